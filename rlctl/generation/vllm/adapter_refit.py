"""Adapters of a vLLM worker: the destination of a refit, and the proof of the live version.

A version arrives in a second copy of A and B while requests run; one short copy makes it live. Before a token of the
version leaves the engine, the checksum of each live A and B is compared with the sum that the trainer announced. Where
a tensor-parallel worker keeps a part of a tensor, the part is kept as it arrived for its sum. The same sums are
compared again before the next version: nothing may have written to the live tensors meanwhile.

`commit` queues this work on the device and waits for nothing: the next step is queued behind it. `prove` reads the sums
while the device makes that step. An engine that waited in between stalled for 6.6 ms (8B, rank 32, one H100, steps of
8.8 ms).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlctl.generation.engine import LoadMode
from rlctl.generation.vllm.adapter_layers import EngineAdapters
from rlctl.generation.vllm.weight_loader import WeightLoader
from rlctl.models.adapters import LORA_A, LORA_B
from rlctl.refit.checksum import FixedTensors, QueuedSums
from rlctl.refit.param_slices import ParamSlice, ParamSliceSink, ShadowParams
from rlctl.refit.protocol import Header, LiveProof, RefitError, digest_of
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.weight_sink import BatchedCopy, WeightSink

# (item, number of the part among its parts).
Key = tuple[int, int]


@dataclass(frozen=True)
class _Live:
    """A live part of an item."""

    key: Key
    name: str
    view: Tensor
    # The part is all of the item.
    whole: bool


class AdapterLoader(WeightLoader):
    """Loader of adapters: receives them next to the live ones, and proves these."""

    def __init__(self, plan: RefitPlan, adapters: EngineAdapters, device: torch.device, why: str) -> None:
        """Raises RefitError unless the plan has the tensors of the engine's adapters, by name and shape."""
        _compare(plan, adapters)
        self._plan, self._device = plan, device
        self._shadow = ShadowParams(adapters.buffers, adapters.regions)
        if device.type == "cuda":
            # Made on this thread's stream; received items come on others.
            torch.cuda.synchronize(device)
        self._sink = _ProvenSink(plan, self._shadow.regions, device)
        live = ParamSliceSink(plan, adapters.regions)
        self._live = [
            _Live((number, place), item.box.name, part.view, part.whole)
            for number, item in enumerate(plan.items)
            for place, part in enumerate(live.parts(number))
        ]
        self._fixed = FixedTensors([each.view for each in self._live])
        self.sink: WeightSink = self._sink
        # The base weights are in no refit: an engine must not drop them when it sleeps.
        self.choice = LoadMode("staged", why, self._shadow.nbytes, overwrites=False)
        # Sums of the version that is live, by part; its number.
        self._served: dict[Key, int] = {}
        self._version = -1

    def commit(self) -> None:
        """Queue the copy of the received version into the live buffers, between two passes over their checksums."""
        before = self._fixed.queue(self._device)
        self._shadow.commit()
        self._queued = before, self._fixed.queue(self._device), self._sink.queue_parts()

    def prove(self, header: Header, sent: Mapping[int, int]) -> LiveProof:
        """Compare the live tensors with the sent ones. sent: the verified checksums, by item.

        Raises RefitError naming the tensor that differs, or that was written to since the version before was proven.
        """
        before, after, parts = self._queued
        keys = [each.key for each in self._live]
        was, now = (dict(zip(keys, sums.read())) for sums in (before, after))
        served, self._served = self._served, {}
        for each in self._live:
            if served.get(each.key, was[each.key]) != was[each.key]:
                raise RefitError(f"{each.name} was written to after version {self._version} became live")
        expected = {each.key: sent[each.key[0]] for each in self._live if each.whole and each.key[0] in sent}
        expected |= {key: value for key, value in zip(self._sink.cut, parts.read()) if key[0] in sent}
        live = [each for each in self._live if each.key in expected]
        wrong = [each.name for each in live if now[each.key] != expected[each.key]]
        if wrong:
            raise RefitError(
                f"{wrong[0]} is live with other numbers than version {header.version} was sent with "
                f"({len(set(wrong))} of {len(self._plan.entries)} tensors)"
            )
        self._served, self._version = expected, header.version
        names = {self._plan.items[each.key[0]].box.name for each in live}
        return LiveProof(
            header.version,
            digest_of(sent),
            sum(name.endswith(LORA_A) for name in names),
            sum(name.endswith(LORA_B) for name in names),
        )


class _ProvenSink(ParamSliceSink):
    """Sink that keeps each part of a cut tensor as it arrived, for its checksum."""

    def __init__(self, plan: RefitPlan, regions: Iterable[ParamSlice], device: torch.device) -> None:
        super().__init__(plan, regions, beside_requests=True)
        self._device = device
        # Parts as they arrived.
        self.cut: dict[Key, Tensor] = {}
        self._fixed = FixedTensors([])

    def copies(self, arrived: Iterable[tuple[int, Tensor]]) -> BatchedCopy:
        here = list(arrived)
        pairs = [(part.view, data[part.inside]) for number, data in here for part in self.parts(number)]
        for number, data in here:
            for place, part in enumerate(self.parts(number)):
                if not part.whole:
                    # Contiguous.
                    kept = self.cut.setdefault((number, place), torch.empty_like(part.view).contiguous())
                    pairs.append((kept, data[part.inside]))
        return BatchedCopy(pairs, beside_requests=True)

    def queue_parts(self) -> QueuedSums:
        """Queue the checksums of the parts in `cut`, in its order."""
        if len(self._fixed.tensors) != len(self.cut):
            self._fixed = FixedTensors([*self.cut.values()])
        return self._fixed.queue(self._device)


def _compare(plan: RefitPlan, adapters: EngineAdapters) -> None:
    """Raise RefitError unless the trainer sends the tensors that the engine has places for."""
    sent = {entry.name: entry.shape for entry in plan.entries}
    held = {tensor.name: tensor.shape for tensor in adapters.spec.tensors}
    if sent == held:
        return
    counts = ", ".join(
        f"{end} {sum(name.endswith(LORA_A) for name in names)} A and {sum(name.endswith(LORA_B) for name in names)} B"
        for end, names in (("the trainer sends", sent), ("the engine has places for", held))
    )
    lost = [f"{name} has no place in the engine" for name in sent if name not in held]
    lost += [f"{name} is not sent" for name in held if name not in sent]
    lost += [f"{n} is sent as {sent[n]}, held as {held[n]}" for n in sent if n in held and sent[n] != held[n]]
    raise RefitError(f"adapters: {counts}; {lost[0]}" + (f", and {len(lost) - 1} more" if lost[1:] else ""))
