"""Interpolation of values by OmegaConf: `${a.b}` reads another key, `${oc.env:NAME}` an environment variable.

A value that reads the environment is treated as a secret: it is never written to disk.
"""

import re
from dataclasses import replace

from rlctl.config.errors import ConfigError, Problem
from rlctl.config.provenance import MISSING, ConfigNode, children, leaves, node_at, plain

# `\${` with an odd number of backslashes, which is text and no reference.
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_INNERMOST = re.compile(r"\$\{([^{}]*)\}")
# Character that stands in a text for a reference that was read already. No config has it: it is for private use.
_FILLED = "\ue000"
# Text of OmegaConf's error for a missing variable.
_NO_VARIABLE = re.compile(r"Environment variable '([^']*)' not found")


class _InterpolationError(Exception):
    """A reference that rlctl does not allow."""


def interpolate(root: ConfigNode) -> ConfigNode:
    """Return the tree with references replaced by values. Raises ConfigError with every reference that is invalid."""
    marked = [(key, node) for key, node in leaves(root) if isinstance(node.value, str) and "${" in node.value]
    if not marked:
        return root
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    errors = (_InterpolationError, OmegaConfBaseException)
    walk = _Walk(root)
    problems = []
    for key, node in marked:
        try:
            walk.reads_environment(key, node)
            # Raises for a text that OmegaConf cannot parse.
            OmegaConf.create([node.value])
        except errors as error:
            problems.append(_describe_error(key, node, error))
    if problems:
        raise ConfigError(problems)
    tree = OmegaConf.create(plain(root))
    # id of a node with references -> node that replaces it.
    filled = dict[int, ConfigNode]()
    for key, node in marked:
        try:
            value = OmegaConf.create([node.value], parent=tree)[0]
        except errors as error:
            problems.append(_describe_error(key, node, error))
            continue
        if OmegaConf.is_config(value):
            # Use the section's own node, because OmegaConf's copy does not know which values are secrets.
            filled[id(node)] = walk.find(_parse_references(str(node.value))[0][0])
        else:
            secret = str(node.value) if walk.reads_environment(key, node) else None
            filled[id(node)] = ConfigNode(value, node.origin, secret=secret)
    if problems:
        raise ConfigError(problems)
    return _rebuild(root, filled)


def _describe_error(key: str, node: ConfigNode, error: Exception) -> Problem:
    mistake = str(error).strip().splitlines()[0]
    if variable := _NO_VARIABLE.search(mistake):
        name = variable[1]
        mistake = f"the environment has no variable {name}; set it, or write a default: ${{oc.env:{name},DEFAULT}}"
    return Problem(str(node.origin), key, f"{node.value}: {mistake}")


def _rebuild(node: ConfigNode, filled: dict[int, ConfigNode]) -> ConfigNode:
    if isinstance(node.value, dict):
        return replace(node, value={key: _rebuild(child, filled) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return replace(node, value=[_rebuild(child, filled) for child in node.value])
    return replace(_rebuild(filled[id(node)], filled), origin=node.origin) if id(node) in filled else node


def _parse_references(text: str) -> tuple[list[str], bool]:
    """Return the keys to which a text refers, and True if it reads the environment. Raises _InterpolationError."""
    keys = []
    is_secret = False
    rest = _ESCAPED.sub(" ", text)
    while reference := _INNERMOST.search(rest):
        name, is_resolver, _ = reference[1].partition(":")
        if is_resolver and name.strip() != "oc.env":
            raise _InterpolationError("only keys, ${a.b}, and variables, ${oc.env:NAME}, can be referred to")
        if _FILLED in reference[1].partition(",")[0]:
            raise _InterpolationError("a reference must name its key, not look it up by another reference")
        if name.lstrip().startswith("."):
            raise _InterpolationError("a reference names the whole key, from the top of the config")
        if is_resolver:
            is_secret = True
        else:
            # OmegaConf accepts `[a][0]`, `a[0]` and `a.0`.
            keys.append(re.sub(r"\[(\w+)\]", r".\1", name).strip().removeprefix("."))
        rest = rest.replace(reference[0], _FILLED, 1)
    if "${" in rest:
        raise _InterpolationError("a reference without its closing bracket")
    return keys, is_secret


class _Walk:
    """Search along the references of one config, with the results cached."""

    def __init__(self, root: ConfigNode) -> None:
        self._root = root
        # id of a node -> True if it reads the environment, directly or by references.
        self._secrets: dict[int, bool] = {}

    def find(self, key: str) -> ConfigNode:
        """Return the node to which `${key}` refers. Raises _InterpolationError."""
        node = node_at(self._root, key.split("."))
        if node is None or node.value == MISSING:
            raise _InterpolationError(f"{key} is not set" if node else f"there is no key {key!r}")
        return node

    def reads_environment(self, key: str, node: ConfigNode, path: tuple[int, ...] = ()) -> bool:
        """Return True if a value reads the environment, directly or by references.

        path: ids of the nodes that were followed so far. Raises _InterpolationError for a loop or an unknown key.
        """
        if id(node) in path:
            raise _InterpolationError(f"{key} refers to itself")
        if id(node) not in self._secrets:
            is_secret = False
            parts = {f"{key}.{name}": child for name, child in children(node).items()}
            if isinstance(node.value, str) and "${" in node.value:
                names, is_secret = _parse_references(node.value)
                parts = {name: self.find(name) for name in names}
            # Visit every part, even after a secret is found, so that every loop and unknown key is reported.
            secret_parts = [self.reads_environment(name, part, (*path, id(node))) for name, part in parts.items()]
            self._secrets[id(node)] = is_secret or any(secret_parts)
        return self._secrets[id(node)]
