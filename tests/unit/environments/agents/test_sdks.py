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
# Agent -> (its thinking as the client sends it back, number of rows that eight turns give).
THINKING_AND_ROWS = {
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


def write_call(name: str, **arguments: Any) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"{THOUGHT}<tool_call>{call}</tool_call>"


def turns_of(agent: str) -> tuple[str, ...]:
    """Return the texts of turns that this agent can process. They are repeated for all eight turns."""
    calculate = write_call("calculate", expression="2 + 2")
    if agent == "smolagents_agent:run_code":
        return CODE
    if agent == "smolagents_agent:run":
        return calculate, calculate, write_call("final_answer", answer="4")
    if agent == "here:mini_swe_agent":
        return write_call("bash", command="ls"), THOUGHT, write_call("bash", command="ls")
    return calculate, calculate, write_call("answer", value=4), THOUGHT


@pytest.mark.long  # SDKs take seconds to import
@pytest.mark.parametrize("agent", AGENTS)
def test_what_a_client_keeps(agent: str, serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec(AGENTS[agent][0]) is None:
        pytest.skip(f"{AGENTS[agent][0]} is not installed: pip install -e '.[agents-test]'")
    bodies = list[Any]()
    for api in (chat_completions, anthropic_messages, responses):
        read_request = api.read_request

        def note_and_read(body: dict[str, Any], read_request: Any = read_request) -> Any:
            bodies.append(body)
            return read_request(body)

        monkeypatch.setattr(api, "read_request", note_and_read)
    turns = turns_of(agent)
    thinking, num_rows = THINKING_AND_ROWS[agent]
    served = serve(lambda number: f"{turns[number % len(turns)]}{END}" if number < 8 else "max_turns")
    task = SimpleNamespace(row={"agent": agent, "expressions": ["2 + 2"] * 9})
    with pytest.raises(Exception, match=r"environment\.max_turns"):
        outcome = agent_clients.run(task, served.url, served.key)
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)
    served.settle()
    sent_back = json.dumps(bodies)
    assert thinking in sent_back and (thinking or "hm" not in sent_back)
    assert len(served.kept_lengths) == 8
    continued_turns = {ask.after for ask in served.asks if ask.number < 8}
    assert len(set(range(8)) - continued_turns) == num_rows, served.session.rewritten
