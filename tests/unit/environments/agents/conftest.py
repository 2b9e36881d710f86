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

    def serve_session(text_of_turn: Any, template: str = TOOLED, **options: Any) -> Served:
        served = Served(Chat(tokenizer, template, None), text_of_turn, **options)
        opened.append(served)
        return served

    yield serve_session
    for served in opened:
        served.close()
