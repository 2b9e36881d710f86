"""Adapter of Anthropic's Messages API: reads requests, and writes answers, streams and errors."""

import json
from collections.abc import Iterator
from typing import Any

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

# Beginning of Claude Code's first block of the system prompt. The block changes with each request.
_BILLING = "x-anthropic-"
_IGNORED_PARAMETERS = ("metadata", "service_tier", "container", "betas", "context_management", "inference_geo", "speed")
_UNENFORCED = ("thinking", "output_config", "output_format", "mcp_servers")
_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read_request(body: dict[str, Any]) -> ClientRequest:
    """Return the request in the body of an HTTP request. Raises RefusedError."""
    parameters = Parameters(dict(body))
    system = _read_system(parameters.take("system", (str, list), ""))
    messages = [{"role": "system", "content": system}] if system else []
    for message in parameters.take("messages", list, []):
        messages += _read_message(message)
    tools = [_read_tool(tool) for tool in parameters.take("tools", list, [])]
    choice = parameters.body.get("tool_choice") or {"type": "auto"}
    choice_kind = choice.get("type") if isinstance(choice, dict) else None
    # The policy can be held to these choices. Another one stays in the body, and is counted as unenforced.
    if choice_kind in ("auto", "none"):
        parameters.ignore(["tool_choice"])
        if choice.get("disable_parallel_tool_use"):
            parameters.counted.append("unenforced/disable_parallel_tool_use")
    parameters.override()
    parameters.leave_unenforced(("tool_choice", *_UNENFORCED))
    parameters.ignore(_IGNORED_PARAMETERS)
    return ClientRequest(
        model=parameters.take("model", str, "policy"),
        messages=check_messages(messages),
        tools=tools,
        max_tokens=parameters.take("max_tokens", int),
        stop=[str(text) for text in parameters.take("stop_sequences", list, []) if text],
        template_kwargs=parameters.take_template_kwargs(),
        may_call=choice_kind != "none",
        stream=bool(parameters.take("stream", bool, False)),
        counted=parameters.count_rest(),
    )


def answer_body(turn: ClientTurn) -> dict[str, Any]:
    """Return the body of the answer to a request without streaming."""
    usage = {"input_tokens": turn.prompt_length, "output_tokens": len(turn.tokens)}
    return {**_message_head(turn), "content": _content_blocks(turn), **_ending_fields(turn), "usage": usage}


def answer_events(turn: ClientTurn) -> Iterator[bytes]:
    """Yield the server-sent events of a turn. Each block of the message comes as one delta."""
    usage = {"input_tokens": turn.prompt_length, "output_tokens": 0}
    empty_message = {**_message_head(turn), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", {"message": empty_message})
    for index, block in enumerate(_content_blocks(turn)):
        empty_block, deltas = _split_block(block)
        yield _event("content_block_start", {"index": index, "content_block": empty_block})
        for delta in deltas:
            yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    yield _event("message_delta", {"delta": _ending_fields(turn), "usage": {"output_tokens": len(turn.tokens)}})
    yield _event("message_stop", {})


def waiting_event() -> bytes:
    """Return the event that keeps a stream open until its turn is sampled."""
    return _event("ping", {})


def error_body(refused: RefusedError) -> dict[str, Any]:
    """Return the body of the answer to a refused request."""
    return {"type": "error", "error": {"type": refused.kind, "message": refused.text}}


def error_event(refused: RefusedError) -> bytes:
    """Return the event that ends a stream with an error."""
    return _event("error", {"error": error_body(refused)["error"]})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _read_system(system: Any) -> str:
    """Return the system prompt without Claude Code's billing block, which changes with each request."""
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    texts = [text_of([_without_marks(block)]) for block in blocks]
    return "\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _without_marks(block: Any) -> Any:
    """Return a block with its type and text alone, without fields such as `cache_control`."""
    return {"type": block.get("type"), "text": block.get("text")} if isinstance(block, dict) else block


def _read_message(sent: Any) -> list[Message]:
    """Return a sent message as messages for the chat template. Tool results in a user's message become role `tool`."""
    role = sent.get("role") if isinstance(sent, dict) else None
    if role not in ("user", "assistant", "system"):
        raise RefusedError("messages: each has a role of user, assistant")
    content = sent.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise RefusedError("messages: content must be text or a list of blocks")
    if role == "assistant":
        return [_read_assistant(blocks)]
    results: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            call_id = str(block.get("tool_use_id") or "")
            results.append({"role": "tool", "content": text_of(block.get("content")), "tool_call_id": call_id})
        else:
            texts.append(text_of([_without_marks(block)]))
    # Results come first, because they answer the calls of the previous turn.
    if texts or not results:
        return [*results, {"role": role, "content": "\n".join(texts)}]
    return results


def _read_assistant(blocks: list[dict[str, Any]]) -> Message:
    texts = []
    calls = []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(read_call(block.get("name"), block.get("input") or {}, block.get("id")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(text_of([_without_marks(block)]))
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if calls:
        message["tool_calls"] = calls
    return message


def _read_tool(tool: Any) -> dict[str, Any]:
    kind = tool.get("type") or "custom" if isinstance(tool, dict) else type(tool).__name__
    if kind != "custom":
        raise RefusedError(f"tools: this policy calls tools of yours, and no {kind}")
    return function_schema(
        {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        }
    )


def _message_head(turn: ClientTurn) -> dict[str, Any]:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": turn.request.model}


def _content_blocks(turn: ClientTurn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if turn.reasoning:
        # With a signature, because pydantic-ai sends thinking without one back as a message of the user.
        blocks.append({"type": "thinking", "thinking": turn.reasoning, "signature": turn.id})
    if turn.content or not turn.calls:
        blocks.append({"type": "text", "text": turn.content})
    for call in turn.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments})
    return blocks


def _split_block(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an empty block for a stream, and the deltas that fill it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        empty_block = {"type": "thinking", "thinking": "", "signature": ""}
        return empty_block, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _ending_fields(turn: ClientTurn) -> dict[str, Any]:
    if turn.stop and turn.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop}
    return {"stop_reason": _FINISH[turn.finish], "stop_sequence": None}
