"""A Slurm job that is a Ray cluster: its batch script and the plan that its tasks read. Pure."""

import shlex
from dataclasses import replace
from typing import Any

from rlctl.cluster.hosts import shown
from rlctl.cluster.ray_start import Place, start_request
from rlctl.cluster.state import ClusterNode, ClusterState, folder_name
from rlctl.config.cluster_schema import SlurmCluster

# What a task needs beside it, of `remote_scripts/`.
PROGRAMS = ("task", "check", "start", "wait", "stop")


def batch_script(config: SlurmCluster, job_name: str, folder: str, python: str) -> str:
    """What `sbatch` is given. folder: of the job's files, which every node sees."""
    options = [*_options(config, job_name, folder), *config.sbatch_options]
    # Since Slurm 22.05 a step no longer takes this from its job.
    cpus = "" if config.cpus_per_task is None else f" --cpus-per-task={config.cpus_per_task}"
    step = f"srun --nodes={config.nodes} --ntasks-per-node=1{cpus} --mem=0 --cpu-bind=none"
    task = f"{shown(python)} {shlex.quote(f'{folder}/remote_scripts/task.py')} {shlex.quote(folder)}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        f"# One Ray node a task; they read the cluster's token from {folder}/token, which is theirs alone to read.",
        *config.setup,
        "# The head's end is a failure, and ends the others; another node may go and the rest stays.",
        f"{step} --kill-on-bad-exit=1 --wait=0 -- {task}",
    ]
    return "\n".join(lines) + "\n"


def job_plan(config: SlurmCluster, state: ClusterState, too_slow: str) -> dict[str, Any]:
    """What the tasks are told: the requests of `remote_scripts/start.py`, in which a node fills in what only it knows.

    too_slow: in a node's log, that it is worth a second try.
    """
    gpus = config.gpus_per_node if config.num_gpus is None else config.num_gpus
    config = replace(config, num_gpus=gpus)
    nodes = [ClusterNode("{name}", f"{{{role}}}", "", role == "head", "{address}") for role in ("head", "other")]
    state = replace(state, address="{head}", nodes=nodes)
    place = Place("{name}", "", "{address}", "", 0, dashboard=True)
    head, other = (start_request(config, state, node, place, "") for node in nodes)
    if config.num_cpus is None:
        # Ray would count the machine's, which the job may have but a part of.
        head["arguments"].append("--num-cpus={cpus}")
        other["arguments"].append("--num-cpus={cpus}")
    return {
        "cluster": state.name,
        "head": head,
        "other": other,
        "ports": [config.port, config.dashboard_port],
        "folders": [folder_name() for _ in range(config.nodes)],
        "deadline_s": config.start_timeout_s,
        "too_slow": too_slow,
    }


def _options(config: SlurmCluster, job_name: str, folder: str) -> list[str]:
    asked = {
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "time": config.time,
        "constraint": config.constraint,
        "cpus-per-task": config.cpus_per_task,
        "gres": None if config.gpus_per_node is None else f"gpu:{config.gpus_per_node}",
    }
    options = [f"--job-name={job_name}", f"--nodes={config.nodes}", "--ntasks-per-node=1"]
    options += [f"--{name}={shlex.quote(str(value))}" for name, value in asked.items() if value is not None]
    options += ["--exclusive"] if config.exclusive else []
    # A second run of the job would be a cluster that nobody asked for.
    return [*options, "--no-requeue", f"--output={shlex.quote(f'{folder}/logs/job/start.log')}"]
