"""Encoding in which text from outside stays text: it yields no control token, even if it spells one (contract 4).

A chat template renders all messages to one string, and a tokenizer finds its added tokens anywhere in a string. So a
token that a message spells, for example <|im_end|>, gets a mark behind its first character before the template sees it.
The mark is two noncharacters of Unicode, which templates do not touch. `encode` then knows that the tokens without a
mark are written by the template.
"""

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal

SpecialTokens = Literal["text", "allow"]

# Unicode reserves noncharacters for use within a program, so text from outside has hardly ever one. Such a character is
# escaped as `_LITERAL`, and restored later.
_ESCAPE = "\ufdd0"
_MARK = f"{_ESCAPE}\ufdd1"
_LITERAL = f"{_ESCAPE}\ufdd2"
# Placeholder of an added token while a text is encoded; the number is the token's id. It has a random part, so that no
# text can spell it.
_PLACE = f"\ufdd3{secrets.token_hex(16)} {{}}\ufdd4"
# Roles from which templates make control tokens, as in <|user|>.
_ROLE_NAMES = {"system", "developer", "user", "assistant", "tool", "function", "observation", "environment", "ipython"}
# Added tokens with which a model marks its thinking and its tool calls, in the tokenizers of the usual families.
_OWN = re.compile(
    r"think|thought|reasoning|tool[_▁ ]?call|tool[_▁ ]?sep|python_tag|\[ARGS\]|\[CALL_ID\]|arg_(key|value)"
    r"|</?(function|parameter)\b|_ACTION",
    re.IGNORECASE,
)
# Number of characters before a text that may change its encoding. A tokenizer looks back to the last added token, or
# one word.
_CONTEXT = 256
# Contexts that are tried if a token would reach across the cut between two texts.
_CUTS = ("0", "\n")
# Keys of an assistant's message that hold the model's words. Other values, such as tool calls, are data.
_OWN_WORDS = ("content", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class TextBackend:
    """A copy of the tokenizer in which each added token is written as its placeholder."""

    tokenizer: Any
    # Id of a placeholder -> id of the added token.
    ids: dict[int, int]
    # Ids of added tokens that no text may yield. The token for unknown text is not included.
    never: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with placeholders; empty if plain text would yield an added token."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        if any(token in self.never for token in tokens if token not in self.ids):
            return []
        return [self.ids.get(token, token) for token in tokens]


class ControlTokens:
    """Added tokens of a tokenizer, special or not. Added tokens of white space alone count as text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added: dict[str, int] = dict(tokenizer.get_added_vocab())
        tokens = [token for token in self._added if token.strip()]
        self._all = _by_head(tokens)
        # Without the marks of thinking and of tool calls, which an assistant's text may contain as tokens.
        self._not_own = _by_head([token for token in tokens if not _OWN.search(token)])

    def mark_message(self, message: dict[str, Any], end: str | None = None) -> dict[str, Any]:
        """Return a message with a mark in each added token that it spells.

        In an assistant's text, tokens of thinking and of tool calls get no mark. end: token that the text may end with
        as a token, if the template writes no end token.
        """
        if message.get("role") != "assistant":
            return {**self.mark_all(message), "role": self._mark_role(message.get("role"))}
        own_words = {name: self._mark_own_words(value, end) for name, value in message.items() if name in _OWN_WORDS}
        further = {name: value for name, value in message.items() if name not in own_words}
        return {**self.mark_all(further), **own_words}

    def mark_all(self, value: Any) -> Any:
        """Return JSON-like data with a mark in each token that its texts and keys spell."""
        if isinstance(value, str):
            return self._mark_text(value, self._all)
        if isinstance(value, dict):
            return {self.mark_all(name): self.mark_all(child) for name, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(child) for child in value]
        return value

    def join_texts(self, texts: list[str]) -> str:
        """Join marked texts, and mark each token that only two neighbouring texts together spell."""
        joined = ""
        for text in texts:
            plain = remove_marks(joined)
            cut = len(plain)
            tokens = self._find_tokens(plain + remove_marks(text), self._all)
            crosses = any(start < cut < start + len(token) for start, token in tokens)
            joined = f"{joined}{_MARK}{text}" if crosses else joined + text
        return joined

    def find_spelled(self, value: Any) -> list[str]:
        """Return the added tokens that marked data spell as text, in order."""
        tokens: list[str] = []
        if isinstance(value, str):
            # Each character of a token may have a mark of two characters behind it.
            longest = 3 * max(map(len, self._added), default=0)
            for place in _mark_places(value):
                # The mark stands behind the token's first character.
                token = self._longest_token(remove_marks(value[place - 1] + value[place : place + longest]))
                if token:
                    tokens.append(token)
        elif isinstance(value, dict):
            role = str(value.get("role") or "")
            if _MARK in role and not self.find_spelled(role):
                # `_mark_role` put marks throughout a role that spells no token by itself.
                tokens.append(remove_marks(role))
            tokens += self.find_spelled([*value, *value.values()])
        elif isinstance(value, list):
            for child in value:
                tokens += self.find_spelled(child)
        return tokens

    def encode(self, text: str, before: str = "") -> list[int]:
        """Return the token ids of a marked text. An added token with a mark is encoded as text.

        A text without marks is encoded by the tokenizer itself. In a text with marks, the text between two control
        tokens is encoded as a whole, so that its pieces merge as if the spelled token were no token.

        before: marked text before `text`, whose tokens are not returned. It matters, because SentencePiece marks the
        beginning of a word, and some control tokens take the blanks around them.
        """
        if not before:
            return self._encode_alone(text)
        context = self._context(before)
        tokens = self._encode_behind(text, context)
        # None if a token would reach across both texts.
        return self._encode_apart(text) if tokens is None else tokens

    def _context(self, before: str) -> str:
        """Return the end of the text `before` that decides how a text behind it is encoded: from its last token on."""
        end = before[-_CONTEXT:]
        tokens = self._find_tokens(end, self._all)
        starts = [start for start, token in tokens if not end.startswith(_MARK, start + len(token))]
        if starts:
            return end[starts[-1] :]
        # Without a token, cut the end at the beginning of a word.
        return end if len(before) <= _CONTEXT else end[end.find(" ") + 1 :]

    def _encode_behind(self, text: str, context: str) -> list[int] | None:
        """Return the tokens of a text behind a context; None if the text changes the context's tokens."""
        context_tokens = self._encode_context(context)
        tokens = self._encode_alone(context + text)
        is_unchanged = tokens[: len(context_tokens)] == context_tokens
        return tokens[len(context_tokens) :] if is_unchanged else None

    def _encode_apart(self, text: str) -> list[int]:
        """Return the tokens of a text behind another text, where a token would reach across the cut between both."""
        tried = (self._encode_behind(text, cut) for cut in _CUTS)
        return next((tokens for tokens in tried if tokens is not None), None) or self._encode_alone(text)

    @cached_property
    def _encode_context(self) -> Callable[[str], list[int]]:
        """Function that encodes a context. Cached, because nearly all turns have the same context."""
        return lru_cache(maxsize=64)(self._encode_alone)

    def _encode_alone(self, text: str) -> list[int]:
        if _ESCAPE not in text:
            return self._encode_text(text)
        if self._backend and (tokens := self._backend.encode(self._with_places(text))):
            return tokens
        # The tokenizer has no backend, or its backend reads the spelled token as a piece: cut the text at each mark.
        first, *later_parts = map(remove_marks, text.split(_MARK))
        tokens = self._encode_text(first)
        for part in later_parts:
            tokens += self._encode_apart(part)
        return tokens

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _mark_role(self, role: Any) -> Any:
        """Return a role with marks between all characters if a template could make a control token of it.

        For example a template that writes <|role|> would make <|end|> of the role `end`.
        """
        if not isinstance(role, str) or role in _ROLE_NAMES or not role:
            return self.mark_all(role)
        # A template cannot make an added token of a plain word that is a part of none.
        if role.replace("-", "_").isidentifier() and not any(role in token for token in self._added):
            return role
        return _MARK + _MARK.join(role.replace(_ESCAPE, "")) + _MARK

    def _mark_own_words(self, value: Any, end: str | None) -> Any:
        if not isinstance(value, str):
            return self.mark_all(value)
        if end and value.endswith(end):
            return self._mark_text(value.removesuffix(end), self._not_own) + end
        return self._mark_text(value, self._not_own)

    def _mark_text(self, text: str, tokens: dict[str, tuple[str, ...]]) -> str:
        places = sorted({start + 1 for start, _ in self._find_tokens(text, tokens)})
        if not places and any(self._find_tokens(self._normalize(text), tokens)):
            # The text spells a token only after the tokenizer's normalization. With any mark `_backend` encodes it.
            places = [len(text) - len(text.lstrip()) + 1]
        cuts = [0, *places, len(text)]
        parts = (text[start:end].replace(_ESCAPE, _LITERAL) for start, end in pairwise(cuts))
        return _MARK.join(parts)

    def _find_tokens(self, text: str, tokens: dict[str, tuple[str, ...]]) -> Iterator[tuple[int, str]]:
        """Yield (position, token) of all tokens that `text` spells, at each position the longest token.

        tokens: tokens by head, as `_by_head` returns them.
        """
        for match in self._heads.finditer(text):
            start = match.start()
            # The head of a token is its first two characters, or one if the token has only one.
            for head in (text[start : start + 2], text[start]):
                candidates = tokens.get(head)
                if candidates and text.startswith(candidates, start):
                    yield start, next(token for token in candidates if text.startswith(token, start))
                    break

    def _normalize(self, text: str) -> str:
        """Return the text after normalization, in which some added tokens are found; empty if nothing changes."""
        if self._normalizer is None or (text.isascii() and not self._folds):
            return ""
        try:
            return str(self._normalizer.normalize_str(text))
        except UnicodeEncodeError:  # a lone surrogate, which no tokenizer encodes
            return ""

    @cached_property
    def _folds(self) -> bool:
        """True if the normalizer changes ASCII text too, for example to lower case."""
        letters = "".join(map(chr, range(32, 127)))
        return self._normalizer is not None and str(self._normalizer.normalize_str(letters)) != letters

    def _longest_token(self, text: str) -> str | None:
        """Return the longest token that `text` begins with."""
        return next((token for start, token in self._find_tokens(text, self._all) if start == 0), None)

    @cached_property
    def _heads(self) -> re.Pattern[str]:
        heads = "".join(sorted({re.escape(head[0]) for head in self._all}))
        return re.compile(f"[{heads}]" if heads else "(?!)")

    @cached_property
    def _normalizer(self) -> Any:
        """The tokenizer's normalizer; None if no added token is looked for in normalized text."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not any(token.normalized for token in self._tokenizer.added_tokens_decoder.values()):
            return None
        return backend.normalizer

    @cached_property
    def _written(self) -> re.Pattern[str]:
        """Pattern that finds added tokens in marked text, the longest first, as the tokenizer does."""
        flags = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
        patterns = []
        for token in sorted(self._added, key=len, reverse=True):
            # A mark stands behind a token's first character, so only a token of one character can match before a mark.
            pattern = re.escape(token) + (f"(?!{_MARK})" if len(token) == 1 else "")
            is_word = token in flags and flags[token].single_word
            patterns.append(rf"(?<!\w){pattern}(?!\w)" if is_word else pattern)
        return re.compile("|".join(patterns))

    @cached_property
    def _backend(self) -> TextBackend | None:
        """The tokenizer with placeholders; None for a tokenizer in Python, which has no backend to copy."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers import Tokenizer

        state = json.loads(backend.to_str())
        places = {int(token["id"]): _PLACE.format(token["id"]) for token in state["added_tokens"]}
        added = [{**token, "content": places[token["id"]]} for token in state["added_tokens"]]
        changed = {"added_tokens": added, "post_processor": None, "truncation": None, "padding": None}
        tokenizer = Tokenizer.from_str(json.dumps({**state, **changed}))
        ids: dict[int, int] = {}
        for token_id, place in places.items():
            place_id = tokenizer.token_to_id(place)
            if place_id is not None:
                ids[place_id] = token_id
        model = state["model"]
        unknown = {self._tokenizer.unk_token_id, model.get("unk_id"), self._added.get(model.get("unk_token") or "")}
        never = {token_id for token, token_id in self._added.items() if token.strip()} - unknown
        return TextBackend(tokenizer, ids, frozenset(never))

    def _with_places(self, text: str) -> str:
        """Return a marked text without marks, with a placeholder for each control token that has no mark."""
        parts: list[str] = []
        position = 0
        for match in self._written.finditer(text):
            parts.append(remove_marks(text[position : match.start()]))
            parts.append(_PLACE.format(self._added[match[0]]))
            position = match.end()
        parts.append(remove_marks(text[position:]))
        return "".join(parts)


def remove_marks(text: str) -> str:
    """Return a marked text without its marks, as a person reads it."""
    return text.replace(_MARK, "").replace(_LITERAL, _ESCAPE) if _ESCAPE in text else text


def _mark_places(text: str) -> Iterator[int]:
    return (match.start() for match in re.finditer(_MARK, text) if match.start())


def _by_head(tokens: list[str]) -> dict[str, tuple[str, ...]]:
    """Return tokens by their first two characters. Each tuple has the longest token first."""
    by_head: defaultdict[str, list[str]] = defaultdict(list)
    for token in sorted(tokens, key=len, reverse=True):
        by_head[token[:2]].append(token)
    return {head: tuple(head_tokens) for head, head_tokens in by_head.items()}
