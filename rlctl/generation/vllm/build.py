"""The engine's calls into vLLM's interface: building an engine, and reading its scheduler."""

import gc
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.fast.switch import shorten_steps
from rlctl.generation.vllm.registry_answer import backend_note, refusal
from rlctl.models.facts import find_facts
from rlctl.models.model_sizes import config_file
from rlctl.preflight.engines.vllm import VllmOptions
from rlctl.preflight.memory import SCORE_BATCH_TOKENS

# Fields of `EngineSpec` that are passed to vLLM unchanged.
_FIELDS = (
    "dtype",
    "seed",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
)
_CPU_BATCH_TOKENS = 8192
# For models with at least this number of parameters a slower step is worth a note. Tiny recipes have smaller models.
_LARGE = 50_000_000
_NO_FULL_GRAPHS = (
    "a step in which a prompt begins is no whole CUDA graph, whose log-probs are right for plain attention with heads "
    "of 128 alone: rollouts of several turns take up to 1.4 times as long, those of one turn are as fast; there is "
    "nothing to mend"
)


def build_llm(spec: EngineSpec, extension: str) -> tuple[Any, list[str]]:
    """Build vLLM's engine in this process. Return the engine, and notes for the user.

    extension: class mixed into vLLM's workers, "module.Class". Raises ModelError if vLLM does not serve the model.
    """
    engine_args, llm_engine = _classes()
    # Imports vLLM.
    from rlctl.generation.vllm.adapter_loader import load_arguments

    options = VllmOptions(**spec.options)
    graphs_note = None
    extra: dict[str, Any] = {}
    if spec.kv_cache_mib is not None:
        extra["kv_cache_memory_bytes"] = spec.kv_cache_mib << 20
    if spec.device == "cpu":
        inspect_classes_here()
        extra |= {
            # Prompts share only whole blocks of their prefix. With vLLM's default of 128 tokens on a CPU, they would
            # share almost nothing.
            "block_size": 32,
            # When a prompt of a seeded request is prefilled in chunks, vLLM rewinds the request's generator by an
            # offset. CPU generators have no offset: vLLM 0.32 then fails in the step.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(spec.max_model_len, _CPU_BATCH_TOKENS),
        }
    else:
        extra |= {"gpu_memory_utilization": spec.gpu_memory_utilization, "enable_sleep_mode": spec.sleeps}
        if spec.scores or spec.values:
            extra["max_num_batched_tokens"] = SCORE_BATCH_TOKENS
        if not options.enforce_eager and _hopper():
            if allows_full_graphs(spec.model_path):
                # By default vLLM runs only decoding steps as whole CUDA graphs: a step in which a prompt begins takes
                # 13 ms instead of 6 (Qwen3-1.7B, 128 sequences, H200). Rollouts of eight turns make 26,300 tokens/s
                # with whole graphs, 18,200 without; rollouts of one turn 47,300 and 47,400 (Qwen3-0.6B, H100).
                extra["compilation_config"] = {"cudagraph_mode": "FULL"}
            elif is_worth_a_note(spec.model_path):
                graphs_note = _NO_FULL_GRAPHS
        if spec.tensor_parallel_size > 1:
            # Inside a Ray placement group vLLM would choose its Ray executor, which needs a group made by vLLM.
            extra["distributed_executor_backend"] = "mp"
    if spec.values:
        # vLLM turns asynchronous scheduling off for this runner.
        extra["runner"] = "pooling"
    if spec.adapters:
        extra |= load_arguments(spec.adapters, spec.load_format, spec.adapter_folder)
    else:
        extra["load_format"] = spec.load_format
    arguments = engine_args(
        model=spec.model_path,
        skip_tokenizer_init=True,
        enable_prefix_caching=spec.prefix_caching,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        worker_extension_cls=extension,
        enforce_eager=options.enforce_eager,
        **{name: getattr(spec, name) for name in _FIELDS},
        **extra,
    )
    try:
        llm = llm_engine.from_engine_args(arguments)
    except (ValueError, AttributeError, KeyError, TypeError, AssertionError, ImportError) as error:
        if refused := refusal(error, spec.model_path):
            raise refused from error
        raise
    notes = [backend_note(llm), graphs_note]
    if not spec.values:
        notes.append(shorten_steps(llm, spec))
    _count_prefix_hits(llm.engine_core.engine_core.scheduler.kv_cache_manager)
    return llm, [note for note in notes if note]


