"""Tests of a row: the columns of APPS, LiveCodeBench, MBPP, KodCode, HumanEval and rlctl's own, as one suite."""

import ast
import base64
import io
import json
import pickle
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any, Literal

from rlctl.rewards.base import RewardError

Kind = Literal["input", "calls", "asserts", "script"]
FORMS = (
    "tests (texts of asserts, or {input, output}), test_list (MBPP), input_output (APPS, TACO), public_test_cases "
    "(LiveCodeBench), test (KodCode, HumanEval), reward_model.ground_truth (verl)"
)
# Parts of the name of a column with tests.
_HINTS = ("test", "case", "assert", "check", "verif")


@dataclass(frozen=True)
class TestSuite:
    """Tests of one task."""

    # pytest collects no class with this attribute.
    __test__ = False

    kind: Kind
    # asserts: code that runs before them; script: the test module.
    setup: str = ""
    # input: (standard input, output); calls: (arguments, expected values); asserts: texts.
    cases: list[Any] = field(default_factory=list)
    # calls: name of the function; script: name of the function that `check` gets.
    entry_point: str = ""
    # input: source of `check(input, output, expected)`.
    checker: str = ""

    @property
    def fingerprint(self) -> str:
        """Hash of all of the tests."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the suite as the judge reads it."""
        return asdict(self)


def read_tests(row: dict[str, Any], column: str | None = None) -> TestSuite:
    """Return the tests of a row. column: name of the column with the tests, in place of the known ones.

    Raises RewardError, with the key to set if another column looks like tests.
    """
    if column is not None:
        if row.get(column) is None:
            raise RewardError(f"no tests: the row has no column {column} (rewards.N.column)")
        suite = _read_any(row[column], row, column)
    else:
        suite = _read_known(row)
    if suite is None:
        raise RewardError(_describe_missing(row))
    if not suite.cases and suite.kind != "script":
        raise RewardError("no tests: the row's list of tests is empty")
    return suite


def _read_known(row: dict[str, Any]) -> TestSuite | None:
    if row.get("tests") is not None:
        return _read_any(row["tests"], row, "tests")
    if row.get("test_list") is not None:
        return _read_any(row["test_list"], row, "test_list")
    if row.get("input_output") is not None:
        return _read_any(row["input_output"], row, "input_output")
    if row.get("public_test_cases") is not None or row.get("private_test_cases") is not None:
        return _read_livecodebench(row)
    if isinstance(row.get("test"), str):
        return _read_any(row["test"], row, "test")
    reward_model = row.get("reward_model")
    if isinstance(reward_model, dict) and reward_model.get("ground_truth") is not None:
        return _read_any(reward_model["ground_truth"], row, "reward_model.ground_truth")
    return None


def _read_any(content: Any, row: dict[str, Any], column: str) -> TestSuite | None:
    """Return the suite of a column's value: a list, an object, JSON text of one, or the text of a test module."""
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except ValueError:
            return _read_script(content, row, column)
    if isinstance(content, dict):
        return _read_apps(content, row, column)
    if not isinstance(content, list):
        raise RewardError(f"unreadable tests: column {column} has a {type(content).__name__}; known are {FORMS}")
    if all(isinstance(member, str) for member in content):
        setup = [_text_or_empty(row.get("test_setup_code")), *map(_text_or_empty, _list_of(row.get("test_imports")))]
        suite = TestSuite("asserts", "\n".join(part for part in setup if part), list(content))
        for text in (suite.setup, *suite.cases):
            _require_python(text, column)
        return suite
    if all(isinstance(member, dict) and "input" in member and "output" in member for member in content):
        return _read_pairs(content, row, column)
    raise RewardError(f"unreadable tests: column {column} has neither texts nor {{input, output}}; known are {FORMS}")


def _read_apps(content: dict[str, Any], row: dict[str, Any], column: str) -> TestSuite:
    """Return the suite of {inputs, outputs, fn_name}."""
    inputs = content.get("inputs")
    outputs = content.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise RewardError(f"unreadable tests: column {column} needs inputs and outputs, two lists of one length")
    name = content.get("fn_name")
    if not name:
        cases = [(_lines_of(stdin_text), _lines_of(output)) for stdin_text, output in zip(inputs, outputs)]
        return TestSuite("input", cases=cases, checker=_text_or_empty(row.get("checker")))
    calls = []
    for stdin_text, output in zip(inputs, outputs):
        expected = [output]
        # APPS puts some values into a list of one.
        if isinstance(output, list) and len(output) == 1:
            expected.append(output[0])
        calls.append((_list_of(stdin_text), expected))
    return TestSuite("calls", cases=calls, entry_point=str(name))


