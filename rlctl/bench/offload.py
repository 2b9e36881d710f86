"""`rlctl bench offload`: the cost of keeping optimizer state on the host while log-probs are computed.

It measures three things: plain copies between page-locked host memory and the device; the trainer's `OffloadedTensors`
on optimizer state of the model's shape; and training steps (log-probs of all tokens, then an update) for each place
where the state can be. Each measurement has a fresh process, on one device.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, words
from rlctl.bench.runs import in_process
from rlctl.bench.workload import longest, make_random_model, model_problems, shape_folder
from rlctl.config.errors import ConfigError, Problem
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.trainer_settings import TrainerSettings

if TYPE_CHECKING:
    from rlctl.training.trainer_worker import RankBatch

# Bytes of one plain copy, and number of copies.
_COPY = 1 << 30
_ROUNDS = 5
# Places of optimizer state during a step. left: it stays on the device. moved: on the host during log-probs, on the
# device during the update. on the host: it stays there, and the CPU updates the weights; overlapped: while gradients
# and weights are copied.
LEFT = "left"
MOVED = "moved"
HOST = "on the host"
OVERLAPPED = "on the host, overlapped"
# Backend -> places where the state stays on the host.
HOST_UPDATES: dict[str, tuple[str, ...]] = {"fsdp": (), "megatron": (HOST, OVERLAPPED)}
_OFFLOAD_LEGEND = (
    "link: one page-locked copy of 1 GiB; mover: all optimizer state; step: log-probs of all tokens, then an update, "
    "medians in seconds; peak: most device memory allocated during log-probs; B/p: bytes a parameter, on the device "
    "those allocated after an update, on the host those that the process has grown by"
)


@dataclass(frozen=True)
class OffloadBench(Bench):
    """Training steps, a row for each place of optimizer state. With a GPU also copies of that state."""

    model: str
    backend: str
    settings: list[str]  # overrides of the trainer section
    tokens: int  # of a sequence
    batch: int  # sequences of a step
    steps: int  # counted ones, after the first
    device: str  # torch's name, for example "cuda:0"

    @cached_property
    def section(self) -> TrainerSettings:
        """Trainer section with the settings applied and each `auto` decided. Raises ConfigError."""
        settings = [f"trainer.backend={self.backend}", "trainer.compile=false", *self.settings]
        run = load("sft", None, settings).settled
        return run.settle_on(RunMachine("cpu" if self.device == "cpu" else "cuda"), None).trainer

    @property
    def places(self) -> list[str]:
        """Places of optimizer state to measure. The CPU can update weights of bfloat16 alone."""
        if self.section.dtype != "bfloat16":
            return [LEFT, MOVED]
        return [LEFT, MOVED, *HOST_UPDATES[self.section.backend]]

    def check(self) -> list[Problem]:
        problems: list[Problem] = []
        words("--backend", self.backend, HOST_UPDATES, problems)
        problems += model_problems(self.model)
        if problems:
            return problems
        try:
            limit = min(longest(self.model), self.section.micro_batch_tokens)
        except ConfigError as error:
            return error.problems
        if self.tokens <= limit:
            return []
        return [Problem("--seq-len", "", f"{self.tokens}: the model, or a pass, holds {limit} at most")]

    def measure(self, folder: Path, say: Say) -> "OffloadResults":
        say(f"random weights in the shape of {self.model}")
        make_random_model(shape_folder(self.model, folder), folder)
        copies = None
        if self.device != "cpu":
            say("copies between device and host")
            copies = in_process(measure_copies, folder / "model", self.device)
        rows = []
        for place in self.places:
            say(f"{self.steps + 1} steps, optimizer state {place}")
            rows.append(in_process(measure_steps, self, place, folder))
        return OffloadResults(self.model, self.section.backend, self.tokens, self.batch, copies, rows)


@dataclass(frozen=True)
class CopyRates:
    """Rates of copies. A pair is (to the host, to the device), in bytes/s."""

    nbytes: int  # of the optimizer state
    link: tuple[float, float]  # one large plain copy
    mover: tuple[float, float]  # the whole optimizer state, moved by `OffloadedTensors`
    first: float  # seconds of the first move to the host, with the allocation of the host buffer

    @property
    def shares(self) -> tuple[float, float]:
        """Rate of the mover divided by that of the link, in each direction."""
        return self.mover[0] / self.link[0], self.mover[1] / self.link[1]

    def seconds(self, moved: tuple[float, float]) -> float:
        """Return the seconds to move (bytes to the host, bytes to the device) with nothing else running."""
        return moved[0] / self.mover[0] + moved[1] / self.mover[1]

    def table(self) -> ResultTable:
        """Return a table with one row for each direction."""
        ways = zip(("to host", "to device"), self.link, self.mover, self.shares)
        return ResultTable(
            [
                [
                    (f"{self.nbytes / 1e9:.2f} GB of state", way),
                    ("link GB/s", f"{link / 1e9:.1f}"),
                    ("mover GB/s", f"{mover / 1e9:.1f}"),
                    ("share", f"{share:.0%}"),
                ]
                for way, link, mover, share in ways
            ]
        )


@dataclass(frozen=True)
class StepRow:
    """Results of steps with optimizer state in one place. Times are medians in seconds."""

    kind: str  # the place, for example "moved"
    log_probs: float
    train: float
    peak: float  # most bytes of the device allocated during log-probs
    moved: tuple[float, float]  # bytes that a step moves to the host and to the device
    device: float  # bytes allocated on the device after an update, divided by the number of parameters
    host: float  # bytes by which the process has grown, divided by the number of parameters
    losses: list[float]  # of each update

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.log_probs + self.train

    def cells(self) -> Cells:
        """Return the cells of its table row."""
        return [
            ("optimizer state", self.kind),
            ("log-probs", f"{self.log_probs:.3f}"),
            ("update", f"{self.train:.3f}"),
            ("step", f"{self.step:.3f}"),
            ("peak GB", f"{self.peak / 1e9:.2f}"),
            ("moved GB", f"{sum(self.moved) / 1e9:.2f}"),
            ("B/p dev", f"{self.device:.1f}"),
            ("B/p host", f"{self.host:.1f}"),
        ]


@dataclass(frozen=True)
class OffloadResults(Results):
    """Results: a row for each place of optimizer state. The first two are left and moved."""

    model: str
    backend: str
    tokens: int
    batch: int
    copies: CopyRates | None  # None without a GPU, where state never moves
    rows: list[StepRow]

    @property
    def cost(self) -> float:
        """Seconds that moving the state adds to a step."""
        return self.rows[1].step - self.rows[0].step

    @property
    def moving(self) -> float | None:
        """Seconds that a step's moves take with nothing else running."""
        return self.copies.seconds(self.rows[1].moved) if self.copies else None

    @property
    def hidden(self) -> float | None:
        """Share of `moving` that is not in `cost`."""
        return 1 - self.cost / self.moving if self.moving else None

    def derived_figures(self, row: StepRow) -> dict[str, Any]:
        return {"step": row.step}

    def as_json(self) -> Any:
        """Return all fields, the mover's shares of the link's rates, and the costs of moving."""
        copies = asdict(self.copies) | {"shares": self.copies.shares} if self.copies else None
        costs = {"cost": self.cost, "moving": self.moving, "hidden": self.hidden}
        return super().as_json() | {"copies": copies} | costs

    def report(self, wide: bool) -> list[Line | ResultTable]:
        work = f"{self.batch} sequences of {self.tokens:,} tokens a step"
        head = Line(f"{self.model}, backend {self.backend}: {work}")
        steps = ResultTable([row.cells() for row in self.rows])
        if self.copies is None:
            return [head, steps, Line("no GPU: optimizer state is in host memory at all times, 0 bytes were moved")]
        moves = f"the moves alone take {self.moving:.3f} s"
        cost = Line(f"a step takes {self.cost:+.3f} s longer; {moves}: {self.hidden:.0%} of them hidden")
        return [head, self.copies.table(), steps, cost, Line(_OFFLOAD_LEGEND, "dim")]


