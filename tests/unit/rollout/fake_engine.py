"""Deterministic stand-ins for an engine behind `Worker` and for a refit, in this process and on one thread.

The engine is the product's own `VllmEngine` over a model that "samples" the version of its weights: a token tells its
sampler, and a mixture of versions shows.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlctl.generation.engine import EngineStats, FinishedTurns
from rlctl.generation.requests import RequestId, TurnRequest
from rlctl.generation.vllm import engine
from rlctl.generation.vllm.active_requests import ActiveRequests
from rlctl.generation.vllm.engine import RefitState, VllmEngine
from rlctl.generation.vllm.scores import EngineScores
from rlctl.refit.protocol import Header, RefitReport, Untouched
from rlctl.refit.refit import EngineEnd, EnginesLost
from rlctl.workers.errors import Failure, WorkerDied, WorkerError, WorkerTimeout

MIXTURE = 10**6
# Seconds of virtual time between two checks of a waiting call.
_LOOK_S = 0.25


@dataclass
class Running:
    """A running request of `FakeModel`, whose fields have vLLM's names."""

    external_req_id: str
    length: int
    tokens: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_output_placeholders: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens)

    num_computed_tokens = num_output_tokens

    @property
    def request_id(self) -> str:
        return self.external_req_id


class FakeModel:
    """Stand-in for vLLM, with the attributes that the engine uses. A refit replaces its two weights one by one."""

    def __init__(self) -> None:
        self.weights = [-1, -1]
        self.running: dict[str, Running] = {}
        cache = SimpleNamespace(prefix_cache_stats=SimpleNamespace(queries=0, hits=0))
        scheduler = SimpleNamespace(
            requests=self.running, running=self.running, waiting=[], kv_cache_manager=cache, max_num_running_reqs=4
        )
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self.output_processor = SimpleNamespace(request_states=self.running)
        self.broken = False

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def step(self) -> list[Any]:
        if self.broken:
            raise RuntimeError("the model is broken")
        token = self.weights[0] if self.weights[0] == self.weights[1] else MIXTURE
        outputs = []
        for name, request in list(self.running.items()):
            request.tokens.append(token)
            if len(request.tokens) == request.length:
                del self.running[name]
                log_probs = SimpleNamespace(logprobs=[-1.0] * request.length)
                answer = SimpleNamespace(token_ids=request.tokens, logprobs=log_probs, finish_reason="stop")
                outputs.append(SimpleNamespace(request_id=name, finished=True, outputs=[answer]))
        return outputs


def answer(patch: pytest.MonkeyPatch, length: Callable[[TurnRequest], int]) -> None:
    """Patch engines to add requests to a `FakeModel`. length: returns the number of tokens of a request's answer."""

    def begin(model: FakeModel, request: Running) -> None:
        model.running[request.external_req_id] = request

    patch.setattr(engine, "make_request", lambda llm, spec, request: Running(str(request.id), length(request)))
    patch.setattr(engine, "add_request", begin)


class SteppedEngine(VllmEngine):
    """The real engine without its thread: it steps only when `step` is called. Needs the patch by `answer`."""

    def __init__(self, model: FakeModel | None = None) -> None:
        self.model = model or FakeModel()
        self._spec: Any = SimpleNamespace(recompute_kv_cache=False, reset_prefix_cache=True, values=False)
        self._requests = ActiveRequests()
        self._scores = EngineScores(self._call_workers)
        self._entering = deque()
        self._stats = EngineStats()
        self._version = -1
        self._llm = self.model
        self._state = RefitState.SERVING
        self._poison_reason = ""
        self._overwrites = False
        self._dropped = False
        self._steps = deque(maxlen=1)

    def _call_on_thread(self, work: Callable[[], Any]) -> Any:
        return work()

    def collect(self, patience_s: float) -> FinishedTurns:
        return super().collect(0.0)

    @property
    def version(self) -> int:
        """Version of the weights that the engine reports."""
        return self._version

    @property
    def active(self) -> list[TurnRequest]:
        """Requests without an answer, in order of arrival; empty if the engine has failed."""
        return [turn.request for turn in self._requests._turns.values()] if self._requests else []

    def hold(self, sequences: int) -> None:
        """Report room for `sequences` sequences in the cache."""
        self._stats = replace(self._stats, holds=sequences)

    def step(self) -> None:
        """Sample a token of each request, as the engine's thread would."""
        if self._requests:
            self._step_engine()

    def serve(self, actual: int, header: Header, torn: bool) -> None:
        """Replace the weights by those of version `actual`. torn: replace only the first of the two tensors."""

        def load() -> float:
            self.model.weights[0] = actual
            if torn:
                raise RuntimeError("the second tensor was lost")
            self.model.weights[1] = actual
            return 0.0

        self._change(header, load)

    def is_whole(self) -> bool:
        """Return True if all weights have the version that the engine reports, or if the engine refuses to sample."""
        return bool(self._poison_reason) or set(self.model.weights) == {self._version}


