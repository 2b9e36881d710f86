"""`rlctl loss`: checks that a policy loss keeps the contract of the trainers."""

from typing import Annotated

import typer

from rlctl.cli.arguments import note_repeats
from rlctl.cli.output import FAILED, examples, say

app = typer.Typer(no_args_is_help=True)


@app.callback()
def loss() -> None:
    """Check a policy loss, rlctl's own or one's own."""


@app.command(
    epilog=examples(
        "rlctl loss check my_loss.py:Sapo",
        "rlctl loss check my_loss.py:Sapo tau_down=2 kl_coef=0.1",
        "rlctl loss check gspo level=token async.enabled=true",
    )
)
def check(
    name: Annotated[str, typer.Argument(help="A loss by its name, or file.py:Class or module:Class.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of grpo.loss by their own name, or any others in full."),
    ] = None,
) -> None:
    """Try a loss on made-up rollouts: sign, packing, order, masks, outliers, needs. Exit code 1 if it fails."""
    from rlctl.grpo.losses.base import make_loss
    from rlctl.grpo.losses.check import check_loss
    from rlctl.preflight.load import load

    keys = [text if "." in text.partition("=")[0] else f"grpo.loss.{text}" for text in overrides or []]
    note_repeats(keys)
    settled = load("grpo", None, [f"grpo.loss.name={name}", *keys]).settled
    findings = check_loss(make_loss(settled))
    for finding in findings:
        say(f"failed  {finding.name}: {finding.problem}" if finding.problem else f"holds   {finding.name}")
    if any(finding.problem for finding in findings):
        raise typer.Exit(FAILED)
