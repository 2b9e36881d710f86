"""Every loss by its paper's formula: plain loops over tokens, with float64 scalars and gradients from autograd.

`POLICY` has one function of at most 20 lines for each loss, and `reference` computes the terms that all losses share.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlctl.grpo.losses.base import PolicyLoss
from rlctl.grpo.losses.check import MadeUpRow

MU = "rollout_log_prob"
PROXIMAL = "proximal_log_prob"
REFERENCE = "reference_log_prob"
TEACHER = "teacher_log_prob"


def old_log_prob(loss: PolicyLoss, row: MadeUpRow, t: int) -> Tensor:
    if loss.proximal == "current":
        return row.log_probs[t].detach()
    return row.columns[MU if loss.proximal == "rollout" else PROXIMAL][t]


def shrink_of(loss: PolicyLoss, row: MadeUpRow, t: int) -> float:
    return float(loss.age_decay ** row.columns["age"][t]) if loss.max_age else 1.0


def clip_surrogate(loss: Any, r: Tensor, a: float, shrink: float) -> Tensor:
    """Return PPO's -min(r A, clip(r) A). For A < 0 the result is at most -dual_clip A."""
    low = 1 - loss.clip_low * shrink
    high = 1 + loss.clip_high * shrink
    clip = r
    if r < low:
        clip = low + 0 * r
    elif r > high:
        clip = high + 0 * r
    smaller = r * a if r * a < clip * a else clip * a
    if a < 0 and loss.dual_clip is not None and smaller < loss.dual_clip * a:
        smaller = loss.dual_clip * a + 0 * r
    return -smaller


def surrogate(loss: Any, rollout: Sequence[MadeUpRow], row: MadeUpRow, t: int) -> Tensor:
    r = (row.log_probs[t] - old_log_prob(loss, row, t)).exp()
    return clip_surrogate(loss, r, row.columns["advantage"][t].item(), shrink_of(loss, row, t))


def gspo(loss: Any, rollout: Sequence[MadeUpRow], row: MadeUpRow, t: int) -> Tensor:
    gaps = []
    for sibling in rollout:
        gaps += [sibling.log_probs[u] - old_log_prob(loss, sibling, u) for u in trained_places(sibling)]
    s = (torch.stack(gaps).sum() / len(gaps)).exp()
    if loss.level == "token":
        s = s.detach() * row.log_probs[t].exp() / row.log_probs[t].exp().detach()
    return clip_surrogate(loss, s, row.columns["advantage"][t].item(), shrink_of(loss, row, t))


def cispo(loss: Any, rollout: Sequence[MadeUpRow], row: MadeUpRow, t: int) -> Tensor:
    r = (row.log_probs[t] - old_log_prob(loss, row, t)).exp().item()
    shrink = shrink_of(loss, row, t)
    weight = min(max(r, 1 - loss.clip_low * shrink), 1 + loss.clip_high * shrink)
    return -weight * row.columns["advantage"][t] * row.log_probs[t]


def dppo(loss: Any, rollout: Sequence[MadeUpRow], row: MadeUpRow, t: int) -> Tensor:
    pi = row.log_probs[t].exp().item()
    q = old_log_prob(loss, row, t).exp().item()
    a = row.columns["advantage"][t].item()
    shrink = shrink_of(loss, row, t)
    outside = (a > 0 and pi - q > loss.mask_high * shrink) or (a < 0 and pi - q < -loss.mask_low * shrink)
    weight = 0.0 if outside else min(pi / q, loss.ratio_cap)
    term = -weight * a * row.log_probs[t]
    return term + loss.rollout_kl_coef * (row.log_probs[t] - old_log_prob(loss, row, t)) ** 2


POLICY: dict[str, Callable[[Any, Sequence[MadeUpRow], MadeUpRow, int], Tensor]] = {
    "GrpoLoss": surrogate,
    "DrGrpoLoss": surrogate,
    "ReinforceLoss": surrogate,
    "GspoLoss": gspo,
    "CispoLoss": cispo,
    "DppoLoss": dppo,
}


