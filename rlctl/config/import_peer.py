"""Drafting of a recipe from a config file of verl, NeMo-RL or prime-rl: `rlctl config import`.

The draft has every key of the file, either translated, or in a comment with the reason. A comment with TODO asks for a
value that the file does not give.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_origin

from rlctl.config.builtin import find, is_shipped
from rlctl.config.errors import ConfigError, Problem, shorten
from rlctl.config.fields import alternatives, schema_keys, sections_of
from rlctl.config.peer_keys import PeerKey, rows_of_tool
from rlctl.config.peer_values import PeerConfig, Translation, TranslationError, describe_rule, without_indices
from rlctl.config.provenance import MISSING, ConfigNode, dump, leaves, merge, plain, read_file, read_toml, show_path
from rlctl.config.schema import KINDS

TOOLS = ("verl", "NeMo-RL", "prime-rl")
# Sections of other tools that only occur in a config with rollouts.
_SECTIONS_THAT_SAMPLE = {"orchestrator", "actor_rollout_ref", "grpo"}
_SWITCHES = ("enabled", "enable")
# Reason for a key that has no equal and no value.
_EMPTY = "empty there"
# Most letters of a value in a comment.
_MAX_VALUE = 100
_TRACKERS = "telemetry.trackers"
# Key that a recipe must set -> text of its TODO.
_MUST_SET = {
    "model.path": "a folder or a hub name",
    "data.train.path": "a file or a hub data set; prompt_key and answer_key name its columns",
    "rewards": "a list, such as [{name: math_verify}], or {name: file.py:function} for one of yours",
}
# (tool, kind of run) -> (key, remark) to decide, because the tool's behaviour is in none of its files.
_ALWAYS = {
    ("prime-rl", "grpo"): (
        "async.enabled",
        "prime-rl generates and trains at the same time; `async: {enabled: true}` does so here",
    )
}


class KeyOutcome(Enum):
    """Outcome of the translation of one key."""

    TRANSLATED = "translated"
    # Another key decides the value, or rlctl lacks the feature; the reason says which.
    LEFT_OUT = "left out, with the reason"
    TO_DO = "to do"
    UNKNOWN = "unknown to rlctl"


@dataclass(frozen=True)
class ImportedKey:
    """A key of the other tool's config, or a section that is translated as a whole."""

    key: str
    node: ConfigNode
    outcome: KeyOutcome
    reason: str = ""

    @property
    def num_values(self) -> int:
        """Number of values in the key or section."""
        return max(1, len(list(leaves(self.node))))

    def comment(self) -> str:
        """Return the comment line of the draft: location, key, value, reason."""
        origin = self.node.origin
        place = f"{origin.file.name}:{origin.line} " if origin.file else ""
        value = shorten(json.dumps(plain(self.node), ensure_ascii=False, default=str), _MAX_VALUE)
        return f"# - {place}{self.key} = {value}: {self.reason}"


@dataclass(frozen=True)
class _Assignment:
    """A value for one key of the draft. Of two values for the same key the one with higher strength wins."""

    value: Any
    # 0: from a key that sets several keys. 1: copied or computed. 2: from a rule for exactly this value, such as a
    # switch.
    strength: int
    remark: str
    # Index of its key in `_Importer.keys`.
    index: int = -1


@dataclass(frozen=True)
class RecipeDraft:
    """A drafted recipe."""

    tool: str
    kind: str
    text: str
    keys: list[ImportedKey]

    def count(self, outcome: KeyOutcome) -> int:
        """Return the number of values of the other tool with this outcome."""
        return sum(key.num_values for key in self.keys if key.outcome is outcome)

    def summary(self) -> str:
        """Return one line: the tool, the kind of run, and the number of values with each outcome."""
        total = sum(key.num_values for key in self.keys)
        parts = [f"{self.count(outcome)} {outcome.value}" for outcome in KeyOutcome if self.count(outcome)]
        return f"{self.tool}, {self.kind}: {total} values: {', '.join(parts)}"


def draft_recipe(file: Path) -> RecipeDraft:
    """Draft a recipe from another tool's config file.

    Raises ConfigError if the file is unreadable, is a recipe of rlctl, or has no key of a known tool.
    """
    root, missing_parents = _read_with_parents(file, ())
    tool = _find_tool(file, root)
    kind = _guess_kind(root)
    importer = _Importer(tool, kind, PeerConfig(root))
    importer.import_keys()
    importer.ask_for_missing()
    return RecipeDraft(tool, kind, importer.render(file, missing_parents), importer.keys)


