"""Checks that trainer and generator agree on weights and log-probs: a probe before step 1, and comparisons later.

Checksums show that every tensor arrived as sent. Log-probs of sampled tokens show that both sides load and compute the
weights in the same way.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rlctl.config.errors import first_line
from rlctl.config.schema import GrpoConfig
from rlctl.data.tasks import Task
from rlctl.grpo.batch import training_sample
from rlctl.grpo.components import GrpoComponents
from rlctl.grpo.logprob_mismatch import Floats, Mismatch, mismatch
from rlctl.grpo.scored_probe import ThreeRows, compare_rows, find_refusal, score_decoded
from rlctl.preflight.engine_rules import UNMEASURED, engine_rules
from rlctl.preflight.machine import Device
from rlctl.preflight.settled import SettledGrpo
from rlctl.rollout.types import Sampling
from rlctl.rollout.wait_deadline import Emit
from rlctl.training.micro_batching import TrainingSample
from rlctl.workers.errors import WorkerError

# Fewest prompts in a comparison, and fewest prompts for each engine.
PROMPTS = 8
PER_ENGINE = 2
# Largest number of tokens of each answer.
TOKENS = 16
# Largest token_mult_prob_error that is accepted without a second measurement. In float32 a larger value is always
# refused, and an engine whose rounding was measured has a tighter bound (`bound_of`). In bfloat16 a larger value needs
# a second measurement. NeMo-RL's documentation calls more than 1.05 a defect of the framework.
BOUNDS = {"float32": UNMEASURED, "bfloat16": 1.05}
# Largest allowed ratio of two roundings. A correct engine rounds 0.8 to 1.2 times as much as the trainer
# (grpo/README.md). A step rounds about as much as the probe: 1.0607 after 1.0600.
_AS_MUCH = 2.0
# In float32: largest allowed ratio of the gap between engine and trainer to the gap between the trainer's passes over
# packed and single sequences. It leaves room for deep models. No family of models/FAMILIES.md needs it.
_OTHER_KERNELS = 20.0


class ProbeError(RuntimeError):
    """Trainer and generator disagree on log-probs, so training on sampled tokens would be silently wrong."""


@dataclass(frozen=True)
class Rounding:
    """Distances of the bfloat16 trainer and engine from a float32 pass of the trainer with the same rounded weights."""

    # `token_mult_prob_error` between the trainer and the float32 pass.
    trainer: float
    # `token_mult_prob_error` between the engine and the float32 pass.
    engine: float

    @property
    def explains(self) -> bool:
        """True if rounding explains the gap: both distances are similar. Otherwise one side computes wrongly."""
        gaps = (self.trainer - 1, self.engine - 1)
        return all(map(math.isfinite, gaps)) and max(gaps) <= _AS_MUCH * min(gaps)

    def __str__(self) -> str:
        return f"the same weights in float32 are {self.trainer:.4f} from the trainer, {self.engine:.4f} from the engine"


@dataclass(frozen=True)
class OwnRounding:
    """Distances in float32 that show how much other kernels, or another packing, change log-probs."""

    # `token_mult_prob_error` between the trainer's passes over packed and over single sequences.
    trainer: float
    # `token_mult_prob_error` between the engine and the trainer.
    engine: float

    @property
    def explains(self) -> bool:
        """True if other kernels explain the distance between engine and trainer."""
        return self.engine - 1 <= _OTHER_KERNELS * (self.trainer - 1)

    def __str__(self) -> str:
        return f"the trainer with each sequence alone is {self.trainer:.7f} from itself"


@dataclass(frozen=True)
class Verdict:
    """Judgement of a gap between the log-probs of trainer and generator."""

    # True if the gap is small enough, or rounding explains it.
    agree: bool
    # Result of the second measurement; empty if none was made.
    explanation: str = ""


def bound_of(settled: SettledGrpo, device: Device, dtype: str) -> float:
    """Return the largest token_mult_prob_error that is accepted without a second measurement, for this model."""
    if dtype != "float32" or settled.facts is None:
        return BOUNDS[dtype]
    return engine_rules(settled.config.generation.engine).float32_bound(device, settled.facts)


def judge(
    gap: Mismatch,
    dtype: str,
    rounding: Callable[[], Rounding | OwnRounding | None],
    bound: float | None = None,
) -> Verdict:
    """Accept a gap within `bound`. If the gap is larger, measure the rounding of both sides and judge by that.

    In a deep model with wide logits, rounding alone may cause a gap above the bound. rounding: measures the rounding;
    returns None if the trainer cannot measure it. bound: see `bound_of`; None: the dtype's bound.
    """
    if gap.token_mult_prob_error <= (bound or BOUNDS[dtype]):
        return Verdict(True)
    if dtype == "float32" and not gap.token_mult_prob_error <= BOUNDS[dtype]:
        return Verdict(False)
    try:
        measured = rounding()
    except WorkerError as error:
        # The pass may fail, for example if a layer in float32 does not fit the device.
        return Verdict(False, f"the trainer's pass in float32 failed: {first_line(error)}")
    return Verdict(measured.explains, str(measured)) if measured else Verdict(False)


def rounding_of(
    engine: Floats, trainer: Floats, exact: Floats | None, mask: Sequence[NDArray[np.bool_]]
) -> Rounding | None:
    """Return the distances of engine and trainer from `exact`: the trainer's log-probs computed in float32.

    None if `exact` is None, because the trainer cannot compute in float32.
    """
    if exact is None:
        return None
    return Rounding(
        trainer=mismatch(trainer, exact, mask).token_mult_prob_error,
        engine=mismatch(engine, exact, mask).token_mult_prob_error,
    )


def bound_of_steps(configured: float, probed: float, dtype: str) -> float:
    """Return the bound on the token_mult_prob_error of a run's steps.

    configured: bound of the config. probed: token_mult_prob_error of the probe, which passed. If `probed` is above the
    dtype's bound, rounding explained it. A step rounds about as much as the probe, so the new bound allows twice the
    probe's gap. A configured bound below the dtype's bound stays.
    """
    if probed <= BOUNDS[dtype] or configured < BOUNDS[dtype]:
        return configured
    return max(configured, 1 + _AS_MUCH * (probed - 1))


@dataclass(frozen=True)
class Probed:
    """Result of a probe that passed."""

    # Gap between decoded and trained log-probs.
    gap: Mismatch
    # Gaps to the log-probs that the engines score; None if they score none.
    rows: ThreeRows | None
    # Reason why they score none; empty if they do.
    refusal: str

    @property
    def event(self) -> dict[str, object]:
        """Fields of the event "probe"."""
        scored: dict[str, object] = {"unscored": self.refusal}
        if self.rows:
            scored = {"scored": self.rows.scored_trained.token_mult_prob_error}
        return {**vars(self.gap), **scored}


def probe(
    config: GrpoConfig,
    parts: GrpoComponents,
    tasks: list[Task],
    version: int,
    dtype: str,
    emit: Emit = lambda *_, **__: None,
    bound: float | None = None,
) -> Probed:
    """Send all weights to the engines with checksums, sample a few tokens, and compare log-probs.

    Engines that can score also score the tokens. emit: gets a warning if rounding explains a gap above the bound, and
    if scored log-probs differ from decoded ones that are right. bound: see `judge`. Raises RefitError that names the
    first tensor that arrived changed, and ProbeError if all tensors arrived intact but log-probs differ.
    """
    parts.pool.sync(version, "all")
    samples = sample_parity(config, parts, tasks, version)
    if not samples:
        raise ProbeError(f"no episode could be played; most failed of {parts.failure_cause()}")
    engine = [sample.columns["rollout_log_prob"] for sample in samples]
    mask = [sample.mask for sample in samples]
    trainer = parts.trainer.log_probs(samples)
    gap = mismatch(engine, trainer, mask)
    rows = None
    refusal = find_refusal(parts)
    if not refusal:
        rows = compare_rows(samples, engine, score_decoded(config, parts, samples, emit), trainer)

    def rounding() -> Rounding | OwnRounding | None:
        if dtype != "float32":
            return rounding_of(engine, trainer, parts.trainer.exact_log_probs(samples), mask)
        alone = list(chain.from_iterable(parts.trainer.log_probs([sample]) for sample in samples))
        return OwnRounding(mismatch(alone, trainer, mask).token_mult_prob_error, gap.token_mult_prob_error)

    verdict = judge(gap, dtype, rounding, bound)
    error = gap.token_mult_prob_error
    summary = f"token_mult_prob_error {error:.6f} over {gap.tokens} tokens, at most {bound or BOUNDS[dtype]} in {dtype}"
    if not verdict.agree:
        reason = f"; {verdict.explanation}" if verdict.explanation else ""
        if rows:
            reason += f"; {rows.explain(bound or BOUNDS[dtype])}"
        entries = parts.pool.plan.entries
        raise ProbeError(
            f"trainer and generator disagree on log-probs: {summary}{reason}. All {len(entries)} tensors arrived "
            f"intact, from {entries[0].name} on: one side loads or computes them differently. "
            f"{parts.trainer.suspects()}"
        )
    if verdict.explanation:
        step_bound = bound_of_steps(config.health.max_token_mult_prob_error, error, dtype)
        remedy = "; trainer.dtype=float32 does not" if dtype != "float32" else ""
        warning = (
            f"{summary}: both sides round this model more than most ({verdict.explanation}){remedy}. "
            f"Steps are held to {step_bound:.4g}"
        )
        emit("warning", what=warning)
    # A pass over prompt and answer rounds about as much as decoding does.
    scored_bound = 1 + _AS_MUCH * (max(error, BOUNDS[dtype]) - 1)
    if rows and not rows.scored_trained.token_mult_prob_error <= scored_bound:
        emit("warning", what=f"probe: {rows.explain(scored_bound)}. A step trains on decoded tokens, which are right")
    return Probed(gap, rows, refusal)


def sample_parity(config: GrpoConfig, parts: GrpoComponents, tasks: list[Task], version: int) -> list[TrainingSample]:
    """Sample a few short answers without top_p and top_k, while trainer and generator both have `version`.

    Other requests of the engines continue meanwhile. Return one sample for each row; empty if every episode failed.
    """
    tasks = tasks[: max(PROMPTS, PER_ENGINE * len(parts.pool.engines))]
    length = min(TOKENS, config.generation.max_new_tokens)
    sampling = Sampling("parity", config.run.seed, len(tasks), 1, length, config.generation.temperature)
    groups = parts.dispatcher.sample(parts.runner, sampling, tasks, version)
    rollouts = chain.from_iterable(group.rollouts for group in groups)
    rows = chain.from_iterable(rollout.rows for rollout in rollouts)
    return [training_sample(row, 0.0) for row in rows]


def compare(parts: GrpoComponents, samples: list[TrainingSample]) -> Mismatch:
    """Return the gap between the log-probs of the engine, which are in `samples`, and the trainer's.

    The trainer must still have the weight version that sampled.
    """
    engine = [sample.columns["rollout_log_prob"] for sample in samples]
    return mismatch(engine, parts.trainer.log_probs(samples), [sample.mask for sample in samples])
