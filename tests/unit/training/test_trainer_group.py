"""TrainerGroup splits a batch over the ranks, calls the ranks, counts tokens, and passes on the ranks' errors."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, cast

import numpy as np
import pytest

from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.sft.loss import NllLoss
from rlctl.training.interface import LossNeeds, Totals, TrainingSample
from rlctl.training.trainer_group import TrainerGroup
from rlctl.workers.errors import Failure, WorkerDied, WorkerError


def sequence(length: int) -> TrainingSample:
    return TrainingSample(np.arange(length, dtype=np.int32), np.ones(length, np.bool_))


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"tensor": 2, "pipeline": 3}, {"context": 2}])
def test_tokens_count_once_however_many_ranks_get_them(layout: dict[str, int]) -> None:
    names = {"tensor": "tensor_model", "pipeline": "pipeline_model", "context": "context"}
    sizes = [f"trainer.megatron.{names[name]}_parallel_size={size}" for name, size in layout.items()]
    backend = ["trainer.backend=megatron"] if layout else []
    run = load("sft", None, [*backend, "trainer.num_ranks=6", *sizes]).settled
    section = run.settle_on(RunMachine("cpu"), None).trainer
    ready = TrainerGroup(cast(Any, None), section).prepare([sequence(n) for n in (9, 30, 4, 17)])
    assert sorted(ready.lengths) == [4, 9, 17, 30]
    assert len(ready.shares) == 6
    copies = int(np.prod([*layout.values()], dtype=int))
    assert sum(len(share.tokens) for share in ready.shares) == copies * sum(ready.lengths)


class Recorder:
    """Group of two ranks that records calls instead of running them. failures: method -> error that its call raises."""

    def __init__(self, metrics: dict[str, float] | None = None, **failures: Exception) -> None:
        self.calls: list[tuple[str, list[tuple[Any, ...]]]] = []
        self._metrics = {"made": 1.0} if metrics is None else metrics
        self._failures = failures

    def __len__(self) -> int:
        return 2

    def run(self, method: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> list[Any]:
        self.calls.append((method.__name__, arguments))
        if method.__name__ in self._failures:
            raise self._failures[method.__name__]
        return [self._metrics] * len(arguments)

    def call(self, method: Callable[..., Any]) -> list[Any]:
        return self.run(method, [()] * 2)

    @property
    def methods(self) -> list[str]:
        return [method for method, _ in self.calls]


def make_trainer(group: Recorder) -> TrainerGroup:
    section = load("grpo", None, ["trainer.num_ranks=2"]).settled.settle_on(RunMachine("cpu"), None).trainer
    return TrainerGroup(cast(Any, group), section)


LOSS = NllLoss()


@pytest.mark.parametrize(
    ("metrics", "skip_cause"),
    [
        ({}, "it has no token to train on"),
        ({"train/grad_norm": 0.0}, "its gradient is exactly 0"),
        ({"train/grad_norm": 1e-30, "train/lr": 1.0}, ""),
    ],
)
def test_an_update_says_why_it_made_no_optimizer_step(metrics: dict[str, float], skip_cause: str) -> None:
    with make_trainer(Recorder(metrics)).update(LOSS) as update:
        update.accumulate([sequence(5)])
    assert update.skip_cause == skip_cause


def test_an_update_of_one_part_is_one_call_and_may_be_prepared_before() -> None:
    group = Recorder()
    samples = [sequence(5), sequence(3)]
    for batch in (samples, make_trainer(group).prepare(samples)):
        group.calls.clear()
        with make_trainer(group).update(LOSS) as update:
            update.accumulate(batch)
            assert not group.calls and not update.metrics
        [(method, ranks)] = group.calls
        assert method == "train" and update.metrics == {"made": 1.0} and update.parts == 1
        totals = Totals(tokens=8, sequences=2, rollouts=2)
        assert [arguments[1:] for arguments in ranks] == [(LOSS, totals), (LOSS, totals)]


@pytest.mark.parametrize("in_parts", [False, True])
def test_the_step_knows_the_totals_of_all_parts(in_parts: bool) -> None:
    group = Recorder()
    with make_trainer(group).update(LOSS, in_parts=in_parts) as update:
        for part in ([sequence(5), sequence(3)], [sequence(4)], []):
            update.accumulate(part)
    assert update.parts == 2
    # With `in_parts` each part is sent at once. Otherwise the last part is sent with the optimizer step.
    methods = ["accumulate", "accumulate", "train"] if in_parts else ["accumulate", "train"]
    assert group.methods == methods
    sent_tokens = []
    for method, ranks in group.calls:
        totals = [Totals(tokens=12, sequences=3, rollouts=3)] if method == "train" else []
        assert all(arguments[1:] == (LOSS, *totals) for arguments in ranks)
        sent_tokens.append(sum(len(arguments[0].tokens) for arguments in ranks))
    assert sent_tokens == ([8, 4, 0] if in_parts else [8, 4])


@dataclass(frozen=True)
class WholeLoss(NllLoss):
    """Loss that needs all rows of a rollout in one micro-batch."""

    needs: ClassVar[LossNeeds] = LossNeeds(whole_rollouts=True)


def test_rows_of_a_rollout_count_as_one_and_go_together_where_the_loss_needs_it() -> None:
    rows = [replace(sequence(40), rollout=rollout) for rollout in (0, 0, 1, 1, None, None)]
    for loss, together in ((WholeLoss(), True), (NllLoss(), False)):
        group = Recorder()
        with make_trainer(group).update(loss) as update:
            update.accumulate(rows)
        [(_, ranks)] = group.calls
        assert ranks[0][2] == Totals(tokens=240, sequences=6, rollouts=4)
        batches = []
        for share, *_ in ranks:
            batches += [[row.rollout for row in batch] for batch in share.micro_batches()]
        assert sorted(map(str, chain.from_iterable(batches))) == ["0", "0", "1", "1", "None", "None"]
        assert all(batch.count(0) in (0, 2) and batch.count(1) in (0, 2) for batch in batches) == together


def test_a_rollout_that_fits_no_micro_batch_names_the_knob() -> None:
    rows = [replace(sequence(5000), rollout=0) for _ in range(2)]
    message = r"2 rows of 10000 tokens together, a micro-batch at most \d+.*raise trainer.micro_batch_tokens"
    with pytest.raises(ValueError, match=message), make_trainer(Recorder()).update(WholeLoss()) as update:
        update.accumulate(rows)


def test_an_update_of_nothing_is_no_call() -> None:
    group = Recorder()
    for in_parts in (False, True):
        with make_trainer(group).update(LOSS, in_parts=in_parts) as update:
            update.accumulate([])
        assert update.metrics == {} and not group.calls


def test_an_exception_discards_what_the_ranks_have() -> None:
    group = Recorder()
    with pytest.raises(KeyError), make_trainer(group).update(LOSS) as update:
        update.accumulate([sequence(5)])
        raise KeyError
    assert not group.calls and not update.metrics
    with pytest.raises(KeyError), make_trainer(group).update(LOSS, in_parts=True) as update:
        update.accumulate([sequence(5)])
        raise KeyError
    assert group.methods == ["accumulate", "discard"]


def test_ranks_that_are_gone_are_not_asked_to_discard() -> None:
    group = Recorder(accumulate=WorkerDied("accumulate", ["trainer-1"], "killed"))
    with pytest.raises(WorkerDied), make_trainer(group).update(LOSS) as update:
        for _ in range(2):
            update.accumulate([sequence(5)])
    assert group.methods == ["accumulate"]


def test_a_loss_that_is_not_finite_is_told_by_the_rank_that_knows_where() -> None:
    def make_failing_trainer(*errors: tuple[str, str]) -> TrainerGroup:
        failures = [
            Failure(f"trainer-{rank}", type=kind, text=text, traceback="") for rank, (kind, text) in enumerate(errors)
        ]
        return make_trainer(Recorder(train=WorkerError("train", failures)))

    elsewhere = ("FloatingPointError", "the gradient norm is nan (elsewhere)")
    refused = make_failing_trainer(elsewhere, ("FloatingPointError", "the gradient norm is nan (first in lm_head)"))
    with pytest.raises(FloatingPointError, match="lm_head"), refused.update(LOSS) as update:
        update.accumulate([sequence(5)])
    broken = make_failing_trainer(elsewhere, ("KeyError", "advantage"))
    with pytest.raises(WorkerError, match="FloatingPointError"), broken.update(LOSS) as update:
        update.accumulate([sequence(5)])
