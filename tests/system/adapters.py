"""Adapters of tiny models: a source that sends adapters of any version, and log-probs by a model of transformers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlctl.generation.spec import EngineSpec
from rlctl.generation.vllm.kind import environment, make_vllm_engine
from rlctl.models.adapters import AdapterSpec, choose_targets
from rlctl.models.derive import derive_facts
from rlctl.refit.protocol import Header, SendReport
from rlctl.refit.sender import SendsWeights
from rlctl.refit.weight_source import Shard
from rlctl.workers.group import Worker, WorkerSpec
from tests.system.engines import spec_for

RANK = 8
ALPHA = 16.0


def adapter_spec(folder: Path, rank: int = RANK, target_modules: Any = "all") -> AdapterSpec:
    targets, problems = choose_targets(derive_facts(folder).sizes.linears, target_modules)
    assert targets and not problems
    return AdapterSpec(rank, ALPHA, False, 0.0, targets)


def adapters_of(spec: AdapterSpec, version: int) -> dict[str, Tensor]:
    """Return the A and B matrices of a version. B is 0 in version 0. Each version changes every tensor."""
    values_by_name = {}
    for number, tensor in enumerate(spec.tensors):
        random = torch.Generator().manual_seed(1000 * version + number)
        values = torch.randn(tensor.shape, generator=random) / tensor.shape[1] ** 0.5
        # B is as large as after many updates: the product of A and B is about a tenth of a weight.
        values_by_name[tensor.name] = values if tensor.is_a else 0.1 * min(version, 1) * values
    return values_by_name


class AdapterSource(SendsWeights):
    """Stand-in for a trainer rank: sends the adapters of any requested version."""

    def __init__(self, spec: AdapterSpec, dtype: str = "float32") -> None:
        self._spec = spec
        self.tensors = adapters_of(spec, 0)
        super().__init__(self, 0, torch.device("cpu"))

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        return [(name, tuple(tensor.shape), dtype or "float32") for name, tensor in self.tensors.items()]

    def shards(self) -> list[Shard]:
        return [Shard(name, (0, 0), tensor) for name, tensor in self.tensors.items()]

    def refit_send(self, header: Header) -> SendReport:
        for name, tensor in adapters_of(self._spec, header.version).items():
            self.tensors[name].copy_(tensor)
        return super().refit_send(header)


def engine_with(folder: Path, spec: AdapterSpec | None, **changes: Any) -> EngineSpec:
    return replace(spec_for(folder, 160), adapters=spec, stop_token_ids=(), **changes)


def start_adapted(
    spec: EngineSpec, logs: Path, name: str, worker: str = "rlctl.generation.vllm.worker_extension.RefitWorker"
) -> Worker:
    make = partial(make_vllm_engine, spec, worker)
    env = environment("cpu", [])
    # vLLM binds the workers of an engine to a NUMA node each, and this machine may have one.
    env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return Worker(WorkerSpec(name, make, env, str(logs / f"{name}.log"), 4))


@contextmanager
def apply_adapters(model: Any, spec: AdapterSpec, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Let a transformers model compute with the adapters, in the same order of operations as the trainer."""
    handles = []
    for target in spec.targets:
        lora_a = tensors[f"{target.name}.lora_A.weight"]
        lora_b = tensors[f"{target.name}.lora_B.weight"]

        def add_product(
            module: Any, inputs: Any, base_output: Tensor, a: Tensor = lora_a, b: Tensor = lora_b
        ) -> Tensor:
            output: Tensor = base_output + inputs[0] @ a.T @ b.T * spec.scale
            return output

        handles.append(model.get_submodule(target.name).register_forward_hook(add_product))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def log_probs(model: Any, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Return the log-prob of each answer token at temperature 1."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(answer)), torch.tensor(answer)].numpy()
