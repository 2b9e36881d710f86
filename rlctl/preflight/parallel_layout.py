"""How the trainer's ranks share the work out: the sizes of the parallel groups, and who trains which shard of a batch.

Plain: checks, plan, driver and ranks all read it here. A batch is split over data-parallel shards, never over ranks:
the ranks of a shard train the same sequences together. Ranks stand in Megatron-core's order, `tp-cp-ep-dp-pp`, tensor
fastest: rank = tensor + T * (context + C * (data + D * pipeline)). Expert groups cut the ranks of a pipeline stage a
second time and have no part in that.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """world: all ranks. tensor, pipeline, context, expert: sizes of the groups.

    sequence: sequence parallelism as configured; None: where there are several tensor ranks.
    """

    world: int
    tensor: int
    pipeline: int
    context: int
    expert: int
    sequence: bool | None = None

    @property
    def data(self) -> int:
        """Shards that a batch is split into."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def sequence_parallel(self) -> bool:
        """Whether tensor ranks share the tokens between matrices; Megatron-core refuses it for a single one."""
        return self.tensor > 1 and self.sequence is not False

    def shard_of(self, rank: int) -> int:
        """The shard of a batch that `rank` trains."""
        return rank // (self.tensor * self.context) % self.data

    @property
    def shards(self) -> list[int]:
        """The shard of each rank."""
        return [self.shard_of(rank) for rank in range(self.world)]

    def __str__(self) -> str:
        """`tensor 2 x pipeline 1 x context 1 x data 2, experts over 1`."""
        groups = f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context} x data {self.data}"
        return f"{groups}, experts over {self.expert}"
