"""Adapter of OpenAI's Responses API: reads requests, and writes answers, streams and errors."""

import json
from collections.abc import Iterator
from typing import Any

from rlctl.environments.agents import chat_completions
from rlctl.environments.agents.client_request import (
    ClientRequest,
    Parameters,
    RefusedError,
    check_messages,
    function_schema,
    read_call,
    text_of,
)
from rlctl.environments.agents.client_turn import ClientTurn
from rlctl.environments.contract import Message

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_IGNORED_PARAMETERS = (
    "include",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "user",
    "prompt_cache_key",
    "prompt_cache_retention",
    "truncation",
    "top_logprobs",
)
_REFUSED = {
    "background": "this endpoint answers a request while its client waits",
    "conversation": "this endpoint keeps none: send the items, or previous_response_id",
    "prompt": "this endpoint keeps no prompts",
}
# Equal in the Chat Completions API.
error_body = chat_completions.error_body
error_event = chat_completions.error_event
waiting_event = chat_completions.waiting_event


def read_request(body: dict[str, Any]) -> ClientRequest:
    """Return the request in the body of an HTTP request. Raises RefusedError."""
    parameters = Parameters(dict(body))
    instructions = parameters.take("instructions", str, "")
    sent = parameters.take("input", (str, list), [])
    tools, hosted = _read_tools(parameters.take("tools", list, []))
    parameters.counted += [f"unenforced/tool_{kind}" for kind in hosted]
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += [{"role": "user", "content": sent}] if isinstance(sent, str) else _read_items(sent)
    # Values that ask for nothing special are ignored. Others stay in the body, and are counted as unenforced.
    text = parameters.body.get("text")
    if isinstance(text, dict) and (text.get("format") or {"type": "text"}) == {"type": "text"}:
        parameters.ignore(["text"])
    choice = parameters.body.get("tool_choice")
    if choice in ("auto", "none"):
        parameters.ignore(["tool_choice"])
    if parameters.body.get("parallel_tool_calls"):
        parameters.ignore(["parallel_tool_calls"])
    parameters.override()
    parameters.leave_unenforced(("tool_choice", "text", "parallel_tool_calls", "reasoning", "max_tool_calls"))
    parameters.refuse(_REFUSED)
    parameters.ignore(_IGNORED_PARAMETERS)
    previous_id = parameters.take("previous_response_id", str, "")
    return ClientRequest(
        model=parameters.take("model", str, "policy"),
        # A request that continues a response has only new messages. The session adds the earlier ones and checks all.
        messages=messages if previous_id else check_messages(messages),
        tools=tools,
        max_tokens=parameters.take("max_output_tokens", int),
        template_kwargs=parameters.take_template_kwargs(),
        may_call=choice != "none",
        stream=bool(parameters.take("stream", bool, False)),
        previous_id=previous_id.removeprefix("resp_"),
        counted=parameters.count_rest(),
    )


def answer_body(turn: ClientTurn) -> dict[str, Any]:
    """Return the body of the answer to a request without streaming."""
    is_cut = turn.finish == "length"
    usage = {
        "input_tokens": turn.prompt_length,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(turn.tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt_length + len(turn.tokens),
    }
    return {
        **_response_head(turn, "incomplete" if is_cut else "completed"),
        "output": _output_items(turn),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": usage,
    }


def answer_events(turn: ClientTurn) -> Iterator[bytes]:
    """Yield the server-sent events of a turn: the begun response, each item of the output, the ended response.

    The turn is sampled already, so each item comes as one delta.
    """
    ended_response = answer_body(turn)
    begun_response = {**_response_head(turn, "in_progress"), "output": [], "usage": None}
    # (type, fields) of each event.
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun_response}),
        ("response.in_progress", {"response": begun_response}),
    ]
    for index, item in enumerate(ended_response["output"]):
        events += _item_events(index, item)
    # `response.completed`, or `response.incomplete` for a turn that met its limit of tokens.
    events.append((f"response.{ended_response['status']}", {"response": ended_response}))
    for number, (kind, fields) in enumerate(events):
        event = json.dumps({"type": kind, "sequence_number": number, **fields})
        yield f"event: {kind}\ndata: {event}\n\n".encode()


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (type, fields) of each event of one item of the output."""
    place = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        part_place = {**place, "content_index": 0}
        yield "response.output_item.added", {"output_index": index, "item": {**item, "content": []}}
        yield "response.content_part.added", {**part_place, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**part_place, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**part_place, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**part_place, "part": part}
    elif item["type"] == "function_call":
        yield "response.output_item.added", {"output_index": index, "item": {**item, "arguments": ""}}
        yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
        done = {**place, "arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", done
    else:
        yield "response.output_item.added", {"output_index": index, "item": item}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _read_items(items: list[Any]) -> list[Message]:
    """Return sent items as messages for the chat template. The items of one assistant turn become one message."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise RefusedError(f"input: each message has a role of {', '.join(_ROLES)}")
            message: Message = {"role": role, "content": text_of(item.get("content"))}
            last_message = messages[-1] if messages else None
            if role == "assistant" and last_message and last_message["role"] == "assistant":
                last_message["content"] += message["content"]
            else:
                messages.append(message)
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            call = read_call(item.get("name"), item.get("arguments"), item.get("call_id"))
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            call_id = str(item.get("call_id") or "")
            messages.append({"role": "tool", "content": text_of(item.get("output")), "tool_call_id": call_id})
        elif kind != "reasoning":
            raise RefusedError(f"input: this policy reads no {kind}")
    return messages


def _read_tools(tools: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the schemas of the functions, and the kinds of all other tools, which the policy does not see.

    Codex sends a web search, namespaces and free-text tools too, and works without these. Raises RefusedError if there
    are tools and none is a function.
    """
    functions: list[Any] = []
    hosted_kinds: list[str] = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        if kind == "function":
            functions.append(tool)
        else:
            hosted_kinds.append(kind if isinstance(kind, str) and kind.isidentifier() else "other")
    if hosted_kinds and not functions:
        raise RefusedError(f"tools: this policy calls functions, and no {hosted_kinds[0]}")
    return [function_schema(function) for function in functions], hosted_kinds


def _response_head(turn: ClientTurn, status: str) -> dict[str, Any]:
    """Return the fields of a response other than its output and usage.

    status: `in_progress`, `completed` or `incomplete`. Fields without a meaning here are None or the API's default.
    """
    request = turn.request
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in request.tools]
    return {
        "id": f"resp_{turn.id}",
        "object": "response",
        "created_at": turn.created,
        "status": status,
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": f"resp_{request.previous_id}" if request.previous_id else None,
        "tool_choice": "auto" if request.may_call else "none",
        "tools": tools,
        "temperature": None,
        "top_p": None,
    }


def _output_items(turn: ClientTurn) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if turn.reasoning:
        content = [{"type": "reasoning_text", "text": turn.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": content})
    if turn.content or not turn.calls:
        items.append(
            {
                "type": "message",
                "id": f"msg_{turn.id}",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}],
            }
        )
    for call in turn.calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "status": "completed",
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False),
            }
        )
    return items
