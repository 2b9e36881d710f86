"""Chats as tokens: what a prompt looks like to the model, and which tokens of a chat its assistant wrote.

The mask is exact by construction: the rendered chat is cut where each assistant turn starts and ends, and the
pieces are tokenized one by one, just as the model will meet them when it generates.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.config.schema import DataSection
from rlctl.data.datasets import DataError
from rlctl.data.ends import EndTokens, TurnEnd, find_ends, find_turn_end
from rlctl.data.rows import Messages

Tokens = tuple[list[int], NDArray[np.bool_]]

_EMPTY = "the prompt is empty, and the tokenizer puts no token before it: an answer has nothing to follow"


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """Load the Hugging Face tokenizer of a folder or hub name, once a process. Raises DataError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: no tokenizer: {str(error).strip().splitlines()[0]}") from error


@dataclass(frozen=True)
class Chat:
    """How prompts and chats become text. `template`: Jinja source, or None for plain text without roles.

    folder: the model's, whose end tokens count; None: not on this machine.
    """

    tokenizer: Any
    template: str | None
    system_prompt: str | None
    folder: Path | None = None

    def prompt_text(self, messages: Messages) -> str:
        """What the model is to continue: the chat so far and the opening of the assistant's turn."""
        return self._render(messages, generation=True)

    def prompt_tokens(self, text: str) -> list[int]:
        """A template writes the beginning-of-text token itself; plain text gets the tokenizer's own, once.

        Raises DataError if nothing is left to begin with.
        """
        tokens = self._begun(self._encode(text))
        if not tokens:
            raise DataError(_EMPTY)
        return tokens

    @cached_property
    def ends(self) -> EndTokens:
        """The tokens that end an answer. Raises DataError."""
        ends = find_ends(self.tokenizer, self._turn.token, self.folder)
        return replace(ends, warnings=(*ends.warnings, *self._turn.warnings, *self._no_beginning()))

    def chat_tokens(self, messages: Messages, train: Literal["all", "last"]) -> Tokens:
        """Token ids and a mask, true on the assistant turns trained on with their end tokens.

        Raises DataError if there is no assistant turn or the template does not keep to what it wrote before.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise DataError("no assistant message to train on")
        turns = turns[-1:] if train == "last" else turns
        text, spans = self._spans(messages, turns)
        tokens: list[int] = []
        mask: list[bool] = []
        for start, end, trained in _pieces(len(text), spans):
            ids = self._encode(text[start:end])
            tokens += ids
            mask += [trained] * len(ids)
        if self._end_marker(text) is None and tokens[-1:] != [self._trained_end]:
            tokens.append(self._trained_end)
            mask.append(True)
        begun = self._begun(tokens)
        mask = [False] * (len(begun) - len(tokens)) + mask
        if mask[0]:
            raise DataError(_EMPTY)
        return begun, np.array(mask, dtype=np.bool_)

    def _spans(self, messages: Messages, turns: list[int]) -> tuple[str, list[tuple[int, int]]]:
        """The rendered chat up to the last trained turn, and (start, end) of each trained turn within it."""
        text = self._render(messages[: turns[-1] + 1], generation=False)
        spans: list[tuple[int, int]] = []
        for turn in turns:
            before = self._render(messages[:turn], generation=True)
            if not text.startswith(before):
                raise DataError(
                    f"the chat template is not prefix-stable at message {turn + 1}: what it writes before the "
                    "assistant's turn changes with what follows; set sft.mask=last or another data.chat_template"
                )
            if spans and spans[-1][1] > len(before):
                raise DataError(
                    f"the chat template ends message {turn - 1} as an earlier turn otherwise than as the last one; "
                    "set sft.mask=last or another data.chat_template"
                )
            spans.append((len(before), self._turn_end(messages[: turn + 1], text, len(before))))
        return text[: spans[-1][1]], spans

    def _turn_end(self, messages: Messages, text: str, start: int) -> int:
        """Where the turn that begins at `start` ends: behind its end token, before the template's white space.

        By the first end token, not by length: Qwen3's template drops the empty thinking block of all turns
        but the last.
        """
        alone = self._render(messages, generation=False)
        marker = self._end_marker(alone)
        if marker is not None and marker in text[start:]:
            return text.index(marker, start) + len(marker)
        if marker is None and text.startswith(alone):
            return len(alone.rstrip()) if self.template else len(alone)
        raise DataError(
            f"the chat template is not prefix-stable at message {len(messages)}: the assistant's turn reads "
            "differently once the chat goes on; set sft.mask=last or another data.chat_template"
        )

    def _end_marker(self, text: str) -> str | None:
        """The token by which the template ended the last turn of `text`, white space aside; None if it writes none.

        Usually the one it always writes; another special token may stand in its place, as behind a tool call.
        """
        usual = self._turn.token
        if usual is None:
            return None
        return next((each for each in (usual, *self._special) if text.rstrip().endswith(each)), None)

    @cached_property
    def _trained_end(self) -> int:
        if self.ends.trained is None:
            raise DataError("no token ends an answer: the tokenizer has no eos_token; set it in tokenizer_config.json")
        return self.ends.trained

    @cached_property
    def _special(self) -> list[str]:
        added = self.tokenizer.added_tokens_decoder.values()
        return [str(token) for token in added if token.special]

    @cached_property
    def _turn(self) -> TurnEnd:
        return TurnEnd() if self.template is None else find_turn_end(self._render_closed, self.tokenizer)

    def _no_beginning(self) -> Iterator[str]:
        """A warning for a template that leaves out the token which the tokenizer puts before text."""
        bos = self.tokenizer.bos_token
        if self._turn.rendered and self._prefix and bos and not self._turn.rendered.startswith(bos):
            yield f"the chat template writes no {bos}, which the tokenizer puts before text: chats begin without it"

    def _render_closed(self, messages: Messages) -> str:
        return self._render(messages, generation=False)

    def _render(self, messages: Messages, generation: bool) -> str:
        if self.template is None:
            return "".join(message["content"] for message in messages)
        if self.system_prompt is not None and messages[:1] and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return str(
            self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=generation
            )
        )

    def _begun(self, tokens: list[int]) -> list[int]:
        """`tokens` behind what the tokenizer puts before plain text, unless they begin with it already."""
        prefix = self._prefix if self.template is None else []
        return tokens if tokens[: len(prefix)] == prefix else [*prefix, *tokens]

    @cached_property
    def _prefix(self) -> list[int]:
        """The tokens that the tokenizer puts before a text by itself: usually the beginning-of-text token, or none."""
        bare = self._encode("a")
        whole = list(self.tokenizer("a").input_ids)
        starts = (at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
        return whole[: next(starts, 0)]

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)


def make_chat(tokenizer: Any, data: DataSection, folder: Path | None) -> Chat:
    """The chat of a run by data.chat_template and data.system_prompt. folder: the model's. Raises DataError."""
    chat_template, system_prompt = data.chat_template, data.system_prompt
    if chat_template == "auto":
        template = tokenizer.chat_template
    elif chat_template == "none":
        template = None
    elif Path(chat_template).is_file():
        template = Path(chat_template).read_text(encoding="utf-8")
    else:
        raise DataError(f"data.chat_template: {chat_template}: no such file (or auto, none)")
    if template is None and system_prompt is not None:
        raise DataError("data.system_prompt needs a chat template: this tokenizer has none, or it is set to none")
    return Chat(tokenizer, template, system_prompt, folder)


def _pieces(length: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """(start, end, trained) of consecutive pieces that make up the whole text."""
    position = 0
    for start, end in spans:
        yield position, start, False
        yield start, end, True
        position = end
    yield position, length, False
