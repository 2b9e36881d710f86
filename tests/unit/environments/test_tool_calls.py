"""Parsing of tool calls by format: a turn gives calls, mistakes that the model is told, or text, never an error."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.environments.tool_calls import parse_tool_calls
from rlctl.environments.tool_formats import PARSERS, MalformedCall, ToolCall, tool_format
from tests.tools import TOOLS

MARKS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "<function=move>", "</function>", "</think>"]
# Text of arguments: any characters, brackets and quotes, and the marks of all formats.
TEXTS = st.lists(st.sampled_from([*MARKS, *'{}[]";:,\\\n', "é", "雪", "🙂", "ab"]), max_size=5).map("".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
CALLS = st.lists(
    st.builds(ToolCall, st.sampled_from(["move", "say", "雪"]), st.dictionaries(TEXTS, VALUES, max_size=3)), max_size=4
)


def write_hermes(calls: list[ToolCall], ascii: bool = True) -> str:
    texts = [json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=ascii) for call in calls]
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def parse_calls(text: str, format: str = "hermes") -> list[ToolCall | MalformedCall]:
    return parse_tool_calls(text, format, TOOLS).calls


@settings(max_examples=40)
@given(CALLS, st.booleans(), st.sampled_from(["", "Let me see. ", "<think>a {call}</think>\n"]))
def test_hermes_calls_come_back_as_they_were_written(calls: list[ToolCall], ascii: bool, opening: str) -> None:
    parsed = parse_tool_calls(opening + write_hermes(calls, ascii) + "<|im_end|>", "hermes", TOOLS)
    assert parsed.calls == calls
    assert parsed.content.removesuffix("<|im_end|>").strip() in ("", "Let me see.")


@settings(max_examples=40)
@given(CALLS.filter(bool), st.sampled_from(["", "<|python_tag|>"]), st.sampled_from(["; ", "\n", " "]))
def test_llama_calls_come_back_as_they_were_written(calls: list[ToolCall], opening: str, separator: str) -> None:
    texts = [json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls]
    assert parse_calls(opening + separator.join(texts) + "<|eot_id|>", "llama3") == calls


@settings(max_examples=40)
@given(CALLS.filter(bool))
def test_mistral_calls_come_back_as_they_were_written(calls: list[ToolCall]) -> None:
    json_list = json.dumps([{"name": call.name, "arguments": call.arguments} for call in calls])
    assert parse_calls(f"Well.[TOOL_CALLS]{json_list}</s>", "mistral") == calls
    # vLLM 0.32 leaves the id in the name. mistral-common writes it so from its version 11 of the format on.
    assert parse_calls('[TOOL_CALLS]move[CALL_ID]a1b2c3d4e[ARGS]{"steps": 1}', "mistral") == [
        ToolCall("move", {"steps": 1})
    ]
    assert parse_calls('[TOOL_CALLS]move[ARGS]{"steps": 1}[TOOL_CALLS]say{}', "mistral") == [
        ToolCall("move", {"steps": 1}),
        ToolCall("say", {}),
    ]


@given(
    st.sampled_from(sorted(PARSERS)),
    st.lists(st.sampled_from([*MARKS, "<think>", *'{}[]"', "move", "\n"]), max_size=30),
)
def test_no_text_is_an_error_of_the_parser(format: str, parts: list[str]) -> None:
    for call in parse_calls("".join(parts), format):
        assert isinstance(call, ToolCall) or (call.error and "\n" not in call.error and len(call.error) < 200)


@settings(max_examples=40)
@given(CALLS.filter(bool), st.data())
def test_a_truncated_turn_keeps_its_whole_calls_and_invents_none(calls: list[ToolCall], data: st.DataObject) -> None:
    text = write_hermes(calls)
    parsed = parse_calls(text[: data.draw(st.integers(0, len(text)))])
    if "</think>" not in text and text.count("<tool_call>") == len(calls):
        whole_calls = [call for call in parsed if isinstance(call, ToolCall)]
        assert whole_calls == calls[: len(whole_calls)] and len(parsed) <= len(whole_calls) + 1


def test_a_mark_within_a_string_does_not_end_the_call() -> None:
    code = "print('</tool_call>') # } ] \" <tool_call>"
    assert parse_calls(write_hermes([ToolCall("say", {"text": code})])) == [ToolCall("say", {"text": code})]


def test_arguments_may_be_json_within_json() -> None:
    text = '<tool_call>{"name": "move", "arguments": "{\\"steps\\": 2}"}</tool_call>'
    assert parse_calls(text) == [ToolCall("move", {"steps": 2})]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"name": "move", "arguments": {"steps": 1}', "not valid JSON: Expecting ',' delimiter at character 43"),
        ("{name: move}", "Expecting property name"),
        ("[1, 2]", "not a JSON object: '[1, 2]'"),
        ('{"arguments": {}}', 'no name: a call is {"name": ..., "arguments": {...}}'),
        ('{"name": "move", "arguments": [1]}', "arguments of 'move' must be a JSON object"),
        ('{"name": "move", "arguments": "x"}', "arguments of 'move' must be a JSON object"),
        ('{"name": "move", "arguments": {"steps": NaN}}', "not finite"),
        ('{"name": "move", "arguments": {}} and more', "not one JSON object: 'and more' follows it"),
        ("[" * 100_000, "nested too deep"),
        (
            '{"name": "move", "arguments": {"path": ' + "[" * 500 + "]" * 500 + "}}",
            "nested too deep: at most 64 levels",
        ),
        ('{"name": "move", "arguments": {"where": "' + "x" * 300_000 + '"}}', "have 300,013 characters, and at most"),
        ('{"name": "' + "m" * 300 + '", "arguments": {}}', "a name of 300 characters, and at most 200"),
        ('{"name": "\\ud800", "arguments": {}}', "a name with half of a character"),
        ("", "not valid JSON"),
    ],
)
def test_a_mistake_is_told_and_the_next_call_counts(body: str, message: str) -> None:
    next_call = write_hermes([ToolCall("move", {"steps": 1})])
    first, second = parse_calls(f"<tool_call>{body}</tool_call>{next_call}")
    assert isinstance(first, MalformedCall) and message in first.error
    assert second == ToolCall("move", {"steps": 1})


@pytest.mark.parametrize("levels", [500, 970, 1100, 100_000])
@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "move", "arguments": {"path": @}}</tool_call>'),
        ("llama3", '{"name": "move", "parameters": {"path": @}}'),
        ("mistral", '[TOOL_CALLS][{"name": "move", "arguments": {"path": @}}]'),
        ("mistral", '[TOOL_CALLS]move[ARGS]{"path": @}'),
        ("qwen3_coder", "<tool_call><function=move><parameter=path>@</parameter></function></tool_call>"),
    ],
)
def test_no_format_lets_a_deep_value_through(format: str, text: str, levels: int) -> None:
    (call,) = parse_calls(text.replace("@", "[" * levels + "]" * levels), format)
    if levels < 900 or format != "qwen3_coder":
        assert isinstance(call, MalformedCall) and "nested too deep" in call.error and "at most 64 levels" in call.error
    else:  # a value that is no JSON is a text there
        assert isinstance(call, MalformedCall) or isinstance(call.arguments["path"], str)


def test_of_too_many_calls_the_first_are_made_and_the_rest_is_answered_once() -> None:
    calls = parse_calls(write_hermes([ToolCall("move", {})] * 1000))
    assert calls[:256] == [ToolCall("move", {})] * 256
    (refusal,) = calls[256:]
    assert isinstance(refusal, MalformedCall) and refusal.error == "one of 1,000 in a turn, and at most 256 are called"


def test_what_is_thought_is_not_called() -> None:
    call = write_hermes([ToolCall("move", {})])
    assert parse_calls(f"<think>maybe {call}</think>no") == []
    assert parse_calls(f"maybe {call}</think>no") == []
    assert parse_calls(f"<think>maybe {call}") == []
    parsed = parse_tool_calls(f"<think>maybe</think>Now. {call}", "hermes", TOOLS)
    assert parsed.calls == [ToolCall("move", {})] and parsed.content == "Now."


@pytest.mark.parametrize("opening", ["", "<think>maybe</think>", "maybe</think>", "[THINK]maybe[/THINK]"])
@pytest.mark.parametrize("value", ["</think>", "<think>", "a</think>b<think>c", "</tool_call><tool_call>", "[/THINK]"])
@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "say", "arguments": {"where": "@"}}</tool_call>'),
        ("llama3", '{"name": "say", "parameters": {"where": "@"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "say", "arguments": {"where": "@"}}]'),
        ("mistral", '[TOOL_CALLS]say[ARGS]{"where": "@"}'),
        ("qwen3_coder", "<tool_call><function=say><parameter=where>@</parameter></function></tool_call>"),
    ],
)
def test_a_mark_of_thinking_in_an_argument_is_text(format: str, text: str, value: str, opening: str) -> None:
    expected = [ToolCall("say", {"where": value})]
    assert parse_calls(opening + text.replace("@", value), format) == expected
    assert parse_calls(opening + text.replace("@", value) + "\nWell.", format) == expected


@pytest.mark.parametrize(
    ("format", "text", "message"),
    [
        ("hermes", '{"name": "move", "arguments": {"steps": 1}}', "JSON that names move, and no whole call"),
        ("hermes", 'I call {"name": "move"}.', "JSON that names move"),
        ("hermes", "move</tool_call>", "the mark tool_call without a whole call"),
        ("hermes", "<function=move><parameter=steps>1</parameter></function>", "the mark function without"),
        ("llama3", 'Set {x}. {"name": "move", "parameters": {}}', "JSON that names move"),
        ("llama3", "<tool_call>move</tool_call>", "the mark tool_call"),
        ("mistral", '[{"name": "move", "arguments": {}}]', "JSON that names move"),
        ("mistral", "[TOOL_CALLS][]", "the mark TOOL_CALLS without a whole call"),
        ("qwen3_coder", '{"name": "move", "arguments": {}}', "JSON that names move"),
        ("qwen3_coder", "<function=move><parameter=steps>1</parameter>", "without </function>"),
    ],
)
def test_a_turn_that_looks_like_a_call_and_is_none_is_a_mistake(format: str, text: str, message: str) -> None:
    for opening in ("", "Let me see. ", "<think>hm</think>"):
        (call,) = parse_calls(opening + text, format)
        assert isinstance(call, MalformedCall) and message in call.error


@pytest.mark.parametrize("format", sorted(PARSERS))
@pytest.mark.parametrize(
    "text", ["It is 4.", 'Their "name": "Bob".', '{"answer": 3}', "f(x) = {x}", '<think>"name": "move"</think>4', ""]
)
def test_an_answer_is_no_call(format: str, text: str) -> None:
    assert parse_calls(text, format) == []


def test_coder_values_are_read_by_their_schema() -> None:
    text = (
        "Off.\n<tool_call>\n<function=move>\n<parameter=where>\n12\n</parameter>\n<parameter=steps>\n12\n</parameter>\n"
        "<parameter=fast>\nTrue\n</parameter>\n<parameter=path>\n[1, 2]\n</parameter>\n"
        "<parameter=other>\na\nb\n</parameter>\n</function>\n</tool_call>"
    )
    expected = {"where": "12", "steps": 12, "fast": True, "path": [1, 2], "other": "a\nb"}
    parsed = parse_tool_calls(text, "qwen3_coder", TOOLS)
    assert parsed.calls == [ToolCall("move", expected)] and parsed.content == "Off."
    assert parse_calls(
        text.replace("12\n</parameter>\n<parameter=fast>", "many\n</parameter>\n<parameter=fast>"), "qwen3_coder"
    )[0] == ToolCall("move", {**expected, "steps": "many"})


@pytest.mark.parametrize(
    "text",
    ["<tool_call>move</tool_call>", "<tool_call><function=move>x</function></tool_call>", "<tool_call><function=m"],
)
def test_coder_mistakes_are_told(text: str) -> None:
    (call,) = parse_calls(text, "qwen3_coder")
    assert isinstance(call, MalformedCall)


@given(CALLS.filter(bool))
def test_coder_texts_come_back_as_they_were_written(calls: list[ToolCall]) -> None:
    text = ""
    expected_calls = []
    for call in calls:
        texts = {f"k{index}": str(argument) for index, argument in enumerate(call.arguments.values())}
        body = "".join(f"<parameter={key}>\n{argument}\n</parameter>\n" for key, argument in texts.items())
        text += f"<tool_call>\n<function={call.name}>\n{body}</function>\n</tool_call>\n"
        expected_calls.append(ToolCall(call.name, texts))
    all_arguments = str([call.arguments for call in calls])
    if not any(mark in all_arguments for mark in MARKS):
        assert parse_calls(text, "qwen3_coder") == expected_calls


@pytest.mark.parametrize("format", sorted(PARSERS))
@pytest.mark.parametrize(
    "part", ["<tool_call>", "<parameter=a>", "[TOOL_CALLS]", "<think>", "</think>", '{"name": ', " "]
)
@pytest.mark.parametrize("opening", ["<tool_call><function=move>", "[TOOL_CALLS]"])
def test_a_turn_that_repeats_itself_is_parsed_in_no_time(format: str, part: str, opening: str) -> None:
    start = time.process_time()
    parse_calls(f"{opening}{part * 10_000}</function>", format)
    assert time.process_time() - start < 20


def test_llama_text_without_a_call_is_text() -> None:
    for text in ("Hello.", '{"a": 1}'):
        assert parse_tool_calls(text, "llama3", TOOLS).content == text
        assert parse_calls(text, "llama3") == []
    (call,) = parse_calls('<|python_tag|>print("x")', "llama3")
    assert isinstance(call, MalformedCall)


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ('<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>', "hermes"),
        ("<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>", "qwen3_coder"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>{function-name}\\n<arg_key>", None),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_format_is_known_by_the_template(template: str, format: str | None) -> None:
    assert tool_format(template) == format
