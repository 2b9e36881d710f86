"""Adapter of the Chat Completions API of OpenAI: its requests, answers, streams and errors."""

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

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# They change nothing that the policy would do.
_HARMLESS = (
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


def read(body: dict[str, Any]) -> ClientRequest:
    """Return the turn that a request asks for. Raises RefusedError."""
    left = Parameters(dict(body))
    messages = [_read_message(each) for each in left.take("messages", list, [])]
    tools = [_tool(each) for each in left.take("tools", list, [])]
    limits = [left.take("max_completion_tokens", int), left.take("max_tokens", int)]
    stop = left.take("stop", (str, list), [])
    if left.take("n", int, 1) != 1:
        raise RefusedError("n must be 1: ask again for another turn")
    if any(each != "text" for each in left.take("modalities", list, [])):
        raise RefusedError("modalities: this policy writes text alone")
    if (left.body.get("response_format") or {}) == {"type": "text"}:
        left.ignore(["response_format"])
    if left.body.get("parallel_tool_calls"):
        left.ignore(["parallel_tool_calls"])
    choice = left.body.get("tool_choice")
    if choice in ("auto", "none"):
        left.ignore(["tool_choice"])
    left.override()
    left.leave_unenforced(("tool_choice", "response_format", "parallel_tool_calls", *_UNENFORCED))
    left.refuse(_REFUSED)
    left.ignore(_HARMLESS)
    stream_options = left.take("stream_options", dict, {})
    return ClientRequest(
        model=left.take("model", str, "policy"),
        messages=checked_messages(messages),
        tools=tools,
        most=min((each for each in limits if each is not None), default=None),
        stop=[str(each) for each in ([stop] if isinstance(stop, str) else stop) if each],
        template_kwargs=left.take_template_kwargs(),
        calls=choice != "none",
        stream=bool(left.take("stream", bool, False)),
        form={
            "usage": bool(stream_options.get("include_usage")),
            "logprobs": bool(left.take("logprobs", (bool, int), False)),
            "token_ids": bool(left.take("return_token_ids", bool, False)),
        },
        counted=left.rest(),
    )


def write(said: ClientTurn) -> dict[str, Any]:
    """Return the answer of a request that is not streamed."""
    message = {"role": "assistant", "content": said.content or None, **_calls(said), **_reasoning(said)}
    choice = {"index": 0, "message": message, "finish_reason": said.finish, **_extras(said)}
    return {**_completion_head(said, "chat.completion"), "choices": [choice], "usage": _usage(said)}


def stream(said: ClientTurn) -> Iterator[bytes]:
    """Yield the server-sent events of a turn: it is one delta."""
    head = _completion_head(said, "chat.completion.chunk")
    calls = [{"index": index, **each} for index, each in enumerate(_calls(said).get("tool_calls", ()))]
    delta = {
        "role": "assistant",
        "content": said.content,
        **_reasoning(said),
        **({"tool_calls": calls} if calls else {}),
    }
    yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **_extras(said)}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": said.finish}]})
    if said.asked.form["usage"]:
        yield _event({**head, "choices": [], "usage": _usage(said)})
    yield b"data: [DONE]\n\n"


def waiting() -> bytes:
    """Return the comment of a stream without a turn so far."""
    return b": the policy samples\n\n"


def error(refused: RefusedError) -> dict[str, Any]:
    """Return the body of an answer with an error."""
    return {"error": {"message": refused.text, "type": refused.kind, "param": None, "code": refused.kind}}


def stream_error(refused: RefusedError) -> bytes:
    """Return the event that ends a stream with an error."""
    return _event(error(refused))


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def _read_message(given: Any) -> Message:
    role = _ROLES.get(str(given.get("role"))) if isinstance(given, dict) else None
    if role is None:
        raise RefusedError(f"messages: each has a role of {', '.join(_ROLES)}")
    message: Message = {"role": role, "content": text_of(given.get("content"))}
    if role == "assistant" and isinstance(given.get("tool_calls"), list):
        functions = [
            (each.get("function") or {}, each.get("id")) for each in given["tool_calls"] if isinstance(each, dict)
        ]
        if not all(isinstance(each, dict) for each, _ in functions):
            raise RefusedError("messages: the function of a tool call must be an object")
        if calls := [called(each.get("name"), each.get("arguments"), number) for each, number in functions]:
            message["tool_calls"] = calls
    if role == "tool":
        message["tool_call_id"] = str(given.get("tool_call_id") or "")
    return message


def _tool(given: Any) -> dict[str, Any]:
    if not isinstance(given, dict) or given.get("type", "function") != "function":
        kind = given.get("type") if isinstance(given, dict) else type(given).__name__
        raise RefusedError(f"tools: this policy calls functions, and no {kind}")
    return function_schema(given.get("function"))


def _completion_head(said: ClientTurn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{said.id}", "object": kind, "created": said.created, "model": said.asked.model}


def _calls(said: ClientTurn) -> dict[str, Any]:
    calls = [
        {
            "id": each.id,
            "type": "function",
            "function": {"name": each.name, "arguments": json.dumps(each.arguments, ensure_ascii=False)},
        }
        for each in said.calls
    ]
    return {"tool_calls": calls} if calls else {}


def _reasoning(said: ClientTurn) -> dict[str, Any]:
    return {"reasoning_content": said.reasoning} if said.reasoning else {}


def _usage(said: ClientTurn) -> dict[str, Any]:
    prompt, answer = said.prompt_length, len(said.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _extras(said: ClientTurn) -> dict[str, Any]:
    """Return log-probs and token ids, where the client asks."""
    extras: dict[str, Any] = {}
    if said.asked.form["logprobs"]:
        tokens = [(text, list(text.encode(errors="replace"))) for text in said.token_texts()]
        content = [
            {"token": text, "logprob": log_prob, "bytes": raw, "top_logprobs": []}
            for (text, raw), log_prob in zip(tokens, said.log_probs)
        ]
        extras["logprobs"] = {"content": content, "refusal": None}
    if said.asked.form["token_ids"]:
        extras["token_ids"] = said.tokens
    return extras
