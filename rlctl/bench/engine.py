"""A vLLM worker of `rlctl bench refit`: a run's own refit end, that of the plain link, a comparison of bits."""

from typing import Any

import torch
from torch import Tensor

from rlctl.bench.rounds import BenchEnd, Measured, Meeting, Timing
from rlctl.bench.weights import make_tensor
from rlctl.generation.vllm.adapter_layers import EngineAdapters
from rlctl.generation.vllm.adapter_loader import find_adapters
from rlctl.generation.vllm.param_layout import UnsupportedLayout, find_regions
from rlctl.generation.vllm.worker_extension import RefitWorker
from rlctl.refit.protocol import Checks, Header, TransportSpec
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.weight_sink import WholeTensorSink


class BenchWorker(RefitWorker):
    """Mix-in of vLLM's worker; `self.rank` counts the workers of its engine."""

    _bench: BenchEnd

    @property
    def _bench_adapters(self) -> EngineAdapters | None:
        return find_adapters(self.model_runner.get_model())

    def bench_meet(self, port: int, parties: int) -> None:
        """Join the other processes of the bench."""
        self._bench = BenchEnd(self.device, Meeting(port, parties, server=False))

    def bench_clear(self) -> None:
        """Leave the last row's transport."""
        if self._rl_receiver:
            self._rl_receiver.close()
        self._rl_receiver = None
        self._bench.clear()

    def bench_refit_rounds(self, plan: RefitPlan, checks: Checks, version: int, rounds: int, in_turn: bool) -> Measured:
        """Receive and commit several times, by the transport that `rl_open` joined."""

        def work(number: int) -> Timing:
            if in_turn:
                self._bench.meeting.wait()
            header = Header(version + number, plan.digest, checks, self._bench_adapters is not None)
            report = self._rl.receive(header)
            self._rl.commit()
            if header.prove:
                self._rl.prove(header)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds = self._rl.commit_seconds()
            assert seconds is not None, "the device has done all"
            return {"wire": report.wire, "load": report.load}, seconds

        return self._bench.measure(rounds, work)

    def bench_plain_rounds(self, spec: TransportSpec, first_rank: int, payload: int, rounds: int) -> Measured:
        """Receive `payload` bytes over the plain link."""
        return self._bench.plain_rounds(spec, first_rank + self.rank, payload, rounds)

    def bench_differences(self, plan: RefitPlan, version: int, master: str) -> list[str]:
        """Return the names of the tensors that differ here from a version as it was sent."""
        delivered = self._bench_tensors(plan)
        differing = []
        for entry in plan.entries:
            sent = make_tensor(entry.name, entry.shape, version, getattr(torch, master), self.device)
            sent = sent.to(getattr(torch, entry.dtype))
            places = delivered.get(entry.name, [])
            if not places or not all(torch.equal(view, sent[box]) for box, view in places):
                differing.append(entry.name)
        return differing

    def bench_forget(self) -> None:
        """Zero every parameter, so that old weights cannot pass for new ones; not on CPU, where vLLM repacks them."""
        adapters = self._bench_adapters
        if self.device.type == "cpu" and not adapters:
            return
        weights = adapters.buffers.values() if adapters else self.model_runner.get_model().parameters()
        with torch.no_grad():
            for tensor in weights:
                tensor.zero_()

    def _bench_tensors(self, plan: RefitPlan) -> dict[str, list[tuple[Any, Tensor]]]:
        """Return where each tensor is: parts of the live parameters, or on CPU the tensors delivered to the loader."""
        if adapters := self._bench_adapters:
            self._rl_regions = adapters.regions
        elif self._rl_regions is None:
            self._rl_regions = find_regions(self.model_runner, plan, self.device)
        places: dict[str, list[tuple[Any, Tensor]]] = {}
        if not isinstance(self._rl_regions, UnsupportedLayout):
            for region in self._rl_regions:
                places.setdefault(region.box.name, []).append((region.box.slices(), region.view))
            return places
        sink = self._rl_receiver.sink if self._rl_receiver else None
        delivered = dict(sink.tensors()) if isinstance(sink, WholeTensorSink) else {}
        return {name: [((), tensor)] for name, tensor in delivered.items()}
