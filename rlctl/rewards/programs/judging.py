"""Verdicts on programs: the judge runs in a sandbox with one program, or with all programs of a group.

Programs of one task share a sandbox, so that it starts once. An abnormal end of one (a limit, a signal, a lost answer,
a process left) sends each one through its own sandbox, and only those verdicts count.
"""

import json
import py_compile
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlctl.config.grpo_schema import ProgramRewardSection
from rlctl.rewards.programs.inside.compare import is_same_output
from rlctl.rewards.programs.test_forms import TestSuite
from rlctl.sandbox.base import Ending, Limits, Program, Result, Sandbox, SandboxError
from rlctl.sandbox.open_sandbox import LOCAL_KINDS

# Outcomes of a test that no limit ended.
PASSED = "passed"
FAILED = "failed"
# Test that the judge cannot run. It says nothing about the program.
UNSUPPORTED = "unsupported"
# Outcome of a program that ended its judge.
LOST = "lost"
_NORMAL = {PASSED, FAILED, UNSUPPORTED}
_LIMITS = {
    Ending.WALL_TIME: "wall",
    Ending.CPU_TIME: "cpu",
    Ending.MEMORY: "memory",
    Ending.PROCESSES: "processes",
    Ending.OUTPUT: "output",
    Ending.FILES: "files",
}
# Names of the limits, as metrics have them.
LIMIT_NAMES = tuple(_LIMITS.values())
# Memory of the judge and of the process that forks programs, MiB.
_JUDGE_MIB = 96
_JUDGE = "rlctl.rewards.programs.inside.judge"
# Seconds that a judge takes to start on a busy machine.
_START_S = 20.0
NEAR = 0.8
# A judge that is lost so many times in a row was ended by its program. Where one sandbox in five is lost at random, one
# program in 600 would be taken for such.
_LOSSES = 4
# Tries of a sandbox that fails.
TRIES = 2


@dataclass(frozen=True)
class ProgramVerdict:
    """Outcomes of one program's tests."""

    # Outcome of each test that ran: `passed`, `failed`, `unsupported`, or the limit that ended it.
    tests: Sequence[str]
    num_tests: int
    # First error, or the reason.
    detail: str = ""
    # True if a test used at least 80% of the limit on CPU time.
    is_near: bool = False
    # True if the verdict may differ in another run, because a limit or another process had a part in it.
    is_fragile: bool = False

    @property
    def share(self) -> float:
        """Share of the tests that passed. Tests that did not run have failed."""
        return sum(outcome == PASSED for outcome in self.tests) / self.num_tests

    @property
    def limit(self) -> str:
        """Name of the first limit that ended a test; empty if none did."""
        return next((outcome for outcome in self.tests if outcome in LIMIT_NAMES), "")


@dataclass
class Effort:
    """Work of sandboxes."""

    seconds: float = 0.0
    sandboxes: int = 0
    # Programs that were judged once more, each in its own sandbox.
    repeated: int = 0
    # Calls of a sandbox that failed.
    failures: int = 0

    def add(self, other: "Effort") -> None:
        """Add another one's counts."""
        self.seconds += other.seconds
        self.sandboxes += other.sandboxes
        self.repeated += other.repeated
        self.failures += other.failures


