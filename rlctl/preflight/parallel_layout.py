"""Parallel layouts of the trainer's ranks: group sizes, the batch shard of each rank, and the nearest valid layout.

Pure. Checks, plan, driver and ranks use it. A batch is split over data-parallel shards, never over ranks: all ranks of
a shard train the same sequences. Ranks are in Megatron-core's order, `tp-cp-ep-dp-pp`, where tensor changes fastest:
rank = tensor + T * (context + C * (data + D * pipeline)). Expert groups split the ranks of a pipeline stage
independently and do not appear in that formula.

The nearest layout has the same number of ranks and the smallest sum of |log(size / requested size)| over the groups.
Tensor ranks never split an expert (its tensor-parallel size is 1), so an expert's width need not be divisible.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rlctl.models.facts import ModelSizes

# Largest group size to propose while the model is not known, because few models have more heads or layers to split.
_LARGEST = 128
# Field of a `Layout` -> its config key.
KEYS = {
    "world": "trainer.num_ranks",
    "tensor": "trainer.megatron.tensor_model_parallel_size",
    "pipeline": "trainer.megatron.pipeline_model_parallel_size",
    "context": "trainer.megatron.context_parallel_size",
    "expert": "trainer.megatron.expert_model_parallel_size",
    "sequence": "trainer.megatron.sequence_parallel",
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel groups, and the total number of ranks."""

    # Number of all trainer ranks.
    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    # Sequence parallelism as configured; None: on if there are several tensor ranks.
    sequence: bool | None = None

    @property
    def data(self) -> int:
        """Number of data-parallel shards of a batch."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def sequence_parallel(self) -> bool:
        """True if tensor ranks split the tokens outside of matrix products. Megatron-core refuses this for one tensor
        rank.
        """
        return self.tensor > 1 and self.sequence is not False

    def shard_of(self, rank: int) -> int:
        """Return the shard of a batch that `rank` trains."""
        return rank // (self.tensor * self.context) % self.data

    @property
    def shards(self) -> list[int]:
        """Batch shard of each rank, indexed by rank."""
        return [self.shard_of(rank) for rank in range(self.world)]

    def __str__(self) -> str:
        """Return `tensor 2 x pipeline 1 x context 1 x data 2, experts over 1`."""
        groups = f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} x data {self.data}"
        return f"{groups}, experts over {self.expert}"


def find_clashes(layout: Layout, sizes: ModelSizes | None) -> Iterator[tuple[str, str]]:
    """Yield (field of the layout, its problem) for every contradiction."""
    ranks = layout.tensor * layout.pipeline * layout.context
    if layout.world % ranks:
        groups = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context}"
        yield "world", f"must be a multiple of {groups} = {ranks}, not {layout.world}"
    if sizes:
        yield from _tensor_clashes(layout.tensor, sizes)
        if sizes.layers % layout.pipeline:
            yield "pipeline", f"must divide the model's {sizes.layers} layers, not {layout.pipeline}"
        yield from _context_clashes(layout, sizes)
    yield from _expert_clashes(layout, sizes)


def nearest_layout(requested: Layout, sizes: ModelSizes | None, sequences: int | None = None) -> Layout:
    """Return the valid layout on the same number of ranks whose group sizes are nearest to `requested`.

    sequences: number trained in one update; each shard needs one. If they are too few for any layout of these ranks,
    the result has fewer ranks: with the requested group sizes, else with the nearest valid ones, else one rank per
    sequence.
    """
    working = [layout for layout in _candidates(requested, sizes) if _works(layout, sizes, sequences)]
    if working:
        return min(working, key=lambda layout: _distance(requested, layout))
    assert sequences is not None, "one rank a shard always works"
    for layout in (requested, nearest_layout(requested, sizes)):
        most_ranks = min(requested.world, sequences * layout.tensor * layout.pipeline * layout.context)
        unit = _rank_multiple(layout)
        smaller = replace(layout, world=most_ranks // unit * unit)
        if smaller.world and _works(smaller, sizes, sequences):
            return smaller
    return Layout(sequences, tensor=1, pipeline=1, context=1, expert=1, sequence=requested.sequence)


def suggest_layout(requested: Layout, sizes: ModelSizes | None, sequences: int | None) -> str:
    """Return the overrides for the nearest valid layout as `; try KEY=VALUE KEY=VALUE`."""
    nearest = nearest_layout(requested, sizes, sequences)
    overrides = []
    for name, key in KEYS.items():
        size = getattr(nearest, name)
        if size != getattr(requested, name):
            overrides.append(f"{key}={'null' if size is None else size}")
    return f"; try {' '.join(overrides)}"


def world_sizes(layout: Layout, sizes: ModelSizes | None, sequences: int | None) -> list[int]:
    """Return the nearest valid numbers of ranks, below and above, for the layout's group sizes."""
    unit = _rank_multiple(layout)
    below = layout.world // unit * unit
    counts = (below, below + unit)
    return [count for count in counts if count and _works(replace(layout, world=count), sizes, sequences)]


