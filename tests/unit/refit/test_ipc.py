"""The counters of CUDA IPC are tested on a host: both ends run as threads, and a handle is the tensor itself.

tests/gpu/test_transports.py has the tests on a device (handles, streams, the copy engines).
"""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlctl.refit import ipc
from rlctl.refit.checksum import StreamingChecksums
from rlctl.refit.pipeline import ChunkReceiver
from rlctl.refit.protocol import Checks, Header, PeerLost, RefitError, TransportSpec
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.transport import open_receiver, open_sender
from rlctl.refit.weight_sink import WholeTensorSink
from tests.unit.refit.weights import CPU, make_weights, plan_for, source_of


@pytest.fixture(autouse=True)
def handles_are_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[torch.Tensor] = []

    def share(tensor: torch.Tensor) -> int:
        shared.append(tensor)
        return len(shared) - 1

    monkeypatch.setattr(ipc, "share", share)
    monkeypatch.setattr(ipc, "open_handle", lambda handle, device: shared[handle])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def make_spec(folder: Path, receivers: int = 1, timeout_s: float = 300.0, colocated: bool = False) -> TransportSpec:
    return TransportSpec("ipc", receivers, timeout_s, num_buffers=2, folder=str(folder), colocated=colocated)


def receive(end: ChunkReceiver, plan: RefitPlan, version: int, checks: Checks) -> dict[str, torch.Tensor]:
    sink = WholeTensorSink(plan, CPU)
    assert end.receive(Header(version, plan.digest, checks), sink).bytes == plan.payload
    return dict(sink.tensors())


@pytest.mark.parametrize("checks", ["all", "sampled", "off"])
@pytest.mark.parametrize(("world", "receivers"), [(1, 1), (2, 1), (3, 2)])
def test_every_version_arrives_bit_for_bit(
    tmp_path: Path, threads: ThreadPoolExecutor, world: int, receivers: int, checks: Checks
) -> None:
    weights = make_weights()
    spec = make_spec(tmp_path, receivers)
    plan = plan_for(weights, world, buffer_bytes=300_000)
    senders = [open_sender(spec, source_of(plan, weights, rank, world), CPU) for rank in range(world)]
    ends = [open_receiver(spec, plan, rank, CPU) for rank in range(1, receivers + 1)]
    for version in range(4):
        for name, tensor in make_weights(version).items():
            weights[name].copy_(tensor)
        sending = [threads.submit(sender.send, Header(version, plan.digest, checks)) for sender in senders]
        arriving = [threads.submit(receive, end, plan, version, checks) for end in ends]
        assert sum(future.result(300).bytes for future in sending) == plan.payload
        for future in arriving:
            for name, tensor in future.result(300).items():
                assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_receiver_on_the_trainers_device_converts_by_itself_and_nothing_is_buffered(
    tmp_path: Path, threads: ThreadPoolExecutor, dtype: str
) -> None:
    weights = {"a": torch.randn(64, 32), "b": torch.randn(5, 3)}
    plan = RefitPlan.build([(name, tuple(tensor.shape), dtype) for name, tensor in weights.items()], buffer_bytes=4096)
    spec = make_spec(tmp_path, colocated=True)
    sender = open_sender(spec, source_of(plan, weights), CPU)
    end = open_receiver(spec, plan, 1, CPU)
    for version in range(3):
        for tensor in weights.values():
            tensor.normal_()
        sending = threads.submit(sender.send, Header(version, plan.digest, "all"))
        received = receive(end, plan, version, "all")
        assert sending.result(300).extra_bytes == 0
        for name, tensor in weights.items():
            assert torch.equal(received[name], tensor.to(getattr(torch, dtype))), name