class FakeWorker:
    """`Worker` whose engine is in this process.

    It may be killed (`dead`), make no more steps (`hangs`), answer no call (`stuck`), or miss one deadline (`late`).
    """

    lost_its_node = False
    # All workers of a schedule.
    workers: ClassVar[list[Any]]
    worker_ids_by_request: ClassVar[dict[RequestId, set[int]]]

    def __init__(self, spec: Any) -> None:
        self.name = spec.name
        self.engine = SteppedEngine()
        self.dead = False
        self.hangs = False
        self.late = False
        self.stuck = False
        FakeWorker.workers.append(self)

    @staticmethod
    def forget_all() -> None:
        """Forget all workers, at the begin of a run."""
        FakeWorker.workers = []
        FakeWorker.worker_ids_by_request = defaultdict(set)

    def start(self, method: Callable[..., Any], *arguments: Any) -> "FakePending":
        return FakePending(self, method.__name__, arguments)

    async def call(self, deadline_s: float, method: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a call. `collect` waits until there are answers, or its patience is over."""
        now = asyncio.get_running_loop().time
        called_at = now()
        name = method.__name__
        while self.stuck and not self.dead and now() < called_at + deadline_s:
            await asyncio.sleep(_LOOK_S)
        if self.stuck and not self.dead:
            raise WorkerTimeout(name, [self.name], deadline_s, "run.deadline_s")
        if name == "submit":
            for request in arguments[0]:
                FakeWorker.worker_ids_by_request[request.id].add(id(self))
        (answer,) = FakePending(self, name, arguments).wait(deadline_s)
        while name == "collect" and not answer.ids and now() < called_at + arguments[0]:
            await asyncio.sleep(_LOOK_S)
            (answer,) = FakePending(self, name, arguments).wait(deadline_s)
        return answer

    def built(self) -> "FakePending":
        return FakePending(self, "is_whole", ())

    def kill(self) -> None:
        self.dead = True

    @property
    def makes_steps(self) -> bool:
        """True if the engine of this worker makes steps."""
        return not self.dead and not self.hangs and not self.stuck


@dataclass
class FakePending:
    """A pending call, which is executed when a caller waits for the result."""

    worker: FakeWorker
    method: str
    arguments: tuple[Any, ...]

    def wait(self, deadline_s: float, knob: str = "run.deadline_s") -> list[Any]:
        if self.worker.dead:
            raise WorkerDied(self.method, [self.worker.name], "killed")
        if self.worker.late:
            self.worker.late = False
            raise WorkerTimeout(self.method, [self.worker.name], deadline_s, knob)
        try:
            return [getattr(self.worker.engine, self.method)(*self.arguments)]
        except Exception as error:
            failure = Failure(self.worker.name, type(error).__name__, str(error), "")
            raise WorkerError(self.method, [failure]) from error


@dataclass
class FakeRefit:
    """A refit that ships the trainer's weights as any version. draw_fault: draws the fate of an engine's refit.

    note_progress: called when one engine has new weights and the next has not.
    """

    draw_fault: Callable[[], str]
    note_progress: Callable[[], None]
    # Version of the trainer's weights.
    trainer: int = 0
    options: Any = field(default_factory=lambda: SimpleNamespace(kind="shm"))

    def open(self, ends: list[EngineEnd]) -> list[Any]:
        return []

    def rest_trainers(self) -> None:
        pass

    def run(self, ends: list[EngineEnd], version: int, checks: Any = None) -> RefitReport:
        self._ship_weights(ends, range(len(ends)), version)
        return RefitReport(0.0)

    def catch_up(self, behind: list[EngineEnd], version: int) -> None:
        self._ship_weights(behind, range(len(behind)), version)

    def resend(self, ends: list[EngineEnd], fresh: list[EngineEnd], behind: list[EngineEnd], version: int) -> None:
        places = [ends.index(end) for end in fresh + behind]
        self._ship_weights(ends, places, version)

    def _ship_weights(self, ends: list[EngineEnd], places: Iterable[int], version: int) -> None:
        errors: dict[int, Exception] = {}
        for place in places:
            worker: Any = ends[place].worker
            fault = self.draw_fault()
            self.note_progress()
            try:
                if fault == "untouched":
                    raise WorkerError("refit", [Failure(worker.name, Untouched.__name__, "the wire broke", "")])
                if worker.dead or worker.hangs or worker.stuck:
                    raise WorkerDied("refit", [worker.name], "killed")
                worker.engine.serve(self.trainer, Header(version, "", "all"), fault == "torn")
            except (WorkerDied, WorkerError) as error:
                errors[place] = error
            except RuntimeError as error:
                errors[place] = WorkerError("refit", [Failure(worker.name, "RuntimeError", str(error), "")])
        if errors:
            raise EnginesLost(errors)
