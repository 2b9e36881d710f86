"""Origins of a resolved config's values, written as comments in its YAML: `lr: 0.0003 # from my.yaml:7`.

rlctl writes a run's config.yaml with every key, so its line numbers do not tell where a user wrote a value. A value
without a comment is a default from configs/.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

_ORIGIN_MARK = "  # from "


def with_origins(text: str, origins: Mapping[str, str]) -> str:
    """Return the YAML `text`, in block style, with a comment after each value in `origins` (dotted key -> origin)."""
    parts = []
    begin = 0
    for key, end in _value_ends(yaml.compose(text, Loader=yaml.SafeLoader), ""):
        if key in origins:
            parts += [text[begin:end], _ORIGIN_MARK, _comment(origins[key])]
            begin = end
    return "".join([*parts, text[begin:]])


def recorded_origins(path: Path) -> dict[str, str]:
    """Return dotted key -> origin, for the values of a file with such a comment; empty if the file is no YAML."""
    try:
        text = path.read_text(encoding="utf-8")
        ends = list(_value_ends(yaml.compose(text, Loader=yaml.SafeLoader), ""))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    rests = ((key, text[end:].partition("\n")[0]) for key, end in ends)
    return {key: rest.removeprefix(_ORIGIN_MARK) for key, rest in rests if rest.startswith(_ORIGIN_MARK)}


def _value_ends(node: yaml.Node | None, key: str) -> Iterator[tuple[str, int]]:
    """Yield (dotted key, text index after its end) for every scalar and every empty mapping or list, in order."""
    if isinstance(node, yaml.MappingNode) and node.value:
        for name, child in node.value:
            yield from _value_ends(child, f"{key}.{name.value}" if key else str(name.value))
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for index, child in enumerate(node.value):
            yield from _value_ends(child, f"{key}.{index}")
    elif node is not None and key:
        yield key, node.end_mark.index


def _comment(origin: str) -> str:
    # YAML forbids control characters, even in comments.
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(origin.split()))
