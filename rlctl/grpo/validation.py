"""Validation: samples and scores held-out tasks.

GRPO runs, SFT runs whose recipe asks for samples, and `rlctl eval` all use this code. So equal weights, tasks and seeds
give equal numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.config.plugins import correctness
from rlctl.config.schema import GrpoConfig
from rlctl.data.tasks import Task
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.grpo.group_record import group_records, recorded_keys
from rlctl.grpo.metric_rows import HELD_OUT_ACCURACY
from rlctl.grpo.metrics import validation_metrics
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.scoring import GroupScorer
from rlctl.rollout.types import Decode, RolloutGroup, Sampling
from rlctl.run.recorder import RunRecorder


@dataclass(frozen=True)
class Validation:
    """Held-out tasks, with the objects that sample and score them. Samples come from the weights that engines serve."""

    config: GrpoConfig
    dispatcher: RolloutDispatcher
    runner: RolloutRunner
    score: GroupScorer
    tasks: Sequence[Task]

    def groups(self, version: int, places: range | None = None) -> list[RolloutGroup]:
        """Sample and score the tasks with the indices `places`, or all tasks if None. Return their groups in order.

        Seeds follow from `run.seed`, the weight version, and a task's index among all tasks. A task therefore gets the
        same samples alone as together with others. Raises the errors of `RolloutDispatcher.sample`.
        """
        places = range(len(self.tasks)) if places is None else places
        config = self.config.validation
        sampling = Sampling(
            purpose="validation",
            run_seed=self.config.run.seed,
            groups_per_step=len(self.tasks),
            num_rollouts=config.num_generations,
            max_new_tokens=self.config.generation.max_new_tokens,
            temperature=config.temperature,
        )
        tasks = [self.tasks[place] for place in places]
        return self.score(self.dispatcher.sample(self.runner, sampling, tasks, version, places.start))


def find_unreached_accuracy(groups: Sequence[RolloutGroup], config: GrpoConfig, step: int) -> str | None:
    """Return a warning if no held-out answer after `step` is right although their rewards differ, else None.

    An environment whose rewards never reach 1 has an accuracy of 0 in all steps. The best checkpoint would then be
    chosen by a metric that never changes.
    """
    scores = [score for group in groups for score in group.scores]
    rewards = [score.value for score in scores if score.value is not None]
    if not rewards or min(rewards) == max(rewards) or any(score.right for score in scores):
        return None
    _, least = correctness(config.rewards)
    remedy = "set rewards.N.correct_at"
    if config.checkpoint.metric == HELD_OUT_ACCURACY.name:
        remedy += ", or choose the best checkpoint by another metric: checkpoint.metric=validation/reward"
    return (
        f"step {step}: no held-out answer is right, yet their rewards go from {min(rewards):g} to {max(rewards):g}: an "
        f"answer is right if the reward that decides is at least {least:g}; if it never is by intent, {remedy}"
    )


@dataclass(frozen=True)
class SampledValidation:
    """Validation of weights that another algorithm, such as SFT, trains. Engines get weights only for validations."""

    validation: Validation
    pool: GeneratorPool
    recorder: RunRecorder
    # Decodes tokens to text, including special tokens, for records.
    decode: Decode

    def measure(self, version: int) -> dict[str, float]:
        """Return the validation metrics of the trainer's weights, which have `version`, and record some groups.

        Raises the errors of `GeneratorPool.sync` and `Validation.groups`.
        """
        if self.pool.asleep or self.pool.version != version:
            self.pool.sync(version)
        groups = self.validation.groups(version)
        if self.pool.sleeps:
            self.pool.rest()
        self.recorder.warn_once("accuracy", find_unreached_accuracy(groups, self.validation.config, version))
        self.recorder.groups(
            version,
            "validation",
            lambda n, tokens: group_records(groups[:n], self.decode, recorded_keys(self.validation.config, tokens)),
        )
        return validation_metrics(groups)

    def close(self) -> None:
        """Stop the runner and the dispatcher. No further validation is possible."""
        self.validation.runner.close()
        self.validation.dispatcher.close()
