"""`rlctl bench scale`: measures the driver's work in runs on many GPUs, without these GPUs, by the run's own code.

Ranks and engines are not started. Each rank's shards of the weights are those of FSDP2, taken from a model on the meta
device. The refit plan, the bytes sent and the driver's CPU time are real. Half of the GPUs train, the others generate.
"""

import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, until_interrupted
from rlctl.bench.workload import model_folder, model_problems
from rlctl.config.builtin import RECIPES
from rlctl.config.errors import Problem
from rlctl.launch.local_ray import local_ray
from rlctl.launch.worker_specs import refit_options
from rlctl.preflight.cluster_plan import H100_BYTES, PlannedCluster, settle_on_cluster, stopped_s
from rlctl.preflight.load import load
from rlctl.preflight.memory import communicator_bytes, refit_bytes
from rlctl.preflight.plan import RunPlan, make_plan
from rlctl.preflight.settled import SettledGrpo
from rlctl.refit.refit import make_plan as plan_refit
from rlctl.refit.refit_plan import Layout, TensorSlice, layout_digest
from rlctl.refit.sender import Holding
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.trainer_group import TrainerGroup
from rlctl.workers.group import Pending, Worker, WorkerGroup, WorkerSpec
from rlctl.workers.shared_arguments import SharedArgument, array_bytes, put_common, put_once

# GPUs of a node.
_NODE = 8
# Calls whose mean CPU time is the time of one call.
_CALLS = 512
_SCALE_DEADLINE_S = 300.0
# Share of a GPU's memory that an engine's weights may take. An engine has the fewest GPUs (1, 2, 4 or 8) that suffice.
_WEIGHTS_SHARE = 0.7
# A step's batch: sequences for each trainer rank, and tokens of a sequence.
_SEQUENCES = 4
_LENGTH = 4096
_LEGEND = (
    "comms: communicators on a GPU of an engine, with the members of the largest and their memory at most; plan: bytes "
    "of the refit's plan; start, rebuild: CPU time of the driver until all ranks and engines have joined, at the start "
    f"and after a rebuild of an engine; batch: bytes and CPU time of {_SEQUENCES} x {_LENGTH:,} tokens a rank; "
    "stop: time for which a checkpoint stops training; *: too few GPUs for weights, gradients and optimizer state"
)


class Idle:
    """A worker that does nothing, to time calls to it."""

    def take(self, *arguments: Any) -> None:
        """Return at once."""


@dataclass(frozen=True)
class ScaleRow:
    """Results for one model on one number of GPUs."""

    model: str
    gpus: int
    too_large: bool  # True if a GPU is too small for its share of weights, gradients and optimizer state
    ranks: int
    engines: int
    communicators: int  # refit communicators that a GPU of an engine joins
    members: int  # of the largest communicator
    communicator_bytes: int  # the most memory that all communicators of a GPU take
    plan_bytes: int  # size of the refit plan
    start: float  # CPU seconds of the driver until all ranks and engines have joined the refit
    rebuild: float  # the same after an engine was rebuilt
    batch_bytes: int  # bytes of a step's batch that leave the driver
    batch: float  # CPU seconds of the driver for a step's batch
    stopped: float  # seconds for which a checkpoint stops training

    def cells(self) -> Cells:
        """Return the cells of its table row."""
        return [
            ("model", self.model),
            ("GPUs", f"{self.gpus:,} *" if self.too_large else f"{self.gpus:,}"),
            ("ranks", f"{self.ranks:,}"),
            ("engines", f"{self.engines:,}"),
            ("comms", f"{self.communicators} x {self.members:,}"),
            ("GiB", f"{self.communicator_bytes / 2**30:.1f}"),
            ("plan", _megabytes(self.plan_bytes)),
            ("start", _seconds_text(self.start)),
            ("rebuild", _seconds_text(self.rebuild)),
            ("batch", _megabytes(self.batch_bytes)),
            ("", _seconds_text(self.batch)),
            ("stop", _seconds_text(self.stopped)),
        ]


