"""Judgement of an engine's greedy tokens by transformers' own model of a folder.

transformers scores the tokens that the engine chose. Two separate answers could not be compared, because their contexts
differ after the first different token. In bfloat16 the two best tokens of a position may be closer than the rounding.
So transformers' model runs in the engine's dtype too, on the same tokens. This measures how far rounding moves the gap
between the two best tokens, and how often it makes another token the best. An engine may round twice as much.
Measured with vLLM on a CPU in bfloat16, with 5,319 tokens of two mixtures of experts (tests/zoo.py): 103 tokens
differed. In 48 trials of 128 tokens each, the largest gap was 1.8 times the rounding in one trial, else at most 1.3.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlctl.evaluation.closeness import EXACT
from rlctl.evaluation.model_facts import Finding
from rlctl.evaluation.transformers_model import plain_logits, plain_model

# Largest ratio of an engine's rounding to transformers' own rounding.
_ROUNDING_RATIO = 2.0
# Further tokens that may differ by chance: one of 1,000 right engines has more.
_CHANCE_TOKENS = 3


class GreedyAnswer(NamedTuple):
    """Tokens of a prompt and of an engine's greedy answer."""

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]


class _TieRounding(NamedTuple):
    """Rounding of transformers' own model in a dtype, compared with float32."""

    # Largest change of the gap between the two best tokens of a position, in nats.
    gap: float
    # Share of positions at which another token becomes the best.
    share: float


def judge_greedy(answers: Sequence[GreedyAnswer], folder: str, device: str, dtype: str) -> Finding:
    """Compare an engine's greedy tokens with the best tokens of transformers' float32 model of a folder.

    dtype: the engine's dtype. A different token passes if it is as good as the best token up to rounding.
    """
    sequences = [np.concatenate(answer) for answer in answers]
    lm = plain_model(folder, device)
    logits = [plain_logits(lm, sequence)[:-1] for sequence in sequences]
    gaps = torch.cat([_gaps_to_best(rows, answer) for rows, answer in zip(logits, answers)])
    rounding = _TieRounding(0.0, 0.0)
    if dtype != "float32":
        # Free the float32 model first, because two models at the same time may not fit in memory.
        del lm
        rounding = _measure_rounding(plain_model(folder, device, dtype), sequences, logits)
    return _judge_gaps(gaps, rounding, dtype)


def _measure_rounding(
    rounded_lm: Any, sequences: Sequence[NDArray[np.int32]], logits: Sequence[torch.Tensor]
) -> _TieRounding:
    """Return how far a model in the engine's dtype differs from the float32 `logits` of the same sequences."""
    gap_changes = []
    has_other_best = []
    for sequence, rows in zip(sequences, logits):
        best_logits, best_tokens = rows.topk(2)
        rounded_logits = plain_logits(rounded_lm, sequence)[:-1]
        # Rounded logits of the two tokens that are the best in float32.
        rounded_pairs = rounded_logits.gather(1, best_tokens)
        rounded_gaps = rounded_pairs[:, 0] - rounded_pairs[:, 1]
        gap_changes.append(rounded_gaps - (best_logits[:, 0] - best_logits[:, 1]))
        has_other_best.append(rounded_pairs[:, 0] < rounded_logits.amax(-1))
    return _TieRounding(
        gap=float(torch.cat(gap_changes).abs().max()),
        share=float(torch.cat(has_other_best).float().mean()),
    )


def _gaps_to_best(logits: torch.Tensor, answer: GreedyAnswer) -> torch.Tensor:
    """Return how far the logit of each token of an answer is below the best logit of its position, in nats.

    logits: float32 [T - 1, vocab] of prompt and answer.
    """
    logits = logits[len(answer.prompt) - 1 :]
    chosen = logits.gather(1, torch.from_numpy(answer.answer.astype(np.int64))[:, None])[:, 0]
    return logits.amax(-1) - chosen


def _judge_gaps(gaps: torch.Tensor, rounding: _TieRounding, dtype: str) -> Finding:
    """Judge greedy tokens by their gaps to the best tokens: by the largest gap and by the number of nonzero gaps."""
    num_tokens = len(gaps)
    num_equal = int((gaps == 0).sum())
    gap_limit = max(EXACT, _ROUNDING_RATIO * rounding.gap)
    most_within = int(_ROUNDING_RATIO * rounding.share * num_tokens) + _CHANCE_TOKENS
    # A gap of NaN counts as beyond, because the comparison is false.
    num_within = int((gaps <= gap_limit).sum()) - num_equal
    num_beyond = num_tokens - num_equal - num_within
    text = f"{num_equal} of {num_tokens} greedy tokens of the engine are those of transformers with the exported folder"
    text += f", {num_within} within rounding" if num_within else ""
    text += f", {num_beyond} beyond" if num_beyond else ""
    if num_within or num_beyond:
        text += f": at most {float(gaps.max()):.2g} nats behind the best; allowed: {most_within} by {gap_limit:.2g}"
        text += f", about twice what {dtype} does in transformers" if dtype != "float32" else ""
    figures: dict[str, float] = {"greedy_equal": num_equal, "greedy_within": num_within, "greedy_tokens": num_tokens}
    return Finding("export", text, not num_beyond and num_within <= most_within, figures)
