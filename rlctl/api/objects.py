"""Conversion of overrides from Python values to texts. A value may be a function or a class instead of its name.

A recipe names code by `file.py:object`, and each process of a run loads it from there. So an object is replaced by such
a name. It names the object's own file, or a new file that contains the pickled object. A new file is needed for objects
that only this process has: those of a notebook or of the main script, closures, instances. Rows are written to a JSONL
file, whose path takes their place.
"""

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import BytesIO
from keyword import iskeyword
from pathlib import Path
from types import CodeType
from typing import Any, TypeGuard

from rlctl.config.errors import ConfigError, Problem, one_line
from rlctl.utils.files import write_whole

# Texts as on the command line, or values by dotted key.
Overrides = Sequence[str] | Mapping[str, Any]
# Folder below `run.dir` for files of objects. They are kept, because a run that names them needs them to resume.
OBJECTS = ".objects"
# Keys whose value names a data set.
_ROWS_KEY = re.compile(r"data\.(train|train\.sources\.[^.]+|validation)\.path")


def texts_of(overrides: Overrides, folder: Callable[[], Path]) -> list[str]:
    """Return overrides as texts of the command line. Raises ConfigError with every value that has no text form.

    folder: returns the folder for files of objects. It is called only if an object needs a file.
    """
    if isinstance(overrides, str):
        raise ConfigError([Problem("overrides", "", f'is one text: give a list, ["{overrides}"]')])
    if not isinstance(overrides, Mapping):
        return list(overrides)
    problems = []
    texts = []
    for key, value in overrides.items():
        try:
            plain_value = _plain(value, folder, key)
            texts.append(f"{key}={json.dumps(plain_value, ensure_ascii=False, allow_nan=True)}")
        except (TypeError, ValueError, OSError) as error:
            problems.append(Problem("overrides", key, one_line(error)))
    if problems:
        raise ConfigError(problems)
    return texts


def _plain(value: object, folder: Callable[[], Path], key: str) -> object:
    """Return the value of a dotted key as JSON data, with names in place of objects, and of rows.

    Raises TypeError for any other value.
    """
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner_value, folder, f"{key}.{name}") for name, inner_value in value.items()}
    if _are_rows(value):
        if _ROWS_KEY.fullmatch(key):
            return str(_write_rows(value, folder))
        # The key is the section of a data set, which has its rows in `path`.
        if _ROWS_KEY.fullmatch(f"{key}.path"):
            raise TypeError(f"is a section: rows go to {key}.path")
    if isinstance(value, list | tuple):
        return [_plain(inner_value, folder, key) for inner_value in value]
    if callable(value):
        return _name_in_own_file(value) or _name_in_new_file(value, folder)
    allowed = "text, numbers, lists, mappings, a function or a class"
    if _ROWS_KEY.fullmatch(key):
        allowed = "a path, a list of mappings (to_dict('records') of a DataFrame), or a Dataset"
    raise TypeError(f"is a {type(value).__name__}: give {allowed}")


def _are_rows(value: object) -> TypeGuard[Iterable[Mapping[str, Any]]]:
    """Return True for a list of mappings, and for a data set of the library `datasets`."""
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(isinstance(row, Mapping) for row in value)
    return hasattr(value, "column_names") and hasattr(value, "to_list")


def _write_rows(rows: Iterable[Mapping[str, Any]], folder: Callable[[], Path]) -> Path:
    """Write rows to a JSONL file, and return its path. Raises TypeError for a value that JSON does not have."""
    lines = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise TypeError(f"row {number} cannot be written as JSON: {one_line(error)}") from None
    content = "".join(lines)
    file = _make_objects_folder(folder) / f"rows-{hashlib.sha256(content.encode()).hexdigest()[:12]}.jsonl"
    write_whole(file, content)
    return file.resolve()


def _name_in_own_file(value: object) -> str | None:
    """Return `file.py:object` of a function or class at the top level of a module; None for any other object.

    An object of the main script gets None too, because the import of the main script would run it again.
    """
    name = getattr(value, "__qualname__", "")
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not value:
        return None
    if module.__name__.startswith("rlctl."):
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None) or ""
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else None


def _name_in_new_file(value: object, folder: Callable[[], Path]) -> str:
    """Write a file that unpickles an object, and return `file.py:object` for it. Raises TypeError, OSError."""
    name = re.sub(r"\W+", "_", getattr(value, "__name__", type(value).__name__)).strip("_") or "object"
    try:
        content = _bytes_of(value)
    except Exception as error:
        reason = f"{name} cannot be sent to the processes of a run: {one_line(error)}"
        raise TypeError(f"{reason}; make what it holds inside the function, or put it into a file of its own") from None
    # A lambda's name is a keyword.
    variable = name if name.isidentifier() and not iskeyword(name) else f"object_{name}"
    lines = (
        f'"""{name}, as it was given to rlctl in Python. Written by rlctl, for the processes of runs."""',
        "",
        "import base64",
        "",
        "import cloudpickle",
        "",
        f'{variable} = cloudpickle.loads(base64.b64decode("{base64.b64encode(content).decode()}"))',
        "",
    )
    file = _make_objects_folder(folder) / f"{variable}-{hashlib.sha256(content).hexdigest()[:12]}.py"
    write_whole(file, "\n".join(lines))
    return f"{file.resolve()}:{variable}"


def _make_objects_folder(folder: Callable[[], Path]) -> Path:
    """Make the folder for files of objects, and return it. Only its user may read it: an object may contain secrets."""
    objects = folder()
    objects.mkdir(mode=0o700, parents=True, exist_ok=True)
    return objects


def _bytes_of(value: object) -> bytes:
    """Return an object's pickled bytes. The code keeps the names of its files, so that errors name the user's line."""
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        """Pickler that keeps a function's file name. cloudpickle would replace it by `<dynamic-code>`."""

        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, CodeType):
                return super().reducer_override(obj)
            make_code, arguments = self.dispatch_table[CodeType](obj)
            with_file = (obj.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)
            return make_code, tuple(with_file)

    file = BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
