"""The `anthropic` SDK talks to the policy: blocks, tools, streams, counts."""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.environments.agents.served import END, Served, script, write_call

if TYPE_CHECKING:
    from anthropic.resources import Messages

Serve = Callable[..., Served]
ADD: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
USER: Any = {"role": "user", "content": "2+2?"}
CACHED = {"cache_control": {"type": "ephemeral"}}


@cache
def make_client() -> Any:
    """Return a client. Its import takes 1.3 s, so that only the process of these tests makes it."""
    from anthropic import Anthropic

    return Anthropic(base_url="http://unused", api_key="unused", timeout=300)


def messages_of(served: Served) -> "Messages":
    return make_client().with_options(base_url=served.url.removesuffix("/v1"), api_key=served.key).messages


def request_turn(served: Served, messages: Any, **options: Any) -> Any:
    return messages_of(served).create(model="any", max_tokens=100, messages=messages, **options)


def test_a_turn_is_blocks(serve: Serve) -> None:
    served = serve(script(f"<think>two and two</think>\n\nIt is 4.{END}"))
    answer = request_turn(served, [USER], system="Be short.")
    thinking, text = answer.content
    assert (thinking.thinking, text.text, answer.stop_reason) == ("two and two", "It is 4.", "end_turn")
    # pydantic-ai sends thinking back as the user's without one.
    assert thinking.signature
    assert served.texts()[0].startswith(f"<|im_start|>system\nBe short.{END}\n<|im_start|>user\n2+2?{END}")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(served.prompts[0]), len(served.sampled[0]))


def test_a_later_request_goes_on_although_marks_move(serve: Serve) -> None:
    served = serve(script(write_call(2, 2, "Let me see."), f"4{END}", f"Yes.{END}"))
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be short."}]
    first = request_turn(served, [USER], tools=[ADD], system=system)
    text, use = first.content
    assert (text.text, use.name, use.input, first.stop_reason) == ("Let me see.", "add", {"a": 2, "b": 2}, "tool_use")
    system[0]["text"] = "x-anthropic-billing-header: cch=2;"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "4"}], **CACHED}
    messages = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert request_turn(served, messages, tools=[ADD], system=system).content[0].text == "4"
    assert served.asks[1].after == 0
    assert served.chat.decode(served.asks[1].tokens) == f"\n<|im_start|>tool\n4{END}\n<|im_start|>assistant\n"
    result.pop("cache_control")
    messages += [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": [{**CACHED, "type": "text", "text": "?"}]},
    ]
    request_turn(served, messages, tools=[ADD], system=system)
    assert served.asks[2].after == 1 and not served.session.rewritten


def test_a_stream_has_the_same_as_an_answer(serve: Serve) -> None:
    served = serve(script(write_call(1, 2, "<think>Hm</think>So: ")))
    with messages_of(served).stream(model="any", max_tokens=100, messages=[USER], tools=[ADD]) as stream:
        assert "".join(stream.text_stream) == "So:"
        final = stream.get_final_message()
    thinking, text, use = final.content
    assert (thinking.thinking, text.text, use.input) == ("Hm", "So:", {"a": 1, "b": 2}) and thinking.signature
    assert (final.stop_reason, final.usage.output_tokens) == ("tool_use", len(served.sampled[0]))


def test_a_stop_sequence_is_named(serve: Serve) -> None:
    served = serve(script(f"a. Observation: b{END}"))
    answer = request_turn(served, [USER], stop_sequences=["Observation:"])
    assert (answer.content[0].text, answer.stop_reason) == ("a. ", "stop_sequence")
    assert answer.stop_sequence == "Observation:"


def test_tokens_are_counted_without_a_turn(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    count = messages_of(served).count_tokens(model="any", messages=[USER], tools=[ADD]).input_tokens
    request_turn(served, [USER], tools=[ADD])
    assert count == len(served.prompts[0]) and len(served.asks) == 1


def test_what_cannot_be_honoured_is_counted_or_refused(serve: Serve) -> None:
    from anthropic import BadRequestError

    served = serve(script(f"4{END}"))
    extra_body = {"temperature": 0.1, "thinking": {"type": "adaptive"}}
    request_turn(served, [USER], tool_choice={"type": "any"}, tools=[ADD], extra_body=extra_body)
    counts = {name for name in served.session.counts if "/" in name}
    assert counts == {"overridden/temperature", "unenforced/thinking", "unenforced/tool_choice"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
    for messages, tools, message in (
        ([{"role": "user", "content": [image]}], [], "no image"),
        ([USER], [{"type": "web_search_20250305", "name": "web_search"}], "no web_search"),
    ):
        with pytest.raises(BadRequestError, match=message):
            request_turn(served, messages, tools=tools)


def test_a_bearer_token_is_a_key_too(serve: Serve) -> None:
    from anthropic import Anthropic, AuthenticationError

    served = serve(script(f"4{END}"))
    client = Anthropic(base_url=served.url, auth_token=served.key, api_key=None)
    assert client.messages.create(model="m", max_tokens=5, messages=[USER]).content[0].text == "4"  # type: ignore[union-attr]
    with pytest.raises(AuthenticationError):
        client.with_options(auth_token="wrong").messages.create(model="m", max_tokens=5, messages=[USER])
