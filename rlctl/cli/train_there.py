"""`rlctl train --cluster`: checks a run against a cluster, hands it over, and watches it from here."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from rlctl.cli.explained import explained
from rlctl.cli.output import FAILED, INTERRUPTED, OK, note
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.cluster.ground import Ground
    from rlctl.cluster.jobs.submit import Target
    from rlctl.config.load import Composed

# The cluster that this very process is a job of.
HERE = "here"
_CODES = {"done": OK, "failed": FAILED, "died": FAILED, "interrupted": INTERRUPTED}


@dataclass(frozen=True)
class There:
    """A cluster to run on, and how. secrets: names of environment variables."""

    target: "Target"
    wait: bool
    detach: bool
    secrets: list[str]
    probe: bool

    @classmethod
    def asked(
        cls, cluster: str | None, wait: bool, detach: bool, secrets: list[str] | None, probe: bool = False
    ) -> "There | None":
        """What the options say; None: this machine. Ends the command where the cluster takes no runs."""
        if cluster is None or cluster == HERE:
            given = {"--wait": wait and cluster is None, "--detach": detach, "--env": bool(secrets)}
            if wrong := [name for name, is_given in given.items() if is_given]:
                raise ConfigError([Problem(name, "", "goes with --cluster NAME") for name in wrong])
            return None
        from rlctl.cluster.jobs.submit import find_target

        with explained():
            return cls(find_target(cluster), wait, detach, secrets or [], probe)

    @staticmethod
    def ground(cluster: str | None, wait: bool) -> "Ground":
        """Where a run stands that this process drives."""
        from rlctl.cluster.ground import ThisMachine
        from rlctl.cluster.standing import StandingCluster

        if cluster is None:
            return ThisMachine()
        if "RAY_ADDRESS" not in os.environ:
            raise ConfigError([Problem("--cluster here", "", "this is no job of a cluster: RAY_ADDRESS is not set")])
        return StandingCluster(wait)

    @property
    def away(self) -> bool:
        return self.target.away


def train_there(there: There, composed: "Composed", resume: Path | None, dry_run: bool) -> int:
    """Returns the exit code: the run's own, if it is watched to its end."""
    from rlctl.cli.train import refuse, show_plan
    from rlctl.cluster.jobs.submit import Order, submit
    from rlctl.config.architecture import config_file, read_architecture
    from rlctl.config.plan import make_plan
    from rlctl.config.shipped import RECIPES

    target, config = there.target, composed.config
    file = config_file(config.model.path)
    sizes = read_architecture(file) if file else None
    plan = make_plan(config, sizes, target.gpus, target.device_memory, target.rooms())
    if dry_run:
        show_plan(composed, plan, f" --cluster {target.state.name}")
    short = f"{plan.misplaced}; --wait waits for it" if plan.misplaced and not there.wait else None
    refuse(composed, short or plan.too_large)
    note(composed.notes)
    flags = ["--wait"] * there.wait + ["--probe"] * there.probe
    with explained():
        run = submit(target, Order(composed.values(), resume, there.secrets, flags, RECIPES))
    typer.echo(f"{run.name} runs on {target.state.name}; {_later(run)}", err=True)
    return OK if there.detach else watch(run, config.run.log_every, config.telemetry.dashboard)


def watch(run: Path, every: int = 1, dashboard: str = "auto") -> int:
    """Shows a run that a job drives until it ends or Ctrl-C, which leaves it running; returns its exit code."""
    from rich.console import Console

    from rlctl.cluster.jobs.following import bring_up_to_date, followed
    from rlctl.telemetry.dashboard import LiveDashboard
    from rlctl.telemetry.lines import LineView
    from rlctl.telemetry.run_dir import RunDir
    from rlctl.telemetry.state import read_state

    screen = dashboard == "on" or (dashboard == "auto" and sys.stdout.isatty())
    # What is here may be the end of an earlier attempt.
    bring_up_to_date(run)
    with suppress(KeyboardInterrupt), followed(run) as following:
        view = LiveDashboard(RunDir(run), Console()) if screen else LineView(RunDir(run), every, _begun(run))
        with view:
            view.wait(following.is_lost)
        if following.lost:
            typer.echo(f"error: {following.lost}; the run may go on: rlctl runs dash {run.name}", err=True)
            return FAILED
    status = read_state(run).status
    if status not in _CODES:
        typer.echo(f"{run.name} runs on; {_later(run)}", err=True)
    return _CODES.get(status, INTERRUPTED)


def _begun(run: Path) -> float:
    """When the attempt that is to be watched was submitted."""
    return (run / "job.json").stat().st_mtime


def _later(run: Path) -> str:
    from rlctl.config.tree import show_path

    return f"watch: rlctl runs dash {show_path(run)}, stop: rlctl runs stop {show_path(run)}"
