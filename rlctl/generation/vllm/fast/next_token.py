"""One more token for each request that goes on, without vLLM's work for everything a request might need.

Nearly all requests of a step need nothing but their next token: they do not end, and their last block has room. vLLM
looks at some fifty properties of each, asks four layers for blocks, and makes an output for each token.
"""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

# Features that rlctl's engines lack. A scheduler with any of these, by its name in any compared release, is left alone.
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


def whole_sequences(manager: Any) -> Any | None:
    """Return the one kind of blocks that `manager` has, where all layers attend to the whole sequence; else None."""
    kinds = manager.coordinator.single_type_managers
    return kinds[0] if [type(kind).__name__ for kind in kinds] == ["FullAttentionManager"] else None


@dataclass(slots=True)
class SampledTokens:
    """Tokens of one request and their log-probs, in the order in which they were sampled."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class NextTokens:
    """Stands before a scheduler's `schedule`, and takes in the tokens of requests that go on.

    Made for the releases of `COMPARED` (`switch.py`), requests of `vllm_request`, and models whose layers all attend
    to the whole sequence; of others it takes nothing in. It repeats the steps of vLLM's schedulers for a running
    request with one more token, in their order.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import Request, RequestStatus

        self._scheduler, self._manager = scheduler, scheduler.kv_cache_manager
        self._running, self._unpaused = RequestStatus.RUNNING, PauseState.UNPAUSED
        # The next step is scheduled before this one's tokens are known: they have placeholders meanwhile.
        self._ahead = isinstance(scheduler, AsyncScheduler)
        # Attributes that vLLM 0.25 lacks and later releases have.
        self._counts_in_flight = "num_in_flight_tokens" in Request.__init__.__code__.co_names
        # Tokens that were sampled before a request was preempted, and are yet to come.
        self._stale = "num_stale_output_tokens" if self._counts_in_flight else "async_tokens_to_discard"
        whole = whole_sequences(self._manager)
        self._on = whole is not None and not any(getattr(scheduler, name, None) for name in _FEATURES)
        if whole is not None and self._on:
            self._blocks, self._size = whole.req_to_blocks, int(whole.block_size)
            self._cached: dict[str, int] = whole.num_cached_block
            self._caching = bool(self._manager.enable_caching)
            self._schedule, scheduler.schedule = scheduler.schedule, self._schedule_next

    def _schedule_next(self, throttle_prefills: bool = False) -> Any:
        """Give each running request a token, and have vLLM schedule waiting requests with the remaining budget."""
        scheduler = self._scheduler
        held = throttle_prefills or scheduler._pause_state != self._unpaused
        if held or not (going := self._going()):
            return self._schedule(throttle_prefills)
        names, new_blocks, computed, sampled = self._advance_requests(going)
        scheduler.max_num_scheduled_tokens -= len(names)
        try:
            step = self._schedule(throttle_prefills)
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

    def _going(self) -> list[Any]:
        """Return the running requests that get one token; none where vLLM has more to decide about any request."""
        scheduler, blocks, size = self._scheduler, self._blocks, self._size
        before = None if scheduler.use_v2_model_runner else scheduler.prev_step_scheduled_req_ids
        going, short, longest = [], 0, scheduler.max_model_len
        for request in scheduler.running:
            computed, ahead = request.num_computed_tokens, request.num_output_placeholders
            missing = len(request._all_token_ids) + ahead - computed
            if missing != 1 or request.is_prefill_chunk or (before is not None and request.request_id not in before):
                return []
            if computed + 1 >= longest or (ahead and len(request._output_token_ids) + 1 >= request.max_tokens):
                # The request's last token is being computed: vLLM passes over the request too.
                continue
            short += computed >= len(blocks[request.request_id]) * size
            going.append(request)
        enough = short <= self._manager.block_pool.get_num_free_blocks()
        return going if enough and len(going) <= scheduler.max_num_scheduled_tokens else []

    def _advance_requests(self, going: list[Any]) -> tuple[list[str], list[Any], list[int], list[int]]:
        """Give each request a token. Return names, blocks that are new, tokens computed before, and tokens sampled."""
        manager, blocks, size, cached, caching = self._manager, self._blocks, self._size, self._cached, self._caching
        lookahead, is_ahead = self._scheduler.num_lookahead_tokens, self._ahead
        # vLLM passes a request over until the step of this number.
        later = self._scheduler.current_step + 2
        names, new_blocks, computed, sampled = list[str](), list[Any](), list[int](), list[int]()
        for request in going:
            name, before, ahead = request.request_id, request.num_computed_tokens, request.num_output_placeholders
            names.append(name)
            computed.append(before)
            sampled.append(len(request._output_token_ids) + ahead)
            # Known tokens with keys and values in the cache after this step: whether they fill one more block.
            known = before + 1 - ahead
            if before < len(blocks[name]) * size and not (caching and known // size > cached.get(name, 0)):
                new_blocks.append(None)
            else:
                found = manager.allocate_slots(request, 1, num_lookahead_tokens=lookahead)
                new_blocks.append(found.get_block_ids(allow_none=True))
            request.num_computed_tokens = before + 1
            request.next_decode_eligible_step = later
            if is_ahead:
                request.num_output_placeholders = ahead + 1
            if self._counts_in_flight:
                request.num_in_flight_tokens += 1
        return names, new_blocks, computed, sampled

    def take(self, scheduled: Any, sampled: Any, log_probs: list[float], kept: dict[str, SampledTokens]) -> Any:
        """Append the step's token to each request that already has one and surely goes on, and to its entry in `kept`.

        log_probs: of each row of `sampled`. Returns the step without those requests, for `update_from_output`.
        """
        if not self._on or scheduled.scheduled_spec_decode_tokens or not sampled.sampled_token_ids:
            return scheduled
        scheduler, size, cached = self._scheduler, self._size, self._cached
        row, tokens, others = sampled.req_id_to_index, sampled.sampled_token_ids, dict[str, int]()
        requests, longest = scheduler.requests, scheduler.max_model_len
        for name, count in scheduled.num_scheduled_tokens.items():
            request, place = requests.get(name), row[name]
            new = tokens[place]
            if request is None or len(new) != 1 or not self._goes_on(request, new[0], longest):
                others[name] = count
                continue
            (token,) = new
            request._output_token_ids.append(token)
            request._all_token_ids.append(token)
            if len(request._all_token_ids) % size == 0:
                request.update_block_hashes()
            if self._counts_in_flight:
                request.num_in_flight_tokens -= count
            if self._ahead:
                request.num_output_placeholders -= 1
                known = request.num_computed_tokens - request.num_output_placeholders
                if self._caching and known // size > cached.get(name, 0):
                    self._manager.cache_blocks(request, known)
            own = kept[name]
            own.tokens.append(token)
            own.log_probs.append(log_probs[place])
        if len(others) == len(scheduled.num_scheduled_tokens):
            return scheduled
        scheduled = copy(scheduled)
        scheduled.num_scheduled_tokens = others
        return scheduled

    def _goes_on(self, request: Any, token: int, longest: int) -> bool:
        """Return whether a request runs, has a token already, and another is sampled after `token`."""
        params = request.sampling_params
        return (
            0 < len(request._output_token_ids) < request.max_tokens - 1
            and request.status is self._running
            and len(request._all_token_ids) + 1 < longest
            and token != params.eos_token_id
            and token not in params.stop_token_ids
            and not getattr(request, self._stale)
        )
