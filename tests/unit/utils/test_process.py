"""A process is known by its boot and the ticks since; a start-up collects garbage less often; modules run apart."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.cluster.remote_scripts.node import lives
from rlctl.utils.process import age_s, driver_lives, fewer_collections, identity, run_module, start_id
from tests.waiting import until


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "/tmp/rlctl-x/r", "--block"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def clock_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Set the clock forward, and return the seconds. The kernel then moves `btime`, which wall-clock starts rest on."""
    text = Path("/proc/stat").read_text()
    boot_time = int(text.partition("btime ")[2].split()[0])
    (tmp_path / "stat").write_text(text.replace(f"btime {boot_time}", f"btime {boot_time + 3}"))
    for name in ("self", str(os.getpid())):
        (tmp_path / name).symlink_to(f"/proc/{os.getpid()}")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    return 3.0


def test_a_clock_that_is_set_does_not_change_who_a_process_is(
    child: "subprocess.Popen[bytes]", tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    before = identity()
    wall = psutil.Process().create_time()
    node = {"folder": "/tmp/rlctl-x", "pid": child.pid, "start_id": start_id(child.pid)}
    step = request.getfixturevalue("clock_step")
    assert psutil.Process().create_time() == pytest.approx(wall + step, abs=0.5)
    assert identity() == before
    assert driver_lives(before) and lives(node)


def test_a_process_that_has_ended_is_nobody_even_before_it_is_reaped(child: "subprocess.Popen[bytes]") -> None:
    recorded = {"pid": child.pid, "start_id": start_id(child.pid)}
    assert driver_lives(recorded)
    child.kill()
    until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
    assert start_id(child.pid) == ""
    assert not driver_lives(recorded) and not lives({"folder": "/tmp/rlctl-x", **recorded})
    child.wait()
    assert start_id(child.pid) == ""


def test_a_node_of_an_earlier_version_is_known_by_the_folder_on_its_command_line(
    child: "subprocess.Popen[bytes]",
) -> None:
    until(lambda: "--block" in psutil.Process(child.pid).cmdline())
    recorded = {"pid": child.pid, "create_time": 1.0, "start_id": ""}
    assert lives({"folder": "/tmp/rlctl-x", **recorded})
    assert not lives({"folder": "/tmp/rlctl-y", **recorded})


@pytest.mark.parametrize("damage", [{"pid": None}, {"pid": "7"}, {"pid": 1e400}, {"pid": 10**30}, {"start_id": 7}])
def test_a_damaged_record_names_no_living_driver(damage: dict[str, object]) -> None:
    assert not driver_lives({**identity(), **damage})


def test_a_process_knows_its_age() -> None:
    program = "import time; time.sleep(0.5); from rlctl.utils.process import age_s; print(age_s())"
    began = time.monotonic()
    age = float(subprocess.check_output([sys.executable, "-c", program], text=True))
    assert 0.5 <= age <= time.monotonic() - began + 0.02
    assert age_s() > 0


def test_garbage_is_collected_less_often_within_the_block_and_as_before_after_it() -> None:
    threshold_of_suite = gc.get_threshold()
    before = (700, 10, 10)
    gc.set_threshold(*before)
    with pytest.raises(ValueError, match="as a start-up may"), fewer_collections():
        during = gc.get_threshold()
        assert gc.isenabled() and during[0] > 10 * before[0] and during[1:] == before[1:]
        raise ValueError("fails, as a start-up may")
    assert gc.get_threshold() == before
    gc.set_threshold(*threshold_of_suite)


def test_a_package_that_a_module_of_another_process_lacks_is_missing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Name the package, so that the command line can say what to install, as for an import of its own."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "needs_more.py").write_text("import sys\nprint(sys.argv[1])\nimport not_there.at_all\n")
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_there'$") as missing:
        run_module("needs_more", "1")
    assert missing.value.name == "not_there"
    (tmp_path / "broken.py").write_text("print('output')\n1 / 0\n")
    process = run_module("broken")
    assert (process.returncode, process.stdout) == (1, "output\n")
