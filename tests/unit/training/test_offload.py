"""Offloaded tensors free their device memory, are in one host buffer meanwhile, and come back without a changed bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlctl.preflight.memory import PHASES, Residency
from rlctl.training import offload
from rlctl.training.offload import OffloadedTensors, OffloadManager


def make_tensors() -> list[Tensor]:
    """Return tensors of several shapes and dtypes. The second is a view of the first, the fourth is empty."""
    flat = torch.arange(1000.0)
    return [flat, flat[3:7], torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(), torch.empty(0), torch.tensor(2.5)]


ALL_BYTES = 4000 + 12 + 4


def device_bytes(tensors: list[Tensor]) -> int:
    """Return the bytes of memory that the tensors use. Memory that several tensors share counts once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@pytest.fixture
def table() -> Residency:
    """Return the table of a run whose optimizer state is on the host in the phase log_probs and nowhere else."""
    return {
        phase: {"parameters": "device", "gradients": "none", "optimizer": "host" if phase == "log_probs" else "device"}
        for phase in PHASES
    }


@pytest.fixture
def move_everything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Offload tensors of a CPU trainer too, which are normally left in host memory."""
    monkeypatch.setattr(offload, "select_movable", list)
    yield


def test_frozen_tensors_are_copied_to_the_host_once_and_come_back_each_time() -> None:
    tensors = make_tensors()
    before = [tensor.clone() for tensor in tensors]
    offloaded = OffloadedTensors(tensors, frozen=True)
    copied = []
    for _ in range(3):
        copied.append(offloaded.move("host"))
        assert device_bytes(tensors) == 0
        copied.append(offloaded.move("device"))
        offloaded.wait()
        assert all(torch.equal(tensor, expected) for tensor, expected in zip(tensors, before))
    assert copied == [ALL_BYTES, ALL_BYTES, 0, ALL_BYTES, 0, ALL_BYTES]


def test_a_way_out_frees_the_device_and_the_way_back_brings_every_bit() -> None:
    tensors = make_tensors()
    offloaded = OffloadedTensors(tensors)
    assert offloaded.nbytes == device_bytes(tensors) == ALL_BYTES
    for _ in range(2):
        assert offloaded.move("host") == ALL_BYTES
        assert (device_bytes(tensors), offloaded.place) == (0, "host")
        assert offloaded.move("device") == ALL_BYTES
        offloaded.wait()
        assert all(torch.equal(tensor, expected) for tensor, expected in zip(tensors, make_tensors()))


def test_who_is_there_already_does_not_move() -> None:
    offloaded = OffloadedTensors(make_tensors())
    assert offloaded.move("device") == 0
    offloaded.move("host")
    assert offloaded.move("host") == 0


def test_the_host_buffer_is_made_once() -> None:
    tensors = make_tensors()
    offloaded = OffloadedTensors(tensors)
    places = []
    for _ in range(3):
        offloaded.move("host")
        offloaded.settle()
        places.append(offloaded.at_hand(tensors[0]).data_ptr())
        offloaded.move("device")
    assert len(set(places)) == 1


def test_what_is_away_is_at_hand_on_the_host_to_read_and_to_write() -> None:
    tensors = make_tensors()
    stranger = torch.ones(2)
    offloaded = OffloadedTensors(tensors)
    assert all(offloaded.at_hand(tensor) is tensor for tensor in tensors)
    offloaded.move("host")
    offloaded.settle()
    assert all(torch.equal(offloaded.at_hand(tensor), expected) for tensor, expected in zip(tensors, make_tensors()))
    assert offloaded.at_hand(stranger) is stranger
    offloaded.at_hand(tensors[1]).fill_(-1)
    offloaded.move("device")
    assert tensors[0][2:8].tolist() == [2, -1, -1, -1, -1, 7]


def test_what_was_nowhere_comes_back_as_zeros() -> None:
    tensors = make_tensors()
    offloaded = OffloadedTensors(tensors)
    assert offloaded.move("none") == 0 and device_bytes(tensors) == 0
    assert offloaded.move("device") == 0 and device_bytes(tensors) == ALL_BYTES
    assert all(not tensor.any() for tensor in tensors)


def test_nothing_to_move_is_fine() -> None:
    offloaded = OffloadedTensors([])
    assert offloaded.move("host") == offloaded.move("device") == offloaded.nbytes == 0


@pytest.mark.usefixtures("move_everything")
def test_a_phase_moves_what_the_table_says_and_counts_it(table: Residency) -> None:
    tensors = make_tensors()
    offload_manager = OffloadManager(table, {"optimizer": tensors})
    for phase in ("generate", "log_probs", "log_probs", "train", "refit", "checkpoint", "log_probs"):
        offload_manager.enter(phase)  # type: ignore[arg-type]
    assert device_bytes(tensors) == 0
    moved_bytes = {phase: (moved["to_host"], moved["to_device"]) for phase, moved in offload_manager.moved.items()}
    assert moved_bytes.pop("log_probs") == (2 * ALL_BYTES, 0)
    assert moved_bytes.pop("train") == (0, ALL_BYTES)
    assert set(moved_bytes.values()) == {(0, 0)}
    assert offload_manager.totals() == {"moved_to_host": 2 * ALL_BYTES, "moved_to_device": ALL_BYTES}
    metrics = offload_manager.take_metrics()
    assert metrics["offload/to_host_gb"] == 2 * ALL_BYTES / 1e9
    assert metrics["offload/to_device_gb"] == ALL_BYTES / 1e9
    assert 0 < metrics["offload/seconds"] < 1
    # Each move is reported once.
    assert offload_manager.take_metrics() == {}
    offload_manager.settle()
    assert torch.equal(offload_manager.at_hand(tensors[0]), make_tensors()[0])


def test_what_stands_in_host_memory_anyway_stays(table: Residency) -> None:
    tensors = make_tensors()
    offload_manager = OffloadManager(table, {"optimizer": tensors})
    offload_manager.enter("log_probs")
    assert device_bytes(tensors) == ALL_BYTES and offload_manager.totals() == {"moved_to_host": 0, "moved_to_device": 0}
    assert offload_manager.take_metrics() == {}
    assert offload_manager.at_hand(tensors[0]) is tensors[0]