def _tensor_clashes(size: int, sizes: ModelSizes) -> Iterator[tuple[str, str]]:
    counts = {"attention heads": sizes.heads, "key-value heads": sizes.kv_heads}
    if sizes.sparse_layers < sizes.layers:
        counts["MLP columns (intermediate_size)"] = sizes.intermediate
    counts["tokens of vocabulary"] = sizes.vocab
    if uneven := [f"{count} {name}" for name, count in counts.items() if count % size]:
        problem = f"must divide the model's {' and '.join(uneven)}, not {size}"
        if size > sizes.kv_heads:
            most_ranks = math.gcd(*counts.values())
            problem += f": each rank needs a key-value head of its own, at most {most_ranks} ranks work"
        yield "tensor", problem


def _context_clashes(layout: Layout, sizes: ModelSizes) -> Iterator[tuple[str, str]]:
    """Yield clashes of the context size. In attention the context ranks exchange tokens for heads (Ulysses), so heads
    are split.
    """
    if sizes.heads % layout.tensor or sizes.kv_heads % layout.tensor:
        return
    heads = sizes.heads // layout.tensor
    kv_heads = sizes.kv_heads // layout.tensor
    size = layout.context
    if heads % size:
        yield "context", f"must divide the {heads} attention heads of a tensor rank, not {size}"
    elif kv_heads % size and size % kv_heads:
        problem = f"must divide the {kv_heads} key-value heads of a tensor rank or be a multiple of them, not {size}"
        yield "context", problem


def _expert_clashes(layout: Layout, sizes: ModelSizes | None) -> Iterator[tuple[str, str]]:
    size = layout.expert
    stage_ranks = layout.world // layout.pipeline
    if sizes and size > 1 and not sizes.sparse_layers:
        yield "expert", f"must be 1, not {size}: the model is dense, without experts"
        return
    uneven = []
    if sizes and sizes.sparse_layers and sizes.experts % size:
        uneven.append(f"the model's {sizes.experts} experts")
    if layout.world % layout.pipeline == 0 and stage_ranks % size:
        uneven.append(f"the {stage_ranks} ranks of a pipeline stage")
    if uneven:
        yield "expert", f"must divide {' and '.join(uneven)}, not {size}"
    has_experts = sizes.sparse_layers > 0 if sizes else size > 1
    if has_experts and layout.tensor > 1 and not layout.sequence_parallel:
        problem = f"must not be false: Megatron-core trains experts on {layout.tensor} tensor ranks only with it"
        yield "sequence", problem


def _works(layout: Layout, sizes: ModelSizes | None, sequences: int | None) -> bool:
    enough = sequences is None or layout.data <= sequences
    return enough and next(find_clashes(layout, sizes), None) is None


def _candidates(requested: Layout, sizes: ModelSizes | None) -> Iterator[Layout]:
    """Yield every split of the ranks into groups, with sequence parallelism as requested and with its default."""
    world = requested.world
    small_divisors = [count for count in range(1, math.isqrt(world) + 1) if world % count == 0]
    divisors = small_divisors + [world // count for count in reversed(small_divisors) if count * count != world]
    may_have_experts = sizes is None or sizes.sparse_layers > 0
    # Impossible sizes are removed before the product is formed: thousands of ranks may have a hundred divisors, while a
    # model has few heads and layers.
    if sizes is None:
        divisors = [count for count in divisors if count <= _LARGEST]
        tensors = stages = contexts = divisors
    else:
        tensors = [count for count in divisors if next(_tensor_clashes(count, sizes), None) is None]
        stages = [count for count in divisors if sizes.layers % count == 0]
        contexts = [count for count in divisors if sizes.heads % count == 0]
    for tensor, pipeline, context in product(tensors, stages, contexts):
        if world % (tensor * pipeline * context):
            continue
        experts = [count for count in divisors if world // pipeline % count == 0] if may_have_experts else [1]
        for expert, sequence in product(experts, dict.fromkeys((requested.sequence, None))):
            yield Layout(world, tensor=tensor, pipeline=pipeline, context=context, expert=expert, sequence=sequence)


def _distance(requested: Layout, layout: Layout) -> tuple[float, bool, tuple[int, ...]]:
    """Return a sort key: distance, whether `sequence` differs, then larger sizes first in the order tensor, pipeline,
    context, expert.
    """
    names = ("tensor", "pipeline", "context", "expert")
    ratios = [abs(math.log(getattr(layout, name) / getattr(requested, name))) for name in names]
    sizes = tuple(-getattr(layout, name) for name in names)
    return round(sum(ratios), 9), layout.sequence != requested.sequence, sizes


def _rank_multiple(layout: Layout) -> int:
    """Return the divisor that every valid number of ranks has, so that batches and experts split evenly."""
    return math.lcm(layout.tensor * layout.pipeline * layout.context, layout.pipeline * layout.expert)
