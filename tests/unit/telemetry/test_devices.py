"""Which GPUs a process may use."""

import os
import stat
from pathlib import Path

import pytest

from rlctl.telemetry.devices import count_gpus, visible_gpus


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
