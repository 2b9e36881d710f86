"""Chats as samples to imitate: each trained turn reads as the chat template writes it while it is the last one.

The mask is exact by construction. The rendered chat is cut where each trained turn starts and ends. Each piece is
tokenized behind the text before it: these are the tokens of a model that generates.

Some templates write a turn otherwise once the chat goes on: Qwen3's drops its thinking. Turns that stay as they were
share a sample. Where one does not, `history` decides: strip begins another sample, whose earlier turns read as the
template writes them now, as they do when the model is asked; keep goes on in the same sample, as GRPO does.
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.data.chat import EMPTY_PROMPT, Chat, Tools
from rlctl.data.control_tokens import unmarked
from rlctl.data.files import DataError
from rlctl.data.rows import Messages, is_trained

Tokens = tuple[list[int], NDArray[np.bool_]]
History = Literal["keep", "strip"]

_OPEN = "<think>"
# Fields of a message that hold its thinking, apart from its answer.
_THINKING_FIELDS = ("reasoning_content", "reasoning", "thinking")
# A message up to the end of its thinking, and the white space behind that.
_THINKING_HEAD = re.compile(r"\s*(?:<think>)?(.*?)</think>(\s*)", re.DOTALL)


@dataclass(frozen=True)
class TrainedTurn:
    """One turn of the assistant, as text with marks (`ControlTokens`)."""

    # Index of its message.
    index: int
    # Prompt that it follows.
    before: str
    # The turn, up to its end token.
    said: str
    # True if it has text behind its first end token, which is not trained.
    cut: bool = False
    # True if its message has thinking or calls that the template does not write, and that are not trained.
    silent: bool = False

    @property
    def whole(self) -> str:
        """The chat up to the end of the turn."""
        return self.before + self.said


@dataclass(frozen=True)
class ChatSamples:
    """Samples of one chat."""

    # int32-valued ids and bool [T] of each: true on the trained turns with their end tokens.
    rows: list[Tokens]
    # True if the template writes an earlier trained turn otherwise once the chat goes on.
    rewritten: bool
    # Trained turns with text behind their first end token.
    cut: int
    # Trained turns whose thinking or calls the template does not write.
    silent: int
    # Trained turns without a token at which sampling stops.
    unended: int


def chat_samples(
    chat: Chat, messages: Messages, train: Literal["all", "last"], history: History, tools: Tools = ()
) -> ChatSamples:
    """Return the samples of a chat. Each trained turn is trained in one sample.

    train: all assistant turns, or the last. Turns that a mark leaves out are not trained: a chat may have no sample.
    tools: JSON schemas that the prompt shows. Raises DataError if there is no assistant turn, or if the template does
    not write one as the model would say it.
    """
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not indices:
        raise DataError("no assistant message to train on")
    chosen = indices[-1:] if train == "last" else indices
    turns = [_written_turn(chat, messages, index, tools) for index in chosen if is_trained(messages[index])]
    groups: list[list[TrainedTurn]] = []
    for turn in turns:
        if groups and turn.before.startswith(groups[-1][-1].whole):
            groups[-1].append(turn)
        else:
            groups.append([turn])
    is_rewritten = len(groups) > 1
    if history == "keep" and is_rewritten:
        groups = [turns]
        samples = [_kept_turns(chat, messages, turns, tools)]
    else:
        samples = [_prompt_parts(chat, group) for group in groups]
    for pieces, group in zip(samples, groups, strict=True):
        _end_sample(chat, pieces, group[-1])
    trained = [tokens for pieces in samples for tokens, is_trained in pieces if is_trained]
    return ChatSamples(
        rows=[_tokens_and_mask(chat, pieces) for pieces in samples],
        rewritten=is_rewritten,
        cut=sum(turn.cut for turn in turns),
        silent=sum(turn.silent for turn in turns),
        unended=sum(not tokens or tokens[-1] not in chat.ends.named for tokens in trained),
    )


def _prompt_parts(chat: Chat, turns: list[TrainedTurn]) -> list[tuple[list[int], bool]]:
    """Return (tokens, true if trained on) of turns that all stand in the last one's prompt."""
    pieces: list[tuple[list[int], bool]] = []
    position = 0
    for turn in turns:
        opening = chat.encode(turn.before[position:], turn.before[:position])
        pieces += [(opening, False), (chat.encode(turn.said, turn.before), True)]
        position = len(turn.whole)
    return pieces


def _kept_turns(chat: Chat, messages: Messages, turns: list[TrainedTurn], tools: Tools) -> list[tuple[list[int], bool]]:
    """Return the same of turns that each follow the earlier ones as they were while they were the last."""
    pieces = _prompt_parts(chat, turns[:1])
    stops = frozenset(chat.ends.stops)
    for last, turn in pairwise(turns):
        added = messages[last.index + 1 : turn.index]
        link = chat.link(messages[: last.index], added, tools)
        pieces += [(link.after(pieces[-1][0], stops), False), (chat.encode(turn.said, turn.before), True)]
    return pieces


