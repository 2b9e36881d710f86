"""Composition of a recipe and `key=value` overrides into one tree of values, each with its origin.

The order is: the files of `defaults:` from left to right (each after its own `defaults:`), the file itself, then the
overrides. A later value replaces an earlier one; mappings merge. `section: null` restores the defaults of a section. At
the end each `${other.key}` is replaced by its value.

A section or list entry with a `name` has defaults that depend on the name, see `NAMED`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import NoneType

from rlctl.config.builtin import CONFIGS, find, recipe_names
from rlctl.config.errors import ConfigError, Problem, did_you_mean, shorten
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

_RECIPE_PATH = RECIPE.split(".")
# Key of a section with a `name` -> its file of defaults in configs/. The file has a section `all`, and a section for
# each name that has more keys.
NAMED_SECTIONS = {"grpo.loss": "loss", "grpo.advantage": "advantage", "generation.engine": "engine"}
# The same for lists of such sections, and for mappings with any keys.
_NAMED_ENTRIES = {
    "rewards": "reward",
    "telemetry.trackers": "tracker",
    "environment.choices": "environment",
    "data.train.sources": "source",
}
NAMED = {**NAMED_SECTIONS, **_NAMED_ENTRIES}
# Key of a section that may be null -> its file of defaults. The file may have further defaults for the first key.
OPTIONAL_SECTIONS = {
    "lora": "lora",
    "teacher": "teacher",
    "critic": "critic",
    "grpo.loss.distillation": "distillation",
    "sft.loss.distillation": "distillation",
}
# Key of a mapping with any keys -> file of defaults of each value.
_ENTRIES = {"teachers": "teacher", "roles": "role"}
# Section of a file of defaults for names that have no section there.
_OTHER_NAMES = "other"
# Sections without a file of defaults that may also be written as a bare name.
_NAME_SECTIONS = ("agent", "sandbox")


def compose(recipe: Path, overrides: list[str], within: str = "", command_overrides: Sequence[str] = ()) -> ConfigNode:
    """Return the merged tree of the file `recipe` and the overrides, with references filled in.

    within: dotted key of a whole config inside the file; that config is returned. command_overrides: overrides
    that the command itself adds, applied before the user's. Raises ConfigError for a missing parent, unreadable YAML,
    or a malformed override or reference.
    """
    override_origins = [Origin(text=text) for text in command_overrides]
    override_origins += [Origin(override=number, text=text) for number, text in enumerate(overrides, start=1)]
    root = _load_validation_recipe(_add_defaults(_inherit(recipe, heirs=(), roots={})))
    if within:
        inner_config = node_at(root, within.split("."))
        assert inner_config is not None, f"{recipe} has no {within}"
        root = inner_config
    root = _apply_overrides(root, override_origins)
    recipe_node = node_at(root, _RECIPE_PATH)
    if recipe_node is None or not isinstance(recipe_node.value, dict):
        return interpolate(root)
    # A reference in the recipe names a key of the recipe, not of the outer config.
    root = interpolate(put(root, _RECIPE_PATH, ConfigNode(None, recipe_node.origin)))
    return put(root, _RECIPE_PATH, interpolate(recipe_node))


@cache
def defaults_of(kind: str, name: str) -> ConfigNode:
    """Return the defaults for `name` from configs/KIND.yaml, for example kind "loss" and name "gspo"."""
    root = read_file(CONFIGS / f"{kind}.yaml")
    assert isinstance(root.value, dict)
    own_defaults = root.value.get(name, root.value.get(_OTHER_NAMES, ConfigNode({}, root.origin)))
    return merge(root.value["all"], own_defaults)


def _add_defaults(root: ConfigNode) -> ConfigNode:
    """Return the tree with every named section or entry merged over its defaults. A bare name becomes `{name: ...}`."""
    recipe = node_at(root, _RECIPE_PATH)
    if recipe is not None and isinstance(recipe.value, dict):
        root = put(root, _RECIPE_PATH, _add_defaults(recipe))
    root = _add_named_defaults(root)
    for key, kind in OPTIONAL_SECTIONS.items():
        path = key.split(".")
        section = node_at(root, path)
        if section is not None and isinstance(section.value, dict):
            root = put(root, path, merge(defaults_of(kind, path[0]), section))
    for key, kind in _ENTRIES.items():
        section = node_at(root, [key])
        if section is not None and isinstance(section.value, dict):
            entries = {name: merge(defaults_of(kind, ""), child) for name, child in section.value.items()}
            root = put(root, [key], ConfigNode(entries, section.origin))
    return root


def _add_named_defaults(root: ConfigNode) -> ConfigNode:
    """Return the tree with the defaults by name of every section and entry of `NAMED`."""
    for key, kind in NAMED.items():
        path = key.split(".")
        section = node_at(root, path)
        if section is None:
            continue
        if key in NAMED_SECTIONS:
            root = put(root, path, _merge_over_defaults(kind, section))
        elif isinstance(section.value, list):
            listed = [_merge_over_defaults(kind, child) for child in section.value]
            root = put(root, path, ConfigNode(listed, section.origin))
        elif isinstance(section.value, dict):
            by_name = {name: _merge_over_defaults(kind, child) for name, child in section.value.items()}
            root = put(root, path, ConfigNode(by_name, section.origin))
    return root


def _merge_over_defaults(kind: str, section: ConfigNode) -> ConfigNode:
    section = _expand_bare_name(section)
    name = node_at(section, ["name"])
    return merge(defaults_of(kind, str(name.value) if name else ""), section)


def _expand_bare_name(section: ConfigNode) -> ConfigNode:
    return ConfigNode({"name": section}, section.origin) if isinstance(section.value, str) else section


def _merge_named(base: ConfigNode, over: ConfigNode) -> ConfigNode:
    """Return `base` merged with `over`. A section of `over` with another loss, advantage or engine replaces that of
    `base`.

    The earlier keys are dropped, because they may mean something else in the new loss. A note at the new `name` lists
    them.
    """
    for key in _NAME_SECTIONS:
        if (section := node_at(over, [key])) is not None:
            over = put(over, [key], _expand_bare_name(section))
    for key in NAMED_SECTIONS:
        path = key.split(".")
        base_section = node_at(base, path)
        over_section = node_at(over, path)
        if base_section is None or over_section is None:
            continue
        base_section = _expand_bare_name(base_section)
        over_section = _expand_bare_name(over_section)
        over = put(over, path, over_section)
        base_name = node_at(base_section, ["name"])
        over_name = node_at(over_section, ["name"])
        if base_name and over_name and base_name.value != over_name.value:
            base = put(base, path, ConfigNode({}, base_section.origin))
            over = put(over, [*path, "name"], replace(over_name, note=_left_out_note(base_section, key)))
    return merge(base, over)


def _left_out_note(section: ConfigNode, path: str) -> str | None:
    """Return a note with the keys of a dropped section that were no defaults; None if all were."""
    origins = {key: node.origin for key, node in leaves(section) if key != "name"}
    default_files = [CONFIGS / f"{kind}.yaml" for kind in NAMED_SECTIONS.values()]
    left_out = [f"{path}.{key} ({origin})" for key, origin in origins.items() if origin.file not in default_files]
    if not left_out:
        return None
    name = node_at(section, ["name"])
    return f"left out, since they were for {name.value if name else path}: {', '.join(left_out)}"


def _load_validation_recipe(root: ConfigNode) -> ConfigNode:
    """Return the tree with `validation.recipe`, a name or file, replaced by the contents of that recipe. Raises
    ConfigError.
    """
    node = node_at(root, _RECIPE_PATH)
    kind = node_at(root, ["kind"])
    if node is None or node.value is None or kind is None or kind.value != "sft":
        return root
    if isinstance(node.value, str):
        name = os.path.expanduser(node.value)
        file = find(name, node.origin.file.parent) if node.origin.file else None
        file = file or find(name, Path.cwd())
        if file is None:
            hint = did_you_mean(Path(name).stem, recipe_names()) or "; see `rlctl recipes list`"
            raise ConfigError([Problem(str(node.origin), RECIPE, f"no such recipe or file: {node.value}{hint}")])
        root = put(root, _RECIPE_PATH, _add_defaults(_inherit(file, heirs=(), roots={})))
    recipe_kind = node_at(root, [*_RECIPE_PATH, "kind"])
    if recipe_kind is None or recipe_kind.value != "grpo":
        actual_kind = f"one for {recipe_kind.value}" if recipe_kind else "none"
        rule = "must be the name or file of a GRPO recipe, whose prompts and rewards measure"
        mistake = f"{rule}; {node.text or 'it'} is {actual_kind}"
        raise ConfigError([Problem(str(node.origin), RECIPE, mistake)])
    return root


def _inherit(path: Path, heirs: tuple[Path, ...], roots: dict[Path, ConfigNode]) -> ConfigNode:
    """Return the tree of a file merged over its parents. heirs: files that inherit from it. roots: cache of trees by
    file.
    """
    if path in roots:
        return roots[path]
    root = read_file(path)
    assert isinstance(root.value, dict)
    written = ConfigNode({key: node for key, node in root.value.items() if key != "defaults"}, root.origin)
    merged = ConfigNode({}, root.origin)
    for name_node in _parent_names(root.value.get("defaults")):
        name = str(name_node.value)
        where = str(name_node.origin)
        # A user's recipe may be named sft.yaml and inherit the shipped sft.yaml.
        parent = find(name, path.parent, other_than=path) or find(name, path.parent)
        if parent is None:
            files = [*path.parent.glob("*.yaml"), *CONFIGS.glob("*.yaml")]
            names = [file.stem for file in files] + recipe_names()
            hint = did_you_mean(Path(name).stem, names)
            raise ConfigError([Problem(where, "defaults", f"no file {name}{hint}")])
        if parent in (*heirs, path):
            raise ConfigError([Problem(where, "defaults", f"{name} inherits from itself")])
        merged = _restore_null_sections(_merge_named(merged, _inherit(parent, (*heirs, path), roots)))
    roots[path] = _restore_null_sections(_merge_named(merged, written))
    return roots[path]


def _restore_null_sections(root: ConfigNode) -> ConfigNode:
    """Return the tree with each section that is null replaced by its defaults. Inherited values of the section are
    dropped.
    """
    kind = node_at(root, ["kind"])
    if kind is None or not isinstance(kind.value, str) or kind.value not in KINDS:
        return root
    for path in _section_paths(kind.value):
        section = node_at(root, path)
        if section is not None and section.value is None:
            default = node_at(_inherit(CONFIGS / f"{kind.value}.yaml", heirs=(), roots={}), path)
            if default is not None:
                root = put(root, path, default)
    recipe = node_at(root, _RECIPE_PATH)
    if recipe is None or not isinstance(recipe.value, dict):
        return root
    return put(root, _RECIPE_PATH, _restore_null_sections(recipe))


@cache
def _section_paths(kind: str) -> list[list[str]]:
    """Return the paths of the sections that every config of this kind must have."""
    sections = {key: field.type for key, field in schema_keys(KINDS[kind]) if is_section(field)}
    return [key.split(".") for key, hint in sections.items() if NoneType not in alternatives(hint)]


def _parent_names(node: ConfigNode | None) -> list[ConfigNode]:
    if node is None:
        return []
    names = node.value if isinstance(node.value, list) else [node]
    if not all(isinstance(name.value, str) for name in names):
        raise ConfigError([Problem(str(node.origin), "defaults", "must be a file name or a list of them")])
    return names


def _apply_overrides(root: ConfigNode, overrides: list[Origin]) -> ConfigNode:
    problems = []
    overrides = list(_drop_earlier_names(overrides))
    root = _apply_name_overrides(root, overrides)
    # The override of `validation.recipe` is applied before those of the recipe's keys, whatever their order.
    for origin in sorted(overrides, key=lambda override: not override.text.startswith(f"{RECIPE}=")):
        key, equals, value = origin.text.partition("=")
        recipe = node_at(root, _RECIPE_PATH)
        if not equals or not all(key.split(".")):
            problems.append(Problem(str(origin), "", "must be key=value, for example trainer.optimizer.lr=1e-6"))
        elif not key[0].isalnum():
            problems.append(Problem(str(origin), "", f"no prefix is needed: {key.lstrip('+~-')}={value}"))
        elif key.startswith(f"{RECIPE}.") and recipe is not None and recipe.value is None:
            problems.append(Problem(str(origin), "", f"there is no recipe that it is a key of: add {RECIPE}=NAME"))
        else:
            try:
                node = read_value(value, origin)
                names = _override_path(key, node)
                root = _restore_null_sections(_put_override(root, names, node, origin))
                root = _add_defaults(_load_validation_recipe(root))
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(problems)
    return root


def describe_repeats(overrides: Sequence[str]) -> list[str]:
    """Return a line for each override that replaces an earlier override or a part of one."""
    lines = []
    earlier = list[tuple[str, dict[str, bool]]]()
    for number, text in enumerate(overrides, start=1):
        origin = Origin(override=number, text=text)
        keys = _keys_of_override(origin)
        replaced = [earlier_text for earlier_text, earlier_keys in earlier if _replaces(keys, earlier_keys)]
        if replaced:
            lines.append(f"{origin}: takes the place of {shorten(replaced[-1], 240)}")
        earlier.append((text, keys))
    return lines


def _keys_of_override(origin: Origin) -> dict[str, bool]:
    """Return dotted key -> True if the value is null, for each key that an override sets. A list counts as one key."""
    key, equals, value = origin.text.partition("=")
    try:
        node = read_value(value, origin)
    except ConfigError:  # `_apply_overrides` reports the error.
        return {}
    if not equals or node.value == {}:
        return {}
    key = ".".join(_override_path(key, node))
    lists = {key: False} if isinstance(node.value, list) else {}
    return lists | {name: leaf.value is None for name, leaf in leaves(node, key)}


def _replaces(keys: Iterable[str], earlier: Mapping[str, bool]) -> bool:
    """Return True if one of `keys` sets an earlier key, its section, or a key inside a section that was set to null."""
    for key in keys:
        names = key.split(".")
        sections = [".".join(names[:end]) for end in range(1, len(names))]
        if key in earlier or any(earlier.get(section) for section in sections):
            return True
        # The override of `validation.recipe` is always applied first, so it replaces no override of the recipe's keys.
        if key != RECIPE and any(earlier_key.startswith(f"{key}.") for earlier_key in earlier):
            return True
    return False


def _override_path(key: str, node: ConfigNode) -> list[str]:
    """Return the path of keys that an override sets. `grpo.loss=gspo` sets the `name` of that section."""
    path = key.split(".")
    is_named_section = key in NAMED_SECTIONS or key in _NAME_SECTIONS
    return [*path, "name"] if is_named_section and isinstance(node.value, str) else path


def _drop_earlier_names(overrides: Sequence[Origin]) -> Iterator[Origin]:
    """Yield the overrides without those of a loss, advantage or engine whose `name` a later override changes.

    Such an override may also set keys of the earlier loss, as in `grpo.loss={name: gspo, ...}`, and the later loss may
    not have these keys.
    """
    last_names = dict[str, object]()
    remaining = list[Origin]()
    for origin in reversed(overrides):
        key, _, value = origin.text.partition("=")
        section = key.removesuffix(".name")
        name = None
        if section in NAMED_SECTIONS:
            with suppress(ConfigError):  # `_apply_overrides` reports the error.
                name_node = node_at(_expand_bare_name(read_value(value, origin)), ["name"])
                name = name_node.value if name_node else None
        # In reverse order the first name of a section is the one that the user typed last.
        if name is None or last_names.setdefault(section, name) == name:
            remaining.append(origin)
    yield from reversed(remaining)


def _apply_name_overrides(root: ConfigNode, overrides: list[Origin]) -> ConfigNode:
    """Return the tree with the `name` overrides of losses, advantages and engines applied.

    The other overrides of these sections are applied later, so that the order of overrides does not matter.
    """
    for origin in overrides:
        key, _, value = origin.text.partition("=")
        if key.removesuffix(".name") in NAMED_SECTIONS:
            with suppress(ConfigError):  # `_apply_overrides` reports the error.
                root = _merge_named(root, put(ConfigNode({}, origin), key.split("."), read_value(value, origin)))
    return root


def _put_override(node: ConfigNode, names: list[str], value: ConfigNode, origin: Origin) -> ConfigNode:
    """Return a copy of `node` with `value` at the path `names`. Sections merge: `section={a: 1}` keeps other keys."""
    if not names:
        return merge(node, value)
    name = names[0]
    inner_names = names[1:]
    if isinstance(node.value, list):
        index = int(name) if name.isdecimal() else -1
        if not 0 <= index < len(node.value):
            indices = f"0 to {len(node.value) - 1}" if node.value else "none: the list is empty"
            raise ConfigError([Problem(str(origin), "", f"no list entry {name}; there are {indices}")])
        nodes = list(node.value)
        # A whole list entry replaces the old entry: entries have no inherited values to merge with.
        nodes[index] = _put_override(nodes[index], inner_names, value, origin) if inner_names else value
        return ConfigNode(nodes, node.origin)
    children = node.value if isinstance(node.value, dict) else {}
    child = children.get(name, ConfigNode(None, origin))
    return ConfigNode({**children, name: _put_override(child, inner_names, value, origin)}, node.origin)
