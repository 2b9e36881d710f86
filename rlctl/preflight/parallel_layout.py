"""Layouts of the trainer's ranks: sizes of the parallel groups, the shard of each rank, the nearest layout that works.

Pure. Checks, plan, driver and ranks read it. A batch is split over data-parallel shards, never over ranks: the ranks of
a shard train the same sequences together. Ranks are in Megatron-core's order, `tp-cp-ep-dp-pp`, tensor fastest:
rank = tensor + T * (context + C * (data + D * pipeline)). Expert groups cut the ranks of a pipeline stage a second time
and have no part in that.

Nearest: the same number of ranks, and the smallest sum of the logarithms of the sizes' ratios. Experts are never cut by
tensor ranks (their own tensor-parallel size is 1), so that their width is free.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rlctl.models.facts import ModelSizes

# Largest size proposed for a model that is not known: no model has more heads, or layers, to share.
_LARGEST = 128
# Config keys of the fields of a layout.
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
    """Sizes of the parallel groups."""

    # All ranks.
    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    # Sequence parallelism as configured; None: on where there are several tensor ranks.
    sequence: bool | None = None

    @property
    def data(self) -> int:
        """Number of shards that a batch is split into."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def sequence_parallel(self) -> bool:
        """True if tensor ranks share the tokens between matrices. Megatron-core refuses it for a single one."""
        return self.tensor > 1 and self.sequence is not False

    def shard_of(self, rank: int) -> int:
        """Return the shard of a batch that `rank` trains."""
        return rank // (self.tensor * self.context) % self.data

    @property
    def shards(self) -> list[int]:
        """Shard of each rank."""
        return [self.shard_of(rank) for rank in range(self.world)]

    def __str__(self) -> str:
        """Return `tensor 2 x pipeline 1 x context 1 x data 2, experts over 1`."""
        groups = f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} x data {self.data}"
        return f"{groups}, experts over {self.expert}"


def clashes(asked: Layout, sizes: ModelSizes | None) -> Iterator[tuple[str, str]]:
    """Yield (field of the layout, its problem) for every contradiction."""
    ranks = asked.tensor * asked.pipeline * asked.context
    if asked.world % ranks:
        groups = f"tensor {asked.tensor} x pipeline {asked.pipeline} x context {asked.context}"
        yield "world", f"must be a multiple of {groups} = {ranks}, not {asked.world}"
    if sizes:
        yield from _tensor(asked.tensor, sizes)
        if sizes.layers % asked.pipeline:
            yield "pipeline", f"must divide the model's {sizes.layers} layers, not {asked.pipeline}"
        yield from _context(asked, sizes)
    yield from _experts(asked, sizes)


