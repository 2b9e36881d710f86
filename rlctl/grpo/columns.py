"""Log-prob columns of a step's sequences that models besides the policy compute, each sequence by its own model."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rlctl.config.schema import GrpoConfig
from rlctl.grpo.batch import TrainingBatch
from rlctl.preflight.declared_columns import Role
from rlctl.preflight.roles import TEACHER
from rlctl.rollout.buffer import ScoreGroups
from rlctl.rollout.frozen_scores import FrozenScores, GivenTokens
from rlctl.rollout.types import RolloutGroup
from rlctl.training.micro_batching import TrainingSample

LogProbs = NDArray[np.float32]


def models_of_sequences(
    config: GrpoConfig, batch: TrainingBatch, groups: Sequence[RolloutGroup], role: Role
) -> list[Role]:
    """Return the model that computes a column of `role` for each sequence of the batch.

    With several teachers it is the teacher that the row of the sequence's task names.
    """
    if role != TEACHER:
        return [role] * len(batch.sequences)
    teachers = {group.task.id: _teacher_of(config, group) for group in groups}
    return [teachers[task_id] for task_id, _ in batch.places]


def _teacher_of(config: GrpoConfig, group: RolloutGroup) -> Role:
    """Return the teacher of a group: the only one, or the one that the row of its task names."""
    key = config.teacher_key
    return TEACHER if key is None else f"teachers.{group.task.row[key]}"


def score_by_models(
    samples: Sequence[TrainingSample],
    models: Sequence[Role],
    score: Callable[[Sequence[TrainingSample], Role], list[LogProbs]],
) -> list[LogProbs]:
    """Return the log-probs of each sample under its own model, in order. One call of `score` for each model."""
    log_probs: list[LogProbs] = [np.zeros(0, np.float32)] * len(samples)
    for model in dict.fromkeys(models):
        indices = [index for index, own_model in enumerate(models) if own_model == model]
        rows = score([samples[index] for index in indices], model)
        for index, row in zip(indices, rows, strict=True):
            log_probs[index] = row
    return log_probs


def score_on_engines(scores: FrozenScores, samples: Sequence[TrainingSample]) -> list[LogProbs]:
    """Return the log-probs of each sample under a model on engines, float32 [T]."""
    return scores.scores([GivenTokens(sample.tokens, sample.mask) for sample in samples])


def begin_scores(config: GrpoConfig, score: ScoreGroups, frozen: Mapping[Role, FrozenScores]) -> ScoreGroups:
    """Return a `score` that also begins to score each group's rollouts on the engines of its teacher.

    frozen: models on engines, by role.
    """
    if not frozen:
        return score

    def score_and_begin(groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        scored = score(groups)
        for group in scored:
            teacher = _teacher_of(config, group)
            if teacher in frozen:
                rows = [row for rollout in group.rollouts for row in rollout.rows]
                frozen[teacher].begin([GivenTokens(row.tokens, row.sampled) for row in rows if row.sampled.any()])
        return scored

    return score_and_begin
