"""Broadcast of weights between processes over gloo: they arrive whole, or both ends get the cause within a deadline."""

import multiprocessing
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlctl.refit.protocol import Checks, Header, PeerLost, RefitError, TransportSpec, Untouched
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.transport import call_off, open_receiver, open_sender
from rlctl.refit.weight_sink import BatchedCopy, WholeTensorSink
from rlctl.utils.ports import free_port
from tests.unit.refit.weights import CPU, make_weights, plan_for, source_of
from tests.waiting import PATIENCE_S

Answer = str | dict[str, torch.Tensor]


def make_spec(timeout_s: float, receivers: int = 1) -> TransportSpec:
    return TransportSpec("broadcast", receivers, timeout_s, host="127.0.0.1", port=free_port())


class Damaging(WholeTensorSink):
    """Sink that changes the last number of `large` once the tensor has arrived."""

    def copies(self, arrived: Iterable[tuple[int, torch.Tensor]]) -> BatchedCopy:
        copies = [(self._item_buffer(number), tensor) for number, tensor in arrived]
        last_number = dict(self.tensors())["large"][-1, -1]
        return BatchedCopy([*copies, (last_number, torch.tensor(1e9))])


def receive(
    spec: TransportSpec,
    plan: RefitPlan,
    versions: list[int],
    checks: Checks,
    rank: int = 1,
    sinks: type[WholeTensorSink] = WholeTensorSink,
) -> list[Answer]:
    """Receive in this process. Return for each version its tensors, or the text of the RefitError."""
    receiver = open_receiver(spec, plan, rank, CPU)
    answers: list[Answer] = []
    for version in versions:
        sink = sinks(plan, CPU)
        try:
            receiver.receive(Header(version, plan.digest, checks), sink)
            answers.append({name: tensor.clone() for name, tensor in sink.tensors()})
        except RefitError as error:
            answers.append(str(error))
    receiver.close()
    return answers


def send(spec: TransportSpec, plan: RefitPlan, versions: list[int], checks: Checks, rank: int, world: int) -> list[int]:
    """Send all versions from this process. Return the number of bytes sent for each version."""
    weights = make_weights()
    sender = open_sender(spec, source_of(plan, weights, rank, world), CPU)
    sizes = []
    for version in versions:
        for name, tensor in make_weights(version).items():
            weights[name].copy_(tensor)
        sizes.append(sender.send(Header(version, plan.digest, checks)).bytes)
    sender.close()
    return sizes


# The fork server imports torch once for all processes of this module, outside of the tests' seconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([__name__])


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    """Yield three processes once they have started."""
    with ProcessPoolExecutor(3, PROCESSES) as pool:
        for start in [pool.submit(time.sleep, 0) for _ in range(3)]:
            start.result(600)
        yield pool


