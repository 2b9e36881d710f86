"""Saving and loading of a Megatron rank's state, in the names and the format of FSDP checkpoints.

Each backend can therefore resume the other's checkpoints. Saved weights are the float32 main weights of the optimizer.
The distributed optimizer gives each rank a flat piece of a parameter. To save, the ranks join the pieces of one
parameter after the other, and each rank writes some of the whole parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlctl.training.megatron.mapping import Mapping, Part, Shape
from rlctl.training.megatron.optimizer import MOMENTS, Optimizer, OptimizerShard
from rlctl.training.rank_checkpoint import TensorShard
from rlctl.training.sharded_checkpoint import load_shards

KINDS = ("model", *MOMENTS)


@dataclass(frozen=True)
class Stage:
    """The parameters and optimizer state of this rank's pipeline stage."""

    parameters: dict[str, nn.Parameter]
    mapping: Mapping
    optimizer: Optimizer
    # Names of parameters that this rank does not write, because another rank has the same parameter and writes it.
    mirrored: set[str]
    # Returns an optimizer tensor where its values are now: on the device, or its copy on the host while offloaded.
    at_hand: Callable[[Tensor], Tensor]

    def piece(self, slot: OptimizerShard, kind: str) -> Tensor:
        """Return this rank's elements of a parameter's main weights ("model") or of one moment.

        The result is float32 [stop - start].
        """
        return self.at_hand(slot.main if kind == "model" else slot.state[kind])


def copy_shards(stage: Stage, updates: int, moments: bool) -> dict[str, TensorShard]:
    """Return the shards that this rank writes, by checkpoint name, copied to host memory.

    The shards are weights and, if `moments` is true, AdamW's moments and step counts. All ranks call together.
    """
    weights = _merge_parts(_written_parts(stage, "model"), stage.mapping)
    state = {f"model.{name}": shard for name, shard in weights.items()}
    if not moments:
        return state
    for kind in MOMENTS:
        shards = _merge_parts(_written_parts(stage, kind), stage.mapping)
        state |= {f"{kind}.{name}": shard for name, shard in shards.items()}
    for name, shard in weights.items():
        # Several ranks may have shards of one tensor. The rank whose shard starts at index 0 writes the step count.
        if not any(shard.start):
            state[f"step.{name}"] = TensorShard.from_whole(torch.tensor(float(updates)))
    return state


def load(folder: Path, stage: Stage, updates: int) -> None:
    """Read weights and optimizer state from a checkpoint of either backend and of any number of ranks.

    updates: number of updates made so far, which every parameter gets as its step count. Raises OSError.
    """
    for kind in KINDS:
        _load_kind(folder, stage, kind)
    for slot in stage.optimizer.slots.values():
        slot.state["step"].fill_(float(updates))
    stage.optimizer.publish(lambda slot: stage.piece(slot, "model"))


def _load_kind(folder: Path, stage: Stage, kind: str) -> None:
    whole_tensors = {}
    parts: list[Part] = []
    for name, parameter in stage.parameters.items():
        if parameter in stage.optimizer.slots:
            whole_tensors[name] = torch.empty(parameter.shape, dtype=torch.float32)
            parts += stage.mapping.parts(name, whole_tensors[name])
    shards = _merge_parts(parts, stage.mapping)
    load_shards(folder, {f"{kind}.{name}": shard for name, shard in shards.items()})
    for part in parts:
        fused_name, _, start = stage.mapping.fuse(part)
        part.view.copy_(_view_part(shards[fused_name], start, part.view))
    for name, whole_tensor in whole_tensors.items():
        slot = stage.optimizer.slots[stage.parameters[name]]
        stage.piece(slot, kind).copy_(whole_tensor.view(-1)[slot.start : slot.stop])


def _written_parts(stage: Stage, kind: str) -> Iterator[Part]:
    """Yield the parts that this rank writes, in host memory.

    The tensors of the checkpoint are dealt to the ranks in turn. A layer's experts are one tensor of the checkpoint, so
    the same rank writes all experts of the layer that this stage holds.
    """
    # Name of a checkpoint tensor -> its number, in the order in which parameters first need the tensor.
    numbers: dict[str, int] = {}
    for name, parameter in stage.parameters.items():
        first_part = stage.mapping.parts(name, parameter.detach())[0]
        fused_name, _, _ = stage.mapping.fuse(first_part)
        number = numbers.setdefault(fused_name, len(numbers))
        group = stage.optimizer.group(parameter)
        # A collective: all ranks of the group call it, also those that do not write this parameter.
        whole_tensor = _gather_pieces(stage, parameter, kind, group)
        is_writer = number % dist.get_world_size(group) == dist.get_rank(group)
        if is_writer and name not in stage.mirrored:
            yield from stage.mapping.parts(name, whole_tensor.cpu())


def _gather_pieces(stage: Stage, parameter: nn.Parameter, kind: str, group: dist.ProcessGroup) -> Tensor:
    """Return the whole parameter, joined from all ranks' pieces: float32, on the parameter's device."""
    whole_tensor = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    slot = stage.optimizer.slots.get(parameter)
    if slot is not None:
        whole_tensor[slot.start : slot.stop].copy_(stage.piece(slot, kind))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(whole_tensor, group=group)
    return whole_tensor.view(parameter.shape)


def _merge_parts(parts: Iterable[Part], mapping: Mapping) -> dict[str, TensorShard]:
    """Return one shard for each tensor, merged from the given parts of the tensor.

    The experts of a layer are merged to one tensor, because FSDP has them as one tensor in memory.
    """
    shapes: dict[str, Shape] = {}
    # Name of a tensor -> (start in the tensor, view) of each part.
    parts_of: dict[str, list[tuple[Shape, Tensor]]] = {}
    for part in parts:
        name, shape, start = mapping.fuse(part)
        shapes[name] = shape
        parts_of.setdefault(name, []).append((start, part.view))
    return {name: _merge_tensor(shapes[name], tensor_parts) for name, tensor_parts in parts_of.items()}


def _merge_tensor(shape: Shape, parts: list[tuple[Shape, Tensor]]) -> TensorShard:
    """Return the smallest shard of a tensor of `shape` that contains all parts. parts: (start, view) of each."""
    starts = []
    ends = []
    for start, view in parts:
        starts.append(start)
        ends.append([begin + size for begin, size in zip(start, _extent(view, shape))])
    low = tuple(min(begins_of_axis) for begins_of_axis in zip(*starts))
    high = tuple(max(ends_of_axis) for ends_of_axis in zip(*ends))
    merged = torch.empty([end - begin for begin, end in zip(low, high)], dtype=torch.float32)
    shard = TensorShard(shape, low, merged)
    for start, view in parts:
        _view_part(shard, start, view).copy_(view)
    return shard


def _extent(view: Tensor, shape: Shape) -> Shape:
    """Return the size of a part along each axis of a tensor of `shape`.

    A view with fewer axes than the tensor has size 1 along the leading axes. For example, one expert's [rows, columns]
    in a tensor [experts, rows, columns].
    """
    return (1,) * (len(shape) - view.ndim) + tuple(view.shape)


def _view_part(shard: TensorShard, start: Shape, like: Tensor) -> Tensor:
    """Return the part of the shard that begins at `start` of the whole tensor, as a view of the shape of `like`."""
    box = []
    for begin, shard_begin, size in zip(start, shard.start, _extent(like, shard.shape)):
        box.append(slice(begin - shard_begin, begin - shard_begin + size))
    return shard.tensor[tuple(box)].view(like.shape)
