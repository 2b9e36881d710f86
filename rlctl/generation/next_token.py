"""One more token for each request that goes on, without the work that vLLM does for all that a request might need.

Nearly all requests of a step need nothing but their next token: they do not end, and their last block has room. vLLM
asks four layers for blocks each time, and makes an output for each token.
"""

from copy import copy
from typing import Any

# Arguments with which vLLM asks for the slots of a request that is running.
_RUNNING = {"num_lookahead_tokens": 0}


def whole_sequences(manager: Any) -> Any | None:
    """Return the one kind of blocks that `manager` has, where all layers attend to the whole sequence; else None."""
    kinds = manager.coordinator.single_type_managers
    return kinds[0] if [type(kind).__name__ for kind in kinds] == ["FullAttentionManager"] else None


class NextSlots:
    """Stands before a cache manager's `allocate_slots` and `cache_blocks`, and answers where nothing is to be done.

    Made for vLLM 0.25 and 0.32, and models whose layers all attend to the whole sequence; others are left alone.
    """

    def __init__(self, manager: Any) -> None:
        """Take the place of both methods of vLLM's KVCacheManager."""
        if (whole := whole_sequences(manager)) is None:
            return
        self._blocks, self._size = whole.req_to_blocks, int(whole.block_size)
        self._cached: dict[str, int] = whole.num_cached_block
        self._caching, self._none = bool(manager.enable_caching), manager.empty_kv_cache_blocks
        self._allocate_slots, manager.allocate_slots = manager.allocate_slots, self._allocate
        self._cache_blocks, manager.cache_blocks = manager.cache_blocks, self._cache

    def _allocate(self, request: Any, num_new_tokens: int, **named: Any) -> Any:
        """Do vLLM's work, unless the token has room in the request's last block and fills none."""
        if num_new_tokens == 1 and named == _RUNNING:
            tokens = request.num_computed_tokens + 1
            has_room = tokens <= len(self._blocks.get(request.request_id, ())) * self._size
            if has_room and not self._fills(request, min(tokens, request.num_tokens)):
                return self._none
        return self._allocate_slots(request, num_new_tokens, **named)

    def _cache(self, request: Any, num_computed_tokens: int) -> None:
        if self._fills(request, num_computed_tokens):
            self._cache_blocks(request, num_computed_tokens)

    def _fills(self, request: Any, tokens: int) -> bool:
        """Return whether `tokens` fill a block that other requests cannot find yet."""
        return self._caching and tokens // self._size > self._cached.get(request.request_id, 0)


class NextTokens:
    """Takes in the tokens of requests that go on, and leaves the others to vLLM's scheduler.

    Made for vLLM 0.25 and 0.32: it does what their schedulers do for a running request that got one more token.
    """

    def __init__(self, scheduler: Any) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import RequestStatus

        self._scheduler, self._running = scheduler, RequestStatus.RUNNING
        # The next step is scheduled before this one's tokens are known: they have placeholders meanwhile.
        self._ahead = isinstance(scheduler, AsyncScheduler)

    def take(self, scheduled: Any, sampled: Any) -> tuple[Any, list[tuple[str, int]]]:
        """Append the step's token to each request that has one already and surely goes on.

        Returns the step without those requests, for `update_from_output`, and their names and tokens.
        """
        if scheduled.scheduled_spec_decode_tokens or not sampled.sampled_token_ids:
            return scheduled, []
        row, tokens, others, taken = sampled.req_id_to_index, sampled.sampled_token_ids, dict[str, int](), []
        requests, cache_blocks = self._scheduler.requests, self._scheduler.kv_cache_manager.cache_blocks
        for name, count in scheduled.num_scheduled_tokens.items():
            request, new = requests.get(name), tokens[row[name]]
            if request is None or len(new) != 1 or not self._goes_on(request, new[0]):
                others[name] = count
                continue
            # vLLM 0.32 has this count, 0.25 has not.
            if hasattr(request, "num_in_flight_tokens"):
                request.num_in_flight_tokens -= count
            request.append_output_token_ids(new[0])
            if self._ahead:
                request.num_output_placeholders -= 1
                cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
            taken.append((name, new[0]))
        if taken:
            scheduled = copy(scheduled)
            scheduled.num_scheduled_tokens = others
        return scheduled, taken

    def _goes_on(self, request: Any, token: int) -> bool:
        """Return whether a request runs, has a token already, and another is sampled after `token`."""
        sampled, params = len(request._output_token_ids), request.sampling_params
        return (
            0 < sampled < request.max_tokens - 1
            and request.status is self._running
            and len(request._all_token_ids) + 1 < self._scheduler.max_model_len
            and token != params.eos_token_id
            and token not in params.stop_token_ids
            # Tokens that were sampled before it was preempted, and are yet to come: in vLLM 0.32, and in 0.25.
            and not getattr(request, "num_stale_output_tokens", 0)
            and not getattr(request, "async_tokens_to_discard", 0)
        )
