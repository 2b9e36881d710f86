"""A config in, rows and then prompts or samples out: what commands and runs call.

Reading is apart from tokenizing: rows are read and checked before anything starts, tokenized while the rest comes up.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rlctl.config.plugins import needs_answers
from rlctl.config.schema import DataSection, DatasetSection, RunConfig, SftConfig
from rlctl.data.chat import Chat, load_tokenizer, make_chat
from rlctl.data.datasets import Row, load_rows
from rlctl.data.rows import Messages, conversation, is_plain, question
from rlctl.data.tasks import SupervisedSample, Task
from rlctl.data.tokenize import LengthReport, tokenize_prompts, tokenize_samples


@dataclass(frozen=True)
class RunRows:
    """The rows of a run. validation: empty where nothing is validated."""

    train: list[Row]
    validation: list[Row]

    def parts(self, data: DataSection) -> list[tuple[str, DatasetSection, list[Row]]]:
        """(name, section, rows) of train, and of validation where there is one."""
        parts = [("train", data.train, self.train), ("validation", data.validation, self.validation)]
        return [part for part in parts if part[2]]


class RowReader:
    """Reads and checks the rows of a run: ahead of it, so that nothing starts on a bad row, and again if it restarts.

    Rows are handed over once: of what is tokenized not all need stay in memory.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._rows: RunRows | None = None

    def read(self) -> RunRows:
        """Read all rows now, for the next `take`. Raises DataError at the first bad one."""
        data = self._config.data
        validated = data.validation.path is not None and self._config.validation.every > 0
        train = read_rows(self._config, data.train)
        self._rows = RunRows(train, read_rows(self._config, data.validation) if validated else [])
        return self._rows

    def take(self) -> RunRows:
        """Hand over the rows, read now if they were not before. Raises DataError."""
        rows = self._rows or self.read()
        self._rows = None
        return rows


def read_rows(config: RunConfig, section: DatasetSection) -> list[Row]:
    """Read and check the rows of `section` (data.train or data.validation). Raises DataError at the first bad one."""
    rows = load_rows(section)
    unusual: dict[tuple[object, ...], Row] = {}
    for row, messages in zip(rows, _messages(rows, config, section), strict=True):
        if not is_plain(messages):
            unusual.setdefault(_shape(messages), row)
    if unusual:
        # A tokenizer takes seconds to load: only what may not fit its template is put to it this early.
        _tokenize(config, section, list(unusual.values()), load_chat(config, config.model.path))
    return rows


def load_chat(config: RunConfig, model: str) -> Chat:
    """Load the tokenizer and template of a run. model: the policy's folder or hub name. Raises DataError."""
    folder = Path(model) if Path(model).is_dir() else None
    return make_chat(load_tokenizer(config.model.tokenizer or model), config.data, folder)


def load_prompts(
    config: RunConfig, section: DatasetSection, chat: Chat, rows: list[Row]
) -> tuple[list[Task], LengthReport]:
    """Return the prompts of `section` from its rows. Raises DataError."""
    return tokenize_prompts(rows, section, chat, config.data.max_prompt_length)


def load_samples(
    config: SftConfig, section: DatasetSection, chat: Chat, rows: list[Row], max_length: int
) -> tuple[list[SupervisedSample], LengthReport]:
    """Return the samples of `section` from its rows, cut behind `max_length` tokens. Raises DataError."""
    return tokenize_samples(rows, section, chat, config.sft.mask, config.data.max_prompt_length, max_length)


def _messages(rows: list[Row], config: RunConfig, section: DatasetSection) -> Iterator[Messages]:
    if isinstance(config, SftConfig):
        for row in rows:
            yield conversation(row, section)
        return
    answered = needs_answers(config.rewards)
    for row in rows:
        yield question(row, section, answered=answered)[0]


def _shape(messages: Messages) -> tuple[object, ...]:
    """What a template may refuse of a chat: who speaks first, who after whom, and that nothing is said."""
    roles = [message["role"] for message in messages]
    return roles[0], frozenset(pairwise(roles)), roles[-1], any(message["content"] for message in messages)


def _tokenize(config: RunConfig, section: DatasetSection, rows: list[Row], chat: Chat) -> None:
    if isinstance(config, SftConfig):
        tokenize_samples(rows, section, chat, config.sft.mask, None, sys.maxsize)
    else:
        tokenize_prompts(rows, section, chat, None)
