"""Losses for tests: every loss of rlctl with its defaults, and with options that hypothesis draws."""

from typing import Any, Literal

from hypothesis import strategies as st

from rlctl.config.plugins import LOSSES
from rlctl.config.role_schema import DistillationSection
from rlctl.grpo.losses.base import PolicyLoss, make_loss
from rlctl.preflight.load import load


def make_distillation(
    coef: float = 1.0, log_ratio_floor: float = -10.0, over: Literal["sampled", "vocabulary"] = "sampled"
) -> DistillationSection:
    """Return a term over the sampled tokens, or over the vocabulary."""
    return DistillationSection(
        coef=coef,
        over=over,
        divergence="reverse_kl",
        beta=0.5,
        num_top_tokens=20,
        rest="bin",
        log_ratio_floor=log_ratio_floor,
    )


_SHARED: dict[str, list[Any]] = {
    "kl_coef": [0.0, 0.7],
    "kl_estimator": ["k1", "k2", "k3"],
    "kl_max": [None, 0.2, 10.0],
    "entropy_coef": [0.0, 0.1],
    "distillation": [
        None,
        make_distillation(coef=0.6),
        make_distillation(log_ratio_floor=-0.2),
        make_distillation(coef=0.6, over="vocabulary"),
    ],
    "proximal": ["rollout", "recompute", "current"],
    "importance_cap": [None, 1.2],
    "importance_mask": [None, (0.7, 1.5)],
    "sequence_mask": [None, (0.8, 1.3)],
    "age_decay": [1.0, 0.5],
    "max_age": [0, 2],
}
_CLIPPED: dict[str, list[Any]] = {"clip_low": [0.0, 0.2], "clip_high": [0.0, 0.28], "dual_clip": [None, 1.5]}
_OWN: dict[str, dict[str, list[Any]]] = {
    "grpo": {**_CLIPPED, "reduction": ["token", "sequence"]},
    "dr_grpo": {**_CLIPPED, "max_tokens": [1, 17]},
    "gspo": {**_CLIPPED, "level": ["sequence", "token"]},
    "cispo": {"clip_low": [0.3, 1.0], "clip_high": [0.28, 4.0]},
    "reinforce": _CLIPPED,
    "dppo": {
        "mask_low": [0.05, 0.2],
        "mask_high": [0.05, 0.2],
        "ratio_cap": [1.2, 20.0],
        "rollout_kl_coef": [0.0, 0.1],
    },
}


def load_loss(*overrides: str) -> PolicyLoss:
    """Return the loss of a run with these overrides, for example "grpo.loss=gspo"."""
    return make_loss(load("grpo", None, list(overrides)).settled)


DEFAULTS = {name: load_loss(f"grpo.loss={name}") for name in LOSSES}


def options(name: str) -> st.SearchStrategy[PolicyLoss]:
    """Return a hypothesis strategy that draws the loss `name` with any of its options."""
    values = {key: st.sampled_from(choices) for key, choices in {**_SHARED, **_OWN[name]}.items()}
    return st.builds(type(DEFAULTS[name]), **values)


losses = st.one_of([options(name) for name in LOSSES])
# Draws for each rollout the lengths of its rows.
shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=3)
