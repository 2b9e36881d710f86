"""Users' code: loads objects by name (`module:object` or `file.py:object`), and describes errors with file and line."""

import importlib
import importlib.util
import inspect
import math
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Mapping
from functools import partial
from numbers import Real
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

# Folders of Python, of installed packages and of rlctl. A file outside these is a user's.
_LIBRARIES = [
    *(Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    Path(__file__).parents[1],
]
# The most characters of an error's message, and of a traceback.
MAX_DETAIL = 200
MAX_TRACE = 8000
# The deepest nesting of lists and dicts in a value from a model or an environment. It is limited, because pickle, JSON
# and templates recurse.
MAX_LEVELS = 64


def load_object(name: str) -> Any:
    """Return the object named `module:object` or `file.py:object`. Raises the import's errors, or AttributeError."""
    module, _, attribute = name.rpartition(":")
    imported = importlib.import_module(module) if module.startswith("rlctl.") else load_module(module)
    return getattr(imported, attribute)


def load_module(name: str) -> ModuleType:
    """Import a module by its name or by its file. The current directory is searched for names too.

    A file inside a package is imported as a submodule of the package, so that its relative imports work. Raises the
    import's errors.
    """
    path = Path(name)
    is_file = path.suffix == ".py"
    folder = path.resolve().parent if is_file else Path.cwd()
    # Names of the packages that contain the file, outermost first, and of the file itself.
    module_parts = [path.stem]
    while is_file and (folder / "__init__.py").is_file():
        module_parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if not is_file:
        return importlib.import_module(name)
    if len(module_parts) > 1:
        return importlib.import_module(".".join(module_parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def finite_number(value: object) -> float | None:
    """Return `value` as a finite float; None if it is not a finite number. May run code of a user's type."""
    if getattr(value, "shape", None) == ():  # a numpy scalar, or a tensor without dimensions
        value = value.item()  # type: ignore[attr-defined]
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def several_numbers(value: object) -> str:
    """Return the remedy for a reward that returned several values; "" if `value` is a single one."""
    if not isinstance(value, Mapping | list | tuple | set):
        return ""
    return "; write a function for each number, with an entry of its own in rewards"


def is_too_deep(value: object) -> bool:
    """Return True if lists and dicts are nested deeper than `MAX_LEVELS`. It does not recurse itself."""
    values_of_level = [value]
    for _ in range(MAX_LEVELS + 1):
        inner_values: list[object] = []
        for outer_value in values_of_level:
            inner_values += _inner_values(outer_value)
        values_of_level = inner_values
    return bool(values_of_level)


def _inner_values(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def trace_of(error: BaseException) -> str:
    """Return the traceback from the first frame in a user's file on, at most `MAX_TRACE` characters.

    If no frame is in a user's file, only the frame that caught the error is left out.
    """
    frames = error.__traceback__
    while frames and not _is_users(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    if frames is None and error.__traceback__:
        frames = error.__traceback__.tb_next
    trace = format_trace(error, frames)
    return trace if len(trace) <= MAX_TRACE else f"{trace[: MAX_TRACE // 2]}\n[...]\n{trace[-MAX_TRACE // 2 :]}"


def format_trace(error: BaseException, frames: TracebackType | None) -> str:
    """Return the traceback of an error from `frames` on, as Python prints it."""
    try:
        return "".join(traceback.format_exception(type(error), error, frames))
    except BaseException:  # reading the notes and the cause of a user's exception may run the user's code
        return "".join(traceback.format_tb(frames))


def import_error(error: BaseException, caller: str) -> str:
    """Return "cannot import: ..." with file:line in the user's files. caller: the file of rlctl that imported."""
    loaders = (caller, __file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    users_frames = [
        frame for frame in frames if frame.filename not in loaders and not frame.filename.startswith("<frozen")
    ]
    place = users_place(error)
    if not place and users_frames:
        place = place_of(users_frames[-1].filename, users_frames[-1].lineno or 0)
    where = f" at {place}" if place else ""
    return f"cannot import: {type(error).__name__}: {error_text(error)}{where}"


def users_place(error: BaseException) -> str:
    """Return file:line of the innermost frame in a user's file, which is not Python's, a package's or rlctl's.

    For a syntax error, return the line that the parser refused. Return "" if no frame is in a user's file.
    """
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return place_of(error.filename, error.lineno or 0)
    users_frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return place_of(users_frames[-1].filename, users_frames[-1].lineno or 0) if users_frames else ""


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not any(Path(file).is_relative_to(folder) for folder in _LIBRARIES)


def error_text(error: BaseException) -> str:
    """Return an error's message as one line of at most `MAX_DETAIL` characters."""
    return shorten_text(message_of(error))


def message_of(error: BaseException) -> str:
    """Return an error's message. An exception of a user may fail to give one."""
    try:
        return str(error)
    except BaseException as second:  # `__str__` may be the user's code
        return f"its __str__ raised {type(second).__name__}"


def shorten_text(text: str) -> str:
    """Return the text as one line of at most `MAX_DETAIL` characters."""
    line = " ".join(text[: 4 * MAX_DETAIL].split())
    return line if len(line) <= MAX_DETAIL and len(text) <= 4 * MAX_DETAIL else f"{line[:MAX_DETAIL]}..."


def raised_at(error: BaseException, function: Callable[..., Any], caller: str) -> str:
    """Return file:line of the innermost frame in the file that defines `function`.

    If there is none, return that in any user's file, else the innermost of all. caller: the file that called the
    function; its frames do not count.
    """
    frames = traceback.extract_tb(error.__traceback__)
    code = _code(function)
    function_frames = [frame for frame in frames if code and frame.filename == code.co_filename]
    if not function_frames and (place := users_place(error)):
        return place
    candidates = function_frames or [frame for frame in frames if frame.filename != caller]
    if not candidates:
        return defined_at(function)
    innermost = candidates[-1]
    return place_of(innermost.filename, innermost.lineno or 0)


def raised_inside(error: BaseException, *callers: str) -> bool:
    """Return True if code inside the called function raised, and False if the call itself failed.

    A call itself fails, for example, if the function does not take the arguments. callers: files of rlctl through which
    the call went.
    """
    return any(frame.filename not in callers for frame in traceback.extract_tb(error.__traceback__))


def looks_like_bug(raised: str) -> bool:
    """Return True if an error is most likely a bug. raised: a text such as "... raised AttributeError at my.py:3"."""
    kind = raised.partition("raised ")[2].partition(" ")[0]
    return kind in (
        "AttributeError",
        "ImportError",
        "ModuleNotFoundError",
        "NameError",
        "TypeError",
        "UnboundLocalError",
    )


def defined_at(function: Callable[..., Any]) -> str:
    """Return file:line of the function's definition; "" if Python does not know it."""
    code = _code(function)
    return place_of(code.co_filename, code.co_firstlineno) if code else ""


def _code(function: Callable[..., Any]) -> CodeType | None:
    """Return the code object of a function, or of an object that can be called; None if there is none."""
    try:
        plain = inspect.unwrap(function.func if isinstance(function, partial) else function)
    except Exception:  # `__wrapped__` may be the user's code
        return None
    # A function has code itself. An object that can be called has the code of its class's `__call__`.
    for candidate in (plain, vars(type(plain)).get("__call__")):
        code = getattr(candidate, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def place_of(file: str, line: int) -> str:
    """Return "file:line". The path of a file inside the current directory is relative."""
    path = Path(file)
    try:
        current_folder = Path.cwd()
    except OSError:  # the user's code may have removed the current directory
        return f"{path}:{line}"
    return f"{path.relative_to(current_folder) if path.is_relative_to(current_folder) else path}:{line}"
