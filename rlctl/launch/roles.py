"""Model folders of a run's roles besides the policy, found or fetched before its ranks start."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlctl.config.errors import ModelError
from rlctl.config.schema import ModelSection
from rlctl.models.facts import HeadKind
from rlctl.models.model_files import ModelFiles
from rlctl.models.vocabulary import vocabulary_problem
from rlctl.preflight.declared_columns import Role, RoleModel
from rlctl.preflight.roles import RoleFacts, first_difference
from rlctl.preflight.settled import Settled
from rlctl.preflight.written_roles import WrittenRole, written_roles
from rlctl.run.checkpoints import hold
from rlctl.run.run_dir import RunDir


@dataclass(frozen=True)
class RoleFiles:
    """Folder of a role's weights, and its facts."""

    # Hugging Face folder; or PEFT's, of adapters that replace the policy's.
    folder: str
    facts: RoleFacts
    # Folder of the model's own tokenizer.
    tokenizer: str = ""


def find_roles(settled: Settled, policy: ModelFiles, run_dir: RunDir) -> dict[Role, RoleFiles]:
    """Return the folder and facts of each of `settled.frozen_roles`. Fetch a model of the hub once.

    policy: the run's model, found already. An adapter that the policy's own adapters cannot hold is merged with its
    base into the run's directory. Raises ModelError, also for a model that cannot score the policy's tokens.
    """
    written = written_roles(settled.config)
    roles = {}
    for name in settled.frozen_roles:
        try:
            roles[name] = _find_role(written[name], settled, policy, run_dir)
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error
    return roles


def role_models(settled: Settled, files: Mapping[Role, RoleFiles]) -> dict[Role, RoleModel]:
    """Return the models that the trainer's ranks have, each with its place. Raises ModelError without room."""
    models = {}
    for name, role in settled.placed_roles.items():
        if role.problem:
            raise ModelError(f"{name} {role.problem}")
        if role.place != "engines":
            models[name] = RoleModel(files[name].folder, role.place)
    return models


def _find_role(role: WrittenRole, settled: Settled, policy: ModelFiles, run_dir: RunDir) -> RoleFiles:
    if role.weights is None:
        # The policy at weight version 0: the base model, or the adapter that the run starts from.
        return RoleFiles(policy.adapter or policy.folder, RoleFacts(sizes=policy.facts.sizes, is_first=True))
    hold(Path(role.weights).parent)
    facts = settled.role_facts.get(role.name, RoleFacts())
    section = ModelSection(path=role.weights, tokenizer=None, random_init=False, max_length=None)
    folder = run_dir.path / "roles" / role.name
    base = role.path if role.lora else None
    # Engines that score serve whole weights.
    is_adapter = facts.is_adapter and role.place != "engines"
    head: HeadKind = "value" if role.has_value_head else "causal"
    files = ModelFiles.prepare(section, folder, seed=0, merge=not is_adapter, base=base, head=head)
    if not role.has_value_head and not role.is_judge:
        problem = vocabulary_problem(Path(policy.chat), Path(files.chat), files.facts.sizes.vocab)
        if problem:
            raise ModelError(problem)
    difference = first_difference(Path(policy.folder), Path(files.folder))
    found_facts = RoleFacts(files.facts.sizes, difference, is_adapter=is_adapter)
    return RoleFiles(files.adapter or files.folder, found_facts, tokenizer=files.chat)
