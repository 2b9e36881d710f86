"""Divergences of the policy from a teacher at each token of a pack, from hidden states of both in one rank.

A teacher's forward pass leaves its side of a pack: hidden states and head, or the likeliest tokens with their
log-probs. The policy's forward pass measures the divergence from this side, with gradients to the policy alone.
"""

from dataclasses import dataclass

from torch import Tensor

from rlctl.config.role_schema import DistillationSection
from rlctl.training.divergence import Divergence, chunked_divergence
from rlctl.training.logits import OutputHead
from rlctl.training.top_divergence import chunked_top, top_divergence


@dataclass(frozen=True)
class TeacherHidden:
    """Hidden states of a teacher at N tokens: the side of a divergence over the vocabulary."""

    # [N, hidden], in the compute dtype.
    hidden: Tensor
    head: OutputHead


@dataclass(frozen=True)
class TeacherTop:
    """Likeliest tokens of a teacher at N tokens: the side of a divergence over the top k."""

    # int64 [N, k].
    ids: Tensor
    # float32 [N, k].
    log_probs: Tensor


TeacherSide = TeacherHidden | TeacherTop


@dataclass(frozen=True)
class DivergenceTerm:
    """The loss's distillation term over more than the sampled token, as a rank computes it."""

    section: DistillationSection
    # Number of the tokenizer's tokens. Further columns of a head are padding.
    vocab: int
    temperature: float
    # Rows whose logits exist at one time.
    chunk: int
    compiled: bool

    def read_teacher(self, hidden: Tensor, head: OutputHead) -> TeacherSide:
        """Return the side of a teacher with these hidden states [N, hidden]. It may share their memory."""
        if self.section.over == "vocabulary":
            return TeacherHidden(hidden, head)
        ids, log_probs = chunked_top(
            hidden,
            head,
            self.section.num_top_tokens,
            vocab=self.vocab,
            temperature=self.temperature,
            chunk=self.chunk,
        )
        return TeacherTop(ids, log_probs)

    def measure(self, side: TeacherSide, hidden: Tensor, head: OutputHead) -> Tensor:
        """Return the divergence of each token, float32 [N], with gradient to hidden [N, hidden] and head."""
        divergence = Divergence(self.section.divergence, self.section.beta)
        if isinstance(side, TeacherTop):
            return top_divergence(
                hidden,
                head,
                side.ids,
                side.log_probs,
                divergence,
                self.section.rest,
                vocab=self.vocab,
                temperature=self.temperature,
                chunk=self.chunk,
            )
        return chunked_divergence(
            hidden,
            head,
            side.hidden,
            side.head,
            divergence,
            vocab=self.vocab,
            temperature=self.temperature,
            chunk=self.chunk,
            compiled=self.compiled,
        )
