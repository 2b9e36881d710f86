"""Facts of torch FSDP2: weights, gradients and optimizer state are sharded over the ranks of each replica."""

from dataclasses import replace

from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import FLOAT32, Backend, ShardCounts, State, StateBytes, Violation, Violations
from rlctl.preflight.parallel_layout import Layout
from rlctl.preflight.trainer_settings import TrainerSettings

# Largest share of a device's memory for weights, gradients and optimizer state if each node holds a copy. The rest is
# for activations, gathered layers and logits.
_REPLICA_SHARE = 0.5


class FsdpBackend(Backend):
    """torch FSDP2, which trains transformers' own layers on any number of ranks. Its only key is `trainer.replicas`."""

    shard_name = "rank"
    has_layouts = False
    trains_adapters = True
    holds_residents = True
    measures_divergences = True
    frees_gradients = True

    def layout(self, trainer: TrainerSection) -> Layout:
        return Layout(trainer.num_ranks, tensor=1, pipeline=1, context=1, expert=1)

    def ranks_a_copy(self, trainer: TrainerSection) -> int:
        return self.shard_counts(trainer).weights

    def check_unused(self, trainer: TrainerSection) -> Violations:
        if trainer.replicas not in ("auto", 1):
            message = f"needs trainer.backend=fsdp: copies of {trainer.backend} follow from its layout; set auto here"
            yield Violation("trainer.replicas", f"{trainer.replicas} {message}", ("trainer.backend",))

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Violations:
        ranks = trainer.num_ranks
        replicas = trainer.replicas
        if replicas != "auto" and ranks % replicas:
            divisors = [count for count in range(1, ranks + 1) if ranks % count == 0]
            nearest_divisor = min(divisors, key=lambda divisor: abs(divisor - replicas))
            message = f"must divide trainer.num_ranks={ranks}, not {replicas}; try {nearest_divisor}"
            yield Violation("trainer.replicas", message, ("trainer.num_ranks",))

    def choose_replicas(
        self, trainer: TrainerSection, nodes: tuple[int, ...], sizes: ModelSizes | None, memory: int | None, size: int
    ) -> tuple[int, str]:
        """Return one copy per node if the ranks of a node can hold a copy, else 1.

        Links between nodes are slow. A single copy is sharded over all nodes, so every micro-batch gathers weights over
        these links. With a copy per node, only gradients cross them, once per update.
        """
        if len(set(nodes)) > 1:
            return 1, f"the nodes have unequal numbers of ranks: {', '.join(map(str, nodes))}"
        if sizes is None:
            return 1, "until the model's sizes are known"
        states = self.states(replace(trainer, replicas=len(nodes)), sizes, size)
        state_bytes = sum(state.device for state in states.values())
        gib = state_bytes / 2**30
        owners = "1 rank" if nodes[0] == 1 else f"{nodes[0]} ranks"
        copy = f"a copy on the {owners} of a node"
        if memory is None:
            return len(nodes), f"{copy} takes {gib:.1f} GiB each; only gradients cross nodes, once an update"
        room = f"{memory / 2**30:.0f} GiB"
        if state_bytes > _REPLICA_SHARE * memory:
            reason = f"{copy} would take {gib:.0f} of {room} each, above {_REPLICA_SHARE:.0%}"
            return 1, f"{reason}: weights are gathered between nodes"
        return len(nodes), f"{copy} takes {gib:.1f} of {room} each; only gradients cross nodes, once an update"

    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        shards = trainer.num_ranks // (1 if trainer.replicas == "auto" else trainer.replicas)
        return ShardCounts(tensor=1, context=1, weights=shards, experts=shards, optimizer=shards)

    def states(self, trainer: TrainerSection, sizes: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return the exact bytes of float32 weights, gradients and AdamW's two moments.

        With adapters these are the adapters', and the frozen weights take `size` bytes each.
        """
        shards = self.shard_counts(trainer)
        weights = shards.rank_parameters(sizes)
        if isinstance(trainer, TrainerSettings) and trainer.adapters:
            adapter_bytes = -(-trainer.adapters.parameters // shards.weights) * FLOAT32
            return {
                "parameters": StateBytes("frozen weights, adapters", weights * size + adapter_bytes),
                "gradients": StateBytes("gradients of adapters", adapter_bytes),
                "optimizer": StateBytes("AdamW moments of adapters", 2 * adapter_bytes),
            }
        updated_weights = -(-sizes.parameters // shards.optimizer)
        return {
            "parameters": StateBytes("weights, float32", weights * FLOAT32),
            "gradients": StateBytes("gradients", weights * FLOAT32),
            "optimizer": StateBytes("AdamW moments", 2 * updated_weights * FLOAT32),
        }

    def copied_weights(self, trainer: TrainerSettings, sizes: ModelSizes, size: int) -> int:
        """Return the number of weights that are gathered at one time: embedding, output, the current layer and the
        next.

        A single rank gathers nothing. It casts all its weights to the compute dtype, and keeps the casts of layers that
        are not recomputed. Weights already in the compute dtype are not copied.
        """
        outer_weights = sizes.outer_parameters
        if self.shard_counts(trainer).weights > 1:
            return outer_weights + 2 * sizes.largest_layer
        if size == FLOAT32:
            return 0
        if trainer.adapters:
            return trainer.adapters.parameters
        return outer_weights + sizes.largest_layer if trainer.activation_checkpointing else sizes.parameters

    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        if trainer.replicas not in ("auto", 1):
            return "trainer.replicas=1 shares them among all ranks"
        return f"it takes {-(-peak * trainer.num_ranks // capacity)} ranks at least"


BACKEND = FsdpBackend()
