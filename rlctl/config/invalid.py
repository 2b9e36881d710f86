"""A stand-in for a value that was found wrong, so that everything else can still be checked."""

from typing import Any, NoReturn


class BrokenValueError(Exception):
    """A check needs a value that was already reported as wrong."""


def _refuse(*_: object, **__: object) -> NoReturn:
    raise BrokenValueError


class _Broken:
    """Whatever is asked of it, it raises BrokenValueError."""

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __contains__ = __call__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __str__ = __format__ = __fspath__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __int__ = __float__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __index__ = _refuse


BROKEN: Any = _Broken()
