"""The GPUs that a process may use, as runs and `rlctl doctor` see them, and their load."""

import math
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.preflight.machine import read_machine
from rlctl.telemetry.resource_monitor import ResourceMonitor
from rlctl.utils.devices import count_gpus, usable_cores, utilization_meter, visible_gpus


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("", []),
        ("-1", []),
        ("0", ["0"]),
        ("2,5", ["2", "5"]),
        ("GPU-1a, GPU-2b", ["GPU-1a", "GPU-2b"]),
        ("3,-1,1", ["3"]),
    ],
)
def test_devices_that_are_hidden_are_not_used(monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (visible_gpus(), count_gpus()) == (names, len(names))


def test_devices_are_counted_by_the_drivers_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho '  MIG 1g: y'\necho 'GPU 1: B (UUID: z)'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    assert count_gpus() == 2


SMI = "0, GPU-1a2b, H200, 1024, 580.1\n1, GPU-3c4d, H200, 2048, 580.1\n3, GPU-5e6f, H200, 4096, 580.1\n"


@pytest.mark.parametrize(
    ("visible", "memories"),
    [
        (None, [1024, 2048]),
        ("", []),
        ("-1", []),
        ("0, 1", [1024, 2048]),
        ("3,-1,1", [4096]),
        ("3", [4096]),
        ("GPU-3c, GPU-1a2b", [1024, 2048]),
    ],
)
def test_the_machine_has_the_devices_that_runs_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, memories: list[int]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n[ $1 = -L ] && printf 'GPU 0: A\\nGPU 1: B\\n' || printf '{SMI}'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    gpus = read_machine(tmp_path).gpus
    assert [gpu.memory >> 20 for gpu in gpus] == memories
    assert len(gpus) == count_gpus()


def make_driver(use: dict[int, Any]) -> SimpleNamespace:
    """Return a driver's library. use: percent by index, or the error of reading it."""

    def read_rates(index: int) -> SimpleNamespace:
        if isinstance(use[index], Exception):
            raise use[index]
        return SimpleNamespace(gpu=use[index])

    return SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByIndex=lambda index: index, nvmlDeviceGetUtilizationRates=read_rates
    )


@pytest.mark.parametrize(
    ("driver", "visible", "share"),
    [
        (make_driver({0: 50, 1: 100}), "0,1", 0.75),
        (make_driver({0: 50, 1: RuntimeError("GPU is lost")}), "0,1", math.nan),
        (make_driver({}), "", math.nan),
        (None, "0", math.nan),
    ],
)
def test_use_that_cannot_be_told_is_left_out_and_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, driver: SimpleNamespace | None, visible: str, share: float
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert utilization_meter("cuda")() == pytest.approx(share, nan_ok=True)
    metrics = ResourceMonitor("cuda", {}).read()
    assert metrics["memory/driver_gib"] > 0
    assert ("device/utilization" in metrics) == (not math.isnan(share))


@pytest.fixture
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 4, 7})


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 3), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 3), ("", 3)]
)
def test_affinity_and_quota_both_bound_them(three_cores: None, tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path / "cpu.max") == cores


def test_without_control_groups_the_affinity_counts(three_cores: None, tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "cpu.max") == 3