def write_draft(draft: RecipeDraft, file: Path) -> None:
    """Write a draft to a new file. Raises ConfigError if the file exists or cannot be written."""
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(draft.text)
    except FileExistsError as error:
        raise ConfigError([Problem(str(file), "", "exists; name another file")]) from error
    except OSError as error:
        raise ConfigError([Problem(str(file), "", f"cannot be written: {error.strerror}")]) from error


def _read_with_parents(file: Path, heirs: tuple[Path, ...]) -> tuple[ConfigNode, list[str]]:
    """Return the tree of a file merged over the files of its `defaults`, and the names of missing files."""
    file = Path(os.path.abspath(file))
    root = read_toml(file) if file.suffix == ".toml" else read_file(file)
    assert isinstance(root.value, dict)
    written = ConfigNode({name: child for name, child in root.value.items() if name != "defaults"}, root.origin)
    parents = plain(root.value["defaults"]) if "defaults" in root.value else []
    missing: list[str] = []
    merged = ConfigNode({}, root.origin)
    for parent in [parents] if isinstance(parents, str) else parents or []:
        if parent == "_self_":
            continue
        shipped = find(parent, file.parent) if isinstance(parent, str) else None
        if shipped and is_shipped(shipped):
            raise ConfigError([Problem(show_path(file), "defaults", f"{parent} is rlctl's: this is a recipe already")])
        path = _find_parent(file.parent, parent)
        if path is None or path in (*heirs, file):
            missing.append(json.dumps(parent).strip('"'))
            continue
        inherited, missing_above = _read_with_parents(path, (*heirs, file))
        merged = merge(merged, inherited)
        missing += missing_above
    return merge(merged, written), missing


def _find_parent(folder: Path, name: object) -> Path | None:
    if not isinstance(name, str):
        return None
    paths = (folder / name, folder / f"{name}.yaml")
    return next((Path(os.path.abspath(path)) for path in paths if path.is_file()), None)


def _find_tool(file: Path, root: ConfigNode) -> str:
    """Return the tool that has rows for the most keys of the file. Raises ConfigError if no tool has any."""
    keys = [without_indices(key) for key, _ in leaves(root)]
    counts: dict[str, int] = {}
    for tool in TOOLS:
        rows = rows_of_tool(tool)
        counts[tool] = sum(_find_row(key, rows) is not None for key in keys)
    tool = max(counts, key=lambda name: counts[name])
    if counts[tool] == 0:
        raise ConfigError([Problem(show_path(file), "", f"has no key of {', '.join(TOOLS)} that rlctl knows")])
    return tool


def _guess_kind(root: ConfigNode) -> str:
    """Return "sft" for a config with data and without a section that samples, else "grpo"."""
    names = set(root.value) if isinstance(root.value, dict) else set()
    is_sft = "sft" in names or ("data" in names and not _SECTIONS_THAT_SAMPLE & names)
    return "sft" if is_sft else "grpo"


def _find_row(key: str, rows: list[PeerKey]) -> PeerKey | None:
    """Return the row whose key is the longest suffix of `key`; None if no row's key is a suffix."""
    matching = [row for row in rows if f".{key}".endswith(f".{row.key}")]
    return max(matching, key=lambda row: len(row.key), default=None)


