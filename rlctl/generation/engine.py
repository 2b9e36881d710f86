"""One vLLM engine in its process: a thread owns it and steps it; requests and weight changes go between steps.

Tokens in, tokens out, with the log-probs they were sampled with and the weight version that sampled them.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Literal

from rlctl.generation.active_requests import (
    ActiveRequests,
    Cancelled,
    EngineStats,
    FinishedGroups,
    SampledTokens,
    TokenVersions,
    columns,
    stall,
)
from rlctl.generation.requests import PackedRollouts, TurnRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm_build import begun, build_llm, sampling_params
from rlctl.generation.weight_loader import LoadMode
from rlctl.refit.plan import RefitPlan
from rlctl.refit.protocol import EngineReport, Header, Mode, ReceiveReport, TransportSpec, Untouched
from rlctl.refit.refit import ReceivesWeights

_IDLE_POLL_S = 0.05
_STAGED_POLL_S = 0.002
_STEPS_REMEMBERED = 4096


@dataclass(frozen=True)
class MakeEngine:
    """Builds an engine inside its process."""

    spec: EngineSpec

    def __call__(self) -> "Engine":
        return Engine(self.spec)


class RefitState(Enum):
    """State of an engine's live weights."""

    SERVING = "one version, whole"
    RECEIVING = "one version, whole; the next one arrives beside it"
    CHANGING = "becoming the next version: nothing is sampled"
    POISONED = "perhaps a mixture: nothing is sampled any more"


