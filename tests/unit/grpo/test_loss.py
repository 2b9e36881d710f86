"""The policy loss: every formula against per-token loops in float64, its gradient, and independence of packing."""

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlctl.config.schema import GrpoConfig
from rlctl.grpo.loss import GrpoLoss
from rlctl.preflight.load import load
from rlctl.training.interface import LossOutput, TokenBatch, Totals

PLAIN = GrpoLoss(0.2, 0.28, None, 0.0, "k3", 0.0, "token", "rollout", None, None, None, 1.0, 0)
FULL = GrpoLoss(0.2, 0.28, 3.0, 0.3, "k3", 0.05, "sequence", "recompute", 1.5, (0.4, 2.5), (0.8, 1.3), 0.9, 2)
FIELDS = ("advantage", "rollout_log_prob", "proximal_log_prob", "reference_log_prob", "age")

losses = st.builds(
    GrpoLoss,
    clip_low=st.sampled_from([0.0, 0.2]),
    clip_high=st.sampled_from([0.0, 0.28]),
    dual_clip=st.sampled_from([None, 1.5]),
    kl_coef=st.sampled_from([0.0, 0.7]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    entropy_coef=st.sampled_from([0.0, 0.1]),
    reduction=st.sampled_from(["token", "sequence"]),
    proximal=st.sampled_from(["rollout", "recompute", "current"]),
    importance_cap=st.sampled_from([None, 1.2]),
    importance_mask=st.sampled_from([None, (0.7, 1.5)]),
    sequence_mask=st.sampled_from([None, (0.8, 1.3)]),
    age_decay=st.sampled_from([1.0, 0.5]),
    max_age=st.sampled_from([0, 2]),
)


@dataclass
class Row:
    """One sequence in float64: log_probs and entropy are leaves with gradient."""

    log_probs: Tensor
    entropy: Tensor
    mask: Tensor
    fields: dict[str, Tensor]


def rows(seed: int, lengths: Sequence[int]) -> list[Row]:
    """Rollouts whose four log-probs differ enough that every clip and cap binds somewhere; some advantages 0."""
    random = torch.Generator().manual_seed(seed)

    def normal(size: int, scale: float) -> Tensor:
        return scale * torch.randn(size, generator=random, dtype=torch.float64)

    result = []
    for size in lengths:
        base = -1.0 + normal(size, 0.3)
        fields = {name: base + normal(size, 0.4) for name in FIELDS}
        fields["age"] = torch.randint(0, 3, (size,), generator=random).double()
        fields["advantage"] = normal(1, 1.0).mul(torch.rand(1, generator=random) < 0.8).expand(size)
        mask = torch.rand(size, generator=random) < 0.7
        mask[0] = False
        log_probs, entropy = (base + normal(size, 0.4)).requires_grad_(), normal(size, 1.0).abs().requires_grad_()
        result.append(Row(log_probs, entropy, mask, fields))
    return result


def pack(chosen: Sequence[Row]) -> TokenBatch:
    index = torch.cat([torch.full((len(row.mask),), i) for i, row in enumerate(chosen)])
    fields = {name: torch.cat([row.fields[name] for row in chosen]) for name in FIELDS}
    columns = (torch.cat([getattr(row, name) for row in chosen]) for name in ("log_probs", "entropy", "mask"))
    return TokenBatch(*columns, fields, index, len(chosen))


def totals_of(chosen: Sequence[Row]) -> Totals:
    return Totals(max(1, sum(int(row.mask.sum()) for row in chosen)), len(chosen))


def gradients(output: Tensor, chosen: Sequence[Row]) -> list[Tensor]:
    leaves = [leaf for row in chosen for leaf in (row.log_probs, row.entropy)]
    return list(torch.autograd.grad(output, leaves, materialize_grads=True))


def inside(value: float, bounds: tuple[float, float] | None) -> bool:
    return bounds is None or bounds[0] <= value <= bounds[1]


def geometric(loss: GrpoLoss, row: Row) -> float:
    """Return the geometric mean of q / mu over the sequence's masked tokens."""
    old = row.fields["proximal_log_prob"] if loss.proximal == "recompute" else row.log_probs.detach()
    return math.exp((old - row.fields["rollout_log_prob"])[row.mask].mean().item())


def value(loss: GrpoLoss, chosen: Sequence[Row]) -> Tensor:
    """The loss as an update has it: its sum over its normalizer."""
    return loss(pack(chosen)).loss / (loss.normalizer(totals_of(chosen)) or 1)


def read(*outputs: LossOutput) -> dict[str, float]:
    """The metrics of some micro-batches, as an update has them."""
    found: dict[str, float] = {}
    for name in outputs[0].means:
        total, weight = (sum(output.means[name][part].item() for output in outputs) for part in (0, 1))
        if weight:
            found[name] = total / weight
    return found


def reference(loss: GrpoLoss, chosen: Sequence[Row]) -> tuple[float, dict[str, float], float]:
    """Loss, means and ratio/max by the papers' formulas, a token at a time in Python floats."""
    means: dict[str, float] = {}
    largest = 0.0
    of_age = [0, 0, 0]
    totals = totals_of(chosen)

    def add(name: str, value: float) -> None:
        means[name] = means.get(name, 0.0) + value

    for row in chosen:
        count = int(row.mask.sum())
        for t in (t for t in range(len(row.mask)) if row.mask[t]):
            pi, entropy = math.exp(row.log_probs[t].item()), row.entropy[t].item()
            a = row.fields["advantage"][t].item()
            mu, prox, ref = (math.exp(row.fields[name][t].item()) for name in FIELDS[1:4])
            age = int(row.fields["age"][t].item())
            shrink = loss.age_decay**age if loss.max_age else 1.0
            q = {"rollout": mu, "recompute": prox, "current": pi}[loss.proximal]
            r = pi / q
            low, high = 1 - loss.clip_low * shrink, 1 + loss.clip_high * shrink
            clipped = min(max(r, low), high)
            surrogate = min(r * a, clipped * a)
            if loss.dual_clip is not None and a < 0:
                surrogate = max(surrogate, loss.dual_clip * a)
            w = 1.0
            if loss.proximal != "rollout":
                add("importance/mean", q / mu / totals.tokens)
                if loss.importance_cap is not None:
                    cap = 1 + (loss.importance_cap - 1) * shrink
                    w = min(q / mu, cap)
                    add("importance/truncated", (q / mu > cap) / totals.tokens)
                if loss.importance_mask or loss.sequence_mask:
                    kept = inside(q / mu, loss.importance_mask) and inside(geometric(loss, row), loss.sequence_mask)
                    w *= kept
                    add("importance/masked", (not kept) / totals.tokens)
            if loss.max_age:
                error = max(pi / mu, mu / pi) if loss.proximal == "rollout" else max(q / mu, mu / q)
                of_age[age] += 1
                add(f"age/share_{age}", 1 / totals.tokens)
                add(f"mismatch/age_{age}", error)
            k = {"k1": math.log(pi / ref), "k2": math.log(pi / ref) ** 2 / 2, "k3": ref / pi - 1 + math.log(pi / ref)}
            share = 1 / totals.tokens if loss.reduction == "token" else 1 / count / totals.sequences
            add("loss/policy", -w * surrogate * share)
            add("loss/entropy", entropy * share)
            if loss.kl_coef:
                add("loss/kl", w * r * k[loss.kl_estimator] * share)
            add("ratio/mean", r / totals.tokens)
            if loss.proximal != "recompute":
                gap = pi / mu
                add("mismatch/token_mult_prob_error", max(gap, 1 / gap) / totals.tokens)
                add("mismatch/kl", (gap - 1 - math.log(gap)) / totals.tokens)
            add("ratio/clipped_low", (a < 0 and r < low) / totals.tokens)
            above = (a > 0 and r > high) or (a < 0 and r > (loss.dual_clip or math.inf))
            add("ratio/clipped_high", above / totals.tokens)
            largest = max(largest, r)
    for age, count in enumerate(of_age):
        if count:
            means[f"mismatch/age_{age}"] /= count
    value = means.get("loss/policy", 0.0) - loss.entropy_coef * means.get("loss/entropy", 0.0)
    return value + loss.kl_coef * means.get("loss/kl", 0.0), means, largest


@given(losses, st.integers(0, 10_000), st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_loss_and_metrics_equal_the_papers_formulas(loss: GrpoLoss, seed: int, lengths: list[int]) -> None:
    chosen = rows(seed, lengths)
    output = loss(pack(chosen))
    expected, means, largest = reference(loss, chosen)
    assert value(loss, chosen).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert {name: mean for name, mean in read(output).items() if mean} == pytest.approx(
        {name: mean for name, mean in means.items() if mean}, rel=1e-9, abs=1e-12
    )
    assert output.maxima["ratio/max"].item() == pytest.approx(largest)


@given(losses, st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_gradient_equals_central_differences_of_the_reference(loss: GrpoLoss, seed: int) -> None:
    # Of "current" the value does not tell the gradient: see the test that holds it against recompute.
    loss = replace(loss, proximal="recompute") if loss.proximal == "current" else loss
    chosen = rows(seed, [4, 3])
    analytic = gradients(value(loss, chosen), chosen)
    leaves = [leaf for row in chosen for leaf in (row.log_probs, row.entropy)]
    step = 1e-6
    for leaf, gradient in zip(leaves, analytic):
        for t in range(len(leaf)):
            sides = []
            for shift in (step, -step):
                with torch.no_grad():
                    leaf[t] += shift
                    sides.append(reference(loss, chosen)[0])
                    leaf[t] -= shift
            assert gradient[t].item() == pytest.approx((sides[0] - sides[1]) / (2 * step), rel=1e-5, abs=1e-7)


def test_the_recomputed_policy_and_the_weight_are_constants() -> None:
    """No gradient flows into the fields, even where they have come with one."""
    chosen = rows(0, [6, 6])
    batch = pack(chosen)
    batch.fields = {name: value.requires_grad_() for name, value in batch.fields.items()}
    output = FULL(batch)
    scalars = [*output.maxima.values(), *(each for pair in output.means.values() for each in pair)]
    assert not any(scalar.requires_grad for scalar in scalars)
    output.loss.backward()
    assert all(value.grad is None for value in batch.fields.values())


@given(losses, st.integers(0, 10_000), st.lists(st.integers(1, 6), min_size=2, max_size=6), st.data())
@settings(max_examples=80, deadline=None)
def test_packing_changes_neither_loss_nor_gradient_nor_metrics(
    loss: GrpoLoss, seed: int, lengths: list[int], data: st.DataObject
) -> None:
    """Sequences in any order in any number of micro-batches, their outputs added: one batch in order."""
    chosen = rows(seed, lengths)
    whole = loss(pack(chosen))
    places = data.draw(st.lists(st.integers(0, 2), min_size=len(chosen), max_size=len(chosen)))
    order = data.draw(st.permutations(range(len(chosen))))
    parts = [[chosen[i] for i in order if places[i] == place] for place in range(3)]
    outputs = [loss(pack(part)) for part in parts if part]
    total = torch.stack([output.loss for output in outputs]).sum()
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(gradients(total, chosen), gradients(whole.loss, chosen))
    assert read(*outputs) == pytest.approx(read(whole))
    assert max(output.maxima["ratio/max"] for output in outputs) == whole.maxima["ratio/max"]


@pytest.mark.parametrize("loss", [PLAIN, FULL, replace(FULL, kl_estimator="k1"), replace(FULL, reduction="token")])
def test_unmasked_tokens_are_not_read_whatever_they_hold(loss: GrpoLoss) -> None:
    clean, dirty = rows(3, [7, 5]), rows(3, [7, 5])
    for row in dirty:
        for tensor in (row.log_probs, row.entropy):
            tensor.data[~row.mask] = math.nan
        row.fields = {name: value.where(row.mask, math.nan) for name, value in row.fields.items()}
    expected, output = (loss(pack(chosen)) for chosen in (clean, dirty))
    torch.testing.assert_close(output.means, expected.means)
    torch.testing.assert_close(gradients(output.loss, dirty), gradients(expected.loss, clean))


@pytest.mark.parametrize("loss", [PLAIN, FULL])
def test_a_micro_batch_without_masked_tokens_adds_zero_and_keeps_its_graph(loss: GrpoLoss) -> None:
    (row,) = rows(0, [5])
    row.mask[:] = False
    output = loss(pack([row]))
    assert output.loss.item() == 0.0
    assert not any([*output.maxima.values(), *(total for total, _ in output.means.values())])
    assert not any(gradient.any() for gradient in gradients(output.loss, [row]))


def one(loss: GrpoLoss, log_prob: float, **fields: float) -> tuple[LossOutput, float]:
    """Loss of one token and its gradient with respect to the log-prob, in float32 as in a run."""
    leaf = torch.tensor([log_prob], requires_grad=True)
    columns = {name: torch.tensor([value]) for name, value in fields.items()}
    batch = TokenBatch(leaf, torch.zeros(1), torch.tensor([True]), columns, torch.zeros(1, dtype=torch.int64), 1)
    output = loss(batch)
    output.loss.backward()
    assert leaf.grad is not None
    return output, leaf.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "value", "gradient"),
    [
        (1.0, 2.0, None, -2.0, -2.0),  # on policy the gradient is that of REINFORCE
        (1.2, 1.0, None, -1.2, -1.2),  # within 1 + clip_high
        (1.5, 1.0, None, -1.28, 0.0),  # held by clip_high
        (0.5, 1.0, None, -0.5, -0.5),  # below is free when the advantage pulls up
        (0.5, -1.0, None, 0.8, 0.0),  # held by clip_low
        (1.5, -1.0, None, 1.5, 1.5),  # above is free when the advantage pushes down ...
        (9.0, -1.0, None, 9.0, 9.0),
        (9.0, -1.0, 3.0, 3.0, 0.0),  # ... up to dual_clip
        (9.0, 1.0, 3.0, -1.28, 0.0),  # which positive advantages never see
    ],
)
def test_clipping_case_by_case(
    ratio: float, advantage: float, dual_clip: float | None, value: float, gradient: float
) -> None:
    loss = replace(PLAIN, dual_clip=dual_clip)
    output, slope = one(loss, math.log(ratio) - 1.0, rollout_log_prob=-1.0, advantage=advantage)
    assert (output.loss.item(), slope) == pytest.approx((value, gradient), rel=1e-5)


@pytest.mark.parametrize(("mu", "weight"), [(-1.0, 1.0), (-1.5, math.exp(0.5)), (-3.0, 2.0), (-0.5, math.exp(-0.5))])
def test_importance_weights_are_truncated_above_only(mu: float, weight: float) -> None:
    loss = replace(PLAIN, proximal="recompute", importance_cap=2.0)
    output, slope = one(loss, -1.0, proximal_log_prob=-1.0, rollout_log_prob=mu, advantage=1.0)
    assert (output.loss.item(), slope) == pytest.approx((-weight, -weight), rel=1e-6)
    assert output.means["importance/truncated"][0].item() == (weight == 2.0)


@pytest.mark.parametrize("log_prob", [-1e4, -100.0, 0.0])
@pytest.mark.parametrize("others", [-1e4, 0.0])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_extreme_log_probs_stay_finite(log_prob: float, others: float, kl: Any) -> None:
    loss = replace(FULL, kl_estimator=kl, dual_clip=None, importance_cap=None)
    fields = dict.fromkeys(FIELDS, others) | {"advantage": -1.0}
    output, slope = one(loss, log_prob, **fields)
    assert all(map(math.isfinite, (output.loss.item(), slope, *read(output).values())))


def test_a_nan_log_prob_is_not_hidden() -> None:
    assert math.isnan(one(PLAIN, math.nan, rollout_log_prob=-1.0, advantage=1.0)[0].loss.item())


def test_without_kl_no_reference_and_without_recompute_no_proximal_is_needed() -> None:
    output, _ = one(PLAIN, -1.0, rollout_log_prob=-1.0, advantage=1.0)
    assert "loss/kl" not in output.means and "importance/mean" not in output.means
    for loss, missing in (
        (replace(PLAIN, kl_coef=0.1), "reference"),
        (replace(PLAIN, proximal="recompute"), "proximal"),
    ):
        with pytest.raises(KeyError, match=missing):
            one(loss, -1.0, rollout_log_prob=-1.0, advantage=1.0)


def test_entropy_is_reported_but_without_a_bonus_has_no_gradient() -> None:
    chosen = rows(0, [5])
    output = PLAIN(pack(chosen))
    assert output.means["loss/entropy"][0] > 0
    assert torch.autograd.grad(output.loss, chosen[0].entropy, allow_unused=True)[0] is None


def test_the_normalizer_is_what_the_reduction_says_and_0_where_no_token_counts() -> None:
    sequence = replace(PLAIN, reduction="sequence")
    assert [PLAIN.normalizer(totals) for totals in (Totals(7, 3), Totals(0, 3))] == [7, 0]
    assert [sequence.normalizer(totals) for totals in (Totals(7, 3), Totals(0, 3))] == [3, 0]


def test_is_built_from_the_config_and_travels_by_pickle() -> None:
    def built(*overrides: str) -> GrpoLoss:
        config = load("grpo", None, list(overrides)).config
        assert isinstance(config, GrpoConfig)
        return GrpoLoss.from_config(config)

    assert built() == GrpoLoss(0.2, 0.28, None, 0.0, "k3", 0.0, "token", "rollout", 2.0, None, None, 1.0, 0)
    async_ = built("async.enabled=true", "grpo.loss.importance_mask=[0.5, 5]", "async.max_trajectory_age_steps=3")
    assert async_ == GrpoLoss(0.2, 0.28, None, 0.0, "k3", 0.0, "token", "current", 2.0, (0.5, 5.0), None, 1.0, 3)
    assert built("async.enabled=true", "grpo.updates_per_step=2").proximal == "recompute"
    assert built("grpo.loss.proximal=recompute", "grpo.loss.force_on_policy_ratio=false").proximal == "recompute"
    assert pickle.loads(pickle.dumps(async_)) == async_


def test_current_is_recompute_without_the_pass_while_the_policy_is_unchanged() -> None:
    chosen = rows(3, [6, 4, 5])
    current = replace(FULL, proximal="current")
    for row in chosen:
        row.fields["proximal_log_prob"] = row.log_probs.detach().clone()
    outputs = [loss(pack(chosen)) for loss in (FULL, current)]
    first, second = (gradients(output.loss, chosen) for output in outputs)
    assert outputs[0].loss.item() == pytest.approx(outputs[1].loss.item())
    assert all(torch.allclose(one, other) for one, other in zip(first, second))
    assert read(outputs[1])["ratio/mean"] == pytest.approx(1.0)


def test_a_sequence_that_drifted_is_left_out_whole() -> None:
    chosen = rows(5, [6, 6])
    far = chosen[0]
    far.fields["proximal_log_prob"] = far.fields["rollout_log_prob"] + 2.0
    loss = replace(PLAIN, proximal="recompute", sequence_mask=(0.5, 2.0))
    grads = gradients(value(loss, chosen), chosen)
    assert not grads[0].any()
    assert grads[2].any() or not chosen[1].fields["advantage"].any()
