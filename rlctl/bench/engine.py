"""The vLLM worker of `rlctl bench refit`.

It receives weights by a run's refit and over the plain link, and compares the delivered weights with the sent ones.
"""

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
    """Mix-in of vLLM's worker. `self.rank` is the worker's rank in its engine."""

    _bench: BenchEnd

    @property
    def _bench_adapters(self) -> EngineAdapters | None:
        return find_adapters(self.model_runner.get_model())

    def bench_meet(self, port: int, parties: int) -> None:
        """Join the barrier of all processes of the bench, at `port` of this host."""
        self._bench = BenchEnd(self.device, Meeting(port, parties, server=False))

    def bench_clear(self) -> None:
        """Close the transport that the last row used."""
        if self._rl_receiver:
            self._rl_receiver.close()
        self._rl_receiver = None
        self._bench.clear()

    def bench_refit_rounds(self, plan: RefitPlan, checks: Checks, version: int, rounds: int, in_turn: bool) -> Measured:
        """Receive and commit `rounds` versions, from `version` on, by the transport that `rl_open` joined.

        in_turn: each round begins to receive only after the trainer has sent.
        """

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
        """Receive `payload` bytes over the plain link, `rounds` times. first_rank: the link's rank of worker 0."""
        return self._bench.plain_rounds(spec, first_rank + self.rank, payload, rounds)

    def bench_differences(self, plan: RefitPlan, version: int, master: str) -> list[str]:
        """Return the names of the tensors of which this worker's part differs in a bit from the sent `version`.

        master: dtype of the trainer's weights, from which the sent values are computed.
        """
        delivered = self._bench_tensors(plan)
        differing = []
        for entry in plan.entries:
            trained = make_tensor(entry.name, entry.shape, version, getattr(torch, master), self.device)
            sent = trained.to(getattr(torch, entry.dtype))
            parts = delivered.get(entry.name, [])
            # A tensor without any part on this worker was not delivered.
            if not parts or not all(torch.equal(view, sent[box]) for box, view in parts):
                differing.append(entry.name)
        return differing

    def bench_forget(self) -> None:
        """Zero every parameter, so that `bench_differences` cannot take old weights for new ones.

        On a CPU vLLM repacks its weights, so only adapters are zeroed there.
        """
        adapters = self._bench_adapters
        if self.device.type == "cpu" and not adapters:
            return
        weights = adapters.buffers.values() if adapters else self.model_runner.get_model().parameters()
        with torch.no_grad():
            for tensor in weights:
                tensor.zero_()

    def _bench_tensors(self, plan: RefitPlan) -> dict[str, list[tuple[Any, Tensor]]]:
        """Return for each tensor its delivered parts, as (index into the whole tensor, values).

        The values are views of the live parameters. On a CPU they are the tensors that were delivered to vLLM's loader.
        """
        if adapters := self._bench_adapters:
            self._rl_regions = adapters.regions
        elif self._rl_regions is None:
            self._rl_regions = find_regions(self.model_runner, plan, self.device)
        parts: dict[str, list[tuple[Any, Tensor]]] = {}
        if not isinstance(self._rl_regions, UnsupportedLayout):
            for region in self._rl_regions:
                parts.setdefault(region.box.name, []).append((region.box.slices(), region.view))
            return parts
        # vLLM's loader changes the tensors, so that live parameters cannot be compared.
        sink = self._rl_receiver.sink if self._rl_receiver else None
        delivered = dict(sink.tensors()) if isinstance(sink, WholeTensorSink) else {}
        return {name: [((), tensor)] for name, tensor in delivered.items()}
