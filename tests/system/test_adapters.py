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
    adapter_spec,
    adapters_of,
    apply_adapters,
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
    spec = adapter_spec(folder, target_modules="attention" if family == "qwen3_moe" else "all")
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
            new_requests = requests(12, 1 + version)
            completions = sample(engine, new_requests).unpack()
            for completion in completions:
                assert {*completion.versions.tolist()} == {version}
            with apply_adapters(model, spec, adapters_of(spec, version)):
                assert error(model, new_requests, completions) < 1.001
            now = scores(engine, requests(12, 99, 0.0))
            assert version == 0 or not np.array_equal(now, last)
            last = now
    finally:
        source.kill()
        engine.kill()


def scores(engine: Worker, turn_requests: list[TurnRequest]) -> np.ndarray:
    return sample(engine, turn_requests).log_probs


def error(model: Any, turn_requests: list[TurnRequest], completions: list[Completion]) -> float:
    sampled_log_probs = [completion.log_probs for completion in completions]
    expected_log_probs = [
        log_probs(model, request.prompt_tokens, completion.tokens.tolist())
        for request, completion in zip(turn_requests, completions)
    ]
    masks = [np.ones(len(row), np.bool_) for row in sampled_log_probs]
    return mismatch(sampled_log_probs, expected_log_probs, masks).token_mult_prob_error


def assert_each_token_is_of_its_version(
    model: Any, spec: AdapterSpec, turn_requests: list[TurnRequest], completions: list[Completion]
) -> None:
    sampled_log_probs = list[np.ndarray]()
    expected_log_probs = list[np.ndarray]()
    for request, completion in zip(turn_requests, completions):
        for version in np.unique(completion.versions):
            with apply_adapters(model, spec, adapters_of(spec, max(0, int(version)))):
                expected = log_probs(model, request.prompt_tokens, completion.tokens.tolist())
            is_of_version = completion.versions == version
            sampled_log_probs.append(completion.log_probs[is_of_version])
            expected_log_probs.append(expected[is_of_version])
    masks = [np.ones(len(row), np.bool_) for row in expected_log_probs]
    gap = mismatch(sampled_log_probs, expected_log_probs, masks)
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
        refit = Refit(source, refit_options("shm", tmp_path / "shm", adapters=True))
        end = EngineEnd(engine, 1)
        refit.open([end])
        for version in range(3):
            refit.run([end], version)
            new_requests = requests(12, 1 + version)
            with apply_adapters(model, spec, adapters_of(spec, version)):
                assert error(model, new_requests, sample(engine, new_requests).unpack()) < 1.001
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
            new_requests = requests(12, 1 + version)
            completions = sample(engine, new_requests).unpack()
            with apply_adapters(model, spec, adapters_of(spec, version)):
                assert error(model, new_requests, completions) < 1.001
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
        refit = Refit(source, refit_options("shm", tmp_path / "shm", adapters=True))
        end = EngineEnd(engine, 1)
        refit.open([end])
        memory = []
        for version in range(220):
            refit.run([end], version)
            if version % 20 == 0:
                sample(engine, requests(12, version))
            if version in (20, 219):
                memory.append(engine.start(Engine.memory).wait(DEADLINE)[0]["host_rss"])
        # The adapters are 0.4 MB: one more a sync would be 80.
        assert memory[1] - memory[0] < 8 << 20
    finally:
        source.kill()
        engine.kill()
