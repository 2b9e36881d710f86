"""A vLLM worker as the bench needs it: the run's own refit end, the reference schemes', and a look at every bit."""

from typing import Any

import torch
from torch import Tensor

from rlctl.bench.rounds import Measured, Meeting, run_rounds
from rlctl.bench.schemes import RAW_BYTES, Scheme, Wire, receive
from rlctl.bench.weights import make_tensor
from rlctl.generation.layout import NotPlain, find_regions
from rlctl.generation.worker import RefitWorker
from rlctl.refit.group import Group, meet
from rlctl.refit.messages import Checks, Header, TransportSpec
from rlctl.refit.plan import Plan
from rlctl.refit.sink import WholeSink


class BenchWorker(RefitWorker):
    """Mixed into vLLM's worker; `self.rank` counts the workers of its engine."""

    _bench_wire: Wire | None = None
    _bench_before: int = 0

    def bench_meet(self, port: int, parties: int) -> None:
        """Join the other processes of the bench."""
        self._bench_meeting = Meeting(port, parties, keeper=False)

    def bench_clear(self) -> None:
        """Leave the last scheme; what is allocated now is the ground for peaks."""
        if self._rl_intake:
            self._rl_intake.close()
        if self._bench_wire and self._bench_wire.group:
            self._bench_wire.group.abort()
        self._rl_intake = self._bench_wire = None
        self._bench_kept: dict[str, Tensor] = {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._bench_before = torch.cuda.memory_allocated(self.device)

    def bench_refit_rounds(self, plan: Plan, checks: Checks, version: int, rounds: int, in_turn: bool) -> Measured:
        """Receive and commit several times, by the transport that `rl_open` joined."""

        def work(number: int) -> tuple[dict[str, float], float]:
            if in_turn:
                self._bench_meeting.wait()
            report = self._rl.receive(Header(version + number, plan.digest, checks))
            return {name: report[name] for name in ("wire", "load")}, self._rl.commit()

        return run_rounds(self._bench_meeting, rounds, self.device, self._bench_before, work)

    def bench_open_scheme(self, spec: TransportSpec, buffer_bytes: int, first_rank: int) -> None:
        """Join the group of the reference schemes."""
        group = Group(meet(spec, False), spec, 0, first_rank + self.rank, self.device)
        self._bench_wire = Wire(group, buffer_bytes, self.device)

    def bench_scheme_rounds(self, scheme: Scheme, plan: Plan, rounds: int) -> Measured:
        """Receive by a reference scheme."""
        assert self._bench_wire, "bench_open_scheme comes first"
        wire = self._bench_wire
        layout = [(e.name, torch.Size(e.shape), getattr(torch, e.dtype)) for e in plan.entries]
        size = min(sum(e.nbytes for e in plan.entries), RAW_BYTES)
        scratch = torch.zeros(size, dtype=torch.uint8, device=self.device) if scheme == "raw" else None

        def work(number: int) -> tuple[dict[str, float], float]:
            return receive(scheme, wire, layout, self._bench_load, scratch).seconds(), 0.0

        with torch.no_grad():
            return run_rounds(self._bench_meeting, rounds, self.device, self._bench_before, work)

    def bench_differences(self, plan: Plan, version: int, master: str) -> list[str]:
        """Names of the tensors of which this engine does not hold the bits of a version, as it was sent."""
        held = self._bench_held(plan)
        wrong = []
        for entry in plan.entries:
            sent = make_tensor(entry.name, entry.shape, version, getattr(torch, master), self.device)
            sent = sent.to(getattr(torch, entry.dtype))
            places = held.get(entry.name, [])
            if not places or not all(torch.equal(view, sent[box]) for box, view in places):
                wrong.append(entry.name)
        return wrong

    def bench_forget(self) -> None:
        """Overwrite every parameter, so that old weights cannot pass for new ones; on CPU what arrived is looked at."""
        if self.device.type == "cpu":
            return
        with torch.no_grad():
            for parameter in self.model_runner.get_model().parameters():
                parameter.zero_()

    def _bench_load(self, tensors: list[tuple[str, Tensor]]) -> None:
        """On CPU, where vLLM repacks weights, received tensors are kept instead: loading is no matter of transport."""
        if self.device.type == "cpu":
            self._bench_kept.update(tensors)
        else:
            self.model_runner.get_model().load_weights(iter(tensors))

    def _bench_held(self, plan: Plan) -> dict[str, list[tuple[Any, Tensor]]]:
        """Where each tensor lies now: parts of the live parameters, or on CPU what was delivered to the loader."""
        if self._rl_regions is None:
            self._rl_regions = find_regions(self.model_runner, plan, self.device)
        held: dict[str, list[tuple[Any, Tensor]]] = {}
        if not isinstance(self._rl_regions, NotPlain):
            for region in self._rl_regions:
                held.setdefault(region.box.name, []).append((region.box.slices(), region.view))
            return held
        sink = self._rl_intake.sink if self._rl_intake else None
        delivered = dict(sink.tensors()) if isinstance(sink, WholeSink) else self._bench_kept
        return {name: [((), tensor)] for name, tensor in delivered.items()}
