"""Real engines on tiny models, and a source of weights that stands in for a trainer rank: a Hugging Face folder."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.generation.engine import Engine
from rlctl.generation.requests import SampleRequest
from rlctl.generation.spec import EngineSpec, environment
from rlctl.refit.plan import Header, Plan, TransportSpec
from rlctl.refit.transport import Sender, open_sender
from rlctl.workers.group import Worker, WorkerSpec


def spec_for(folder: Path, max_model_len: int = 64) -> EngineSpec:
    return EngineSpec(
        model_path=str(folder),
        dtype="float32",
        device="cpu",
        max_model_len=max_model_len,
        tensor_parallel_size=1,
        max_num_seqs=64,
        gpu_memory_utilization=0.5,
        kv_cache_mib=32,
        enforce_eager=True,
        top_p=1.0,
        top_k=0,
        stop_token_ids=(1,),
        sleeps=False,
        seed=0,
    )


@dataclass(frozen=True)
class MakeEngine:
    spec: EngineSpec

    def __call__(self) -> Engine:
        return Engine(self.spec)


@dataclass(frozen=True)
class MakeSource:
    folder: Path
    make: Callable[[Path], Any]

    def __call__(self) -> Any:
        return self.make(self.folder)


class FolderSource:
    """Sends the tensors of a Hugging Face folder, as a trainer rank would send its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sender: Sender | None = None

    def refit_plan(self, dtype: str) -> Plan:
        return Plan.build((name, tuple(tensor.shape), dtype) for name, tensor in self._tensors())

    def refit_open(self, spec: TransportSpec, plan: Plan) -> None:
        import torch

        self._sender = open_sender(spec, plan, 0, torch.device("cpu"))

    def refit_send(self, header: Header) -> list[int]:
        assert self._sender
        return self._sender.send(self._tensors(), header)

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        from safetensors import safe_open

        with safe_open(self._folder / "model.safetensors", "pt") as file:
            yield from ((name, file.get_tensor(name)) for name in list(file.keys()))


def start_engine(folder: Path, logs: Path, name: str) -> Worker:
    return Worker(WorkerSpec(name, MakeEngine(spec_for(folder)), environment("cpu", []), str(logs / f"{name}.log"), 4))


def greedy(ids: list[list[int]], tokens: int) -> list[SampleRequest]:
    return [SampleRequest(f"r{index}", prompt, 1, tokens, 0.0, 0) for index, prompt in enumerate(ids)]
