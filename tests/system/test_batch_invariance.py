"""A rollout's tokens and log-probs follow from its seed and its weights alone, not from other requests of its engine.

On a CPU that holds bit by bit. It is why a synchronous run that samples more than it needs resumes bit-exact.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.engine import Engine
from rlctl.generation.requests import Completion, TurnRequest
from tests.system.engines import collect_all, sample, start_engine
from tests.tiny_models import make_model
from tests.turns import turns


def same(one: Sequence[Completion], other: Sequence[Completion]) -> bool:
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.log_probs, b.log_probs)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.long  # a fact about vLLM, to be looked at when its version changes
def test_what_is_sampled_depends_on_nothing_else_in_the_batch(ray_here: Path, tmp_path: Path) -> None:
    engine = start_engine(make_model(tmp_path / "model", seed=1), ray_here, "alone")
    try:
        engine.built().wait(600.0)
        draw = np.random.default_rng(0)
        prompts = [draw.integers(3, 40, draw.integers(4, 20)).tolist() for _ in range(24)]
        groups = [turns(number, 4, prompt, 40, 1000 * number) for number, prompt in enumerate(prompts)]
        mine, others = (
            [each for group in groups[:6] for each in group],
            [each for group in groups[6:] for each in group],
        )
        first = sample(engine, mine).unpack()
        assert len({len(each.tokens) for each in first}) > 3

        def mine_of(requests: list[TurnRequest]) -> list[Completion]:
            found = dict(zip([each.id for each in requests], sample(engine, requests).unpack(), strict=True))
            return [found[each.id] for each in mine]

        assert same(first, [one for group in groups[:6] for one in sample(engine, group).unpack()])
        assert same(first, mine_of(mine[::-1]))
        assert same(first, mine_of(others[:36] + mine + others[36:]))
        # Some begin while others run, which are aborted then.
        engine.start(Engine.submit, others).wait(600.0)
        time.sleep(0.05)
        engine.start(Engine.submit, mine[:12]).wait(600.0)
        (sampled,) = engine.start(Engine.abort, [each.id for each in others]).wait(600.0)
        assert 0 < sampled <= 40 * len(others)
        engine.start(Engine.submit, mine[12:]).wait(600.0)
        assert same(first, collect_all(engine, mine))
    finally:
        engine.kill()
