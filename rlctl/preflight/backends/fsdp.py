"""Facts of torch FSDP2: weights, gradients and optimizer state are sharded over the ranks of each replica."""

from dataclasses import replace

from rlctl.config.trainer_schema import TrainerSection
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import FLOAT32, Backend, ShardCounts, State, StateBytes, Violation, Violations
from rlctl.preflight.parallel_layout import Layout
from rlctl.preflight.trainer_settings import TrainerSettings

# Share of a device that weights, gradients and optimizer state may take where each node holds a copy. Activations,
# gathered layers and logits take the rest.
_REPLICA_SHARE = 0.5


class FsdpBackend(Backend):
    """torch FSDP2. It trains transformers' own layers on any number of ranks. Its key is `trainer.replicas`."""

    shard_name, has_layouts, trains_adapters, frees_gradients = "rank", False, True, True

    def layout(self, trainer: TrainerSection) -> Layout:
        return Layout(trainer.num_ranks, tensor=1, pipeline=1, context=1, expert=1)

    def ranks_a_copy(self, trainer: TrainerSection) -> int:
        return self.shard_counts(trainer).weights

    def check_unused(self, trainer: TrainerSection) -> Violations:
        if trainer.replicas not in ("auto", 1):
            why = f"needs trainer.backend=fsdp: copies of {trainer.backend} follow from its layout; set auto here"
            yield Violation("trainer.replicas", f"{trainer.replicas} {why}", ("trainer.backend",))

    def check_layout(self, trainer: TrainerSection, sizes: ModelSizes | None, sequences: int | None) -> Violations:
        ranks, asked = trainer.num_ranks, trainer.replicas
        if asked != "auto" and ranks % asked:
            near = min((each for each in range(1, ranks + 1) if ranks % each == 0), key=lambda each: abs(each - asked))
            what = f"must divide trainer.num_ranks={ranks}, not {asked}; try {near}"
            yield Violation("trainer.replicas", what, ("trainer.num_ranks",))

    def choose_replicas(
        self, trainer: TrainerSection, nodes: tuple[int, ...], sizes: ModelSizes | None, memory: int | None, size: int
    ) -> tuple[int, str]:
        """Return one copy a node if a node's ranks can hold it.

        Between nodes links are slow: sharded over all, every micro-batch gathers the weights over them. Copies add up
        their gradients, once an update.
        """
        if len(set(nodes)) > 1:
            return 1, f"the nodes have unequal numbers of ranks: {', '.join(map(str, nodes))}"
        if sizes is None:
            return 1, "until the model's sizes are known"
        held = sum(each.device for each in self.states(replace(trainer, replicas=len(nodes)), sizes, size).values())
        gib, copy = held / 2**30, f"a copy on the {nodes[0]} rank{'s' * (nodes[0] > 1)} of a node"
        if memory is None:
            return len(nodes), f"{copy} takes {gib:.1f} GiB each; only gradients cross nodes, once an update"
        room = f"{memory / 2**30:.0f} GiB"
        if held > _REPLICA_SHARE * memory:
            why = f"{copy} would take {gib:.0f} of {room} each, above {_REPLICA_SHARE:.0%}"
            return 1, f"{why}: weights are gathered between nodes"
        return len(nodes), f"{copy} takes {gib:.1f} of {room} each; only gradients cross nodes, once an update"

    def shard_counts(self, trainer: TrainerSection) -> ShardCounts:
        shards = trainer.num_ranks // (1 if trainer.replicas == "auto" else trainer.replicas)
        return ShardCounts(1, 1, shards, shards, shards)

    def states(self, trainer: TrainerSection, sizes: ModelSizes, size: int) -> dict[State, StateBytes]:
        """Return float32 masters and AdamW's two moments, exactly; with adapters theirs, and a base of `size`."""
        shared = self.shard_counts(trainer)
        weights, sharded = shared.rank_parameters(sizes), -(-sizes.parameters // shared.optimizer)
        if isinstance(trainer, TrainerSettings) and trainer.adapters:
            own = -(-trainer.adapters.parameters // shared.weights) * FLOAT32
            return {
                "parameters": StateBytes("frozen weights, adapters", weights * size + own),
                "gradients": StateBytes("gradients of adapters", own),
                "optimizer": StateBytes("AdamW moments of adapters", 2 * own),
            }
        return {
            "parameters": StateBytes("weights, float32", weights * FLOAT32),
            "gradients": StateBytes("gradients", weights * FLOAT32),
            "optimizer": StateBytes("AdamW moments", 2 * sharded * FLOAT32),
        }

    def copied_weights(self, trainer: TrainerSettings, sizes: ModelSizes, size: int) -> int:
        """Return the weights of embedding and output, and of the layer at work and the next, which are gathered.

        One rank casts all its weights instead, and keeps the copies of layers that are not recomputed. It has none of
        weights in the compute dtype.
        """
        whole = (1 if sizes.tied else 2) * sizes.embedding_parameters
        if self.shard_counts(trainer).weights > 1:
            return whole + 2 * sizes.largest_layer
        if size == FLOAT32:
            return 0
        if trainer.adapters:
            return trainer.adapters.parameters
        return whole + sizes.largest_layer if trainer.activation_checkpointing else sizes.parameters

    def more_room(self, trainer: TrainerSection, peak: int, capacity: int) -> str:
        if trainer.replicas not in ("auto", 1):
            return "trainer.replicas=1 shares them among all ranks"
        return f"it takes {-(-peak * trainer.num_ranks // capacity)} ranks at least"


BACKEND = FsdpBackend()
