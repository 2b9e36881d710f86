"""Remarks on unknown keys: the right section, the right spelling, or rlctl's equal of another tool's key. Pure.

`KnownKeys` looks for a remark in this order: a feature that rlctl lacks, such as `critic`; a key of another tool (a
peer) with the same path or the same last two words; a longer or shorter form of a name in the same section; a peer's
key with the same last word; the same name in another section of this kind of run; a similar name in the same section;
the same name in the other kind of run; a similar name in a section with a similar name, first of this kind of run.

A wrong remark is worse than none. So a name without its section leads to another section only if the name is clear by
itself (`gpu_memory_utilization`, `lr`). `enabled`, `path` and `backend` mean something else in each section.
"""

from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher

from rlctl.config.errors import did_you_mean
from rlctl.config.peer_keys import FORMERLY, PeerKey, peer_keys
from rlctl.config.provenance import ConfigNode, children

# Least similarity, from 0 to 1, at which two words count as the same or as similar. Sections are compared more strictly
# for a name that is not clear by itself, and names are compared more strictly in another section.
_SAME_SECTION = 0.6
_EQUAL_SECTION = 0.8
_NEAR_HERE = 0.75
_NEAR_ELSEWHERE = 0.8
_VERY_NEAR = 0.9
# Fewest letters of a word that counts as a form of a longer one.
_SHORTEST_FORM = 3
# Sections of the models besides the policy.
_OTHER_MODELS = ("reference", "teacher", "teachers", "roles", "rewards", "critic")
# One-word names that are clear without their section. Others, such as `type`, `enabled` or `path`, are not.
_CLEAR_WORDS = ("betas", "colocated", "dtype", "eps", "lr", "rslora", "seed", "temperature", "tokenizer")


