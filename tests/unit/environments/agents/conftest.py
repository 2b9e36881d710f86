"""A served session for the `openai` SDK."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlctl.data.chat import Chat
from tests.unit.data.conftest import tokenizer
from tests.unit.environments.agents.served import TOOLED, Served

__all__ = ["tokenizer"]


@pytest.fixture
def serve(tokenizer: Any) -> Iterator[Callable[..., Served]]:
    """Return a function that serves a session with these turns."""
    opened: list[Served] = []

    def make(says: Any, template: str = TOOLED, **more: Any) -> Served:
        opened.append(Served(Chat(tokenizer, template, None), says, **more))
        return opened[-1]

    yield make
    for each in opened:
        each.call(lambda each=each: each.endpoint.close(each.session))
