"""Columns of a row that other tools give a meaning: read, refused, or ignored and said; marks of messages."""

from typing import Any

import pytest

from rlctl.config.data_schema import DatasetSection, TrainDataSection
from rlctl.data.chat import Chat
from rlctl.data.datasets import Row
from rlctl.data.files import DataError
from rlctl.data.nested_columns import columns_of
from rlctl.data.row_columns import row_tools
from rlctl.data.rows import MARKS, conversation, question
from rlctl.data.tokenize import LengthReport, read_tasks, tokenize_prompts, tokenize_samples
from tests.unit.data.conftest import ALL, CHATML

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
PAIR = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
# Writes no message but the user's and the assistant's, takes an argument, and shows no tool.
SHORT = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role in ('user', 'assistant') %}")
SHORT += "{% if not enable_thinking and add_generation_prompt %}<think></think>{% endif %}"


def row(**values: Any) -> Row:
    return Row(0, "a.jsonl:1", values)


def prompt_of(chat: Chat, section: DatasetSection, **values: Any) -> tuple[str, LengthReport]:
    (task,), report = tokenize_prompts([row(**values)], section, chat, None)
    return task.text, report


@pytest.mark.parametrize("name", columns_of("refused"))
@pytest.mark.parametrize("value", ["dots.png", ["dots.png"], [{"bytes": b"x", "path": None}]])
def test_pictures_films_and_sounds_are_refused(section: DatasetSection, name: str, value: Any) -> None:
    media_row = row(prompt="<image>How many?", answer="4", **{name: value})
    for read in (question, conversation):
        with pytest.raises(DataError, match=rf"^a\.jsonl:1: column '{name}' holds .*, and rlctl trains on text alone"):
            read(media_row, section)
    # An environment makes its own prompt of the row.
    assert question(media_row, section, needs_prompt=False)[0]
    for empty in (None, [], ""):
        assert question(row(prompt="How many?", **{name: empty}), section)[0]


@pytest.mark.parametrize("name", ["tool_defs", "functions"])
@pytest.mark.parametrize("tools", [{}, {"tools": None}, {"tools": []}, {"tools": ""}])
def test_tools_of_another_name_are_read_where_tools_has_none(tools: dict[str, Any], name: str) -> None:
    assert row_tools(row(**tools, **{name: [ADD["function"]]})) == [ADD]
    assert row_tools(row(tools=[ADD], **{name: [{"name": "other"}]})) == [ADD]
    assert row_tools(row(**tools, **{name: "sin, cos"})) == []
    with pytest.raises(DataError, match="column 'tools' must be a list of JSON schemas"):
        row_tools(row(tools="sin, cos"))


@pytest.mark.parametrize(
    ("values", "read", "ignored"),
    [
        ({"functions": [ADD]}, "tools in column 'functions'", ""),
        ({"functions": "sin, cos"}, "", "a column 'functions', which is not a list of JSON schemas of functions"),
        ({"system": "Be brief."}, "a system message in column 'system'", ""),
        (
            {"system_prompt": "Be brief.", "system": ["x"]},
            "a system message in column 'system_prompt'",
            "a column 'system'",
        ),
        ({"functions": [ADD], "tool_defs": "sin"}, "tools in column 'functions'", "a column 'tool_defs', which is not"),
        ({"tools": [ADD], "functions": [ADD]}, "", "a column 'functions' beside the tools of column 'tools'"),
        ({"system": {"os": "linux"}}, "", "a column 'system' that is no text, or comes beside a system message"),
        ({"documents": [{"text": "x"}]}, "", "a column 'documents' (documents of the chat template): passed over"),
        ({"documents": [], "history": None, "weight": ""}, "", ""),
    ],
)
def test_a_column_that_is_read_or_ignored_is_said(
    tokenizer: Any, section: DatasetSection, values: dict[str, Any], read: str, ignored: str
) -> None:
    chat = Chat(tokenizer, CHATML, None)
    for _, report in (
        prompt_of(chat, section, prompt="2+2?", **values),
        tokenize_samples([row(messages=PAIR, **values)], section, chat, ALL, None, 999),
    ):
        lines = [line for line in report.ignored if "leaves out" not in line]
        assert list(report.read) == ([read] if read else [])
        assert [line[: len(ignored)] for line in lines] == ([ignored] if ignored else [])
        doubled = report + report
        assert doubled.read == dict.fromkeys(report.read, 2) and doubled.ignored == dict.fromkeys(report.ignored, 2)


@pytest.mark.parametrize(
    ("values", "ignored"),
    [
        ({"prompt": "2+2?", "functions": [ADD]}, "'functions' (the environment or the agent shows tools of its own)"),
        ({"prompt": "2+2?", "tools": [ADD]}, "'tools' (the environment or the agent shows tools of its own)"),
        ({"answer": "4", "system": "Be brief."}, "'system' without a prompt that it could stand before"),
    ],
)
def test_an_environment_ignores_what_it_does_not_show(
    tokenizer: Any, section: DatasetSection, values: dict[str, Any], ignored: str
) -> None:
    _, report = read_tasks([row(**values)], section, Chat(tokenizer, CHATML, None), {})
    assert (report.read, report.warnings) == ({}, [f"1 row has a column {ignored}: passed over"])


