"""A run whose sizes are drawn from one seed, and the checks of its contracts.

`schedule.py` starts its parts and lets events happen; after each event it calls `check_contracts`.
"""

import asyncio
import inspect
import random
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rlctl.config.grpo_schema import DynamicSamplingSection
from rlctl.config.schema import GrpoConfig
from rlctl.data.cursor import TaskSource
from rlctl.generation.generator_pool import GeneratorPool
from rlctl.generation.requests import RequestId, rollout_seed
from rlctl.preflight.load import load
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, RolloutGroup
from tests.unit.rollout.fake_engine import FakeWorker
from tests.virtual_events import VirtualEvents

DEADLINE = 12.0
EXPLAIN = 3.0
# Largest number of tokens of a turn.
LONGEST = 12


@lru_cache
def load_base_config() -> GrpoConfig:
    config = load("grpo", None, ["async.enabled=true", f"run.deadline_s={DEADLINE}"]).config
    assert isinstance(config, GrpoConfig)
    return replace(config, run=replace(config.run, explain_after_s=EXPLAIN, deadline_s=DEADLINE))


class ContractBroken(AssertionError):
    """Raised if a schedule breaks a contract."""


class WatchedEvents(VirtualEvents):
    """Event loop that detects a callback that blocks the loop: virtual time passes during the call."""

    blocked = False

    def step(self) -> bool:
        time_before = self.time
        stepped = super().step()
        self.blocked |= self.time != time_before
        return stepped

    def drop_tasks(self) -> None:
        """Close the coroutines of tasks that have not begun, without a step of the loop.

        A killed run drops its loop. Python would warn, in a later test, that these coroutines were never awaited.
        """
        for task in asyncio.all_tasks(self.loop):
            coroutine = task.get_coro()
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()


