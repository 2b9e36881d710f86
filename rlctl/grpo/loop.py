"""The GRPO loop: groups that were sampled and scored, compared, trained on, the generator brought up to date.

Synchronous and asynchronous are one: `RolloutBuffer` bounds the age of what is trained, by 0 in a synchronous run.

Each line of `step` is a phase with typed input and output; whatever feeds two phases is an argument, not state.
What comes between the steps, and what a resume needs, is in run/loop.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from rlctl.config.schema import GrpoConfig
from rlctl.generation.active_requests import EngineStats
from rlctl.grpo.batch import TrainingBatch, add_log_probs, make_batch
from rlctl.grpo.components import GrpoComponents
from rlctl.grpo.health import PARITY, grpo_health
from rlctl.grpo.logprob_mismatch import mismatch
from rlctl.grpo.loss import GrpoLoss
from rlctl.grpo.metrics import (
    EngineInterval,
    age_metrics,
    generator_metrics,
    length_metrics,
    refit_metrics,
    rollout_metrics,
    speed_metrics,
    turn_metrics,
    update_metrics,
    validation_metrics,
)
from rlctl.grpo.parity_check import parity
from rlctl.preflight.resolved import Resolved
from rlctl.refit.protocol import RefitReport
from rlctl.rollout.buffer import RolloutBuffer, Span
from rlctl.rollout.types import RolloutGroup, Sampling
from rlctl.run.checkpoints import Checkpoint
from rlctl.run.health import HealthStop
from rlctl.run.loop import Loop
from rlctl.telemetry.clock import StepRecorder
from rlctl.telemetry.throughput import length_of_a_token, mfu
from rlctl.training.trainer_group import Update


@dataclass
class Ahead:
    """Groups of a step that are trained on before its last ones are there. update: begun with the first of them."""

    stack: ExitStack
    groups: list[list[RolloutGroup]] = field(default_factory=list)
    batches: list[TrainingBatch] = field(default_factory=list)
    update: Update | None = None

    def with_last(self, groups: list[RolloutGroup], batch: TrainingBatch) -> tuple[list[RolloutGroup], TrainingBatch]:
        """The whole step's."""
        parts = [*self.groups, groups]
        joined = TrainingBatch.joined([*self.batches, batch], [len(part) for part in parts])
        return [group for part in parts for group in part], joined


