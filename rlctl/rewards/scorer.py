"""Scorer of rollouts: a weighted sum of rewards. If a reward raises, hangs or crashes, only one rollout fails.

The reward `exact` runs in this process. So does `python_tests`, whose programs run in a sandbox. Other functions may
hang or crash, so they run in worker processes. A reward model is no function: `score` leaves its value open, and
`complete` adds it.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from queue import LifoQueue
from types import MappingProxyType

from rlctl.config.grpo_schema import AnyRewardSection, ProgramRewardSection, RewardSection
from rlctl.config.plugins import ENVIRONMENT_REWARD, correctness, model_rewards, reward_names, served_judges
from rlctl.rewards.base import (
    NEEDS_EPISODE,
    Form,
    Outcome,
    ReasonedValue,
    RewardFailure,
    RewardInput,
    UnusableError,
    attempt,
)
from rlctl.rewards.coroutine_calls import Answerer
from rlctl.rewards.coroutine_worker import CoroutineWorker
from rlctl.rewards.judge.sections import JudgeSection
from rlctl.rewards.load_rewards import load_reward
from rlctl.rewards.programs.program_tests import ProgramRewards
from rlctl.rewards.reward_process import RewardWorker
from rlctl.sandbox.base import Sandbox
from rlctl.sandbox.open_sandbox import open_sandbox as open_run_sandbox
from rlctl.utils.devices import usable_cores
from rlctl.workers.user_logs import Emit, FailureLog, OutputLog

# Rewards that run in this process.
INLINE = ("exact",)
MAX_WORKERS = 4
# Most items of one call of a worker. About the size of a group, so that slow rewards of several groups run at once.
ITEMS_PER_CALL = 8
# Most names of rewards that a run's environments give, because each name becomes a metric in every record and chart.
MAX_NAMES = 50
OTHER_NAMES = "other"


@dataclass(frozen=True)
class Score:
    """Score of one rollout."""

    # Weighted sum; None if a reward failed, or if no reward judged the rollout.
    value: float | None
    # Reward name -> its value; None if the reward failed or did not judge the rollout.
    parts: dict[str, float | None]
    # Reason of the first failure.
    failed: str | None
    # True if the rollout is correct by the reward that decides (`correct_at`, else the first at 1).
    right: bool
    # Reward name -> its weight in the sum. A part without a weight here has weight 1.
    weights: dict[str, float] = field(default_factory=dict)
    # Reward name -> the reason that a judge gave.
    reasons: dict[str, str] = field(default_factory=dict)
    # Reason why the run must stop before it trains on this rollout's step; None if it need not.
    stop: str | None = None


class Scorer:
    """Rewards of a run and their worker processes. Call `close` at the end, or use the scorer in a `with`.

    logs: folder for rewards.log (output of user functions, up to a bound) and reward-errors.log (tracebacks); None
    means standard error. emit: writes an event at the first failure of each cause. episodes: rollouts are episodes of
    environments, whose processes call the reward functions with a parameter `environments`. rewardless: nothing judges
    a rollout, and each has the value 0. open_sandbox: opens the sandbox of `python_tests` at its first use. records:
    folder for the requests of judges, by the name of each; None: nothing outlives the scorer.
    """

    def __init__(
        self,
        sections: Sequence[AnyRewardSection],
        logs: Path | None = None,
        emit: Emit | None = None,
        *,
        episodes: bool = False,
        rewardless: bool = False,
        open_sandbox: Callable[[], Sandbox] = open_run_sandbox,
        records: Path | None = None,
    ) -> None:
        self._sections = list(sections)
        # Indices of the reward models. `score` leaves their values open, and `complete` adds them.
        self._model_indices = {*model_rewards(sections)}
        # Indices of the judges whose engines have not started. They judge nothing until then.
        self._unconnected = {*served_judges(sections)}
        self._episodes = episodes
        self._is_rewardless = rewardless
        self._records = records
        # Indices of the rewards that the environments' processes call.
        self._called_by_environments: set[int] = set()
        # Names of the rewards that environments gave so far.
        self._environment_names: set[str] = set()
        self._names_lock = threading.Lock()
        self.names = reward_names(sections)
        self._weights = {name: section.weight for name, section in zip(self.names, sections)}
        self._deciding_index, self._correct_at = correctness(sections)
        # If no reward has a `correct_at`, an environment's reward decides if a rollout is right.
        self._has_correct_at = any(section.correct_at is not None for section in sections)
        self.failures = FailureLog("reward", logs / "reward-errors.log" if logs else None, emit)
        self._log = OutputLog("reward", logs / "rewards.log", emit) if logs else None
        size = min(MAX_WORKERS, usable_cores())
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="rewards")
        # Last in, first out, so that a small batch uses a worker whose process is already running.
        self._idle: LifoQueue[RewardWorker] = LifoQueue()
        self.programs = ProgramRewards(self._sections, open_sandbox)
        self.workers = [RewardWorker(self._sections, self._log.descriptor if self._log else None) for _ in range(size)]
        for worker in reversed(self.workers):
            self._idle.put(worker)
        self._forms: list[Form] = []
        # Index of a coroutine reward -> its process.
        self.coroutine_workers: dict[int, CoroutineWorker] = {}
        self._forms_lock = threading.Lock()

    def score(
        self,
        items: list[RewardInput],
        environment_values: Sequence[Mapping[str, float]] = (),
        group_sizes: Sequence[int] = (),
    ) -> list[Score]:
        """Return one score for each item, in order. Never raises an error of a reward.

        group_sizes: number of items of each task, in order. By default each item is a task's only one.
        environment_values: for each item, the values by name that its environment gave. A name of a reward that the
        environment calls is this reward's value. Any other name is a further part of the sum, of weight 1.
        """
        environment_values = environment_values or [{}] * len(items)
        sizes = group_sizes or [1] * len(items)
        by_reward = self._score_by_each(items, environment_values, sizes)
        by_item = zip(*by_reward, strict=True) if by_reward else [()] * len(items)
        called_names = {self._sections[index].name for index in self._called_by_environments}
        scores = []
        for outcomes, values in zip(by_item, environment_values, strict=True):
            further_parts = {name: part for name, part in values.items() if name not in called_names}
            score = self._combine(list(outcomes), further_parts, may_wait=bool(self._model_indices))
            scores.append(self._leave_open(score) if self._model_indices else score)
        return scores

    def complete(self, score: Score, outcomes: Mapping[str, Outcome]) -> Score:
        """Return a score of `score` with the outcomes of all reward models, by name. A failed score stays failed."""
        if score.failed:
            values = {name: part if isinstance(part, float) else None for name, part in outcomes.items()}
            for name, outcome in outcomes.items():
                if isinstance(outcome, RewardFailure):
                    self.failures.add(name, outcome)
            return replace(score, parts=score.parts | values)
        all_outcomes = [outcomes[name] if name in outcomes else score.parts.get(name) for name in self.names]
        further_parts = {name: part or 0.0 for name, part in score.parts.items() if name not in self.names}
        return replace(self._combine(all_outcomes, further_parts), reasons=score.reasons)

    def _leave_open(self, score: Score) -> Score:
        """Return a score without a value, and without parts of the reward models."""
        model_names = {self.names[index] for index in self._model_indices}
        parts = {name: part for name, part in score.parts.items() if name not in model_names}
        return replace(score, value=None, right=False, parts=parts)

    def try_on_sample(self, item: RewardInput) -> Score:
        """Score one item before the run starts. Raises UnusableError with one line for each reward that fails."""
        in_processes = [
            isinstance(section, RewardSection) and section.name not in INLINE and not isinstance(section, JudgeSection)
            for section in self._sections
        ]
        if any(in_processes):
            self.workers[0].start()
        outcomes = [outcomes[0] for outcomes in self._score_by_each([item], [{}], [1])]
        problems: list[tuple[int | None, str]] = []
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, RewardFailure):
                problems.append((index, str(outcome)))
        if problems:
            raise UnusableError(problems, self._sections)
        may_wait = self._episodes or bool(self._model_indices) or bool(self._unconnected)
        score = self._combine(outcomes, may_wait=may_wait)
        return self._leave_open(score) if self._model_indices else score

    def close(self) -> None:
        for coroutine_worker in self.coroutine_workers.values():
            coroutine_worker.stop()
        self._threads.shutdown()
        for worker in self.workers:
            worker.stop()
        self.programs.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect_judge(self, index: int, answerer: Answerer) -> None:
        """Let engines of the run answer the questions of the judge that is the reward `index`."""
        self._coroutine_worker(index).answerer = answerer
        self._unconnected.discard(index)

    def take_counts(self) -> dict[str, float]:
        """Return counts by name that rewards reported since the last call, such as the calls of a judge."""
        totals: dict[str, float] = {}
        for worker in self.coroutine_workers.values():
            for name, count in worker.take_counts().items():
                totals[name] = totals.get(name, 0.0) + count
        return totals

    def _score_by_each(
        self, items: list[RewardInput], environment_values: Sequence[Mapping[str, float]], group_sizes: Sequence[int]
    ) -> list[list[Outcome]]:
        """Return the outcomes of each reward. Coroutine rewards run at the same time as all others."""
        coroutine_indices = {index for index in range(len(self._sections)) if self._form_of(index) != "plain"}
        with ThreadPoolExecutor(max(1, len(coroutine_indices))) as threads:
            pending = {
                index: threads.submit(self._score_by, index, items, environment_values, group_sizes)
                for index in coroutine_indices
            }
            by_reward = {
                index: self._score_by(index, items, environment_values, group_sizes)
                for index in range(len(self._sections))
                if index not in coroutine_indices
            }
            by_reward |= {index: outcomes.result() for index, outcomes in pending.items()}
        return [by_reward[index] for index in range(len(self._sections))]

    def _form_of(self, index: int) -> Form:
        """Return the form of a reward. The first call for a user's function starts a process that loads all rewards.

        If they cannot be loaded, the form is plain: the process that scores then reports the failure.
        """
        section = self._sections[index]
        if isinstance(section, JudgeSection):
            return section.form
        if ":" not in section.name:
            return "plain"
        with self._forms_lock:
            if not self._forms:
                worker = self._idle.get()
                with suppress(UnusableError):
                    worker.start()
                self._idle.put(worker)
                self._forms = worker.forms
        return self._forms[index] if self._forms else "plain"

    def _score_by(
        self,
        index: int,
        items: list[RewardInput],
        environment_values: Sequence[Mapping[str, float]],
        group_sizes: Sequence[int],
    ) -> list[Outcome]:
        """Return the outcomes of one reward: from calls of the reward, or from the values that environments gave.

        A reward model judges nothing here, and neither does a judge whose engines have not started.
        """
        if index in self._model_indices or index in self._unconnected:
            return [None] * len(items)
        if index not in self._called_by_environments:
            outcomes = self._run_reward(index, items, group_sizes)
            kinds = {outcome.kind for outcome in outcomes if isinstance(outcome, RewardFailure)}
            if not self._episodes or NEEDS_EPISODE not in kinds:
                return outcomes
            # The function takes `environments`. From now on its values come from the environments' processes.
            self._called_by_environments.add(index)
        return [values.get(self._sections[index].name) for values in environment_values]

    def _run_reward(self, index: int, items: list[RewardInput], group_sizes: Sequence[int]) -> list[Outcome]:
        if self._sections[index].name in INLINE:
            reward = load_reward(self._sections[index])
            return [attempt(reward, item) for item in items]
        if isinstance(self._sections[index], ProgramRewardSection):
            return self.programs.score(index, items, self._threads.map)
        form = self._form_of(index)
        if form == "plain":
            chunks = _split_items(items, [ITEMS_PER_CALL] * -(-len(items) // ITEMS_PER_CALL))
            return list(chain.from_iterable(self._threads.map(partial(self._score_in_worker, index), chunks)))
        sizes = group_sizes if form == "group" else [1] * len(items)
        return list(chain.from_iterable(self._coroutine_worker(index).score(_split_items(items, sizes))))

    def _coroutine_worker(self, index: int) -> CoroutineWorker:
        """Return the worker of a coroutine reward."""
        section = self._sections[index]
        assert isinstance(section, RewardSection)
        with self._forms_lock:
            if index not in self.coroutine_workers:
                records = self._records / f"{self.names[index]}.jsonl" if self._records else None
                output = self._log.descriptor if self._log else None
                self.coroutine_workers[index] = CoroutineWorker(section, output, records)
            return self.coroutine_workers[index]

    def _score_in_worker(self, index: int, items: list[RewardInput]) -> list[Outcome]:
        worker = self._idle.get()
        try:
            return worker.score(index, items)
        finally:
            self._idle.put(worker)

    def _combine(
        self,
        outcomes: list[Outcome],
        environment_parts: Mapping[str, float] = MappingProxyType({}),
        *,
        may_wait: bool = False,
    ) -> Score:
        """Combine the outcomes of one item to its score, and count the failures.

        environment_parts: parts of the sum that an environment gave, by name. A part with the name of a reward gets a
        prefix. may_wait: an environment may judge the item later, so an item without a value has not failed.
        """
        unique_parts: dict[str, float] = {}
        for name, part in environment_parts.items():
            unique_parts[f"{ENVIRONMENT_REWARD}.{name}" if name in self.names else name] = part
        further_parts = self._limit_names(unique_parts)
        parts: dict[str, float | None] = {}
        failures: dict[str, RewardFailure] = {}
        reasons: dict[str, str] = {}
        for name, outcome in zip(self.names, outcomes, strict=True):
            if isinstance(outcome, RewardFailure):
                failures[name] = outcome
                parts[name] = None
            elif isinstance(outcome, ReasonedValue):
                parts[name] = outcome.value
                reasons[name] = outcome.reason
            else:
                parts[name] = outcome
        is_judged = bool(further_parts) or any(part is not None for part in parts.values())
        if self.names and not failures and not is_judged and not may_wait:
            # Counted under the first reward's name, because no single reward is the cause.
            failures = {self.names[0]: RewardFailure("no reward judges it", detail="each returned None")}
        value = sum(
            section.weight * (part or 0.0) for section, part in zip(self._sections, parts.values(), strict=True)
        ) + sum(further_parts.values())
        parts |= further_parts
        if self._is_rewardless:
            return Score(0.0, {}, None, right=False)
        if not is_judged and not failures:
            return Score(None, {}, None, right=False)
        if not failures and not math.isfinite(value):
            failures = {"sum": RewardFailure("no finite number", detail=f"{value} of {parts}")}
        for name, failure in failures.items():
            self.failures.add(name, failure)
        if failures:
            reason = next(f"{name}: {failure}" for name, failure in failures.items())
            stops = [f"{name}: {failure}" for name, failure in failures.items() if failure.stops_run]
            return Score(None, parts, reason, right=False, reasons=reasons, stop=stops[0] if stops else None)
        if further_parts and not self._has_correct_at:
            deciding_value: float | None = sum(further_parts.values())
        else:
            deciding_value = parts[self.names[self._deciding_index]] if self.names else None
            # If the deciding reward does not judge the rollout, the first reward that judges it decides.
            if deciding_value is None and not self._has_correct_at:
                deciding_value = next((part for part in parts.values() if part is not None), None)
        is_right = (deciding_value or 0.0) >= self._correct_at - 1e-9
        return Score(value, parts, failed=None, right=is_right, weights=self._weights, reasons=reasons)

    def _limit_names(self, parts: dict[str, float]) -> dict[str, float]:
        """Return an environment's parts by name. Parts whose names exceed `MAX_NAMES` are added up as `OTHER_NAMES`."""
        limited_parts: dict[str, float] = {}
        for name, part in parts.items():
            with self._names_lock:
                if len(self._environment_names) < MAX_NAMES:
                    self._environment_names.add(name)
                is_known = name in self._environment_names
            known_name = name if is_known else OTHER_NAMES
            limited_parts[known_name] = limited_parts.get(known_name, 0.0) + part
            if not is_known:
                self.failures.note(
                    "names",
                    f"environments give rewards of more than {MAX_NAMES} names: the rewards of further ones, first "
                    f"{name!r}, are added up as {OTHER_NAMES!r}",
                )
        return limited_parts


def _split_items(items: list[RewardInput], sizes: Sequence[int]) -> list[list[RewardInput]]:
    """Return consecutive parts of the items, without empty ones. sizes: of the parts; the last one may be shorter."""
    remaining = iter(items)
    parts = [list(islice(remaining, size)) for size in sizes]
    return [part for part in parts if part]