class KnownKeys:
    """Known keys of a schema, which find the remark for an unknown key.

    keys: dotted key -> True for a section, for this kind of run. all_keys: the same for all kinds. peers: True: use
    other tools' keys too.
    """

    def __init__(self, keys: Mapping[str, bool], all_keys: Mapping[str, bool], peers: bool) -> None:
        self._keys = keys
        self._all_keys = all_keys
        self._knows_peers = peers
        self._last_words = {key.rpartition(".")[2] for key in all_keys}

    @property
    def _peers(self) -> tuple[PeerKey, ...]:
        return peer_keys() if self._knows_peers else ()

    def remark(self, path: str, names: list[str], is_section: bool = False) -> str:
        """Return a hint about the dotted `path`, which an error message appends to "unknown key".

        names: keys that exist in its section. is_section: True if the unknown key is a section.
        """
        remark = self._find_remark(path, names, is_section)
        return remark or f"; {path.rpartition('.')[0] or 'a config'} has {', '.join(names)}"

    def answers_whole_section(self, path: str, names: list[str]) -> bool:
        """Return True if one remark fits a whole unknown section with the keys `names`.

        That is so if rlctl has this section elsewhere, or if `peer_keys.yaml` has an entry for the section: a section
        of verl, NeMo-RL or another framework.
        """
        for section in _keys_with_name(path.rpartition(".")[2], self._all_keys, sections_only=True):
            if all(f"{section}.{name}" in self._all_keys for name in names):
                return True
        return self._absent_part(path) is not None or self._has_own_row(path)

    def iterate_values(self, node: ConfigNode, path: str) -> Iterator[tuple[str, ConfigNode]]:
        """Yield (path, node) of each value in an unknown section. An inner section with its own peer row is yielded as
        one.
        """
        named_children = children(node)
        if not named_children or self._absent_part(path) is not None or self._has_own_row(path):
            yield path, node
            return
        for name, child in named_children.items():
            yield from self.iterate_values(child, f"{path}.{name}")

    def _has_own_row(self, path: str) -> bool:
        """Return True if the path ends in a peer's key of at least two words."""
        return any("." in peer.key and f".{path}".endswith(f".{peer.key}") for peer in self._peers)

    def _absent_part(self, path: str) -> PeerKey | None:
        """Return the row of a feature on this path that rlctl lacks, such as `critic`; None if there is none."""
        words = path.split(".")
        sections = [f".{'.'.join(words[:end])}" for end in range(1, len(words) + 1)]
        absent = [peer for peer in self._peers if not peer.rlctl_key]
        return next((peer for peer in absent if any(section.endswith(f".{peer.key}") for section in sections)), None)

    def has_remark(self, path: str) -> bool:
        """Return True if a remark on `path` can be found without the keys of its section."""
        return bool(self._find_remark(path, [], is_section=False))

    def _find_remark(self, path: str, names: list[str], is_section: bool) -> str:
        words = path.split(".")
        if absent := self._absent_part(path):
            return self._describe_peer(absent)
        peer = self._nearest_peer(words, min_words=2) or next((peer for peer in self._peers if peer.key == path), None)
        if peer:
            return self._describe_peer(peer)
        if form := self._other_form(path, names):
            return f"; did you mean {form}?"
        if peer := self._nearest_peer(words, min_words=1):
            return self._describe_peer(peer)
        if is_section and (section_remark := self._section_remark(path)):
            return section_remark
        # A key of a list entry is compared with the keys of the entry alone.
        if words[-2:-1] and words[-2].isdecimal():
            return did_you_mean(words[-1], names, _NEAR_HERE)
        # An identical name in another kind of run comes before a similar name.
        return (
            _elsewhere_remark(path, self._keys, is_section)
            or did_you_mean(words[-1], names, _NEAR_HERE)
            or self._other_kind_remark(path, is_section)
            or _near_key_remark(path, self._keys)
            or _near_key_remark(path, self._all_keys)
        )

    def _other_form(self, path: str, names: list[str]) -> str:
        """Return a key of the same section that is another form of the path's last word, for example betas for beta."""
        section, _, word = path.rpartition(".")
        value_names = [name for name in names if not self._keys.get(f"{section}.{name}" if section else name, True)]
        forms = [name for name in value_names if name.startswith(word) or word.startswith(name)]
        longest = max((form for form in forms if min(len(form), len(word)) >= _SHORTEST_FORM), key=len, default="")
        if form := longest or next((name for name in value_names if _ratio(word, name) >= _VERY_NEAR), ""):
            return form
        # Words may be left out: pipeline_parallel_size for pipeline_model_parallel_size.
        parts = set(word.split("_"))
        if len(parts) == 1:
            return ""
        return min((name for name in value_names if parts < set(name.split("_"))), key=len, default="")

    def _nearest_peer(self, words: list[str], min_words: int) -> PeerKey | None:
        """Return the peer's key that shares the most words with the path, counted from the end.

        A single shared word must be clear by itself. It must not be a name of rlctl too, unless it is the peer's whole
        key and means something else there.
        """
        nearest: PeerKey | None = None
        most_shared = (0, False)
        for peer in self._peers:
            peer_words = peer.key.split(".")
            count = _count_shared_end(words, peer_words)
            # Among keys with the same count one that is contained as a whole wins.
            shared = (count, count == len(peer_words))
            if nearest is None or shared > most_shared:
                nearest = peer
                most_shared = shared
        count = most_shared[0]
        if count < min_words or nearest is None:
            return None
        # The second case is a path of one word, which is the whole key of the peer.
        if count > 1 or nearest.key == words[-1] == ".".join(words):
            return nearest
        if words[-1] in self._last_words or not _is_clear(words[-1]):
            return next((peer for peer in self._peers if peer.key == words[-1]), None)
        return nearest

    def _section_remark(self, path: str) -> str:
        """Return a remark for a peer's section if all of its keys are in one section of rlctl; else an empty text."""
        peers = [peer for peer in self._peers if peer.key.startswith(f"{path}.")]
        rlctl_sections = {peer.rlctl_key.rpartition(".")[0] for peer in peers}
        # A single key does not show where a whole section belongs.
        if len(peers) == 1 or len(rlctl_sections) != 1:
            return ""
        return f"; {peers[0].tool}'s {path} is {rlctl_sections.pop()}"

    def _describe_peer(self, peer: PeerKey) -> str:
        if not peer.rlctl_key:
            return f"; rlctl has no {peer.note}"
        subject = f"{peer.key} is now" if peer.tool == FORMERLY else f"{peer.tool}'s {peer.key} is"
        note = f": {peer.note}" if peer.note else ""
        return f"; {subject} {self._key_of_this_kind(peer.rlctl_key)}{note}"

    def _key_of_this_kind(self, rlctl_key: str) -> str:
        """Return the key of this kind of run from a text such as `grpo.a or sft.b`; the whole text if there is none."""
        return next((key for key in rlctl_key.split(" or ") if key in self._keys), rlctl_key)

    def _other_kind_remark(self, path: str, is_section: bool) -> str:
        """Return a remark that a key is of another kind of run, with the equal key of this kind if there is one."""
        key = next(iter(_keys_of_one_meaning(path, self._all_keys, is_section)), None)
        if key is None:
            return ""
        peers = [peer for peer in self._peers if key in peer.rlctl_key.split(" or ")]
        equal_keys = [self._key_of_this_kind(peer.rlctl_key) for peer in peers]
        equal_key = next((equal_key for equal_key in equal_keys if equal_key in self._keys), None)
        remedy = f"; this one has {equal_key}" if equal_key else ""
        return f"; {key} is of another kind of run{remedy}"


