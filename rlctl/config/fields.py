"""Tools to define and inspect config schemas. A section is a dataclass. Its fields have a meaning and limits, but no
default.

Defaults are only in `configs/`. `spec(...)` stores the meaning and the limits in a field. `convert.py` enforces the
limits, `rlctl config show --doc` prints the meanings, and `configs/README.md` lists all fields.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from rlctl.utils.user_code import load_object

# Largest allowed numbers. A larger one is a typing mistake, and computing with it would take forever.
MOST_PROCESSES = 1 << 14
MOST_SEQUENCES = 1 << 20
MOST_SECONDS = 10**8

# Dotted key under which an SFT config contains a whole GRPO config.
RECIPE = "validation.recipe"
# Name of the field in which a section with free keys stores the keys of no other field. The name itself is no key.
FURTHER = "further"


def spec(doc: str, **limits: Any) -> Any:
    """Return a dataclass field without a default. doc: its meaning, in whole sentences.

    ge, gt, le, lt: limits of a number, or of each number in a list. most: an upper limit that only a typing mistake
    exceeds. path: kind of path that `paths.py` resolves: "model" or "dataset" (a local path or a hub name), "template"
    (a file, or one of the field's literals), "plugin" (file.py:object or module:object), "folder" (which need not
    exist). whole: the value is a whole config of another kind of run.
    """
    return field(metadata={"doc": doc, **limits})


def seconds(doc: str, **limits: Any) -> Any:
    """Return a field for seconds, limited to values that waiting functions accept."""
    return spec(doc, **limits, most=MOST_SECONDS)


def share(doc: str) -> Any:
    """Return a field for a share, 0 to 1."""
    return spec(doc, ge=0, le=1)


def key_of(name: str) -> str:
    """Return the config key of a field: `async` for `async_`, since a Python keyword cannot be a field's name."""
    return name.removesuffix("_")


def is_section(field: "Field[Any]") -> bool:
    """Return True if the value of a field is a section with keys in this schema."""
    return bool(sections_of(field.type)) and "whole" not in field.metadata


def keys_of(section: type[Any]) -> dict[str, "Field[Any]"]:
    """Return key -> field, for the fields of a section."""
    return {key_of(field.name): field for field in fields(section)}


def join(key: str, name: str) -> str:
    """Return the dotted key of `name` in the section `key`; an empty `key` is the top level."""
    return f"{key}.{name}" if key else name


@dataclass(frozen=True)
class Elsewhere:
    """Import path `module:object` of a section class outside of config/, next to the code that it configures.

    The object is a section class, or a union of section classes that differ in `name`. It is imported when it is
    needed. A field has the type `Annotated[base, Elsewhere(...)]`, so that config/ itself only knows the base class.
    """

    place: str


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; for any other type, a tuple with only this type."""
    if get_origin(hint) is Annotated:
        return alternatives(load_object(get_args(hint)[1].place))
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def sections_of(hint: Any) -> list[type[Any]]:
    """Return the section classes among the alternatives of a type."""
    return [cast(type[Any], alternative) for alternative in alternatives(hint) if is_dataclass(alternative)]


def literals(hint: Any) -> list[str]:
    """Return the literal words among the alternatives of a type."""
    literal_types = [alternative for alternative in alternatives(hint) if get_origin(alternative) is Literal]
    return list(chain.from_iterable(get_args(literal_type) for literal_type in literal_types))


def schema_key(key: str) -> str:
    """Return a dotted key in the form of `schema_keys`: list indices become `N`, and the prefix `validation.recipe.`
    goes.
    """
    return ".".join("N" if part.isdecimal() else part for part in key.removeprefix(f"{RECIPE}.").split("."))


def schema_keys(kind: type[Any], key: str = "") -> Iterator[tuple[str, "Field[Any]"]]:
    """Yield (dotted key, field) for every section and value of a schema. A list index is `N`."""
    for name, section_field in keys_of(kind).items():
        if name == FURTHER:
            continue
        dotted_key = join(key, name)
        yield dotted_key, section_field
        if "whole" in section_field.metadata:
            continue
        is_list = get_origin(section_field.type) is list
        inner_type = get_args(section_field.type)[0] if is_list else section_field.type
        for section in sections_of(inner_type):
            yield from schema_keys(section, f"{dotted_key}.N" if is_list else dotted_key)
