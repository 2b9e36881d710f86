"""A checkpoint that was damaged in any way is named in one line, and the newest whole one before it is used."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rlctl.run import file_manifest as manifest
from rlctl.run.checkpoints import Checkpoints, NoWholeCheckpoint
from rlctl.utils import digests

SHARD = "trainer/shard-00001.safetensors"


def write_parts(folder: Path) -> None:
    """Write the parts of a GRPO checkpoint: shards, waiting groups, an export."""
    for name in ("trainer", "hf"):
        (folder / name).mkdir()
    for number in (1, 2):
        save_file({"weight": torch.arange(4096.0)}, folder / f"trainer/shard-0000{number}.safetensors")
    save_file({"weight": torch.arange(64.0)}, folder / "hf/model.safetensors")
    np.savez(folder / "groups.npz", tokens=np.arange(100))
    (folder / "groups.json").write_text(json.dumps({"17": [{"value": 1.0, "right": True}] * 8}))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    """Return the checkpoints of steps 2 and 4."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=3, keep_best=0)
    for step in (2, 4):
        checkpoints.save(step, {"cursor": {"row": step}}, write_parts)
    return checkpoints


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 64)
        file.write(b"\xff\xff\xff\xff")


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def write_deep_json(path: Path) -> None:
    path.write_text("[" * 100_000)


def write_infinite_size(path: Path) -> None:
    path.write_text('{"files": {"state.json": {"bytes": 1e400, "digest": ""}}}')


def write_empty_list(path: Path) -> None:
    path.write_text("[]")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (SHARD, overwrite, "its bytes are not those that were written"),
        (SHARD, halve, r"cut to 8,\d+ of 16,\d+ bytes"),
        (SHARD, empty, r"empty, of 16,\d+ bytes"),
        (SHARD, grow, "grown from"),
        (SHARD, Path.unlink, "missing"),
        ("state.json", halve, "cut to"),
        ("state.json", empty, "empty, of"),
        ("state.json", Path.unlink, "missing"),
        ("groups.npz", halve, "cut to"),
        ("groups.json", overwrite, "its bytes"),
        ("manifest.json", Path.unlink, "missing"),
        ("manifest.json", halve, "cannot be read"),
        ("manifest.json", write_empty_list, "it lists no files"),
        ("manifest.json", write_deep_json, "cannot be read"),
        ("manifest.json", write_infinite_size, "it lists no files"),
        ("trainer/shard-00003.safetensors", write_empty_list, "not written with this checkpoint"),
    ],
)
def test_damage_is_one_line_with_the_path_and_the_one_before_is_used(
    checkpoints: Checkpoints, tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    newest = tmp_path / "checkpoints/step_4"
    damage(newest / name)
    search = checkpoints.newest_whole()
    assert search.checkpoint is not None and (search.checkpoint.step, search.notes) == (2, [])
    line = search.damaged[newest]
    assert line.startswith(f"{newest / name}: ") and "\n" not in line
    assert re.search(message, line), line


def test_what_was_not_hurt_is_used_and_nothing_is_said(checkpoints: Checkpoints) -> None:
    search = checkpoints.newest_whole()
    assert search.checkpoint is not None and search.checkpoint.state["cursor"] == {"row": 4}
    assert (search.damaged, search.notes) == ({}, [])


def test_a_state_that_no_parser_takes_is_no_checkpoint(checkpoints: Checkpoints, tmp_path: Path) -> None:
    write_deep_json(tmp_path / "checkpoints/step_4/state.json")
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2]


def test_the_newest_state_as_it_was_written_is_found_without_reading_another_file(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    newest = tmp_path / "checkpoints/step_4"
    overwrite(newest / SHARD)
    latest = checkpoints.latest_as_written()
    assert latest is not None and latest.step == 4
    state = newest / "state.json"
    state.write_text(state.read_text().replace('"row": 4', '"row": 5'))
    latest = checkpoints.latest_as_written()
    assert latest is not None and latest.step == 2
    for folder in (newest, tmp_path / "checkpoints/step_2"):
        (folder / "manifest.json").unlink()
    assert checkpoints.latest_as_written() is None


def test_a_damaged_export_is_said_but_a_resume_does_not_read_it(checkpoints: Checkpoints, tmp_path: Path) -> None:
    overwrite(tmp_path / "checkpoints/step_4/hf/model.safetensors")
    search = checkpoints.newest_whole()
    assert search.checkpoint is not None and (search.checkpoint.step, search.damaged) == (4, {})
    assert "hf/model.safetensors: its bytes are not those that were written; the export alone" in search.notes[0]


def test_if_none_is_whole_one_line_names_them_all(checkpoints: Checkpoints, tmp_path: Path) -> None:
    halve(tmp_path / "checkpoints/step_4/state.json")
    overwrite(tmp_path / "checkpoints/step_2" / SHARD)
    (tmp_path / "checkpoints/step_2/trainer/shard-00002.safetensors").unlink()
    with pytest.raises(NoWholeCheckpoint) as refusal:
        checkpoints.newest_whole()
    assert "\n" not in str(refusal.value)
    for part in ("step_4/state.json: cut to", "shard-00002.safetensors: missing (and 1 more)", "no whole checkpoint"):
        assert part in str(refusal.value)


def test_what_else_lies_in_the_folder_is_named_and_left_alone(checkpoints: Checkpoints, tmp_path: Path) -> None:
    for name in ("step_x", "step_4_copy"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints/step_9").write_text("a file")
    search = checkpoints.newest_whole()
    assert search.checkpoint is not None and (search.checkpoint.step, search.damaged) == (4, {})
    assert len(search.notes) == 3 and all("no checkpoint of rlctl" in note for note in search.notes)
    assert [checkpoint.step for checkpoint in checkpoints.all()] == [2, 4]


def test_a_folder_renamed_to_another_step_is_not_that_step(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_4").rename(tmp_path / "checkpoints/step_6")
    search = checkpoints.newest_whole()
    assert search.checkpoint is not None and search.checkpoint.step == 2
    assert "state.json: not the state of step 6" in search.damaged[tmp_path / "checkpoints/step_6"]


def test_a_damaged_one_set_aside_counts_for_nothing_and_goes_once_the_run_has_passed_it(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    overwrite(tmp_path / "checkpoints/step_4" / SHARD)
    for path in checkpoints.newest_whole().damaged:
        checkpoints.set_aside(path)
    checkpoints.save(3, {}, write_parts)
    assert list_names(tmp_path / "checkpoints") == ["damaged_step_4", "step_2", "step_3"]
    checkpoints.save(4, {}, write_parts)
    assert list_names(tmp_path / "checkpoints") == ["step_2", "step_3", "step_4"]


def test_a_file_of_many_pieces_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE", 1 << 12)
    monkeypatch.setattr(digests, "_READ", 1 << 10)
    file = tmp_path / "file"
    original = np.random.default_rng(0).bytes(50_000)
    file.write_bytes(original)
    manifest.write_manifest(tmp_path)
    assert manifest.find_damage(tmp_path) == {}
    for position in (0, 4095, 4096, 25_000, 49_999):
        damaged = bytearray(original)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        assert list(manifest.find_damage(tmp_path)) == [file], position


def test_the_manifest_names_every_file(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step_4"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert listed.keys() == written - {"manifest.json"}


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
