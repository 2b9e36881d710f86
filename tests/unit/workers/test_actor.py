"""The host of a worker: an exception of its methods comes back as a value, and the next call is answered."""

from typing import Any

import pytest

from rlctl.workers.actor import WorkerActor
from rlctl.workers.errors import Failure


class Weird(BaseException):
    """An exception without a text."""

    def __str__(self) -> str:
        raise SystemExit(3)


class Own:
    """A worker."""

    def end(self, error: BaseException) -> None:
        raise error

    def double(self, number: int) -> int:
        return 2 * number


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (KeyError("a"), "KeyError", "'a'"),
        (SystemExit(3), "SystemExit", "3"),
        (Weird(), "Weird", "its __str__ raised SystemExit"),
    ],
)
def test_what_a_method_raises_comes_back(threads: int, error: Any, kind: str, text: str) -> None:
    actor = WorkerActor("own-0", Own, {}, None, threads)
    assert actor.build() == (None, None)
    failure, _ = actor.call("end", (error,), {})
    assert isinstance(failure, Failure) and (failure.worker, failure.type, failure.text) == ("own-0", kind, text)
    assert "test_actor.py" in failure.traceback
    assert actor.call("double", (2,), {}) == (None, 4)
