"""Steps of vLLM's model runner without the work that no request of rlctl's needs.

vLLM writes the state of a new request by four kernels, each with separate lists and copies. In every step it writes
sampling parameters, looks for penalties, biases and banned words, and ranks each sampled token among the whole
vocabulary. The device waits for that: a step of 128 sequences takes the host 4 to 6 ms (Qwen3-1.7B, H200).
"""

from importlib import import_module
from typing import Any

import numpy as np

from rlctl.generation.vllm.fast.switch import missing

_RUNNER = "vllm.v1.worker.gpu.model_runner"
# Versions that they were compared with. From 0.33 on vLLM itself looks for penalties only where a request has some.
COMPARED = ("0.25.1",)
# Names of a model runner, and of vLLM's modules, that are read or set here.
RUNNER = (
    "add_requests",
    "device",
    "block_tables.apply_staged_writes",
    "block_tables.block_tables",
    "block_tables.num_blocks.copy_to_uva",
    "prompt_logprobs_worker.compute_prompt_logprobs",
    "req_states.all_token_ids.gpu",
    "req_states.apply_staged_writes",
    "req_states.max_num_reqs",
    "req_states.num_computed_tokens.gpu",
    "req_states.prefill_len.copy_to_uva",
    "req_states.prompt_len.copy_to_uva",
    "req_states.total_len.gpu",
    "sampler.bad_words_state.apply_bad_words",
    "sampler.logit_bias_state.apply_logit_bias",
    "sampler.logprob_token_ids_state.max_num_token_ids",
    "sampler.penalties_state.apply_penalties",
    "sampler.sampling_states.apply_min_p",
    "sampler.sampling_states.max_num_logprobs",
)
MODULES = (
    "vllm.utils.torch_utils:async_tensor_h2d",
    "vllm.v1.outputs:LogprobsTensors",
    "vllm.v1.worker.gpu.buffer_utils:FusedStagedWriter",
    "vllm.v1.worker.gpu.buffer_utils:async_tensor_h2d",
    "vllm.v1.worker.gpu.sample.logprob:compute_token_logprobs",
    "vllm.v1.worker.gpu.sample.sampler:compute_topk_logprobs",
)


def device_names_lacking(runner: Any) -> list[str]:
    """Return the names that shortened device steps rely on and this vLLM does not have."""
    if not _applies_to(runner):
        return []
    lacking = [f"GPUModelRunner.{name}" for name in missing(runner, RUNNER)]
    for place in MODULES:
        module, _, name = place.partition(":")
        try:
            found = hasattr(import_module(module), name)
        except ImportError:
            found = False
        lacking += [] if found else [place]
    return lacking


def shorten_device_steps(runner: Any) -> None:
    """Spare a worker's steps that work. A runner of another kind, as on a CPU, or version is left alone."""
    if _applies_to(runner):
        StateWrites(runner)
        _skip_what_none_asks_for(runner)
        _keep_log_probs_alone()


def _applies_to(runner: Any) -> bool:
    import vllm

    return type(runner).__module__ == _RUNNER and vllm.__version__.partition("+")[0] in COMPARED


class StateWrites:
    """Writes tokens, lengths and cache blocks of requests by one kernel, vLLM's for models with several caches."""

    def __init__(self, runner: Any) -> None:
        """Take the place of the runner's own writes."""
        from vllm.v1.worker.gpu import buffer_utils

        self._states, self._tables, self._device = runner.req_states, runner.block_tables, runner.device
        # All of int32, as the kernel has it.
        self._tensors = [
            self._states.total_len,
            self._states.all_token_ids,
            self._states.num_computed_tokens,
            *self._tables.block_tables,
        ]
        buffer_utils.async_tensor_h2d = _copy_to_device
        self._writer = buffer_utils.FusedStagedWriter(runner.device, len(self._tensors) * self._states.max_num_reqs)
        self._addresses, self._layout = list[int](), self._make_layout([])
        self._add_requests, runner.add_requests = runner.add_requests, self._add
        self._states.apply_staged_writes = self._write_lengths
        self._tables.apply_staged_writes = self._write

    def _add(self, scheduled: Any) -> None:
        """Add requests; where none begins, their sampling parameters are on the device already."""
        if scheduled.scheduled_new_reqs:
            self._add_requests(scheduled)

    def _write_lengths(self) -> None:
        self._states.prompt_len.copy_to_uva()
        self._states.prefill_len.copy_to_uva()

    def _write(self) -> None:
        """Write staged values: the runner's last write before it prepares the step's inputs."""
        addresses = [each.gpu.data_ptr() for each in self._tensors]
        if addresses != self._addresses:
            self._addresses, self._layout = addresses, self._make_layout(addresses)
        self._writer.apply(self._tensors, *self._layout)
        self._tables.num_blocks.copy_to_uva()

    def _make_layout(self, addresses: list[int]) -> tuple[Any, Any]:
        """Return where each tensor begins, uint64, and how far its rows are apart, int64, on the device."""
        import torch

        strides = [each.gpu.stride(0) for each in self._tensors]
        return (
            torch.tensor(addresses, dtype=torch.uint64, device=self._device),
            torch.tensor(strides, dtype=torch.int64, device=self._device),
        )


def _copy_to_device(data: Any, device: Any, dtype: Any = None) -> Any:
    """Copy a list to the device as vLLM does. torch takes three times as long as numpy to read one."""
    import torch
    from vllm.utils.torch_utils import async_tensor_h2d

    read = np.array(data, np.int32) if dtype is torch.int32 and isinstance(data, list) else data
    return async_tensor_h2d(read, device, dtype)


def _skip_what_none_asks_for(runner: Any) -> None:
    """Skip vLLM's checks for options that `build.vllm_request` never sets."""

    def nothing(*arguments: Any) -> None:
        pass

    sampler = runner.sampler
    sampler.logit_bias_state.apply_logit_bias = nothing
    sampler.penalties_state.apply_penalties = nothing
    sampler.bad_words_state.apply_bad_words = nothing
    sampler.sampling_states.apply_min_p = nothing
    sampler.logprob_token_ids_state.max_num_token_ids = lambda rows: 0
    # Each request asks for the log-probs of its sampled tokens.
    sampler.sampling_states.max_num_logprobs = lambda rows: 0
    runner.prompt_logprobs_worker.compute_prompt_logprobs = lambda *arguments: {}


def _keep_log_probs_alone() -> None:
    """Have vLLM's sampler compute and copy the log-probs of sampled tokens, and no ranks, where nothing else was asked.

    The lists of its outputs have no ranks and no tokens then; tokens come separately.
    """
    import torch
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import sampler
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

    class LogProbsAlone(LogprobsTensors):  # type: ignore[misc]
        def to_cpu_nonblocking(self) -> Any:
            return LogprobsTensors(nothing, self.logprobs.to("cpu", non_blocking=True), nothing)

    def compute(logits: Any, num_logprobs: int, sampled: Any, cu_num_logits: Any = None, **named: Any) -> Any:
        if num_logprobs or named["max_per_req_token_ids"] or cu_num_logits is not None:
            return vllms_own(logits, num_logprobs, sampled, cu_num_logits, **named)
        tokens = sampled.unsqueeze(-1)
        return LogProbsAlone(tokens, compute_token_logprobs(logits, tokens), sampled)

    nothing, vllms_own = torch.empty(0), sampler.compute_topk_logprobs
    sampler.compute_topk_logprobs = compute
