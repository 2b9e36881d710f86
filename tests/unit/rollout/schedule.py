"""A schedule: a whole run of buffer, dispatcher and pool on one thread, with every choice drawn from one seed.

Engines die, hang, break and miss deadlines; requests are aborted and resampled; groups teach nothing and are replaced;
rollouts have several turns, with environments that answer late or fail, or with rollout functions and several
concurrent samples; weights change drained or in flight; the run is killed and resumed from its newest checkpoint;
validation comes in between. After each event contracts 1, 2, 3 and 8 are checked.
"""

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlctl.data.cursor import Cursor, TaskSource
from rlctl.data.tasks import Task
from rlctl.environments.contract import EnvironmentContract
from rlctl.generation import generator_pool
from rlctl.generation.generator_pool import EngineSlot, GeneratorPool
from rlctl.generation.vllm import active_requests
from rlctl.rewards.scorer import Score
from rlctl.rollout import buffer
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.environment import EnvironmentPlayer
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.players.function import FunctionPlayer
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, RolloutGroup, Sampling
from rlctl.rollout.wait_deadline import WaitDeadline
from tests.unit.rollout.drawn_run import DEADLINE, LONGEST, DrawnRun, WatchedEvents
from tests.unit.rollout.fake_engine import FakeRefit, FakeWorker, answer
from tests.unit.rollout.late_games import LateGames, StubChat

ROWS = [Task(f"r{i}", [5, 9], "", None) for i in range(7)]
HELD_OUT = [Task(f"v{i}", [5, 9], "", None) for i in range(2)]
RIGHT = Score(1.0, {}, None, True)
FAILED = Score(None, {}, "environment: it failed", False)


class Killed(BaseException):
    """Raised at any moment to simulate that the driver is killed."""


