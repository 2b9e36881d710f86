"""One vLLM engine in its process: a thread owns it and steps it; requests and weight changes go between steps.

Tokens in, tokens out, with the log-probs they were sampled with and the weight version that sampled them.
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
from rlctl.generation.requests import PackedCompletions, RequestId, TurnRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.active_requests import ActiveRequests, after_step, ordinary_gap, stall
from rlctl.generation.vllm.build import add_request, begun, build_llm, cached_sequences, vllm_request
from rlctl.refit.protocol import (
    EngineReport,
    Header,
    Interrupted,
    LiveProof,
    Mode,
    PeerLost,
    ReceiveReport,
    TransportSpec,
    Untouched,
)
from rlctl.refit.refit_plan import RefitPlan

_IDLE_POLL_S = 0.05
_STAGED_POLL_S = 0.002
_STEPS_REMEMBERED = 4096
# Requests handed to vLLM beyond the number it decodes at a time.
_SPARE = 16
# Requests that enter vLLM in a step, where it has those.
_ENTER = 2
# A caller's thread pauses after each four requests, for 0.1 ms, so that the engine's thread runs.
_TOGETHER, _YIELD_S = 4, 1e-4


class RefitState(Enum):
    """State of an engine's live weights."""

    SERVING = "one version, whole"
    RECEIVING = "one version, whole; the next one arrives beside it"
    CHANGING = "becoming the next version: nothing is sampled"
    INTERRUPTED = "perhaps a mixture: nothing is sampled until a version has arrived whole"
    POISONED = "perhaps a mixture: nothing is sampled any more"


