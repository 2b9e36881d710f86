"""Completion of recipes, config keys, their values and run names, in bash, zsh and fish (`rlctl --install-completion`).

A shell adds a space behind a word that is the only one. Nothing here offers `key=` alone: each value is offered as
`key=value`.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from dataclasses import Field

Offers = list[tuple[str, str]]
_ENDS = (".yaml", ".yml")


def complete_recipe(incomplete: str) -> Offers:
    """Offer the shipped recipes."""
    from rlctl.config.builtin import recipe_names

    return [(name, "recipe") for name in recipe_names() if name.startswith(incomplete)]


def complete_config(incomplete: str) -> Offers:
    """Offer names of configs: shipped recipes, YAML files and run directories."""
    return [*complete_recipe(incomplete), *_paths(incomplete)]


def complete_arguments(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer a recipe, and then keys with their values. bash takes `key=value` apart at the `=`, zsh and fish do not."""
    kind = {"grpo": "grpo", "sft": "sft", "eval": "grpo"}.get(str(ctx.info_name))
    given = [str(each) for each in ctx.params.get("arguments") or []]
    if given[-1:] == ["="]:
        given.pop()
        return [
            (value, doc) for value, doc in _values(given[-1] if given else "", kind) if value.startswith(incomplete)
        ]
    if given and given[-1] in _fields(kind) and not incomplete:
        return _values(given[-1], kind)
    key, equals, _ = incomplete.partition("=")
    if equals:
        return [(f"{key}={value}", doc) for value, doc in _values(key, kind)]
    keys = [each for each in _fields(kind) if each.startswith(incomplete)] if incomplete else []
    offers = [(f"{each}=", _meaning(_fields(kind)[each])) for each in keys]
    if len(keys) == 1:
        offers += [(f"{keys[0]}={value}", doc) for value, doc in _values(keys[0], kind)]
    named = any("=" not in each for each in given)
    return offers if named else [*(each for each in complete_config(incomplete) if _of_kind(each[0], kind)), *offers]


def complete_run(ctx: typer.Context, incomplete: str) -> Offers:
    """Offer the runs of the folder in question, the newest first."""
    from rlctl.config.builtin import runs_folder

    root = Path(str(ctx.params.get("root") or runs_folder()))
    events = sorted(root.glob("*/events.jsonl"), key=lambda path: -path.stat().st_mtime)
    return [(path.parent.name, "run") for path in events if path.parent.name.startswith(incomplete)]


@cache
def _fields(kind: str | None) -> "dict[str, list[Field[Any]]]":
    """Return every value's key with its fields, of each section that may have it; of both kinds of run for None."""
    from rlctl.config.fields import is_section, schema_keys
    from rlctl.config.schema import KINDS

    found: dict[str, list[Field[Any]]] = {}
    for each in [KINDS[kind]] if kind else KINDS.values():
        for key, field in schema_keys(each):
            if not is_section(field):
                found.setdefault(key.replace(".N", ".0"), []).append(field)
    return found


def _values(key: str, kind: str | None) -> Offers:
    """Return the words that a key may have, and its default. An empty value is the user's to fill in."""
    from types import NoneType

    from rlctl.config.builtin import recipe_names
    from rlctl.config.fields import RECIPE, alternatives, literals

    fields = _fields(kind).get(key, [])
    types = {each for field in fields for each in alternatives(field.type)}
    words = [str(word) for field in fields for word in literals(field.type)]
    words += ["true", "false"] * (bool in types) + ["null"] * (NoneType in types)
    words += [name for name in recipe_names() if _of_kind(name, "grpo")] if key == RECIPE else []
    default = _defaults(kind or "grpo").get(key)
    offers = list(dict.fromkeys([*words, *([default] if default is not None else [])]))
    meaning = _meaning(fields)
    return [(word, "default" if word == default else meaning) for word in offers or [""] * bool(fields)]


@cache
def _defaults(kind: str) -> dict[str, str]:
    """Return the default of every key that has one."""
    from rlctl.config.builtin import CONFIGS
    from rlctl.config.compose import compose
    from rlctl.config.provenance import leaves

    found = leaves(compose(CONFIGS / f"{kind}.yaml", []))
    return {key: node.text or "null" for key, node in found if not isinstance(node.value, (dict, list))}


def _meaning(fields: "list[Field[Any]]") -> str:
    return str(fields[0].metadata["doc"]).partition(". ")[0].removesuffix(".") if fields else ""


def _of_kind(name: str, kind: str | None) -> bool:
    return kind is None or not name.startswith(tuple({"grpo-", "sft-"} - {f"{kind}-"}))


def _paths(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield YAML files, run directories and folders that begin so."""
    folder, _, _ = incomplete.rpartition("/")
    for path in sorted(Path(folder or ("/" if incomplete.startswith("/") else ".")).glob("*")):
        shown = f"{incomplete[: len(folder) + 1] if folder or incomplete[:1] == '/' else ''}{path.name}"
        if not shown.startswith(incomplete) or path.name.startswith("."):
            continue
        if path.is_file() and path.suffix in _ENDS:
            yield shown, "file"
        elif (path / "config.yaml").is_file():
            yield shown, "run"
