"""The folder of compiled code: private, one for each set of versions and devices, one of vLLM's for each living
engine."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlctl.preflight.doctor import check_kept_code
from rlctl.utils import code_cache
from rlctl.utils.code_cache import cache_root, forget_old_code, intruder, keep_code, kept_bytes

VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_FX_GRAPH_CACHE",
    "TORCHINDUCTOR_AUTOGRAD_CACHE",
)
SHOW = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {VARIABLES}}}), flush=True)"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "cache"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(code_cache, "_held", [])
    for name in VARIABLES:
        # Set, then removed: the test's own setting is undone too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return home / "rlctl"


def test_folders_are_the_users_alone_and_the_compilers_are_pointed_at_them(root: Path) -> None:
    keep_code(engine=True)
    [folder] = root.iterdir()
    assert cache_root() == root
    assert [path.stat().st_mode & 0o777 for path in (root, folder)] == [0o700, 0o700]
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert os.environ["VLLM_CACHE_ROOT"] == str(folder / "vllm-0")
    assert os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] == "1"


def test_a_variable_that_the_user_set_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_code()
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"
    assert "VLLM_CACHE_ROOT" not in os.environ


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_can_write_to_is_left_alone(
    root: Path, mode: int, capfd: pytest.CaptureFixture[str]
) -> None:
    root.mkdir()
    root.chmod(mode)
    keep_code()
    assert "TRITON_CACHE_DIR" not in os.environ
    assert f"is not kept: {root} can be written to by others" in capfd.readouterr().err
    assert check_kept_code().state == "warning"


def test_a_parent_that_others_can_change_is_as_bad_unless_it_is_sticky(root: Path) -> None:
    root.mkdir(mode=0o700)
    assert intruder(root) is None
    root.parent.chmod(0o777)
    assert intruder(root)
    root.parent.chmod(0o1777)
    assert intruder(root) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_another_users_folder_or_link_is_never_read(root: Path) -> None:
    root.mkdir(mode=0o700)
    os.chown(root, 12345, 12345)
    assert intruder(root) == f"{root} belongs to another user"
    keep_code()
    assert "TRITON_CACHE_DIR" not in os.environ
    root.rmdir()
    target = root.parent / "target"
    target.mkdir(mode=0o700)
    root.symlink_to(target)
    assert intruder(root) is None
    os.lchown(root, 12345, 12345)
    assert intruder(root)


def test_a_link_leads_to_a_folder_that_is_looked_at_too(root: Path) -> None:
    target = root.parent / "target"
    target.mkdir()
    target.chmod(0o777)
    root.symlink_to(target)
    assert intruder(root)


def test_each_living_engine_has_a_folder_of_its_own_and_the_next_run_finds_it_again(root: Path) -> None:
    program = f"from rlctl.utils.code_cache import keep_code; keep_code(engine=True); {SHOW}; input()"
    engines = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    variables = [json.loads(engine.stdout.readline()) for engine in engines if engine.stdout]
    for engine in engines:
        engine.communicate("\n")
    assert {Path(folders["VLLM_CACHE_ROOT"]).name for folders in variables} == {"vllm-0", "vllm-1"}
    assert variables[0]["TRITON_CACHE_DIR"] == variables[1]["TRITON_CACHE_DIR"]
    keep_code(engine=True)
    assert Path(os.environ["VLLM_CACHE_ROOT"]).name == "vllm-0"


def test_code_of_other_versions_goes_after_thirty_days(root: Path) -> None:
    keep_code()
    [current_folder] = root.iterdir()
    old_folder = root / "other"
    old_folder.mkdir()
    (old_folder / "used").touch()
    (old_folder / "code").write_bytes(b"x" * 1000)
    assert kept_bytes() >= 1000
    forget_old_code()
    assert old_folder.exists()
    last_use = time.time() - 31 * 24 * 3600
    os.utime(old_folder / "used", (last_use, last_use))
    forget_old_code()
    assert current_folder.exists() and not old_folder.exists()


def test_a_disk_that_is_full_or_read_only_ends_no_run(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root.write_text("a file, where the folder should be")
    keep_code()
    assert "is not kept" in capfd.readouterr().err
