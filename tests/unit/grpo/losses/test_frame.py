"""Properties that all losses share: metrics, independence of packing, declared inputs, construction and pickling."""

import math
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.config.plugins import LOSSES
from rlctl.grpo.losses.base import PolicyLoss
from rlctl.grpo.losses.check import MadeUpRow, difference, made_up_rows, outcome, pack_rows
from rlctl.training.interface import LossNeeds, Totals
from tests.unit.grpo.losses.drawn import DEFAULTS, load_loss, losses, make_distillation, options, shapes
from tests.unit.grpo.losses.references import MU, importance, old_log_prob, trained_places

GRPO = DEFAULTS["grpo"]
FULL = replace(
    GRPO, proximal="recompute", kl_coef=0.3, importance_cap=1.5, importance_mask=(0.4, 2.5), sequence_mask=(0.8, 1.3),
    age_decay=0.9, max_age=2, entropy_coef=0.05, reduction="sequence",
)  # fmt: skip


def measure_token(loss: Any, rollout: Sequence[MadeUpRow], row: MadeUpRow, t: int) -> dict[str, float]:
    """Return the metrics of the GRPO loss at token t of `row`, computed with Python floats."""
    pi = row.log_probs[t].exp().item()
    q = old_log_prob(loss, row, t).exp().item()
    mu = row.columns[MU][t].exp().item()
    r = pi / q
    a = row.columns["advantage"][t].item()
    age = int(row.columns["age"][t])
    shrink = loss.age_decay**age if loss.max_age else 1.0
    is_above = (a > 0 and r > 1 + loss.clip_high * shrink) or (a < 0 and r > (loss.dual_clip or math.inf))
    metrics = {
        "ratio/mean": r,
        "ratio/clipped_low": float(a < 0 and r < 1 - loss.clip_low * shrink),
        "ratio/clipped_high": float(is_above),
    }
    if loss.proximal != "recompute":
        gap = pi / mu
        metrics["mismatch/token_mult_prob_error"] = max(gap, 1 / gap)
        metrics["mismatch/kl"] = gap - 1 - math.log(gap)
    if loss.proximal != "rollout":
        metrics["importance/mean"] = q / mu
        if loss.importance_cap is not None:
            metrics["importance/truncated"] = float(q / mu > 1 + (loss.importance_cap - 1) * shrink)
        if loss.importance_mask or loss.sequence_mask:
            metrics["importance/masked"] = float(importance(loss, rollout, row, t) == 0)
    if loss.max_age:
        for share_age in range(3):
            metrics[f"age/share_{share_age}"] = float(age == share_age)
        policy = pi if loss.proximal == "rollout" else q
        metrics[f"mismatch/age_{age}"] = max(policy / mu, mu / policy)
    return metrics


def average_metrics(loss: Any, rows: Sequence[MadeUpRow]) -> tuple[dict[str, float], float]:
    """Return the GRPO loss's metrics, averaged over tokens in a plain loop, and the largest ratio."""
    values: dict[str, list[float]] = {}
    for row in rows:
        rollout = [sibling for sibling in rows if sibling.rollout == row.rollout]
        for t in trained_places(row):
            for name, number in measure_token(loss, rollout, row, t).items():
                values.setdefault(name, []).append(number)
    means = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
    return means, max(values.get("ratio/mean", []), default=0.0)


@given(options("grpo"), st.integers(0, 10_000), shapes)
@settings(max_examples=60, deadline=None)
def test_metrics_equal_plain_means_over_tokens(loss: PolicyLoss, seed: int, lengths: list[list[int]]) -> None:
    rows = made_up_rows(seed, lengths)
    measured = outcome(loss, [rows], rows)
    expected_means, largest = average_metrics(loss, rows)
    means = {name: mean for name, mean in measured.means.items() if not name.startswith("loss/")}
    assert means == pytest.approx(expected_means)
    assert measured.maxima == {"ratio/max": pytest.approx(largest)}


