"""`rlctl bench offload`: what it costs to have optimizer state on the host while log-probs are computed.

In one run: plain page-locked copies over the link, the trainer's mover on state of the model's shape, and steps (a pass
over log-probs, then an update) with the state left where it is and moved. Each in a fresh process, on one device.
"""

import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from rlctl.bench.workload import make_random_model
from rlctl.config.schema import TrainerSection

if TYPE_CHECKING:
    from rlctl.training.worker import Share

_COPY, _ROUNDS = 1 << 30, 5
Result = TypeVar("Result")


@dataclass(frozen=True)
class OffloadBench:
    """What is measured. section: the trainer's, backend and all. tokens: of a sequence. batch: sequences a step.
    steps: counted ones, after the first.
    """

    shape: Path
    model: str
    section: TrainerSection
    tokens: int
    batch: int
    steps: int
    device: str


@dataclass(frozen=True)
class Copies:
    """Bytes/s to the host and to the device. nbytes: of the state that the mover moves. link: one large copy.
    mover: the whole state. first: seconds of its first way out, which makes the host buffer.
    """

    nbytes: int
    link: tuple[float, float]
    mover: tuple[float, float]
    first: float

    @property
    def shares(self) -> tuple[float, float]:
        """Of the link's speed that the mover reaches."""
        return self.mover[0] / self.link[0], self.mover[1] / self.link[1]

    def seconds(self, moved: tuple[float, float]) -> float:
        """Of so many bytes to the host and to the device, if nothing ran beside them."""
        return moved[0] / self.mover[0] + moved[1] / self.mover[1]


@dataclass(frozen=True)
class StepRow:
    """Steps of one kind: medians in seconds. peak: most bytes of the device allocated during log-probs.
    moved: bytes a step to the host and to the device. device: bytes allocated there after an update; host: what the
    process grew by; both of a parameter. losses: of each update.
    """

    kind: str
    log_probs: float
    train: float
    peak: float
    moved: tuple[float, float]
    device: float
    host: float
    losses: list[float]

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.log_probs + self.train


@dataclass(frozen=True)
class OffloadResults:
    """copies: None without a GPU, where state is in host memory and never moves. rows: left, moved, and those that
    the host updates."""

    model: str
    backend: str
    tokens: int
    batch: int
    copies: Copies | None
    rows: list[StepRow]

    @property
    def cost(self) -> float:
        """Seconds that a step takes longer when state moves."""
        return self.rows[1].step - self.rows[0].step

    @property
    def moving(self) -> float | None:
        """Seconds that a step's moves take alone."""
        return self.copies.seconds(self.rows[1].moved) if self.copies else None

    @property
    def hidden(self) -> float | None:
        """Share of the moves' time that a step does not take longer."""
        return 1 - self.cost / self.moving if self.moving else None

    def as_json(self) -> dict[str, Any]:
        """Everything, with the derived figures."""
        copies = asdict(self.copies) | {"shares": self.copies.shares} if self.copies else None
        rows = [asdict(row) | {"step": row.step} for row in self.rows]
        return {
            **asdict(self),
            "copies": copies,
            "rows": rows,
            "cost": self.cost,
            "moving": self.moving,
            "hidden": self.hidden,
        }


def run_offload_bench(bench: OffloadBench, folder: Path, say: Callable[[str], None]) -> OffloadResults:
    """Measure in `folder`. Raises RuntimeError or OSError with what went wrong in a process."""
    say(f"random weights in the shape of {bench.model}")
    make_random_model(bench.shape, folder)
    copies = None
    if bench.device != "cpu":
        say("copies between device and host")
        copies = _apart(measure_copies, folder / "model", bench.device)
    rows = []
    for kind in kinds(bench.section, bench.device):
        say(f"{bench.steps + 1} steps, optimizer state {kind}")
        rows.append(_apart(measure_steps, bench, kind, folder))
    return OffloadResults(bench.model, bench.section.backend, bench.tokens, bench.batch, copies, rows)


LEFT, MOVED, HOST, OVERLAPPED = "left", "moved", "on the host", "on the host, overlapped"


def kinds(section: TrainerSection, device: str) -> list[str]:
    """What is measured: Megatron's host optimizer only where weights are of bfloat16."""
    half = section.dtype == "bfloat16" or (section.dtype == "auto" and device != "cpu")
    return [LEFT, MOVED, *[HOST, OVERLAPPED] * (section.backend == "megatron" and half)]


