"""Runs over several nodes of one machine learn as a run on one node does: same ranks, same mesh, same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.faults.runs import read
from tests.system.clusters import Clusters

# Two CPUs a node: a rank and an engine on each.
SIZES = ("trainer.num_ranks=2", "generation.num_engines=2", "trainer.threads=1")
SETTINGS = (
    *SIZES,
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "validation.every=0",
    "grpo.num_steps=3",
)


def train(clusters: Clusters, name: str, *arguments: str) -> Path:
    clusters.run("grpo", f"run.name={name}", *SETTINGS, *arguments, group="train", within_s=800)
    return clusters.home / "runs" / name


def steps(run: Path) -> list[dict[str, Any]]:
    return [record for record in read(run / "metrics.jsonl") if record["kind"] == "step"]


def learning_of(run: Path) -> list[dict[str, Any]]:
    """Return gradient norm, learning rate and reward of each step."""
    names = ("train/grad_norm", "train/lr", "reward/mean")
    return [{name: metric for name, metric in step.items() if name in names} for step in steps(run)]


def weights(run: Path) -> dict[str, Any]:
    return load_file(max((run / "checkpoints").glob("*/hf/model.safetensors")))


def transports_of(run: Path) -> set[str]:
    return {event["transport"] for event in read(run / "events.jsonl") if event["kind"] == "refit_opened"}


@pytest.mark.long  # four runs: minutes
@pytest.mark.timeout(1800)
def test_two_nodes_learn_to_the_last_bit_what_one_node_does(clusters: Clusters) -> None:
    alone = train(clusters, "alone", "trainer.replicas=2")
    clusters.run("up", "nodes=2", "num_cpus=2")
    out, _ = clusters.run("grpo", "--cluster", "local", "--dry-run", *SIZES, group="train")
    plan = " ".join(out.split())
    assert "shm within each of 2 nodes, whose rank holds all weights" in plan
    assert "head 2 CPUs: rank 0; engine 0" in plan and "node-1 2 CPUs: rank 1; engine 1" in plan
    assert "trainer.replicas=2" in plan and "only gradients cross nodes, once an update" in plan

    colocated = train(clusters, "colocated", "--cluster", "local")
    apart = train(clusters, "apart", "--cluster", "local", "placement.colocated=false", "trainer.replicas=2")
    assert transports_of(alone) == transports_of(colocated) == {"shm"}
    assert transports_of(apart) == {"broadcast"}
    # Groups of an asynchronous run depend on the time. Engines have the trainer's weights all the same.
    ahead = train(clusters, "ahead", "--cluster", "local", "async.enabled=true", "health.parity_every=1")
    assert transports_of(ahead) == {"broadcast"} and [step["step"] for step in steps(ahead)] == [1, 2, 3]
    assert max(step["mismatch/parity"] for step in steps(ahead)) < 1 + 1e-6
    assert max(step["age/max"] for step in steps(ahead)) <= 1
    expected = json.dumps(learning_of(alone))
    assert expected.count("train/grad_norm") == expected.count("reward/mean") == 3
    for run in (colocated, apart):
        assert json.dumps(learning_of(run)) == expected
        assert all(tensor.equal(weights(run)[name]) for name, tensor in weights(alone).items())


@pytest.mark.long  # two runs of eight processes: minutes
@pytest.mark.timeout(1800)
def test_four_nodes_learn_to_the_last_bit_what_one_node_does(clusters: Clusters) -> None:
    sizes = ("trainer.num_ranks=4", "generation.num_engines=4", "grpo.num_steps=2")
    alone = train(clusters, "alone", "trainer.replicas=4", *sizes)
    clusters.run("up", "nodes=4", "num_cpus=2")
    four = train(clusters, "four", "--cluster", "local", *sizes)
    (attempt,) = (four / "logs").glob("attempt_*")
    nodes = json.loads((attempt / "nodes.json").read_text())
    assert all(nodes[f"trainer-{rank}"] == nodes[f"engine-{rank}"] for rank in range(4))
    assert len(set(nodes.values())) == 4
    assert transports_of(alone) == transports_of(four) == {"shm"}
    assert json.dumps(learning_of(four)) == json.dumps(learning_of(alone)) and len(learning_of(four)) == 2
    assert all(tensor.equal(weights(four)[name]) for name, tensor in weights(alone).items())


@pytest.mark.long  # two runs of eight processes: minutes
@pytest.mark.timeout(1800)
def test_four_nodes_apart_and_asynchronous_learn_what_one_node_does(clusters: Clusters) -> None:
    # No group depends on the time: a step trains the oldest groups, which the version before sampled whole.
    settings = (
        "trainer.num_ranks=4",
        "generation.num_engines=4",
        "trainer.replicas=4",
        "placement.colocated=false",
        "async.enabled=true",
        "async.policy=in_order",
        "async.in_flight_weight_updates=false",
        "async.streamed_training=false",
        "async.prefetch=full",
    )
    alone = train(clusters, "alone", *settings)
    clusters.run("up", "nodes=4", "num_cpus=2")
    four = train(clusters, "four", "--cluster", "local", *settings)
    (attempt,) = (four / "logs").glob("attempt_*")
    nodes = json.loads((attempt / "nodes.json").read_text())
    trainer_nodes = {nodes[f"trainer-{rank}"] for rank in range(4)}
    engine_nodes = {nodes[f"engine-{rank}"] for rank in range(4)}
    assert len(set(nodes.values())) == 4 and not trainer_nodes & engine_nodes
    assert transports_of(alone) == {"shm"}
    assert transports_of(four) == {"broadcast"}
    for run in (alone, four):
        assert [step["age/max"] for step in steps(run)] == [0, 1, 1]
    for metrics, expected in zip(learning_of(four), learning_of(alone), strict=True):
        assert metrics == pytest.approx(expected, rel=1e-6)
    assert all(tensor.allclose(weights(four)[name], rtol=1e-6, atol=1e-8) for name, tensor in weights(alone).items())
