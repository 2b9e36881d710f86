"""From a tree of values to the typed dataclasses of `schema.py`, collecting every mistake on the way.

Conversion is strict where a guess could be wrong (`1.5` is no whole number, `1` no boolean) and lenient where it
could not: a whole number is a number, and what was written as a number or a list is text where text is wanted.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import Field, fields, is_dataclass
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from rlctl.config import paths
from rlctl.config.errors import BROKEN, Problem, did_you_mean
from rlctl.config.peer_keys import renamed_value
from rlctl.config.provenance import MISSING, ConfigNode, leaves, plain
from rlctl.config.schema import FURTHER, KINDS
from rlctl.config.unknown_keys import KnownKeys

T = TypeVar("T")

_TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
# Keys of an unknown section that are looked for among ours: a huge one takes a second, not minutes.
_MOST_UNKNOWN = 500
# What a 64-bit integer holds: what torch, numpy and vLLM take.
_MOST = 2**63 - 1
# Unknown keys of one config for which the nearest one is looked for.
_MOST_HINTS = 100
_LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


class Converter:
    """Converts one tree; `problems` holds what was wrong, `missing` the keys and sections that are not there.

    recipe: the file to name when something is missing. kinds: schemas that a misplaced key may belong to.
    parents: the files that hold the defaults. away: absolute paths that are not here are left to where they are.
    """

    def __init__(
        self,
        recipe: str,
        kinds: Iterable[type[Any]] = tuple(KINDS.values()),
        parents: tuple[str, ...] = ("grpo.yaml", "sft.yaml"),
        away: bool = False,
    ) -> None:
        self.recipe = recipe
        self.kinds = tuple(kinds)
        self.parents = parents
        self.away = away
        self.problems: list[Problem] = []
        self.missing: list[str] = []
        keys = [key for kind in self.kinds for key, _ in schema_keys(kind)]
        sections = {key.rpartition(".")[0] for key in keys}
        self._known = KnownKeys({key: key in sections for key in keys}, peers=self.kinds == tuple(KINDS.values()))
        self._hints = 0

    def section(self, kind: type[T], node: ConfigNode, key: str = "") -> T:
        """A dataclass from a mapping, in which what was wrong is BROKEN."""
        if not isinstance(node.value, dict):
            return cast(T, self._wrong(node, key, f"must be a section of `key: value`, not {_shown(node)}"))
        hints = _hints(kind)
        takes_any = hints.pop(FURTHER, None) is not None
        others = {name: child for name, child in node.value.items() if name not in hints}
        for name, child in others.items() if not takes_any else ():
            self._unknown(child, _join(key, name), list(hints))
        values: dict[str, Any] = {FURTHER: plain(ConfigNode(others, node.origin))} if takes_any else {}
        for each in fields(cast(Any, kind)):
            if (name := key_of(each.name)) in hints:
                values[each.name] = self._field(each, hints[name], node.value.get(name), _join(key, name))
        return kind(**values)

    def _field(self, spec: "Field[Any]", hint: Any, node: ConfigNode | None, key: str) -> Any:
        if node is None:
            what = "section" if is_dataclass(hint) else "key"
            parents = " or ".join(f"`defaults: {name}`" for name in self.parents)
            missing = f"missing {what}: inherit the defaults, {parents}"
            self.missing.append(key)
            self.problems.append(Problem(self.recipe, key, missing))
            return BROKEN
        if node.value == MISSING:
            self.problems.append(Problem(self.recipe, key, f"not set, and has no default: {spec.metadata['doc']}"))
            return BROKEN
        value = self._value(hint, node, key, spec.metadata)
        if isinstance(value, str) and "path" in spec.metadata and value not in _literals(hint):
            try:
                return paths.resolve(value, spec.metadata["path"], node.origin)
            except FileNotFoundError as error:
                if self.away and value.startswith("/"):
                    return value
                return self._wrong(node, key, str(error))
        return value

    def _value(self, hint: Any, node: ConfigNode, key: str, limits: Any) -> Any:
        if sections := [each for each in _alternatives(hint) if is_dataclass(each)]:
            return self.section(_named(cast(list[type[Any]], sections), node), node, key)
        if node.value is None and NoneType in get_args(hint):
            return None
        if lists := [each for each in _alternatives(hint) if get_origin(each) is list]:
            if not isinstance(node.value, list):
                null = " or null" * (NoneType in get_args(hint))
                return self._wrong(node, key, f"must be a list{null}, not {_shown(node)}")
            item = get_args(lists[0])[0]
            return [self._value(item, child, f"{key}.{i}", limits) for i, child in enumerate(node.value)]
        value = _scalar(node, hint)
        if value is None:
            hint_of_word = renamed_value(key, node.value) or did_you_mean(str(node.value), _literals(hint))
            return self._wrong(node, key, f"must be {_describe(hint)}, not {_shown(node)}{hint_of_word}")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            return self._wrong(node, key, "must be text that UTF-8 and file names can hold, without NUL or surrogates")
        most = limits.get("most", _MOST)
        if isinstance(value, int | float) and math.isfinite(value) and not -_MOST <= value <= most:
            bound = f"at most {most}" if value > most else f"at least {-_MOST}"
            return self._wrong(node, key, f"must be {bound}, not {_shown(node)}")
        if isinstance(value, int | float) and not _within(value, limits):
            return self._wrong(node, key, f"must be {_describe_limits(limits)}, not {node.value}")
        return value

    def _wrong(self, node: ConfigNode, key: str, what: str) -> Any:
        self.problems.append(Problem(str(node.origin), key, what))
        return BROKEN

    def _unknown(self, node: ConfigNode, key: str, here: list[str]) -> None:
        """Report a key that no section has; of a section that nobody knows, each key within that leads somewhere."""
        self._hints += 1
        if self._hints > _MOST_HINTS:
            self._wrong(node, key, "unknown key")
            return
        is_section = isinstance(node.value, dict)
        if isinstance(node.value, dict) and not self._known.knows(key, list(node.value)):
            inside = list(islice(leaves(node, key), _MOST_UNKNOWN))
            leading = [(name, leaf) for name, leaf in inside if self._known.leads(name)]
            for name, leaf in leading:
                self._wrong(leaf, name, f"unknown key{self._known.remark(name, [])}")
            if leading:
                others = len(inside) - len(leading)
                if len(inside) == _MOST_UNKNOWN:
                    self._wrong(node, key, f"unknown section; only its first {_MOST_UNKNOWN} keys were looked at")
                elif others:
                    self._wrong(node, key, f"unknown section; rlctl has nothing for {others} more of its keys")
                return
        self._wrong(node, key, f"unknown key{self._known.remark(key, here, is_section)}")


def schema_keys(kind: type[Any], key: str = "") -> Iterator[tuple[str, "Field[Any]"]]:
    """(dotted key, field) of every section and value of a schema; a list entry's number is `N`."""
    for each in fields(kind):
        hint, name = _hints(kind)[key_of(each.name)], _join(key, key_of(each.name))
        if each.name == FURTHER:
            continue
        yield name, each
        item = get_args(hint)[0] if get_origin(hint) is list else hint
        for section in _alternatives(item):
            if is_dataclass(section):
                yield from schema_keys(cast(type[Any], section), name if item is hint else f"{name}.N")


