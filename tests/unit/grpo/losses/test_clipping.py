"""Clipping in the losses: value and gradient of single tokens, and a far outlier does not dominate an update."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlctl.config.plugins import LOSSES
from rlctl.grpo.losses.base import PolicyLoss
from rlctl.grpo.losses.check import made_up_rows, one_token, outcome
from rlctl.grpo.metrics import update_metrics
from tests.unit.grpo.losses.drawn import DEFAULTS, load_loss

GRPO: Any = DEFAULTS["grpo"]


def measure_token(loss: PolicyLoss, ratio: float, advantage: float) -> tuple[float, float]:
    """Return the loss of one token, and its derivative with respect to the token's log-prob.

    ratio: pi / q of the token. The generator and the old policy have probability e^-1.
    """
    row = one_token(math.log(ratio) - 1.0, -1.0, advantage)
    measured = outcome(loss, [[row]], [row])
    return measured.loss, measured.gradients[0].item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected_loss", "slope"),
    [
        (1.0, 2.0, None, -2.0, -2.0),  # on policy the gradient is that of REINFORCE
        (1.2, 1.0, None, -1.2, -1.2),  # within 1 + clip_high
        (1.5, 1.0, None, -1.28, 0.0),  # clipped by clip_high
        (0.5, 1.0, None, -0.5, -0.5),  # a small ratio is not clipped if A > 0
        (0.5, -1.0, None, 0.8, 0.0),  # clipped by clip_low
        (1.5, -1.0, None, 1.5, 1.5),  # a large ratio is not clipped if A < 0
        (9.0, -1.0, None, 9.0, 9.0),
        (9.0, -1.0, 3.0, 3.0, 0.0),  # unless dual_clip clips it
        (9.0, 1.0, 3.0, -1.28, 0.0),  # dual_clip has no effect if A > 0
    ],
)
def test_grpo_case_by_case(
    ratio: float, advantage: float, dual_clip: float | None, expected_loss: float, slope: float
) -> None:
    loss = replace(GRPO, dual_clip=dual_clip)
    assert measure_token(loss, ratio, advantage) == pytest.approx((expected_loss, slope), rel=1e-9)


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.0, 1.0), (4.9, 4.9), (9.0, 5.0)])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_bounds_the_weight_and_keeps_the_gradient(ratio: float, weight: float, advantage: float) -> None:
    log_prob = math.log(ratio) - 1.0
    expected = (-weight * advantage * log_prob, -weight * advantage)
    assert measure_token(DEFAULTS["cispo"], ratio, advantage) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ratio", "advantage", "slope"),
    [
        (1.5, 1.0, -1.5),  # probability 0.18 higher: within the region
        (1.6, 1.0, 0.0),  # 0.22 higher, and A > 0 raises it further: left out
        (1.6, -1.0, 1.6),  # 0.22 higher, but A < 0 lowers it
        (0.4, -1.0, 0.0),  # 0.22 lower, and A < 0 lowers it further: left out
        (0.4, 1.0, -0.4),
    ],
)
def test_dppo_leaves_out_what_moves_out_of_the_region(ratio: float, advantage: float, slope: float) -> None:
    loss: Any = DEFAULTS["dppo"]
    assert measure_token(replace(loss, rollout_kl_coef=0.0), ratio, advantage)[1] == pytest.approx(slope)
    assert measure_token(loss, ratio, advantage)[1] == pytest.approx(slope + 2e-3 * math.log(ratio))


def test_gspo_clips_a_rollout_whole() -> None:
    rows = made_up_rows(1, [[6], [6]])
    for row, gap in zip(rows, (0.1, 1e-4)):
        row.mask[1:] = True
        row.columns["rollout_log_prob"] = row.log_probs.detach() - gap
        row.columns["advantage"] = row.log_probs.detach() * 0 + 1.0
    measured = outcome(replace(DEFAULTS["gspo"], proximal="rollout"), [rows], rows)
    assert not measured.gradients[0].any()
    assert measured.gradients[2][1:].tolist() == pytest.approx([-math.exp(1e-4) / 5 / 2] * 5)
    assert measured.means["ratio/clipped_high"] == 0.5


def measure_first_update(loss: PolicyLoss, noise: float) -> dict[str, float]:
    """Return the metrics of a step's first update. Engine and trainer differ by `noise` nats at each token."""
    rows = made_up_rows(0, [[65]] * 256)
    random = torch.Generator().manual_seed(1)
    for row in rows:
        row.mask[1:] = True
        exact = row.log_probs.detach().clone()
        rounded = exact + noise * torch.randn(len(exact), generator=random, dtype=exact.dtype)
        row.columns |= {"proximal_log_prob": exact, "rollout_log_prob": rounded, "age": torch.zeros_like(exact)}
    return update_metrics([outcome(loss, [rows], rows).means])


@pytest.mark.parametrize("settings", [(), ("grpo.updates_per_step=2",), ("async.enabled=true",)])
@pytest.mark.parametrize("name", LOSSES)
def test_no_default_clips_the_rounding_of_bfloat16(name: str, settings: tuple[str, ...]) -> None:
    # On the tiny model in bfloat16 the mean difference of log-probs is 0.006 nats.
    metrics = measure_first_update(load_loss(f"grpo.loss={name}", *settings), noise=0.01)
    assert metrics["ratio/clipped_first"] == 0.0


def test_gspo_against_the_engines_log_probs_clips_the_rounding() -> None:
    metrics = measure_first_update(load_loss("grpo.loss={name: gspo, proximal: rollout}"), noise=0.01)
    assert metrics["ratio/clipped_first"] > 0.25


def share_of_outlier(loss: Any, mu: float, advantage: float, reference: float) -> float:
    """Return |gradient of one outlier| / (norm of the gradients of all 512 tokens).

    The outlier has probability e^-1 under the policy and log-prob `mu` under the generator. Other tokens are on-policy.
    """
    rows = made_up_rows(0, [[8]] * 64, spread=0.01)
    for row in rows:
        row.mask[1:] = True
        row.columns["advantage"] = row.columns["advantage"].sign() + (row.columns["advantage"] == 0)
    outlier_row = rows[0]
    outlier_row.log_probs.data[3] = -1.0
    outlier_row.columns["rollout_log_prob"][3] = mu
    outlier_row.columns["reference_log_prob"][3] = reference
    outlier_row.columns["advantage"][:] = advantage
    gradients = [gradient.double() for gradient in outcome(loss, [rows], rows).gradients[::2]]
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    return abs(gradients[0][3].item()) / norm


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("reference", [-1.0, -3.0, -15.0])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo", "reinforce"])
def test_one_token_at_minus_15_against_minus_1_does_not_take_the_update(
    name: str, advantage: float, reference: float
) -> None:
    loss: Any = replace(DEFAULTS[name], kl_coef=0.1)
    assert share_of_outlier(loss, mu=-15.0, advantage=advantage, reference=reference) < 0.25


def test_without_the_bounds_one_token_takes_the_update() -> None:
    unbounded = replace(GRPO, kl_coef=0.1, kl_max=None)
    assert share_of_outlier(unbounded, -15.0, 1.0, -3.0) > 0.9999
    assert share_of_outlier(replace(GRPO, dual_clip=None), -15.0, -1.0, -1.0) > 0.9999
