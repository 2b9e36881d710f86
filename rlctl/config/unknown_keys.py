"""What to say of a key that no section has: the right place, the right spelling, or the word of another tool. Pure.

Looked for in this order: a peer's key by two words of its path or more, a longer or shorter form of a name in the same
section, a peer's key by its last word, the same name in another section, a near name in the same section, and the
nearest of all names, by its last word and its whole path.
"""

from collections.abc import Mapping
from difflib import SequenceMatcher

from rlctl.config.errors import did_you_mean
from rlctl.config.peer_keys import FORMERLY, PEER_KEYS, PeerKey

_NEAR = 0.6
_VERY_NEAR = 0.9
_SHORTEST_FORM = 3


class KnownKeys:
    """The keys of some schemas. keys: dotted key -> True for a section. peers: keys of other tools are known too."""

    def __init__(self, keys: Mapping[str, bool], peers: bool) -> None:
        self._keys = keys
        self._peers = PEER_KEYS if peers else ()
        self._last = {key.rpartition(".")[2] for key in keys}

    def remark(self, path: str, here: list[str], section: bool = False) -> str:
        """What follows "unknown key" for the dotted `path`. here: the names in its section. section: it is one."""
        return self._found(path, here, section) or f"; {path.rpartition('.')[0] or 'a config'} has {', '.join(here)}"

    def knows(self, path: str, names: list[str]) -> bool:
        """True if an unknown section that holds `names` is known as a whole: a part of rlctl that is elsewhere, or one
        that rlctl does not have."""
        name = path.rpartition(".")[2]
        elsewhere = self._same(name, section=True)
        ours = any(all(f"{section}.{each}" in self._keys for each in names) for section in elsewhere)
        return ours or any(each.key == name and not each.ours for each in self._peers)

    def leads(self, path: str) -> bool:
        """True if there is a remark on `path` without the names of its section."""
        return bool(self._found(path, [], section=False))

    def _found(self, path: str, here: list[str], section: bool) -> str:
        words = path.split(".")
        if peer := self._peer(words, at_least=2):
            return _translated(peer)
        if form := self._form(path, here):
            return f"; did you mean {form}?"
        if peer := self._peer(words, at_least=1):
            return _translated(peer)
        if words[-2:-1] and words[-2].isdecimal():
            return did_you_mean(words[-1], here)
        if same := self._same(words[-1], section):
            nearer = [key for key in same if _parents_ratio(path, key) >= _NEAR]
            return f"; did you mean {nearer[0]}?" if len(nearer) == 1 else f"; it belongs at {' or '.join(same)}"
        return did_you_mean(words[-1], here) or self._nearest(path)

    def _form(self, path: str, here: list[str]) -> str:
        """The value of the same section whose name is the path's last word in another form: beta for betas."""
        section, _, name = path.rpartition(".")
        values = [each for each in here if not self._keys.get(f"{section}.{each}" if section else each, True)]
        alike = [each for each in values if each.startswith(name) or name.startswith(each)]
        longest = max((each for each in alike if min(len(each), len(name)) >= _SHORTEST_FORM), key=len, default="")
        return longest or next((each for each in values if _ratio(name, each) >= _VERY_NEAR), "")

    def _peer(self, words: list[str], at_least: int) -> PeerKey | None:
        """The peer's key that shares most words with the path, from its end; one word alone must not be ours too."""
        shared = [(_shared_end(words, each.key.split(".")), each) for each in self._peers]
        count, peer = max(shared, key=lambda pair: pair[0], default=(0, None))
        if count < at_least or peer is None:
            return None
        if count == 1 and words[-1] in self._last:
            # Ours elsewhere: only a tool whose whole key it is means something else by it.
            return next((each for each in self._peers if each.key == words[-1]), None)
        return peer

    def _same(self, name: str, section: bool) -> list[str]:
        found = [key for key in self._keys if key.rpartition(".")[2] == name]
        return [key for key in found if self._keys[key]] if section else found

    def _nearest(self, path: str) -> str:
        name = path.rpartition(".")[2]
        words = {word: ratio for word in self._last if (ratio := _near_ratio(name, word)) >= _NEAR}
        near = [key for key in self._keys if key.rpartition(".")[2] in words]
        best = max(near, key=lambda key: (words[key.rpartition(".")[2]], _parents_ratio(path, key)), default=None)
        return f"; did you mean {best}?" if best else ""


def _translated(peer: PeerKey) -> str:
    if not peer.ours:
        return f"; rlctl has no {peer.note}"
    said = f"{peer.key} is now" if peer.tool == FORMERLY else f"{peer.tool}'s {peer.key} is"
    return f"; {said} {peer.ours}" + (f": {peer.note}" if peer.note else "")


def _shared_end(words: list[str], key: list[str]) -> int:
    """How many words two paths share, from the end."""
    count = 0
    for one, other in zip(reversed(words), reversed(key)):
        if one != other:
            break
        count += 1
    return count


def _parents_ratio(path: str, key: str) -> float:
    return _ratio(path.rpartition(".")[0], key.rpartition(".")[0]) if "." in path else 0.0


def _near_ratio(one: str, other: str) -> float:
    """Their likeness where it may be near, else 0: most words are told apart by their letters alone."""
    matcher = SequenceMatcher(None, one, other)
    return matcher.ratio() if min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= _NEAR else 0.0


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
