"""Weights through files in memory: the sent weights arrive, or an error with its cause."""

import subprocess
from pathlib import Path

import pytest
import torch

from rlctl.refit.pipeline import ChunkReceiver, ChunkSender
from rlctl.refit.protocol import Header, PeerLost, RefitError, TransportSpec
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.transport import open_receiver, open_sender
from rlctl.refit.weight_sink import WholeTensorSink
from rlctl.refit.weight_source import WeightSource
from tests.unit.refit.weights import CPU, make_weights, plan_for, source_of


def make_spec(folder: Path, timeout_s: float = 1.0) -> TransportSpec:
    return TransportSpec("shm", 1, timeout_s, folder=str(folder))


def make_sender(spec: TransportSpec, source: WeightSource) -> ChunkSender:
    return open_sender(spec, source, CPU)


def make_receiver(plan: RefitPlan, folder: Path) -> ChunkReceiver:
    return open_receiver(make_spec(folder), plan, 1, CPU)


def make_header(plan: RefitPlan, version: int) -> Header:
    return Header(version, plan.digest, "all")


@pytest.mark.parametrize("world", [1, 3])
def test_every_dtype_and_shape_arrives_bit_for_bit_from_every_rank(tmp_path: Path, world: int) -> None:
    weights = make_weights()
    plan = plan_for(weights, world)
    senders = [make_sender(make_spec(tmp_path), source_of(plan, weights, rank, world)) for rank in range(world)]
    receiver = make_receiver(plan, tmp_path)
    sink = WholeTensorSink(plan, CPU)
    for version in (3, 4, 5):
        for name, tensor in make_weights(version).items():
            weights[name].copy_(tensor)
        reports = [sender.send(make_header(plan, version)) for sender in senders]
        assert sum(report.bytes for report in reports) == plan.payload
        receiver.receive(make_header(plan, version), sink)
        received = dict(sink.tensors())
        assert [*received] == [*weights]
        for name, tensor in make_weights(version).items():
            assert received[name].dtype == tensor.dtype
            assert torch.equal(received[name], tensor)
    assert sink.extra_bytes == 0
    receiver.close()
    for sender in senders:
        sender.close()
    assert list(tmp_path.iterdir()) == []


def test_weights_travel_in_the_dtype_of_the_plan(tmp_path: Path) -> None:
    weights = {"w": torch.randn(5, 7)}
    plan = RefitPlan.build([("w", (5, 7), "bfloat16")])
    make_sender(make_spec(tmp_path), source_of(plan, weights)).send(make_header(plan, 1))
    sink = WholeTensorSink(plan, CPU)
    make_receiver(plan, tmp_path).receive(make_header(plan, 1), sink)
    assert torch.equal(dict(sink.tensors())["w"], weights["w"].bfloat16())


def test_a_version_stays_readable_until_the_next_but_one(tmp_path: Path) -> None:
    weights = make_weights()
    plan = plan_for(weights)
    sender = make_sender(make_spec(tmp_path), source_of(plan, weights))
    for version in (1, 2):
        sender.send(make_header(plan, version))
    make_receiver(plan, tmp_path).receive(make_header(plan, 1), WholeTensorSink(plan, CPU))
    sender.send(make_header(plan, 3))
    with pytest.raises(RefitError, match="expected version 1: the part of trainer rank 0 holds version 3"):
        make_receiver(plan, tmp_path).receive(make_header(plan, 1), WholeTensorSink(plan, CPU))


def test_a_part_that_a_rank_has_not_written_is_named(tmp_path: Path) -> None:
    weights = make_weights()
    plan = plan_for(weights, 2)
    senders = [make_sender(make_spec(tmp_path), source_of(plan, weights, rank, 2)) for rank in range(2)]
    senders[0].send(make_header(plan, 1))
    with pytest.raises(RefitError, match="the part of trainer rank 1 is being written"):
        make_receiver(plan, tmp_path).receive(make_header(plan, 1), WholeTensorSink(plan, CPU))


def test_a_version_never_written_and_a_foreign_plan_are_errors(tmp_path: Path) -> None:
    weights = make_weights()
    plan = plan_for(weights)
    receiver = make_receiver(plan, tmp_path)
    with pytest.raises(RefitError, match="version 9 was never written"):
        receiver.receive(make_header(plan, 9), WholeTensorSink(plan, CPU))
    with pytest.raises(RefitError, match="this end was given plan"):
        receiver.receive(Header(9, "0" * 16, "all"), WholeTensorSink(plan, CPU))
    make_sender(make_spec(tmp_path), source_of(plan, weights))
    with pytest.raises(RefitError, match=f"version 9 of plan {plan.digest} was never written"):
        receiver.receive(make_header(plan, 9), WholeTensorSink(plan, CPU))


@pytest.mark.parametrize("name", ["matrix", "large", "last"])
def test_a_flipped_bit_is_named_with_its_tensor(tmp_path: Path, name: str) -> None:
    weights = make_weights()
    plan = plan_for(weights)
    make_sender(make_spec(tmp_path), source_of(plan, weights)).send(make_header(plan, 1))
    entry = next(entry for entry in plan.entries if entry.name == name)
    with (tmp_path / "slot1").open("r+b") as file:
        file.seek(entry.offset + entry.nbytes - 1)
        byte = file.read(1)[0]
        file.seek(entry.offset + entry.nbytes - 1)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(RefitError, match=f"{name} arrived changed"):
        make_receiver(plan, tmp_path).receive(make_header(plan, 1), WholeTensorSink(plan, CPU))


def test_a_rank_whose_first_rank_never_opens_says_so_in_time(tmp_path: Path) -> None:
    weights = make_weights()
    plan = plan_for(weights, 2)
    with pytest.raises(PeerLost, match=r"trainer rank 1 waited 0.2 s for rank 0 to open"):
        make_sender(make_spec(tmp_path, 0.2), source_of(plan, weights, 1, 2))


def test_a_folder_without_room_is_an_error_that_says_how_much_is_needed(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted")
    try:
        weights = {"big": torch.zeros(1 << 20)}
        plan = plan_for(weights, buffer_bytes=1 << 30)
        with pytest.raises(RefitError, match="has no room for 2 x 4 MiB"):
            make_sender(make_spec(folder), source_of(plan, weights))
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
