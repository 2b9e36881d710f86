"""The interface between a loss and the trainers: a loss's input and output, and the division of sums.

A loss sees one packed micro-batch at a time and returns sums over it. The trainer adds those sums over micro-batches,
ranks and parts of an update. It then divides once: the reduced gradients by `Loss.normalizer`, before norm and
clipping, and each metric by its weight. The result of an update therefore does not depend on how its samples were
packed, shared out over ranks or split into parts.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from rlctl.training.micro_batching import TrainingSample

MicroBatch = list[TrainingSample]


@dataclass(frozen=True)
class Totals:
    """Counts over all ranks, micro-batches and parts of one update."""

    # Tokens whose mask is true.
    tokens: int
    # Rows, each a `TrainingSample`.
    sequences: int
    # Rollouts, each of one row or several.
    rollouts: int

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences, self.rollouts + other.rollouts)


@dataclass(frozen=True)
class LossNeeds:
    """Needs of a loss beyond tokens and mask. The loop provides them, and nothing else."""

    # Names of `preflight.columns.COLUMNS`.
    columns: frozenset[str] = frozenset()
    # All rows of a rollout in one micro-batch.
    whole_rollouts: bool = False


@dataclass
class TokenBatch:
    """One packed micro-batch of T tokens, S sequences and R rollouts, as a loss sees it.

    Tensors are on the trainer's device. R is S where each rollout has one row.
    """

    # float32 [T], with gradient: log-prob of each token under the tempered policy; 0 where the mask is false.
    log_probs: Tensor
    # float32 [T], with gradient: entropy of the tempered policy at each token; 0 where the mask is false.
    entropy: Tensor
    # bool [T]: true at the tokens that count.
    mask: Tensor
    # Name -> [T, *shape]: the samples' columns.
    columns: dict[str, Tensor]
    # int64 [T]: index of the token's sequence within the micro-batch, 0 to S - 1.
    sequence: Tensor
    # S.
    num_sequences: int
    # int64 [T]: index of the token's rollout within the micro-batch, 0 to R - 1.
    rollout: Tensor
    # R.
    num_rollouts: int


@dataclass
class LossOutput:
    """Sums over one micro-batch; all tensors are scalars on the micro-batch's device."""

    # With gradient. A sum that is divided by nothing: the trainer divides its gradient by `Loss.normalizer`.
    loss: Tensor
    # name -> (sum, weight), without gradient. The metric is the update's sum over its weight; without weight it is
    # left out of the record.
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # name -> value, without gradient. The metric is the largest value of the update.
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A picklable loss: a frozen dataclass with these members."""

    @property
    def needs(self) -> LossNeeds:
        """Needs of the loss beyond tokens and mask."""
        ...

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the sums of one micro-batch. Their totals must not depend on how samples were packed into it.

        A micro-batch without a masked token has a loss of 0 that keeps its graph.
        """
        ...

    def normalizer(self, totals: Totals) -> float:
        """Return the divisor of the update's summed gradient; 0 where there is nothing to train on."""
        ...
