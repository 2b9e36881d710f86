"""One vLLM engine in its process. One thread calls vLLM and makes its steps. Other calls run on it between two steps.

Requests and answers contain tokens. Each sampled token has its log-prob and the weight version that sampled it.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from enum import Enum
from typing import Any, Literal

from rlctl.generation.engine import Engine, EngineStats, FinishedTurns, LoadMode, MemoryPart
from rlctl.generation.requests import PackedCompletions, RequestId, ScoreRequest, TurnRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.active_requests import ActiveRequests, after_step, ordinary_gap, stall
from rlctl.generation.vllm.build import build_llm, cached_sequences, has_begun, sampled_tokens, scheduled_requests
from rlctl.generation.vllm.make_requests import add_request, make_request
from rlctl.generation.vllm.scores import EngineScores
from rlctl.refit.protocol import (
    EngineReport,
    Header,
    LiveProof,
    Mode,
    PeerLost,
    ReceiveReport,
    RefitInterrupted,
    TransportSpec,
    Untouched,
)
from rlctl.refit.refit_plan import RefitPlan

_IDLE_POLL_S = 0.05
_STAGED_POLL_S = 0.002
_STEPS_REMEMBERED = 4096
# vLLM gets this number of requests more than it decodes at a time, and further requests later.
_SPARE = 16
# In each step vLLM gets at least this number of new requests, even if it has enough.
_ENTER_PER_STEP = 2
# A caller's thread sleeps 0.1 ms after each four requests, so that the engine's thread can run.
_REQUESTS_PER_PAUSE = 4
_PAUSE_S = 1e-4


class RefitState(Enum):
    """State of an engine's live weights."""

    SERVING = "one complete version"
    RECEIVING = "one complete version; the next version arrives in shadow parameters"
    CHANGING = "becoming the next version: nothing is sampled"
    INTERRUPTED = "perhaps a mixture of versions: nothing is sampled until a complete version has arrived"
    POISONED = "perhaps a mixture of versions: nothing is sampled any more"


