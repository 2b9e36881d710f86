"""From a tree of values to the typed dataclasses of a schema, collecting every mistake on the way.

Conversion is strict where a guess could be wrong (`1.5` is no whole number, `1` no boolean). It is lenient where no
guess is needed: a whole number is a number, and a number or a list is text where the key takes text.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import Field
from itertools import islice
from pathlib import Path
from textwrap import wrap
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin

from rlctl.config import paths
from rlctl.config.errors import BROKEN, LONGEST, Problem, did_you_mean
from rlctl.config.fields import FURTHER, alternatives, join, keys_of, literals, schema_keys, sections_of
from rlctl.config.provenance import MISSING, ConfigNode, leaves, node_at, plain, show_path
from rlctl.config.schema import KINDS
from rlctl.config.unknown_keys import KnownKeys, renamed_value

T = TypeVar("T")

TYPE_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
# Keys of an unknown section that are looked for among ours: a huge one takes a second, not minutes.
_MOST_UNKNOWN = 500
# Largest 64-bit integer, the bound of torch, numpy and vLLM.
_LARGEST_INTEGER = 2**63 - 1
_NUMBER_TEXT = re.compile(r"[-+]?(\d[\d_]*)?\.?\d+([eE][-+]?\d+)?")
_WITH_COMMAS = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")
_NOT_FINITE = re.compile(r"[+-]?(?:inf|infinity|nan)", re.IGNORECASE)
# Unknown keys of one config for which the nearest one is looked for.
_MOST_HINTS = 200


def known_keys(kind: type[Any], among: Iterable[type[Any]] = KINDS.values()) -> KnownKeys:
    """Return the keys of the schema `kind`. among: schemas that a misplaced key may belong to."""
    keys_of_kind = {schema: [key for key, _ in schema_keys(schema)] for schema in among}
    all_keys = [key for keys in keys_of_kind.values() for key in keys]
    sections = {key.rpartition(".")[0] for key in all_keys}
    every = {key: key in sections for key in all_keys}
    own = {key: every[key] for key in keys_of_kind[kind]}
    return KnownKeys(own, every, peers=kind in KINDS.values())


class Converter(Generic[T]):
    """A conversion of one tree to a `kind`. A wrong value becomes BROKEN.

    recipe: the file to name when something is missing. among: schemas that a misplaced key may belong to.
    parents: the files that hold the defaults. away: absolute paths that are not here are left to where they are.
    """

    def __init__(
        self,
        kind: type[T],
        recipe: str,
        among: Iterable[type[Any]] = KINDS.values(),
        parents: tuple[str, ...] = ("grpo.yaml", "sft.yaml"),
        away: bool = False,
    ) -> None:
        self.kind = kind
        self.recipe = recipe
        self.parents = parents
        self.away = away
        self.problems: list[Problem] = []
        # One line for each model that is a run or a checkpoint.
        self.notes: list[str] = []
        # Keys and sections that are not there.
        self.missing: list[str] = []
        self._runs: Path | None = None
        # Unknown keys, each with its node.
        self.unknown: list[tuple[str, ConfigNode]] = []
        self._known = known_keys(kind, among)
        self._hints = 0

    def convert(self, root: ConfigNode, key: str = "") -> T:
        """Convert the whole config, or the section `key`; `problems` then holds every mistake in it."""
        folder = node_at(root, ["run", "dir"])
        self._runs = Path(folder.value) if folder and isinstance(folder.value, str) else None
        config: T = self._convert_section(self.kind, root, key)
        return config

    def _convert_section(self, kind: type[Any], node: ConfigNode, key: str, others: Iterable[type[Any]] = ()) -> Any:
        """Convert the section to a `kind`. others: its possible kinds under other names."""
        if not isinstance(node.value, dict):
            return self._wrong(node, key, f"must be a section of `key: value`, not {_node_text(node)}")
        keys = keys_of(kind)
        takes_any = keys.pop(FURTHER, None) is not None
        further = {name: child for name, child in node.value.items() if name not in keys}
        for name, child in further.items() if not takes_any else ():
            if owners := [words[0] for each in others if name in keys_of(each) and (words := _name_of(each))]:
                whose = f"a key of {', '.join(owners)}; {plain(node)['name']} has {', '.join(keys)}"
                self._wrong(child, join(key, name), f"unknown key here: {whose}")
            else:
                self._unknown(child, join(key, name), list(keys))
        if takes_any and (named := node.value.get("name")) is not None and named.value == MISSING:
            # Any key may be the class's, but no class is named.
            for name, child in further.items():
                if hint := did_you_mean(name, ["name"]):
                    self._wrong(child, join(key, name), f"unknown key{hint}")
        values: dict[str, Any] = {FURTHER: plain(ConfigNode(further, node.origin))} if takes_any else {}
        for name, field in keys.items():
            # The entry of a list was written in one place; a section may be put together of many.
            where = str(node.origin) if key.rpartition(".")[2].isdigit() else self.recipe
            values[field.name] = self._field(field, node.value.get(name), join(key, name), where)
        return kind(**values)

    def _field(self, field: "Field[Any]", node: ConfigNode | None, key: str, where: str) -> Any:
        """Convert a value. where: the place to name if it is not set."""
        if node is None:
            what = "section" if sections_of(field.type) else "key"
            parents = " or ".join(f"`defaults: {name}`" for name in self.parents)
            self.missing.append(key)
            self.problems.append(Problem(where, key, f"missing {what}: inherit the defaults, {parents}"))
            return BROKEN
        if node.value == MISSING:
            what = f"not set, and has no default: {field.metadata['doc'].removesuffix('.')}"
            self.problems.append(Problem(where, key, what))
            return BROKEN
        value = self._convert_value(field.type, node, key, field.metadata)
        if "path" not in field.metadata:
            return value
        if isinstance(value, list):
            entries = node.value if isinstance(node.value, list) else []
            found = [self._resolve_path(*each, field, f"{key}.{i}") for i, each in enumerate(zip(value, entries))]
            return BROKEN if any(each is BROKEN for each in found) else found
        return self._resolve_path(value, node, field, key)

    def _resolve_path(self, value: Any, node: ConfigNode, field: "Field[Any]", key: str) -> Any:
        """Look up the path behind a text, and note a model that is a run; leave other values."""
        if not isinstance(value, str) or value in literals(field.type):
            return value
        try:
            found = paths.resolve(value, field.metadata["path"], node.origin, self._runs)
            if field.metadata["path"] == "model" and Path(found).name == "hf" != Path(value).name:
                self.notes.append(f"{key}={value} is {show_path(Path(found))}")
            return found
        except FileNotFoundError as error:
            return value if self.away and value.startswith("/") else self._wrong(node, key, str(error))

    def _convert_value(self, hint: Any, node: ConfigNode, key: str, limits: Any) -> Any:
        if node.value is None and NoneType in get_args(hint):
            return None
        if sections := sections_of(hint):
            # The section whose `name` is the entry's; else the last, whose name may be any.
            name = node.value.get("name") if isinstance(node.value, dict) else None
            alike = (each for each in sections[:-1] if name and name.value in _name_of(each))
            return self._convert_section(next(alike, sections[-1]), node, key, sections)
        if get_origin(hint) is dict:
            if not isinstance(node.value, dict):
                return self._wrong(node, key, f"must be a section of `key: value`, not {_node_text(node)}")
            item = get_args(hint)[1]
            if item is Any:
                return plain(node)
            return {
                name: self._convert_value(item, child, join(key, name), limits) for name, child in node.value.items()
            }
        if lists := [each for each in alternatives(hint) if get_origin(each) is list]:
            words = literals(hint)
            if not isinstance(node.value, list) and (str in alternatives(hint) or node.value in words):
                return self._scalar_value(hint, node, key, limits)
            if not isinstance(node.value, list):
                null = f", or one of {', '.join(words)}" * bool(words) + " or null" * (NoneType in get_args(hint))
                return self._wrong(node, key, f"must be a list{null}, not {_node_text(node)}")
            item = get_args(lists[0])[0]
            return [self._convert_value(item, child, f"{key}.{i}", limits) for i, child in enumerate(node.value)]
        return self._scalar_value(hint, node, key, limits)

    def _scalar_value(self, hint: Any, node: ConfigNode, key: str, limits: Any) -> Any:
        value = _scalar(node, hint)
        if (
            value is None
            and isinstance(node.value, dict)
            and any(self._known.leads(name) for name, _ in leaves(node, key))
        ):
            # Another tool's section of this name.
            self._unknown(node, key, [])
            return BROKEN
        if value is None:
            hint_of_word = renamed_value(key, node.value) or did_you_mean(str(node.value), literals(hint))
            hint_of_word = hint_of_word or _number_hint(node.value, alternatives(hint))
            return self._wrong(node, key, f"must be {describe(hint)}, not {_node_text(node)}{hint_of_word}")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            return self._wrong(node, key, "must be text that UTF-8 and file names can hold, without NUL or surrogates")
        if isinstance(value, int | float) and (bound := _passed(node, value, limits)):
            return self._wrong(node, key, f"must be {bound}")
        return value

    def _wrong(self, node: ConfigNode, key: str, what: str) -> Any:
        self.problems.append(Problem(str(node.origin), key, what))
        return BROKEN

    def _unknown(self, node: ConfigNode, key: str, here: list[str]) -> None:
        """Report an unknown key. Of an unknown section, report each key with a remark, then the names of the others."""
        self.unknown.append((key, node))
        self._hints += 1
        if self._hints > _MOST_HINTS:
            self._wrong(node, key, "unknown key")
            return
        is_section = isinstance(node.value, dict)
        if isinstance(node.value, dict) and not self._known.knows(key, list(node.value)):
            inside = list(islice(self._known.parts(node, key), _MOST_UNKNOWN))
            remarks = {name: self._known.remark(name, []) for name, _ in inside if self._known.leads(name)}
            for name, part in inside:
                if name in remarks:
                    self._wrong(part, name, f"unknown key{remarks[name]}")
            if remarks:
                others = [name.removeprefix(f"{key}.") for name, _ in inside if name not in remarks]
                if len(inside) == _MOST_UNKNOWN:
                    self._wrong(node, key, f"unknown section; only its first {_MOST_UNKNOWN} keys were looked at")
                for line in wrap(", ".join(others), LONGEST - 60, break_on_hyphens=False):
                    self._wrong(node, key, f"unknown section; rlctl has nothing for {line.removesuffix(',')}")
                return
        self._wrong(node, key, f"unknown key{self._known.remark(key, here, is_section)}")


def _name_of(section: type[Any]) -> list[str]:
    """Return the words that the `name` of a section may be; none where it may be any."""
    field = keys_of(section).get("name")
    return literals(field.type) if field else []


def describe_limits(limits: Any) -> str:
    """Return the limits of a number in words; empty if it has none."""
    return " and ".join(f"{words} {limits[name]}" for name, words in LIMITS.items() if name in limits)


def _scalar(node: ConfigNode, hint: Any) -> str | int | float | bool | None:
    """Return the value as one of the hint's types, or None where none fits."""
    value, allowed = node.value, alternatives(hint)
    if isinstance(value, str) and (value in literals(hint) or str in allowed):
        return value
    if isinstance(value, bool):
        return value if bool in allowed else None
    if isinstance(value, int) and int in allowed:
        return value
    if isinstance(value, int | float) and float in allowed:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if isinstance(value, str) and float in allowed and _NOT_FINITE.fullmatch(value):
        # YAML writes .inf and .nan. Its range refuses the number, and says which are allowed.
        return float(value)
    # `name: 007`, or an override such as pattern=[0-9]: text that YAML takes for something else.
    return node.text if str in allowed and value is not None else None


