"""Conversion of a tree of values to the typed dataclasses of a schema. All mistakes are collected.

Conversion is strict where a guess could be wrong: `1.5` is no whole number, and `1` is no boolean. It is lenient where
nothing is guessed: a whole number is accepted as a number, and a number as text.
"""

import re
from collections.abc import Iterable
from dataclasses import Field
from itertools import chain, islice
from pathlib import Path
from textwrap import wrap
from types import NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin

from rlctl.config import paths
from rlctl.config.errors import BROKEN, LONGEST, Problem, did_you_mean
from rlctl.config.fields import FURTHER, alternatives, join, keys_of, literals, schema_keys, sections_of
from rlctl.config.peer_keys import renamed_value
from rlctl.config.provenance import MISSING, ConfigNode, leaves, node_at, plain, show_path
from rlctl.config.scalars import describe, describe_node, limit_mistake, match_scalar, number_remark
from rlctl.config.schema import KINDS
from rlctl.config.unknown_keys import KnownKeys

T = TypeVar("T")

# Most keys of an unknown section that are looked up. With this limit a huge section takes a second, not minutes.
_MAX_UNKNOWN = 500
# Most unknown keys of one config that are looked up.
_MAX_HINTS = 200


def known_keys(kind: type[Any], among: Iterable[type[Any]] = KINDS.values()) -> KnownKeys:
    """Return the known keys for the schema `kind`. among: other schemas to which a misplaced key may belong."""
    keys_of_kind = {schema: [key for key, _ in schema_keys(schema)] for schema in among}
    all_keys = dict.fromkeys(chain.from_iterable(keys_of_kind.values()), False)
    for key in list(all_keys):
        section = key.rpartition(".")[0]
        if section in all_keys:
            all_keys[section] = True
    return KnownKeys({key: all_keys[key] for key in keys_of_kind[kind]}, all_keys, peers=kind in KINDS.values())


