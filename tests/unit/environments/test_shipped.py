"""The environments that ship: by the contract, won by a good player, and never trained on held-out tasks."""

import importlib
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.plugins import ENVIRONMENTS
from rlctl.environments import calculator, guess, maze, sqlite
from rlctl.environments.calculator import Calculator, compute
from rlctl.environments.contract import read_contract
from rlctl.environments.guess import Guess
from rlctl.environments.maze import Maze
from rlctl.environments.sqlite import Sqlite
from rlctl.utils.user_code import load_object


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_each_keeps_the_contract_and_imports_nothing_of_rlctl(name: str) -> None:
    contract = read_contract(load_object(ENVIRONMENTS[name]), {})
    assert contract.problems == [] and contract.notes == [] and contract.has_reward
    assert bool(contract.tools) != contract.has_step
    module = importlib.import_module(ENVIRONMENTS[name].partition(":")[0])
    source = Path(str(module.__file__)).read_text()
    assert "rlctl" not in source and len(source.splitlines()) <= 130


@pytest.mark.parametrize("module", [guess, calculator, sqlite, maze], ids=lambda module: module.__name__)
def test_tasks_are_the_seeds_own_and_held_out_ones_are_no_others(module: Any) -> None:
    first_tasks = list(islice(module.tasks(1), 300))
    assert first_tasks == list(islice(module.tasks(1), 300)) != list(islice(module.tasks(2), 300))
    keys = {"guess": "low", "calculator": "expression", "sqlite": "shop", "maze": "maze"}
    key = keys[module.__name__.rpartition(".")[2]]
    training_tasks = {str(row[key]) for row in islice(module.tasks(1, False), 2000)}
    held_out_tasks = {str(row[key]) for row in islice(module.tasks(1, True), 2000)}
    assert training_tasks and held_out_tasks and not training_tasks & held_out_tasks


def play_guess(choose_number: Any, num_games: int = 4000) -> float:
    """Play games of 15 numbers and 5 guesses; return the share won. The player sees the remaining range."""
    draw = random.Random(1)
    num_won = 0.0
    for row in islice(guess.tasks(0), num_games):
        game = Guess()
        low = row["low"]
        high = row["high"]
        game.reset(**row)
        hint: str | None = ""
        while hint is not None:
            number = choose_number(draw, low, high, row)
            hint = game.step(f"I guess {number}.")
            if hint == "higher":
                low = number + 1
            else:
                high = number - 1
        num_won += game.get_reward()
    return num_won / num_games


def test_guess_is_won_by_chance_by_hints_and_by_halving_as_often_as_stated() -> None:
    blind_share = play_guess(lambda draw, low, high, row: draw.randint(row["low"], row["high"]))
    heeding_share = play_guess(lambda draw, low, high, row: draw.randint(low, high))
    halving_share = play_guess(lambda draw, low, high, row: (low + high) // 2, num_games=500)
    assert blind_share == pytest.approx(0.29, abs=0.02)
    assert heeding_share == pytest.approx(0.80, abs=0.02)
    assert halving_share == 1.0


def test_guess_takes_the_last_number_and_any_words() -> None:
    game = Guess(guesses=3, prompt="{low} {high}=", higher="+", lower="-", unclear="*")
    assert game.reset(low=1, high=15, secret=7) == "1 15="
    assert [game.step("not 7 but 3"), game.step("hm"), game.step("7")] == ["+", "*", None]
    assert game.get_reward() == 1.0
    game.reset(low=1, high=15, secret=7)
    assert [game.step("9" * 5000), game.step("-7"), game.step("8")] == ["-", "+", None]
    assert game.get_reward() == 0.0


def test_a_calculator_computes_and_runs_nothing_else() -> None:
    row = next(calculator.tasks(3))
    game = Calculator()
    assert row["expression"] in game.reset(**row)
    result = game.calculate(row["expression"])
    assert result == str(eval(row["expression"]))
    assert game.get_reward() == 0.0
    game.answer(float(result))
    assert game.get_reward() == 1.0
    assert compute("-(2 + 3) * 4 / 5") == -4.0
    for text in (
        "__import__('os')",
        "9**9**9",
        "1 +",
        "x",
        "1 / 0",
        "'a' * 9",
        "9" * 300,
        "True + 1",
        "10000000 * 10000000 * 10000000",
    ):
        with pytest.raises(ValueError):
            compute(text)


def test_a_database_answers_and_is_never_changed() -> None:
    for row in islice(sqlite.tasks(5), 30):
        game = Sqlite()
        assert row["question"] in game.reset(**row)
        game.submit("SELECT 'something else'")
        assert game.get_reward() == 0.0
        game.submit(row["sql"])
        assert game.get_reward() == 1.0
        game.close()
    game.reset(**row)
    for statement in ("DELETE FROM orders", "DROP TABLE orders", "nonsense", "SELECT 1; SELECT 2"):
        with pytest.raises((sqlite.sqlite3.Error, sqlite.sqlite3.Warning)):
            game.query(statement)
        game.submit(statement)
        assert game.get_reward() == 0.0
    assert game.query("SELECT 1 UNION SELECT 2").split() == ["1", "2"]


def test_a_query_without_end_is_ended() -> None:
    game = Sqlite()
    game.reset(**next(sqlite.tasks(5)))
    with pytest.raises(sqlite.sqlite3.OperationalError, match="interrupted"):
        game.query("WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n")


def test_a_maze_is_walked_by_who_tries_each_way_once() -> None:
    opposite = {"up": "down", "down": "up", "left": "right", "right": "left"}
    for row in islice(maze.tasks(2), 20):
        game = Maze()
        view = game.reset(**row)
        trail: list[str] = []
        tried: dict[str, set[str]] = {}
        while "arrived" not in view:  # by hand along one wall: depth first
            place, ways = view[view.index("You are") :].rstrip(".").split(". Open: ")
            tried_ways = tried.setdefault(place, {opposite[trail[-1]]} if trail else set())
            untried_ways = [way for way in ways.split(", ") if way not in tried_ways]
            if untried_ways:
                way = untried_ways[0]
                trail.append(way)
            else:
                way = opposite[trail.pop()]
            tried_ways.add(way)
            view = game.move(way)  # type: ignore[arg-type]
        reward = game.get_reward()
        assert reward["goal"] == 1.0 and 0 < reward["short"] <= 0.1 + 1e-9
        with pytest.raises(ValueError, match="ended"):
            game.move("up")


def test_a_wall_costs_a_move_and_an_unfinished_walk_is_worth_nothing() -> None:
    game = Maze(moves=2)
    game.reset()
    assert game.move("up").startswith("There is a wall. You are in row 1, column 1.")
    game.move("left")
    with pytest.raises(ValueError, match="ended"):
        game.move("left")
    assert game.get_reward() == {"goal": 0.0, "short": 0.0}
