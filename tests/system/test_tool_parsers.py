"""Tool calls are found wherever vLLM's own parsers find them, with the same names and arguments."""

import json
from typing import Any

import pytest

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
# vLLM calls these with no arguments, or with cut ones. They are answered with the mistake instead.
ANSWERED = [
    ("qwen3_coder", "<tool_call><function=move>steps 1</function></tool_call>"),
    ("qwen3_coder", "<tool_call><function=move><parameter=where>ho"),
]


def theirs(format: str, text: str) -> list[Any]:
    """Return the calls that vLLM's parser finds: (name, arguments) each."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    marks = NEWER if "[TOOL_CALLS]move" in text else MARKS
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, additional_special_tokens=marks)
    request: Any = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=TOOLS)  # type: ignore[list-item]
    parser = ToolParserManager.get_tool_parser(NAMES[format])(tokenizer, request.tools)
    found = parser.extract_tool_calls(text, request).tool_calls
    return [(each.function.name, json.loads(each.function.arguments)) for each in found]


@pytest.mark.parametrize("format", sorted(TEXTS))
def test_what_vllm_takes_for_a_call_is_one(format: str) -> None:
    for text in TEXTS[format]:
        ours = parse_tool_calls(text, format, TOOLS).calls
        assert [(each.name, each.arguments) for each in ours if isinstance(each, ToolCall)] == theirs(format, text), (
            text
        )
        assert not any(isinstance(each, MalformedCall) for each in ours), text


@pytest.mark.parametrize(("format", "text"), ANSWERED)
def test_what_vllm_calls_without_its_arguments_is_answered(format: str, text: str) -> None:
    assert theirs(format, text) == [("move", {})]
    (only,) = parse_tool_calls(text, format, TOOLS).calls
    assert isinstance(only, MalformedCall)
