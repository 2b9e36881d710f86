"""Conventions of other tools: nested columns, ShareGPT's, Alpaca's and TRL's, read or refused with the remedy."""

from dataclasses import replace
from typing import Any

import pytest

from rlctl.config.data_schema import DatasetSection
from rlctl.data.datasets import Row
from rlctl.data.files import DataError
from rlctl.data.nested_columns import convention, has_column, value_at
from rlctl.data.rows import conversation, question


def row(values: dict[str, Any]) -> Row:
    return Row(0, "a.jsonl:1", values)


def test_a_dotted_name_reaches_into_columns_and_a_column_of_that_name_comes_first() -> None:
    values = {"reward_model": {"ground_truth": "42", "style": None}, "a.b": 1, "a": {"b": 2}, "choices": ["x", "y"]}
    assert value_at(values, "reward_model.ground_truth") == "42"
    assert (value_at(values, "a.b"), value_at(values, "choices.1")) == (1, "y")
    assert value_at(values, "reward_model.other") is None and value_at(values, "choices.9") is None
    assert has_column(values, "reward_model.style") and not has_column(values, "reward_model.other")


def test_verls_rows_are_read_with_a_nested_answer(section: DatasetSection) -> None:
    values = {
        "prompt": [{"role": "user", "content": "1+1="}],
        "reward_model": {"style": "rule", "ground_truth": 2},
    }
    nested = replace(section, answer_key="reward_model.ground_truth")
    assert question(row(values), nested) == ([{"role": "user", "content": "1+1="}], "2")
    assert conversation(row(values), nested)[-1] == {"role": "assistant", "content": "2"}


def test_sharegpts_turns_are_messages(section: DatasetSection) -> None:
    turns = [("system", "Be brief."), ("human", "1+1="), ("gpt", "2")]
    values = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
    messages = conversation(row(values), replace(section, messages_key="conversations"))
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[-1]["content"] == "2"
    values["conversations"][1]["from"] = "robot"
    with pytest.raises(DataError, match=r"a\.jsonl:1: message 2: from must be one of human, .*not 'robot'"):
        conversation(row(values), replace(section, messages_key="conversations"))


def test_a_mark_of_sharegpts_turn_stays(section: DatasetSection) -> None:
    turns = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2", "weight": 0}]
    messages = conversation(row({"messages": turns}), section)
    assert messages[1] == {"role": "assistant", "content": "2", "weight": 0}


@pytest.mark.parametrize(
    ("input_text", "prompt"), [("", "Add them."), ("1 and 1", "Add them.\n\n1 and 1"), (None, "Add them.")]
)
def test_alpacas_input_follows_its_instruction(section: DatasetSection, input_text: str | None, prompt: str) -> None:
    alpaca = replace(section, prompt_key="instruction", answer_key="output")
    values = {"instruction": "Add them.", "input": input_text, "output": "2"}
    assert question(row(values), alpaca) == ([{"role": "user", "content": prompt}], "2")


def test_trls_conversational_prompts_and_completions_are_read(section: DatasetSection) -> None:
    values = {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}],
        "completion": [{"role": "assistant", "content": "2"}],
    }
    messages = conversation(row(values), replace(section, answer_key="completion"))
    assert [message["content"] for message in messages] == ["s", "1+1=", "2"]


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"conversations": []}, "these are ShareGPT's columns: set data.train.messages_key=conversations"),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "these are Alpaca's columns: set data.train.prompt_key=instruction data.train.answer_key=output",
        ),
        ({"prompt": "a", "completion": "b"}, "these are TRL's columns: set data.train.answer_key=completion"),
        (
            {"prompt": "a", "reward_model": {"ground_truth": "b"}},
            "these are verl's columns: set data.train.answer_key=reward_model.ground_truth",
        ),
        ({"question": "a", "answer": "b"}, "set data.train.prompt_key=question"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "these are preferences (DPO, reward models), which "
         "rlctl does not train on"),
        ({"text": "a"}, "whole texts have no prompt and answer, and rlctl does not train on them (language modelling)"),
    ],
)  # fmt: skip
def test_a_convention_that_is_known_is_told_with_the_keys_that_read_it(values: dict[str, Any], remedy: str) -> None:
    assert convention(values, "data.train") == f"; {remedy}"


def test_other_columns_are_left_to_the_list_of_them() -> None:
    assert convention({"a": 1, "b": 2}, "data.train") == ""
