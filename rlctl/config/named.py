"""Sections and entries that take their defaults by their `name`: rewards, environments, trackers, loss, advantage.

Their defaults, and those of data sources, are in configs/reward.yaml, environment.yaml, source.yaml, tracker.yaml,
loss.yaml and advantage.yaml: `all` for every name, and a section for each name that has keys of its own.
"""

from dataclasses import replace
from functools import cache

from rlctl.config.builtin import CONFIGS
from rlctl.config.fields import RECIPE
from rlctl.config.provenance import ConfigNode, leaves, merge, node_at, put, read_file

# Paths in a config -> file of their defaults.
_LISTS = {("rewards",): "reward", ("telemetry", "trackers"): "tracker"}
_MAPPINGS = {("environment", "choices"): "environment", ("data", "train", "sources"): "source"}
_SECTIONS = {("grpo", "loss"): "loss", ("grpo", "advantage"): "advantage"}
NAMED_SECTIONS = [".".join(path) for path in _SECTIONS]
FILES_BY_PATH = {".".join(path): kind for path, kind in (*_LISTS.items(), *_SECTIONS.items())}


@cache
def defaults_of(kind: str, name: str) -> ConfigNode:
    """Return the defaults for this `name`. kind: "reward", "environment", "tracker", "loss" or "advantage"."""
    root = read_file(CONFIGS / f"{kind}.yaml")
    assert isinstance(root.value, dict)
    return merge(root.value["all"], root.value.get(name, ConfigNode({}, root.origin)))


def complete(root: ConfigNode) -> ConfigNode:
    """Return the tree with every named section and list entry over its defaults. A bare name is `{name: ...}`."""
    recipe = node_at(root, RECIPE.split("."))
    if recipe is not None and isinstance(recipe.value, dict):
        root = put(root, RECIPE.split("."), complete(recipe))
    for path, kind in _LISTS.items():
        found = node_at(root, list(path))
        if found is not None and isinstance(found.value, list):
            entries = [_over_defaults(kind, entry) for entry in found.value]
            root = put(root, list(path), ConfigNode(entries, found.origin))
    for path, kind in _MAPPINGS.items():
        found = node_at(root, list(path))
        if found is not None and isinstance(found.value, dict):
            named = {key: _over_defaults(kind, entry) for key, entry in found.value.items()}
            root = put(root, list(path), ConfigNode(named, found.origin))
    for path, kind in _SECTIONS.items():
        section = node_at(root, list(path))
        if section is not None:
            root = put(root, list(path), _over_defaults(kind, section))
    return root


def merge_named(base: ConfigNode, over: ConfigNode) -> ConfigNode:
    """Return `merge`, where a section that names another loss or advantage than before begins anew.

    A key of the one before may mean something else in the new one. Its `name` has a note of the left-out keys.
    """
    for path in map(list, _SECTIONS):
        before, after = node_at(base, path), node_at(over, path)
        if before is None or after is None:
            continue
        old, new = _with_name(before), _with_name(after)
        over = put(over, path, new)
        names = [node_at(each, ["name"]) for each in (old, new)]
        if names[0] and names[1] and names[0].value != names[1].value:
            base = put(base, path, ConfigNode({}, before.origin))
            over = put(over, [*path, "name"], replace(names[1], note=_left_out(old, ".".join(path))))
    return merge(base, over)


def _left_out(section: ConfigNode, path: str) -> str | None:
    """Return a note of the keys of a section that were not its defaults; None without any."""
    written = {key: node.origin for key, node in leaves(section) if key != "name"}
    files = [CONFIGS / f"{kind}.yaml" for kind in _SECTIONS.values()]
    lost = [f"{path}.{key} ({origin})" for key, origin in written.items() if origin.file not in files]
    name = node_at(section, ["name"])
    return f"left out, since they were for {name.value if name else path}: {', '.join(lost)}" if lost else None


def _over_defaults(kind: str, entry: ConfigNode) -> ConfigNode:
    named = _with_name(entry)
    name = node_at(named, ["name"])
    return merge(defaults_of(kind, str(name.value) if name else ""), named)


def _with_name(entry: ConfigNode) -> ConfigNode:
    return ConfigNode({"name": entry}, entry.origin) if isinstance(entry.value, str) else entry
