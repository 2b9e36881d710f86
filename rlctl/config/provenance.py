"""Config values with their origins: YAML and TOML files and overrides, read as trees of `ConfigNode`s.

Scalars follow YAML 1.2's core schema, not PyYAML's 1.1: `1e-6` is a number, and `on`, `off`, `yes` and `no` are text.
Only mappings, lists, text, numbers, booleans and null are allowed, so no tag can build an object.
"""

import re
import stat
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from rlctl.config.builtin import CONFIGS, is_shipped
from rlctl.config.errors import ConfigError, Problem, shorten

MISSING = "???"
# Largest allowed config file in bytes. A larger file is data or weights, named by mistake.
_MAX_BYTES = 1 << 18

_SCALARS = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
]

_NOT_ALLOWED = " is not allowed: write plain values"


class _TagError(ConfigError):
    """A value has a tag, or a key of a kind, that is not allowed. In an override such a value is read as text."""


class _Loader(yaml.SafeLoader):
    """YAML loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """YAML dumper. It quotes text if YAML 1.1 or 1.2 would read another type. It writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Double quotes escape all kinds of line breaks. In other styles PyYAML would fold them.
    has_line_break = len(text.splitlines()) > 1 or text.splitlines() != [text]
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if has_line_break else None)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_multi_representer(str, _represent_text)
for _tag, _pattern, _initials in _SCALARS:
    for _yaml_class in (_Loader, _Dumper):
        _yaml_class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _initials)


@dataclass(frozen=True)
class Origin:
    """Location where a value was written: a line of a file, or an override.

    An override that the command itself adds has a text and no number. Messages do not show it, because nobody typed it.
    """

    file: Path | None = None
    line: int = 0
    # Number of the override among those that the user typed, from 1.
    override: int = 0
    text: str = ""

    def __str__(self) -> str:
        if self.override:
            return f"override {self.override}: {shorten(self.text, 240)}"
        if self.text:
            return ""
        return f"{show_path(self.file)}:{self.line}" if self.file else "defaults"


@dataclass(frozen=True)
class ConfigNode:
    """A value and its origin."""

    value: "dict[str, ConfigNode] | list[ConfigNode] | str | int | float | bool | None"
    origin: Origin
    # The scalar as written, so that `name: 007` can be read as text.
    text: str | None = None
    # The original text with `${oc.env:...}`, if the value was read from the environment.
    secret: str | None = None
    # Note about the value, printed once when the config is loaded.
    note: str | None = None


class Interpolation(str):
    """Text in which `dump` does not escape `${`, so that it is a reference again when the YAML is read."""


def show_path(path: Path) -> str:
    """Return a path as a user would type it: relative inside the current directory, else absolute.

    A shipped file is shown as, for example, `configs/base.yaml`.
    """
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(path.relative_to(CONFIGS.parent)) if is_shipped(path) else str(path)


