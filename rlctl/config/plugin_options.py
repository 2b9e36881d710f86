"""Config keys of a user's class.

The keys of a loss, an advantage or an engine are the fields that its dataclass adds to rlctl's base class. The keys of
a tracker are the parameters of its constructor that rlctl does not pass itself. A tracker's parameter without a type,
or with a type that is not listed below, takes any value.

The keys are converted as strictly as rlctl's own. A field's type may be bool, int, float, str, a Literal, a list of one
of these, or one of these or None. `spec(...)` adds limits. The default is in the class.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass, replace
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
    """Import a user's class. Return (class, "") or (None, problem).

    name: module:Class or file.py:Class. base: module:Class of rlctl's class from which it must inherit.
    """
    try:
        plugin = load_object(name)
    except (Exception, SystemExit) as error:
        return None, import_error(error, __file__)
    base_class = load_object(base)
    base_name = base_class.__name__
    if not (isinstance(plugin, type) and issubclass(plugin, base_class) and is_dataclass(plugin)):
        class_name = name.rpartition(":")[2]
        return None, f"must be a dataclass that inherits from {base_name}: `class {class_name}({base_name}):`"
    if missing := sorted(getattr(plugin, "__abstractmethods__", ())):
        return None, f"lacks {', '.join(missing)}, which every {base_name} has"
    return plugin, ""


def plugin_options(
    plugin: type[Any], base: type[Any], options: Mapping[str, Any], key: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Convert `options` to the fields that `plugin` adds to `base`. Return the values and every mistake.

    key: dotted key of the section, for the problems. The `where` of problems is empty.
    """
    inherited = {field.name for field in fields(base)}
    added = {field.name: field for field in fields(plugin) if field.init and field.name not in inherited}
    hints = get_type_hints(plugin)
    problems = [
        Problem("", join(key, name), f"{plugin.__name__} has it as {_describe_hint(hints[name])}: {_FORMS}")
        for name in added
        if not _is_config_type(hints[name])
    ]
    if problems:
        return {}, problems
    unset = [name for name in added if name not in options]
    problems += [
        Problem("", join(key, name), f"not set, and {plugin.__name__} has no default")
        for name in unset
        if added[name].default is MISSING and added[name].default_factory is MISSING
    ]
    option_types = {name: (hints[name], added_field.metadata) for name, added_field in added.items()}
    # The converter demands every field. A field that is not set gets null, and the converter's answer about it is
    # dropped: its default is the class's.
    filled = {**options, **dict.fromkeys(unset)}
    values, mistakes = _convert_options(plugin.__name__, option_types, filled, key)
    unset_keys = [join(key, name) for name in unset]
    problems += [mistake for mistake in mistakes if mistake.key not in unset_keys]
    return {name: values[name] for name in added if name in options}, problems


def call_options(
    plugin: Any, leading: Sequence[str], options: Mapping[str, Any], key: str = ""
) -> tuple[dict[str, Any], list[Problem]]:
    """Convert `options` to keyword arguments for a call of `plugin`. Return the arguments and every mistake.

    leading: names of the positional arguments that rlctl passes. key: as in `plugin_options`.
    """
    name = getattr(plugin, "__name__", "it")
    try:
        signature = _read_signature(plugin)
    except ValueError:  # a constructor that Python knows no signature of
        return dict(options), []
    try:
        leading_arguments = signature.bind_partial(*leading).arguments
    except TypeError as error:
        return {}, [Problem("", join(key, "name"), f"{name} is called with {', '.join(leading)} first: {error}")]
    takes_any = False
    hints = dict[str, Any]()
    required = list[str]()
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_any = True
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in leading_arguments:
            hints[parameter.name] = parameter.annotation
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    problems = list[Problem]()
    for option in options:
        if option not in hints and not takes_any:
            remark = did_you_mean(option, hints) or f"; {name} has {', '.join(hints) or 'none'}"
            problems.append(Problem("", join(key, option), f"unknown key{remark}"))
    for option in required:
        if option not in options:
            problems.append(Problem("", join(key, option), f"not set, and {name} has no default"))
    # An option named `further` is not converted, because the converter uses this name itself.
    option_types = {
        option: (hint, dict[str, Any]())
        for option, hint in hints.items()
        if option in options and option != FURTHER and _is_config_type(hint)
    }
    typed_options = {option: options[option] for option in option_types}
    values, mistakes = _convert_options(name, option_types, typed_options, key)
    converted = {} if mistakes else values
    return {**options, **converted}, problems + mistakes


def _convert_options(
    name: str, option_types: Mapping[str, tuple[Any, Mapping[str, Any]]], options: Mapping[str, Any], key: str
) -> tuple[dict[str, Any], list[Problem]]:
    """Convert options by their types. Return the values and every mistake.

    name: of the class, for messages. option_types: option -> (type, limits).
    """
    section_fields = [
        (option, hint, field(metadata={"doc": option, **limits})) for option, (hint, limits) in option_types.items()
    ]
    section_type = make_dataclass(name, section_fields)
    converter: Converter[Any] = Converter(section_type, "", among=(section_type,))
    values = converter.convert(_to_node(dict(options)), key)
    return vars(values), [replace(problem, where="") for problem in converter.problems]


def _read_signature(plugin: Any) -> inspect.Signature:
    """Return the signature of a class or function. Raises ValueError if Python knows none."""
    with suppress(Exception):  # a hint may be the user's code, or name a module that only type checkers import
        return inspect.signature(plugin, eval_str=True)
    return inspect.signature(plugin)


def checked_options(plugin: type[Any], base: type[Any], options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the values of `plugin_options`. Raises ConfigError for mistakes, because the config may not have been
    checked.
    """
    values, problems = plugin_options(plugin, base, options, key)
    if problems:
        raise ConfigError(problems)
    return values


def _to_node(option: Any) -> ConfigNode:
    if isinstance(option, dict):
        return ConfigNode({name: _to_node(child) for name, child in option.items()}, Origin())
    if isinstance(option, list):
        return ConfigNode([_to_node(child) for child in option], Origin())
    return ConfigNode(option, Origin(), None if option is None else str(option))


def _describe_hint(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


def _is_config_type(hint: Any) -> bool:
    for alternative in alternatives(hint):
        inner = get_args(alternative)[0] if get_origin(alternative) is list else alternative
        if get_origin(inner) is not Literal and inner not in _PLAIN_TYPES:
            return False
    return True
