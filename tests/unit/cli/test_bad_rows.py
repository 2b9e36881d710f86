"""Bad rows of data end a command before a start: one line that names file and line of the row, exit code 2."""

import json
from pathlib import Path

import pytest

from rlctl.launch import assembly
from tests.unit.cli.conftest import Rlctl

GOOD = '{"prompt": "1+1=", "answer": "2"}'
BAD = {
    '{"prompt": "1+1=", "answer": ' + "9" * 6000 + "}": "a number of more than 4,300 digits",
    '{"prompt": "1+1=", "answer": "2", "x": ' + "[" * 100_000 + "]" * 100_000 + "}": "nested too deep",
    '{"prompt": "1+1=", "answer": "2", "x": ' + "[" * 120 + "]" * 120 + "}": "nested too deep",
    r'{"prompt": "1+1=\ud800", "answer": "2"}': r"column 'prompt' has the lone surrogate \ud800",
    r'{"prompt": "1+1=", "answer": "\uDC00"}': r"column 'answer' has the lone surrogate \udc00",
    r'{"prompt": "1", "answer": "2", "x": {"y": ["\udfff"]}}': r"column 'x' has the lone surrogate \udfff",
    r'{"messages": [{"role": "user", "content": "\ud83d"}], "answer": "2"}': "column 'messages' has the lone surrogate",
    '{"messages": [{"role": "user", "content": null}], "answer": "2"}': "message 1 (user): content must be text",
    '{"messages": [{"role": "user", "content": [null]}], "answer": "2"}': "message 1 (user): content must be text or",
    '{"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "tool_calls": [{"function": true}]}]}':
        "message 2: a tool call must have a name, and arguments",
    '{"prompt": 11, "answer": "2"}': "column 'prompt' must be text or a list of {role, content}, not the number 11",
    '{"prompt": [11], "answer": "2"}': "'prompt' must be a list of {role, content} or {from, value}, not the number 11",
    '{"messages": 11, "answer": "2"}': "'messages' must be a list of {role, content} or {from, value}, not the number",
    '{"prompt": [{"role": "user", "content": 11}], "answer": "2"}':
        "message 1 (user): content must be text or a list of {type: text, text: ...}, not the number 11",
    '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "tool_calls": 11}]}':
        "message 2: tool_calls must be a list of {name, arguments}, not the number 11",
    '{"prompt": "1+1=", "answer": [2]}': "answer column 'answer' must be text or a finite number, not a list",
    '{"prompt": "1+1=", "answer": NaN}': "answer column 'answer' must be text or a finite number, not nan",
    '{"prompt": "1+1=", "answer": null}': "no answer to compare with: column 'answer' is null",
    '{"prompt": "1+1=", "anwser": "2"}': "no answer to compare with: no column 'answer'; did you mean anwser?",
    '{"prompt": "", "answer": "2"}': "the prompt is empty",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD, ids=BAD.values())
