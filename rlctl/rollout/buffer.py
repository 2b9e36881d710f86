"""Rollout buffer: admits tasks, tracks their groups, and yields the groups of each step, sampled and scored.

`GroupTable` has the states of all groups, under this module's one lock; `StalenessRule` decides who trains when. With
`max_trajectory_age_steps` 0 this is the synchronous loop. A group's seeds are a function of its number, so that a
resume samples the same. Where a group teaches nothing, `RefillRule` says how many others are sampled in its place.
Contract 8: a wait that lasts says who waits for whom.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rlctl.config.schema import GrpoConfig
from rlctl.data.cursor import TaskSource
from rlctl.generation.requests import RolloutId
from rlctl.rollout.buffer_checkpoint import load_groups, save_groups
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.groups import GroupRecord, GroupState, GroupTable
from rlctl.rollout.patience import TICK_S, Clock, Emit, Patience, ThreadErrors
from rlctl.rollout.prefetch import AdaptivePrefetch
from rlctl.rollout.refill import RefillRule
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.staleness import StalenessRule
from rlctl.rollout.types import Rollout, RolloutGroup, RolloutStart, Sampling, Waste

Span = Callable[[str], AbstractContextManager[None]]
ScoreGroups = Callable[[Sequence[RolloutGroup]], list[RolloutGroup]]
# The reason for which a scored group teaches nothing and is replaced; None if it is kept.
WhyNothing = Callable[[RolloutGroup], str | None]


class RolloutBuffer:
    """The groups of a run. Methods are called from the loop's thread; sampling and scoring go on meanwhile.

    runner: plays rollouts with the dispatcher's engines. teaches_nothing: pure; called for every group that is scored.
    """

    def __init__(
        self,
        config: GrpoConfig,
        source: TaskSource,
        dispatcher: RolloutDispatcher,
        runner: RolloutRunner,
        score: ScoreGroups,
        emit: Emit,
        clock: Clock | None = None,
        teaches_nothing: WhyNothing = lambda group: None,
    ) -> None:
        self._config, self._source = config, source
        self._dispatcher, self._runner = dispatcher, runner
        self._score, self._emit, self._clock = score, emit, clock or Clock()
        self._teaches_nothing = teaches_nothing
        size, asynchronous = config.grpo.num_prompts_per_step, config.async_
        rule = StalenessRule(size, asynchronous.max_age, asynchronous.policy, asynchronous.window_fraction)
        sampling = config.grpo.dynamic_sampling
        self._refill = RefillRule(size, sampling.max_extra if sampling.filter else 0.0)
        self._groups = GroupTable(rule, self._refill.budget)
        shape = (config.grpo.num_generations_per_prompt, config.generation.max_new_tokens)
        self._sampling = Sampling("train", config.run.seed, size, *shape, config.generation.temperature)
        self._prefetch = AdaptivePrefetch(size, rule.capacity, adaptive=asynchronous.prefetch == "auto")
        self._patience = Patience(self._clock, config.run, emit)
        self._version = 0
        # Tokens of every rollout of the groups that were sampled since `sampled_lengths` was last called.
        self._lengths: list[int] = []
        self._waste = Waste()
        # Seconds that the step under way waited, and when it began.
        self._waited, self._step_began = 0.0, self._clock.now()
        self._closed = False
        self._changed = threading.Condition(threading.RLock())
        self._errors = ThreadErrors(self._changed)
        # Held from the choice of groups to begin until they are submitted, which must not happen under `_changed`.
        self._admitting = threading.RLock()
        self._clock.spawn("scoring", self._errors.guarded(self._score_sampled))

    def admit(self, version: int) -> None:
        """Begin as many groups as there is room for, but no more than the run still trains; the engines serve
        `version`."""
        with self._changed:
            self._version, self._step_began = version, self._clock.now()
        self._admit()

    def take(self, version: int, span: Span) -> list[RolloutGroup]:
        """Wait for the groups of the step at `version` that were not taken yet to be scored, and take them.

        What a synchronous step does not need is put off, and no engine samples any more.
        """
        numbers = self._wait(version, lambda: self._groups.select(version), span)
        with self._admitting:
            groups = self._take(numbers, version)
            self._put_off_surplus(span)
        return groups

    def take_part(self, version: int, tokens: int, span: Span) -> list[RolloutGroup]:
        """Wait until scored groups of the step at `version` have so many tokens, and take them; none once the step's
        last groups are there, for `take`."""

        def part() -> list[int] | None:
            if self._groups.select(version) is not None:
                return []
            # Less work than the choice, which would be made for every group that ends.
            if sum(_tokens(group) for group in self._groups.in_state(GroupState.READY)) < tokens:
                return None
            numbers = self._groups.select_part(version)
            return numbers if sum(_tokens(self._groups[number]) for number in numbers) >= tokens else None

        return self._take(self._wait(version, part, span), version)

    def drain(self, span: Span) -> None:
        """Wait until nothing is being sampled; `advance` ends it.

        An engine that is lost meanwhile is replaced by the sync that follows: the trainer has its weights already.
        """
        self._patience.news()
        if self._dispatcher.drain():
            return
        with span("drain"):
            while not self._dispatcher.drain():
                with self._changed:
                    self._clock.wait(self._changed, TICK_S)
                self._patience.check(self._dispatcher.last_step(), self.explanation)

    def advance(self, version: int) -> None:
        """Release the groups of the step, now that the engines serve `version`; sample again, and in an asynchronous
        run admit the next groups."""
        now = self._clock.now()
        waited, self._waited = self._waited / max(1e-9, now - self._step_began), 0.0
        with self._changed:
            complete = len(self._groups.in_state(GroupState.SAMPLED, GroupState.READY))
            self._prefetch.step_over(waited, complete)
            filtered = self._groups.in_state(GroupState.FILTERED)
            self._waste.filtered += [(_group(each), each.reason) for each in filtered]
            nothing = sum(bool(group.reason) for group in self._groups.in_state(GroupState.TAKEN, GroupState.FILTERED))
            self._refill.step_over(nothing, len(self._groups.release()))
            # Whoever is admitted from here on, by whichever thread, is sampled by this version.
            self._version = version
        self._dispatcher.resume()
        if self._config.async_.enabled:
            self.admit(version)

    @property
    def target(self) -> int:
        """Groups to keep on their way, see `AdaptivePrefetch`."""
        return self._prefetch.target

    def occupancy(self) -> dict[int, int]:
        """Return the number of active groups by the version at which they were admitted."""
        with self._changed:
            return self._groups.occupancy()

    def sampled_lengths(self) -> list[int]:
        """Return the tokens of every rollout of the groups that were sampled since the last call."""
        with self._changed:
            lengths, self._lengths = self._lengths, []
            return lengths

    def waste(self) -> Waste:
        """Return what was sampled in vain since the last call."""
        with self._changed:
            waste, self._waste = self._waste, Waste()
            return waste

    def snapshot(self) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """Return what a resume needs, and a function that writes the READY groups into a folder.

        groups: the state of `load`. cursor: of the same moment, since a refill may draw at any time.
        """
        with self._changed:
            groups = {**self._groups.state_dict(), "prefetch": self._prefetch.target}
            groups["refill"] = self._refill.state_dict()
            state = {"groups": groups, "cursor": self._source.cursor.state_dict()}
            ready = {group.number: list(group.rollouts.values()) for group in self._groups.in_state(GroupState.READY)}
        return state, lambda folder: save_groups(folder, ready)

    def load(self, state: dict[str, Any], folder: Path, version: int) -> None:
        """Take up the groups of a `snapshot`: READY ones are so again, the others are sampled again at `version`."""
        self._version, saved = version, load_groups(folder)
        with self._changed:
            self._prefetch.resume(state["prefetch"])
            self._refill.load_state_dict(state.get("refill", []))
            again = self._groups.load_state_dict(state, version, self._source.at, saved)
        self._submit(again)

    def close(self) -> None:
        """Sample and score no more."""
        self._runner.close()
        self._dispatcher.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def ended(self, rollouts: list[Rollout]) -> None:
        """Take rollouts that ended, see `RolloutTaker`."""
        with self._changed:
            for rollout in rollouts:
                group = self._groups.get(rollout.id.group)
                # A group given up meanwhile is not being sampled any more.
                if not group or (group.state, group.attempt) != (GroupState.SAMPLING, rollout.id.attempt):
                    continue
                group.rollouts[rollout.id.index] = rollout
                if len(group.rollouts) == self._sampling.num_rollouts:
                    group.rollouts = dict(sorted(group.rollouts.items()))
                    self._lengths += [one.num_sampled for one in group.rollouts.values() if one.rows]
                    self._groups.sampled(group.number)
            self._patience.news()
            self._changed.notify_all()

    def restarted(self, rollouts: list[RolloutId], afresh: bool) -> None:
        """Count the groups whose engine was lost. A group that takes engine after engine down with it is dropped."""
        most = self._config.generation.max_generation_failures
        for number in dict.fromkeys(rollout.group for rollout in rollouts):
            with self._changed:
                group = self._groups[number]
                if group.state is not GroupState.SAMPLING:
                    continue
                group.failures += 1
                if group.failures <= most:
                    # Earlier turns that are kept are as old as they were.
                    self._groups.restart(number, self._version if afresh else group.version)
                    continue
                self._groups.drop(number)
            self._runner.abort(self._ids(group))
            what = f"prompt {group.task.id} is dropped: its sampling failed {group.failures} times"
            self._emit("warning", what=what)

    def explanation(self) -> str:
        """Return who waits for whom, since when, at which versions."""
        with self._changed:
            sampling, sampled, ready, filtered, taken = (self._groups.in_state(s) for s in list(GroupState)[1:])
            held = ", ".join(f"{count} of version {version}" for version, count in self._groups.occupancy().items())
            what = f"step {self._version + 1} waits for {self._groups.waits_for()}"
        if oldest := min(sampling, key=lambda group: group.began, default=None):
            since = self._clock.now() - oldest.began
            what += f"; the oldest, prompt {oldest.task.id}, began {since:.0f} s ago"
        counts = f"{len(sampling)} groups sampling, {len(sampled)} to score, {len(ready)} ready"
        counts += f", {len(filtered)} filtered" if filtered else ""
        sampled_by = f"{self._dispatcher.describe()}{self._runner.describe()}"
        return f"{what}; {counts}, {len(taken)} taken for the step ({held}); {sampled_by}"

    def _admit(self) -> None:
        """Begin the groups that are wanted now, deferred ones first."""
        with self._admitting:
            with self._changed:
                count = max(0, min(self._wanted(), self._groups.room))
                tasks = {group.number: group.task for group in self._groups.in_state(GroupState.DEFERRED)[:count]}
                first = self._source.cursor.position
                tasks |= dict(enumerate(self._source.draw(count - len(tasks)), first))
                groups = self._groups.admit(tasks, self._version)
            self._submit(groups)

    def _wanted(self) -> int:
        """Return how many groups are to be begun, if there is room."""
        config, groups = self._config.grpo, self._groups
        left = (config.num_steps - self._version) * config.num_prompts_per_step - groups.active
        if self._config.async_.enabled:
            return min(self._prefetch.target - groups.active, left)
        if not groups.places or self._version >= config.num_steps:
            return 0
        filtered, ready = (len(groups.in_state(state)) for state in (GroupState.FILTERED, GroupState.READY))
        return self._refill.in_flight(filtered, ready) - groups.active

    def _put_off_surplus(self, span: Span) -> None:
        """Stop what a synchronous step does not need, and wait until no engine samples it any more."""
        with self._changed:
            surplus = self._groups.surplus()
            rollouts = [rollout for group in surplus for rollout in group.rollouts.values()]
            running = [group for group in surplus if group.state is GroupState.SAMPLING]
            self._groups.put_off(surplus)
        if not surplus:
            return
        before = self._aborted_tokens
        with span("drain"):
            self._runner.abort([each for group in running for each in self._ids(group)])
        # Not before they are gone may the same requests be submitted again.
        self.drain(span)
        aborted = self._aborted_tokens - before
        with self._changed:
            self._waste.surplus += len(surplus)
            self._waste.surplus_tokens += sum(rollout.num_sampled for rollout in rollouts) + aborted

    def _submit(self, groups: list[GroupRecord]) -> None:
        for group in groups:
            group.began = self._clock.now()
        self._runner.begin([start for group in groups for start in self._starts(group)], self)

    def _starts(self, group: GroupRecord) -> list[RolloutStart]:
        return self._sampling.starts(group.task, group.number, group.attempt)

    def _ids(self, group: GroupRecord) -> list[RolloutId]:
        return [start.id for start in self._starts(group)]

    @property
    def _aborted_tokens(self) -> int:
        return self._dispatcher.aborted_tokens + self._runner.aborted_tokens

    def _score_sampled(self) -> bool:
        """Score every group that is SAMPLED: together they keep all reward workers busy. Returns False at the end."""
        with self._changed:
            sampled = self._groups.in_state(GroupState.SAMPLED)
            if not sampled and not self._closed:
                self._clock.wait(self._changed, TICK_S)
                return True
            if self._closed:
                return False
        if self._note_scores(sampled, self._score([_group(each) for each in sampled])):
            self._admit()
        return True

    def _note_scores(self, sampled: list[GroupRecord], scored: list[RolloutGroup]) -> bool:
        """Move groups on that were scored; return whether any of them is to be replaced."""
        with self._changed:
            # Some may have been put off meanwhile; then another record has their number.
            still = [(group, found) for group, found in zip(sampled, scored) if group.state is GroupState.SAMPLED]
            for group, found in still:
                group.rollouts = dict(enumerate(found.rollouts))
                self._groups.scored(group.number, self._teaches_nothing(found))
            self._patience.news()
            self._changed.notify_all()
            return any(group.state is GroupState.FILTERED for group, _ in still)

    def _wait(self, version: int, choice: Callable[[], list[int] | None], span: Span) -> list[int]:
        """Wait until there is something to choose; return the choice."""
        self._version = version
        self._patience.news()
        while (numbers := self._chosen(choice)) is None:
            why, began = self._waits_for(), self._clock.now()
            with span(why):
                while self._chosen(choice) is None and self._waits_for() == why:
                    self._look_after()
            self._waited += self._clock.now() - began
        return numbers

    def _chosen(self, choice: Callable[[], list[int] | None]) -> list[int] | None:
        with self._changed:
            self._errors.check()
            return choice()

    def _waits_for(self) -> str:
        with self._changed:
            return self._groups.waits_for()

    def _look_after(self) -> None:
        """Wait a while; replace lost engines, resample what is overdue, explain or end a long silence."""
        with self._changed:
            self._clock.wait(self._changed, TICK_S)
        self._runner.check()
        if self._dispatcher.repair():
            # What the replacement took is no silence of the new engine.
            self._patience.news()
        if self._config.async_.enabled and self._config.async_.on_bound == "requeue":
            self._resample_overdue()
        last_step = max(self._dispatcher.last_step(), self._runner.last_step)
        self._patience.check(last_step, self.explanation)

    def _resample_overdue(self) -> None:
        with self._changed:
            overdue = [self._groups[number] for number in self._groups.overdue(self._version)]
        if not overdue:
            return
        ids = [each for group in overdue for each in self._ids(group)]
        stopped = {each.group for each in self._runner.abort(ids)}
        with self._changed:
            again = [self._groups.resample(group.number, self._version) for group in overdue if group.number in stopped]
        for group in again:
            self._emit("redrawn", prompt=group.task.id, version=self._version)
        self._submit(again)

    def _take(self, numbers: list[int], version: int) -> list[RolloutGroup]:
        with self._changed:
            return [_group(each) for each in self._groups.take(numbers, version)]


def _group(record: GroupRecord) -> RolloutGroup:
    return RolloutGroup(record.task, list(record.rollouts.values()))


def _tokens(record: GroupRecord) -> int:
    return sum(rollout.num_tokens for rollout in record.rollouts.values())
