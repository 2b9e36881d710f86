"""Config values that remember where they come from: YAML files and overrides as trees of `Node`s.

Scalars follow YAML 1.2's core schema, not PyYAML's 1.1: `1e-6` is a number, and `on`, `off`, `yes` and `no` are
text. Nothing but mappings, lists, text, numbers, booleans and null can be read, so no tag builds an object.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlctl.config.errors import ConfigError, Problem
from rlctl.config.shipped import CONFIGS, is_shipped

MISSING = "???"

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


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would read as something other than text; repeats shared values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, data: str) -> yaml.ScalarNode:
    # In double quotes line breaks of every kind are escaped; PyYAML folds them away in the other styles.
    style = '"' if len(data.splitlines()) > 1 or data.splitlines() != [data] else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _text)
_Dumper.add_multi_representer(str, _text)
for _tag, _pattern, _first in _SCALARS:
    for _yaml in (_Loader, _Dumper):
        _yaml.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)


@dataclass(frozen=True)
class Origin:
    """Where a value was written: a line of a file, or an override by its position (from 1) and text."""

    file: Path | None = None
    line: int = 0
    override: int = 0
    text: str = ""

    def __str__(self) -> str:
        if self.override:
            return f"override {self.override}: {self.text}"
        return f"{show_path(self.file)}:{self.line}" if self.file else "defaults"


@dataclass(frozen=True)
class Node:
    """A value and its origin. text: how a scalar was written, so that `name: 007` can stay text.

    secret: the interpolation that gave the value, if it reads the environment.
    """

    value: "dict[str, Node] | list[Node] | str | int | float | bool | None"
    origin: Origin
    text: str | None = None
    secret: str | None = None


class Interpolation(str):
    """Text whose `${` is to be resolved by whoever reads the dumped config."""


def show_path(path: Path) -> str:
    """As a person would type it: relative below the current directory, `configs/base.yaml` if shipped, or absolute."""
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return str(path.relative_to(CONFIGS.parent)) if is_shipped(path) else str(path)


def read_file(path: Path) -> Node:
    """The mapping in a YAML file. Raises ConfigError: unreadable, not YAML, no mapping, a key written twice."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([Problem(show_path(path), "", f"cannot be read: {reason}")]) from error
    except yaml.YAMLError as error:
        raise ConfigError([Problem(f"{show_path(path)}:{_line(error)}", "", _reason(error))]) from error
    if root is None:
        return Node({}, Origin(path, 1))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError([Problem(f"{show_path(path)}:1", "", "a config is a mapping of `key: value` lines")])
    return _node(root, Origin(path, 1), path)


def read_value(text: str, origin: Origin) -> Node:
    """The YAML value of an override; what is not YAML (`[0-9]+`) is text."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        node = Node(None, origin) if root is None else _node(root, origin, None)
    except (yaml.YAMLError, ConfigError):
        node = Node(text, origin)
    return Node(node.value, origin, text)


def merge(base: Node, over: Node) -> Node:
    """`over` wins: mappings are merged key by key, everything else is replaced whole."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, over.origin, over.text)


def plain(node: Node) -> Any:
    """The value alone: dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def leaves(node: Node, key: str = "") -> Iterator[tuple[str, Node]]:
    """(dotted key, node) of every scalar, and of every empty mapping or list, in order."""
    children: list[tuple[str, Node]] = []
    if isinstance(node.value, dict):
        children = list(node.value.items())
    elif isinstance(node.value, list):
        children = [(str(index), child) for index, child in enumerate(node.value)]
    if not children and key:
        yield key, node
    for name, child in children:
        yield from leaves(child, f"{key}.{name}" if key else name)


def dump(data: Any) -> str:
    """YAML text that `read_file` reads back to the same data; `${` is escaped, but in an `Interpolation`."""
    return yaml.dump(_escape(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


def _escape(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _escape(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_escape(value) for value in data]
    if isinstance(data, str) and not isinstance(data, Interpolation):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", data)
    return data


def _node(root: yaml.Node, origin: Origin, file: Path | None) -> Node:
    if isinstance(root, yaml.MappingNode):
        return Node(_mapping(root, origin, file), origin)
    if isinstance(root, yaml.SequenceNode):
        return Node([_node(child, _at(child, origin, file), file) for child in root.value], origin)
    return Node(_scalar(root, _at(root, origin, file)), origin, root.value)


def _mapping(root: yaml.MappingNode, origin: Origin, file: Path | None) -> dict[str, Node]:
    children: dict[str, Node] = {}
    for name, child in root.value:
        here = _at(name, origin, file)
        if not isinstance(name, yaml.ScalarNode):
            raise ConfigError([Problem(str(here), "", "a key must be a name")])
        if name.value in children:
            first = children[name.value].origin.line
            raise ConfigError([Problem(str(here), name.value, f"written twice; first in line {first}")])
        children[name.value] = _node(child, here, file)
    return children


def _scalar(root: yaml.Node, here: Origin) -> str | int | float | bool | None:
    kind, text = root.tag.rpartition(":")[2], str(root.value)
    if kind == "str":
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text.replace("_", ""))
    if kind == "float":
        return float(re.sub(r"\.(?=inf|nan)", "", text.replace("_", "").lower()))
    raise ConfigError([Problem(str(here), "", f"tag {root.tag} is not allowed: write plain values")])


def _at(root: yaml.Node, origin: Origin, file: Path | None) -> Origin:
    return Origin(file, root.start_mark.line + 1) if file else origin


def _line(error: yaml.YAMLError) -> int:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return mark.line + 1 if mark else 1


def _reason(error: yaml.YAMLError) -> str:
    return f"not YAML: {getattr(error, 'problem', None) or getattr(error, 'context', None) or error}"
