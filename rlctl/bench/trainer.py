"""The trainer rank of `rlctl bench refit`: it sends random weights by a run's refit, and bytes over the plain link."""

from pathlib import Path

import torch

from rlctl.bench.rounds import BenchEnd, Measured, Meeting, Timing
from rlctl.bench.weights import NamedShape, RandomShards, parameters_of
from rlctl.models.adapters import AdapterSpec
from rlctl.refit.protocol import Checks, Header, TransportSpec
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.sender import SendsWeights
from rlctl.utils.ports import free_port


class BenchTrainer(SendsWeights):
    """Trainer rank. Its process is a `workers.actor.WorkerActor`."""

    def __init__(
        self,
        folder: str,
        adapters: AdapterSpec | None,
        rank: int,
        world: int,
        device: str,
        master: str,
    ) -> None:
        """Allocate this rank's shards.

        folder: has the model's config.json. adapters: sent instead of the weights. master: dtype of the shards.
        """
        # With adapters, engines prove in each refit that their live tensors are the sent ones.
        self._prove = adapters is not None
        self._rank = rank
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        rows: list[NamedShape]
        if adapters:
            rows = [(tensor.name, tensor.shape) for tensor in adapters.tensors]
        else:
            rows = parameters_of(Path(folder))
        self._weights = RandomShards(rows, rank, world, master, self._device)
        super().__init__(self._weights, rank, self._device)

    def layout(self, dtype: str) -> list[tuple[str, tuple[int, ...], str]]:
        """Return (name, shape, dtype) of each tensor to send."""
        return self._weights.layout(dtype)

    def rendezvous(self, port: int, parties: int) -> None:
        """Join the barrier of all processes of the bench, at `port` of this host. Rank 0 serves it."""
        self._end = BenchEnd(self._device, Meeting(port, parties, server=self._rank == 0))

    def fill(self, version: int) -> None:
        """Set the weights to those of `version`."""
        self._weights.fill(version)

    def copy_speed(self, payload: int, rounds: int) -> Measured:
        """Measure copies of `payload` bytes within this device's memory (on a CPU: memcpy)."""
        source = torch.zeros(payload, dtype=torch.uint8, device=self._device)
        target = torch.zeros_like(source)

        def work(number: int) -> Timing:
            target.copy_(source)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return {}, 0.0

        # A meeting of this process alone: no other takes part in the copies.
        return self._end.measure(rounds, work, Meeting(free_port(), parties=1, server=True))

    def clear(self) -> None:
        """Close the transport and the plain link that the last row used."""
        self.refit_close()
        self._end.clear()

    def refit_rounds(self, plan: RefitPlan, checks: Checks, version: int, rounds: int, in_turn: bool) -> Measured:
        """Send `rounds` versions, from `version` on. in_turn: receivers begin a round only after the send is done."""

        def work(number: int) -> Timing:
            report = self.refit_send(Header(version + number, plan.digest, checks, self._prove))
            if in_turn:
                self._end.meeting.wait()
            return {"pack": report.pack}, 0.0

        return self._end.measure(rounds, work)

    def plain_rounds(self, spec: TransportSpec, payload: int, rounds: int) -> Measured:
        """Send `payload` bytes over the plain link, `rounds` times. Rank 0 sends; other ranks only join the rounds."""
        return self._end.plain_rounds(spec, 0 if self._rank == 0 else None, payload, rounds)