def _read_pairs(pairs: list[dict[str, Any]], row: dict[str, Any], column: str) -> TestSuite:
    """Return the suite of [{input, output, testtype}, ...]: standard input, or arguments as a JSON value a line."""
    metadata = _parse_object(row.get("metadata"))
    entry_point = metadata.get("func_name") or row.get("entry_point")
    kinds = {pair.get("testtype") or pair.get("type") or "" for pair in pairs}
    if not any(kind.startswith("func") for kind in kinds if isinstance(kind, str)):
        cases = [(_lines_of(pair["input"]), _lines_of(pair["output"])) for pair in pairs]
        return TestSuite("input", cases=cases, checker=_text_or_empty(row.get("checker")))
    if not entry_point:
        raise RewardError(f"unreadable tests: column {column} calls a function, and metadata has no func_name")
    calls = []
    for pair in pairs:
        try:
            arguments = [json.loads(line) for line in str(pair["input"]).split("\n") if line.strip()]
            calls.append((arguments, [json.loads(str(pair["output"]))]))
        except ValueError as error:
            raise RewardError(f"unreadable tests: column {column} has arguments that are no JSON: {error}") from error
    return TestSuite("calls", cases=calls, entry_point=str(entry_point))


def _read_livecodebench(row: dict[str, Any]) -> TestSuite:
    pairs: list[Any] = []
    for name in ("public_test_cases", "private_test_cases"):
        content = row.get(name)
        if isinstance(content, str) and content.strip():
            try:
                content = json.loads(content)
            except ValueError:
                content = _unpack_private(content)
        pairs += _list_of(content)
    if not all(isinstance(pair, dict) and "input" in pair and "output" in pair for pair in pairs):
        raise RewardError("unreadable tests: public_test_cases and private_test_cases need {input, output, testtype}")
    return _read_pairs(pairs, row, "public_test_cases")


class _TextUnpickler(pickle.Unpickler):
    """Reads a pickled text, and refuses every class and function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no text")


def _unpack_private(text: str) -> Any:
    """Return the private tests of LiveCodeBench: base64 of zlib of a pickled JSON text."""
    try:
        packed = zlib.decompress(base64.b64decode(text))
        return json.loads(_TextUnpickler(io.BytesIO(packed)).load())
    except Exception as error:
        raise RewardError(f"unreadable tests: private_test_cases: {type(error).__name__}") from error


def _read_script(text: str, row: dict[str, Any], column: str) -> TestSuite:
    tree = _require_python(text, column)
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if "check" in functions and row.get("entry_point"):
        return TestSuite("script", text, entry_point=str(row["entry_point"]))
    if any(name.startswith("test") for name in functions):
        return TestSuite("script", text)
    asserts = [node for node in tree.body if isinstance(node, ast.Assert)]
    if not asserts:
        raise RewardError(f"unreadable tests: column {column} has neither test functions nor asserts")
    setup = [ast.unparse(node) for node in tree.body if not isinstance(node, ast.Assert)]
    return TestSuite("asserts", "\n".join(setup), [ast.unparse(node) for node in asserts])


def _require_python(text: str, column: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise RewardError(f"unreadable tests: column {column} is no Python: {error}") from error


def _describe_missing(row: dict[str, Any]) -> str:
    message = f"no tests: the row has columns {', '.join(sorted(row))}; known are {FORMS}"
    likely = [name for name in sorted(row) if any(hint in name.lower() for hint in _HINTS)]
    if likely:
        message += f"; set rewards.N.column={likely[0]}"
    return message


def _lines_of(content: Any) -> str:
    """Return a text; a list of lines is joined, as APPS writes some inputs."""
    if isinstance(content, list):
        return "\n".join(map(_lines_of, content))
    return content if isinstance(content, str) else json.dumps(content)


def _list_of(content: Any) -> list[Any]:
    if content is None:
        return []
    if isinstance(content, Iterable) and not isinstance(content, str | dict):
        return list(content)
    return [content]


def _text_or_empty(content: Any) -> str:
    return content if isinstance(content, str) else ""


def _parse_object(content: Any) -> dict[str, Any]:
    """Return an object, or the JSON text of one; empty for anything else."""
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except ValueError:
            return {}
    return content if isinstance(content, dict) else {}
