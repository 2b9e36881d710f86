"""The reward `python_tests`: programs of completions against the tests of their rows, in a sandbox.

It runs in the run's own process, since the sandbox isolates the programs. Results are kept within a run, by content.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from rlctl.config.grpo_schema import AnyRewardSection, ProgramRewardSection
from rlctl.rewards.base import Outcome, RewardError, RewardFailure, RewardInput
from rlctl.rewards.programs.code_block import PYTHON, find_program, is_repeatable
from rlctl.rewards.programs.judging import LIMIT_NAMES, UNSUPPORTED, Effort, Judge, ProgramVerdict
from rlctl.rewards.programs.test_forms import TestSuite, read_tests
from rlctl.sandbox.base import Sandbox, SandboxError
from rlctl.utils.user_code import shorten_text

# Most results that are kept.
MAX_KEPT = 200_000
# Runs tasks in threads, in any order, and returns their results in order.
RunAll = Callable[[Callable[["_Job"], "_Answer"], Iterable["_Job"]], Iterable["_Answer"]]


@dataclass
class Usage:
    """Counts since the last reading."""

    programs: int
    # Programs whose result was known.
    cached: int
    # Name of a limit -> programs that it ended.
    limits: Counter[str]
    near: int
    # Seconds in which programs were scored.
    seconds: float
    effort: Effort

    def add(self, other: "Usage") -> None:
        """Add another one's counts."""
        self.programs += other.programs
        self.cached += other.cached
        self.limits += other.limits
        self.near += other.near
        self.seconds += other.seconds
        self.effort.add(other.effort)


@dataclass(frozen=True)
class _Job:
    """Programs of one suite, to be judged in one sandbox. keys: where the results are kept; None: nowhere."""

    suite: TestSuite
    programs: list[str]
    keys: list[str | None]
    indices: list[list[int]]


@dataclass(frozen=True)
class _Answer:
    verdicts: list[ProgramVerdict | SandboxError]
    effort: Effort


class ProgramScorer:
    """Scores completions by the tests of their rows. Threads may call `score` at the same time."""

    def __init__(self, section: ProgramRewardSection, sandbox: Sandbox) -> None:
        self._section = section
        self._sandbox = sandbox
        self._kept: OrderedDict[str, ProgramVerdict] = OrderedDict()
        self._lock = threading.Lock()
        self._usage = _no_usage()

    def score(self, items: Sequence[RewardInput], run_all: RunAll) -> list[Outcome]:
        """Return one outcome for each item, in order. run_all: runs the jobs, such as `ThreadPoolExecutor.map`."""
        start = time.monotonic()
        outcomes: list[Outcome] = [RewardFailure("no result")] * len(items)
        jobs, verdicts = self._plan(items, outcomes)
        efforts = Effort()
        for job, answer in zip(jobs, run_all(self._judge, jobs), strict=True):
            efforts.add(answer.effort)
            for key, indices, verdict in zip(job.keys, job.indices, answer.verdicts, strict=True):
                if isinstance(verdict, ProgramVerdict) and key is not None and not verdict.is_fragile:
                    self._keep(key, verdict)
                for index in indices:
                    verdicts[index] = verdict
        for index, verdict in verdicts.items():
            outcomes[index] = self._grade_verdict(verdict)
        num_run = sum(len(job.programs) for job in jobs)
        with self._lock:
            self._usage.programs += len(verdicts)
            self._usage.cached += len(verdicts) - num_run
            self._usage.seconds += time.monotonic() - start
            self._usage.effort.add(efforts)
            for verdict in verdicts.values():
                if isinstance(verdict, ProgramVerdict):
                    self._usage.near += verdict.is_near
                    if verdict.limit:
                        self._usage.limits[verdict.limit] += 1
        return outcomes

    def take_usage(self) -> Usage:
        """Return the counts since the last call."""
        with self._lock:
            usage = self._usage
            self._usage = _no_usage()
        return usage

    def _plan(
        self, items: Sequence[RewardInput], outcomes: list[Outcome]
    ) -> tuple[list[_Job], dict[int, ProgramVerdict | SandboxError]]:
        """Return the jobs, and the verdicts that are known by the item's index. Failures are put into `outcomes`."""
        verdicts: dict[int, ProgramVerdict | SandboxError] = {}
        jobs: dict[str, _Job] = {}
        for index, item in enumerate(items):
            completion = item.completion if item.last_turn is None else item.last_turn
            try:
                suite = read_tests(item.row, self._section.column)
                if self._section.command is not None and suite.kind != "input":
                    raise RewardError("no input tests: a program of another language is judged by its output alone")
            except RewardError as error:
                kind, _, detail = str(error).partition(": ")
                outcomes[index] = RewardFailure(kind, detail=shorten_text(detail))
                continue
            program = find_program(completion, PYTHON if self._section.command is None else ())
            key = self._key_of(suite, program)
            verdict = self._known(key)
            if verdict is not None:
                verdicts[index] = verdict
                continue
            job = jobs.setdefault(suite.fingerprint, _Job(suite, [], [], []))
            if key is not None and key in job.keys:
                job.indices[job.keys.index(key)].append(index)
            else:
                job.programs.append(program)
                job.keys.append(key)
                job.indices.append([index])
        return list(jobs.values()), verdicts

    def _judge(self, job: _Job) -> _Answer:
        judge = Judge(self._sandbox, self._section, job.suite)
        verdicts = judge.judge(job.programs)
        return _Answer(verdicts, judge.effort)

    def _key_of(self, suite: TestSuite, program: str) -> str | None:
        """Return the key of a result that may be kept; None for a program that may depend on a clock or on chance."""
        if not self._section.cache or self._section.command is not None or not is_repeatable(program):
            return None
        return sha256(f"{suite.fingerprint}\0{program}".encode("utf-8", "replace")).hexdigest()

    def _known(self, key: str | None) -> ProgramVerdict | None:
        if key is None:
            return None
        with self._lock:
            verdict = self._kept.get(key)
            if verdict is not None:
                self._kept.move_to_end(key)
            return verdict

    def _keep(self, key: str, verdict: ProgramVerdict) -> None:
        with self._lock:
            self._kept[key] = verdict
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)

    def _grade_verdict(self, verdict: ProgramVerdict | SandboxError) -> Outcome:
        if isinstance(verdict, SandboxError):
            return RewardFailure("the sandbox failed", detail=shorten_text(str(verdict)))
        if UNSUPPORTED in verdict.tests:
            return RewardFailure("a test cannot be run", detail=shorten_text(verdict.detail))
        if self._section.score == "share":
            return verdict.share
        return float(verdict.share == 1.0)


