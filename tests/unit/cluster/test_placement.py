"""Which device each part stands on."""

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlctl.cluster.placement import count_gpus, place

few = st.integers(1, 6)


@given(st.integers(1, 24), few, few, few, st.booleans())
def test_every_part_has_devices_of_its_own_or_the_error_says_how_many_are_needed(
    gpus: int, ranks: int, engines: int, tensor_parallel_size: int, colocated: bool
) -> None:
    wanted = engines * tensor_parallel_size
    needed = max(ranks, wanted) if colocated else ranks + wanted
    if needed > gpus:
        with pytest.raises(ValueError, match=f"^{needed} GPUs needed, .* this machine has {gpus}$"):
            place(gpus, ranks, engines, tensor_parallel_size, colocated)
        return
    placement = place(gpus, ranks, engines, tensor_parallel_size, colocated)
    trained = [device for rank in placement.trainers for device in rank]
    sampled = [device for engine in placement.engines for device in engine]
    assert [len(engine) for engine in placement.engines] == [tensor_parallel_size] * engines
    assert len(set(trained)) == len(trained) == ranks == placement.trainer_devices
    assert len(set(sampled)) == len(sampled) == wanted == placement.generator_devices
    assert {*trained, *sampled} == set(range(needed))
    assert placement.all_devices == needed
    assert placement.shared == colocated


def test_on_a_cpu_everything_shares_the_one_machine() -> None:
    placement = place(0, ranks=2, engines=3, tensor_parallel_size=1, colocated=False)
    assert (placement.device, placement.shared) == ("cpu", True)
    assert (len(placement.trainers), len(placement.engines)) == (2, 3)
    assert (placement.trainer_devices, placement.generator_devices, placement.all_devices) == (1, 1, 1)


def test_colocated_engines_take_the_trainers_devices() -> None:
    placement = place(4, ranks=4, engines=2, tensor_parallel_size=2, colocated=True)
    assert placement.trainers == [[0], [1], [2], [3]]
    assert placement.engines == [[0, 1], [2, 3]]
    assert (placement.shared, placement.all_devices) == (True, 4)


def test_engines_apart_stand_behind_the_trainers() -> None:
    placement = place(8, ranks=4, engines=2, tensor_parallel_size=2, colocated=False)
    assert placement.engines == [[4, 5], [6, 7]]
    assert (placement.trainer_devices, placement.generator_devices, placement.all_devices) == (4, 4, 8)


def test_too_few_devices_are_an_error_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"6 GPUs needed, apart for 2 trainer ranks and 2 engines x 2 .* has 4"):
        place(4, ranks=2, engines=2, tensor_parallel_size=2, colocated=False)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), ("0", 1), ("2,5", 2), ("GPU-1a, GPU-2b", 2)])
def test_devices_that_are_hidden_do_not_count(monkeypatch: pytest.MonkeyPatch, visible: str, count: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert count_gpus() == count


def test_devices_are_counted_by_the_drivers_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert count_gpus() == 0
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho '  MIG 1g: y'\necho 'GPU 1: B (UUID: z)'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    assert count_gpus() == 2
