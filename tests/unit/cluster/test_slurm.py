"""A cluster as a Slurm job: the submitted script, what its tasks run, and how Slurm's output is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.cluster.hosts import slurm_host
from rlctl.cluster.lifecycle import dry_run
from rlctl.cluster.slurm.job import JobFolder, batch_script, job_plan
from rlctl.cluster.slurm.queue import Job
from rlctl.cluster.state import ClusterError, ClusterState
from rlctl.config.cluster_schema import SlurmCluster
from rlctl.config.load_cluster import load_cluster


def config_of(*overrides: str) -> SlurmCluster:
    config = load_cluster("slurm", list(overrides))
    assert isinstance(config, SlurmCluster)
    return config


def plan_of(*overrides: str) -> dict[str, Any]:
    state = ClusterState("lab", "slurm", "starting", "python", "", False, 0.0)
    return job_plan(config_of(*overrides), state)


def test_the_script_asks_for_what_was_asked_and_for_nothing_else() -> None:
    lines = batch_script(config_of(), "rlctl-lab", "/shared/job", "/env/python").splitlines()
    assert lines[0] == "#!/bin/bash"
    assert [line for line in lines if line.startswith("#SBATCH")] == [
        "#SBATCH --job-name=rlctl-lab",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --no-requeue",
        "#SBATCH --output=/shared/job/logs/job/start.log",
    ]
    assert lines[-1].startswith("srun --nodes=1 --ntasks-per-node=1 ")
    assert lines[-1].endswith("-- /env/python -m rlctl.cluster.remote_scripts.task /shared/job")
    assert not any(word in "\n".join(lines) for word in ("ray stop", "symmetric-run", "pkill"))


def test_every_option_has_its_line() -> None:
    overrides = ["nodes=4", "partition=gpu", "account=me", "qos=high", "time=1-00:00:00", "gpus_per_node=8"]
    overrides += ["cpus_per_task=16", "exclusive=true", "constraint=a|b", "sbatch_options=[--mem=64G]"]
    script = batch_script(config_of(*overrides, "setup=[module load cuda]"), "x", "/a b", "~/py")
    for option in ("nodes=4", "partition=gpu", "account=me", "qos=high", "time=1-00:00:00", "cpus-per-task=16"):
        assert f"#SBATCH --{option}\n" in script
    for option in ("--gres=gpu:8", "--exclusive", "--constraint='a|b'", "--mem=64G"):
        assert f"#SBATCH {option}\n" in script
    assert "\nmodule load cuda\n" in script
    assert "--cpus-per-task=16 " in script.splitlines()[-1]
    assert script.splitlines()[-1].endswith("-- ~/py -m rlctl.cluster.remote_scripts.task '/a b'")


def test_tasks_are_told_the_same_ray_arguments_as_hosts_over_ssh() -> None:
    plan = plan_of("nodes=2", "gpus_per_node=8")
    head = plan["head"]["arguments"]
    other = plan["other"]["arguments"]
    assert {"--head", "--port={port}", "--dashboard-host=127.0.0.1", "--dashboard-port={port}"} <= set(head)
    assert {"--address={head}", "--node-ip-address={address}", "--node-name={name}", "--num-gpus=8"} <= set(other)
    # Ray would count the machine's cores, of which the job may have a part.
    assert "--num-cpus={cpus}" in head
    assert "--num-cpus=3" in plan_of("num_cpus=3")["head"]["arguments"]
    assert len(set(plan["folders"])) == 2
    assert plan["head"]["token"] == plan["other"]["token"] == ""


def test_dry_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert f" {tmp_path}/state/rlctl/clusters/slurm/job-" in dry_run(config_of())
    assert " /scratch/rlctl-lab-" in dry_run(config_of("shared_folder=/scratch", "name=lab"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ClusterError, match="local submits nothing"):
        dry_run(load_cluster("local", []))


def test_a_node_is_reached_by_a_step_of_the_job_that_runs_the_setup_first(monkeypatch: pytest.MonkeyPatch) -> None:
    host = slurm_host("n1", "~/py", "17", ["module load cuda"])
    command = host.command()
    assert command[:2] == ["srun", "--overlap"]
    assert {"--jobid=17", "--nodelist=n1"} <= set(command)
    assert command[-2:] == ["-c", "{\nmodule load cuda\n} </dev/null >&2\nexec ~/py -"]
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    assert host.environment
    environment = host.environment()
    assert "SLURM_JOB_ID" not in environment
    assert environment["SLURM_CONF"] == "/etc/slurm.conf"


@pytest.mark.parametrize(
    ("job", "expected_text"),
    [
        (Job("7", "TIMEOUT", "TimeLimit"), "job 7 ended (TIMEOUT, TimeLimit): its time limit was over: ask for more"),
        (Job("7", "CANCELLED by 0", "None"), "job 7 ended (CANCELLED by 0): it was cancelled"),
        (Job("7", "NODE_FAIL"), "a node failed"),
        (Job("7", "forgotten by Slurm"), "job 7 ended (forgotten by Slurm)"),
    ],
)
def test_why_a_job_is_over(job: Job, expected_text: str) -> None:
    assert not job.runs
    assert not job.waits
    assert expected_text in job.ending


def test_the_shared_folder_is_private_and_gone_but_for_logs(tmp_path: Path) -> None:
    shared = JobFolder(str(tmp_path / "job"))
    shared.make()
    shared.fill("#!/bin/bash\n", {"a": 1}, "secret")
    assert [path.stat().st_mode & 0o077 for path in (shared.path, shared.script, shared.path / "token")] == [0] * 3
    with pytest.raises(ClusterError, match="is there already"):
        shared.make()
    (shared.logs / "job" / "start.log").write_text("hello\nsrun: error: n1: task 0: Exited with exit code 1\n")
    assert shared.last_words() == "hello"
    reports = {0: {"name": "n1", "folder": "/tmp/a"}, 1: {"name": "n2", "folder": "/tmp/b", "ended": {"left": [5]}}}
    for index, report in reports.items():
        (shared.path / "nodes" / f"{index}.json").write_text(json.dumps(report))
    assert shared.cleanup_problems() == [
        "n1: ended without clearing up: look for /tmp/a there",
        "n2: processes 5 would not end",
    ]
    shared.remove(tmp_path / "logs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs"]
    assert (tmp_path / "logs" / "job" / "start.log").exists()
