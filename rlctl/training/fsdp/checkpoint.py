"""Saving and loading a trainer's state through torch DCP, as safetensors: nothing is pickled.

Every rank writes its shards into one file; any number of ranks reads the slices it needs from all of them.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlctl.training import sharded_checkpoint
from rlctl.training.fsdp.optimizer import Named
from rlctl.training.offload import OffloadManager


def save(
    folder: Path, parameters: Named, optimizer: torch.optim.Optimizer, offload_manager: OffloadManager, updates: int
) -> None:
    """Write weights, moments, the number of updates made and this rank's RNG state into `folder`.

    Moments are written from where they stand: engines may hold the device's memory. Raises OSError with the first
    rank's reason, a full disk say.
    """
    state = _state(parameters, optimizer, offload_manager) | {
        "updates": torch.tensor(updates),
        sharded_checkpoint.rng_name(dist.get_rank()): torch.get_rng_state(),
    }
    sharded_checkpoint.write(folder, state)


def load(folder: Path, parameters: Named, optimizer: torch.optim.Optimizer, offload_manager: OffloadManager) -> int:
    """Read what `save` wrote, on any number of ranks; returns the number of updates.

    A rank that did not exist when the state was saved takes rank 0's RNG state. Raises FileNotFoundError if
    `folder` holds no state, OSError for what cannot be read.
    """
    rng_key = sharded_checkpoint.saved_rng_name(folder, dist.get_rank())
    updates, rng = torch.tensor(0), torch.zeros_like(torch.get_rng_state())
    state = _state(parameters, optimizer, offload_manager) | {"updates": updates, rng_key: rng}
    sharded_checkpoint.fill(folder, state)
    torch.set_rng_state(rng)
    return int(updates)


def _state(parameters: Named, optimizer: torch.optim.Optimizer, offload_manager: OffloadManager) -> dict[str, Tensor]:
    """Live tensors by name: `load` fills them where they lie."""
    offload_manager.wait()
    offload_manager.settle()
    weights = {f"model.{name}": p.detach() for name, p in parameters.items()}
    moments = {
        f"{key}.{name}": _at_hand(tensor, offload_manager)
        for name, p in parameters.items()
        for key, tensor in optimizer.state[p].items()
    }
    return weights | moments


def _at_hand(tensor: Tensor, offload_manager: OffloadManager) -> Tensor:
    """The same tensor, its shard in host memory if that is where it stands."""
    if not isinstance(tensor, DTensor):
        return offload_manager.at_hand(tensor)
    shard = tensor.to_local()
    found = offload_manager.at_hand(shard)
    return tensor if found is shard else DTensor(found, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