def read_file(path: Path) -> ConfigNode:
    """Read the mapping in a YAML file.

    Raises ConfigError if the file is unreadable, too large, not YAML, no mapping, or has a key twice.
    """
    try:
        return _parse_file(path, _read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([Problem(show_path(path), "", f"cannot be read: {reason}")]) from error


@lru_cache(maxsize=64)
def _parse_file(path: Path, text: str) -> ConfigNode:
    """Parse the `text` of a YAML file. Cached because parents are read often, and each takes 4 ms of CPU."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        line, mistake = _yaml_mistake(error)
        raise ConfigError([Problem(f"{show_path(path)}:{line}", "", f"not YAML: {mistake}")]) from error
    if root is None:
        return ConfigNode({}, Origin(path, 1))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError([Problem(f"{show_path(path)}:1", "", "a config is a mapping of `key: value` lines")])
    return _Reader(path).read(root, Origin(path, 1))


def _yaml_mistake(error: yaml.YAMLError) -> tuple[int, str]:
    """Return (line from 1, description) of a YAML error. Rare errors have the parser's description."""
    problem = str(getattr(error, "problem", None) or getattr(error, "context", None) or error)
    context = str(getattr(error, "context", None) or "")
    problem_mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    begin_mark = getattr(error, "context_mark", None) or problem_mark
    line = problem_mark.line + 1 if problem_mark else 1
    first_line = begin_mark.line + 1 if begin_mark else line
    if character := re.search(r"found character '(.+)' that cannot start any token", problem):
        return line, "a tab; indent with spaces" if character[1] == r"\t" else f"text with {character[1]} needs quotes"
    if "unknown escape character" in problem:
        return line, "a backslash in double quotes begins an escape: double it, or write single quotes"
    if "quoted scalar" in context:
        return first_line, "a quote that is opened here is not closed"
    if "flow sequence" in context or "flow mapping" in context:
        bracket = "[" if "flow sequence" in context else "{"
        return first_line, f"a {bracket} that is opened here is not closed, or a comma is missing behind it"
    if "mapping values are not allowed" in problem:
        return line, "a second `: `, or above it a line that is no `key: value`; put text with `: ` in quotes"
    if "block mapping" in context or "could not find expected ':'" in problem:
        mistake = "this line is no `key: value`, or is not indented like those of its section"
        return line, mistake if first_line == line else f"{mistake}, which begins in line {first_line}"
    return line, problem


def read_toml(path: Path) -> ConfigNode:
    """Read the mapping in a TOML file. Each value has the line of its key. Raises ConfigError as `read_file`."""
    try:
        text = _read_text(path)
        return _toml_node(tomllib.loads(text), path, _toml_key_lines(text), key="", section_line=1)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([Problem(show_path(path), "", f"cannot be read: {reason}")]) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([Problem(show_path(path), "", f"not TOML: {error}")]) from error


def _toml_key_lines(text: str) -> dict[str, int]:
    """Return dotted key -> line, for each table and each `key = value` with an unquoted key."""
    lines: dict[str, int] = {}
    table = ""
    # Name of an array of tables -> index of its last table so far.
    array_indices: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.-]+)\s*\]", line):
            table = header[2]
            # An array of tables has the line of its first table. Below, each table gets a line under its index.
            lines.setdefault(table, number)
            if header[1] == "[[":
                array_indices[table] = array_indices.get(table, -1) + 1
            for name in sorted(array_indices, key=len):
                if f"{table}.".startswith(f"{name}."):
                    table = f"{name}.{array_indices[name]}{table[len(name) :]}"
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            lines.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return lines


def _toml_node(content: Any, path: Path, lines: dict[str, int], key: str, section_line: int) -> ConfigNode:
    """Return the content of `key` as a node. section_line: line to use if the key's own line is not known."""
    origin = Origin(path, lines.get(key, section_line))
    if isinstance(content, dict | list):
        named_children = content.items() if isinstance(content, dict) else enumerate(content)
        nodes = dict[str, ConfigNode]()
        for name, child in named_children:
            child_key = f"{key}.{name}" if key else str(name)
            nodes[str(name)] = _toml_node(child, path, lines, child_key, origin.line)
        return ConfigNode(nodes if isinstance(content, dict) else list(nodes.values()), origin)
    is_config_scalar = isinstance(content, bool | int | float | str)
    return ConfigNode(content if is_config_scalar else str(content), origin, str(content))


def read_value(text: str, origin: Origin) -> ConfigNode:
    """Return the YAML value of an override. Text that is no valid YAML, for example `[0-9]+`, stays text. Raises
    ConfigError as `read_file`.
    """
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return ConfigNode(text, origin, text)
    if root is None:
        return ConfigNode(None, origin, text)
    try:
        return ConfigNode(_Reader(None).read(root, origin).value, origin, text)
    except _TagError:
        return ConfigNode(text, origin, text)


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises OSError, also for a pipe or a device, because reading may never end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(0, "is a folder" if stat.S_ISDIR(mode) else "is no ordinary file")
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(0, f"is larger than {_MAX_BYTES >> 10} KiB, so it is no config")
    return content.decode("utf-8-sig")


def merge(base: ConfigNode, over: ConfigNode) -> ConfigNode:
    """Return `base` merged with `over`: mappings merge key by key, other values of `over` replace those of `base`."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return replace(over, note=over.note or base.note)
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return ConfigNode(merged, over.origin, over.text)


def plain(node: ConfigNode) -> Any:
    """Return the value without origins: dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def leaves(node: ConfigNode, key: str = "") -> Iterator[tuple[str, ConfigNode]]:
    """Yield (dotted key, node) of every scalar, and of every empty mapping or list, in order."""
    named_children = children(node)
    if not named_children and key:
        yield key, node
    for name, child in named_children.items():
        yield from leaves(child, f"{key}.{name}" if key else name)


def node_at(node: ConfigNode, names: list[str]) -> ConfigNode | None:
    """Return the node at the path `names`; None if there is none. A list entry's name is its index."""
    descendant: ConfigNode | None = node
    for name in names:
        descendant = children(descendant).get(name) if descendant else None
    return descendant


def put(node: ConfigNode, names: list[str], value: ConfigNode) -> ConfigNode:
    """Return a copy of `node` with `value` at the path `names`. The path must not go through lists."""
    if not names:
        return value
    section = node.value if isinstance(node.value, dict) else {}
    child = section.get(names[0], ConfigNode(None, value.origin))
    return replace(node, value={**section, names[0]: put(child, names[1:], value)})


