"""`rlctl bench refit`: weights from trainer ranks into vLLM engines, by rlctl's refit and by what it is measured
against, in one run on the same processes, devices and bytes; every row's weights are compared bit by bit.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.bench.models import longest, model_folder
from rlctl.bench.results import Results, Row, make_row
from rlctl.bench.schemes import LABELS, Scheme
from rlctl.bench.trainer import BenchTrainerSpec
from rlctl.cluster.placement import Placement
from rlctl.cluster.processes import trainer_environment
from rlctl.generation.engine import MakeEngine
from rlctl.generation.requests import SampleRequest
from rlctl.generation.spec import EngineSpec, environment
from rlctl.refit.messages import Checks, Kind, TransportSpec
from rlctl.refit.refit import EngineEnd, Options, Refit
from rlctl.telemetry.cores import usable_cores
from rlctl.telemetry.devices import visible_gpus
from rlctl.workers.group import Worker, WorkerGroup, WorkerSpec
from rlctl.workers.ports import free_port

_DEADLINE_S = 600.0
_PROMPT_TOKENS, _REQUESTS, _REQUEST_TOKENS = 64, 16, 192
# Long enough for decoding to be under way, short enough for requests to outlast the update.
_BEFORE_UPDATE_S = 0.25


@dataclass(frozen=True)
class RefitBench:
    """What to measure. master: dtype of the trainer's weights; dtype: what travels and is served.

    transports, modes, num_buffers, checks: a row of rlctl's refit for each combination. rounds: refits a row. updates:
    refits while requests run. references: whether the other schemes are measured too.
    """

    model: str
    placement: Placement
    tensor_parallel: int
    transports: tuple[Kind, ...]
    modes: tuple[str, ...]
    num_buffers: tuple[int, ...]
    master: str
    dtype: str
    buffer_memory_ratio: float
    checks: tuple[Checks, ...]
    timeout_s: float
    rounds: int
    updates: int
    references: bool
    enforce_eager: bool
    logs: str

    @property
    def reference_rounds(self) -> int:
        """Rounds of a row that is only compared with: enough for a median."""
        return min(self.rounds, 30)

    @property
    def cpu(self) -> bool:
        return self.placement.device == "cpu"

    def gpus(self, devices: Sequence[int]) -> list[str]:
        """As CUDA_VISIBLE_DEVICES wants them."""
        return [] if self.cpu else [visible_gpus()[index] for index in devices]


def run_bench(bench: RefitBench, folder: Path, say: Callable[[str], None]) -> Results:
    """Needs a running Ray. folder: in the host's memory, for the time of the bench. say: told what begins."""
    with ExitStack() as stack:
        say("starting trainer ranks and engines")
        stage = stack.enter_context(_staged(bench, model_folder(bench.model, folder), folder))
        stage.meet()
        rows = list(stage.rows(say))
    return Results(
        bench.model, stage.payload, len(stage.trainers), len(stage.engines), bench.tensor_parallel, stage.bound, rows
    )


@contextmanager
def _staged(bench: RefitBench, model: Path, folder: Path) -> Iterator["_Stage"]:
    trainers = _start_trainers(bench, model)
    engines: list[Worker] = []
    try:
        engines += [_start_engine(bench, model, index) for index in range(len(bench.placement.engines))]
        trainers.built().wait(_DEADLINE_S)
        for engine in engines:
            engine.built().wait(_DEADLINE_S)
        yield _Stage(bench, trainers, engines, folder)
    finally:
        trainers.kill()
        for engine in engines:
            engine.kill()


