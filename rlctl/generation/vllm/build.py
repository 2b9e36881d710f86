"""The engine's calls into vLLM's interface: building an engine, and making and adding requests."""

import gc
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.generation.requests import ScoreRequest, TurnRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.fast.switch import refuse_what_is_not_honoured, shorten_steps
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
        if spec.scores:
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
    notes = [backend_note(llm), shorten_steps(llm, spec), graphs_note]
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


def vllm_request(llm: Any, spec: EngineSpec, request: TurnRequest) -> Any:
    """Return vLLM's request for a turn. Raises ValueError for a prompt that does not fit the model."""
    prompt = {"type": "token", "prompt_token_ids": request.prompt_tokens}
    params = _sampling_params(spec, request)
    if VllmOptions(**spec.options).fast_path:
        refuse_what_is_not_honoured(params)
    return llm.input_processor.process_inputs(str(request.id), prompt, params, supported_tasks=("generate",))


def vllm_score_request(llm: Any, spec: EngineSpec, request: ScoreRequest) -> Any:
    """Return vLLM's request for given tokens: the hidden states of its prompt score them. Raises ValueError if the
    request is malformed or does not fit the model.

    No scored token follows the last one, so the prompt ends before it. vLLM samples one token for nobody.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request.check(spec.max_model_len, llm.model_config.get_vocab_size())
    prompt = {"type": "token", "prompt_token_ids": request.tokens[:-1]}
    params = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        # Hidden states of cached tokens are not computed.
        skip_reading_prefix_cache=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    return llm.input_processor.process_inputs(str(request.id), prompt, params, supported_tasks=("generate",))


def add_request(llm: Any, request: Any) -> None:
    """Add a request to vLLM without `LLMEngine.add_request`, which would check the request again between two steps."""
    llm.input_processor.assign_request_id(request)
    llm.output_processor.add_request(request, None)
    llm.engine_core.add_request(request)


def _sampling_params(spec: EngineSpec, request: TurnRequest) -> Any:
    """Return vLLM's sampling parameters for one request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    is_greedy = request.temperature == 0
    # The parity check compares distributions without top_p and top_k, because the trainer does not apply these.
    is_uncut = is_greedy or request.id.rollout.purpose == "parity"
    max_tokens = request.max_new_tokens
    stop_token_ids = [*spec.stop_token_ids, *request.stops]
    if spec.forced_lengths:
        max_tokens = spec.forced_lengths.draw(request.seed, max_tokens)
        stop_token_ids = []
    return SamplingParams(
        temperature=request.temperature,
        top_p=1.0 if is_uncut else spec.top_p,
        top_k=0 if is_uncut else spec.top_k,
        seed=None if is_greedy else request.seed,
        max_tokens=max_tokens,
        ignore_eos=spec.forced_lengths is not None,
        stop_token_ids=stop_token_ids,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        # No copy is needed, since no other request shares these parameters.
        skip_clone=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
