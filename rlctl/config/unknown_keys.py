"""The answer to a key that no section has: the right place, the right spelling, or the word of another tool. Pure.

It is looked for in this order: a peer's key by its whole path or two of its words, a longer or shorter form of a name
in the same section, a peer's key by its last word, the same name in another section of this kind of run, a near name in
the same section, the nearest name of this kind, by its last word and its whole path, and then both for other kinds.
"""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlctl.config.errors import did_you_mean
from rlctl.config.provenance import ConfigNode, children

_NEAR = 0.6
_VERY_NEAR = 0.9
_SHORTEST_FORM = 3
# A name that says nothing without its section.
_ANY_SECTION = ("type",)


# Tool of a former key of rlctl itself.
_FORMERLY = "rlctl"


class PeerKey(NamedTuple):
    """A key of another tool, and its equal here: see peer_keys.yaml."""

    tool: str
    key: str
    # Keys joined by `and` or `or`; empty if there is none.
    ours: str
    note: str = ""


@cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("peer_keys.yaml").read_text(encoding="utf-8"))
    return tables


@cache
def peer_keys() -> tuple[PeerKey, ...]:
    """Return the keys of other tools and the former ones of rlctl, read once and only for an unknown key."""
    return tuple(
        PeerKey(tool, key, *([found] if isinstance(found, str) else found))
        for tool, keys in _tables().items()
        if tool != "former values"
        for key, found in keys.items()
    )


def renamed_value(key: str, value: object) -> str:
    """Return `; X is now Y` for a word that rlctl had for a value of `key`; nothing for any other."""
    new = _tables()["former values"].get(key, {}).get(str(value))
    return f"; {value} is now {new}" if new else ""