@dataclass(frozen=True)
class ScaleBench(Bench):
    """Runs on clusters that do not exist, a row for each model and each number of GPUs."""

    models: Sequence[str]
    gpus: Sequence[int]

    def check(self) -> list[Problem]:
        problems = list(chain.from_iterable(map(model_problems, self.models)))
        for count in self.gpus:
            if count % _NODE:
                problems.append(Problem("--gpus", "", f"{count}: whole nodes of {_NODE}, like 8,64,512"))
        return problems

    def measure(self, folder: Path, say: Say) -> "ScaleResults":
        with local_ray(folder):
            # A call costs Ray's client the same for any number of processes, so two workers are enough.
            specs = [WorkerSpec(name, Idle, log=f"{folder}/{name}.log") for name in ("idle-0", "idle-1")]
            group = WorkerGroup(specs, deadline_s=60)
            try:
                group.built().wait(_SCALE_DEADLINE_S)
                a_call = _call_seconds(group.workers)
                rows, interrupted = until_interrupted(self._scale_rows(folder, a_call, say))
            finally:
                group.kill()
        return ScaleResults(rows, a_call, interrupted)

    def _scale_rows(self, folder: Path, a_call: float, say: Say) -> Iterator[ScaleRow]:
        for name in self.models:
            say(name)
            model = _Model(model_folder(name, folder))
            for gpus in self.gpus:
                say(f"{name} on {gpus:,} GPUs")
                yield _scale_row(name, model, gpus, a_call)


