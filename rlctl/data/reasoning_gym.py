"""Tasks of the library reasoning-gym, generated from a seed: rows for `path: reasoning_gym:NAME`, and their scores.

Rows are generated in a separate process with a fixed hash seed. Some data sets iterate over sets of text, so equal
seeds would give different rows in another process. A row keeps the metadata for its score as a Python literal, because
some data sets need tuples or whole numbers as keys, and JSON has neither.
"""

import ast
import json
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from rlctl.config.errors import did_you_mean, first_line
from rlctl.data.files import DataError, Read

# Column with the name and the arguments of the row's data set, and with the entry's metadata for its score.
COLUMN = "reasoning_gym"
# Most seconds of generating all rows of a data set.
TIMEOUT_S = 600.0
# Data sets that mix others. Use data.train.sources instead.
_COMPOSITES = ("composite",)


def missing_library() -> str:
    """Return the command to type if the library is not installed; empty if it is."""
    absent = "reasoning_gym needs the library reasoning-gym: pip install 'rlctl[reasoning-gym]'"
    return absent if find_spec("reasoning_gym") is None else ""


class ReasoningGym:
    """Generator of rows (`datasets.RowGenerator`) from the data sets of reasoning-gym."""

    def problems(self, dataset: str, args: Mapping[str, Any]) -> list[tuple[str, str]]:
        if missing := missing_library():
            return [("path", missing)]
        configs = _configs()
        if dataset not in configs:
            near = did_you_mean(dataset, configs) or f": it has {len(configs)}, such as chain_sum and countdown"
            return [("path", f"reasoning_gym has no data set {dataset!r}{near}")]
        keys = list(configs[dataset].__dataclass_fields__)
        problems = []
        for key in args:
            if key not in keys:
                near = did_you_mean(key, keys)
                problems.append((f"args.{key}", f"{dataset} has no such key{near or ';'} it has {', '.join(keys)}"))
        seed = args.get("seed")
        if not isinstance(seed, int) or isinstance(seed, bool):
            reason = "must be a whole number: rows follow from it, and those held out need another"
            problems.append(("args.seed", reason))
        if problems:
            return problems
        try:
            _create_dataset(dataset, args)
        except Exception as error:  # The data set's checks raise AssertionError and other errors.
            return [("args", f"{dataset}: {first_line(error)}; it has {', '.join(keys)}")]
        return []

    def seeds(self, dataset: str, args: Mapping[str, Any]) -> range:
        library_dataset = _create_dataset(dataset, args)
        return range(library_dataset.seed, library_dataset.seed + library_dataset.size)

    def read(self, dataset: str, args: Mapping[str, Any], limit: int | None) -> Read:
        path = f"{COLUMN}:{dataset}"
        if problems := self.problems(dataset, args):
            key, problem = problems[0]
            raise DataError(f"{path}: {key}: {problem}")
        number = 0
        command = [sys.executable, "-m", __name__, dataset, json.dumps(args), json.dumps(limit)]
        variables = {**os.environ, "PYTHONHASHSEED": "0"}
        with (
            tempfile.TemporaryFile("w+", errors="replace") as errors,
            Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=errors, env=variables, text=True) as process,
        ):
            timer = threading.Timer(TIMEOUT_S, process.kill)
            timer.start()
            try:
                for number, line in enumerate(process.stdout or (), 1):
                    yield f"{path}:{number}", json.loads(line)
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
            errors.seek(0)
            error_lines = errors.read().strip().splitlines() or ["it ended"]
        if code == -9:  # the timer killed the process
            raise DataError(
                f"{path}: {number} rows in {TIMEOUT_S:g} s: set args.size or limit to fewer, or write a file"
            )
        if code:
            raise DataError(f"{path}:{number + 1}: {error_lines[-1]}")


class Scores:
    """Scorer of completions with the data set that generated the row."""

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the score of a completion, mostly from 0 to 1. Raises KeyError for a row of another origin.

        The answer is the text in the last `<answer>...</answer>`, else all text behind the last `</think>`.
        """
        origin = row[COLUMN]
        key = json.dumps([origin["dataset"], origin["args"]], sort_keys=True)
        if key not in self._datasets:
            self._datasets[key] = _create_dataset(origin["dataset"], origin["args"])
        metadata = ast.literal_eval(origin["metadata"])
        entry = {"question": row["prompt"], "answer": row["answer"], "metadata": metadata}
        return float(self._datasets[key].score_answer(answer=answer_of(completion), entry=entry))


def answer_of(completion: str) -> str:
    """Return the answer in a completion by the rule in `Scores.score`."""
    before, mark, _ = completion.rpartition("</answer>")
    if mark and "<answer>" in before:
        return before.rpartition("<answer>")[2].strip()
    return completion.rpartition("</think>")[2].strip()


def _configs() -> dict[str, Any]:
    """Return the class of each data set's config, by the data set's name."""
    import reasoning_gym  # noqa: F401  (it registers the data sets)
    from reasoning_gym.factory import DATASETS

    return {name: config for name, (_, config) in sorted(DATASETS.items()) if name not in _COMPOSITES}


def _create_dataset(name: str, args: Mapping[str, Any]) -> Any:
    """Return a data set of the library. Its standard output is redirected, because some data sets print dots."""
    with redirect_stdout(sys.stderr):
        import reasoning_gym

        return reasoning_gym.create_dataset(name, **args)


def _plain(value: Any) -> Any:
    """Return a value with all parts converted to Python's built-in types, for example from NumPy's numbers."""
    if isinstance(value, dict):
        return {_plain(key): _plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    if isinstance(value, str):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def _print_rows(name: str, args: dict[str, Any], limit: int | None) -> None:
    """Print each row as one line of JSON, for `ReasoningGym.read`."""
    dataset = _create_dataset(name, args)
    # Only rows go to the standard output: some data sets print dots while they generate.
    out = sys.stdout
    sys.stdout = sys.stderr
    for index in range(min(dataset.size, limit or dataset.size)):
        entry = dataset[index]
        metadata = repr(_plain(entry["metadata"]))
        ast.literal_eval(metadata)  # raises for metadata that the score could not read back
        origin = {"dataset": name, "args": args, "metadata": metadata}
        row = {"prompt": entry["question"], "answer": entry["answer"], COLUMN: origin}
        print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    _print_rows(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
