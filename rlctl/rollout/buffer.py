"""Rollout buffer: admits tasks, tracks their groups, and yields the sampled and scored groups of each step.

`GroupTable` has the states of all groups; only the event loop uses it. `StalenessRule` chooses the groups of each step.
With `max_trajectory_age_steps` 0 training is synchronous. A group's seeds are a function of its number, so that a
resumed run samples the same tokens. `RefillRule` says how many groups replace groups that teach nothing, for example
groups of equal rewards. A long wait emits a warning that says its cause (contract 8).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
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
from rlctl.utils.event_loop import wait_until_set

Span = Callable[[str], AbstractContextManager[None]]
ScoreGroups = Callable[[Sequence[RolloutGroup]], list[RolloutGroup]]
# Most calls of `score` at a time, each on its thread. Other groups end while a judge takes seconds for one.
_MAX_SCORING = 16
# Returns the reason why a scored group teaches nothing and is replaced; None if the group is kept.
WhyNothing = Callable[[RolloutGroup], str | None]
# Takes groups of the step and returns them; returns None if the step must wait for further groups.
Attempt = Callable[[], list[RolloutGroup] | None]


class RolloutBuffer:
    """The groups of a run. Only the training thread calls the methods; sampling and scoring go on in the background.

    runner: plays rollouts with the dispatcher's engines. score: called on a separate thread. teaches_nothing: a pure
    function, called for every group that is scored.
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
        self._config = config
        self._source = source
        self._dispatcher = dispatcher
        self._runner = runner
        self._events = dispatcher.events
        self._score = score
        self._emit = emit
        self._teaches_nothing = teaches_nothing
        groups_per_step = config.grpo.num_prompts_per_step
        rule = StalenessRule(
            groups_per_step=groups_per_step,
            max_age=config.async_.max_age,
            policy=config.async_.policy,
            window_fraction=config.async_.window_fraction,
        )
        dynamic_sampling = config.grpo.dynamic_sampling
        self._refill = RefillRule(groups_per_step, dynamic_sampling.max_extra if dynamic_sampling.filter else 0.0)
        self._groups = GroupTable(rule, self._refill.budget)
        self._sampling = Sampling(
            purpose="train",
            run_seed=config.run.seed,
            groups_per_step=groups_per_step,
            num_rollouts=config.grpo.num_generations_per_prompt,
            max_new_tokens=config.generation.max_new_tokens,
            temperature=config.generation.temperature,
        )
        self._prefetch = AdaptivePrefetch(groups_per_step, rule.capacity, adaptive=config.async_.prefetch == "auto")
        self._wait_deadline = WaitDeadline(self._events.now, config.run, emit)
        self._version = 0
        # Number of sampled tokens of each rollout, for groups sampled since `sampled_lengths` was last called.
        self._lengths: list[int] = []
        self._waste = Waste()
        # Seconds that the current step waited.
        self._waited = 0.0
        self._step_began = self._events.now()
        # Set when a group has changed its state or an engine was lost.
        self._changed = dispatcher.news
        self._num_scoring = 0
        self._is_admitting = False
        self._is_closed = False
        # True if a group was dropped since the last step. A hanging engine may still be sampling its rollouts.
        self._has_dropped = False
        dispatcher.restarted = self._restart_groups

    def admit(self, version: int) -> None:
        """Begin as many groups as fit, but no more than the run will still train. version: that of the engines."""
        self._runner.check()
        self._events.ask(lambda: self._admit_at(version))

    def take(self, version: int, span: Span) -> list[RolloutGroup]:
        """Wait until all groups that the step at `version` still lacks are scored; take and return these groups.

        Groups that a synchronous step does not need are stopped, and deferred to the next step.
        """
        surplus: list[RolloutId] = []

        def take_all() -> list[RolloutGroup] | None:
            numbers = self._groups.select(version)
            if numbers is None:
                return None
            groups = [record.rollout_group() for record in self._groups.take(numbers, version)]
            surplus.extend(self._put_off_surplus())
            return groups

        groups = self._wait_for_groups(version, take_all, span)
        if surplus or (self._has_dropped and not self._config.async_.enabled):
            self._stop_surplus(surplus, span)
        return groups

    def take_part(self, version: int, tokens: int, span: Span) -> list[RolloutGroup]:
        """Wait until scored groups of the step at `version` have `tokens` tokens together; take and return them.
        Return an empty list once all groups that the step lacks are scored: `take` takes these."""

        def take_some() -> list[RolloutGroup] | None:
            if self._groups.select(version) is not None:
                return []
            # Cheaper than `select_part`, which would run after every finished group.
            if self._groups.ready_tokens < tokens:
                return None
            numbers = self._groups.select_part(version)
            if sum(self._groups[number].num_tokens for number in numbers) < tokens:
                return None
            return [record.rollout_group() for record in self._groups.take(numbers, version)]

        return self._wait_for_groups(version, take_some, span)

    def drain(self, span: Span) -> None:
        """Begin no more turns, and wait until no engine samples. Sampling resumes with `advance`.

        Engines that are lost meanwhile are replaced in the next refit, because the trainer already has new weights.
        """
        self._wait_deadline.note_progress()
        if self._dispatcher.drain():
            return
        with span("drain"):
            while not self._dispatcher.drain(TICK_S):
                self._wait_deadline.check(self._dispatcher.last_step(), self.explanation)

    def advance(self, version: int) -> None:
        """End the step after a refit to `version`: release its groups, and resume sampling. In an asynchronous run,
        also admit the next groups."""
        now = self._events.now()
        waited_share = self._waited / max(1e-9, now - self._step_began)
        self._waited = 0.0
        self._events.ask(lambda: self._release(version, waited_share))
        self._dispatcher.resume()
        if self._config.async_.enabled:
            self.admit(version)

    @property
    def target(self) -> int:
        """Number of groups to keep between admission and release, see `AdaptivePrefetch`."""
        return self._prefetch.target

    def occupancy(self) -> dict[int, int]:
        """Return the number of active groups by the version at which they were admitted."""
        return self._events.ask(self._groups.occupancy)

    def sampled_lengths(self) -> list[int]:
        """Return the number of sampled tokens of each rollout, for groups sampled since the last call."""

        def take_lengths() -> list[int]:
            lengths = self._lengths
            self._lengths = []
            return lengths

        return self._events.ask(take_lengths)

    def waste(self) -> Waste:
        """Return the counts of groups that were sampled but not trained, since the last call."""

        def take_waste() -> Waste:
            waste = self._waste
            self._waste = Waste()
            return waste

        return self._events.ask(take_waste)

    def snapshot(self) -> tuple[dict[str, Any], Callable[[Path], None]]:
        """Return the state for a checkpoint, and a function that writes the READY groups into a folder.

        `load` takes the state's entry `groups`. The entry `cursor` is the data cursor's state at this moment.
        """

        def read_state() -> tuple[dict[str, Any], dict[int, list[Rollout]]]:
            groups = {**self._groups.state_dict(), "refill": self._refill.state_dict()}
            groups["prefetch"] = self._prefetch.target
            return {"groups": groups, "cursor": self._source.cursor.state_dict()}, self._groups.saved_rollouts()

        state, ready = self._events.ask(read_state)
        return state, lambda folder: save_groups(folder, ready)

    def load(self, state: dict[str, Any], folder: Path, version: int) -> None:
        """Restore the groups of a `snapshot`: READY ones stay READY, other groups are sampled again at `version`."""
        rollouts = load_groups(folder)

        def load_state() -> list[GroupRecord]:
            self._version = version
            self._prefetch.resume(state["prefetch"])
            self._refill.load_state_dict(state.get("refill", []))
            return self._groups.load_state_dict(state, version, self._source.row_at, rollouts)

        resampled = self._events.ask(load_state)
        self._events.run(self._runner.begin_groups(map(self._begin_group, resampled), self._take_ended))

    def close(self) -> None:
        """Stop sampling and scoring for good."""
        self._is_closed = True
        self._runner.close()
        self._dispatcher.close()

    def explanation(self) -> str:
        """Return a text on the step's wait: groups by state and version, the state of engines and environments."""
        groups = self._events.ask(lambda: self._groups.describe(self._events.now()))
        return f"step {self._version + 1} waits for {groups}; {self._dispatcher.describe()}{self._runner.describe()}"

    # Waits, on the training thread.

    def _wait_for_groups(self, version: int, attempt: Attempt, span: Span) -> list[RolloutGroup]:
        """Repeat an attempt until it succeeds; return the groups that it took."""
        self._wait_deadline.note_progress()
        self._events.check()
        groups, cause = self._events.run(self._try_for_a_tick(version, attempt))
        while groups is None:
            began = self._events.now()
            span_cause = cause
            with span(span_cause):
                while groups is None and cause == span_cause:
                    groups, cause = self._events.run(self._try_for_a_tick(version, attempt, span_cause))
                    self._events.check()
                    if groups is None:
                        self._look_after()
            self._waited += self._events.now() - began
        return groups

    async def _try_for_a_tick(
        self, version: int, attempt: Attempt, span_cause: str | None = None
    ) -> tuple[list[RolloutGroup] | None, str]:
        """Repeat an attempt until it succeeds, the wait has another cause than `span_cause`, an engine is lost, or
        TICK_S is over. Return (groups or None, cause of the wait)."""
        self._version = version
        end = self._events.now() + TICK_S
        while True:
            self._changed.clear()
            groups = attempt()
            cause = self._groups.waits_for()
            if groups is not None or cause != span_cause or self._dispatcher.has_lost:
                return groups, cause
            if not await wait_until_set(self._changed, end - self._events.now()):
                return groups, cause

    def _look_after(self) -> None:
        """Replace lost engines, resample overdue groups, and warn of a long silence or raise at its deadline."""
        self._runner.check()
        if self._dispatcher.repair():
            # The time of the replacement must not count as a silence of the new engine.
            self._wait_deadline.note_progress()
        if self._config.async_.enabled and self._config.async_.on_bound == "requeue":
            self._events.run(self._resample_overdue())
        self._wait_deadline.check(max(self._dispatcher.last_step(), self._runner.last_step), self.explanation)

    def _stop_surplus(self, surplus: list[RolloutId], span: Span) -> None:
        """Stop rollouts that a synchronous step does not need, and wait until engines no longer sample them."""
        tokens_before = self._aborted_tokens
        with span("drain"):
            self._events.run(self._runner.stop(surplus))
        # Wait until no engine has these requests, because the next step submits the same requests again.
        self.drain(span)
        self._dispatcher.resume()
        self._has_dropped = False
        self._waste.surplus_tokens += self._aborted_tokens - tokens_before

    @property
    def _aborted_tokens(self) -> int:
        return self._dispatcher.aborted_tokens + self._runner.aborted_tokens

    # On the event loop.

    def _admit_at(self, version: int) -> None:
        self._version = version
        self._step_began = self._events.now()
        self._admit()

    def _admit(self) -> None:
        """Begin the wanted groups: a first slice now, further slices in a task, so that other tasks run in between."""
        if self._admit_slice() and not self._is_admitting:
            self._is_admitting = True
            self._events.spawn(self._admit_further_slices())

    async def _admit_further_slices(self) -> None:
        try:
            await asyncio.sleep(0)
            while self._admit_slice():
                await asyncio.sleep(0)
        finally:
            self._is_admitting = False

    def _admit_slice(self) -> bool:
        """Begin at most one slice of the wanted groups, DEFERRED ones first. Return True if the slice was full."""
        slice_size = max(1, SLICE // self._sampling.num_rollouts)
        count = max(0, min(self._count_wanted(), self._groups.room, slice_size))
        if self._is_closed or not count:
            return False
        tasks = {group.number: group.task for group in self._groups.in_state(GroupState.DEFERRED)[:count]}
        first_number = self._source.cursor.position
        tasks |= dict(enumerate(self._source.draw(count - len(tasks)), first_number))
        self._begin_rollouts(self._groups.admit(tasks, self._version))
        return count == slice_size

    def _count_wanted(self) -> int:
        """Return the number of groups that the run wants to begin. There may be room for fewer."""
        config = self._config.grpo
        groups = self._groups
        if self._config.async_.enabled:
            untrained = (config.num_steps - self._version) * config.num_prompts_per_step
            return min(self._prefetch.target, untrained) - groups.active
        if not groups.num_lacking or self._version >= config.num_steps:
            return 0
        return self._refill.in_flight(groups.count(GroupState.FILTERED), groups.count(GroupState.READY)) - groups.active

    def _begin_rollouts(self, groups: Sequence[GroupRecord]) -> None:
        for group in groups:
            self._runner.begin(self._begin_group(group), self._take_ended)

    def _begin_group(self, group: GroupRecord) -> list[RolloutStart]:
        """Set a group's begin to now; return the specifications of its rollouts."""
        group.began = self._events.now()
        return self._starts(group)

    def _starts(self, group: GroupRecord) -> list[RolloutStart]:
        return self._sampling.starts(group.task, group.number, group.attempt)

    def _rollout_ids(self, groups: Sequence[GroupRecord]) -> list[RolloutId]:
        return [start.id for start in chain.from_iterable(map(self._starts, groups))]

    def _take_ended(self, rollout: Rollout) -> None:
        """Take a rollout that ended. After a group's last rollout, begin to score the group."""
        self._wait_deadline.note_progress()
        group = self._groups.get(rollout.id.group)
        # The group may have been dropped, put off or resampled meanwhile: this rollout is then outdated.
        if group is None or group.state is not GroupState.SAMPLING or group.attempt != rollout.id.attempt:
            return
        group.rollouts[rollout.id.index] = rollout
        if len(group.rollouts) == self._sampling.num_rollouts:
            group.rollouts = dict(sorted(group.rollouts.items()))
            self._lengths += [ended.num_sampled for ended in group.rollouts.values() if ended.rows]
            self._groups.mark_sampled(group.number)
            self._changed.set()
            if self._num_scoring < _MAX_SCORING:
                self._num_scoring += 1
                self._events.spawn(self._score_sampled())

    async def _score_sampled(self) -> None:
        """Score the SAMPLED groups that no other call scores; repeat until there is none."""
        while not self._is_closed and (records := self._groups.begin_scoring()):
            groups = [record.rollout_group() for record in records]
            scored_groups = await self._events.in_thread("scoring", partial(self._score, groups))
            if self._note_scores(records, scored_groups) and not self._is_closed:
                self._admit()
        self._num_scoring -= 1

    def _note_scores(self, records: list[GroupRecord], scored_groups: list[RolloutGroup]) -> bool:
        """Store the scores and move the groups to READY or FILTERED; return True if any is FILTERED."""
        scored_records = []
        for record, scored_group in zip(records, scored_groups):
            # A group may have been put off meanwhile: its number may then belong to a new record.
            if record.state is GroupState.SAMPLED:
                record.rollouts = dict(enumerate(scored_group.rollouts))
                self._groups.mark_scored(record.number, self._teaches_nothing(scored_group))
                scored_records.append(record)
        self._wait_deadline.note_progress()
        self._changed.set()
        return any(record.state is GroupState.FILTERED for record in scored_records)

    async def _restart_groups(self, rollouts: list[RolloutId]) -> None:
        """Count a failure for each group with rollouts on a lost engine. Drop groups that have failed too often."""
        lost_rollouts = Counter(rollout.group for rollout in rollouts if rollout.purpose == "train")
        dropped: list[GroupRecord] = []
        for number, num_lost in lost_rollouts.items():
            group = self._groups.get(number)
            if group is None or group.state is not GroupState.SAMPLING:
                continue
            group.failures += 1
            if group.failures <= self._config.generation.max_generation_failures:
                # The group gets the newer version only if it keeps no token of the older one.
                all_lost = not self._runner.several_turns and num_lost == self._sampling.num_rollouts
                self._groups.restart(number, self._version if all_lost else group.version)
                continue
            self._groups.drop(number)
            dropped.append(group)
            self._emit("warning", what=f"prompt {group.task.id} is dropped: its sampling failed {group.failures} times")
        if dropped:
            self._has_dropped = True
            self._changed.set()
            await self._runner.stop(self._rollout_ids(dropped))

    async def _resample_overdue(self) -> None:
        overdue = [self._groups[number] for number in self._groups.overdue(self._version)]
        if not overdue:
            return
        stopped_groups = {rollout_id.group for rollout_id in await self._runner.stop(self._rollout_ids(overdue))}
        # A group of which a rollout was stopped cannot have become complete during the wait.
        resampled = [
            self._groups.resample(group.number, self._version) for group in overdue if group.number in stopped_groups
        ]
        for group in resampled:
            self._emit("redrawn", prompt=group.task.id, version=self._version)
        self._begin_rollouts(resampled)

    def _put_off_surplus(self) -> list[RolloutId]:
        """Defer groups that a synchronous step does not need. Return their running rollouts; the caller stops these."""
        surplus = self._groups.surplus()
        running = [group for group in surplus if group.state is GroupState.SAMPLING]
        self._waste.surplus += len(surplus)
        for group in surplus:
            self._waste.surplus_tokens += sum(rollout.num_sampled for rollout in group.rollouts.values())
        self._groups.put_off(surplus)
        return self._rollout_ids(running)

    def _release(self, version: int, waited_share: float) -> None:
        """End a step. waited_share: share of the step's seconds in which the trainer waited for rollouts."""
        groups = self._groups
        self._prefetch.note_step(waited_share, groups.count(GroupState.SAMPLED, GroupState.READY))
        for record in groups.in_state(GroupState.FILTERED):
            self._waste.filtered.append((record.rollout_group(), record.reason))
        ended = groups.in_state(GroupState.TAKEN, GroupState.FILTERED)
        groups.release()
        self._refill.note_step(sum(bool(record.reason) for record in ended), len(ended))
        # Groups admitted from now on are sampled at this version.
        self._version = version
