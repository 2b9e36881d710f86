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
from rlctl.preflight.engine_rules import UNMEASURED, engine_rules
from rlctl.preflight.machine import Device
from rlctl.preflight.settled import SettledGrpo
from rlctl.rollout.types import Sampling
from rlctl.training.micro_batching import TrainingSample
from rlctl.workers.errors import WorkerError

# Fewest prompts in a comparison, and fewest prompts for each engine.
PROMPTS = 8
PER_ENGINE = 2
# Most tokens of an answer.
TOKENS = 16
# Largest mean of exp|trainer - generator| without a second measurement. In float32 no engine may exceed it; a measured
# engine has a tighter bound (`bound_of`). In bfloat16 a larger gap needs a second measurement (NeMo-RL's documentation
# calls more than 1.05 a defect of the framework).
BOUNDS = {"float32": UNMEASURED, "bfloat16": 1.05}
# A right engine rounds about as much as the trainer does. Measured: 0.8 to 1.2 times (grpo/README.md). A step rounds
# about as much as the probe did: 1.0607 after 1.0600.
_AS_MUCH = 2.0
# An engine in float32 may be this many times as far from the trainer as the trainer is from itself, with each sequence
# alone: room for deep models. No family of models/FAMILIES.md needs it.
_OTHER_KERNELS = 20.0


class ProbeError(RuntimeError):
    """Trainer and generator disagree: training on such samples would be silently wrong."""


@dataclass(frozen=True)
class Rounding:
    """`token_mult_prob_error` of both sides to the trainer in float32, whose weights are rounded as theirs."""

    trainer: float
    engine: float

    @property
    def explains(self) -> bool:
        """True if neither side is much farther from float32 than the other. Otherwise one side computes it wrongly."""
        gaps = (self.trainer - 1, self.engine - 1)
        return all(map(math.isfinite, gaps)) and max(gaps) <= _AS_MUCH * min(gaps)

    def __str__(self) -> str:
        return f"the same weights in float32 are {self.trainer:.4f} from the trainer, {self.engine:.4f} from the engine"


@dataclass(frozen=True)
class OwnRounding:
    """`token_mult_prob_error` in float32: of the trainer to itself, each sequence alone, and of the engine to it."""

    trainer: float
    engine: float

    @property
    def explains(self) -> bool:
        """True if the engine is as close as other kernels are."""
        return self.engine - 1 <= _OTHER_KERNELS * (self.trainer - 1)

    def __str__(self) -> str:
        return f"the trainer with each sequence alone is {self.trainer:.7f} from itself"


@dataclass(frozen=True)
class Verdict:
    """Judgement of a gap between trainer and generator."""

    agree: bool
    # Empty if the gap is within the dtype's bound.
    explanation: str = ""


def bound_of(settled: SettledGrpo, device: Device, dtype: str) -> float:
    """Return the largest gap that is accepted without a second measurement."""
    if dtype != "float32" or settled.facts is None:
        return BOUNDS[dtype]
    return engine_rules(settled.config.generation.engine).float32_bound(device, settled.facts)


def judge(
    gap: Mismatch,
    dtype: str,
    rounding: Callable[[], Rounding | OwnRounding | None],
    bound: float | None = None,
) -> Verdict:
    """Judge a gap by its bound. If the gap is larger, judge it by the rounding of both sides.

    On a deep model with wide logits, correct computations may round to more than the bound on both sides. rounding:
    measures the rounding; returns None if the trainer cannot. bound: see `bound_of`; None: the dtype's bound.
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
    """Return the rounding of both sides. exact: the trainer's log-probs in float32; None: there are none."""
    if exact is None:
        return None
    return Rounding(
        trainer=mismatch(trainer, exact, mask).token_mult_prob_error,
        engine=mismatch(engine, exact, mask).token_mult_prob_error,
    )


def bound_of_steps(configured: float, probed: float, dtype: str) -> float:
    """Return the bound on the mismatch of a run's steps, from the config's and from the gap of a probe that passed.

    A probed gap above the dtype's bound was explained by rounding. A step rounds about as much; twice the gap is within
    bounds. A configured bound that is stricter than the dtype's stays.
    """
    if probed <= BOUNDS[dtype] or configured < BOUNDS[dtype]:
        return configured
    return max(configured, 1 + _AS_MUCH * (probed - 1))


def probe(
    config: GrpoConfig,
    parts: GrpoComponents,
    tasks: list[Task],
    version: int,
    dtype: str,
    warn: Callable[[str], object] = lambda text: None,
    bound: float | None = None,
) -> Mismatch:
    """Refit with all checksums, sample a few tokens, and compare log-probs.

    warn: called with a text if a gap above the bound is explained by rounding. bound: see `judge`. Raises RefitError
    that names the first tensor that arrived changed, and ProbeError if log-probs differ with all tensors intact.
    """
    parts.pool.sync(version, "all")
    samples = sample_parity(config, parts, tasks, version)
    if not samples:
        raise ProbeError(f"no episode could be played; most failed of {parts.failure_cause()}")
    engine = [sample.columns["rollout_log_prob"] for sample in samples]
    mask = [sample.mask for sample in samples]
    trainer = parts.trainer.log_probs(samples)
    gap = mismatch(engine, trainer, mask)

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
        entries = parts.pool.plan.entries
        raise ProbeError(
            f"trainer and generator disagree on log-probs: {summary}{reason}. All {len(entries)} tensors arrived "
            f"intact, from {entries[0].name} on: one side loads or computes them differently. "
            f"{parts.trainer.suspects()}"
        )
    if verdict.explanation:
        step_bound = bound_of_steps(config.health.max_token_mult_prob_error, error, dtype)
        remedy = "; trainer.dtype=float32 does not" if dtype != "float32" else ""
        warn(
            f"{summary}: both sides round this model more than most ({verdict.explanation}){remedy}. "
            f"Steps are held to {step_bound:.4g}"
        )
    return gap


def sample_parity(config: GrpoConfig, parts: GrpoComponents, tasks: list[Task], version: int) -> list[TrainingSample]:
    """Sample a few tokens from the whole distribution while trainer and generator both have `version`.

    Other requests continue meanwhile. Returns an empty list if every episode failed.
    """
    tasks = tasks[: max(PROMPTS, PER_ENGINE * len(parts.pool.engines))]
    length = min(TOKENS, config.generation.max_new_tokens)
    sampling = Sampling("parity", config.run.seed, len(tasks), 1, length, config.generation.temperature)
    groups = parts.dispatcher.sample(parts.runner, sampling, tasks, version)
    rollouts = chain.from_iterable(group.rollouts for group in groups)
    rows = chain.from_iterable(rollout.rows for rollout in rollouts)
    return [training_sample(row, 0.0) for row in rows]


def compare(parts: GrpoComponents, samples: list[TrainingSample]) -> Mismatch:
    """Return the gap between the samples' log-probs and the trainer's. The trainer must still have their version."""
    engine = [sample.columns["rollout_log_prob"] for sample in samples]
    return mismatch(engine, parts.trainer.log_probs(samples), [sample.mask for sample in samples])