def _keys_with_name(name: str, keys: Mapping[str, bool], sections_only: bool) -> list[str]:
    return [key for key in keys if key.rpartition(".")[2] == name and (keys[key] or not sections_only)]


def _keys_of_one_meaning(path: str, keys: Mapping[str, bool], sections_only: bool) -> list[str]:
    """Return the keys with the path's last word in a similar section; if none, all such keys if the word is clear."""
    name = path.rpartition(".")[2]
    same_name = _prefer_policy(path, _keys_with_name(name, keys, sections_only))
    is_clear = _is_clear(name) or sections_only or "." not in path
    min_ratio = _SAME_SECTION if is_clear else _EQUAL_SECTION
    in_same_section = [key for key in same_name if _sections_ratio(path, key) >= min_ratio]
    return in_same_section if in_same_section or not is_clear else same_name


def _prefer_policy(path: str, keys: list[str]) -> list[str]:
    """Return the policy's keys, because other models repeat them, or those of the other model that the path names.

    Return all keys if that model has no such key.
    """
    named_models = {word for word in path.split(".") if word in _OTHER_MODELS}
    sections = [key.partition(".")[0] for key in keys]
    if named_models:
        of_model = [key for key, section in zip(keys, sections) if section in named_models]
    else:
        of_model = [key for key, section in zip(keys, sections) if section not in _OTHER_MODELS]
    return of_model or keys


def _is_clear(name: str) -> bool:
    """Return True if a name is clear without the name of its section."""
    return "_" in name or name in _CLEAR_WORDS


def _elsewhere_remark(path: str, keys: Mapping[str, bool], sections_only: bool) -> str:
    """Return a remark that names other keys with the path's last word."""
    same_meaning = _keys_of_one_meaning(path, keys, sections_only)
    if len(same_meaning) == 1 and _sections_ratio(path, same_meaning[0]) >= _SAME_SECTION:
        return f"; did you mean {same_meaning[0]}?"
    return f"; it belongs at {' or '.join(same_meaning)}" if same_meaning else ""


def _near_key_remark(path: str, keys: Mapping[str, bool]) -> str:
    """Return a remark that names the key in a similar section whose last word is the most similar."""
    name = path.rpartition(".")[2]
    ratios: dict[str, float] = {}
    for key in keys:
        ratio = _near_ratio(name, key.rpartition(".")[2])
        if ratio >= _NEAR_ELSEWHERE and ("." not in path or _sections_ratio(path, key) >= _SAME_SECTION):
            ratios[key] = ratio
    # A key of a list entry is meant less often than one of a section.
    nearest = max(ratios, key=lambda key: (ratios[key], ".N." not in key, _sections_ratio(path, key)), default=None)
    return f"; did you mean {nearest}?" if nearest else ""


def _count_shared_end(words: list[str], other_words: list[str]) -> int:
    """Return the number of equal words at the end of two paths."""
    count = 0
    for word, other_word in zip(reversed(words), reversed(other_words)):
        if word != other_word:
            break
        count += 1
    return count


def _sections_ratio(path: str, key: str) -> float:
    """Return the similarity of the sections of two keys: the larger of that of whole paths and of last words; 0 without
    a section.
    """
    section = path.rpartition(".")[0]
    key_section = key.rpartition(".")[0]
    if not section:
        return 0.0
    return max(_ratio(section, key_section), _ratio(section.rpartition(".")[2], key_section.rpartition(".")[2]))


def _near_ratio(word: str, other_word: str) -> float:
    """Return the similarity of two words; 0 without computing it if their letters show that it is too low."""
    matcher = SequenceMatcher(None, word, other_word)
    may_be_near = min(matcher.real_quick_ratio(), matcher.quick_ratio()) >= _NEAR_ELSEWHERE
    return matcher.ratio() if may_be_near else 0.0


def _ratio(word: str, other_word: str) -> float:
    return SequenceMatcher(None, word, other_word).ratio()
