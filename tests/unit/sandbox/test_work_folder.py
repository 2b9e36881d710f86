"""Files of a program are read and removed without following anything that the program left."""

import os
from pathlib import Path

import pytest

from rlctl.sandbox import work_folder
from rlctl.sandbox.work_folder import WorkFolder


@pytest.fixture
def folder() -> WorkFolder:
    return WorkFolder(None, None)


def test_only_plain_files_are_read(folder: WorkFolder, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder.write({"plain": b"abc", "inner/plain": b"def"})
    (folder.work / "link").symlink_to(secret)
    (folder.work / "folder-link").symlink_to(tmp_path)
    os.mkfifo(folder.work / "pipe")
    names = ("plain", "inner/plain", "link", "folder-link/secret", "pipe", "inner", "none")
    files, missing = folder.read(names, 100)
    assert files == {"plain": b"abc", "inner/plain": b"def"}
    assert list(missing) == ["link", "folder-link/secret", "pipe", "inner", "none"]
    files, missing = folder.read(("plain", "inner/plain"), 5)
    assert list(files) == ["plain"]
    assert missing == {"inner/plain": "more than 5 bytes with the files before it"}
    folder.remove()


def test_writing_goes_through_no_link(folder: WorkFolder, tmp_path: Path) -> None:
    (folder.work / "out").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        folder.write({"out/file": b"x"})
    (folder.work / "file").symlink_to(tmp_path / "file")
    folder.write({"file": b"x"})
    assert list(tmp_path.iterdir()) == []
    folder.remove()


def test_too_many_bytes_or_files_are_noticed(folder: WorkFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write({"f": b"x" * 100_000})
    assert not folder.exceeds(1 << 20)
    assert folder.exceeds(50_000)
    monkeypatch.setattr(work_folder, "MOST_FILES", 20)
    for number in range(20):
        os.mkdir(folder.temporary / str(number))
    assert folder.exceeds(1 << 30)
    folder.remove()


def test_a_deep_tree_without_permissions_is_removed(folder: WorkFolder) -> None:
    descriptor = os.open(folder.work, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    # A path has at most 4,096 bytes.
    assert not folder.exceeds(1 << 30)
    (folder.work / "locked").mkdir(mode=0)
    folder.remove()
    assert not folder.work.exists()