class VllmEngine(Engine):
    """Samples for several callers at a time; every touch of vLLM happens on one thread."""

    # Header of a live version that is to be proven; the workers' proofs of the last one, or their error.
    _unproven: Header | None = None
    _proven: list[LiveProof] | BaseException

    def __init__(self, spec: EngineSpec, extension: str) -> None:
        """Build the engine. extension: class mixed into vLLM's workers, "module.Class"."""
        self._spec, self._extension = spec, extension
        self._notes = list[str]()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._requests = ActiveRequests()
        # Requests not handed to vLLM yet.
        self._entering: deque[Any] = deque()
        self._stats = EngineStats()
        self._version = spec.version
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._mode: Literal["staged", "direct"] = "direct"
        # `LoadMode.overwrites` of the refit.
        self._overwrites = False
        # The weights were dropped by `sleep`, and no refit has written others yet.
        self._dropped = False
        self._state = RefitState.SERVING
        # Reason of POISONED.
        self._poisoned = ""
        self._llm: Any = None
        self._thread = threading.Thread(target=self._serve_steps, name="engine", daemon=True)
        self._thread.start()
        self._on_thread(lambda: None)

    def submit(self, requests: list[TurnRequest]) -> None:
        # On the caller's thread: the engine makes steps while vLLM checks the requests.
        checked = self._map_on_caller(lambda request: vllm_request(self._llm, self._spec, request), requests)
        self._on_thread(lambda: self._add_requests(requests, checked))

    def collect(self, patience_s: float) -> FinishedTurns:
        turns = self._requests.collect(patience_s, lambda: len(self._scheduler.waiting) + len(self._entering))
        columns = PackedCompletions.pack(self._map_on_caller(lambda turn: turn.completion(), turns))
        return FinishedTurns([turn.request.id for turn in turns], columns, replace(self._stats, at=time.monotonic()))

    def abort(self, ids: list[RequestId]) -> int:
        def stop() -> int:
            sampled = {name: request.num_output_tokens for request, name in self._scheduled()}
            turns = self._requests.abort(ids)
            self._entering = deque(each for each in self._entering if each.request_id not in turns)
            self._llm.abort_request(list(turns))
            return sum(
                len(turn.output.token_ids) if turn.output else sampled.get(name, 0) for name, turn in turns.items()
            )

        tokens: int = self._on_thread(stop)
        return tokens

    def refit_open(
        self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool
    ) -> LoadMode:
        # Together: were one worker to stage and another not, one would sample while its weights change.
        room = min(self._on_thread(lambda: self._workers("rl_room")))
        arguments = (spec, plan, first_rank, mode, in_flight, room)
        choices: list[LoadMode] = self._on_thread(lambda: self._workers("rl_open", *arguments))
        choice = replace(choices[0], overwrites=all(each.overwrites for each in choices))
        self._mode, self._overwrites = choice.mode, choice.overwrites
        return choice

    def refit_receive(self, header: Header) -> EngineReport:
        begin = time.perf_counter()
        reports = self._receive_shadow(header) if self._mode == "staged" else []
        paused = self._on_thread(lambda: self._change(header, lambda: self._make_live(header, reports)))
        # Nothing may arrive in shadow parameters that the device still copies.
        while (copying := self._on_thread(self._count_commit)) is None:
            time.sleep(_STAGED_POLL_S)
        commit, end = paused + copying, time.perf_counter()
        self._let_steps_pass(end)
        proofs = self._on_thread(self._proofs)
        received = max(reports, key=lambda report: report.seconds)
        steps = list(self._steps)
        gap = ordinary_gap(steps, begin)
        return EngineReport(received, end - begin, commit, stall(steps, begin, end), tuple(proofs), gap)

    def sleep(self) -> None:
        """Give the device's memory to the trainer. Weights and key-value cache are dropped: a refit comes before the
        next token. Where it goes through the engine's own loader, which may read old weights, they go to the host."""

        def rest() -> None:
            # vLLM's level 1 copies weights to the host and back, level 2 drops them and keeps buffers.
            self._dropped |= self._overwrites
            self._llm.sleep(level=2 if self._overwrites else 1)

        self._on_thread(rest)

    def wake(self, part: MemoryPart) -> None:
        self._on_thread(lambda: self._llm.wake_up(tags=[part]))

    def memory(self) -> dict[str, float]:
        import psutil

        parts = self._on_thread(lambda: self._llm.collective_rpc("rl_memory"))
        totals = {key: sum(part[key] for part in parts) for key in parts[0]}
        return {**totals, "host_rss": float(psutil.Process().memory_info().rss)}

    def checksums(self) -> dict[str, int]:
        ranks = self._on_thread(lambda: self._workers("rl_checksums"))
        return {f"{rank}: {name}": value for rank, own in enumerate(ranks) for name, value in own.items()}

    def notes(self) -> list[str]:
        return self._notes

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension on every worker, between two steps. For benches and tests."""
        answers: list[Any] = self._on_thread(lambda: self._llm.collective_rpc(method, args=args))
        return answers

    def _map_on_caller(self, work: Callable[[Any], Any], each: Sequence[Any]) -> list[Any]:
        """Return `work` applied to each, on the caller's thread.

        Python lets the engine's thread go on after 5 ms of another's, which is a whole step; so this one stands back
        in between.
        """
        made = list[Any]()
        for number, one in enumerate(each, 1):
            made.append(work(one))
            if number % _TOGETHER == 0 and self._requests:
                time.sleep(_YIELD_S)
        return made

    def _on_thread(self, work: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._commands.put((work, future))
        return future.result()

    def _serve_steps(self) -> None:
        try:
            self._llm, self._notes = build_llm(self._spec, self._extension)
            self._stats = replace(self._stats, holds=cached_sequences(self._llm))
        except BaseException as error:
            # A caller learns why: construction waits for the first command's answer.
            while True:
                self._commands.get()[1].set_exception(error)
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
            except BaseException as error:  # also one that would end the thread
                future.set_exception(error)

    def _step_engine(self) -> None:
        try:
            self._sample_tokens()
        except BaseException as error:
            # The thread lives on: the next caller gets an answer, not silence.
            self._poison(f"vLLM failed in a step: {error}", error)

    def _sample_tokens(self) -> None:
        """Make one step of vLLM, and record finished requests."""
        begin = time.perf_counter()
        self._let_in()
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
        for output in finished:
            self._requests.finish(output.request_id, output.outputs[0])

    @property
    def _scheduler(self) -> Any:
        return self._llm.engine_core.engine_core.scheduler

    def _add_requests(self, requests: list[TurnRequest], checked: list[Any]) -> None:
        self._require_sound()
        if self._dropped:
            raise RuntimeError("this engine's weights were dropped when it fell asleep: a refit must come first")
        self._requests.add(requests, self._version)
        self._entering.extend(checked)

    def _let_in(self) -> None:
        """Hand requests to vLLM: all that have a place there, and a few per step of the others."""
        scheduler = self._scheduler
        room = scheduler.max_num_running_reqs + _SPARE - len(scheduler.running) - len(scheduler.waiting)
        for _ in range(min(len(self._entering), max(room, _ENTER))):
            self._enter(self._entering.popleft())

    def _require_sound(self) -> None:
        if self._state is RefitState.POISONED:
            raise RuntimeError(f"this engine must not be used: {self._poisoned}")

    def _enter(self, request: Any) -> None:
        """Hand a request to vLLM. request: from `vllm_request`."""
        if self._spec.reset_prefix_cache:
            # The salt keeps prefixes that older weights computed out of reach. vLLM's own reset does nothing while
            # requests run, or restarts them all.
            request.cache_salt = f"v{self._version}"
        add_request(self._llm, request)

    def _receive_shadow(self, header: Header) -> list[ReceiveReport]:
        """Receive into shadow parameters while requests continue. Raises Untouched."""
        self._enter_state(RefitState.RECEIVING)
        try:
            self._on_thread(lambda: self._workers("rl_stage", header))
            while not all(reports := self._on_thread(lambda: self._workers("rl_staged"))):
                time.sleep(_STAGED_POLL_S)
        except Exception as error:
            self._enter_state(RefitState.SERVING)
            raise Untouched(str(error)) from error
        return list(reports)

    def _change(self, header: Header, load: Callable[[], float]) -> float:
        """Make a version live by `load`; running requests continue under the new weights; return `load`'s seconds."""
        self._require_sound()
        self._enter_state(RefitState.CHANGING)
        try:
            seconds = load()
        except PeerLost as error:
            # Running requests continue once the version has come: the other end may be at fault, not this engine.
            self._enter_state(RefitState.INTERRUPTED)
            raise Interrupted(str(error)) from error
        except BaseException as error:
            # Weights may be a mixture: running requests must not continue.
            self._poison(f"the refit to version {header.version} failed: {error}", error)
            raise
        self._enter_state(RefitState.SERVING)
        self._version, self._dropped = header.version, False
        begun_before = self._restart_what_has_not_begun()
        self._requests.change(self._sampled_tokens(begun_before), header.version)
        self._stats = replace(self._stats, paused=self._stats.paused + seconds)
        return seconds

    def _enter_state(self, state: RefitState) -> None:
        """Enter the next state of a refit; an engine that was poisoned meanwhile stays so."""
        if self._state is not RefitState.POISONED:
            self._state = state

    def _poison(self, why: str, error: BaseException) -> None:
        """Sample nothing from now on, and end running requests with the error."""
        self._state, self._poisoned = RefitState.POISONED, why
        self._entering.clear()
        self._requests.fail(error)

    def _workers(self, method: str, *arguments: Any) -> list[Any]:
        """Return the answers of all workers to a method of `RefitWorker`. Raises the first failure once all answered.

        vLLM itself stops reading at the first failure, and mistakes the remaining answers for those of the next call.
        """
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _make_live(self, header: Header, reports: list[ReceiveReport]) -> float:
        """Commit a version; receive first if there are no reports yet. Return the seconds of receiving here."""
        begin = end = time.perf_counter()
        if not reports:
            reports += self._workers("rl_receive", header)
            end = time.perf_counter()
        self._workers("rl_commit", header)
        self._unproven, self._proven = header if header.prove else None, []
        return end - begin

    def _count_commit(self) -> float | None:
        """Count the pause of the last commit once every worker's device has done it, and return it; None before."""
        parts = self._workers("rl_committed")
        if None in parts:
            return None
        seconds = float(max(parts))
        self._stats = replace(self._stats, paused=self._stats.paused + seconds)
        return seconds

    def _prove(self) -> bool:
        """Have the workers compare the live tensors of a version that is not proven yet; return False if they differ.

        On the engine's thread: after the step that follows a change, before its tokens are recorded. The device is at
        work on that step meanwhile.
        """
        header, self._unproven = self._unproven, None
        if header is None:
            return True
        try:
            self._proven = self._workers("rl_prove", header)
        except BaseException as error:
            self._proven = error
            self._poison(f"the refit to version {header.version} failed: {error}", error)
            return False
        return True

    def _proofs(self) -> list[LiveProof]:
        """Return each worker's proof of the last version, made now if nothing was sampled. Raises its error."""
        self._prove()
        if isinstance(self._proven, BaseException):
            raise self._proven
        return self._proven

    def _restart_what_has_not_begun(self) -> list[tuple[Any, str]]:
        """Have requests that have not begun enter again: their salt is of the version before. Return the others.

        Running ones begin to recompute their keys and values, if they are to.
        """
        found = self._scheduled()
        fresh = [name for request, name in found if not begun(request)]
        if self._spec.recompute_kv_cache:
            self._llm.reset_prefix_cache(reset_running_requests=True)
        if fresh:
            self._llm.abort_request(fresh)
        for name in fresh:
            again = self._requests.restart(name, self._version)
            self._enter(vllm_request(self._llm, self._spec, again))
        for request in self._entering:
            self._requests.restart(request.request_id, self._version)
        return [(request, name) for request, name in found if begun(request)]

    def _sampled_tokens(self, running: list[tuple[Any, str]]) -> list[tuple[str, int]]:
        """Return the name of each running request, and how many tokens the version before sampled.

        A token that the device still works on counts: the weights of before began it. Where keys and values are
        recomputed it is thrown away.
        """
        late = 0 if self._spec.recompute_kv_cache else 1
        return [(name, request.num_output_tokens + late * request.num_output_placeholders) for request, name in running]

    def _scheduled(self) -> list[tuple[Any, str]]:
        """Return the requests of vLLM's scheduler with the names that they were added by."""
        requests = self._scheduler.requests
        states = [(requests.get(name), state) for name, state in self._llm.output_processor.request_states.items()]
        return [(request, state.external_req_id) for request, state in states if request is not None]

    def _let_steps_pass(self, end: float) -> None:
        """The gap that a change of weights makes ends with the step after it."""
        while self._requests and not (self._steps and self._steps[-1] > end) and time.perf_counter() < end + 1:
            time.sleep(_STAGED_POLL_S)
