"""From rows to what is drawn: `Prompt`s (GRPO) and `Sample`s (SFT), and a report of what their lengths cost.

A row is a chat if it has the messages column, else a prompt text (a user message where there is a template).
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlctl.config.schema import DatasetSection
from rlctl.data.chat import Chat, Messages
from rlctl.data.datasets import DataError, Row
from rlctl.data.prompts import Prompt, Sample


@dataclass
class LengthReport:
    """What was cut, in rows; lengths in tokens. `longest`: of all rows, before anything was cut."""

    rows: int
    dropped: int = 0
    truncated: int = 0
    longest: int = 0

    def __str__(self) -> str:
        """`2,300 rows; 12 dropped (prompt too long), 3 truncated; longest 1,024 tokens`."""
        cuts = [f"{self.dropped:,} dropped (prompt too long)"] * bool(self.dropped)
        cuts += [f"{self.truncated:,} truncated"] * bool(self.truncated)
        return f"{self.rows:,} rows; {', '.join(cuts) or 'none cut'}; longest {self.longest:,} tokens"


def tokenize_prompts(
    rows: list[Row], section: DatasetSection, chat: Chat, max_prompt_length: int | None
) -> tuple[list[Prompt], LengthReport]:
    """Prompts named `r{row}`; those of more than `max_prompt_length` tokens are left out and counted.

    The answer is the answer column or, if there is none, the chat's trailing assistant message.
    Raises DataError at the first bad row, or if no prompt is left.
    """
    report = LengthReport(len(rows))
    prompts: list[Prompt] = []
    for row in rows:
        messages, answer = _question(row, section)
        with_origin = _At(row)
        with with_origin:
            text = chat.prompt_text(messages)
        tokens = chat.prompt_tokens(text)
        report.longest = max(report.longest, len(tokens))
        if max_prompt_length is not None and len(tokens) > max_prompt_length:
            report.dropped += 1
        elif not tokens:
            raise DataError(f"{row.origin}: the prompt is empty")
        else:
            prompts.append(Prompt(f"r{row.number}", tokens, text, answer, row.values))
    if not prompts:
        raise DataError(f"{section.path}: every prompt is longer than data.max_prompt_length={max_prompt_length}")
    return prompts, report


def tokenize_samples(
    rows: list[Row],
    section: DatasetSection,
    chat: Chat,
    train: Literal["all", "last"],
    max_prompt_length: int | None,
    max_length: int,
) -> tuple[list[Sample], LengthReport]:
    """Samples named `r{row}`, cut behind `max_length` tokens; what is trained on follows `train` (sft.mask).

    A sample whose first trained token stands behind `max_prompt_length` or `max_length` is left out and counted.
    Raises DataError at the first bad row, or if no sample is left.
    """
    report = LengthReport(len(rows))
    samples: list[Sample] = []
    for row in rows:
        with _At(row):
            tokens, mask = chat.chat_tokens(_conversation(row, section), train)
        report.longest = max(report.longest, len(tokens))
        prompt_length = max(int(mask.argmax()), 1)
        if prompt_length > (max_prompt_length or max_length) or prompt_length >= max_length:
            report.dropped += 1
            continue
        report.truncated += len(tokens) > max_length
        samples.append(Sample(f"r{row.number}", np.array(tokens[:max_length], np.int32), mask[:max_length]))
    if not samples:
        raise DataError(f"{section.path}: no sample is left: every prompt is longer than the limit")
    return samples, report


class _At:
    """Puts the row's place before whatever goes wrong inside."""

    def __init__(self, row: Row) -> None:
        self._origin = row.origin

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            raise DataError(f"{self._origin}: {error}") from error


def _question(row: Row, section: DatasetSection) -> tuple[Messages, str | None]:
    """The messages to answer, and the reference answer."""
    answer = row.values.get(section.answer_key)
    messages = _messages(row, section)
    if messages[-1]["role"] == "assistant":
        answer = messages[-1]["content"] if answer is None else answer
        messages = messages[:-1]
    if not messages:
        raise DataError(f"{row.origin}: nothing before the assistant's message")
    return messages, None if answer is None else str(answer)


def _conversation(row: Row, section: DatasetSection) -> Messages:
    """The whole chat; a prompt text is answered by the answer column."""
    messages = _messages(row, section)
    if row.values.get(section.messages_key) is not None:
        return messages
    answer = row.values.get(section.answer_key)
    if answer is None:
        raise DataError(f"{row.origin}: no column {section.answer_key!r} to train on{_columns(row)}")
    return [*messages, {"role": "assistant", "content": str(answer)}]


def _messages(row: Row, section: DatasetSection) -> Messages:
    """The messages column, checked, or the prompt text as a user message."""
    messages = row.values.get(section.messages_key)
    if messages is None:
        prompt = row.values.get(section.prompt_key)
        if not isinstance(prompt, str):
            wanted = f"column {section.prompt_key!r} of text, nor {section.messages_key!r}"
            raise DataError(f"{row.origin}: no {wanted}{_columns(row)}")
        return [{"role": "user", "content": prompt}]
    whole = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in messages)
    if not whole or not messages:
        raise DataError(f"{row.origin}: {section.messages_key!r} must be a list of {{role, content}}")
    return list(messages)


def _columns(row: Row) -> str:
    return f" (the row has: {', '.join(map(repr, row.values)) or 'nothing'})"
