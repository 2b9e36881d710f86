"""Output of `rlctl config`: a config as lines of YAML with remarks, and the differences of two configs as a table."""

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

# Key of a config -> metadata of its field, such as "doc".
_METADATA: dict[str, Mapping[str, Any]] = {}
for _schema in KINDS.values():
    _METADATA |= {key: field.metadata for key, field in schema_keys(_schema)}
_ABSENT = object()
MAX_INDENT = 44  # the most columns before a comment


def lines(root: ConfigNode) -> list[tuple[str, str, str]]:
    """Return the whole config as (line of YAML, origin of its value, meaning of its key), in order."""
    described = []
    for line, node, key in _render_section(root, "", ""):
        origin = str(node.origin) if node else ""
        meaning = _METADATA.get(schema_key(key), {}).get("doc", "") if node else ""
        described.append((line, origin, meaning))
    return described


def print_lines(lines_with_remarks: list[tuple[str, str]], out: Console) -> None:
    """Print each (line of YAML, remark) with the remark as a comment, on a terminal in two columns."""
    widths = [len(line) for line, remark in lines_with_remarks if remark]
    width = min(MAX_INDENT, max(widths, default=0))
    if not out.soft_wrap and width:
        columns = (Column(min_width=width, max_width=MAX_INDENT, overflow="fold"), Column(style="dim"))
        rows = ((Text(line), Text(f"# {remark}" if remark else "")) for line, remark in lines_with_remarks)
        out.print(make_table(*columns, rows=rows))
        return
    for line, remark in lines_with_remarks:
        text = Text(line)
        if remark:
            text = Text.assemble(line.ljust(width), (f"  # {remark}", "dim"))
        out.print(text)


def difference(name_a: str, a: ConfigNode, name_b: str, b: ConfigNode) -> Table | None:
    """Return a table of the keys whose values differ; None if no value differs."""
    values_a = _resolved_values(a)
    values_b = _resolved_values(b)
    keys = [key for key in {**values_a, **values_b} if values_a.get(key, _ABSENT) != values_b.get(key, _ABSENT)]
    if not keys:
        return None
    table = make_table(names("key"), texts(name_a, "red"), texts(name_b, "green"), titles="bold")
    for key in keys:
        cells = [_yaml_text(values[key]) if key in values else "–" for values in (values_a, values_b)]
        table.add_row(key, *cells)
    return table


def _render_section(node: ConfigNode, key: str, indent: str) -> list[tuple[str, ConfigNode | None, str]]:
    """Return (line, node, dotted key) for each line of a mapping's children. A line without a value has node None."""
    assert isinstance(node.value, dict)
    rendered: list[tuple[str, ConfigNode | None, str]] = []
    for name, child in node.value.items():
        child_key = f"{key}.{name}" if key else name
        if isinstance(child.value, dict) and child.value:
            rendered.append((f"{indent}{name}:", None, child_key))
            rendered += _render_section(child, child_key, indent + "  ")
        elif isinstance(child.value, list) and any(isinstance(grandchild.value, dict) for grandchild in child.value):
            rendered.append((f"{indent}{name}:", None, child_key))
            for index, grandchild in enumerate(child.value):
                rendered += _render_list_entry(grandchild, f"{child_key}.{index}", indent)
        else:
            rendered.append((f"{indent}{name}: {_render_inline(child)}", child, child_key))
    return rendered


def _render_list_entry(node: ConfigNode, key: str, indent: str) -> list[tuple[str, ConfigNode | None, str]]:
    if not isinstance(node.value, dict) or not node.value:
        return [(f"{indent}- {_render_inline(node)}", node, key)]
    rendered = _render_section(node, key, indent + "  ")
    first_line, first_node, first_key = rendered[0]
    rendered[0] = (f"{indent}- {first_line.lstrip()}", first_node, first_key)
    return rendered


def _render_inline(node: ConfigNode) -> str:
    """Return a value on one line of YAML."""
    if isinstance(node.value, list):
        return f"[{', '.join(_render_inline(child) for child in node.value)}]"
    return _yaml_text(plain(node))


def _yaml_text(value: object) -> str:
    return dump({"key": value}).removeprefix("key: ").rstrip("\n")


def _resolved_values(root: ConfigNode) -> dict[str, object]:
    """Return dotted key -> value. Paths are resolved as a run does it, so that a run's config equals its recipe."""
    values: dict[str, object] = {}
    runs_node = node_at(root, ["run", "dir"])
    runs = Path(str(runs_node.value)) if runs_node and runs_node.value else None
    for key, node in leaves(root):
        path_kind = _METADATA.get(schema_key(key), {}).get("path")
        values[key] = plain(node)
        if path_kind and isinstance(node.value, str):
            # A path that does not exist is compared as it is written.
            with suppress(FileNotFoundError):
                values[key] = paths.resolve(node.value, path_kind, node.origin, runs)
    return values
