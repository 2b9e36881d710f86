"""Agents of smolagents: `agent: smolagents_agent.py:run`, or `:run_code` for one that writes Python.

Needs `pip install "smolagents[openai]"`. Their system prompt has thousands of tokens, and the recipe's tiny model 256
positions.
"""

from openai import OpenAI
from problems import Problems, value_of
from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool

CLIENT = OpenAI(base_url="http://unused", api_key="unused")


@tool
def calculate(expression: str) -> str:
    """Compute.

    Args:
        expression: Numbers and + - *.
    """
    return f"{value_of(expression):.10g}"


def run(task, base_url, api_key, kind=ToolCallingAgent):
    """Play one episode; return the share of right answers."""
    client, problems = CLIENT.with_options(base_url=base_url, api_key=api_key), Problems(task.row)
    agent = kind([calculate], OpenAIModel("policy", client=client), max_steps=8, verbosity_level=LogLevel.OFF)
    for prompt in problems.prompts():
        said = agent.run(prompt, reset=False)
        try:
            problems.answer(float(said))
        except (TypeError, ValueError):
            continue
    return problems.reward()


def run_code(task, base_url, api_key):
    """Play one episode with an agent that writes code."""
    return run(task, base_url, api_key, CodeAgent)