@given(losses, st.integers(0, 10_000), shapes, st.data())
@settings(max_examples=60, deadline=None)
def test_packing_and_order_change_neither_loss_nor_gradient_nor_metrics(
    loss: PolicyLoss, seed: int, lengths: list[list[int]], data: st.DataObject
) -> None:
    """Compare one micro-batch with the same rows in any order, spread over any number of micro-batches.

    A loss that needs whole rollouts gets all rows of a rollout in one micro-batch.
    """
    rows = made_up_rows(seed, lengths)
    order = data.draw(st.permutations(rows))
    keys = [row.rollout if loss.needs.whole_rollouts else index for index, row in enumerate(order)]
    places = data.draw(st.lists(st.integers(0, 2), min_size=max(keys) + 1, max_size=max(keys) + 1))
    parts = [[row for row, key in zip(order, keys) if places[key] == place] for place in range(3)]
    assert difference(outcome(loss, [rows], rows), outcome(loss, parts, rows)) is None


@given(losses)
@settings(max_examples=60, deadline=None)
def test_what_is_divided_by_adds_up_over_the_parts_of_an_update(loss: PolicyLoss) -> None:
    first = Totals(7, 3, 2)
    second = Totals(5, 4, 4)
    assert loss.normalizer(first) + loss.normalizer(second) == pytest.approx(loss.normalizer(first + second))
    assert loss.normalizer(Totals(0, 3, 2)) == 0


def test_the_normalizer_is_tokens_rollouts_or_rollouts_times_a_constant() -> None:
    totals = Totals(tokens=7, sequences=3, rollouts=2)
    expected = {"grpo": 7, "dr_grpo": 2 * 4, "gspo": 2, "cispo": 7, "reinforce": 7, "dppo": 7}
    assert {name: loss.normalizer(totals) for name, loss in DEFAULTS.items()} == expected
    assert load_loss("grpo.loss.reduction=sequence").normalizer(totals) == 2
    assert load_loss("grpo.loss=dr_grpo", "grpo.loss.max_tokens=10").normalizer(totals) == 20


def test_constants_have_no_gradient_though_fields_come_with_one() -> None:
    rows = made_up_rows(0, [[6], [6]])
    batch = pack_rows(rows)
    batch.columns = {name: value.requires_grad_() for name, value in batch.columns.items()}
    output = FULL(batch)
    scalars = list(output.maxima.values())
    for mean in output.means.values():
        scalars += mean
    assert not any(scalar.requires_grad for scalar in scalars)
    output.loss.backward()  # type: ignore[no-untyped-call]
    assert all(value.grad is None for value in batch.columns.values())


def test_a_nan_log_prob_is_not_hidden() -> None:
    rows = made_up_rows(0, [[4]])
    rows[0].log_probs.data[:] = math.nan
    rows[0].mask[1] = True
    assert all(math.isnan(loss(pack_rows(rows)).loss.item()) for loss in DEFAULTS.values())


def test_entropy_is_measured_but_without_a_bonus_has_no_gradient() -> None:
    rows = made_up_rows(0, [[5]])
    output = GRPO(pack_rows(rows))
    assert output.means["loss/entropy"][0] > 0
    assert torch.autograd.grad(output.loss, rows[0].entropy, allow_unused=True)[0] is None


def test_current_is_recompute_without_the_pass_while_the_policy_is_unchanged() -> None:
    rows = made_up_rows(3, [[6], [4], [5]])
    for row in rows:
        row.columns["proximal_log_prob"] = row.log_probs.detach().clone()
    for loss in (FULL, *DEFAULTS.values()):
        recompute = outcome(replace(loss, proximal="recompute"), [rows], rows)
        current = outcome(replace(loss, proximal="current"), [rows], rows)
        assert current.loss == pytest.approx(recompute.loss)
        torch.testing.assert_close(current.gradients, recompute.gradients)
        assert current.means["ratio/mean"] == pytest.approx(1.0)


@pytest.mark.parametrize(("cap", "mask", "weight"), [
    (2.0, None, 2.0), (8.0, None, 4.0), (None, None, 1.0), (None, (0.5, 5.0), 4.0), (None, (0.5, 3.0), 0.0),
    (2.0, (0.5, 5.0), 2.0), (2.0, (0.5, 3.0), 0.0),
])  # fmt: skip
def test_weights_of_tis_icepop_and_both(cap: float | None, mask: tuple[float, float] | None, weight: float) -> None:
    """The weight of a token with rho 4 is cut to the cap (TIS), stays rho within the mask (IcePop), or is 0."""
    rows = made_up_rows(0, [[2]])
    rows[0].mask[1] = True
    rows[0].columns |= {"advantage": torch.ones(2, dtype=torch.float64)}
    rows[0].columns["proximal_log_prob"] = rows[0].log_probs.detach().clone()
    rows[0].columns[MU] = rows[0].log_probs.detach() - math.log(4)
    loss = replace(GRPO, proximal="recompute", importance_cap=cap, importance_mask=mask)
    assert outcome(loss, [rows], rows).loss == pytest.approx(-weight)
    by_sequence = replace(loss, importance_mask=None, sequence_mask=mask)
    assert outcome(by_sequence, [rows], rows).loss == pytest.approx(-weight)


