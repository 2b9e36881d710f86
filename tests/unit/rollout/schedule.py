"""A schedule: a whole run of buffer, dispatcher and pool on one thread, with every choice drawn from one seed.

Engines die, hang, break and miss deadlines; requests are aborted and resampled; groups teach nothing and are replaced;
rollouts have several turns, with environments that answer late or fail, or with rollout functions and several
concurrent samples; weights change drained or in flight; the run is killed and resumed from its newest checkpoint;
validation comes in between. After each event contracts 1, 2, 3 and 8 are looked at.
"""

import asyncio
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rlctl.config.grpo_schema import DynamicSamplingSection
from rlctl.config.schema import GrpoConfig
from rlctl.data.chat import TurnLink
from rlctl.data.cursor import Cursor, TaskSource
from rlctl.data.tasks import Task
from rlctl.environments.contract import EnvironmentContract
from rlctl.environments.messages import FunctionEnded, FunctionWaits
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.generation import generator_pool
from rlctl.generation.generator_pool import EngineSlot, GeneratorPool
from rlctl.generation.requests import RequestId, rollout_seed
from rlctl.generation.vllm import active_requests
from rlctl.preflight.load import load
from rlctl.rewards.scorer import Score
from rlctl.rollout import buffer
from rlctl.rollout.buffer import RolloutBuffer
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.players.environment import EnvironmentPlayer
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.players.function import FunctionPlayer
from rlctl.rollout.players.single_turn import SingleTurnPlayer
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import RolloutGroup, Sampling
from rlctl.rollout.wait_deadline import WaitDeadline
from tests.unit.rollout.fake_engine import FakeRefit, FakeWorker, answer
from tests.virtual_events import VirtualEvents

DEADLINE, EXPLAIN = 12.0, 3.0
ROWS = [Task(f"r{i}", [5, 9], "", None) for i in range(7)]
HELD_OUT = [Task(f"v{i}", [5, 9], "", None) for i in range(2)]
# Tokens of a turn, at most.
LONGEST = 12


@lru_cache
def base() -> GrpoConfig:
    config = load("grpo", None, ["async.enabled=true", f"run.deadline_s={DEADLINE}"]).config
    assert isinstance(config, GrpoConfig)
    return replace(config, run=replace(config.run, explain_after_s=EXPLAIN, deadline_s=DEADLINE))


class ContractBroken(AssertionError):
    """A contract that a schedule found broken."""


class Killed(BaseException):
    """The driver's end in the midst of anything."""


class WatchedEvents(VirtualEvents):
    """Event loop that knows if time passed in one of its callbacks: it was blocked."""

    blocked = False

    def step(self) -> bool:
        before = self.time
        stepped = super().step()
        self.blocked |= self.time != before
        return stepped