def _end_sample(chat: Chat, pieces: list[tuple[list[int], bool]], last: TrainedTurn) -> None:
    """Put the end token behind a sample whose last turn has none. Raises DataError if no token ends an answer."""
    tokens = pieces[-1][0]
    if chat.end_marker(last.whole) is not None or (tokens and tokens[-1] in chat.ends.named):
        return
    if chat.ends.trained is None:
        raise DataError("no token ends an answer: the tokenizer has no eos_token; set it in tokenizer_config.json")
    tokens.append(chat.ends.trained)


def _tokens_and_mask(chat: Chat, pieces: list[tuple[list[int], bool]]) -> Tokens:
    """Return tokens and mask of a sample, with the tokens that begin it. Raises DataError for an empty prompt."""
    tokens = [token for piece, _ in pieces for token in piece]
    mask = [trained for piece, trained in pieces for _ in piece]
    begun = chat.begun(tokens)
    mask = [False] * (len(begun) - len(tokens)) + mask
    if mask[0]:
        raise DataError(EMPTY_PROMPT)
    return begun, np.array(mask, dtype=np.bool_)


def _written_turn(chat: Chat, messages: Messages, index: int, tools: Tools) -> TrainedTurn:
    """Return a turn as the template writes it while it is the last one."""
    before = chat.render(messages[:index], generation=True, tools=tools)
    whole = chat.render(messages[: index + 1], generation=False, tools=tools)
    bare = before.rstrip().removesuffix(_OPEN)
    thinking = _thinking(chat, messages[index], opened=bare != before.rstrip())
    start = len(before) if whole.startswith(before) else len(bare)
    end = _end_of_turn(chat, whole, start)
    said, cut = whole[start:end], bool(whole[end:].strip())
    if chat.template is not None and chat.end_marker(whole) is None:
        said += chat.following_end(messages[:index], messages[index + 1 : index + 2], tools)
    if whole.startswith(before) and (thinking is None or thinking[1].strip() in said):
        return TrainedTurn(index, before, said, cut, _is_silent(messages[index], unmarked(said)))
    if not whole.startswith(bare):
        raise DataError(
            f"the chat template is not prefix-stable at message {index + 1}: what it writes before the assistant's "
            "turn changes with the turn; set another data.chat_template"
        )
    if thinking is None:
        raise DataError(
            f"the chat template opens the answer of message {index + 1} with {_OPEN}, and the message has no thinking: "
            f"write it as {_OPEN}...</think> before the answer, or set data.chat_template to a file that opens none"
        )
    said = _with_thinking(before, thinking, said)
    return TrainedTurn(index, before, said, cut, _is_silent(messages[index], unmarked(said)))


def _is_silent(message: dict[str, Any], said: str) -> bool:
    """Return True if `said`, a turn as it is written, lacks the thinking of a field of its own, or a call's name."""
    thoughts = (message.get(name) for name in _THINKING_FIELDS)
    calls = message.get("tool_calls")
    functions = [each.get("function", each) for each in calls if isinstance(each, dict)] if calls else []
    names = [each.get("name") for each in functions if isinstance(each, dict)]
    wanted = [each.strip() for each in (*thoughts, *names) if isinstance(each, str)]
    return any(each not in said for each in wanted)


def _thinking(chat: Chat, message: dict[str, Any], opened: bool) -> re.Match[str] | None:
    """Return the thinking of a message. opened: its prompt opens one, so that a separate field counts too."""
    marked = chat.marked(message)
    fields = (marked.get(name) for name in _THINKING_FIELDS)
    apart = next((field for field in fields if isinstance(field, str) and field.strip()), None)
    if found := _THINKING_HEAD.match(marked["content"]):
        return found
    return _THINKING_HEAD.match(f"{_OPEN}\n{apart}\n</think>\n\n") if opened and apart else None


def _with_thinking(before: str, thinking: re.Match[str], said: str) -> str:
    """Return a turn whose thinking the template drops, with its thinking, as the model says it after `before`."""
    opened = before.rstrip().endswith(_OPEN)
    thought = thinking[1].lstrip() if opened and before[-1:].isspace() else thinking[1]
    return f"{'' if opened else _OPEN}{thought}</think>{thinking[2]}{said.lstrip()}"


def _end_of_turn(chat: Chat, whole: str, start: int) -> int:
    """Return where the turn ends that begins at `start`: after its end token, before the template's white space."""
    marker = chat.end_marker(whole)
    if marker is not None and marker in whole[start:]:
        return whole.index(marker, start) + len(marker)
    return len(whole.rstrip()) if chat.template else len(whole)
