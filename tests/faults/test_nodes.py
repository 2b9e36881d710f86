"""A node that dies in any phase is named. The run goes on with the other nodes, or prints the command to go on."""

import os
import shlex
import signal
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.faults.runs import read
from tests.system.clusters import Clusters, processes_of
from tests.system.test_cluster_runs import steps, wait_for

# Long: each loss of a trainer's node costs a start of the run.
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
TINY = ("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=2", "validation.every=0", "run.probe=false")
ENDLESS = ("grpo.num_steps=5000", "checkpoint.every=1", "trainer.threads=1", "run.restart_backoff_s=1")


class Hurt:
    """A run on a local cluster, of which the test kills nodes."""

    def __init__(self, clusters: Clusters, name: str, *settings: str) -> None:
        self.clusters = clusters
        self.path = clusters.home / "runs" / name
        command = ("grpo", "--cluster", "local", f"run.name={name}", *TINY, *ENDLESS)
        self.process = clusters.popen(*command, *settings, group="train")

    def events(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        events = read(self.path / "events.jsonl")
        return [event for event in events if {"kind": kind, **fields}.items() <= event.items()]

    def wait(self, kind: str, count: int, **fields: Any) -> dict[str, Any]:
        """Return the `count`th event with these fields, once there is one."""

        def has_come() -> bool:
            assert self.process.poll() is None or kind == "run_ended", self.process.communicate()
            return len(self.events(kind, **fields)) >= count

        wait_for(has_come, f"{kind} {fields} number {count}", 500)
        return self.events(kind, **fields)[count - 1]

    def kill_in(self, phase: str, node: str) -> None:
        """Kill all processes of a node when the next phase of this name begins, after one whole step."""
        done = len(steps(self.path))
        wait_for(lambda: len(steps(self.path)) > done, "step", 500)
        folders = {state["name"]: state["folder"] for state in self.clusters.state()["nodes"]}
        processes = set[psutil.Process]()
        for pid in processes_of([folders[node]]):
            root = psutil.Process(pid)
            processes |= {root, *root.children(recursive=True)}
        self.wait("phase", len(self.events("phase", name=phase)) + 1, name=phase)
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def test_a_node_of_ranks_and_engines_is_lost_in_each_phase_and_the_run_begins_again_or_says_how(
    clusters: Clusters,
) -> None:
    clusters.run("up", "nodes=2", "num_cpus=2")
    sizes = ("trainer.num_ranks=2", "generation.num_engines=2", "run.max_restarts=4", "placement.wait_s=500")
    run = Hurt(clusters, "hurt", *sizes)
    wait_for(run.path.is_dir, "submission")
    phases = ("generation", "train", "refit", "checkpoint")
    for count, phase in enumerate(phases, 1):
        run.kill_in(phase, "node-1")
        reason = run.wait("restart", count)["reason"]
        assert "trainer-1 died during " in reason and reason.endswith(": node node-1 is gone"), (phase, reason)
        clusters.run("up", "nodes=2", "num_cpus=2")
        start = run.wait("run_started", count + 1)
        # The checkpoint of the step may or may not have been complete when the node died.
        assert start["start_step"] >= len(steps(run.path)) - 1, (phase, start)
    run.kill_in("train", "node-1")
    out, err = run.process.communicate(timeout=400)
    assert run.process.returncode == 1, out + err
    end = run.wait("run_ended", 1)
    assert end["reason"].endswith(": node node-1 is gone"), end
    smaller = "trainer.num_ranks=1 generation.num_engines=1"
    resume = f"rlctl train grpo --resume {run.path} --cluster local {smaller}"
    assert end["next"][0] == resume and resume in out

    numbers = steps(run.path)
    assert numbers == list(range(1, len(numbers) + 1))
    arguments = shlex.split(resume)[2:]
    clusters.run(*arguments, f"grpo.num_steps={len(numbers) + 1}", group="train")
    assert steps(run.path) == list(range(1, len(numbers) + 2))
    # More ranks and engines than it was saved by, on one node again.
    clusters.run("up", "nodes=2", "num_cpus=2")
    without_sizes = arguments[: -len(smaller.split())]
    clusters.run(*without_sizes, *sizes[:2], f"grpo.num_steps={len(numbers) + 2}", group="train")
    assert steps(run.path) == list(range(1, len(numbers) + 3))
    clusters.run("down")


def test_nodes_of_engines_are_lost_and_the_run_goes_on_with_the_others(clusters: Clusters) -> None:
    clusters.run("up", "nodes=4", "num_cpus=1")
    sizes = ("generation.num_engines=3", "placement.colocated=false", "async.enabled=true")
    run = Hurt(clusters, "hurt", *sizes, "refit.timeout_s=60", "run.max_restarts=0")
    wait_for(run.path.is_dir, "submission")
    for count, (phase, node) in enumerate((("refit", "node-1"), ("train", "node-2")), 1):
        run.kill_in(phase, node)
        gone = run.wait("engine_gone", count)
        assert gone["reason"] == f"node {node} is gone, the run goes on with {3 - count} of 3 engines", (phase, gone)
        # Nothing counts against generation.max_restarts, and the others go on as they are.
        assert not run.events("engine_restarted") and len(run.events("engine_lost")) == count
    done = len(steps(run.path))
    wait_for(lambda: len(steps(run.path)) >= done + 2, "further steps", 400)
    run.kill_in("checkpoint", "node-3")
    out, err = run.process.communicate(timeout=400)
    assert run.process.returncode == 1 and "the nodes of all engines are gone" in out + err
    assert f"--resume {run.path} --cluster local" in run.wait("run_ended", 1)["next"][0]
    numbers = steps(run.path)
    assert numbers == list(range(1, len(numbers) + 1))
    clusters.run("down")
