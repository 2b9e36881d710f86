"""Scripted policy: a player plays an episode with given texts of the turns, without a model or a tokenizer."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np

from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.plain_chat import TOOLS_MARK, text_bytes
from rlctl.environments.tool_formats import ToolCall
from rlctl.environments.tool_schema import Schema
from rlctl.generation.requests import Completion, TurnRequest

# Methods of `EnvironmentPool` that act on one episode. Their first argument is the episode's id.
_ACTIONS = ("reset", "call", "step", "reward", "close")


@dataclass(frozen=True)
class ScriptedPolicy:
    """`Policy` that says one of these texts in each turn. Each byte of a text is a token."""

    texts: Sequence[str]

    async def sample(self, request: TurnRequest) -> Completion:
        tokens = np.frombuffer(text_bytes(self.texts[request.id.turn]), np.uint8).astype(np.int32)
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


@dataclass
class AgentScript:
    """`Policy` of one agent that calls each tool of its requests once, and then repeats a few texts in turn.

    calls: returns the texts that call tools with these schemas.
    """

    calls: Callable[[list[Schema]], list[str]]
    texts: Sequence[str]
    # Texts that call the tools in the first prompt with tools; None before that prompt.
    _tool_turns: list[str] | None = None

    async def sample(self, request: TurnRequest) -> Completion:
        prompt = bytes(request.prompt_tokens).decode(errors="replace")
        _, mark, tools_text = prompt.rpartition(TOOLS_MARK)
        if self._tool_turns is None and mark:
            # Texts of later messages stand behind the JSON of the tools.
            tools, _ = json.JSONDecoder().raw_decode(tools_text)
            self._tool_turns = self.calls(tools)
        tool_turns = self._tool_turns or []
        turn = request.id.turn
        if turn < len(tool_turns):
            text = tool_turns[turn]
        else:
            text = self.texts[(turn - len(tool_turns)) % len(self.texts)]
        # `ScriptedPolicy` takes the text at the turn's index.
        return await ScriptedPolicy([text] * (turn + 1)).sample(request)


def call_text(call: ToolCall) -> str:
    """Return the text of a turn that calls a tool."""
    call_json = json.dumps({"name": call.name, "arguments": call.arguments}, default=str)
    # An argument may contain the text of the end mark, which must not end the call.
    return f"<tool_call>{call_json.replace('<', chr(92) + 'u003c')}</tool_call>"


@dataclass
class TimedAction:
    """One action of an episode, and its time."""

    # Name of the pool's method.
    kind: str
    # Arguments without the episode's id.
    arguments: tuple[Any, ...]
    outcome: "Future[Any]"
    began: float = field(default_factory=perf_counter)
    # Seconds until the outcome was known.
    seconds: float = 0.0


class TimedPool:
    """`EnvironmentPool` that records the actions of its episodes, in order."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        self.actions: list[TimedAction] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._pool, name)
        if name not in _ACTIONS:
            return method

        def act(*arguments: Any) -> "Future[Any]":
            action = TimedAction(name, arguments[1:], method(*arguments))
            self.actions.append(action)
            action.outcome.add_done_callback(lambda _: self._end_action(action))
            return action.outcome

        return act

    def _end_action(self, action: TimedAction) -> None:
        action.seconds = perf_counter() - action.began
