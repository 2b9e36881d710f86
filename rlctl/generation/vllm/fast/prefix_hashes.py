"""Hashes of a rollout's full cache blocks, kept from turn to turn.

vLLM finds a prefix by the hash of each full block, and hashes a new request from its first token on. A turn begins with
the turns before it, whose blocks are hashed already.
"""

from collections import OrderedDict
from typing import Any

from rlctl.generation.vllm.fast.next_token import whole_sequences

# Rollouts with kept hashes, for each sequence decoded at a time. Most rollouts wait: for the engine, or for their
# environment. A token of a rollout takes 36 bytes.
_KEPT = 4


class PrefixHashes:
    """Stands before an engine core's `request_block_hasher`, for requests that begin.

    Made for vLLM 0.25 and 0.32, and models whose layers all attend to the whole sequence. Tokens and salt are compared:
    a rewritten history is hashed again.
    """

    def __init__(self, core: Any) -> None:
        self._hash, self._size = core.request_block_hasher, core.scheduler.block_size
        # By rollout, of its last request: salt, tokens and hashes, which grow with the request.
        self._last: OrderedDict[str, tuple[str | None, list[int], list[Any]]] = OrderedDict()
        self._most = _KEPT * core.scheduler.max_num_running_reqs
        if self._hash and whole_sequences(core.scheduler.kv_cache_manager):
            core.request_block_hasher = self._begin

    def _begin(self, request: Any) -> Any:
        """Give a request the hashes that its rollout's last one has; return the others."""
        # vLLM calls it again with each token, when only its own is needed.
        request._block_hasher = self._hash
        rollout = request.request_id.rpartition("@")[0]
        salt, tokens, hashes = self._last.pop(rollout, (None, [], []))
        hashed = len(hashes) * self._size
        if salt == request.cache_salt and request.prompt_token_ids[:hashed] == tokens[:hashed]:
            request.block_hashes.extend(hashes)
        self._last[rollout] = request.cache_salt, request._all_token_ids, request.block_hashes
        if len(self._last) > self._most:
            self._last.popitem(last=False)
        return self._hash(request)