@dataclass
class Judge:
    """Judges programs of one suite. One instance serves one call of the scorer."""

    sandbox: Sandbox
    section: ProgramRewardSection
    suite: TestSuite
    effort: Effort = field(default_factory=Effort)

    def judge(self, programs: Sequence[str]) -> list[ProgramVerdict | SandboxError]:
        """Return for each program its verdict, or the error of a sandbox that failed."""
        if self.section.command is not None:
            return [self._try(lambda program=program: self._run_command(program)) for program in programs]
        if len(programs) > 1:
            try:
                return self._judge_group(programs)
            except (_AbnormalEnd, SandboxError):
                self.effort.repeated += len(programs)
        return [self._try(lambda program=program: self._judge_alone(program)) for program in programs]

    def _try(self, judge: Any) -> ProgramVerdict | SandboxError:
        """Judge a program. A sandbox that fails gets a second try."""
        last_error = SandboxError("no try")
        for _ in range(TRIES):
            try:
                verdict: ProgramVerdict = judge()
                return verdict
            except _TooLongError as error:
                self.effort.failures += 1
                return error
            except SandboxError as error:
                self.effort.failures += 1
                last_error = error
        return last_error

    def _judge_group(self, programs: Sequence[str]) -> list[ProgramVerdict | SandboxError]:
        """Judge all programs in one sandbox. Raises _AbnormalEnd if one may have disturbed another."""
        result, verdicts = self._run_judge(programs, may_write=False)
        if verdicts is None or len(verdicts) != len(programs) or result.ending is not Ending.EXITED:
            raise _AbnormalEnd
        if any(verdict.is_fragile for verdict in verdicts):
            raise _AbnormalEnd
        return list(verdicts)

    def _judge_alone(self, program: str) -> ProgramVerdict:
        """Judge a program in its own sandbox. Raises SandboxError."""
        for _ in range(_LOSSES):
            result, verdicts = self._run_judge([program], may_write=True)
            if verdicts:
                return verdicts[0]
            if result.ending is Ending.WALL_TIME:
                raise _TooLongError(f"a program and its judge took longer than {result.wall_s:.0f} s")
            if result.ending in _LIMITS:
                return ProgramVerdict([_LIMITS[result.ending]], 1, "the sandbox ended it at a limit", is_fragile=True)
            if b" ready" not in result.stdout:
                raise SandboxError(f"its judge did not start: {_last_line(result)}")
        # The judge is always lost. If a harmless program is judged, this program ended its judge.
        if self._run_judge([""], may_write=True)[1]:
            return ProgramVerdict([LOST], 1, "the program ended the process that judges it", is_fragile=True)
        raise SandboxError(f"its judge ended without a verdict: {_last_line(result)}")

    def _run_judge(self, programs: Sequence[str], *, may_write: bool) -> tuple[Result, list[ProgramVerdict] | None]:
        """Run the judge in a sandbox; return its result and the verdicts, None without them. Raises SandboxError."""
        token = secrets.token_hex(16)
        section = self.section
        request = {
            "token": token,
            "suite": self.suite.to_json(),
            "programs": list(programs),
            "stop_early": section.score == "all",
            "limits": {
                "cpu_s": section.cpu_s,
                "idle_s": section.idle_s,
                "memory_bytes": section.memory_mib << 20,
                "output_bytes": 4 << 20,
                "files": may_write,
            },
        }
        num_tests = max(1, len(self.suite.cases)) * len(programs)
        limits = self._limits(num_tests)
        program = Program(
            argv=("python", "-s", "-m", _JUDGE),
            stdin=json.dumps(request).encode(),
            files=_judge_files(self.sandbox.name in LOCAL_KINDS),
            variables={"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
        )
        result = self._call_sandbox(program, limits)
        return result, _read_verdicts(result, token, section.cpu_s)

    def _limits(self, num_tests: int) -> Limits:
        """Return the limits of a whole sandbox. Those of a test are the judge's, which ends a program earlier."""
        section = self.section
        # A program is ended after three limits, and a busy machine gives it a part of a core.
        longest_s = num_tests * (section.cpu_s + section.idle_s)
        return Limits(
            wall_s=_START_S + min(20 * longest_s, section.wall_s),
            cpu_s=_START_S + num_tests * section.cpu_s,
            memory_mib=section.memory_mib + _JUDGE_MIB,
        )

    def _run_command(self, source: str) -> ProgramVerdict:
        """Run a program of another language with each input, and compare its output here. Raises SandboxError."""
        section = self.section
        outcomes = []
        detail = ""
        is_near = False
        limits = Limits(wall_s=_START_S + section.idle_s, cpu_s=section.cpu_s, memory_mib=section.memory_mib)
        for stdin_text, expected in self.suite.cases:
            program = Program(
                argv=("sh", "-c", str(section.command)),
                stdin=stdin_text.encode(),
                files={"program": source.encode("utf-8", "replace")},
            )
            result = self._call_sandbox(program, limits)
            is_near = is_near or result.is_near(limits)
            if result.ending in _LIMITS:
                outcomes.append(_LIMITS[result.ending])
            elif is_same_output(result.stdout.decode("utf-8", "replace"), expected):
                outcomes.append(PASSED)
            else:
                outcomes.append(FAILED)
                detail = detail or _last_line(result)
            if section.score == "all" and outcomes[-1] != PASSED:
                break
        # Nothing says if it reads a clock.
        return ProgramVerdict(outcomes, len(self.suite.cases), detail, is_near, is_fragile=True)

    def _call_sandbox(self, program: Program, limits: Limits) -> Result:
        try:
            result = self.sandbox.run(program, limits)
        except SandboxError:
            raise
        except Exception as error:
            raise SandboxError(f"{type(error).__name__}: {error}") from error
        self.effort.sandboxes += 1
        self.effort.seconds += result.wall_s
        return result


class _TooLongError(SandboxError):
    """A program whose tests took longer than `wall_s`. A second try would take as long."""


class _AbnormalEnd(Exception):
    """Programs of one sandbox may have disturbed each other."""


def _read_verdicts(result: Result, token: str, cpu_s: float) -> list[ProgramVerdict] | None:
    """Return the verdicts behind the token; None if there are none. Raises SandboxError if it isolates too little."""
    for line in reversed(result.stdout.decode("utf-8", "replace").splitlines()):
        mark, _, text = line.partition(" ")
        if mark == token and text != "ready":
            break
    else:
        return None
    verdicts = []
    for record in json.loads(text):
        if "unsafe" in record:
            raise SandboxError("a program may read the memory of its judge here: use another sandbox")
        if "lost" in record:
            return None
        verdicts.append(_verdict_of(record, cpu_s))
    return verdicts


def _verdict_of(record: Mapping[str, Any], cpu_s: float) -> ProgramVerdict:
    tests = list(record["tests"])
    is_near = record["cpu_s"] >= NEAR * cpu_s
    is_abnormal = not _NORMAL.issuperset(tests)
    is_fragile = is_near or record["orphans"] or is_abnormal
    return ProgramVerdict(tests, max(1, record["num_tests"]), record["detail"], is_near, is_fragile)


@cache
def _judge_files(is_compiled: bool) -> dict[str, bytes]:
    """Return the judge's modules. None of them is a secret.

    is_compiled: the sandbox's Python is this one. Compiling the modules at each start would take 30 ms of its 90.
    """
    modules = {}
    inside = Path(__file__).parent / "inside"
    packages = _JUDGE.split(".")[:-1]
    with TemporaryDirectory() as folder:
        target = Path(folder, "module.pyc")
        for path in sorted(inside.glob("*.py")):
            if is_compiled:
                py_compile.compile(str(path), str(target), path.name, doraise=True)
            source = target if is_compiled else path
            modules["/".join([*packages, f"{path.stem}{source.suffix}"])] = source.read_bytes()
        for depth in range(1, len(packages)):
            modules["/".join([*packages[:depth], "__init__.py"])] = b""
    return modules


def _last_line(result: Result) -> str:
    lines = result.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:200] if lines else f"{result.ending}, exit code {result.exit_code}"