class Schedule(DrawnRun):
    """One run, in which everything random is drawn from one seed."""

    # The schedule that is running.
    current: ClassVar["Schedule"]

    def __init__(self, seed: int) -> None:
        Schedule.current = self
        super().__init__(seed)
        self.scoring_hangs = False
        self.saved: Any = None
        self.files: dict[str, Any] = {}

    def run(self) -> None:
        """Run to the last step through all events, and check the outcome of every task."""
        while True:
            try:
                self.start()
                self.make_steps()
                break
            except Killed:
                self.files = dict(self.saved[2]) if self.saved else {}
            except RuntimeError as error:
                # Only a reward that hangs, engines that die too often, or two with the same failure before their first
                # token end a run; each is named.
                if "were sampled" in str(error) or not self.is_expected_end(str(error)):
                    raise
                self.scoring_hangs = False
            self.events.drop_tasks()
        self.check_end()

    def check_end(self) -> None:
        """Check the outcome of every task, and that nothing runs once the buffer is closed."""
        ended = set(self.ended)
        waiting_groups = self.list_groups()
        waiting = {group["number"] for group in waiting_groups}
        num_trained = len(ended - self.filtered)
        self.demand(num_trained == self.num_steps * self.prompts_per_step, 2, f"{len(ended)} groups ended")
        has_all = ended | waiting == set(range(self.num_drawn))
        self.demand(not ended & waiting and has_all, 2, "a task is lost")
        # Without a filter nothing is drawn that no step needs.
        states = {group["state"] for group in waiting_groups}
        is_put_off = bool(self.useless_share) and states == {"deferred"}
        self.demand(not states or is_put_off, 2, f"{states} are left")
        self.trouble = 0.0
        self.buffer.close()
        while self.events.step() or self.events.work():
            pass
        self.events.check()
        tasks = asyncio.all_tasks(self.events.loop)
        self.demand(not tasks, 2, f"nobody waits for {tasks}")

    def is_expected_end(self, text: str) -> bool:
        """Return True if an error names a cause that may end a run."""
        is_used_up = "generation.max_restarts" in text or "cannot sample, as the one before it" in text
        is_stuck = self.scoring_hangs and "nothing was sampled or scored" in text and "to score" in text
        return is_used_up or is_stuck

    def start(self) -> None:
        """Start the run, or restart it from its newest checkpoint."""
        FakeWorker.forget_all()
        self.events = WatchedEvents(self.let_event_happen, self.random)
        self.news_at = 0.0
        self.explained_at = 0.0
        spec: Any = SimpleNamespace(
            kind="vllm", tensor_parallel_size=1, max_num_seqs=3, sleeps=False, dtype="float32", version=-1
        )
        slots = [EngineSlot({})] * self.num_engines
        self.pool = GeneratorPool(spec, slots, "", DEADLINE, self.random.choice([2, 50]), self.emit)
        self.refit = FakeRefit(self.draw_refit_fault, self.let_engines_go_on)
        refit: Any = self.refit
        self.pool.connect(refit)
        self.source = self.make_source()
        self.version = self.saved[0] if self.saved else 0
        # Number of groups that an asynchronous run may still replace.
        self.credit = self.saved[3] if self.saved else self.budget * (self.max_age + 1)
        self.refit.trainer = self.version
        self.sync(self.version)
        self.dispatcher = RolloutDispatcher(self.pool, self.config.run, self.emit, self.events)
        self.runner = RolloutRunner(self.make_player(), self.dispatcher)
        self.buffer = RolloutBuffer(
            config=self.config,
            source=self.source,
            dispatcher=self.dispatcher,
            runner=self.runner,
            score=self.score,
            emit=self.emit,
            teaches_nothing=self.find_uselessness,
        )
        self.ended = {number: step for number, step in self.ended.items() if step < self.version}
        self.filtered &= set(self.ended)
        if self.saved:
            state = json.loads(self.saved[1])
            self.source.cursor.load_state_dict(state["cursor"])
            self.buffer.load(state["groups"], Path("newest"), self.version)

    def make_source(self) -> TaskSource:
        """Return the tasks to draw."""
        return TaskSource(ROWS, Cursor(len(ROWS), 1, True))

    def make_player(self) -> Any:
        """Return the player of the rollouts."""
        if not self.plays_episodes:
            return SingleTurnPlayer()
        self.games = LateGames(self.random, self.trouble, self.events)
        limits = EpisodeLimits(max_turns=3, max_length=40, timeout_s=1e9, max_retries=1, history="keep")
        contract = EnvironmentContract("Game", [], True, True, [], [])
        games: Any = self.games
        chat: Any = StubChat()
        if self.seed % 2:
            return FunctionPlayer(games, chat, limits)
        return EnvironmentPlayer(games, {"game": contract}, chat, limits, None)

    def make_steps(self) -> None:
        while self.version < self.num_steps:
            self.buffer.admit(self.version)
            groups: list[RolloutGroup] = []
            while self.takes_parts and (part := self.buffer.take_part(self.version, 6, open_span)):
                groups += part
            groups += self.buffer.take(self.version, open_span)
            self.check_trained(groups)
            # This is the optimizer step: the trainer gets new weights, while the engines go on sampling.
            self.refit.trainer += 1
            for _ in range(self.random.randint(0, 2)):
                self.let_event_happen()
            if not self.is_in_flight:
                self.buffer.drain(open_span)
            self.sync(self.version + 1)
            self.end_step(groups)
            if self.random.random() < 0.2:
                self.validate()
            if self.random.random() < 0.5:
                self.save()

    def end_step(self, groups: list[RolloutGroup]) -> None:
        """Note the groups that a step trained or replaced, and let the buffer go on to the next step."""
        replaced = [group["number"] for group in self.list_groups() if group["state"] == "filtered"]
        for number in [self.find_number(group) for group in groups] + replaced:
            self.demand(number not in self.ended, 2, f"group {number} ends twice")
            self.ended[number] = self.version
        self.filtered |= set(replaced)
        self.version += 1
        self.credit = min(self.budget * (self.max_age + 1), self.credit + self.budget)
        self.buffer.advance(self.version)
        self.check_waste(replaced)
        self.check_contracts()

    def sync(self, version: int) -> None:
        self.is_syncing = True
        self.pool.sync(version)
        self.is_syncing = False
        is_synced = all(worker.engine.version == version for worker in self.list_live_workers())
        self.demand(is_synced, 3, "an engine is behind")

    def save(self) -> None:
        state, write = self.buffer.snapshot()
        write(Path("newest"))
        self.saved = (self.version, json.dumps(state), dict(self.files), self.credit)

    def validate(self) -> None:
        sampling = Sampling("validation", 0, len(HELD_OUT), 2, LONGEST, 1.0)
        groups = self.dispatcher.sample(self.runner, sampling, HELD_OUT, self.version)
        self.demand([group.task for group in groups] == HELD_OUT, 2, "validation got other answers")
        for group in groups:
            for rollout in group.rollouts:
                has_version = (rollout.sampled_tokens == self.version).all()
                self.demand(bool(has_version), 3, "validation mixes versions")
            self.demand(len(group.rollouts) == 2, 2, "validation lost a rollout")

    # Events while somebody waits.

    def let_event_happen(self) -> None:
        luck = self.random.random()
        if self.plays_episodes:
            self.games.answer()
        if luck < self.trouble:
            self.cause_fault()
        elif luck < 0.25:
            self.let_rewards_go_on()
        elif luck < 0.45:
            self.step_engines()
        else:
            self.let_time_pass()
        self.let_loop_go_on(8)
        self.check_contracts()

    def let_rewards_go_on(self) -> None:
        if not self.scoring_hangs:
            self.events.work()

    def step_engines(self) -> None:
        for worker in self.list_live_workers():
            if self.random.random() < 0.7:
                worker.engine.step()

    def let_time_pass(self) -> None:
        self.events.time += 1.0
        for worker in self.list_live_workers():
            worker.engine.step()
        self.let_rewards_go_on()
        self.let_loop_go_on(80)

    def let_loop_go_on(self, max_steps: int) -> None:
        for _ in range(self.random.randint(0, max_steps)):
            if not self.events.step():
                return

    def cause_fault(self) -> None:
        worker = self.random.choice(FakeWorker.workers)
        luck = self.random.random()
        if luck < 0.25:
            worker.dead = True
        elif luck < 0.4:
            worker.hangs = True
        elif luck < 0.5:
            worker.stuck = True
        elif luck < 0.65:
            worker.late = True
        elif luck < 0.8:
            worker.engine.model.broken = True
        elif luck < 0.85:
            self.scoring_hangs = True
        else:
            raise Killed

    def let_engines_go_on(self) -> None:
        """Let engines step in the middle of a refit, when only some engines have the new weights."""
        if self.pool.version >= 0:
            self.step_engines()
            self.check_contracts()

    def draw_refit_fault(self) -> str:
        return self.random.choice(["torn", "untouched"]) if self.random.random() < self.trouble else ""

    # Functions that the buffer calls.

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        return [replace(group, rollouts=[add_score(rollout) for rollout in group.rollouts]) for group in groups]

    def find_uselessness(self, group: RolloutGroup) -> str | None:
        """Return the reason why a group teaches nothing, or None. The buffer calls it as `teaches_nothing`."""
        number = group.rollouts[0].id.group
        if not self.is_useless(number):
            return None
        if self.credit:
            self.credit -= 1
        else:
            self.unreplaced.add(number)
        return "nothing"

    def emit(self, kind: str, **fields: Any) -> None:
        if "s without a new group" in fields.get("what", ""):
            self.explained_at = self.events.time