def _number_hint(value: object, allowed: tuple[Any, ...]) -> str:
    """Return a remark on a number in quotes or with commas where a number is allowed; nothing for any other value."""
    if not isinstance(value, str) or not {int, float} & set(allowed):
        return ""
    if _WITH_COMMAS.fullmatch(value):
        return f"; a number has no commas; write {value.replace(',', '')}"
    return f"; without quotes: {value}" if _NUMBER_TEXT.fullmatch(value) else ""


def _passed(node: ConfigNode, value: int | float, limits: Any) -> str:
    """Return the bounds that a number is outside of, and the number; nothing if it is within."""
    # A number with a fraction may be any that is finite, unless its key says otherwise.
    least, most = (-_LARGEST_INTEGER, _LARGEST_INTEGER) if isinstance(value, int) else (-math.inf, math.inf)
    most = limits.get("most", most)
    # A whole number is finite, also one that no float holds.
    finite = isinstance(value, int) or math.isfinite(value)
    if finite and not least <= value <= most:
        return f"{f'at most {most}' if value > most else f'at least {least}'}, not {_node_text(node)}"
    within = {"ge": lambda limit: value >= limit, "gt": lambda limit: value > limit,
              "le": lambda limit: value <= limit, "lt": lambda limit: value < limit}  # fmt: skip
    if finite and all(within[name](limits[name]) for name in LIMITS if name in limits):
        return ""
    allowed = [*["a finite number"] * (not finite), *filter(None, [describe_limits(limits)])]
    return f"{', '.join(allowed)}, not {_node_text(node)}"


def describe(hint: Any) -> str:
    """Return a type in words."""
    words = literals(hint)
    names = [", ".join(words)] if words else []
    names += [TYPE_NAMES[each] for each in alternatives(hint) if not get_args(each)]
    return ("one of " if words and len(names) == 1 else "") + " or ".join(names)


def _node_text(node: ConfigNode) -> str:
    if isinstance(node.value, dict | list):
        return "a section" if isinstance(node.value, dict) else "a list"
    if node.value is None or isinstance(node.value, str):
        return "null" if node.value is None else repr(node.value)
    return node.text or str(node.value)
