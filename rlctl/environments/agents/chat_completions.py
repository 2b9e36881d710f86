"""Adapter of OpenAI's Chat Completions API: reads requests, and writes answers, streams and errors."""

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

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# Parameters without an effect on the policy.
_IGNORED_PARAMETERS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "top_logprobs",
)
_UNENFORCED = ("reasoning_effort", "verbosity", "prediction", "thinking")
_REFUSED = {
    "logit_bias": "would change the policy's distribution",
    "audio": "this policy writes text alone",
    "functions": "are of an older API: use tools",
    "function_call": "is of an older API: use tool_choice",
    "web_search_options": "this endpoint searches nothing",
}


def read_request(body: dict[str, Any]) -> ClientRequest:
    """Return the request in the body of an HTTP request. Raises RefusedError."""
    parameters = Parameters(dict(body))
    messages = [_read_message(message) for message in parameters.take("messages", list, [])]
    tools = [_read_tool(tool) for tool in parameters.take("tools", list, [])]
    limits = [parameters.take("max_completion_tokens", int), parameters.take("max_tokens", int)]
    stops = parameters.take("stop", (str, list), [])
    if isinstance(stops, str):
        stops = [stops]
    if parameters.take("n", int, 1) != 1:
        raise RefusedError("n must be 1: ask again for another turn")
    if any(modality != "text" for modality in parameters.take("modalities", list, [])):
        raise RefusedError("modalities: this policy writes text alone")
    # Values that ask for nothing special are ignored. Others stay in the body, and are counted as unenforced.
    if (parameters.body.get("response_format") or {}) == {"type": "text"}:
        parameters.ignore(["response_format"])
    if parameters.body.get("parallel_tool_calls"):
        parameters.ignore(["parallel_tool_calls"])
    choice = parameters.body.get("tool_choice")
    if choice in ("auto", "none"):
        parameters.ignore(["tool_choice"])
    parameters.override()
    parameters.leave_unenforced(("tool_choice", "response_format", "parallel_tool_calls", *_UNENFORCED))
    parameters.refuse(_REFUSED)
    parameters.ignore(_IGNORED_PARAMETERS)
    stream_options = parameters.take("stream_options", dict, {})
    return ClientRequest(
        model=parameters.take("model", str, "policy"),
        messages=check_messages(messages),
        tools=tools,
        max_tokens=min((limit for limit in limits if limit is not None), default=None),
        stop=[str(text) for text in stops if text],
        template_kwargs=parameters.take_template_kwargs(),
        may_call=choice != "none",
        stream=bool(parameters.take("stream", bool, False)),
        form={
            "usage": bool(stream_options.get("include_usage")),
            "logprobs": bool(parameters.take("logprobs", (bool, int), False)),
            "token_ids": bool(parameters.take("return_token_ids", bool, False)),
        },
        counted=parameters.count_rest(),
    )


def answer_body(turn: ClientTurn) -> dict[str, Any]:
    """Return the body of the answer to a request without streaming."""
    # A turn of tool calls alone has null, as OpenAI's. An empty turn is text, so that an agent's `.strip()` works.
    content = None if turn.calls and not turn.content else turn.content
    message = {"role": "assistant", "content": content, **_call_fields(turn), **_reasoning_fields(turn)}
    choice = {"index": 0, "message": message, "finish_reason": turn.finish, **_extra_fields(turn)}
    return {**_completion_head(turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def answer_events(turn: ClientTurn) -> Iterator[bytes]:
    """Yield the server-sent events of a turn. The whole turn comes as one delta."""
    head = _completion_head(turn, "chat.completion.chunk")
    delta: dict[str, Any] = {
        "role": "assistant",
        "content": turn.content,
        **_reasoning_fields(turn),
        **_call_fields(turn),
    }
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **_extra_fields(turn)}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": turn.finish}]})
    if turn.request.form["usage"]:
        yield _event({**head, "choices": [], "usage": _usage(turn)})
    yield b"data: [DONE]\n\n"


def waiting_event() -> bytes:
    """Return the comment that keeps a stream open until its turn is sampled."""
    return b": the policy samples\n\n"


def error_body(refused: RefusedError) -> dict[str, Any]:
    """Return the body of the answer to a refused request."""
    return {"error": {"message": refused.text, "type": refused.kind, "param": None, "code": refused.kind}}


def error_event(refused: RefusedError) -> bytes:
    """Return the event that ends a stream with an error."""
    return _event(error_body(refused))


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def _read_message(sent: Any) -> Message:
    role = _ROLES.get(str(sent.get("role"))) if isinstance(sent, dict) else None
    if role is None:
        raise RefusedError(f"messages: each has a role of {', '.join(_ROLES)}")
    message: Message = {"role": role, "content": text_of(sent.get("content"))}
    sent_calls = sent.get("tool_calls")
    if role == "assistant" and isinstance(sent_calls, list):
        calls = []
        for call in sent_calls:
            if not isinstance(call, dict):
                continue
            function = call.get("function") or {}
            if not isinstance(function, dict):
                raise RefusedError("messages: the function of a tool call must be an object")
            calls.append(read_call(function.get("name"), function.get("arguments"), call.get("id")))
        if calls:
            message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = str(sent.get("tool_call_id") or "")
    return message


def _read_tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
        raise RefusedError(f"tools: this policy calls functions, and no {kind}")
    return function_schema(tool.get("function"))


def _completion_head(turn: ClientTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": turn.request.model}


def _call_fields(turn: ClientTurn) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in turn.calls
    ]
    return {"tool_calls": calls} if calls else {}


def _reasoning_fields(turn: ClientTurn) -> dict[str, Any]:
    return {"reasoning_content": turn.reasoning} if turn.reasoning else {}


def _usage(turn: ClientTurn) -> dict[str, Any]:
    prompt_length = turn.prompt_length
    length = len(turn.tokens)
    return {"prompt_tokens": prompt_length, "completion_tokens": length, "total_tokens": prompt_length + length}


def _extra_fields(turn: ClientTurn) -> dict[str, Any]:
    """Return the fields of log-probs and token ids if the client asked for these."""
    fields: dict[str, Any] = {}
    if turn.request.form["logprobs"]:
        content = []
        for text, log_prob in zip(turn.token_texts(), turn.log_probs):
            text_bytes = list(text.encode(errors="replace"))
            content.append({"token": text, "logprob": log_prob, "bytes": text_bytes, "top_logprobs": []})
        fields["logprobs"] = {"content": content, "refusal": None}
    if turn.request.form["token_ids"]:
        fields["token_ids"] = turn.tokens
    return fields
