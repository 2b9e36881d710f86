"""Slurm's own commands, and what they say in one line that tells what to do next."""

import shutil
import subprocess
from dataclasses import dataclass

from rlctl.cluster.hosts import answer, started, visible
from rlctl.cluster.links import SLURM_HIDES
from rlctl.cluster.state import ClusterError

_ANSWER_S, _SUBMIT_S = 60.0, 120.0
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
# What sbatch says, and what a person does about it.
_SBATCH_SAYS = {
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
    """A job as Slurm knows it. nodes: as Slurm abbreviates them. left: of its time limit."""

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    left: str = ""

    @property
    def waits(self) -> bool:
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        return self.state in _RUNNING

    @property
    def ending(self) -> str:
        """Why it is over, in a line."""
        meaning = _ENDINGS.get(self.state.split()[0], "")
        reason = f", {self.reason}" if self.reason not in ("", "None") else ""
        return f"job {self.id} ended ({self.state}{reason})" + (f": {meaning}" if meaning else "")


def must_be_here() -> None:
    """Raises ClusterError where Slurm is not installed."""
    missing = [name for name in ("sbatch", "squeue", "scancel", "srun") if not shutil.which(name)]
    if missing:
        what = f"no Slurm here, {missing[0]} is not found: run rlctl on a login node of the cluster"
        raise ClusterError(f"{what}, or take hosts over ssh: rlctl cluster up ssh 'hosts=[...]'")


def submit(script: str) -> str:
    """The id of the new job. Raises ClusterError; after a Ctrl-C `find` still has it."""
    try:
        process = started(["sbatch", "--parsable", script], visible(*SLURM_HIDES))
    except OSError:
        raise ClusterError(_not_found("sbatch")) from None
    try:
        out, err = process.communicate(timeout=_SUBMIT_S)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"sbatch did not answer within {_SUBMIT_S:g} s: see `scontrol ping`") from None
    except KeyboardInterrupt:
        # What is on its way to the controller could not be found and cancelled yet.
        process.wait(timeout=_ANSWER_S)
        raise
    finally:
        process.kill()
    if process.returncode:
        raise ClusterError(_explained(err))
    return out.strip().splitlines()[-1].split(";")[0]


def find(job_name: str) -> list[str]:
    """Ids of one's own jobs of this name that are not over."""
    return _answer("squeue", "--me", "--noheader", f"--name={job_name}", "--format=%A").split()


def look_up(job: str) -> Job:
    """The job now; one that Slurm has forgotten is over as well. Raises ClusterError if Slurm does not answer."""
    try:
        said = _answer("squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T|%r|%N|%L").strip()
    except ClusterError as error:
        if "Invalid job id" not in str(error):
            raise
        said = ""
    if said:
        return Job(job, *said.splitlines()[0].split("|"))
    return _recorded(job)


def cancel(jobs: list[str]) -> None:
    """Asks for their end."""
    _answer("scancel", *jobs)


def _recorded(job: str) -> Job:
    """From the accounts, where the site keeps them."""
    try:
        said = _answer("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,Reason")
    except ClusterError:
        said = ""
    state, _, reason = said.strip().partition("|")
    return Job(job, state or "forgotten by Slurm", reason)


def _answer(*command: str) -> str:
    try:
        done = answer(command, _ANSWER_S, environment=visible(*SLURM_HIDES))
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{command[0]} did not answer within {_ANSWER_S:g} s: see `scontrol ping`") from None
    except OSError:
        raise ClusterError(_not_found(command[0])) from None
    if done.returncode:
        raise ClusterError(_explained(done.stderr, command[0]))
    return done.stdout


def _not_found(command: str) -> str:
    return f"{command} is not found: run rlctl where Slurm is installed"


def _explained(errors: str, command: str = "sbatch") -> str:
    for words, meaning in _SBATCH_SAYS.items():
        if words.lower() in errors.lower():
            return f"{command}: {meaning}"
    said = [line.strip() for line in errors.splitlines() if line.strip()] or [f"{command} said nothing"]
    return f"{command}: {said[-1].removeprefix(f'{command}: ').removeprefix('error: ').removeprefix('fatal: ')}"
