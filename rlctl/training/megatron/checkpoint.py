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

from rlctl.training.megatron.mapping import Mapping, Part
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
    # Parameters that another rank, holding the same, answers for.
    mirrored: set[str]
    # A tensor of the optimizer -> the same in the memory where it is now, on the device or on the host.
    at_hand: Callable[[Tensor], Tensor]

    def piece(self, slot: OptimizerShard, kind: str) -> Tensor:
        """Return float32 [stop - start] of one slot: its main ("model") or a moment."""
        return self.at_hand(slot.main if kind == "model" else slot.state[kind])


def saved(stage: Stage, updates: int, moments: bool) -> dict[str, TensorShard]:
    """Return weights, and moments and step counts if asked for, as this rank writes them: copies on the host."""
    kinds = KINDS if moments else KINDS[:1]
    shards = {kind: _merged_shards(_own_parts(stage, kind), stage.mapping) for kind in kinds}
    state = {f"{kind}.{name}": shard for kind, found in shards.items() for name, shard in found.items()}
    # Several ranks may have parts of a tensor: one has its begin.
    steps = [name for name, shard in shards["model"].items() if moments and not any(shard.start)]
    return state | {f"step.{name}": TensorShard.whole(torch.tensor(float(updates))) for name in steps}


def load(folder: Path, stage: Stage, updates: int) -> None:
    """Read a checkpoint of either backend, on any layout. Raises OSError."""
    for kind in KINDS:
        _load_kind(folder, stage, kind)
    for slot in stage.optimizer.slots.values():
        slot.state["step"].fill_(float(updates))
    stage.optimizer.publish(lambda slot: stage.piece(slot, "model"))


def _load_kind(folder: Path, stage: Stage, kind: str) -> None:
    held = {name: p for name, p in stage.parameters.items() if p in stage.optimizer.slots}
    values = {name: torch.empty(p.shape, dtype=torch.float32) for name, p in held.items()}
    parts = [part for name, value in values.items() for part in stage.mapping.parts(name, value)]
    shards = _merged_shards(parts, stage.mapping)
    load_shards(folder, {f"{kind}.{name}": shard for name, shard in shards.items()})
    for part in parts:
        name, _, start = stage.mapping.fused(part)
        part.view.copy_(_within(shards[name], start, part.view))
    for name, parameter in held.items():
        slot = stage.optimizer.slots[parameter]
        stage.piece(slot, kind).copy_(values[name].view(-1)[slot.start : slot.stop])


def _own_parts(stage: Stage, kind: str) -> Iterator[Part]:
    """Yield the parts that this rank writes, on the host.

    Ranks share parameters out by tensors of the checkpoint. A layer's experts are one such tensor, so one rank writes
    all that are here.
    """
    tensors = {
        name: stage.mapping.fused(stage.mapping.parts(name, p.detach())[0])[0] for name, p in stage.parameters.items()
    }
    numbers = {tensor: number for number, tensor in enumerate(dict.fromkeys(tensors.values()))}
    for name, parameter in stage.parameters.items():
        group = stage.optimizer.group(parameter)
        whole = _gathered(stage, parameter, kind, group)
        own = numbers[tensors[name]] % dist.get_world_size(group) == dist.get_rank(group)
        if own and name not in stage.mirrored:
            yield from stage.mapping.parts(name, whole.cpu())


def _gathered(stage: Stage, parameter: nn.Parameter, kind: str, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' pieces together: float32, of the parameter's shape, on its device."""
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
    slot = stage.optimizer.slots.get(parameter)
    if slot is not None:
        whole[slot.start : slot.stop].copy_(stage.piece(slot, kind))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(whole, group=group)
    return whole.view(parameter.shape)


def _merged_shards(parts: Iterable[Part], mapping: Mapping) -> dict[str, TensorShard]:
    """Return one shard a tensor, of all its parts that are here; experts of a layer are fused, as in memory."""
    by_name: dict[str, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]] = {}
    for part in parts:
        name, shape, start = mapping.fused(part)
        by_name.setdefault(name, []).append((shape, start, part.view))
    return {name: _shard(found) for name, found in by_name.items()}


def _shard(found: list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]) -> TensorShard:
    shape = found[0][0]
    extents = [(start, (1,) * (len(shape) - view.ndim) + tuple(view.shape)) for _, start, view in found]
    low = tuple(min(start[d] for start, _ in extents) for d in range(len(shape)))
    high = tuple(max(start[d] + size[d] for start, size in extents) for d in range(len(shape)))
    shard = TensorShard(shape, low, torch.empty([stop - begin for begin, stop in zip(low, high)], dtype=torch.float32))
    for _, start, view in found:
        _within(shard, start, view).copy_(view)
    return shard


def _within(shard: TensorShard, start: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the view of a shard that is the part at `start`, of the shape of `like`."""
    size = (1,) * (len(shard.shape) - like.ndim) + tuple(like.shape)
    begin = [at - low for at, low in zip(start, shard.start)]
    return shard.tensor[tuple(slice(b, b + n) for b, n in zip(begin, size))].view(like.shape)
