"""Loading of a config's data for commands and runs: rows first, then prompts (GRPO) or samples (SFT).

Rows are read and checked before anything starts. They are tokenized while the rest of the run starts.
"""

import hashlib
import json
import re
import sys
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Literal

from rlctl.config.data_schema import DataSection, DatasetSection, TrainDataSection
from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object
from rlctl.config.run_weights import chat_folder
from rlctl.config.schema import GrpoConfig, RunConfig, SftConfig
from rlctl.data.chat import Chat, make_chat
from rlctl.data.datasets import Row, load_rows, path_text
from rlctl.data.end_tokens import EndTokens
from rlctl.data.files import DataError
from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.data.rows import MARKS, conversation, is_plain, question
from rlctl.data.tasks import SupervisedSample, Task
from rlctl.data.templates import templates_of
from rlctl.data.tokenize import LengthReport, read_tasks, tokenize_prompts, tokenize_samples
from rlctl.data.unwritten_messages import require_system_message

# Expressions in a template that may make the text of a turn depend on later turns.
_LOOKS_AHEAD = re.compile(r"messages\s*\|\s*(length|count|last)|messages\[-1\]|loop\.(last|revindex|length|nextitem)")
# Opening of thinking that is not closed at once. Templates write closed, empty thinking to turn thinking off.
_OPENS_THINKING = re.compile(r"<think>(?!(\\n|\s)*</think>)")


@dataclass(frozen=True)
class RunRows:
    """Rows of a run's training and validation data."""

    train: list[Row]
    # Empty if the run does not validate.
    validation: list[Row]

    def parts(self, data: DataSection) -> "list[DataPart]":
        """Return the parts by source: those of train, then those of validation if there are rows."""
        # Held-out rows of the training data belong to the sections of their sources.
        validation_section = data.validation if data.validation.path is not None else None
        validation_parts = parts_of("validation", self.validation, data, validation_section)
        return [*parts_of("train", self.train, data), *validation_parts]


@dataclass(frozen=True)
class DataPart:
    """Rows of one source of the training or validation data."""

    purpose: Literal["train", "validation"]
    section: DatasetSection
    rows: list[Row]

    @property
    def name(self) -> str:
        """Name for messages: `train`, or for example `train (sums)` for the rows of the source `sums`."""
        source = self.rows[0].source
        return f"{self.purpose} ({source})" if source else self.purpose


def parts_of(
    purpose: Literal["train", "validation"], rows: list[Row], data: DataSection, section: DatasetSection | None = None
) -> list[DataPart]:
    """Return rows by source, in their order. section: section of all rows; None if each source has its section."""
    groups = groupby(rows, key=lambda row: row.source)
    return [DataPart(purpose, section or data.train.section_of(source), list(group)) for source, group in groups]


