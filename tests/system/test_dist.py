"""`make dist` makes both files of a release, and its wheel works without the repository."""

import os
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def make_dist(folder: Path, dist: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "DIST": str(dist)}
    return subprocess.run(["make", "dist"], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_wheel_and_sdist_are_whole_and_the_wheel_works(tmp_path: Path) -> None:
    done = make_dist(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith("and the wheel works")
    (wheel,) = tmp_path.glob("*.whl")
    (sdist,) = tmp_path.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "rlctl/py.typed",
        "rlctl/share/configs/grpo.yaml",
        "rlctl/share/recipes/grpo-tiny.yaml",
        "rlctl/share/examples/README.md",
    } <= packed
    assert not any(name.startswith("tests/") for name in packed)
    with tarfile.open(sdist) as archive:
        sources = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", ".ci/run", ".ci/dist", "tests/conftest.py", "CHANGELOG.md", "LICENSE"} <= sources


def test_a_version_without_a_section_of_the_changelog_is_refused(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## ", "### "))
    done = make_dist(tmp_path, tmp_path / "dist")
    assert done.returncode == 2
    assert "CHANGELOG.md has no section for" in done.stdout
    assert not (tmp_path / "dist").exists()
