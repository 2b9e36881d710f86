"""A turn is hashed from the end of the turn before, and from the start where its history or its weights are others."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.generation.requests import RequestId, RolloutId
from rlctl.generation.vllm.fast.prefix_hashes import PrefixHashes

BLOCK = 4


class Core:
    """Hashes as vLLM's core does: each full block, with all before it; counts the blocks."""

    def __init__(self, sequences: int = 8) -> None:
        kinds = [type("FullAttentionManager", (), {})()]
        manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=kinds))
        self.scheduler = SimpleNamespace(block_size=BLOCK, max_num_running_reqs=sequences, kv_cache_manager=manager)
        self.hashed = 0
        self.request_block_hasher: Any = self.hash_blocks

    def hash_blocks(self, request: Any) -> list[int]:
        done, tokens = len(request.block_hashes), request._all_token_ids
        ends = range((done + 1) * BLOCK, len(tokens) + 1, BLOCK)
        self.hashed += len(ends)
        return [hash((request.cache_salt, *tokens[:end])) for end in ends]

    def begin(self, rollout: int, turn: int, prompt: list[int], answer: int = 0, salt: str = "v0") -> Any:
        """Sample a turn, as vLLM makes its request; return the request."""
        name = f"{RequestId(RolloutId('train', 't', rollout, 0), turn)}-5e1f"
        request = SimpleNamespace(
            request_id=name, cache_salt=salt, prompt_token_ids=prompt, _all_token_ids=[*prompt], block_hashes=[]
        )
        for token in (None, *range(answer)):
            request._all_token_ids += [] if token is None else [token]
            hasher = getattr(request, "_block_hasher", self.request_block_hasher)
            request.block_hashes.extend(hasher(request))
        return request


@pytest.fixture
def core() -> Core:
    made = Core()
    PrefixHashes(made)
    return made


def test_a_turn_is_hashed_from_where_the_one_before_ended(core: Core) -> None:
    first = core.begin(0, 0, [1] * 10, answer=7)
    assert core.hashed == 4
    second = core.begin(0, 1, [*first._all_token_ids, 5, 5, 5])
    assert core.hashed == 5 and second.block_hashes == Core().hash_blocks(
        SimpleNamespace(**vars(second) | {"block_hashes": []})
    )


@pytest.mark.parametrize("changed", ["first token", "salt", "rollout", "shorter"])
def test_another_history_or_other_weights_are_hashed_anew(core: Core, changed: str) -> None:
    tokens = core.begin(0, 0, [1] * 10, answer=7)._all_token_ids
    prompt = {"first token": [2, *tokens[1:]], "shorter": tokens[:9]}.get(changed, [*tokens])
    before = core.hashed
    request = core.begin(int(changed == "rollout"), 1, prompt, salt="v1" if changed == "salt" else "v0")
    assert core.hashed - before == len(prompt) // BLOCK
    assert request.block_hashes == Core().hash_blocks(SimpleNamespace(**vars(request) | {"block_hashes": []}))


def test_four_times_as_many_rollouts_are_kept_as_an_engine_decodes() -> None:
    core = Core(sequences=2)
    PrefixHashes(core)
    for rollout in range(9):
        core.begin(rollout, 0, [rollout] * 8)
    before = core.hashed
    for rollout in range(1, 9):
        core.begin(rollout, 1, [rollout] * 8)
    assert core.hashed == before
    core.begin(0, 1, [0] * 8)
    assert core.hashed == before + 2