def make_needs(*columns: str, whole_rollouts: bool = False) -> LossNeeds:
    return LossNeeds(frozenset({"advantage", "rollout_log_prob", *columns}), whole_rollouts)


def test_a_loss_needs_the_columns_that_its_options_read() -> None:
    expected_needs = {name: make_needs(whole_rollouts=name == "gspo") for name in LOSSES}
    assert {name: loss.needs for name, loss in DEFAULTS.items()} == expected_needs
    assert replace(GRPO, kl_coef=0.1).needs == make_needs("reference_log_prob")
    assert replace(GRPO, proximal="recompute").needs == make_needs("proximal_log_prob")
    assert replace(GRPO, distillation=make_distillation()).needs == make_needs("teacher_log_prob")
    term = make_distillation(over="vocabulary")
    assert replace(GRPO, distillation=term).needs == replace(make_needs(), divergence=term)
    assert replace(GRPO, max_age=2).needs == make_needs("age")
    assert replace(GRPO, sequence_mask=(0.5, 2.0)).needs == make_needs(whole_rollouts=True)
    assert load_loss("grpo.loss.reduction=sequence").needs == make_needs(whole_rollouts=True)


def test_is_made_from_the_config_of_a_run() -> None:
    mask = load_loss("async.enabled=true", "grpo.loss.importance_mask=[0.5, 5]", "async.max_trajectory_age_steps=3")
    assert mask == replace(GRPO, proximal="current", importance_mask=(0.5, 5.0), max_age=3)
    assert load_loss("async.enabled=true", "grpo.updates_per_step=2").proximal == "recompute"
    assert load_loss("grpo.loss.proximal=recompute", "grpo.loss.force_on_policy_ratio=false").proximal == "recompute"
    assert load_loss("grpo.loss=cispo", "async.enabled=true").proximal == "rollout"


def test_gspo_has_the_trainers_own_log_probs_without_a_pass_where_a_step_makes_one_update() -> None:
    explicit = "grpo.loss={name: gspo, proximal: auto}"
    assert [load_loss(key).proximal for key in ("grpo.loss=gspo", explicit)] == ["current", "current"]
    several = load_loss("grpo.loss=gspo", "grpo.updates_per_step=2")
    assert several.needs == make_needs("proximal_log_prob", whole_rollouts=True)


def test_keys_of_a_users_class_become_values_of_its_fields_types() -> None:
    file = Path(__file__).parents[3] / "plugins" / "my_loss.py"
    tau = vars(load_loss(f"grpo.loss.name={file}:Sapo", "grpo.loss.tau_down=2"))["tau_down"]
    assert (tau, type(tau)) == (2.0, float)


@pytest.mark.parametrize("loss", [*DEFAULTS.values(), FULL])
def test_travels_by_pickle(loss: PolicyLoss) -> None:
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_a_users_class_travels_to_a_process_that_has_not_imported_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from rlctl.grpo.losses.base import PolicyLoss, PolicyTerm\n\n"
        "@dataclass(frozen=True)\nclass Mine(PolicyLoss):\n    scale: float = 2.0\n\n"
        "    def policy(self, tokens):\n        return PolicyTerm(-self.scale * tokens.advantage * tokens.log_prob)\n"
    )
    loss: Any = load_loss(f"grpo.loss.name={file}:Mine", "grpo.loss.scale=3")
    (tmp_path / "loss.pickle").write_bytes(pickle.dumps(loss))
    code = "import pickle, sys; print(vars(pickle.load(open(sys.argv[1], 'rb'))))"
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "loss.pickle")], cwd=tmp_path, capture_output=True, text=True
    )
    expected_keys = {key.name: getattr(loss, key.name) for key in fields(loss)}
    assert process.stdout.strip() == str(expected_keys), process.stderr
    assert loss.scale == 3.0
