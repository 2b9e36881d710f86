"""Rollout buffer: admits prompts, tracks their rollouts and rewards, and yields one training batch per step.

`StalenessScheduler` keeps the bound on staleness and decides who is admitted when; with `max_trajectory_age_steps` 0
this is the synchronous loop. Everything random about a group is a function of its id, its index in data order, so that
a resume draws the same. Contract 8: a wait that lasts says who waits for whom.
"""

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.schema import GrpoConfig
from rlctl.data.cursor import TaskSource
from rlctl.data.tasks import Task
from rlctl.generation.requests import Rollout, TurnRequest
from rlctl.preflight.resolved import Resolved
from rlctl.rewards.scorer import Score
from rlctl.rollout.buffer_checkpoint import load_groups, save_groups
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.prefetch import AdaptivePrefetch
from rlctl.rollout.scoring import RolloutGroup
from rlctl.rollout.seeds import REDRAW, TRAIN, rollout_seeds
from rlctl.rollout.staleness import StalenessScheduler

Span = Callable[[str], AbstractContextManager[None]]
ScoreGroups = Callable[[list[Task], list[list[Rollout]]], list[list[Score]]]
Emit = Callable[..., None]
_TICK_S = 0.5


@dataclass
class _Active:
    """A group between admission and the end of its step. began: when it was admitted or drawn anew."""

    prompt: Task
    attempt: int = 0
    began: float = 0.0
    completions: list[Rollout] | None = None
    scores: list[Score] | None = None


