"""Chats as samples to imitate (SFT). Each trained turn is written as the chat template writes a last turn.

The mask is exact, because the rendered chat is cut where each trained turn starts and ends. Each piece is tokenized
with the text before it as context, so its tokens are those that a model would generate.

Some templates rewrite a turn once the chat goes on: Qwen3's drops the turn's thinking. Turns that are not rewritten
share a sample. If a turn is rewritten, `history` decides. strip: the next trained turn begins another sample, in which
earlier turns are rewritten as in the prompts of inference. keep: all turns stay as they were in one sample, as in GRPO.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.data.chat import EMPTY_PROMPT, Chat, Tools
from rlctl.data.control_tokens import remove_marks
from rlctl.data.files import DataError
from rlctl.data.rows import Messages, is_trained

Tokens = tuple[list[int], NDArray[np.bool_]]
History = Literal["keep", "strip"]

_OPEN = "<think>"
# Fields of a message that hold its thinking apart from its content.
_THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# Thinking at the beginning of a message, and the white space behind the thinking.
_THINKING_HEAD = re.compile(r"\s*(?:<think>)?(.*?)</think>(\s*)", re.DOTALL)


@dataclass(frozen=True)
class TrainedTurn:
    """One trained turn of the assistant, as text with marks (`ControlTokens`)."""

    # Index of the turn's message.
    index: int
    # Rendered prompt before the turn.
    prompt: str
    # Text of the turn, its end token included.
    text: str
    # True if the turn has text behind its first end token. That text is not trained.
    is_cut: bool = False
    # True if the message has thinking or calls that the template does not write. They are not trained.
    is_silent: bool = False

    @property
    def chat_text(self) -> str:
        """Text of the chat up to the end of the turn."""
        return self.prompt + self.text


@dataclass(frozen=True)
class ChatSamples:
    """Samples of one chat."""

    # (token ids, mask bool [T]) of each sample. The mask is true on trained turns and on their end tokens.
    rows: list[Tokens]
    # True if the template rewrites an earlier trained turn once the chat goes on.
    rewritten: bool
    # Number of trained turns with text behind their first end token.
    cut: int
    # Number of trained turns whose thinking or calls the template does not write.
    silent: int
    # Number of trained turns without a token at which sampling stops.
    unended: int


def chat_samples(
    chat: Chat, messages: Messages, train: Literal["all", "last"], history: History, tools: Tools = ()
) -> ChatSamples:
    """Return the samples of a chat. Each trained turn is trained in exactly one sample.

    train: train all assistant turns, or the last one. A turn with a mark of 0 (`rows.MARKS`) is not trained, so a chat
    may have no sample. tools: JSON schemas that the prompt shows. Raises DataError if there is no assistant turn, or if
    the template does not write a turn as the model would generate it.
    """
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not indices:
        raise DataError("no assistant message to train on")
    chosen = indices[-1:] if train == "last" else indices
    turns = [_written_turn(chat, messages, index, tools) for index in chosen if is_trained(messages[index])]
    # Turns that share a sample: the prompt of each turn begins with the chat up to the turn before.
    groups: list[list[TrainedTurn]] = []
    for turn in turns:
        if groups and turn.prompt.startswith(groups[-1][-1].chat_text):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    is_rewritten = len(groups) > 1
    # (tokens, is trained) of each piece of each sample.
    samples: list[list[tuple[list[int], bool]]]
    if history == "keep" and is_rewritten:
        groups = [turns]
        samples = [_kept_turns(chat, messages, turns, tools)]
    else:
        samples = [_prompt_parts(chat, group) for group in groups]
    for pieces, group in zip(samples, groups, strict=True):
        _end_sample(chat, pieces, group[-1])
    unended = 0
    for pieces in samples:
        trained_turns = [tokens for tokens, trained in pieces if trained]
        unended += sum(not tokens or tokens[-1] not in chat.ends.by_id for tokens in trained_turns)
    return ChatSamples(
        rows=[_tokens_and_mask(chat, pieces) for pieces in samples],
        rewritten=is_rewritten,
        cut=sum(turn.is_cut for turn in turns),
        silent=sum(turn.is_silent for turn in turns),
        unended=unended,
    )


def _prompt_parts(chat: Chat, turns: list[TrainedTurn]) -> list[tuple[list[int], bool]]:
    """Return (tokens, is trained) of each piece of a sample, whose last turn's prompt contains all other turns."""
    pieces: list[tuple[list[int], bool]] = []
    position = 0
    for turn in turns:
        opening = chat.encode(turn.prompt[position:], turn.prompt[:position])
        pieces += [(opening, False), (chat.encode(turn.text, turn.prompt), True)]
        position = len(turn.chat_text)
    return pieces


def _kept_turns(chat: Chat, messages: Messages, turns: list[TrainedTurn], tools: Tools) -> list[tuple[list[int], bool]]:
    """Return (tokens, is trained) of each piece of a sample in which no earlier turn is rewritten."""
    pieces = _prompt_parts(chat, turns[:1])
    stops = frozenset(chat.ends.stops)
    for last, turn in pairwise(turns):
        added = messages[last.index + 1 : turn.index]
        link = chat.link(messages[: last.index], added, tools)
        between = link.tokens_after(pieces[-1][0], stops)
        pieces += [(between, False), (chat.encode(turn.text, turn.prompt), True)]
    return pieces


