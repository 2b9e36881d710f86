"""Rules of a schema: a dataclass a section; a field has its meaning and limits, and no default.

Defaults are in `configs/` alone. `spec(...)` puts the meaning and the allowed range at the field; `convert.py`
enforces both, `rlctl config show --doc` prints the meaning, and `configs/README.md` lists them all.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from rlctl.utils.user_code import load_object

# Largest sensible numbers. A larger number is a slip, and its arithmetic would not end.
MOST_PROCESSES = 1 << 14
MOST_SEQUENCES = 1 << 20
MOST_SECONDS = 10**8

# The key of a whole config within another.
RECIPE = "validation.recipe"
# The field of a section that takes any key. The field is no key itself: it holds the keys that no other field has.
FURTHER = "further"


def spec(doc: str, **limits: Any) -> Any:
    """Return a field without a default. doc: its meaning, in whole sentences.

    ge, gt, le, lt: limits of a number, or of each number of a list. most: a bound so far away that only a slip
    passes it. path: the kind of thing that a text names, for `paths.py` to look up: "model" and "dataset" (a local path
    or a hub name), "template" (a file, or one of the field's literals), "plugin" (file.py:object, or no file at all),
    "folder" (one that need not exist). whole: the value is a whole config, whose keys are those of its kind of run.
    """
    return field(metadata={"doc": doc, **limits})


def seconds(doc: str, **limits: Any) -> Any:
    """Return a field of seconds, which waiting functions can take."""
    return spec(doc, **limits, most=MOST_SECONDS)


def share(doc: str) -> Any:
    """Return a field of a share, 0 to 1."""
    return spec(doc, ge=0, le=1)


def key_of(name: str) -> str:
    """Return the key of a field: `async` of `async_`, since Python takes no keyword as a name."""
    return name.removesuffix("_")


def is_section(field: "Field[Any]") -> bool:
    """Return True if the value of a field is a section, whose keys the schema lists."""
    return bool(sections_of(field.type)) and "whole" not in field.metadata


def keys_of(section: type[Any]) -> dict[str, "Field[Any]"]:
    """Return the fields of a section by their keys."""
    return {key_of(field.name): field for field in fields(section)}


def join(key: str, name: str) -> str:
    """Return the dotted key of `name` in the section `key`, which is empty at the top."""
    return f"{key}.{name}" if key else name


@dataclass(frozen=True)
class Elsewhere:
    """The place of a section that is in the folder of the part it configures, above config/: `module:object`.

    The object is a section, or a union of sections, each with another `name`. It is imported when it is needed. A field
    has it as `Annotated[base, Elsewhere(...)]`. Lower folders know the base alone.
    """

    place: str


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union; of any other type, the type alone."""
    if get_origin(hint) is Annotated:
        return alternatives(load_object(get_args(hint)[1].place))
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def sections_of(hint: Any) -> list[type[Any]]:
    """Return the sections that a value of this type may be."""
    return [cast(type[Any], alternative) for alternative in alternatives(hint) if is_dataclass(alternative)]


def literals(hint: Any) -> list[str]:
    """Return the words that a value of this type may be."""
    literal_types = [alternative for alternative in alternatives(hint) if get_origin(alternative) is Literal]
    return list(chain.from_iterable(get_args(literal_type) for literal_type in literal_types))


def schema_key(key: str) -> str:
    """Return a key as `schema_keys` has it: a list entry's number becomes `N`, and a recipe's key loses its prefix."""
    return ".".join("N" if part.isdecimal() else part for part in key.removeprefix(f"{RECIPE}.").split("."))


def schema_keys(kind: type[Any], key: str = "") -> Iterator[tuple[str, "Field[Any]"]]:
    """Yield (dotted key, field) of every section and value of a schema; a list entry's number is `N`."""
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
