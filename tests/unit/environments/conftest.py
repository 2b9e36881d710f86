"""Fixture that writes the file of an environment whose methods a test can make misbehave."""

from pathlib import Path

import pytest

from tests.unit.environments.pools import OWN


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file of the environment `Own` in the working directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file
