"""The plain `openai` SDK talks to the policy: text, tools, streams, stops, parameters."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.unit.environments.agents.served import ADD, END, Served, script, write_call

Serve = Callable[..., Served]
CLIENT = openai.OpenAI(base_url="http://unused", api_key="unused", max_retries=2, timeout=300)


def client_of(served: Served) -> openai.OpenAI:
    return CLIENT.with_options(base_url=served.url, api_key=served.key)


def request_turn(served: Served, messages: Any, **options: Any) -> Any:
    return client_of(served).chat.completions.create(model="any", messages=messages, **options)


USER = {"role": "user", "content": "2+2?"}


def test_a_turn_is_text_with_its_usage(serve: Serve) -> None:
    served = serve(script(f"It is 4.{END}"))
    answer = request_turn(served, [USER])
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is 4.", None, "stop")
    assert served.texts() == [f"<|im_start|>user\n2+2?{END}\n<|im_start|>assistant\n"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(served.prompts[0]), 9)
    assert (answer.model, answer.object) == ("any", "chat.completion")


def test_an_empty_turn_is_empty_text_and_a_turn_of_calls_alone_is_null(serve: Serve) -> None:
    served = serve(script(END, write_call(2, 2)))
    assert request_turn(served, [USER]).choices[0].message.content == ""
    message = request_turn(served, [USER], tools=[ADD]).choices[0].message
    assert message.content is None and len(message.tool_calls) == 1


def test_a_later_request_goes_on_with_the_sampled_tokens(serve: Serve) -> None:
    served = serve(script(write_call(2, 2, "Let me see. "), f"4{END}"))
    messages: list[Any] = [USER]
    message = request_turn(served, messages, tools=[ADD]).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 2})
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
    assert request_turn(served, messages, tools=[ADD]).choices[0].message.content == "4"
    assert served.asks[1].after == 0
    assert served.chat.decode(served.asks[1].tokens) == f"\n<|im_start|>tool\n4{END}\n<|im_start|>assistant\n"
    assert served.prompts[1][: len(served.prompts[0])] == served.prompts[0]


def test_a_stream_has_the_same_as_an_answer(serve: Serve) -> None:
    served = serve(script(write_call(1, 2, "Hm. ")))
    stream = request_turn(served, [USER], tools=[ADD], stream=True, stream_options={"include_usage": True})
    first, last, usage = list(stream)
    delta = first.choices[0].delta
    assert (delta.role, delta.content, delta.tool_calls[0].function.name) == ("assistant", "Hm.", "add")
    assert last.choices[0].finish_reason == "tool_calls" and usage.choices == []
    assert usage.usage.completion_tokens == len(served.sampled[0])


def test_thinking_is_apart_and_stays_in_the_tokens(serve: Serve) -> None:
    served = serve(script(f"<think>two and two</think>\n\nIt is 4.{END}", f"Yes.{END}"))
    message = request_turn(served, [USER]).choices[0].message
    assert (message.content, message.reasoning_content) == ("It is 4.", "two and two")
    # Most clients drop it.
    request_turn(served, [USER, {"role": "assistant", "content": "It is 4."}, {"role": "user", "content": "Sure?"}])
    assert served.asks[1].after == 0 and "<think>two and two</think>" in served.texts()[1]


@pytest.mark.parametrize(
    ("turn", "stop", "content", "kept_text"),
    [
        (f"I think. Observation: 4{END}", ["Observation:"], "I think. ", "I think. Observation:"),
        (f"abcabc{END}", ["bc", "c"], "a", "abc"),
        (f"abc{END}", "zzz", "abc", f"abc{END}"),
        ("abc</code> more", ["</code>", "Observation:"], "abc", "abc</code>"),
    ],
)
def test_a_stop_cuts_text_and_tokens(serve: Serve, turn: str, stop: Any, content: str, kept_text: str) -> None:
    served = serve(script(turn))
    choice = request_turn(served, [USER], stop=stop).choices[0]
    assert (choice.message.content, choice.finish_reason) == (content, "stop")
    served.settle()
    assert served.chat.decode(served.sampled[0][: served.kept_lengths[0]]) == kept_text


def test_the_engine_is_told_of_stops_that_are_one_token(serve: Serve) -> None:
    served = serve(script("ab"))
    request_turn(served, [USER], stop=["b", "Observation:"])
    assert served.asks[0].stops == served.chat.encode("b")


def test_a_client_that_puts_the_stop_back_goes_on(serve: Serve) -> None:
    served = serve(script("abc</code> more", f"4{END}"))
    content = request_turn(served, [USER], stop=["</code>"]).choices[0].message.content
    next_messages = [{"role": "assistant", "content": f"{content}</code>"}, {"role": "user", "content": "Out: 4"}]
    request_turn(served, [USER, *next_messages], stop=["</code>"])
    assert served.asks[1].after == 0


def test_sampling_belongs_to_the_run_and_is_counted(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    request_turn(
        served,
        [USER],
        tools=[ADD],
        temperature=0.3,
        seed=1,
        tool_choice="required",
        response_format={"type": "json_object"},
        max_tokens=7,
        user="me",
        extra_body={"novelty": 1, "top_k": 5},
    )
    assert served.asks[0].max_tokens == 7
    assert {name for name in served.session.counts if "/" in name} == {
        "overridden/temperature",
        "overridden/seed",
        "overridden/top_k",
        "unenforced/tool_choice",
        "unenforced/response_format",
        "ignored/novelty",
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n must be 1"),
        ({"logit_bias": {"5": 1}}, "logit_bias: would change"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [USER, {"role": "assistant", "content": "So"}]}, "the last one is the assistant's"),
        ({"messages": []}, "there are none"),
        ({"tools": [{"type": "web_search"}]}, "no web_search"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "add"}]}, USER]}, "must be an object"),
    ],
)
def test_what_cannot_be_honoured_is_refused_and_not_tried_again(serve: Serve, options: Any, message: str) -> None:
    served = serve(script())
    with pytest.raises(openai.BadRequestError, match=message):
        request_turn(served, **{"messages": [USER], **options})
    assert served.asks == [] and served.session.defect is None


def test_log_probs_and_ids_come_where_they_are_asked_for(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    choice = request_turn(served, [USER], logprobs=True, extra_body={"return_token_ids": True}).choices[0]
    assert [log_prob.token for log_prob in choice.logprobs.content] == ["4", END]
    assert choice.logprobs.content[0].logprob == -0.5 and choice.token_ids == served.sampled[0]


def test_a_call_that_cannot_be_read_is_text(serve: Serve) -> None:
    turn = '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>'
    served = serve(script(turn + END))
    message = request_turn(served, [USER], tools=[ADD]).choices[0].message
    assert (message.content, message.tool_calls) == (turn, None)
    assert served.session.counts["malformed_calls"] == 1


def test_a_used_up_budget_is_a_400_with_its_name(serve: Serve) -> None:
    served = serve(script("max_length", f"4{END}", "max_turns"))
    with pytest.raises(openai.BadRequestError, match=r"environment\.max_length"):
        request_turn(served, [USER])
    # A shorter prompt may have room, and no budget of turns comes back.
    request_turn(served, [USER])
    for _ in range(3):
        with pytest.raises(openai.BadRequestError, match=r"environment\.max_turns"):
            request_turn(served, [USER])
    assert len(served.asks) == 3 and served.session.counts["refused"] == 4
