"""Tool calls are found wherever vLLM's own parsers find them, with the same names and arguments."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.environments.tool_calls import parse_tool_calls
from rlctl.environments.tool_formats import MalformedCall, ToolCall
from tests.tools import TOOLS

NAMES = {"hermes": "hermes", "llama3": "llama3_json", "mistral": "mistral", "qwen3_coder": "qwen3_coder"}
MARKS = ["<|python_tag|>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", "<think>", "</think>"]
# vLLM reads Mistral's older lists where the vocabulary has no [ARGS].
NEWER = [*MARKS, "[ARGS]"]
ONE = '{"name": "move", "arguments": {"steps": 1, "where": "a } b"}}'
LLAMA = '{"name": "move", "parameters": {"steps": 1, "path": [1, {"x": 2}]}}'
PARAMETERS = "<parameter=steps>\n1\n</parameter>\n<parameter=where>\nhome\n</parameter>\n"
CODER = f"<function=move>\n{PARAMETERS}</function>"
TEXTS = {
    "hermes": [
        f"<tool_call>\n{ONE}\n</tool_call>",
        f"Well. <tool_call>{ONE}</tool_call>\n<tool_call>{ONE}</tool_call>",
        f"<tool_call>{ONE}",
        "It is 4.",
    ],
    "llama3": [
        LLAMA,
        f"<|python_tag|>{LLAMA}",
        f"I will look. {LLAMA}",
        f"I will look.\n\n{LLAMA}\nThen we see.",
        f"{LLAMA}; {LLAMA}",
        f"First {LLAMA} and then {LLAMA}",
        LLAMA.replace("parameters", "arguments"),
        "It is 4.",
        '{"answer": 4}',
    ],
    "mistral": [
        f"[TOOL_CALLS][{ONE}]",
        f"[TOOL_CALLS] [{ONE}, {ONE}]",
        f"Well.[TOOL_CALLS]{ONE}",
        '[TOOL_CALLS]move[ARGS]{"steps": 1}',
        '[TOOL_CALLS]move{"steps": 1}',
        '[TOOL_CALLS]move[ARGS]{"steps": 1}[TOOL_CALLS]move[ARGS]{"steps": 2}',
        '[TOOL_CALLS]move[ARGS]{"steps": "1", "where": 7}',
        f"[TOOL_CALLS] [TOOL_CALLS] [{ONE}]",
        f"[TOOL_CALLS][TOOL_CALLS]{ONE}",
        f"[TOOL_CALLS] [{ONE}][TOOL_CALLS] [{ONE}]",
        f"[TOOL_CALLS] this one [{ONE}] and more",
        "It is 4.",
    ],
    "qwen3_coder": [
        f"<tool_call>\n{CODER}\n</tool_call>",
        f"{CODER}\n</tool_call>",
        CODER,
        f"I move now. {CODER}",
        f"<tool_call>{CODER}</tool_call>\n<tool_call>{CODER}</tool_call>",
        f"<tool_call>{CODER}{CODER}</tool_call>",
        f"<tool_call>{CODER}<tool_call>{CODER}</tool_call>",
        f"<tool_call><function=move>{PARAMETERS}</function>",
        "<tool_call><function=move><parameter=where>home<parameter=steps>1</parameter></function></tool_call>",
        "<tool_call><function=move>\n</function></tool_call>",
        "<tool_call><function=move><parameter=fast>true</parameter><parameter=path>[1, 2]</parameter></function>",
        "It is 4.",
    ],
}
NO_NAME = "vLLM calls a tool without a name, which no client has"
# vLLM takes these for calls. The model is told its mistake instead.
ANSWERED = [
    ("qwen3_coder", "<tool_call><function=move>steps 1</function></tool_call>", "vLLM drops the text"),
    ("qwen3_coder", "<tool_call><function=move><parameter=where>ho", "the turn was cut, and vLLM drops the argument"),
    ("qwen3_coder", "<function=move\n<parameter=where>ho</parameter>\n</function>", "vLLM takes a mark into the name"),
    ("qwen3_coder", "<tool_call>\n<function=move\n</function>\n</tool_call>", "the name has no end"),
    ("mistral", "[TOOL_CALLS]move[ARGS]", "the turn was cut: vLLM calls without arguments"),
    ("mistral", '[TOOL_CALLS]move[ARGS]{"where": "ho', "the turn was cut: vLLM gives its client broken JSON"),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"steps": 1}}]', NO_NAME),
    ("mistral", 'move[TOOL_CALLS][ARGS]{"steps": 1}', NO_NAME),
    ("mistral", "[TOOL_CALLS][ARGS]{not JSON", NO_NAME),
    ("hermes", '<tool_call>{"name": "move", "arguments": [1]}</tool_call>', "vLLM gives its client a list"),
    ("llama3", '{"name": "move", "parameters": [1]}', "vLLM gives its client a list"),
]
# vLLM takes none of these for a call, since a turn with one mistake has no calls there. A whole call counts here.
COUNTED = [
    ("hermes", f"<tool_call>{ONE}</tool_call><tool_call>{{</tool_call>"),
    ("llama3", f"{LLAMA} I used {{move}} for this."),
    ("llama3", f'{LLAMA} with {{"steps": 1}}'),
]
SCALARS = st.none() | st.booleans() | st.integers(-9, 99) | st.sampled_from([1.5, -0.0, 1e3])
TYPE_NAMES = st.sampled_from(
    ["string", "integer", "number", "boolean", "array", "object", "null", "INT64", "enum", "bool", "list", "date"]
)
TYPES = TYPE_NAMES | st.lists(TYPE_NAMES | st.none(), max_size=3) | st.none() | st.just(5)
# True and False are schemas too. Other values are none, and a server of tools may send them.
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.booleans() | st.just([]) | st.just({}) | st.builds(lambda kind: {"type": kind}, TYPES),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES,
            "enum": st.lists(SCALARS | st.sampled_from(["a", "42", [], {}]), max_size=3) | st.none(),
            "const": SCALARS,
            "nullable": st.booleans(),
            "anyOf": st.lists(inner, max_size=3) | st.none(),
            "oneOf": st.lists(inner, max_size=2),
            "allOf": st.lists(inner, max_size=2),
            "items": inner,
            "properties": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2) | st.just([]),
            "$ref": st.just("#/$defs/a"),
        },
    ),
    max_leaves=6,
)
NUMBERS = ["42", " 7 ", "4_2", "٤٢", "-0", "1.5", "1e3", "1e400", "NaN", "inf", "-Infinity", "1", "0", "9" * 400]
WORDS = ["true", "True", " false", "null", "NULL", "None", "", "home", "a\nb", '"x"', "'x'"]
LISTS = ["[1]", "[1e999]", "[NaN]", '["1", true]', '{"a": 1}', '{"a": "1", "b": null}', "{'a': 1}", "[", "{}"]
WRITTEN_VALUES = st.sampled_from(NUMBERS + WORDS + LISTS) | st.text("ab01.,:\"'[]{} \n\\é雪", max_size=8)
VALUES = st.recursive(
    SCALARS | WRITTEN_VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=2),
    max_leaves=4,
)


def write_call(format: str, arguments: dict[str, Any]) -> str:
    """Write a call in words of a format; arguments of qwen3_coder are texts."""
    if format == "qwen3_coder":
        parameters = [f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in arguments.items()]
        return f"<tool_call>\n<function=move>\n{''.join(parameters)}</function>\n</tool_call>"
    text = json.dumps(arguments)
    call = f'{{"name": "move", "arguments": {text}}}'
    texts = {
        "hermes": f"<tool_call>{call}</tool_call>",
        "llama3": call,
        "mistral": f"[TOOL_CALLS]move[ARGS]{text}",
        "mistral's list": f"[TOOL_CALLS][{call}]",
    }
    return texts[format]


@cache
def tokenizer_with(marks: tuple[str, ...]) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=list(marks))


def find_by_vllm(format: str, text: str, tools: Any = TOOLS) -> list[tuple[str, Any]]:
    """Return (name, arguments) of the calls that vLLM's parser finds. Arguments that are no JSON stay text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    marks = NEWER if "[TOOL_CALLS]move" in text or "[ARGS]" in text else MARKS
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=tools)
    parser = ToolParserManager.get_tool_parser(NAMES[format])(tokenizer_with(tuple(marks)), request.tools)
    calls = parser.extract_tool_calls(text, request).tool_calls
    return [(call.function.name, read_json(call.function.arguments)) for call in calls]


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def find_by_rlctl(format: str, text: str, tools: Any = TOOLS) -> list[tuple[str, Any]]:
    """Return (name, arguments) of the calls that a run makes. A mistake has no name, and its error for arguments."""
    calls = parse_tool_calls(text, format, tools).calls
    return [(call.name, call.arguments) if isinstance(call, ToolCall) else ("", call.error) for call in calls]


