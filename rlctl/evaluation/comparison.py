"""Comparison of two evaluations of the same tasks: their difference, and its probability by chance."""

from collections.abc import Sequence
from dataclasses import asdict
from fractions import Fraction
from glob import escape
from itertools import product
from pathlib import Path
from typing import Any

from rlctl.config.errors import UserError
from rlctl.evaluation.statistics import Bounds, compare_means
from rlctl.evaluation.store import MADE_AGAIN, DamagedResult, EvaluationError, EvaluationFolder
from rlctl.evaluation.target import find_target
from rlctl.run.run_dir import RunDirError, find_run

Result = dict[str, Any]

# Settings of an evaluation that must be equal for a fair comparison.
SETTINGS = ("generations", "temperature", "top_p", "top_k", "max_new_tokens", "scored_by")
# Differences with a smaller probability are called more than chance.
LEVEL = 0.05


class NotComparable(UserError):
    """Two evaluations that share no task. The text is one line for the user."""


def results_of(path: Path, root: Path) -> list[Result]:
    """Return the results that `path` names, newest first.

    path: folder or file of one result, or a set of weights, or a run for the results of all its checkpoints. root:
    folder of runs. Raises EvaluationError, TargetError.
    """
    folder = path.parent if path.name == "result.json" else path
    if result := _read_result(folder):
        return [result]
    if (folder / "parts").is_dir():
        raise EvaluationError(f"{path}: the evaluation is not finished; the same `rlctl eval` goes on with it")
    try:
        run = find_run(str(path), root)
        name = run.name
        files = (run / "evals").glob("step_*--*/result.json")
    except RunDirError:
        target = find_target(str(path), root)
        name = target.name
        if target.run:
            files = (target.run / "evals").glob(f"step_{target.step}--*/result.json")
        else:
            files = Path("evals").glob(f"{escape(name)}--*/result.json")
    newest_first = sorted(files, key=lambda file: -file.stat().st_mtime)
    results = [_read_result(file.parent) for file in newest_first]
    finished = [result for result in results if result]
    if not finished:
        raise EvaluationError(f"{path}: {name} was not evaluated yet; rlctl eval {path} does it")
    return finished


def _read_result(folder: Path) -> Result | None:
    try:
        return EvaluationFolder(folder).result()
    except DamagedResult as error:
        raise EvaluationError(f"{error}; nothing is compared; {MADE_AGAIN}") from None


def settings_of(result: Result) -> Result:
    """Return the settings of sampling and scoring in a result."""
    return {name: result[name] for name in SETTINGS if name in result}


def pair(first: Sequence[Result], second: Sequence[Result]) -> tuple[Result, Result]:
    """Return the first pair of results with equal rows and settings, else with equal rows, else the first of each."""
    pairs = list(product(first, second))
    of_same_rows = [(result, other) for result, other in pairs if result["rows"] == other["rows"]]
    of_same_settings = [(result, other) for result, other in of_same_rows if not _unequal_settings(result, other)]
    return (of_same_settings or of_same_rows or pairs)[0]


def _unequal_settings(first: Result, second: Result) -> list[str]:
    """Return the names of the settings that differ. A setting that an older result lacks counts as equal."""
    common = [name for name in SETTINGS if name in first and name in second]
    return [name for name in common if first[name] != second[name]]


def compare(first: Result, second: Result) -> Result:
    """Return the difference of two results in accuracy and in reward, second minus first.

    first, second: from `EvaluationFolder.result`. Tasks without a score in one of the results are left out and counted.
    In the returned dict `settings` has the settings of both results, and `unequal` the names of the differing settings.
    Raises NotComparable for results of different rows, and if no task has a score in both.
    """
    if first["rows"] != second["rows"]:
        results = f"{first['data']} of {first['target']} and {second['data']} of {second['target']}"
        raise NotComparable(f"{results} are not the same rows: no task is in both")
    scored = {task["task"]: task for task in first["by_task"] if task["scored"]}
    after = [task for task in second["by_task"] if task["scored"] and task["task"] in scored]
    before = [scored[task["task"]] for task in after]
    if not after:
        raise NotComparable(f"no task has a score in both {first['target']} and {second['target']}")
    accuracy = compare_means(_shares(before), _shares(after), (-1.0, 1.0))
    reward = compare_means(_task_rewards(before), _task_rewards(after), _difference_bounds(first, second))
    return {
        "first": first["target"],
        "second": second["target"],
        "settings": {"first": settings_of(first), "second": settings_of(second)},
        "unequal": _unequal_settings(first, second),
        "data": first["data"],
        "tasks": len(after),
        "left_out": max(len(first["by_task"]), len(second["by_task"])) - len(after),
        "accuracy": asdict(accuracy) | {"more_than_chance": accuracy.p_value < LEVEL},
        "reward": asdict(reward) | {"more_than_chance": reward.p_value < LEVEL},
    }


def _difference_bounds(first: Result, second: Result) -> Bounds | None:
    """Return the least and the greatest possible difference of a reward; None unless both results have bounds."""
    before = first.get("figures", {}).get("reward", {}).get("bounds")
    after = second.get("figures", {}).get("reward", {}).get("bounds")
    return (after[0] - before[1], after[1] - before[0]) if before and after else None


def _shares(tasks: Sequence[Result]) -> list[Fraction]:
    return [Fraction(task["right"], task["scored"]) for task in tasks]


def _task_rewards(tasks: Sequence[Result]) -> list[float]:
    return [float(task["reward"]) for task in tasks]
