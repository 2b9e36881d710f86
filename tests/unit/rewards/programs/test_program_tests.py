"""The reward `python_tests` on a real sandbox: limits, shares, groups, kept results and failing sandboxes."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest

from rlctl.rewards.base import RewardFailure, RewardInput
from rlctl.rewards.programs.judging import Judge, ProgramVerdict
from rlctl.rewards.programs.program_tests import ProgramScorer, usage_metrics
from rlctl.rewards.programs.test_forms import read_tests
from rlctl.sandbox.base import Guarantee, Limits, Program, Result, Sandbox, SandboxError, Strength
from tests.unit.rewards.programs.test_cheats import SECTION

SQUARES = {"test_list": ["assert f(3) == 9", "assert f(-2) == 4", "assert f(0) == 0", "assert f(1) == 1"]}
RIGHT = "def f(x): return x * x"
QUICK = replace(SECTION, cpu_s=0.5, idle_s=0.5)


def item(program: str, row: Mapping[str, object] = SQUARES) -> RewardInput:
    return RewardInput("square", program, None, dict(row))


@dataclass
class CountedSandbox:
    """A real sandbox that counts calls and fails a share."""

    inner: Sandbox
    failing: float = 0.0
    calls: int = 0

    def __post_init__(self) -> None:
        self._draw = random.Random(0)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def isolation(self) -> Mapping[Guarantee, Strength]:
        return self.inner.isolation

    def run(self, program: Program, limits: Limits) -> Result:
        self.calls += 1
        if self._draw.random() < self.failing:
            raise SandboxError("no room")
        return self.inner.run(program, limits)

    def close(self) -> None:
        """Leave the shared sandbox open."""


def judge_alone(
    sandbox: Sandbox, program: str, row: Mapping[str, object] = SQUARES, **changes: object
) -> ProgramVerdict:
    section = replace(QUICK, score="share", **changes)  # type: ignore[arg-type]
    verdict = Judge(sandbox, section, read_tests(dict(row))).judge([program])[0]
    assert isinstance(verdict, ProgramVerdict)
    return verdict


@pytest.mark.parametrize(
    ("program", "outcomes"),
    [
        ("def f(x): return x * x if x > 0 else 0", ["passed", "failed", "passed", "passed"]),
        ("def f(x):\n    while x == 3: pass\n    return x * x", ["cpu", "passed", "passed", "passed"]),
        ("import time\ndef f(x):\n    time.sleep(60 * (x == 3))\n    return x * x", ["wall", *["passed"] * 3]),
        ("def f(x): return len(bytes(10**10)) if x == 3 else x * x", ["memory", "passed", "passed", "passed"]),
        ("def f(x:", ["failed"]),
        ("import os\nos._exit(0)", ["lost"]),
    ],
)
def test_a_limit_ends_one_test_and_the_next_has_a_new_process(program: str, outcomes: list[str], sandbox: Sandbox):
    verdict = judge_alone(sandbox, program)
    assert list(verdict.tests) == outcomes
    assert verdict.is_fragile == bool({"cpu", "wall", "memory", "lost"} & set(outcomes))


def test_output_without_end_and_changed_arguments(sandbox: Sandbox) -> None:
    printed = judge_alone(sandbox, "while True: print('x' * 4096)", {"tests": [{"input": "", "output": "x"}]})
    assert list(printed.tests) == ["output"]
    sorting = {"tests": ["x = [3, 1, 2]\nassert f(x) is None\nassert x == [1, 2, 3]"]}
    assert judge_alone(sandbox, "def f(x): x.sort()", sorting).share == 1.0


SCRIPT = """
import pytest
from solution import Empty, Stack, total

def test_last_in_is_first_out():
    stack = Stack()
    stack.push(1)
    stack.push([2])
    assert stack.pop() == [2] and len(stack) == 1 and list(stack) == [1]

def test_an_empty_stack_raises():
    with pytest.raises(Empty, match="nothing"):
        Stack().pop()
    with pytest.raises(ZeroDivisionError):
        total([1], 0)

@pytest.mark.parametrize("numbers, value", [([1, 2], 1.5), ((1.0,), 0.5)])
def test_total(numbers, value):
    assert total(numbers, 2) == pytest.approx(value)
"""
STACK = """
class Empty(Exception):
    pass

class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Empty("nothing")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)

