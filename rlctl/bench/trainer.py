"""A trainer rank as the bench needs it: random weights, both the run's own refit end and the reference schemes'."""

from dataclasses import dataclass
from pathlib import Path

import torch

from rlctl.bench.rounds import Measured, Meeting, run_rounds
from rlctl.bench.schemes import RAW_BYTES, Scheme, Wire, send
from rlctl.bench.weights import RandomShards
from rlctl.refit.group import Group, meet
from rlctl.refit.messages import Checks, Header, TransportSpec
from rlctl.refit.plan import Plan
from rlctl.refit.sending import SendingEnd, SendsWeights
from rlctl.training.process import met_at


@dataclass(frozen=True)
class BenchTrainerSpec:
    """master: dtype of the trainer's weights. init_method: where ranks meet for gathering."""

    folder: str
    rank: int
    world: int
    device: str
    master: str
    init_method: str

    def __call__(self) -> "BenchTrainer":
        return BenchTrainer(self)


class BenchTrainer(SendsWeights):
    """Hosted by `workers.Host`."""

    def __init__(self, spec: BenchTrainerSpec) -> None:
        self._spec, self._device = spec, torch.device(spec.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        if spec.world > 1:
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            torch.distributed.init_process_group(
                backend, store=met_at(spec.init_method, spec.rank, spec.world), rank=spec.rank, world_size=spec.world
            )
        self._weights = RandomShards(Path(spec.folder), spec.rank, spec.world, spec.master, self._device)
        self._sending = SendingEnd(self._weights, spec.rank, self._device)
        self._wire: Wire | None = None
        self._before = 0

    def layout(self, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """Of what is sent."""
        return self._weights.layout(dtype)

    def meet(self, port: int, parties: int) -> None:
        """Join the other processes of the bench."""
        self._meeting = Meeting(port, parties, keeper=self._spec.rank == 0)

    def fill(self, version: int) -> None:
        """The weights become those of a version."""
        self._weights.fill(version)

    def copy_speed(self, payload: int, rounds: int) -> Measured:
        """Copies of as many bytes as a refit has, within this device's memory (on CPU: memcpy)."""
        source, target = (torch.zeros(payload, dtype=torch.uint8, device=self._device) for _ in range(2))

        def work(number: int) -> tuple[dict[str, float], float]:
            target.copy_(source)
            self._synchronize()
            return {}, 0.0

        return run_rounds(Meeting(self._port(), 1, True), rounds, self._device, 0, work)

    def clear(self) -> None:
        """Leave the last scheme; what is allocated now is the ground for peaks."""
        self._sending.close()
        if self._wire and self._wire.group:
            self._wire.group.abort()
        self._wire = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def refit_rounds(self, plan: Plan, checks: Checks, version: int, rounds: int, in_turn: bool) -> Measured:
        """Send one version several times. in_turn: receivers begin when this is done."""

        def work(number: int) -> tuple[dict[str, float], float]:
            report = self._sending.send(Header(version + number, plan.digest, checks))
            if in_turn:
                self._meeting.wait()
            return {"pack": report["pack"]}, 0.0

        return run_rounds(self._meeting, rounds, self._device, self._before, work)

    def open_scheme(self, spec: TransportSpec, buffer_bytes: int) -> None:
        """Join the group of the reference schemes."""
        group = Group(meet(spec, True), spec, 0, 0, self._device) if self._spec.rank == 0 else None
        self._wire = Wire(group, buffer_bytes, self._device)

    def scheme_rounds(self, scheme: Scheme, dtype: str, payload: int, rounds: int) -> Measured:
        """Send by a reference scheme."""
        assert self._wire, "open_scheme comes first"
        wire = self._wire
        raw = scheme == "raw" and wire.group
        scratch = torch.zeros(min(payload, RAW_BYTES), dtype=torch.uint8, device=self._device) if raw else None

        def work(number: int) -> tuple[dict[str, float], float]:
            if scheme == "raw" and not wire.group:
                return {}, 0.0
            tensors = self._weights.gathered(getattr(torch, dtype))
            return send(scheme, wire, tensors, payload, scratch).seconds(), 0.0

        return run_rounds(self._meeting, rounds, self._device, self._before, work)

    def gather_rounds(self, dtype: str, rounds: int) -> Measured:
        """Gathering and converting alone, every tensor of the model."""

        def work(number: int) -> tuple[dict[str, float], float]:
            for _ in self._weights.gathered(getattr(torch, dtype)):
                pass
            self._synchronize()
            return {}, 0.0

        return run_rounds(self._alone, rounds, self._device, self._before, work)

    def meet_alone(self, port: int) -> None:
        """Join the other trainer ranks, without engines."""
        self._alone = Meeting(port, self._spec.world, keeper=self._spec.rank == 0)

    def _port(self) -> int:
        from rlctl.workers.ports import free_port

        return free_port()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
