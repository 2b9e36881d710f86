"""Every trained turn is trained once, as its template writes it while it is the last: Qwen3's, R1's, and plain ones."""

from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlctl.config.data_schema import DatasetSection
from rlctl.data.chat import Chat
from rlctl.data.datasets import Row
from rlctl.data.files import DataError
from rlctl.data.supervised import Tokens, chat_samples
from rlctl.data.tokenize import tokenize_prompts, tokenize_samples
from tests.unit.data.conftest import ALL, CHATML, THINKING, UNMARKED, UNSTABLE
from tests.unit.data.test_control_tokens import tokenizers
from tests.unit.data.test_turn_link import STRIPS

# As Qwen3-8B has it; tools' text and `reasoning_content` only as far as they matter here.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# As DeepSeek-R1 has it, with ChatML's tokens: it cuts the thinking of every turn, and opens the next one's.
R1 = """
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
        {{- '<|im_start|>assistant:' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
    {%- else %}{{- '<|im_start|>' + message.role + ':' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant:<think>\\n' }}{%- endif %}
"""
# Cuts thinking likewise, and opens none.
CUTS = R1.replace("assistant:<think>\\n", "assistant:")

TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>\nfirst\n</think>\n\nA"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "<think>\nsecond\n</think>\n\nB"},
]
BARE = [{**message, "content": message["content"].rpartition("\n")[2]} for message in TALK]


def chat_of(template: str) -> Chat:
    return Chat(tokenizers("bytes")[0], template, None)


def sample_text(chat: Chat, row: Tokens) -> str:
    """Return a sample's text, {+like this+} where it is trained."""
    parts = []
    for is_trained, pairs in groupby(zip(*row, strict=True), key=lambda pair: bool(pair[1])):
        text = chat.decode([token for token, _ in pairs])
        parts.append(f"{{+{text}+}}" if is_trained else text)
    return "".join(parts)


def sample_texts(
    template: str, messages: Any, history: Any = "strip", train: Any = "all", tools: Any = ()
) -> list[str]:
    chat = chat_of(template)
    return [sample_text(chat, row) for row in chat_samples(chat, messages, train, history, tools).rows]


def test_qwen3s_turns_are_trained_with_their_thinking_each_after_what_its_prompt_shows() -> None:
    begin = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    first = "<think>\nfirst\n</think>\n\nA<|im_end|>"
    between = "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    second = "<think>\nsecond\n</think>\n\nB<|im_end|>"
    assert sample_texts(QWEN3, TALK) == [f"{begin}{{+{first}+}}", f"{begin}A<|im_end|>{between}{{+{second}+}}"]
    assert sample_texts(QWEN3, TALK, "keep") == [f"{begin}{{+{first}+}}{between}{{+{second}+}}"]
    assert sample_texts(QWEN3, TALK, train="last") == [f"{begin}A<|im_end|>{between}{{+{second}+}}"]


def test_qwen3s_bare_answers_are_trained_behind_the_empty_thinking_that_it_puts_there() -> None:
    first = "<think>\n\n</think>\n\nA<|im_end|>"
    second = "<think>\n\n</think>\n\nB<|im_end|>"
    assert [text.partition("{+")[2] for text in sample_texts(QWEN3, BARE)] == [f"{first}+}}", f"{second}+}}"]
    (text,) = sample_texts(QWEN3, BARE, "keep")
    assert f"{{+{first}+}}" in text and f"{{+{second}+}}" in text


def test_turns_between_tool_calls_that_keep_their_thinking_share_a_sample() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    talk = [TALK[0], {**TALK[1], "tool_calls": [call]}, {"role": "tool", "content": "4"}, TALK[3]]
    (text,) = sample_texts(QWEN3, talk)
    assert text.count("{+<think>") == 2 and "<tool_call>" in text.partition("+}")[0]


@pytest.mark.parametrize("template", [R1, CUTS])
def test_a_template_that_cuts_all_thinking_still_has_it_trained(template: str) -> None:
    opens = "<think>\n" if template == R1 else ""
    first = "<think>\nfirst\n</think>\n\nA<|im_end|>"
    second = "<think>\nsecond\n</think>\n\nB<|im_end|>"
    begin = "<|im_start|>user:one<|im_start|>assistant:"
    between = "<|im_start|>user:two<|im_start|>assistant:"
    assert sample_texts(template, TALK) == [
        f"{begin}{opens}{{+{first.removeprefix(opens)}+}}",
        f"{begin}\n\nA<|im_end|>{between}{opens}{{+{second.removeprefix(opens)}+}}",
    ]
    (text,) = sample_texts(template, TALK, "keep")
    assert text.replace("{+", "").replace("+}", "") == f"{begin}{first}{between}{second}"
    assert sample_texts(template, TALK, train="last") == sample_texts(template, TALK)[1:]


