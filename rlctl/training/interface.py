"""Port `Loss` between a loss and the trainers: a loss's input and output, and the division of sums.

A loss gets one packed micro-batch at a time and returns sums over it. The trainer adds these sums over micro-batches,
ranks and parts of an update. It then divides once: the reduced gradients by `Loss.normalizer`, before norm and
clipping, and each metric by its weight. So the result of an update does not depend on how its samples were packed,
distributed over ranks or split into parts.
"""

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from rlctl.config.role_schema import DistillationSection
from rlctl.training.micro_batching import TrainingSample

MicroBatch = list[TrainingSample]


@dataclass(frozen=True)
class Totals:
    """Counts over all ranks, micro-batches and parts of one update."""

    # Number of tokens whose mask is true.
    tokens: int
    # Number of rows, each a `TrainingSample`.
    sequences: int
    # Number of rollouts. A rollout has one row or several.
    rollouts: int

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(self.tokens + other.tokens, self.sequences + other.sequences, self.rollouts + other.rollouts)


@dataclass(frozen=True)
class LossNeeds:
    """Inputs that a loss needs besides tokens and mask. The loop provides only these columns."""

    # Names of `preflight.declared_columns.COLUMNS`.
    columns: frozenset[str] = frozenset()
    # True if all rows of a rollout must be in one micro-batch.
    whole_rollouts: bool = False
    # Term whose divergence from the teacher the trainer computes at each masked token; None for no divergence.
    divergence: DistillationSection | None = None


@dataclass
class TokenBatch:
    """Input of a loss: one packed micro-batch of T tokens, S sequences and R rollouts.

    Tensors are on the trainer's device. R equals S if each rollout has one row.
    """

    # float32 [T], with gradient: log-prob of each token under the tempered policy; 0 where the mask is false. 0 for a
    # model with a value head, like the entropy.
    log_probs: Tensor
    # float32 [T], with gradient: entropy of the tempered policy at each token; 0 where the mask is false.
    entropy: Tensor
    # bool [T]: true at the tokens to train on.
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
    # float32 [T], with gradient: divergence of `LossNeeds.divergence` at each token, nats, 0 where the mask is false.
    # None without that need.
    divergence: Tensor | None = None
    # float32 [T], with gradient: value of the tokens before each token, 0 where the mask is false. None for a model
    # without value head.
    values: Tensor | None = None


@dataclass
class LossOutput:
    """Sums over one micro-batch; all tensors are scalars on the micro-batch's device."""

    # With gradient. An undivided sum: the trainer divides its gradient by `Loss.normalizer`.
    loss: Tensor
    # name -> (sum, weight), without gradient. The metric is the update's total sum divided by its total weight; with a
    # total weight of 0 it is not recorded.
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # name -> value, without gradient. The metric is the largest value of the update.
    maxima: dict[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A picklable loss: a frozen dataclass with these members."""

    @property
    def needs(self) -> LossNeeds:
        """Inputs that the loss needs besides tokens and mask."""
        ...

    def __call__(self, batch: TokenBatch) -> LossOutput:
        """Return the sums of one micro-batch. Totals over micro-batches must not depend on how samples were packed.

        For a micro-batch without any masked token, the loss must be 0 and still have its graph for the backward pass.
        """
        ...

    def normalizer(self, totals: Totals) -> float:
        """Return the divisor of the update's summed gradient; 0 if there is nothing to train on."""
        ...