def test_a_system_column_is_the_system_message_unless_the_chat_has_one(tokenizer: Any, section: DatasetSection) -> None:
    chat = Chat(tokenizer, CHATML, "of the config")
    text, _ = prompt_of(chat, section, prompt="2+2?", system="Be brief.")
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?")
    messages = [{"role": "system", "content": "Be long."}, PAIR[0]]
    text, report = prompt_of(chat, section, messages=messages, system="Be brief.")
    assert "Be brief." not in text and "comes beside a system message" in report.warnings[0]


def test_a_rows_own_arguments_of_the_template_are_honoured(tokenizer: Any, section: DatasetSection) -> None:
    chat = Chat(tokenizer, SHORT, None, template_kwargs={"enable_thinking": True})
    assert not prompt_of(chat, section, prompt="x")[0].endswith("</think>")
    for value in ({"enable_thinking": False}, '{"enable_thinking": false}'):
        assert prompt_of(chat, section, prompt="x", chat_template_kwargs=value)[0].endswith("<think></think>")
    text, report = prompt_of(chat, section, prompt="x", chat_template_kwargs={"depth": 3})
    warning = "1 row has chat_template_kwargs.depth, which is no argument of the chat template: passed over"
    assert report.warnings == [warning] and not text.endswith("</think>")
    # Players of episodes write the prompts of these tasks.
    _, report = read_tasks([row(prompt="x", chat_template_kwargs={"depth": 3})], section, chat, {})
    assert report.warnings == [warning]
    bad_row = row(prompt="x", chat_template_kwargs="off")
    problem = r"^a\.jsonl:1: column 'chat_template_kwargs' must be an object"
    with pytest.raises(DataError, match=problem):
        tokenize_prompts([bad_row], section, chat, None)
    with pytest.raises(DataError, match=problem):
        read_tasks([bad_row], section, chat, {})


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_message_that_the_template_leaves_out_is_counted(
    tokenizer: Any, section: TrainDataSection, role: str
) -> None:
    request = [{"role": role, "content": "Answer in French."}, *PAIR]
    chats = [request, request, PAIR, [{**request[0], "content": ""}, *PAIR]]
    rows = [row(messages=messages) for messages in chats]
    warning = f"2 rows have a message of role {role} that the chat template leaves out: the model does not see it"
    for template, lines in ((SHORT, [warning]), (CHATML, [])):
        chat = Chat(tokenizer, template, None, template_kwargs={"enable_thinking": True} if template == SHORT else {})
        for _, report in (
            tokenize_prompts(rows, section, chat, None),
            tokenize_samples(rows, section, chat, ALL, None, 999),
        ):
            assert [line.partition(";")[0] for line in report.warnings] == lines


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_a_turn_whose_mark_is_false_is_not_trained(
    tokenizer: Any, section: DatasetSection, mark: str, value: Any
) -> None:
    chat = Chat(tokenizer, CHATML, None)
    bad_turn = {**PAIR[1], "content": "5", mark: value}
    doubt = {"role": "user", "content": "Sure?"}
    marked = [PAIR[0], bad_turn, doubt, {**PAIR[1], mark: 1}, doubt, {**PAIR[1], "content": "7", mark: None}]
    unmarked = [{**message, mark: None} for message in marked]
    (sample,), report = tokenize_samples([row(messages=marked)], section, chat, ALL, None, 999)
    (unmarked_sample,), _ = tokenize_samples([row(messages=unmarked)], section, chat, ALL, None, 999)
    assert chat.decode(sample.tokens[sample.mask]) == "4<|im_end|>7<|im_end|>"
    unmarked_tokens = unmarked_sample.tokens
    assert chat.decode(unmarked_tokens[unmarked_sample.mask]) == "5<|im_end|>4<|im_end|>7<|im_end|>"
    assert sample.tokens.tolist() == unmarked_tokens.tolist()
    assert str(report).endswith("; 1 turn marked as not to be trained")
    samples, report = tokenize_samples([row(messages=[PAIR[0], bad_turn])], section, chat, ALL, None, 999)
    assert (samples, report.untrained_rows) == ([], 1)


def test_a_false_value_of_a_key_like_a_mark_is_said(tokenizer: Any, section: DatasetSection) -> None:
    keys: dict[str, Any] = {"is_trained": False, "loss_weight": 0, "tool": 0, "masked": None, "training": True}
    rows = [row(messages=[PAIR[0], {**PAIR[1], **keys}])] * 2
    _, report = tokenize_samples(rows, section, Chat(tokenizer, CHATML, None), ALL, None, 999)
    reason = "which is no mark that is read: it is trained; marks are weight, train, loss, loss_mask, trainable"
    assert report.warnings == [
        f"2 rows have a turn with is_trained=false, {reason}", f"2 rows have a turn with loss_weight=0, {reason}"
    ]  # fmt: skip
