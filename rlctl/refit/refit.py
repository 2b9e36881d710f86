"""A refit as the driver runs it: both ends opened once, then one call a version, checked and timed."""

from dataclasses import dataclass
from typing import Any

from rlctl.refit.plan import Header, Plan, RefitError, TransportSpec
from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import Pending, Worker, WorkerGroup
from rlctl.workers.ports import free_port

KNOB = "refit.timeout_s"


@dataclass(frozen=True)
class EngineEnd:
    """One engine: its process, and the number of workers (tensor-parallel ranks) behind it."""

    worker: Worker
    ranks: int


class EnginesLost(RuntimeError):
    """Engines that must be rebuilt, by index: they may hold a mixture of versions, or nothing at all."""

    def __init__(self, reasons: dict[int, Exception]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(str(reason) for reason in reasons.values()))


class Refit:
    """Brings engines to the trainer's version."""

    def __init__(self, trainers: WorkerGroup, dtype: str, kind: str, folder: str, timeout_s: float) -> None:
        self._trainers, self._kind, self._folder, self._timeout = trainers, kind, folder, timeout_s
        self.plan: Plan = trainers.call("refit_plan", dtype)[0]
        self._opened = False

    def open(self, engines: list[EngineEnd]) -> None:
        """Connect both ends; again after an engine was replaced."""
        world = 1 + sum(engine.ranks for engine in engines)
        spec = self._spec(world)
        pending = []
        if spec.rendezvous or not self._opened:
            pending.append(self._trainers.start("refit_open", spec, self.plan))
        first = 1
        for engine in engines:
            pending.append(engine.worker.start("refit_open", spec, self.plan, first))
            first += engine.ranks
        self._gather(pending)
        self._opened = True

    def run(self, engines: list[EngineEnd], version: int, checksums: bool) -> None:
        """Send `version` and load it everywhere.

        Raises RefitError naming the first tensor that arrived changed, EnginesLost for engines that failed.
        """
        header = Header(version, self.plan.digest, checksums)
        sending = self._trainers.start("refit_send", header)
        if not self._rendezvous:
            sent = self._gather([sending])[0]
        receiving = [engine.worker.start("refit_receive", header) for engine in engines]
        if self._rendezvous:
            sent = self._gather([sending])[0]
        lost: dict[int, Exception] = {}
        for index, (engine, part) in enumerate(zip(engines, receiving)):
            try:
                received = part.wait(self._timeout, KNOB)[0]
            except (WorkerDied, WorkerError, WorkerTimeout) as error:
                lost[index] = error
                continue
            self._compare(engine.worker.name, sent[0], received["checksums"])
        if lost:
            raise EnginesLost(lost)

    def resend(self, engines: list[EngineEnd], fresh: list[EngineEnd], version: int) -> None:
        """Bring replaced engines to `version`, which the others already have."""
        if self._rendezvous:
            self.open(engines)
            self.run(engines, version, checksums=True)
            return
        self.open(fresh)
        header = Header(version, self.plan.digest, False)
        self._gather([engine.worker.start("refit_receive", header) for engine in fresh])

    @property
    def _rendezvous(self) -> bool:
        return self._spec(0).rendezvous

    def _spec(self, world: int) -> TransportSpec:
        if self._kind == "shm":
            return TransportSpec("shm", folder=self._folder)
        port = free_port() if world else 0
        return TransportSpec("broadcast", host="127.0.0.1", port=port, world=world, timeout_s=self._timeout)

    def _gather(self, pending: list[Pending]) -> list[list[Any]]:
        return [part.wait(self._timeout, KNOB) for part in pending]

    def _compare(self, engine: str, sent: list[int], received: list[int]) -> None:
        entries = self.plan.entries if sent else ()
        for entry, ours, theirs in zip(entries, sent, received, strict=True):
            if ours != theirs:
                raise RefitError(f"{entry.name} reached {engine} changed: checksum {theirs}, sent {ours}")
