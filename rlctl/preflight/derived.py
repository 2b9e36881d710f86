"""Cached fields that are computed from other fields. The cache keeps the value or the error."""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

from rlctl.config.errors import BrokenValueError

T = TypeVar("T")


class NotKnownError(Exception):
    """A value cannot be computed yet, for example because the device is not known."""


class derived(Generic[T]):
    """A cached property that also caches its error.

    A `BrokenValueError` or `NotKnownError` is raised again for every reader. So a broken value ends the checks that
    read it, and no others.
    """

    def __init__(self, rule: Callable[[Any], T]) -> None:
        self._rule = rule
        self.__doc__ = rule.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        # The class name is a part of the cache key, because a subclass's rule may call `super()` for the rule that it
        # overrides.
        self._place = f"{owner.__name__}.{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        # The instance's `__dict__` is the cache, because a frozen dataclass refuses `setattr`.
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
