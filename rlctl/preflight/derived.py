"""Fields that follow from others, each a value or its problem."""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

from rlctl.config.errors import BrokenValueError

T = TypeVar("T")


class NotKnownError(Exception):
    """A value that depends on something that is not known yet, such as the device."""


class derived(Generic[T]):
    """A field that follows from others: worked out once, and kept as its value or as its problem.

    A problem is raised for every reader, `BrokenValueError` or `NotKnownError`. So a broken value ends the checks that
    need it, and no others.
    """

    def __init__(self, rule: Callable[[Any], T]) -> None:
        self._rule = rule
        self.__doc__ = rule.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        # A rule that overrides another one may read it by `super()`: each has a place of its own.
        self._place = f"{owner.__name__}.{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        # The instance's own dictionary keeps the outcome: frozen dataclasses take no attribute.
        attributes = vars(instance)
        if self._place not in attributes:
            try:
                attributes[self._place] = self._rule(instance)
            except (BrokenValueError, NotKnownError) as problem:
                attributes[self._place] = problem
        outcome = attributes[self._place]
        if isinstance(outcome, BrokenValueError | NotKnownError):
            raise outcome
        return outcome
