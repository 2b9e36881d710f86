"""Comparison of two evaluations of the same tasks: the difference, and whether it is more than chance."""

from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from rlctl.evaluation.statistics import Bounds, paired
from rlctl.evaluation.store import EvaluationError, EvaluationFolder
from rlctl.evaluation.target import find_target

Result = dict[str, Any]

# Differences with a smaller probability are called more than chance.
LEVEL = 0.05


class NotComparable(ValueError):
    """Two evaluations that share no task; one line for the user."""


def results_of(path: Path, root: Path) -> list[Result]:
    """Return the results that `path` names: a result's folder or file, or a checkpoint or run with results, newest
    first.

    root: the folder of runs. Raises EvaluationError, TargetError.
    """
    folder = path.parent if path.name == "result.json" else path
    if result := EvaluationFolder(folder).result():
        return [result]
    target = find_target(str(path), root)
    folders = (target.run / "evals").glob(f"step_{target.step}--*/result.json") if target.run else ()
    files = sorted(folders, key=lambda file: -file.stat().st_mtime)
    found = [result for file in files if (result := EvaluationFolder(file.parent).result())]
    if not found:
        raise EvaluationError(f"{path}: {target.name} was not evaluated yet; rlctl eval {path} does it")
    return found


def pair(first: Sequence[Result], second: Sequence[Result]) -> tuple[Result, Result]:
    """Return the first pair that has the same rows and settings, else the same rows, else the first of each."""
    pairs = list(product(first, second))
    same = [(a, b) for a, b in pairs if a["rows"] == b["rows"]]
    settings = ("generations", "temperature", "rescored")
    alike = [(a, b) for a, b in same if all(a.get(key) == b.get(key) for key in settings)]
    return (alike or same or pairs)[0]


def compare(first: Result, second: Result) -> Result:
    """Return the difference of two results, second minus first, in accuracy and in reward.

    Both are of `EvaluationFolder.result`. Tasks that one of them lacks, or has no score of, are left out and counted.
    Raises NotComparable for results of different rows, and for no common task.
    """
    if first["rows"] != second["rows"]:
        what = f"{first['data']} of {first['target']} and {second['data']} of {second['target']}"
        raise NotComparable(f"{what} are not the same rows: no task is in both")
    known = {task["task"]: task for task in first["by_task"] if task["scored"]}
    pairs = [(known[task["task"]], task) for task in second["by_task"] if task["scored"] and task["task"] in known]
    if not pairs:
        raise NotComparable(f"no task has a score in both {first['target']} and {second['target']}")
    before, after = zip(*pairs)
    accuracy = paired(_shares(before), _shares(after), (-1.0, 1.0))
    reward = paired(_rewards(before), _rewards(after), _bounds(first, second))
    return {
        "first": first["target"],
        "second": second["target"],
        "data": first["data"],
        "tasks": len(pairs),
        "left_out": max(len(first["by_task"]), len(second["by_task"])) - len(pairs),
        "accuracy": asdict(accuracy) | {"more_than_chance": accuracy.p_value < LEVEL},
        "reward": asdict(reward) | {"more_than_chance": reward.p_value < LEVEL},
    }


def _bounds(first: Result, second: Result) -> Bounds | None:
    """Return the least and the greatest difference of a reward; None unless both results state its bounds."""
    before, after = (each.get("figures", {}).get("reward", {}).get("bounds") for each in (first, second))
    return (after[0] - before[1], after[1] - before[0]) if before and after else None


def _shares(tasks: Sequence[Result]) -> list[Fraction]:
    return [Fraction(each["right"], each["scored"]) for each in tasks]


def _rewards(tasks: Sequence[Result]) -> list[float]:
    return [float(each["reward"]) for each in tasks]