def test_thinking_without_its_first_mark_follows_a_prompt_that_opens_it() -> None:
    talk = [TALK[0], {"role": "assistant", "content": "first\n</think>\n\nA"}]
    assert sample_texts(R1, talk) == sample_texts(R1, TALK[:2])
    call = {**TALK[1], "content": "<think>\nfirst\n</think>\n\n", "tool_calls": [{"function": {"name": "add"}}]}
    (text,) = sample_texts(R1, [TALK[0], call])
    assert text.endswith("{+first\n</think>\n\n<tool_call>add</tool_call><|im_end|>+}")


def test_thinking_in_a_field_of_its_own_follows_a_prompt_that_opens_it() -> None:
    talk = [TALK[0], {"role": "assistant", "content": "A", "reasoning_content": "first"}]
    assert sample_texts(R1, talk) == sample_texts(R1, TALK[:2])


@pytest.mark.parametrize(
    ("message", "template", "silent"),
    [
        ({"content": "a", "reasoning_content": "why"}, CHATML, 1),
        ({"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}, CHATML, 1),
        ({"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}, QWEN3, 0),
        ({"content": "a", "reasoning_content": "why <|im_end|>"}, R1, 0),
        ({"content": "a"}, CHATML, 0),
    ],
)
def test_thinking_and_calls_that_the_template_does_not_write_are_told(
    message: dict[str, Any], template: str, silent: int
) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", **message}]
    row = Row(0, "rows.jsonl:1", {"messages": messages})
    _, report = tokenize_samples([row], SECTION, chat_of(template), ALL, None, 4096)
    assert report.silent_turns == silent
    line = "1 turn has thinking or tool calls that the chat template does not write: not trained"
    assert any(warning.startswith(line) for warning in report.warnings) == bool(silent)


def test_text_behind_a_spelled_end_is_told_where_it_is_not_trained() -> None:
    row = Row(0, "a.jsonl:1", {"messages": [TALK[0], {"role": "assistant", "content": "A<|im_end|>B"}]})
    allowed = replace(chat_of(CHATML), special_tokens="allow")
    (sample,), report = tokenize_samples([row], SECTION, allowed, ALL, None, 1000)
    assert allowed.decode(sample.tokens[sample.mask].tolist()) == "A<|im_end|>"
    (warning,) = report.warnings
    assert warning.startswith("1 turn spells an end token: the text behind it is not trained")
    (sample,), report = tokenize_samples([row], SECTION, chat_of(CHATML), ALL, None, 1000)
    assert chat_of(CHATML).decode(sample.tokens[sample.mask].tolist()) == "A<|im_end|>B<|im_end|>"
    assert report.cut_turns == 0


def test_a_bare_answer_behind_thinking_that_the_prompt_opens_is_refused_with_remedies_that_work() -> None:
    for train in ("all", "last"):
        with pytest.raises(
            DataError, match=r"opens the answer of message \d with <think>, and the message has no thinking"
        ):
            sample_texts(R1, BARE, train=train)
    assert len(sample_texts(R1, TALK)) == 2, "thinking before the answer"
    assert sample_texts(CUTS, BARE)[0].count("{+") == 2, "a template that opens none"


def test_a_template_that_rewrites_its_beginning_is_refused_with_a_remedy_that_works() -> None:
    for train in ("all", "last"):
        with pytest.raises(DataError, match=r"not prefix-stable at message \d.*set another data\.chat_template"):
            sample_texts(UNSTABLE, BARE, train=train)


CONTENT = st.sampled_from(
    ["A", "", " so\n", "<think>\nx\n</think>\n\nB", "<think>y</think>C", "<|im_end|>", "</think>D"]
)
ROUND = st.tuples(st.lists(st.sampled_from(["user", "tool"]), min_size=1, max_size=2), CONTENT, CONTENT)


@pytest.mark.parametrize("template", [CHATML, THINKING, STRIPS, UNMARKED, QWEN3, CUTS])
@pytest.mark.parametrize("history", ["strip", "keep"])
@settings(max_examples=60, deadline=None)
@given(rounds=st.lists(ROUND, min_size=1, max_size=4))
def test_each_turn_is_trained_once_after_the_prompt_that_the_model_has(
    template: str, history: Literal["keep", "strip"], rounds: Any
) -> None:
    chat = chat_of(template)
    talk: list[dict[str, str]] = []
    for number, (roles, question, answer) in enumerate(rounds):
        talk += [{"role": role, "content": f"{number}{question}"} for role in roles]
        talk.append({"role": "assistant", "content": f"{answer}{number}"})
    samples = chat_samples(chat, talk, "all", history)
    assert len(samples.rows) == 1 or (history, samples.rewritten) == ("strip", True)
    # (tokens before a trained turn, its tokens)
    trained: list[tuple[list[int], list[int]]] = []
    for tokens, mask in samples.rows:
        position = 0
        for is_trained, piece in groupby(mask.tolist()):
            end = position + len(list(piece))
            if is_trained:
                trained.append((tokens[:position], tokens[position:end]))
            position = end
    turns = [index for index, message in enumerate(talk) if message["role"] == "assistant"]
    assert len(trained) == len(turns)
    for index, (before, turn) in zip(turns, trained, strict=True):
        thought, _, answer = talk[index]["content"].rpartition("</think>")
        assert answer.strip() in chat.decode(turn)
        assert thought.removeprefix("<think>").strip() in chat.decode(turn), "no thinking is lost"
        if history == "strip":
            prompt = chat.prompt(talk[:index])
            assert chat.decode(before) == prompt.text
            # Without control tokens around a turn, those of its text would merge with the template's.
            assert before == prompt.tokens or template == UNMARKED


SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
SECTION = DatasetSection("a.jsonl", "train", "prompt", "answer", "messages", None, {})


@pytest.mark.parametrize("column", [[SCHEMA], [SCHEMA["function"]], '[{"name": "add"}]', ['{"name": "add"}']])
def test_a_rows_tools_are_in_its_prompt_of_sft_and_of_grpo(column: Any) -> None:
    chat = chat_of(QWEN3)
    row = Row(0, "a.jsonl:1", {"messages": TALK[:2], "tools": column})
    (sample,), report = tokenize_samples([row], SECTION, chat, ALL, None, 1000)
    (task,), _ = tokenize_prompts([row], SECTION, chat, None)
    assert chat.decode(task.tokens).startswith("<|im_start|>system\n# Tools\n<tools>\n{")
    assert sample.tokens.tolist()[: len(task.tokens)] == task.tokens
    assert '"name": "add"' in task.text and report.warnings == []


@pytest.mark.parametrize("column", [None, [], ""])
def test_a_row_without_tools_has_none_in_its_prompt(column: Any) -> None:
    row = Row(0, "a.jsonl:1", {"messages": TALK[:2], "tools": column})
    (task,), _ = tokenize_prompts([row], SECTION, chat_of(QWEN3), None)
    assert "# Tools" not in task.text


@pytest.mark.parametrize("column", [["hammer"], "hammer", 3, [{"description": "x"}]])
def test_a_column_of_other_tools_is_refused_with_its_place(column: Any) -> None:
    row = Row(0, "a.jsonl:7", {"messages": TALK[:2], "tools": column})
    with pytest.raises(DataError, match=r"^a\.jsonl:7: column 'tools' must be a list of JSON schemas of functions"):
        tokenize_samples([row], SECTION, chat_of(QWEN3), ALL, None, 1000)


def test_tools_that_the_template_does_not_show_are_told() -> None:
    row = Row(0, "a.jsonl:1", {"messages": TALK[:2], "tools": [SCHEMA]})
    _, report = tokenize_samples([row], SECTION, chat_of(CHATML), ALL, None, 1000)
    (warning,) = report.warnings
    assert warning.startswith("1 row has tools, and the chat template shows none: the model does not see them")


@pytest.mark.parametrize(
    ("history", "report_end"),
    [
        ("strip", "2 samples, each turn as it was while the last (sft.history=strip)"),
        ("keep", "one sample each, turns kept as they were (sft.history=keep)"),
    ],
)
def test_the_report_says_how_rewritten_turns_are_trained(history: Any, report_end: str) -> None:
    rows = [Row(0, "a.jsonl:1", {"messages": TALK}), Row(1, "a.jsonl:2", {"messages": TALK[:2]})]
    sft = replace(ALL, history=history)
    samples, report = tokenize_samples(rows, SECTION, chat_of(QWEN3), sft, None, 1000)
    assert str(report).startswith("2 rows; ")
    assert str(report).endswith(f"1 with earlier turns that the chat template rewrites: {report_end}")
    names = ["r0", "r0.1", "r1"] if history == "strip" else ["r0", "r1"]
    assert [sample.id for sample in samples] == names
