"""One GRPO step: times its phases, and collects its record."""

from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from itertools import chain

from rlctl.grpo.advantages.base import Advantage
from rlctl.grpo.batch import LeftOut, TaskOutcomes, TrainingBatch, make_batch, raise_if_stopped
from rlctl.grpo.components import GrpoComponents
from rlctl.grpo.group_record import recorded_keys, step_records
from rlctl.grpo.metrics import (
    EngineInterval,
    age_metrics,
    engine_metrics,
    generator_metrics,
    length_metrics,
    prefix_metrics,
    refit_metrics,
    rollout_metrics,
    sampling_metrics,
    scoring_metrics,
    speed_metrics,
    turn_metrics,
    update_metrics,
)
from rlctl.preflight.settled import SettledGrpo
from rlctl.refit.protocol import RefitReport
from rlctl.rewards.judge.metric_rows import judge_metrics
from rlctl.rewards.judge.sections import has_judge
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.types import RolloutGroup
from rlctl.run.health import WEIGHT_VERSION
from rlctl.telemetry.clock import StepRecorder
from rlctl.telemetry.throughput import TRAINING, length_of_a_token
from rlctl.training.trainer_group import NO_GRADIENT, NO_TOKEN, Update


class GrpoStep:
    """The step that trains the weights of `version`."""

    def __init__(self, settled: SettledGrpo, parts: GrpoComponents, version: int, advantage: Advantage) -> None:
        self._settled = settled
        self._parts = parts
        self.version = version
        self._advantage = advantage
        self._config = settled.config
        self._async = settled.config.async_.enabled
        self._has_judge = has_judge(settled.config.rewards)
        self._recorder = StepRecorder(parts.recorder.events, version + 1)
        self.phase = self._recorder.phase
        self.training = partial(self.phase, "train")
        # Read at the begin of the step, so that the tokens of a validation before it do not count.
        self._stats = parts.dispatcher.stats()
        self._scoring_stats = {role: scores.stats() for role, scores in parts.frozen.items()}
        self._groups: list[list[RolloutGroup]] = []
        self._batches: list[TrainingBatch] = []
        self.updates: list[Update] = []
        # Metrics that no update returns, such as the mismatch of a comparison.
        self.measured: dict[str, float] = {}

    def waiting(self, cause: str) -> AbstractContextManager[None]:
        """Time a wait for rollouts or scores: a phase of a synchronous step, idle time of an asynchronous trainer."""
        if self._async:
            return self.phase(f"idle_{cause}")
        return self.phase("reward" if cause == "scores" else "generation")

    def batch(self, groups: list[RolloutGroup]) -> TrainingBatch:
        """Return the groups' batch. It has no advantages yet if these read columns that are still to be computed.

        Raises StopBeforeUpdateError if a reward asks the run to stop.
        """
        raise_if_stopped(groups)
        with self.phase("advantage"):
            return make_batch(groups, self._config.grpo, self._advantage, self.version if self._async else None)

    def collect(self, groups: list[RolloutGroup], batch: TrainingBatch) -> None:
        """Keep groups of the step, and their batch, for the record.

        Raises FloatingPointError if more rollouts of the step are left out than the config allows.
        """
        self._groups.append(groups)
        self._batches.append(batch)
        config = self._config.grpo
        share = self._config.health.max_non_finite_rollouts
        rollouts = config.num_prompts_per_step * config.num_generations_per_prompt
        if len(self.left_out) > share * rollouts:
            raise FloatingPointError(
                f"{len(self.left_out)} of {rollouts} rollouts have a log-prob that is not finite, at most {share:.0%} "
                f"(health.max_non_finite_rollouts): first {self.left_out[0]}"
            )

    @property
    def left_out(self) -> list[LeftOut]:
        """Rollouts of the step that reach no update."""
        return list(chain.from_iterable(batch.left_out for batch in self._batches))

    @property
    def not_replaced(self) -> int:
        """Number of groups that teach nothing and kept their place in the step."""
        filtered_ids = chain.from_iterable(batch.outcomes.filtered.values() for batch in self._batches)
        return sum(map(len, filtered_ids))

    @property
    def skipped_updates(self) -> list[str]:
        """For each update of the step, the cause why it made no optimizer step; empty if it made one."""
        causes = {NO_GRADIENT: f"{NO_GRADIENT}: no advantage differs from 0, or bounds hold each token that has one"}
        return [causes.get(update.skip_cause, update.skip_cause) for update in self.updates] or [NO_TOKEN]

    def record(self, buffer: RolloutBuffer, refit: RefitReport) -> None:
        """Write the step's metrics and its rollouts. refit: report of the refit that ended the step."""
        parts = self._parts
        number = self.version + 1
        groups = list(chain.from_iterable(self._groups))
        batch = TrainingBatch.join(self._batches, list(map(len, self._groups)))
        waste = buffer.waste()
        updates = [update.metrics for update in self.updates]
        ended = groups + [group for group, _ in waste.filtered]
        metrics = rollout_metrics(ended, batch) | update_metrics(updates) | self.measured | refit_metrics(refit)
        metrics |= parts.program_metrics()
        metrics |= sampling_metrics(ended, batch, waste, self._config.grpo)
        # The lengths are taken even if they are not recorded, because the buffer would collect more and more.
        lengths = buffer.sampled_lengths()
        if self._async:
            metrics |= age_metrics(groups, self.version, buffer.occupancy(), self._config.async_.max_age)
            metrics |= length_metrics(lengths) | {"buffer/target": float(buffer.target)}
        if self._settled.streams_training:
            metrics["train/parts"] = float(max(update.parts for update in self.updates))
        for group, reason in waste.filtered:
            batch.outcomes.add(TaskOutcomes(filtered={reason: [group.task.id]}))
        outcomes = asdict(batch.outcomes)
        if batch.left_out:
            outcomes["left_out"] = [asdict(rollout) for rollout in batch.left_out]
        parts.recorder.outcomes(number, outcomes)
        parts.recorder.groups(
            number,
            "train",
            lambda n, tokens: step_records(ended[:n], batch, parts.decode, recorded_keys(self._config, tokens)),
        )
        if self._has_judge:
            metrics |= judge_metrics(parts.score.scorer.take_counts())
        monitor = parts.monitor.read()
        times = self._recorder.finish()
        metrics |= self._speed(metrics, times, batch)
        parts.recorder.step(number, {WEIGHT_VERSION.name: number, **metrics, **monitor, **times})

    def _speed(self, metrics: dict[str, float], times: dict[str, float], batch: TrainingBatch) -> dict[str, float]:
        devices = self._parts.devices
        speed = speed_metrics(metrics, times, devices.trainer, devices.all)
        engines = EngineInterval(self._stats, self._parts.dispatcher.stats(), devices.generator)
        speed |= generator_metrics(engines) if self._async else turn_metrics(metrics, times, devices.generator)
        speed |= prefix_metrics(engines) | engine_metrics(engines)
        for role, scores in self._parts.frozen.items():
            stats = scores.stats()
            speed |= scoring_metrics(role, EngineInterval(self._scoring_stats[role], stats, len(stats)))
        length = length_of_a_token([len(sequence) for sequence in batch.sequences])
        return speed | devices.flops.metrics(speed[TRAINING.name], length, devices.name)
