import json
from dataclasses import replace

import pytest

from rlctl.data.chat import Chat
from rlctl.data.datasets import Row
from rlctl.data.files import DataError
from rlctl.data.tokenize import read_tasks, tokenize_prompts, tokenize_samples
from tests.unit.data.conftest import ALL, CHATML


def rows(*values: dict) -> list[Row]:
    return [Row(number, f"some.jsonl:{number + 1}", columns) for number, columns in enumerate(values)]


@pytest.fixture
def plain(tokenizer) -> Chat:
    return Chat(tokenizer, None, None)


@pytest.fixture
def chatml(tokenizer) -> Chat:
    return Chat(tokenizer, CHATML, None)


def test_a_prompt_keeps_text_tokens_answer_and_row(plain, section):
    columns = {"prompt": "1+1=", "answer": 2, "level": "easy"}
    (prompt,), _ = tokenize_prompts(rows(columns), section, plain, None)
    assert (prompt.id, prompt.text, prompt.answer, prompt.row) == ("r0", "1+1=", "2", columns)
    assert plain.tokenizer.decode(prompt.tokens) == "1+1="


def test_a_template_wraps_a_prompt_text_as_a_user_message(chatml, section):
    (prompt,), _ = tokenize_prompts(rows({"prompt": "hi", "answer": "x"}), section, chatml, None)
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_chats_trailing_assistant_message_is_the_answer_unless_a_column_has_it(chatml, section):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    prompts, _ = tokenize_prompts(rows({"messages": chat}, {"messages": chat, "answer": "no"}), section, chatml, None)
    assert [prompt.answer for prompt in prompts] == ["yes", "no"]
    assert all("yes" not in prompt.text for prompt in prompts)


def test_chats_without_a_template_are_told(plain, chatml, section):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    several = rows({"messages": chat}, {"prompt": "2"}, {"messages": [*chat, {"role": "assistant", "content": "2"}]})
    _, report = tokenize_prompts(several, section, plain, None)
    begin = "2 rows have several messages, and there is no chat template: joined without roles"
    assert [warning[: len(begin)] for warning in report.warnings] == [begin]
    assert tokenize_prompts(several, section, chatml, None)[1].warnings == []


def test_text_that_the_tokenizer_does_not_know_is_counted(plain, section):
    odd = rows({"prompt": "1+1=", "answer": "2"}, {"prompt": "éé1=", "answer": "é"}, {"prompt": "é", "answer": "2"})
    _, prompt_report = tokenize_prompts(odd, section, plain, None)
    _, sample_report = tokenize_samples(odd, section, plain, ALL, None, 9)
    line = "tokens of some.jsonl:2 are <unk>, which stands for text that the tokenizer does not know"
    assert prompt_report.warnings == [f"2 of 4 {line}; 2 rows have 3 such tokens"]
    assert sample_report.warnings == [f"3 of 6 {line}; 2 rows have 4 such tokens"]
    assert tokenize_prompts(odd[:1], section, plain, None)[1].warnings == []
    assert (prompt_report + prompt_report).unknown_tokens == 6


def test_a_question_and_its_answer_need_no_template(plain, section):
    pair = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for chat, warnings in ((pair, 0), ([{"role": "system", "content": "Add."}, *pair], 1)):
        _, report = tokenize_samples(rows({"messages": chat}), section, plain, ALL, None, 1000)
        assert len(report.warnings) == warnings


def test_long_prompts_are_cut_and_the_report_says_so(plain, section):
    long_rows = rows(*({"prompt": "a" * length} for length in (3, 9, 4, 12)))
    prompts, report = tokenize_prompts(long_rows, section, plain, 4)
    assert [prompt.id for prompt in prompts] == ["r0", "r2"]
    assert (report.rows, report.dropped, report.longest) == (4, 2, 12)
    assert str(report) == "4 rows; 2 dropped (prompt too long); longest 12 tokens; 2 without an answer"


def test_nothing_left_after_the_cut_is_an_error(plain, section):
    with pytest.raises(DataError, match=r"every prompt is longer than data\.max_prompt_length=2"):
        tokenize_prompts(rows({"prompt": "abc"}), section, plain, 2)
    for max_prompt_length, max_length, limit in (
        (None, 3, r"fills the longest sequence of 3 tokens \(model\.max_length\)"),
        (9, 3, r"fills the longest sequence of 3 tokens \(model\.max_length\)"),
        (2, 9, r"is longer than data\.max_prompt_length=2"),
    ):
        with pytest.raises(DataError, match=f"^some.jsonl: no sample is left: every prompt {limit}$"):
            row = rows({"prompt": "abc", "answer": "d"})
            tokenize_samples(row, section, plain, ALL, max_prompt_length, max_length)


def test_a_response_is_trained_on_and_its_prompt_is_not(plain, section):
    (sample,), _ = tokenize_samples(rows({"prompt": "1+1=", "answer": "2"}), section, plain, ALL, None, 64)
    assert plain.tokenizer.decode(sample.tokens) == "1+1=2<eos>"
    assert sample.mask.tolist() == [False] * 4 + [True] * 2
    assert (sample.tokens.dtype, sample.mask.dtype) == ("int32", "bool")


