"""What `${...}` may say, and how large a config may become by it: what is checked before OmegaConf fills them in.

A reference names another key, `${a.b}`, or a variable of the environment, `${oc.env:NAME}`. Sections that refer to
sections that refer to sections grow by powers, so that sizes are added up first, without making anything.
"""

import re
from collections.abc import Iterator

from rlctl.config.errors import Problem
from rlctl.config.provenance import MOST_BYTES, ConfigNode

_MOST_REFERENCES = 100
# What a value costs besides its letters.
_VALUE = 32
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_RESOLVER = re.compile(r"\$\{([^${}:]*):")
_FILLED = "\ue000"


def check_references(root: ConfigNode, marked: list[tuple[str, ConfigNode]]) -> Iterator[Problem]:
    """Problems of the values of `marked`: (dotted key, node) of text with `${`.

    A reference that leads nowhere is OmegaConf's to report.
    """
    if sum(str(node.value).count("${") for _, node in marked) > _MOST_REFERENCES:
        key, node = marked[-1]
        yield Problem(str(node.origin), key, f"more than {_MOST_REFERENCES} references (${{...}}) in one config")
        return
    found = False
    for key, node in marked:
        if what := _unknown(str(node.value)):
            found = True
            yield Problem(str(node.origin), key, what)
    if found:
        return
    sizes, total = _Sizes(root), 0
    for key, node in marked:
        total += sizes.of(node)
        if total > MOST_BYTES:
            what = f"{node.value} makes the config larger than {MOST_BYTES >> 10} KiB: none is so large"
            yield Problem(str(node.origin), key, what)
            return


def _unknown(text: str) -> str | None:
    """What is wrong with a reference in `text`; None too where its brackets do not match, which OmegaConf says."""
    rest = _ESCAPED.sub("", text)
    if any(name.strip() != "oc.env" for name in _RESOLVER.findall(rest)):
        return f"{text}: only keys, ${{a.b}}, and variables, ${{oc.env:NAME}}, can be referred to"
    for _ in range(3):
        for inner in _INNERMOST.findall(rest):
            name = inner.partition(":")[0]
            if name.lstrip().startswith("."):
                return f"{text}: a reference names the whole key, from the top of the config"
            if _FILLED in name:
                return f"{text}: a reference must name its key, not look it up by another reference"
        rest, count = _INNERMOST.subn(_FILLED, rest)
        if not count:
            return None
    return f"{text}: references nested too deep" if "${" in rest else None


class _Sizes:
    """Letters of values with all references in them filled in."""

    def __init__(self, root: ConfigNode) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def of(self, node: ConfigNode) -> int:
        """A cycle counts as nothing: OmegaConf names it."""
        if id(node) in self._known:
            return self._known[id(node)]
        self._known[id(node)] = 0
        if isinstance(node.value, dict | list):
            children = node.value.values() if isinstance(node.value, dict) else node.value
            size = sum(map(self.of, children))
        else:
            size = len(str(node.value)) + _VALUE
            if isinstance(node.value, str):
                size += sum(map(self._referred, _INNERMOST.findall(node.value)))
        self._known[id(node)] = size
        return size

    def _referred(self, reference: str) -> int:
        node: ConfigNode | None = self._root
        # OmegaConf takes `a[0]` and `a.0` alike.
        for name in re.sub(r"\[(\w+)\]", r".\1", reference).strip().split("."):
            children = node.value if node else None
            if isinstance(children, list):
                node = children[int(name)] if name.isdecimal() and int(name) < len(children) else None
            else:
                node = children.get(name) if isinstance(children, dict) else None
        return self.of(node) if node else 0
