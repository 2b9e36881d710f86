"""A source with rollouts twenty times as long as the others' keeps its share of the trained groups."""

from collections import Counter
from typing import Any

import pytest

from rlctl.data.cursor import TaskSource
from rlctl.data.mixture import MixedCursor
from rlctl.data.tasks import Task
from rlctl.generation.requests import TurnRequest
from tests.unit.rollout.fake_engine import answer
from tests.unit.rollout.schedule import Schedule, fakes

STEPS = 100
PROMPTS = 6
ROWS_PER_SOURCE = 11
WEIGHTS = {"fast": 3.0, "slow": 2.0, "rare": 0.5}
TASKS: list[Task] = []
for source_name in WEIGHTS:
    for _ in range(ROWS_PER_SOURCE):
        TASKS.append(Task(f"r{len(TASKS)}", [1], "", None, source=source_name))


class MixedSchedule(Schedule):
    """A run without trouble over three sources."""

    def __init__(self, seed: int, max_age: int) -> None:
        super().__init__(seed)
        self.prompts_per_step = PROMPTS
        self.rollouts_per_group = 1
        self.max_age = max_age
        self.num_engines = 2
        self.num_steps = STEPS
        self.trouble = 0.0
        self.useless_share = 0.0
        self.max_extra = 0.0
        self.budget = 0
        self.config = self.make_config()
        self.trained_sources: Counter[str] = Counter()

    def make_source(self) -> TaskSource:
        rows = dict.fromkeys(WEIGHTS, ROWS_PER_SOURCE)
        return TaskSource(TASKS, MixedCursor(rows, list(WEIGHTS.values()), 1, True))

    def let_event_happen(self) -> None:
        self.let_time_pass()

    def validate(self) -> None:
        pass

    def check_trained(self, groups: list[Any]) -> None:
        super().check_trained(groups)
        self.trained_sources.update(group.task.source for group in groups)


def find_length(request: TurnRequest) -> int:
    """Return the number of tokens of an answer, by the source of its task."""
    row = int(request.id.rollout.task.partition("-r")[2])
    return 20 if TASKS[row].source == "slow" else 1


@pytest.mark.parametrize("max_age", [1, *(pytest.param(age, marks=pytest.mark.long) for age in (0, 3))])
def test_realised_shares_are_within_one_percent_though_a_source_is_twenty_times_slower(
    max_age: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fakes():
        answer(monkeypatch, find_length)
        schedule = MixedSchedule(3, max_age)
        schedule.run()
    assert sum(schedule.trained_sources.values()) == STEPS * PROMPTS
    for source, weight in WEIGHTS.items():
        share = schedule.trained_sources[source] / (STEPS * PROMPTS)
        assert share == pytest.approx(weight / sum(WEIGHTS.values()), abs=0.01)
