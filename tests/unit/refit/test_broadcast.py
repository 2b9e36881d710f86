"""Weights by broadcast between two processes over gloo: they arrive whole, or both ends learn why not, in time."""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from torch import Tensor

from rlctl.refit.broadcast import BroadcastGroup
from rlctl.refit.checksum import checksum
from rlctl.refit.plan import Header, Plan, RefitError, TransportSpec, dtype_name
from rlctl.refit.transport import open_receiver, open_sender
from rlctl.workers.ports import free_port

CPU = torch.device("cpu")


def tensors(version: int) -> list[tuple[str, Tensor]]:
    base = torch.arange(91, dtype=torch.float32).view(7, 13) + version
    return [("matrix", base), ("transposed", base.T), ("odd", base[0, :3].bfloat16()), ("scalar", base[6, 12].double())]


def make_plan() -> Plan:
    return Plan.build((name, tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors(0))


def make_spec(timeout_s: float) -> TransportSpec:
    return TransportSpec("broadcast", host="127.0.0.1", port=free_port(), world=2, timeout_s=timeout_s)


def receive(spec: TransportSpec, versions: list[int]) -> list[str | dict[str, tuple[str, int]]]:
    """The receiving process: for each version what arrived (dtype, checksum), or what the RefitError says."""
    plan = make_plan()
    receiver = open_receiver(spec, plan, 1, CPU)
    answers: list[str | dict[str, tuple[str, int]]] = []
    for version in versions:
        try:
            arrived = receiver.receive(Header(version, plan.digest, True))
            answers.append({name: (dtype_name(tensor), checksum(tensor)) for name, tensor in arrived})
        except RefitError as error:
            answers.append(str(error))
    receiver.close()
    return answers


@pytest.fixture(scope="module")
def other() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def test_every_version_arrives_bit_for_bit_over_one_group(other: ProcessPoolExecutor) -> None:
    spec, plan = make_spec(60), make_plan()
    answer = other.submit(receive, spec, [1, 2])
    sender = open_sender(spec, plan, 0, CPU)
    sums = [sender.send(iter(tensors(version)), Header(version, plan.digest, True)) for version in (1, 2)]
    for version, theirs, ours in zip((1, 2), answer.result(60), sums):
        assert theirs == {name: (dtype_name(tensor), checksum(tensor)) for name, tensor in tensors(version)}
        assert [value for _, value in theirs.values()] == ours
    sender.close()


def test_a_sender_without_checksums_returns_none_and_ranks_above_0_only_take_part(other: ProcessPoolExecutor) -> None:
    spec, plan = make_spec(60), make_plan()
    answer = other.submit(receive, spec, [1])
    header = Header(1, plan.digest, False)
    assert open_sender(spec, plan, 1, CPU).send(iter(tensors(1)), Header(1, plan.digest, True)) == []
    assert open_sender(spec, plan, 0, CPU).send(iter(tensors(1)), header) == []
    assert set(answer.result(60)[0]) == {"matrix", "transposed", "odd", "scalar"}


def test_another_version_than_announced_is_an_error_before_any_weight(other: ProcessPoolExecutor) -> None:
    spec, plan = make_spec(3), make_plan()
    answer = other.submit(receive, spec, [5])
    sender = open_sender(spec, plan, 0, CPU)
    with pytest.raises(RefitError, match="refit rank 0"):
        # The receiver leaves at the header, so the sender's end fails too, at the latest when the time is over.
        for _ in range(100):
            sender.send(iter(tensors(4)), Header(4, plan.digest, False))
            time.sleep(0.05)
    assert answer.result(60) == [f"expected version 5 of plan {plan.digest}, the trainer sends another"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_peer_that_never_comes_is_an_error_within_the_time(rank: int) -> None:
    spec, begin = make_spec(1.0), time.monotonic()
    with pytest.raises(RefitError, match=f"refit rank {rank} of 2 could not join at 127.0.0.1:{spec.port}"):
        BroadcastGroup(spec, rank, CPU)
    assert time.monotonic() - begin < 10


def test_a_trainer_that_joins_and_never_sends_is_an_error_within_the_time(other: ProcessPoolExecutor) -> None:
    spec = make_spec(2.0)
    answer = other.submit(receive, spec, [1])
    group = BroadcastGroup(spec, 0, CPU)
    (message,) = answer.result(30)
    assert isinstance(message, str) and message.startswith("refit rank 1: broadcast failed or timed out")
    assert group.rank == 0