class Engine(ReceivesWeights):
    """Samples for several callers at a time; every touch of vLLM happens on one thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._running = ActiveRequests()
        self._finished: queue.SimpleQueue[tuple[str, Future[list[SampledTokens]]] | None] = queue.SimpleQueue()
        self._counters = EngineStats()
        self._ended: dict[str, int] = {}
        self._places = 0
        self._version = -1
        self._boundaries = TokenVersions()
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._mode: Literal["staged", "direct"] = "direct"
        self._state = RefitState.SERVING
        # Reason of POISONED.
        self._poisoned = ""
        self._llm: Any = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._on_thread(lambda: None)

    def generate(self, requests: list[TurnRequest]) -> PackedRollouts:
        """Sample every request; returns when all are done, in the requests' order."""
        return columns([future.result() for future in self._on_thread(lambda: self._add(requests))])

    def submit(self, requests: list[TurnRequest]) -> None:
        """Begin to sample; `collect` hands out each group when it is done. Returns at once."""
        for request, future in zip(requests, self._on_thread(lambda: self._add(requests))):
            future.add_done_callback(partial(self._keep, request.id))

    def collect(self, patience_s: float) -> FinishedGroups:
        """The submitted groups that ended since the last call; waits at most that long for one, or for as many
        rollouts of several groups as make room for another group.

        Raises what ended them otherwise than by `abort`.
        """
        news: list[tuple[str, Future[list[SampledTokens]]] | None] = []
        while True:
            try:
                news.append(self._finished.get(timeout=0.0 if news else patience_s))
            except queue.Empty:
                break
        ended = [group for group in news if group]
        kept = [(name, future) for name, future in ended if not isinstance(future.exception(), Cancelled)]
        found = columns([future.result() for _, future in kept])
        return FinishedGroups([name for name, _ in kept], found, self._read(), self._ended)

    def steps(self) -> int:
        """Made so far; answers while requests run."""
        return self._counters.steps

    def _read(self) -> EngineStats:
        return replace(self._counters, at=time.monotonic())

    def abort(self, ids: list[str]) -> None:
        """End these groups, as far as they run."""
        self._on_thread(lambda: self._drop(ids, Cancelled(f"requests {ids} were aborted")))

    def refit_open(
        self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool
    ) -> LoadMode:
        """Join the refit transport. in_flight: requests go on during a refit. See `weight_loader.choose_loading`."""
        # Together: were one worker to stage and another not, one would sample while its weights change.
        room = min(self._on_thread(lambda: self._workers("rl_room")))
        arguments = (spec, plan, first_rank, mode, in_flight, room)
        choice: LoadMode = self._on_thread(lambda: self._workers("rl_open", *arguments))[0]
        self._mode = choice.mode
        return choice

    def refit_receive(self, header: Header) -> EngineReport:
        begin, reports = time.perf_counter(), list[ReceiveReport]()
        if self._mode == "staged":
            reports = self._stage(header)
            commit = self._on_thread(lambda: self._change(header, self._commit))
        else:
            commit = self._on_thread(lambda: self._change(header, lambda: self._receive(header, reports)))
        end = time.perf_counter()
        self._let_steps_pass(end)
        received = max(reports, key=lambda report: report.seconds)
        return EngineReport(received, end - begin, commit, stall(list(self._steps), begin, end))

    def sleep(self) -> None:
        """Give the device's memory to the trainer: weights to the host, key-value cache dropped."""
        self._on_thread(lambda: self._llm.sleep(level=1))

    def wake(self, tags: list[str]) -> None:
        """Take memory back: "weights" before a refit, "kv_cache" before generation."""
        self._on_thread(lambda: self._llm.wake_up(tags=tags))

    def memory(self) -> dict[str, float]:
        """Bytes: device_allocated, device_peak (summed over the engine's devices), host_rss."""
        import psutil

        parts = self._on_thread(lambda: self._llm.collective_rpc("rl_memory"))
        totals = {key: sum(part[key] for part in parts) for key in parts[0]}
        return {**totals, "host_rss": float(psutil.Process().memory_info().rss)}

    def cancel(self) -> None:
        """End every running request: its `generate` raises Cancelled."""
        self._on_thread(lambda: self._drop(self._running.names(), Cancelled("every request was cancelled")))

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension (`EngineSpec.extension`) on every worker, between two steps."""
        answers: list[Any] = self._on_thread(lambda: self._llm.collective_rpc(method, args=args))
        return answers

    def _keep(self, name: str, future: "Future[list[SampledTokens]]") -> None:
        self._finished.put((name, future))

    def _on_thread(self, work: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._commands.put((work, future))
        return future.result()

    def _run(self) -> None:
        try:
            self._llm = build_llm(self._spec)
        except BaseException as error:
            # Whoever asks learns why: construction waits for the first command's answer.
            while True:
                self._commands.get()[1].set_exception(error)
        while True:
            self._run_commands()
            if self._running:
                self._step()

    def _run_commands(self) -> None:
        while True:
            try:
                work, future = self._commands.get(block=not self._running, timeout=_IDLE_POLL_S)
            except queue.Empty:
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _step(self) -> None:
        begin = time.perf_counter()
        try:
            outputs = self._llm.step()
        except Exception as error:
            # The thread lives on: whoever asks next gets an answer, not silence.
            self._poison(f"vLLM failed in a step: {error}", error)
            return
        self._steps.append(time.perf_counter())
        finished = [output for output in outputs if output.finished]
        self._counters = self._counters.worked(self._steps[-1] - begin, len(self._scheduler.running) + len(finished))
        if finished:
            self._finish(finished)

    def _finish(self, outputs: list[Any]) -> None:
        size = 0
        for output in outputs:
            sample = output.outputs[0]
            versions = self._boundaries.end(output.request_id, len(sample.token_ids))
            size = self._running.finish(output.request_id, SampledTokens(sample, versions))
        self._ended = self._running.ended()
        self._places += len(outputs)
        if self._places >= size:
            self._places = 0
            self._finished.put(None)

    @property
    def _scheduler(self) -> Any:
        return self._llm.engine_core.engine_core.scheduler

    def _add(self, requests: list[TurnRequest]) -> list["Future[list[SampledTokens]]"]:
        if self._state is RefitState.POISONED:
            raise RuntimeError(f"this engine must not be used: {self._poisoned}")
        groups = [self._running.add(request) for request in requests]
        for group in groups:
            for index, rollout in enumerate(group.rollouts()):
                self._enter(group.request, index, rollout)
        return [group.done for group in groups]

    def _enter(self, request: TurnRequest, index: int, rollout: str) -> None:
        # The salt keeps prefixes that older weights computed out of the cache's reach.
        prompt = {"prompt_token_ids": request.prompt_tokens, "cache_salt": f"v{self._version}"}
        self._llm.add_request(rollout, prompt, sampling_params(self._spec, request, index))
        self._boundaries.begin(rollout, self._version)

    def _drop(self, names: list[str], reason: Exception) -> None:
        rollouts = self._running.drop(names, reason)
        self._llm.abort_request(rollouts)
        for rollout in rollouts:
            self._boundaries.forget(rollout)

    def _stage(self, header: Header) -> list[ReceiveReport]:
        """Receive beside the live weights while requests go on. Raises Untouched."""
        self._advance(RefitState.RECEIVING)
        try:
            self._on_thread(lambda: self._workers("rl_stage", header))
            while not all(reports := self._on_thread(lambda: self._workers("rl_staged"))):
                time.sleep(_STAGED_POLL_S)
        except Exception as error:
            self._advance(RefitState.SERVING)
            raise Untouched(str(error)) from error
        return list(reports)

    def _change(self, header: Header, load: Callable[[], float]) -> float:
        """Make a version live by `load`, and let what runs go on with it; return the seconds that `load` says."""
        self._advance(RefitState.CHANGING)
        try:
            seconds = load()
        except Exception as error:
            # Weights may be a mixture: what runs must not go on with them.
            self._poison(f"the refit to version {header.version} failed: {error}", error)
            raise
        self._advance(RefitState.SERVING)
        self._version = header.version
        self._boundaries.change(self._sampling(), header.version)
        self._counters = self._counters.stood(seconds)
        return seconds

    def _advance(self, state: RefitState) -> None:
        """Enter the next state of a refit; an engine that was poisoned meanwhile stays so."""
        if self._state is not RefitState.POISONED:
            self._state = state

    def _poison(self, why: str, error: Exception) -> None:
        """Sample nothing from now on; what runs ends with the error."""
        self._state, self._poisoned = RefitState.POISONED, why
        for rollout in self._running.drop(self._running.names(), error):
            self._boundaries.forget(rollout)

    def _workers(self, method: str, *arguments: Any) -> list[Any]:
        """What a method of `RefitWorker` gives on every worker. Raises the first failure, once all have answered: vLLM
        itself stops reading at the first, and takes what is left for the answers of the next call."""
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _commit(self) -> float:
        return float(max(self._workers("rl_commit")))

    def _receive(self, header: Header, reports: list[ReceiveReport]) -> float:
        begin = time.perf_counter()
        reports += self._workers("rl_receive", header)
        self._commit()
        return time.perf_counter() - begin

    def _sampling(self) -> list[tuple[str, int]]:
        """(rollout, tokens sampled) of every rollout that has not ended, as the change of weights leaves them.

        A token that the device still works on counts: it was begun with the weights of before. Where keys and values
        are computed anew it is thrown away. A rollout that has not begun enters anew, for its salt is of before.
        """
        requests = self._scheduler.requests
        states = [(requests.get(name), state) for name, state in self._request_states()]
        found = [(request, state.external_req_id) for request, state in states if request is not None]
        fresh = [rollout for request, rollout in found if not begun(request)]
        if self._spec.recompute_kv_cache:
            self._llm.reset_prefix_cache(reset_running_requests=True)
        self._reenter(fresh)
        late = 0 if self._spec.recompute_kv_cache else 1
        return [
            (rollout, request.num_output_tokens + late * request.num_output_placeholders)
            for request, rollout in found
            if begun(request)
        ]

    def _request_states(self) -> list[tuple[str, Any]]:
        return list(self._llm.output_processor.request_states.items())

    def _reenter(self, rollouts: list[str]) -> None:
        if not rollouts:
            return
        self._llm.abort_request(rollouts)
        requests = {group.request.id: group.request for group in self._running}
        for rollout in rollouts:
            name, _, index = rollout.rpartition("#")
            self._enter(requests[name], int(index), rollout)

    def _let_steps_pass(self, end: float) -> None:
        """The gap that a change of weights makes ends with the step after it."""
        while self._running and not (self._steps and self._steps[-1] > end) and time.perf_counter() < end + 1:
            time.sleep(_STAGED_POLL_S)
