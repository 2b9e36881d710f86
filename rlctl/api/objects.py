"""Overrides as Python values, where a function or a class may stand in place of its name.

A recipe names code by `file.py:object`, and each process of a run loads it from there. So an object becomes such a
name: of its own file, or of a new file that holds the object's bytes. The second is for objects that only this process
has: those of a notebook or of the main script, closures, instances.
"""

import base64
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from types import CodeType
from typing import Any

from rlctl.config.errors import ConfigError, Problem, one_line
from rlctl.utils.files import write_whole

# A list of texts as on the command line, or values by dotted key.
Overrides = Sequence[str] | Mapping[str, Any]
# Below `run.dir`: the runs that name the files resume from them.
OBJECTS = ".objects"


def texts_of(overrides: Overrides, folder: Callable[[], Path]) -> list[str]:
    """Return overrides as the command line takes them. Raises ConfigError with every value that has no text.

    folder: returns the folder for files of objects. It is called once an object needs a file.
    """
    if isinstance(overrides, str):
        raise ConfigError([Problem("overrides", "", f'is one text: give a list, ["{overrides}"]')])
    if not isinstance(overrides, Mapping):
        return list(overrides)
    problems = []
    texts = []
    for key, value in overrides.items():
        try:
            texts.append(f"{key}={json.dumps(_plain(value, folder), ensure_ascii=False, allow_nan=True)}")
        except (TypeError, ValueError, OSError) as error:
            problems.append(Problem("overrides", key, one_line(error)))
    if problems:
        raise ConfigError(problems)
    return texts


def _plain(value: object, folder: Callable[[], Path]) -> object:
    """Return a value as JSON has it, with names in place of objects. Raises TypeError for a value without a text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner_value, folder) for key, inner_value in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner_value, folder) for inner_value in value]
    if callable(value):
        return _name_in_own_file(value) or _name_in_new_file(value, folder)
    raise TypeError(f"is a {type(value).__name__}: give text, numbers, lists, mappings, a function or a class")


def _name_in_own_file(value: object) -> str | None:
    """Return `file.py:object` of a function or class at the top of a module; None for any other object.

    The main script is no such module: to import it is to run it again.
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
    """Write a file that makes the object from its bytes, and return `file.py:object`. Raises TypeError, OSError."""
    name = re.sub(r"\W+", "_", getattr(value, "__name__", type(value).__name__)).strip("_") or "object"
    try:
        content = _bytes_of(value)
    except Exception as error:
        reason = f"{name} cannot be sent to the processes of a run: {one_line(error)}"
        raise TypeError(f"{reason}; make what it holds inside the function, or put it into a file of its own") from None
    variable = name if name.isidentifier() else f"object_{name}"
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
    objects = folder()
    # What an object holds may be secret.
    objects.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = objects / f"{variable}-{hashlib.sha256(content).hexdigest()[:12]}.py"
    write_whole(file, "\n".join(lines))
    return f"{file.resolve()}:{variable}"


def _bytes_of(value: object) -> bytes:
    """Return the bytes of an object. Its code keeps the names of its files: errors name the user's line."""
    import cloudpickle

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        """Pickler that does not write `<dynamic-code>` for the file of a function."""

        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, CodeType):
                return super().reducer_override(obj)
            make_code, arguments = self.dispatch_table[CodeType](obj)
            with_file = (obj.co_filename if argument == "<dynamic-code>" else argument for argument in arguments)
            return make_code, tuple(with_file)

    file = BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
