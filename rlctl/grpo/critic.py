"""The critic of a run: values of a step's tokens, and updates of the critic towards the step's returns.

A critic is a second `TrainerGroup`: other processes than the policy's, on the same devices. The loop asks it for the
column `value` before the advantages, and trains it once they are known, before the policy.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rlctl.config.critic_schema import CriticSection
from rlctl.grpo.batch import TrainingBatch
from rlctl.grpo.critic_rows import EXPLAINED_VARIANCE, GRAD_NORM, LEARNING_RATE
from rlctl.grpo.losses.value import ValueLoss
from rlctl.preflight.declared_columns import RETURN, VALUE
from rlctl.run.recorder import BegunSave, WriteTrainer
from rlctl.training import metric_rows
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.trainer_group import TrainerGroup
from rlctl.training.trainer_worker import TrainerWorker

# Name of a trainer's metric -> name of the critic's.
_RENAMED = {metric_rows.GRAD_NORM.name: GRAD_NORM.name, metric_rows.LEARNING_RATE.name: LEARNING_RATE.name}
# Share of the returns' mean square below which they do not vary.
_EPSILON = 1e-12


class Critic:
    """The critic's trainer, and its turns on the devices that it shares with the policy's."""

    def __init__(self, trainer: TrainerGroup, policy: TrainerGroup, section: CriticSection, shares_gpus: bool) -> None:
        self.trainer = trainer
        self._policy = policy
        self._section = section
        self._loss = ValueLoss(section.value_clip)
        self._shares_gpus = shares_gpus
        # True once an update of the step has changed the critic.
        self.has_moved = False

    def is_alone(self, version: int) -> bool:
        """Return True if the step that trains the weights of `version` trains the critic alone."""
        return version < self._section.warm_up_steps

    def values(self, samples: Rows[TrainingSample]) -> list[NDArray[np.float32]]:
        """Return the column `value` of each sample, float32 [T, 2]; the first token has no value before it: 0."""
        self._rest(self._policy)
        outputs = self.trainer.values(samples)
        self._rest(self.trainer)
        return [np.stack([np.concatenate([[0], row[:-1]]), row], axis=-1, dtype=np.float32) for row in outputs]

    def train(self, batch: TrainingBatch) -> dict[str, float]:
        """Update the critic with the batch, and return its metrics.

        Raises FloatingPointError for a loss or a gradient norm that is not finite.
        """
        self.has_moved = False
        self._rest(self._policy)
        metrics: dict[str, list[float]] = {}
        for samples in batch.shares(self._section.updates_per_step):
            try:
                with self.trainer.update(self._loss) as update:
                    update.accumulate(_select_columns(samples))
            except FloatingPointError as error:
                raise FloatingPointError(f"critic: {error}") from error
            self.has_moved = True
            for name, value in update.metrics.items():
                shown_name = _RENAMED.get(name, name)
                if shown_name.startswith("critic/"):
                    metrics.setdefault(shown_name, []).append(value)
        self._rest(self.trainer)
        means = {name: float(np.mean(values)) for name, values in metrics.items()}
        explained = explained_variance(batch.sequences)
        return means if explained is None else means | {EXPLAINED_VARIANCE.name: explained}

    def _rest(self, trainer: TrainerGroup) -> None:
        """Free the memory that a trainer does not need while the other one works."""
        if self._shares_gpus:
            trainer.group.call(TrainerWorker.rest)


def _select_columns(samples: Rows[TrainingSample]) -> list[TrainingSample]:
    """Return the samples with the columns alone that the critic reads."""
    names = (VALUE.name, RETURN.name)
    return [
        TrainingSample(
            tokens=sample.tokens,
            mask=sample.mask,
            columns={name: sample.columns[name] for name in names},
            rollout=sample.rollout,
        )
        for sample in samples
    ]


def explained_variance(samples: Rows[TrainingSample]) -> float | None:
    """Return 1 - var(return - value) / var(return) over the sampled tokens; None if all returns are equal."""
    if not samples:
        return None
    values = np.concatenate([sample.columns[VALUE.name][sample.mask, 0] for sample in samples]).astype(np.float64)
    returns = np.concatenate([sample.columns[RETURN.name][sample.mask] for sample in samples]).astype(np.float64)
    if not len(returns) or returns.var() <= _EPSILON * np.square(returns).mean():
        return None
    return float(1 - (returns - values).var() / returns.var())


@dataclass(frozen=True)
class JointSave:
    """The saves of policy and critic, as one."""

    parts: tuple[BegunSave, ...]

    @property
    def wait_cause(self) -> str:
        """Reason why steps must wait until both are written; empty if they may train meanwhile."""
        return next((part.wait_cause for part in self.parts if part.wait_cause), "")

    def finish(self) -> Mapping[Path, tuple[int, str]]:
        """Wait until all files are synced to disk; return their sizes and digests."""
        files: dict[Path, tuple[int, str]] = {}
        for part in self.parts:
            files |= part.finish()
        return files


def write_with_critic(trainer: TrainerGroup, critic: Critic | None) -> WriteTrainer:
    """Return the function that begins a checkpoint of the policy and, if there is one, of the critic."""
    if critic is None:
        return trainer.begin_save
    begin_critic: Callable[..., BegunSave] = critic.trainer.begin_save

    def begin(folder: Path, export: Path | None, dtype: str | None, beside_training: bool) -> JointSave:
        checkpoint = folder.parent
        (checkpoint / "critic").mkdir()
        critic_export = checkpoint / "critic_hf" if export else None
        policy_save = trainer.begin_save(folder, export, dtype, beside_training)
        return JointSave((policy_save, begin_critic(checkpoint / "critic", critic_export, dtype, beside_training)))

    return begin