@pytest.mark.parametrize(("world", "receivers"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("checks", ["all", "sampled"])
def test_every_version_arrives_bit_for_bit_at_every_receiver(
    processes: ProcessPoolExecutor, world: int, receivers: int, checks: Checks
) -> None:
    spec = make_spec(PATIENCE_S, receivers)
    plan = plan_for(make_weights(), world, buffer_bytes=300_000)
    arriving: list[Future[Any]] = [
        processes.submit(receive, spec, plan, [1, 2], checks, rank=rank) for rank in range(1, receivers + 1)
    ]
    sending = [processes.submit(send, spec, plan, [1, 2], checks, rank=rank, world=world) for rank in range(1, world)]
    sizes = [send(spec, plan, [1, 2], checks, rank=0, world=world)]
    sizes += [future.result(PATIENCE_S) for future in sending]
    assert [sum(sizes_of_version) for sizes_of_version in zip(*sizes)] == [plan.payload, plan.payload]
    for future in arriving:
        for version, received in zip((1, 2), future.result(PATIENCE_S)):
            for name, tensor in make_weights(version).items():
                assert torch.equal(received[name], tensor), name


def test_another_plan_is_found_out_before_anything_is_received(processes: ProcessPoolExecutor) -> None:
    weights = make_weights()
    spec = make_spec(PATIENCE_S)
    plan = plan_for(weights)
    foreign_plan = plan_for(weights, buffer_bytes=300_000)
    answer = processes.submit(receive, spec, foreign_plan, [1], "all")
    sender = open_sender(spec, source_of(plan, weights), CPU)
    with pytest.raises(PeerLost, match=r"the group broke at matrix to transposed: .*peer"):
        sender.send(Header(1, plan.digest, "all"))
    (text,) = answer.result(PATIENCE_S)
    assert f"expected version 1 of plan {foreign_plan.digest}, trainer rank 0 sends version 1 of another plan" in text


def test_another_version_than_announced_is_refused(processes: ProcessPoolExecutor) -> None:
    weights = make_weights()
    spec = make_spec(PATIENCE_S)
    plan = plan_for(weights)
    answer = processes.submit(receive, spec, plan, [7], "all")
    sender = open_sender(spec, source_of(plan, weights), CPU)
    with pytest.raises(PeerLost):
        sender.send(Header(8, plan.digest, "all"))
    assert "expected version 7" in answer.result(PATIENCE_S)[0]
    assert "sends version 8 of this plan" in answer.result(PATIENCE_S)[0]


# The first and the last of three owners share a group.
@pytest.mark.parametrize(("world", "wrong_rank"), [(2, 1), (3, 2)], ids=["two groups", "one group"])
def test_one_of_several_owners_with_another_version_is_named_before_anything_is_received(
    processes: ProcessPoolExecutor, world: int, wrong_rank: int
) -> None:
    spec = make_spec(PATIENCE_S)
    plan = plan_for(make_weights(), world)
    answer = processes.submit(receive, spec, plan, [7], "all")
    sending = []
    for rank in range(1, world):
        version = 8 if rank == wrong_rank else 7
        sending.append(processes.submit(send, spec, plan, [version], "all", rank=rank, world=world))
    with pytest.raises(PeerLost):
        send(spec, plan, [7], "all", rank=0, world=world)
    (text,) = answer.result(PATIENCE_S)
    assert f"expected version 7 of plan {plan.digest}, trainer rank {wrong_rank} sends version 8 of this plan" in text
    assert all(isinstance(future.exception(PATIENCE_S), PeerLost) for future in sending)


@pytest.mark.parametrize("buffer_bytes", [300_000, 1 << 20], ids=["chunks", "one chunk"])
def test_what_arrived_changed_is_named_with_its_owner(processes: ProcessPoolExecutor, buffer_bytes: int) -> None:
    spec = make_spec(PATIENCE_S)
    plan = plan_for(make_weights(), 2, buffer_bytes)
    answer = processes.submit(receive, spec, plan, [1], "all", sinks=Damaging)
    sending = processes.submit(send, spec, plan, [1], "all", rank=1, world=2)
    send(spec, plan, [1], "all", rank=0, world=2)
    sending.result(PATIENCE_S)
    assert answer.result(PATIENCE_S) == ["large arrived changed from trainer rank 1 (version 1)"]


def test_a_sender_that_never_sends_is_named_in_time(processes: ProcessPoolExecutor) -> None:
    weights = make_weights()
    spec = make_spec(1)
    plan = plan_for(weights)
    answer = processes.submit(receive, spec, plan, [1], "all")
    sender = open_sender(spec, source_of(plan, weights), CPU)
    (text,) = answer.result(PATIENCE_S)
    assert "engine worker 1 and trainer rank 0: the group broke at the header" in text
    sender.close()


def leave(spec: TransportSpec, plan: RefitPlan) -> None:
    """Join the transport's process group, then leave it."""
    open_receiver(spec, plan, 1, CPU).close()


def test_a_receiver_that_leaves_is_noticed_before_the_deadline() -> None:
    weights = make_weights()
    spec = make_spec(2 * PATIENCE_S)
    plan = plan_for(weights)
    process = PROCESSES.Process(target=leave, args=(spec, plan))
    process.start()
    sender = open_sender(spec, source_of(plan, weights), CPU)
    process.join(PATIENCE_S)
    begin = time.monotonic()
    with pytest.raises(PeerLost, match="trainer rank 0: the group broke at"):
        for version in range(3):
            sender.send(Header(version, plan.digest, "all"))
    assert time.monotonic() - begin < PATIENCE_S


def test_engine_workers_learn_at_once_that_another_is_lost(processes: ProcessPoolExecutor) -> None:
    spec = make_spec(2 * PATIENCE_S, receivers=3)
    plan = plan_for(make_weights())
    arriving = [processes.submit(receive, spec, plan, [1], "all", rank=rank) for rank in (2, 3)]
    process = PROCESSES.Process(target=stand_still, args=(spec, plan))
    process.start()
    sender = open_sender(spec, source_of(plan, make_weights()), CPU)
    begin = time.monotonic()
    process.kill()
    with pytest.raises(PeerLost):
        for version in range(1, 4):
            sender.send(Header(version, plan.digest, "all"))
    sender.drop([1], "engine-0 died")
    # The deadline of these workers is far away.
    for future in arriving:
        # On a busy machine a worker may still join: `receive` then raises instead of returning its error.
        message = str(future.exception(PATIENCE_S) or "") or future.result()[0]
        assert "the group broke at" in message or "could not join the refit group" in message
    assert time.monotonic() - begin < PATIENCE_S
    sender.close()


def test_who_waits_for_a_dead_one_to_join_is_called_off(processes: ProcessPoolExecutor) -> None:
    spec = make_spec(2 * PATIENCE_S, receivers=2)
    plan = plan_for(make_weights())
    joining = processes.submit(receive, spec, plan, [1], "all", rank=2)
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(open_sender, spec, source_of(plan, make_weights()), CPU)
        time.sleep(0.5)
        call_off(spec, "engine-0 died during refit_open")
        assert str(opening.exception(PATIENCE_S)) == "engine-0 died during refit_open"
    error = joining.exception(PATIENCE_S)
    assert isinstance(error, Untouched) and str(error) == "engine-0 died during refit_open"


def stand_still(spec: TransportSpec, plan: RefitPlan) -> None:
    """Join the transport's process group, and receive nothing."""
    receiver = open_receiver(spec, plan, 1, CPU)
    time.sleep(10 * PATIENCE_S)
    receiver.close()


def test_nobody_to_meet_is_an_error_that_names_the_place() -> None:
    with socket.socket() as unused:
        # No other process can take this port, and nobody listens on it.
        unused.bind(("127.0.0.1", 0))
        spec = replace(make_spec(1), port=unused.getsockname()[1])
        with pytest.raises(RefitError, match=f"nobody could be met at 127.0.0.1:{spec.port}"):
            open_receiver(spec, plan_for(make_weights()), 1, CPU)
