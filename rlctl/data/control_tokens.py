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
# Values of an assistant's message that it says itself. Its other values, such as tool calls, are data.
_SAID = ("content", "reasoning_content", "reasoning", "thinking")


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

    def message(self, message: dict[str, Any], end: str | None = None) -> dict[str, Any]:
        """Return a message with a mark in each token that it spells.

        An assistant's text keeps the marks of thinking and of tool calls. end: token that may end its text as a token,
        where the template writes none.
        """
        if message.get("role") != "assistant":
            return {**self.outside(message), "role": self._role(message.get("role"))}
        said = {name: self._said(value, end) for name, value in message.items() if name in _SAID}
        return {**self.outside({name: value for name, value in message.items() if name not in said}), **said}

    def outside(self, value: Any) -> Any:
        """Return JSON-like data with a mark in each token that its texts spell, names included."""
        if isinstance(value, str):
            return self._marked(value, self._all)
        if isinstance(value, dict):
            return {self.outside(name): self.outside(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.outside(each) for each in value]
        return value

    def joined(self, texts: list[str]) -> str:
        """Return marked texts as one, with marks also where only two texts together spell a token."""
        whole = ""
        for text in texts:
            plain, behind = unmarked(whole), unmarked(text)
            cut = len(plain)
            both = plain + behind
            crosses = any(start < cut < start + len(token) for start, token in self._spelled(both, self._all))
            whole = f"{whole}{_MARK}{text}" if crosses else whole + text
        return whole

    def spelled(self, value: Any) -> list[str]:
        """Return the tokens that marked data hold as text, in order."""
        if isinstance(value, str):
            near = 3 * max(map(len, self._added), default=0)
            found = (self._longest(unmarked(value[at - 1] + value[at : at + near])) for at in _marks(value))
            return [token for token in found if token]
        if isinstance(value, dict):
            role = str(value.get("role") or "")
            made = [unmarked(role)] if _MARK in role and not self.spelled(role) else []
            return made + self.spelled([*value, *value.values()])
        return [token for each in value for token in self.spelled(each)] if isinstance(value, list) else []

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
        starts = [at for at, token in self._spelled(end, self._all) if not end.startswith(_MARK, at + len(token))]
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
        first, *others = map(unmarked, text.split(_MARK))
        return [*self._encode_text(first), *(token for part in others for token in self._encode_cut(part))]

    def _encode_text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _role(self, role: Any) -> Any:
        """Return a role with marks throughout if a template could make it a control token, as `end` to <|end|>."""
        if not isinstance(role, str) or role in _ROLE_NAMES or not role:
            return self.outside(role)
        if role.replace("-", "_").isidentifier() and not any(role in token for token in self._added):
            return role
        return _MARK + _MARK.join(role.replace(_ESCAPE, "")) + _MARK

    def _said(self, value: Any, end: str | None) -> Any:
        if not isinstance(value, str):
            return self.outside(value)
        if end and value.endswith(end):
            return self._marked(value.removesuffix(end), self._not_own) + end
        return self._marked(value, self._not_own)

    def _marked(self, text: str, tokens: dict[str, tuple[str, ...]]) -> str:
        places = sorted({start + 1 for start, _ in self._spelled(text, tokens)})
        if not places and any(self._spelled(self._normalized(text), tokens)):
            # A token that the text spells only once it is normalized; the mark has it encoded by `_backend`.
            places = [len(text) - len(text.lstrip()) + 1]
        cuts = [0, *places, len(text)]
        parts = (text[start:end].replace(_ESCAPE, _LITERAL) for start, end in pairwise(cuts))
        return _MARK.join(parts)

    def _spelled(self, text: str, tokens: dict[str, tuple[str, ...]]) -> Iterator[tuple[int, str]]:
        """Yield (position, token) of all tokens that `text` spells; of several at one position the longest."""
        for found in self._heads.finditer(text):
            start = found.start()
            for head in (text[start : start + 2], text[start]):
                if (those := tokens.get(head)) and text.startswith(those, start):
                    yield start, next(token for token in those if text.startswith(token, start))
                    break

    def _normalized(self, text: str) -> str:
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

    def _longest(self, text: str) -> str | None:
        return next((token for start, token in self._spelled(text, self._all) if start == 0), None)

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
        made = Tokenizer.from_str(json.dumps({**state, **changed}))
        found = {made.token_to_id(place): number for number, place in places.items()}
        ids = {place: number for place, number in found.items() if place is not None}
        model = state["model"]
        unknown = {self._tokenizer.unk_token_id, model.get("unk_id"), self._added.get(model.get("unk_token") or "")}
        never = {number for token, number in self._added.items() if token.strip()} - unknown
        return TextBackend(made, ids, frozenset(never))

    def _with_places(self, text: str) -> str:
        """Return marked text as plain text, with a placeholder for each control token that it holds unmarked."""
        parts, position = list[str](), 0
        for found in self._written.finditer(text):
            parts += [unmarked(text[position : found.start()]), _PLACE.format(self._added[found[0]])]
            position = found.end()
        return "".join([*parts, unmarked(text[position:])])


def unmarked(text: str) -> str:
    """Return the text that a person reads."""
    return text.replace(_MARK, "").replace(_LITERAL, _ESCAPE) if _ESCAPE in text else text


def _marks(text: str) -> Iterator[int]:
    return (found.start() for found in re.finditer(_MARK, text) if found.start())


def _by_head(tokens: list[str]) -> dict[str, tuple[str, ...]]:
    """Return tokens by their first two characters, the longest first."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for token in sorted(tokens, key=len, reverse=True):
        found[token[:2]].append(token)
    return {head: tuple(those) for head, those in found.items()}
