"""The Responses API of the `openai` SDK: items, tools, streams, continued responses."""

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.unit.environments.agents.served import ADD as CHAT_ADD
from tests.unit.environments.agents.served import END, Served, script, write_call
from tests.unit.environments.agents.test_chat_completions import client_of

Serve = Callable[..., Served]
ADD: Any = {"type": "function", **CHAT_ADD["function"]}  # type: ignore[dict-item]


def request_turn(served: Served, items: Any, **options: Any) -> Any:
    return client_of(served).responses.create(model="any", input=items, **options)


def test_a_turn_is_items(serve: Serve) -> None:
    served = serve(script(f"<think>two and two</think>\n\nIt is 4.{END}"))
    answer = request_turn(served, "2+2?", instructions="Be short.")
    reasoning, message = answer.output
    assert (reasoning.type, message.type, answer.output_text) == ("reasoning", "message", "It is 4.")
    assert served.texts()[0].startswith(f"<|im_start|>system\nBe short.{END}\n<|im_start|>user\n2+2?{END}")
    assert (answer.status, answer.usage.output_tokens) == ("completed", len(served.sampled[0]))


def test_items_that_come_back_continue_the_turn(serve: Serve) -> None:
    served = serve(script(write_call(2, 2, "<think>Hm</think>Let me see."), f"4{END}"))
    items: list[Any] = [{"role": "user", "content": "2+2?"}]
    answer = request_turn(served, items, tools=[ADD])
    call = answer.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 2, "b": 2}')
    items += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "4"}]
    assert request_turn(served, items, tools=[ADD]).output_text == "4"
    assert served.asks[1].after == 0 and not served.session.rewritten


def test_a_continued_response_needs_no_earlier_items(serve: Serve) -> None:
    served = serve(script(f"one{END}", f"two{END}", f"three{END}"))
    first = request_turn(served, "1", instructions="Be short.")
    second = request_turn(served, "2", instructions="Be short.", previous_response_id=first.id)
    third = request_turn(served, "3", instructions="Be short.", previous_response_id=second.id)
    assert [ask.after for ask in served.asks] == [None, 0, 1] and third.output_text == "three"
    with pytest.raises(openai.NotFoundError, match="no turn of this session"):
        request_turn(served, "4", previous_response_id="resp_other-1")


def test_a_stream_has_the_same_as_an_answer(serve: Serve) -> None:
    served = serve(script(write_call(1, 2, "So: ")))
    with client_of(served).responses.stream(model="any", input="?", tools=[ADD]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.function_call_arguments.done"} <= {*kinds}
    assert final.output_text == "So:" and final.output[-1].arguments == '{"a": 1, "b": 2}'


def test_a_turn_that_was_cut_is_incomplete(serve: Serve) -> None:
    answer = request_turn(serve(script("It is")), "2+2?", max_output_tokens=5)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_what_cannot_be_honoured_is_counted_or_refused(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    request_turn(
        served, "?", temperature=0.2, reasoning={"effort": "low"}, include=[], store=False, tool_choice="required"
    )
    counts = {name for name in served.session.counts if "/" in name}
    assert counts == {"overridden/temperature", "unenforced/reasoning", "unenforced/tool_choice"}
    for options, message in (
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "no web_search"),
        ({"items": [{"type": "item_reference", "id": "x"}]}, "no item_reference"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            request_turn(served, **{"items": "?", **options})  # type: ignore[arg-type]


def test_tools_of_codex_that_the_policy_is_not_shown_are_counted(serve: Serve) -> None:
    served = serve(script(f"4{END}"))
    hosted: list[Any] = [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}, {"type": "a b"}]
    request_turn(served, "?", tools=[ADD, *hosted])
    assert {name for name in served.session.counts if "/" in name} == {
        "unenforced/tool_web_search",
        "unenforced/tool_namespace",
        "unenforced/tool_other",
    }
    assert '"add"' in served.texts()[0] and "web_search" not in served.texts()[0]
