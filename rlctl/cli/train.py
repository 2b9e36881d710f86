"""`rlctl train`: loads the config, shows the plan or hands the run over; the run itself is in `launch`."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.arguments import Arguments, split
from rlctl.cli.completion import complete_run
from rlctl.cli.dry_run import refuse_plan, show_plan
from rlctl.cli.output import FAILED, busy, examples, note, reading, say
from rlctl.cli.train_there import Where, train_there
from rlctl.config.errors import ConfigError, ModelError, Problem

if TYPE_CHECKING:
    from rlctl.data.load import RowReader
    from rlctl.launch.resume import Resumed
    from rlctl.preflight.load import Composed
    from rlctl.preflight.settled import Settled

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
    where = Where(cluster, wait, detach, env or [], probe)
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
    where = Where(cluster, wait, detach, env or [])
    raise typer.Exit(_train("sft", arguments, resume, dry_run, where))


def _train(kind: str, arguments: list[str] | None, resume: Path | None, dry_run: bool, where: Where) -> int:
    """Load the run, check it, and launch it here or hand it to a cluster. Returns the exit code."""
    from rlctl.launch.resume import find_resumed, refuse_contradictions, replace_lost_model
    from rlctl.preflight.load import load

    target = where.target()
    away = target is not None and target.away
    recipe, overrides = split(arguments)
    if resume is not None and recipe is not None:
        raise ConfigError([Problem(f"--resume {resume}", "", f"a run keeps its own config: leave out {recipe}")])
    resumed = find_resumed(resume, overrides) if resume is not None else None
    if resumed:
        replaced = [] if away else replace_lost_model(resumed)
        note(f"the folder of model.path is gone: going on with {each}" for each in replaced)
        composed = load(kind, str(resumed.run / "config.yaml"), [*replaced, *overrides], resume=True, away=away)
        refuse_contradictions(composed, resumed.run)
    else:
        composed = load(kind, recipe, overrides, away=away)
        if not away and derive_facts(composed):
            # Sizes are checked now that they are known.
            composed = load(kind, recipe, overrides)
    if target is not None:
        return train_there(where, target, composed, resumed, dry_run)
    runtime = where.runtime()
    reader = _check_here(composed, resumed, dry_run, elsewhere=where.cluster is not None)
    from rlctl.launch.assembly import launch

    text = composed.to_yaml()
    return launch(composed.settled, text, runtime, resumed.run if resumed else None, where.probe, reader)


def derive_facts(composed: "Composed[Settled]") -> bool:
    """Derive the facts of a model that is here and new. Return True if it was. Raises ConfigError for a bad one."""
    from rlctl.models.facts import find_facts
    from rlctl.models.model_sizes import underived

    folder = underived(composed.config.model.path)
    if folder is None:
        return False
    try:
        with busy("deriving the model's facts"):
            find_facts(folder)
    except ModelError as error:
        raise ConfigError([Problem(str(composed.origins["model.path"]), "model.path", str(error))]) from error
    return True


def _check_here(
    composed: "Composed[Settled]", resumed: "Resumed | None", dry_run: bool, elsewhere: bool
) -> "RowReader":
    """End the command if nothing is to start: a dry run, too few devices, missing packages, bad rows."""
    from rlctl.data.load import RowReader, part_of
    from rlctl.launch.data_preview import local_chat
    from rlctl.launch.first_row import runs_others_code, try_all, try_environments
    from rlctl.preflight.capacity import capacity_rows, planned_cluster, settle_there
    from rlctl.preflight.engine import engine_rules
    from rlctl.preflight.machine import RunMachine, device_of, read_machine
    from rlctl.preflight.placement import this_machine
    from rlctl.preflight.plan import crowding_notes, disk_notes, make_plan
    from rlctl.run.run_dir import RunDir
    from rlctl.utils.files import folder_bytes

    config, sampling = composed.config, composed.settled.sampling
    machine = read_machine(Path(config.run.dir).absolute())
    memory = min((gpu.memory for gpu in machine.gpus), default=machine.memory)
    settled = composed.settled.on(RunMachine(device_of(len(machine.gpus)), memory), composed.settled.facts)
    cluster = planned_cluster(config.placement.nodes) if config.placement.nodes else None
    if cluster and not dry_run:
        refuse_plan(composed, "is a cluster that is not there, for --dry-run alone: leave it out", "placement.nodes")
    if cluster:
        there = settle_there(composed.settled, cluster)
        plan = make_plan(there, cluster.resources)
        show_plan(composed, plan, resumed, demands=capacity_rows(there, plan))
    saved = folder_bytes(RunDir(resumed.run).checkpoints) if resumed else 0
    cores = None if elsewhere else machine.cores
    plan = make_plan(settled, this_machine(len(machine.gpus)), machine.disk_free + saved, cores)
    if dry_run:
        played = sampling is not None and sampling.config.has_turns
        with busy("trying the first row"):
            others = sampling is not None and runs_others_code(sampling.config)
            tried = try_all(composed, rewards=others, environments=played, fetch=False)
        show_plan(replace(composed, notes=[*composed.notes, *tried]), plan, resumed)
    if not elsewhere:
        refuse_plan(composed, plan.misplaced or plan.too_large)
        refuse_plan(composed, plan.unserved, "model.path")
        refuse_plan(composed, plan.unsaved, "run.dir")
    note([*composed.notes, *disk_notes(plan.schedule), *crowding_notes(settled, cores)])
    needed = ["torch", "transformers", "ray"]
    if sampling:
        needed += engine_rules(sampling.config.generation.engine).packages
    if absent := [name for name in needed if find_spec(name) is None]:
        extra = "gpu" if plan.placement and plan.placement.device == "cuda" else "cpu"
        mend = f"pip install 'rlctl[{extra}]'; see rlctl doctor"
        say(f"error: {', '.join(absent)} not installed: {mend}", err=True)
        raise typer.Exit(FAILED)
    reader = RowReader(config)
    with reading("reading the data"):
        rows = reader.read()
    if settled.grpo:
        section, first = config.data.train.of(rows.train[0].source), rows.train[0]
    elif sampling:
        with reading("reading the recipe's data"):
            part = part_of(sampling.config, "validation")[0]
        section, first = part.section, part.rows[0]
    if sampling and sampling.config.has_turns and not elsewhere:
        with busy("reading the environments"):
            setup = try_environments(composed, section, first, local_chat(sampling.config))
        note(setup.notes)
    return reader
