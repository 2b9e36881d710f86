"""`rlctl data`: shows the data of a run before it starts."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.arguments import Arguments, split_any
from rlctl.cli.output import ShownProgress, console, examples, note, reading
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.text import Text

    from rlctl.launch.data_preview import DataPreview, Piece

app = typer.Typer(no_args_is_help=True)

DEFAULT = "sft-tiny"


@app.callback()
def data() -> None:
    """Show the data of a run: text, masks, lengths, packs."""


@app.command(
    epilog=examples(
        "rlctl data preview my.yaml",
        "rlctl data preview my.yaml sft.mask=last model.max_length=2048 --samples 5",
        "rlctl data preview grpo-tiny --validation --json",
    )
)
def preview(
    arguments: Arguments = None,
    samples: Annotated[int, typer.Option(min=0, help="The rows whose text is shown, as the run draws them.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="The most tokens that are shown of each row.")] = 256,
    validation: Annotated[bool, typer.Option("--validation", help="Show data.validation, not data.train.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts alone, as JSON.")] = False,
) -> None:
    """Show how rows become tokens: text, the part that is trained on, lengths, and how well they pack."""
    from rlctl.data.datasets import path_text
    from rlctl.launch import data_preview
    from rlctl.launch.prepare import RunRequest, prepare

    recipe, overrides = split_any(arguments, DEFAULT)
    # run.name=null, because a preview starts nothing: it must also work if a run of the recipe's name exists.
    request = RunRequest(kind=None, recipe=recipe, overrides=[*overrides, "run.name=null"])
    prepared = prepare(request, "checked", ShownProgress())
    sft = prepared.settled.sft
    # Samples are cut at the longest sequence. Without model.max_length it is a fact of the model.
    if sft and sft.longest_sequence is None:
        prepared.derive_facts()
    composed = prepared.composed
    section = composed.config.data
    if validation and not section.has_validation:
        raise ConfigError([Problem("data.validation.path", "", "is null: there is nothing to show")])
    path = path_text((validation and section.validation.path) or section.train.paths)
    with reading(f"reading {path}"):
        data_view = data_preview.preview(composed, "validation" if validation else "train", samples, tokens)
    note(data_view.notes)
    if as_json:
        typer.echo(json.dumps({"path": path, **data_view.as_json()}, indent=1))
    else:
        _show_preview(path, data_view)


def _mark_trained(name: str, pieces: list["Piece"]) -> "Text":
    """Return a row's text with the part that is trained on in green, or between {+ and +} if colours are off."""
    from rich.text import Text

    has_colours = console().is_terminal and not console().no_color
    row_text = Text(f"{name}\n", "cyan")
    for piece in pieces:
        text = "..." if piece.truncated else piece.text
        if piece.trained:
            row_text.append(text if has_colours else f"{{+{text}+}}", "bold green")
        else:
            row_text.append(text, "default")
    return row_text


def _show_preview(path: str, data_view: "DataPreview") -> None:
    from rich.padding import Padding
    from rich.text import Text

    from rlctl.dashboard.formats import count

    out = console()
    lengths = data_view.lengths
    out.print(Text.assemble((path, "bold"), f": {data_view.report}"))
    if len(data_view.reports) > 1:
        for name, report in data_view.reports.items():
            out.print(f"  {name}: {report}")
    out.print(
        f"tokens   {lengths.total:,}; a row has {lengths.mean:,.4g} on average, {lengths.median:,.4g} at the "
        f"median, {lengths.p90:,.4g} at the 90th percentile, at most {lengths.longest:,}"
    )
    out.print(f"ends     {data_view.ends}")
    note([*data_view.ends.warnings, *data_view.report.warnings])
    if (packs := data_view.packs) is not None:
        out.print(f"trained  {data_view.trained:.1%} of the tokens")
        out.print(f"packs    {packs}, over the first {count(packs.steps, 'step')}")
    for title, pieces in data_view.rows:
        text = _mark_trained(title, pieces)
        out.print()
        out.print(Padding(text, (0, 0, 0, 2)) if out.is_terminal else text)
