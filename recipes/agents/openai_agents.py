"""Agent of the OpenAI Agents SDK: `rlctl train grpo calculator-agent-tiny agent=openai_agents.py:run`.

Needs `pip install openai-agents`. `run` speaks Chat Completions, `run_responses` the Responses API. The clients of all
agents of a process are one: coroutines share an event loop.
"""

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from problems import Problems

set_tracing_disabled(True)  # it calls home otherwise
CLIENT = AsyncOpenAI(base_url="http://unused", api_key="unused")


async def run(task, base_url, api_key, model=OpenAIChatCompletionsModel):
    """Play one episode; return the share of right answers."""
    problems, items = Problems(task.row), []
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    tools = [function_tool(problems.answer), function_tool(problems.calculate)]
    agent = Agent("calculator", model=model("policy", client), tools=tools)
    for prompt in problems.prompts():
        result = await Runner.run(agent, [*items, {"role": "user", "content": prompt}])
        items = result.to_input_list()
    return problems.reward()


async def run_responses(task, base_url, api_key):
    """Play one episode by the Responses API."""
    return await run(task, base_url, api_key, OpenAIResponsesModel)
