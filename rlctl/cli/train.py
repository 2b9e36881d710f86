"""`rlctl train`: prepares a run. It then shows the plan (--dry-run), starts the run, or submits it to a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.arguments import Arguments, split
from rlctl.cli.completion import complete_run
from rlctl.cli.dry_run import show_dry_run
from rlctl.cli.output import OK, ShownProgress, examples, refuse
from rlctl.cli.train_there import HERE, Where, train_there

app = typer.Typer(help="Train a model with GRPO or SFT.", no_args_is_help=True)

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the plan, read all rows, write the resolved config, start nothing.")
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Continue a run, by name or directory, with its own config and these overrides.",
        autocompletion=complete_run,
    ),
]
CompiledGraph = Annotated[
    bool, typer.Option("--compiled-graph", help="Call the ranks through a Ray Compiled Graph, after a warm-up.")
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME", help="Run on this cluster, as a job that outlives this terminal. In a job: here."
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="With --cluster: wait until the cluster has room.")]
Detach = Annotated[bool, typer.Option("--detach", help="With --cluster: do not watch the run.")]
Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env", metavar="VARIABLE", help="With --cluster: give this secret of the shell to the driver. Repeatable."
    ),
]
Probe = Annotated[
    bool, typer.Option("--probe", help="Compare trainer and generator, weights and log-probs, then stop.")
]


@app.command(
    epilog=examples(
        "rlctl train grpo",
        "rlctl train grpo my.yaml grpo.num_steps=20 trainer.optimizer.lr=1e-5",
        "rlctl train grpo my.yaml 'rewards=[exact, {name: mine.py:short, weight: 0.1}]'",
        "rlctl train grpo my.yaml --dry-run",
        "rlctl train grpo --resume grpo--qwen3-tiny--1",
        "rlctl train grpo my.yaml --cluster my-cluster",
    )
)
def grpo(
    arguments: Arguments = None,
    dry_run: DryRun = False,
    resume: Resume = None,
    probe: Probe = False,
    cluster: OnCluster = None,
    wait: Wait = False,
    detach: Detach = False,
    env: Env = None,
) -> None:
    """Train with reinforcement learning (GRPO). Without a recipe, a tiny model learns sums on a CPU."""
    where = Where(cluster=cluster, wait=wait, detach=detach, secrets=env or [], probe=probe)
    raise typer.Exit(_train("grpo", arguments, resume, dry_run, where))


@app.command(
    epilog=examples(
        "rlctl train sft",
        "rlctl train sft my.yaml data.train.path=chats.jsonl sft.batch_size=32",
        "rlctl train sft --compiled-graph",
        "rlctl train sft --resume sft--qwen3-tiny--1",
    )
)
def sft(
    arguments: Arguments = None,
    dry_run: DryRun = False,
    resume: Resume = None,
    compiled_graph: CompiledGraph = False,
    cluster: OnCluster = None,
    wait: Wait = False,
    detach: Detach = False,
    env: Env = None,
) -> None:
    """Fine-tune (SFT) on chats, or on prompts with answers. Without a recipe, a tiny model learns sums on a CPU."""
    if compiled_graph:
        arguments = [*(arguments or []), "ray_compiled_graph.enabled=true"]
    where = Where(cluster=cluster, wait=wait, detach=detach, secrets=env or [])
    raise typer.Exit(_train("sft", arguments, resume, dry_run, where))


def _train(kind: str, arguments: list[str] | None, resume: Path | None, dry_run: bool, where: Where) -> int:
    """Prepare a run; show its plan, launch it here, or submit it to a cluster. Return the exit code."""
    from rlctl.launch.prepare import MissingPackagesError, RunRequest, prepare

    target = where.target()
    recipe, overrides = split(arguments)
    request = RunRequest(
        kind=kind,
        recipe=recipe,
        overrides=overrides,
        resume=resume,
        is_dry=dry_run,
        target=target,
        waits=where.wait,
        is_job=where.cluster == HERE,
    )
    if target is not None:
        return train_there(where, target, prepare(request, "planned", ShownProgress()))
    prepared = prepare(request, "checked", ShownProgress())
    runtime = where.runtime()
    prepared.advance("planned")
    if dry_run:
        show_dry_run(prepared)
        return OK
    # Imported here, because it is slow and a dry run does not need it.
    from rlctl.launch.assembly import launch_prepared

    try:
        return launch_prepared(prepared, runtime, where.probe)
    except MissingPackagesError as error:
        refuse(error)
