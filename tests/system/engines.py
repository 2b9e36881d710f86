"""Real engines on tiny models, and a stand-in for a trainer rank that sends the weights of a Hugging Face folder."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.generation.engine import Engine
from rlctl.generation.generator_pool import EngineSlot
from rlctl.generation.requests import Completion, PackedCompletions, RequestId, TurnRequest
from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.kind import environment, make_vllm_engine
from rlctl.models.hf_folder import WeightFiles
from rlctl.refit.protocol import Kind
from rlctl.refit.refit import RefitOptions
from rlctl.refit.sender import SendsWeights
from rlctl.refit.weight_source import Shard
from rlctl.workers.group import Worker, WorkerSpec
from tests.turns import turn

SEAT = EngineSlot(environment("cpu", []))


def spec_for(folder: Path, max_model_len: int = 64) -> EngineSpec:
    return EngineSpec(
        kind="vllm",
        options={"fast_path": True, "enforce_eager": True},
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        tensor_parallel_size=1,
        max_num_seqs=64,
        gpu_memory_utilization=0.5,
        kv_cache_mib=32,
        top_p=1.0,
        top_k=0,
        stop_token_ids=(1,),
        sleeps=False,
        seed=0,
        load_format="auto",
        prefix_caching=True,
        reset_prefix_cache=True,
        recompute_kv_cache=False,
        forced_lengths=None,
    )


@dataclass(frozen=True)
class MakeSource:
    folder: Path
    make: Callable[[Path], Any]

    def __call__(self) -> Any:
        return self.make(self.folder)


class FolderSource(SendsWeights):
    """Stand-in for a trainer rank: sends the tensors of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        import torch

        files = WeightFiles(folder)
        self.tensors = {name: files.tensor(name).clone() for name in files.names()}
        super().__init__(self, 0, torch.device("cpu"))

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        return [(name, tuple(tensor.shape), dtype or "float32") for name, tensor in self.tensors.items()]

    def shards(self) -> list[Shard]:
        return [Shard(name, (0,) * tensor.ndim, tensor) for name, tensor in self.tensors.items()]


def refit_options(kind: Kind, folder: Path | str = "", **changes: Any) -> RefitOptions:
    options = RefitOptions(
        kind=kind,
        dtype="float32",
        mode="auto",
        num_buffers=2,
        buffer_memory_ratio=0.02,
        timeout_s=600.0,
        folder=str(folder),
        checks="all",
        colocated=False,
        in_flight=False,
    )
    return replace(options, **changes)


def start_engine(folder: Path, logs: Path, name: str, stops: tuple[int, ...] = (1,)) -> Worker:
    spec = replace(spec_for(folder), stop_token_ids=stops)
    make = partial(make_vllm_engine, spec, "tests.system.engine_workers.ForgettingWorker")
    return Worker(WorkerSpec(name, make, environment("cpu", []), str(logs / f"{name}.log"), 4))


def greedy(ids: list[list[int]], tokens: int) -> list[TurnRequest]:
    return [turn(index, 0, prompt, tokens, 0.0) for index, prompt in enumerate(ids)]


def collect_all(engine: Worker, requests: list[TurnRequest]) -> list[Completion]:
    """Wait for the answers of requests that were submitted; return them in the requests' order."""
    completions: dict[RequestId, Completion] = {}
    while len(completions) < len(requests):
        (finished,) = engine.start(Engine.collect, 60.0).wait(600.0)
        assert finished.ids, "the engine gave nothing for a minute"
        completions |= dict(zip(finished.ids, finished.columns.unpack(), strict=True))
    return [completions[request.id] for request in requests]


def sample(engine: Worker, requests: list[TurnRequest]) -> PackedCompletions:
    """Sample on one engine; return the answers in the requests' order."""
    engine.start(Engine.submit, requests).wait(600.0)
    return PackedCompletions.pack(collect_all(engine, requests))