class RowReader:
    """Reader of a run's rows. It reads and checks them before the run starts, and again if the run restarts.

    It hands the rows over once and then forgets them, so that they need not stay in memory.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._rows: RunRows | None = None

    def read(self) -> RunRows:
        """Read and check all rows, and keep them for the next `take`. Raises DataError at the first bad row."""
        data = self._config.data
        validated = data.has_validation and self._config.validation.every > 0
        train = read_train(self._config)
        held_out: list[Row] = []
        if data.validation.fraction is not None:
            # Also in a run without validation, so that no run trains on the held-out rows.
            train, held_out = split_off(train, data.train, data.validation.fraction)
        elif validated:
            held_out = read_rows(self._config, data.validation)
        self._rows = RunRows(train, held_out if validated else [])
        return self._rows

    def take(self) -> RunRows:
        """Return the rows and forget them. Read them now if `read` was not called before. Raises DataError."""
        rows = self._rows or self.read()
        self._rows = None
        return rows


def part_of(config: RunConfig, purpose: Literal["train", "validation"]) -> list[DataPart]:
    """Read and check the training or validation rows of a run; return them by source. Raises DataError."""
    data = config.data
    if purpose == "validation" and data.validation.path is not None:
        return parts_of(purpose, read_rows(config, data.validation), data, data.validation)
    rows = read_train(config)
    if data.validation.fraction is not None:
        train, held_out = split_off(rows, data.train, data.validation.fraction)
        rows = held_out if purpose == "validation" else train
    return parts_of(purpose, rows, data)


def read_train(config: RunConfig) -> list[Row]:
    """Read and check the rows of data.train, one source after the other. Raises DataError at the first bad one."""
    train = config.data.train
    if not train.sources:
        return read_rows(config, train)
    rows: list[Row] = []
    for name, section in train.sources.items():
        first = len(rows)
        rows += [replace(row, number=first + row.number, source=name) for row in read_rows(config, section)]
    return rows


def split_off(rows: list[Row], section: TrainDataSection, fraction: float) -> tuple[list[Row], list[Row]]:
    """Return (rows to train on, held-out rows). The SHA-256 of a row's prompt decides in which part the row is.

    Rows with the same prompt are in the same part. Raises DataError if a part is empty.
    """
    train: list[Row] = []
    held_out: list[Row] = []
    for row in rows:
        # Without a prompt the whole row is the task.
        prompt = question(row, section.section_of(row.source), needs_prompt=False)[0] or row.values
        content = json.dumps(prompt, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        # Evenly distributed from 0 to 1 over the prompts.
        prompt_share = int.from_bytes(hashlib.sha256(content).digest()[:8], "big") / 2**64
        if prompt_share < fraction:
            held_out.append(row)
        else:
            train.append(row)
    if not train or not held_out:
        finding = f"{len(held_out)} of {len(rows)} rows are held out by data.validation.fraction={fraction:g}"
        raise DataError(f"{path_text(section.paths)}: {finding}: both parts need one")
    return train, held_out


def read_rows(config: RunConfig, section: DatasetSection) -> list[Row]:
    """Read and check the rows of `section` (data.train or data.validation). Raises DataError at the first bad one."""
    rows = load_rows(section)
    sft = config.sft
    needs_answer = config.needs_answers
    may_need_thinking = sft is not None and may_open_thinking(config)
    # One row for each shape of chat that a template may refuse. A shape is the first role, the pairs of roles that
    # follow each other, the last role, if a message has text, and if every answer has thinking.
    unusual: dict[tuple[object, ...], Row] = {}
    for row in rows:
        if not config.needs_prompts:
            # The prompt is complete, and rendered by the template, only when an episode begins.
            question(row, section, needs_answer=needs_answer, needs_prompt=False)
            continue
        messages = conversation(row, section) if sft else question(row, section, needs_answer=needs_answer)[0]
        if may_need_thinking or not is_plain(messages):
            roles = [message["role"] for message in messages]
            has_text = any(message["content"] for message in messages)
            answers = [message["content"] for message in messages if message["role"] == "assistant"]
            has_thinking = all("</think>" in answer for answer in answers)
            shape = (roles[0], frozenset(pairwise(roles)), roles[-1], has_text, has_thinking)
            unusual.setdefault(shape, row)
    is_local = Path(config.model.tokenizer or chat_folder(config.model.path)).is_dir()
    if config.data.system_prompt is not None and is_local:
        # This raises DataError for a template that leaves out the system prompt.
        load_chat(config, config.model.path)
    if unusual:
        # Only unusual rows are rendered this early, because the tokenizer takes seconds to load.
        chat = load_chat(config, config.model.path)
        unusual_rows = list(unusual.values())
        if sft:
            tokenize_samples(unusual_rows, section, chat, sft, max_prompt_length=None, max_length=sys.maxsize)
        else:
            tokenize_prompts(unusual_rows, section, chat, max_prompt_length=None)
    return rows


def may_open_thinking(config: RunConfig) -> bool:
    """Return True if the template may open an answer with thinking. SFT then refuses an answer without thinking.

    The template is read from its file, because the tokenizer takes seconds to load. False if it is not on this machine.
    """
    # Behind the last use of this argument a template writes the opening of an answer.
    opening = _template_text(config).rpartition("add_generation_prompt")[2]
    return bool(_OPENS_THINKING.search(opening))


def may_rewrite(config: RunConfig) -> bool:
    """Return True if the text of a turn may depend on later turns. The template is read as in `may_open_thinking`."""
    return bool(_LOOKS_AHEAD.search(_template_text(config)))


def _template_text(config: RunConfig) -> str:
    """Return the source of the template, or of all its templates; empty if none can be read."""
    return "\n".join(templates_of(config).values())


def may_have_unknown_text(config: RunConfig) -> bool:
    """Return True if the tokenizer has a token for text that it does not know. Reads only its `tokenizer.json`."""
    folder = Path(config.model.tokenizer or chat_folder(config.model.path))
    try:
        model = read_object(folder / "tokenizer.json").get("model")
    except ModelError:
        return False
    if not isinstance(model, dict):
        return False
    has_token = model.get("unk_token") is not None or model.get("unk_id") is not None
    return has_token and not model.get("byte_fallback")


def load_chat(config: RunConfig, model: str) -> Chat:
    """Load the tokenizer and the chat template of a run. model: the policy's folder or hub name. Raises DataError."""
    model = chat_folder(model)
    folder = Path(model) if Path(model).is_dir() else None
    chat = make_chat(load_tokenizer(config.model.tokenizer or model), config.data, folder)
    if chat.system_prompt is not None:
        require_system_message(chat, chat.system_prompt)
    return chat


def end_tokens(config: RunConfig, chat: Chat) -> EndTokens:
    """Return the tokens that end an answer, with `generation.stop_token_ids` in a GRPO run. Raises DataError."""
    further = config.further_stops
    return chat.ends if further is None else chat.ends.with_further(further, chat.tokenizer)


def load_prompts(
    config: GrpoConfig, section: DatasetSection, chat: Chat, rows: list[Row]
) -> tuple[list[Task], LengthReport]:
    """Return the tasks of a data set's rows, and a report of the rows' lengths. Raises DataError."""
    if config.opens_prompts:
        return read_tasks(rows, section, chat, config.environment.environments)
    return tokenize_prompts(rows, section, chat, config.data.max_prompt_length)


def check_teachers(config: GrpoConfig, rows: list[Row]) -> None:
    """Raise DataError for the first row whose column `teacher_key` names none of several teachers."""
    key = config.teacher_key
    if key is None:
        return
    for row in rows:
        if row.values.get(key) not in [*config.teachers]:
            problem = f"column {key!r} must be one of {', '.join(config.teachers)}, not {row.values.get(key)!r}"
            raise DataError(f"{row.origin}: {problem} (teachers)")


def load_samples(
    config: SftConfig, section: DatasetSection, chat: Chat, rows: list[Row], max_length: int
) -> tuple[list[SupervisedSample], LengthReport]:
    """Return the samples of a data set's rows, cut after `max_length` tokens, and a report of their lengths.

    Raises DataError.
    """
    samples, report = tokenize_samples(rows, section, chat, config.sft, config.data.max_prompt_length, max_length)
    if not samples:
        problem = f"no sample is left: marks of messages leave out every turn ({', '.join(MARKS)})"
        raise DataError(f"{path_text(section.path)}: {problem}")
    return samples, report
