"""Chats as text and tokens: a prompt as the model reads it, and the tokens between two of its turns.

`rows.py` reads the tool calls of a row's messages; `rollout/conversation.py` keeps the tokens of a conversation.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

from rlctl.config.data_schema import DataSection
from rlctl.config.errors import ModelError, one_line
from rlctl.config.json_files import read_object
from rlctl.data.control_tokens import ControlTokens, SpecialTokens, remove_marks
from rlctl.data.end_tokens import EndTokens, TurnEnd, find_ends, find_turn_end
from rlctl.data.files import DataError
from rlctl.data.load_tokenizer import load_tokenizer
from rlctl.data.rows import Messages
from rlctl.data.templates import Template, choose_template, find_template, unknown_arguments

# JSON schemas of functions, as chat templates take them.
Tools = Sequence[dict[str, Any]]

# Stands for the text of a turn, to find the template's text around a turn.
_SURROGATE = re.compile("[\ud800-\udfff]")
_ANSWER_TEXT = "the-text-of-an-answer"
# Most sets of tools that a chat keeps marked.
_TOOL_SETS = 16
# Most variants of a chat that `with_kwargs` keeps.
_ARGUMENT_SETS = 16
EMPTY_PROMPT = "the prompt is empty, and the tokenizer puts no token before it: an answer has nothing to follow"


@dataclass(frozen=True)
class TurnLink:
    """Tokens between two of the assistant's turns; none is sampled."""

    # Close a turn that was cut before it ended.
    close: list[int]
    # The messages in between, and the opening of the next turn.
    between: list[int]
    # First of `between`, where that is a control token and no other ends a turn, as GLM-4.5's mark of the next role.
    mark: int | None = None

    def tokens_after(self, tokens: Sequence[int], stops: Collection[int]) -> list[int]:
        """Return the tokens that follow a turn of these `tokens`. stops: tokens that end a turn."""
        if tokens and tokens[-1] == self.mark:
            return self.between[1:]
        if tokens and tokens[-1] in stops:
            return self.between
        return self.close + self.between


@dataclass(frozen=True)
class Prompt:
    """Text that the model continues, and its tokens."""

    text: str
    tokens: list[int]
    # Control tokens spelled in the messages, and encoded as text, in order.
    spelled: list[str]


