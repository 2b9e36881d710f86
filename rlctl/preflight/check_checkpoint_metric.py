"""What keeps the best checkpoints from being told: a metric that is never measured, steps that are not validated. Pure.

A checkpoint is ranked by what was measured of its own weights alone, in its step's record or its validation.
"""

import re

from rlctl.config.errors import did_you_mean
from rlctl.config.plugins import reward_names
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.preflight.resolved import Resolved
from rlctl.telemetry.metrics import MEANING

_HELD_OUT = "validation/"


def best_notes(config: RunConfig) -> list[str]:
    """One line each, wherever the values were written; none where no best checkpoint is asked for."""
    saved, validated = config.checkpoint, config.validation.every
    metric = saved.metric.removeprefix("-")
    if not saved.keep_best:
        return []
    if not _is_measured(metric, config):
        near = did_you_mean(metric, _names(config))
        return [f"checkpoint.metric={saved.metric}: no such metric is measured{near}; no best checkpoint is kept"]
    if config.data.validation.path is None or not validated or not metric.startswith(_HELD_OUT):
        return []
    on_the_way = range(saved.every, Resolved(config).num_steps, saved.every) if saved.every else range(0)
    if missed := sum(step % validated > 0 for step in on_the_way):
        uneven = f"checkpoint.every={saved.every} is no multiple of validation.every={validated}"
        return [
            f"{uneven}: {missed} of {len(on_the_way)} checkpoints on the way have no {metric} and can never be the best"
        ]
    return []


def _is_measured(metric: str, config: RunConfig) -> bool:
    # Phases have names of their own, ages are counted.
    return metric in _names(config) or re.fullmatch(r"time/\w+|\w+/(groups|age)_\d+", metric) is not None


def _names(config: RunConfig) -> list[str]:
    """Of the metrics of such a run's steps and validations."""
    if isinstance(config, GrpoConfig):
        held_out = ["accuracy", "reward", "failed_rewards", "length", "prompts"]
        held_out += ["pass_at_k"] * (config.validation.num_generations > 1)
        own = [f"reward/{name}/{what}" for name in reward_names(config.rewards) for what in ("mean", "failed")]
    else:
        held_out, own = ["loss", "prompts"], []
    patterns = ("_K", "/NAME/mean", "/NAME/failed")
    steps = [name for name in MEANING if not name.startswith(_HELD_OUT) and not name.endswith(patterns)]
    return [*steps, *own, *(_HELD_OUT + name for name in held_out)]