class ProgramRewards:
    """Entries of `rewards:` with programs, and their sandbox. It opens at the first use."""

    def __init__(self, sections: Sequence[AnyRewardSection], open_sandbox: Callable[[], Sandbox]) -> None:
        self._sections = sections
        self._open_sandbox = open_sandbox
        self._sandbox: Sandbox | None = None
        self._scorers: dict[int, ProgramScorer] = {}
        self._lock = threading.Lock()

    def score(self, index: int, items: Sequence[RewardInput], run_all: RunAll) -> list[Outcome]:
        """Score items by the reward with this index; return one outcome for each, in order."""
        try:
            scorer = self._scorer_of(index)
        except SandboxError as error:
            return [RewardFailure("no sandbox", detail=shorten_text(str(error)))] * len(items)
        return scorer.score(items, run_all)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of all programs since the last call; empty without such a reward."""
        usage = _no_usage()
        for scorer in self._scorers.values():
            usage.add(scorer.take_usage())
        return usage_metrics(usage) if self._scorers else {}

    def close(self) -> None:
        """Close the sandbox."""
        if self._sandbox is not None:
            self._sandbox.close()

    def _scorer_of(self, index: int) -> ProgramScorer:
        with self._lock:
            if self._sandbox is None:
                self._sandbox = self._open_sandbox()
            if index not in self._scorers:
                section = self._sections[index]
                assert isinstance(section, ProgramRewardSection)
                self._scorers[index] = ProgramScorer(section, self._sandbox)
            return self._scorers[index]


def usage_metrics(usage: Usage) -> dict[str, float]:
    """Return the metrics of a step."""
    total = max(1, usage.programs)
    metrics = {
        "programs/scored": float(usage.programs),
        "programs/cached": usage.cached / total,
        "programs/per_second": usage.programs / usage.seconds if usage.seconds else 0.0,
        "programs/sandbox_seconds": usage.effort.seconds,
        "programs/sandboxes": float(usage.effort.sandboxes),
        "programs/repeated": float(usage.effort.repeated),
        "programs/sandbox_failures": float(usage.effort.failures),
        "programs/near_limit": usage.near / total,
    }
    return metrics | {f"programs/limit/{name}": usage.limits[name] / total for name in LIMIT_NAMES}


def _no_usage() -> Usage:
    return Usage(programs=0, cached=0, limits=Counter(), near=0, seconds=0.0, effort=Effort())
