"""Files go to their place, not where somebody's symbolic link points."""

import os
from pathlib import Path

import pytest

from rlctl.utils.files import Reserve, foreign_link, write_whole


def test_a_link_in_the_place_of_a_file_or_of_its_draft_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    for name in ("config.yaml", ".config.yaml.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_whole(tmp_path / "config.yaml", "new")
    assert victim.read_text() == "keep"
    assert not (tmp_path / "config.yaml").is_symlink()
    assert (tmp_path / "config.yaml").read_text() == "new"
    assert not (tmp_path / ".config.yaml.tmp").exists()


def test_what_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "taken", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.skipif(os.geteuid() != 0, reason="a link of another user needs root")
def test_a_link_of_another_user_is_found_anywhere_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "mine").symlink_to(tmp_path)
    (tmp_path / "theirs").symlink_to(tmp_path)
    os.lchown(tmp_path / "theirs", 65534, 65534)
    assert foreign_link(tmp_path / "mine" / "runs") is None
    assert foreign_link(tmp_path / "theirs" / "runs" / "x.yaml") == tmp_path / "theirs"


def test_a_reserve_gives_its_room_back_once(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "room", 1 << 16)
    assert (tmp_path / "room").stat().st_size == 1 << 16
    reserve.release()
    reserve.release()
    assert list(tmp_path.iterdir()) == []
