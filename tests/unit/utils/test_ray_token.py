"""Ray's token: one module knows its variables, and a process takes it from a file or from its environment."""

import os
from pathlib import Path

import pytest

import rlctl
from rlctl.utils import ray_token
from rlctl.utils.ray_token import new_token, token_here, use_token, write_token

NAMES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def test_no_other_module_names_the_variables_of_the_token() -> None:
    files = [path for path in Path(rlctl.__file__).parent.rglob("*.py") if "RAY_AUTH_TOKEN" in path.read_text()]
    assert files == [Path(ray_token.__file__)]


def test_a_process_uses_the_token_of_a_file_or_of_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "before")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    token = new_token()
    path = tmp_path / "token"
    write_token(path, token)
    use_token(None)
    assert [os.environ.get(name) for name in NAMES] == ["token", "before", None]
    assert (token_here(tmp_path / "none"), token_here(path)) == ("before", token)
    use_token(str(path))
    assert [os.environ.get(name) for name in NAMES] == ["token", None, str(path)]
