"""The keys of a user's own loss or advantage: the fields that its class, a dataclass, adds to rlctl's base class.

They are converted as strictly as rlctl's own keys. A field may be bool, int, float, str, a Literal, a list of one of
these, or one of these or None; `spec(...)` gives it limits. Its default stands in the class.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass, make_dataclass, replace
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rlctl.config.convert import Converter
from rlctl.config.errors import ConfigError, Problem
from rlctl.config.fields import alternatives, join
from rlctl.config.provenance import ConfigNode, Origin
from rlctl.utils.user_code import import_error, load_object

_PLAIN = (bool, int, float, str, NoneType)
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
        Problem("", join(key, each.name), f"{plugin.__name__} has it as {_shown(hints[each.name])}: {_FORMS}")
        for each in own
        if not _is_plain(hints[each.name])
    ]
    if problems:
        return {}, problems
    missing = [each.name for each in own if each.name not in given and not _has_default(each)]
    problems += [Problem("", join(key, name), f"not set, and {plugin.__name__} has no default") for name in missing]
    set_here = [each for each in own if each.name in given]
    metadata = {each.name: {"doc": each.name, **each.metadata} for each in own}
    section = make_dataclass(
        plugin.__name__, [(each.name, hints[each.name], field(metadata=metadata[each.name])) for each in own]
    )
    given_nodes = {name: _node(value) for name, value in given.items()}
    # A default is not converted: the class decides.
    filler = {each.name: _node(None) for each in own if each.name not in given}
    converter: Converter[Any] = Converter(section, "", among=(section,))
    values = converter.convert(ConfigNode({**given_nodes, **filler}, Origin()), key)
    unset = [join(key, name) for name in filler]
    problems += [replace(each, where="") for each in converter.problems if each.key not in unset]
    return {each.name: getattr(values, each.name) for each in set_here}, problems


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


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _is_plain(hint: Any) -> bool:
    for each in alternatives(hint):
        inner = get_args(each)[0] if get_origin(each) is list else each
        if get_origin(inner) is not Literal and inner not in _PLAIN:
            return False
    return True
