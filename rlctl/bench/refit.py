"""`rlctl bench refit`: times the transfer of weights from trainer ranks to vLLM engines, against the plain link.

The plain link is a bare broadcast of as many bytes, with no work on either side. All rows are measured with the same
processes, devices and bytes. Delivered weights are compared with the sent ones bit by bit.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

from rlctl.bench.frame import Bench, Say
from rlctl.bench.refit_results import RefitResults, SchemeRow, make_row
from rlctl.bench.trainer import BenchTrainer
from rlctl.bench.workload import longest, model_folder, model_problems
from rlctl.config.errors import Problem
from rlctl.config.grpo_schema import RefitSection
from rlctl.dashboard.formats import count
from rlctl.generation.engine import Engine
from rlctl.generation.requests import RequestId, RolloutId, TurnRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.engine import VllmEngine
from rlctl.generation.vllm.kind import environment, make_vllm_engine
from rlctl.launch.local_ray import local_ray
from rlctl.launch.sampling import shared_memory
from rlctl.launch.worker_specs import trainer_environment
from rlctl.models.adapters import AdapterSpec, choose_targets
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.placement import Placement, ResourceRequest, place, this_machine, usual_transport
from rlctl.refit.protocol import Checks, Kind, Mode, TransportSpec
from rlctl.refit.refit import EngineEnd, Refit, RefitOptions
from rlctl.utils.devices import usable_cores, visible_gpus
from rlctl.utils.ports import free_port
from rlctl.workers.group import Pending, Worker, WorkerGroup, WorkerSpec

_DEADLINE_S = 600.0
# The most rounds of the plain link. More would not change the median.
_MOST_PLAIN = 30
# Requests that each engine samples during an update, and their tokens.
_PROMPT_TOKENS = 64
_REQUESTS = 16
_REQUEST_TOKENS = 192
# An update begins after this number of engine steps. The prompts are then computed, and no request ends before it.
_BEFORE_UPDATE = 12
_POLL_S = 0.005


@dataclass(frozen=True)
class RefitBench(Bench):
    """Refits: a row for the plain link, and a row for each combination of transport, mode, buffers and checks."""

    model: str
    gpus: int  # of this machine
    trainers: int
    engines: int
    tensor_parallel: int
    colocated: bool  # trainer and engines share GPUs
    transports: Sequence[Kind]  # empty: the one that a run would choose
    modes: Sequence[Mode]
    num_buffers: Sequence[int]
    checks: Sequence[Checks]
    master: str  # dtype of the trainer's weights
    defaults: RefitSection  # refit section of the default config
    rounds: int  # refits of each row
    updates: int  # further refits of each row, while requests run
    enforce_eager: bool
    lora_rank: int = 0  # rank of LoRA adapters to send instead of the weights; 0: send the weights

    def check(self) -> list[Problem]:
        problems = model_problems(self.model)
        if self.cpu and self.tensor_parallel > 1:
            problems.append(Problem("--tensor-parallel", "", "on CPU an engine is one process: allowed is 1"))
        try:
            assert self.placement
        except ValueError as error:
            problems.append(Problem("--trainers, --generators, --tensor-parallel", "", str(error)))
        if self.lora_rank and (self.modes != ["auto"] or self.checks != ["all"]):
            message = "adapters are always staged and checked whole: leave --mode and --checksum out"
            problems.append(Problem("--lora-rank", "", message))
        if "direct" in self.modes and self.cpu:
            message = "direct needs a GPU: on CPU vLLM repacks its weights; allowed: auto, staged"
            problems.append(Problem("--mode", "", message))
        return problems

    def measure(self, folder: Path, say: Say) -> RefitResults:
        with local_ray(folder) as reaper, reaper.folder("rlctl-bench-", shared_memory()) as memory:
            say("starting trainer ranks and engines")
            with self._stage(memory, folder) as stage:
                rows = list(stage.rows(say))
        return RefitResults(
            model=self.model,
            payload=stage.payload,
            trainers=len(stage.trainers),
            engines=len(stage.engines),
            tensor_parallel=self.tensor_parallel,
            bound=stage.bound,
            rows=rows,
        )

    @property
    def cpu(self) -> bool:
        """True if there is no GPU."""
        return not self.gpus

    @property
    def dtype(self) -> str:
        """dtype in which weights are sent, and in which engines serve them."""
        return "float32" if self.cpu else "bfloat16"

    @cached_property
    def placement(self) -> Placement:
        """Devices of every process. Raises ValueError if there are too few."""
        request = ResourceRequest(self.trainers, self.engines, self.tensor_parallel, self.colocated)
        return place(this_machine(self.gpus), request)

    def _adapters(self, model: Path) -> AdapterSpec | None:
        """Return LoRA adapters for all linear layers that can have one; None to send the weights.

        model: a folder with the model's config.json.
        """
        if not self.lora_rank:
            return None
        targets, _ = choose_targets(read_sizes(model / "config.json").linears, "all")
        return AdapterSpec(self.lora_rank, alpha=2.0 * self.lora_rank, rslora=False, dropout=0.0, targets=targets)

    @property
    def kinds(self) -> Sequence[Kind]:
        """Transports to measure."""
        return self.transports or (usual_transport(self.placement, self.engines),)

    def _visible(self, devices: Sequence[int]) -> list[str]:
        """Return the names of devices for CUDA_VISIBLE_DEVICES; empty on a CPU."""
        return [] if self.cpu else [visible_gpus()[index] for index in devices]

    @contextmanager
    def _stage(self, memory: Path, logs: Path) -> Iterator["_Stage"]:
        """Start all processes, and kill them when the block ends. memory: folder for weights in transit."""
        model = model_folder(self.model, memory)
        adapters = self._adapters(model)
        trainers = self._start_trainers(model, adapters, logs)
        engines: list[Worker] = []
        try:
            engines += [self._start_engine(model, adapters, index, logs) for index in range(self.engines)]
            trainers.built().wait(_DEADLINE_S)
            for engine in engines:
                engine.built().wait(_DEADLINE_S)
            yield _Stage(self, trainers, engines, memory)
        finally:
            trainers.kill()
            for engine in engines:
                engine.kill()

    def _start_trainers(self, model: Path, adapters: AdapterSpec | None, logs: Path) -> WorkerGroup:
        """Start the trainer ranks, without waiting until they are built."""
        places = self.placement.trainers
        specs = []
        for rank in range(len(places)):
            device = "cpu" if self.cpu else "cuda:0"
            make = partial(
                BenchTrainer,
                folder=str(model),
                adapters=adapters,
                rank=rank,
                world=len(places),
                device=device,
                master=self.master,
            )
            env = trainer_environment(self._visible(places[rank].devices), max(1, usable_cores() // len(places)))
            specs.append(WorkerSpec(f"trainer-{rank}", make, env, f"{logs}/trainer-{rank}.log", threads=2))
        return WorkerGroup(specs, _DEADLINE_S)

    def _start_engine(self, model: Path, adapters: AdapterSpec | None, index: int, logs: Path) -> Worker:
        """Start one engine, without waiting until it is built."""
        spec = EngineSpec(
            kind="vllm",
            options={"fast_path": True, "enforce_eager": self.enforce_eager or self.cpu},
            model_path=str(model),
            dtype=self.dtype,
            device=self.placement.device,
            max_model_len=min(2 * (_PROMPT_TOKENS + _REQUEST_TOKENS), longest(str(model))),
            tensor_parallel_size=self.tensor_parallel,
            max_num_seqs=_REQUESTS,
            # The other half is for staged weights, and for a trainer on the same device.
            gpu_memory_utilization=0.5,
            kv_cache_mib=512 if self.cpu else None,
            top_p=1.0,
            top_k=0,
            stop_token_ids=(),
            sleeps=False,
            seed=0,
            load_format="dummy",
            prefix_caching=True,
            reset_prefix_cache=True,
            recompute_kv_cache=False,
            forced_lengths=None,
            adapters=adapters,
        )
        slot = self.placement.engines[index]
        shared = self.placement.peer_devices(slot) if "ipc" in self.kinds else ()
        env = environment(self.placement.device, self._visible(slot.devices), self._visible(shared))
        make = partial(make_vllm_engine, spec, "rlctl.bench.engine.BenchWorker")
        return Worker(WorkerSpec(f"engine-{index}", make, env, f"{logs}/engine-{index}.log", threads=4))


class _Stage:
    """The running processes of a bench, joined in one `Meeting`. One method measures each kind of row."""

    def __init__(self, bench: RefitBench, trainers: WorkerGroup, engines: list[Worker], folder: Path) -> None:
        self.bench = bench
        self.trainers = trainers
        self.engines = engines
        self._folder = folder
        self.ends = [EngineEnd(engine, bench.tensor_parallel) for engine in engines]
        self.workers = len(engines) * bench.tensor_parallel
        self.refit = Refit(trainers, self._options(bench.kinds[0], "auto", bench.num_buffers[0]))
        self.payload = self.refit.plan.payload
        self.bound = 0.0
        self._plain_rounds = min(bench.rounds, _MOST_PLAIN)
        self._version = 0
        port = free_port()
        parties = len(trainers) + self.workers
        joined = trainers.start(BenchTrainer.rendezvous, port, parties)
        self._rpc("bench_meet", port, parties)
        joined.wait(_DEADLINE_S)

    def rows(self, say: Say) -> Iterator[SchemeRow]:
        """Measure and yield one row after the other."""
        bench = self.bench
        self._clear()
        say("the plain link")
        plain = self._measure_copy() if bench.placement.shared else self._measure_plain_link()
        self.bound = plain.seconds
        yield plain
        for kind, mode, num_buffers, checks in product(bench.kinds, bench.modes, bench.num_buffers, bench.checks):
            say(f"rlctl: {kind}, {mode}, {num_buffers} buffers, checks {checks}")
            yield self._measure_refits(kind, mode, num_buffers, checks)

    def _measure_copy(self) -> SchemeRow:
        """Measure a copy within the device that trainer and engine share, in place of the plain link."""
        first = self.trainers.workers[0]
        copied = first.start(BenchTrainer.copy_speed, self.payload, self._plain_rounds).wait(_DEADLINE_S)
        return make_row("memcpy" if self.bench.cpu else "device copy", copied, copied)

    def _measure_plain_link(self) -> SchemeRow:
        """Measure the plain link from trainer rank 0 to all engine workers."""
        bench = self.bench
        spec = TransportSpec("broadcast", self.workers, bench.defaults.timeout_s, host="127.0.0.1", port=free_port())
        # Rank 0 of the link sends. The workers of an engine have successive ranks.
        first_ranks = range(1, 1 + self.workers, bench.tensor_parallel)
        sending = self.trainers.start(BenchTrainer.plain_rounds, spec, self.payload, self._plain_rounds)
        receiving = [
            engine.start(VllmEngine.rpc, "bench_plain_rounds", spec, first, self.payload, self._plain_rounds)
            for engine, first in zip(self.engines, first_ranks)
        ]
        received = _answers(receiving)
        return make_row("raw link", sending.wait(_DEADLINE_S), received)

    def _measure_refits(self, kind: Kind, mode: Mode, num_buffers: int, checks: Checks) -> SchemeRow:
        """Open a refit with these settings, measure its rounds, and compare the delivered weights."""
        bench = self.bench
        self._clear()
        self._fill()
        refit = Refit(self.trainers, self._options(kind, mode, num_buffers))
        choice = refit.open(self.ends)[0]
        plan = refit.plan
        # Over shared memory the ends need not take part at the same time, and the driver calls one after the other.
        in_turn = kind == "shm"
        sending = self.trainers.start(BenchTrainer.refit_rounds, plan, checks, 1, bench.rounds, in_turn)
        received = self._rpc("bench_refit_rounds", plan, checks, 1, bench.rounds, in_turn)
        row = make_row(
            label=f"rlctl {kind}, {choice.mode}, {count(num_buffers, 'buffer')}, checks {checks}",
            sent=sending.wait(_DEADLINE_S),
            received=received,
            differences=self._differences(),
            mode=choice.mode,
        )
        if bench.updates:
            row = replace(row, **self._while_requests_run(refit, checks))
        return row

    def _while_requests_run(self, refit: Refit, checks: Checks) -> dict[str, Any]:
        """Measure refits as a run makes them: by the driver, while every engine samples.

        Return medians in seconds: stall and step (see `SchemeRow`), and driver, the time of a whole refit.
        """
        stalls = []
        gaps = []
        refit_seconds = []
        for number in range(self.bench.updates):
            # Each update has other prompts, so that no prefix is in a cache.
            first_group = number * _REQUESTS
            groups = range(first_group, first_group + _REQUESTS)
            requests = [
                TurnRequest(
                    id=RequestId(RolloutId("parity", "bench", group, 0)),
                    prompt_tokens=[7 + group] * _PROMPT_TOKENS,
                    max_new_tokens=_REQUEST_TOKENS,
                    temperature=1.0,
                    seed=group - first_group,
                )
                for group in groups
            ]
            for engine in self.engines:
                steps_before = _steps(engine)
                engine.start(Engine.submit, requests).wait(_DEADLINE_S)
                # A step that computes prompts is longer. It must not count as a stall by the update.
                while _steps(engine) < steps_before + _BEFORE_UPDATE:
                    time.sleep(_POLL_S)
            begin = time.perf_counter()
            # The rounds before had the versions 1 to `rounds`.
            report = refit.run(self.ends, 1 + self.bench.rounds + number, checks)
            refit_seconds.append(time.perf_counter() - begin)
            stalls.append(report.stall)
            gaps.append(report.gap)
            for engine in self.engines:
                engine.start(Engine.abort, [request.id for request in requests]).wait(_DEADLINE_S)
        return {"stall": median(stalls), "step": median(gaps), "driver": median(refit_seconds)}

    def _options(self, kind: Kind, mode: Mode, num_buffers: int) -> RefitOptions:
        """Return the options of a refit, with the defaults of a run where no argument replaces them."""
        bench = self.bench
        is_one_pair = len(self.trainers) == self.workers == 1
        return RefitOptions(
            kind=kind,
            dtype=bench.dtype,
            mode=mode,
            num_buffers=num_buffers,
            buffer_memory_ratio=bench.defaults.buffer_memory_ratio,
            timeout_s=bench.defaults.timeout_s,
            folder=str(self._folder / "refit"),
            checks=bench.checks[0],
            colocated=bench.placement.shared and is_one_pair and not (bench.cpu or bench.lora_rank),
            in_flight=True,
            adapters=bench.lora_rank > 0,
        )

    def _clear(self) -> None:
        self.trainers.call(BenchTrainer.clear)
        self._rpc("bench_clear")

    def _fill(self) -> None:
        """Set new weights in the trainer, and zeros in the engines."""
        self._version += 1
        self.trainers.call(BenchTrainer.fill, self._version)
        self._rpc("bench_forget")

    def _differences(self) -> list[str]:
        names_by_worker = self._rpc("bench_differences", self.refit.plan, self._version, self.bench.master)
        return sorted(set(chain.from_iterable(names_by_worker)))

    def _rpc(self, method: str, *args: object) -> list[Any]:
        return _answers([engine.start(VllmEngine.rpc, method, *args) for engine in self.engines])


def _steps(engine: Worker) -> int:
    """Return the number of steps that an engine has made."""
    return int(engine.start(Engine.collect, 0.0).wait(_DEADLINE_S)[0].stats.steps)


def _answers(pending: Sequence[Pending[Any]]) -> list[Any]:
    """Return the answers of all workers of all engines, in one list."""
    return list(chain.from_iterable(part.wait(_DEADLINE_S)[0] for part in pending))
