"""Specification of a trainer rank: plain data that travels to its process."""

from collections.abc import Mapping
from dataclasses import dataclass

from rlctl.preflight.declared_columns import Role, RoleModel
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.training.profile import ProfileSpec
from rlctl.training.rank_checkpoint import Copies


@dataclass(frozen=True)
class TrainerSpec:
    """Specification of one trainer rank."""

    config: TrainerSettings
    # Hugging Face folder.
    model_path: str
    tokenizer_path: str
    rank: int
    world: int
    # Address at which ranks meet: tcp://host:port, served by rank 0, or file://path.
    init_method: str
    # cpu, or cuda:N with N this rank's device.
    device: str
    # Temperature by which logits are divided before log-probs are computed.
    temperature: float
    # Number of updates over which the learning-rate schedule runs.
    total_updates: int
    seed: int
    profile: ProfileSpec | None
    # The models whose log-probs the run needs, besides the policy's.
    roles: Mapping[Role, RoleModel]
    # PEFT folder of the adapters' initial values; None: they are drawn.
    adapter_folder: str | None = None
    # The model's name in an export of adapters; None: `model_path`.
    base_name: str | None = None
    # Parts that checkpoints copy to the host.
    copies: Copies = "nothing"
