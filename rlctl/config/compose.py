"""From a recipe and `key=value` overrides to one tree of values, each with its origin.

Order, the later winning: the files of `defaults:` from left to right (each after its own `defaults:`), the file itself,
the overrides. Mappings merge, everything else is replaced. `section: null` brings back the defaults of a section. Then
`${other.key}` is filled in.

A section or an entry with a `name` takes its defaults by this name, see `NAMED`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import NoneType

from rlctl.config.builtin import CONFIGS, find, recipe_names
from rlctl.config.errors import ConfigError, Problem, did_you_mean, shortened
from rlctl.config.fields import RECIPE, alternatives, is_section, schema_keys
from rlctl.config.interpolation import interpolate
from rlctl.config.provenance import (
    ConfigNode,
    Origin,
    leaves,
    merge,
    node_at,
    put,
    read_file,
    read_value,
)
from rlctl.config.schema import KINDS

_RECIPE = RECIPE.split(".")
# Key -> file of defaults in configs/: `all` for every name, and a section for each name with further keys.
NAMED_SECTIONS = {"grpo.loss": "loss", "grpo.advantage": "advantage", "generation.engine": "engine"}
# The same of lists, and of sections whose keys are any.
_NAMED_ENTRIES = {
    "rewards": "reward",
    "telemetry.trackers": "tracker",
    "environment.choices": "environment",
    "data.train.sources": "source",
}
NAMED = {**NAMED_SECTIONS, **_NAMED_ENTRIES}
# Sections that a run may lack -> the file of their defaults.
OPTIONAL_SECTIONS = {"lora": "lora"}
# Sections without further defaults for which a bare name stands too.
_SHORT = ("agent",)


def compose(recipe: Path, overrides: list[str], within: str = "", own: Sequence[str] = ()) -> ConfigNode:
    """Return the merged tree of the file `recipe`, its references filled in.

    within: dotted key of a whole config inside the file: return that one. own: a command's own overrides, which
    come before the typed ones. Raises ConfigError: a parent not found, unreadable YAML, a malformed override or
    reference.
    """
    given = [Origin(text=text) for text in own]
    given += [Origin(override=number, text=text) for number, text in enumerate(overrides, start=1)]
    root = _with_recipe(_complete(_inherit(recipe, (), {})))
    if within:
        found = node_at(root, within.split("."))
        assert found is not None, f"{recipe} has no {within}"
        root = found
    root = _apply(root, given)
    inner = node_at(root, _RECIPE)
    if inner is None or not isinstance(inner.value, dict):
        return interpolate(root)
    # A reference names a key of the config that it was written in.
    root = interpolate(put(root, _RECIPE, ConfigNode(None, inner.origin)))
    return put(root, _RECIPE, interpolate(inner))


@cache
def defaults_of(kind: str, name: str) -> ConfigNode:
    """Return the defaults for this `name` in the file of a `kind`, such as "loss"."""
    root = read_file(CONFIGS / f"{kind}.yaml")
    assert isinstance(root.value, dict)
    return merge(root.value["all"], root.value.get(name, ConfigNode({}, root.origin)))


def _complete(root: ConfigNode) -> ConfigNode:
    """Return the tree with every named section and entry over its defaults. A bare name is `{name: ...}`."""
    recipe = node_at(root, _RECIPE)
    if recipe is not None and isinstance(recipe.value, dict):
        root = put(root, _RECIPE, _complete(recipe))
    for key, kind in OPTIONAL_SECTIONS.items():
        found = node_at(root, [key])
        if found is not None and isinstance(found.value, dict):
            root = put(root, [key], merge(defaults_of(kind, ""), found))
    for key, kind in NAMED.items():
        found = node_at(root, key.split("."))
        if found is None:
            continue
        if key in NAMED_SECTIONS:
            root = put(root, key.split("."), _over_defaults(kind, found))
        elif isinstance(found.value, list):
            entries = [_over_defaults(kind, entry) for entry in found.value]
            root = put(root, key.split("."), ConfigNode(entries, found.origin))
        elif isinstance(found.value, dict):
            named = {name: _over_defaults(kind, entry) for name, entry in found.value.items()}
            root = put(root, key.split("."), ConfigNode(named, found.origin))
    return root


def _over_defaults(kind: str, entry: ConfigNode) -> ConfigNode:
    named = _with_name(entry)
    name = node_at(named, ["name"])
    return merge(defaults_of(kind, str(name.value) if name else ""), named)


def _with_name(entry: ConfigNode) -> ConfigNode:
    return ConfigNode({"name": entry}, entry.origin) if isinstance(entry.value, str) else entry


def _merge_named(base: ConfigNode, over: ConfigNode) -> ConfigNode:
    """Return `merge`, where a section that names another loss, advantage or engine than before loses its earlier keys.

    A key of the one before may mean something else in the new one. Its `name` has a note of the left-out keys.
    """
    for key in _SHORT:
        if (short := node_at(over, [key])) is not None:
            over = put(over, [key], _with_name(short))
    for key in NAMED_SECTIONS:
        path = key.split(".")
        before, after = node_at(base, path), node_at(over, path)
        if before is None or after is None:
            continue
        old, new = _with_name(before), _with_name(after)
        over = put(over, path, new)
        names = [node_at(each, ["name"]) for each in (old, new)]
        if names[0] and names[1] and names[0].value != names[1].value:
            base = put(base, path, ConfigNode({}, before.origin))
            over = put(over, [*path, "name"], replace(names[1], note=_left_out_note(old, key)))
    return merge(base, over)


def _left_out_note(section: ConfigNode, path: str) -> str | None:
    """Return a note of the keys of a section that were not its defaults; None without any."""
    written = {key: node.origin for key, node in leaves(section) if key != "name"}
    files = [CONFIGS / f"{kind}.yaml" for kind in NAMED_SECTIONS.values()]
    lost = [f"{path}.{key} ({origin})" for key, origin in written.items() if origin.file not in files]
    name = node_at(section, ["name"])
    return f"left out, since they were for {name.value if name else path}: {', '.join(lost)}" if lost else None


def _with_recipe(root: ConfigNode) -> ConfigNode:
    """Return the tree with the recipe that an SFT run is validated by, in place of its name. Raises ConfigError."""
    node, kind = node_at(root, _RECIPE), node_at(root, ["kind"])
    if node is None or node.value is None or kind is None or kind.value != "sft":
        return root
    if isinstance(node.value, str):
        name = os.path.expanduser(node.value)
        folders = [*([node.origin.file.parent] if node.origin.file else []), Path.cwd()]
        file = next((found for folder in folders if (found := find(name, folder))), None)
        if file is None:
            hint = did_you_mean(Path(name).stem, recipe_names()) or "; see `rlctl recipes list`"
            raise ConfigError([Problem(str(node.origin), RECIPE, f"no such recipe or file: {node.value}{hint}")])
        root = put(root, _RECIPE, _complete(_inherit(file, (), {})))
    stated = node_at(root, [*_RECIPE, "kind"])
    if stated is None or stated.value != "grpo":
        given = f"{node.text or 'it'} is {f'one for {stated.value}' if stated else 'none'}"
        what = f"must be the name or file of a GRPO recipe, whose prompts and rewards measure; {given}"
        raise ConfigError([Problem(str(node.origin), RECIPE, what)])
    return root


def _inherit(path: Path, below: tuple[Path, ...], known: dict[Path, ConfigNode]) -> ConfigNode:
    """Read a file over its parents. known: files that were read already."""
    if path in known:
        return known[path]
    root = read_file(path)
    assert isinstance(root.value, dict)
    own = ConfigNode({key: node for key, node in root.value.items() if key != "defaults"}, root.origin)
    merged = ConfigNode({}, root.origin)
    for entry in _parents(root.value.get("defaults")):
        name, where = str(entry.value), str(entry.origin)
        # A user's recipe may be named sft.yaml and inherit the shipped one of that name.
        parent = find(name, path.parent, other_than=path) or find(name, path.parent)
        if parent is None:
            names = [file.stem for file in (*path.parent.glob("*.yaml"), *CONFIGS.glob("*.yaml"))]
            hint = did_you_mean(Path(name).stem, [*names, *recipe_names()])
            raise ConfigError([Problem(where, "defaults", f"no file {name}{hint}")])
        if parent in (*below, path):
            raise ConfigError([Problem(where, "defaults", f"{name} inherits from itself")])
        merged = _undone(_merge_named(merged, _inherit(parent, (*below, path), known)))
    known[path] = _undone(_merge_named(merged, own))
    return known[path]


def _undone(root: ConfigNode) -> ConfigNode:
    """Return the tree with its defaults in each section that is null. Nothing inherited is left of the section."""
    kind = node_at(root, ["kind"])
    if kind is None or not isinstance(kind.value, str) or kind.value not in KINDS:
        return root
    for path in _section_paths(kind.value):
        found = node_at(root, path)
        if found is not None and found.value is None:
            default = node_at(_inherit(CONFIGS / f"{kind.value}.yaml", (), {}), path)
            root = put(root, path, default) if default is not None else root
    recipe = node_at(root, _RECIPE)
    return root if recipe is None or not isinstance(recipe.value, dict) else put(root, _RECIPE, _undone(recipe))


@cache
def _section_paths(kind: str) -> list[list[str]]:
    """Return the paths of the sections that every config of this kind has."""
    keys = schema_keys(KINDS[kind])
    return [key.split(".") for key, each in keys if is_section(each) and NoneType not in alternatives(each.type)]


def _parents(node: ConfigNode | None) -> list[ConfigNode]:
    if node is None:
        return []
    entries = node.value if isinstance(node.value, list) else [node]
    if not all(isinstance(entry.value, str) for entry in entries):
        raise ConfigError([Problem(str(node.origin), "defaults", "must be a file name or a list of them")])
    return entries


def _apply(root: ConfigNode, overrides: list[Origin]) -> ConfigNode:
    problems = []
    overrides = list(_without_earlier_names(overrides))
    root = _named_anew(root, overrides)
    # A recipe comes before its keys, in any order of overrides.
    for origin in sorted(overrides, key=lambda each: not each.text.startswith(f"{RECIPE}=")):
        key, equals, value = origin.text.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(Problem(str(origin), "", "must be key=value, for example trainer.optimizer.lr=1e-6"))
        elif not key[0].isalnum():
            problems.append(Problem(str(origin), "", f"no prefix is needed: {key.lstrip('+~-')}={value}"))
        elif key.startswith(f"{RECIPE}.") and (recipe := node_at(root, _RECIPE)) and recipe.value is None:
            problems.append(Problem(str(origin), "", f"there is no recipe that it is a key of: add {RECIPE}=NAME"))
        else:
            try:
                node = read_value(value, origin)
                names = _override_path(key, node)
                root = _complete(_with_recipe(_undone(_put(root, names, node, origin))))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return root


def repeated(overrides: Sequence[str]) -> list[str]:
    """Return a line for each override that takes the place of an earlier one, or of a part of it."""
    said, earlier = [], list[tuple[str, dict[str, bool]]]()
    for number, text in enumerate(overrides, start=1):
        origin = Origin(override=number, text=text)
        keys = _keys_set(origin)
        if lost := [each for each, theirs in earlier if _take_place(keys, theirs)]:
            said.append(f"{origin}: takes the place of {shortened(lost[-1], 240)}")
        earlier.append((text, keys))
    return said


def _keys_set(origin: Origin) -> dict[str, bool]:
    """Return each key that an override sets -> True if it is null. A list, which replaces another one, is a key too."""
    key, equals, value = origin.text.partition("=")
    try:
        node = read_value(value, origin)
    except ConfigError:  # Reported when it is put.
        return {}
    if not equals or node.value == {}:
        return {}
    key = ".".join(_override_path(key, node))
    lists = {key: False} if isinstance(node.value, list) else {}
    return lists | {name: leaf.value is None for name, leaf in leaves(node, key)}


def _take_place(keys: Iterable[str], earlier: Mapping[str, bool]) -> bool:
    """Return True if one of `keys` sets an earlier key, its section, or a key inside a section that was null."""
    for key in keys:
        above = key.split(".")
        if key in earlier or any(earlier.get(".".join(above[:end])) for end in range(1, len(above))):
            return True
        # A recipe comes before its keys, in any order.
        if key != RECIPE and any(each.startswith(f"{key}.") for each in earlier):
            return True
    return False


def _override_path(key: str, node: ConfigNode) -> list[str]:
    """Return the path that an override sets: a bare name is the `name` of a section that has one."""
    return [*key.split("."), *["name"] * (key in (*NAMED_SECTIONS, *_SHORT) and isinstance(node.value, str))]


def _without_earlier_names(overrides: Sequence[Origin]) -> Iterator[Origin]:
    """Yield the overrides but those that name a loss, advantage or engine where a later one names another.

    Keys of the earlier one may mean nothing in the later one.
    """
    last = dict[str, object]()
    kept = list[Origin]()
    for origin in reversed(overrides):
        key, _, value = origin.text.partition("=")
        section, name = key.removesuffix(".name"), None
        if section in NAMED_SECTIONS:
            with suppress(ConfigError):  # Reported when it is put.
                named = node_at(_with_name(read_value(value, origin)), ["name"])
                name = named.value if named else None
        if name is None or last.setdefault(section, name) == name:
            kept.append(origin)
    yield from reversed(kept)


def _named_anew(root: ConfigNode, overrides: list[Origin]) -> ConfigNode:
    """Return the tree with the losses, advantages and engines that the overrides name.

    Their other keys come later, so that the order of overrides does not matter.
    """
    for origin in overrides:
        key, _, value = origin.text.partition("=")
        if key.removesuffix(".name") in NAMED_SECTIONS:
            with suppress(ConfigError):  # Reported when it is put.
                root = _merge_named(root, put(ConfigNode({}, origin), key.split("."), read_value(value, origin)))
    return root


def _put(node: ConfigNode, names: list[str], value: ConfigNode, origin: Origin) -> ConfigNode:
    """Return a copy of `node` with `value` at the path `names`; sections merge: `section={a: 1}` keeps the rest."""
    if not names:
        return merge(node, value)
    name, rest = names[0], names[1:]
    if isinstance(node.value, list):
        index = int(name) if name.isdecimal() else -1
        if not 0 <= index < len(node.value):
            has = f"0 to {len(node.value) - 1}" if node.value else "none: the list is empty"
            raise ConfigError([Problem(str(origin), "", f"no list entry {name}; there are {has}")])
        # An entry given whole replaces the old one: a list has no defaults to merge with.
        entry = _put(node.value[index], rest, value, origin) if rest else value
        return ConfigNode([*node.value[:index], entry, *node.value[index + 1 :]], node.origin)
    children = node.value if isinstance(node.value, dict) else {}
    child = children.get(name, ConfigNode(None, origin))
    return ConfigNode({**children, name: _put(child, rest, value, origin)}, node.origin)
