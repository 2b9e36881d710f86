"""Facts of torch FSDP2: weights, gradients and optimizer state are sharded over all ranks."""

from rlctl.config.schema import TrainerSection
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.backend import FLOAT32, Backend, ShardCounts, State, StateBytes
from rlctl.preflight.parallel_layout import Layout


class FsdpBackend(Backend):
    """torch FSDP2. It trains transformers' own layers on any number of ranks, and adds no keys."""

    shard_name, has_layouts, trains_adapters = "rank", False, True

    def layout(self, trainer: TrainerSection) -> Layout:
        return Layout(trainer.num_ranks, tensor=1, pipeline=1, context=1, expert=1)

    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        ranks = trainer.num_ranks
        return ShardCounts(1, 1, ranks, ranks, ranks)

    def states(self, trainer: TrainerSection, sizes: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return float32 masters and AdamW's two moments, exactly."""
        shared = self.shard_counts(trainer)
        weights, sharded = shared.of(sizes), -(-sizes.parameters // shared.optimizer)
        return {
            "parameters": StateBytes("weights, float32", weights * FLOAT32),
            "gradients": StateBytes("gradients", weights * FLOAT32),
            "optimizer": StateBytes("AdamW moments", 2 * sharded * FLOAT32),
        }

    def gathers_layers(self, trainer: TrainerSection, size: int) -> bool:
        """Return True unless one rank computes in float32: its shard is the layer."""
        return trainer.num_ranks > 1 or size != FLOAT32

    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        return f"it takes {-(-peak * trainer.num_ranks // capacity)} ranks at least"


BACKEND = FsdpBackend()