def measure_copies(model: Path, name: str) -> CopyRates:
    """Measure plain copies, then moves of the model's two AdamW moments. name: a CUDA device, such as "cuda:0"."""
    import torch

    from rlctl.bench.weights import parameters_of
    from rlctl.training.offload import OffloadedTensors

    device = torch.device(name)
    torch.cuda.set_device(device)
    on_device = torch.zeros(_COPY, dtype=torch.uint8, device=device)
    on_host = torch.zeros(_COPY, dtype=torch.uint8, device="cpu").pin_memory()

    def copy_rate(target: torch.Tensor, source: torch.Tensor) -> float:
        def work() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)

        return _COPY / median(seconds_of(work) for _ in range(_ROUNDS))

    link = (copy_rate(on_host, on_device), copy_rate(on_device, on_host))
    del on_device, on_host
    # AdamW has two moments in float32 for each parameter.
    moments: list[torch.Tensor] = []
    for _, shape in parameters_of(model):
        moments += [torch.zeros(shape, device=device), torch.zeros(shape, device=device)]
    mover = OffloadedTensors(moments)

    def move(place: Any) -> None:
        mover.move(place)
        mover.settle()

    torch.cuda.synchronize(device)
    to_host: list[float] = []
    to_device: list[float] = []
    for _ in range(1 + _ROUNDS):
        to_host.append(seconds_of(lambda: move("host")))
        to_device.append(seconds_of(lambda: move("device")))
    rates = (mover.nbytes / median(to_host[1:]), mover.nbytes / median(to_device[1:]))
    return CopyRates(mover.nbytes, link, rates, first=to_host[0])


