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

STEPS, PROMPTS = 100, 6
WEIGHTS = {"fast": 3.0, "slow": 2.0, "rare": 0.5}
TASKS = [
    Task(f"r{i}", [1], "", None, source=name) for i, name in enumerate(name for name in WEIGHTS for _ in range(11))
]


class Mixed(Schedule):
    """A run without trouble over three sources."""

    def __init__(self, seed: int, max_age: int) -> None:
        super().__init__(seed)
        self.size, self.rollouts, self.max_age, self.engines, self.last = PROMPTS, 1, max_age, 2, STEPS
        self.trouble, self.share, self.max_extra, self.budget = 0.0, 0.0, 0.0, 0
        self.config = self._config()
        self.trained: Counter[str] = Counter()

    def make_source(self) -> TaskSource:
        return TaskSource(TASKS, MixedCursor(dict.fromkeys(WEIGHTS, 11), list(WEIGHTS.values()), 1, True))

    def event(self) -> None:
        self.a_while_passes()

    def validate(self) -> None:
        pass

    def look_at_trained(self, groups: list[Any]) -> None:
        super().look_at_trained(groups)
        self.trained.update(group.task.source for group in groups)


def length_by_source(request: TurnRequest) -> int:
    row = int(request.id.rollout.task.partition("-r")[2])
    return 20 if TASKS[row].source == "slow" else 1


@pytest.mark.parametrize("max_age", [1, *(pytest.param(age, marks=pytest.mark.long) for age in (0, 3))])
def test_realised_shares_are_within_one_percent_though_a_source_is_twenty_times_slower(
    max_age: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fakes():
        answer(monkeypatch, length_by_source)
        run = Mixed(3, max_age)
        run.run()
    assert sum(run.trained.values()) == STEPS * PROMPTS
    for name, weight in WEIGHTS.items():
        assert run.trained[name] / (STEPS * PROMPTS) == pytest.approx(weight / sum(WEIGHTS.values()), abs=0.01)
