"""Every engine keeps the promises of `generation/engine.py`: a user's and vLLM, by the same calls."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.generation.engine import Engine
from rlctl.generation.requests import Completion, RequestId, ScoreRequest, TurnRequest
from rlctl.generation.spec import EngineSpec, build_engine, engine_kind
from rlctl.refit.protocol import Header, Untouched
from rlctl.refit.refit import EngineEnd, Refit
from rlctl.workers.errors import WorkerError
from rlctl.workers.group import Worker, WorkerGroup, WorkerSpec
from tests.system.drifting import DriftingSource
from tests.system.engines import MakeSource, collect_all, refit_options, spec_for
from tests.system.test_in_flight import Models, with_kept_keys, with_new_keys
from tests.tiny_models import make_model
from tests.turns import turn, turns

DEADLINE = 600.0
ROOM = 64
VERSION = 3
PROMPT = [5, 6, 7, 8]
# Kind, and its options.
ENGINES = {
    "torch": (f"{Path(__file__).parents[1] / 'plugins' / 'torch_engine.py'}:KIND", {}),
    "vllm": ("vllm", {"fast_path": True, "enforce_eager": True}),
}


class Stage:
    """One engine in its process, and weights that change."""

    def __init__(self, spec: EngineSpec, logs: Path, shm: Path, name: str) -> None:
        environment = engine_kind(spec.kind).environment("cpu", [], [])
        self.engine = Worker(WorkerSpec(name, partial(build_engine, spec), environment, str(logs / f"{name}.log"), 6))
        make = MakeSource(Path(spec.model_path), DriftingSource)
        self.source = WorkerGroup([WorkerSpec(f"{name}-source", make)], DEADLINE)
        self.models = Models(Path(spec.model_path))
        self.refit: Refit | None = None
        self._shm = shm

    def connect(self) -> None:
        self.source.built().wait(DEADLINE)
        self.refit = Refit(self.source, refit_options("shm", self._shm, in_flight=True))
        self.refit.open(self.ends)

    @property
    def ends(self) -> list[EngineEnd]:
        return [EngineEnd(self.engine, 1)]

    def bring(self, version: int) -> None:
        """Bring the engine to a version."""
        assert self.refit
        self.refit.run(self.ends, version)

    def submit(self, requests: list[TurnRequest]) -> None:
        self.engine.start(Engine.submit, requests).wait(DEADLINE)

    def sample(self, requests: list[TurnRequest]) -> list[Completion]:
        self.submit(requests)
        return collect_all(self.engine, requests)

    def score(self, requests: list[ScoreRequest]) -> list[Completion]:
        self.engine.start(Engine.score, requests).wait(DEADLINE)
        return collect_all(self.engine, requests)

    def refuses(self, requests: list[TurnRequest]) -> bool:
        """Submit requests and expect an error. Return True if no request runs afterwards."""
        with pytest.raises(WorkerError):
            self.submit(requests)
        return self.nothing_runs()

    def nothing_runs(self) -> bool:
        (finished,) = self.engine.start(Engine.collect, 0.3).wait(DEADLINE)
        return not finished.ids

    def kill(self) -> None:
        self.source.kill()
        self.engine.kill()


@pytest.fixture(params=ENGINES)
def stage(request: pytest.FixtureRequest, ray_here: Path, tmp_path: Path) -> Iterator[Stage]:
    kind, options = ENGINES[request.param]
    folder = make_model(tmp_path / "m", "qwen3", seed=1)
    spec = replace(spec_for(folder, ROOM), kind=kind, options=options, version=VERSION, scores=True)
    stage = Stage(spec, ray_here, tmp_path / "shm", f"port-{request.param}")
    try:
        stage.engine.built().wait(DEADLINE)
        yield stage
    finally:
        stage.kill()


@pytest.mark.long
def test_an_engine_keeps_the_promises_of_the_port(stage: Stage) -> None:
    engine = stage.engine
    # Answers: tokens, log-probs, versions, ends.
    requests = [*turns(0, 6, PROMPT, 12), turn(1, 0, PROMPT, 12, 0.0), turn(2, 0, [9] * 40, 60, 0.5, seed=3)]
    first = stage.sample(requests)
    for request, answer in zip(requests, first, strict=True):
        assert_is_of_the_distribution(stage.models, 0, request, answer)
        assert set(answer.versions.tolist()) == {VERSION}
        full_length = min(request.max_new_tokens, ROOM - len(request.prompt_tokens))
        stops = answer.tokens == 1
        assert not stops[:-1].any() and answer.finish == ("stop" if stops[-1] else "length")
        assert answer.finish == "stop" or len(answer.tokens) == full_length
    # Others do not change a turn, and its own tokens that end it are told apart from all turns'.
    repeated = stage.sample([requests[3], turn(9, 0, PROMPT, 50, seed=8)])[0]
    assert np.array_equal(repeated.tokens, first[3].tokens)
    np.testing.assert_allclose(repeated.log_probs, first[3].log_probs, atol=1e-6)
    stopped = stage.sample([replace(requests[7], stops=(int(first[7].tokens[2]),))])[0]
    end = first[7].tokens.tolist().index(first[7].tokens[2]) + 1
    assert stopped.finish == "stop" and np.array_equal(stopped.tokens, first[7].tokens[:end])

    # A call of which something is refused begins nothing.
    fresh = turn(20, 0, PROMPT)
    assert stage.refuses([fresh, turn(21, 0, [5] * ROOM)])
    assert stage.refuses([fresh, fresh])

    # An abort forgets requests, whose ids may come again, and passes over others.
    running = [turn(30, index, PROMPT, 60, 2.0, seed=50) for index in range(4)]
    stage.submit(running)
    ids = [request.id for request in running]
    (tokens,) = engine.start(Engine.abort, [*ids, turn(40).id]).wait(DEADLINE)
    assert 0 <= tokens <= 4 * 60 and stage.nothing_runs()
    assert all(len(answer.tokens) for answer in stage.sample(running))

    # Given tokens are scored, whatever was sampled or scored before.
    given = [ScoreRequest(turn(60, index).id, [*PROMPT, *range(2, 50)], 4, top=index * 3) for index in range(3)]
    given.append(replace(given[0], id=turn(61).id, ids=np.full((48, 2), 7, np.int32), temperature=0.5))
    for _ in range(2):
        assert_are_scored(stage, 0, VERSION, given, stage.score(given))
    with pytest.raises(WorkerError):
        engine.start(Engine.score, [given[0], replace(given[1], start=0)]).wait(DEADLINE)
    engine.start(Engine.score, given).wait(DEADLINE)
    (tokens,) = engine.start(Engine.abort, [request.id for request in given]).wait(DEADLINE)
    assert tokens == 0 and stage.nothing_runs()

    # Weights change while turns run, also to the version that is live.
    sums = engine.start(Engine.checksums).wait(DEADLINE)[0]
    stage.connect()
    long_requests = turns(50, 8, PROMPT, 50, seed=9)
    answers = dict[RequestId, Completion]()
    version = VERSION
    stage.submit(long_requests)
    while len(answers) < len(long_requests):
        version += 1
        stage.bring(version)
        (finished,) = engine.start(Engine.collect, 0.02).wait(DEADLINE)
        answers |= zip(finished.ids, finished.columns.unpack(), strict=True)
    assert any(len(set(answer.versions.tolist())) > 1 for answer in answers.values())
    for request in long_requests:
        answer = answers[request.id]
        assert (np.diff(answer.versions) >= 0).all() and answer.versions[0] >= VERSION
        if answer.versions[0] > VERSION:
            ways = [way(stage.models, PROMPT, answer) for way in (with_kept_keys, with_new_keys)]
            assert min(np.abs(log_probs - answer.log_probs).max() for log_probs in ways) < 1e-3
    before = stage.sample(requests)
    assert_are_of_version(stage, version, requests, before)

    # A score is of one version, also if weights change meanwhile.
    many = [replace(given[index % 4], id=turn(70, index).id) for index in range(40)]
    engine.start(Engine.score, many).wait(DEADLINE)
    stage.bring(version + 1)
    for request, answer in zip(many, collect_all(engine, many), strict=True):
        (scored_at,) = set(answer.versions.tolist())
        assert scored_at in (version, version + 1)
        assert_are_scored(stage, scored_at, scored_at, [request], [answer])
    stage.bring(version)

    # Memory is given back and taken again around a refit.
    stage.bring(version)
    live = engine.start(Engine.checksums).wait(DEADLINE)[0]
    assert live.keys() == sums.keys() and (not sums or live != sums)
    engine.start(Engine.sleep).wait(DEADLINE)
    engine.start(Engine.wake, "weights").wait(DEADLINE)
    stage.bring(version)
    engine.start(Engine.wake, "kv_cache").wait(DEADLINE)
    assert engine.start(Engine.checksums).wait(DEADLINE)[0] == live
    for earlier, later in zip(before, stage.sample(requests), strict=True):
        assert np.array_equal(earlier.tokens, later.tokens) and np.array_equal(earlier.log_probs, later.log_probs)
    assert {*engine.start(Engine.memory).wait(DEADLINE)[0]} == {"device_allocated", "device_peak", "host_rss"}

    # A refit that fails leaves the old version live and says so, or leaves nothing to sample with.
    header = Header(version + 1, "of another plan", "all")
    with pytest.raises(WorkerError) as error:
        engine.start(Engine.refit_receive, header).wait(DEADLINE)
    if error.value.failures[0].type == Untouched.__name__:
        assert_are_of_version(stage, version, requests, stage.sample(requests))
    else:
        assert stage.refuses(requests)


def assert_are_of_version(stage: Stage, version: int, requests: list[TurnRequest], answers: list[Completion]) -> None:
    for request, answer in zip(requests, answers, strict=True):
        assert set(answer.versions.tolist()) == {version}
        assert_is_of_the_distribution(stage.models, version, request, answer)


def assert_are_scored(
    stage: Stage, weights: int, version: int, requests: list[ScoreRequest], answers: list[Completion]
) -> None:
    """Compare scores with transformers' model. weights: version of the model; version: the one that answers name."""
    for request, answer in zip(requests, answers, strict=True):
        tokens = torch.tensor([request.tokens])
        with torch.no_grad():
            logits = stage.models.load(weights)(tokens).logits[0, request.start - 1 : -1]
        expected = (logits / request.temperature).log_softmax(-1)
        scored = tokens[0, request.start :]
        assert answer.tokens.tolist() == scored.tolist() and set(answer.versions.tolist()) == {version}
        np.testing.assert_allclose(answer.log_probs, expected.gather(1, scored[:, None])[:, 0], atol=1e-4)
        if not request.top and request.ids is None:
            assert not answer.columns
            continue
        ids = expected.topk(request.top).indices if request.ids is None else torch.from_numpy(request.ids).long()
        assert np.array_equal(answer.columns["top_ids"], ids)
        np.testing.assert_allclose(answer.columns["top_log_probs"], expected.gather(1, ids), atol=1e-4)


def assert_is_of_the_distribution(models: Models, version: int, request: TurnRequest, answer: Completion) -> None:
    """Compare log-probs with transformers' model. A greedy turn has those of temperature 1, and the largest."""
    tokens = torch.tensor([[*request.prompt_tokens, *answer.tokens.tolist()]])
    with torch.no_grad():
        logits = models.load(version)(tokens).logits[0, len(request.prompt_tokens) - 1 : -1]
    expected = (logits / (request.temperature or 1.0)).log_softmax(-1).gather(1, tokens[0, -len(answer.tokens) :, None])
    np.testing.assert_allclose(answer.log_probs, expected[:, 0].numpy(), atol=1e-3)
    assert request.temperature or (logits.argmax(-1).numpy() == answer.tokens).all()
