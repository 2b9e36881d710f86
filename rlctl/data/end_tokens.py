"""Tokens that end an answer: SFT trains one of them behind an answer, and GRPO stops sampling at all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError, one_line
from rlctl.config.json_files import read_object, whole_number
from rlctl.data.files import DataError
from rlctl.data.rows import Messages

MODEL_FILES = ("generation_config.json", "config.json")
# Largest id of a token: tokenizers and engines use 31 bits.
_MOST_TOKENS = 2**31 - 1
_FURTHER = "generation.stop_token_ids"


@dataclass(frozen=True)
class EndTokens:
    """Tokens that end an answer."""

    # Id that SFT puts behind an answer, one of `stops`; None if there are no stops.
    trained: int | None
    # Id -> (text of the token, sources that name the token).
    by_id: dict[int, tuple[str, tuple[str, ...]]]
    # Warnings for the user, one line each.
    warnings: tuple[str, ...] = ()

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids that end sampling."""
        return tuple(self.by_id)

    def __str__(self) -> str:
        """Return, for example, `<|im_end|> 151645 (chat template), <|endoftext|> 151643 (config.json, tokenizer)`."""
        texts = (f"{text} {token} ({', '.join(sources)})" for token, (text, sources) in self.by_id.items())
        return ", ".join(texts) or "none"

    def with_further(self, tokens: Sequence[int], tokenizer: Any) -> "EndTokens":
        """Return these end tokens and `tokens`, which are `generation.stop_token_ids`.

        Raises DataError for an id that is no token.
        """
        by_id = dict(self.by_id)
        for token in tokens:
            text, sources = by_id.get(token, (_token_text(tokenizer, token, _FURTHER), ()))
            by_id[token] = text, (*sources, _FURTHER)
        warnings = self.warnings
        if not by_id:
            warnings += (f"no token ends an answer: each goes on to generation.max_new_tokens; set {_FURTHER}",)
        return replace(self, by_id=by_id, warnings=warnings)


@dataclass(frozen=True)
class TurnEnd:
    """End of an assistant's turn, as a chat template writes it."""

    # Text of the added token that ends the turn; None if the template writes no such token.
    token: str | None = None
    # Rendered chat of a question and its answer; empty if the template refuses this chat.
    rendered: str = ""
    # Warnings for the user, one line each.
    warnings: tuple[str, ...] = ()


def find_turn_end(render: Callable[[Messages], str], tokenizer: Any) -> TurnEnd:
    """Find the token that the template writes behind an answer, by rendering a chat of a question and an answer."""
    text = "the-text-of-an-answer"
    try:
        rendered = render([{"role": "user", "content": "question"}, {"role": "assistant", "content": text}])
    except Exception as error:  # Any error of a template. A row that it cannot render is an error with its place.
        warning = f"the chat template refuses a question and its answer: {one_line(error)}"
        return TurnEnd(warnings=(f"{warning}; {_UNKNOWN}",))
    if text not in rendered:
        warning = f"the chat template leaves out the assistant's text; {_UNKNOWN}"
        return TurnEnd(rendered=rendered, warnings=(warning,))
    behind = rendered.rpartition(text)[2].strip()
    # The longest token first, because one token may begin with another.
    tokens = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    token = next((token for token in tokens if behind.startswith(token)), None)
    if token is None and behind:
        mend = "add it to the tokenizer's special tokens, or set another data.chat_template"
        warning = f"the chat template ends a turn with {behind!r}, which is no token: answers hold it as text; {mend}"
        return TurnEnd(rendered=rendered, warnings=(warning,))
    return TurnEnd(token=token, rendered=rendered)


_UNKNOWN = "the token by which it ends a turn is not known"


def find_ends(tokenizer: Any, turn_end: str | None, folder: Path | None) -> EndTokens:
    """Return all end tokens that the model's files, the tokenizer and the chat template name.

    turn_end: text of the token with which the chat template ends an assistant's turn. folder: the model's folder; None
    if it is not known. Raises DataError for an id that is no token of the tokenizer.
    """
    sources: dict[int, list[str]] = {}
    template_token = None if turn_end is None else int(tokenizer.convert_tokens_to_ids(turn_end))
    if template_token is not None:
        sources[template_token] = ["chat template"]
    for file in [folder / name for name in MODEL_FILES] if folder else []:
        for token in _read_eos(file):
            sources.setdefault(token, []).append(file.name)
    # Tokens that the model's files list. The tokenizer is not among the sources yet.
    listed = {token for token, names in sources.items() if names != ["chat template"]}
    if tokenizer.eos_token_id is not None:
        sources.setdefault(int(tokenizer.eos_token_id), []).append("tokenizer")
    candidates = (template_token, tokenizer.eos_token_id, *sources)
    trained = next((token for token in candidates if token is not None), None)
    by_id = {token: (_token_text(tokenizer, token, names[0]), tuple(names)) for token, names in sources.items()}
    ends = EndTokens(trained, by_id)
    if trained is None or not listed or trained in listed:
        return ends
    where = f"neither {' nor '.join(MODEL_FILES)} of {folder} lists it"
    text = by_id[trained][0]
    warning = f"answers end with {text}, but {where}: programs that read only those will not stop there"
    mend = f"add {trained} to eos_token_id in {MODEL_FILES[0]}; checkpoints that are exported have it there"
    return replace(ends, warnings=(f"{warning}; {mend}",))


def _token_text(tokenizer: Any, token: int, source: str) -> str:
    if 0 <= token < len(tokenizer):
        return str(tokenizer.convert_ids_to_tokens(token))
    raise DataError(f"{source}: {token} ends an answer, but is no token: the tokenizer has {len(tokenizer):,}")


def _read_eos(file: Path) -> list[int]:
    """Return the ids in `eos_token_id` of a JSON file, where it is a number, a list or missing."""
    if not file.is_file():
        return []
    try:
        eos = read_object(file).get("eos_token_id")
        tokens = eos if isinstance(eos, list) else [eos]
        return [whole_number(token, f"{file}: eos_token_id", 0, _MOST_TOKENS) for token in tokens if token is not None]
    except ModelError as error:
        raise DataError(str(error)) from error
