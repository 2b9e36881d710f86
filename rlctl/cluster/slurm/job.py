"""Slurm job that is a Ray cluster: its batch script, the plan for its tasks, and the shared folder.

SHARED/                       0700: job-TAG in the cluster's own folder, or shared_folder/rlctl-NAME-TAG
    job.sh                    the submitted script
    plan.json token           read by the tasks
    nodes/INDEX.json          their reports
    logs/NODE/                their logs, after their end
"""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlctl.cluster.hosts import quoted_path
from rlctl.cluster.ray_start import TOO_SLOW, Place, start_request
from rlctl.cluster.state import ClusterError, ClusterNode, ClusterState, node_folder_name
from rlctl.config.cluster_schema import SlurmCluster
from rlctl.utils.files import write_private

# Beginnings of lines that Slurm itself writes into a job's log.
_NOISE = ("srun:", "slurmstepd", "Terminated")


def batch_script(config: SlurmCluster, job_name: str, folder: str, python: str) -> str:
    """Return the script for `sbatch`. folder: shared folder of the job's files."""
    resources = {
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
        "time": config.time,
        "constraint": config.constraint,
        "cpus-per-task": config.cpus_per_task,
        "gres": None if config.gpus_per_node is None else f"gpu:{config.gpus_per_node}",
    }
    options = [f"--job-name={job_name}", f"--nodes={config.nodes}", "--ntasks-per-node=1"]
    options += [f"--{name}={shlex.quote(str(amount))}" for name, amount in resources.items() if amount is not None]
    if config.exclusive:
        options.append("--exclusive")
    # No requeue: a job restarted by Slurm would be a cluster that nobody requested.
    options += ["--no-requeue", f"--output={shlex.quote(f'{folder}/logs/job/start.log')}", *config.sbatch_options]
    # Since Slurm 22.05 a step does not inherit --cpus-per-task from its job.
    cpus = "" if config.cpus_per_task is None else f" --cpus-per-task={config.cpus_per_task}"
    step = f"srun --nodes={config.nodes} --ntasks-per-node=1{cpus} --mem=0 --cpu-bind=none"
    task = f"{quoted_path(python)} -m rlctl.cluster.remote_scripts.task {shlex.quote(folder)}"
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        f"# One Ray node a task; they read the cluster's token from {folder}/token, which is theirs alone to read.",
        *config.setup,
        "# The head's end is a failure, and ends the others; another node may go and the rest stays.",
        f"{step} --kill-on-bad-exit=1 --wait=0 -- {task}",
    ]
    return "\n".join(lines) + "\n"


def job_plan(config: SlurmCluster, state: ClusterState) -> dict[str, Any]:
    """Return the plan for the tasks: requests of `remote_scripts/node.py`. A task replaces placeholders such as
    {address}.
    """
    gpus = config.gpus_per_node if config.num_gpus is None else config.num_gpus
    config = replace(config, num_gpus=gpus)
    # Two placeholder nodes. Their hosts differ, so that each counts as the first node of its host.
    head_node = ClusterNode(name="{name}", host="{head}", folder="", head=True, address="{address}")
    other_node = ClusterNode(name="{name}", host="{other}", folder="", head=False, address="{address}")
    state = replace(state, address="{head}", nodes=[head_node, other_node])
    place = Place(name="{name}", host="", address="{address}", root="", shm_bytes=0, has_dashboard=True)
    # Each task adds the token, which is in a separate private file.
    head_request = start_request(config, state, head_node, place, token="")
    other_request = start_request(config, state, other_node, place, token="")
    if config.num_cpus is None:
        # By default Ray would count all CPUs of the machine, but the job may have fewer.
        head_request["arguments"].append("--num-cpus={cpus}")
        other_request["arguments"].append("--num-cpus={cpus}")
    return {
        "cluster": state.name,
        "head": head_request,
        "other": other_request,
        "ports": [config.port, config.dashboard_port],
        "folders": [node_folder_name() for _ in range(config.nodes)],
        "deadline_s": config.start_timeout_s,
        # Text in a node's log after which a second try makes sense.
        "too_slow": TOO_SLOW,
    }


class JobFolder:
    """Folder shared by a job's nodes and this machine."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.script = self.path / "job.sh"
        self.logs = self.path / "logs"

    def make(self) -> None:
        """Create the folder. Raises ClusterError if it exists or cannot be created."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            for name in ("nodes", "logs/job"):
                (self.path / name).mkdir(parents=True)
        except FileExistsError:
            remedy = "remove it if no cluster uses it, or set another shared_folder"
            raise ClusterError(f"{self.path} is there already: {remedy}") from None
        except OSError as error:
            raise ClusterError(f"{self.path} cannot be made: {error.strerror}; set another shared_folder") from None

    def fill(self, script: str, plan: dict[str, Any], token: str) -> None:
        """Write the files that the job reads."""
        write_private(self.script, script, 0o700)
        write_private(self.path / "plan.json", json.dumps(plan, indent=1))
        write_private(self.path / "token", token)

    def reports(self) -> dict[int, dict[str, Any]]:
        """Return index of the node in the job -> its report."""
        reports = {}
        # List the folder instead of opening names: a network file system caches for long that a name did not exist.
        for path in sorted((self.path / "nodes").glob("*.json")):
            reports[int(path.stem)] = json.loads(path.read_text(encoding="utf-8"))
        return reports

    def last_words(self) -> str:
        """Return the last useful line of the job's own log, or a remedy if the error is known."""
        try:
            text = (self.logs / "job" / "start.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        if "No module named 'rlctl" in text:
            return "its Python has no rlctl: pip install rlctl there, or set python=..."
        if missing := re.search(r"execve\(\): (\S+): No such file|(\S+): (?:command not found|No such file)", text):
            return f"not found on the nodes: {missing[1] or missing[2]}; set python=... to one that has ray and rlctl"
        # Slurm's own lines come last and are not useful.
        useful_lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
        return useful_lines[-1] if useful_lines else ""

    def cleanup_problems(self) -> list[str]:
        """Return a line for each node that did not report a full clean-up. Call it when the job has ended."""
        lines = []
        for report in self.reports().values():
            if "folder" not in report:
                # The task ended before it started a Ray node.
                continue
            if "ended" not in report:
                lines.append(f"{report['name']}: ended without clearing up: look for {report['folder']} there")
            elif living_pids := report["ended"]["left"]:
                lines.append(f"{report['name']}: processes {', '.join(map(str, living_pids))} would not end")
        return lines

    def remove(self, logs: Path) -> None:
        """Move the folder's logs to `logs`, and remove the folder."""
        if not self.path.is_dir():
            return
        for source in self.logs.iterdir() if self.logs.is_dir() else ():
            if any(source.iterdir()):
                shutil.rmtree(logs / source.name, ignore_errors=True)
                logs.mkdir(mode=0o700, exist_ok=True)
                shutil.move(source, logs / source.name)
        shutil.rmtree(self.path)
