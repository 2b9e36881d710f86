"""Shards of a rank's weights and optimizer state, for refits, exports and checkpoints."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlctl.models.parameter_table import ParameterTable
from rlctl.refit.weight_source import Shard
from rlctl.training.fsdp.mesh import shard_start
from rlctl.training.fsdp.model import Named, local
from rlctl.training.offload import OffloadManager
from rlctl.training.rank_checkpoint import TensorShard


@dataclass(frozen=True)
class RankShards:
    """Shards of a rank, in their own memory."""

    # Tensors that are sent and exported, and the trained parameters.
    sent_tensors: Named
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    state: OffloadManager
    table: ParameterTable
    # Ranks of a replica; and the group of ranks with the same shards, None with one replica.
    mesh: DeviceMesh
    replicas: dist.ProcessGroup | None
    # True on rank 0.
    is_first: bool

    def sent(self) -> list[Shard]:
        """Return the shards under Hugging Face names."""
        shards = []
        for name, tensor in self.sent_tensors.items():
            shard = local(tensor).detach()
            for row in self.table.rows_of(name):
                if part := row.part(shard, shard_start(tensor, self.mesh)):
                    start, view = part
                    shards.append(Shard(row.name, start, view))
        return shards

    def written_state(self, *, moments: bool) -> dict[str, TensorShard]:
        """Return the shards that this rank writes, by their names in a checkpoint. moments: with optimizer state."""
        names = list(self.parameters)
        if self.replicas is not None:
            # Replicas hold the same shards: each writes some parameters.
            names = names[dist.get_rank(self.replicas) :: self.replicas.size()]
        saved = self.live(names)
        if not moments:
            return {name: shard for name, shard in saved.items() if name.startswith("model.")}
        if self.mesh.get_local_rank() > 0:
            # Every rank of a replica has whole step counts. The first rank writes them.
            return {name: shard for name, shard in saved.items() if not name.startswith("step.")}
        return saved

    def frozen(self) -> dict[str, TensorShard]:
        """Return the frozen parameters and the buffers that this rank writes into an export."""
        # Frozen parameters are cut like trained ones. The first replica writes them, its first rank the buffers.
        if self.replicas is not None and dist.get_rank(self.replicas) > 0:
            return {}
        saved = {}
        for name, tensor in self.sent_tensors.items():
            if name in self.parameters:
                continue
            if isinstance(tensor, DTensor):
                shard = local(tensor.detach())
                if shard.numel():
                    saved[name] = TensorShard(tuple(tensor.shape), shard_start(tensor, self.mesh), shard)
            elif self.is_first:
                saved[name] = TensorShard.from_whole(tensor)
        return saved

    def live(self, names: Iterable[str]) -> dict[str, TensorShard]:
        """Return this rank's live shards of parameters and their optimizer state, which a load fills.

        Names are those of a checkpoint, such as exp_avg.NAME.
        """
        shards = {}
        for name in names:
            parameter = self.parameters[name]
            for kind, tensor in {"model": parameter.detach(), **self.optimizer.state[parameter]}.items():
                live = self.state.at_hand(local(tensor))
                if live.numel():
                    shards[f"{kind}.{name}"] = TensorShard(tuple(tensor.shape), shard_start(tensor, self.mesh), live)
        return shards
