"""From a recipe and `key=value` overrides to one tree of values, each with its origin.

Order, the later winning: the files of `defaults:` from left to right (each with its own `defaults:` first), the
file itself, the overrides. Mappings merge, everything else is replaced; then `${other.key}` is filled in.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from rlctl.config.builtin import CONFIGS, find, recipe_names
from rlctl.config.errors import ConfigError, Problem, did_you_mean
from rlctl.config.provenance import (
    MOST_DEPTH,
    MOST_VALUES,
    ConfigNode,
    Origin,
    leaves,
    merge,
    plain,
    read_file,
    read_value,
    show_path,
)
from rlctl.config.references import check_references

# Files that one inherits from, one through the other.
_MOST_PARENTS = 32


def compose(recipe: Path, overrides: list[str]) -> ConfigNode:
    """The merged, interpolated tree of the file `recipe`.

    Raises ConfigError: a parent not found, unreadable YAML, a malformed override or interpolation, too many values.
    """
    root = _complete(_inherit(recipe, (), {}))
    root = _apply(root, overrides)
    if sum(1 for _ in leaves(root)) > MOST_VALUES:
        raise ConfigError([Problem(show_path(recipe), "", f"more than {MOST_VALUES:,} values: no config is so large")])
    return _interpolate(root)


def find_recipe(recipe: str) -> Path:
    """The file a person means by `recipe`: a path, a run's directory, or the name of a shipped one."""
    path = Path(os.path.expanduser(recipe))
    if os.path.isfile(path / "config.yaml"):
        path /= "config.yaml"
    found = find(str(path), Path.cwd())
    if found is None:
        hint = did_you_mean(path.stem, recipe_names()) or "; see `rlctl recipes list`"
        raise ConfigError([Problem(recipe, "", f"no such recipe or file{hint}")])
    return found


def _inherit(path: Path, below: tuple[Path, ...], known: dict[Path, ConfigNode]) -> ConfigNode:
    """The file over its parents. known: what was read already, since many may inherit from one."""
    if path in known:
        return known[path]
    root = read_file(path)
    assert isinstance(root.value, dict)
    own = ConfigNode({key: node for key, node in root.value.items() if key != "defaults"}, root.origin)
    merged = ConfigNode({}, root.origin)
    for name, origin in _parents(root.value.get("defaults")):
        # A recipe of one's own may be named sft.yaml and inherit the shipped one of that name.
        parent = find(name, path.parent, other_than=path) or find(name, path.parent)
        if parent is None:
            names = [file.stem for file in (*path.parent.glob("*.yaml"), *CONFIGS.glob("*.yaml"))]
            hint = did_you_mean(Path(name).stem, [*names, *recipe_names()])
            raise ConfigError([Problem(str(origin), "defaults", f"no file {name}{hint}")])
        if parent in (*below, path):
            raise ConfigError([Problem(str(origin), "defaults", f"{name} inherits from itself")])
        if len(below) >= _MOST_PARENTS:
            raise ConfigError([Problem(str(origin), "defaults", f"more than {_MOST_PARENTS} files, each of the next")])
        merged = merge(merged, _inherit(parent, (*below, path), known))
    known[path] = merge(merged, own)
    return known[path]


def _parents(node: ConfigNode | None) -> list[tuple[str, Origin]]:
    if node is None:
        return []
    entries = node.value if isinstance(node.value, list) else [node]
    if not all(isinstance(entry.value, str) for entry in entries):
        raise ConfigError([Problem(str(node.origin), "defaults", "must be a file name or a list of them")])
    if len(entries) > _MOST_PARENTS:
        raise ConfigError([Problem(str(node.origin), "defaults", f"must be at most {_MOST_PARENTS} files")])
    return [(str(entry.value), entry.origin) for entry in entries]


def _apply(root: ConfigNode, overrides: list[str]) -> ConfigNode:
    problems = []
    for number, text in enumerate(overrides, start=1):
        origin = Origin(override=number, text=text)
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(Problem(str(origin), "", "must be key=value, for example trainer.optimizer.lr=1e-6"))
        elif not key[0].isalnum():
            problems.append(Problem(str(origin), "", f"no prefix is needed: {key.lstrip('+~-')}={value}"))
        elif key.count(".") >= MOST_DEPTH:
            problems.append(Problem(str(origin), "", f"no key is nested deeper than {MOST_DEPTH} levels"))
        else:
            try:
                root = _complete(_put(root, key.split("."), read_value(value, origin), origin))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return root