def children(node: ConfigNode) -> dict[str, ConfigNode]:
    """Return name (or list index) -> child node; empty for a scalar."""
    if isinstance(node.value, list):
        return {str(index): child for index, child in enumerate(node.value)}
    return node.value if isinstance(node.value, dict) else {}


def dump(tree: Any) -> str:
    """Return YAML that `read_file` reads back as the same tree. `${` is escaped, except in an `Interpolation`."""
    return yaml.dump(_escape_references(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _escape_references(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _escape_references(child) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_escape_references(child) for child in tree]
    if isinstance(tree, str) and not isinstance(tree, Interpolation):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", tree)
    return tree


class _Reader:
    """Converter of PyYAML nodes to `ConfigNode`s. An alias becomes a copy of its target. file: None for an override."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def read(self, root: yaml.Node, origin: Origin, ancestors: tuple[yaml.Node, ...] = ()) -> ConfigNode:
        """Convert `root`, which begins at `origin`. ancestors: nodes that contain it. Raises ConfigError."""
        if any(root is ancestor for ancestor in ancestors):
            mistake = "an alias (*) within the value that it stands for; write it out"
            raise ConfigError([Problem(str(origin), "", mistake)])
        if isinstance(root, yaml.ScalarNode):
            return ConfigNode(_parse_scalar(root, self._origin_of(root, origin)), origin, root.value)
        if root.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
            raise _TagError([Problem(str(self._origin_of(root, origin)), "", f"tag {root.tag}{_NOT_ALLOWED}")])
        ancestors = (*ancestors, root)
        if isinstance(root, yaml.MappingNode):
            return ConfigNode(self._read_mapping(root, origin, ancestors), origin)
        return ConfigNode([self.read(child, self._origin_of(child, origin), ancestors) for child in root.value], origin)

    def _read_mapping(
        self, root: yaml.MappingNode, origin: Origin, ancestors: tuple[yaml.Node, ...]
    ) -> dict[str, ConfigNode]:
        children: dict[str, ConfigNode] = {}
        for name, child in root.value:
            key_origin = self._origin_of(name, origin)
            if not isinstance(name, yaml.ScalarNode):
                raise _TagError([Problem(str(key_origin), "", "a key must be a name")])
            if name.value == "<<" and name.style is None:
                mistake = (
                    "no merge keys (<<) are read; inherit a file with `defaults:`, or name a value with ${other.key}"
                )
                raise ConfigError([Problem(str(key_origin), "", mistake)])
            if root.flow_style and _is_rest_of_number(name, child, children):
                last_key = next(reversed(children))
                mistake = f"a number has no commas; write {children[last_key].text}{name.value}"
                raise ConfigError([Problem(str(key_origin), last_key, mistake)])
            if name.value in children:
                first = f"; first in line {children[name.value].origin.line}" if self._file else ""
                raise ConfigError([Problem(str(key_origin), name.value, f"written twice{first}")])
            children[name.value] = self.read(child, key_origin, ancestors)
        return children

    def _origin_of(self, root: yaml.Node, override: Origin) -> Origin:
        """Return the origin of a PyYAML node: its line in the file, or `override` if there is no file."""
        return Origin(self._file, root.start_mark.line + 1) if self._file else override


def _is_rest_of_number(name: yaml.ScalarNode, child: yaml.Node, earlier: dict[str, ConfigNode]) -> bool:
    """Return True if `{n: 1,000}` was parsed as `n: 1` and a key `000` without a value. earlier: the keys before
    `name`.
    """
    last_value = earlier[next(reversed(earlier))].value if earlier else None
    is_number = isinstance(last_value, int) and not isinstance(last_value, bool)
    has_no_value = isinstance(child, yaml.ScalarNode) and child.value == ""
    return is_number and has_no_value and re.fullmatch(r"\d{3}", name.value) is not None


def _parse_scalar(root: yaml.Node, origin: Origin) -> str | int | float | bool | None:
    kind = root.tag.rpartition(":")[2]
    text = str(root.value)
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    plain_text = text.replace("_", "")
    try:
        if kind == "int":
            return int(plain_text)
        if kind == "float":
            return float(re.sub(r"\.(?=inf|nan)", "", plain_text.lower()))
    except ValueError:
        raise _TagError([Problem(str(origin), "", f"is tagged !!{kind}, but is none: {text!r}")]) from None
    raise _TagError([Problem(str(origin), "", f"tag {root.tag}{_NOT_ALLOWED}")])
