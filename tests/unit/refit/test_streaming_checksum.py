"""Checksums of a refit: one for each item, for any number of askers, and no copy outlives its pass."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rlctl.refit.checksum import StreamingChecksums
from rlctl.utils.device_stream import DeviceStream
from tests.checksums import checksum

CPU = torch.device("cpu")


def test_every_refit_has_the_checksums_of_what_lies_there_then() -> None:
    sums = StreamingChecksums(CPU)
    items = {number: torch.randn(700 + number, 3) for number in range(5)}
    for checked in ([0, 3], [4], [], [1, 2]):
        for tensor in items.values():
            tensor.normal_()
        sums.start(len(checked))
        sums.queue(checked[:1], items.__getitem__, slot=0)
        sums.queue_lasting({number: items[number] for number in checked[1:]}, DeviceStream(CPU).mark())
        assert sums.values() == {number: checksum(items[number]) for number in checked}


def test_items_of_two_slots_are_not_mixed_up() -> None:
    sums = StreamingChecksums(CPU)
    slots = [torch.full((4096,), 1.0), torch.full((4096,), 2.0)]
    for version in range(4):
        sums.start(1)
        sums.queue([0], lambda _, slot=version % 2: slots[slot], slot=version % 2)  # type: ignore[misc]
        assert sums.values() == {0: checksum(slots[version % 2])}


def test_what_is_made_for_a_checksum_is_let_go_before_the_next_is_made() -> None:
    memory: list[StorageWeakRef] = []

    def make_item(number: int) -> torch.Tensor:
        assert all(storage.expired() for storage in memory)
        tensor = torch.arange(5000 + number)
        memory.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    sums = StreamingChecksums(CPU)
    sums.start(4)
    sums.queue(range(4), make_item)
    assert len(memory) == 4