def _hints(kind: type[Any]) -> dict[str, Any]:
    return {key_of(name): hint for name, hint in get_type_hints(kind).items()}


def key_of(name: str) -> str:
    """The key of a field: `async` of `async_`, which Python would not take without."""
    return name.removesuffix("_")


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _named(sections: list[type[Any]], node: ConfigNode) -> type[Any]:
    """Return the section whose `name` is the entry's; else the last, whose name may be any."""
    name = node.value.get("name") if isinstance(node.value, dict) else None
    alike = (each for each in sections[:-1] if name is not None and name.value in _literals(_hints(each)["name"]))
    return next(alike, sections[-1])


def _literals(hint: Any) -> list[str]:
    return [value for each in _alternatives(hint) if get_origin(each) is Literal for value in get_args(each)]


def _scalar(node: ConfigNode, hint: Any) -> str | int | float | bool | None:
    """The value as one of the hint's types, or None where it is none of them."""
    value, allowed = node.value, _alternatives(hint)
    if isinstance(value, str) and (value in _literals(hint) or str in allowed):
        return value
    if isinstance(value, bool):
        return value if bool in allowed else None
    if isinstance(value, int) and int in allowed:
        return value
    if isinstance(value, int | float) and float in allowed:
        return float(value)
    # `name: 007`, or an override such as pattern=[0-9]: text that YAML takes for something else.
    return node.text if str in allowed and value is not None else None


def _within(value: int | float, limits: Any) -> bool:
    # Written so that nan, which compares false with everything, is out of every range.
    within = {"ge": lambda limit: value >= limit, "gt": lambda limit: value > limit,
              "le": lambda limit: value <= limit, "lt": lambda limit: value < limit}  # fmt: skip
    return math.isfinite(value) and all(within[name](limits[name]) for name in _LIMITS if name in limits)


def _describe(hint: Any) -> str:
    literals = _literals(hint)
    names = [", ".join(literals)] if literals else []
    names += ["null" if each is NoneType else _TYPE_NAMES[each] for each in _alternatives(hint) if not get_args(each)]
    return ("one of " if literals and len(names) == 1 else "") + " or ".join(names)


def _describe_limits(limits: Any) -> str:
    return " and ".join(f"{words} {limits[name]}" for name, words in _LIMITS.items() if name in limits) or "finite"


def _shown(node: ConfigNode) -> str:
    if isinstance(node.value, dict):
        return "a section"
    if isinstance(node.value, list):
        return "a list"
    if node.value is None or isinstance(node.value, str):
        return "null" if node.value is None else repr(node.value)
    return node.text or str(node.value)
