"""Scores rollouts by a weighted sum of rewards. A reward that raises, hangs or crashes costs that rollout alone.

`exact` runs here; everything else runs the user's code or pattern and so runs in worker processes.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import LifoQueue
from types import TracebackType

from rlctl.config.schema import RewardSection
from rlctl.rewards.base import Item, Outcome, RewardError, attempt, load_function
from rlctl.rewards.worker import Worker
from rlctl.telemetry.cores import usable_cores

INLINE = ("exact",)
MAX_WORKERS = 4
# About a group: slow rewards of several groups are worked on side by side.
ITEMS_PER_CALL = 8


@dataclass(frozen=True)
class Score:
    """value: the weighted sum, None if a reward failed. parts: reward name -> value. failed: why.

    right: the rollout counts as correct: its value reaches the sum of the weights, what all rewards of 1 give.
    """

    value: float | None
    parts: dict[str, float | None]
    failed: str | None
    right: bool


class Scorer:
    """`log`: a file for what user functions print; None: the standard error. Close it, or use it in a `with`.

    `failures` counts what went wrong so far by kind, `reasons` holds the first reason of each kind.
    """

    def __init__(self, sections: list[RewardSection], log: Path | None = None) -> None:
        self._sections = sections
        self.names = _unique([section.name for section in sections])
        self.failures: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}
        self._log = log.open("a") if log else None
        size = min(MAX_WORKERS, usable_cores())
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="rewards")
        # Last in, first out: a small batch keeps to the worker that is already running.
        self._idle: LifoQueue[Worker] = LifoQueue()
        self.workers = [Worker(sections, self._log) for _ in range(size)]
        for worker in self.workers:
            self._idle.put(worker)

    def score(self, items: list[Item]) -> list[Score]:
        """One score an item, in order; never raises for what a reward does."""
        columns = [self._outcomes(reward, items) for reward in range(len(self._sections))]
        return [self._sum(list(outcomes)) for outcomes in zip(*columns, strict=True)]

    def try_on_sample(self, item: Item) -> Score:
        """Score one item before the run starts. Raises RewardError, a line for each reward that is no use."""
        if any(section.name not in INLINE for section in self._sections):
            self.workers[0].start()
        outcomes = [self._outcomes(reward, [item])[0] for reward in range(len(self._sections))]
        lines = [f"{name}: {reason}" for name, (_, reason) in zip(self.names, outcomes, strict=True) if reason]
        if lines:
            raise RewardError("\n".join(lines))
        return self._sum(outcomes)

    def close(self) -> None:
        self._threads.shutdown()
        for worker in self.workers:
            worker.stop()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _outcomes(self, reward: int, items: list[Item]) -> list[Outcome]:
        if self._sections[reward].name in INLINE:
            function = load_function(self._sections[reward])
            return [attempt(function, item) for item in items]
        chunks = [items[start : start + ITEMS_PER_CALL] for start in range(0, len(items), ITEMS_PER_CALL)]
        return [outcome for part in self._threads.map(partial(self._remote, reward), chunks) for outcome in part]

    def _remote(self, reward: int, items: list[Item]) -> list[Outcome]:
        worker = self._idle.get()
        try:
            return worker.score(reward, items)
        finally:
            self._idle.put(worker)

    def _sum(self, outcomes: list[Outcome]) -> Score:
        parts = {name: value for name, (value, _) in zip(self.names, outcomes, strict=True)}
        reasons = [f"{name}: {reason}" for name, (_, reason) in zip(self.names, outcomes, strict=True) if reason]
        for reason in reasons:
            kind = ": ".join(reason.split(": ", 2)[:2])
            self.failures[kind] += 1
            self.reasons.setdefault(kind, reason)
        if reasons:
            return Score(None, parts, reasons[0], right=False)
        weights = [section.weight for section in self._sections]
        value = sum(weight * (part or 0.0) for weight, part in zip(weights, parts.values(), strict=True))
        return Score(value, parts, None, right=value >= sum(weights) - 1e-9)


def _unique(names: list[str]) -> list[str]:
    """regex, regex -> regex, regex-2: a part of a score needs a name of its own."""
    return [name if (n := names[:i].count(name)) == 0 else f"{name}-{n + 1}" for i, name in enumerate(names)]
