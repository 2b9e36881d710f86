"""Chats as text and tokens: the prompt that a model continues, and the tokens between two of its turns.

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

_SURROGATE = re.compile("[\ud800-\udfff]")
# Stands for the text of a turn, to find the text that the template writes around a turn.
_ANSWER_TEXT = "the-text-of-an-answer"
# Most sets of tools that a chat keeps marked.
_TOOL_SETS = 16
# Most variants of a chat that `with_kwargs` keeps.
_ARGUMENT_SETS = 16
EMPTY_PROMPT = "the prompt is empty, and the tokenizer puts no token before it: an answer has nothing to follow"


@dataclass(frozen=True)
class TurnLink:
    """Tokens between two of the assistant's turns. The template writes them; none is sampled."""

    # Tokens to end a turn that was cut before its end token.
    close: list[int]
    # Tokens of the messages between the turns, and of the opening of the next turn.
    between: list[int]
    # First token of `between` if it is the control token that ends the turn, such as GLM-4.5's mark of the next role.
    # None if the template ends a turn by a separate token.
    mark: int | None = None

    def tokens_after(self, tokens: Sequence[int], stops: Collection[int]) -> list[int]:
        """Return the tokens to append to a turn whose sampled tokens are `tokens`. stops: ids that end a turn."""
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
    # Control tokens that the messages spell out, in order. They are encoded as text.
    spelled: list[str]


