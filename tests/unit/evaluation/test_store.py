"""An evaluation's folder: parts as they were written or not at all, the rest found, one process at a time; its name."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.tasks import Task
from rlctl.evaluation.store import DamagedResult, EvaluationError, EvaluationFolder, digest_of, digest_of_rows
from rlctl.rollout.types import RolloutGroup
from rlctl.run.file_manifest import write_manifest
from tests.unit.evaluation.test_figures import rollout

TASKS = [Task(f"r{place}", [1], "", "2", {"answer": "2"}) for place in range(7)]


def groups(places: range) -> list[RolloutGroup]:
    rollouts = [rollout(f"r{place}", index=0, reward=float(place % 2), length=place + 1) for place in places]
    return [RolloutGroup(TASKS[place], [place_rollout]) for place, place_rollout in zip(places, rollouts)]


def test_what_is_missing_is_found_in_ranges() -> None:
    folder = EvaluationFolder(Path("/nonexistent"))
    assert folder.missing(7, 3) == [range(3), range(3, 6), range(6, 7)]


def test_parts_come_back_as_they_were_and_the_rest_is_missing(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path / "one")
    with folder.claim():
        folder.save(range(2, 5), groups(range(2, 5)))
        folder.save(range(1), groups(range(1)))
    reopened = EvaluationFolder(tmp_path / "one")
    assert reopened.missing(7, 10) == [range(1, 2), range(5, 7)]
    with reopened.claim():
        reopened.save(range(1, 2), groups(range(1, 2)))
    loaded = reopened.groups(TASKS[:5])
    assert [group.task.id for group in loaded] == ["r0", "r1", "r2", "r3", "r4"]
    assert [group.rollouts[0].num_sampled for group in loaded] == [1, 2, 3, 4, 5]
    assert [group.rollouts[0].reward for group in loaded] == [0.0, 1.0, 0.0, 1.0, 0.0]


def test_a_part_that_was_half_written_is_sampled_again(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    (tmp_path / "parts/tmp_000000-000003").mkdir(parents=True)
    (tmp_path / "parts/tmp_000000-000003/groups.json").write_text("[")
    with folder.claim():
        assert folder.missing(4, 4) == [range(4)]
        folder.save(range(4), groups(range(4)))
    assert folder.missing(4, 4) == []


def test_two_processes_do_not_evaluate_into_one_folder(tmp_path: Path) -> None:
    first = EvaluationFolder(tmp_path)
    second = EvaluationFolder(tmp_path)
    with first.claim(), pytest.raises(EvaluationError) as raised, second.claim():
        raise AssertionError
    assert str(raised.value) == f"{tmp_path} is being evaluated by another process"
    with second.claim():
        pass
    # A full pipe that does not block raises this where progress is printed.
    with pytest.raises(BlockingIOError), first.claim():
        raise BlockingIOError


def test_a_result_is_there_when_all_of_it_is(tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path)
    assert folder.result() is None
    (tmp_path / "result.json").write_text("{}")
    write_manifest(tmp_path, ["result.json"])
    with pytest.raises(EvaluationError, match=r"result\.json: not the result of an evaluation"):
        folder.result()
    result = {"rows": "r", "by_task": [{"task": "r0"}], "figures": {"tasks": 1}}
    folder.finish([{"task": "r0"}], result)
    assert folder.result() == result
    assert json.loads((tmp_path / "rollouts.jsonl").read_text()) == {"task": "r0"}


CONFIG: dict[str, Any] = {
    "run": {"seed": 0, "name": "a"},
    "model": {"path": "a", "max_length": None},
    "trainer": {"dtype": "auto", "num_ranks": 1},
    "data": {"train": {"path": "t"}, "validation": {"path": "v"}, "shuffle": True},
    "rewards": [{"name": "exact"}],
    "validation": {"temperature": 0.0},
}


def change_config(section: str, **values: Any) -> dict[str, Any]:
    return {**CONFIG, section: {**CONFIG[section], **values}}


def test_the_digest_changes_with_what_answers_depend_on_and_with_nothing_else() -> None:
    first = digest_of(CONFIG, "w", "r")
    equal_configs = [
        change_config("run", name="b"),
        change_config("model", path="b"),
        change_config("trainer", num_ranks=2),
        change_config("data", train={"path": "u"}),
    ]
    assert {digest_of(config, "w", "r") for config in equal_configs} == {first}
    other_configs = [
        change_config("run", seed=1),
        change_config("validation", temperature=1.0),
        change_config("data", validation={"path": "w"}),
        {**CONFIG, "rewards": [{"name": "regex"}]},
    ]
    digests = {digest_of(config, "w", "r") for config in other_configs}
    assert len({first, *digests, digest_of(CONFIG, "x", "r"), digest_of(CONFIG, "w", "s")}) == 7


def test_rows_have_one_digest_whatever_tokens_they_are() -> None:
    same_rows = [Task(task.id, [7, 7], "another template", task.answer, task.row) for task in TASKS]
    assert digest_of_rows(same_rows) == digest_of_rows(TASKS)
    assert digest_of_rows(TASKS[1:]) != digest_of_rows(TASKS)


def save_parts(path: Path) -> EvaluationFolder:
    folder = EvaluationFolder(path)
    with folder.claim():
        folder.save(range(3), groups(range(3)))
        folder.save(range(3, 7), groups(range(3, 7)))
    return folder


def alter_reward(path: Path) -> None:
    path.write_text(path.read_text().replace('"value": 1.0', '"value": 0.5'))


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("groups.npz", Path.unlink, "missing"),
    ("groups.json", alter_reward, "its bytes are not those that were written"),
    ("groups.npz", lambda path: os.truncate(path, 100), "cut to 100 of "),
    ("manifest.json", Path.unlink, "missing, so that nothing says"),
]


@pytest.mark.parametrize(("name", "hurt", "problem"), DAMAGE)
def test_a_damaged_part_is_named_with_its_path_and_is_missing_again(
    tmp_path: Path, name: str, hurt: Callable[[Path], None], problem: str
) -> None:
    folder = save_parts(tmp_path)
    hurt(tmp_path / "parts/000003-000006" / name)
    with folder.claim():
        (line,) = folder.drop_damaged()
        assert line.startswith(f"{tmp_path}/parts/000003-000006/{name}: {problem}")
        assert line.endswith("; sampled again: 4 tasks")
        assert folder.missing(7, 10) == [range(3, 7)]
        with pytest.raises(EvaluationError, match=r"parts: no answers to 4 of 7 tasks, first r3"):
            folder.groups(TASKS)
        folder.save(range(3, 7), groups(range(3, 7)))
        assert folder.drop_damaged() == []
    assert [group.task.id for group in folder.groups(TASKS)] == [task.id for task in TASKS]


@pytest.mark.parametrize("name", ["result.json", "rollouts.jsonl", "manifest.json"])
def test_a_result_counts_only_as_it_was_written(tmp_path: Path, name: str) -> None:
    folder = EvaluationFolder(tmp_path)
    result = {"rows": "r", "by_task": [{}], "figures": {"tasks": 10}}
    folder.finish([{"task": f"r{number}"} for number in range(10)], result)
    file = tmp_path / name
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 2])) if name != "manifest.json" else file.unlink()
    with pytest.raises(DamagedResult, match=rf"{name}: (cut to|missing)"):
        folder.result()
