"""An engine that serves other adapters than the trainer sent is named and rebuilt. Its prefix cache is not reused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlctl.generation.generator_pool import EngineSlot, GeneratorPool
from rlctl.generation.spec import EngineKind
from rlctl.generation.vllm.engine import VllmEngine
from rlctl.generation.vllm.kind import environment, make_vllm_engine
from rlctl.preflight.engines.vllm import VllmOptions
from rlctl.refit.refit import EngineEnd, Refit
from rlctl.workers.group import WorkerGroup, WorkerSpec
from tests.faults.runs import Run
from tests.system.adapters import AdapterSource, adapter_spec, adapters_of, apply_adapters, engine_with, start_adapted
from tests.system.engines import greedy, refit_options, sample
from tests.system.test_adapters import error
from tests.turns import turn
from tests.zoo import make_family

DEADLINE = 600.0
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
# Prompt of all requests, longer than a block of the prefix cache.
SHARED = [12] * 70
WORKER = "tests.system.engine_workers.FaultyWorker"
KIND = EngineKind(partial(make_vllm_engine, extension=WORKER), environment, VllmOptions)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_family(tmp_path / "m", "qwen2")


@pytest.fixture
def source(model: Path, ray_here: Path) -> Iterator[WorkerGroup]:
    group = WorkerGroup([WorkerSpec("source", partial(AdapterSource, adapter_spec(model)))], DEADLINE)
    try:
        group.built().wait(DEADLINE)
        yield group
    finally:
        group.kill()


def test_one_of_two_engines_that_kept_its_adapters_is_named_and_rebuilt(
    model: Path, source: WorkerGroup, ray_here: Path, tmp_path: Path
) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    spec = replace(engine_with(model, adapter_spec(model)), kind="tests.faults.test_adapters:KIND")
    slot = EngineSlot(environment("cpu", []))
    emit: Callable[..., None] = lambda kind, **facts: events.append((kind, facts))  # noqa: E731
    pool = GeneratorPool(spec, [slot, slot], str(ray_here), DEADLINE, 1, emit)
    try:
        pool.wait_until_built()
        pool.connect(Refit(source, refit_options("shm", tmp_path / "shm", adapters=True)))
        pool.sync(1)
        error_of_adapting_twice = pool.engines[0].start(VllmEngine.rpc, "rl_adapt_again").wait(DEADLINE)[0][0]
        refusal = "lora: model.layers.0.self_attn.qkv_proj has adapters already, which would count twice"
        assert refusal in str(error_of_adapting_twice)
        pool.engines[1].start(VllmEngine.rpc, "rl_be_lazy").wait(DEADLINE)
        assert pool.sync(2).rebuilt == (1,)
        losses = [facts for kind, facts in events if kind == "engine_lost"]
        assert [loss["engine"] for loss in losses] == [1]
        assert "engine-1 does not serve the adapters of version 2 with " in losses[0]["reason"]
        assert "it proves version 1 with " in losses[0]["reason"]
        log_probs = [sample(engine, greedy(PROMPTS, 12)).log_probs for engine in pool.engines]
        assert np.array_equal(log_probs[0], log_probs[1])
        # A second sync of the same version changes nothing.
        pool.sync(2)
        assert np.array_equal(sample(pool.engines[0], greedy(PROMPTS, 12)).log_probs, log_probs[0])
    finally:
        pool.kill()


def test_a_prefix_of_older_adapters_is_out_of_reach_and_shows_where_it_is_not(
    model: Path, source: WorkerGroup, ray_here: Path, tmp_path: Path
) -> None:
    spec = adapter_spec(model)
    trainer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for is_salted in (True, False):
        name = f"salted-{is_salted}"
        engine = start_adapted(engine_with(model, spec, reset_prefix_cache=is_salted), ray_here, name)
        try:
            engine.built().wait(DEADLINE)
            refit = Refit(source, refit_options("shm", tmp_path / f"shm-{is_salted}", adapters=True))
            refit.open([EngineEnd(engine, 1)])
            gaps = []
            for version in (1, 2):
                refit.run([EngineEnd(engine, 1)], version)
                turns = [turn(version, 0, SHARED, 16, 1.0, version)]
                with apply_adapters(trainer, spec, adapters_of(spec, version)):
                    gaps.append(error(trainer, turns, sample(engine, turns).unpack()))
            assert gaps[0] < 1.001
            assert gaps[1] < 1.001 if is_salted else gaps[1] > 1.01
        finally:
            engine.kill()


@pytest.mark.long  # a whole run for the words of test_a_rate_that_moves_nothing_is_named_at_the_first_step_alone
def test_a_run_stops_whose_first_optimizer_step_left_every_b_as_it_was(tmp_path: Path) -> None:
    # Above 0, and so small that its products are 0 in float32.
    run = Run(tmp_path, "still", "lora={}", "trainer.optimizer.lr=1e-46", "checkpoint.every=0", "grpo.num_steps=4")
    assert run.end() == 1, run.text()
    (end,) = run.events("run_ended")
    assert "adapters as they were, first model.layers.0.self_attn.q_proj.lora_B.weight: the model" in end["reason"]
    assert end["reason"].endswith("is too small (trainer.optimizer.lr)")
    assert not run.steps()
