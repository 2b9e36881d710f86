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
SMALL = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "validation.every=0", "grpo.num_steps=3")


def train(clusters: Clusters, name: str, *arguments: str) -> Path:
    clusters.run("grpo", f"run.name={name}", *SIZES, *SMALL, *arguments, group="train", within_s=800)
    return clusters.home / "runs" / name


def steps(run: Path) -> list[dict[str, Any]]:
    return [each for each in read(run / "metrics.jsonl") if each["kind"] == "step"]


def learned(run: Path) -> list[dict[str, Any]]:
    """Gradient norm, learning rate and reward of each step."""
    kept = "train/grad_norm", "train/lr", "reward/mean"
    return [{key: value for key, value in each.items() if key in kept} for each in steps(run)]


def weights(run: Path) -> dict[str, Any]:
    (file,) = sorted((run / "checkpoints").glob("*/hf/model.safetensors"))[-1:]
    return load_file(file)


def ways(run: Path) -> set[str]:
    return {each["transport"] for each in read(run / "events.jsonl") if each["kind"] == "refit_opened"}


@pytest.mark.long  # four runs: minutes
@pytest.mark.timeout(1800)
def test_two_nodes_learn_to_the_last_bit_what_one_node_does(clusters: Clusters) -> None:
    alone = train(clusters, "alone", "trainer.replicas=2")
    clusters.run("up", "nodes=2", "num_cpus=2")
    out, _ = clusters.run("grpo", "--cluster", "local", "--dry-run", *SIZES, group="train")
    said = " ".join(out.split())
    assert "shm within each of 2 nodes, whose rank holds all weights" in said
    assert "head 2 CPUs: rank 0; engine 0" in said and "node-1 2 CPUs: rank 1; engine 1" in said
    assert "trainer.replicas=2" in said and "only gradients cross nodes, once an update" in said

    colocated = train(clusters, "colocated", "--cluster", "local")
    apart = train(clusters, "apart", "--cluster", "local", "placement.colocated=false", "trainer.replicas=2")
    assert (ways(alone), ways(colocated), ways(apart)) == ({"shm"}, {"shm"}, {"broadcast"})
    # Groups of an asynchronous run depend on the time. Engines have the trainer's weights all the same.
    ahead = train(clusters, "ahead", "--cluster", "local", "async.enabled=true", "health.parity_every=1")
    assert ways(ahead) == {"broadcast"} and [each["step"] for each in steps(ahead)] == [1, 2, 3]
    assert max(each["mismatch/parity"] for each in steps(ahead)) < 1 + 1e-6
    assert max(each["age/max"] for each in steps(ahead)) <= 1
    expected = json.dumps(learned(alone))
    assert expected.count("train/grad_norm") == expected.count("reward/mean") == 3
    for run in (colocated, apart):
        assert json.dumps(learned(run)) == expected
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
    assert all(nodes[f"trainer-{n}"] == nodes[f"engine-{n}"] for n in range(4)) and len(set(nodes.values())) == 4
    assert (ways(alone), ways(four)) == ({"shm"}, {"shm"})
    assert json.dumps(learned(four)) == json.dumps(learned(alone)) and len(learned(four)) == 2
    assert all(tensor.equal(weights(four)[name]) for name, tensor in weights(alone).items())


@pytest.mark.long  # two runs of eight processes: minutes
@pytest.mark.timeout(1800)
def test_four_nodes_apart_and_asynchronous_learn_what_one_node_does(clusters: Clusters) -> None:
    # No group depends on the time: a step trains the oldest groups, which the version before sampled whole.
    whole = ("async.in_flight_weight_updates=false", "async.streamed_training=false", "async.prefetch=full")
    ordered = ("async.enabled=true", "async.policy=in_order", "placement.colocated=false", *whole)
    sizes = ("trainer.num_ranks=4", "generation.num_engines=4", "trainer.replicas=4", *ordered)
    alone = train(clusters, "alone", *sizes)
    clusters.run("up", "nodes=4", "num_cpus=2")
    four = train(clusters, "four", "--cluster", "local", *sizes)
    (attempt,) = (four / "logs").glob("attempt_*")
    nodes = json.loads((attempt / "nodes.json").read_text())
    assert len(set(nodes.values())) == 4 and not {nodes[f"trainer-{n}"] for n in range(4)} & {
        nodes[f"engine-{n}"] for n in range(4)
    }
    assert (ways(alone), ways(four)) == ({"shm"}, {"broadcast"})
    assert [each["age/max"] for each in steps(four)] == [each["age/max"] for each in steps(alone)] == [0, 1, 1]
    for ours, theirs in zip(learned(four), learned(alone), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert all(tensor.allclose(weights(four)[name], rtol=1e-6, atol=1e-8) for name, tensor in weights(alone).items())
