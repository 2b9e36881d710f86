"""Hashes of a rollout's full cache blocks, kept from turn to turn.

vLLM finds a prefix by the hash of each full block, and hashes a new request from its first token on. A turn begins with
the turns before it, whose blocks are hashed already.
"""

from collections import OrderedDict
from typing import Any

from rlctl.generation.next_token import whole_sequences

# Tokens of the requests that are kept, at most: 36 bytes each.
_KEPT_TOKENS = 4_000_000


class PrefixHashes:
    """Stands before an engine core's `request_block_hasher`, for requests that begin.

    Made for vLLM 0.25 and 0.32, and models whose layers all attend to the whole sequence. Tokens and salt are compared:
    a history that was rewritten is hashed anew.
    """

    def __init__(self, core: Any) -> None:
        self._hash, self._size = core.request_block_hasher, core.scheduler.block_size
        # By rollout: the last request that it made.
        self._last: OrderedDict[str, Any] = OrderedDict()
        self._most = max(1, _KEPT_TOKENS // core.scheduler.max_model_len)
        if self._hash and whole_sequences(core.scheduler.kv_cache_manager):
            core.request_block_hasher = self._begin

    def _begin(self, request: Any) -> Any:
        """Give a request the hashes that its rollout's last one has; return the others."""
        # It is asked for new blocks with each token.
        request._block_hasher = self._hash
        rollout = request.request_id.rpartition("@")[0]
        last = self._last.pop(rollout, None)
        if last is not None and last.cache_salt == request.cache_salt:
            hashed = len(last.block_hashes) * self._size
            if request.prompt_token_ids[:hashed] == last._all_token_ids[:hashed]:
                request.block_hashes.extend(last.block_hashes)
        self._last[rollout] = request
        if len(self._last) > self._most:
            self._last.popitem(last=False)
        return self._hash(request)
