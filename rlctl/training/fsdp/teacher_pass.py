"""Sides of a teacher for the losses of an update: from its forward passes over the micro-batches, or from a column."""

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from rlctl.models.vocabulary import count_tokens
from rlctl.preflight.declared_columns import TEACHER_TOP
from rlctl.preflight.roles import TEACHER
from rlctl.training.fsdp.model import FsdpPolicy, free_gathered
from rlctl.training.fsdp.resident import ResidentModel
from rlctl.training.interface import Loss, MicroBatch
from rlctl.training.metric_rows import TEACHER_IN_UPDATE
from rlctl.training.packing import pack
from rlctl.training.spec import TrainerSpec
from rlctl.training.teacher_side import DivergenceTerm, TeacherHidden, TeacherSide, TeacherTop
from rlctl.training.update import MetricAccumulator
from rlctl.utils.device_stream import mark_here


class TeacherPass:
    """The teacher of a rank, swapped or resident, and its passes within an update."""

    def __init__(
        self,
        policy: FsdpPolicy,
        resident: ResidentModel | None,
        weights: Callable[[], AbstractContextManager[None]],
        spec: TrainerSpec,
    ) -> None:
        """resident: the teacher's own model; None if it is swapped, or the run has none.

        weights: returns a context with the teacher's weights on the device, in the policy's place if it is swapped.
        """
        self._policy = policy
        self._resident = resident
        self._weights = weights
        self._spec = spec
        self._device = torch.device(spec.device)

    def find_term(self, loss: Loss) -> DivergenceTerm | None:
        """Return the term whose divergence the loss needs, as this rank computes it; None if it needs none."""
        section = loss.needs.divergence
        if section is None:
            return None
        teacher = self._resident.model if self._resident else self._policy
        columns = min(self._policy.facts.sizes.vocab, teacher.facts.sizes.vocab)
        return DivergenceTerm(
            section=section,
            vocab=min(columns, count_tokens(Path(self._spec.tokenizer_path)) or columns),
            temperature=self._spec.temperature,
            chunk=self._spec.config.logprob_chunk_tokens,
            compiled=self._spec.config.compile,
        )

    def run(
        self, micro_batches: list[MicroBatch], term: DivergenceTerm | None, metrics: MetricAccumulator
    ) -> Generator[TeacherSide | None]:
        """Yield the teacher's side of each micro-batch, in order; None without a term. The caller closes the passes.

        metrics: get the seconds of the passes.
        """
        if term is None:
            yield from [None] * len(micro_batches)
        elif TEACHER not in self._spec.roles:
            yield from (self._read_column(micro_batch, term) for micro_batch in micro_batches)
        elif self._resident:
            yield from self._run_resident(self._resident.model, micro_batches, term, metrics)
        else:
            yield from self._run_swapped(micro_batches, term, metrics)

    def _run_resident(
        self, model: FsdpPolicy, micro_batches: list[MicroBatch], term: DivergenceTerm, metrics: MetricAccumulator
    ) -> Generator[TeacherSide]:
        """Run a pass just before each micro-batch's loss."""
        begin = mark_here(self._device)
        with self._weights():
            try:
                for micro_batch in micro_batches:
                    # The policy's pass reads the head, which stays gathered until the end.
                    side = self._run_pass(model, micro_batch, term)
                    metrics.add_span(TEACHER_IN_UPDATE.name, (begin, mark_here(self._device)))
                    yield side
                    begin = mark_here(self._device)
            finally:
                free_gathered(model)

    def _run_swapped(
        self, micro_batches: list[MicroBatch], term: DivergenceTerm, metrics: MetricAccumulator
    ) -> Generator[TeacherSide]:
        """Run the passes over all micro-batches, and yield the sides once the policy is back."""
        begin = mark_here(self._device)
        with self._weights():
            sides = _keep_sides(self._run_pass(self._policy, micro_batch, term) for micro_batch in micro_batches)
            free_gathered(self._policy)
        metrics.add_span(TEACHER_IN_UPDATE.name, (begin, mark_here(self._device)))
        yield from sides

    def _read_column(self, micro_batch: MicroBatch, term: DivergenceTerm) -> TeacherSide:
        """Return the likeliest tokens of a teacher on engines, which the samples have. Raises ValueError without them.

        An empty micro-batch has no column and no token to train on.
        """
        packed = pack(micro_batch, self._device)
        top = packed.columns.get(TEACHER_TOP.name)
        if top is None:
            if micro_batch:
                names = ", ".join(("policy", *self._spec.roles))
                raise ValueError(f"the trainer has no teacher: its roles are {names}")
            top = torch.zeros(len(packed.tokens), term.section.num_top_tokens, 2, device=packed.tokens.device)
        ids, log_probs = top[packed.mask].unbind(-1)
        return TeacherTop(ids.long(), log_probs)

    @torch.no_grad()
    def _run_pass(self, model: FsdpPolicy, micro_batch: MicroBatch, term: DivergenceTerm) -> TeacherSide:
        packed = pack(micro_batch, self._device)
        side: TeacherSide = model(packed, packed.mask.nonzero()[:, 0], term.read_teacher)
        return side


def _keep_sides(sides: Iterable[TeacherSide]) -> list[TeacherSide]:
    """Return the sides with one copy of the head, so that other weights may take the place of the teacher's."""
    kept_sides: list[TeacherSide] = []
    head = None
    for side in sides:
        if isinstance(side, TeacherHidden):
            head = head or side.head.copy()
            side = replace(side, head=head)
        kept_sides.append(side)
    return kept_sides