def test_samples_are_truncated_at_max_length_and_those_without_a_trained_token_dropped(plain, section):
    values = [{"prompt": "ab", "answer": "c"}, {"prompt": "ab", "answer": "cdef"}, {"prompt": "abcd", "answer": "e"}]
    samples, report = tokenize_samples(rows(*values), section, plain, ALL, None, 4)
    assert [len(sample.tokens) for sample in samples] == [4, 4]
    assert (report.dropped, report.truncated, report.longest) == (1, 1, 7)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"question": "x"}, "no column 'prompt' of text, nor 'messages' (the row has: 'question')"),
        ({"prompt": 3}, "column 'prompt' must be text or a list of {role, content}, not the number 3"),
        ({"messages": "x"}, "'messages' must be a list of {role, content}"),
        ({"messages": [{"role": "user"}]}, "'messages' must be a list of {role, content}"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "nothing before the assistant's message"),
        ({"prompt": ""}, "the prompt is empty"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(plain, section, value, complaint):
    with pytest.raises(DataError) as error:
        tokenize_prompts(rows({"prompt": "fine"}, value), section, plain, None)
    assert str(error.value).startswith(f"some.jsonl:2: {complaint}")


@pytest.mark.parametrize("key", ["chess", None, ["maze"], {"maze": 1}])
def test_a_row_must_name_one_of_several_environments(plain, section, key):
    with pytest.raises(DataError, match=r"some\.jsonl:1: column 'environment' must be one of maze, guess, not"):
        read_tasks(rows({"environment": key}), section, plain, {"maze": 0, "guess": 0})


def test_a_bad_sample_is_named_by_file_and_line(plain, section):
    with pytest.raises(DataError, match=r"some\.jsonl:1: no answer to train on: no column 'answer'"):
        tokenize_samples(rows({"prompt": "x"}), section, plain, ALL, None, 64)
    with pytest.raises(DataError, match=r"some\.jsonl:1: no assistant message"):
        tokenize_samples(rows({"messages": [{"role": "user", "content": "x"}]}), section, plain, ALL, None, 64)


def test_what_a_template_raises_is_named_by_file_and_line(tokenizer, section):
    strict = Chat(tokenizer, "{{ raise_exception('roles must alternate') }}", None)
    with pytest.raises(DataError, match=r"some\.jsonl:1: the chat template refuses the row: roles must alternate"):
        tokenize_prompts(rows({"prompt": "x"}), section, strict, None)


def test_another_columns_names_are_followed(plain, section):
    renamed = replace(section, prompt_key="question", answer_key="solution")
    (prompt,), _ = tokenize_prompts(rows({"question": "x", "solution": "y"}), renamed, plain, None)
    assert (prompt.text, prompt.answer) == ("x", "y")


def test_rows_that_spell_control_tokens_are_counted_and_the_first_is_named(chatml, section):
    forged = {"prompt": "a<|im_end|>b<|im_start|>", "answer": "c"}
    spelling = rows({"prompt": "a", "answer": "b"}, forged, {"prompt": "x", "answer": "y<|im_end|>z"})
    prompts, prompt_report = tokenize_prompts(spelling, section, chatml, None)
    samples, sample_report = tokenize_samples(spelling, section, chatml, ALL, None, 64)
    assert (prompt_report.spelled, sample_report.spelled) == (1, 2)
    assert str(sample_report).endswith("2 spell control tokens (encoded as text)")
    (warning,) = sample_report.warnings
    assert warning.startswith("some.jsonl:2 spells <|im_end|> (and 1 more row), which is encoded as text")
    assert warning.endswith("data.special_tokens=allow makes tokens of all that rows spell")
    assert prompts[1].text.count("<|im_end|>") == 2, "a person reads the text as it was"
    end = chatml.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [sample.tokens.tolist().count(end) for sample in samples] == [2, 2, 2], "each turn's own"
    assert (prompt_report + sample_report).warnings[0].startswith("some.jsonl:2")
    allowed = replace(chatml, special_tokens="allow")
    _, report = tokenize_samples(spelling, section, allowed, ALL, None, 64)
    assert (report.spelled, report.cut_turns) == (0, 1)


def test_a_token_that_the_model_has_no_row_for_is_refused_with_its_place(tokenizer, section, tmp_path):
    row = rows({"prompt": "1+1=", "answer": "2"})
    last_token = max(tokenizer("1+1=", add_special_tokens=False).input_ids)
    for count, has_row in ((last_token, False), (last_token + 1, True)):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"vocab_size": count}))
        chat = Chat(tokenizer, None, None, folder)
        if has_row:
            assert len(tokenize_prompts(row, section, chat, None)[0]) == 1
        else:
            with pytest.raises(DataError, match=rf"^some\.jsonl:1: token {count} .* vocabulary of {count}: is the tok"):
                tokenize_prompts(row, section, chat, None)
        beyond = f"the tokenizer has {len(tokenizer) - count:,} tokens beyond the model's vocabulary of {count:,}"
        assert any(warning.startswith(beyond) for warning in chat.ends.warnings)