def test_checksums_of_a_shared_device_are_taken_before_a_receiver_begins(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_weights()
    plan = plan_for(weights)
    spec = make_spec(tmp_path, colocated=True)
    sender = open_sender(spec, source_of(plan, weights), CPU)
    order: list[str] = []
    compute_sums = StreamingChecksums.values
    publish = ipc.IpcSender.publish
    monkeypatch.setattr(StreamingChecksums, "values", lambda *args: order.append("sums") or compute_sums(*args))
    monkeypatch.setattr(ipc.IpcSender, "publish", lambda *args: order.append("chunk") or publish(*args))
    sending = threads.submit(sender.send, Header(1, plan.digest, "all"))
    receive(open_receiver(spec, plan, 1, CPU), plan, 1, "all")
    sending.result(300)
    assert order[:2] == ["sums", "chunk"]


def test_no_more_chunks_are_packed_than_there_are_buffers_until_they_are_taken(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"w": torch.randn(64, 256, dtype=torch.float64)}
    plan = RefitPlan.build([("w", (64, 256), "float32")], buffer_bytes=8192)
    spec = make_spec(tmp_path)
    sender = open_sender(spec, source_of(plan, weights), CPU)
    packed: list[int] = []
    publish = ipc.IpcSender.publish
    second_is_published = threading.Event()
    third_is_published = threading.Event()

    def publish_and_note(transport: ipc.IpcSender, number: int, slot: int, span: Any) -> None:
        packed.append(number)
        publish(transport, number, slot, span)
        if number == 1:
            second_is_published.set()
        if number == 2:
            third_is_published.set()

    monkeypatch.setattr(ipc.IpcSender, "publish", publish_and_note)
    sending = threads.submit(sender.send, Header(1, plan.digest, "all"))
    assert second_is_published.wait(300) and not third_is_published.wait(0.3)
    assert packed == [0, 1]
    received = receive(open_receiver(spec, plan, 1, CPU), plan, 1, "all")
    sending.result(300)
    assert packed == list(range(len(plan.chunks)))
    assert torch.equal(received["w"], weights["w"].float())


def failure_of(future: "Future[Any]") -> str:
    error = future.exception(300)
    assert isinstance(error, RefitError), error
    return f"{type(error).__name__}: {error}"


def test_what_arrived_changed_is_named_with_its_owner(
    tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_weights()
    plan = plan_for(weights, 2)
    spec = make_spec(tmp_path)
    senders = [open_sender(spec, source_of(plan, weights, rank, 2), CPU) for rank in range(2)]
    publish_sums = ipc.IpcSender.publish_sums
    items_of_rank_1 = set[int]()
    for _, chunk in plan.chunks_of(1):
        items_of_rank_1.update(chunk.numbers)

    def publish_wrong_sums(transport: ipc.IpcSender, sums: StreamingChecksums, packing: Any) -> None:
        values = dict(sums.values(packing))
        for number in items_of_rank_1 & values.keys():
            values[number] += 1
        publish_sums(transport, SimpleNamespace(values=lambda stream: values), packing)  # type: ignore[arg-type]

    monkeypatch.setattr(ipc.IpcSender, "publish_sums", publish_wrong_sums)
    sending = [threads.submit(sender.send, Header(3, plan.digest, "all")) for sender in senders]
    arriving = threads.submit(receive, open_receiver(spec, plan, 1, CPU), plan, 3, "all")
    assert failure_of(arriving) == "RefitError: matrix arrived changed from trainer rank 1 (version 3)"
    for future in sending:
        future.result(300)


def test_a_receiver_that_never_comes_is_named_and_may_be_dropped(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    weights = make_weights()
    plan = plan_for(weights, buffer_bytes=1 << 30)
    spec = make_spec(tmp_path, receivers=2, timeout_s=1.0)
    sender = open_sender(spec, source_of(plan, weights), CPU)
    end = open_receiver(spec, plan, 1, CPU)
    sending = threads.submit(sender.send, Header(1, plan.digest, "all"))
    receive(end, plan, 1, "all")
    text = failure_of(sending)
    assert text.startswith(PeerLost.__name__)
    assert "trainer rank 0 waited 1 s for engine workers 2 to take part 1 of" in text
    spec = replace(spec, timeout_s=300.0)
    sender = open_sender(spec, source_of(plan, weights), CPU)
    end = open_receiver(spec, plan, 1, CPU)
    sender.drop([2], "it was killed")
    sending = threads.submit(sender.send, Header(2, plan.digest, "all"))
    receive(end, plan, 2, "all")
    sending.result(300)


def test_a_sender_that_never_sends_and_another_version_are_named(tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    weights = make_weights()
    plan = plan_for(weights, buffer_bytes=1 << 30)
    spec = make_spec(tmp_path, timeout_s=0.5)
    end = open_receiver(spec, plan, 1, CPU)
    with pytest.raises(PeerLost, match=r"engine worker 1 waited 0.5 s for trainer rank 0 to open"):
        receive(end, plan, 1, "all")
    sender = open_sender(spec, source_of(plan, weights), CPU)
    with pytest.raises(PeerLost, match=r"engine worker 1 waited 0.5 s for trainer rank 0 to send matrix to last"):
        receive(open_receiver(spec, plan, 1, CPU), plan, 1, "all")
    sending = threads.submit(sender.send, Header(8, plan.digest, "all"))
    with pytest.raises(RefitError, match=f"expected version 7 of plan {plan.digest}, trainer rank 0 sends version 8"):
        receive(open_receiver(replace(spec, timeout_s=300.0), plan, 1, CPU), plan, 7, "all")
    assert isinstance(sending.exception(300), PeerLost)
