"""The files that are uploaded to a cluster with another file system."""

import base64
import io
import subprocess
import zipfile
from pathlib import Path

import pytest

from rlctl.cluster.jobs import upload
from rlctl.cluster.state import ClusterError


def names_in(package: str) -> set[str]:
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(package))) as archive:
        return set(archive.namelist())


def fill(home: Path, *files: str) -> None:
    for file in files:
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text(file)


def test_paths_below_the_working_directory_and_recipes_become_relative(tmp_path: Path) -> None:
    home = tmp_path / "home"
    recipes = tmp_path / "recipes"
    config = {
        "model": {"path": f"{recipes}/tiny/model"},
        "data": [f"{home}/data.jsonl", "/shared/other.jsonl", "organisation/name"],
        "rewards": [{"name": f"{home}/mine.py:brevity"}],
        "seed": 3,
    }
    assert upload.portable(config, [home, recipes]) == {
        "model": {"path": "tiny/model"},
        "data": ["data.jsonl", "/shared/other.jsonl", "organisation/name"],
        "rewards": [{"name": "mine.py:brevity"}],
        "seed": 3,
    }


def test_without_git_all_but_hidden_files_and_runs_travel(tmp_path: Path) -> None:
    fill(tmp_path, "a.yaml", "rewards/mine.py", ".secret", "runs/old/events.jsonl", "x/__pycache__/y.pyc")
    assert names_in(upload.pack(tmp_path, [])) == {"a.yaml", "rewards/mine.py"}


def test_with_git_what_it_ignores_travels_only_if_the_config_names_it(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    fill(tmp_path, "a.yaml", "data/train.jsonl", "data/other.jsonl", "new.py")
    (tmp_path / ".gitignore").write_text("data/\n")
    package = upload.pack(tmp_path, [tmp_path / "data" / "train.jsonl", Path("/elsewhere")])
    assert names_in(package) == {".gitignore", "a.yaml", "new.py", "data/train.jsonl"}
    assert "data/other.jsonl" in names_in(upload.pack(tmp_path, [tmp_path / "data"]))


def test_too_much_is_an_error_that_names_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, "small")
    (tmp_path / "weights.bin").write_bytes(bytes(3 << 20))
    monkeypatch.setattr(upload, "MOST_BYTES", 2 << 20)
    with pytest.raises(ClusterError, match=r"has 3 MiB to ship, at most 2: weights\.bin 3 MiB, small 0 MiB"):
        upload.pack(tmp_path, [])
