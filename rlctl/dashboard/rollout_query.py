"""Queries on the groups of rollouts.jsonl: groups of some steps, the worst, the best, or those with a given text."""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlctl.config.errors import UserError
from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.rollouts_file import GroupPlace, index, read_groups

POLL_S = 0.5


class NoSuchGroup(UserError):
    """A query that no recorded group answers. The text is one line for the user."""


@dataclass(frozen=True)
class RolloutQuery:
    """A query on a run's groups. Without steps, order, task and pattern it asks for the newest step."""

    # True for validation groups, False for training groups.
    validation: bool = False
    # First and last step.
    steps: tuple[int, int] | None = None
    # Order of groups by their mean reward.
    order: Literal["worst", "best"] | None = None
    # Id of a task, such as e2-r17, or of a row: r17 stands for the row's tasks in every epoch.
    task: str | None = None
    # Pattern to find in prompts and in the text after prompts.
    pattern: re.Pattern[str] | None = None

    @property
    def purpose(self) -> str:
        return "validation" if self.validation else "train"

    def asks_for(self, place: GroupPlace) -> bool:
        """Return True if a group has the purpose, a step and the task of the query."""
        first, last = self.steps or (place.step, place.step)
        if place.purpose != self.purpose or not first <= place.step <= last:
            return False
        return self.task is None or place.task == self.task or place.task.endswith(f"-{self.task}")

    def matches(self, group: Record) -> bool:
        """Return True if the pattern is found in a text of the group, or if there is no pattern."""
        return self.pattern is None or any(self.pattern.search(text) for text in texts(group))


@dataclass(frozen=True)
class Answer:
    """Result of a query."""

    groups: list[Record]
    # Number of all groups of the run that match the query.
    num_found: int
    # First and last step with a recorded group.
    recorded: tuple[int, int]


def texts(group: Record) -> Iterator[str]:
    """Yield the prompt and the whole text of each rollout of a group."""
    yield str(group.get("prompt", ""))
    for rollout in group["rollouts"]:
        yield "".join(str(text) for text, _ in rollout.get("text", ()))


def mean_reward(group: Record) -> float | None:
    """Return the mean reward of a group's rollouts that have a reward; None if no rollout has one."""
    rewards = [rollout.get("reward") for rollout in group["rollouts"]]
    numbers = [reward for reward in rewards if isinstance(reward, (int, float))]
    return sum(numbers) / len(numbers) if numbers else None


def select(path: Path, query: RolloutQuery, limit: int) -> Answer:
    """Return at most `limit` groups that match a query. path: rollouts.jsonl.

    With an order these are the first groups in this order, else the newest groups in the order of steps. Raises
    NoSuchGroup if no group of the steps or the task was recorded.
    """
    recorded_places = [place for place in index(path) if place.purpose == query.purpose]
    if not recorded_places:
        key = "telemetry.groups_per_validation" if query.validation else "telemetry.groups_per_step"
        raise NoSuchGroup(f"no {query.purpose} group was recorded yet ({key})")
    recorded_steps = (recorded_places[0].step, max(place.step for place in recorded_places))
    places = [place for place in recorded_places if query.asks_for(place)]
    if not places:
        raise NoSuchGroup(_no_group_message(query, recorded_places))
    # A query that sets only the purpose asks for the newest step.
    if query == RolloutQuery(query.validation):
        places = [place for place in places if place.step == recorded_steps[1]]
    if query.pattern:
        groups = zip(places, read_groups(path, places))
        places = [place for place, group in groups if query.matches(group)]
    if query.order:
        sign = 1 if query.order == "worst" else -1
        means = [(place, mean_reward(group)) for place, group in zip(places, read_groups(path, places))]
        means.sort(key=lambda place_and_mean: _order_key(place_and_mean[1], sign))
        places = [place for place, _ in means]
        return Answer(list(read_groups(path, places[:limit])), len(places), recorded_steps)
    return Answer(list(read_groups(path, places[-limit:])), len(places), recorded_steps)


def follow(path: Path, query: RolloutQuery, ended: Callable[[], bool], poll_s: float = POLL_S) -> Iterator[Record]:
    """Yield the matching groups of the newest step, then each new matching group, until the run has ended.

    ended: returns True once the run has ended.
    """
    last_step = -1
    is_over = False
    while not is_over:
        # Asked before the file is read: if the run has ended, the file has all its records.
        is_over = ended()
        places = [place for place in index(path) if query.asks_for(place)]
        first_new_step = last_step + 1
        if last_step < 0:
            first_new_step = max((place.step for place in places), default=0)
        new_places = [place for place in places if place.step >= first_new_step]
        if new_places and not is_over:
            # A step's groups are written one by one. Wait, so that the step is complete.
            time.sleep(poll_s)
            first_new_step = new_places[0].step
            new_places = [place for place in index(path) if query.asks_for(place) and place.step >= first_new_step]
        yield from filter(query.matches, read_groups(path, new_places))
        last_step = max([last_step, *(place.step for place in new_places)])
        if not is_over:
            time.sleep(poll_s)


def _order_key(mean: float | None, sign: int) -> tuple[bool, float]:
    # Groups without a reward come last in both orders.
    return mean is None, sign * (mean or 0.0)


def _no_group_message(query: RolloutQuery, places: list[GroupPlace]) -> str:
    """Return the message for a query whose task or steps no group has. places: groups of the purpose."""
    steps = sorted({place.step for place in places})
    if query.task is not None:
        return f"no group of task {query.task} was recorded; rlctl runs rollouts --json lists them with their tasks"
    if len(steps) > 8:
        listed = f"{steps[0]} to {steps[-1]}"
        if len(steps) < steps[-1] - steps[0] + 1:
            listed += ", not all"
    else:
        listed = ", ".join(map(str, steps))
    return f"no {query.purpose} group of that step was recorded; there are those of {listed}"
