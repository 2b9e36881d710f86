"""One vLLM engine in its process: a thread owns it and steps it; requests and weight changes go between steps.

Tokens in, tokens out, with the log-probs they were sampled with and the weight version that sampled them.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlctl.generation.boundaries import Boundaries
from rlctl.generation.intake import Choice, Mode
from rlctl.generation.requests import FINISHES, Columns, SampleRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.stall import stall
from rlctl.refit.messages import Header, TransportSpec, Untouched
from rlctl.refit.plan import Plan
from rlctl.refit.transport import Report

_IDLE_POLL_S = 0.05
_STAGED_POLL_S = 0.002
_CPU_BATCH_TOKENS = 8192
_STEPS_REMEMBERED = 4096


class Engine:
    """Samples for several callers at a time; every touch of vLLM happens on one thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}
        self._version = -1
        self._boundaries = Boundaries()
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._mode = "direct"
        self._poisoned = ""
        self._llm: Any = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._on_thread(lambda: None)

    def generate(self, requests: list[SampleRequest]) -> Columns:
        """Sample every request; returns when all are done, in the requests' order."""
        return _columns([future.result() for future in self._on_thread(lambda: self._add(requests))])

    def refit_open(self, spec: TransportSpec, plan: Plan, first_rank: int, mode: Mode, in_flight: bool) -> Choice:
        """Join the refit transport. in_flight: requests go on during a refit. See `intake.choose_loading`."""
        arguments = (spec, plan, first_rank, mode, in_flight)
        choice: Choice = self._on_thread(lambda: self._llm.collective_rpc("rl_open", args=arguments)[0])
        self._mode = choice.mode
        return choice

    def refit_receive(self, header: Header) -> Report:
        """Bring the engine to a version between two steps; running requests go on with it, their KV kept.

        Report: of the receiver, the slowest worker's; commit: seconds in which nothing could be sampled; stall:
        longest gap between two tokens of a running request beyond its ordinary gap, 0 if none ran.

        A failure leaves the engine poisoned (it samples no more), unless nothing live was touched yet.
        """
        begin = time.perf_counter()
        if self._mode == "staged":
            reports = self._stage(header)
            commit = self._on_thread(lambda: self._change(header, self._commit))
        else:
            reports = []
            commit = self._on_thread(lambda: self._change(header, lambda: self._receive(header, reports)))
        end = time.perf_counter()
        self._let_steps_pass(end)
        report = max(reports, key=lambda report: report["seconds"])
        return {**report, "commit": commit, "seconds": end - begin, "stall": stall(list(self._steps), begin, end)}

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
        """End every running request: its `generate` raises RuntimeError."""
        self._on_thread(self._cancel)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension (`EngineSpec.extension`) on every worker, between two steps."""
        answers: list[Any] = self._on_thread(lambda: self._llm.collective_rpc(method, args=args))
        return answers

    def _on_thread(self, work: Callable[[], Any]) -> Any:
        future: Future[Any] = Future()
        self._commands.put((work, future))
        return future.result()

    def _run(self) -> None:
        try:
            self._llm = _build(self._spec)
        except BaseException as error:
            # Whoever asks learns why: construction waits for the first command's answer.
            while True:
                self._commands.get()[1].set_exception(error)
        while True:
            self._run_commands()
            if self._waiting:
                self._step()

    def _run_commands(self) -> None:
        while True:
            try:
                work, future = self._commands.get(block=not self._waiting, timeout=_IDLE_POLL_S)
            except queue.Empty:
                return
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except Exception as error:
            self._poisoned = f"vLLM failed in a step: {error}"
            for request, future in self._waiting.items():
                self._boundaries.forget(request)
                future.set_exception(error)
            self._waiting.clear()
            # The thread lives on: whoever asks next gets an answer, not silence.
            return
        self._steps.append(time.perf_counter())
        for output in outputs:
            if output.finished:
                samples = sorted(output.outputs, key=lambda sample: sample.index)
                versions = self._boundaries.end(output.request_id, [len(sample.token_ids) for sample in samples])
                self._waiting.pop(output.request_id).set_result((samples, versions))

    def _add(self, requests: list[SampleRequest]) -> list[Future[Any]]:
        if self._poisoned:
            raise RuntimeError(f"this engine must not be used: {self._poisoned}")
        futures: list[Future[Any]] = []
        for request in requests:
            params = _params(self._spec, request)
            # The salt keeps prefixes that older weights computed out of the cache's reach.
            prompt = {"prompt_token_ids": request.prompt_tokens, "cache_salt": f"v{self._version}"}
            self._llm.add_request(request.id, prompt, params)
            self._boundaries.begin(request.id, request.num_samples, self._version)
            self._waiting[request.id] = Future()
            futures.append(self._waiting[request.id])
        return futures

    def _cancel(self) -> None:
        self._llm.abort_request([*self._waiting])
        for request, future in self._waiting.items():
            self._boundaries.forget(request)
            future.set_exception(RuntimeError(f"request {request} was cancelled"))
        self._waiting.clear()

    def _stage(self, header: Header) -> list[Report]:
        """Receive beside the live weights while requests go on. Raises Untouched."""
        try:
            self._on_thread(lambda: self._llm.collective_rpc("rl_stage", args=(header,)))
            while not all(reports := self._on_thread(lambda: self._llm.collective_rpc("rl_staged"))):
                time.sleep(_STAGED_POLL_S)
        except Exception as error:
            raise Untouched(str(error)) from error
        return list(reports)

    def _change(self, header: Header, load: Callable[[], float]) -> float:
        """Make a version live by `load`; what runs goes on with it. Returns the seconds that `load` says."""
        try:
            seconds = load()
        except Exception as error:
            self._poisoned = f"the refit to version {header.version} failed: {error}"
            raise
        self._version = header.version
        self._boundaries.change(self._running(), header.version)
        return seconds

    def _commit(self) -> float:
        seconds: list[float] = self._llm.collective_rpc("rl_commit")
        return max(seconds)

    def _receive(self, header: Header, reports: list[Report]) -> float:
        begin = time.perf_counter()
        reports += self._llm.collective_rpc("rl_receive", args=(header,))
        self._commit()
        return time.perf_counter() - begin

    def _running(self) -> list[tuple[str, int, int]]:
        """(request, index, tokens sampled) of every rollout that has not ended.

        A token that the device still works on counts: it was begun with the weights of before.
        """
        requests = self._llm.engine_core.engine_core.scheduler.requests
        return [
            (state.external_req_id, state.request_index, request.num_output_tokens + request.num_output_placeholders)
            for name, state in self._llm.output_processor.request_states.items()
            if (request := requests.get(name)) is not None
        ]

    def _let_steps_pass(self, end: float) -> None:
        """The gap that a change of weights makes ends with the step after it."""
        while self._waiting and not (self._steps and self._steps[-1] > end) and time.perf_counter() < end + 1:
            time.sleep(_STAGED_POLL_S)


def _build(spec: EngineSpec) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    extra: dict[str, Any] = {}
    if spec.device == "cpu":
        extra = {
            "kv_cache_memory_bytes": spec.kv_cache_mib << 20,
            # Prompts share their prefix by whole blocks, and CPU's own default of 128 shares next to none.
            "block_size": 32,
            # A seeded request whose prompt is prefilled in chunks rewinds its generator by an offset, which CPU
            # generators do not have: vLLM 0.32 then fails in the step.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(spec.max_model_len, _CPU_BATCH_TOKENS),
        }
    else:
        extra = {"gpu_memory_utilization": spec.gpu_memory_utilization, "enable_sleep_mode": spec.sleeps}
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=spec.model_path,
            skip_tokenizer_init=True,
            dtype=spec.dtype,
            seed=spec.seed,
            max_model_len=spec.max_model_len,
            max_num_seqs=spec.max_num_seqs,
            tensor_parallel_size=spec.tensor_parallel_size,
            enforce_eager=spec.enforce_eager,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            worker_extension_cls=spec.extension,
            load_format=spec.load_format,
            **extra,
        )
    )


def _params(spec: EngineSpec, request: SampleRequest) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = request.temperature == 0
    return SamplingParams(
        n=request.num_samples,
        temperature=request.temperature,
        top_p=1.0 if greedy else spec.top_p,
        top_k=0 if greedy else spec.top_k,
        seed=None if greedy else request.seed,
        max_tokens=request.max_new_tokens,
        stop_token_ids=list(spec.stop_token_ids),
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _columns(results: list[tuple[list[Any], NDArray[np.int32]]]) -> Columns:
    samples = [sample for group, _ in results for sample in group]
    lengths = np.array([len(sample.token_ids) for sample in samples], np.int32)
    tokens = [np.asarray(sample.token_ids, np.int32) for sample in samples]
    log_probs = [np.asarray(sample.logprobs.logprobs, np.float32) for sample in samples]
    versions = np.concatenate([versions for _, versions in results])
    finishes = [FINISHES.index(sample.finish_reason) for sample in samples]
    return Columns(lengths, np.concatenate(tokens), np.concatenate(log_probs), versions, np.array(finishes, np.int8))
