"""Comparison of two evaluations of the same tasks: the difference, and whether it is more than chance."""

from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from glob import escape
from itertools import product
from pathlib import Path
from typing import Any

from rlctl.config.errors import UserError
from rlctl.evaluation.statistics import Bounds, paired
from rlctl.evaluation.store import MADE_AGAIN, DamagedResult, EvaluationError, EvaluationFolder
from rlctl.evaluation.target import find_target
from rlctl.run.run_dir import RunDirError, find_run

Result = dict[str, Any]

# Settings on which a comparison depends.
SETTINGS = ("generations", "temperature", "top_p", "top_k", "max_new_tokens", "scored_by")
# Differences with a smaller probability are called more than chance.
LEVEL = 0.05


class NotComparable(UserError):
    """Two evaluations that share no task; one line for the user."""


def results_of(path: Path, root: Path) -> list[Result]:
    """Return the results that `path` names, newest first: one result's folder or file, or those of weights.

    A run stands for all of its checkpoints. root: the folder of runs. Raises EvaluationError, TargetError.
    """
    folder = path.parent if path.name == "result.json" else path
    if result := _whole_result(folder):
        return [result]
    if (folder / "parts").is_dir():
        raise EvaluationError(f"{path}: the evaluation is not finished; the same `rlctl eval` goes on with it")
    try:
        run = find_run(str(path), root)
        name, folders = run.name, (run / "evals").glob("step_*--*/result.json")
    except RunDirError:
        target = find_target(str(path), root)
        place, parent = (f"step_{target.step}", target.run / "evals") if target.run else (target.name, Path("evals"))
        name, folders = target.name, parent.glob(f"{escape(place)}--*/result.json")
    files = sorted(folders, key=lambda file: -file.stat().st_mtime)
    found = [result for file in files if (result := _whole_result(file.parent))]
    if not found:
        raise EvaluationError(f"{path}: {name} was not evaluated yet; rlctl eval {path} does it")
    return found


def _whole_result(folder: Path) -> Result | None:
    try:
        return EvaluationFolder(folder).result()
    except DamagedResult as error:
        raise EvaluationError(f"{error}; nothing is compared; {MADE_AGAIN}") from None


def settings_of(result: Result) -> Result:
    """Return the settings that a result states: those of its sampling and its scores."""
    return {name: result[name] for name in SETTINGS if name in result}


def pair(first: Sequence[Result], second: Sequence[Result]) -> tuple[Result, Result]:
    """Return the first pair that has the same rows and settings, else the same rows, else the first of each."""
    pairs = list(product(first, second))
    same = [(a, b) for a, b in pairs if a["rows"] == b["rows"]]
    equal = [(a, b) for a, b in same if not _unequal(a, b)]
    return (equal or same or pairs)[0]


def _unequal(first: Result, second: Result) -> list[str]:
    """Return the names of the settings that differ; one that an older result lacks is not known to."""
    before, after = settings_of(first), settings_of(second)
    return [name for name in SETTINGS if name in before and name in after and before[name] != after[name]]


def compare(first: Result, second: Result) -> Result:
    """Return the difference of two results, second minus first, in accuracy and in reward.

    Both are of `EvaluationFolder.result`. Tasks without a score in one result are left out and counted.
    `settings` has the settings of both, `unequal` the names of the unequal ones. Raises NotComparable for results of
    different rows, and for no common task.
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
    reward = paired(_task_rewards(before), _task_rewards(after), _difference_bounds(first, second))
    return {
        "first": first["target"],
        "second": second["target"],
        "settings": {"first": settings_of(first), "second": settings_of(second)},
        "unequal": _unequal(first, second),
        "data": first["data"],
        "tasks": len(pairs),
        "left_out": max(len(first["by_task"]), len(second["by_task"])) - len(pairs),
        "accuracy": asdict(accuracy) | {"more_than_chance": accuracy.p_value < LEVEL},
        "reward": asdict(reward) | {"more_than_chance": reward.p_value < LEVEL},
    }


def _difference_bounds(first: Result, second: Result) -> Bounds | None:
    """Return the least and the greatest difference of a reward; None unless both results state its bounds."""
    before, after = (each.get("figures", {}).get("reward", {}).get("bounds") for each in (first, second))
    return (after[0] - before[1], after[1] - before[0]) if before and after else None


def _shares(tasks: Sequence[Result]) -> list[Fraction]:
    return [Fraction(each["right"], each["scored"]) for each in tasks]


def _task_rewards(tasks: Sequence[Result]) -> list[float]:
    return [float(each["reward"]) for each in tasks]
