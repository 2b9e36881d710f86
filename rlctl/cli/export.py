"""`rlctl export`: a checkpoint as a Hugging Face folder with a model card, and its way to the hub."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.cli.arguments import OfStep
from rlctl.cli.completion import complete_run
from rlctl.cli.output import busy, examples, note, refuse, say
from rlctl.config.builtin import runs_folder
from rlctl.config.errors import ConfigError, Problem, UserError

EPILOG = examples(
    "rlctl export sums sums-hf                          the newest checkpoint of a run",
    "rlctl export sums sums-hf --step 40 --dtype bfloat16",
    "rlctl export runs/sums/checkpoints/step_40 sums-hf --push me/sums --private",
)


def export(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT | FOLDER | RUN",
            help="A checkpoint, a Hugging Face folder, or a run: its newest checkpoint.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ],
    to: Annotated[Path, typer.Argument(help="The folder to write, a new one.", show_default=False)],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="The dtype of the weights; if left out, they stay as they are."),
    ] = None,
    step: OfStep = None,
    repository: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Upload the folder to this repository of the hub."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make the repository private.")] = False,
) -> None:
    """Write weights as a Hugging Face folder with a model card: recipe, data, figures."""
    if private and repository is None:
        raise ConfigError([Problem("--private", "", "needs --push OWNER/NAME")])
    from rlctl.evaluation import export as exporter
    from rlctl.evaluation.target import find_target

    try:
        with busy("writing"):
            folder = exporter.export(find_target(target, runs_folder(), step), to, dtype, lambda what: note([what]))
        say(f"{folder}: loads in transformers and vLLM; its README.md says what made it")
        if repository is not None:
            with busy("uploading"):
                address = exporter.push(folder, repository, private)
            say(f"pushed to {address}")
    except UserError as error:
        refuse(error)
