"""The keys of a user's own class, as a config has them.

A loss, an advantage or an engine's options: the fields that the class, a dataclass, adds to rlctl's base class. A
tracker: the parameters of its constructor after those that rlctl gives. One without a type, or of another type than
those below, takes any value.

They are converted as strictly as rlctl's own keys. A field may be bool, int, float, str, a Literal, a list of one of
these, or one of these or None; `spec(...)` gives it limits. Its default stands in the class.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rlctl.config.convert import Converter
from rlctl.config.errors import ConfigError, Problem, did_you_mean
from rlctl.config.fields import FURTHER, alternatives, join
from rlctl.config.provenance import ConfigNode, Origin
from rlctl.utils.user_code import import_error, load_object

_PLAIN_TYPES = (bool, int, float, str, NoneType)
_FORMS = "a config holds bool, int, float, str, Literal[...], list[...] of one of these, and `| None`"


def load_plugin(name: str, base: str) -> tuple[type[Any] | None, str]:
    """Import a user's class; return it and its problem, empty if there is none.

    name: module:Class or file.py:Class. base: the class of rlctl that it has to inherit from, named likewise.
    """
    try:
        found = load_object(name)
    except (Exception, SystemExit) as error:
        return None, import_error(error, __file__)
    wanted = load_object(base)
    if not (isinstance(found, type) and issubclass(found, wanted) and is_dataclass(found)):
        own = name.rpartition(":")[2]
        return None, f"must be a dataclass that inherits from {wanted.__name__}: `class {own}({wanted.__name__}):`"
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        return None, f"lacks {', '.join(missing)}, which every {wanted.__name__} has"
    return found, ""


def plugin_options(
    plugin: type[Any], base: type[Any], given: Mapping[str, Any], key: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of `plugin`'s own fields, those beyond `base`, and every mistake in `given`.

    key: the section, which the problems name; their `where` is empty.
    """
    inherited = {each.name for each in fields(base)}
    own = [each for each in fields(plugin) if each.init and each.name not in inherited]
    hints = get_type_hints(plugin)
    problems = [
        Problem("", join(key, each.name), f"{plugin.__name__} has it as {_hint_text(hints[each.name])}: {_FORMS}")
        for each in own
        if not _is_plain(hints[each.name])
    ]
    if problems:
        return {}, problems
    missing = [each.name for each in own if each.name not in given and not _has_default(each)]
    problems += [Problem("", join(key, name), f"not set, and {plugin.__name__} has no default") for name in missing]
    set_here = [each for each in own if each.name in given]
    section = [(each.name, hints[each.name], dict(each.metadata)) for each in own]
    # A default is not converted: the class decides.
    filler = {each.name: None for each in own if each.name not in given}
    values, wrong = _convert_options(plugin.__name__, section, {**given, **filler}, key)
    unset = [join(key, name) for name in filler]
    problems += [each for each in wrong if each.key not in unset]
    return {each.name: values[each.name] for each in set_here}, problems


def call_options(
    plugin: Any, leading: Sequence[str], given: Mapping[str, Any], key: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the arguments of a call of `plugin` by the keys of its entry, and every mistake in `given`.

    leading: names of the arguments before them, which rlctl gives. key: as in `plugin_options`.
    """
    name = getattr(plugin, "__name__", "it")
    try:
        signature = _signature(plugin)
    except ValueError:  # a constructor that Python knows no signature of
        return dict(given), []
    try:
        taken = signature.bind_partial(*leading).arguments
    except TypeError as error:
        return {}, [Problem("", join(key, "name"), f"{name} is called with {', '.join(leading)} first: {error}")]
    kinds = inspect.Parameter
    own = {each.name: each for each in signature.parameters.values() if each.name not in taken}
    takes_any = any(each.kind is kinds.VAR_KEYWORD for each in own.values())
    own = {each: own[each] for each in own if own[each].kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)}
    problems = list[Problem]()
    for word in given:
        if word not in own and not takes_any:
            what = did_you_mean(word, own) or f"; {name} has {', '.join(own) or 'none'}"
            problems.append(Problem("", join(key, word), f"unknown key{what}"))
    for word, each in own.items():
        if word not in given and each.default is kinds.empty:
            problems.append(Problem("", join(key, word), f"not set, and {name} has no default"))
    hints = {word: each.annotation for word, each in own.items() if word in given}
    # A key of that name means something else to the converter.
    typed: list[tuple[str, Any, dict[str, Any]]]
    typed = [(word, hint, {}) for word, hint in hints.items() if word != FURTHER and _is_plain(hint)]
    values, wrong = _convert_options(name, typed, {word: given[word] for word, _, _ in typed}, key)
    return {**given, **({} if wrong else values)}, problems + wrong


def _convert_options(
    name: str, section: list[tuple[str, Any, dict[str, Any]]], given: Mapping[str, Any], key: str
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of a section, and every mistake. name: of the class. section: (key, type, limits) of each."""
    made = make_dataclass(
        name, [(word, hint, field(metadata={"doc": word, **limits})) for word, hint, limits in section]
    )
    converter: Converter[Any] = Converter(made, "", among=(made,))
    values = converter.convert(ConfigNode({word: _node(value) for word, value in given.items()}, Origin()), key)
    return vars(values), [replace(each, where="") for each in converter.problems]


def _signature(plugin: Any) -> inspect.Signature:
    """Return the signature of a call. Raises ValueError if Python knows none."""
    with suppress(Exception):  # a hint may be the user's code, or name a module that only type checkers import
        return inspect.signature(plugin, eval_str=True)
    return inspect.signature(plugin)


def checked_options(plugin: type[Any], base: type[Any], given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the values of `plugin_options`. Raises ConfigError for a mistake, as where the config was not checked."""
    values, problems = plugin_options(plugin, base, given, key)
    if problems:
        raise ConfigError(problems)
    return values


def _node(value: Any) -> ConfigNode:
    if isinstance(value, dict):
        return ConfigNode({name: _node(each) for name, each in value.items()}, Origin())
    if isinstance(value, list):
        return ConfigNode([_node(each) for each in value], Origin())
    return ConfigNode(value, Origin(), None if value is None else str(value))


def _has_default(each: "Field[Any]") -> bool:
    return each.default is not MISSING or each.default_factory is not MISSING


def _hint_text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _is_plain(hint: Any) -> bool:
    for each in alternatives(hint):
        inner = get_args(each)[0] if get_origin(each) is list else each
        if get_origin(inner) is not Literal and inner not in _PLAIN_TYPES:
            return False
    return True
