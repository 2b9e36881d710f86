"""Agent that is a command: `agent: {command: "python command_line.py"}`, run once a rollout.

The SDK finds its address and key in the environment's variables. The last line of the output is the value.
"""

import json
import os

from calculator import TOOLS, use
from openai import OpenAI
from problems import Problems

client = OpenAI()  # OPENAI_BASE_URL, OPENAI_API_KEY
problems, messages = Problems(json.loads(os.environ["RLCTL_TASK"])["row"]), []
for prompt in problems.prompts():
    messages.append({"role": "user", "content": prompt})
    while not problems.answered:
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        messages += [use(problems, call) for call in message.tool_calls]
print(json.dumps({"reward": problems.reward()}))
