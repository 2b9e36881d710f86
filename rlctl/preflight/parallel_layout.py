"""How the trainer's ranks share the work out: the sizes of the parallel groups, and who trains which shard of a batch.

Plain: checks, plan, driver and ranks all read it here. A batch is split over data-parallel shards, never over ranks:
the ranks of a shard train the same sequences together. Ranks stand in Megatron-core's order, `tp-cp-ep-dp-pp`, tensor
fastest: rank = tensor + T * (context + C * (data + D * pipeline)). Expert groups cut the ranks of a pipeline stage a
second time and have no part in that.
"""

from dataclasses import dataclass

from rlctl.config.schema import TrainerSection


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


def layout(trainer: TrainerSection) -> Layout:
    """FSDP shards weights over all ranks and splits a batch over all of them."""
    if trainer.backend == "fsdp":
        return Layout(trainer.num_ranks, tensor=1, pipeline=1, context=1, expert=1)
    sizes = trainer.megatron
    return Layout(
        trainer.num_ranks,
        tensor=sizes.tensor_model_parallel_size,
        pipeline=sizes.pipeline_model_parallel_size,
        context=sizes.context_parallel_size,
        expert=sizes.expert_model_parallel_size,
        sequence=sizes.sequence_parallel,
    )


def hosted_share(trainer: TrainerSection) -> float:
    """Of the parameters, whose optimizer state lives on the host and is updated there."""
    own = trainer.megatron
    if trainer.backend == "fsdp" or not own.optimizer_cpu_offload:
        return 0.0
    return 1.0 if own.optimizer_offload_fraction is None else own.optimizer_offload_fraction


def cpu_offload_problem(dtype: str) -> str | None:
    """Why Megatron-core's CPU optimizer cannot update weights of `dtype`, or None; what `auto` means, the device says.

    Under the distributed optimizer float32 weights have no main copy: their shards are views, which torch's optimizers
    refuse (`can't optimize a non-leaf Tensor`, megatron-core 0.16.1).
    """
    if dtype != "float32":
        return None
    return "needs trainer.dtype=bfloat16: Megatron-core's CPU optimizer fails on shards of float32 weights"