def measure_steps(bench: OffloadBench, place: str, folder: Path) -> StepRow:
    """Time the steps of a one-rank trainer in this process. The first step warms up and is not counted."""
    import torch

    from rlctl.sft.loss import NllLoss
    from rlctl.training.interface import Totals
    from rlctl.training.offload import process_memory
    from rlctl.training.spec import TrainerSpec
    from rlctl.training.trainer_worker import TrainerWorker

    model = str(folder / "model")
    meeting = f"file://{folder / place}"
    is_updated_on_host = place in (HOST, OVERLAPPED)
    count = 1 + bench.steps
    section = replace(
        bench.section,
        num_ranks=1,
        megatron=replace(
            bench.section.megatron,
            optimizer_cpu_offload=is_updated_on_host,
            overlap_cpu_optimizer_d2h_h2d=place == OVERLAPPED,
        ),
        offload_optimizer_for_logprob=place == MOVED,
        offload_optimizer_for_generation=False,
    )
    rss_before = process_memory(torch.device("cpu"))["host_rss"]
    spec = TrainerSpec(
        config=section,
        model_path=model,
        tokenizer_path=model,
        rank=0,
        world=1,
        init_method=meeting,
        device=bench.device,
        temperature=1.0,
        total_updates=count,
        seed=0,
        profile=None,
        roles={},
    )
    trainer = TrainerWorker(spec)
    share = random_batch(folder / "model", bench.tokens, bench.batch, bench.section.micro_batch_tokens)
    # Each sequence is a rollout, and all its tokens but the first are trained on.
    totals = Totals(tokens=(bench.tokens - 1) * bench.batch, sequences=bench.batch, rollouts=bench.batch)
    scoring_seconds: list[float] = []
    training_seconds: list[float] = []
    peaks: list[float] = []
    losses: list[float] = []
    for _ in range(count):
        if bench.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        scoring_seconds.append(seconds_of(lambda: trainer.log_probs(share)))
        peaks.append(trainer.memory()["device_peak"])
        training_seconds.append(seconds_of(lambda: losses.append(trainer.train(share, NllLoss(), totals)["loss/nll"])))
    memory = trainer.memory()
    moved = memory["moved_to_host"] / count, memory["moved_to_device"] / count
    parameters = trainer.info()["parameters"]
    device = memory["device_allocated"] / parameters
    host = (memory["host_rss"] - rss_before) / parameters
    return StepRow(
        kind=place,
        log_probs=median(scoring_seconds[1:]),
        train=median(training_seconds[1:]),
        peak=max(peaks[1:]),
        moved=moved,
        device=device,
        host=host,
        losses=losses,
    )


def random_batch(model: Path, tokens: int, count: int, micro_batch: int) -> "RankBatch":
    """Return `count` random sequences of `tokens` tokens, packed into micro-batches of at most `micro_batch`.

    All tokens but each sequence's first are trained on.
    """
    import numpy as np

    from rlctl.training.micro_batching import TrainingSample, plan_micro_batches
    from rlctl.training.trainer_worker import RankBatch

    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    rng = np.random.default_rng(0)
    mask = np.arange(tokens) > 0
    samples = [TrainingSample(rng.integers(vocabulary, size=tokens).astype(np.int32), mask, {}) for _ in range(count)]
    # The plan of the only rank.
    [plan] = plan_micro_batches([tokens] * count, 1, micro_batch)
    return RankBatch.from_micro_batches([[samples[index] for index in batch] for batch in plan])


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that `work` takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
