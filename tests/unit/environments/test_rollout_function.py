"""Rollout functions in the process that runs them: what they ask for, what they return, and what is wrong with them."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec
from rlctl.environments.pool import EnvironmentPool, UnusableEnvironmentError

OWN = """
import asyncio, random

async def play(task, policy):
    tokens, log_probs, versions = await policy.sample(task.tokens)
    more = await policy.sample([*task.tokens, *tokens, 9])
    return {"sum": float(sum(more.tokens)), "first": log_probs[0] + versions[0]}

async def beside(task, policy):
    found = await asyncio.gather(*(policy.sample([each]) for each in task.row["starts"]))
    return float(sum(each.tokens[0] for each in found))

async def drawing(task, policy):
    await policy.sample([random.randint(0, 10**6)])

async def raising(task, policy):
    raise KeyError(task.answer)

async def wrong(task, policy):
    return "much"

async def hanging(task, policy):
    await asyncio.sleep(100)

def plain(task, policy):
    return 1.0

async def alone(task):
    return 1.0
"""
TASK = {"id": "e0-r1", "prompt": "1+1=", "tokens": [1, 2], "answer": "2", "row": {"starts": [3, 4, 5]}}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(OWN)
    return path


@pytest.fixture
def pool_of(own: Path) -> Iterator[Any]:
    pools = []

    def make(name: str, timeout_s: float = 30.0) -> EnvironmentPool:
        spec = EnvironmentSpec(f"{own}:{name}", timeout_s, is_function=True)
        pools.append(EnvironmentPool({"rollout": spec}, 2048, processes=1))
        return pools[-1]

    yield make
    for pool in pools:
        pool.shutdown()


def test_it_asks_for_samples_and_returns_a_value(pool_of: Any) -> None:
    pool = pool_of("play")
    assert pool.contracts()["rollout"].problems == []
    assert pool.begin("a", TASK, 0).result() == {"sample": [1, 2]}
    assert pool.begin("b", TASK, 0).result() == {"sample": [1, 2]}
    assert pool.resume("a", ([7, 8], [-0.5, -0.25], [3, 3])).result() == {"sample": [1, 2, 7, 8, 9]}
    assert pool.resume("a", ([4, 5], [0.0, 0.0], [4, 4])).result() == {"reward": {"sum": 9.0, "first": 2.5}}
    assert pool.close("a").result() is None and pool.close("b").result() is None


def test_samples_side_by_side_are_taken_one_after_the_other(pool_of: Any) -> None:
    pool = pool_of("beside")
    assert pool.begin("a", TASK, 0).result() == {"sample": [3]}
    assert pool.resume("a", ([10], [0.0], [0])).result() == {"sample": [4]}
    assert pool.resume("a", ([20], [0.0], [0])).result() == {"sample": [5]}
    assert pool.resume("a", ([30], [0.0], [0])).result() == {"reward": 60.0}


def test_random_is_that_of_the_group(pool_of: Any) -> None:
    pool = pool_of("drawing")
    found = [pool.begin(name, TASK, seed).result() for name, seed in (("a", 5), ("b", 5), ("c", 6))]
    assert found[0] == found[1] != found[2]
    assert found[0] == {"sample": [random.Random(5).randint(0, 10**6)]}
    assert pool.resume("a", ([1], [0.0], [0])).result() == {"reward": None}


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("raising", "raised", "own.py:17: '2'"),
        ("wrong", "contract", "the rollout function must return a finite number or a dict of them, not str 'much'"),
        ("hanging", "timeout", "begin took longer than 0.5 s"),
    ],
)
def test_what_goes_wrong_costs_that_rollout(pool_of: Any, name: str, kind: str, said: str) -> None:
    pool = pool_of(name, 30.0 if name != "hanging" else 0.5)
    pool.contracts()
    failure = pool.begin("a", TASK, 0).result()
    assert isinstance(failure, EnvironmentFailure) and failure.kind == kind and said in str(failure)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain", "must be `async def plain(task, policy)`, not a function"),
        ("alone", "is called as alone(task, policy): too many positional arguments"),
        ("none", "own.py has no none"),
    ],
)
def test_what_is_no_rollout_function_is_told_before_the_start(pool_of: Any, name: str, said: str) -> None:
    with pytest.raises(UnusableEnvironmentError, match="rollout: ") as error:
        pool_of(name).contracts()
    assert said in str(error.value)
