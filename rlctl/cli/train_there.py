"""`rlctl train --cluster`: checks a run for a cluster, submits it as a job, and watches it from this machine."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from rlctl.cli.dry_run import show_dry_run
from rlctl.cli.output import FAILED, INTERRUPTED, OK, explain_errors, note, say
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.cluster.jobs.submit import TargetCluster
    from rlctl.launch.prepare import PreparedRun
    from rlctl.launch.runtime import Runtime

# Value of --cluster for a process that already is a job of a cluster: it drives the run on that cluster.
HERE = "here"
_CODES = {"done": OK, "failed": FAILED, "died": FAILED, "interrupted": INTERRUPTED, "stopped": INTERRUPTED}


@dataclass(frozen=True)
class Where:
    """Options that say where a run is driven: on this machine, or on a cluster, and how it is submitted."""

    cluster: str | None
    wait: bool
    detach: bool
    # Names of environment variables whose values are sent to the cluster.
    secrets: list[str]
    probe: bool = False

    def target(self) -> "TargetCluster | None":
        """Return the cluster to submit to; None if this process drives the run.

        End the command with an error if the cluster is not up, or takes no runs.
        """
        if self.cluster is None or self.cluster == HERE:
            options = {
                "--wait": self.wait and self.cluster is None,
                "--detach": self.detach,
                "--env": bool(self.secrets),
            }
            if misplaced := [name for name, is_set in options.items() if is_set]:
                raise ConfigError([Problem(name, "", "goes with --cluster NAME") for name in misplaced])
            return None
        from rlctl.cluster.jobs.submit import find_cluster

        with explain_errors():
            return find_cluster(self.cluster)

    def runtime(self) -> "Runtime":
        """Return the runtime of a run that this process drives."""
        from rlctl.launch.runtime import ClusterRuntime, LocalRuntime

        if self.cluster is None:
            return LocalRuntime()
        if "RAY_ADDRESS" not in os.environ:
            raise ConfigError([Problem("--cluster here", "", "this is no job of a cluster: RAY_ADDRESS is not set")])
        return ClusterRuntime(self.wait)


def train_there(where: Where, target: "TargetCluster", prepared: "PreparedRun") -> int:
    """Submit a run to a cluster and watch it, or show its plan. Return the exit code.

    It is the run's own exit code if the run ends while it is watched.
    """
    from rlctl.cluster.jobs.submit import Submission, submit
    from rlctl.config.builtin import RECIPES

    if prepared.request.is_dry:
        show_dry_run(prepared, target.state.name)
        return OK
    composed = prepared.composed
    prepared.require_fit()
    note(prepared.notes)
    flags = ["--wait"] if where.wait else []
    if where.probe:
        flags.append("--probe")
    if unsent := [name for name in composed.variables() if name not in where.secrets]:
        mistake = "the config reads it, and it is not there: add --env"
        raise ConfigError([Problem(f"${{oc.env:{name}}}", "", f"{mistake} {name}") for name in unsent])
    submission = Submission(
        config=composed.written(),
        resume=prepared.resumed.run if prepared.resumed else None,
        secrets=where.secrets,
        flags=flags,
        recipes=RECIPES,
    )
    with explain_errors():
        run = submit(target, submission)
    say(f"{run.name} runs on {target.state.name}; {_next_commands(run)}", err=True)
    config = composed.config
    return OK if where.detach else watch(run, config.run.log_every, config.telemetry.dashboard)


def watch(run: Path, every: int = 1, dashboard: str = "auto") -> int:
    """Show a submitted run until it ends, and return its exit code. Ctrl-C leaves the run running.

    every: print a line for every this many steps, if there is no live view. dashboard: on, off or auto.
    """
    from rlctl.cluster.jobs.watch import follow_run, refresh_run
    from rlctl.dashboard.console import SafeConsole
    from rlctl.dashboard.state import read_state
    from rlctl.dashboard.view import LineView, LiveDashboard
    from rlctl.run.run_dir import RunDir

    is_live = dashboard == "on" or (dashboard == "auto" and sys.stdout.isatty())
    with suppress(KeyboardInterrupt), follow_run(run) as following:
        # Fetch first, because the local copy may end with records of an earlier attempt.
        refresh_run(run)
        submit_time = (run / "job.json").stat().st_mtime
        view = LiveDashboard(RunDir(run), SafeConsole()) if is_live else LineView(RunDir(run), every, since=submit_time)
        with view:
            view.wait(following.is_lost)
        if following.lost:
            say(f"error: {following.lost}; the run may go on: rlctl runs dash {quote(run.name)}", err=True)
            return FAILED
    status = read_state(run).status
    # Ctrl-C ended the watch before the run ended.
    if status not in _CODES:
        say(f"{run.name} runs on; {_next_commands(run)}", err=True)
    return _CODES.get(status, INTERRUPTED)


def _next_commands(run: Path) -> str:
    from rlctl.config.provenance import show_path

    folder = quote(show_path(run))
    return f"watch: rlctl runs dash {folder}, stop: rlctl runs stop {folder}"
