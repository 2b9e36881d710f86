"""Runs of adapters: each transport, two engines and two ranks, in flight, streamed, by a graph, resumed, for long."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from rlctl.grpo.losses.sections import STEP_MISMATCH
from rlctl.grpo.metric_rows import PARITY
from tests.faults.runs import Run, survivors

LORA = ("lora.rank=4", "trainer.optimizer.lr=3e-3", "checkpoint.every=0")
FOUR = (
    "grpo.num_steps=4",
    "validation.every=0",
    "generation.num_engines=2",
    "trainer.num_ranks=2",
    "trainer.threads=1",
)
IN_FLIGHT = ("async.enabled=true", "async.in_flight_weight_updates=true", "health.parity_every=1")
WAYS = {
    "shm, colocated": ("refit.transport=shm", "placement.colocated=true"),
    "broadcast, apart": ("refit.transport=broadcast", "placement.colocated=false"),
    "shm, in flight": ("refit.transport=shm", *IN_FLIGHT, "async.streamed_training=false"),
    "broadcast, in flight, streamed, recomputed": (
        "refit.transport=broadcast", *IN_FLIGHT, "async.streamed_training=true",
        "trainer.activation_checkpointing=true",
    ),
}  # fmt: skip


@pytest.mark.long  # combinations: test_adapters.py has a refit, test_lora.py the trainer
@pytest.mark.parametrize("way", WAYS)
def test_two_engines_agree_with_two_trainer_ranks_at_every_step(way: str, tmp_path: Path) -> None:
    settings = LORA + FOUR + WAYS[way]
    run = Run(tmp_path, "ways", *settings)
    assert run.end() == 0, run.text()
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    # In flight a step trains tokens of older versions: a parity check samples new ones.
    metric = PARITY if IN_FLIGHT[0] in WAYS[way] else STEP_MISMATCH
    errors = [step[metric.name] for step in steps]
    assert max(errors) < 1.001, errors
    # An engine without its proof would have been lost.
    assert not [event for event in run.events() if event["kind"] == "engine_lost"]
    assert all(step["train/grad_norm"] > 0 and step["refit/seconds"] > 0 for step in steps)


def sft(folder: Path, name: str, *settings: str, resume: bool = False) -> Run:
    adapters = () if resume else (*LORA, "lora.dropout=0.2", "sft.num_steps=6", "validation.every=0")
    return Run(folder, name, *adapters, *settings, kind="sft", resume=resume)


def result(run: Run) -> tuple[list[Any], bytes]:
    """Return the losses and norms of all steps, and the adapter after the last."""
    file = run.path / "checkpoints/step_6/hf/adapter_model.safetensors"
    return [(step["step"], step["loss/nll"], step["train/grad_norm"]) for step in run.steps()], file.read_bytes()


@pytest.mark.long  # three runs
def test_with_dropout_a_graph_trains_alike_and_a_killed_run_goes_on_alike(tmp_path: Path) -> None:
    graph = sft(tmp_path, "graph", "ray_compiled_graph.enabled=require")
    assert " ms a call, ordinary " in graph.wait_for_event("dispatch")["what"]
    assert graph.end() == 0, graph.text()
    hurt = sft(tmp_path, "hurt", "checkpoint.every=2", "checkpoint.keep_last=9")
    hurt.wait_for_event("checkpoint", step=2)
    assert survivors(hurt.kill()) == []
    hurt = sft(tmp_path, "hurt", resume=True)
    assert hurt.end() == 0, hurt.text()
    unhurt = sft(tmp_path, "whole")
    assert unhurt.end() == 0, unhurt.text()
    assert result(hurt) == result(unhurt)
    assert result(graph) == result(unhurt)


@pytest.mark.long  # two hundred steps
@pytest.mark.timeout(1500)
def test_memory_is_flat_over_two_hundred_steps(tmp_path: Path) -> None:
    small = ("grpo.num_steps=205", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=2")
    adapters = ("lora.rank=64", "validation.every=0", "generation.max_new_tokens=4")
    settings = LORA + adapters + small
    run = Run(tmp_path, "flat", *settings)
    processes = {name: psutil.Process(pid) for name, pid in run.wait_for_event("processes").items() if "-0" in name}
    memory: list[dict[str, int]] = []
    for step in (20, 200):
        run.wait_for_step(step)
        memory.append({name: process.memory_info().rss for name, process in processes.items()})
    assert run.end() == 0, run.text()
    grown = {name: (memory[1][name] - memory[0][name]) / 2**20 for name in memory[0]}
    assert {"trainer-0", "engine-0"} <= grown.keys()
    # A version more at each step would be 270 MiB: one has 393,216 numbers of 4 bytes.
    assert max(grown.values()) < 24, (memory, grown)
