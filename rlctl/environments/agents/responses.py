"""Adapter of the Responses API of OpenAI: its requests, answers, streams and errors."""

import json
from collections.abc import Iterator
from typing import Any

from rlctl.environments.agents import chat_completions
from rlctl.environments.agents.client_request import (
    ClientRequest,
    Parameters,
    RefusedError,
    called,
    checked_messages,
    function_schema,
    text_of,
)
from rlctl.environments.agents.client_turn import ClientTurn
from rlctl.environments.contract import Message

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_HARMLESS = (
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
error, stream_error, waiting = chat_completions.error, chat_completions.stream_error, chat_completions.waiting


def read(body: dict[str, Any]) -> ClientRequest:
    """Return the turn that a request asks for. Raises RefusedError."""
    left = Parameters(dict(body))
    instructions = left.take("instructions", str, "")
    given = left.take("input", (str, list), [])
    tools, hosted = _read_tools(left.take("tools", list, []))
    left.counted += [f"unenforced/tool_{kind}" for kind in hosted]
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += [{"role": "user", "content": given}] if isinstance(given, str) else _read_items(given)
    text = left.body.get("text")
    if isinstance(text, dict) and (text.get("format") or {"type": "text"}) == {"type": "text"}:
        left.ignore(["text"])
    choice = left.body.get("tool_choice")
    if choice in ("auto", "none"):
        left.ignore(["tool_choice"])
    if left.body.get("parallel_tool_calls"):
        left.ignore(["parallel_tool_calls"])
    left.override()
    left.leave_unenforced(("tool_choice", "text", "parallel_tool_calls", "reasoning", "max_tool_calls"))
    left.refuse(_REFUSED)
    left.ignore(_HARMLESS)
    before = left.take("previous_response_id", str, "")
    return ClientRequest(
        model=left.take("model", str, "policy"),
        # A continued response brings no opening: the session puts it before these messages.
        messages=messages if before else checked_messages(messages),
        tools=tools,
        most=left.take("max_output_tokens", int),
        template_kwargs=left.take_template_kwargs(),
        calls=choice != "none",
        stream=bool(left.take("stream", bool, False)),
        continues=before.removeprefix("resp_"),
        counted=left.rest(),
    )


def write(said: ClientTurn) -> dict[str, Any]:
    """Return the answer of a request that is not streamed."""
    cut = said.finish == "length"
    usage = {
        "input_tokens": said.prompt_length,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": len(said.tokens),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": said.prompt_length + len(said.tokens),
    }
    return {
        **_response_head(said, "incomplete" if cut else "completed"),
        "output": _items(said),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": usage,
    }


def stream(said: ClientTurn) -> Iterator[bytes]:
    """Yield the server-sent events of a turn: each item is one delta."""
    whole = write(said)
    events: list[tuple[str, dict[str, Any]]] = []
    begun = {**_response_head(said, "in_progress"), "output": [], "usage": None}
    events += [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
    for index, item in enumerate(whole["output"]):
        events += _item_events(index, item)
    events.append((f"response.{whole['status']}", {"response": whole}))
    for number, (kind, data) in enumerate(events):
        told = json.dumps({"type": kind, "sequence_number": number, **data})
        yield f"event: {kind}\ndata: {told}\n\n".encode()


def _item_events(index: int, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events of one item of the output."""
    place = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        (part,) = item["content"]
        at = {**place, "content_index": 0}
        yield "response.output_item.added", {"output_index": index, "item": {**item, "content": []}}
        yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
        yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
        yield "response.content_part.done", {**at, "part": part}
    elif item["type"] == "function_call":
        yield "response.output_item.added", {"output_index": index, "item": {**item, "arguments": ""}}
        yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
        done = {**place, "arguments": item["arguments"], "name": item["name"]}
        yield "response.function_call_arguments.done", done
    else:
        yield "response.output_item.added", {"output_index": index, "item": item}
    yield "response.output_item.done", {"output_index": index, "item": item}


def _read_items(items: list[Any]) -> list[Message]:
    """Return items in our form: those of one turn of the assistant become one message."""
    found: list[Message] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        if kind == "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise RefusedError(f"input: each message has a role of {', '.join(_ROLES)}")
            message: Message = {"role": role, "content": text_of(item.get("content"))}
            last = found[-1] if found else None
            if role == "assistant" and last and last["role"] == "assistant":
                last["content"] += message["content"]
            else:
                found.append(message)
        elif kind == "function_call":
            if not found or found[-1]["role"] != "assistant":
                found.append({"role": "assistant", "content": ""})
            call = called(item.get("name"), item.get("arguments"), item.get("call_id"))
            found[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            number, output = str(item.get("call_id") or ""), text_of(item.get("output"))
            found.append({"role": "tool", "content": output, "tool_call_id": number})
        elif kind != "reasoning":
            raise RefusedError(f"input: this policy reads no {kind}")
    return found


def _read_tools(given: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions, and the kinds of tools that the policy is not shown.

    Codex brings a web search, namespaces and tools of free text besides its functions, and works without them. Raises
    RefusedError if no tool is a function.
    """
    kinds = [each.get("type") if isinstance(each, dict) else type(each).__name__ for each in given]
    others = [
        kind if isinstance(kind, str) and kind.isidentifier() else "other" for kind in kinds if kind != "function"
    ]
    if others and len(others) == len(given):
        raise RefusedError(f"tools: this policy calls functions, and no {others[0]}")
    return [function_schema(each) for each, kind in zip(given, kinds) if kind == "function"], others


def _response_head(said: ClientTurn, status: str) -> dict[str, Any]:
    asked = said.asked
    tools = [{"type": "function", "strict": False, **each["function"]} for each in asked.tools]
    return {
        "id": f"resp_{said.id}",
        "object": "response",
        "created_at": said.created,
        "status": status,
        "model": asked.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "previous_response_id": f"resp_{asked.continues}" if asked.continues else None,
        "tool_choice": "auto" if asked.calls else "none",
        "tools": tools,
        "temperature": None,
        "top_p": None,
    }


def _items(said: ClientTurn) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if said.reasoning:
        thought = [{"type": "reasoning_text", "text": said.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{said.id}", "summary": [], "content": thought})
    if said.content or not said.calls:
        text = [{"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}]
        own = {"type": "message", "id": f"msg_{said.id}", "role": "assistant", "status": "completed"}
        items.append({**own, "content": text})
    for each in said.calls:
        text_of_call = json.dumps(each.arguments, ensure_ascii=False)
        own = {"type": "function_call", "id": f"fc_{each.id}", "call_id": each.id, "status": "completed"}
        items.append({**own, "name": each.name, "arguments": text_of_call})
    return items
