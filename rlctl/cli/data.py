"""`rlctl data`: shows the data of a run before it starts."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.arguments import Arguments, split
from rlctl.cli.output import busy, console, examples, note
from rlctl.cli.try_first_row import try_environments
from rlctl.config.errors import ConfigError, Problem
from rlctl.config.schema import GrpoConfig, RunConfig, SftConfig

if TYPE_CHECKING:
    from rich.text import Text

    from rlctl.data.chat import Chat
    from rlctl.data.cursor import Drawn
    from rlctl.data.ends import EndTokens
    from rlctl.data.load import DataPart, RowReader, RunRows
    from rlctl.data.preview import Lengths, Piece
    from rlctl.data.tasks import SupervisedSample, Task
    from rlctl.data.tokenize import LengthReport
    from rlctl.preflight.load import Composed
    from rlctl.training.micro_batching import PackingStats

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
    from rlctl.data.datasets import shown
    from rlctl.data.load import part_of
    from rlctl.preflight.load import load

    recipe, overrides = split(arguments)
    # Nothing is started, so that a run of the recipe's name may exist.
    composed = load(None, recipe or DEFAULT, [*overrides, "run.name=null"])
    config = composed.config
    if validation and not config.data.has_validation:
        raise ConfigError([Problem("data.validation.path", "", "is null: there is nothing to show")])
    path = shown((validation and config.data.validation.path) or config.data.train.paths)
    with _reading(f"reading {path}"):
        parts = part_of(config, "validation" if validation else "train")
        if isinstance(config, SftConfig):
            seen = _sft(config, parts, samples, tokens)
        elif config.environment.enabled:
            seen = _played(composed, config, parts, samples)
        else:
            seen = _grpo(config, parts, samples)
    if as_json:
        typer.echo(json.dumps({"path": path, **seen.as_json()}, indent=1))
    else:
        _show(path, seen)


@dataclass(frozen=True)
class _Seen:
    """The facts about one data set that are shown."""

    # By part: train, or each source of it.
    reports: "dict[str, LengthReport]"
    # The tokens that end an answer.
    ends: "EndTokens"
    lengths: "Lengths"
    texts: list["Text"]
    # Only of samples: the share of the tokens that is trained on, and how they pack.
    trained: float | None = None
    packs: "PackingStats | None" = None

    @property
    def report(self) -> "LengthReport":
        """Counts of all parts."""
        return reduce(add, self.reports.values())

    def as_json(self) -> dict[str, Any]:
        ends = {"trained": self.ends.trained, "stops": self.ends.stops, "warnings": self.ends.warnings}
        counts = {name: asdict(report) for name, report in self.reports.items()}
        facts = {**asdict(self.report), "ends": ends, "lengths": asdict(self.lengths)}
        facts |= {"parts": counts} if len(counts) > 1 else {}
        return facts if self.packs is None else facts | {"trained_share": self.trained, "packing": asdict(self.packs)}


def _sft(config: SftConfig, parts: "list[DataPart]", count: int, most: int) -> _Seen:
    from rlctl.config.fields import stated
    from rlctl.data.load import load_samples
    from rlctl.data.preview import Lengths, pieces, step_lengths
    from rlctl.models.model_sizes import sizes_of
    from rlctl.preflight.backend import layout_of
    from rlctl.preflight.resolved import device_of, longest_sequence
    from rlctl.preflight.tuning import tune
    from rlctl.training.micro_batching import packing
    from rlctl.utils.devices import count_gpus, device_memory

    chat = run_chat(config)
    longest = longest_sequence(config, sizes_of(config.model.path))
    if longest is None:
        what = f"{config.model.path} is not on this machine, so its longest sequence is not known; set it"
        raise ConfigError([Problem("model.max_length", "", what)])
    rows, reports = _all(parts, lambda part: load_samples(config, part.section, chat, part.rows, longest))
    texts = [_sample(_titled(sample), pieces(sample, chat.tokenizer, most)) for sample in _first(rows, config, count)]
    tuned = tune(config, device_of(count_gpus()), sizes_of(config.model.path), device_memory()).config
    tokens = stated(tuned.trainer.micro_batch_tokens)
    packs = packing(step_lengths(rows, config), layout_of(config.trainer).data, tokens)
    lengths = Lengths.of([len(sample.tokens) for sample in rows])
    trained = sum(int(sample.mask.sum()) for sample in rows) / lengths.total
    return _Seen(reports, chat.ends, lengths, texts, trained, packs)


def _grpo(config: GrpoConfig, parts: "list[DataPart]", count: int) -> _Seen:
    from rlctl.data.load import load_prompts
    from rlctl.data.preview import Lengths, Piece

    chat = run_chat(config)
    rows, reports = _all(parts, lambda part: load_prompts(config, part.section, chat, part.rows))
    ends = _ends(config, chat)
    texts = [
        _sample(_titled(prompt), [Piece(f"{prompt.text}\nanswer: {prompt.answer}", False)])
        for prompt in _first(rows, config, count)
    ]
    return _Seen(reports, ends, Lengths.of([len(prompt.tokens) for prompt in rows]), texts)


def _all(
    parts: "list[DataPart]", load: "Callable[[DataPart], tuple[list[Drawn], LengthReport]]"
) -> "tuple[list[Drawn], dict[str, LengthReport]]":
    """Return the rows of all parts, and the report of each."""
    loaded = [(part.name, load(part)) for part in parts]
    return [row for _, (rows, _) in loaded for row in rows], {name: report for name, (_, report) in loaded}


def _played(composed: "Composed", config: GrpoConfig, parts: "list[DataPart]", count: int) -> _Seen:
    """Return the rows of environments, of which the first is begun: its prompt with the tools."""
    from rlctl.data.load import load_prompts
    from rlctl.data.preview import Lengths, Piece

    chat = run_chat(config)
    _, reports = _all(parts, lambda part: load_prompts(config, part.section, chat, part.rows))
    setup = try_environments(composed, parts[0].section, parts[0].rows[0], chat)
    prompt = chat.prompt(setup.first, setup.tools)
    note(setup.notes)
    texts = [_sample("first row", [Piece(prompt.text, False)])] if count else []
    return _Seen(reports, _ends(config, chat), Lengths.of([len(prompt.tokens)]), texts)


def _first(rows: list["Drawn"], config: RunConfig, count: int) -> list["Drawn"]:
    """Return the rows that the run draws first; of held-out rows those of each source in turn."""
    from rlctl.data.cursor import RowSource
    from rlctl.data.mixture import order_of

    return RowSource(rows, order_of(rows, config)).draw(min(count, len(rows)))


def _titled(row: "Task | SupervisedSample") -> str:
    return f"{row.id} ({row.source})" if row.source else row.id


def read_ahead(config: RunConfig) -> "tuple[RowReader, RunRows]":
    """Read and check all rows of a run before anything starts. Raises ConfigError."""
    from rlctl.data.load import RowReader

    reader = RowReader(config)
    with _reading("reading the data"):
        return reader, reader.read()


def read_recipe(config: GrpoConfig) -> "list[DataPart]":
    """Read and check the held-out rows of the recipe that an SFT run is validated by. Raises ConfigError."""
    from rlctl.data.load import part_of

    with _reading("reading the recipe's data"):
        return part_of(config, "validation")


def ends_of(config: RunConfig) -> "EndTokens | None":
    """Return the tokens that end an answer; None if the model is not on this machine. Raises ConfigError."""
    from rlctl.models.model_sizes import config_file

    if config_file(config.model.path) is None:
        return None
    with _reading("loading the tokenizer"):
        return _ends(config, run_chat(config))


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Show that data are read; turn their first mistake into a ConfigError."""
    from rlctl.data.files import DataError

    try:
        with busy(what):
            yield
    except DataError as error:
        raise ConfigError([Problem("data", "", str(error))]) from error


