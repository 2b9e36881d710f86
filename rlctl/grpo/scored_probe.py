"""Third row of the probe: log-probs that an engine computes for its decoded tokens as given ones, in one pass.

Decoded log-probs come from steps of one token, scored ones from a pass over prompt and answer, and trained ones from
the trainer. Where two rows agree, the third is the one that computes otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlctl.config.errors import first_line
from rlctl.config.schema import GrpoConfig
from rlctl.generation.engine import Engine
from rlctl.grpo.components import GrpoComponents
from rlctl.grpo.logprob_mismatch import Floats, Mismatch, mismatch
from rlctl.rollout.frozen_scores import FrozenScores, GivenTokens
from rlctl.rollout.wait_deadline import Emit
from rlctl.training.micro_batching import TrainingSample
from rlctl.workers.errors import WorkerError

# Pair of rows that agree -> the work that differs from both.
_ODD_ONES = {
    "scored and trained": "the engine's decoding steps compute otherwise: their kernels or graphs",
    "decoded and trained": "the engine's passes over given tokens compute otherwise: prompts, or the reading of scores",
    "decoded and scored": "the engine agrees with itself, so that one side loads or computes the weights differently",
}


@dataclass(frozen=True)
class ThreeRows:
    """Gaps between the decoded, scored and trained log-probs of the same tokens."""

    decoded_trained: Mismatch
    decoded_scored: Mismatch
    scored_trained: Mismatch

    def explain(self, bound: float) -> str:
        """Return a text on each pair of rows, and on the row that is at odds with both others.

        bound: largest token_mult_prob_error of two rows that agree.
        """
        errors = {
            "decoded and trained": self.decoded_trained.token_mult_prob_error,
            "decoded and scored": self.decoded_scored.token_mult_prob_error,
            "scored and trained": self.scored_trained.token_mult_prob_error,
        }
        agreeing = [pair for pair, error in errors.items() if error <= bound]
        differing = [f"{pair} differ ({error:.6f})" for pair, error in errors.items() if pair not in agreeing]
        text = ", ".join(differing + [f"{pair} agree ({errors[pair]:.6f})" for pair in agreeing])
        return f"{text}: {_ODD_ONES[agreeing[0]]}" if len(agreeing) == 1 else text


def find_refusal(parts: GrpoComponents) -> str:
    """Return the reason why the run's engines score no given tokens; empty if they do."""
    try:
        reasons = parts.pool.call(Engine.open_scores)
    except WorkerError as error:
        return first_line(error)
    return next(filter(None, reasons), "")


def score_decoded(config: GrpoConfig, parts: GrpoComponents, samples: Sequence[TrainingSample], emit: Emit) -> Floats:
    """Return the log-probs of sampled tokens as the run's engines score them, float32 [T] for each sample."""
    scores = FrozenScores(
        parts.dispatcher,
        config.run,
        emit,
        name="policy",
        temperature=config.generation.temperature,
        longest=parts.pool.longest,
        max_age=0,
    )
    return scores.scores([GivenTokens(sample.tokens, sample.mask) for sample in samples])


def compare_rows(samples: Sequence[TrainingSample], decoded: Floats, scored: Floats, trained: Floats) -> ThreeRows:
    """Return the gaps of the three rows at the sampled tokens."""
    mask = [sample.mask for sample in samples]
    return ThreeRows(
        decoded_trained=mismatch(decoded, trained, mask),
        decoded_scored=mismatch(decoded, scored, mask),
        scored_trained=mismatch(scored, trained, mask),
    )