def test_a_bad_row_is_one_line_and_nothing_starts(
    rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr(assembly, "launch", lambda *_, **options: pytest.fail("the run was started"))
    rows = home / "rows.jsonl"
    rows.write_text(f"{GOOD}\n" * 300 + f"{line}\n{GOOD}\n")
    for options in ([], ["--dry-run"]):
        done = rlctl("train", "grpo", "grpo.recipe.yaml", "data.train.path=rows.jsonl", *options)
        assert done.code == 2
        error, last = done.err.splitlines()
        assert error.startswith(f"error: data: {rows}:301: {BAD[line]}")
        assert last == "1 problem; nothing was started"
    assert not (home / "runs").exists()


@pytest.mark.parametrize(
    ("kind", "limits", "complaint"),
    [
        ("grpo", [], "prompt r0 has 81 tokens; with generation.max_new_tokens="),
        ("grpo", ["data.max_prompt_length=20"], "every prompt is longer than data.max_prompt_length=20"),
        ("sft", ["data.max_prompt_length=50"], "left: every prompt is longer than data.max_prompt_length=50"),
        ("sft", [], "no sample is left: every prompt fills the longest sequence of 64 tokens (model.max_length)"),
    ],
)  # fmt: skip
def test_rows_that_are_all_too_long_are_told_by_a_dry_run(
    rlctl: Rlctl, home: Path, kind: str, limits: list[str], complaint: str
) -> None:
    (home / "rows.jsonl").write_text(f'{{"prompt": "{"1+" * 40}=", "answer": "40"}}\n' * 3)
    done = rlctl("train", kind, f"{kind}-tiny", "data.train.path=rows.jsonl", *limits, "--dry-run")
    assert done.code == 2 and complaint in done.err


def test_the_driver_of_a_job_reads_the_rows_before_it_asks_the_cluster_for_anything(
    rlctl: Rlctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "launch", lambda *_, **options: pytest.fail("the run was started"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (home / "rows.jsonl").write_text(f'{GOOD}\n{{"prompt": "", "answer": "2"}}\n')
    done = rlctl("train", "grpo", "grpo.recipe.yaml", "data.train.path=rows.jsonl", "--cluster", "here")
    assert done.code == 2
    error, last = done.err.splitlines()[-2:]
    assert error.startswith(f"error: data: {home / 'rows.jsonl'}:2: the prompt is empty")
    assert last == "1 problem; nothing was started"


def test_a_corrupt_page_of_parquet_is_one_line(rlctl: Rlctl, home: Path) -> None:
    import pyarrow
    from pyarrow.parquet import write_table

    rows = home / "rows.parquet"
    prompts = [f"{number}+1=" for number in range(5000)]
    answers = [str(number + 1) for number in range(5000)]
    table = pyarrow.table({"prompt": prompts, "answer": answers})
    write_table(table, rows, use_dictionary=False, write_page_checksum=True, compression="none")
    command = ("train", "grpo", "grpo.recipe.yaml", "data.train.path=rows.parquet", "--dry-run")
    assert "train 5,000 rows, all read and checked" in " ".join(rlctl(*command).out.split())
    damaged_file = bytearray(rows.read_bytes())
    damaged_file[2000:2004] = b"\xff\x00\xff\x00"
    rows.write_bytes(damaged_file)
    done = rlctl(*command)
    assert done.code == 2
    assert done.err.splitlines()[0].startswith(
        "error: override 1: data.train.path=rows.parquet: rows.parquet:1: rows from this one on cannot be read: "
    )


def test_a_mistyped_answer_column_is_refused_at_once(rlctl: Rlctl) -> None:
    done = rlctl("config", "check", "grpo.recipe.yaml", "data.train.answer_key=anwser")
    assert done.code == 2
    assert "data.train.answer_key: no column anwser; did you mean answer?" in done.err


@pytest.mark.parametrize(
    ("split", "first_prompt", "num_rows"),
    [
        ("train[:90%]", "0", 90),
        ("train[-10%:]", "90", 10),
        ("train[10:20]", "10", 10),
        ("train[:5]+train[95:]", "0", 10),
    ],
)
def test_a_file_is_sliced_as_a_hub_data_set_is(
    rlctl: Rlctl, home: Path, split: str, first_prompt: str, num_rows: int
) -> None:
    lines = [f'{{"prompt": "{number}", "answer": {number}}}\n' for number in range(100)]
    (home / "rows.jsonl").write_text("".join(lines))
    options = ("grpo.recipe.yaml", "data.train.path=rows.jsonl", f"data.train.split={split}", "data.shuffle=false")
    assert json.loads(rlctl("data", "preview", *options, "--json").out)["rows"] == num_rows
    assert f"\n{first_prompt}\nanswer: {first_prompt}\n" in rlctl("data", "preview", *options, "--samples", "1").out


@pytest.mark.parametrize("split", ["test", "train[", "train[50:50]"])
def test_a_split_that_a_file_does_not_have_is_one_line(rlctl: Rlctl, home: Path, split: str) -> None:
    done = rlctl("data", "preview", "grpo.recipe.yaml", f"data.train.split={split}")
    assert done.code == 2
    error, _ = done.err.splitlines()
    assert error.startswith(f"error: data: {home / 'train.jsonl'}: ") and split in error


def test_the_plan_names_the_tokens_that_end_an_answer(rlctl: Rlctl) -> None:
    out = rlctl("train", "grpo", "grpo.recipe.yaml", "generation.stop_token_ids=[3]", "--dry-run").out
    assert "answers end at <eos> 1 (tokenizer), 0 3 (generation.stop_token_ids)" in " ".join(out.split())


def test_rows_without_an_answer_are_counted_where_a_reward_of_ones_own_may_do_without(rlctl: Rlctl, home: Path) -> None:
    (home / "rows.jsonl").write_text(f'{GOOD}\n{{"prompt": "2+2="}}\n')
    options = ("grpo.recipe.yaml", "data.train.path=rows.jsonl", "rewards=[{name: mine:brevity}]")
    assert "; 1 without an answer" in rlctl("data", "preview", *options).out
