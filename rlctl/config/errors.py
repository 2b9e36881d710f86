"""Errors for the user: each problem of a config is one line with location, key, mistake and remedy."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

# Most letters of each part of a message: location, key, mistake.
LONGEST = 480


@dataclass(frozen=True)
class Problem:
    """One mistake in a config."""

    # `file:line` or `override 2: a.b=c`.
    where: str
    # Dotted key; empty for a whole file.
    key: str
    what: str

    def __str__(self) -> str:
        # The location `override 2: a.b=c` names the key already.
        key = "" if f" {self.key}=" in self.where else self.key
        line = ": ".join(shorten(" ".join(part.split())) for part in (self.where, key, self.what) if part)
        # A command-line argument in another encoding than UTF-8 contains surrogates, which cannot be printed.
        return line.encode("utf-8", "backslashreplace").decode("utf-8")


class UserError(ValueError):
    """Base class of errors that the user can correct. The message has one line for each mistake.

    The command line prints the message without a traceback and exits with `exit_code`.
    """

    # Subclasses set 1 if the input was correct and the work failed.
    exit_code = 2


class ConfigError(UserError):
    """All problems of one config at once, at least one."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


@contextmanager
def locate_errors(where: str, *error_types: type[UserError]) -> Iterator[None]:
    """Turn an error of these types in the block into a ConfigError. where: location to report: a key, an option or a
    file.
    """
    try:
        yield
    except error_types as error:
        raise ConfigError([Problem(where, "", str(error))]) from error


class ModelError(UserError):
    """rlctl cannot use a model or its weights. The message is one line for the user."""


def shorten(text: str, max_letters: int = LONGEST) -> str:
    """Return `text`, with its middle left out if it is longer than `max_letters`."""
    if len(text) <= max_letters:
        return text
    return f"{text[: max_letters * 2 // 3]} ... {text[-(max_letters // 4) :]}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, or the name of its class."""
    return " ".join(str(error).split()) or type(error).__name__


def did_you_mean(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `; did you mean X?` for the nearest candidate; empty if none is as similar as `cutoff`, 0 to 1."""
    if len(word) > LONGEST:
        return ""
    near = get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


class BrokenValueError(Exception):
    """A check needs a value that was already reported as wrong."""


def _refuse(*_: object, **__: object) -> NoReturn:
    raise BrokenValueError


class _Broken:
    """Value on which every operation raises BrokenValueError."""

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __str__ = __format__ = __fspath__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __int__ = __float__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __index__ = _refuse


# Placeholder for a wrong value while the rest of the config is checked.
BROKEN: Any = _Broken()
