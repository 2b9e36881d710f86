"""A model besides the policy in the trainer's ranks: frozen, sharded like the policy, of any architecture."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from rlctl.models.derive import load_facts, table_of
from rlctl.models.hf_folder import check_tied
from rlctl.models.meta_model import skeleton
from rlctl.preflight.declared_columns import Role
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.training.fsdp.model import build_policy, check_restarts, local
from rlctl.training.offload import OffloadedTensors, select_movable
from rlctl.training.spec import TrainerSpec


class ResidentModel:
    """A frozen model of a role, in the compute dtype. On GPUs it is on the host between its uses."""

    def __init__(
        self,
        folder: Path,
        section: TrainerSettings,
        device: torch.device,
        dtype: torch.dtype,
        mesh: DeviceMesh,
        temperature: float,
    ) -> None:
        """Read this rank's shard from a Hugging Face folder. All ranks call together.

        section: settings of the policy's trainer. Raises the errors of `build_policy`.
        """
        facts = load_facts(folder)
        lm = skeleton(folder, device, facts.sizes.one_sequence_a_row is None)
        table = table_of(lm, folder)
        check_tied(folder, table, facts)
        self.model = build_policy(
            lm,
            facts=facts,
            table=table,
            folder=folder,
            section=replace(section, activation_checkpointing=False, adapters=None),
            dtype=dtype,
            mesh=mesh,
            temperature=temperature,
            frozen=True,
        )
        if facts.kinds.states or facts.sizes.one_sequence_a_row:
            check_restarts(self.model, device, dtype)
        tensors = chain(self.model.lm.parameters(), self.model.lm.buffers())
        self._weights = OffloadedTensors(select_movable(map(local, tensors)), frozen=True)
        self._weights.move("host")

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the weights on the device within the block."""
        self._weights.move("device")
        self._weights.wait()
        try:
            yield
        finally:
            self._weights.move("host")


def build_residents(
    spec: TrainerSpec, device: torch.device, dtype: torch.dtype, mesh: DeviceMesh
) -> dict[Role, ResidentModel]:
    """Return role -> model of each resident role of a rank. All ranks call together."""
    residents = {}
    for role, model in spec.roles.items():
        if model.place == "resident":
            residents[role] = ResidentModel(
                Path(model.folder),
                section=spec.config,
                device=device,
                dtype=dtype,
                mesh=mesh,
                temperature=spec.temperature,
            )
    return residents
