"""A Megatron rank's state under the same names and in the same form as FSDP's, so that either resumes the other's.

Weights are the float32 ones that are updated. The distributed optimizer gives each rank flat pieces of parameters;
they are put together over its ranks, one parameter at a time, and each rank writes its share of the parameters.
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
    """The state that this rank holds."""

    parameters: dict[str, nn.Parameter]
    mapping: Mapping
    optimizer: Optimizer
    # Parameters that another rank, which holds the same, writes.
    mirrored: set[str]
    # A tensor of the optimizer -> the same in the memory where it is now, on the device or on the host.
    at_hand: Callable[[Tensor], Tensor]

    def piece(self, slot: OptimizerShard, kind: str) -> Tensor:
        """Return float32 [stop - start] of one slot: its main ("model") or a moment."""
        return self.at_hand(slot.main if kind == "model" else slot.state[kind])


def copy_shards(stage: Stage, updates: int, moments: bool) -> dict[str, TensorShard]:
    """Return weights, and with `moments` moments and step counts, as this rank writes them: copies on the host."""
    weights = _merge_parts(_written_parts(stage, "model"), stage.mapping)
    state = {f"model.{name}": shard for name, shard in weights.items()}
    if not moments:
        return state
    for kind in MOMENTS:
        shards = _merge_parts(_written_parts(stage, kind), stage.mapping)
        state |= {f"{kind}.{name}": shard for name, shard in shards.items()}
    for name, shard in weights.items():
        # Several ranks may have parts of a tensor. The rank with its begin writes the step count.
        if not any(shard.start):
            state[f"step.{name}"] = TensorShard.from_whole(torch.tensor(float(updates)))
    return state


def load(folder: Path, stage: Stage, updates: int) -> None:
    """Read a checkpoint of either backend, on any layout. Raises OSError."""
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
    """Yield the parts that this rank writes, on the host.

    Ranks share parameters out by tensors of the checkpoint. A layer's experts are one such tensor, so one rank writes
    all that are here.
    """
    # Number of each tensor of the checkpoint, in the order of its first parameter.
    numbers: dict[str, int] = {}
    for name, parameter in stage.parameters.items():
        first_part = stage.mapping.parts(name, parameter.detach())[0]
        fused_name, _, _ = stage.mapping.fuse(first_part)
        number = numbers.setdefault(fused_name, len(numbers))
        group = stage.optimizer.group(parameter)
        # All ranks of the group take part in the collective, whoever writes.
        whole_tensor = _gather_pieces(stage, parameter, kind, group)
        is_writer = number % dist.get_world_size(group) == dist.get_rank(group)
        if is_writer and name not in stage.mirrored:
            yield from stage.mapping.parts(name, whole_tensor.cpu())


def _gather_pieces(stage: Stage, parameter: nn.Parameter, kind: str, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' pieces together: float32, of the parameter's shape, on its device."""
    whole_tensor = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    slot = stage.optimizer.slots.get(parameter)
    if slot is not None:
        whole_tensor[slot.start : slot.stop].copy_(stage.piece(slot, kind))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(whole_tensor, group=group)
    return whole_tensor.view(parameter.shape)


def _merge_parts(parts: Iterable[Part], mapping: Mapping) -> dict[str, TensorShard]:
    """Return one shard a tensor, of all its parts that are here; experts of a layer are fused, as in memory."""
    shapes: dict[str, Shape] = {}
    # Name -> the start and the view of each part.
    parts_of: dict[str, list[tuple[Shape, Tensor]]] = {}
    for part in parts:
        name, shape, start = mapping.fuse(part)
        shapes[name] = shape
        parts_of.setdefault(name, []).append((start, part.view))
    return {name: _merge_tensor(shapes[name], tensor_parts) for name, tensor_parts in parts_of.items()}


def _merge_tensor(shape: Shape, parts: list[tuple[Shape, Tensor]]) -> TensorShard:
    """Return the smallest shard with all parts. parts: the start and the view of each."""
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
    """Return the extent of a part in a tensor of `shape`, of whose first axes the part may have one index."""
    return (1,) * (len(shape) - view.ndim) + tuple(view.shape)


def _view_part(shard: TensorShard, start: Shape, like: Tensor) -> Tensor:
    """Return the view of a shard that is the part at `start`, of the shape of `like`."""
    box = []
    for begin, shard_begin, size in zip(start, shard.start, _extent(like, shard.shape)):
        box.append(slice(begin - shard_begin, begin - shard_begin + size))
    return shard.tensor[tuple(box)].view(like.shape)