class Schedule:
    """One run, in which everything random is drawn from one seed."""

    # The one that runs.
    current: ClassVar["Schedule"]

    def __init__(self, seed: int) -> None:
        Schedule.current = self
        self.seed, self.random, self.version = seed, random.Random(seed), 0
        draw = self.random
        self.size, self.rollouts, self.max_age = (
            draw.choice([1, 2, 2, 3]),
            draw.randint(1, 2),
            draw.choice([0, 1, 1, 2]),
        )
        self.engines, self.last = draw.choice([1, 2, 2, 3]), draw.choice([2, 3, 3, 4])
        self.in_flight, self.parts = draw.random() < 0.5, draw.random() < 0.3
        self.trouble = draw.choice([0.0, 0.01, 0.03])
        # Share of the groups that teach nothing, and how many of a step may be replaced; 0 and 0: no filter.
        self.share, self.max_extra = draw.choice([(0.0, 0.0), (0.3, 3.0), (0.6, 3.0), (0.6, 1.0), (0.9, 0.5)])
        # True if rollouts are episodes of up to three turns.
        self.episodes = draw.random() < 0.4
        self.budget = int(self.max_extra * self.size)
        self.config = self._config()
        # Numbers of the groups that ended, by the step of their end; and of the filtered groups.
        self.ended: dict[int, int] = {}
        self.filtered: set[int] = set()
        # Numbers of the groups that teach nothing and were scored when the budget was used up.
        self.kept: set[int] = set()
        # Task ids of the draws so far; a resume draws the same.
        self.numbers: dict[str, int] = {}
        self.scoring_hangs = False
        self.syncing = False
        self.saved: Any = None
        self.files: dict[str, Any] = {}

    def _config(self) -> GrpoConfig:
        config, draw = base(), self.random
        sampling = DynamicSamplingSection("rewards" if self.share else None, self.max_extra)
        sizes = {"num_steps": self.last, "num_prompts_per_step": self.size, "num_generations_per_prompt": self.rollouts}
        asynchronous = replace(
            config.async_,
            enabled=self.max_age > 0,
            max_trajectory_age_steps=self.max_age,
            policy=draw.choice(["windowed_fifo", "in_order", "ready_first"]),
            on_bound=draw.choice(["wait", "requeue"]),
            in_flight_weight_updates=self.in_flight,
        )
        generation = replace(config.generation, max_generation_failures=draw.randint(0, 2), max_new_tokens=LONGEST)
        return replace(
            config,
            grpo=replace(config.grpo, dynamic_sampling=sampling, **sizes),
            async_=asynchronous,
            generation=generation,
        )

    def run(self) -> None:
        """Run to the last step through all events, and check the outcome of every task."""
        while True:
            try:
                self.start()
                self.steps()
                break
            except Killed:
                self.files = dict(self.saved[2]) if self.saved else {}
            except RuntimeError as error:
                # Only a reward that hangs, engines that die too often, or two with the same failure before their first
                # token end a run; each is named.
                if "were sampled" in str(error) or not self.ends_explained(str(error)):
                    raise
                self.scoring_hangs = False
        numbers, left = set(self.ended), self.groups()
        active = {group["number"] for group in left}
        self.demand(len(numbers - self.filtered) == self.last * self.size, 2, f"{len(numbers)} groups ended")
        self.demand(not numbers & active and numbers | active == set(range(self.drawn)), 2, "a task is lost")
        # Without a filter nothing is drawn that no step needs.
        waits = {group["state"] for group in left}
        self.demand(not waits or (bool(self.share) and waits == {"deferred"}), 2, f"{waits} are left")
        self.trouble = 0.0
        self.buffer.close()
        while self.events.step() or self.events.work():
            pass
        self.events.check()
        self.demand(not (tasks := asyncio.all_tasks(self.events.loop)), 2, f"nobody waits for {tasks}")

    def ends_explained(self, text: str) -> bool:
        used_up = "generation.max_restarts" in text or "cannot sample, as the one before it" in text
        stuck = self.scoring_hangs and "nothing was sampled or scored" in text and "to score" in text
        return used_up or stuck

    def start(self) -> None:
        """Begin, or begin again from the newest checkpoint."""
        FakeWorker.forget_all()
        self.events = WatchedEvents(self.event, self.random)
        self.heard = self.explained = 0.0
        spec = SimpleNamespace(
            kind="vllm", tensor_parallel_size=1, max_num_seqs=3, sleeps=False, dtype="float32", version=-1
        )
        slots, restarts = [EngineSlot({})] * self.engines, self.random.choice([2, 50])
        arguments: Any = (spec, slots, "", DEADLINE, restarts, self.emit)
        self.pool, self.refit = GeneratorPool(*arguments), FakeRefit(self.refit_fault, self.engines_go_on)
        refit: Any = self.refit
        self.pool.connect(refit)
        self.source = self.make_source()
        self.version = self.saved[0] if self.saved else 0
        # Groups that an asynchronous run may still replace.
        self.credit = self.saved[3] if self.saved else self.budget * (self.max_age + 1)
        self.refit.trainer = self.version
        self.sync(self.version)
        self.dispatcher = RolloutDispatcher(self.pool, self.config.run, self.emit, self.events)
        self.runner = RolloutRunner(self.make_player(), self.dispatcher)
        parts = (self.config, self.source, self.dispatcher, self.runner, self.score, self.emit)
        self.buffer = RolloutBuffer(*parts, teaches_nothing=self.teaches_nothing)
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
        if not self.episodes:
            return SingleTurnPlayer()
        self.games = LateGames(self.random, self.trouble, self.events)
        limits = EpisodeLimits(3, 40, 1e9, 1, "keep")
        contract = EnvironmentContract("Game", [], True, True, [], [])
        games: Any = self.games
        chat: Any = StubChat()
        if self.seed % 2:
            return FunctionPlayer(games, chat, limits)
        return EnvironmentPlayer(games, {"game": contract}, chat, limits, None)

    def steps(self) -> None:
        while self.version < self.last:
            self.buffer.admit(self.version)
            groups: list[RolloutGroup] = []
            while self.parts and (part := self.buffer.take_part(self.version, 6, span)):
                groups += part
            groups += self.buffer.take(self.version, span)
            self.look_at_trained(groups)
            # The optimizer's step: the trainer has new weights, and the engines go on meanwhile.
            self.refit.trainer += 1
            for _ in range(self.random.randint(0, 2)):
                self.event()
            if not self.in_flight:
                self.buffer.drain(span)
            self.sync(self.version + 1)
            replaced = [group["number"] for group in self.groups() if group["state"] == "filtered"]
            for number in [self.number(group) for group in groups] + replaced:
                self.demand(number not in self.ended, 2, f"group {number} ends twice")
                self.ended[number] = self.version
            self.filtered |= set(replaced)
            self.version += 1
            self.credit = min(self.budget * (self.max_age + 1), self.credit + self.budget)
            self.buffer.advance(self.version)
            self.look_at_waste(replaced)
            self.look()
            if self.random.random() < 0.2:
                self.validate()
            if self.random.random() < 0.5:
                self.save()

    def number(self, group: RolloutGroup) -> int:
        """Number of a group's draw: no two draws have the same task."""
        for number in range(len(self.numbers), self.drawn):
            self.numbers[self.source.row_at(number).id] = number
        number = self.numbers[group.task.id]
        is_drawn = number < self.drawn and self.source.row_at(number) == group.task
        self.demand(is_drawn, 2, f"{group.task.id} was not drawn")
        return number

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups as a checkpoint has them, in the order of their numbers."""
        state, _ = self.buffer.snapshot()
        found: list[dict[str, Any]] = state["groups"]["groups"]
        return sorted(found, key=lambda group: int(group["number"]))

    def sync(self, version: int) -> None:
        self.syncing = True
        self.pool.sync(version)
        self.syncing = False
        self.demand(all(worker.engine.version == version for worker in self.live()), 3, "an engine is behind")

    def save(self) -> None:
        state, write = self.buffer.snapshot()
        write(Path("newest"))
        self.saved = (self.version, json.dumps(state), dict(self.files), self.credit)

    def validate(self) -> None:
        sampling = Sampling("validation", 0, len(HELD_OUT), 2, LONGEST, 1.0)
        groups = self.dispatcher.sample(self.runner, sampling, HELD_OUT, self.version)
        self.demand([group.task for group in groups] == HELD_OUT, 2, "validation got other answers")
        tokens = [one.sampled_tokens for group in groups for one in group.rollouts]
        self.demand(all((each == self.version).all() for each in tokens), 3, "validation mixes versions")
        self.demand(all(len(group.rollouts) == 2 for group in groups), 2, "validation lost a rollout")

    # Events while somebody waits.

    def event(self) -> None:
        luck = self.random.random()
        if self.episodes:
            self.games.answer()
        if luck < self.trouble:
            self.fault()
        elif luck < 0.25:
            self.rewards_go_on()
        elif luck < 0.45:
            self.engines_step()
        else:
            self.a_while_passes()
        self.loop_goes_on(8)
        self.look()

    def rewards_go_on(self) -> None:
        if not self.scoring_hangs:
            self.events.work()

    def engines_step(self) -> None:
        for worker in self.live():
            if self.random.random() < 0.7:
                worker.engine.step()

    def a_while_passes(self) -> None:
        self.events.time += 1.0
        for worker in self.live():
            worker.engine.step()
        self.rewards_go_on()
        self.loop_goes_on(80)

    def loop_goes_on(self, most: int) -> None:
        for _ in range(self.random.randint(0, most)):
            if not self.events.step():
                return

    def fault(self) -> None:
        worker, what = self.random.choice(FakeWorker.made), self.random.random()
        if what < 0.25:
            worker.dead = True
        elif what < 0.4:
            worker.hangs = True
        elif what < 0.5:
            worker.stuck = True
        elif what < 0.65:
            worker.late = True
        elif what < 0.8:
            worker.engine.model.broken = True
        elif what < 0.85:
            self.scoring_hangs = True
        else:
            raise Killed

    def engines_go_on(self) -> None:
        """In the midst of a sync: some engines have the new weights."""
        if self.pool.version >= 0:
            self.engines_step()
            self.look()

    def refit_fault(self) -> str:
        return self.random.choice(["torn", "untouched"]) if self.random.random() < self.trouble else ""

    def live(self) -> list[Any]:
        workers: list[Any] = self.pool.engines
        return [worker for worker in workers if worker.steps]

    def score(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        scores = {True: Score(1.0, {}, None, True), False: Score(None, {}, "environment: it failed", False)}
        return [
            replace(group, rollouts=[replace(one, score=scores[bool(one.rows)]) for one in group.rollouts])
            for group in groups
        ]

    def nothing(self, number: int) -> bool:
        """Return True if a group teaches nothing."""
        return random.Random(f"{self.seed} {number}").random() < self.share

    def teaches_nothing(self, group: RolloutGroup) -> str | None:
        number = group.rollouts[0].id.group
        if not self.nothing(number):
            return None
        if self.credit:
            self.credit -= 1
        else:
            self.kept.add(number)
        return "nothing"

    def emit(self, kind: str, **fields: Any) -> None:
        if "s without a new group" in fields.get("what", ""):
            self.explained = self.events.time

    # The contracts.

    def demand(self, kept: bool, contract: int, what: str) -> None:
        if not kept:
            raise ContractBroken(f"contract {contract} in schedule {self.seed}: {what}")

    @property
    def drawn(self) -> int:
        return self.source.cursor.position

    def look(self) -> None:
        """After each event."""
        active = sum(self.buffer.occupancy().values())
        most = (self.max_age + 1) * self.size if self.max_age else self.size + self.budget
        self.demand(active <= most, 1, "more groups than the bound allows")
        self.demand(len(self.groups()) + len(self.ended) >= self.drawn, 2, "a task is lost")
        for worker in self.live():
            self.demand(worker.engine.is_whole(), 3, f"{worker.name} serves a mixture")
            expected = {self.pool.version, self.pool.version + 1} if self.syncing else {self.pool.version}
            # One that is being rebuilt has no weights yet, and no request.
            expected |= set() if worker.engine.active else {-1}
            self.demand(worker.engine.version in expected, 3, f"{worker.name} serves {worker.engine.version}")
        self.demand(not self.events.blocked, 8, "the event loop is blocked")
        self.look_at_loads()
        self.look_at_wait()

    def look_at_loads(self) -> None:
        """The tokens that are counted ahead of an engine are those of its turns."""
        for engine in self.dispatcher.engines():
            turns = engine.sampling + engine.aborting
            least = turns if self.episodes else LONGEST * turns
            self.demand(least <= engine.load <= LONGEST * turns, 2, f"{engine.load} tokens are ahead of {turns} turns")

    def look_at_wait(self) -> None:
        """A wait in which nothing comes is explained, and ends at its deadline."""
        news = max(self.runner.last_step, self.heard)
        silence, explained = self.events.time - news, self.explained > news
        # An abort waits 5 s for engines, and whatever comes between two waits takes a while too.
        self.demand(explained or silence <= EXPLAIN + 9, 8, f"{silence} s without a word")
        # An engine that does nothing has a deadline, and so has its replacement.
        self.demand(silence <= 4 * DEADLINE, 8, f"a wait of {silence} s does not end")

    def look_at_trained(self, groups: list[RolloutGroup]) -> None:
        self.demand(len(groups) == self.size, 2, f"{len(groups)} groups in a step")
        self.look_at_chosen({self.number(group): bool(group.rollouts) for group in groups})
        records = {record["number"]: record for record in self.groups()}
        for group in groups:
            if not group.rollouts:
                continue
            record = records[self.number(group)]
            self.demand(len(group.rollouts) == self.rollouts, 2, "a rollout is missing")
            for index, one in enumerate(group.rollouts):
                ids = (one.id.index, one.id.group, one.id.attempt)
                self.demand(ids == (index, record["number"], record["attempt"]), 2, "a rollout of another group")
                self.look_at_engines(RequestId(one.id))
                self.demand(rollout_seed(0, one.id, self.size) >= 0 and one.score is not None, 2, "not scored")
                tokens, versions = one.sampled_tokens.tolist(), one.sampled_versions.tolist()
                self.demand(tokens == versions, 3, "tokens are said to be of another version")
                if not one.rows:
                    self.demand(one.episode is not None and one.episode.ending == "failed", 2, "nothing was sampled")
                    continue
                age = self.version - min(tokens)
                self.demand(0 <= age <= self.max_age, 1, f"trained at age {age}")
                turns = {*np.concatenate([row.turns[row.sampled] for row in one.rows]).tolist()}
                self.demand(turns == set(range(one.episode.turns if one.episode else 1)), 2, "a turn is missing")
                mixed = any(
                    len(set(row.tokens[row.turns == turn].tolist())) > 1 for row in one.rows for turn in range(3)
                )
                self.demand(self.in_flight or not mixed, 3, "drained, yet a turn is of two versions")

    def look_at_engines(self, first: RequestId) -> None:
        """A rollout goes from engine to engine no more often than its group may fail."""
        # An episode that is played again, and a group that was put off, make the same request again.
        if self.max_age and not self.episodes:
            engines, most = len(FakeWorker.given[first]), self.config.generation.max_generation_failures
            self.demand(engines <= most + 1, 2, f"{engines} engines sampled {first}, which may fail {most} times")

    def look_at_chosen(self, taken: dict[int, bool]) -> None:
        """Look at who trains. taken: number of each group of the step -> whether it has rollouts."""
        if self.max_age:
            useless = {number for number, sampled in taken.items() if sampled and self.nothing(number)}
            self.demand(useless <= self.kept, 2, f"groups {useless - self.kept} take places, and budget is left")
            return
        # In a synchronous run: the first in the order of their draws.
        expected, replaced = list[int](), 0
        for number in (group["number"] for group in self.groups()):
            if self.nothing(number) and taken.get(number, True) and replaced < self.budget:
                replaced += 1
            else:
                expected.append(number)
        self.demand(sorted(taken) == expected[: self.size], 2, f"{sorted(taken)} train in place of {expected}")
        sampling = sum(each.sampling + each.aborting for each in self.dispatcher.engines() if each.is_live)
        pending = "; 0 rollouts not begun" in self.dispatcher.describe()
        self.demand(not sampling and pending, 2, f"a step that is over has rollouts: {self.dispatcher.describe()}")

    def look_at_waste(self, replaced: list[int]) -> None:
        """Check the step's record of replaced groups."""
        waste = self.buffer.waste()
        told = [(group.task, reason) for group, reason in waste.filtered]
        expected = [(self.source.row_at(number), "nothing") for number in replaced]
        self.demand(told == expected, 2, f"{told} were replaced")
        most = self.budget * (self.max_age + self.version)
        self.demand(len(self.filtered) <= most, 2, f"{len(self.filtered)} groups were replaced in {self.version} steps")
        self.demand(not (waste.surplus and self.max_age), 2, "an asynchronous run puts groups off")


