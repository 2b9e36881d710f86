"""Text from outside stays text: it gives no control token, also where it spells one (contract 4).

A chat template renders all messages to one string, and a tokenizer finds its added tokens anywhere in a string. Spelled
tokens therefore get a mark behind their first character before the template sees them. The mark is two noncharacters of
Unicode, which templates leave where they are. `encode` then knows which tokens the template itself wrote.
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

# Unicode reserves these for a program's own use: no text that is exchanged holds them. Text that does is kept.
_ESCAPE = "\ufdd0"
_MARK = f"{_ESCAPE}\ufdd1"
_LITERAL = f"{_ESCAPE}\ufdd2"
# Stands for an added token while the text around it is encoded; the number is the token's id. No text can spell it.
_PLACE = f"\ufdd3{secrets.token_hex(16)} {{}}\ufdd4"
# Roles from which templates make control tokens, as in <|user|>.
_ROLE_NAMES = {"system", "developer", "user", "assistant", "tool", "function", "observation", "environment", "ipython"}
# Marks of the model's own thinking and tool calls, as the tokenizers of the usual families name them.
_OWN = re.compile(
    r"think|thought|reasoning|tool[_▁ ]?call|tool[_▁ ]?sep|python_tag|\[ARGS\]|\[CALL_ID\]|arg_(key|value)"
    r"|</?(function|parameter)\b|_ACTION",
    re.IGNORECASE,
)
# Characters before a text that its encoding is found in. Tokenizers look back to the last added token, or by a word.
_CONTEXT = 256
# Texts before a cut, for which no token reaches into the text behind.
_CUTS = ("0", "\n")
# Values of an assistant's message that are its own words. Its other values, such as tool calls, are data.
_OWN_WORDS = ("content", "reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class TextBackend:
    """A tokenizer whose added tokens have placeholders as names."""

    tokenizer: Any
    # Ids of the placeholders -> those of the tokens.
    ids: dict[int, int]
    # Ids that no text may give. The token of unknown text is not included.
    never: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text with placeholders; none if the model has a control token as a piece of text."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        if any(token in self.never for token in tokens if token not in self.ids):
            return []
        return [self.ids.get(token, token) for token in tokens]


class ControlTokens:
    """Added tokens of a tokenizer, special or not. Those of white space alone are text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added: dict[str, int] = dict(tokenizer.get_added_vocab())
        tokens = [token for token in self._added if token.strip()]
        self._all = _by_head(tokens)
        self._not_own = _by_head([token for token in tokens if not _OWN.search(token)])

    def mark_message(self, message: dict[str, Any], end: str | None = None) -> dict[str, Any]:
        """Return a message with a mark in each token that it spells.

        An assistant's text keeps the marks of thinking and of tool calls. end: token that may end its text as a token,
        where the template writes none.
        """
        if message.get("role") != "assistant":
            return {**self.mark_all(message), "role": self._mark_role(message.get("role"))}
        own_words = {name: self._mark_own_words(value, end) for name, value in message.items() if name in _OWN_WORDS}
        further = {name: value for name, value in message.items() if name not in own_words}
        return {**self.mark_all(further), **own_words}

    def mark_all(self, value: Any) -> Any:
        """Return JSON-like data with a mark in each token that its texts spell, names included."""
        if isinstance(value, str):
            return self._mark_text(value, self._all)
        if isinstance(value, dict):
            return {self.mark_all(name): self.mark_all(child) for name, child in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(child) for child in value]
        return value

    def join_texts(self, texts: list[str]) -> str:
        """Return marked texts as one, with marks also where only two texts together spell a token."""
        joined = ""
        for text in texts:
            plain = remove_marks(joined)
            cut = len(plain)
            tokens = self._find_tokens(plain + remove_marks(text), self._all)
            crosses = any(start < cut < start + len(token) for start, token in tokens)
            joined = f"{joined}{_MARK}{text}" if crosses else joined + text
        return joined

    def find_spelled(self, value: Any) -> list[str]:
        """Return the tokens that marked data hold as text, in order."""
        tokens: list[str] = []
        if isinstance(value, str):
            longest = 3 * max(map(len, self._added), default=0)
            for place in _mark_places(value):
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
        """Return the tokens of marked text: control tokens where no mark is, and text as the model reads it.

        Without a mark these are the tokenizer's own. With one, the text between two control tokens is still encoded as
        a whole, so that it merges as it would if the spelled token were no token.

        before: marked text in front, whose tokens stay as they are. The encoding of a text depends on its place:
        SentencePiece marks the beginning of a word, and some control tokens take the blanks around them.
        """
        if not before:
            return self._encode_alone(text)
        context = self._context(before)
        tokens = self._encode_behind(text, context)
        # None: a token would reach into both texts.
        return self._encode_cut(text) if tokens is None else tokens

    def _context(self, before: str) -> str:
        """Return the end of a text that decides how text behind it is encoded: from its last token on."""
        end = before[-_CONTEXT:]
        tokens = self._find_tokens(end, self._all)
        starts = [start for start, token in tokens if not end.startswith(_MARK, start + len(token))]
        if starts:
            return end[starts[-1] :]
        # A longer text is cut between two words.
        return end if len(before) <= _CONTEXT else end[end.find(" ") + 1 :]

    def _encode_behind(self, text: str, context: str) -> list[int] | None:
        """Return the tokens of text behind a context; None if the context has other tokens there."""
        head = self._contexts(context)
        tokens = self._encode_alone(context + text)
        return tokens[len(head) :] if tokens[: len(head)] == head else None

    def _encode_cut(self, text: str) -> list[int]:
        """Return the tokens of text that no token shares with the text before it."""
        tried = (self._encode_behind(text, cut) for cut in _CUTS)
        return next((tokens for tokens in tried if tokens is not None), None) or self._encode_alone(text)

    @cached_property
    def _contexts(self) -> Callable[[str], list[int]]:
        """Encode a context. It is the same before nearly every turn."""
        return lru_cache(maxsize=64)(self._encode_alone)

    def _encode_alone(self, text: str) -> list[int]:
        if _ESCAPE not in text:
            return self._encode_text(text)
        if self._backend and (tokens := self._backend.encode(self._with_places(text))):
            return tokens
        # The tokenizer is of another library, or its model has the spelled text as a piece.
        first, *later_parts = map(remove_marks, text.split(_MARK))
        tokens = self._encode_text(first)
        for part in later_parts:
            tokens += self._encode_cut(part)
        return tokens

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _mark_role(self, role: Any) -> Any:
        """Return a role with marks throughout if a template could make it a control token, as `end` to <|end|>."""
        if not isinstance(role, str) or role in _ROLE_NAMES or not role:
            return self.mark_all(role)
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
            # A token that the text spells only once it is normalized; the mark has it encoded by `_backend`.
            places = [len(text) - len(text.lstrip()) + 1]
        cuts = [0, *places, len(text)]
        parts = (text[start:end].replace(_ESCAPE, _LITERAL) for start, end in pairwise(cuts))
        return _MARK.join(parts)

    def _find_tokens(self, text: str, tokens: dict[str, tuple[str, ...]]) -> Iterator[tuple[int, str]]:
        """Yield (position, token) of all tokens that `text` spells; of several at one position the longest."""
        for match in self._heads.finditer(text):
            start = match.start()
            for head in (text[start : start + 2], text[start]):
                candidates = tokens.get(head)
                if candidates and text.startswith(candidates, start):
                    yield start, next(token for token in candidates if text.startswith(token, start))
                    break

    def _normalize(self, text: str) -> str:
        """Return the text in which some added tokens are found; empty where it is the same."""
        if self._normalizer is None or (text.isascii() and not self._folds):
            return ""
        try:
            return str(self._normalizer.normalize_str(text))
        except UnicodeEncodeError:  # half of a surrogate pair, which no tokenizer encodes
            return ""

    @cached_property
    def _folds(self) -> bool:
        """True if the normalizer changes ASCII text too, as one that makes it lower case."""
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
        """Normalizer that changes text before some added tokens are found in it; None where it does so before none."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or not any(token.normalized for token in self._tokenizer.added_tokens_decoder.values()):
            return None
        return backend.normalizer

    @cached_property
    def _written(self) -> re.Pattern[str]:
        """Finds added tokens in marked text, the longest first, as the tokenizer does."""
        flags = {token.content: token for token in self._tokenizer.added_tokens_decoder.values()}
        patterns = []
        for token in sorted(self._added, key=len, reverse=True):
            pattern = re.escape(token) + (f"(?!{_MARK})" if len(token) == 1 else "")
            alone = token in flags and flags[token].single_word
            patterns.append(rf"(?<!\w){pattern}(?!\w)" if alone else pattern)
        return re.compile("|".join(patterns))

    @cached_property
    def _backend(self) -> TextBackend | None:
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
        """Return marked text as plain text, with a placeholder for each control token that it holds unmarked."""
        parts: list[str] = []
        position = 0
        for match in self._written.finditer(text):
            parts.append(remove_marks(text[position : match.start()]))
            parts.append(_PLACE.format(self._added[match[0]]))
            position = match.end()
        parts.append(remove_marks(text[position:]))
        return "".join(parts)


def remove_marks(text: str) -> str:
    """Return the text that a person reads."""
    return text.replace(_MARK, "").replace(_LITERAL, _ESCAPE) if _ESCAPE in text else text


def _mark_places(text: str) -> Iterator[int]:
    return (match.start() for match in re.finditer(_MARK, text) if match.start())


def _by_head(tokens: list[str]) -> dict[str, tuple[str, ...]]:
    """Return tokens by their first two characters, the longest first."""
    by_head: defaultdict[str, list[str]] = defaultdict(list)
    for token in sorted(tokens, key=len, reverse=True):
        by_head[token[:2]].append(token)
    return {head: tuple(head_tokens) for head, head_tokens in by_head.items()}
