"""A vLLM engine scores given tokens as transformers does: any temperature, shared prefixes, long sequences."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.generation.engine import Engine
from rlctl.generation.requests import Completion, ScoreRequest
from rlctl.generation.spec import build_engine
from rlctl.generation.vllm.kind import environment
from rlctl.workers.errors import WorkerError
from rlctl.workers.group import Worker, WorkerSpec
from tests.system.engines import collect_all, spec_for
from tests.tiny_models import make_model
from tests.turns import turn

LONGEST = 5000
DEADLINE = 600.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=3, max_length=LONGEST)


@pytest.fixture(scope="module")
def engine(folder: Path, ray_here: Path) -> Iterator[Worker]:
    spec = replace(spec_for(folder, LONGEST), scores=True, version=4)
    worker = Worker(
        WorkerSpec("scores", partial(build_engine, spec), environment("cpu", []), str(ray_here / "scores.log"), 4)
    )
    try:
        worker.built().wait(DEADLINE)
        yield worker
    finally:
        worker.kill()


def score(engine: Worker, requests: list[ScoreRequest]) -> list[Completion]:
    engine.start(Engine.score, requests).wait(DEADLINE)
    return collect_all(engine, requests)


def expected_log_probs(folder: Path, request: ScoreRequest) -> torch.Tensor:
    """Return the log-probs of the whole vocabulary at each scored place, by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([request.tokens])).logits[0, request.start - 1 : -1]
    return (logits / request.temperature).log_softmax(-1)


def assert_is_right(folder: Path, request: ScoreRequest, answer: Completion) -> float:
    expected = expected_log_probs(folder, request)
    scored = torch.tensor(request.tokens[request.start :])
    assert answer.tokens.tolist() == scored.tolist() and answer.finish == "length"
    assert set(answer.versions.tolist()) == {4}
    gap = np.abs(answer.log_probs - expected.gather(1, scored[:, None])[:, 0].numpy()).max()
    if request.top:
        # Two tokens of almost equal log-probs may change places: each id has its log-prob, and the k-th has the k-th.
        top_ids = torch.from_numpy(answer.columns["top_ids"]).long()
        for log_probs in (expected.gather(1, top_ids), expected.topk(request.top).values):
            gap = max(gap, np.abs(answer.columns["top_log_probs"] - log_probs.numpy()).max())
    elif request.ids is not None:
        assert np.array_equal(answer.columns["top_ids"], request.ids)
        given = expected.gather(1, torch.from_numpy(request.ids).long())
        gap = max(gap, np.abs(answer.columns["top_log_probs"] - given.numpy()).max())
    else:
        assert not answer.columns
    return float(gap)


@pytest.mark.long
def test_scores_are_those_of_transformers(folder: Path, engine: Worker) -> None:
    draws = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draws.integers(3, 64, count).tolist()

    prompt = tokens(70)
    answer = tokens(90)
    requests = [
        ScoreRequest(turn(0, index).id, prompt + answer[: 30 + 20 * index], len(prompt), top=index * 5)
        for index in range(4)
    ]
    # A sequence twice, and one of which all blocks are in the cache of sampled turns.
    requests += [ScoreRequest(turn(1, index).id, prompt + answer, len(prompt), temperature=0.7) for index in range(2)]
    ids = draws.integers(0, 64, (len(answer), 3)).astype(np.int32)
    requests.append(ScoreRequest(turn(2).id, prompt + answer, len(prompt), ids=ids, temperature=1.3))
    requests.append(ScoreRequest(turn(3).id, tokens(2), 1, top=64))
    requests.append(ScoreRequest(turn(4).id, tokens(LONGEST), 1, top=20))
    sampled = [turn(9, index, prompt + answer, 4) for index in range(2)]
    engine.start(Engine.submit, sampled).wait(DEADLINE)
    collect_all(engine, sampled)
    for _ in range(2):
        gaps = [assert_is_right(folder, *pair) for pair in zip(requests, score(engine, requests), strict=True)]
        assert max(gaps) < 1e-5, gaps
        print("largest gap to transformers:", max(gaps))
    # Turns and scores in one batch.
    mixed = [turn(10, index, prompt, 40, seed=1) for index in range(6)]
    engine.start(Engine.submit, mixed).wait(DEADLINE)
    engine.start(Engine.score, requests[:6]).wait(DEADLINE)
    answers = collect_all(engine, [*mixed, *requests[:6]])
    for request, completion in zip(requests, answers[6:], strict=False):
        assert assert_is_right(folder, request, completion) < 1e-5
    assert all(len(completion.tokens) for completion in answers[:6])


@pytest.mark.long
def test_a_malformed_request_is_refused(engine: Worker) -> None:
    whole = ScoreRequest(turn(20).id, [5, 6, 7], 1)
    for wrong in (
        replace(whole, start=3),
        replace(whole, start=0),
        replace(whole, tokens=[5, 6, 99]),
        replace(whole, tokens=[5] * (LONGEST + 1)),
        replace(whole, ids=np.zeros((1, 2), np.int32)),
        replace(whole, ids=np.full((2, 1), 64, np.int32)),
        replace(whole, top=2, ids=np.zeros((2, 1), np.int32)),
        replace(whole, temperature=0.0),
    ):
        with pytest.raises(WorkerError, match="ValueError"):
            engine.start(Engine.score, [replace(whole, id=turn(21).id), wrong]).wait(DEADLINE)
    (finished,) = engine.start(Engine.collect, 0.2).wait(DEADLINE)
    assert not finished.ids