class DrawnRun:
    """Sizes and state of a run, drawn from one seed, with the checks of its contracts."""

    # Objects of the run, created at each start.
    events: WatchedEvents
    pool: GeneratorPool
    source: TaskSource
    dispatcher: RolloutDispatcher
    runner: RolloutRunner
    buffer: RolloutBuffer

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.version = 0
        draw = self.random
        self.prompts_per_step = draw.choice([1, 2, 2, 3])
        self.rollouts_per_group = draw.randint(1, 2)
        self.max_age = draw.choice([0, 1, 1, 2])
        self.num_engines = draw.choice([1, 2, 2, 3])
        self.num_steps = draw.choice([2, 3, 3, 4])
        self.is_in_flight = draw.random() < 0.5
        self.takes_parts = draw.random() < 0.3
        self.trouble = draw.choice([0.0, 0.01, 0.03])
        # (share of groups that teach nothing, replacements for each group of a step). (0, 0) means no filter.
        filters = [(0.0, 0.0), (0.3, 3.0), (0.6, 3.0), (0.6, 1.0), (0.9, 0.5)]
        self.useless_share, self.max_extra = draw.choice(filters)
        # True if rollouts are episodes of up to three turns.
        self.plays_episodes = draw.random() < 0.4
        self.budget = int(self.max_extra * self.prompts_per_step)
        self.config = self.make_config()
        # Number of an ended group -> step in which it ended.
        self.ended: dict[int, int] = {}
        # Numbers of the groups that were filtered.
        self.filtered: set[int] = set()
        # Numbers of the groups that teach nothing but were not replaced, because the budget was used up.
        self.unreplaced: set[int] = set()
        # Task id -> number of its draw. After a resume the same tasks are drawn.
        self.numbers: dict[str, int] = {}
        # Virtual times at which the latest result came, and at which a wait was last explained.
        self.news_at = 0.0
        self.explained_at = 0.0
        self.is_syncing = False

    def make_config(self) -> GrpoConfig:
        config = load_base_config()
        draw = self.random
        filter_name = "rewards" if self.useless_share else None
        grpo = replace(
            config.grpo,
            dynamic_sampling=DynamicSamplingSection(filter_name, self.max_extra),
            num_steps=self.num_steps,
            num_prompts_per_step=self.prompts_per_step,
            num_generations_per_prompt=self.rollouts_per_group,
        )
        asynchronous = replace(
            config.async_,
            enabled=self.max_age > 0,
            max_trajectory_age_steps=self.max_age,
            policy=draw.choice(["windowed_fifo", "in_order", "ready_first"]),
            on_bound=draw.choice(["wait", "requeue"]),
            in_flight_weight_updates=self.is_in_flight,
        )
        generation = replace(config.generation, max_generation_failures=draw.randint(0, 2), max_new_tokens=LONGEST)
        return replace(config, grpo=grpo, async_=asynchronous, generation=generation)

    @property
    def num_drawn(self) -> int:
        """Number of tasks that were drawn so far."""
        return self.source.cursor.position

    def find_number(self, group: RolloutGroup) -> int:
        """Return the number of the draw that a group belongs to. Each draw has another task."""
        for number in range(len(self.numbers), self.num_drawn):
            self.numbers[self.source.row_at(number).id] = number
        number = self.numbers[group.task.id]
        is_drawn = number < self.num_drawn and self.source.row_at(number) == group.task
        self.demand(is_drawn, 2, f"{group.task.id} was not drawn")
        return number

    def list_groups(self) -> list[dict[str, Any]]:
        """Return the groups' records as saved in a checkpoint, sorted by number."""
        state, _ = self.buffer.snapshot()
        records: list[dict[str, Any]] = state["groups"]["groups"]
        return sorted(records, key=lambda record: int(record["number"]))

    def list_live_workers(self) -> list[Any]:
        workers: list[Any] = self.pool.engines
        return [worker for worker in workers if worker.makes_steps]

    def is_useless(self, number: int) -> bool:
        """Return True if a group teaches nothing."""
        return random.Random(f"{self.seed} {number}").random() < self.useless_share

    # The contracts.

    def demand(self, is_met: bool, contract: int, complaint: str) -> None:
        """Raise ContractBroken with `complaint` unless `is_met`. contract: number in rlctl/README.md."""
        if not is_met:
            raise ContractBroken(f"contract {contract} in schedule {self.seed}: {complaint}")

    def check_contracts(self) -> None:
        """Check all conditions that must hold after each event."""
        active = sum(self.buffer.occupancy().values())
        bound = self.prompts_per_step + self.budget
        if self.max_age:
            bound = (self.max_age + 1) * self.prompts_per_step
        self.demand(active <= bound, 1, "more groups than the bound allows")
        self.demand(len(self.list_groups()) + len(self.ended) >= self.num_drawn, 2, "a task is lost")
        for worker in self.list_live_workers():
            self.demand(worker.engine.is_whole(), 3, f"{worker.name} serves a mixture")
            expected = {self.pool.version}
            if self.is_syncing:
                expected.add(self.pool.version + 1)
            # An engine that is being rebuilt has no weights yet, and must have no request.
            if not worker.engine.active:
                expected.add(-1)
            self.demand(worker.engine.version in expected, 3, f"{worker.name} serves {worker.engine.version}")
        self.demand(not self.events.blocked, 8, "the event loop is blocked")
        self.check_loads()
        self.check_wait()

    def check_loads(self) -> None:
        """Check that the tokens counted ahead of an engine are those of its turns."""
        for engine in self.dispatcher.engines():
            turns = engine.sampling + engine.aborting
            lower_bound = turns if self.plays_episodes else LONGEST * turns
            is_right = lower_bound <= engine.load <= LONGEST * turns
            self.demand(is_right, 2, f"{engine.load} tokens are ahead of {turns} turns")

    def check_wait(self) -> None:
        """Check that a wait without results is explained after some time, and ends at its deadline."""
        news_at = max(self.runner.last_step, self.news_at)
        silence = self.events.time - news_at
        is_explained = self.explained_at > news_at
        # An abort waits 5 s for engines, and whatever comes between two waits takes a while too.
        self.demand(is_explained or silence <= EXPLAIN + 9, 8, f"{silence} s without a word")
        # An engine that does nothing is replaced after a deadline, and so is its replacement.
        self.demand(silence <= 4 * DEADLINE, 8, f"a wait of {silence} s does not end")

    def check_trained(self, groups: list[RolloutGroup]) -> None:
        """Check the groups that one step trains."""
        self.demand(len(groups) == self.prompts_per_step, 2, f"{len(groups)} groups in a step")
        self.check_choice({self.find_number(group): bool(group.rollouts) for group in groups})
        records = {record["number"]: record for record in self.list_groups()}
        for group in groups:
            if not group.rollouts:
                continue
            record = records[self.find_number(group)]
            self.demand(len(group.rollouts) == self.rollouts_per_group, 2, "a rollout is missing")
            for index, rollout in enumerate(group.rollouts):
                ids = (rollout.id.index, rollout.id.group, rollout.id.attempt)
                expected_ids = (index, record["number"], record["attempt"])
                self.demand(ids == expected_ids, 2, "a rollout of another group")
                self.check_trained_rollout(rollout)

    def check_trained_rollout(self, rollout: Rollout) -> None:
        self.check_engines_of(RequestId(rollout.id))
        seed = rollout_seed(0, rollout.id, self.prompts_per_step)
        self.demand(seed >= 0 and rollout.score is not None, 2, "not scored")
        # A fake engine samples the version of its weights as token id.
        tokens = rollout.sampled_tokens.tolist()
        self.demand(tokens == rollout.sampled_versions.tolist(), 3, "tokens are said to be of another version")
        if not rollout.rows:
            has_failed = rollout.episode is not None and rollout.episode.ending == "failed"
            self.demand(has_failed, 2, "nothing was sampled")
            return
        age = self.version - min(tokens)
        self.demand(0 <= age <= self.max_age, 1, f"trained at age {age}")
        sampled_turns = np.concatenate([row.turns[row.sampled] for row in rollout.rows])
        num_turns = rollout.episode.turns if rollout.episode else 1
        self.demand({*sampled_turns.tolist()} == set(range(num_turns)), 2, "a turn is missing")
        for row in rollout.rows:
            for turn in range(3):
                versions = set(row.tokens[row.turns == turn].tolist())
                self.demand(self.is_in_flight or len(versions) <= 1, 3, "drained, yet a turn is of two versions")

    def check_engines_of(self, first: RequestId) -> None:
        """Check that a request moves to another engine no more often than generations of its group may fail."""
        # Repeated episodes and deferred groups make the same request again, so they are not checked.
        if self.max_age and not self.plays_episodes:
            engines = len(FakeWorker.worker_ids_by_request[first])
            max_failures = self.config.generation.max_generation_failures
            complaint = f"{engines} engines sampled {first}, which may fail {max_failures} times"
            self.demand(engines <= max_failures + 1, 2, complaint)

    def check_choice(self, has_rollouts: dict[int, bool]) -> None:
        """Check that the step trains the right groups. has_rollouts: number of a group -> True if it has rollouts."""
        if self.max_age:
            useless = {number for number, sampled in has_rollouts.items() if sampled and self.is_useless(number)}
            replaceable = useless - self.unreplaced
            self.demand(not replaceable, 2, f"groups {replaceable} take places, and budget is left")
            return
        # A synchronous run trains the first useful groups in the order of their draws.
        expected = list[int]()
        num_replaced = 0
        for record in self.list_groups():
            number = record["number"]
            if self.is_useless(number) and has_rollouts.get(number, True) and num_replaced < self.budget:
                num_replaced += 1
            else:
                expected.append(number)
        chosen = sorted(has_rollouts)
        self.demand(chosen == expected[: self.prompts_per_step], 2, f"{chosen} train in place of {expected}")
        sampling = sum(engine.sampling + engine.aborting for engine in self.dispatcher.engines() if engine.is_live)
        has_begun_all = "; 0 rollouts not begun" in self.dispatcher.describe()
        complaint = f"a step that is over has rollouts: {self.dispatcher.describe()}"
        self.demand(not sampling and has_begun_all, 2, complaint)

    def check_waste(self, replaced: list[int]) -> None:
        """Check that the buffer reports the step's replaced groups. replaced: their numbers."""
        waste = self.buffer.waste()
        recorded = [(group.task, reason) for group, reason in waste.filtered]
        expected = [(self.source.row_at(number), "nothing") for number in replaced]
        self.demand(recorded == expected, 2, f"{recorded} were replaced")
        num_filtered = len(self.filtered)
        budget = self.budget * (self.max_age + self.version)
        self.demand(num_filtered <= budget, 2, f"{num_filtered} groups were replaced in {self.version} steps")
        self.demand(not (waste.surplus and self.max_age), 2, "an asynchronous run puts groups off")