class VllmEngine(Engine):
    """vLLM engine. Several threads may call it; only one thread calls vLLM."""

    # Header of the live version while its tensors still have to be proven; else None.
    _unproven: Header | None = None
    # The workers' proofs for the last version, or the error that proving raised.
    _proof_or_error: list[LiveProof] | BaseException

    def __init__(self, spec: EngineSpec, extension: str) -> None:
        """Build the engine. extension: class mixed into vLLM's workers, "module.Class"."""
        self._spec = spec
        self._extension = extension
        self._notes = list[str]()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._requests = ActiveRequests()
        self._scores = EngineScores(self._call_workers)
        # Requests that were not passed to vLLM yet.
        self._entering: deque[Any] = deque()
        self._stats = EngineStats()
        self._version = spec.version
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._mode: Literal["staged", "direct"] = "direct"
        # `LoadMode.overwrites` of all workers: True if a refit writes every tensor.
        self._overwrites = False
        # True if `sleep` dropped the weights and no refit has written new ones yet.
        self._dropped = False
        self._state = RefitState.SERVING
        self._poison_reason = ""
        self._llm: Any = None
        self._thread = threading.Thread(target=self._serve_steps, name="engine", daemon=True)
        self._thread.start()
        self._call_on_thread(lambda: None)

    def submit(self, requests: list[TurnRequest]) -> None:
        self._begin_requests(requests)

    def score(self, requests: list[ScoreRequest]) -> None:
        self._begin_requests(requests)

    def open_scores(self) -> str:
        try:
            self._call_on_thread(self._scores.open)
        except RuntimeError as error:
            return str(error)
        return ""

    def collect(self, patience_s: float) -> FinishedTurns:
        turns = self._requests.collect(patience_s, lambda: len(self._scheduler.waiting) + len(self._entering))
        ids = [turn.request.id for turn in turns]
        columns = PackedCompletions.pack(self._map_on_caller(lambda turn: turn.completion(), turns))
        return FinishedTurns(ids, columns, replace(self._stats, at=time.monotonic()))

    def abort(self, ids: list[RequestId]) -> int:
        def abort_on_thread() -> int:
            sampled = {name: request.num_output_tokens for request, name in scheduled_requests(self._llm)}
            turns = self._requests.abort(ids)
            self._entering = deque(request for request in self._entering if request.request_id not in turns)
            self._llm.abort_request(list(turns))
            self._scores.forget(turns)
            return sum(turn.num_sampled(sampled.get(name, 0)) for name, turn in turns.items())

        tokens: int = self._call_on_thread(abort_on_thread)
        return tokens

    def refit_open(
        self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool
    ) -> LoadMode:
        # All workers choose by the smallest free memory of any worker. If only some received into shadow parameters,
        # the others would sample while their weights change.
        room = min(self._call_on_thread(lambda: self._call_workers("rl_room")))
        arguments = (spec, plan, first_rank, mode, in_flight, room)
        choices: list[LoadMode] = self._call_on_thread(lambda: self._call_workers("rl_open", *arguments))
        choice = replace(choices[0], overwrites=all(worker_choice.overwrites for worker_choice in choices))
        self._mode = choice.mode
        self._overwrites = choice.overwrites
        return choice

    def refit_receive(self, header: Header) -> EngineReport:
        begin = time.perf_counter()
        reports = self._receive_shadow(header) if self._mode == "staged" else []
        receive_seconds = self._call_on_thread(lambda: self._change(header, lambda: self._make_live(header, reports)))
        # Wait until the device has copied the shadow parameters, because the next version overwrites them.
        copy_seconds = self._call_on_thread(self._count_commit)
        while copy_seconds is None:
            time.sleep(_STAGED_POLL_S)
            copy_seconds = self._call_on_thread(self._count_commit)
        end = time.perf_counter()
        self._let_steps_pass(end)
        proofs = self._call_on_thread(self._proofs)
        steps = list(self._steps)
        return EngineReport(
            max(reports, key=lambda report: report.seconds),
            end - begin,
            receive_seconds + copy_seconds,
            stall(steps, begin, end),
            tuple(proofs),
            ordinary_gap(steps, begin),
        )

    def sleep(self) -> None:
        """Free the device's memory for the trainer. The key-value cache is dropped. The weights are dropped too if a
        refit writes all of them; otherwise they are kept in host memory."""

        def rest() -> None:
            # vLLM's level 1 copies the weights to the host, level 2 drops them and keeps only buffers.
            self._dropped |= self._overwrites
            self._llm.sleep(level=2 if self._overwrites else 1)

        self._call_on_thread(rest)

    def wake(self, part: MemoryPart) -> None:
        self._call_on_thread(lambda: self._llm.wake_up(tags=[part]))

    def memory(self) -> dict[str, float]:
        import psutil

        memory_by_rank = self._call_on_thread(lambda: self._llm.collective_rpc("rl_memory"))
        totals = {key: sum(memory[key] for memory in memory_by_rank) for key in memory_by_rank[0]}
        return {**totals, "host_rss": float(psutil.Process().memory_info().rss)}

    def checksums(self) -> dict[str, int]:
        checksums_by_rank = self._call_on_thread(lambda: self._call_workers("rl_checksums"))
        checksums = {}
        for rank, rank_checksums in enumerate(checksums_by_rank):
            for name, checksum in rank_checksums.items():
                checksums[f"{rank}: {name}"] = checksum
        return checksums

    def notes(self) -> list[str]:
        return self._notes

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `RefitWorker` on every worker, between two steps. For benchmarks and tests."""
        answers: list[Any] = self._call_on_thread(lambda: self._llm.collective_rpc(method, args=args))
        return answers

    def _map_on_caller(self, work: Callable[[Any], Any], turns: Sequence[Any]) -> list[Any]:
        """Return `work` applied to each turn, on the caller's thread.

        Python switches between threads only every 5 ms, as long as a whole step. So the caller's thread sleeps now and
        then, to let the engine's thread run.
        """
        answers = list[Any]()
        for number, turn in enumerate(turns, 1):
            answers.append(work(turn))
            if number % _REQUESTS_PER_PAUSE == 0 and self._requests:
                time.sleep(_PAUSE_S)
        return answers

    def _call_on_thread(self, work: Callable[[], Any]) -> Any:
        """Make the engine's thread call `work` between two steps. Return the value, or raise the error, of `work`."""
        future: Future[Any] = Future()
        self._commands.put((work, future))
        return future.result()

    def _serve_steps(self) -> None:
        try:
            self._llm, self._notes = build_llm(self._spec, self._extension)
            self._stats = replace(self._stats, holds=cached_sequences(self._llm))
            if self._spec.scores:
                self._scores.open()
        except BaseException as error:
            # Answer every command with this error. `__init__` waits for a first command, and so raises it.
            while True:
                _, future = self._commands.get()
                future.set_exception(error)
        while True:
            self._run_commands()
            if self._has_work:
                self._step_engine()

    @property
    def _has_work(self) -> bool:
        return bool(self._requests) and self._state is not RefitState.INTERRUPTED

    def _run_commands(self) -> None:
        while True:
            try:
                work, future = self._commands.get(block=not self._has_work, timeout=_IDLE_POLL_S)
            except queue.Empty:
                return
            try:
                future.set_result(work())
            except BaseException as error:  # also errors that would otherwise end this thread
                future.set_exception(error)

    def _step_engine(self) -> None:
        try:
            self._sample_tokens()
        except BaseException as error:
            # Continue with this thread, so that later callers get an error instead of waiting forever.
            self._poison(f"vLLM failed in a step: {error}", error)

    def _sample_tokens(self) -> None:
        """Make one step of vLLM, and record finished requests."""
        begin = time.perf_counter()
        self._let_requests_enter()
        outputs = self._llm.step()
        self._steps.append(time.perf_counter())
        if not self._prove():
            return
        finished = [output for output in outputs if output.finished]
        self._stats = after_step(
            self._stats,
            self._steps[-1] - begin,
            len(self._scheduler.running) + len(finished),
            self._scheduler.kv_cache_manager.prefix_cache_stats,
        )
        scores = self._scores.take(output.request_id for output in finished)
        for output in finished:
            answer = output.outputs if self._spec.values else output.outputs[0]
            self._requests.finish(output.request_id, scores.get(output.request_id) or answer)

    @property
    def _scheduler(self) -> Any:
        return self._llm.engine_core.engine_core.scheduler

    def _make_vllm_request(self, request: TurnRequest | ScoreRequest) -> Any:
        return make_request(self._llm, self._spec, request)

    def _begin_requests(self, requests: Sequence[TurnRequest | ScoreRequest]) -> None:
        def add() -> None:
            self._require_sound()
            if self._dropped:
                raise RuntimeError("this engine's weights were dropped when it fell asleep: a refit must come first")
            self._requests.add(requests, self._version)
            self._entering.extend(vllm_requests)

        # vLLM checks the requests on the caller's thread, so that the engine's thread can make steps meanwhile.
        vllm_requests = self._map_on_caller(self._make_vllm_request, requests)
        self._call_on_thread(add)

    def _let_requests_enter(self) -> None:
        """Pass requests to vLLM: as many as it has room for, and at least `_ENTER_PER_STEP`."""
        scheduler = self._scheduler
        room = scheduler.max_num_running_reqs + _SPARE - len(scheduler.running) - len(scheduler.waiting)
        for _ in range(min(len(self._entering), max(room, _ENTER_PER_STEP))):
            self._enter_request(self._entering.popleft())

    def _require_sound(self) -> None:
        if self._state is RefitState.POISONED:
            raise RuntimeError(f"this engine must not be used: {self._poison_reason}")

    def _enter_request(self, request: Any) -> None:
        """Pass a request to vLLM. request: from `_make_vllm_request`."""
        name = request.request_id
        if self._spec.reset_prefix_cache:
            # The salt makes cached prefixes of older weights unusable. vLLM's own reset of the prefix cache does
            # nothing while requests run, or restarts all requests.
            request.cache_salt = f"v{self._version}"
        add_request(self._llm, request)
        own_request = self._requests.request(name)
        if isinstance(own_request, ScoreRequest) and not self._spec.values:
            self._scores.open()
            self._scores.add(name, request.request_id, own_request)

    def _receive_shadow(self, header: Header) -> list[ReceiveReport]:
        """Receive into shadow parameters while requests continue. Raises Untouched if receiving fails."""
        self._enter_state(RefitState.RECEIVING)
        try:
            self._call_on_thread(lambda: self._call_workers("rl_stage", header))
            while True:
                reports: list[ReceiveReport] = self._call_on_thread(lambda: self._call_workers("rl_staged"))
                if all(reports):
                    return reports
                time.sleep(_STAGED_POLL_S)
        except Exception as error:
            self._enter_state(RefitState.SERVING)
            raise Untouched(str(error)) from error

    def _change(self, header: Header, load: Callable[[], float]) -> float:
        """Make a version live by calling `load`; return the seconds that `load` returned. Running requests continue
        with the new weights."""
        self._require_sound()
        self._enter_state(RefitState.CHANGING)
        try:
            seconds = load()
        except PeerLost as error:
            # The peer may be at fault, not this engine: running requests continue once the version has arrived.
            self._enter_state(RefitState.INTERRUPTED)
            raise RefitInterrupted(str(error)) from error
        except BaseException as error:
            # The weights may be a mixture of versions: running requests must not continue.
            self._poison(f"the refit to version {header.version} failed: {error}", error)
            raise
        self._enter_state(RefitState.SERVING)
        self._version = header.version
        self._dropped = False
        continuing = self._restart_fresh_requests()
        counts = sampled_tokens(continuing, recomputed=self._spec.recompute_kv_cache)
        self._requests.change(counts, header.version)
        self._stats = replace(self._stats, paused=self._stats.paused + seconds)
        return seconds

    def _enter_state(self, state: RefitState) -> None:
        """Enter the next state of a refit. A POISONED engine stays POISONED."""
        if self._state is not RefitState.POISONED:
            self._state = state

    def _poison(self, reason: str, error: BaseException) -> None:
        """Make the engine POISONED: it samples no more, and running requests end with the error."""
        self._state = RefitState.POISONED
        self._poison_reason = reason
        self._entering.clear()
        self._requests.fail(error)

    def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `RefitWorker` on all workers; return their answers. Raises the first error in the end.

        If the method raised, vLLM would stop reading at the first error, and take the remaining answers for answers to
        the next call. So the workers return their errors.
        """
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _make_live(self, header: Header, reports: list[ReceiveReport]) -> float:
        """Commit a version; receive it first if `reports` is empty. Return the seconds of receiving here, else 0."""
        seconds = 0.0
        if not reports:
            begin = time.perf_counter()
            # `+=` changes the caller's list on purpose: the caller reads the reports.
            reports += self._call_workers("rl_receive", header)
            seconds = time.perf_counter() - begin
        self._call_workers("rl_commit", header)
        self._unproven = header if header.prove else None
        self._proof_or_error = []
        return seconds

    def _count_commit(self) -> float | None:
        """Return the seconds of the last commit and add them to the stats; None while a worker's device is not done."""
        seconds_by_worker = self._call_workers("rl_committed")
        if None in seconds_by_worker:
            return None
        seconds = float(max(seconds_by_worker))
        self._stats = replace(self._stats, paused=self._stats.paused + seconds)
        return seconds

    def _prove(self) -> bool:
        """Make the workers prove the live tensors of an unproven version. Return False if that failed, else True.

        This is called on the engine's thread in the first step after a change of weights, before the step's tokens are
        recorded. The device works on that step meanwhile.
        """
        header = self._unproven
        if header is None:
            return True
        self._unproven = None
        try:
            self._proof_or_error = self._call_workers("rl_prove", header)
        except BaseException as error:
            self._proof_or_error = error
            self._poison(f"the refit to version {header.version} failed: {error}", error)
            return False
        return True

    def _proofs(self) -> list[LiveProof]:
        """Return each worker's proof of the last version. Prove it now if no step did. Raises the error of proving."""
        self._prove()
        if isinstance(self._proof_or_error, BaseException):
            raise self._proof_or_error
        return self._proof_or_error

    def _restart_fresh_requests(self) -> list[tuple[Any, str]]:
        """Pass requests that have not begun to vLLM again, because their salt names the old version.

        Scored requests begin again too, because one version computes a score. Return (request, name) of the others.
        With `EngineSpec.recompute_kv_cache`, these recompute their keys and values.
        """
        scheduled = scheduled_requests(self._llm)
        continuing = [(request, name) for request, name in scheduled if has_begun(request) and name not in self._scores]
        continuing_names = {name for _, name in continuing}
        fresh_names = [name for _, name in scheduled if name not in continuing_names]
        if self._spec.recompute_kv_cache:
            self._llm.reset_prefix_cache(reset_running_requests=True)
        if fresh_names:
            self._llm.abort_request(fresh_names)
            self._scores.forget(fresh_names)
        for name in fresh_names:
            self._enter_request(self._make_vllm_request(self._requests.restart(name, self._version)))
        for request in self._entering:
            self._requests.restart(request.request_id, self._version)
        return continuing

    def _let_steps_pass(self, end: float) -> None:
        """Wait at most 1 s for the first step after `end`, so that `stall` can measure the gap between steps."""
        while self._requests and not (self._steps and self._steps[-1] > end) and time.perf_counter() < end + 1:
            time.sleep(_STAGED_POLL_S)