def _start_trainers(bench: RefitBench, model: Path) -> WorkerGroup:
    places, specs = bench.placement.trainers, []
    init_method = f"tcp://127.0.0.1:{free_port()}"
    for rank in range(len(places)):
        device = "cpu" if bench.cpu else "cuda:0"
        make = BenchTrainerSpec(str(model), rank, len(places), device, bench.master, init_method)
        env = trainer_environment(bench.gpus(places[rank].devices), max(1, usable_cores() // len(places)))
        specs.append(WorkerSpec(f"trainer-{rank}", make, env, f"{bench.logs}/trainer-{rank}.log", threads=2))
    return WorkerGroup(specs, _DEADLINE_S)


def _start_engine(bench: RefitBench, model: Path, index: int) -> Worker:
    spec = EngineSpec(
        model_path=str(model),
        dtype=bench.dtype,
        device=bench.placement.device,
        max_model_len=min(2 * (_PROMPT_TOKENS + _REQUEST_TOKENS), longest(model)),
        tensor_parallel_size=bench.tensor_parallel,
        max_num_seqs=_REQUESTS,
        # Room beside the engine for staging, and for a trainer on the same device.
        gpu_memory_utilization=0.5,
        kv_cache_mib=512,
        enforce_eager=bench.enforce_eager or bench.cpu,
        top_p=1.0,
        top_k=0,
        stop_token_ids=(),
        sleeps=False,
        seed=0,
        load_format="dummy",
        extension="rlctl.bench.engine.BenchWorker",
        recompute_kv_cache=False,
        forced_lengths=None,
    )
    seat = bench.placement.engines[index]
    beside = bench.placement.beside(seat) if "ipc" in bench.transports else ()
    env = environment(bench.placement.device, bench.gpus(seat.devices), bench.gpus(beside))
    return Worker(WorkerSpec(f"engine-{index}", MakeEngine(spec), env, f"{bench.logs}/engine-{index}.log", threads=4))


class _Stage:
    """The processes of a bench, and one method a kind of measurement."""

    def __init__(self, bench: RefitBench, trainers: WorkerGroup, engines: list[Worker], folder: Path) -> None:
        self.bench, self.trainers, self.engines, self._folder = bench, trainers, engines, folder
        self.ends = [EngineEnd(engine, bench.tensor_parallel) for engine in engines]
        self.workers = len(engines) * bench.tensor_parallel
        self.refit = Refit(trainers, self._options(bench.transports[0], "auto", bench.num_buffers[0]))
        self.payload = self.refit.plan.payload
        self.bound = 0.0
        self._version = 0

    def meet(self) -> None:
        """All processes join one meeting; trainer ranks one of their own."""
        port, alone, parties = free_port(), free_port(), len(self.trainers) + self.workers
        trainers = self.trainers.start("meet", port, parties)
        self._rpc("bench_meet", port, parties)
        trainers.wait(_DEADLINE_S)
        self.trainers.call("meet_alone", alone)

    def rows(self, say: Callable[[str], None]) -> Iterator[Row]:
        """Every row, as it is measured."""
        bench = self.bench
        shared = bench.placement.shared
        if shared:
            say("a plain copy")
            self._clear()
            first = self.trainers.workers[0]
            copied = first.start("copy_speed", self.payload, bench.reference_rounds).wait(_DEADLINE_S)[0]
            row = make_row("memcpy" if bench.cpu else "device copy", [copied], [copied])
            self.bound = row.seconds
            yield row
        # The plain link is what every row is compared with; where devices are shared, the copy above is.
        plain: list[Scheme] = [] if shared else ["raw"]
        others: list[Scheme] = (
            ["each", "packed-1", "packed-2"] if bench.references and (bench.cpu or not shared) else []
        )
        for scheme in plain + others:
            say(LABELS[scheme])
            yield self._reference(scheme)
        if len(self.trainers) > 1:
            say("gathering alone")
            yield self._gathering()
        for kind in bench.transports:
            for mode in bench.modes:
                for buffers in bench.num_buffers:
                    for checks in bench.checks:
                        say(f"rlctl: {kind}, {mode}, {buffers} buffers, checks {checks}")
                        yield self._ours(kind, mode, buffers, checks)

    def _reference(self, scheme: Scheme) -> Row:
        bench = self.bench
        spec = TransportSpec("broadcast", self.workers, bench.timeout_s, host="127.0.0.1", port=free_port())
        self._clear()
        self._fill()
        opening = self.trainers.start("open_scheme", spec, self.refit.buffer_bytes)
        joining = [
            engine.start("rpc", "bench_open_scheme", spec, self.refit.buffer_bytes, 1 + i * bench.tensor_parallel)
            for i, engine in enumerate(self.engines)
        ]
        for part in (opening, *joining):
            part.wait(_DEADLINE_S)
        sending = self.trainers.start("scheme_rounds", scheme, bench.dtype, self.payload, bench.reference_rounds)
        received = self._rpc("bench_scheme_rounds", scheme, self.refit.plan, bench.reference_rounds)
        sent = sending.wait(_DEADLINE_S)
        wrong = None if scheme == "raw" else self._differences()
        row = make_row(LABELS[scheme], sent, received, wrong)
        if scheme == "raw":
            self.bound = row.seconds
        return row

    def _gathering(self) -> Row:
        self._clear()
        gathered = self.trainers.call("gather_rounds", self.bench.dtype, self.bench.reference_rounds)
        return make_row("gathering to every rank alone", gathered, gathered)

    def _ours(self, kind: Kind, mode: str, buffers: int, checks: Checks) -> Row:
        bench = self.bench
        self._clear()
        self._fill()
        refit = Refit(self.trainers, self._options(kind, mode, buffers))
        choice = refit.open(self.ends)[0]
        in_turn = kind == "shm"
        arguments = (refit.plan, checks, 1, bench.rounds, in_turn)
        sending = self.trainers.start("refit_rounds", *arguments)
        received = self._rpc("bench_refit_rounds", *arguments)
        sent = sending.wait(_DEADLINE_S)
        wrong = self._differences()
        label = f"rlctl {kind}, {choice.mode}, {buffers} buffer{'s' * (buffers > 1)}, checks {checks}"
        row = make_row(label, sent, received, wrong, choice.mode)
        if bench.updates:
            row = replace(row, **self._while_requests_run(refit, checks))
        return row

    def _while_requests_run(self, refit: Refit, checks: Checks) -> dict[str, Any]:
        """Refits as a run does them, through the driver, while every engine samples."""
        stalls, seconds = [], []
        for number in range(self.bench.updates):
            for engine in self.engines:
                engine.start("generate", _requests(number))
            time.sleep(_BEFORE_UPDATE_S)
            begin = time.perf_counter()
            report = refit.run(self.ends, 1 + self.bench.rounds + number, checks)
            seconds.append(time.perf_counter() - begin)
            stalls.append(report["stall"])
            for engine in self.engines:
                engine.start("cancel").wait(_DEADLINE_S)
        return {"stall": median(stalls), "driver": median(seconds)}

    def _options(self, kind: Kind, mode: str, buffers: int) -> Options:
        bench = self.bench
        return Options(
            kind=kind,
            dtype=bench.dtype,
            mode=mode,
            num_buffers=buffers,
            buffer_memory_ratio=bench.buffer_memory_ratio,
            timeout_s=bench.timeout_s,
            folder=str(self._folder / "refit"),
            checks=bench.checks[0],
            colocated=bench.placement.shared and not bench.cpu and len(self.trainers) == self.workers == 1,
            in_flight=True,
        )

    def _clear(self) -> None:
        self.trainers.call("clear")
        self._rpc("bench_clear")

    def _fill(self) -> None:
        """New weights at the trainer, none at the engines."""
        self._version += 1
        self.trainers.call("fill", self._version)
        self._rpc("bench_forget")

    def _differences(self) -> list[str]:
        found = self._rpc("bench_differences", self.refit.plan, self._version, self.bench.master)
        return sorted({name for names in found for name in names})

    def _rpc(self, method: str, *args: object) -> list[Any]:
        pending = [engine.start("rpc", method, *args) for engine in self.engines]
        return [answer for part in pending for answer in part.wait(_DEADLINE_S)[0]]


def _requests(number: int) -> list[SampleRequest]:
    """What engines sample while weights change: prompts that differ, so that no prefix is cached."""
    return [
        SampleRequest(f"b{number}-{i}", [7 + number * _REQUESTS + i] * _PROMPT_TOKENS, 1, _REQUEST_TOKENS, 1.0, i)
        for i in range(_REQUESTS)
    ]
