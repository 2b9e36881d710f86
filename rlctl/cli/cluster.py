"""`rlctl cluster`: starts, shows and stops Ray clusters on this machine, on ssh hosts, on Slurm or on Kubernetes."""

import json
import shlex
import time
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.arguments import AsJson, Follow, Lines, split
from rlctl.cli.output import FAILED, OK, console, examples, explain_errors
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.cluster.state import ClusterState

app = typer.Typer(
    help="Start, show and stop Ray clusters: on this machine, over ssh, on Slurm, on Kubernetes.", no_args_is_help=True
)

UpArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="CLUSTER | KEY=VALUE",
        help="local, ssh, slurm, kubernetes or a YAML file, then overrides such as nodes=2 or 'hosts=\\[gpu1, gpu2]'.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(metavar="CLUSTER", help="The name of a cluster; if left out, the one that is up.")]
_WATCH_S = 3.0


@app.command(
    epilog=examples(
        "rlctl cluster up                          this machine",
        "rlctl cluster up local nodes=3            three Ray nodes on it, to try things",
        "rlctl cluster up ssh 'hosts=[gpu1, gpu2]' the first host is the head",
        "rlctl cluster up slurm nodes=2 gpus_per_node=8 time=4:00:00",
        "rlctl cluster up pods.yaml --dry-run --job 'train grpo my.yaml --cluster here'",
        "rlctl cluster up mine.yaml                yours, over cluster/ssh.yaml",
    )
)
def up(
    arguments: UpArguments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be submitted, and start nothing.")
    ] = False,
    job: Annotated[
        str | None,
        typer.Option(
            "--job", metavar="COMMAND", help="On Kubernetes, with --dry-run: print a RayJob that runs this command."
        ),
    ] = None,
) -> None:
    """Start a cluster, or restart the lost parts of one. A cluster that cannot start whole is stopped again."""
    from rlctl.cli.cluster_view import Progress, next_steps
    from rlctl.cluster.status import summary
    from rlctl.config.load_cluster import load_cluster

    cluster, overrides = split(arguments)
    config = load_cluster(cluster or "local", overrides)
    if dry_run:
        with explain_errors():
            from rlctl.cluster.lifecycle import dry_run as format_submission

            typer.echo(format_submission(config, job), nl=False)
        return
    if job is not None:
        raise ConfigError([Problem("--job", "", "goes with --dry-run: pipe what it prints into kubectl create -f -")])
    with explain_errors(), Progress() as progress:
        from rlctl.cluster.lifecycle import bring_up

        started = bring_up(config, progress.say)
    for warning in started.warnings:
        progress.say("warning", warning)
    outcome = "is up already" if started.already else "is up"
    if started.repaired:
        outcome = f"has {', '.join(started.repaired)} again"
    typer.echo(f"{started.state.name} {outcome}: {summary(started.state, started.status)}")
    if started.already and overrides:
        progress.say("warning", f"overrides change nothing: rlctl cluster down {started.state.name} first")
    typer.echo(next_steps(started.state))


@app.command(epilog=examples("rlctl cluster status", "rlctl cluster status --watch", "rlctl cluster status --json"))
def status(
    name: Name = "",
    watch: Annotated[bool, typer.Option("--watch", help="Print it again every 3 seconds, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a cluster: nodes, free devices, listeners and problems. Exit code 1 unless it is up."""
    with explain_errors():
        from rlctl.cli.cluster_view import render
        from rlctl.cluster.status import as_dict, cluster_status

        state = _find_cluster(name)
        while True:
            current = cluster_status(state)
            if as_json:
                typer.echo(json.dumps(as_dict(state, current)))
            else:
                out = console()
                if watch and out.is_terminal:
                    out.clear()
                out.print(render(state, current), soft_wrap=False)
            if not watch:
                break
            time.sleep(_WATCH_S)
    raise typer.Exit(OK if current.condition == "up" else FAILED)


@app.command(epilog=examples("rlctl cluster down", "rlctl cluster down my-cluster"))
def down(
    name: Name = "",
    forget: Annotated[bool, typer.Option("--forget", help="Give up hosts that cannot be reached any more.")] = False,
) -> None:
    """Stop a cluster. No process stays, and no file except logs."""
    from rlctl.cli.cluster_view import Progress

    with explain_errors(), Progress() as progress:
        from rlctl.cluster.lifecycle import take_down

        state = take_down(name or _find_only_name(), progress.say, forget)
    typer.echo(f"{state.name} is down")


@app.command(epilog=examples("rlctl cluster logs", "rlctl cluster logs --node head --follow"))
def logs(
    name: Name = "",
    node: Annotated[str | None, typer.Option("--node", help="Only the logs of this node.")] = None,
    follow: Follow = False,
    lines: Lines = 10,
) -> None:
    """Print the logs of Ray's processes and workers; of a stopped cluster, those that were kept here."""
    with explain_errors():
        from rlctl.cluster.status import show_logs

        code = show_logs(name or _find_only_name(or_stopped=True), node, follow, lines)
    raise typer.Exit(code)


@app.command("list", epilog=examples("rlctl cluster list"))
def list_(as_json: AsJson = False) -> None:
    """List all clusters with their state."""
    from rlctl.cli.cluster_view import clusters_table

    with explain_errors():
        from rlctl.cluster.status import all_clusters

        clusters = all_clusters()
    if as_json:
        typer.echo(json.dumps(clusters))
    elif not clusters:
        typer.echo("no clusters; start one with: rlctl cluster up")
    else:
        console().print(clusters_table(clusters), soft_wrap=False)


@app.command(epilog=examples('eval "$(rlctl cluster env)"'))
def env(name: Name = "") -> None:
    """Print lines for a shell, so that Ray programs in it find a cluster and its token."""
    with explain_errors():
        from rlctl.cluster.launcher import launcher_of

        state = _find_cluster(name)
        for key, value in launcher_of(state).environment(state).items():
            typer.echo(f"export {key}={shlex.quote(value)}")


def _find_cluster(name: str) -> "ClusterState":
    from rlctl.cluster.state import ClusterStore, NoSuchCluster, not_up

    store = ClusterStore(name or _find_only_name())
    state = store.load()
    if state is None:
        raise NoSuchCluster(not_up(store.name))
    return state


def _find_only_name(or_stopped: bool = False) -> str:
    """Return the name of the only cluster that is up. With or_stopped and none up: of the only one that has logs."""
    from rlctl.cluster.state import NoSuchCluster, known_clusters, running_clusters

    names = running_clusters()
    if or_stopped and not names:
        names = known_clusters()
    if len(names) == 1:
        return names[0]
    if names:
        raise NoSuchCluster(f"which one? there are {', '.join(names)}")
    raise NoSuchCluster("no cluster is up; start one with: rlctl cluster up")
