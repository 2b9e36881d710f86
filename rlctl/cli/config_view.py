"""A config tree as lines of YAML with remarks, and two of them as a table of differences."""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlctl.config import paths
from rlctl.config.fields import schema_keys
from rlctl.config.provenance import ConfigNode, dump, leaves, plain
from rlctl.config.schema import KINDS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


_NO_FIELD: Mapping[str, Any] = {}
_ABSENT = object()
MOST_INDENT = 44  # columns before the comments


def lines(root: ConfigNode) -> list[tuple[str, str, str]]:
    """(line of YAML, where its value was written, what its key means); the lines together are the config."""
    meanings = {key: each.metadata for kind in KINDS.values() for key, each in schema_keys(kind)}
    return [
        (text, str(node.origin) if node else "", meanings.get(_generic(key), _NO_FIELD).get("doc", "") if node else "")
        for text, node, key in _render(root, "", "")
    ]


def print_lines(remarks: list[tuple[str, str]], out: "Console") -> None:
    """Each (line, remark) as YAML with comments: one line each in a pipe, hanging comments on a terminal."""
    from rich.table import Table
    from rich.text import Text

    width = min(MOST_INDENT, max((len(text) for text, remark in remarks if remark), default=0))
    if not out.soft_wrap and width:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(min_width=width, max_width=MOST_INDENT, overflow="fold")
        grid.add_column(style="dim")
        for text, remark in remarks:
            grid.add_row(Text(text), Text(f"# {remark}" if remark else ""))
        out.print(grid)
        return
    for text, remark in remarks:
        out.print(Text.assemble(text.ljust(width) if remark else text, (f"  # {remark}" if remark else "", "dim")))


def difference(name_a: str, a: ConfigNode, name_b: str, b: ConfigNode) -> "Table | None":
    """The leaves whose values differ, or None."""
    from rich.table import Table

    left, right = _values(a), _values(b)
    keys = [key for key in {**left, **right} if left.get(key, _ABSENT) != right.get(key, _ABSENT)]
    if not keys:
        return None
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("key", style="cyan", no_wrap=True)
    for title, style in ((name_a, "red"), (name_b, "green")):
        table.add_column(title, style=style, overflow="fold")
    for key in keys:
        table.add_row(key, *(_yaml(side[key]) if key in side else "–" for side in (left, right)))
    return table


def _render(node: ConfigNode, key: str, indent: str) -> list[tuple[str, ConfigNode | None, str]]:
    """(line, node of a value that ends on it, dotted key) for the children of a mapping."""
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
    """A value on one line of YAML."""
    if isinstance(node.value, list):
        return f"[{', '.join(_inline(entry) for entry in node.value)}]"
    return _yaml(plain(node))


def _yaml(value: object) -> str:
    return dump({"key": value}).removeprefix("key: ").rstrip("\n")


def _values(root: ConfigNode) -> dict[str, object]:
    """Dotted key -> value, with paths resolved as a run would, so that a run equals its recipe."""
    looked_up = {key: each.metadata for kind in KINDS.values() for key, each in schema_keys(kind)}
    values: dict[str, object] = {}
    for key, node in leaves(root):
        kind = looked_up.get(_generic(key), _NO_FIELD).get("path")
        values[key] = plain(node)
        if kind and isinstance(node.value, str):
            with suppress(FileNotFoundError):
                values[key] = paths.resolve(node.value, kind, node.origin)
    return values


def _generic(key: str) -> str:
    return ".".join("N" if part.isdecimal() else part for part in key.split("."))
