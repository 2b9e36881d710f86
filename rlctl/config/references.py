"""References in values: `${a.b}` is the value of another key, `${oc.env:NAME}` a variable of the environment.

`${oc.env:NAME,default}` has a default, and a backslash before `${` makes it text. Sections that refer to sections that
refer to sections grow by powers, so that what is filled in is counted, and bounded.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import replace

from rlctl.config.errors import ConfigError, Problem
from rlctl.config.provenance import MISSING, MOST_BYTES, ConfigNode, leaves, node_at, plain

_MOST_REFERENCES = 100
# What a value costs besides its letters.
_VALUE = 32
_OPENING = re.compile(r"(\\*)\$\{")


class _ReferenceError(Exception):
    """A reference that cannot be filled in. too_large: the rest of the config is not looked at."""

    def __init__(self, what: str, too_large: bool = False) -> None:
        super().__init__(what)
        self.too_large = too_large


def fill_references(root: ConfigNode) -> ConfigNode:
    """Return the tree with its references filled in. Raises ConfigError with every one that leads nowhere."""
    marked = [(key, node) for key, node in leaves(root) if isinstance(node.value, str) and "${" in node.value]
    if sum(str(node.value).count("${") for _, node in marked) > _MOST_REFERENCES:
        key, node = marked[-1]
        what = f"more than {_MOST_REFERENCES} references (${{...}}) in one config"
        raise ConfigError([Problem(str(node.origin), key, what)])
    filler, problems = _Filler(root), []
    for key, node in marked:
        try:
            filler.fill(node)
        except RecursionError:
            problems.append(Problem(str(node.origin), key, "references nested too deep"))
        except _ReferenceError as error:
            problems.append(Problem(str(node.origin), key, f"{node.value}{error}"))
            if error.too_large:
                break
    if problems:
        raise ConfigError(problems)
    return _Filler(root).fill(root) if marked else root


class _Filler:
    """Fills references in, up to a bound on all that they add."""

    def __init__(self, root: ConfigNode) -> None:
        self._root = root
        self._letters = 0
        # Keys that are being looked up, each for the one before it.
        self._open: list[str] = []

    def fill(self, node: ConfigNode) -> ConfigNode:
        """Return a node with all references in it filled in. Raises _ReferenceError."""
        if isinstance(node.value, dict):
            return replace(node, value={key: self.fill(child) for key, child in node.value.items()})
        if isinstance(node.value, list):
            return replace(node, value=[self.fill(child) for child in node.value])
        if self._open:
            self._letters += len(str(node.value)) + _VALUE
            if self._letters > MOST_BYTES:
                raise _ReferenceError(f" makes the config larger than {MOST_BYTES >> 10} KiB: none is so large", True)
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        parts = [self._look_up(part) if is_reference else part for part, is_reference in _split(node.value)]
        secret = node.value if any(isinstance(part, ConfigNode) and part.secret for part in parts) else None
        if len(parts) == 1 and isinstance(parts[0], ConfigNode):
            return replace(parts[0], origin=node.origin, text=None, secret=secret)
        text = "".join(part if isinstance(part, str) else str(plain(part)) for part in parts)
        return ConfigNode(text, node.origin, secret=secret)

    def _look_up(self, reference: str) -> ConfigNode:
        head, has_default, default = reference.partition(",")
        name, is_resolver, variable = (word.strip() for word in head.partition(":"))
        if is_resolver and name != "oc.env":
            raise _ReferenceError(": only keys, ${a.b}, and variables, ${oc.env:NAME}, can be referred to")
        if "${" in head:
            raise _ReferenceError(": a reference must name its key, not look it up by another reference")
        if is_resolver:
            return self._variable(variable, default.strip() if has_default else None)
        # `a[0]` and `a.0` are the same entry.
        key = re.sub(r"\[(\w+)\]", r".\1", reference).strip()
        if key.startswith("."):
            raise _ReferenceError(": a reference names the whole key, from the top of the config")
        found = node_at(self._root, key.split("."))
        if found is None or found.value == MISSING:
            raise _ReferenceError(f": {key} is not set" if found else f": there is no key {key!r}")
        if key in self._open:
            raise _ReferenceError(f": {key} refers to itself")
        self._open.append(key)
        filled = self.fill(found)
        self._open.pop()
        return filled

    def _variable(self, name: str, default: str | None) -> ConfigNode:
        """Return a variable of the environment as a secret; a default is one too, since it is read in its place."""
        if name in os.environ:
            return ConfigNode(os.environ[name], self._root.origin, secret=name)
        if default is None:
            raise _ReferenceError(f": the environment has no variable {name!r}")
        value = self.fill(ConfigNode(default.strip("'\""), self._root.origin)).value
        return ConfigNode(None if default == "null" else str(value), self._root.origin, secret=name)


def _split(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text that are not empty, with True for what is between `${` and its `}`."""
    end = 0
    for found in _OPENING.finditer(text):
        if found.start() < end:
            continue
        escapes = found[1]
        before = text[end : found.start()] + escapes[: len(escapes) // 2]
        end = found.end()
        if len(escapes) % 2:
            yield before + "${", False
            continue
        if before:
            yield before, False
        depth, begin = 1, end
        while depth:
            closing = re.compile(r"\$\{|\}").search(text, end)
            if closing is None:
                raise _ReferenceError(": a reference without its closing bracket")
            depth, end = depth + (1 if closing[0] == "${" else -1), closing.end()
        yield text[begin : end - 1], True
    if text[end:]:
        yield text[end:], False
