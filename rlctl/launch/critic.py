"""The critic of a run: its folder, and the specs of its ranks."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlctl.config.errors import ModelError
from rlctl.config.schema import ModelSection
from rlctl.launch.runtime import Allocation
from rlctl.launch.session import Session
from rlctl.models.facts import head_kind
from rlctl.models.model_files import ModelFiles, make_value_folder
from rlctl.models.vocabulary import vocabulary_problem
from rlctl.preflight.critic import critic_settings
from rlctl.preflight.settled import Settled
from rlctl.run.checkpoints import Checkpoint

if TYPE_CHECKING:
    from rlctl.workers.group import WorkerGroup, WorkerSpec


def find_critic(settled: Settled, policy: ModelFiles, run_dir: Path) -> Path | None:
    """Return the Hugging Face folder with the critic's first weights; None for a run without critic.

    A causal LM gets a value head of zeros, in a new folder of the run's directory. Raises ModelError.
    """
    section = settled.grpo.config.critic if settled.grpo else None
    if section is None:
        return None
    source = Path(policy.folder)
    try:
        if section.path is not None:
            model = ModelSection(path=section.path, tokenizer=None, random_init=False, max_length=None)
            files = ModelFiles.prepare(model, run_dir / "roles" / "critic", seed=0, head=None)
            source = Path(files.folder)
            if files.adapter:
                raise ModelError(f"{section.path} is an adapter; needed: a whole model")
            if problem := vocabulary_problem(Path(policy.chat), source, files.facts.sizes.vocab):
                raise ModelError(problem)
        if head_kind(source) == "value":
            return source
        return make_value_folder(source, run_dir / "roles" / "critic" / "init", seed=settled.config.run.seed)
    except ModelError as error:
        raise ModelError(f"critic: {error}") from error


def start_critic(session: Session, settled: Settled, folder: Path, allocation: Allocation) -> "WorkerGroup":
    """Start the critic's ranks, each on the device of a rank of the trainer."""
    from rlctl.workers.group import WorkerGroup

    return WorkerGroup(_critic_specs(session, settled, folder, allocation), settled.config.run.deadline_s)


def _critic_specs(session: Session, settled: Settled, folder: Path, allocation: Allocation) -> "list[WorkerSpec]":
    """Return the spec of every rank."""
    from rlctl.launch.worker_specs import rank_specs, trainer_spec

    trainer = critic_settings(settled)
    assert trainer is not None
    assert settled.grpo is not None
    section = settled.grpo.config.critic
    assert section is not None
    template = replace(
        trainer_spec(session, settled, str(folder), allocation),
        config=trainer,
        world=trainer.num_ranks,
        total_updates=settled.config.num_steps * section.updates_per_step,
        profile=None,
    )
    return rank_specs("critic", template, session, settled, allocation)


def load_critic(group: "WorkerGroup", checkpoint: Checkpoint) -> None:
    """Read the critic's part of a checkpoint. Raises ModelError if the checkpoint has none."""
    from rlctl.training.trainer_worker import TrainerWorker

    if not checkpoint.critic.is_dir():
        raise ModelError(f"{checkpoint.path} has no critic: its run had none; start a new run")
    group.call(TrainerWorker.load, str(checkpoint.critic))
