"""rollouts.jsonl: bounded, thinned with one warning, and indexed without parsing it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.rollouts_file import RolloutsFile, index, newest_group, read_groups


def make_group(task: str, text: str = "x") -> dict[str, Any]:
    return {"task": task, "prompt": "?", "rollouts": [{"index": 0, "text": [[text, True]], "reward": 1.0}]}


def open_file(path: Path, max_bytes: int = 1 << 20) -> tuple[RolloutsFile, list[str]]:
    """Return the writer, and the list that its warnings go to."""
    warnings: list[str] = []
    return RolloutsFile(path, max_bytes, lambda kind, what: warnings.append(what)), warnings


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(max_size=40), min_size=1, max_size=5))
def test_the_index_finds_every_group_whatever_its_task_and_text_are(tmp_path_factory: Any, names: list[str]) -> None:
    path = tmp_path_factory.mktemp("run") / "rollouts.jsonl"
    file, _ = open_file(path)
    for step, name in enumerate(names):
        file.outcomes(step, {"trained": [name]})
        file.groups(step, "train", [make_group(name, text=name)])
    places = index(path)
    assert [(place.step, place.task) for place in places] == list(enumerate(names))
    assert [group["task"] for group in read_groups(path, places)] == names


def test_a_line_that_is_not_whole_is_no_group_yet(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    file, _ = open_file(path)
    file.groups(1, "train", [make_group("a"), make_group("b")])
    path.write_bytes(path.read_bytes()[:-10])
    assert [place.task for place in index(path)] == ["a"]
    newest = newest_group(path)
    assert newest is not None and newest["task"] == "a"
    assert index(tmp_path / "none") == [] and newest_group(tmp_path / "none") is None


def test_a_damaged_line_is_no_group_and_hides_no_other(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    file, _ = open_file(path)
    file.groups(1, "train", [make_group("a")])
    head = '{"kind": "group", "step": %s, "purpose": "train", "task": "%s", "rollouts": '
    deep_nesting = "[" * 100_000
    damaged_lines = [head % (2, "b") + deep_nesting, head % (2, r"\x") + "[]}", head % ("9" * 5000, "c") + "[]}"]
    path.write_text(path.read_text() + "".join(f"{line}\n" for line in damaged_lines))
    assert [group["task"] for group in read_groups(path, index(path))] == ["a"]
    newest = newest_group(path)
    assert newest is not None and newest["task"] in ("a", "c")


def test_groups_stay_within_the_bound_the_older_the_sparser_and_it_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    max_bytes = 20_000
    file, warnings = open_file(path, max_bytes)
    for step in range(1, 101):
        file.outcomes(step, {"trained": [str(step)]})
        file.groups(step, "train", [make_group("a", "y" * 400), make_group("b", "y" * 400)])
        assert sum(place.length for place in index(path)) <= max_bytes
    steps = sorted({place.step for place in index(path)})
    assert steps[0] == 1 and steps[-1] == 100
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    assert gaps[0] > 2 >= gaps[-1]
    assert len(warnings) == 1 and "telemetry.rollouts_limit_mib" in warnings[0]
    # Both groups of a step stay or go; the outcomes of tasks stay for every step.
    assert len(index(path)) == 2 * len(steps)
    outcomes = [record for record in read_records(path) if record["kind"] == "prompts"]
    assert [record["step"] for record in outcomes] == list(range(1, 101))


def test_a_step_that_is_too_large_alone_is_left_out(tmp_path: Path) -> None:
    file, warnings = open_file(tmp_path / "rollouts.jsonl", 500)
    file.groups(1, "train", [make_group("a", "y" * 1000)])
    assert index(tmp_path / "rollouts.jsonl") == [] and len(warnings) == 1
    file.groups(2, "train", [make_group("b")])
    assert [place.step for place in index(tmp_path / "rollouts.jsonl")] == [2]


def test_a_later_process_counts_what_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    earlier_file, _ = open_file(path, 10_000)
    earlier_file.groups(1, "train", [make_group("a", "y" * 9_000)])
    file, warnings = open_file(path, 10_000)
    file.groups(2, "train", [make_group("b", "y" * 5_000)])
    assert [place.step for place in index(path)] == [2] and warnings


# The second group is longer than the bytes that are looked at first.
@pytest.mark.parametrize("answer", ["4", "4" * 100_000])
def test_the_newest_group_is_read_from_the_end(answer: str, tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps({"kind": "group", "step": 1}) + "\n" + "x" * 100 + "\n")
    file, _ = open_file(path)
    file.groups(7, "validation", [make_group("r1", answer)])
    file.outcomes(8, {"trained": []})
    newest = newest_group(path)
    assert newest is not None and (newest["step"], newest["purpose"]) == (7, "validation")