class GrpoLoop(Loop):
    """The steps of a run, see `Loop`."""

    def __init__(self, config: GrpoConfig, parts: GrpoComponents, stop: Callable[[], bool]) -> None:
        write, health = parts.trainer.save, grpo_health(config, parts.score.scorer.failures.most_common)
        super().__init__(config.grpo.num_steps, parts.recorder, parts.source.cursor, write, stop, health)
        self._config, self._parts, self._async = config, parts, config.async_.enabled
        resolved = Resolved(config)
        self._loss, self._needs_log_probs = GrpoLoss.from_config(config), resolved.needs_log_probs
        self._streams, self._max_age = resolved.streams_training, resolved.max_age

        self._counters: list[EngineStats] = []
        self._buffer = RolloutBuffer(config, parts.source, parts.dispatcher, parts.score, parts.recorder.events.emit)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take up the groups that waited for their step, or were being sampled, at a checkpoint."""
        super().resume(checkpoint)
        if "groups" in checkpoint.state:
            self._buffer.load(checkpoint.state["groups"], checkpoint.path, checkpoint.step)

    def save(self) -> None:
        """See `Loop.save`; with the groups between admission and training."""
        state, write = self._buffer.snapshot()
        self.save_with({"groups": state}, write)

    def close(self) -> None:
        """Sample no more."""
        self._buffer.close()

    def step(self) -> None:
        """Make one step: N groups, `updates_per_step` updates, the generator brought up to date."""
        # An exception discards the parts of an update.
        with ExitStack() as stack:
            self._step(stack)

    def _step(self, stack: ExitStack) -> None:
        number = self.done + 1
        record = StepRecorder(self._parts.recorder.events, number)
        # Not those of the last step's end: what a validation samples belongs to no step.
        self._counters = self._parts.dispatcher.stats()
        span = partial(_waiting, record, self._async)
        with record.phase("data"):
            self._buffer.admit(self.done)
        ahead = self._train_ahead(record, span, stack)
        self._buffer.wait(self.done, span)
        groups = self._buffer.take(self.done, span)
        with record.phase("advantage"):
            batch = self._batch(groups, ahead)
        if self._parts.pool.sleeps:
            with record.phase("sleep"):
                self._parts.pool.rest()
        measured: dict[str, float] = {}
        if self._needs_log_probs and batch.sequences:
            with record.phase("log_probs"):
                batch, measured = self._add_log_probs(batch, ahead)
        with record.phase("train"):
            updates = self._update(batch, ahead)
        if not updates or not all(updates):
            what = f"step {number}: no optimizer step, for it has no token to train on"
            self._parts.recorder.events.emit("warning", what=what)
        groups, batch = ahead.with_last(groups, batch)
        moved = self._refit(number, record, span)
        self.done = number
        measured |= self._parity(record)
        metrics = rollout_metrics(groups, batch) | update_metrics(updates) | measured | refit_metrics(moved)
        if self._streams:
            metrics["train/parts"] = float(ahead.update.parts if ahead.update else 1)
        if self._async:
            metrics |= age_metrics(groups, number - 1, self._buffer.occupancy(), self._max_age)
            metrics["buffer/target"] = float(self._buffer.target)
        # Taken in any case: they would pile up.
        lengths = self._buffer.sampled_lengths()
        if self._async:
            metrics |= length_metrics(lengths)
        self._record(record, groups, batch, metrics)

    def _train_ahead(self, record: StepRecorder, span: Span, stack: ExitStack) -> "Ahead":
        """Compute gradients of groups that are there while the step's last ones are being sampled, as soon as they are
        worth a call."""
        ahead = Ahead(stack)
        trainer = self._parts.trainer
        while self._streams and (groups := self._buffer.take_part(self.done, trainer.worthwhile, span)):
            with record.phase("advantage"):
                batch = self._batch(groups, ahead)
            with record.phase("train"):
                if batch.sequences:
                    ahead.update = ahead.update or stack.enter_context(trainer.update(self._loss, in_parts=True))
                    ahead.update.accumulate(batch.sequences)
            ahead.groups.append(groups)
            ahead.batches.append(batch)
        return ahead

    def _batch(self, groups: list[RolloutGroup], ahead: "Ahead") -> TrainingBatch:
        batch = make_batch(groups, self._config.grpo, self.done if self._async else None)
        self._refuse_many(batch, ahead)
        return batch

    def _refuse_many(self, batch: TrainingBatch, ahead: "Ahead") -> None:
        """Raise FloatingPointError if more rollouts of the step are left out than the config allows."""
        left_out = [each for part in (*ahead.batches, batch) for each in part.left_out]
        config, share = self._config.grpo, self._config.health.max_non_finite_rollouts
        rollouts = config.num_prompts_per_step * config.num_generations_per_prompt
        if left_out:
            self._details["non_finite"] = f"first {left_out[0]}"
        if len(left_out) > share * rollouts:
            raise FloatingPointError(
                f"{len(left_out)} of {rollouts} rollouts have a log-prob that is not finite, at most {share:.0%} "
                f"(health.max_non_finite_rollouts): first {left_out[0]}"
            )

    def _update(self, batch: TrainingBatch, ahead: "Ahead") -> list[dict[str, float]]:
        trainer = self._parts.trainer
        if ahead.update:
            ahead.update.accumulate(batch.sequences)
            ahead.stack.close()
            return [ahead.update.metrics]
        updates: list[dict[str, float]] = []
        for share in batch.shares(count := self._config.grpo.updates_per_step):
            try:
                with trainer.update(self._loss) as update:
                    update.accumulate(share)
            except FloatingPointError as error:
                if not any(updates):
                    raise
                # The weights are between two steps: no checkpoint is made of them.
                which, newest = (
                    f"step {self.done + 1}, update {len(updates) + 1} of {count}",
                    self._parts.recorder.newest,
                )
                raise HealthStop(f"{which}: {error}, as the updates before made them; {newest}") from error
            updates.append(update.metrics)
        return updates

    def _parity(self, record: StepRecorder) -> dict[str, float]:
        """In an asynchronous run, every so many steps: the mismatch under equal weights. A synchronous run's own tokens
        tell it."""
        every = self._config.health.parity_every
        if not self._async or not every or self.done % every:
            return {}
        with record.phase("parity"):
            prompts = self._parts.validation or self._parts.source.ahead(0, self._config.grpo.num_prompts_per_step)
            return {PARITY: parity(self._config, self._parts, prompts, self.done).token_mult_prob_error}

    def _refit(self, version: int, record: StepRecorder, span: Span) -> RefitReport:
        """The generator comes to `version`; what was trained makes room, which async fills at once."""
        if self._async and not self._config.async_.in_flight_weight_updates:
            self._buffer.drain(span)
        with record.phase("refit"):
            moved = self._parts.pool.sync(version)
            self._buffer.advance(version)
        return moved

    def validate(self) -> None:
        """Measure every held-out prompt, greedy or by k samples of each. A rollout whose reward fails counts apart."""
        config, tasks = self._config.validation, self._parts.validation
        if not tasks:
            return
        with self._parts.recorder.validation(self.done) as metrics:
            shape = (len(tasks), config.num_generations, self._config.generation.max_new_tokens)
            sampling = Sampling("validation", self._config.run.seed, *shape, config.temperature)
            groups = self._parts.dispatcher.sample(sampling, tasks, self.done)
            metrics |= validation_metrics(self._parts.score(groups))

    def _add_log_probs(self, batch: TrainingBatch, ahead: "Ahead") -> tuple[TrainingBatch, dict[str, float]]:
        trainer, measured = self._parts.trainer, dict[str, float]()
        if self._loss.proximal == "recompute":
            batch = add_log_probs(batch, trainer.log_probs(batch.sequences), "trainer", self._config.grpo)
            if batch.sequences:
                ours, theirs = (batch.column(name) for name in ("proximal_log_prob", "rollout_log_prob"))
                gap = mismatch(theirs, ours, [sequence.mask for sequence in batch.sequences])
                measured = {"mismatch/token_mult_prob_error": gap.token_mult_prob_error, "mismatch/kl": gap.kl}
        if self._loss.kl_coef > 0 and batch.sequences:
            columns = trainer.log_probs(batch.sequences, reference=True)
            batch = add_log_probs(batch, columns, "reference", self._config.grpo)
        self._refuse_many(batch, ahead)
        return batch, measured

    def _record(
        self, record: StepRecorder, groups: list[RolloutGroup], batch: TrainingBatch, metrics: dict[str, float]
    ) -> None:
        recorder, devices = self._parts.recorder, self._parts.devices
        outcomes = asdict(batch.outcomes) | (
            {"left_out": [asdict(each) for each in batch.left_out]} if batch.left_out else {}
        )
        recorder.rollouts(self.done, outcomes, lambda: _shown(groups, self._parts.score.decode))
        monitor = self._parts.monitor.read()
        times = record.finish()
        speed = speed_metrics(metrics, times, devices.trainer, devices.all)
        if self._async:
            interval = EngineInterval(self._counters, self._parts.dispatcher.stats(), devices.generator)
            speed |= generator_metrics(interval)
        else:
            speed |= turn_metrics(metrics, times, devices.generator)
        flops = devices.flops(length_of_a_token([len(sequence) for sequence in batch.sequences]))
        share = mfu(speed["throughput/training"], flops, devices.name)
        measured = speed | ({} if share is None else {"throughput/mfu": share})
        recorder.step(self.done, {"version": self.done, **metrics, **measured, **monitor, **times})


def _waiting(record: StepRecorder, asynchronous: bool, why: str) -> AbstractContextManager[None]:
    """How a wait is booked: generation and reward are phases of a synchronous step, idle times of the trainer else."""
    if asynchronous:
        return record.phase(f"idle_{why}")
    return record.phase("reward" if why == "scores" else "generation")


def _shown(groups: list[RolloutGroup], decode: Callable[[list[list[int]]], list[str]]) -> list[dict[str, Any]]:
    firsts = [(group.task, group.rollouts[0]) for group in groups if group.rollouts]
    texts = decode([rollout.sampled_tokens.tolist() for _, rollout in firsts])
    return [
        {
            "prompt_id": task.id,
            "prompt": task.text,
            "answer": task.answer,
            "completion": text,
            "reward": rollout.reward,
            "rewards": score.parts,
            "right": score.right if rollout.reward is not None else None,
            "failed": score.failed,
            "finish": rollout.finish,
            # Weight version -> tokens that it sampled.
            "versions": {str(v): int(n) for v, n in zip(*np.unique(rollout.sampled_versions, return_counts=True))},
        }
        for (task, rollout), text in zip(firsts, texts)
        if (score := rollout.score)
    ]