class _Model:
    """A model on the meta device: names, shapes and shards of its tensors, without values."""

    def __init__(self, folder: Path) -> None:
        from rlctl.models.derive import derive_facts, table_of
        from rlctl.models.meta_model import language_model

        lm = language_model(folder)
        self.folder = folder
        self.sizes = derive_facts(folder, weights=False).sizes
        self._table = table_of(lm, folder)
        self._parameters = dict(lm.named_parameters())

    def layout(self, dtype: str) -> Layout:
        return [(row.name, row.shape, dtype) for row in self._table.sent_rows]

    def boxes(self, ranks: int) -> list[list[TensorSlice]]:
        """Return, for each of `ranks` ranks, the parts of tensors that it owns when the ranks share one copy.

        FSDP2 splits a tensor's first dimension into equal parts, rounded up.
        """
        boxes: list[list[TensorSlice]] = [[] for _ in range(ranks)]
        for name, parameter in self._parameters.items():
            rows_per_rank = -(-len(parameter) // ranks)
            shards: dict[int, Any] = {}
            for row in self._table.rows_of(name):
                first_rank = row.start[0] // rows_per_rank
                end_rank = -(-(row.start[0] + row.size[0]) // rows_per_rank)
                for rank in range(first_rank, end_rank):
                    start = rank * rows_per_rank
                    # Several table rows (tensors on disk) use the same shard; making its view once saves time.
                    shard = shards.setdefault(rank, parameter[start : start + rows_per_rank])
                    part = row.part(shard, (start, *(0,) * (parameter.ndim - 1)))
                    if part is not None:
                        offset, tensor = part
                        boxes[rank].append(TensorSlice(row.name, offset, tuple(tensor.shape)))
        return boxes


def _scale_row(name: str, model: _Model, gpus: int, a_call: float) -> ScaleRow:
    """Measure the driver's work for a model on a number of GPUs. a_call: CPU seconds of one call."""
    settled, run = _plan_run(model, gpus)
    assert run.placement
    ranks = settled.trainer.num_ranks
    generation = settled.config.generation
    options = refit_options(settled, run.placement, "")
    layout = model.layout(options.dtype)
    boxes = model.boxes(options.ranks_a_copy or ranks)
    digest = layout_digest(layout)
    # Only the ranks of the first copy send weights. Ranks of other copies own nothing to send.
    boxes += [[]] * (ranks - len(boxes))
    pickled_holdings = [pickle.dumps(Holding(digest, digest, rank_boxes, H100_BYTES)) for rank_boxes in boxes]
    with _Timer() as planning:
        plan, _, _ = plan_refit(layout, [pickle.loads(pickled) for pickled in pickled_holdings], options)
        # The digest is part of every refit, so the time includes computing it.
        assert plan.digest
    actors = ranks + generation.num_engines
    batch_bytes, batch_seconds = _measure_batch(settled)
    num_groups = len(plan.owner_groups)
    members = max(map(len, plan.owner_groups)) + generation.num_engines * generation.tensor_parallel_size
    return ScaleRow(
        model=name,
        gpus=gpus,
        too_large=run.too_large is not None,
        ranks=ranks,
        engines=generation.num_engines,
        communicators=num_groups if options.kind == "broadcast" else 0,
        members=members,
        communicator_bytes=num_groups * communicator_bytes(len(run.placement.used_nodes)),
        plan_bytes=len(pickle.dumps(plan)),
        # Calls at the start: each rank returns its parts, then all join. After a rebuild: all join, then all learn the
        # version.
        start=planning.seconds + (ranks + actors) * a_call,
        rebuild=2 * actors * a_call,
        batch_bytes=batch_bytes,
        batch=batch_seconds + ranks * a_call,
        stopped=stopped_s(settled, run),
    )


def _plan_run(model: _Model, gpus: int) -> tuple[SettledGrpo, RunPlan]:
    """Return the settled config and the plan of an asynchronous run in which half of the GPUs train."""
    cluster = PlannedCluster(max(1, gpus // _NODE), min(gpus, _NODE), H100_BYTES)
    half = gpus // 2
    gpus_an_engine = 1
    weight_bytes = refit_bytes(model.sizes, "bfloat16")
    while weight_bytes > gpus_an_engine * _WEIGHTS_SHARE * H100_BYTES and gpus_an_engine < min(half, _NODE):
        gpus_an_engine *= 2
    settings = [
        f"model.path={model.folder}",
        "model.random_init=true",
        f"model.tokenizer={RECIPES / 'tiny/qwen3-tiny'}",
        f"trainer.num_ranks={half}",
        f"generation.num_engines={half // gpus_an_engine}",
        f"generation.tensor_parallel_size={gpus_an_engine}",
        "async.enabled=true",
        "trainer.backend=fsdp",
        f"grpo.num_prompts_per_step={half * _SEQUENCES}",
    ]
    without_facts = load("grpo", None, settings).settled
    with_facts = without_facts.settle_on(without_facts.machine, model.sizes)
    settled = cast(SettledGrpo, settle_on_cluster(with_facts, cluster))
    return settled, make_plan(settled, cluster.resources)


def _measure_batch(settled: SettledGrpo) -> tuple[int, float]:
    """Return the bytes of a step's batch as it leaves the driver, and the CPU seconds until it is in Ray's store."""
    import ray

    columns = {name: np.zeros(_LENGTH, np.float32) for name in ("advantage", "rollout_log_prob")}
    sample = TrainingSample(tokens=np.zeros(_LENGTH, np.int32), mask=np.ones(_LENGTH, np.bool_), columns=columns)
    trainer = TrainerGroup(cast(WorkerGroup, None), settled.trainer)  # `prepare` calls no worker
    samples = [sample] * (_SEQUENCES * settled.trainer.num_ranks)
    with _Timer() as timer:
        shares = trainer.prepare(samples).shares
        for (argument,) in put_common([(share,) for share in shares]):
            # A share of several ranks is in the store by now. Ray itself puts an argument of this size for one rank.
            if not isinstance(argument, SharedArgument):
                ray.put(argument)
    distinct_shares = {id(share): share for share in shares}.values()  # ranks with the same data have one object
    return sum(map(array_bytes, distinct_shares)), timer.seconds


def _call_seconds(workers: Sequence[Worker]) -> float:
    """Return the driver's mean CPU seconds for one call, with the wait for its answer. A first pass warms up."""
    argument = put_once(0)
    seconds = []
    for _ in range(2):
        chosen = list(islice(cycle(workers), _CALLS))
        with _Timer() as timer:
            refs = [worker.start(Idle.take, argument).refs[0] for worker in chosen]
            Pending[None]("take", chosen, refs).wait(_SCALE_DEADLINE_S)
        seconds.append(timer.seconds)
    return seconds[-1] / _CALLS


class _Timer:
    """Measures the CPU seconds of this process, all threads, within a `with` block."""

    seconds = 0.0

    def __enter__(self) -> "_Timer":
        self._begin = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self._begin


@dataclass(frozen=True)
class ScaleResults(Results):
    """Results: a row for each model and each number of GPUs."""

    rows: list[ScaleRow]
    call: float  # CPU seconds of the driver for one call to a worker
    interrupted: bool = False

    def report(self, wide: bool) -> list[Line | ResultTable]:
        return [ResultTable([row.cells() for row in self.rows], gap=1), Line(_LEGEND, "dim")]


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e8 else f"{count / 1e9:,.2f} GB"
