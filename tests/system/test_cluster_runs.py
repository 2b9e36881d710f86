"""Runs that live on a cluster: handed over, watched, left, stopped, gone on with, and found dead."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import in_transit, read
from tests.system.clusters import Clusters, gone, processes_of

pytestmark = pytest.mark.usefixtures("ordinary_workers")

SMALL = ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "validation.every=0", "run.probe=false")


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    clusters = Clusters(tmp_path, RLCTL_SECRET="do not show this")
    yield clusters
    clusters.clean()


def steps(run: Path) -> list[int]:
    return [record["step"] for record in read(run / "metrics.jsonl") if record["kind"] == "step"]


def wait_for(has_come: Callable[[], object], awaited: str, within_s: float = 240) -> None:
    end = time.monotonic() + within_s
    while not has_come():
        assert time.monotonic() < end, f"no {awaited} within {within_s:g} s"
        time.sleep(0.1)


@pytest.mark.long  # two minutes; a cluster's own life is in test_cluster.py, its jobs in tests/unit/cluster/jobs
@pytest.mark.timeout(900)
def test_up_train_and_down(clusters: Clusters, tmp_path: Path) -> None:
    clusters.run("up", "nodes=2", "num_cpus=2")
    folders = [node["folder"] for node in clusters.state()["nodes"]]
    # Ranks on one node of two CPUs, engines on the other.
    sizes = ("trainer.num_ranks=2", "generation.num_engines=2", "placement.colocated=false", "grpo.num_steps=2")
    out, err = clusters.run("grpo", "--cluster", "local", "--dry-run", *sizes, group="train")
    assert ["head", "2", "CPUs:", "rank", "0,", "1"] in [line.split() for line in out.splitlines()]
    assert ["node-1", "2", "CPUs:", "engine", "0,", "1"] in [line.split() for line in out.splitlines()]
    _, err = clusters.run("grpo", "--cluster", "local", "trainer.num_ranks=4", group="train", code=2)
    assert "5 CPUs needed for 4 trainer ranks and 1 engine" in err
    assert "the cluster has 4 CPUs free: head 2, node-1 2; --wait waits for it" in err
    run = tmp_path / "runs" / "grpo--qwen3-tiny--1"
    assert not run.exists()

    out, err = clusters.run("grpo", "--cluster", "local", "--env", "RLCTL_SECRET", *sizes, *SMALL, group="train")
    assert f"{run.name} runs on local; watch: rlctl runs dash" in err
    assert f"{run.name} done" in out
    assert "rlctl train grpo --resume" in out
    assert "--cluster local grpo.num_steps=4" in out
    assert steps(run) == [1, 2]
    opened = [event for event in read(run / "events.jsonl") if event["kind"] == "refit_opened"]
    assert [(event["transport"], len(event["engines"])) for event in opened] == [("broadcast", 2)]
    listed_runs = json.loads(clusters.run("list", "--json", group="runs")[0])
    assert [(listed["name"], listed["status"]) for listed in listed_runs] == [(run.name, "done")]
    # Reserved resources are free again, and no secret stands anywhere.
    seen = json.loads(clusters.run("status", "--json")[0])
    assert [node["free"]["CPU"] for node in seen["nodes"]] == [2, 2]
    assert seen["runs"] == []
    assert all(b"do not show this" not in path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert "trainer-0.log" in {path.name for path in (run / "logs" / "latest").iterdir()}

    lines = clusters.run("logs", run.name, "--node", "node-1", group="runs")[0].splitlines()
    assert {line.partition(" | ")[0] for line in lines} == {"node-1 engine-0.log", "node-1 engine-1.log"}

    late = ("run.name=spät", "placement.wait_s=1", "trainer.num_ranks=4", *SMALL)
    out, err = clusters.run("grpo", "--cluster", "local", "--wait", *late, group="train", code=1)
    assert "no room within placement.wait_s=1: 5 CPUs needed for 4 trainer ranks and 1 engine" in out + err
    assert steps(run.parent / "spät") == []
    clusters.run("down")
    assert gone(folders)
    listed = clusters.run("list", group="runs")[0].split()
    assert {"done", "failed"} <= {*listed}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_left_stopped_resumed_and_killed(clusters: Clusters, tmp_path: Path) -> None:
    clusters.run("up", "num_cpus=2")
    _, err = clusters.run("grpo", "--cluster", "loca", group="train", code=2)
    assert "error: no cluster loca is up; did you mean local?" in err
    _, err = clusters.run("grpo", "--cluster", "local", "--env", "NOT_THERE", group="train", code=2)
    assert "--env NOT_THERE: not set in this environment" in err
    _, err = clusters.run("grpo", "--wait", group="train", code=2)
    assert "--wait: goes with --cluster NAME" in err

    run = tmp_path / "runs" / "mine"
    command = ("grpo", "--cluster", "local", "run.name=mine", "grpo.num_steps=500", *SMALL)
    watching = clusters.popen(*command, group="train")
    wait_for(lambda: len(steps(run)) >= 2, "second step")
    os.killpg(watching.pid, signal.SIGINT)
    _, err = watching.communicate(timeout=60)
    assert watching.returncode == 130
    assert "mine runs on; watch: rlctl runs dash runs/mine, stop: rlctl runs stop runs/mine" in err
    done = len(steps(run))
    wait_for(lambda: len(steps(run)) > done, "step without a watcher")
    status = clusters.run("status")[0]
    assert "mine  running" in status
    # A second one has no room, and waits.
    command = ("grpo", "--cluster", "local", "--wait", "run.name=next", "grpo.num_steps=1", *SMALL)
    waiting = clusters.popen(*command, group="train")
    events = run.parent / "next" / "events.jsonl"
    wait_for(lambda: any("waiting for room" in str(event.get("what")) for event in read(events)), "wait")

    assert "mine ends after its step" in clusters.run("stop", "mine", group="runs")[0]
    wait_for(lambda: any(e["kind"] == "run_ended" for e in read(run / "events.jsonl")), "end")
    assert read(run / "events.jsonl")[-1]["status"] == "stopped"
    saved = len(steps(run))
    assert (run / "checkpoints" / f"step_{saved}").is_dir()
    out, err = waiting.communicate(timeout=300)
    assert waiting.returncode == 0, out + err

    clusters.run("grpo", "--resume", "runs/mine", "--cluster", "local", "--detach", group="train")
    wait_for(lambda: len(steps(run)) > saved, "step after the resume")
    assert steps(run) == list(range(1, len(steps(run)) + 1))
    _, err = clusters.run("grpo", "--resume", "runs/mine", "--cluster", "local", "--wait", group="train", code=2)
    assert "is still running (job mine-2-" in err
    _, err = clusters.run("grpo", "--resume", "runs/mine", group="train", code=2)
    assert "is driven by job mine-2-" in err
    started = [event for event in read(run / "events.jsonl") if event["kind"] == "run_started"]
    psutil.Process(started[-1]["pid"]).kill()
    wait_for(lambda: "its driver is gone" in clusters.run("show", "mine", group="runs")[0], "word of its end", 60)
    assert "mine engine-0.log | " in clusters.run("logs", "mine", "--process", "engine-0", group="runs")[0]
    wait_for(lambda: json.loads(clusters.run("status", "--json")[0])["nodes"][0]["free"]["CPU"] == 2, "room", 60)
    wait_for(lambda: in_transit("mine") == [], "empty shared memory", 30)

    saved = len(steps(run))
    clusters.run("grpo", "--resume", "runs/mine", "--cluster", "local", "--detach", group="train")
    wait_for(lambda: len(steps(run)) > saved, "step of the third attempt")
    (folder,) = [node["folder"] for node in clusters.state()["nodes"]]
    (head,) = [pid for pid in processes_of([folder]) if psutil.Process(pid).name() == "gcs_server"]
    os.kill(head, signal.SIGKILL)
    wait_for(lambda: read(run / "events.jsonl")[-1]["kind"] == "run_ended", "end", 120)
    error, ended = read(run / "events.jsonl")[-2:]
    assert error["kind"] == "error" and ended["status"] == "failed"
    assert ended["reason"].startswith(f"Ray's gcs_server (process {head}) is gone"), ended
    assert f"rlctl train grpo --resume {run} --cluster local" in ended["next"][0]
    assert f"Ray's gcs_server (process {head}) is gone" in clusters.run("show", "mine", group="runs")[0]
    clusters.run("down")
    assert gone([folder]) and in_transit("mine") == []
