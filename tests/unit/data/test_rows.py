import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from rlctl.config.data_schema import DatasetSection
from rlctl.data.datasets import Row
from rlctl.data.files import DataError
from rlctl.data.rows import answer_text, conversation, is_json_chat, question

PART = {"type": "text", "text": "hi "}


def row(**values: Any) -> Row:
    return Row(2, "a.jsonl:3", values)


def chat(content: Any) -> Row:
    return row(messages=[{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("42", "42"), (42, "42"), (42.0, "42"), (-0.0, "0"), (0.5, "0.5"), (1e-7, "0.0000001"), (1e22, "1" + "0" * 22),
        (Decimal("3.140"), "3.14"), (True, "true"), (None, None), ("", ""),
    ],
)  # fmt: skip
def test_an_answer_is_text_as_a_model_writes_it(value: Any, text: str | None) -> None:
    assert answer_text(value) == text


@pytest.mark.parametrize(
    ("value", "value_text"),
    [([1], "a list"), ({"a": 1}, "a dict"), (float("nan"), "nan"), (float("inf"), "inf"), (b"4", "a bytes")],
)
def test_an_answer_that_is_no_text_is_an_error_with_its_line(
    section: DatasetSection, value: Any, value_text: str
) -> None:
    expected = f"a.jsonl:3: answer column 'answer' must be text or a finite number, not {value_text}"
    for read in (question, conversation):
        with pytest.raises(DataError) as error:
            read(row(prompt="x", answer=value), section)
        assert str(error.value) == expected


def test_an_answer_that_is_missing_is_an_error_where_one_is_compared_with(section: DatasetSection) -> None:
    assert question(row(prompt="x"), section) == ([{"role": "user", "content": "x"}], None)
    for bad_row, reason in ((row(prompt="x", answer=None), "column 'answer' is null"),
                            (row(prompt="x", anwser="4"), "no column 'answer'; did you mean anwser?")):  # fmt: skip
        with pytest.raises(DataError) as error:
            question(bad_row, section, needs_answer=True)
        assert str(error.value) == f"a.jsonl:3: no answer to compare with: {reason}"


def test_parts_of_text_are_joined(section: DatasetSection) -> None:
    row_of_parts = chat([PART, {**PART, "text": "there", "image_url": None}])
    assert question(row_of_parts, section)[0] == [{"role": "user", "content": "hi there"}]
    assert conversation(row_of_parts, section)[0]["content"] == "hi there"


@pytest.mark.parametrize(
    ("content", "content_text"),
    [
        (None, "null"), (3, "the number 3"), ({"text": "x"}, "a dict"), ([PART, "x"], "the text 'x'"),
        ([{"type": "image_url", "image_url": "x"}], "a part of type 'image_url'"),
        ([{"type": "text", "text": None}], "a part of type 'text' without text"),
    ],
)  # fmt: skip
def test_any_other_content_is_an_error_with_its_line(section: DatasetSection, content: Any, content_text: str) -> None:
    for read in (question, conversation):
        with pytest.raises(DataError) as error:
            read(chat(content), section)
        rule = "content must be text or a list of {type: text, text: ...}"
        assert str(error.value) == f"a.jsonl:3: message 1 (user): {rule}, not {content_text}"


def test_calls_in_openais_form_are_read_as_templates_want_them(section: DatasetSection) -> None:
    request = {"role": "user", "content": "2+3"}
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    bare = {"role": "assistant", "tool_calls": [call]}
    for message in (bare, {**bare, "content": None}):
        _, read = conversation(row(messages=[request, message]), section)
        assert read["content"] == "" and read["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}
    assert call["function"]["arguments"] == '{"a": 2, "b": 3}'
    call["function"]["arguments"] = "2, 3"
    with pytest.raises(DataError, match=r"a\.jsonl:3: message 2: a tool call must have a name, and arguments"):
        conversation(row(messages=[request, bare]), section)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"prompt": None, "answer": 3}, "column 'prompt' is null"),
        ({"messages": "[]"}, "not the text '[]'"),
        ({"messages": []}, "{from, value}, not an empty list"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}, "{from, value}: message 2 has no content"),
        ({"messages": [{"content": "x"}]}, "{from, value}: message 1 has no role"),
        ({"messages": [{"from": "human"}]}, "{from, value}: message 1 has no value"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "and the last message is of bot, not assistant"),
    ],
)
def test_what_a_row_lacks_is_said_as_it_is(section: DatasetSection, values: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError) as error:
        question(row(**values), section, needs_answer=True)
    assert problem in str(error.value)


@pytest.mark.parametrize("column", ["messages", "prompt"])
@pytest.mark.parametrize("key", ["role", "from"])
def test_messages_may_be_json_text(section: DatasetSection, column: str, key: str) -> None:
    messages = [{"role": "user", "content": "2+2"}] if key == "role" else [{"from": "human", "value": "2+2"}]
    json_row = row(**{column: json.dumps(messages)})
    assert question(json_row, section)[0] == [{"role": "user", "content": "2+2"}] and is_json_chat(json_row, section)
    text_row = row(prompt="[1, 2] has a sum of")
    text = question(text_row, section)[0][0]["content"]
    assert text == "[1, 2] has a sum of" and not is_json_chat(text_row, section)


@pytest.mark.parametrize("value", [0.5, "false", [0, 1], -1, float("nan")])
def test_a_mark_that_says_neither_yes_nor_no_is_an_error(section: DatasetSection, value: Any) -> None:
    marked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": value}]
    with pytest.raises(DataError, match=r"^a\.jsonl:3: message 2: weight must be 0 or 1, false or true: a turn is "):
        conversation(row(messages=marked), section)


def test_another_answer_column_is_followed(section: DatasetSection) -> None:
    assert question(row(prompt="x", gold=7), replace(section, answer_key="gold"))[1] == "7"