def trained_places(row: MadeUpRow) -> list[int]:
    """Return the indices of the tokens at which the mask is true."""
    return [t for t in range(len(row.mask)) if row.mask[t]]


def is_within(number: float, bounds: tuple[float, float] | None) -> bool:
    return bounds is None or bounds[0] <= number <= bounds[1]


def importance(loss: PolicyLoss, rollout: Sequence[MadeUpRow], row: MadeUpRow, t: int) -> float:
    """Return the importance weight w of token t of `row`. rollout: all rows of its rollout."""
    if loss.proximal == "rollout":
        return 1.0
    rho = (old_log_prob(loss, row, t) - row.columns[MU][t]).exp().item()
    gaps: list[float] = []
    for sibling in rollout:
        gaps += [(old_log_prob(loss, sibling, u) - sibling.columns[MU][u]).item() for u in trained_places(sibling)]
    geometric = math.exp(sum(gaps) / len(gaps))
    if not (is_within(rho, loss.importance_mask) and is_within(geometric, loss.sequence_mask)):
        return 0.0
    if loss.importance_cap is None:
        return rho if loss.importance_mask or loss.sequence_mask else 1.0
    return min(rho, 1 + (loss.importance_cap - 1) * shrink_of(loss, row, t))


def kl(loss: PolicyLoss, w: float, row: MadeUpRow, t: int) -> Tensor:
    x = row.columns[REFERENCE][t] - row.log_probs[t]
    k = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[loss.kl_estimator]
    carried = w * (row.log_probs[t] - old_log_prob(loss, row, t)).exp()
    if loss.kl_max is None:
        return carried * k
    term = (loss.kl_max if carried > loss.kl_max else carried) * k
    return term if abs(term) < loss.kl_max else torch.sign(term).detach() * loss.kl_max


def teacher(loss: PolicyLoss, w: float, row: MadeUpRow, t: int) -> Tensor:
    """Return w r k3, its log-ratio at least the floor in value, but not in its gradient; or the divergence itself."""
    if loss.distillation is None:
        return 0 * row.log_probs[t]
    if loss.distillation.over == "vocabulary":
        return row.divergence[t]
    x = row.columns[TEACHER][t] - row.log_probs[t]
    if x < loss.distillation.log_ratio_floor:
        x = x - x.detach() + loss.distillation.log_ratio_floor
    return w * (row.log_probs[t] - old_log_prob(loss, row, t)).exp() * (x.exp() - 1 - x)


def reference(loss: PolicyLoss, rows: Sequence[MadeUpRow]) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of an update over `rows`, with gradient, and its terms by name."""
    tokens = sum(len(trained_places(row)) for row in rows)
    rollouts = len({row.rollout for row in rows})
    sums = {name: torch.zeros((), dtype=torch.float64) for name in ("policy", "kl", "teacher", "entropy")}
    for row in rows:
        rollout = [sibling for sibling in rows if sibling.rollout == row.rollout]
        length = sum(len(trained_places(sibling)) for sibling in rollout)
        share = 1 / max(1, tokens)
        if isinstance(loss.mean_over, float):
            share = 1 / rollouts / loss.mean_over
        elif loss.mean_over == "rollouts" and length:
            share = 1 / length / rollouts
        for t in trained_places(row):
            w = importance(loss, rollout, row, t)
            sums["policy"] = sums["policy"] + share * w * POLICY[type(loss).__name__](loss, rollout, row, t)
            sums["kl"] = sums["kl"] + share * kl(loss, w, row, t)
            sums["teacher"] = sums["teacher"] + share * teacher(loss, w, row, t)
            sums["entropy"] = sums["entropy"] + share * row.entropy[t]
    total = sums["policy"] + loss.kl_coef * sums["kl"] - loss.entropy_coef * sums["entropy"]
    if loss.distillation:
        total = total + loss.distillation.coef * sums["teacher"]
    return total, {f"loss/{name}": value.item() for name, value in sums.items()}
