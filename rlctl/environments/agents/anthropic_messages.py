"""Adapter of the Messages API of Anthropic: its requests, answers, streams and errors."""

import json
from collections.abc import Iterator
from typing import Any

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

# Claude Code's first block of the system prompt, which changes with each request.
_BILLING = "x-anthropic-"
_IGNORED_PARAMETERS = ("metadata", "service_tier", "container", "betas", "context_management", "inference_geo", "speed")
_UNENFORCED = ("thinking", "output_config", "output_format", "mcp_servers")
_FINISH = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: dict[str, Any]) -> ClientRequest:
    """Return the turn that a request asks for. Raises RefusedError."""
    left = Parameters(dict(body))
    system = _system(left.take("system", (str, list), ""))
    messages = [{"role": "system", "content": system}] if system else []
    for given in left.take("messages", list, []):
        messages += _read_message(given)
    tools = [_tool(each) for each in left.take("tools", list, [])]
    choice = left.body.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind in ("auto", "none"):
        left.ignore(["tool_choice"])
        if choice.get("disable_parallel_tool_use"):
            left.counted.append("unenforced/disable_parallel_tool_use")
    left.override()
    left.leave_unenforced(("tool_choice", *_UNENFORCED))
    left.ignore(_IGNORED_PARAMETERS)
    return ClientRequest(
        model=left.take("model", str, "policy"),
        messages=checked_messages(messages),
        tools=tools,
        most=left.take("max_tokens", int),
        stop=[str(each) for each in left.take("stop_sequences", list, []) if each],
        template_kwargs=left.take_template_kwargs(),
        calls=kind != "none",
        stream=bool(left.take("stream", bool, False)),
        counted=left.rest(),
    )


def write(said: ClientTurn) -> dict[str, Any]:
    """Return the answer of a request that is not streamed."""
    usage = {"input_tokens": said.prompt_length, "output_tokens": len(said.tokens)}
    return {**_message_head(said), "content": _blocks(said), **_ending(said), "usage": usage}


def stream(said: ClientTurn) -> Iterator[bytes]:
    """Yield the server-sent events of a turn: each block is one delta."""
    usage = {"input_tokens": said.prompt_length, "output_tokens": 0}
    begun = {**_message_head(said), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield _event("message_start", {"message": begun})
    for index, block in enumerate(_blocks(said)):
        empty, deltas = _as_deltas(block)
        yield _event("content_block_start", {"index": index, "content_block": empty})
        for delta in deltas:
            yield _event("content_block_delta", {"index": index, "delta": delta})
        yield _event("content_block_stop", {"index": index})
    yield _event("message_delta", {"delta": _ending(said), "usage": {"output_tokens": len(said.tokens)}})
    yield _event("message_stop", {})


def waiting() -> bytes:
    """Return the event of a stream without a turn so far."""
    return _event("ping", {})


def error(refused: RefusedError) -> dict[str, Any]:
    """Return the body of an answer with an error."""
    return {"type": "error", "error": {"type": refused.kind, "message": refused.text}}


def stream_error(refused: RefusedError) -> bytes:
    """Return the event that ends a stream with an error."""
    return _event("error", {"error": error(refused)["error"]})


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def _system(given: Any) -> str:
    """Return the system prompt, without the line that bills a client's requests."""
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else given
    texts = [text_of([_plain(each)]) for each in blocks]
    return "\n".join(text for text in texts if text and not text.startswith(_BILLING))


def _plain(block: Any) -> Any:
    return {"type": block.get("type"), "text": block.get("text")} if isinstance(block, dict) else block


def _read_message(given: Any) -> list[Message]:
    """Return a message in our form. Results of tools come in a user's message, and become messages of role tool."""
    role = given.get("role") if isinstance(given, dict) else None
    if role not in ("user", "assistant", "system"):
        raise RefusedError("messages: each has a role of user, assistant")
    content = given.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
        raise RefusedError("messages: content must be text or a list of blocks")
    if role == "assistant":
        return [_assistant(blocks)]
    found: list[Message] = []
    texts: list[str] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            result = text_of(block.get("content"))
            found.append({"role": "tool", "content": result, "tool_call_id": str(block.get("tool_use_id") or "")})
        else:
            texts.append(text_of([_plain(block)]))
    # Results answer the calls of the turn before, whatever is said with these results.
    return [*found, {"role": role, "content": "\n".join(texts)}] if texts or not found else found


def _assistant(blocks: list[dict[str, Any]]) -> Message:
    texts, calls = [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(called(block.get("name"), block.get("input") or {}, block.get("id")))
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(text_of([_plain(block)]))
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _tool(given: Any) -> dict[str, Any]:
    kind = given.get("type") or "custom" if isinstance(given, dict) else type(given).__name__
    if kind != "custom":
        raise RefusedError(f"tools: this policy calls tools of yours, and no {kind}")
    own = {"name": given.get("name"), "description": given.get("description")}
    return function_schema({**own, "parameters": given.get("input_schema")})


def _message_head(said: ClientTurn) -> dict[str, Any]:
    return {"id": f"msg_{said.id}", "type": "message", "role": "assistant", "model": said.asked.model}


def _blocks(said: ClientTurn) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if said.reasoning:
        # pydantic-ai sends thinking without a signature back as a message of the user.
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": said.id})
    if said.content or not said.calls:
        blocks.append({"type": "text", "text": said.content})
    calls = ({"type": "tool_use", "id": each.id, "name": each.name, "input": each.arguments} for each in said.calls)
    return [*blocks, *calls]


def _as_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an empty block for the beginning of a stream, and the deltas to fill it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        signed = {"type": "signature_delta", "signature": block["signature"]}
        empty = {"type": "thinking", "thinking": "", "signature": ""}
        return empty, [{"type": "thinking_delta", "thinking": block["thinking"]}, signed]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _ending(said: ClientTurn) -> dict[str, Any]:
    if said.cut_at and said.finish == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": said.cut_at}
    return {"stop_reason": _FINISH[said.finish], "stop_sequence": None}
