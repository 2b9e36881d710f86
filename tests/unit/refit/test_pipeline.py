"""The receiving end of the chunk pipeline, over a transport that delivers chunks at once."""

from collections.abc import Callable
from typing import Any

from rlctl.refit.pipeline import ChunkReceiver, ReceiverTransport
from rlctl.refit.protocol import Header
from rlctl.refit.refit_plan import Chunk, RefitPlan
from rlctl.refit.weight_sink import BatchedCopy
from rlctl.utils.device_stream import DeviceEvent, DeviceStream
from tests.unit.refit.weights import CPU, make_weights, plan_for


class SlowEvent(DeviceEvent):
    """Event whose `reached` is true from the third call on."""

    def __init__(self) -> None:
        super().__init__(None)
        self.calls = 0

    def is_reached(self) -> bool:
        self.calls += 1
        return self.calls >= 3


class SlowStream(DeviceStream):
    def mark(self) -> DeviceEvent:
        return SlowEvent()


class Wireless(ReceiverTransport):
    """Transport whose chunks arrive at once. `give_back` notes the calls that later chunks' ends have had."""

    def __init__(self, plan: RefitPlan) -> None:
        self.order = list(enumerate(plan.chunks))
        self.ends: dict[int, list[SlowEvent]] = {owner: [] for owner in plan.owners}
        self.calls_of_later_ends: list[int] = []

    def begin(self, *_: Any) -> None: ...

    def arrive(self, number: int, chunk: Chunk, meanwhile: Callable[[], object]) -> tuple[int, DeviceStream]:
        return 0, SlowStream(CPU)

    def view(self, number: int, slot: int) -> None: ...

    def note_load(self, chunk: Chunk, end: DeviceEvent) -> None:
        assert isinstance(end, SlowEvent)
        self.ends[chunk.owner].append(end)

    def give_back(self, chunk: Chunk) -> None:
        self.ends[chunk.owner].pop(0)
        self.calls_of_later_ends += [end.calls for end in self.ends[chunk.owner]]

    def sums(self, owner: int, header: Header) -> dict[int, int]:
        return {}

    def times(self, loading: dict[int, float]) -> tuple[float, float]:
        return 0.0, sum(loading.values())

    def close(self) -> None: ...


class NoSink:
    def target(self, number: int) -> None: ...

    def copies(self, arrived: Any) -> BatchedCopy:
        return BatchedCopy([])

    def adopt(self, flat: Any) -> bool:
        return False


def test_a_device_is_asked_only_for_the_next_chunk_of_each_owner() -> None:
    plan = plan_for(make_weights(), world=2, buffer_bytes=1 << 18)
    transport = Wireless(plan)
    assert all(len(list(plan.chunks_of(owner))) > 2 for owner in plan.owners)
    receiver = ChunkReceiver(transport, plan, rank=1, device=CPU, timeout_s=10)
    report = receiver.receive(Header(0, plan.digest, "off"), NoSink())
    assert report.bytes == plan.payload
    assert set(transport.calls_of_later_ends) == {0}
    assert not any(transport.ends.values())
