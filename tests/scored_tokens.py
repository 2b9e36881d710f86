"""Requests to score given tokens, and the comparison of an engine's answers with transformers in float32."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rlctl.generation.engine import Engine
from rlctl.generation.requests import TOP_IDS, TOP_LOG_PROBS, Completion, ScoreRequest, TurnRequest
from rlctl.workers.group import Worker
from tests.system.engines import collect_all
from tests.turns import turn

# Tokens of the longest sequence, above the tokens of one step.
LONGEST = 5000
# Tokens of the vocabulary of a tiny model.
VOCAB = 64
DEADLINE = 600.0


@dataclass(frozen=True)
class ScoredTokens:
    """Requests that try the traps of scoring, and turns that put their shared prompt into the prefix cache."""

    prompt: list[int]
    requests: list[ScoreRequest]
    sampled: list[TurnRequest]

    @property
    def short(self) -> list[ScoreRequest]:
        """Requests with fewer than `LONGEST` tokens."""
        return [request for request in self.requests if len(request.tokens) < LONGEST]


def draw_scored_tokens(copies: int) -> ScoredTokens:
    """Return requests with a shared prefix, one sequence twice, temperatures, given ids, and `copies` of a long one."""
    draws = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draws.integers(3, VOCAB, count).tolist()

    prompt = tokens(70)
    answer = tokens(90)
    start = len(prompt)
    whole = prompt + answer
    requests = [
        ScoreRequest(turn(0, index).id, prompt + answer[: 30 + 20 * index], start, top=index * 5) for index in range(4)
    ]
    requests += [ScoreRequest(turn(1, index).id, whole, start, temperature=0.7) for index in range(2)]
    ids = draws.integers(0, VOCAB, (len(answer), 3)).astype(np.int32)
    requests.append(ScoreRequest(turn(2).id, whole, start, ids=ids, temperature=1.3))
    requests.append(ScoreRequest(turn(3).id, tokens(2), 1, top=VOCAB))
    long_tokens = tokens(LONGEST)
    requests += [ScoreRequest(turn(4, index).id, long_tokens, 1, top=20) for index in range(copies)]
    sampled = [turn(9, index, whole, 4) for index in range(2)]
    return ScoredTokens(prompt, requests, sampled)


def score(engine: Worker, requests: list[ScoreRequest]) -> list[Completion]:
    """Score on one engine; return the answers in the requests' order."""
    engine.start(Engine.score, requests).wait(DEADLINE)
    return collect_all(engine, requests)


class Transformers:
    """The log-probs of a folder's model by transformers on a CPU in float32."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def largest_gap(self, requests: list[ScoreRequest], answers: list[Completion], version: int) -> float:
        """Return the largest difference of a log-prob. version: weight version that the answers must have."""
        pairs = zip(requests, answers, strict=True)
        return max(self._gap(request, answer, version) for request, answer in pairs)

    def _gap(self, request: ScoreRequest, answer: Completion, version: int) -> float:
        expected = self._log_probs(request)
        scored = torch.tensor(request.tokens[request.start :])
        assert answer.tokens.tolist() == scored.tolist() and answer.finish == "length"
        assert set(answer.versions.tolist()) == {version}
        gaps = [np.abs(answer.log_probs - expected.gather(1, scored[:, None])[:, 0].numpy())]
        if not request.top and request.ids is None:
            assert not answer.columns
            return float(gaps[0].max())
        ids = torch.from_numpy(answer.columns[TOP_IDS]).long()
        top_log_probs = answer.columns[TOP_LOG_PROBS]
        gaps.append(np.abs(top_log_probs - expected.gather(1, ids).numpy()))
        if request.top:
            # Tokens of almost equal log-probs may change places, and one that is as likely as the k-th may be left
            # out: the log-probs of the k distinct ids are the k largest.
            assert all(len(set(row)) == request.top for row in ids.tolist())
            assert (np.diff(top_log_probs, axis=1) <= 0).all(), "the likeliest token is not first"
            gaps.append(np.abs(top_log_probs - expected.topk(request.top).values.numpy()))
        else:
            assert np.array_equal(answer.columns[TOP_IDS], request.ids)
        return float(max(gap.max() for gap in gaps))

    @torch.no_grad()
    def _log_probs(self, request: ScoreRequest) -> torch.Tensor:
        """Return the log-probs of the whole vocabulary at each scored place."""
        logits = self._model(torch.tensor([request.tokens])).logits[0, request.start - 1 : -1]
        return (logits / request.temperature).log_softmax(-1)