class KnownKeys:
    """The keys of a schema. own: dotted key -> True for a section. every: those of other kinds too.

    peers: keys of other tools are known too.
    """

    def __init__(self, own: Mapping[str, bool], every: Mapping[str, bool], peers: bool) -> None:
        self._own, self._every = own, every
        self._knows_peers = peers
        self._last = {key.rpartition(".")[2] for key in every}

    @property
    def _peers(self) -> tuple[PeerKey, ...]:
        return peer_keys() if self._knows_peers else ()

    def remark(self, path: str, here: list[str], section: bool = False) -> str:
        """Return the text after "unknown key" for the dotted `path`.

        here: the names in its section. section: it is a section itself.
        """
        return self._found(path, here, section) or f"; {path.rpartition('.')[0] or 'a config'} has {', '.join(here)}"

    def knows(self, path: str, names: list[str]) -> bool:
        """Return True if an unknown section with `names` is known as a whole. It is then a part of rlctl under another
        key, or a part that rlctl lacks.
        """
        name = path.rpartition(".")[2]
        elsewhere = _named(name, self._every, section=True)
        ours = any(all(f"{section}.{each}" in self._every for each in names) for section in elsewhere)
        return ours or any(each.key == name and not each.ours for each in self._peers) or self._is_whole(path)

    def parts(self, node: ConfigNode, path: str) -> Iterator[tuple[str, ConfigNode]]:
        """Yield (path, node) of each value in an unknown section; a section that a peer's key names is one value."""
        within = children(node)
        if not within or self._is_whole(path):
            yield path, node
            return
        for name, child in within.items():
            yield from self.parts(child, f"{path}.{name}")

    def _is_whole(self, path: str) -> bool:
        """Return True if a peer's key of two words or more names all of a section."""
        return any("." in each.key and f".{path}".endswith(f".{each.key}") for each in self._peers)

    def leads(self, path: str) -> bool:
        """Return True if there is a remark on `path` without the names of its section."""
        return bool(self._found(path, [], section=False))

    def _found(self, path: str, here: list[str], section: bool) -> str:
        words = path.split(".")
        if peer := self._peer(words, at_least=2) or next((each for each in self._peers if each.key == path), None):
            return self._translated(peer)
        if form := self._form(path, here):
            return f"; did you mean {form}?"
        if peer := self._peer(words, at_least=1):
            return self._translated(peer)
        if section and (found := self._section(path)):
            return found
        if words[-2:-1] and words[-2].isdecimal():
            return did_you_mean(words[-1], here)
        own = _elsewhere(path, self._own, section) or did_you_mean(words[-1], here)
        # The very name of another kind's key comes before a name that is only near.
        return own or self._of_another_kind(path, section) or _nearest(path, self._own) or _nearest(path, self._every)

    def _form(self, path: str, here: list[str]) -> str:
        """Return the value of the same section whose name is the path's last word in another form: betas for beta."""
        section, _, name = path.rpartition(".")
        values = [each for each in here if not self._own.get(f"{section}.{each}" if section else each, True)]
        alike = [each for each in values if each.startswith(name) or name.startswith(each)]
        longest = max((each for each in alike if min(len(each), len(name)) >= _SHORTEST_FORM), key=len, default="")
        if form := longest or next((each for each in values if _ratio(name, each) >= _VERY_NEAR), ""):
            return form
        # Words may be left out: pipeline_parallel_size for pipeline_model_parallel_size.
        parts = set(name.split("_"))
        return min((each for each in values if len(parts) > 1 and parts < set(each.split("_"))), key=len, default="")

    def _peer(self, words: list[str], at_least: int) -> PeerKey | None:
        """Return the peer's key that shares most words with the path, from its end.

        One word alone must not be an rlctl name too, unless it is a tool's whole key, with another meaning.
        """
        shared = [(_shared_end(words, (key := each.key.split("."))), len(key), each) for each in self._peers]
        # Among equals the key that the path names whole.
        count, _, peer = max(shared, key=lambda row: (row[0], row[0] == row[1]), default=(0, 0, None))
        if count < at_least or peer is None or (count == 1 and words[-1] in _ANY_SECTION and len(words) > 1):
            return None
        if count == 1 and words[-1] in self._last:
            return next((each for each in self._peers if each.key == words[-1]), None)
        return peer

    def _section(self, path: str) -> str:
        """Return a remark on a peer's section whose keys are all in one section of rlctl."""
        inside = [each for each in self._peers if each.key.startswith(f"{path}.")]
        ours = {each.ours.rpartition(".")[0] for each in inside}
        return f"; {inside[0].tool}'s {path} is {ours.pop()}" if len(inside) > 1 and len(ours) == 1 else ""

    def _translated(self, peer: PeerKey) -> str:
        if not peer.ours:
            return f"; rlctl has no {peer.note}"
        said = f"{peer.key} is now" if peer.tool == _FORMERLY else f"{peer.tool}'s {peer.key} is"
        return f"; {said} {self._of_this_kind(peer.ours)}" + (f": {peer.note}" if peer.note else "")

    def _of_this_kind(self, ours: str) -> str:
        """Return the key of this kind of run among `grpo.a or sft.b`; all where that is none or all."""
        return next((key for key in ours.split(" or ") if key in self._own), ours)

    def _of_another_kind(self, path: str, section: bool) -> str:
        """Return a remark on a key of another kind of run, with the key of this kind that a peer's is equal to."""
        key = next(iter(_named(path.rpartition(".")[2], self._every, section)), None)
        if key is None:
            return ""
        equals = (self._of_this_kind(each.ours) for each in self._peers if key in each.ours.split(" or "))
        equal = next((each for each in equals if each in self._own), None)
        return f"; {key} is of another kind of run" + (f"; this one has {equal}" if equal else "")


def _named(name: str, keys: Mapping[str, bool], section: bool) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] == name and (keys[key] or not section)]


def _elsewhere(path: str, keys: Mapping[str, bool], section: bool) -> str:
    """Return a remark on the keys with the path's last word. section: sections alone."""
    same = _named(path.rpartition(".")[2], keys, section)
    nearer = [key for key in same if _parents_ratio(path, key) >= _NEAR]
    if len(nearer) == 1:
        return f"; did you mean {nearer[0]}?"
    return f"; it belongs at {' or '.join(same)}" if same else ""


def _nearest(path: str, keys: Mapping[str, bool]) -> str:
    name = path.rpartition(".")[2]
    names = {key: key.rpartition(".")[2] for key in keys}
    words = {word: ratio for word in set(names.values()) if (ratio := _near_ratio(name, word)) >= _NEAR}
    near = [key for key in keys if names[key] in words]
    best = max(near, key=lambda key: (words[names[key]], _parents_ratio(path, key)), default=None)
    return f"; did you mean {best}?" if best else ""


def _shared_end(words: list[str], key: list[str]) -> int:
    """Return the number of words that two paths share, from the end."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(words), reversed(key))))


def _parents_ratio(path: str, key: str) -> float:
    return _ratio(path.rpartition(".")[0], key.rpartition(".")[0]) if "." in path else 0.0


def _near_ratio(one: str, other: str) -> float:
    """Return their likeness where they may be near, else 0: most words are told apart by their letters alone."""
    matcher = SequenceMatcher(None, one, other)
    return matcher.ratio() if min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= _NEAR else 0.0


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
