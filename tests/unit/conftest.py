from pathlib import Path

import pytest

from tests.unit import folders


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, filled by `folders.write`."""
    monkeypatch.chdir(folders.write(tmp_path / "home"))
    return tmp_path / "home"
