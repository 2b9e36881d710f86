"""An engine for tests of refit: it samples nothing, and receives broadcast weights straight into its parameters."""

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlctl.generation.engine import Engine, EngineStats, FinishedTurns, LoadMode, MemoryPart
from rlctl.generation.requests import PackedCompletions, RequestId, TurnRequest
from rlctl.generation.spec import EngineKind, EngineSpec
from rlctl.refit.pipeline import ChunkReceiver
from rlctl.refit.protocol import EngineReport, Header, Mode, PeerLost, RefitInterrupted, TransportSpec
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.transport import open_receiver
from rlctl.refit.weight_sink import BatchedCopy, WholeTensorSink

CPU = torch.device("cpu")


class PlainEngine(Engine):
    """Engine with the tensors of the refit plan. `state` is "interrupted" while only some have the new version."""

    def __init__(self, spec: EngineSpec) -> None:
        self._folder = Path(spec.model_path)
        self._receiver: ChunkReceiver | None = None
        self._sink: Live | None = None
        self.state = "whole"

    def refit_open(
        self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool
    ) -> LoadMode:
        if self._receiver:
            self._receiver.close()
        self._receiver = open_receiver(spec, plan, first_rank, CPU)
        self._sink = self._sink or Live(plan, self._folder)
        return LoadMode("direct", "plain parameters", 0, overwrites=True)

    def refit_receive(self, header: Header) -> EngineReport:
        assert self._receiver and self._sink
        begin = time.perf_counter()
        self.state = "interrupted"
        try:
            received = self._receiver.receive(header, self._sink)
        except PeerLost as error:
            raise RefitInterrupted(str(error)) from error
        self.state = "whole"
        seconds = time.perf_counter() - begin
        return EngineReport(received, seconds, seconds, 0.0)

    def live(self) -> dict[str, str]:
        """Return the state and a hash of every tensor."""
        assert self._sink
        return {"state": self.state} | {name: hash_of(tensor) for name, tensor in self._sink.tensors()}

    def submit(self, requests: list[TurnRequest]) -> None:
        raise NotImplementedError

    def collect(self, patience_s: float) -> FinishedTurns:
        return FinishedTurns([], PackedCompletions.pack([]), EngineStats())

    def abort(self, ids: list[RequestId]) -> int:
        return 0

    def sleep(self) -> None:
        """Do nothing: there is no device memory to give back."""

    def wake(self, part: MemoryPart) -> None:
        """Do nothing: there is no device memory to take."""

    def memory(self) -> dict[str, float]:
        return {}

    def notes(self) -> list[str]:
        return []


def hash_of(tensor: Tensor) -> str:
    """Return a hash of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


class Live(WholeTensorSink):
    """Parameters of the engine. If a file `hold-PID` exists for this process, it stops in the middle of a refit."""

    def __init__(self, plan: RefitPlan, folder: Path) -> None:
        super().__init__(plan, CPU)
        self._folder = folder
        self._chunks = 0

    def copies(self, arrived: Iterable[tuple[int, Tensor]]) -> BatchedCopy:
        self._chunks += 1
        if self._chunks == 4 and (self._folder / f"hold-{os.getpid()}").exists():
            (self._folder / f"held-{os.getpid()}").touch()
            time.sleep(3600)
        return super().copies(arrived)


def environment(device: str, devices: Sequence[str], beside: Sequence[str] = ()) -> dict[str, str]:
    """Return environment variables that give each engine one thread, because a test starts many engines."""
    return {"OMP_NUM_THREADS": "1"}


KIND = EngineKind(PlainEngine, environment)