def _put(node: ConfigNode, names: list[str], value: ConfigNode, origin: Origin) -> ConfigNode:
    """A copy of `node` with `value` at the path `names`; sections merge, so `section={a: 1}` keeps the rest."""
    if not names:
        return merge(node, value) if isinstance(node.value, dict) else value
    name, rest = names[0], names[1:]
    if isinstance(node.value, list):
        index = int(name) if name.isdecimal() and len(name) < 9 else -1
        if not 0 <= index < len(node.value):
            has = f"0 to {len(node.value) - 1}" if node.value else "none: the list is empty"
            raise ConfigError([Problem(str(origin), "", f"no list entry {name}; there are {has}")])
        # An entry given whole replaces the old one: a list has no defaults to merge with.
        entry = _put(node.value[index], rest, value, origin) if rest else value
        return ConfigNode([*node.value[:index], entry, *node.value[index + 1 :]], node.origin)
    children = node.value if isinstance(node.value, dict) else {}
    child = children.get(name, ConfigNode(None, origin))
    return ConfigNode({**children, name: _put(child, rest, value, origin)}, node.origin)


def _complete(root: ConfigNode) -> ConfigNode:
    """Return the tree with every entry of `rewards` and `telemetry.trackers` over what stands for it in configs/."""
    root = _complete_list(root, ("rewards",), lambda _: _entry_defaults("reward"))
    trackers = _entry_defaults("tracker").value
    assert isinstance(trackers, dict)
    return _complete_list(root, ("telemetry", "trackers"), lambda name: trackers.get(name, trackers["any"]))


def _complete_list(root: ConfigNode, path: tuple[str, ...], defaults: Callable[[str], ConfigNode]) -> ConfigNode:
    """Complete the list at `path`. An entry that is a bare name is `{name: ...}`. defaults: by the entry's name."""
    child = root.value.get(path[0]) if isinstance(root.value, dict) else None
    if child is None:
        return root
    if path[1:]:
        return merge(root, ConfigNode({path[0]: _complete_list(child, path[1:], defaults)}, root.origin))
    if not isinstance(child.value, list):
        return root
    entries = [
        ConfigNode({"name": entry}, entry.origin) if isinstance(entry.value, str) else entry for entry in child.value
    ]
    completed = []
    for entry in entries:
        name = entry.value.get("name") if isinstance(entry.value, dict) else None
        completed.append(merge(defaults(str(name.value) if name else ""), entry))
    return merge(root, ConfigNode({path[0]: ConfigNode(completed, child.origin)}, root.origin))


@cache
def _entry_defaults(kind: str) -> ConfigNode:
    return read_file(CONFIGS / f"{kind}.yaml")


def _interpolate(root: ConfigNode) -> ConfigNode:
    """`${a.b}` filled in, by OmegaConf. Raises ConfigError with every one that leads nowhere."""
    marked = [(key, node) for key, node in leaves(root) if isinstance(node.value, str) and "${" in node.value]
    if not marked:
        return root
    if problems := list(check_references(root, marked)):
        raise ConfigError(problems)
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    secrets = _secrets({key: str(node.value) for key, node in marked})
    try:
        tree = OmegaConf.create(plain(root))
    except (OmegaConfBaseException, RecursionError) as error:
        where, key = next(((str(node.origin), key) for key, node in marked), (show_path(Path()), ""))
        raise ConfigError([Problem(where, key, f"bad interpolation: {_first_line(error)}")]) from error
    for key, node in marked:
        try:
            value = OmegaConf.select(tree, key, throw_on_missing=True)
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            filled = replace(_wrap(value, node.origin), secret=str(node.value) if key in secrets else None)
            root = _put(root, key.split("."), filled, node.origin)
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(Problem(str(node.origin), key, f"{node.value}: {_first_line(error)}"))
    if problems:
        raise ConfigError(problems)
    return root


def _secrets(marked: dict[str, str]) -> set[str]:
    """Return the keys whose interpolation reads the environment, itself or through other keys."""
    found = {key for key, text in marked.items() if "oc.env" in text}
    while True:
        through = {key for key, text in marked.items() if key not in found and any(name in text for name in found)}
        if not through:
            return found
        found |= through


def _wrap(value: object, origin: Origin) -> ConfigNode:
    if isinstance(value, dict):
        return ConfigNode({str(key): _wrap(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, list):
        return ConfigNode([_wrap(child, origin) for child in value], origin)
    assert value is None or isinstance(value, str | int | float | bool)
    return ConfigNode(value, origin)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