def run_chat(config: RunConfig) -> "Chat":
    """Return the tokenizer and template of a config, with its model's end tokens if that is on this machine."""
    from rlctl.data.load import load_chat
    from rlctl.models.model_sizes import config_file

    file = config_file(config.model.path)
    return load_chat(config, str(file.parent) if file else config.model.path)


def _ends(config: RunConfig, chat: "Chat") -> "EndTokens":
    if isinstance(config, SftConfig):
        return chat.ends
    return chat.ends.with_further(config.generation.stop_token_ids, chat.tokenizer)


def _sample(name: str, parts: list["Piece"]) -> "Text":
    """Return a row's text; the part that is trained on is in colour, or {+like this+} where there is none."""
    from rich.text import Text

    plain = not console().is_terminal or bool(console().no_color)
    text = Text(f"{name}\n", "cyan")
    for part in parts:
        shown = "..." if part.truncated else part.text
        text.append(f"{{+{shown}+}}" if plain and part.trained else shown, "bold green" if part.trained else "default")
    return text


def _show(path: str, seen: _Seen) -> None:
    from rich.padding import Padding
    from rich.text import Text

    out, lengths = console(), seen.lengths
    out.print(Text.assemble((path, "bold"), f": {seen.report}"))
    for name, report in seen.reports.items() if len(seen.reports) > 1 else ():
        out.print(f"  {name}: {report}")
    out.print(
        f"tokens   {lengths.total:,}; a row has {lengths.mean:,.4g} on average, {lengths.median:,.4g} at the "
        f"median, {lengths.p90:,.4g} at the 90th percentile, at most {lengths.longest:,}"
    )
    out.print(f"ends     {seen.ends}")
    note([*seen.ends.warnings, *seen.report.warnings])
    if (packs := seen.packs) is not None:
        out.print(f"trained  {seen.trained:.1%} of the tokens")
        out.print(f"packs    {packs}, over the first {packs.steps:,} step{'s' * (packs.steps != 1)}")
    for text in seen.texts:
        out.print()
        out.print(Padding(text, (0, 0, 0, 2)) if out.is_terminal else text)
