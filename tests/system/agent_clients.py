"""Agents for tests, besides those of recipes/agents. Each uses another unmodified client library."""

import importlib
import os
import sys
from functools import cache

from rlctl.config.builtin import RECIPES

sys.path.insert(0, str(RECIPES / "agents"))
# Without this variable litellm downloads a table of prices.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
# Without this variable mini-swe-agent repeats a request ten times after a status 400, for four minutes.
os.environ.setdefault("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", "1")


def run(task, base_url, api_key):  # type: ignore[no-untyped-def]
    """Run the agent that the row names, as `module:function`."""
    module, _, function = task.row["agent"].partition(":")
    agents = globals() if module == "here" else vars(importlib.import_module(module))
    return agents[function](task, base_url, api_key)


async def openai_async(task, base_url, api_key):  # type: ignore[no-untyped-def]
    """Stream the answers of the plain asynchronous SDK."""
    from calculator import TOOLS, use
    from problems import Problems

    client = _async_client().with_options(base_url=base_url, api_key=api_key)
    messages = []
    problems = Problems(task.row)
    for prompt in problems.prompts():
        messages.append({"role": "user", "content": prompt})
        while not problems.answered:
            async with client.chat.completions.stream(model="policy", messages=messages, tools=TOOLS) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [use(problems, call) for call in message.tool_calls]
    return problems.reward()


def stopping(task, base_url, api_key):  # type: ignore[no-untyped-def]
    """Request a turn with a stop text that is one token of the tiny model."""
    from calculator import CLIENT, TOOLS
    from problems import Problems

    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages = []
    for prompt in Problems(task.row).prompts():
        messages.append({"role": "user", "content": prompt})
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, stop=["}}"])
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    return 0.0


def mini_swe_agent(task, base_url, api_key):  # type: ignore[no-untyped-def]
    """Run mini-swe-agent's default agent. Its commands are not executed: a tiny model wrote them."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel
    from problems import Problems

    class Nowhere:
        config = None

        def execute(self, action, cwd=""):  # type: ignore[no-untyped-def]
            return {"output": "", "returncode": 0, "exception_info": ""}

        def get_template_vars(self, **kwargs):  # type: ignore[no-untyped-def]
            return {}

        def serialize(self):  # type: ignore[no-untyped-def]
            return {}

    endpoint = {"api_base": base_url, "api_key": api_key}
    model = LitellmModel(model_name="openai/policy", model_kwargs=endpoint, cost_tracking="ignore_errors")
    templates = {"system_template": "You have bash.", "instance_template": "{{task}}"}
    agent = DefaultAgent(model, Nowhere(), **templates, step_limit=9, max_consecutive_format_errors=0)
    agent.run(next(Problems(task.row).prompts()))
    return 0.0


@cache
def _async_client():  # type: ignore[no-untyped-def]
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url="http://unused", api_key="unused")