class _Importer:
    """Translator of one config, key by key."""

    def __init__(self, tool: str, kind: str, config: PeerConfig) -> None:
        self.tool = tool
        self.kind = kind
        self.keys: list[ImportedKey] = []
        self._config = config
        self._rows = rows_of_tool(tool)
        self._fields = dict(schema_keys(KINDS[kind]))
        self._assignments: dict[str, _Assignment] = {}

    def import_keys(self) -> None:
        """Translate every key of the file."""
        for key, node, off_reason in self._iterate(self._config.root, ""):
            row = None if off_reason else _find_row(without_indices(key), self._rows)
            if off_reason:
                self.keys.append(ImportedKey(key, node, KeyOutcome.LEFT_OUT, off_reason))
            elif row is None:
                self.keys.append(_answer_unknown(key, node))
            elif not row.rlctl_key:
                self.keys.append(ImportedKey(key, node, KeyOutcome.LEFT_OUT, f"rlctl has no {row.note}"))
            else:
                self._import_row(key, node, row)
        for section, assignment in list(self._assignments.items()):
            if assignment.value is None:
                self._drop_keys_of(section)

    def ask_for_missing(self) -> None:
        """Add a TODO for each key that a recipe of this kind must set, if the file does not give it."""
        for key, meaning in _MUST_SET.items():
            if key in self._fields and key not in self._assignments:
                self._assignments[key] = _Assignment(MISSING, strength=1, remark=f"TODO: {meaning}")

    def render(self, file: Path, missing_parents: list[str]) -> str:
        """Return the draft as YAML."""
        lines = [
            f"# Drafted by `rlctl config import {file.name}` from a config of {self.tool}; comments name its keys.",
            "# configs/COMING_FROM.md says what is different in kind. Lines with TODO ask for a decision.",
            f"defaults: {self.kind}.yaml",
            *self._render_values(),
        ]
        to_do = [f"# - defaults: {name} is not beside {file.name}: its values are not here" for name in missing_parents]
        if (self.tool, self.kind) in _ALWAYS:
            key_to_decide, remark = _ALWAYS[self.tool, self.kind]
            if key_to_decide not in self._assignments:
                to_do.append(f"# - {key_to_decide}: {remark}")
        keys_with_value = [key for key in self.keys if key.reason != _EMPTY]
        comments: dict[KeyOutcome, list[str]] = {outcome: [] for outcome in KeyOutcome}
        for key in keys_with_value:
            comments[key.outcome].append(key.comment())
        to_do += comments[KeyOutcome.TO_DO]
        empty_keys = [key.key for key in self.keys if key.reason == _EMPTY]
        if empty_keys:
            comments[KeyOutcome.LEFT_OUT].append(f"# - {_EMPTY}: {', '.join(empty_keys)}")
        for title, section in (
            ("# TODO: each of these needs a decision.", to_do),
            ("# Left out, and why.", comments[KeyOutcome.LEFT_OUT]),
            ("# Unknown to rlctl.", comments[KeyOutcome.UNKNOWN]),
        ):
            if section:
                lines += ["", title, *section]
        return "\n".join(lines) + "\n"

    def _iterate(self, node: ConfigNode, key: str) -> Iterator[tuple[str, ConfigNode, str]]:
        """Yield (key, node, reason) for every value, and for every section that has a row of its own.

        A section that is switched off is yielded once, with that as reason. Other reasons are empty.
        """
        if not isinstance(node.value, dict) or not node.value or self._is_answered_whole(key):
            if key:
                yield key, node, ""
            return
        switch = next((name for name in _SWITCHES if name in node.value and node.value[name].value is False), None)
        if key and switch:
            rest = dict(node.value)
            if _find_row(without_indices(f"{key}.{switch}"), self._rows):
                yield f"{key}.{switch}", rest.pop(switch), ""
            if rest:
                yield key, ConfigNode(rest, node.origin), f"{key}.{switch} is false there"
            return
        for name, child in node.value.items():
            yield from self._iterate(child, f"{key}.{name}" if key else name)

    def _is_answered_whole(self, key: str) -> bool:
        """Return True if there is a row for the section `key`, and no row for a key inside."""
        row = _find_row(key, self._rows)
        return row is not None and not any(other.key.startswith(f"{row.key}.") for other in self._rows)

    def _import_row(self, key: str, node: ConfigNode, row: PeerKey) -> None:
        """Translate one value by its row. Record the draft's value, or the reason why there is none."""
        keys = [rlctl_key for rlctl_key in row.rlctl_keys if rlctl_key in self._fields]
        if not keys:
            reason = f"{row.rlctl_key} is of another kind of run"
            self.keys.append(ImportedKey(key, node, KeyOutcome.LEFT_OUT, reason))
            return
        try:
            translation = self._config.translate(row, self._config.value_of(key, node), keys)
            values = {name: self._fit(name, value) for name, value in translation.values.items()}
        except TranslationError as error:
            self.keys.append(ImportedKey(key, node, KeyOutcome.TO_DO, f"{' or '.join(keys)}: {error}"))
            return
        # Null there means the tool's default. A key of rlctl that takes no null keeps its own default.
        values = {name: value for name, value in values.items() if value is not None or self._takes_null(name)}
        if not values:
            reason = f"{row.rlctl_key}: {row.note or 'the default, where theirs is null'}"
            self.keys.append(ImportedKey(key, node, KeyOutcome.LEFT_OUT, reason))
            return
        formula = describe_rule(row)
        remark = f"{key}: {formula}" if formula else key
        self.keys.append(ImportedKey(key, node, KeyOutcome.TRANSLATED))
        for name, value in values.items():
            strength = _strength_of(row, translation)
            self._assign(name, _Assignment(value, strength, remark, index=len(self.keys) - 1))

    def _takes_null(self, name: str) -> bool:
        return NoneType in alternatives(self._fields[name].type)

    def _fit(self, name: str, value: Any) -> Any:
        """Return a value in the type of the key. Raises TranslationError for an unfit section or fraction."""
        field = self._fields[name]
        allowed = alternatives(field.type)
        takes_section = bool(sections_of(field.type)) or any(get_origin(hint) is dict for hint in allowed)
        if isinstance(value, dict) and not takes_section:
            raise TranslationError("a section there, one value here")
        if isinstance(value, float) and int in allowed and float not in allowed:
            if not value.is_integer():
                raise TranslationError(f"{value} is no whole number")
            return int(value)
        return value

    def _assign(self, name: str, new: _Assignment) -> None:
        """Put a value into the draft. Of two different values the stronger one stays, and the other's key gets the
        reason.
        """
        old = self._assignments.get(name)
        if old is None:
            self._assignments[name] = new
            return
        if old.value == new.value:
            strength = max(old.strength, new.strength)
            self._assignments[name] = replace(old, strength=strength, remark=f"{old.remark}, {new.remark}")
            return
        if name == _TRACKERS:
            remark = f"{old.remark}, {new.remark}"
            self._assignments[name] = replace(new, value=[*old.value, *new.value], remark=remark)
            return
        stays = new if new.strength > old.strength else old
        goes = old if stays is new else new
        self._assignments[name] = stays
        outcome = KeyOutcome.TO_DO if new.strength == old.strength else KeyOutcome.LEFT_OUT
        reason = f"{name}: {stays.remark} decides it"
        if outcome is KeyOutcome.TO_DO:
            reason = f"{name}: {stays.remark} says otherwise, and is taken"
        self.keys[goes.index] = replace(self.keys[goes.index], outcome=outcome, reason=reason)

    def _drop_keys_of(self, section: str) -> None:
        """Drop the values inside a section that the draft sets to null."""
        for name in [name for name in self._assignments if name.startswith(f"{section}.")]:
            index = self._assignments.pop(name).index
            reason = f"{name}: {self._assignments[section].remark} makes {section} null"
            self.keys[index] = replace(self.keys[index], outcome=KeyOutcome.LEFT_OUT, reason=reason)

    def _render_values(self) -> Iterator[str]:
        """Yield the YAML lines of all values in the order of the schema, with a line for each new section."""
        open_section: list[str] = []
        for name in self._fields:
            if name not in self._assignments:
                continue
            assignment = self._assignments[name]
            *section, last = name.split(".")
            for depth, word in enumerate(section):
                if open_section[: depth + 1] != section[: depth + 1]:
                    yield f"{'  ' * depth}{word}:"
            open_section = section
            yield f"{'  ' * len(section)}{last}: {_inline(assignment.value)}  # {assignment.remark}"


def _strength_of(row: PeerKey, translation: Translation) -> int:
    if translation.is_exact_case:
        return 2
    return 0 if " and " in row.rlctl_key else 1


def _answer_unknown(key: str, node: ConfigNode) -> ImportedKey:
    if node.value is None or node.value in ({}, []):
        return ImportedKey(key, node, KeyOutcome.LEFT_OUT, _EMPTY)
    return ImportedKey(key, node, KeyOutcome.UNKNOWN, "no counterpart")


def _inline(value: Any) -> str:
    """Return a value as one line of YAML."""
    if value == MISSING:
        return MISSING
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return dump({"key": value}).removeprefix("key: ").rstrip("\n")
