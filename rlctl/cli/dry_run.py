"""`rlctl train --dry-run`: shows the plan of a run and writes its resolved config. It starts nothing."""

from shlex import quote
from typing import TYPE_CHECKING

from rlctl.cli.output import busy, console, note, say

if TYPE_CHECKING:
    from rlctl.launch.prepare import PreparedRun


def show_dry_run(prepared: "PreparedRun", cluster: str = "") -> None:
    """Show the plan of a run, read its data, and write its config.

    cluster: name of the cluster that would get the run; its data are not read here. Empty: this machine.
    """
    from rlctl.cli.plan_view import data_rows, format_plan, format_rows
    from rlctl.launch.resume import plan_of_resume

    assert prepared.plan
    note(prepared.notes)
    console().print(format_plan(prepared.plan))
    if prepared.demands:
        console().print(format_rows("demands on the cluster", prepared.demands))
    prepared.require_fit()
    # The cluster of placement.nodes is only planned: there is no command to propose and no data to read.
    if prepared.demands is not None:
        return
    if not cluster:
        prepared.advance("read")
        console().print(format_rows("data", data_rows(prepared.row_counts, prepared.ends)))
        note(prepared.ends.warnings if prepared.ends else [])
    kind = prepared.plan.kind
    cluster_option = f" --cluster {cluster}" if cluster else ""
    if prepared.resumed:
        with busy("reading the newest checkpoint"):
            rows = plan_of_resume(prepared.composed, prepared.resumed.run)
        console().print(format_rows("resume", rows))
        say(f"\nrun it: {prepared.resumed.command(kind, cluster_option)}")
    else:
        path = prepared.write_config()
        say(f"\nresolved config: {path}\nrun it: rlctl train {kind} {quote(str(path))}{cluster_option}")