@pytest.mark.parametrize("format", sorted(TEXTS))
def test_what_vllm_takes_for_a_call_is_one(format: str) -> None:
    for text in TEXTS[format]:
        assert find_by_rlctl(format, text) == find_by_vllm(format, text), text


@pytest.mark.parametrize("format", [*sorted(TEXTS), "mistral's list"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_value_gets_the_type_that_it_has_when_vllm_serves_the_model(format: str, data: st.DataObject) -> None:
    properties = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c"]), SCHEMAS, max_size=3))
    values = WRITTEN_VALUES if format == "qwen3_coder" else VALUES
    arguments = data.draw(st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), values, max_size=4))
    parameters = {"type": "object", "properties": properties}
    tools = [{"type": "function", "function": {"name": "move", "description": "Move.", "parameters": parameters}}]
    text = write_call(format, arguments)
    parser = format.partition("'")[0]
    calls = find_by_rlctl(parser, text, tools)
    # As JSON, 1 and True and 1.0 differ.
    assert json.dumps(calls) == json.dumps(find_by_vllm(parser, text, tools)), (properties, text)


@pytest.mark.parametrize(("format", "text", "reason"), ANSWERED)
def test_a_mistake_that_vllm_calls_is_answered(format: str, text: str, reason: str) -> None:
    assert find_by_vllm(format, text), reason
    (call,) = parse_tool_calls(text, format, TOOLS).calls
    assert isinstance(call, MalformedCall), reason


@pytest.mark.parametrize(("format", "text"), COUNTED)
def test_a_whole_call_beside_a_mistake_counts(format: str, text: str) -> None:
    assert find_by_vllm(format, text) == []
    assert isinstance(parse_tool_calls(text, format, TOOLS).calls[0], ToolCall)


def test_an_entry_of_a_list_that_is_no_call_is_answered() -> None:
    text = f'[TOOL_CALLS] [{ONE}, "junk"]'
    (move,) = find_by_vllm("mistral", text)
    assert find_by_rlctl("mistral", text) == [move, ("", "not a JSON object: '\"junk\"'")]
