"""Agent of pydantic-ai: `rlctl train grpo calculator-agent-tiny agent=pydantic_ai_agent.py:run`.

Needs `pip install "pydantic-ai-slim[openai,anthropic]"`. `run` speaks Chat Completions, `run_anthropic` the Messages
API. Await `agent.run`: `run_sync` has another event loop, and clients belong to one.
"""

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from problems import Problems
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = AsyncOpenAI(base_url="http://unused", api_key="unused")
ANTHROPIC = AsyncAnthropic(base_url="http://unused", api_key="unused")


async def run(task, base_url, api_key):
    """Play one episode; return the share of right answers."""
    client = OPENAI.with_options(base_url=base_url, api_key=api_key)
    return await played(task, OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client)))


async def run_anthropic(task, base_url, api_key):
    """Play one episode by Anthropic's API, whose address has no `/v1`."""
    client = ANTHROPIC.with_options(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    return await played(task, AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client)))


async def played(task, model):
    """Play one episode with a model."""
    problems, history = Problems(task.row), []
    agent = Agent(model, tools=[problems.answer, problems.calculate])
    for prompt in problems.prompts():
        history = (await agent.run(prompt, message_history=history)).all_messages()
    return problems.reward()
