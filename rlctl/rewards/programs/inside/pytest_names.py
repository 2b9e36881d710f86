"""The few names of pytest that tests of data sets use: raises, approx, fail, mark.parametrize. Others raise."""

import math
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rlctl.rewards.programs.inside.stand_ins import UnsupportedTestError

_PARAMETERS = "rlctl_parameters"


class Approximation:
    """A number, or a sequence or dict of numbers, that is equal to near ones."""

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self._expected = expected
        self._relative = rel
        self._absolute = abs

    def __eq__(self, value: object) -> bool:
        return self._is_near(value, self._expected)

    __hash__ = None  # type: ignore[assignment]

    def _is_near(self, value: Any, expected: Any) -> bool:
        if isinstance(expected, list | tuple):
            return (
                isinstance(value, list | tuple)
                and len(value) == len(expected)
                and all(map(self._is_near, value, expected))
            )
        if isinstance(expected, dict):
            return (
                isinstance(value, dict)
                and value.keys() == expected.keys()
                and all(self._is_near(value[key], member) for key, member in expected.items())
            )
        if type(value) in (int, float) and isinstance(expected, int | float):
            return math.isclose(value, expected, rel_tol=self._relative, abs_tol=self._absolute)
        return bool(value == expected)


class Raised:
    """Holds the error of a `raises` block, as pytest's ExceptionInfo does."""

    value: BaseException | None = None

    @property
    def type(self) -> Any:
        """Class of the error."""
        return type(self.value)


@contextmanager
def raises(expected: Any, match: str | None = None) -> Iterator[Raised]:
    """Expect an error of the block."""
    raised = Raised()
    try:
        yield raised
    except expected as error:
        raised.value = error
        if match is not None and not re.search(match, str(error)):
            raise AssertionError(f"{error} does not match {match}") from error
        return
    raise AssertionError(f"did not raise {expected}")


def fail(reason: str = "") -> None:
    """Fail the test."""
    raise AssertionError(reason)


def parametrize(names: Any, values: Any, **_: Any) -> Callable[[Any], Any]:
    """Run a test once for each set of values."""
    listed = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)

    def mark(function: Any) -> Any:
        sets = [dict(zip(listed, value if len(listed) > 1 else (value,))) for value in values]
        outer = getattr(function, _PARAMETERS, [{}])
        setattr(function, _PARAMETERS, [{**first, **second} for first in sets for second in outer])
        return function

    return mark


def expand(function: Any, class_: Any = None) -> list[Callable[[], bool]]:
    """Return one test for each set of a function's parameters. class_: the class whose method it is."""

    def case_of(arguments: dict[str, Any]) -> Callable[[], bool]:
        def run() -> bool:
            if class_ is None:
                function(**arguments)
                return True
            instance = class_()
            if hasattr(instance, "setup_method"):
                instance.setup_method()
            function(instance, **arguments)
            return True

        return run

    return [case_of(arguments) for arguments in getattr(function, _PARAMETERS, [{}])]


def make_module() -> types.ModuleType:
    """Return a module with these names as `pytest`."""
    module = types.ModuleType("pytest")
    marks = types.SimpleNamespace(parametrize=parametrize)
    vars(module).update(raises=raises, approx=Approximation, fail=fail, mark=marks, __getattr__=_refuse_name)
    return module


def _refuse_name(name: str) -> Any:
    raise UnsupportedTestError(f"uses pytest.{name}, which is not among raises, approx, fail and mark.parametrize")
