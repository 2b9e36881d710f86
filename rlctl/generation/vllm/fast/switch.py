"""The switch `generation.engine.fast_path`: shortened steps (`next_token.py`, `step_outputs.py`), or vLLM's own steps.

The shortened steps replace vLLM's private code. So they are on only for the exact vLLM versions whose steps were
compared bit by bit (`tests/system/test_next_token.py`, `tests/gpu/test_next_token.py`), and if every name that they
need exists.
"""

from collections.abc import Callable, Iterable
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.fast.next_token import NextTokens
from rlctl.generation.vllm.fast.step_outputs import StepOutputs
from rlctl.preflight.engines.vllm import COMPARED, VllmOptions

# Attributes of a scheduler, and of its parts, that the shortened steps read or set.
SCHEDULER = (
    "_pause_state",
    "connector",
    "current_step",
    "defer_block_free",
    "ec_connector",
    "lora_config",
    "max_model_len",
    "max_num_scheduled_tokens",
    "need_mamba_block_aligned_split",
    "num_lookahead_tokens",
    "num_spec_tokens",
    "prev_step_scheduled_req_ids",
    "requests",
    "running",
    "schedule",
    "update_from_output",
    "use_pp",
    "use_v2_model_runner",
    "kv_cache_manager.allocate_slots",
    "kv_cache_manager.block_pool.get_num_free_blocks",
    "kv_cache_manager.cache_blocks",
    "kv_cache_manager.coordinator.single_type_managers",
    "kv_cache_manager.enable_caching",
)
# Attributes of a request that the shortened steps read or set.
REQUEST = (
    "_all_token_ids",
    "_output_token_ids",
    "is_prefill_chunk",
    "max_tokens",
    "next_decode_eligible_step",
    "num_computed_tokens",
    "num_output_placeholders",
    "request_id",
    "sampling_params",
    "status",
    "update_block_hashes",
)
# Attributes of a request with different names in different versions: one name of each tuple must exist.
EITHER = (("num_stale_output_tokens", "async_tokens_to_discard"),)
# Sampling parameters that the shortened steps honour, with any value.
HONOURED = ("temperature", "top_p", "top_k", "seed", "max_tokens", "ignore_eos", "skip_clone", "stop_token_ids")
# Sampling parameters with the same value in every request of rlctl. All parameters not named here have vLLM's default.
FIXED = {"logprobs": 0, "flat_logprobs": True, "detokenize": False, "output_kind": "FINAL_ONLY"}


def shorten_steps(llm: Any, spec: EngineSpec) -> str | None:
    """Shorten an engine's steps if `fast_path` is set. Return a note if they cannot be shortened.

    llm: vLLM's `LLMEngine`, freshly built.
    """
    if not VllmOptions(**spec.options).fast_path:
        return None
    if obstacle := _find_obstacle(llm, spec.device):
        return f"generation.engine.fast_path=auto uses vLLM's own steps: {obstacle}"
    core = llm.engine_core.engine_core
    StepOutputs(core.scheduler, llm.output_processor.request_states, NextTokens(core.scheduler))
    return None


def _find_obstacle(llm: Any, device: str) -> str | None:
    """Return the reason why an engine's steps cannot be shortened, None if they can."""
    import vllm

    version = vllm.__version__.partition("+")[0]
    compared_versions = COMPARED[device]
    if version not in compared_versions:
        compared_text = ", ".join(compared_versions)
        return f"shortened ones were compared with vLLM {compared_text} on this device, not with {version}"
    core = llm.engine_core.engine_core
    lacking = [f"Scheduler.{name}" for name in missing(core.scheduler, SCHEDULER)] + _missing_of_requests()
    return f"vLLM {version} has no {', '.join(dict.fromkeys(lacking))}" if lacking else None


def missing(owner: Any, names: Iterable[str]) -> list[str]:
    """Return the dotted names that `owner` does not have."""
    absent = []
    for name in names:
        try:
            attrgetter(name)(owner)
        except AttributeError:
            absent.append(name)
    return absent


def _missing_of_requests() -> list[str]:
    """Return the names of `REQUEST` and `EITHER` that a request would lack. No request exists yet: read its class."""
    from vllm.v1.request import Request

    available = {*dir(Request), *Request.__init__.__code__.co_names}
    # An attribute that `__init__` sets is among the names in its code.
    lacking = [name for name in REQUEST if name not in available]
    lacking += ["/".join(names) for names in EITHER if not available.intersection(names)]
    return [f"Request.{name}" for name in lacking]


def refuse_what_is_not_honoured(params: Any) -> None:
    """Raise ValueError for a sampling parameter that shortened steps would ignore. params: `SamplingParams`."""
    fixed_parameters = _find_fixed_parameters()
    values = fixed_parameters.read(params)
    if values == fixed_parameters.values:
        return
    for name, requested, fixed in zip(fixed_parameters.names, values, fixed_parameters.values):
        if requested != fixed:
            raise ValueError(
                f"{name}={requested!r} is not honoured by shortened steps; generation.engine.fast_path=off honours it"
            )


class _FixedParameters(NamedTuple):
    """Sampling parameters that have the same value in every request of rlctl."""

    names: list[str]
    # Returns the values of these parameters, given a request's `SamplingParams`.
    read: Callable[[Any], Any]
    # Fixed values, in the order of the names.
    values: Any


@cache
def _find_fixed_parameters() -> _FixedParameters:
    """Return all parameters of vLLM that are not in `HONOURED`. Those not in `FIXED` have vLLM's default."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    names = [name for name in SamplingParams.__struct_fields__ if name not in HONOURED and not name.startswith("_")]
    read = attrgetter(*names)
    fixed = {**FIXED, "output_kind": RequestOutputKind[FIXED["output_kind"]]}
    return _FixedParameters(names, read, read(SamplingParams(**fixed)))
