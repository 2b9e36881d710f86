"""Weights through a file in memory: what arrives is what was sent, or an error that says why."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlctl.refit.checksum import checksum
from rlctl.refit.plan import Header, Plan, RefitError, dtype_name
from rlctl.refit.shm import ShmReceiver, ShmSender

TENSORS: list[tuple[str, Tensor]] = [
    ("matrix", torch.randn(7, 13)),
    ("odd", torch.randn(5, 3).to(torch.bfloat16)),
    ("half", torch.randn(129).to(torch.float16)),
    ("double", torch.randn(3, 1, 2).to(torch.float64)),
    ("none", torch.empty(0, 4)),
    ("scalar", torch.tensor(2.5)),
    ("transposed", torch.randn(4, 6).T),
]


def plan_of(tensors: list[tuple[str, Tensor]]) -> Plan:
    return Plan.build((name, tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors)


def test_every_dtype_and_shape_arrives_bit_for_bit(tmp_path: Path) -> None:
    plan = plan_of(TENSORS)
    header = Header(3, plan.digest, True)
    sums = ShmSender(plan, tmp_path, 0).send(iter(TENSORS), header)
    received = list(ShmReceiver(plan, tmp_path).receive(header))
    assert [name for name, _ in received] == [name for name, _ in TENSORS]
    for (_, sent), (_, got) in zip(TENSORS, received):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)
    assert sums == [checksum(tensor) for _, tensor in received]


def test_only_the_newest_version_stays_and_ranks_above_0_write_nothing(tmp_path: Path) -> None:
    plan = plan_of(TENSORS)
    sender, other = ShmSender(plan, tmp_path, 0), ShmSender(plan, tmp_path, 1)
    for version in (1, 2):
        sender.send(iter(TENSORS), Header(version, plan.digest, False))
        assert other.send(iter(TENSORS), Header(version, plan.digest, True)) == []
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_a_version_never_written_and_a_foreign_plan_are_errors(tmp_path: Path) -> None:
    plan = plan_of(TENSORS)
    receiver = ShmReceiver(plan, tmp_path)
    with pytest.raises(RefitError, match="version 9 was never written"):
        list(receiver.receive(Header(9, plan.digest, False)))
    with pytest.raises(RefitError, match="this end was given plan"):
        list(receiver.receive(Header(9, "0" * 16, False)))


def test_a_tensor_that_departs_from_the_plan_leaves_no_version_behind(tmp_path: Path) -> None:
    plan = plan_of(TENSORS)
    wrong = [("matrix", torch.randn(7, 14)), *TENSORS[1:]]
    with pytest.raises(RefitError, match=r"the trainer exported matrix \(7, 14\)"):
        ShmSender(plan, tmp_path, 0).send(iter(wrong), Header(1, plan.digest, False))
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_raises_halfway_leaves_the_last_version_as_it_was(tmp_path: Path) -> None:
    plan = plan_of(TENSORS)
    sender = ShmSender(plan, tmp_path, 0)
    sender.send(iter(TENSORS), Header(1, plan.digest, False))

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "matrix", torch.zeros(7, 13)
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        sender.send(broken(), Header(2, plan.digest, False))
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    received = dict(ShmReceiver(plan, tmp_path).receive(Header(1, plan.digest, False)))
    assert torch.equal(received["matrix"], TENSORS[0][1])


def test_a_version_sent_again_replaces_itself(tmp_path: Path) -> None:
    plan = plan_of(TENSORS)
    sender = ShmSender(plan, tmp_path, 0)
    for _ in range(2):
        sender.send(iter(TENSORS), Header(1, plan.digest, False))
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_a_folder_without_room_is_an_error_that_says_how_much_is_needed(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted")
    try:
        big = [("big", torch.zeros(1 << 20))]
        plan = plan_of(big)
        with pytest.raises(RefitError, match="has no room for 4 MiB"):
            ShmSender(plan, folder, 0).send(iter(big), Header(1, plan.digest, False))
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
