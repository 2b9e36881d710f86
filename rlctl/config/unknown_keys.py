"""The answer to a key that no section has: the right place, the right spelling, or the word of another tool. Pure.

It is looked for in this order: a part that rlctl lacks, such as `critic`; a peer's key by its whole path or two of its
words; a longer or shorter form of a name in the same section; a peer's key by its last word; the same name in another
section of this kind of run; a near name in the same section; a near name in a section of nearly the same name. The last
three are then tried for other kinds.

A wrong answer is worse than none. So a name alone leads to another section only if it says what it sets
(`gpu_memory_utilization`, `lr`): `enabled`, `path` and `backend` mean something else in each section.
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

# Least ratio at which two words count as the same or as near, from 0 to 1. Sections are compared more strictly for a
# name that says nothing by itself, and names more strictly in another section.
_SAME_SECTION = 0.6
_EQUAL_SECTION = 0.8
_NEAR_HERE = 0.75
_NEAR_ELSEWHERE = 0.8
_VERY_NEAR = 0.9
_SHORTEST_FORM = 3
# Names of one word that mean the same in every section. Other words need the section: `type`, `enabled`, `path`.
_CLEAR_WORDS = ("betas", "colocated", "dtype", "eps", "lr", "rslora", "seed", "temperature", "tokenizer")


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
        section_name = path.rpartition(".")[2]
        our_sections = _keys_named(section_name, self._every, section=True)
        is_ours = any(all(f"{section}.{name}" in self._every for name in names) for section in our_sections)
        return is_ours or self._absent_part(path) is not None or self._is_whole(path)

    def parts(self, node: ConfigNode, path: str) -> Iterator[tuple[str, ConfigNode]]:
        """Yield (path, node) of each value in an unknown section; a section that a peer's key names is one value."""
        within = children(node)
        if not within or self._absent_part(path) is not None or self._is_whole(path):
            yield path, node
            return
        for name, child in within.items():
            yield from self.parts(child, f"{path}.{name}")

    def _is_whole(self, path: str) -> bool:
        """Return True if a peer's key of two words or more names all of a section."""
        return any("." in peer.key and f".{path}".endswith(f".{peer.key}") for peer in self._peers)

    def _absent_part(self, path: str) -> PeerKey | None:
        """Return the part of a peer on this path that rlctl lacks, such as `critic`; None if there is none."""
        words = path.split(".")
        sections = [f".{'.'.join(words[:end])}" for end in range(1, len(words) + 1)]
        absent = [peer for peer in self._peers if not peer.ours]
        return next((peer for peer in absent if any(section.endswith(f".{peer.key}") for section in sections)), None)

    def leads(self, path: str) -> bool:
        """Return True if there is a remark on `path` without the names of its section."""
        return bool(self._found(path, [], section=False))

    def _found(self, path: str, here: list[str], section: bool) -> str:
        words = path.split(".")
        if absent := self._absent_part(path):
            return self._translated(absent)
        peer = self._peer(words, at_least=2) or next((peer for peer in self._peers if peer.key == path), None)
        if peer:
            return self._translated(peer)
        if form := self._form(path, here):
            return f"; did you mean {form}?"
        if peer := self._peer(words, at_least=1):
            return self._translated(peer)
        if section and (found := self._section_remark(path)):
            return found
        if words[-2:-1] and words[-2].isdecimal():
            return did_you_mean(words[-1], here, _NEAR_HERE)
        own = _elsewhere(path, self._own, section) or did_you_mean(words[-1], here, _NEAR_HERE)
        # The very name of another kind's key comes before a name that is only near.
        return (
            own
            or self._of_another_kind(path, section)
            or _nearest_key(path, self._own)
            or _nearest_key(path, self._every)
        )

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

        One word alone must say what it sets. It must not be an rlctl name too, unless it is a tool's whole key, with
        another meaning.
        """
        shared = [(_shared_end(words, peer.key.split(".")), peer) for peer in self._peers]
        # Among equals the key that the path names whole.
        count, peer = max(shared, key=lambda row: (row[0], row[0] == row[1].key.count(".") + 1), default=(0, None))
        if count < at_least or peer is None:
            return None
        if count > 1 or peer.key == words[-1] == ".".join(words):
            return peer
        whole_key = next((peer for peer in self._peers if peer.key == words[-1]), None)
        if words[-1] in self._last or not _is_clear(words[-1]):
            return whole_key
        return peer

    def _section_remark(self, path: str) -> str:
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
        key = next(iter(_of_one_meaning(path, self._every, section)), None)
        if key is None:
            return ""
        equals = (self._of_this_kind(peer.ours) for peer in self._peers if key in peer.ours.split(" or "))
        equal = next((name for name in equals if name in self._own), None)
        return f"; {key} is of another kind of run" + (f"; this one has {equal}" if equal else "")


def _keys_named(name: str, keys: Mapping[str, bool], section: bool) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] == name and (keys[key] or not section)]


def _of_one_meaning(path: str, keys: Mapping[str, bool], section: bool) -> list[str]:
    """Return the keys with the path's last word in nearly the same section; without any, all if the word is clear."""
    name = path.rpartition(".")[2]
    same_name = _keys_named(name, keys, section)
    is_clear = _is_clear(name) or section or "." not in path
    likeness = _SAME_SECTION if is_clear else _EQUAL_SECTION
    in_same_section = [key for key in same_name if _sections_ratio(path, key) >= likeness]
    return in_same_section or (same_name if is_clear else [])


def _is_clear(name: str) -> bool:
    """Return True if a name says what it sets without the name of its section."""
    return "_" in name or name in _CLEAR_WORDS


def _elsewhere(path: str, keys: Mapping[str, bool], section: bool) -> str:
    """Return a remark on the keys with the path's last word. section: sections alone."""
    found = _of_one_meaning(path, keys, section)
    if len(found) == 1 and _sections_ratio(path, found[0]) >= _SAME_SECTION:
        return f"; did you mean {found[0]}?"
    return f"; it belongs at {' or '.join(found)}" if found else ""


def _nearest_key(path: str, keys: Mapping[str, bool]) -> str:
    """Return a remark on the key in nearly the same section whose last word is nearest to the path's."""
    name = path.rpartition(".")[2]
    likeness: dict[str, float] = {}
    for key in keys:
        ratio = _near_ratio(name, key.rpartition(".")[2])
        if ratio >= _NEAR_ELSEWHERE and ("." not in path or _sections_ratio(path, key) >= _SAME_SECTION):
            likeness[key] = ratio
    best = max(likeness, key=lambda key: (likeness[key], _sections_ratio(path, key)), default=None)
    return f"; did you mean {best}?" if best else ""


def _shared_end(words: list[str], key: list[str]) -> int:
    """Return the number of words that two paths share, from the end."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(reversed(words), reversed(key))))


def _sections_ratio(path: str, key: str) -> float:
    """Return the likeness of the sections of two keys, by their whole paths or their last words; 0 at the top."""
    section = path.rpartition(".")[0]
    other = key.rpartition(".")[0]
    if not section:
        return 0.0
    return max(_ratio(section, other), _ratio(section.rpartition(".")[2], other.rpartition(".")[2]))


def _near_ratio(one: str, other: str) -> float:
    """Return their likeness where they may be near, else 0: most words are told apart by their letters alone."""
    matcher = SequenceMatcher(None, one, other)
    may_be_near = min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= _NEAR_ELSEWHERE
    return matcher.ratio() if may_be_near else 0.0


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