class Converter(Generic[T]):
    """Converter of one tree to the dataclass `kind`. A wrong value becomes BROKEN.

    recipe: file to name when a key is missing. among: other schemas to which a misplaced key may belong. parents: files
    with the defaults, for messages. away: keep absolute paths that do not exist on this machine.
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
        # One note for each model path that is a run or a checkpoint, with the folder of its weights.
        self.notes: list[str] = []
        # Dotted keys of missing values and sections.
        self.missing: list[str] = []
        # Folder in which a model is looked up as the name of a run, see `paths.resolve`.
        self._runs: Path | None = None
        # (dotted key, node) of each unknown key.
        self.unknown: list[tuple[str, ConfigNode]] = []
        self._known_keys = known_keys(kind, among)

    def convert(self, root: ConfigNode, key: str = "") -> T:
        """Convert the whole config, or the section `key`. Afterwards `problems` has every mistake."""
        runs_node = node_at(root, ["run", "dir"])
        self._runs = Path(runs_node.value) if runs_node and isinstance(runs_node.value, str) else None
        config: T = self._convert_section([self.kind], self.kind, root, key)
        return config

    def _convert_section(self, kinds: list[type[Any]], kind: type[Any], node: ConfigNode, key: str) -> Any:
        """Convert a section to the dataclass `kind`. kinds: all dataclasses that the section may be, depending on its
        `name`.
        """
        if not isinstance(node.value, dict):
            return self._report(node, key, f"must be a section of `key: value`, not {describe_node(node)}")
        keys = keys_of(kind)
        takes_any = keys.pop(FURTHER, None) is not None
        further = {name: child for name, child in node.value.items() if name not in keys}
        values: dict[str, Any] = {}
        if takes_any:
            values[FURTHER] = plain(ConfigNode(further, node.origin))
            name_node = node.value.get("name")
            if name_node is not None and name_node.value == MISSING:
                # No class is named, so any key might belong to the class. Only misspellings of `name` are reported.
                for name, child in further.items():
                    if hint := did_you_mean(name, ["name"]):
                        self._report(child, join(key, name), f"unknown key{hint}")
        else:
            for name, child in further.items():
                kinds_with_key = [_allowed_names(other_kind) for other_kind in kinds if name in keys_of(other_kind)]
                if owners := [names[0] for names in kinds_with_key if names]:
                    whose = f"a key of {', '.join(owners)}; {plain(node)['name']} has {', '.join(keys)}"
                    self._report(child, join(key, name), f"unknown key here: {whose}")
                else:
                    self._report_unknown(child, join(key, name), list(keys))
        for name, field in keys.items():
            # A missing key is reported at the line of a list entry, or at the recipe for a section, which may come from
            # many files.
            where = str(node.origin) if key.rpartition(".")[2].isdigit() else self.recipe
            values[field.name] = self._convert_field(field, node.value.get(name), join(key, name), where)
        return kind(**values)

    def _convert_field(self, field: "Field[Any]", node: ConfigNode | None, key: str, where: str) -> Any:
        """Convert the value of one key. where: location to report if the key is not set."""
        if node is None:
            noun = "section" if sections_of(field.type) else "key"
            parents = " or ".join(f"`defaults: {name}`" for name in self.parents)
            self.missing.append(key)
            self.problems.append(Problem(where, key, f"missing {noun}: inherit the defaults, {parents}"))
            return BROKEN
        if node.value == MISSING:
            mistake = f"not set, and has no default: {field.metadata['doc'].removesuffix('.')}"
            self.problems.append(Problem(where, key, mistake))
            return BROKEN
        value = self._convert_value(field.type, node, key, field.metadata)
        if "path" not in field.metadata:
            return value
        if isinstance(value, list):
            path_nodes = node.value if isinstance(node.value, list) else []
            resolved = [
                self._resolve_path(path, path_node, field, f"{key}.{index}")
                for index, (path, path_node) in enumerate(zip(value, path_nodes))
            ]
            return BROKEN if any(path is BROKEN for path in resolved) else resolved
        return self._resolve_path(value, node, field, key)

    def _resolve_path(self, value: Any, node: ConfigNode, field: "Field[Any]", key: str) -> Any:
        """Return the resolved path of a text; return other values unchanged. Add a note if a model path is a run."""
        if not isinstance(value, str) or value in literals(field.type):
            return value
        try:
            path = paths.resolve(value, field.metadata["path"], node.origin, self._runs)
            # A run or checkpoint resolves to the folder hf/ of its weights, which the user did not type.
            if field.metadata["path"] == "model" and Path(path).name == "hf" != Path(value).name:
                self.notes.append(f"{key}={value} is {show_path(Path(path))}")
            return path
        except FileNotFoundError as error:
            return value if self.away and value.startswith("/") else self._report(node, key, str(error))

    def _convert_value(self, hint: Any, node: ConfigNode, key: str, limits: Any) -> Any:
        if node.value is None and NoneType in get_args(hint):
            return None
        if sections := sections_of(hint):
            # Choose the dataclass whose allowed names include the section's `name`; else the last one, which takes any
            # name.
            kind = sections[-1]
            name = node.value.get("name") if isinstance(node.value, dict) else None
            if name:
                kind = next((section for section in sections[:-1] if name.value in _allowed_names(section)), kind)
            return self._convert_section(sections, kind, node, key)
        if get_origin(hint) is dict:
            if not isinstance(node.value, dict):
                return self._report(node, key, f"must be a section of `key: value`, not {describe_node(node)}")
            child_hint = get_args(hint)[1]
            if child_hint is Any:
                return plain(node)
            return {
                name: self._convert_value(child_hint, child, join(key, name), limits)
                for name, child in node.value.items()
            }
        list_hints = [alternative for alternative in alternatives(hint) if get_origin(alternative) is list]
        if list_hints and isinstance(node.value, list):
            child_hint = get_args(list_hints[0])[0]
            return [
                self._convert_value(child_hint, child, f"{key}.{index}", limits)
                for index, child in enumerate(node.value)
            ]
        words = literals(hint)
        if list_hints and str not in alternatives(hint) and node.value not in words:
            form = "a list"
            if words:
                form += f", or one of {', '.join(words)}"
            if NoneType in get_args(hint):
                form += " or null"
            return self._report(node, key, f"must be {form}, not {describe_node(node)}")
        return self._convert_scalar(hint, node, key, limits)

    def _convert_scalar(self, hint: Any, node: ConfigNode, key: str, limits: Any) -> Any:
        value = match_scalar(node, hint)
        if value is None:
            if isinstance(node.value, dict) and any(self._known_keys.has_remark(name) for name, _ in leaves(node, key)):
                # Another tool has a section with this name.
                self._report_unknown(node, key, [])
                return BROKEN
            remark = renamed_value(key, node.value) or did_you_mean(str(node.value), literals(hint))
            remark = remark or number_remark(node.value, alternatives(hint))
            return self._report(node, key, f"must be {describe(hint)}, not {describe_node(node)}{remark}")
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
            return self._report(node, key, "must be text that UTF-8 and file names can hold, without NUL or surrogates")
        if isinstance(value, int | float) and (mistake := limit_mistake(node, value, limits)):
            return self._report(node, key, f"must be {mistake}")
        return value

    def _report(self, node: ConfigNode, key: str, mistake: str) -> Any:
        self.problems.append(Problem(str(node.origin), key, mistake))
        return BROKEN

    def _report_unknown(self, node: ConfigNode, key: str, names: list[str]) -> None:
        """Report an unknown key. names: keys that its section has.

        For an unknown section, report each inner key for which a remark is found, then list the others.
        """
        self.unknown.append((key, node))
        if len(self.unknown) > _MAX_HINTS:
            self._report(node, key, "unknown key")
            return
        is_section = isinstance(node.value, dict)
        if isinstance(node.value, dict) and not self._known_keys.answers_whole_section(key, list(node.value)):
            values = list(islice(self._known_keys.iterate_values(node, key), _MAX_UNKNOWN))
            remarks = {
                name: self._known_keys.remark(name, []) for name, _ in values if self._known_keys.has_remark(name)
            }
            for name, value in values:
                if name in remarks:
                    self._report(value, name, f"unknown key{remarks[name]}")
            if remarks:
                without_remark = [name.removeprefix(f"{key}.") for name, _ in values if name not in remarks]
                if len(values) == _MAX_UNKNOWN:
                    self._report(node, key, f"unknown section; only its first {_MAX_UNKNOWN} keys were looked at")
                for line in wrap(", ".join(without_remark), LONGEST - 60, break_on_hyphens=False):
                    self._report(node, key, f"unknown section; rlctl has nothing for {line.removesuffix(',')}")
                return
        self._report(node, key, f"unknown key{self._known_keys.remark(key, names, is_section)}")


def _allowed_names(section: type[Any]) -> list[str]:
    """Return the allowed words for the `name` of a section; empty if any name is allowed."""
    field = keys_of(section).get("name")
    return literals(field.type) if field else []
