"""Making of vLLM's requests: turns to sample, tokens to score, and tokens to value."""

from typing import Any

from rlctl.generation.requests import ScoreRequest, TurnRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.fast.switch import refuse_what_is_not_honoured
from rlctl.preflight.engines.vllm import VllmOptions


def make_request(llm: Any, spec: EngineSpec, request: TurnRequest | ScoreRequest) -> Any:
    """Return vLLM's request. Raises RuntimeError if the engine was not built for it, and ValueError as the functions
    below.
    """
    if isinstance(request, TurnRequest):
        if spec.values:
            raise RuntimeError("this engine values tokens and samples none (EngineSpec.values)")
        return vllm_request(llm, spec, request)
    if spec.values:
        return vllm_value_request(llm, spec, request)
    return vllm_score_request(llm, spec, request)


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


def vllm_value_request(llm: Any, spec: EngineSpec, request: ScoreRequest) -> Any:
    """Return vLLM's request for the value of the last of given tokens. Raises ValueError if the request is malformed or
    does not fit the model.
    """
    from vllm import PoolingParams

    request.check_value(spec.max_model_len, llm.model_config.get_vocab_size())
    prompt = {"type": "token", "prompt_token_ids": request.tokens}
    # By default vLLM applies a sigmoid to the head's output. A cached prefix is not read: every row is computed.
    params = PoolingParams(task="classify", use_activation=False, skip_reading_prefix_cache=True)
    return llm.input_processor.process_inputs(str(request.id), prompt, params, supported_tasks=("classify",))


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
