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


def write(folder: Path) -> None:
    """The parts of a GRPO checkpoint: shards, waiting groups, an export."""
    for name in ("trainer", "hf"):
        (folder / name).mkdir()
    for number in (1, 2):
        save_file({"weight": torch.arange(4096.0)}, folder / f"trainer/shard-0000{number}.safetensors")
    save_file({"weight": torch.arange(64.0)}, folder / "hf/model.safetensors")
    np.savez(folder / "groups.npz", tokens=np.arange(100))
    (folder / "groups.json").write_text(json.dumps({"17": [{"value": 1.0, "right": True}] * 8}))


@pytest.fixture
def kept(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=3, keep_best=0)
    for step in (2, 4):
        checkpoints.save(step, {"cursor": {"row": step}}, write)
    return checkpoints


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 64)
        file.write(b"\xff\xff\xff\xff")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def too_large(path: Path) -> None:
    path.write_text('{"files": {"state.json": {"bytes": 1e400, "digest": ""}}}')


def lists_nothing(path: Path) -> None:
    path.write_text("[]")


@pytest.mark.parametrize(
    ("name", "hurt", "what"),
    [
        (SHARD, overwrite, "its bytes are not those that were written"),
        (SHARD, cut, r"cut to 8,\d+ of 16,\d+ bytes"),
        (SHARD, empty, r"empty, of 16,\d+ bytes"),
        (SHARD, grow, "grown from"),
        (SHARD, Path.unlink, "missing"),
        ("state.json", cut, "cut to"),
        ("state.json", empty, "empty, of"),
        ("state.json", Path.unlink, "missing"),
        ("groups.npz", cut, "cut to"),
        ("groups.json", overwrite, "its bytes"),
        ("manifest.json", Path.unlink, "missing"),
        ("manifest.json", cut, "cannot be read"),
        ("manifest.json", lists_nothing, "it lists no files"),
        ("manifest.json", nested, "cannot be read"),
        ("manifest.json", too_large, "it lists no files"),
        ("trainer/shard-00003.safetensors", lists_nothing, "not written with this checkpoint"),
    ],
)
def test_damage_is_one_line_with_the_path_and_the_one_before_is_used(
    kept: Checkpoints, tmp_path: Path, name: str, hurt: Callable[[Path], None], what: str
) -> None:
    newest = tmp_path / "checkpoints/step_4"
    hurt(newest / name)
    found = kept.newest_whole()
    assert found.checkpoint is not None and (found.checkpoint.step, found.notes) == (2, [])
    line = found.damaged[newest]
    assert line.startswith(f"{newest / name}: ") and "\n" not in line
    assert re.search(what, line), line


def test_what_was_not_hurt_is_used_and_nothing_is_said(kept: Checkpoints) -> None:
    found = kept.newest_whole()
    assert found.checkpoint is not None and found.checkpoint.state["cursor"] == {"row": 4}
    assert (found.damaged, found.notes) == ({}, [])


def test_a_state_that_no_parser_takes_is_no_checkpoint(kept: Checkpoints, tmp_path: Path) -> None:
    nested(tmp_path / "checkpoints/step_4/state.json")
    assert [checkpoint.step for checkpoint in kept.all()] == [2]


def test_the_newest_state_as_it_was_written_is_found_without_reading_another_file(
    kept: Checkpoints, tmp_path: Path
) -> None:
    newest = tmp_path / "checkpoints/step_4"
    overwrite(newest / SHARD)
    latest = kept.latest_as_written()
    assert latest is not None and latest.step == 4
    state = newest / "state.json"
    state.write_text(state.read_text().replace('"row": 4', '"row": 5'))
    latest = kept.latest_as_written()
    assert latest is not None and latest.step == 2
    for path in newest, tmp_path / "checkpoints/step_2":
        (path / "manifest.json").unlink()
    assert kept.latest_as_written() is None


def test_a_damaged_export_is_said_but_a_resume_does_not_read_it(kept: Checkpoints, tmp_path: Path) -> None:
    overwrite(tmp_path / "checkpoints/step_4/hf/model.safetensors")
    found = kept.newest_whole()
    assert found.checkpoint is not None and (found.checkpoint.step, found.damaged) == (4, {})
    assert "hf/model.safetensors: its bytes are not those that were written; the export alone" in found.notes[0]


def test_if_none_is_whole_one_line_names_them_all(kept: Checkpoints, tmp_path: Path) -> None:
    cut(tmp_path / "checkpoints/step_4/state.json")
    overwrite(tmp_path / "checkpoints/step_2" / SHARD)
    (tmp_path / "checkpoints/step_2/trainer/shard-00002.safetensors").unlink()
    with pytest.raises(NoWholeCheckpoint) as refusal:
        kept.newest_whole()
    assert "\n" not in str(refusal.value)
    for part in ("step_4/state.json: cut to", "shard-00002.safetensors: missing (and 1 more)", "no whole checkpoint"):
        assert part in str(refusal.value)


def test_what_else_lies_in_the_folder_is_named_and_left_alone(kept: Checkpoints, tmp_path: Path) -> None:
    for name in ("step_x", "step_4_copy"):
        (tmp_path / "checkpoints" / name).mkdir()
    (tmp_path / "checkpoints/step_9").write_text("a file")
    found = kept.newest_whole()
    assert found.checkpoint is not None and (found.checkpoint.step, found.damaged) == (4, {})
    assert len(found.notes) == 3 and all("no checkpoint of rlctl" in note for note in found.notes)
    assert [checkpoint.step for checkpoint in kept.all()] == [2, 4]


def test_a_folder_renamed_to_another_step_is_not_that_step(kept: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_4").rename(tmp_path / "checkpoints/step_6")
    found = kept.newest_whole()
    assert found.checkpoint is not None and found.checkpoint.step == 2
    assert "state.json: not the state of step 6" in found.damaged[tmp_path / "checkpoints/step_6"]


def test_a_damaged_one_set_aside_counts_for_nothing_and_goes_once_the_run_has_passed_it(
    kept: Checkpoints, tmp_path: Path
) -> None:
    overwrite(tmp_path / "checkpoints/step_4" / SHARD)
    for path in kept.newest_whole().damaged:
        kept.set_aside(path)
    kept.save(3, {}, write)
    assert names(tmp_path) == ["damaged_step_4", "step_2", "step_3"]
    kept.save(4, {}, write)
    assert names(tmp_path) == ["step_2", "step_3", "step_4"]


def test_a_file_of_many_pieces_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE", 1 << 12)
    monkeypatch.setattr(digests, "_READ", 1 << 10)
    (tmp_path / "file").write_bytes(np.random.default_rng(0).bytes(50_000))
    manifest.write_manifest(tmp_path)
    assert manifest.find_damage(tmp_path) == {}
    whole = (tmp_path / "file").read_bytes()
    for position in (0, 4095, 4096, 25_000, 49_999):
        (tmp_path / "file").write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert list(manifest.find_damage(tmp_path)) == [tmp_path / "file"], position


def test_the_manifest_names_every_file(kept: Checkpoints, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints/step_4"
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert listed.keys() == there - {"manifest.json"}


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
