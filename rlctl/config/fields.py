"""Rules of a schema: a dataclass a section; a field has its meaning and limits, and no default.

Defaults are in `configs/` alone. `spec(...)` puts the meaning and the allowed range at the field; `convert.py`
enforces both, `rlctl config show --doc` prints the meaning, and `configs/README.md` lists them all.
"""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from rlctl.utils.user_code import load_object

# Largest sensible numbers. A larger one is a slip, and its arithmetic would not end.
MOST_PROCESSES = 1 << 14
MOST_SEQUENCES = 1 << 20
MOST_SECONDS = 10**8

# The key of a whole config within another.
RECIPE = "validation.recipe"
# The field of a section that takes any key. It is no key itself: it holds the keys that no other field has.
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
    return {key_of(each.name): each for each in fields(section)}


def join(key: str, name: str) -> str:
    """Return the dotted key of `name` in the section `key`, which is empty at the top."""
    return f"{key}.{name}" if key else name


@dataclass(frozen=True)
class Elsewhere:
    """The place of a section that is in the folder of the part it configures, above config/: `module:object`.

    The object is a section, or a union of some that are told apart by their `name`. It is imported when it is needed. A
    field has it as `Annotated[base, Elsewhere(...)]`. Lower folders know the base alone.
    """

    place: str


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types that a type is a union of; itself if it is none."""
    if get_origin(hint) is Annotated:
        return alternatives(load_object(get_args(hint)[1].place))
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def sections_of(hint: Any) -> list[type[Any]]:
    """Return the sections that a value of this type may be."""
    return [cast(type[Any], each) for each in alternatives(hint) if is_dataclass(each)]


def literals(hint: Any) -> list[str]:
    """Return the words that a value of this type may be."""
    return [value for each in alternatives(hint) if get_origin(each) is Literal for value in get_args(each)]


def generic(key: str) -> str:
    """Return a key as `schema_keys` has it: the number of a list's entry becomes `N`, a recipe's key is of its kind."""
    return ".".join("N" if part.isdecimal() else part for part in key.removeprefix(f"{RECIPE}.").split("."))


def schema_keys(kind: type[Any], key: str = "") -> Iterator[tuple[str, "Field[Any]"]]:
    """Yield (dotted key, field) of every section and value of a schema; a list entry's number is `N`."""
    for name, each in keys_of(kind).items():
        if name == FURTHER:
            continue
        full = join(key, name)
        yield full, each
        is_list = get_origin(each.type) is list
        inside = get_args(each.type)[0] if is_list else each.type
        for section in sections_of(inside) if "whole" not in each.metadata else ():
            yield from schema_keys(section, f"{full}.N" if is_list else full)
