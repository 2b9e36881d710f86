"""Tensors leave their memory, come back bit by bit, and lie in one host buffer meanwhile."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rlctl.preflight.memory import PHASES, Residency
from rlctl.training import offload
from rlctl.training.offload import OffloadedTensors, OffloadManager


def tensors() -> list[Tensor]:
    """Make tensors of several shapes and dtypes, one a view of another, one empty."""
    flat = torch.arange(1000.0)
    return [flat, flat[3:7], torch.arange(6, dtype=torch.bfloat16).view(2, 3).t(), torch.empty(0), torch.tensor(2.5)]


OWN_BYTES = 4000 + 12 + 4


def held(mine: list[Tensor]) -> int:
    """Bytes of device memory, views counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in mine}.values())


@pytest.fixture
def table() -> Residency:
    """Out for log-probs alone."""
    return {
        phase: {"parameters": "device", "gradients": "none", "optimizer": "host" if phase == "log_probs" else "device"}
        for phase in PHASES
    }


@pytest.fixture
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Even the state of a CPU trainer."""
    monkeypatch.setattr(offload, "_select_movable", list)
    yield


def test_a_way_out_frees_the_device_and_the_way_back_brings_every_bit() -> None:
    mine, expected = tensors(), tensors()
    offloaded = OffloadedTensors(mine)
    assert offloaded.nbytes == held(mine) == OWN_BYTES
    for _ in range(2):
        assert offloaded.move("host") == OWN_BYTES
        assert (held(mine), offloaded.place) == (0, "host")
        assert offloaded.move("device") == OWN_BYTES
        offloaded.wait()
        assert all(torch.equal(a, b) for a, b in zip(mine, expected))


def test_who_is_there_already_does_not_move() -> None:
    offloaded = OffloadedTensors(tensors())
    assert offloaded.move("device") == 0
    offloaded.move("host")
    assert offloaded.move("host") == 0


def test_the_host_buffer_is_made_once() -> None:
    mine = tensors()
    offloaded = OffloadedTensors(mine)
    places = []
    for _ in range(3):
        offloaded.move("host")
        offloaded.settle()
        places.append(offloaded.at_hand(mine[0]).data_ptr())
        offloaded.move("device")
    assert len(set(places)) == 1


def test_what_is_away_is_at_hand_on_the_host_to_read_and_to_write() -> None:
    mine, expected, stranger = tensors(), tensors(), torch.ones(2)
    offloaded = OffloadedTensors(mine)
    assert all(offloaded.at_hand(t) is t for t in mine)
    offloaded.move("host")
    offloaded.settle()
    assert all(torch.equal(offloaded.at_hand(a), b) for a, b in zip(mine, expected))
    assert offloaded.at_hand(stranger) is stranger
    offloaded.at_hand(mine[1]).fill_(-1)
    offloaded.move("device")
    assert mine[0][2:8].tolist() == [2, -1, -1, -1, -1, 7]


def test_what_was_nowhere_comes_back_as_zeros() -> None:
    mine = tensors()
    offloaded = OffloadedTensors(mine)
    assert offloaded.move("none") == 0 and held(mine) == 0
    assert offloaded.move("device") == 0 and held(mine) == OWN_BYTES
    assert all(not t.any() for t in mine)


def test_nothing_to_move_is_fine() -> None:
    offloaded = OffloadedTensors([])
    assert offloaded.move("host") == offloaded.move("device") == offloaded.nbytes == 0


@pytest.mark.usefixtures("everything_moves")
def test_a_phase_moves_what_the_table_says_and_counts_it(table: Residency) -> None:
    mine = tensors()
    offload_manager = OffloadManager(table, {"optimizer": mine})
    for phase in ("generate", "log_probs", "log_probs", "train", "refit", "checkpoint", "log_probs"):
        offload_manager.enter(phase)  # type: ignore[arg-type]
    assert held(mine) == 0
    ways = {phase: (each["to_host"], each["to_device"]) for phase, each in offload_manager.moved.items()}
    assert ways.pop("log_probs") == (2 * OWN_BYTES, 0)
    assert ways.pop("train") == (0, OWN_BYTES)
    assert set(ways.values()) == {(0, 0)}
    assert offload_manager.totals() == {"moved_to_host": 2 * OWN_BYTES, "moved_to_device": OWN_BYTES}
    told = offload_manager.take_metrics()
    assert (told["offload/to_host_gb"], told["offload/to_device_gb"]) == (2 * OWN_BYTES / 1e9, OWN_BYTES / 1e9)
    assert 0 < told["offload/seconds"] < 1
    # Each move is told once.
    assert offload_manager.take_metrics() == {}
    offload_manager.settle()
    assert torch.equal(offload_manager.at_hand(mine[0]), tensors()[0])


def test_what_stands_in_host_memory_anyway_stays(table: Residency) -> None:
    mine = tensors()
    offload_manager = OffloadManager(table, {"optimizer": mine})
    offload_manager.enter("log_probs")
    assert held(mine) == OWN_BYTES and offload_manager.totals() == {"moved_to_host": 0, "moved_to_device": 0}
    assert offload_manager.take_metrics() == {}
    assert offload_manager.at_hand(mine[0]) is mine[0]
