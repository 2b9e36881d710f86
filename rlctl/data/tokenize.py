"""Conversion of rows to `Task`s (GRPO) and `SupervisedSample`s (SFT), with a report of rows cut or left out.

A row with the messages column is a chat. Any other row is a prompt text, which becomes a user message if there is a
chat template.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlctl.config.data_schema import DatasetSection
from rlctl.config.errors import one_line
from rlctl.config.plugins import ENVIRONMENT_COLUMN
from rlctl.config.schema import SftSection
from rlctl.data.chat import Chat
from rlctl.data.datasets import Row, path_text
from rlctl.data.files import DataError
from rlctl.data.row_chat import chat_of_row
from rlctl.data.row_columns import describe_columns, row_tools, template_arguments
from rlctl.data.rows import MARKS, Messages, conversation, is_chat, is_json_chat, is_trained, question, unread_marks
from rlctl.data.supervised import chat_samples
from rlctl.data.tasks import SupervisedSample, Task
from rlctl.data.unwritten_messages import UnwrittenMessages

# Largest vocabulary that a warning writes out.
_FEW_TOKENS = 64


@dataclass
class LengthReport:
    """Counts of rows cut or left out for their lengths, and of other findings."""

    # Number of rows read.
    rows: int
    # Prompts or samples left out because the prompt is too long, and samples cut at their end.
    dropped: int = 0
    truncated: int = 0
    # Tokens of the longest row before anything was cut.
    longest: int = 0
    # Prompts without a reference answer.
    unanswered: int = 0
    # Trained turns without a token at which sampling stops.
    unended: int = 0
    # Rows that spell a control token, which is encoded as text. Place and token of the first such row.
    spelled: int = 0
    first_spelled: str = ""
    # Rows in which the chat template rewrites earlier turns once the chat goes on, and the samples of these rows.
    rewritten: int = 0
    rewritten_samples: int = 0
    # Rows with tools that the chat template does not show.
    unshown_tools: int = 0
    # Rows whose messages are joined without roles or separators, because there is no chat template.
    run_together: int = 0
    # Tokens that stand for text unknown to the tokenizer, rows with such tokens, and a text on the first such row.
    unknown_tokens: int = 0
    unknown_rows: int = 0
    first_unknown: str = ""
    # All tokens of the tokenizer that found unknown text, if they are few; else empty.
    small_vocabulary: str = ""
    # Turns with text behind their first end token. That text is not trained.
    cut_turns: int = 0
    # Turns whose thinking or calls the chat template does not write. These are not trained.
    silent_turns: int = 0
    # Turns that are not trained because of a mark (`rows.MARKS`), and rows that have no other turn.
    untrained_turns: int = 0
    untrained_rows: int = 0
    # Unusual way of reading, for example `tools in column 'functions'` -> number of rows.
    read: dict[str, int] = field(default_factory=dict)
    # Description of an ignored part of a row -> number of rows.
    ignored: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: "LengthReport") -> "LengthReport":
        """Return the sums of the counts of two sets of rows."""
        sums: dict[str, Any] = {"longest": max(self.longest, other.longest)}
        for name in ("first_spelled", "first_unknown", "small_vocabulary"):
            sums[name] = getattr(self, name) or getattr(other, name)
        for key, value in vars(self).items():
            if isinstance(value, dict):
                sums[key] = dict(Counter(value) + Counter(getattr(other, key)))
            elif key not in sums:
                sums[key] = value + getattr(other, key)
        return LengthReport(**sums)

    def __str__(self) -> str:
        """Return, for example, `2,300 rows; 12 dropped (prompt too long), 3 truncated; longest 1,024 tokens`."""
        cuts: list[str] = []
        if self.dropped:
            cuts.append(f"{self.dropped:,} dropped (prompt too long)")
        if self.truncated:
            cuts.append(f"{self.truncated:,} truncated")
        # In a run with an environment the prompts, and so their lengths, are known only when an episode begins.
        longest = f"; {', '.join(cuts) or 'none cut'}; longest {self.longest:,} tokens" if self.longest else ""
        findings = [f"{self.rows:,} rows{longest}"]
        if self.unanswered:
            findings.append(f"{self.unanswered:,} without an answer")
        if self.unended:
            turns = "1 turn ends" if self.unended == 1 else f"{self.unended:,} turns end"
            findings.append(f"{turns} with no token at which sampling stops")
        if self.rewritten:
            samples = f"{self.rewritten_samples:,} samples, each turn as it was while the last (sft.history=strip)"
            if self.rewritten == self.rewritten_samples:
                samples = "one sample each, turns kept as they were (sft.history=keep)"
            findings.append(f"{self.rewritten:,} with earlier turns that the chat template rewrites: {samples}")
        if self.untrained_turns:
            turns = "1 turn" if self.untrained_turns == 1 else f"{self.untrained_turns:,} turns"
            untrained_rows = f" ({self.untrained_rows:,} rows have no other)" if self.untrained_rows else ""
            findings.append(f"{turns} marked as not to be trained{untrained_rows}")
        findings += [f"{count:,} with {reading}" for reading, count in self.read.items()]
        if self.spelled:
            findings.append(f"{self.spelled:,} spell control tokens (encoded as text)")
        return "; ".join(findings)

    @property
    def warnings(self) -> list[str]:
        """One line for each finding that the user should look at."""
        lines: list[str] = []
        if self.unshown_tools:
            rows = f"{self.unshown_tools:,} row{' has' if self.unshown_tools == 1 else 's have'} tools"
            finding = f"{rows}, and the chat template shows none: the model does not see them"
            lines.append(f"{finding}; set another data.chat_template")
        if self.run_together:
            rows = f"{self.run_together:,} row{' has' if self.run_together == 1 else 's have'} several messages"
            lines.append(
                f"{rows}, and there is no chat template: joined without roles or anything between them; "
                "set data.chat_template to a Jinja file"
            )
        if self.cut_turns:
            turns = "1 turn spells" if self.cut_turns == 1 else f"{self.cut_turns:,} turns spell"
            lines.append(f"{turns} an end token: the text behind it is not trained (data.special_tokens=allow)")
        if self.silent_turns:
            turns = f"{self.silent_turns:,} turn{' has' if self.silent_turns == 1 else 's have'} thinking or tool calls"
            lines.append(f"{turns} that the chat template does not write: not trained; set another data.chat_template")
        if self.unknown_rows:
            line = f"{self.first_unknown}, which stands for text that the tokenizer does not know"
            if self.small_vocabulary:
                line += f" (it knows {self.small_vocabulary})"
            if self.unknown_rows > 1:
                line += f"; {self.unknown_rows:,} rows have {self.unknown_tokens:,} such tokens"
            lines.append(line)
        for reason, count in self.ignored.items():
            lines.append(f"{count:,} row{' has' if count == 1 else 's have'} {reason}")
        if self.spelled:
            rows = self.first_spelled
            if self.spelled > 1:
                rows += f" (and {self.spelled - 1:,} more row{'' if self.spelled == 2 else 's'})"
            finding = f"{rows}, which is encoded as text and not as that control token"
            lines.append(f"{finding}; data.special_tokens=allow makes tokens of all that rows spell")
        return lines

    def note_unknown(self, row: Row, tokens: Sequence[int], chat: Chat) -> None:
        """Count the tokens of a row that stand for text unknown to the tokenizer."""
        unknown = chat.unknown_token
        count = 0 if unknown is None else tokens.count(unknown)
        if count:
            self.unknown_tokens += count
            self.unknown_rows += 1
            name = chat.tokenizer.convert_ids_to_tokens(unknown)
            verb = "is" if count == 1 else "are"
            finding = f"{count:,} of {len(tokens):,} tokens of {row.origin} {verb} {name}"
            self.first_unknown = self.first_unknown or finding
            self.small_vocabulary = self.small_vocabulary or _list_small_vocabulary(chat)

    def note_row(self, row: Row, section: DatasetSection, messages: Messages, *, shows_tools: bool = True) -> None:
        """Count a row's unusual columns, read or ignored.

        messages: the row's chat, empty if there is none. shows_tools: the prompt shows the row's tools.
        """
        read, ignored = describe_columns(row, section, messages, shows_tools=shows_tools)
        if is_json_chat(row, section):
            read.append("messages as JSON text")
        for reading in read:
            self.read[reading] = self.read.get(reading, 0) + 1
        for reason in ignored:
            self.note_ignored(f"{reason}: passed over")

    def note_ignored(self, reason: str) -> None:
        """Count a row with an ignored part. reason: description of this part."""
        self.ignored[reason] = self.ignored.get(reason, 0) + 1

    def note_unwritten(self, roles: list[str]) -> None:
        """Count a row whose messages of these roles the chat template leaves out."""
        for role in dict.fromkeys(roles):
            message = f"a message of role {role} that the chat template leaves out: the model does not see it"
            self.note_ignored(f"{message}; set another data.chat_template")

    def note_marks(self, messages: Messages) -> None:
        """Count the turns excluded from training by a mark, and the unknown keys that look like a mark."""
        turns = [message for message in messages if message["role"] == "assistant"]
        self.untrained_turns += sum(not is_trained(turn) for turn in turns)
        unread: dict[str, Any] = {}
        for turn in turns:
            unread |= {key: turn[key] for key in unread_marks(turn)}
        for key, mark in unread.items():
            turn_text = f"a turn with {key}={json.dumps(mark)}, which is no mark that is read: it is trained"
            self.note_ignored(f"{turn_text}; marks are {', '.join(MARKS)}")

    def note_spelled(self, row: Row, spelled: list[str]) -> None:
        """Count a row if it spells control tokens. spelled: these tokens."""
        if spelled:
            self.spelled += 1
            self.first_spelled = self.first_spelled or f"{row.origin} spells {spelled[0]}"


def tokenize_prompts(
    rows: list[Row], section: DatasetSection, chat: Chat, max_prompt_length: int | None
) -> tuple[list[Task], LengthReport]:
    """Return tasks with ids such as `r17` for row 17, and a report.

    A prompt of more than `max_prompt_length` tokens is left out and counted. The answer is the answer column, or else
    the chat's last message if it is the assistant's. Raises DataError at the first bad row, or if no prompt is left.
    """
    report = LengthReport(len(rows))
    unwritten = UnwrittenMessages()
    prompts: list[Task] = []
    for row in rows:
        messages, answer = question(row, section)
        tools = row_tools(row)
        report.note_row(row, section, messages)
        with _name_place(row):
            own_chat = _chat_of(row, chat, report)
            prompt = own_chat.prompt(messages, tools)
            report.note_unwritten(unwritten.find_roles(own_chat, messages, tools, generation=True))
        if chat.template is None and len(messages) > 1:
            report.run_together += 1
        if tools and not chat.shows_tools:
            report.unshown_tools += 1
        tokens = prompt.tokens
        report.note_spelled(row, prompt.spelled)
        report.note_unknown(row, tokens, chat)
        report.longest = max(report.longest, len(tokens))
        if max_prompt_length is not None and len(tokens) > max_prompt_length:
            report.dropped += 1
        else:
            report.unanswered += answer is None
            task = Task(
                id=f"r{row.number}",
                tokens=tokens,
                text=prompt.text,
                answer=answer,
                row=row.values,
                source=row.source,
                messages=messages if is_chat(row, section) else [],
            )
            prompts.append(task)
    if not prompts:
        raise DataError(
            f"{path_text(section.path)}: every prompt is longer than data.max_prompt_length={max_prompt_length}"
        )
    return prompts, report


def tokenize_samples(
    rows: list[Row],
    section: DatasetSection,
    chat: Chat,
    turns: SftSection,
    max_prompt_length: int | None,
    max_length: int,
) -> tuple[list[SupervisedSample], LengthReport]:
    """Return samples with ids such as `r17` for row 17, cut after `max_length` tokens, and a report.

    If the template rewrites turns, a row has further samples, with ids such as `r17.1`. A sample whose first trained
    token comes after `max_prompt_length` or `max_length` tokens is left out and counted. turns: `mask` chooses the
    trained turns, `history` decides on rewritten turns. Raises DataError at the first bad row, or if no sample is left.
    """
    report = LengthReport(len(rows))
    unwritten = UnwrittenMessages()
    samples: list[SupervisedSample] = []
    for row in rows:
        messages = conversation(row, section)
        tools = row_tools(row)
        report.note_row(row, section, messages)
        report.note_marks(messages)
        with _name_place(row):
            own_chat = _chat_of(row, chat, report)
            row_samples = chat_samples(own_chat, messages, turns.mask, turns.history, tools)
            report.note_unwritten(unwritten.find_roles(own_chat, messages, tools, generation=False))
        report.untrained_rows += not row_samples.rows
        # Without a template a question and its answer are usual, so only longer chats count.
        report.run_together += chat.template is None and len(messages) > 2
        if tools and not chat.shows_tools:
            report.unshown_tools += 1
        report.cut_turns += row_samples.cut
        report.silent_turns += row_samples.silent
        report.unended += row_samples.unended
        if row_samples.rewritten:
            report.rewritten += 1
            report.rewritten_samples += len(row_samples.rows)
        report.note_spelled(row, chat.find_spelled(messages, tools))
        # The last sample has the whole chat.
        if row_samples.rows:
            report.note_unknown(row, row_samples.rows[-1][0], chat)
        for number, (tokens, mask) in enumerate(row_samples.rows):
            report.longest = max(report.longest, len(tokens))
            # Index of the first trained token.
            prompt_length = max(int(mask.argmax()), 1)
            if prompt_length > (max_prompt_length or max_length) or prompt_length >= max_length:
                report.dropped += 1
                continue
            report.truncated += len(tokens) > max_length
            sample = SupervisedSample(
                id=f"r{row.number}.{number}" if number else f"r{row.number}",
                tokens=np.array(tokens[:max_length], np.int32),
                mask=mask[:max_length],
                source=row.source,
            )
            samples.append(sample)
    if not samples and report.dropped:
        limit = f"fills the longest sequence of {max_length:,} tokens (model.max_length)"
        if max_prompt_length is not None and max_prompt_length < max_length:
            limit = f"is longer than data.max_prompt_length={max_prompt_length}"
        raise DataError(f"{path_text(section.path)}: no sample is left: every prompt {limit}")
    return samples, report


def _list_small_vocabulary(chat: Chat) -> str:
    """Return the tokens of a tokenizer with at most `_FEW_TOKENS`, special ones left out; empty for a larger one."""
    vocabulary = chat.tokenizer.get_vocab()
    if len(vocabulary) > _FEW_TOKENS:
        return ""
    tokens = sorted(set(vocabulary) - set(chat.tokenizer.all_special_tokens))
    return " ".join(token if token.strip() else repr(token) for token in tokens)


def read_tasks(
    rows: list[Row], section: DatasetSection, chat: Chat, choices: Collection[str]
) -> tuple[list[Task], LengthReport]:
    """Return tasks for environments, with ids such as `r17` for row 17, and a report. The tasks have no tokens.

    choices: keys of the environments. With several, a row's column `environment` must name one. Raises DataError at the
    first bad row.
    """
    report = LengthReport(len(rows))
    tasks: list[Task] = []
    for row in rows:
        messages, answer = question(row, section, needs_prompt=False)
        report.note_row(row, section, messages, shows_tools=False)
        if len(choices) > 1 and (key := row.values.get(ENVIRONMENT_COLUMN)) not in [*choices]:
            problem = f"column {ENVIRONMENT_COLUMN!r} must be one of {', '.join(choices)}, not {key!r}"
            raise DataError(f"{row.origin}: {problem} (environment.choices)")
        with _name_place(row):
            # Only to report wrong and unknown arguments of the template. The players read these arguments later.
            _chat_of(row, chat, report)
        task = Task(
            id=f"r{row.number}",
            tokens=[],
            text="\n".join(message["content"] for message in messages),
            answer=answer,
            row=row.values,
            source=row.source,
            messages=messages,
        )
        tasks.append(task)
    return tasks, report


def _chat_of(row: Row, chat: Chat, report: LengthReport) -> Chat:
    """Return the chat with a row's arguments of the template. Count the arguments that the template does not take."""
    for name in chat.unknown_kwargs(template_arguments(row.values)):
        report.note_ignored(f"chat_template_kwargs.{name}, which is no argument of the chat template: passed over")
    return chat_of_row(chat, row.values)


@contextmanager
def _name_place(row: Row) -> Iterator[None]:
    """Turn any error inside into a DataError that begins with the row's place."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{row.origin}: {one_line(error)}") from error
    except Exception as error:  # Any error of a template, or of a tokenizer that refuses the text.
        problem = f"the chat template refuses the row: {one_line(error)}"
        raise DataError(f"{row.origin}: {problem}; set another data.chat_template") from error