def inspect_classes_here() -> None:
    """Make vLLM inspect a model's class in this process, which imports the class later anyway.

    By default vLLM starts another process for this, so that CUDA is not initialized. On a CPU that process only repeats
    imports: 13 s of CPU at the first start of each architecture. The replaced function is private. A vLLM without it is
    left unchanged.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda inspect: inspect()


def cached_sequences(llm: Any) -> int:
    """Return the number of sequences of `max_model_len` tokens for which the key-value cache has room."""
    scheduler = llm.engine_core.engine_core.scheduler
    tokens: int = scheduler.kv_cache_manager.block_pool.num_gpu_blocks * scheduler.block_size
    return tokens // int(scheduler.max_model_len)


def _count_prefix_hits(manager: Any) -> None:
    """Make vLLM's cache manager count prompt tokens and cache hits, without vLLM's other statistics."""
    from vllm.v1.metrics.stats import PrefixCacheStats

    manager.log_stats = True
    manager.prefix_cache_stats = PrefixCacheStats()


def _classes() -> tuple[Any, Any]:
    """Import vLLM with garbage collection off; return its classes EngineArgs and LLMEngine.

    Garbage collection during the imports takes 2 of their 9 s of CPU, and finds nothing. While it builds an engine,
    vLLM collects garbage five times. That takes 1.7 of 2.0 s, but 0.1 s if the imported modules are frozen.
    """
    gc.disable()
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        gc.freeze()
    finally:
        gc.enable()
    return EngineArgs, LLMEngine


def _hopper() -> bool:
    """Return True if the GPU is a Hopper. This asks the driver, because CUDA must not be initialized before a fork."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is not None and capability.major == 9


def allows_full_graphs(model: str) -> bool:
    """Return True if log-probs are right when a whole step in which prompts begin runs as one CUDA graph.

    model: folder or hub name. FlashAttention 3 lays out its work by the head's size and by the longest query of a step.
    A captured graph repeats the layout of a decoding step, also when a prompt begins. Results are right with heads of
    128: `token_mult_prob_error` was 1.014, and 1.008 for Qwen3-0.6B. With heads of 64 it was 1.37, with 256 it was
    1.53, and vLLM raised no error; eager steps gave 1.004. With experts, kernels read memory outside of their tensors
    (vLLM 0.25.1, H100 and H200). Windows, sinks, capped scores and states were not compared. Source:
    `hopper/flash_api.cpp` of vllm-project/flash-attention.
    """
    file = config_file(model)
    if file is None:
        return False
    try:
        facts = find_facts(file.parent)
    except (ModelError, ModuleNotFoundError):  # rlctl cannot train this model, but vLLM may sample from it
        return False
    if facts.sizes.experts or facts.kinds.states:
        return False
    return all(
        attention.dim == attention.v_dim == 128
        and attention.window is None
        and attention.softcap is None
        and not attention.sinks
        for attention in facts.kinds.attention
    )


def is_worth_a_note(model: str) -> bool:
    """Return True if the user should be told about slower steps: the model is not tiny, or its size is unknown."""
    file = config_file(model)
    try:
        return file is None or find_facts(file.parent).sizes.parameters >= _LARGE
    except (ModelError, ModuleNotFoundError):
        return True


def has_begun(request: Any) -> bool:
    """Return True if the device has begun a request of vLLM's scheduler."""
    return bool(request.num_computed_tokens or request.num_output_tokens or request.num_preemptions)


def scheduled_requests(llm: Any) -> list[tuple[Any, str]]:
    """Return (request, name) of every request in vLLM's scheduler. name: the one in `ActiveRequests`."""
    requests = llm.engine_core.engine_core.scheduler.requests
    states = [(requests.get(name), state) for name, state in llm.output_processor.request_states.items()]
    return [(request, state.external_req_id) for request, state in states if request is not None]


def sampled_tokens(running: list[tuple[Any, str]], *, recomputed: bool) -> list[tuple[str, int]]:
    """Return (name, number of tokens sampled before this change of weights) of each running request.

    A token that the device is still sampling counts too, since the old weights began it. If keys and values are
    recomputed, vLLM discards this token, and it does not count.
    """
    late = 0 if recomputed else 1
    return [(name, request.num_output_tokens + late * request.num_output_placeholders) for request, name in running]
