"""Conversion of overrides from Python values to texts. A value may be a function or a class instead of its name.

A recipe names code by `file.py:object`, and each process of a run loads it from there. So an object is replaced by such
a name. It names the object's own file, or a new file that contains the pickled object. A new file is needed for objects
that only this process has: those of a notebook or of the main script, closures, instances.
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

# Texts as on the command line, or values by dotted key.
Overrides = Sequence[str] | Mapping[str, Any]
# Folder below `run.dir` for files of objects. They are kept, because a run that names them needs them to resume.
OBJECTS = ".objects"


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
            texts.append(f"{key}={json.dumps(_plain(value, folder), ensure_ascii=False, allow_nan=True)}")
        except (TypeError, ValueError, OSError) as error:
            problems.append(Problem("overrides", key, one_line(error)))
    if problems:
        raise ConfigError(problems)
    return texts


def _plain(value: object, folder: Callable[[], Path]) -> object:
    """Return a value as JSON data, with names in place of objects. Raises TypeError for any other value."""
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
    # Readable by the user only, because an object may contain secrets.
    objects.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = objects / f"{variable}-{hashlib.sha256(content).hexdigest()[:12]}.py"
    write_whole(file, "\n".join(lines))
    return f"{file.resolve()}:{variable}"


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
