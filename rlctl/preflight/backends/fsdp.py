"""Facts of torch FSDP2: weights, gradients and optimizer state are sharded over all ranks."""

from rlctl.config.schema import TrainerSection
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.backend import FLOAT32, Found, ShardCounts, State, StateBytes
from rlctl.preflight.parallel_layout import Layout


class FsdpBackend:
    """torch FSDP2."""

    shard_name, has_layouts = "rank", False

    def layout(self, trainer: TrainerSection) -> Layout:
        """Split a batch over all ranks."""
        return Layout(trainer.num_ranks, tensor=1, pipeline=1, context=1, expert=1)

    def check_keys(self, trainer: TrainerSection) -> Found:
        """Find nothing: torch is always there."""
        yield from ()

    def check_unused(self, trainer: TrainerSection) -> Found:
        """Find nothing: FSDP has no keys of its own."""
        yield from ()

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Found:
        """Find nothing: any number of ranks works."""
        yield from ()

    def check_model(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Found:
        """Find nothing: the layers are transformers' own."""
        yield from ()

    def check_optimizer(self, trainer: TrainerSection, sizes: ModelSizes | None) -> Found:
        """Find nothing: the optimizer runs where the weights are."""
        yield from ()

    def idle_keys(self, trainer: TrainerSection) -> dict[str, str]:
        """Return nothing: FSDP has no keys of its own."""
        return {}

    def suggest_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int) -> str:
        """Return '': the number of ranks is the layout."""
        return ""

    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        """Share all state over all ranks."""
        ranks = trainer.num_ranks
        return ShardCounts(1, 1, ranks, ranks, ranks)

    def states(self, trainer: TrainerSection, architecture: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return float32 masters and AdamW's two moments, exactly."""
        shared = self.shard_counts(trainer)
        weights, sharded = shared.of(architecture), -(-architecture.parameters // shared.optimizer)
        return {
            "parameters": StateBytes("weights, float32", weights * FLOAT32),
            "gradients": StateBytes("gradients", weights * FLOAT32),
            "optimizer": StateBytes("AdamW moments", 2 * sharded * FLOAT32),
        }

    def optimizer_on_host(self, trainer: TrainerSection) -> bool:
        """Return False."""
        return False

    def residual_bytes(self, trainer: TrainerSection, size: int) -> int:
        """Return `size`: layers add in the compute dtype."""
        return size

    def gathers_layers(self, trainer: TrainerSection, size: int) -> bool:
        """Return True unless one rank computes in float32: its shard is the layer."""
        return trainer.num_ranks > 1 or size != FLOAT32

    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        """Return how many ranks it takes."""
        return f"it takes {-(-peak * trainer.num_ranks // capacity)} ranks at least"


BACKEND = FsdpBackend()
