"""Rollout buffer: admits tasks, tracks their groups, and yields the groups of each step, sampled and scored.

`GroupTable` has the states of all groups, and belongs to the event loop; `StalenessRule` decides who trains when. With
`max_trajectory_age_steps` 0 this is the synchronous loop. A group's seeds are a function of its number, so that a
resume samples the same. Where a group teaches nothing, `RefillRule` says how many others are sampled in its place.
A long wait is explained (contract 8).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.config.schema import GrpoConfig
from rlctl.data.cursor import TaskSource
from rlctl.generation.requests import RolloutId
from rlctl.rollout.buffer_checkpoint import load_groups, save_groups
from rlctl.rollout.dispatcher import RolloutDispatcher
from rlctl.rollout.groups import GroupRecord, GroupState, GroupTable
from rlctl.rollout.prefetch import AdaptivePrefetch
from rlctl.rollout.refill import RefillRule
from rlctl.rollout.runner import SLICE, RolloutRunner
from rlctl.rollout.staleness import StalenessRule
from rlctl.rollout.types import Rollout, RolloutGroup, RolloutStart, Sampling, Waste
from rlctl.rollout.wait_deadline import TICK_S, Emit, WaitDeadline
from rlctl.utils.event_loop import within

Span = Callable[[str], AbstractContextManager[None]]
ScoreGroups = Callable[[Sequence[RolloutGroup]], list[RolloutGroup]]
# The reason for which a scored group teaches nothing and is replaced; None if it is kept.
WhyNothing = Callable[[RolloutGroup], str | None]
# Takes groups of a step; None while they have to be waited for.
Attempt = Callable[[], list[RolloutGroup] | None]


class RolloutBuffer:
    """The groups of a run. The training thread calls the methods; sampling and scoring go on meanwhile.

    runner: plays rollouts with the dispatcher's engines. score: called on a separate thread. teaches_nothing: pure;
    called for every group that is scored.
    """

    def __init__(
        self,
        config: GrpoConfig,
        source: TaskSource,
        dispatcher: RolloutDispatcher,
        runner: RolloutRunner,
        score: ScoreGroups,
        emit: Emit,
        teaches_nothing: WhyNothing = lambda group: None,
    ) -> None:
        self._config, self._source = config, source
        self._dispatcher, self._runner, self._events = dispatcher, runner, dispatcher.events
        self._score, self._emit, self._teaches_nothing = score, emit, teaches_nothing
        size, asynchronous = config.grpo.num_prompts_per_step, config.async_
        rule = StalenessRule(size, asynchronous.max_age, asynchronous.policy, asynchronous.window_fraction)
        sampling = config.grpo.dynamic_sampling
        self._refill = RefillRule(size, sampling.max_extra if sampling.filter else 0.0)
        self._groups = GroupTable(rule, self._refill.budget)
        shape = (config.grpo.num_generations_per_prompt, config.generation.max_new_tokens)
        self._sampling = Sampling("train", config.run.seed, size, *shape, config.generation.temperature)
        self._prefetch = AdaptivePrefetch(size, rule.capacity, adaptive=asynchronous.prefetch == "auto")
        self._wait_deadline = WaitDeadline(self._events.now, config.run, emit)
        self._version = 0
        # Tokens of every rollout of the groups that were sampled since `sampled_lengths` was last called.
        self._lengths: list[int] = []
        self._waste = Waste()
        # Seconds that the current step waited, and when it began.
        self._waited, self._step_began = 0.0, self._events.now()
        # Set when a group has changed its state.
        self._changed = dispatcher.news
        self._scoring = self._admitting = self._closed = False
        # True if a group was dropped since the last step. A hanging engine may still sample its rollouts.
        self._dropped = False
        dispatcher.restarted = self._restarted

    def admit(self, version: int) -> None:
        """Begin as many groups as there is room for, but no more than the run still trains; the engines serve
        `version`."""
        self._runner.check()
        self._events.ask(lambda: self._admit_at(version))

    def take(self, version: int, span: Span) -> list[RolloutGroup]:
        """Wait for the groups of the step at `version` that were not taken yet to be scored, and take them.

        Groups that a synchronous step does not need are put off, and no engine samples any more.
        """
        surplus: list[RolloutId] = []

        def all_groups() -> list[RolloutGroup] | None:
            if (numbers := self._groups.select(version)) is None:
                return None
            groups = [_group(each) for each in self._groups.take(numbers, version)]
            surplus.extend(self._put_off_surplus())
            return groups

        groups = self._wait_for_groups(version, all_groups, span)
        if surplus or (self._dropped and not self._config.async_.enabled):
            self._stop_surplus(surplus, span)
        return groups

    def take_part(self, version: int, tokens: int, span: Span) -> list[RolloutGroup]:
        """Wait until scored groups of the step at `version` have this number of tokens, and take them; none once the
        step's last groups are there, for `take`."""

        def part() -> list[RolloutGroup] | None:
            if self._groups.select(version) is not None:
                return []
            # Cheaper than the choice, which would run after every finished group.
            if self._groups.ready_tokens < tokens:
                return None
            numbers = self._groups.select_part(version)
            if sum(self._groups[number].num_tokens for number in numbers) < tokens:
                return None
            return [_group(each) for each in self._groups.take(numbers, version)]

        return self._wait_for_groups(version, part, span)

    def drain(self, span: Span) -> None:
        """Wait until nothing is being sampled; `advance` ends it.

        The following sync replaces engines that are lost meanwhile: the trainer has its weights already.
        """
        self._wait_deadline.note_progress()
        if self._dispatcher.drain():
            return
        with span("drain"):
            while not self._dispatcher.drain(TICK_S):
                self._wait_deadline.check(self._dispatcher.last_step(), self.explanation)

    def advance(self, version: int) -> None:
        """Release the groups of the step, now that the engines serve `version`; sample again, and in an asynchronous
        run admit the next groups."""
        now = self._events.now()
        waited, self._waited = self._waited / max(1e-9, now - self._step_began), 0.0
        self._events.ask(lambda: self._release(version, waited))
        self._dispatcher.resume()
        if self._config.async_.enabled:
            self.admit(version)

    @property
    def target(self) -> int:
        """Groups to keep on their way, see `AdaptivePrefetch`."""
        return self._prefetch.target

    def occupancy(self) -> dict[int, int]:
        """Return the number of active groups by the version at which they were admitted."""
        return self._events.ask(self._groups.occupancy)

    def sampled_lengths(self) -> list[int]:
        """Take the number of tokens of every rollout of the groups that were sampled since the last call."""

        def lengths() -> list[int]:
            lengths, self._lengths = self._lengths, []
            return lengths

        return self._events.ask(lengths)

    def waste(self) -> Waste:
        """Take the groups that were sampled in vain since the last call."""

        def waste() -> Waste:
            waste, self._waste = self._waste, Waste()
            return waste

        return self._events.ask(waste)

    def snapshot(self) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """Return the state for a resume, and a function that writes the READY groups into a folder.

        groups: the state of `load`. cursor: of the same moment, since a refill may draw at any time.
        """

        def state() -> tuple[dict[str, Any], dict[int, list[Rollout]]]:
            groups = {**self._groups.state_dict(), "prefetch": self._prefetch.target}
            groups["refill"] = self._refill.state_dict()
            ready = {group.number: list(group.rollouts.values()) for group in self._groups.in_state(GroupState.READY)}
            return {"groups": groups, "cursor": self._source.cursor.state_dict()}, ready

        found, ready = self._events.ask(state)
        return found, lambda folder: save_groups(folder, ready)

    def load(self, state: dict[str, Any], folder: Path, version: int) -> None:
        """Take up the groups of a `snapshot`: READY ones are so again, the others are sampled again at `version`."""
        saved = load_groups(folder)

        def take_up() -> list[GroupRecord]:
            self._version = version
            self._prefetch.resume(state["prefetch"])
            self._refill.load_state_dict(state.get("refill", []))
            return self._groups.load_state_dict(state, version, self._source.row_at, saved)

        again = self._events.ask(take_up)
        self._events.run(self._runner.begin_groups(map(self._begun, again), self._take_ended))

    def close(self) -> None:
        """Sample and score no more."""
        self._closed = True
        self._runner.close()
        self._dispatcher.close()

    def explanation(self) -> str:
        """Return the parts that wait, their partners, times and versions."""
        return f"{self._events.ask(self._explanation)}; {self._dispatcher.describe()}{self._runner.describe()}"

    # The training thread's waits.

    def _wait_for_groups(self, version: int, attempt: Attempt, span: Span) -> list[RolloutGroup]:
        """Wait until an attempt succeeds; return the groups that it took."""
        self._wait_deadline.note_progress()
        self._events.check()
        taken, why = self._events.run(self._try_once(version, attempt))
        while taken is None:
            waited_for, began = why, self._events.now()
            with span(waited_for):
                while taken is None and why == waited_for:
                    taken, why = self._events.run(self._try_once(version, attempt, waited_for))
                    self._events.check()
                    if taken is None:
                        self._look_after()
            self._waited += self._events.now() - began
        return taken

    async def _try_once(
        self, version: int, attempt: Attempt, waited_for: str | None = None
    ) -> tuple[list[RolloutGroup] | None, str]:
        """Try until an attempt succeeds, the wait has another cause, an engine is lost, or a tick is over; return the
        groups, and the cause."""
        self._version = version
        end = self._events.now() + TICK_S
        while True:
            self._changed.clear()
            taken, why = attempt(), self._groups.waits_for()
            if taken is not None or why != waited_for or self._dispatcher.has_lost:
                return taken, why
            if not await within(self._changed, end - self._events.now()):
                return taken, why

    def _look_after(self) -> None:
        """Replace lost engines, resample groups that are overdue, explain or end a long silence."""
        self._runner.check()
        if self._dispatcher.repair():
            # The time that the replacement took is no silence of the new engine.
            self._wait_deadline.note_progress()
        if self._config.async_.enabled and self._config.async_.on_bound == "requeue":
            self._events.run(self._resample_overdue())
        last_step = max(self._dispatcher.last_step(), self._runner.last_step)
        self._wait_deadline.check(last_step, self.explanation)

    def _stop_surplus(self, surplus: list[RolloutId], span: Span) -> None:
        """Stop rollouts that a synchronous step does not need, and wait until no engine samples them any more."""
        before = self._aborted_tokens
        with span("drain"):
            self._events.run(self._runner.stop(surplus))
        # Not before they are gone may the same requests be submitted again.
        self.drain(span)
        self._dispatcher.resume()
        self._dropped = False
        self._waste.surplus_tokens += self._aborted_tokens - before

    @property
    def _aborted_tokens(self) -> int:
        return self._dispatcher.aborted_tokens + self._runner.aborted_tokens

    # On the event loop.

    def _admit_at(self, version: int) -> None:
        self._version, self._step_began = version, self._events.now()
        self._admit()

    def _admit(self) -> None:
        """Begin the groups that are wanted now: a slice at once, others while the loop goes round."""
        if self._admit_slice() and not self._admitting:
            self._admitting = True
            self._events.spawn(self._admit_others())

    async def _admit_others(self) -> None:
        try:
            await asyncio.sleep(0)
            while self._admit_slice():
                await asyncio.sleep(0)
        finally:
            self._admitting = False

    def _admit_slice(self) -> bool:
        """Begin a slice of the wanted groups, deferred ones first; return True if others may follow."""
        most = max(1, SLICE // self._sampling.num_rollouts)
        count = max(0, min(self._wanted(), self._groups.room, most))
        if self._closed or not count:
            return False
        tasks = {group.number: group.task for group in self._groups.in_state(GroupState.DEFERRED)[:count]}
        first = self._source.cursor.position
        tasks |= dict(enumerate(self._source.draw(count - len(tasks)), first))
        self._begin_rollouts(self._groups.admit(tasks, self._version))
        return count == most

    def _wanted(self) -> int:
        """Return how many groups are to be begun, if there is room."""
        config, groups = self._config.grpo, self._groups
        left = (config.num_steps - self._version) * config.num_prompts_per_step - groups.active
        if self._config.async_.enabled:
            return min(self._prefetch.target - groups.active, left)
        if not groups.places or self._version >= config.num_steps:
            return 0
        filtered, ready = groups.count(GroupState.FILTERED), groups.count(GroupState.READY)
        return self._refill.in_flight(filtered, ready) - groups.active

    def _begin_rollouts(self, groups: Sequence[GroupRecord]) -> None:
        for group in groups:
            self._runner.begin(self._begun(group), self._take_ended)

    def _begun(self, group: GroupRecord) -> list[RolloutStart]:
        """Note that a group begins now; return its rollouts."""
        group.began = self._events.now()
        return self._starts(group)

    def _starts(self, group: GroupRecord) -> list[RolloutStart]:
        return self._sampling.starts(group.task, group.number, group.attempt)

    def _ids(self, groups: Sequence[GroupRecord]) -> list[RolloutId]:
        return [start.id for group in groups for start in self._starts(group)]

    def _take_ended(self, rollout: Rollout) -> None:
        """Take a rollout that ended; score its group with the last one."""
        self._wait_deadline.note_progress()
        group = self._groups.get(rollout.id.group)
        # A group given up meanwhile is not being sampled any more.
        if not group or (group.state, group.attempt) != (GroupState.SAMPLING, rollout.id.attempt):
            return
        group.rollouts[rollout.id.index] = rollout
        if len(group.rollouts) == self._sampling.num_rollouts:
            group.rollouts = dict(sorted(group.rollouts.items()))
            self._lengths += [one.num_sampled for one in group.rollouts.values() if one.rows]
            self._groups.sampled(group.number)
            self._changed.set()
            if not self._scoring:
                self._scoring = True
                self._events.spawn(self._score_sampled())

    async def _score_sampled(self) -> None:
        """Score every group that is SAMPLED, until none is: together they keep all reward workers busy."""
        while not self._closed and (sampled := self._groups.in_state(GroupState.SAMPLED)):
            scored = await self._events.in_thread("scoring", partial(self._score, [_group(each) for each in sampled]))
            if self._note_scores(sampled, scored) and not self._closed:
                self._admit()
        self._scoring = False

    def _note_scores(self, sampled: list[GroupRecord], scored: list[RolloutGroup]) -> bool:
        """Move groups on that were scored; return True if any group is to be replaced."""
        # Some may have been put off meanwhile; then another record has their number.
        still = [(group, found) for group, found in zip(sampled, scored) if group.state is GroupState.SAMPLED]
        for group, found in still:
            group.rollouts = dict(enumerate(found.rollouts))
            self._groups.scored(group.number, self._teaches_nothing(found))
        self._wait_deadline.note_progress()
        self._changed.set()
        return any(group.state is GroupState.FILTERED for group, _ in still)

    async def _restarted(self, rollouts: list[RolloutId]) -> None:
        """Count the groups whose engine was lost. A group that takes engine after engine down is dropped."""
        lost = Counter(each.group for each in rollouts if each.purpose == "train")
        groups = [group for number in lost if (group := self._groups.get(number))]
        dropped = list[GroupRecord]()
        for group in [group for group in groups if group.state is GroupState.SAMPLING]:
            group.failures += 1
            if group.failures <= self._config.generation.max_generation_failures:
                # Earlier turns that are kept, and rollouts of other engines, are as old as they were.
                afresh = not self._runner.several_turns and lost[group.number] == self._sampling.num_rollouts
                self._groups.restart(group.number, self._version if afresh else group.version)
                continue
            self._groups.drop(group.number)
            dropped.append(group)
            what = f"prompt {group.task.id} is dropped: its sampling failed {group.failures} times"
            self._emit("warning", what=what)
        if dropped:
            self._dropped = True
            self._changed.set()
            await self._runner.stop(self._ids(dropped))

    async def _resample_overdue(self) -> None:
        overdue = [self._groups[number] for number in self._groups.overdue(self._version)]
        if not overdue:
            return
        stopped = {each.group for each in await self._runner.stop(self._ids(overdue))}
        # No group is completed in the meantime: its other rollouts were stopped.
        again = [self._groups.resample(group.number, self._version) for group in overdue if group.number in stopped]
        for group in again:
            self._emit("redrawn", prompt=group.task.id, version=self._version)
        self._begin_rollouts(again)

    def _put_off_surplus(self) -> list[RolloutId]:
        """Defer groups that a synchronous step does not need; return the rollouts that are to be stopped."""
        surplus = self._groups.surplus()
        running = [group for group in surplus if group.state is GroupState.SAMPLING]
        self._waste.surplus += len(surplus)
        self._waste.surplus_tokens += sum(one.num_sampled for group in surplus for one in group.rollouts.values())
        self._groups.put_off(surplus)
        return self._ids(running)

    def _release(self, version: int, waited: float) -> None:
        """End a step. waited: the trainer's share of waiting time in the step."""
        groups = self._groups
        self._prefetch.step_over(waited, groups.count(GroupState.SAMPLED) + groups.count(GroupState.READY))
        filtered = groups.in_state(GroupState.FILTERED)
        self._waste.filtered += [(_group(each), each.reason) for each in filtered]
        nothing = sum(bool(group.reason) for group in groups.in_state(GroupState.TAKEN, GroupState.FILTERED))
        self._refill.step_over(nothing, len(groups.release()))
        # Every group that is admitted from here on is sampled by this version.
        self._version = version

    def _explanation(self) -> str:
        groups = self._groups
        what = f"step {self._version + 1} waits for {groups.waits_for()}"
        if oldest := min(groups.in_state(GroupState.SAMPLING), key=lambda group: group.began, default=None):
            since = self._events.now() - oldest.began
            what += f"; the oldest, prompt {oldest.task.id}, began {since:.0f} s ago"
        sampling, sampled, ready, filtered, taken = (groups.count(state) for state in list(GroupState)[1:])
        counts = f"{sampling} groups sampling, {sampled} to score, {ready} ready"
        counts += f", {filtered} filtered" if filtered else ""
        held = ", ".join(f"{count} of version {version}" for version, count in groups.occupancy().items())
        return f"{what}; {counts}, {taken} taken for the step ({held})"


def _group(record: GroupRecord) -> RolloutGroup:
    return RolloutGroup(record.task, list(record.rollouts.values()))
