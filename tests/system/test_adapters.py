"""An engine serves the adapters that were sent, after every refit, for every family."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.generation.engine import Engine
from rlctl.generation.requests import Completion, TurnRequest
from rlctl.generation.vllm.engine import VllmEngine
from rlctl.grpo.logprob_mismatch import mismatch
from rlctl.models.adapters import AdapterSpec
from rlctl.refit.refit import EngineEnd, Refit
from rlctl.workers.group import Worker, WorkerGroup, WorkerSpec
from tests.system.adapters import (
    AdapterSource,
    adapted,
    adapter_spec,
    adapters_of,
    engine_with,
    log_probs,
    start_adapted,
)
from tests.system.engines import collect_all, refit_options, sample
from tests.turns import turn
from tests.zoo import make_family

DEADLINE = 600.0
SYNCS = 20
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12] * 40]
# One of each: merged projections with biases, ties, fused projections on disk, windows and softcaps, experts, scales.
FAMILIES = ("qwen2", "llama", "phi3", "gemma2", "qwen3_moe", "granite", "qwen3", "olmo2")
SHORT = ("qwen2",)


def requests(length: int, number: int, temperature: float = 1.0) -> list[TurnRequest]:
    return [turn(i, number, prompt, length, temperature, 100 * number + i) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("family", [f if f in SHORT else pytest.param(f, marks=pytest.mark.long) for f in FAMILIES])
def test_an_engine_samples_as_the_trainer_after_each_of_twenty_syncs(
    family: str, ray_here: Path, tmp_path: Path
) -> None:
    folder = make_family(tmp_path / "m", family)
    spec = adapter_spec(folder, wanted="attention" if family == "qwen3_moe" else "all")
    # Running requests compute their keys and values again, so that each token is one version's own.
    engine = start_adapted(engine_with(folder, spec, recompute_kv_cache=True), ray_here, f"adapted-{family}")
    source = WorkerGroup([WorkerSpec("source", partial(AdapterSource, spec))], DEADLINE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        source.built().wait(DEADLINE)
        engine.built().wait(DEADLINE)
        refit = Refit(source, refit_options("shm", tmp_path / "shm", adapters=True, in_flight=True))
        end = EngineEnd(engine, 1)
        (mode,) = refit.open([end])
        assert mode.mode == "staged" and not mode.overwrites
        before = sample(engine, requests(12, 0)).unpack()
        assert error(model, requests(12, 0), before) < 1.001
        last = scores(engine, requests(12, 99, 0.0))
        for version in range(SYNCS):
            running = requests(96, 1000 + version) if version % 2 else []
            if running:
                engine.start(Engine.submit, running).wait(DEADLINE)
                time.sleep(0.05)
            report = refit.run([end], version)
            assert report.bytes == 4 * spec.parameters
            answers = collect_all(engine, running) if running else []
            if running:
                assert_each_token_is_of_its_version(model, spec, running, answers)
            made = requests(12, 1 + version)
            found = sample(engine, made).unpack()
            assert {int(v) for row in found for v in row.versions} == {version}
            with adapted(model, spec, adapters_of(spec, version)):
                assert error(model, made, found) < 1.001
            now = scores(engine, requests(12, 99, 0.0))
            assert version == 0 or not np.array_equal(now, last)
            last = now
    finally:
        source.kill()
        engine.kill()


def scores(engine: Worker, given: list[TurnRequest]) -> np.ndarray:
    return sample(engine, given).log_probs


def error(model: Any, given: list[TurnRequest], found: list[Completion]) -> float:
    theirs = [one.log_probs for one in found]
    ours = [log_probs(model, request.prompt_tokens, one.tokens.tolist()) for request, one in zip(given, found)]
    return mismatch(theirs, ours, [np.ones(len(row), np.bool_) for row in theirs]).token_mult_prob_error


def assert_each_token_is_of_its_version(
    model: Any, spec: AdapterSpec, given: list[TurnRequest], found: list[Completion]
) -> None:
    theirs, ours = list[np.ndarray](), list[np.ndarray]()
    for request, one in zip(given, found):
        for version in np.unique(one.versions):
            with adapted(model, spec, adapters_of(spec, max(0, int(version)))):
                expected = log_probs(model, request.prompt_tokens, one.tokens.tolist())
            theirs.append(one.log_probs[one.versions == version])
            ours.append(expected[one.versions == version])
    gap = mismatch(theirs, ours, [np.ones(len(row), np.bool_) for row in ours])
    assert gap.token_mult_prob_error < 1.001
    # A token of another version would differ by far more.
    assert gap.max_abs_diff < 0.01


def test_a_folded_into_its_layers_weight_as_on_a_gpu_samples_as_the_trainer(ray_here: Path, tmp_path: Path) -> None:
    folder = make_family(tmp_path / "m", "qwen2")
    # A rank that tensor cores need padding for.
    spec = adapter_spec(folder, rank=3)
    engine = start_adapted(engine_with(folder, spec), ray_here, "folded", "tests.system.folding.FoldingWorker")
    source = WorkerGroup([WorkerSpec("source", partial(AdapterSource, spec))], DEADLINE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        source.built().wait(DEADLINE)
        engine.built().wait(DEADLINE)
        assert engine.start(VllmEngine.rpc, "rl_methods").wait(DEADLINE)[0] == [["FoldedMethod"]]
        refit, end = Refit(source, refit_options("shm", tmp_path / "shm", adapters=True)), EngineEnd(engine, 1)
        refit.open([end])
        for version in range(3):
            refit.run([end], version)
            made = requests(12, 1 + version)
            with adapted(model, spec, adapters_of(spec, version)):
                assert error(model, made, sample(engine, made).unpack()) < 1.001
    finally:
        source.kill()
        engine.kill()


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_two_tensor_parallel_workers_sample_as_the_trainer(family: str, ray_here: Path, tmp_path: Path) -> None:
    """Two processes, each with its part of A or B: their sums meet in vLLM's all-reduce."""
    folder = make_family(tmp_path / "m", family)
    spec = adapter_spec(folder)
    engine = start_adapted(engine_with(folder, spec, tensor_parallel_size=2), ray_here, f"parallel-{family}")
    source = WorkerGroup([WorkerSpec("source", partial(AdapterSource, spec))], DEADLINE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    try:
        source.built().wait(DEADLINE)
        engine.built().wait(DEADLINE)
        refit = Refit(source, refit_options("shm", tmp_path / "shm", adapters=True, in_flight=True))
        end = EngineEnd(engine, 2)
        refit.open([end])
        for version in range(4):
            refit.run([end], version)
            made = requests(12, 1 + version)
            found = sample(engine, made).unpack()
            with adapted(model, spec, adapters_of(spec, version)):
                assert error(model, made, found) < 1.001
    finally:
        source.kill()
        engine.kill()


@pytest.mark.long
def test_memory_is_flat_over_two_hundred_syncs(ray_here: Path, tmp_path: Path) -> None:
    folder = make_family(tmp_path / "m", "qwen3")
    spec = adapter_spec(folder)
    engine = start_adapted(engine_with(folder, spec), ray_here, "flat")
    source = WorkerGroup([WorkerSpec("source", partial(AdapterSource, spec))], DEADLINE)
    try:
        source.built().wait(DEADLINE)
        engine.built().wait(DEADLINE)
        refit, end = Refit(source, refit_options("shm", tmp_path / "shm", adapters=True)), EngineEnd(engine, 1)
        refit.open([end])
        held = []
        for version in range(220):
            refit.run([end], version)
            if version % 20 == 0:
                sample(engine, requests(12, version))
            if version in (20, 219):
                held.append(engine.start(Engine.memory).wait(DEADLINE)[0]["host_rss"])
        # The adapters are 0.4 MB: one more a sync would be 80.
        assert held[1] - held[0] < 8 << 20
    finally:
        source.kill()
        engine.kill()
