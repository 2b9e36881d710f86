"""Calls of Slurm's commands. Each error is one line with the remedy."""

import shutil
import subprocess
from dataclasses import dataclass

from rlctl.cluster.hosts import last_line, remedy_of, slurm_environment
from rlctl.cluster.state import ClusterError

_SLURM_ANSWER_S = 60.0
_SUBMIT_S = 120.0
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
# Text in the error output of Slurm's commands -> remedy.
_REMEDIES = {
    "Invalid partition": "no such partition: see `sinfo`, then set partition=...",
    "Invalid account": "not your account, or not for this partition: see `sacctmgr show assoc user=$USER`, "
    "then set account=... and partition=...",
    "Invalid qos": "no such qos for you: see `sacctmgr show assoc user=$USER format=account,qos`, then set qos=...",
    "Invalid feature": "no node has this constraint: see `sinfo -o '%N %f'`, then set constraint=...",
    "Invalid generic resource": "no node has such GPUs: see `sinfo -o '%N %G'`, then set gpus_per_node=...",
    "Requested time limit is invalid": "longer than the partition allows: see `sinfo -o '%P %l'`, then set time=...",
    "Invalid --time": "not a time limit: minutes, hours:minutes:seconds or days-hours, such as time=4:00:00",
    "Requested node configuration is not available": "no node has what is asked for: see `sinfo -N -l`",
    "CPU count per node can not be satisfied": "no node has so many CPUs: see `sinfo -N -l`",
    "Node count specification invalid": "more nodes than the partition has: see `sinfo`, then set nodes=...",
    "Unable to contact slurm controller": "Slurm's controller does not answer: see `scontrol ping`",
}  # fmt: skip
_ENDINGS = {
    "TIMEOUT": "its time limit was over: ask for more with time=...",
    "CANCELLED": "it was cancelled",
    "NODE_FAIL": "a node failed",
    "PREEMPTED": "a job of higher priority took its nodes",
    "OUT_OF_MEMORY": "it was out of memory: ask for more with sbatch_options=[--mem=...]",
    "DEADLINE": "its deadline was over",
    "BOOT_FAIL": "a node did not boot",
}


@dataclass(frozen=True)
class Job:
    """A job's status in Slurm."""

    id: str
    state: str
    reason: str = ""
    # Names of the nodes in Slurm's short form, for example node[1-4].
    nodes: str = ""
    # Time that is left until the job's time limit.
    time_left: str = ""

    @property
    def waits(self) -> bool:
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        return self.state in _RUNNING

    @property
    def ending(self) -> str:
        """Reason why the job ended, in one line."""
        meaning = _ENDINGS.get(self.state.split()[0], "")
        reason = f", {self.reason}" if self.reason not in ("", "None") else ""
        ending = f"job {self.id} ended ({self.state}{reason})"
        return f"{ending}: {meaning}" if meaning else ending


def must_be_here() -> None:
    """Raise ClusterError if Slurm's commands are not installed."""
    missing = [name for name in ("sbatch", "squeue", "scancel", "srun") if not shutil.which(name)]
    if missing:
        problem = f"no Slurm here, {missing[0]} is not found: run rlctl on a login node of the cluster"
        raise ClusterError(f"{problem}, or take hosts over ssh: rlctl cluster up ssh 'hosts=[...]'")


def submit(script: str) -> str:
    """Submit a job and return its id. Raises ClusterError. After a Ctrl-C `find` can still find the job by name."""
    return _run_command(_SUBMIT_S, "sbatch", "--parsable", script).strip().splitlines()[-1].split(";")[0]


def find(job_name: str) -> list[str]:
    """Return the ids of the user's unfinished jobs with this name."""
    return _run_command(_SLURM_ANSWER_S, "squeue", "--me", "--noheader", f"--name={job_name}", "--format=%A").split()


def look_up(job: str) -> Job:
    """Return a job's current status. A job that Slurm does not know has ended.

    Ask squeue first. It knows a job until some minutes after its end. Then ask sacct, the site's accounting. Raises
    ClusterError if squeue does not answer.
    """
    options = ("--noheader", f"--jobs={job}", "--states=all", "--format=%T|%r|%N|%L")
    try:
        if queue_row := _run_command(_SLURM_ANSWER_S, "squeue", *options).strip():
            # The columns are the fields of `Job` after the id. If this version of Slurm omits one, its default is used.
            columns = queue_row.splitlines()[0].split("|")
            return Job(job, *columns)
    except ClusterError as error:
        # squeue has forgotten the job.
        if "Invalid job id" not in str(error):
            raise
    try:
        account_row = _run_command(_SLURM_ANSWER_S, "sacct", "-n", "-X", "-P", "-j", job, "-o", "State,Reason").strip()
    except ClusterError:
        # Many sites have no accounting.
        account_row = ""
    state, _, reason = account_row.partition("|")
    return Job(job, state or "forgotten by Slurm", reason)


def cancel(jobs: list[str]) -> None:
    """Ask Slurm to end jobs."""
    _run_command(_SLURM_ANSWER_S, "scancel", *jobs)


def _run_command(deadline_s: float, *command: str) -> str:
    """Run one of Slurm's commands and return its output. Raises ClusterError."""
    name = command[0]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
            env=slurm_environment(),
        )
    except OSError:
        raise ClusterError(f"{name} is not found: run rlctl where Slurm is installed") from None
    try:
        out, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{name} did not answer within {deadline_s:g} s: see `scontrol ping`") from None
    except KeyboardInterrupt:
        # Let sbatch finish: before that the job cannot be found and cancelled.
        if name == "sbatch":
            process.wait(timeout=_SLURM_ANSWER_S)
        raise
    finally:
        process.kill()
        process.wait()
    if not process.returncode:
        return out
    complaint = last_line(errors).removeprefix(f"{name}: ").removeprefix("error: ").removeprefix("fatal: ")
    raise ClusterError(f"{name}: {remedy_of(errors, _REMEDIES) or complaint or 'it said nothing'}")