@dataclass(frozen=True)
class Chat:
    """Rules by which prompts and chats become text and tokens.

    Text of messages and tools comes from outside: it yields no added token of the tokenizer (`ControlTokens`).
    """

    tokenizer: Any
    # None: plain text without roles.
    template: Template | None
    system_prompt: str | None
    # Folder of the model, whose end tokens count; None: not on this machine.
    folder: Path | None = None
    # data.special_tokens: allow reads spelled tokens as control tokens.
    special_tokens: SpecialTokens = "text"
    # Arguments of the template, such as enable_thinking.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def unknown_token(self) -> int | None:
        """Token in place of text that the tokenizer does not know. None: it has none, or that token delimits texts."""
        token: int | None = self.tokenizer.unk_token_id
        return None if token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id) else token

    def with_kwargs(self, arguments: Mapping[str, Any]) -> "Chat":
        """Return this chat with further arguments of its template, as a row or a request names them.

        They come from outside: a control token that they spell is text. Raises DataError for a name that the template
        does not take.
        """
        if not arguments:
            return self
        key = json.dumps(arguments, sort_keys=True, default=str)
        if key in self._variants:
            return self._variants[key]
        for name, reason in self.unknown_kwargs(arguments).items():
            raise DataError(f"chat_template_kwargs: {name} {reason}")
        further = arguments if self.special_tokens == "allow" else self._control.mark_all(dict(arguments))
        variant = replace(self, template_kwargs={**self.template_kwargs, **further})
        # The tokenizer's facts take long to find, and an engine stops at the same tokens for all chats of a run.
        vars(variant).update({"_control": self._control, "_turn_end": self._turn_end, "ends": self.ends})
        while len(self._variants) >= _ARGUMENT_SETS:
            self._variants.pop(next(iter(self._variants)), None)
        self._variants[key] = variant
        return variant

    def unknown_kwargs(self, names: Collection[str]) -> dict[str, str]:
        """Return the reason for each name that is no argument of the template."""
        if self.template is None:
            return dict.fromkeys(names, "needs a chat template: this tokenizer has none, or it is set to none")
        return unknown_arguments(names, self.template)

    @cached_property
    def _variants(self) -> "dict[str, Chat]":
        """Chats of `with_kwargs`, by the JSON of their arguments."""
        return {}

    def prompt(self, messages: Messages, tools: Tools = ()) -> Prompt:
        """Return the prompt that the model continues: the chat and the opening of the assistant's turn.

        tools: JSON schemas of the functions that it may call. Raises DataError for no token at all.
        """
        text = self.render(messages, generation=True, tools=tools)
        return Prompt(remove_marks(text), self.prompt_tokens(text), self.find_spelled(messages, tools))

    def prompt_text(self, messages: Messages, tools: Tools = ()) -> str:
        """Return the text of a prompt. Its tokens are those of `prompt`: the text alone may spell further ones."""
        return remove_marks(self.render(messages, generation=True, tools=tools))

    def find_spelled(self, messages: Messages, tools: Tools = ()) -> list[str]:
        """Return the control tokens spelled in messages and tools, and encoded as text, in order."""
        if self.special_tokens == "allow":
            return []
        return self._control.find_spelled([*map(self.mark_message, messages), *self._control.mark_all(list(tools))])

    def prompt_tokens(self, text: str) -> list[int]:
        """Return the tokens of a rendered text. A template writes the beginning-of-text token; plain text gets it here.

        Raises DataError for no token at all.
        """
        tokens = self.add_prefix(self.encode(text))
        if not tokens:
            raise DataError(EMPTY_PROMPT)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def turn_text(self, tokens: Sequence[int]) -> str:
        """Return the text of a sampled turn, without the token that ended it."""
        return self.decode(tokens[:-1] if tokens and tokens[-1] in self.ends.by_id else tokens)

    @cached_property
    def ends(self) -> EndTokens:
        """Tokens that end an answer. Raises DataError."""
        ends = find_ends(self.tokenizer, self._turn_end.token, self.folder)
        warnings = [*ends.warnings, *self._turn_end.warnings]
        bos = self.tokenizer.bos_token
        rendered = self._turn_end.rendered
        if rendered and self._prefix and bos and not rendered.startswith(bos):
            text = f"the chat template writes no {bos}, which the tokenizer puts before text: chats begin without it"
            warnings.append(text)
        rows = self._embedding_rows
        if rows is not None:
            # Added tokens may have any id.
            base = self.tokenizer.vocab_size
            beyond = sum(token >= max(base, rows) for token in self.tokenizer.added_tokens_decoder)
            beyond += max(0, base - rows)
            text = f"the tokenizer has {beyond:,} tokens beyond the model's vocabulary of {rows:,}"
            warnings.append(f"{text}: text that yields one is refused")
        return replace(ends, warnings=tuple(warnings))

    def link(self, messages: Messages, added: Messages, tools: Tools = ()) -> TurnLink:
        """Return the tokens between the assistant's turn that follows `messages` and its next one.

        added: the messages between the two. The turn itself is not rendered: its tokens are those that were sampled.
        Raises DataError if the template cannot go on after a turn.
        """
        before, behind = self._render_around(messages, added, tools)
        marker = self._turn_end.token
        if marker is None:
            between = self.encode(behind, before)
            is_marked = bool(between) and between[0] in self.tokenizer.added_tokens_decoder
            return TurnLink([], between, between[0] if is_marked else None)
        end = behind.index(marker) + len(marker)
        return TurnLink(self._closing(behind[:end]), self.encode(behind[end:], before + behind[:end]))

    def following_end(self, messages: Messages, added: Messages, tools: Tools = ()) -> str:
        """Return the template's text behind a turn, up to a token that ends the turn; empty without one.

        messages, added: those before and behind the turn. Its end may be the mark of the next role, as GLM-4.5's.
        """
        try:
            behind = self._render_around(messages, added, tools)[1]
        except DataError:
            return ""
        mark = behind.lstrip()
        tokens = [text for text, _ in self.ends.by_id.values() if mark.startswith(text)]
        return behind[: len(behind) - len(mark) + len(max(tokens, key=len))] if tokens else ""

    def _render_around(self, messages: Messages, added: Messages, tools: Tools) -> tuple[str, str]:
        """Return the chat up to the end of the assistant's text that follows `messages`, and the text behind it.

        Raises DataError if the template cannot go on after a turn.
        """
        answer = _ANSWER_TEXT
        while answer in str([*messages, *added]):  # A tool may answer with that text.
            answer += "-"
        turn = {"role": "assistant", "content": answer}
        try:
            text = self.render([*messages, turn, *added], generation=True, tools=tools)
        except Exception as error:  # Any error of a template.
            raise DataError(f"the chat template cannot go on after a turn: {one_line(error)}") from error
        if answer not in text:
            raise DataError("the chat template leaves out the assistant's text, so that no turn can follow it")
        before, _, behind = text.rpartition(answer)
        return before + answer, behind

    def rewrites_history(self) -> bool:
        """Return True if the template writes an earlier turn otherwise than it was sampled, as Qwen3's, which drops the
        thinking of all turns but the last."""
        if self.template is None:
            return False
        turn = f"<think>\nthought\n</think>\n\n{_ANSWER_TEXT}"
        chat = [{"role": "user", "content": "question"}]
        added = [{"role": "assistant", "content": turn}, {"role": "user", "content": "more"}]
        with suppress(Exception):  # A row that the template refuses is an error with its place.
            return not self.render([*chat, *added], generation=True).startswith(self.prompt_text(chat) + turn)
        return False

    @cached_property
    def shows_tools(self) -> bool:
        """True if the template writes tools into a prompt."""
        if self.template is None:
            return False
        function = {"name": "named", "description": "", "parameters": {"type": "object", "properties": {}}}
        chat = [{"role": "user", "content": "question"}]
        with suppress(Exception):  # A row that the template refuses is an error with its place.
            return self.prompt_text(chat, [{"type": "function", "function": function}]) != self.prompt_text(chat)
        return True

    def end_marker(self, text: str) -> str | None:
        """Return the token by which the template ended the last turn of `text`; None: it writes none.

        Usually all turns have the same end. Another special token may take its place, as after a tool call.
        """
        turn_end = self._turn_end.token
        if turn_end is None:
            return None
        return next((token for token in (turn_end, *self._special) if text.rstrip().endswith(token)), None)

    @cached_property
    def _special(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return [str(token) for token in added if token.special]

    @cached_property
    def _closing(self) -> Callable[[str], list[int]]:
        """Encode the text that closes a turn; it is the same after nearly every turn."""
        return lru_cache(maxsize=16)(partial(self.encode, before=_ANSWER_TEXT))

    @cached_property
    def _turn_end(self) -> TurnEnd:
        if self.template is None:
            return TurnEnd()
        return find_turn_end(partial(self._render_text, generation=False), self.tokenizer)

    def render(self, messages: Messages, generation: bool, tools: Tools = ()) -> str:
        """Return the chat as text, with a mark in each control token that messages or tools spell."""
        marked = [self.mark_message(message) for message in messages]
        takes_system_prompt = self.template is not None and self.system_prompt is not None
        if takes_system_prompt and messages[:1] and messages[0]["role"] != "system":
            # The config's own text, which may name control tokens.
            marked = [{"role": "system", "content": self.system_prompt}, *marked]
        if self.special_tokens == "text":
            tools = self._mark_tools(tools)
        return self._render_text(marked, generation, tools)

    def _mark_tools(self, tools: Tools) -> Tools:
        """Return tools with marks in the control tokens that they spell. An object is marked once: nobody changes it.

        24 tools of an agent take 2 ms, and each of its turns brings them.
        """
        cached, marked = self._tools_by_id.get(id(tools), ((), ()))
        if cached is not tools:
            while len(self._tools_by_id) >= _TOOL_SETS:
                self._tools_by_id.pop(next(iter(self._tools_by_id)), None)
            marked = self._control.mark_all(list(tools))
            self._tools_by_id[id(tools)] = (tools, marked)
        return marked

    @cached_property
    def _tools_by_id(self) -> dict[int, tuple[Tools, Tools]]:
        """Tools, and their marked form, by the id of the former."""
        return {}

    def _render_text(self, messages: Messages, generation: bool, tools: Tools = ()) -> str:
        if self.template is None:
            texts = [message["content"] for message in messages]
            return self._control.join_texts(texts) if self.special_tokens == "text" else "".join(texts)
        return str(
            self.tokenizer.apply_chat_template(
                messages,
                chat_template=choose_template(self.template, with_tools=bool(tools)),
                tokenize=False,
                add_generation_prompt=generation,
                tools=list(tools) or None,
                **self.template_kwargs,
            )
        )

    def mark_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with marks in the control tokens that it spells, unless it may write such tokens."""
        if self.special_tokens == "allow":
            return message
        return self._control.mark_message(message, self._plain_end)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @cached_property
    def _plain_end(self) -> str | None:
        """Token that an answer's own text may end with, where the template writes none."""
        has_turn_end = self.template is not None and self._turn_end.token is not None
        return None if has_turn_end else self.tokenizer.eos_token

    def add_prefix(self, tokens: list[int]) -> list[int]:
        """Return `tokens` after the tokens that the tokenizer puts before plain text, once."""
        prefix = self._prefix if self.template is None else []
        return tokens if tokens[: len(prefix)] == prefix else prefix + tokens

    @cached_property
    def _prefix(self) -> list[int]:
        """Tokens that the tokenizer puts before a text by itself: usually the beginning-of-text token, or none."""
        bare = self._control.encode("a")
        tokens = list(self.tokenizer("a").input_ids)
        starts = (start for start in range(len(tokens)) if tokens[start : start + len(bare)] == bare)
        return tokens[: next(starts, 0)]

    def encode(self, text: str, before: str = "") -> list[int]:
        """Return the tokens of rendered text behind the text `before`, whose tokens stay as they are.

        Raises DataError for a lone surrogate, and for a token that the model has no row for.
        """
        try:
            tokens = self._control.encode(text, before)
        except (TypeError, UnicodeEncodeError):  # tokenizers raise either
            if half := _SURROGATE.search(text):
                problem = f"the text has the lone surrogate {half[0]!a}, half of a character, which no tokenizer takes"
                raise DataError(problem) from None
            raise
        if self._embedding_rows is not None and tokens and (last := max(tokens)) >= self._embedding_rows:
            name = self.tokenizer.convert_ids_to_tokens(last)
            problem = f"token {last} ({name!r}) is beyond the model's vocabulary of {self._embedding_rows:,}"
            raise DataError(f"{problem}: is the tokenizer the model's own (model.tokenizer)?")
        return tokens

    @cached_property
    def _embedding_rows(self) -> int | None:
        """Rows of the model's embedding, where the tokenizer has tokens beyond them; None: each token has a row."""
        try:
            config = read_object(self.folder / "config.json") if self.folder else {}
        except ModelError:
            return None
        text = config.get("text_config")
        rows = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
        last = max([len(self.tokenizer) - 1, *self.tokenizer.added_tokens_decoder])
        return rows if isinstance(rows, int) and rows <= last else None


@dataclass(frozen=True)
class ChatSpec:
    """A chat as another process loads it."""

    # Folder or hub name of the tokenizer.
    tokenizer: str
    template: Template | None
    system_prompt: str | None
    folder: Path | None
    special_tokens: SpecialTokens
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_chat(cls, chat: Chat) -> "ChatSpec":
        """Return the facts of a chat."""
        facts = {field.name: getattr(chat, field.name) for field in fields(cls)}
        return cls(**{**facts, "tokenizer": str(chat.tokenizer.name_or_path)})

    def load(self) -> Chat:
        """Load the tokenizer. Raises DataError."""
        return Chat(**{**vars(self), "tokenizer": load_tokenizer(self.tokenizer)})


def make_chat(tokenizer: Any, data: DataSection, folder: Path | None) -> Chat:
    """Return the chat of a run, by data.chat_template and the keys around it. folder: the model's. Raises DataError."""
    system_prompt = data.system_prompt
    template = find_template(data.chat_template, tokenizer)
    if template is None and system_prompt is not None:
        raise DataError("data.system_prompt needs a chat template: this tokenizer has none, or it is set to none")
    chat = Chat(
        tokenizer=tokenizer,
        template=template,
        system_prompt=system_prompt,
        folder=folder,
        special_tokens=data.special_tokens,
        template_kwargs=data.chat_template_kwargs,
    )
    for name, reason in chat.unknown_kwargs(data.chat_template_kwargs).items():
        raise DataError(f"data.chat_template_kwargs.{name}: {reason}")
    return chat