class RolloutBuffer:
    """The groups of a run. Methods are called from the loop's thread; sampling and scoring go on beside it."""

    def __init__(
        self,
        config: GrpoConfig,
        source: TaskSource,
        dispatcher: Callable[[Callable[[list[tuple[str, list[Rollout]]]], None]], RolloutDispatcher],
        score: ScoreGroups,
        emit: Emit,
    ) -> None:
        self._config, self._source, self._score, self._emit = config, source, score, emit
        shape = (config.grpo.num_prompts_per_step, Resolved(config).max_age)
        self._staleness = StalenessScheduler(*shape, config.async_.policy, config.async_.window_fraction)
        adaptive = config.async_.prefetch == "auto"
        self._prefetch = AdaptivePrefetch(shape[0], self._staleness.capacity, adaptive=adaptive)
        self._waited, self._step_began = 0.0, time.monotonic()
        self._active: dict[int, _Active] = {}
        self._later: list[int] = []
        self._lengths: list[int] = []
        self._version = 0
        self._changed = threading.Condition()
        self._news = self._explained = time.monotonic()
        self._failure: Exception | None = None
        self._unscored: queue.SimpleQueue[list[tuple[int, list[Rollout]]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._keep_scoring, name="scoring", daemon=True).start()
        self.dispatcher = dispatcher(self._sampled)

    def fill(self, version: int) -> None:
        """Draw as many prompts as there is room for, never more than the run still trains; `version` is served."""
        self._version = version
        self.repair()
        config = self._config.grpo
        with self._changed:
            left = (config.num_steps - version) * config.num_prompts_per_step - len(self._active)
            count = max(0, min(self._prefetch.target - len(self._active), self._staleness.room(), left))
            again, self._later = self._later[:count], self._later[count:]
            first = self._source.cursor.position
            drawn = dict(enumerate(self._source.draw(count - len(again)), first))
            drawn |= {group_id: self._source.at(group_id) for group_id in again}
            self._staleness.admit(sorted(drawn), version)
            for group_id, prompt in drawn.items():
                self._active[group_id] = _Active(prompt)
        self._begin(sorted(drawn))

    def wait(self, version: int, span: Span) -> None:
        """Until the groups of the step at `version` are sampled. span: times a wait, by what it is for."""
        self._wait(version, lambda: self._staleness.select(version, scored=False), span)

    def take(self, version: int, span: Span) -> list[RolloutGroup]:
        """The groups of the step at `version` that were not taken yet, once they are scored."""
        return self._taken(self._wait(version, lambda: self._staleness.select(version), span), version)

    def take_part(self, version: int, tokens: int, span: Span) -> list[RolloutGroup]:
        """Groups of the step at `version` that are scored, once they have so many tokens; none once the step's last
        groups are there, for `take`."""
        return self._taken(self._wait(version, lambda: self._part(version, tokens), span), version)

    def _part(self, version: int, tokens: int) -> list[int] | None:
        if self._staleness.select(version) is not None:
            return []
        # Less work than the choice, which would be made for every group that ends.
        if self._tokens(self._staleness.with_status("ready")) < tokens:
            return None
        part = self._staleness.select_part(version)
        return part if self._tokens(part) >= tokens else None

    def _tokens(self, group_ids: list[int]) -> int:
        groups = [self._active[group_id] for group_id in group_ids]
        return sum(len(group.prompt.tokens) + len(one.tokens) for group in groups for one in group.completions or [])

    def _taken(self, group_ids: list[int], version: int) -> list[RolloutGroup]:
        with self._changed:
            self._staleness.take(group_ids, version)
            groups = [self._active[group_id] for group_id in group_ids]
        return [RolloutGroup(each.prompt, each.completions or [], each.scores or []) for each in groups]

    def release(self) -> None:
        """The step's groups were trained or filtered: they make room."""
        now = time.monotonic()
        waited, self._waited = self._waited / max(1e-9, now - self._step_began), 0.0
        self._step_began = now
        with self._changed:
            complete = len(self._staleness.with_status("sampled")) + len(self._staleness.with_status("ready"))
            self._prefetch.step_over(waited, complete)
            for group_id in self._staleness.release():
                del self._active[group_id]

    def drain(self, span: Span) -> None:
        """Until nothing is being sampled; `dispatcher.go_on` ends it.

        An engine that is lost meanwhile is replaced by the refit that follows: the trainer has its weights already.
        """
        self._news = time.monotonic()
        if self.dispatcher.drain():
            return
        with span("drain"):
            while not self.dispatcher.drain():
                with self._changed:
                    self._changed.wait(_TICK_S)
                self._explain()

    def repair(self) -> None:
        """Engines that were lost are replaced, and what they were at is sampled anew. Raises RuntimeError."""
        for name in self.dispatcher.repair():
            # What the engine's loss and its replacement took is no silence of the new one.
            self._news = time.monotonic()
            group_id = _group_id(name)
            with self._changed:
                failures = self._staleness.restart(group_id, self._version, failed=True)
            if failures > self._config.generation.max_generation_failures:
                self._give_up(name, group_id, failures)

    @property
    def target(self) -> int:
        """Groups that are kept on their way, see `AdaptivePrefetch`."""
        return self._prefetch.target

    def occupancy(self) -> dict[int, int]:
        """Active groups by the version at which they were admitted."""
        with self._changed:
            return self._staleness.occupancy()

    def sampled_lengths(self) -> list[int]:
        """Tokens of every rollout that was sampled since the last call."""
        with self._changed:
            lengths, self._lengths = self._lengths, []
            return lengths

    def snapshot(self) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """What a resume needs: the state, and a function that writes the groups that are ready into a folder."""
        with self._changed:
            state = {**self._staleness.state_dict(), "later": self._later, "prefetch": self._prefetch.target}
            ready = self._staleness.with_status("ready")
            groups = {o: (self._active[o].completions or [], self._active[o].scores or []) for o in ready}
        return state, lambda folder: save_groups(folder, groups)

    def load(self, state: dict[str, Any], folder: Path, version: int) -> None:
        """What `snapshot` kept: groups that were ready are so again, the others are sampled anew at `version`."""
        self._version = version
        saved = load_groups(folder)
        with self._changed:
            again, beyond = self._staleness.load_state_dict(state, version)
            self._later = [*beyond, *state["later"]]
            self._prefetch.resume(state["prefetch"])
            for group_id in self._staleness.group_ids():
                rollouts = saved[group_id] if group_id not in again else (None, None)
                self._active[group_id] = _Active(self._source.at(group_id), 0, 0.0, *rollouts)
        self._begin(again)

    def close(self) -> None:
        """Sample and score no more."""
        self.dispatcher.close()
        self._unscored.put(None)

    def _begin(self, group_ids: list[int]) -> None:
        with self._changed:
            for group_id in group_ids:
                self._active[group_id].began = time.monotonic()
            requests = [self._request(group_id) for group_id in group_ids]
        self.dispatcher.submit(requests)

    def _request(self, group_id: int) -> TurnRequest:
        config, active = self._config, self._active[group_id]
        step, place = divmod(group_id, config.grpo.num_prompts_per_step)
        dispatcher = REDRAW if active.attempt else TRAIN
        seed = rollout_seeds(config.run.seed, dispatcher, step + 1, config.grpo.num_prompts_per_step)[place]
        samples, longest = config.grpo.num_generations_per_prompt, config.generation.max_new_tokens
        return TurnRequest(
            self._name(group_id), active.prompt.tokens, samples, longest, config.generation.temperature, seed
        )

    def _name(self, group_id: int) -> str:
        """Of the group's request: another one each time that it is drawn."""
        return f"{group_id}.{self._active[group_id].attempt}"

    def _sampled(self, groups: list[tuple[str, list[Rollout]]]) -> None:
        """On a thread of the stream."""
        with self._changed:
            # A group given up meanwhile is not running any more.
            ended = [(o, group) for name, group in groups if self._staleness.status(o := _group_id(name)) == "running"]
            for group_id, completions in ended:
                self._active[group_id].completions = completions
                self._lengths += [len(completion.tokens) for completion in completions]
                self._staleness.sampled(group_id)
            self._news = time.monotonic()
            self._changed.notify_all()
        self._unscored.put(ended)

    def _keep_scoring(self) -> None:
        while (ended := self._all_unscored()) is not None:
            prompts = [self._active[group_id].prompt for group_id, _ in ended]
            try:
                scores = self._score(prompts, [completions for _, completions in ended])
            except Exception as error:
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            with self._changed:
                for (group_id, _), one in zip(ended, scores):
                    self._active[group_id].scores = one
                    self._staleness.ready(group_id)
                self._news = time.monotonic()
                self._changed.notify_all()

    def _all_unscored(self) -> list[tuple[int, list[Rollout]]] | None:
        """Every group that waits for its score, once there is one: together they keep all reward workers busy."""
        found: list[tuple[int, list[Rollout]]] = []
        while True:
            try:
                ended = self._unscored.get(block=not found)
            except queue.Empty:
                return found
            if ended is None:
                return None
            found += ended

    def _wait(self, version: int, choice: Callable[[], list[int] | None], span: Span) -> list[int]:
        """Until there is something to choose; the choice."""
        self._version, self._news = version, time.monotonic()
        while (group_ids := self._made(choice)) is None:
            why, began = self._waits_for(), time.monotonic()
            with span(why):
                while self._made(choice) is None and self._waits_for() == why:
                    self._look_after()
            self._waited += time.monotonic() - began
        return group_ids

    def _made(self, choice: Callable[[], list[int] | None]) -> list[int] | None:
        with self._changed:
            if self._failure:
                raise self._failure
            return choice()

    def _waits_for(self) -> str:
        with self._changed:
            return self._staleness.waits_for()

    def _look_after(self) -> None:
        """A while of waiting: engines are looked after, and a long silence is explained or ends the run."""
        with self._changed:
            self._changed.wait(_TICK_S)
        self.repair()
        if self._config.async_.enabled and self._config.async_.on_bound == "requeue":
            self._redraw_overdue()
        self._explain()

    def _redraw_overdue(self) -> None:
        with self._changed:
            overdue = self._staleness.overdue(self._version)
            names = [self._name(group_id) for group_id in overdue]
        if not names:
            return
        stopped = [_group_id(request.id) for request in self.dispatcher.abort(names)]
        with self._changed:
            for group_id in stopped:
                self._staleness.redraw(group_id, self._version)
                self._active[group_id].attempt += 1
                self._emit("redrawn", prompt=self._active[group_id].prompt.id, version=self._version)
        self._begin(stopped)

    def _give_up(self, name: str, group_id: int, failures: int) -> None:
        """A group that takes engine after engine down with it is dropped, and counted."""
        self.dispatcher.abort([name])
        with self._changed:
            prompt = self._active[group_id].prompt.id
            self._active[group_id].completions, self._active[group_id].scores = [], []
            self._staleness.sampled(group_id)
            self._staleness.ready(group_id)
        self._emit("warning", what=f"prompt {prompt} is dropped: its sampling failed {failures} times")

    def _explain(self) -> None:
        """Once a silence, and again after as long."""
        now, run = time.monotonic(), self._config.run
        silence = now - self._news
        # Engines at long answers give no group for long, and are not silent.
        if min(silence, now - self.dispatcher.last_step()) >= run.deadline_s:
            text = self.explanation()
            raise RuntimeError(f"nothing was sampled or scored for {silence:.0f} s (run.deadline_s): {text}")
        if now - max(self._news, self._explained) >= run.explain_after_s:
            self._explained = now
            self._emit("warning", what=f"{silence:.0f} s without a new group: {self.explanation()}")

    def explanation(self) -> str:
        """Who waits for whom, since when, at which versions."""
        with self._changed:
            running = self._staleness.with_status("running")
            sampled = len(self._staleness.with_status("sampled"))
            ready = len(self._staleness.with_status("ready"))
            taken = len(self._staleness.with_status("taken"))
            held = ", ".join(f"{count} of version {version}" for version, count in self._staleness.occupancy().items())
            oldest = min(running, key=lambda o: self._active[o].began, default=None)
            what = f"step {self._version + 1} waits for {self._staleness.waits_for()}"
            if oldest is not None:
                since = time.monotonic() - self._active[oldest].began
                what += f"; the oldest, prompt {self._active[oldest].prompt.id}, began {since:.0f} s ago"
        counts = (
            f"{len(running)} groups sampling, {sampled} to score, {ready} ready, {taken} taken for the step ({held})"
        )
        return f"{what}; {counts}; {self.dispatcher.describe()}"


def _group_id(name: str) -> int:
    return int(name.partition(".")[0])
