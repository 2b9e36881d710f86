"""Interpolation of values by OmegaConf: `${a.b}` is another key, `${oc.env:NAME}` an environment variable.

A value that reads the environment is a secret, and no disk may hold it.
"""

import re
from dataclasses import replace

from rlctl.config.errors import ConfigError, Problem
from rlctl.config.provenance import MISSING, ConfigNode, children, leaves, node_at, plain

_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_INNERMOST = re.compile(r"\$\{([^{}]*)\}")
_FILLED = "\ue000"
# Words of OmegaConf.
_NO_VARIABLE = re.compile(r"Environment variable '([^']*)' not found")


class _InterpolationError(Exception):
    """A reference that OmegaConf is not asked to fill in."""


def interpolate(root: ConfigNode) -> ConfigNode:
    """Return the tree with its references filled in. Raises ConfigError with every one that leads nowhere."""
    marked = [(key, node) for key, node in leaves(root) if isinstance(node.value, str) and "${" in node.value]
    if not marked:
        return root
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    errors = (_InterpolationError, OmegaConfBaseException)
    walk, problems = _Walk(root), []
    for key, node in marked:
        try:
            walk.reads_environment(key, node)
            OmegaConf.create([node.value])
        except errors as error:
            problems.append(_problem(key, node, error))
    if problems:
        raise ConfigError(problems)
    tree, filled = OmegaConf.create(plain(root)), {}
    for key, node in marked:
        try:
            value = OmegaConf.create([node.value], parent=tree)[0]
        except errors as error:
            problems.append(_problem(key, node, error))
            continue
        if OmegaConf.is_config(value):
            # The section itself: a copy would not know which of its values are secrets.
            filled[id(node)] = walk.find(_parse_references(str(node.value))[0][0])
        else:
            secret = str(node.value) if walk.reads_environment(key, node) else None
            filled[id(node)] = ConfigNode(value, node.origin, secret=secret)
    if problems:
        raise ConfigError(problems)
    return _rebuild(root, filled)


def _problem(key: str, node: ConfigNode, error: Exception) -> Problem:
    what = str(error).strip().splitlines()[0]
    if variable := _NO_VARIABLE.search(what):
        name = variable[1]
        what = f"the environment has no variable {name}; set it, or write a default: ${{oc.env:{name},DEFAULT}}"
    return Problem(str(node.origin), key, f"{node.value}: {what}")


def _rebuild(node: ConfigNode, filled: dict[int, ConfigNode]) -> ConfigNode:
    if isinstance(node.value, dict):
        return replace(node, value={key: _rebuild(child, filled) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[_rebuild(child, filled) for child in node.value])
    return replace(_rebuild(filled[id(node)], filled), origin=node.origin) if id(node) in filled else node


def _parse_references(text: str) -> tuple[list[str], bool]:
    """Return the keys that a text refers to, and True if it reads the environment. Raises _InterpolationError."""
    keys, secret = [], False
    rest = _ESCAPED.sub(" ", text)
    while found := _INNERMOST.search(rest):
        name, is_resolver, _ = found[1].partition(":")
        if is_resolver and name.strip() != "oc.env":
            raise _InterpolationError("only keys, ${a.b}, and variables, ${oc.env:NAME}, can be referred to")
        if _FILLED in found[1].partition(",")[0]:
            raise _InterpolationError("a reference must name its key, not look it up by another reference")
        if name.lstrip().startswith("."):
            raise _InterpolationError("a reference names the whole key, from the top of the config")
        if is_resolver:
            secret = True
        else:
            # OmegaConf takes `[a][0]`, `a[0]` and `a.0`.
            keys.append(re.sub(r"\[(\w+)\]", r".\1", name).strip().removeprefix("."))
        rest = rest.replace(found[0], _FILLED, 1)
    if "${" in rest:
        raise _InterpolationError("a reference without its closing bracket")
    return keys, secret


class _Walk:
    """A walk along the references of one config."""

    def __init__(self, root: ConfigNode) -> None:
        self._root = root
        self._known: dict[int, bool] = {}

    def find(self, key: str) -> ConfigNode:
        """Return the node that `${key}` names. Raises _InterpolationError."""
        found = node_at(self._root, key.split("."))
        if found is None or found.value == MISSING:
            raise _InterpolationError(f"{key} is not set" if found else f"there is no key {key!r}")
        return found

    def reads_environment(self, key: str, node: ConfigNode, above: tuple[int, ...] = ()) -> bool:
        """Return True if a value reads the environment once it is filled in.

        above: ids of the nodes that lead here. Raises _InterpolationError.
        """
        if id(node) in above:
            raise _InterpolationError(f"{key} refers to itself")
        if id(node) not in self._known:
            parts, secret = [(f"{key}.{name}", child) for name, child in children(node).items()], False
            if isinstance(node.value, str) and "${" in node.value:
                names, secret = _parse_references(node.value)
                parts = [(name, self.find(name)) for name in names]
            # Every part: each may refer to itself, or to nothing.
            inside = [self.reads_environment(name, part, (*above, id(node))) for name, part in parts]
            self._known[id(node)] = secret or any(inside)
        return self._known[id(node)]
