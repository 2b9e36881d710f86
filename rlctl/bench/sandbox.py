"""`rlctl bench sandbox`: programs a second in each sandbox of this machine, and a call of its waiting Python."""

import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say
from rlctl.config.grpo_schema import ProgramRewardSection
from rlctl.config.sandbox_schema import SandboxName
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.load import load
from rlctl.rewards.programs.judging import PASSED, Judge, ProgramVerdict
from rlctl.rewards.programs.test_forms import TestSuite
from rlctl.sandbox.base import Limits, Program, Sandbox, SandboxError
from rlctl.sandbox.local_sandbox import LocalSandbox
from rlctl.sandbox.open_sandbox import open_sandbox
from rlctl.sandbox.warm_python import WarmPython, make_folder

_SOURCE = "print(sum(range(100)))"
_FILES = {f"data/{number}.txt": b"text\n" * 50 for number in range(5)}
# Runs five tests on five files, each in its own process.
_FIVE_TESTS = """
import glob, subprocess, sys
for path in sorted(glob.glob("data/*.txt")):
    done = subprocess.run([sys.executable, "-S", "solution.py"], stdin=open(path), capture_output=True, text=True)
    assert done.stdout == "50\\n", done
print("passed")
"""
_SOLUTION = b"import sys\nprint(len(sys.stdin.read().split()))\n"
_ASSERTS = [f"assert add({number}, 1) == {number + 1}" for number in range(5)]
_ADD = "def add(a, b):\n    return a + b\n"
_GROUP = 16
_LEGEND = (
    "alone: a program of one line in its own sandbox; files: five files and five processes that test them; tests: the "
    f"reward python_tests with five asserts, each program in its own sandbox; group: the same, {_GROUP} programs in a "
    "sandbox; call: one call of the waiting tool python. CPU: of all processes, a program"
)


@dataclass(frozen=True)
class SandboxBench(Bench):
    """Programs in each kind of sandbox, a row for each sort of program."""

    kinds: Sequence[SandboxName]
    # Programs that run at one time.
    threads: int
    seconds: float  # of each row

    def measure(self, folder: Path, say: Say) -> "SandboxResults":
        tempfile.tempdir = str(folder)
        rows = list[SandboxRow]()
        refusals = list[str]()
        for kind in self.kinds:
            try:
                sandbox = open_sandbox(kind)
            except SandboxError as error:
                refusals.append(f"{kind}: {error}")
                continue
            for work, run in _make_works(sandbox).items():
                say(f"{kind}: {work}")
                threads = 1 if work == "call" else self.threads
                rows.append(self._measure_work(kind, work, run, threads))
            sandbox.close()
        return SandboxResults(rows, refusals)

    def _measure_work(self, kind: str, work: str, run: Callable[[], int], threads: int) -> "SandboxRow":
        """Run one sort of program for some seconds. run: runs programs, and returns how many."""
        # Interpreter, modules and folders of the first program are made once.
        run()
        seconds = list[float]()
        counts = list[int]()
        end = time.perf_counter() + self.seconds

        def repeat(_: int) -> None:
            while time.perf_counter() < end:
                begin = time.perf_counter()
                counts.append(run())
                seconds.append(time.perf_counter() - begin)

        cpu_before = _cpu_seconds()
        begin = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(repeat, range(threads)))
        wall_s = time.perf_counter() - begin
        cpu_s = _cpu_seconds() - cpu_before
        count = sum(counts)
        return SandboxRow(
            kind=kind,
            work=work,
            threads=threads,
            programs=count,
            rate=count / wall_s,
            latency=median(seconds),
            cpu=cpu_s / count,
        )


@dataclass(frozen=True)
class SandboxRow:
    """Measurements of one sort of program in one kind of sandbox."""

    kind: str
    work: str
    threads: int
    programs: int
    rate: float  # programs a second
    latency: float  # median seconds of a sandbox
    cpu: float  # seconds of CPU a program; 0 for processes that have not ended

    def cells(self) -> Cells:
        """Return the cells of its table row."""
        return [
            ("sandbox", self.kind),
            ("work", self.work),
            ("at a time", str(self.threads)),
            ("programs/s", f"{self.rate:.1f}"),
            ("median", f"{self.latency * 1000:.1f} ms"),
            ("CPU", "" if self.work == "call" else f"{self.cpu * 1000:.1f} ms"),
        ]


@dataclass(frozen=True)
class SandboxResults(Results):
    """Results: a row for each kind of sandbox and sort of program."""

    rows: list[SandboxRow]
    # Kinds that do not work here, each with the reason.
    refusals: list[str]

    def report(self, wide: bool) -> list[Line | ResultTable]:
        table = ResultTable([row.cells() for row in self.rows])
        return [table, *(Line(refusal, "yellow") for refusal in self.refusals), Line(_LEGEND, "dim")]


def _make_works(sandbox: Sandbox) -> dict[str, Callable[[], int]]:
    """Return the sorts of programs: name -> function that runs some and returns how many."""
    limits = Limits()
    short = Program(source=_SOURCE)
    tested = Program(source=_FIVE_TESTS, files={**_FILES, "solution.py": _SOLUTION})
    suite = TestSuite("asserts", cases=list(_ASSERTS))

    def run_program(program: Program) -> int:
        result = sandbox.run(program, limits)
        if not result.has_passed:
            raise RuntimeError(f"a program failed: {result.stderr.decode(errors='replace')[-300:]}")
        return 1

    def judge(count: int) -> int:
        verdicts = Judge(sandbox, _program_section(), suite).judge([_ADD] * count)
        for verdict in verdicts:
            if not isinstance(verdict, ProgramVerdict) or set(verdict.tests) != {PASSED}:
                raise RuntimeError(f"a right program has the verdict {verdict}")
        return count

    works: dict[str, Callable[[], int]] = {
        "alone": lambda: run_program(short),
        "files": lambda: run_program(tested),
        "tests": lambda: judge(1),
        "group": lambda: judge(_GROUP),
    }
    if isinstance(sandbox, LocalSandbox):
        python = WarmPython(sandbox, make_folder(tempfile.mkdtemp(prefix="rlctl-bench-")), limits)

        def call() -> int:
            if python.run("1 + 1") != "2\n":
                raise RuntimeError("the tool python does not answer")
            return 1

        works["call"] = call
    return works


def _program_section() -> ProgramRewardSection:
    """Return the section of the reward python_tests with its defaults."""
    config = load("grpo", "grpo-tiny", ["rewards=[{name: python_tests}]"]).config
    assert isinstance(config, GrpoConfig)
    section = config.rewards[0]
    assert isinstance(section, ProgramRewardSection)
    return section


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
