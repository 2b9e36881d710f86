"""Chats as tokens: what a prompt looks like to the model, and which tokens of a chat its assistant wrote.

The mask is exact by construction: the rendered chat is cut where each assistant turn starts and ends, and the
pieces are tokenized one by one, just as the model will meet them when it generates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rlctl.data.datasets import DataError

Messages = list[dict[str, Any]]
Tokens = tuple[list[int], NDArray[np.bool_]]


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """The Hugging Face tokenizer of a folder or hub name, loaded once a process. Raises DataError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: no tokenizer: {str(error).strip().splitlines()[0]}") from error


@dataclass(frozen=True)
class Chat:
    """How prompts and chats become text. `template`: Jinja source, or None for plain text without roles."""

    tokenizer: Any
    template: str | None
    system_prompt: str | None

    def prompt_text(self, messages: Messages) -> str:
        """What the model is to continue: the chat so far and the opening of the assistant's turn."""
        return self._render(messages, generation=True)

    def prompt_tokens(self, text: str) -> list[int]:
        """A template writes the beginning-of-text token itself; plain text gets the tokenizer's own."""
        return self._encode(text, special=self.template is None)

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
            ids = self._encode(text[start:end], special=self.template is None and start == 0)
            tokens += ids
            mask += [trained] * len(ids)
        if self._end_marker(text[: spans[-1][1]]) is None and spans[-1][1] == len(text):
            tokens.append(self.tokenizer.eos_token_id)
            mask.append(True)
        return tokens, np.array(mask, dtype=np.bool_)

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
        """The special token that `text` ends with, white space aside."""
        return next((t for t in self.tokenizer.get_added_vocab() if text.rstrip().endswith(t)), None)

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

    def _encode(self, text: str, special: bool) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=special).input_ids)


def make_chat(tokenizer: Any, chat_template: str, system_prompt: str | None) -> Chat:
    """`chat_template` as in data.chat_template: auto, none, or a Jinja file. Raises DataError."""
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
    return Chat(tokenizer, template, system_prompt)


def _pieces(length: int, spans: list[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """(start, end, trained) of consecutive pieces that make up the whole text."""
    position = 0
    for start, end in spans:
        yield position, start, False
        yield start, end, True
        position = end
    yield position, length, False
