"""The GRPO loop: sample, score, train, refit. The same code runs synchronous and asynchronous runs.

`RolloutBuffer` bounds the age of trained groups. In a synchronous run the bound is 0: nothing is sampled for a step
before the engines have the weights that the step trains. `GrpoStep` times and records a step. `Loop` (run/loop.py) does
the work between two steps: validation, checkpoints, health checks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from rlctl.grpo.advantages.base import make_advantage
from rlctl.grpo.batch import TrainingBatch, add_column, raise_if_stopped, why_it_teaches_nothing
from rlctl.grpo.columns import LogProbs, begin_scores, models_of_sequences, score_by_models, score_on_engines
from rlctl.grpo.components import GrpoComponents
from rlctl.grpo.critic import write_with_critic
from rlctl.grpo.group_record import group_records, recorded_keys
from rlctl.grpo.health import grpo_health
from rlctl.grpo.logprob_mismatch import mismatch
from rlctl.grpo.losses.base import make_loss
from rlctl.grpo.losses.sections import MISMATCH_KL, STEP_MISMATCH
from rlctl.grpo.metric_rows import PARITY
from rlctl.grpo.metrics import validation_metrics
from rlctl.grpo.overlong import training_score
from rlctl.grpo.parity_check import compare, sample_parity
from rlctl.grpo.step import GrpoStep
from rlctl.grpo.validation import Validation, find_unreached_accuracy
from rlctl.preflight.declared_columns import (
    CRITIC,
    PROXIMAL_LOG_PROB,
    ROLLOUT_LOG_PROB,
    Role,
    phase_of,
    roles_by_column,
)
from rlctl.preflight.settled import SettledGrpo
from rlctl.rollout.buffer import RolloutBuffer, ScoreGroups
from rlctl.rollout.types import RolloutGroup
from rlctl.run.checkpoints import Checkpoint
from rlctl.run.health import HealthStop
from rlctl.run.loop import Loop
from rlctl.training.micro_batching import TrainingSample


class GrpoLoop(Loop):
    """The steps of a run, see `Loop`."""

    def __init__(
        self,
        settled: SettledGrpo,
        parts: GrpoComponents,
        stop: Callable[[], bool],
        mismatch_bound: float | None = None,
    ) -> None:
        config = settled.config
        health = grpo_health(settled, parts.failure_cause, parts.tool_cause, mismatch_bound)
        super().__init__(
            num_steps=config.grpo.num_steps,
            recorder=parts.recorder,
            cursor=parts.source.cursor,
            write=write_with_critic(parts.trainer, parts.critic),
            stop=stop,
            health=health,
        )
        self._settled = settled
        self._config = config
        self._parts = parts
        self._loss = make_loss(settled)
        self._advantage = make_advantage(config)
        # Name of a column to compute -> role of the model that computes it.
        self._columns = roles_by_column({*self._loss.needs.columns, *self._advantage.columns})
        # True if groups are trained as soon as they are scored, as parts of one update. This needs an asynchronous run
        # with one update in a step, no column to compute, and advantages that depend on one group only.
        self._streams = settled.streams_training and not self._columns
        self._drains = config.async_.enabled and not config.async_.in_flight_weight_updates
        self._buffer = RolloutBuffer(
            config,
            parts.source,
            parts.dispatcher,
            parts.runner,
            begin_scores(config, self._score_ended(parts.score), parts.frozen),
            parts.recorder.events.emit,
            teaches_nothing=partial(why_it_teaches_nothing, config.grpo),
        )

    def step(self) -> None:
        parts = self._parts
        version = self.done
        step = GrpoStep(self._settled, parts, version, self._advantage)
        with step.phase("data"):
            self._buffer.admit(version)
        try:
            for samples_of_update in self._updates(step):
                with parts.trainer.update(self._loss, in_parts=self._streams, timed=step.training) as update:
                    for samples in samples_of_update:
                        update.accumulate(samples)
                step.updates.append(update)
        except FloatingPointError as error:
            raise self._not_finite(step, error) from error
        if self._drains:
            self._buffer.drain(step.waiting)
        with step.phase("refit"):
            refit = parts.pool.sync(version + 1)
            self._buffer.advance(version + 1)
        self.done = version + 1
        if self._config.async_.enabled:
            self._compare_parity(step, self._sample_parity(step, self.done))
        skipped = [] if self._trains_critic_alone(version) else step.skipped_updates
        step.measured |= self._count_skipped_updates(self.done, skipped)
        step.record(self._buffer, refit)
        self._say_not_replaced(step)
        if step.left_out:
            self._details["non_finite"] = f"first {step.left_out[0]}"

    def _score_ended(self, score: ScoreGroups) -> ScoreGroups:
        """Return the function that scores groups as they end. With reward models a step completes the scores."""
        model_rewards = self._parts.model_rewards
        if model_rewards is None:
            return training_score(self._config, score)

        def score_and_begin(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
            model_rewards.begin(groups)
            return score(groups)

        return score_and_begin

    def _say_not_replaced(self, step: GrpoStep) -> None:
        """Warn once if groups that teach nothing kept their place in a step, because its budget was used up."""
        rules = self._config.grpo.dynamic_sampling
        size = self._config.grpo.num_prompts_per_step
        if rules.filter and rules.max_extra and step.not_replaced:
            warning = (
                f"step {self.done}: {step.not_replaced} of {size} groups teach nothing and are not replaced, for "
                f"grpo.dynamic_sampling.max_extra={rules.max_extra:g} is used up; raise it, or choose prompts of "
                "another difficulty; further steps are counted only (groups/missing)"
            )
            self._parts.recorder.warn_once("budget", warning)

    def _updates(self, step: GrpoStep) -> Iterator[Iterable[list[TrainingSample]]]:
        """Yield each update of the step as an iterable of its parts."""
        if self._streams:
            yield self._parts_as_they_come(step)
            return
        groups = self._buffer.take(step.version, step.waiting)
        compared = [] if self._config.async_.enabled else self._sample_parity(step, step.version)
        if self._parts.pool.sleeps:
            with step.phase("sleep"):
                self._parts.pool.rest()
        self._compare_parity(step, compared)
        if self._parts.model_rewards:
            with step.phase("reward"):
                groups = training_score(self._config, self._parts.model_rewards)(groups)
            step.measured |= self._parts.model_rewards.metrics
        batch = step.batch(groups)
        # The columns of the whole step are computed before its first update changes the weights.
        if self._columns and batch.sequences:
            batch = self._with_columns(batch, groups, step)
        step.collect(groups, batch)
        if self._parts.critic and batch.sequences:
            with step.phase("critic"):
                step.measured |= self._parts.critic.train(batch)
        if self._trains_critic_alone(step.version):
            return
        yield from ([samples] for samples in batch.shares(self._config.grpo.updates_per_step))

    def _trains_critic_alone(self, version: int) -> bool:
        return self._parts.critic is not None and self._parts.critic.is_alone(version)

    def _parts_as_they_come(self, step: GrpoStep) -> Iterator[list[TrainingSample]]:
        """Yield the samples of the step's scored groups in parts, each once it has enough tokens to be worth a call."""
        is_last = False
        while not is_last:
            groups = self._buffer.take_part(step.version, self._parts.trainer.worthwhile, step.waiting)
            is_last = not groups
            if is_last:
                groups = self._buffer.take(step.version, step.waiting)
            batch = step.batch(groups)
            step.collect(groups, batch)
            yield batch.sequences

    def _with_columns(self, batch: TrainingBatch, groups: list[RolloutGroup], step: GrpoStep) -> TrainingBatch:
        """Return the batch with the log-prob columns that loss and advantage read. Stop if no rollout is left.

        groups: those of the batch, whose rows name their teachers.
        """
        for name, role in self._columns.items():
            if batch.sequences:
                models = models_of_sequences(self._config, batch, groups, role)
                values = score_by_models(batch.sequences, models, partial(self._score_samples, step, phase_of(role)))
                with step.phase("advantage"):
                    batch = add_column(batch, name, values, self._config.grpo, self._advantage)
            if batch.sequences and name == PROXIMAL_LOG_PROB.name:
                masks = [sequence.mask for sequence in batch.sequences]
                gap = mismatch(batch.column(ROLLOUT_LOG_PROB.name), batch.column(name), masks)
                step.measured |= {STEP_MISMATCH.name: gap.token_mult_prob_error, MISMATCH_KL.name: gap.kl}
        return batch

    def _score_samples(
        self, step: GrpoStep, phase: str, samples: Sequence[TrainingSample], model: Role
    ) -> list[LogProbs]:
        """Return the log-probs of each sample under a model, by the trainer's ranks or by the model's engines.

        The critic gives its values. phase: name of the passes. While engines score, the trainer is idle.
        """
        if scores := self._parts.frozen.get(model):
            with step.phase(f"idle_{phase}"):
                return score_on_engines(scores, samples)
        with step.phase(phase):
            if model == CRITIC and self._parts.critic:
                return self._parts.critic.values(samples)
            return self._parts.trainer.log_probs(samples, model)

    def _not_finite(self, step: GrpoStep, error: FloatingPointError) -> Exception:
        """Return the exception for an update that is not finite. It allows no checkpoint if an earlier update of the
        step has changed the weights already."""
        critic_moved = self._parts.critic is not None and self._parts.critic.has_moved
        if not critic_moved and all(update.skip_cause for update in step.updates):
            return error
        which = f"step {step.version + 1}, update {len(step.updates) + 1} of {self._config.grpo.updates_per_step}"
        return HealthStop(f"{which}: {error}, as the updates before made them; {self._parts.recorder.newest}")

    def _sample_parity(self, step: GrpoStep, version: int) -> list[TrainingSample]:
        """Sample tokens at `version` for a comparison with the trainer; return nothing in steps without a comparison.

        A comparison is made every `health.parity_every` steps, in runs whose training tokens cannot show the mismatch.
        """
        every = self._config.health.parity_every
        if not self._config.compares_apart or not every or (step.version + 1) % every:
            return []
        with step.phase("parity"):
            tasks = self._parts.validation or self._parts.source.read_ahead(0, self._config.grpo.num_prompts_per_step)
            return sample_parity(self._config, self._parts, tasks, version)

    def _compare_parity(self, step: GrpoStep, samples: list[TrainingSample]) -> None:
        """Record the mismatch of the samples. The trainer must still have the version that sampled them."""
        if samples:
            with step.phase("parity"):
                gap = compare(self._parts, samples)
            step.measured[PARITY.name] = gap.token_mult_prob_error

    def validate(self) -> None:
        """Measure every held-out task, greedily or with k samples. Rollouts with a failed reward are counted apart."""
        parts = self._parts
        if not parts.validation:
            return
        with parts.recorder.validation(self.done) as metrics:
            validation = Validation(self._config, parts.dispatcher, parts.runner, parts.score, parts.validation)
            groups = validation.groups(self.done)
            raise_if_stopped(groups)
            groups = self._value_held_out(groups)
            metrics |= validation_metrics(groups)
        parts.recorder.warn_once("accuracy", find_unreached_accuracy(groups, self._config, self.done))
        parts.recorder.groups(
            self.done,
            "validation",
            lambda n, tokens: group_records(groups[:n], parts.decode, recorded_keys(self._config, tokens)),
        )

    def _value_held_out(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Return the groups of a validation with the values of reward models."""
        model_rewards = self._parts.model_rewards
        if model_rewards is None:
            return groups
        rests = model_rewards.needs_ranks and self._parts.pool.sleeps
        if rests:
            self._parts.pool.rest()
        groups = model_rewards(groups)
        if rests:
            self._parts.pool.sync(self.done)
        return groups

    def resume(self, checkpoint: Checkpoint) -> None:
        super().resume(checkpoint)
        if "groups" in checkpoint.state:
            self._buffer.load(checkpoint.state["groups"], checkpoint.path, checkpoint.step)

    def save(self) -> None:
        state, write_groups = self._buffer.snapshot()
        self.save_with(state, write_groups)

    def close(self) -> None:
        for scores in self._parts.frozen.values():
            scores.close()
        for judge in self._parts.judges:
            judge.close()
        self._buffer.close()
