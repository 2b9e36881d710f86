"""Preview of a run's data: counts, lengths, packing, and text in which trained tokens are marked."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from itertools import pairwise
from operator import add
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.config.errors import ConfigError, Problem
from rlctl.config.schema import RunConfig
from rlctl.data.chat import Chat
from rlctl.data.cursor import Drawn, RowSource
from rlctl.data.end_tokens import EndTokens
from rlctl.data.load_data import DataPart, end_tokens, load_prompts, load_samples, part_of
from rlctl.data.mixture import order_of, step_lengths
from rlctl.data.tasks import SupervisedSample
from rlctl.data.tokenize import LengthReport
from rlctl.launch.first_row import local_chat, try_environments
from rlctl.preflight.backend import layout_of
from rlctl.preflight.load import Composed
from rlctl.preflight.machine import RunMachine, device_of
from rlctl.preflight.settled import Settled, SettledSft
from rlctl.training.micro_batching import PackingStats, packing
from rlctl.utils.devices import count_gpus, device_memory


@dataclass(frozen=True)
class Lengths:
    """Lengths of sequences in tokens, after truncation."""

    total: int
    mean: float
    median: float
    p90: float
    longest: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "Lengths":
        """Return the statistics of one or more lengths."""
        median, p90 = np.percentile(lengths, (50, 90))
        return cls(
            total=sum(lengths),
            mean=float(np.mean(lengths)),
            median=float(median),
            p90=float(p90),
            longest=max(lengths),
        )


@dataclass(frozen=True)
class Piece:
    """Text of consecutive tokens that are all trained on, or all masked."""

    text: str
    trained: bool
    # True for the last piece if the sample has more tokens that are not shown.
    truncated: bool = False


@dataclass(frozen=True)
class DataPreview:
    """Statistics and first rows of one data set."""

    # Name of each part -> its report. A part is `train`, or one source of the rows.
    reports: dict[str, LengthReport]
    # Tokens that end an answer.
    ends: EndTokens
    lengths: Lengths
    # (title, text) of the rows that the run draws first.
    rows: list[tuple[str, list[Piece]]]
    # Only for SFT samples: share of the tokens that are trained on, and packing statistics.
    trained: float | None = None
    packs: PackingStats | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def report(self) -> LengthReport:
        """Sum of the reports of all parts."""
        return reduce(add, self.reports.values())

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as JSON values, without the rows' texts."""
        ends = {"trained": self.ends.trained, "stops": self.ends.stops, "warnings": self.ends.warnings}
        counts = {name: asdict(report) for name, report in self.reports.items()}
        fields = {**asdict(self.report), "ends": ends, "lengths": asdict(self.lengths)}
        if len(counts) > 1:
            fields["parts"] = counts
        if self.packs is not None:
            fields |= {"trained_share": self.trained, "packing": asdict(self.packs)}
        return fields


def preview(
    composed: Composed[Settled], of: Literal["train", "validation"], count: int, max_tokens: int
) -> DataPreview:
    """Read a data set of a config. count: number of rows to show. max_tokens: most tokens to show of a row.

    Raises DataError at the first bad row. Raises ConfigError for unusable environments, or if the longest sequence is
    not known.
    """
    parts = part_of(composed.config, of)
    chat = local_chat(composed.config)
    if sft := composed.settled.sft:
        return _preview_samples(sft, parts, chat, count, max_tokens)
    assert composed.settled.grpo
    config = composed.settled.grpo.config
    ends = end_tokens(config, chat)
    rows, reports = _load_parts(parts, lambda part: load_prompts(config, part.section, chat, part.rows))
    if config.opens_prompts:
        # The environment writes the prompts, so only the first row's is known: its episode begins here.
        setup = try_environments(composed, parts[0].section, parts[0].rows[0], chat)
        tokens = setup.prompt or chat.prompt(setup.first, setup.tools).tokens
        first_rows = [("first row", [Piece(chat.decode(tokens), trained=False)])] if count else []
        return DataPreview(reports, ends, Lengths.from_lengths([len(tokens)]), first_rows, notes=setup.notes)
    first_rows = [
        (_title(task), [Piece(f"{task.text}\nanswer: {task.answer}", trained=False)])
        for task in _first_rows(rows, config, count)
    ]
    return DataPreview(reports, ends, Lengths.from_lengths([len(task.tokens) for task in rows]), first_rows)


def _preview_samples(
    settled: SettledSft, parts: list[DataPart], chat: Chat, count: int, max_tokens: int
) -> DataPreview:
    config = settled.config
    longest = settled.longest_sequence
    if longest is None:
        reason = f"{config.model.path} is not on this machine, so its longest sequence is not known; set it"
        raise ConfigError([Problem("model.max_length", "", reason)])
    rows, reports = _load_parts(parts, lambda part: load_samples(config, part.section, chat, part.rows, longest))
    first_rows = [(_title(sample), _pieces(sample, chat, max_tokens)) for sample in _first_rows(rows, config, count)]
    this_machine = RunMachine(device_of(count_gpus()), device_memory())
    trainer = settled.settle_on(this_machine, settled.facts).trainer
    shards = layout_of(config.trainer).data
    packs = packing(step_lengths(rows, config), shards, trainer.micro_batch_tokens, trainer.is_padded)
    lengths = Lengths.from_lengths([len(sample.tokens) for sample in rows])
    trained_share = sum(int(sample.mask.sum()) for sample in rows) / lengths.total
    return DataPreview(reports, chat.ends, lengths, first_rows, trained=trained_share, packs=packs)


def _load_parts(
    parts: list[DataPart], load: Callable[[DataPart], tuple[list[Drawn], LengthReport]]
) -> tuple[list[Drawn], dict[str, LengthReport]]:
    """Return the rows of all parts, and part name -> report."""
    all_rows: list[Drawn] = []
    reports: dict[str, LengthReport] = {}
    for part in parts:
        rows, report = load(part)
        all_rows += rows
        reports[part.name] = report
    return all_rows, reports


def _first_rows(rows: list[Drawn], config: RunConfig, count: int) -> list[Drawn]:
    """Return the first `count` rows in the run's order. In validation data the sources take turns."""
    return RowSource(rows, order_of(rows, config)).draw(min(count, len(rows)))


def _title(row: Drawn) -> str:
    return f"{row.id} ({row.source})" if row.source else row.id


def _pieces(sample: SupervisedSample, chat: Chat, max_tokens: int) -> list[Piece]:
    """Return the text of a sample's first `max_tokens` tokens, split where the loss mask changes.

    A piece is decoded together with all tokens before it, because a decoder may drop a space at the start of a text.
    """
    mask: NDArray[np.bool_] = sample.mask[:max_tokens]
    tokens = sample.tokens[:max_tokens].tolist()
    # Index of the first token of each piece, and the number of tokens.
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    pieces: list[Piece] = []
    text_before = ""
    for start, end in pairwise(cuts):
        if end > start:
            text = chat.decode(tokens[:end])
            # A token may change how the tokens before it are decoded. Then the piece is decoded alone.
            if text.startswith(text_before):
                piece_text = text.removeprefix(text_before)
            else:
                piece_text = chat.decode(tokens[start:end])
            pieces.append(Piece(piece_text, bool(mask[start])))
            text_before = text
    if len(sample.tokens) > max_tokens:
        pieces.append(Piece("", False, truncated=True))
    return pieces
