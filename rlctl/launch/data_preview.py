"""Preview of a run's data before it starts: counts, lengths, packs, and text with trained tokens apart from others."""

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
    """Lengths of sequences, in tokens, after cutting."""

    total: int
    mean: float
    median: float
    p90: float
    longest: int

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> "Lengths":
        """Return those of at least one sequence."""
        median, p90 = np.percentile(lengths, (50, 90))
        return cls(sum(lengths), float(np.mean(lengths)), float(median), float(p90), max(lengths))


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens that are all trained on, or all not."""

    text: str
    trained: bool
    # True if more follows that is not shown.
    truncated: bool = False


@dataclass(frozen=True)
class DataPreview:
    """Facts about one data set."""

    # By part: train, or each source there.
    reports: dict[str, LengthReport]
    # Tokens that end an answer.
    ends: EndTokens
    lengths: Lengths
    # (title, text) of the rows that the run draws first.
    rows: list[tuple[str, list[Piece]]]
    # Only of samples: the share of the tokens that is trained on, and how they pack.
    trained: float | None = None
    packs: PackingStats | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def report(self) -> LengthReport:
        """Counts of all parts."""
        return reduce(add, self.reports.values())

    def as_json(self) -> dict[str, Any]:
        """Return the counts."""
        ends = {"trained": self.ends.trained, "stops": self.ends.stops, "warnings": self.ends.warnings}
        counts = {name: asdict(report) for name, report in self.reports.items()}
        facts = {**asdict(self.report), "ends": ends, "lengths": asdict(self.lengths)}
        facts |= {"parts": counts} if len(counts) > 1 else {}
        return facts if self.packs is None else facts | {"trained_share": self.trained, "packing": asdict(self.packs)}


def preview(composed: Composed[Settled], of: Literal["train", "validation"], count: int, most: int) -> DataPreview:
    """Read a data set of a config. count: rows whose text is kept. most: tokens of each.

    Raises DataError at the first bad row, ConfigError for unusable environments and an unknown longest sequence.
    """
    parts, chat = part_of(composed.config, of), local_chat(composed.config)
    if sft := composed.settled.sft:
        return _samples(sft, parts, chat, count, most)
    assert composed.settled.grpo
    config = composed.settled.grpo.config
    ends = end_tokens(config, chat)
    rows, reports = _all(parts, lambda part: load_prompts(config, part.section, chat, part.rows))
    if config.opens_prompts:
        # The first row is begun: its prompt with the tools.
        setup = try_environments(composed, parts[0].section, parts[0].rows[0], chat)
        tokens = setup.prompt or chat.prompt(setup.first, setup.tools).tokens
        first = [("first row", [Piece(chat.decode(tokens), False)])] * bool(count)
        return DataPreview(reports, ends, Lengths.from_lengths([len(tokens)]), first, notes=setup.notes)
    shown = [
        (_title(task), [Piece(f"{task.text}\nanswer: {task.answer}", False)]) for task in _first(rows, config, count)
    ]
    return DataPreview(reports, ends, Lengths.from_lengths([len(task.tokens) for task in rows]), shown)


def _samples(settled: SettledSft, parts: list[DataPart], chat: Chat, count: int, most: int) -> DataPreview:
    config, longest = settled.config, settled.longest_sequence
    if longest is None:
        what = f"{config.model.path} is not on this machine, so its longest sequence is not known; set it"
        raise ConfigError([Problem("model.max_length", "", what)])
    rows, reports = _all(parts, lambda part: load_samples(config, part.section, chat, part.rows, longest))
    shown = [(_title(sample), _pieces(sample, chat, most)) for sample in _first(rows, config, count)]
    here = settled.settle_on(RunMachine(device_of(count_gpus()), device_memory()), settled.facts)
    own = here.trainer
    packs = packing(step_lengths(rows, config), layout_of(config.trainer).data, own.micro_batch_tokens, own.is_padded)
    lengths = Lengths.from_lengths([len(sample.tokens) for sample in rows])
    trained = sum(int(sample.mask.sum()) for sample in rows) / lengths.total
    return DataPreview(reports, chat.ends, lengths, shown, trained, packs)


def _all(
    parts: list[DataPart], load: Callable[[DataPart], tuple[list[Drawn], LengthReport]]
) -> tuple[list[Drawn], dict[str, LengthReport]]:
    """Return the rows of all parts, and the report of each."""
    loaded = [(part.name, load(part)) for part in parts]
    return [row for _, (rows, _) in loaded for row in rows], {name: report for name, (_, report) in loaded}


def _first(rows: list[Drawn], config: RunConfig, count: int) -> list[Drawn]:
    """Return the rows that the run draws first; of held-out rows those of each source in turn."""
    return RowSource(rows, order_of(rows, config)).draw(min(count, len(rows)))


def _title(row: Drawn) -> str:
    return f"{row.id} ({row.source})" if row.source else row.id


def _pieces(sample: SupervisedSample, chat: Chat, most: int) -> list[Piece]:
    """Return the text of a sample's first `most` tokens, cut where the mask changes.

    The text of a piece is that of its place: a decoder may drop a blank at the beginning of a text.
    """
    mask: NDArray[np.bool_] = sample.mask[:most]
    tokens = sample.tokens[:most].tolist()
    cuts = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    pieces = list[Piece]()
    before = ""
    for start, end in pairwise(cuts):
        if end > start:
            text = chat.decode(tokens[:end])
            added = text.removeprefix(before) if text.startswith(before) else chat.decode(tokens[start:end])
            pieces.append(Piece(added, bool(mask[start])))
            before = text
    return [*pieces, Piece("", False, truncated=True)] if len(sample.tokens) > most else pieces
