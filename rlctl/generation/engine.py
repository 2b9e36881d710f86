"""One vLLM engine in its process: a thread owns it and steps it; requests and weight changes go between steps.

Tokens in, tokens out, with the log-probs they were sampled with and the weight version that sampled them.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from rlctl.generation.requests import FINISHES, Columns, SampleRequest
from rlctl.generation.spec import EngineSpec
from rlctl.refit.plan import Header, Plan, TransportSpec

_IDLE_POLL_S = 0.05
_CPU_BATCH_TOKENS = 8192


class Engine:
    """Samples for several callers at a time; every touch of vLLM happens on one thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._waiting: dict[str, Future[Any]] = {}
        self._version = -1
        self._poisoned = ""
        self._llm: Any = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._on_thread(lambda: None)

    def generate(self, requests: list[SampleRequest]) -> Columns:
        """Sample every request; returns when all are done, in the requests' order."""
        return _columns([future.result() for future in self._on_thread(lambda: self._add(requests))])

    def refit_open(self, spec: TransportSpec, plan: Plan, first_rank: int) -> None:
        """Join the refit transport."""
        self._on_thread(lambda: self._llm.collective_rpc("rl_open", args=(spec, plan, first_rank)))

    def refit_receive(self, header: Header) -> dict[str, Any]:
        """Load one version between two steps; a failure leaves the engine poisoned: it samples no more."""
        answer: dict[str, Any] = self._on_thread(lambda: self._refit(header))
        return answer

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
            for future in self._waiting.values():
                future.set_exception(error)
            self._waiting.clear()
            raise
        for output in outputs:
            if output.finished:
                self._waiting.pop(output.request_id).set_result((output.outputs, self._version))

    def _add(self, requests: list[SampleRequest]) -> list[Future[Any]]:
        if self._poisoned:
            raise RuntimeError(f"this engine must not be used: {self._poisoned}")
        futures: list[Future[Any]] = []
        for request in requests:
            params = _params(self._spec, request)
            self._llm.add_request(request.id, {"prompt_token_ids": request.prompt_tokens}, params)
            self._waiting[request.id] = Future()
            futures.append(self._waiting[request.id])
        return futures

    def _refit(self, header: Header) -> dict[str, Any]:
        if self._waiting:
            raise RuntimeError(f"a refit must wait until {len(self._waiting)} running requests have ended")
        try:
            parts = self._llm.collective_rpc("rl_refit", args=(header,))
        except Exception as error:
            self._poisoned = f"the refit to version {header.version} failed: {error}"
            raise
        # Cached prefixes were computed by the old weights.
        self._llm.reset_prefix_cache()
        self._version = header.version
        return {"seconds": max(part["seconds"] for part in parts), "checksums": parts[0]["checksums"]}


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
            worker_extension_cls="rlctl.generation.worker.RefitWorker",
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


def _columns(results: list[tuple[Any, int]]) -> Columns:
    samples = [(sample, version) for outputs, version in results for sample in sorted(outputs, key=lambda s: s.index)]
    lengths = np.array([len(sample.token_ids) for sample, _ in samples], np.int32)
    tokens = [np.asarray(sample.token_ids, np.int32) for sample, _ in samples]
    log_probs = [np.asarray(sample.logprobs.logprobs, np.float32) for sample, _ in samples]
    versions = np.repeat(np.array([version for _, version in samples], np.int32), lengths)
    finishes = [FINISHES.index(sample.finish_reason) for sample, _ in samples]
    return Columns(lengths, np.concatenate(tokens), np.concatenate(log_probs), versions, np.array(finishes, np.int8))
