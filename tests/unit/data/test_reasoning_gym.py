"""Rows and scores of reasoning-gym: equal for equal seeds in every process, and scored as the library scores them.

Without the library its tests are skipped: pip install -e '.[reasoning-gym]', then pytest -n 0
tests/unit/data/test_reasoning_gym.py
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from rlctl.config.data_schema import DatasetSection
from rlctl.config.errors import ConfigError
from rlctl.config.grpo_schema import RewardSection
from rlctl.data import reasoning_gym
from rlctl.data.datasets import Row, load_rows
from rlctl.data.files import DataError
from rlctl.data.reasoning_gym import ReasoningGym, answer_of
from rlctl.preflight.load import load
from rlctl.rewards.base import RewardInput, attempt
from rlctl.rewards.load_rewards import load_reward

library = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="pip install 'rlctl[reasoning-gym]'")


def rows(name: str, limit: int | None = None, split: str = "train", **args: Any) -> list[Row]:
    path = f"reasoning_gym:{name}"
    return load_rows(DatasetSection(path, split, "prompt", "answer", "messages", limit, args))


def problems(*overrides: str) -> Iterator[str]:
    data = [f"data.{part}.path=reasoning_gym:chain_sum" for part in ("train", "validation")]
    data += ["data.train.args={seed: 1, size: 50}", "data.validation.args={seed: 100, size: 10}"]
    try:
        load("grpo", None, [*data, "rewards=[{name: reasoning_gym}]", *overrides])
    except ConfigError as error:
        yield from (f"{problem.key}: {problem.what}" for problem in error.problems)


def test_without_the_library_each_use_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda _: None)
    command = "reasoning_gym needs the library reasoning-gym: pip install 'rlctl[reasoning-gym]'"
    keys = ("rewards.0.name", "data.train.path", "data.validation.path")
    assert list(problems()) == [f"{key}: {command}" for key in keys]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>1</answer> no: <answer> 2 </answer>.", "2"),
        ("<think>is it 3?</think>\n4", "4"),
        ("<think>is it 3?</think><answer>4</answer>", "4"),
        (" 5\n", "5"),
        ("6</answer>", "6</answer>"),
    ],
)
def test_the_answer_is_the_last_one_that_is_marked_else_what_follows_the_thinking(completion: str, answer: str) -> None:
    assert answer_of(completion) == answer


@library
@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("data.train.path=reasoning_gym:chainsum", "no data set 'chainsum'; did you mean chain_sum?"),
        ("data.train.args.max_term=3", "chain_sum has no such key; did you mean max_terms? it has min_terms, max_t"),
        ("data.train.args.max_terms=0", "chain_sum: max_terms must be >= min_terms; it has min_terms"),
        ("data.validation.args.seed=null", "data.validation.args.seed: must be a whole number"),
        ("data.validation.args.seed=50", "here 50 to 59, and 1 to 50 in data.train"),
        ("data.train.path=some/hub", "are for rows that a library makes"),
    ],
)
def test_what_is_mistyped_is_told_before_the_start(override: str, line: str) -> None:
    (problem,) = problems(override)
    assert line in problem


@library
def test_a_config_without_mistakes_has_no_problems() -> None:
    assert list(problems()) == []


@library
def test_equal_seeds_give_equal_rows_whatever_the_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        values.append([row.values for row in rows("isomorphic_strings", seed=3, size=4)])
    assert values[0] == values[1] and len(values[0]) == 4


@library
def test_rows_know_their_place_and_have_a_limit_and_slices() -> None:
    all_rows = rows("chain_sum", seed=5, size=6)
    assert [row.origin for row in all_rows] == [f"reasoning_gym:chain_sum:{number}" for number in range(1, 7)]
    values = [row.values for row in all_rows]
    assert [row.values for row in rows("chain_sum", limit=2, seed=5, size=6)] == values[:2]
    assert [row.values for row in rows("chain_sum", split="train[4:]", seed=5, size=6)] == values[4:]


@library
@pytest.mark.parametrize("name", ["chain_sum", "rearc"])  # rearc compares tuples
def test_a_row_that_went_through_json_is_scored_as_the_library_scores_the_entry(name: str) -> None:
    import reasoning_gym as gym

    score = load_reward(RewardSection("reasoning_gym", 1.0, None, None, 5.0, 64))
    dataset = gym.create_dataset(name, seed=1, size=2)
    for index, row in enumerate(rows(name, seed=1, size=2)):
        values = json.loads(json.dumps(row.values))
        for answer in (values["answer"], "none", ""):
            value = attempt(score, RewardInput("", f"so <answer>{answer}</answer>", None, values))
            assert value == dataset.score_answer(answer, dataset[index])


@library
def test_a_row_of_another_source_has_no_score_and_costs_no_more_than_that() -> None:
    score = load_reward(RewardSection("reasoning_gym", 1.0, None, None, 5.0, 64))
    assert "it scores rows of a path reasoning_gym:NAME alone" in str(attempt(score, RewardInput("", "3", "3", {})))


@library
def test_a_data_set_that_fails_is_told_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="reasoning_gym:nothing: path: reasoning_gym has no data set 'nothing'"):
        rows("nothing", seed=1)
    monkeypatch.setattr(reasoning_gym, "TIMEOUT_S", 0.01)
    with pytest.raises(DataError, match=r"reasoning_gym:chain_sum: 0 rows in 0\.01 s: "):
        list(ReasoningGym().read("chain_sum", {"seed": 1}, None))
