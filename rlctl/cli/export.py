"""`rlctl export`: writes a checkpoint as a Hugging Face folder with a model card, and uploads the folder to the hub."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlctl.cli.arguments import OfStep
from rlctl.cli.completion import complete_run
from rlctl.cli.output import busy, examples, note, refuse, say
from rlctl.config.builtin import runs_folder
from rlctl.config.errors import ConfigError, Problem, UserError
from rlctl.config.run_weights import is_adapter

EPILOG = examples(
    "rlctl export sums sums-hf                          the newest checkpoint of a run",
    "rlctl export sums sums-hf --step 40 --dtype bfloat16",
    "rlctl export sums-lora sums-hf --merged            a run of adapters, added to its base",
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
    to: Annotated[Path, typer.Argument(metavar="TO", help="The folder to write, a new one.", show_default=False)],
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="The dtype of the weights; if left out, they stay as they are."),
    ] = None,
    step: OfStep = None,
    merged: Annotated[
        bool, typer.Option("--merged", help="Add an adapter to its base: a whole model, in place of PEFT's folder.")
    ] = False,
    repository: Annotated[
        str | None,
        typer.Option("--push", metavar="OWNER/NAME", help="Upload the folder to this repository of the hub."),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: make the repository private.")] = False,
) -> None:
    """Write weights as a Hugging Face folder, or an adapter as PEFT's, with a model card: recipe, data, figures."""
    if private and repository is None:
        raise ConfigError([Problem("--private", "", "needs --push OWNER/NAME")])
    from rlctl.evaluation import export as exporter
    from rlctl.evaluation.target import find_target
    from rlctl.models.adapter_folder import read_config
    from rlctl.preflight.engines.vllm import lora_options

    try:
        with busy("writing"):
            weights = find_target(target, runs_folder(), step)
            folder = exporter.export(weights, to, dtype, lambda remark: note([remark]), merged)
        loads = "transformers and vLLM"
        if is_adapter(folder):
            loads = f"PEFT and vLLM ({lora_options(read_config(folder).rank)})"
        say(f"{folder}: loads in {loads}; its README.md says what made it")
        if repository is not None:
            with busy("uploading"):
                address = exporter.push(folder, repository, private)
            say(f"pushed to {address}")
    except UserError as error:
        refuse(error)
