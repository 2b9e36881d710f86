"""Agent of the recipe calculator-agent-tiny: the plain `openai` SDK, two tools, and nothing of rlctl's.

The problem is in the row; the policy is asked at `base_url`. The client is made once a process: a client of its own
for each task costs 26 ms of CPU, and `with_options` 0.07 ms.
"""

import ast
import json
import operator

from openai import OpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
NUMBER = {"type": "object", "properties": {"value": {"type": "number"}}, "required": ["value"]}
TEXT = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [
    {"type": "function", "function": {"name": "answer", "description": "Give the answer.", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "calculate", "description": "Compute.", "parameters": TEXT}},
]
CLIENT = OpenAI(base_url="http://unused", api_key="unused")


def run(task, base_url, api_key):
    """Play one episode; return 1.0 if the answer is right."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    expression = task.row["expression"]
    asked = f"Compute {expression}. Use the tool calculate, then give the result to the tool answer."
    messages = [{"role": "user", "content": asked}]
    for _ in range(4):
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return 0.0
        for call in message.tool_calls:
            try:
                arguments = json.loads(call.function.arguments)
                if call.function.name == "answer":
                    return float(abs(float(arguments["value"]) - value(expression)) < 1e-6)
                result = f"{value(arguments['expression']):.10g}"
            except (ValueError, TypeError, KeyError, SyntaxError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def value(expression):
    """Return the value of an arithmetic expression."""

    def of(node):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        raise ValueError("only numbers and + - * are allowed")

    return of(ast.parse(str(expression).strip(), mode="eval").body)