def _section(section: TrainerSection, kind: str) -> TrainerSection:
    hosted = replace(
        section.megatron,
        optimizer_cpu_offload=kind in (HOST, OVERLAPPED),
        overlap_cpu_optimizer_d2h_h2d=kind == OVERLAPPED,
    )
    return replace(
        section,
        num_ranks=1,
        megatron=hosted,
        offload_optimizer_for_logprob=kind == MOVED,
        offload_optimizer_for_generation=False,
    )


def _apart(work: Callable[..., Result], *arguments: Any) -> Result:
    """In a process of its own, which ends with it: device memory and process groups too."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except Exception as error:  # of whatever kind: it is that process's, and told in one line
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def measure_copies(model: Path, name: str) -> Copies:
    """The link, then a mover with AdamW's two moments of the model. name: of the device, one of CUDA."""
    import torch

    from rlctl.bench.weights import parameters_of
    from rlctl.training.moving import Mover

    device = torch.device(name)
    torch.cuda.set_device(device)
    there, here = (torch.zeros(_COPY, dtype=torch.uint8, device=where) for where in (device, "cpu"))
    here = here.pin_memory()

    def copy(target: torch.Tensor, source: torch.Tensor) -> float:
        def work() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return _COPY / median(_seconds(work) for _ in range(_ROUNDS))

    link = copy(here, there), copy(there, here)
    del there, here
    state = [torch.zeros(shape, device=device) for _, shape in parameters_of(model) for _ in range(2)]
    mover = Mover(state)

    def move(place: Any) -> None:
        mover.move(place)
        mover.settle()

    torch.cuda.synchronize(device)
    times = [(_seconds(lambda: move("host")), _seconds(lambda: move("device"))) for _ in range(1 + _ROUNDS)]
    out, back = (median(each[way] for each in times[1:]) for way in (0, 1))
    return Copies(mover.nbytes, link, (mover.nbytes / out, mover.nbytes / back), times[0][0])


def measure_steps(bench: OffloadBench, kind: str, folder: Path) -> StepRow:
    """Steps of a trainer of one rank in this process; the first, which warms everything up, is not counted."""
    import torch

    from rlctl.sft.loss import NllLoss
    from rlctl.training import process
    from rlctl.training.interface import Totals
    from rlctl.training.worker import TrainerSpec, TrainerWorker

    model, meeting = str(folder / "model"), f"file://{folder / kind}"
    section, count = _section(bench.section, kind), 1 + bench.steps
    before = process.memory(torch.device("cpu"))["host_rss"]
    trainer = TrainerWorker(TrainerSpec(section, model, model, 0, 1, meeting, bench.device, 1.0, count, 0, None))
    share, totals = _share(bench), Totals((bench.tokens - 1) * bench.batch, bench.batch)
    seconds, peaks, losses = [], [], []
    for _ in range(count):
        if bench.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        scoring = _seconds(lambda: trainer.log_probs(share))
        peaks.append(trainer.memory()["device_peak"])
        seconds.append((scoring, _seconds(lambda: losses.append(trainer.train(share, NllLoss(), totals)["loss/nll"]))))
    memory = trainer.memory()
    moved = memory["moved_to_host"] / count, memory["moved_to_device"] / count
    log_probs, train = (median(each[part] for each in seconds[1:]) for part in (0, 1))
    parameters = trainer.info()["parameters"]
    device, host = memory["device_allocated"] / parameters, (memory["host_rss"] - before) / parameters
    return StepRow(kind, log_probs, train, max(peaks[1:]), moved, device, host, losses)


def _share(bench: OffloadBench) -> "Share":
    """Random tokens, of which all but each sequence's first are trained on."""
    import numpy as np

    from rlctl.training.plan import plan_micro_batches
    from rlctl.training.sequences import Sequence
    from rlctl.training.worker import Share

    vocabulary = int(json.loads((bench.shape / "config.json").read_text())["vocab_size"])
    rng, mask = np.random.default_rng(0), np.arange(bench.tokens) > 0
    data = [Sequence(rng.integers(vocabulary, size=bench.tokens).astype(np.int32), mask) for _ in range(bench.batch)]
    [plan] = plan_micro_batches([bench.tokens] * bench.batch, 1, bench.section.micro_batch_tokens)
    return Share.of([[data[index] for index in batch] for batch in plan])


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