def nearest(asked: Layout, sizes: ModelSizes | None, sequences: int | None = None) -> Layout:
    """Return the layout without contradictions on as many ranks whose sizes are closest to `asked`.

    sequences: number trained in one update, at least one a shard. Where they are too few for any layout of these ranks,
    the answer has the requested sizes, or else the nearest, on the number of ranks that they feed; at worst it has a
    rank a sequence.
    """
    working = [each for each in _candidates(asked, sizes) if _works(each, sizes, sequences)]
    if working:
        return min(working, key=lambda each: _distance(asked, each))
    assert sequences is not None, "one rank a shard always works"
    for shape in (asked, nearest(asked, sizes)):
        most = min(asked.world, sequences * shape.tensor * shape.pipeline * shape.context)
        fewer = replace(shape, world=most // _multiple(shape) * _multiple(shape))
        if fewer.world and _works(fewer, sizes, sequences):
            return fewer
    return Layout(sequences, 1, 1, 1, 1, asked.sequence)


def instead(asked: Layout, sizes: ModelSizes | None, sequences: int | None) -> str:
    """Return `; try KEY=VALUE KEY=VALUE`, the overrides for the nearest working layout."""
    better = nearest(asked, sizes, sequences)
    pairs = [(key, getattr(asked, name), getattr(better, name)) for name, key in KEYS.items()]
    changes = [f"{key}={'null' if new is None else new}" for key, old, new in pairs if new != old]
    return f"; try {' '.join(changes)}"


def world_sizes(asked: Layout, sizes: ModelSizes | None, sequences: int | None) -> list[int]:
    """Return the nearest numbers of ranks, below and above, that work with the sizes as they are."""
    below = asked.world // (multiple := _multiple(asked)) * multiple
    counts = (below, below + multiple)
    return [count for count in counts if count and _works(replace(asked, world=count), sizes, sequences)]


def _tensor(size: int, sizes: ModelSizes) -> Iterator[tuple[str, str]]:
    cut = {"attention heads": sizes.heads, "key-value heads": sizes.kv_heads}
    if sizes.sparse_layers < sizes.layers:
        cut["MLP columns (intermediate_size)"] = sizes.intermediate
    cut["tokens of vocabulary"] = sizes.vocab
    if uneven := [f"{count} {name}" for name, count in cut.items() if count % size]:
        what = f"must divide the model's {' and '.join(uneven)}, not {size}"
        if size > sizes.kv_heads:
            what += f": each rank needs a key-value head of its own, at most {math.gcd(*cut.values())} ranks work"
        yield "tensor", what


def _context(asked: Layout, sizes: ModelSizes) -> Iterator[tuple[str, str]]:
    """Check Ulysses: for attention, the context ranks exchange tokens for heads."""
    if sizes.heads % asked.tensor or sizes.kv_heads % asked.tensor:
        return
    heads, keys, size = sizes.heads // asked.tensor, sizes.kv_heads // asked.tensor, asked.context
    if heads % size:
        yield "context", f"must divide the {heads} attention heads of a tensor rank, not {size}"
    elif keys % size and size % keys:
        yield "context", f"must divide the {keys} key-value heads of a tensor rank or be a multiple of them, not {size}"


def _experts(asked: Layout, sizes: ModelSizes | None) -> Iterator[tuple[str, str]]:
    size, stage = asked.expert, asked.world // asked.pipeline
    wrong = []
    if sizes and size > 1 and not sizes.sparse_layers:
        yield "expert", f"must be 1, not {size}: the model is dense, without experts"
        return
    if sizes and sizes.sparse_layers and sizes.experts % size:
        wrong.append(f"the model's {sizes.experts} experts")
    if asked.world % asked.pipeline == 0 and stage % size:
        wrong.append(f"the {stage} ranks of a pipeline stage")
    if wrong:
        yield "expert", f"must divide {' and '.join(wrong)}, not {size}"
    mixture = sizes.sparse_layers > 0 if sizes else size > 1
    if mixture and asked.tensor > 1 and not asked.sequence_parallel:
        yield "sequence", f"must not be false: Megatron-core trains experts on {asked.tensor} tensor ranks only with it"


def _works(each: Layout, sizes: ModelSizes | None, sequences: int | None) -> bool:
    enough = sequences is None or each.data <= sequences
    return enough and next(clashes(each, sizes), None) is None


def _candidates(asked: Layout, sizes: ModelSizes | None) -> Iterator[Layout]:
    """Yield every way to cut the ranks, with sequence parallelism as asked for and as it is best."""
    world = asked.world
    small = [count for count in range(1, math.isqrt(world) + 1) if world % count == 0]
    divisors = small + [world // count for count in reversed(small) if count * count != world]
    mixture = sizes is None or sizes.sparse_layers
    # Thousands of ranks have a hundred divisors, a model has few heads and layers: impossible sizes are left out before
    # the product is made.
    if sizes is None:
        tensors = stages = contexts = divisors = [count for count in divisors if count <= _LARGEST]
    else:
        tensors = [count for count in divisors if next(_tensor(count, sizes), None) is None]
        stages = [count for count in divisors if sizes.layers % count == 0]
        contexts = [count for count in divisors if sizes.heads % count == 0]
    for tensor, pipeline, context in product(tensors, stages, contexts):
        if world % (tensor * pipeline * context):
            continue
        experts = [count for count in divisors if world // pipeline % count == 0] if mixture else [1]
        for expert, sequence in product(experts, dict.fromkeys((asked.sequence, None))):
            yield Layout(world, tensor, pipeline, context, expert, sequence)


def _distance(asked: Layout, each: Layout) -> tuple[float, bool, tuple[int, ...]]:
    """Return a key to sort by. Of two layouts as near, the one that keeps the earlier size comes first."""
    names = ("tensor", "pipeline", "context", "expert")
    ratios = [abs(math.log(getattr(each, name) / getattr(asked, name))) for name in names]
    sizes = tuple(-getattr(each, name) for name in names)
    return round(sum(ratios), 9), each.sequence != asked.sequence, sizes


def _multiple(asked: Layout) -> int:
    """Return the number that any number of ranks must be a multiple of, for batches and for experts."""
    return math.lcm(asked.tensor * asked.pipeline * asked.context, asked.pipeline * asked.expert)