def _end_sample(chat: Chat, pieces: list[tuple[list[int], bool]], last: TrainedTurn) -> None:
    """Append the end token if the last turn of a sample has none. Raises DataError if no token ends an answer."""
    tokens = pieces[-1][0]
    if chat.end_marker(last.chat_text) is not None or (tokens and tokens[-1] in chat.ends.by_id):
        return
    if chat.ends.trained is None:
        raise DataError("no token ends an answer: the tokenizer has no eos_token; set it in tokenizer_config.json")
    tokens.append(chat.ends.trained)


def _tokens_and_mask(chat: Chat, pieces: list[tuple[list[int], bool]]) -> Tokens:
    """Join pieces to the tokens and the mask of a sample, behind the tokenizer's first tokens if they are missing.

    Raises DataError for an empty prompt.
    """
    piece_tokens: list[int] = []
    piece_mask: list[bool] = []
    for tokens, trained in pieces:
        piece_tokens += tokens
        piece_mask += [trained] * len(tokens)
    sample_tokens = chat.add_prefix(piece_tokens)
    prefix_mask = [False] * (len(sample_tokens) - len(piece_tokens))
    mask = np.array(prefix_mask + piece_mask, dtype=np.bool_)
    if mask[0]:
        raise DataError(EMPTY_PROMPT)
    return sample_tokens, mask


def _written_turn(chat: Chat, messages: Messages, index: int, tools: Tools) -> TrainedTurn:
    """Return the turn of message `index`, as the template renders it when the message is the last. Raises DataError."""
    prompt = chat.render(messages[:index], generation=True, tools=tools)
    chat_text = chat.render(messages[: index + 1], generation=False, tools=tools)
    # The prompt without the opening of thinking, which the template may write only in a prompt.
    prompt_without_think = prompt.rstrip().removesuffix(_OPEN)
    thinking = _thinking(chat, messages[index], opened=prompt_without_think != prompt.rstrip())
    start = len(prompt) if chat_text.startswith(prompt) else len(prompt_without_think)
    end = _end_of_turn(chat, chat_text, start)
    text = chat_text[start:end]
    # True if the template writes more text behind the turn, which is left out.
    is_cut = bool(chat_text[end:].strip())
    if chat.template is not None and chat.end_marker(chat_text) is None:
        # Some templates end a turn only when the next message follows.
        text += chat.following_end(messages[:index], messages[index + 1 : index + 2], tools)
    keeps_thinking = thinking is None or thinking[1].strip() in text
    # The usual case. Below are templates that open thinking in the prompt, or leave out the thinking of a written turn.
    if chat_text.startswith(prompt) and keeps_thinking:
        is_silent = _is_silent(messages[index], remove_marks(text))
        return TrainedTurn(index=index, prompt=prompt, text=text, is_cut=is_cut, is_silent=is_silent)
    if not chat_text.startswith(prompt_without_think):
        raise DataError(
            f"the chat template is not prefix-stable at message {index + 1}: what it writes before the assistant's "
            "turn changes with the turn; set another data.chat_template"
        )
    if thinking is None:
        raise DataError(
            f"the chat template opens the answer of message {index + 1} with {_OPEN}, and the message has no thinking: "
            f"write it as {_OPEN}...</think> before the answer, or set data.chat_template to a file that opens none"
        )
    text = _with_thinking(prompt, thinking, text)
    is_silent = _is_silent(messages[index], remove_marks(text))
    return TrainedTurn(index=index, prompt=prompt, text=text, is_cut=is_cut, is_silent=is_silent)


def _is_silent(message: dict[str, Any], turn_text: str) -> bool:
    """Return True if the rendered turn lacks the message's thinking, or the name of one of its tool calls."""
    parts = [message.get(name) for name in _THINKING_FIELDS]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts.append(function.get("name"))
    return any(isinstance(part, str) and part.strip() not in turn_text for part in parts)


def _thinking(chat: Chat, message: dict[str, Any], opened: bool) -> re.Match[str] | None:
    """Return the thinking of a message; None if there is none.

    The thinking in a field, apart from the content, counts only if `opened`: the prompt opens the thinking.
    """
    marked = chat.mark_message(message)
    if in_content := _THINKING_HEAD.match(marked["content"]):
        return in_content
    fields = (marked.get(name) for name in _THINKING_FIELDS)
    thinking = next((field for field in fields if isinstance(field, str) and field.strip()), None)
    return _THINKING_HEAD.match(f"{_OPEN}\n{thinking}\n</think>\n\n") if opened and thinking else None


def _with_thinking(prompt: str, thinking: re.Match[str], text: str) -> str:
    """Return a turn's text with the thinking that the template drops, as the model generates it behind `prompt`."""
    opened = prompt.rstrip().endswith(_OPEN)
    thought = thinking[1].lstrip() if opened and prompt[-1:].isspace() else thinking[1]
    return f"{'' if opened else _OPEN}{thought}</think>{thinking[2]}{text.lstrip()}"


def _end_of_turn(chat: Chat, chat_text: str, start: int) -> int:
    """Return the end position of the turn that begins at `start`: behind its end token, or else before last blanks."""
    marker = chat.end_marker(chat_text)
    if marker is not None and marker in chat_text[start:]:
        return chat_text.index(marker, start) + len(marker)
    return len(chat_text.rstrip()) if chat.template else len(chat_text)
