"""`rlctl export` writes a folder, and pushes it to the hub if it is told to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.unit.cli.conftest import Rlctl


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Replace pushes to the hub. Return the list to which each push is added as (repository, True if private)."""
    calls: list[tuple[str, bool]] = []

    class Hub:
        def create_repo(self, name: str, private: bool, exist_ok: bool) -> str:
            calls.append((name, private))
            return f"there/{name}"

        def upload_folder(self, **arguments: Any) -> None:
            assert Path(arguments["folder_path"]).is_dir()

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    save_file({"w": np.ones(3, np.float32)}, home / "model/model.safetensors")
    return calls


def test_a_folder_is_pushed_if_a_repository_is_named(rlctl: Rlctl, hub: list[tuple[str, bool]]) -> None:
    done = rlctl("export", "model", "out")
    assert (done.code, done.err, hub) == (0, "", [])
    assert done.out == "out: loads in transformers and vLLM; its README.md says what made it\n"
    done = rlctl("export", "model", "public", "--push", "me/sums")
    assert (done.code, done.out.splitlines()[-1]) == (0, "pushed to there/me/sums")
    assert rlctl("export", "model", "hidden", "--push", "me/sums", "--private").code == 0
    assert hub == [("me/sums", False), ("me/sums", True)]


def test_private_without_a_repository_is_bad_input_and_writes_nothing(rlctl: Rlctl, home: Path) -> None:
    done = rlctl("export", "model", "out", "--private")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: --private: needs --push OWNER/NAME")
    assert not (home / "out").exists()