def add_score(rollout: Rollout) -> Rollout:
    """Return the rollout with a score. A rollout without rows gets a failed score."""
    return replace(rollout, score=RIGHT if rollout.rows else FAILED)


def draw_length(seed: int) -> int:
    """Return the number of tokens of an answer, drawn by `seed`. One answer in eleven is long."""
    length = 1 + seed % 7
    return length + 12 if seed % 11 == 0 else length


def open_span(name: str) -> Any:
    return nullcontext()


def note_news(deadline: WaitDeadline) -> None:
    """Record the time at which a wait got a result."""
    Schedule.current.news_at = Schedule.current.events.time
    note_progress(deadline)


note_progress = WaitDeadline.note_progress


@contextmanager
def fakes() -> Iterator[None]:
    """Replace processes and files by the stand-ins."""
    files: dict[str, Any] = {}

    def save(folder: Path, groups: Any) -> None:
        files[str(folder)] = groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator_pool, "Worker", FakeWorker)
        patch.setattr(WaitDeadline, "note_progress", note_news)
        answer(patch, lambda request: draw_length(request.seed))
        patch.setattr(active_requests, "GATHER_S", 0.0)
        patch.setattr(buffer, "save_groups", save)
        patch.setattr(buffer, "load_groups", lambda folder: dict(files.get(str(folder), {})))
        yield


def run_all(seeds: Iterable[int]) -> None:
    with fakes():
        for seed in seeds:
            schedule = Schedule(seed)
            try:
                schedule.run()
            finally:
                schedule.events.drop_tasks()