class StubChat:
    """`Chat`, as far as a player touches it: every prompt and every answer of the environment is a token or two."""

    ends = SimpleNamespace(stops=())
    template = None

    def prompt(self, messages: Any, tools: Any) -> SimpleNamespace:
        return SimpleNamespace(tokens=[5, 9], spelled=[])

    def find_spelled(self, messages: Any) -> list[str]:
        return []

    def turn_text(self, tokens: Any) -> str:
        return "said"

    def link(self, messages: Any, added: Any, tools: Any) -> TurnLink:
        return TurnLink([], [8])


class LateGames:
    """Environments in this process that answer late, in any order, and may fail."""

    def __init__(self, draw: random.Random, trouble: float, events: VirtualEvents) -> None:
        self.random, self.trouble, self.events = draw, trouble, events
        self.asked: list[tuple[Future[Any], Any]] = []
        # By episode: answers taken by a function, answers reported, and an open action.
        self.calls: dict[Any, list[Any]] = {}

    def key_of(self, row: Any) -> str:
        return "game"

    def reset(self, episode: Any, row: Any, seed: int) -> "Future[Any]":
        return self._later([{"role": "user", "content": "play"}])

    def step(self, episode: Any, message: str) -> "Future[Any]":
        return self._later(self.random.choice(["more", "more", None]))

    def reward(self, episode: Any, columns: Any = None) -> "Future[Any]":
        return self._later(1.0)

    def check(self) -> None:
        """Nothing goes wrong in this process."""

    def close(self, episode: Any) -> None:
        pass

    # A rollout function: two samples side by side, and one more when it has both.

    def begin(self, episode: Any, task: Any, seed: int) -> "Future[Any]":
        self.calls[episode] = [0, 0, None]
        return self._later(FunctionWaits([[5, 9], [5, 9]], 0))

    def resume(self, episode: Any, answers: list[Any], *, waits: bool) -> "Future[Any]":
        call = self.calls[episode]
        if call[2]:
            call[2].set_result(FunctionWaits([], call[0] - call[1]))
            call[1:] = call[0], None
        call[0] += len(answers)
        news = call[0] - call[1]
        if answers and call[0] >= 2:
            call[1] = call[0]
            has_ended = call[0] == 3
            return self._later(FunctionEnded(news, 1.0) if has_ended else FunctionWaits([[5, 9, 8]], news))
        call[2] = Future()
        opened: Future[Any] = call[2]
        return opened

    def answer(self) -> None:
        """Answer some requests."""
        for _ in range(min(len(self.asked), self.random.randint(0, 6))):
            future, answer = self.asked.pop(self.random.randrange(len(self.asked)))
            fails = self.random.random() < 3 * self.trouble
            future.set_result(EnvironmentFailure("died", "its process ended") if fails else answer)

    def _later(self, answer: Any) -> "Future[Any]":
        self.asked.append((Future(), answer))
        return self.asked[-1][0]


def length(seed: int) -> int:
    """Tokens of an answer: one in eleven is long."""
    return 1 + seed % 7 + (seed % 11 == 0) * 12


def span(why: str) -> Any:
    return nullcontext()


def heard(self: WaitDeadline) -> None:
    """Note that something came, as the wait does."""
    Schedule.current.heard = Schedule.current.events.time
    note_progress(self)


note_progress = WaitDeadline.note_progress


@contextmanager
def fakes() -> Iterator[None]:
    """Put the stand-ins in place of processes and files."""
    files: dict[str, Any] = {}

    def save(folder: Path, groups: Any) -> None:
        files[str(folder)] = groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator_pool, "Worker", FakeWorker)
        patch.setattr(WaitDeadline, "note_progress", heard)
        answer(patch, lambda request: length(request.seed))
        patch.setattr(active_requests, "GATHER_S", 0.0)
        patch.setattr(buffer, "save_groups", save)
        patch.setattr(buffer, "load_groups", lambda folder: dict(files.get(str(folder), {})))
        yield


def run_all(seeds: Iterable[int]) -> None:
    with fakes():
        for seed in seeds:
            Schedule(seed).run()
