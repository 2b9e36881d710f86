"""Separate seeding of Python's `random` for each episode, although many episodes run as threads of one process.

All rollouts of a group have the same seed. So an environment that draws its task with `random` in `reset`, as TRL's
examples do, gives each rollout of a group the same task, whichever other episodes run in the process. NumPy's global
generator is not seeded: an environment that uses NumPy takes the parameter `seed` in `reset`.
"""

import random
from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any, TypeVar

Result = TypeVar("Result")

_fallback = random.Random()
_current: ContextVar[random.Random] = ContextVar("generator of the episode", default=_fallback)


class _EpisodeRandom(random.Random):
    """The generator behind the functions of `random`. Each call draws from the generator of the caller's episode."""

    def random(self) -> float:
        return _current.get().random()

    def getrandbits(self, k: int, /) -> int:
        return _current.get().getrandbits(k)

    def seed(self, a: Any = None, version: int = 2) -> None:
        _current.get().seed(a, version)

    def getstate(self) -> tuple[Any, ...]:
        return _current.get().getstate()

    def setstate(self, state: tuple[Any, ...]) -> None:
        _current.get().setstate(state)

    def gauss(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        return _current.get().gauss(mu, sigma)


def install() -> None:
    """Replace the functions of `random` by functions that draw from the current episode's generator.

    Call this before the import of user code, because user code may keep references to the old functions.
    """
    python_generator = random.seed.__self__  # type: ignore[attr-defined]
    episode_generator = _EpisodeRandom()
    for name in random.__all__:
        if getattr(getattr(random, name), "__self__", None) is python_generator:
            setattr(random, name, getattr(episode_generator, name))


def use(generator: random.Random) -> None:
    """Make `random` draw from `generator` in this thread from now on."""
    _current.set(generator)


async def await_using(generator: random.Random, work: Awaitable[Result]) -> Result:
    """Await work whose `random` draws from `generator`. Other coroutines on the loop draw from their own generators."""
    use(generator)
    return await work
