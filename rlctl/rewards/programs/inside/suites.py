"""Tests of a row as callables, by the kind of the suite. Runs in the judge's process.

input     standard input and the expected output, with an optional checker
calls     arguments and the expected value of a function or of a method of Solution
asserts   lines of Python that raise unless the program is right
script    a test module, as pytest or unittest has it, or HumanEval's `check(candidate)`
"""

import ast
import builtins
import sys
import types
from collections.abc import Callable
from typing import Any, Protocol

from rlctl.rewards.programs.inside import pytest_names
from rlctl.rewards.programs.inside.compare import is_same_output, is_same_value
from rlctl.rewards.programs.inside.stand_ins import RemoteProgram

Case = Callable[[], bool]
# Name of the module as which a test imports the program.
_MODULE = "solution"


class InputRunner(Protocol):
    """Runs the program with a standard input."""

    def run_with_input(self, text: str) -> str:
        """Return the output."""
        ...


def list_cases(suite: dict[str, Any], program: RemoteProgram | None, runner: InputRunner) -> list[Case]:
    """Return the tests. A test returns True if the program is right; it may raise."""
    if suite["kind"] == "input":
        checker = _load_checker(suite["checker"])
        return [_input_case(stdin_text, expected, checker, runner) for stdin_text, expected in suite["cases"]]
    assert program is not None
    if suite["kind"] == "calls":
        return [
            _call_case(program, suite["entry_point"], arguments, expected) for arguments, expected in suite["cases"]
        ]
    if suite["kind"] == "asserts":
        return _assert_cases(program, suite)
    return _script_cases(program, suite)


def _input_case(stdin_text: str, expected: str, checker: Callable[..., Any] | None, runner: InputRunner) -> Case:
    def run() -> bool:
        output = runner.run_with_input(stdin_text)
        if checker is not None:
            return bool(checker(stdin_text, output, expected))
        return is_same_output(output, expected)

    return run


def _load_checker(source: str) -> Callable[..., Any] | None:
    """Return the function `check(input, output, expected)` of the row's checker."""
    if not source:
        return None
    names: dict[str, Any] = {}
    exec(compile(source, "checker", "exec"), names)
    checker: Callable[..., Any] = names["check"]
    return checker


def _call_case(program: RemoteProgram, entry_point: str, arguments: list[Any], expected: list[Any]) -> Case:
    """Compare a call with one of several expected values."""

    def run() -> bool:
        owner = program.get("Solution")() if "Solution" in program.names else program.module
        value = getattr(owner, entry_point)(*arguments)
        return any(is_same_value(value, wanted) for wanted in expected)

    return run


def _assert_cases(program: RemoteProgram, suite: dict[str, Any]) -> list[Case]:
    names = _program_names(program, suite["setup"] + "\n" + "\n".join(suite["cases"]))
    if suite["setup"]:
        exec(compile(suite["setup"], "setup", "exec"), names)

    def case_of(text: str) -> Case:
        def run() -> bool:
            exec(compile(text, "test", "exec"), names)
            return True

        return run

    return [case_of(text) for text in suite["cases"]]


def _program_names(program: RemoteProgram, text: str) -> dict[str, Any]:
    """Return the names of the program that the tests use. A builtin keeps its meaning, and so does a module."""
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    names: dict[str, Any] = {"__name__": "tests"}
    for name in sorted(used):
        if name in sys.stdlib_module_names and name not in ("this", "antigravity", "test"):
            names[name] = __import__(name)
        elif name in program.names and not hasattr(builtins, name):
            names[name] = program.get(name)
    return names


def _script_cases(program: RemoteProgram, suite: dict[str, Any]) -> list[Case]:
    module = types.ModuleType(_MODULE)
    public = [name for name in program.names if not name.startswith("_")]
    # A star brings no builtin and no module of the standard library.
    starred = [name for name in public if not hasattr(builtins, name) and name not in sys.stdlib_module_names]
    vars(module)["__all__"] = starred
    vars(module)["__getattr__"] = program.get
    sys.modules[_MODULE] = module
    sys.modules["pytest"] = pytest_names.make_module()
    names = _program_names(program, suite["setup"])
    names["__name__"] = "tests"
    exec(compile(suite["setup"], "tests.py", "exec"), names)
    if suite["entry_point"]:
        return [_check_case(names["check"], program, suite["entry_point"])]
    cases: list[Case] = []
    for name, value in list(names.items()):
        if isinstance(value, type) and hasattr(value, "assertEqual"):
            methods = [method for method in dir(value) if method.startswith("test")]
            cases += [_unittest_case(value, method) for method in methods]
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [method for method in vars(value) if method.startswith("test")]:
                cases += pytest_names.expand(vars(value)[method], value)
        elif isinstance(value, types.FunctionType) and name.startswith("test"):
            cases += pytest_names.expand(value)
    return cases


def _check_case(check: Callable[..., Any], program: RemoteProgram, entry_point: str) -> Case:
    def run() -> bool:
        check(program.get(entry_point))
        return True

    return run


def _unittest_case(class_: Any, method: str) -> Case:
    # Imported only if needed: a fifth of the judge's start.
    import unittest

    def run() -> bool:
        result = unittest.TestResult()
        class_(method).run(result)
        if not result.wasSuccessful():
            problems = [*result.failures, *result.errors]
            raise AssertionError(problems[0][1].strip().splitlines()[-1] if problems else "failed")
        return True

    return run