@dataclass(frozen=True)
class Chat:
    """Rules by which prompts and chats become text and tokens.

    Messages and tools come from outside, so their texts yield no added token of the tokenizer (`ControlTokens`).
    """

    tokenizer: Any
    # None means plain text without roles.
    template: Template | None
    system_prompt: str | None
    # Folder of the model, whose files name end tokens; None if the model is not on this machine.
    folder: Path | None = None
    # data.special_tokens: `text` encodes a spelled control token as text, `allow` as the control token.
    special_tokens: SpecialTokens = "text"
    # Arguments of the chat template, such as enable_thinking.
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def unknown_token(self) -> int | None:
        """Id of the token for text that the tokenizer does not know.

        None if there is no such token, or if it is the beginning-of-text or end-of-text token too.
        """
        token: int | None = self.tokenizer.unk_token_id
        return None if token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id) else token

    def with_kwargs(self, arguments: Mapping[str, Any]) -> "Chat":
        """Return this chat with the template's arguments of a row or of a request added.

        These come from outside, so a control token that they spell is text. Raises DataError for a name that the
        template does not take.
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
        # Shared with the variant, because these take long to compute, and the end tokens are the same for a whole run.
        vars(variant).update({"_control": self._control, "_turn_end": self._turn_end, "ends": self.ends})
        while len(self._variants) >= _ARGUMENT_SETS:
            self._variants.pop(next(iter(self._variants)), None)
        self._variants[key] = variant
        return variant

    def unknown_kwargs(self, names: Collection[str]) -> dict[str, str]:
        """Return each name that is no argument of the template, with the reason."""
        if self.template is None:
            return dict.fromkeys(names, "needs a chat template: this tokenizer has none, or it is set to none")
        return unknown_arguments(names, self.template)

    @cached_property
    def _variants(self) -> "dict[str, Chat]":
        """Results of `with_kwargs`, by the arguments as JSON."""
        return {}

    def prompt(self, messages: Messages, tools: Tools = ()) -> Prompt:
        """Return the prompt that the model continues: the chat and the opening of the assistant's turn.

        tools: JSON schemas of the functions that the model may call. Raises DataError for a prompt without tokens.
        """
        text = self.render(messages, generation=True, tools=tools)
        return Prompt(remove_marks(text), self.prompt_tokens(text), self.find_spelled(messages, tools))

    def prompt_text(self, messages: Messages, tools: Tools = ()) -> str:
        """Return the text of a prompt. Its tokens are those of `prompt`: the text alone may spell further tokens."""
        return remove_marks(self.render(messages, generation=True, tools=tools))

    def find_spelled(self, messages: Messages, tools: Tools = ()) -> list[str]:
        """Return the control tokens that messages and tools spell, in order, if they are encoded as text."""
        if self.special_tokens == "allow":
            return []
        return self._control.find_spelled([*map(self.mark_message, messages), *self._control.mark_all(list(tools))])

    def prompt_tokens(self, text: str) -> list[int]:
        """Return the tokens of a rendered text.

        A template writes the beginning-of-text token itself. Without a template the token is added here. Raises
        DataError if there are no tokens.
        """
        tokens = self.add_prefix(self.encode(text))
        if not tokens:
            raise DataError(EMPTY_PROMPT)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
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
            # Tokens that the model has no embedding for. Added tokens may have any id, so each one is compared.
            base_size = self.tokenizer.vocab_size
            beyond = sum(token >= max(base_size, rows) for token in self.tokenizer.added_tokens_decoder)
            beyond += max(0, base_size - rows)
            text = f"the tokenizer has {beyond:,} tokens beyond the model's vocabulary of {rows:,}"
            warnings.append(f"{text}: text that yields one is refused")
        return replace(ends, warnings=tuple(warnings))

    def link(self, messages: Messages, added: Messages, tools: Tools = ()) -> TurnLink:
        """Return the tokens between the assistant's turn that follows `messages` and the assistant's next turn.

        added: messages between these turns. The first turn itself is not rendered, because its sampled tokens are kept.
        Raises DataError if the template cannot go on after a turn.
        """
        before, behind = self._render_around(messages, added, tools)
        marker = self._turn_end.token
        if marker is None:
            # A turn may end with the control token that begins the next message, such as GLM-4.5's mark of a role.
            between = self.encode(behind, before)
            is_marked = bool(between) and between[0] in self.tokenizer.added_tokens_decoder
            return TurnLink(close=[], between=between, mark=between[0] if is_marked else None)
        end = behind.index(marker) + len(marker)
        between = self.encode(behind[end:], before + behind[:end])
        return TurnLink(close=self._encode_closing(behind[:end]), between=between)

    def following_end(self, messages: Messages, added: Messages, tools: Tools = ()) -> str:
        """Return the template's text behind a turn, up to a token that ends the turn; empty without such a token.

        messages, added: messages before and behind the turn. The end token may be the mark of the next role (GLM-4.5).
        """
        try:
            behind = self._render_around(messages, added, tools)[1]
        except DataError:
            return ""
        text = behind.lstrip()
        end_texts = [end_text for end_text, _ in self.ends.by_id.values() if text.startswith(end_text)]
        if not end_texts:
            return ""
        num_blanks = len(behind) - len(text)
        return behind[: num_blanks + len(max(end_texts, key=len))]

    def _render_around(self, messages: Messages, added: Messages, tools: Tools) -> tuple[str, str]:
        """Return the rendered chat up to the end of the assistant's turn behind `messages`, and the text behind that.

        Raises DataError if the template cannot go on after a turn.
        """
        answer = _ANSWER_TEXT
        while answer in str([*messages, *added]):  # The stand-in must be unique: a tool may answer with the same text.
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
        """Return True if the template writes an earlier turn in another way than the turn was sampled.

        Qwen3's does: it drops the thinking of all turns but the last.
        """
        if self.template is None:
            return False
        turn = f"<think>\nthought\n</think>\n\n{_ANSWER_TEXT}"
        first_messages = [{"role": "user", "content": "question"}]
        added = [{"role": "assistant", "content": turn}, {"role": "user", "content": "more"}]
        with suppress(Exception):  # The template refuses this chat. An error in a row is raised with the row's place.
            rendered = self.render([*first_messages, *added], generation=True)
            return not rendered.startswith(self.prompt_text(first_messages) + turn)
        return False

    @cached_property
    def shows_tools(self) -> bool:
        """True if the template writes tools into a prompt."""
        if self.template is None:
            return False
        function = {"name": "named", "description": "", "parameters": {"type": "object", "properties": {}}}
        chat = [{"role": "user", "content": "question"}]
        with suppress(Exception):  # The template refuses this chat. An error in a row is raised with the row's place.
            return self.prompt_text(chat, [{"type": "function", "function": function}]) != self.prompt_text(chat)
        return True

    def end_marker(self, text: str) -> str | None:
        """Return the token that ends the last turn of the rendered `text`; None if the template writes no end token.

        Usually all turns end with the same token. A turn with a tool call may end with another special token.
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
    def _encode_closing(self) -> Callable[[str], list[int]]:
        """Function to encode the text that closes a turn. Cached, because nearly all turns have the same text."""
        return lru_cache(maxsize=16)(partial(self.encode, before=_ANSWER_TEXT))

    @cached_property
    def _turn_end(self) -> TurnEnd:
        if self.template is None:
            return TurnEnd()
        return find_turn_end(partial(self._render_text, generation=False), self.tokenizer)

    def render(self, messages: Messages, generation: bool, tools: Tools = ()) -> str:
        """Return the chat as text, with a mark in each control token that messages or tools spell.

        generation: write the opening of the assistant's turn at the end.
        """
        marked = [self.mark_message(message) for message in messages]
        takes_system_prompt = self.template is not None and self.system_prompt is not None
        if takes_system_prompt and messages[:1] and messages[0]["role"] != "system":
            # Not marked: the config's system prompt may name control tokens.
            marked = [{"role": "system", "content": self.system_prompt}, *marked]
        if self.special_tokens == "text":
            tools = self._mark_tools(tools)
        return self._render_text(marked, generation, tools)

    def _mark_tools(self, tools: Tools) -> Tools:
        """Return tools with marks in the control tokens that they spell.

        The result is kept for each object, because nobody changes a list of tools. Marking the 24 tools of an agent
        takes 2 ms, and each turn of the agent needs them.
        """
        known_tools, marked = self._tools_by_id.get(id(tools), ((), ()))
        # Python gives the id of a deleted object to another one, but an object that is kept here is not deleted.
        if known_tools is not tools:
            while len(self._tools_by_id) >= _TOOL_SETS:
                self._tools_by_id.pop(next(iter(self._tools_by_id)), None)
            marked = self._control.mark_all(list(tools))
            self._tools_by_id[id(tools)] = (tools, marked)
        return marked

    @cached_property
    def _tools_by_id(self) -> dict[int, tuple[Tools, Tools]]:
        """(tools, marked tools) by the id of the tools' object."""
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
        """Return a message with marks in the control tokens that it spells; unchanged if special tokens are allowed."""
        if self.special_tokens == "allow":
            return message
        return self._control.mark_message(message, self._plain_end)

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @cached_property
    def _plain_end(self) -> str | None:
        """End token that the text of an answer may spell as its end; None if the template writes an end token."""
        has_turn_end = self.template is not None and self._turn_end.token is not None
        return None if has_turn_end else self.tokenizer.eos_token

    def add_prefix(self, tokens: list[int]) -> list[int]:
        """Return `tokens` behind the tokens that the tokenizer puts before plain text, unless these are there."""
        prefix = self._prefix if self.template is None else []
        return tokens if tokens[: len(prefix)] == prefix else prefix + tokens

    @cached_property
    def _prefix(self) -> list[int]:
        """Tokens that the tokenizer puts before every text: usually the beginning-of-text token, or none."""
        bare = self._control.encode("a")
        tokens = list(self.tokenizer("a").input_ids)
        starts = (start for start in range(len(tokens)) if tokens[start : start + len(bare)] == bare)
        return tokens[: next(starts, 0)]

    def encode(self, text: str, before: str = "") -> list[int]:
        """Return the tokens of a rendered text that stands behind the text `before`, without the tokens of `before`.

        Raises DataError for a lone surrogate, and for a token that the model has no embedding for.
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
        """Number of rows of the model's embedding if the tokenizer has tokens beyond these rows, else None."""
        try:
            config = read_object(self.folder / "config.json") if self.folder else {}
        except ModelError:
            return None
        text_config = config.get("text_config")
        rows = config.get("vocab_size") or (text_config.get("vocab_size") if isinstance(text_config, dict) else None)
        last_token = max([len(self.tokenizer) - 1, *self.tokenizer.added_tokens_decoder])
        return rows if isinstance(rows, int) and rows <= last_token else None


@dataclass(frozen=True)
class ChatSpec:
    """Facts from which another process loads a chat."""

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
        """Load the tokenizer, and return the chat. Raises DataError."""
        return Chat(**{**vars(self), "tokenizer": load_tokenizer(self.tokenizer)})


def make_chat(tokenizer: Any, data: DataSection, folder: Path | None) -> Chat:
    """Return the chat of a run with the settings of `data`. folder: the model's folder. Raises DataError."""
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
