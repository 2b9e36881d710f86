"""Completion of recipes, config keys, their values and run names, in bash, zsh and fish (`rlctl --install-completion`).

If there is one offer alone, a shell completes it and adds a space. A space after `key=` would be wrong, so `key=` is
never the only offer: each `key=value` is offered too.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from dataclasses import Field

# Pairs of a completed word and its description.
Offers = list[tuple[str, str]]
_ENDS = (".yaml", ".yml")


def complete_recipe(incomplete: str) -> Offers:
    """Offer the shipped recipes."""
    from rlctl.config.builtin import recipe_names

    return [(name, "recipe") for name in recipe_names() if name.startswith(incomplete)]


def complete_example(incomplete: str) -> Offers:
    """Offer the shipped examples."""
    from rlctl.config.builtin import example_names

    return [(name, "example") for name in example_names() if name.startswith(incomplete)]


def complete_config(incomplete: str) -> Offers:
    """Offer names of configs: shipped recipes, YAML files and run directories."""
    return [*complete_recipe(incomplete), *_paths(incomplete)]


def complete_arguments(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer recipes, and keys with their values. bash passes `key=value` as three words, zsh and fish as one."""
    kind = {"grpo": "grpo", "sft": "sft", "eval": "grpo"}.get(str(ctx.info_name))
    arguments = [str(argument) for argument in ctx.params.get("arguments") or []]
    # While VAL of `key=VAL` is completed, bash passes `key` and `=` as two finished words before it.
    if arguments[-1:] == ["="]:
        arguments.pop()
        key = arguments[-1] if arguments else ""
        return [(value, doc) for value, doc in _offer_values(key, kind) if value.startswith(incomplete)]
    # At the end of `key=`, bash passes `key`, and click has replaced the unfinished word `=` by an empty one.
    if arguments and arguments[-1] in _fields_by_key(kind) and not incomplete:
        return _offer_values(arguments[-1], kind)
    key, equals, _ = incomplete.partition("=")
    # zsh and fish at `key=VAL`.
    if equals:
        return [(f"{key}={value}", doc) for value, doc in _offer_values(key, kind)]
    offers: Offers = []
    # A command takes one recipe: none is offered after another.
    if all("=" in argument for argument in arguments):
        offers += [(name, doc) for name, doc in complete_config(incomplete) if _may_be_of_kind(name, kind)]
    keys = [key for key in _fields_by_key(kind) if incomplete and key.startswith(incomplete)]
    offers += [(f"{key}=", _first_sentence(_fields_by_key(kind)[key])) for key in keys]
    if len(keys) == 1:
        offers += [(f"{keys[0]}={value}", doc) for value, doc in _offer_values(keys[0], kind)]
    return offers


def complete_run(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer the runs of the command's folder, the newest first."""
    from rlctl.config.builtin import runs_folder

    root = Path(str(ctx.params.get("root") or runs_folder()))
    events = sorted(root.glob("*/events.jsonl"), key=lambda path: -path.stat().st_mtime)
    return [(path.parent.name, "run") for path in events if path.parent.name.startswith(incomplete)]


@cache
def _fields_by_key(kind: str | None) -> "dict[str, list[Field[Any]]]":
    """Return each key of the config with its fields in the schema. kind: grpo, sft, or None for both.

    A key may have several fields: a list's entries and both kinds of runs may have sections of different classes.
    """
    from rlctl.config.fields import is_section, schema_keys
    from rlctl.config.schema import KINDS

    fields: dict[str, list[Field[Any]]] = {}
    for schema in [KINDS[kind]] if kind else KINDS.values():
        for key, field in schema_keys(schema):
            if not is_section(field):
                fields.setdefault(key.replace(".N", ".0"), []).append(field)
    return fields


def _offer_values(key: str, kind: str | None) -> Offers:
    """Return the values that a key may have, and its default. A key of free text without default offers "" alone."""
    from itertools import chain
    from types import NoneType

    from rlctl.config.builtin import recipe_names
    from rlctl.config.fields import RECIPE, alternatives, literals

    fields = _fields_by_key(kind).get(key, [])
    types = set(chain.from_iterable(alternatives(field.type) for field in fields))
    words = [str(word) for word in chain.from_iterable(literals(field.type) for field in fields)]
    if bool in types:
        words += ["true", "false"]
    if NoneType in types:
        words.append("null")
    if key == RECIPE:
        words += [name for name in recipe_names() if _may_be_of_kind(name, "grpo")]
    default = _read_defaults(kind or "grpo").get(key)
    if default is not None:
        words.append(default)
    if fields and not words:
        words.append("")
    meaning = _first_sentence(fields)
    return [(word, "default" if word == default else meaning) for word in dict.fromkeys(words)]


@cache
def _read_defaults(kind: str) -> dict[str, str]:
    """Return each key with its default, as text. Keys of a kind that have no default are left out."""
    from rlctl.config.builtin import CONFIGS
    from rlctl.config.compose import compose
    from rlctl.config.provenance import leaves

    root = compose(CONFIGS / f"{kind}.yaml", [])
    return {key: node.text or "null" for key, node in leaves(root) if not isinstance(node.value, (dict, list))}


def _first_sentence(fields: "list[Field[Any]]") -> str:
    return str(fields[0].metadata["doc"]).partition(". ")[0].removesuffix(".") if fields else ""


def _may_be_of_kind(name: str, kind: str | None) -> bool:
    """Return True unless the recipe's name begins with the name of another kind, for example "sft-"."""
    return kind is None or not name.startswith(tuple({"grpo-", "sft-"} - {f"{kind}-"}))


def _paths(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the YAML files, run directories and folders whose paths begin with `incomplete`."""
    typed_folder, slash, _ = incomplete.rpartition("/")
    folder = Path(typed_folder + slash or ".")
    for path in sorted(folder.glob("*")):
        name = f"{typed_folder}{slash}{path.name}"
        if not name.startswith(incomplete) or path.name.startswith("."):
            continue
        if path.is_file() and path.suffix in _ENDS:
            yield name, "file"
        elif (path / "config.yaml").is_file():
            yield name, "run"