def total(numbers, by): return sum(numbers) / by
"""
CHECKED = {
    "tests": [{"input": "12\n", "output": "3 4\n"}],
    "checker": "def check(input, output, expected):\n    a, b = map(int, output.split())\n    return a * b == 12",
}
UNITTEST = "import unittest\nfrom solution import f\nclass T(unittest.TestCase):\n" + (
    "    def test_f(self): self.assertEqual(f(3), 9)\n    def test_g(self):\n"
    "        with self.assertRaises(TypeError): f(None)\n"
)
LEETCODE = {"input_output": {"fn_name": "twice", "inputs": [[[1, 2]]], "outputs": [[[2, 4]]]}}


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        ({"test": SCRIPT}, STACK, STACK.replace("sum(numbers)", "len(numbers)")),
        ({"test": UNITTEST}, RIGHT, "def f(x): return 9"),
        ({"test": "def check(c):\n    assert c(2) == 4", "entry_point": "f"}, RIGHT, "def f(x): return 2"),
        (CHECKED, "print(2, 6)", "print(2, 5)"),
        (
            LEETCODE,
            "class Solution:\n    def twice(self, x: List[int]) -> List[int]:\n        return [2 * v for v in x]",
            "def twice(x): return x",
        ),
    ],
)
def test_each_kind_of_tests_tells_right_from_wrong(row: dict[str, object], right: str, wrong: str, sandbox: Sandbox):
    outcomes = ProgramScorer(SECTION, sandbox).score([item(right, row), item(wrong, row)], map)
    assert outcomes == [1.0, 0.0]


def test_a_test_that_cannot_run_outside_is_a_failure_and_no_zero(sandbox: Sandbox) -> None:
    row = {"tests": ["assert f(lambda x: x) == 1"]}
    (outcome,) = ProgramScorer(SECTION, sandbox).score([item("def f(g): return g(1)", row)], map)
    assert isinstance(outcome, RewardFailure) and outcome.kind == "a test cannot be run"


def test_equal_programs_are_run_once_and_those_with_a_clock_each_time(sandbox: Sandbox) -> None:
    counted = CountedSandbox(sandbox)
    scorer = ProgramScorer(SECTION, counted)
    clock = "import time\ndef f(x): return x * x + 0 * time.time()"
    assert scorer.score([item(RIGHT), item(f"```python\n{RIGHT}\n```"), item(clock)], map) == [1.0, 1.0, 1.0]
    assert counted.calls == 1
    assert usage_metrics(scorer.take_usage())["programs/cached"] == 0
    assert scorer.score([item(RIGHT), item(clock)], map) == [1.0, 1.0]
    assert counted.calls == 2
    metrics = usage_metrics(scorer.take_usage())
    assert (metrics["programs/scored"], metrics["programs/cached"]) == (2, 0.5)
    uncached = ProgramScorer(replace(SECTION, cache=False), counted)
    assert uncached.score([item(RIGHT)], map) + uncached.score([item(RIGHT)], map) == [1.0, 1.0]
    assert counted.calls == 4


def test_an_abnormal_end_sends_each_program_of_the_group_through_its_own_sandbox(sandbox: Sandbox) -> None:
    counted = CountedSandbox(sandbox)
    scorer = ProgramScorer(QUICK, counted)
    # It waits for its child, which otherwise might still be in the process group that the judge ends.
    orphan = (
        "import os, time\nhere, there = os.pipe()\nif not os.fork():\n    os.setsid()\n    os.write(there, b'!')\n"
        "    time.sleep(30)\nos.read(here, 1)\ndef f(x): return x * x"
    )
    assert scorer.score([item(RIGHT), item(orphan)], map) == [1.0, 1.0]
    assert counted.calls == 3
    assert usage_metrics(scorer.take_usage())["programs/repeated"] == 2
    endless = "def f(x):\n    while True: pass"
    assert scorer.score([item(RIGHT + "\n"), item(endless)], map) == [1.0, 0.0]
    metrics = usage_metrics(scorer.take_usage())
    assert (metrics["programs/limit/cpu"], metrics["programs/near_limit"]) == (0.5, 0.5)


def test_a_failing_sandbox_is_a_failure_and_never_a_zero(sandbox: Sandbox) -> None:
    scorer = ProgramScorer(replace(SECTION, cache=False), CountedSandbox(sandbox, failing=0.6))
    outcomes = [scorer.score([item(RIGHT)], map)[0] for _ in range(12)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
    assert {outcome.kind for outcome in failures} == {"the sandbox failed"}
    assert set(outcomes) - set(failures) == {1.0}
    assert usage_metrics(scorer.take_usage())["programs/sandbox_failures"] >= 2 * len(failures)


def test_another_language_runs_by_a_command(sandbox: Sandbox) -> None:
    section = replace(SECTION, command="sh program", score="share")
    row = {"tests": [{"input": "2 3\n", "output": "5"}, {"input": "1 1\n", "output": "3"}]}
    completion = "```sh\nread a b\necho $((a + b))\n```"
    assert ProgramScorer(section, sandbox).score([item(completion, row)], map) == [0.5]
    (outcome,) = ProgramScorer(section, sandbox).score([item(completion)], map)
    assert isinstance(outcome, RewardFailure) and outcome.kind == "no input tests"


def test_sandboxes_that_end_without_a_word_are_failures_too(sandbox: Sandbox) -> None:
    class SilentSandbox(CountedSandbox):
        def run(self, program: Program, limits: Limits) -> Result:
            result = self.inner.run(program, limits)
            return replace(result, stdout=b"", exit_code=1) if self._draw.random() < 0.5 else result

    scorer = ProgramScorer(replace(SECTION, cache=False), SilentSandbox(sandbox))
    outcomes = [scorer.score([item(RIGHT)], map)[0] for _ in range(8)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, RewardFailure)]
    assert failures and {outcome.kind for outcome in failures} == {"the sandbox failed"}
    assert set(outcomes) - set(failures) == {1.0}
