"""A cluster that is a job of a real Slurm: up, used, ended from outside, refused, interrupted; nothing is left."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rlctl.cluster.state import ClusterNode, ClusterState
from tests.faults.runs import read
from tests.system.clusters import Clusters, gone
from tests.system.slurm_lab import SlurmLab, why_not
from tests.system.test_cluster_runs import SMALL as TINY

PROGRAM = """
import os
os.environ.update({environment})
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init(address="{address}", log_to_driver=False)
names = {{node["NodeID"]: node["NodeName"] for node in ray.nodes()}}
where = ray.remote(num_cpus=1)(lambda: ray.get_runtime_context().get_node_id())
sent = [where.options(scheduling_strategy=On(node, soft=False)).remote() for node in names]
print(*sorted(names[found] for found in ray.get(sent)))
"""
SMALL = ["num_cpus=1", "object_store_mib=100", "min_disk_gib=1"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    if missing := why_not():
        pytest.skip(missing)
    # A short path, since it holds sockets.
    lab = SlurmLab(Path(f"/tmp/rlctl-lab-{os.getpid()}"), 2)
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()
        shutil.rmtree(lab.folder, ignore_errors=True)


@pytest.fixture
def clusters(lab: SlurmLab, tmp_path: Path) -> Iterator[Clusters]:
    clusters = Clusters(tmp_path, **lab.environment)
    yield clusters
    clusters.clean()
    assert lab.jobs() == []


def works_on(state: ClusterState) -> list[str]:
    """Return the nodes that run tasks of a Ray program on the head."""
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{state.head.folder}/token"}
    program = PROGRAM.format(environment=environment, address=state.address)
    command = state.host_of(state.head).command()
    done = subprocess.run(command, input=program, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def folders_of(state: dict[str, list[dict[str, str]]]) -> list[str]:
    return [node["folder"] for node in state["nodes"]]


def is_clear(clusters: Clusters) -> bool:
    """Return True if nothing is left of the cluster but logs."""
    folder = clusters.folder("slurm")
    return not folder.exists() or [path.name for path in folder.iterdir()] == ["logs"]


def test_two_nodes_come_up_and_go(clusters: Clusters, lab: SlurmLab, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = clusters.run("up", "slurm", "nodes=2", *SMALL, within_s=500)
    assert "slurm is up: 2 nodes, 2 CPUs, 0 GPUs, at " in out
    assert "ok      n1: Python" in err
    assert "ok      n2: Python" in err
    state = clusters.state("slurm")
    token = (clusters.folder("slurm") / "token").read_text()
    job = Path(state["shared"])
    assert token not in out + err + json.dumps(state) + (job / "job.sh").read_text() + (job / "plan.json").read_text()
    assert [path.stat().st_mode & 0o077 for path in (job, job / "token", job / "plan.json", job / "job.sh")] == [0] * 4
    assert lab.jobs() == [state["job"]]

    assert "slurm is up already: 2 nodes" in clusters.run("up", "slurm", "nodes=2")[0]
    assert clusters.state("slurm") == state
    seen = json.loads(clusters.run("status", "--json")[0])
    assert [(node["condition"], node["host"], node["resources"]["CPU"]) for node in seen["nodes"]] == [
        ("up", "n1", 1),
        ("up", "n2", 1),
    ]
    dashboard = [address for address, port, _ in seen["nodes"][0]["listening"] if port == seen["dashboard_port"]]
    assert dashboard == ["127.0.0.1"]
    assert clusters.run("list")[0].splitlines()[1].split()[:4] == ["slurm", "slurm", "up", "2"]
    assert "n2 start.log | " in clusters.run("logs", "--node", "n2")[0]

    # A program for hosts over ssh works here too, also from within another job of the user's.
    monkeypatch.setenv("SLURM_CONF", lab.environment["SLURM_CONF"])
    monkeypatch.setenv("SLURM_JOB_ID", "12345")
    nodes = [ClusterNode(**node) for node in state["nodes"]]
    cluster = ClusterState(
        **{name: value for name, value in state.items() if name not in ("version", "nodes")}, nodes=nodes
    )
    facts = cluster.host_of(nodes[1]).run("node.look", {key: state["nodes"][1][key] for key in LOOK}, 60)
    assert facts["alive"]
    assert works_on(cluster) == ["n1", "n2"]

    # A node that is not the head may go; then the job is ended by somebody else.
    psutil.Process(state["nodes"][1]["pid"]).kill()
    wait_for(lambda: "partly up" in clusters.run("status", code=1)[0])
    lab.run("scancel", state["job"])
    assert gone(folders_of(state), within_s=60)
    wait_for(lambda: "CANCELLED" in clusters.run("status", code=1)[0])
    out, _ = clusters.run("status", code=1)
    assert "it was cancelled; clear up: rlctl cluster down slurm" in " ".join(out.split())
    assert clusters.run("list")[0].splitlines()[1].split()[2] == "gone"
    assert "n1 start.log | " in clusters.run("logs", "--node", "n1")[0]
    assert "slurm is down" in clusters.run("down")[0]
    assert is_clear(clusters)
    assert "n1 start.log | " in clusters.run("logs", "--node", "n1")[0]


def test_a_run_lives_on_its_nodes(clusters: Clusters, lab: SlurmLab) -> None:
    clusters.run("up", "slurm", "nodes=2", *SMALL, within_s=500)
    state = clusters.state("slurm")
    settings = ("grpo.num_steps=2", "placement.trainer=spread", *TINY)
    out, err = clusters.run("grpo", "--cluster", "slurm", *settings, group="train", within_s=500)
    run = clusters.home / "runs" / "grpo--qwen3-tiny--1"
    assert "grpo--qwen3-tiny--1 done" in out, err
    opened = [event for event in read(run / "events.jsonl") if event["kind"] == "refit_opened"]
    # The rank stands on one node, the engine on the other: a node has one CPU here.
    assert [(event["transport"], event["engines"]) for event in opened] == [("broadcast", ["engine-0"])]
    assert json.loads(clusters.run("status", "--json")[0])["runs"] == []
    clusters.run("down")
    assert gone(folders_of(state), within_s=60)
    assert lab.jobs() == []


def test_down_leaves_nothing_and_up_clears_what_a_job_left(clusters: Clusters, lab: SlurmLab, tmp_path: Path) -> None:
    shared = f"shared_folder={tmp_path}/scratch"
    clusters.run("up", "slurm", shared, "setup=['echo prepared']", *SMALL, within_s=500)
    first = clusters.state("slurm")
    assert Path(first["shared"]).parent == tmp_path / "scratch"
    head = psutil.Process(first["nodes"][0]["pid"])
    head.kill()
    wait_for(lambda: not lab.jobs())
    out, err = clusters.run("up", "slurm", shared, *SMALL, within_s=500)
    assert f"job {first['job']} ended (FAILED" in err
    assert "slurm was up before and its processes are gone or half started: clearing up" in err
    assert "slurm is up: 1 node" in out
    second = clusters.state("slurm")
    assert second["job"] != first["job"]
    assert "slurm is down" in clusters.run("down")[0]
    assert gone(folders_of(first) + folders_of(second))
    assert list((tmp_path / "scratch").iterdir()) == []
    assert lab.jobs() == []
    assert is_clear(clusters)


def test_what_slurm_refuses_is_a_line(clusters: Clusters) -> None:
    for override, message in REFUSED.items():
        _, err = clusters.run("up", "slurm", override, code=1)
        assert f"error: sbatch: {message}" in err
        assert is_clear(clusters)
    _, err = clusters.run("up", "slurm", "python=/no/python", *SMALL, code=1)
    assert "not found on the nodes: /no/python; set python=... to one that has ray and rlctl" in err
    assert is_clear(clusters)


def test_ctrl_c_and_a_deadline_while_it_waits(clusters: Clusters, lab: SlurmLab) -> None:
    # More nodes than there are: such a job waits without end.
    process = clusters.popen("up", "slurm", "nodes=9")
    wait_for(lambda: bool(lab.jobs()))
    time.sleep(2)
    out, _ = clusters.run("status", code=1)
    assert "waits in the queue: PartitionConfig" in " ".join(out.split())
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "waits in the queue: PartitionConfig" in err
    assert lab.jobs() == []
    assert is_clear(clusters)
    _, err = clusters.run("up", "slurm", "nodes=9", "wait_s=1", code=1)
    assert "still waits in the queue after" in err
    assert "PartitionConfig; nothing is left running: ask for less, or wait longer with wait_s=..." in err
    assert lab.jobs() == []
    assert is_clear(clusters)


LOOK = ("folder", "pid", "start_id")
REFUSED = {
    "partition=nope": "no such partition: see `sinfo`, then set partition=...",
    "time=soon": "not a time limit: minutes, hours:minutes:seconds or days-hours, such as time=4:00:00",
    "constraint=big": "no node has this constraint",
    "gpus_per_node=1": "no node has such GPUs",
}


def wait_for(done: Callable[[], bool], within_s: float = 90) -> None:
    """Raise AssertionError if the condition is not met in time."""
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end
        time.sleep(0.5)
