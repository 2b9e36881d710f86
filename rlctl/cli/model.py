"""`rlctl model check`: describes a causal language model, and proves before a run that it trains exactly."""

import json
from typing import Annotated

import typer

from rlctl.cli.arguments import AsJson
from rlctl.cli.completion import complete_run
from rlctl.cli.output import FAILED, console, examples, explain_engine_errors

app = typer.Typer(no_args_is_help=True)
_MAX_WIDTH = 120
_LABEL_WIDTH = 18


@app.callback()
def model() -> None:
    """Check that a model trains exactly."""


@app.command(
    epilog=examples(
        "rlctl model check Qwen/Qwen3-0.6B",
        "rlctl model check ./my-model --engine",
        "rlctl model check my-run --engine --json",
    )
)
def check(
    name: Annotated[str, typer.Argument(metavar="FOLDER | NAME | RUN", help="A model.", autocompletion=complete_run)],
    engine: Annotated[
        bool, typer.Option("--engine", help="Start an engine too, and compare it with the trainer.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Describe a model, and prove that packed sequences train as each does alone.

    With --engine, prove three more facts: engine and trainer agree; the engine serves the weights sent to it; it
    answers like the exported folder. Exit code 1 if a proof fails, 2 for a model that cannot train.
    """
    from dataclasses import asdict

    from rlctl.config.builtin import runs_folder
    from rlctl.evaluation.evaluation_configs import checked_run
    from rlctl.evaluation.target import find_target
    from rlctl.workers.reaper import scratch_folder

    findings = []
    with explain_engine_errors("interrupted"), scratch_folder("rlctl-model-") as scratch:
        run, files, placement = checked_run(find_target(name, runs_folder()), scratch)
        # Imported here, because it imports torch, which takes seconds.
        from rlctl.evaluation.model_check import check_model

        for finding in check_model(run, files, placement, engine, scratch):
            findings.append(finding)
            if not as_json:
                _show(finding.subject, finding.text, finding.holds)
    holds = all(finding.holds is not False for finding in findings)
    if as_json:
        fields = {"name": name, "holds": holds, "findings": [asdict(finding) for finding in findings]}
        typer.echo(json.dumps(fields, indent=1))
    if not holds:
        raise typer.Exit(FAILED)


def _show(subject: str, text: str, holds: bool | None) -> None:
    """Print one finding: verdict (ok, FAILS or none), subject and text, wrapped to the terminal's width."""
    import shutil
    from textwrap import wrap

    from rich.text import Text

    from rlctl.utils.safe_text import neutral

    verdict, style = {None: ("", ""), True: ("ok", "green"), False: ("FAILS", "bold red")}[holds]
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) - _LABEL_WIDTH - 6
    label = Text.assemble((f"{verdict:<5} ", style), (f"{subject:<{_LABEL_WIDTH}}", "cyan"))
    for line in wrap(neutral(text), max(width, 20)) or [""]:
        console().print(Text.assemble(label, line))
        # Further lines have no label.
        label = Text(" " * (_LABEL_WIDTH + 6))
