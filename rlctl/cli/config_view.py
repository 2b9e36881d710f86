"""A config tree as lines of YAML with remarks, and the differences of two trees as a table."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlctl.config import paths
from rlctl.config.fields import schema_key, schema_keys
from rlctl.config.provenance import ConfigNode, dump, leaves, node_at, plain
from rlctl.config.schema import KINDS
from rlctl.dashboard.console import make_table, names, texts

_FIELDS: Mapping[str, Any] = {key: each.metadata for kind in KINDS.values() for key, each in schema_keys(kind)}
_ABSENT = object()
MOST_INDENT = 44  # columns before the comments


def lines(root: ConfigNode) -> list[tuple[str, str, str]]:
    """Return (line of YAML, origin of its value, meaning of its key); the lines together are the config."""
    return [
        (text, str(node.origin) if node else "", _FIELDS.get(schema_key(key), {}).get("doc", "") if node else "")
        for text, node, key in _render(root, "", "")
    ]


def print_lines(remarks: list[tuple[str, str]], out: Console) -> None:
    """Print each (line, remark) as YAML with a comment: on one line in a pipe, in two columns on a terminal."""
    width = min(MOST_INDENT, max((len(text) for text, remark in remarks if remark), default=0))
    if not out.soft_wrap and width:
        columns = Column(min_width=width, max_width=MOST_INDENT, overflow="fold"), Column(style="dim")
        rows = ((Text(text), Text(f"# {remark}" if remark else "")) for text, remark in remarks)
        out.print(make_table(*columns, rows=rows))
        return
    for text, remark in remarks:
        out.print(Text.assemble(text.ljust(width) if remark else text, (f"  # {remark}" if remark else "", "dim")))


def difference(name_a: str, a: ConfigNode, name_b: str, b: ConfigNode) -> Table | None:
    """Return the leaves whose values differ, or None."""
    left, right = _values(a), _values(b)
    keys = [key for key in {**left, **right} if left.get(key, _ABSENT) != right.get(key, _ABSENT)]
    if not keys:
        return None
    table = make_table(names("key"), texts(name_a, "red"), texts(name_b, "green"), titles="bold")
    for key in keys:
        table.add_row(key, *(_yaml(side[key]) if key in side else "–" for side in (left, right)))
    return table


def _render(node: ConfigNode, key: str, indent: str) -> list[tuple[str, ConfigNode | None, str]]:
    """Return (line, node of a value that ends on it, dotted key) for the children of a mapping."""
    assert isinstance(node.value, dict)
    rendered: list[tuple[str, ConfigNode | None, str]] = []
    for name, child in node.value.items():
        full = f"{key}.{name}" if key else name
        if isinstance(child.value, dict) and child.value:
            rendered += [(f"{indent}{name}:", None, full), *_render(child, full, indent + "  ")]
        elif isinstance(child.value, list) and any(isinstance(entry.value, dict) for entry in child.value):
            rendered.append((f"{indent}{name}:", None, full))
            for index, entry in enumerate(child.value):
                rendered += _entry(entry, f"{full}.{index}", indent)
        else:
            rendered.append((f"{indent}{name}: {_inline(child)}", child, full))
    return rendered


def _entry(entry: ConfigNode, key: str, indent: str) -> list[tuple[str, ConfigNode | None, str]]:
    if not isinstance(entry.value, dict) or not entry.value:
        return [(f"{indent}- {_inline(entry)}", entry, key)]
    (first, node, name), *rest = _render(entry, key, indent + "  ")
    return [(f"{indent}- {first.lstrip()}", node, name), *rest]


def _inline(node: ConfigNode) -> str:
    """Return a value on one line of YAML."""
    if isinstance(node.value, list):
        return f"[{', '.join(_inline(entry) for entry in node.value)}]"
    return _yaml(plain(node))


def _yaml(value: object) -> str:
    return dump({"key": value}).removeprefix("key: ").rstrip("\n")


def _values(root: ConfigNode) -> dict[str, object]:
    """Return dotted key -> value, with paths resolved as a run would, so that a run equals its recipe."""
    values: dict[str, object] = {}
    folder = node_at(root, ["run", "dir"])
    runs = Path(str(folder.value)) if folder and folder.value else None
    for key, node in leaves(root):
        kind = _FIELDS.get(schema_key(key), {}).get("path")
        values[key] = plain(node)
        if kind and isinstance(node.value, str):
            with suppress(FileNotFoundError):
                values[key] = paths.resolve(node.value, kind, node.origin, runs)
    return values
