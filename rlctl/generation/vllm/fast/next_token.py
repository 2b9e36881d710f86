"""Fast scheduling of one more token for each continuing request, without the general work that vLLM does for a request.

Nearly all requests of a step only need their next token: they do not end, and their last cache block has room. For each
such request vLLM checks some fifty properties, calls four layers to ask for blocks, and makes an object for the token.
"""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

# Attributes of a scheduler for features that rlctl's engines do not use. If one is set, vLLM's own steps are kept.
_FEATURES = (
    "connector",
    "ec_connector",
    "lora_config",
    "use_pp",
    "num_spec_tokens",
    "defer_block_free",
    "need_mamba_block_aligned_split",
    "enable_return_routed_experts",
    "aux_output_connector",
)


def only_full_attention(manager: Any) -> Any | None:
    """Return vLLM's manager of cache blocks if all layers attend to the whole sequence, else None."""
    managers = manager.coordinator.single_type_managers
    names = [type(single_type_manager).__name__ for single_type_manager in managers]
    return managers[0] if names == ["FullAttentionManager"] else None


@dataclass(slots=True)
class SampledTokens:
    """Tokens of one request and their log-probs, in the order in which they were sampled."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class NextTokens:
    """Replaces a scheduler's `schedule`, and appends the sampled tokens of continuing requests.

    It works for the vLLM releases of `COMPARED`, requests from `vllm_request`, and models whose layers all attend to
    the whole sequence. For other models it changes nothing. It performs the same operations, in the same order, as
    vLLM's schedulers do for a running request with one more token.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import Request, RequestStatus

        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._running_status = RequestStatus.RUNNING
        self._unpaused_state = PauseState.UNPAUSED
        # True if the next step is scheduled before this step's tokens are known; placeholders then stand for these.
        self._schedules_ahead = isinstance(scheduler, AsyncScheduler)
        # True if requests count tokens in flight: vLLM 0.25 does not, later releases do.
        self._counts_in_flight = "num_in_flight_tokens" in Request.__init__.__code__.co_names
        # Attribute of a request: number of tokens in flight that must be discarded because it was preempted.
        self._stale_tokens = "num_stale_output_tokens" if self._counts_in_flight else "async_tokens_to_discard"
        block_manager = only_full_attention(self._manager)
        self._is_on = block_manager is not None and not any(getattr(scheduler, name, None) for name in _FEATURES)
        if block_manager is not None and self._is_on:
            # vLLM's own dicts by request: its cache blocks, and how many of these are in the prefix cache.
            self._blocks = block_manager.req_to_blocks
            self._num_cached_blocks: dict[str, int] = block_manager.num_cached_block
            self._block_size = int(block_manager.block_size)
            self._caches_prefixes = bool(self._manager.enable_caching)
            self._vllm_schedule = scheduler.schedule
            scheduler.schedule = self._schedule_next

    def _schedule_next(self, throttle_prefills: bool = False) -> Any:
        """Schedule one token for each running request. vLLM schedules waiting requests with the rest of the budget."""
        scheduler = self._scheduler
        if throttle_prefills or scheduler._pause_state != self._unpaused_state:
            return self._vllm_schedule(throttle_prefills)
        continuing = self._select_continuing()
        if not continuing:
            return self._vllm_schedule(throttle_prefills)
        names, new_blocks, computed, sampled = self._advance_requests(continuing)
        # The continuing requests use this part of the step's budget.
        scheduler.max_num_scheduled_tokens -= len(names)
        try:
            step = self._vllm_schedule(throttle_prefills)
        finally:
            scheduler.max_num_scheduled_tokens += len(names)
        cached = step.scheduled_cached_reqs
        cached.req_ids = names + cached.req_ids
        cached.new_block_ids = new_blocks + cached.new_block_ids
        cached.num_computed_tokens = computed + cached.num_computed_tokens
        cached.num_output_tokens = sampled + cached.num_output_tokens
        step.num_scheduled_tokens = dict.fromkeys(names, 1) | step.num_scheduled_tokens
        step.total_num_scheduled_tokens += len(names)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(names)
        return step

    def _select_continuing(self) -> list[Any]:
        """Return the running requests that need one more token; empty if any request needs vLLM's general scheduler."""
        scheduler = self._scheduler
        blocks = self._blocks
        block_size = self._block_size
        max_length = scheduler.max_model_len
        previous_names = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        continuing = []
        needed_blocks = 0
        for request in scheduler.running:
            computed = request.num_computed_tokens
            placeholders = request.num_output_placeholders
            uncomputed = len(request._all_token_ids) + placeholders - computed
            # Any request that needs more than its next token is left to vLLM's scheduler, with all others.
            if uncomputed != 1 or request.is_prefill_chunk:
                return []
            if previous_names is not None and request.request_id not in previous_names:
                return []
            if computed + 1 >= max_length or (
                placeholders and len(request._output_token_ids) + 1 >= request.max_tokens
            ):
                # The request's last token is being computed. vLLM skips the request too.
                continue
            needed_blocks += computed >= len(blocks[request.request_id]) * block_size
            continuing.append(request)
        has_blocks = needed_blocks <= self._manager.block_pool.get_num_free_blocks()
        return continuing if has_blocks and len(continuing) <= scheduler.max_num_scheduled_tokens else []

    def _advance_requests(self, continuing: list[Any]) -> tuple[list[str], list[Any], list[int], list[int]]:
        """Schedule one token for each request. Return four lists, one value for each request: name, new blocks or None,
        number of tokens computed before, number of tokens sampled."""
        manager = self._manager
        blocks = self._blocks
        block_size = self._block_size
        num_cached_blocks = self._num_cached_blocks
        caches_prefixes = self._caches_prefixes
        schedules_ahead = self._schedules_ahead
        lookahead = self._scheduler.num_lookahead_tokens
        # Number of the step before which vLLM does not schedule the request again.
        eligible_step = self._scheduler.current_step + 2
        names: list[str] = []
        new_blocks: list[Any] = []
        computed_before: list[int] = []
        sampled: list[int] = []
        for request in continuing:
            name = request.request_id
            computed = request.num_computed_tokens
            placeholders = request.num_output_placeholders
            names.append(name)
            computed_before.append(computed)
            sampled.append(len(request._output_token_ids) + placeholders)
            # Number of known tokens (no placeholders) whose keys and values are in the cache after this step.
            cached_tokens = computed + 1 - placeholders
            if computed < len(blocks[name]) * block_size and not (
                caches_prefixes and cached_tokens // block_size > num_cached_blocks.get(name, 0)
            ):
                new_blocks.append(None)
            else:
                allocated = manager.allocate_slots(request, 1, num_lookahead_tokens=lookahead)
                new_blocks.append(allocated.get_block_ids(allow_none=True))
            request.num_computed_tokens = computed + 1
            request.next_decode_eligible_step = eligible_step
            if schedules_ahead:
                request.num_output_placeholders = placeholders + 1
            if self._counts_in_flight:
                request.num_in_flight_tokens += 1
        return names, new_blocks, computed_before, sampled

    def append_tokens(
        self, scheduled: Any, sampled: Any, log_probs: list[float], running: dict[str, SampledTokens]
    ) -> Any:
        """Append the step's token to each continuing request that has a token already, and to its entry in `running`.

        log_probs: one for each row of `sampled`. Returns the step without those requests, for `update_from_output`.
        """
        if not self._is_on or scheduled.scheduled_spec_decode_tokens or not sampled.sampled_token_ids:
            return scheduled
        scheduler = self._scheduler
        block_size = self._block_size
        num_cached_blocks = self._num_cached_blocks
        row_numbers = sampled.req_id_to_index
        token_rows = sampled.sampled_token_ids
        requests = scheduler.requests
        max_length = scheduler.max_model_len
        left_to_vllm: dict[str, int] = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request = requests.get(name)
            row_number = row_numbers[name]
            new_tokens = token_rows[row_number]
            if request is None or len(new_tokens) != 1 or not self._needs_another(request, new_tokens[0], max_length):
                # vLLM's `update_from_output` handles this request.
                left_to_vllm[name] = count
                continue
            (token,) = new_tokens
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            if len(request._all_token_ids) % block_size == 0:
                request.update_block_hashes()
            if self._counts_in_flight:
                request.num_in_flight_tokens -= count
            if self._schedules_ahead:
                request.num_output_placeholders -= 1
                cached_tokens = request.num_computed_tokens - request.num_output_placeholders
                if self._caches_prefixes and cached_tokens // block_size > num_cached_blocks.get(name, 0):
                    self._manager.cache_blocks(request, cached_tokens)
            collected = running[name]
            collected.tokens.append(token)
            collected.log_probs.append(log_probs[row_number])
        if len(left_to_vllm) == len(scheduled.num_scheduled_tokens):
            return scheduled
        scheduled = copy(scheduled)
        scheduled.num_scheduled_tokens = left_to_vllm
        return scheduled

    def _needs_another(self, request: Any, token: int, max_length: int) -> bool:
        """Return True if a request runs, has sampled a token already, and will sample another one after `token`."""
        params = request.sampling_params
        return (
            0 < len(request._output_token_ids) < request.max_tokens - 1
            and request.status is self._running_status
            and len(request._all_token_ids) + 1 < max_length
            and token != params.eos_token_id
            and token not in params.stop_token_ids
            and not getattr(request, self._stale_tokens)
        )
