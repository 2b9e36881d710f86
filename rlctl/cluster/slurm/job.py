"""A Slurm job that is a Ray cluster: its batch script, the plan that its tasks read, and the folder they share.

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

# Beginnings of Slurm's own lines in a job's log.
_NOISE = ("srun:", "slurmstepd", "Terminated")


def batch_script(config: SlurmCluster, job_name: str, folder: str, python: str) -> str:
    """Return the script for `sbatch`. folder: the folder of the job's files, which every node sees."""
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
    # A second run of the job would be a cluster that nobody asked for.
    options += ["--no-requeue", f"--output={shlex.quote(f'{folder}/logs/job/start.log')}", *config.sbatch_options]
    # Since Slurm 22.05 a step no longer takes this from its job.
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
    """Return the requests of `remote_scripts/node.py` for the tasks. A task fills in its node's own facts."""
    gpus = config.gpus_per_node if config.num_gpus is None else config.num_gpus
    config = replace(config, num_gpus=gpus)
    head_node = ClusterNode(name="{name}", host="{head}", folder="", head=True, address="{address}")
    other_node = ClusterNode(name="{name}", host="{other}", folder="", head=False, address="{address}")
    state = replace(state, address="{head}", nodes=[head_node, other_node])
    place = Place(name="{name}", host="", address="{address}", root="", shm=0, dashboard=True)
    head_request = start_request(config, state, head_node, place, "")
    other_request = start_request(config, state, other_node, place, "")
    if config.num_cpus is None:
        # Ray would count the machine's CPUs, of which the job may have only a part.
        head_request["arguments"].append("--num-cpus={cpus}")
        other_request["arguments"].append("--num-cpus={cpus}")
    return {
        "cluster": state.name,
        "head": head_request,
        "other": other_request,
        "ports": [config.port, config.dashboard_port],
        "folders": [node_folder_name() for _ in range(config.nodes)],
        "deadline_s": config.start_timeout_s,
        # Words in a node's log that make a second try worthwhile.
        "too_slow": TOO_SLOW,
    }


class JobFolder:
    """The folder that a job's nodes and this machine share."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.script = self.path / "job.sh"
        self.logs = self.path / "logs"

    def make(self) -> None:
        """Make the folder. Raises ClusterError unless it is new."""
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
        """Return the reports of the nodes, by their index in the job."""
        reports = {}
        # The folder is listed: a file server's clients remember for long that a name was not there.
        for path in sorted((self.path / "nodes").glob("*.json")):
            reports[int(path.stem)] = json.loads(path.read_text(encoding="utf-8"))
        return reports

    def last_words(self) -> str:
        """Return the last line of the job's own log."""
        try:
            text = (self.logs / "job" / "start.log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        if "No module named 'rlctl" in text:
            return "its Python has no rlctl: pip install rlctl there, or set python=..."
        if missing := re.search(r"execve\(\): (\S+): No such file|(\S+): (?:command not found|No such file)", text):
            return f"not found on the nodes: {missing[1] or missing[2]}; set python=... to one that has ray and rlctl"
        # Slurm's own lines come last, and add nothing.
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_NOISE)]
        return lines[-1] if lines else ""

    def cleanup_problems(self) -> list[str]:
        """Return a line for each node that did not report a full clean-up. The job is over."""
        lines = []
        for report in self.reports().values():
            if "folder" not in report:
                continue
            if "ended" not in report:
                lines.append(f"{report['name']}: ended without clearing up: look for {report['folder']} there")
            elif living_pids := report["ended"]["left"]:
                lines.append(f"{report['name']}: processes {', '.join(map(str, living_pids))} would not end")
        return lines

    def remove(self, logs: Path) -> None:
        """Remove the folder; its logs go to `logs`."""
        if not self.path.is_dir():
            return
        for source in self.logs.iterdir() if self.logs.is_dir() else ():
            if any(source.iterdir()):
                shutil.rmtree(logs / source.name, ignore_errors=True)
                logs.mkdir(mode=0o700, exist_ok=True)
                shutil.move(source, logs / source.name)
        shutil.rmtree(self.path)
