"""A rollout's tokens and log-probs follow from its seed and its weights alone, not from other requests of its engine.

On a CPU that holds bit by bit. It is why a synchronous run that samples more than it needs resumes bit-exact.
"""

import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from rlctl.generation.engine import Engine
from rlctl.generation.requests import Completion, TurnRequest
from tests.system.engines import collect_all, sample, start_engine
from tests.tiny_models import make_model
from tests.turns import turns


def are_same(first: Sequence[Completion], second: Sequence[Completion]) -> bool:
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.log_probs, b.log_probs)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.long  # a fact about vLLM, to be looked at when its version changes
def test_what_is_sampled_depends_on_nothing_else_in_the_batch(ray_here: Path, tmp_path: Path) -> None:
    engine = start_engine(make_model(tmp_path / "model", seed=1), ray_here, "alone")
    try:
        engine.built().wait(600.0)
        draw = np.random.default_rng(0)
        prompts = [draw.integers(3, 40, draw.integers(4, 20)).tolist() for _ in range(24)]
        groups = [turns(number, 4, prompt, 40, 1000 * number) for number, prompt in enumerate(prompts)]
        compared = list(chain.from_iterable(groups[:6]))
        company = list(chain.from_iterable(groups[6:]))
        first = sample(engine, compared).unpack()
        assert len({len(completion.tokens) for completion in first}) > 3

        def sample_compared(requests: list[TurnRequest]) -> list[Completion]:
            """Sample all requests; return the completions of the compared ones."""
            ids = [request.id for request in requests]
            completions = dict(zip(ids, sample(engine, requests).unpack(), strict=True))
            return [completions[request.id] for request in compared]

        group_by_group = [sample(engine, group).unpack() for group in groups[:6]]
        assert are_same(first, list(chain.from_iterable(group_by_group)))
        assert are_same(first, sample_compared(compared[::-1]))
        assert are_same(first, sample_compared(company[:36] + compared + company[36:]))
        # Some begin while others run, which are aborted then.
        engine.start(Engine.submit, company).wait(600.0)
        time.sleep(0.05)
        engine.start(Engine.submit, compared[:12]).wait(600.0)
        (sampled,) = engine.start(Engine.abort, [request.id for request in company]).wait(600.0)
        assert 0 < sampled <= 40 * len(company)
        engine.start(Engine.submit, compared[12:]).wait(600.0)
        assert are_same(first, collect_all(engine, compared))
    finally:
        engine.kill()
