"""Messages that eight clients send back for a model that thinks: thinking kept or dropped, rows of eight turns.

The README's table of clients has these figures.
"""

import asyncio
import inspect
import json
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from rlctl.environments.agents import anthropic_messages, chat_completions, responses
from tests.system import agent_clients
from tests.system.test_agent_sdks import AGENTS
from tests.unit.environments.agents.served import END, Served

Serve = Callable[..., Served]
# Agent -> its thinking as it is sent back, and the rows of eight turns.
KEPT = {
    "calculator:run": ('"reasoning_content": "hm"', 1),
    "here:openai_async": ('"reasoning_content": "hm"', 1),
    "langgraph_agent:run": ("", 1),
    "openai_agents:run": ("", 1),
    "openai_agents:run_responses": ('"type": "reasoning"', 1),
    "pydantic_ai_agent:run": ('"reasoning_content": "hm"', 1),
    "pydantic_ai_agent:run_anthropic": ('"thinking": "hm"', 1),
    "smolagents_agent:run": ("", 1),
    "smolagents_agent:run_code": ("", 1),
    # Two of its eight turns have no call: it leaves them out.
    "here:mini_swe_agent": ('"reasoning_content": "hm"', 3),
}
THOUGHT = "<think>hm</think>\n\nLet me see."
CODE = (f"{THOUGHT}\n<code>\nprint(calculate('2 + 2'))\n</code>", f"{THOUGHT}\n<code>\nfinal_answer(4)\n</code>")


def call(name: str, **arguments: Any) -> str:
    return f"{THOUGHT}<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def turns_of(agent: str) -> tuple[str, ...]:
    """Return turns that the agent takes, again and again."""
    calculate = call("calculate", expression="2 + 2")
    if agent == "smolagents_agent:run_code":
        return CODE
    if agent == "smolagents_agent:run":
        return calculate, calculate, call("final_answer", answer="4")
    if agent == "here:mini_swe_agent":
        return call("bash", command="ls"), THOUGHT, call("bash", command="ls")
    return calculate, calculate, call("answer", value=4), THOUGHT


@pytest.mark.long  # SDKs take seconds to import
@pytest.mark.parametrize("agent", AGENTS)
def test_what_a_client_keeps(agent: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(AGENTS[agent][0]) is None:
        pytest.skip(f"{AGENTS[agent][0]} is not installed: pip install -e '.[agents-test]'")
    bodies = list[Any]()
    for api in (chat_completions, anthropic_messages, responses):
        own = api.read

        def read(body: dict[str, Any], own: Any = own) -> Any:
            bodies.append(body)
            return own(body)

        monkeypatch.setattr(api, "read", read)
    turns, (thinking, rows) = turns_of(agent), KEPT[agent]
    served = serve(lambda number: f"{turns[number % len(turns)]}{END}" if number < 8 else "max_turns")
    task = SimpleNamespace(row={"agent": agent, "expressions": ["2 + 2"] * 9})
    with pytest.raises(Exception, match=r"environment\.max_turns"):
        value = agent_clients.run(task, served.url, served.key)
        asyncio.run(value) if inspect.iscoroutine(value) else value
    served.settle()
    sent_back = json.dumps(bodies)
    assert thinking in sent_back and (thinking or "hm" not in sent_back)
    assert len(served.kept) == 8
    continued = {each.after for each in served.asks if each.number < 8}
    assert len(set(range(8)) - continued) == rows, served.session.rewritten
