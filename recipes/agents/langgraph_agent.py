"""Agent of LangGraph: `rlctl train grpo calculator-agent-tiny agent=langgraph_agent.py:run`.

Needs `pip install langgraph langchain-openai`. ChatOpenAI makes an HTTP client for each address; this one is given.
"""

import openai
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from problems import Problems

HTTP = openai.DefaultHttpxClient()


def run(task, base_url, api_key):
    """Play one episode; return the share of right answers."""
    problems, messages = Problems(task.row), []
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, http_client=HTTP)
    agent = create_react_agent(model, [problems.answer, problems.calculate])
    for prompt in problems.prompts():
        messages = agent.invoke({"messages": [*messages, ("user", prompt)]})["messages"]
    return problems.reward()
