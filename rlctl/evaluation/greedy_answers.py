"""Judgement of an engine's greedy tokens by transformers' own model of a folder.

transformers scores the engine's own tokens: answers of two models would have other contexts after their first
difference. Below float32 the two best tokens of a place may be closer than rounding. So transformers' model is rounded
too, on the same tokens. It measures how far rounding moves the gap of two best tokens, and how often it makes another
token the best: an engine may round twice as much.
Measured with vLLM on a CPU in bfloat16, 5,319 tokens of two mixtures of experts (tests/zoo.py), 103 of which differed.
Of 48 times 128 tokens the largest gap was 1.8 times the rounding of gaps in one and at most 1.3 times in the others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rlctl.evaluation.closeness import EXACT
from rlctl.evaluation.model_facts import Finding
from rlctl.evaluation.transformers_model import plain_logits, plain_model

# Most times that an engine may move a gap as far, and make another token the best as often, as transformers' own
# rounding does; and tokens that differ by chance: one of 1,000 right engines has more.
_AS_MUCH, _BY_CHANCE = 2.0, 3


class GreedyAnswer(NamedTuple):
    """Tokens of a prompt and of an engine's greedy answer."""

    prompt: NDArray[np.int32]
    answer: NDArray[np.int32]


class _TieRounding(NamedTuple):
    """Rounding of transformers' own model."""

    # Largest change of the gap between the two best tokens of a place, in nats.
    gap: float
    # Share of places where another token becomes the best.
    share: float


def judge_greedy(answers: Sequence[GreedyAnswer], folder: str, device: str, dtype: str) -> Finding:
    """Compare greedy tokens with the best ones of transformers' model of a folder in float32.

    dtype: the engine's. A token that differs passes if it is as good as the best one up to rounding.
    """
    sequences = [np.concatenate(each) for each in answers]
    lm = plain_model(folder, device)
    scores = [plain_logits(lm, each)[:-1] for each in sequences]
    behind = torch.cat([_behind(one, each) for one, each in zip(scores, answers)])
    rounding = _TieRounding(0.0, 0.0)
    if dtype != "float32":
        best = [each.topk(2) for each in scores]
        # Two models at a time may not fit.
        del lm
        lm = plain_model(folder, device, dtype)
        moved, other = [], []
        for tokens, (values, two) in zip(sequences, best):
            rounded = plain_logits(lm, tokens)[:-1]
            chosen = rounded.gather(1, two)
            moved.append((chosen[:, 0] - chosen[:, 1]) - (values[:, 0] - values[:, 1]))
            other.append(chosen[:, 0] < rounded.amax(-1))
        rounding = _TieRounding(float(torch.cat(moved).abs().max()), float(torch.cat(other).float().mean()))
    return _finding(behind, rounding, dtype)


def _behind(logits: torch.Tensor, each: GreedyAnswer) -> torch.Tensor:
    """Return how far each token of an answer is behind the best one, in nats."""
    logits = logits[len(each.prompt) - 1 :]
    chosen = logits.gather(1, torch.from_numpy(each.answer.astype(np.int64))[:, None])[:, 0]
    return logits.amax(-1) - chosen


def _finding(behind: torch.Tensor, rounding: _TieRounding, dtype: str) -> Finding:
    """Judge tokens by how far each is behind the best one: all by the largest gap, and by their number."""
    tokens, equal = len(behind), int((behind == 0).sum())
    allowed, most = max(EXACT, _AS_MUCH * rounding.gap), int(_AS_MUCH * rounding.share * tokens) + _BY_CHANCE
    # NaN is no rounding.
    within = int((behind <= allowed).sum()) - equal
    beyond = tokens - equal - within
    text = f"{equal} of {tokens} greedy tokens of the engine are those of transformers with the exported folder"
    text += f", {within} within rounding" * bool(within) + f", {beyond} beyond" * bool(beyond)
    if within or beyond:
        text += f": at most {float(behind.max()):.2g} nats behind the best; allowed: {most} by {allowed:.2g}"
        text += f", about twice what {dtype} does in transformers" * (dtype != "float32")
    figures: dict[str, float] = {"greedy_equal": equal, "greedy_within": within, "greedy_tokens": tokens}
    return Finding("export", text, not beyond and within <= most, figures)
