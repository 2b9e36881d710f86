"""Runs over several hosts, each with a network; one host is cut off while they train."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import read
from tests.system.clusters import Clusters, gone
from tests.system.ssh_hosts import SshHosts, standing_hosts
from tests.system.test_cluster_runs import SMALL, steps, wait_for

# Long: three hosts come up, and runs of four processes start three times.
pytestmark = [pytest.mark.long, pytest.mark.timeout(2400)]
CLUSTER = """
defaults: cluster/ssh.yaml
hosts: [{hosts}]
python: {python}
ssh_options: [-F, {config}]
object_store_mib: 100
num_cpus: 2
connect_timeout_s: 3
storage: {storage}
"""
REWARD = """
def brevity(prompt, completion, answer, row):
    return -0.001 * len(completion)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    with standing_hosts(tmp_path, 3) as hosts:
        yield hosts


@pytest.fixture
def clusters(hosts: SshHosts, tmp_path: Path) -> Iterator[Clusters]:
    home = tmp_path / "laptop"
    home.mkdir()
    clusters = Clusters(home)
    yield clusters
    clusters.clean()


class Watched:
    """A run as the laptop sees it."""

    def __init__(self, clusters: Clusters, name: str, *settings: str) -> None:
        self.clusters = clusters
        self.name = name
        self.path = clusters.home / "runs" / name
        sizes = ("trainer.num_ranks=2", "generation.num_engines=2", "placement.colocated=false")
        defaults = ("grpo.num_steps=5000", "refit.timeout_s=60", *sizes, *SMALL)
        command = ("grpo", "--cluster", "lab", f"run.name={name}", *defaults, *settings)
        self.process = clusters.popen(*command, group="train")

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read(self.path / "events.jsonl") if event["kind"] == kind]

    def steps_on(self, count: int) -> None:
        """Wait until this many further steps are done."""
        target = len(steps(self.path)) + count
        wait_for(lambda: self.process.poll() is not None or len(steps(self.path)) >= target, f"step {target}", 400)
        assert self.process.poll() is None, self.process.communicate()

    def stop(self) -> None:
        """Stop the run by hand. It ends with a checkpoint."""
        self.clusters.run("stop", self.name, group="runs")
        out, err = self.process.communicate(timeout=200)
        assert self.process.returncode == 130, out + err
        numbers = steps(self.path)
        assert numbers == list(range(1, len(numbers) + 1))


def test_runs_survive_the_loss_of_an_engines_host_and_of_a_trainers(
    clusters: Clusters, hosts: SshHosts, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    file = tmp_path / "lab.yaml"
    names = ", ".join(hosts.names)
    file.write_text(CLUSTER.format(hosts=names, python=sys.executable, config=hosts.config, storage=storage))
    (clusters.home / "mine.py").write_text(REWARD)
    clusters.run("up", str(file), within_s=600)
    folders = [node["folder"] for node in clusters.state("lab")["nodes"]]

    # Ranks on the head, an engine on each of the others; a reward of the user's own travels along.
    rewards = "rewards=[{name: exact}, {name: 'mine:brevity', weight: 0.1}]"
    shrinking = Watched(clusters, "shrinking", "placement.generator=spread", rewards)
    wait_for(lambda: shrinking.path.is_dir(), "submission")
    shrinking.steps_on(3)
    assert (storage / "runs" / "shrinking" / "checkpoints").is_dir()
    status = clusters.run("status")[0]
    assert "shrinking  running" in status
    hosts.plug(2, "down")
    wait_for(lambda: shrinking.events("engine_gone"), "engine given up", 200)
    (lost,) = shrinking.events("engine_gone")
    assert "the run goes on with 1 of 2 engines" in lost["reason"]
    shrinking.steps_on(3)
    shrinking.stop()
    assert not shrinking.events("restart")

    hosts.plug(2, "up")
    hosts.wait()
    assert "lab has host2 again: 3 nodes" in clusters.run("up", str(file), within_s=600)[0]
    settings = ("placement.trainer=spread", "checkpoint.every=2", "run.max_restarts=1", "run.restart_backoff_s=1")
    restarting = Watched(clusters, "restarting", *settings)
    wait_for(lambda: restarting.path.is_dir(), "submission")
    restarting.steps_on(5)
    hosts.plug(1, "down")
    wait_for(lambda: restarting.events("restart"), "restart", 200)
    wait_for(lambda: len(restarting.events("run_started")) == 2, "second attempt", 200)
    assert restarting.events("run_started")[1]["start_step"] >= 4
    restarting.steps_on(3)
    restarting.stop()

    # A rank and an engine on each of two hosts: weights stay there, gradients go over the network.
    colocated = Watched(clusters, "both", "placement.colocated=true", "checkpoint.every=1")
    wait_for(lambda: colocated.path.is_dir(), "submission")
    colocated.steps_on(3)
    assert {event["transport"] for event in colocated.events("refit_opened")} == {"shm"}
    hosts.plug(2, "down")
    out, err = colocated.process.communicate(timeout=300)
    assert colocated.process.returncode == 1, out + err
    (ended,) = colocated.events("run_ended")
    assert ended["reason"].endswith(": node host2 is gone"), ended
    changed = "trainer.num_ranks=1 generation.num_engines=1"
    assert ended["next"][0] == f"rlctl train grpo --resume runs/both --cluster lab {changed}"
    hosts.plug(2, "up")

    hosts.plug(1, "up")
    hosts.wait()
    clusters.run("down", "lab")
    folders += [node["folder"] for node in clusters.state("lab")["nodes"]] if clusters.folder("lab").exists() else []
    assert gone(folders)
