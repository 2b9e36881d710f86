from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.config.data_schema import TrainDataSection
from rlctl.config.schema import GrpoConfig, SftConfig
from rlctl.data.datasets import Row
from rlctl.data.files import DataError
from rlctl.data.load_data import RowReader, load_chat, load_prompts, load_samples, split_off
from rlctl.preflight.load import load

SUMS = Path(__file__).parents[3] / "recipes" / "tiny-data"


def test_the_tiny_recipes_files_become_prompts_and_samples() -> None:
    grpo = load("grpo", "grpo-tiny", ["data.train.limit=5", "data.max_prompt_length=6"]).config
    sft = load("sft", "sft-tiny", ["data.train.limit=5"]).config
    assert isinstance(grpo, GrpoConfig) and isinstance(sft, SftConfig)
    rows = RowReader(grpo).take()
    chat = load_chat(grpo, grpo.model.path)
    assert (len(rows.train), len(rows.validation)) == (5, 200)
    tasks, report = load_prompts(grpo, grpo.data.train, chat, rows.train)
    assert (report.rows, report.dropped, len(tasks)) == (5, 0, 5)
    assert (tasks[0].text, tasks[0].answer) == ("15+34=", "49")
    samples, _ = load_samples(sft, sft.data.train, chat, RowReader(sft).take().train, 64)
    assert chat.tokenizer.decode(samples[0].tokens) == "15+34=49<eos>"


def test_rows_are_read_once_and_again_if_a_run_restarts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": 2}\n')
    reader = RowReader(load("grpo", "grpo-tiny", [f"data.train.path={file}"]).config)
    ahead = reader.read()
    file.write_text('{"prompt": "2+2=", "answer": 4}\n')
    assert reader.take() is ahead
    assert reader.take().train[0].values == {"prompt": "2+2=", "answer": 4}


def prompts(rows: list[Row]) -> set[str]:
    return {row.values["prompt"] for row in rows}


def test_a_share_of_the_rows_is_held_out_by_content_and_stays_there(section: TrainDataSection) -> None:
    def row(number: int) -> Row:
        return Row(number, f"a:{number}", {"prompt": f"{number}+1=", "answer": str(number + 1)})

    rows = [row(number) for number in range(2000)]
    train, held_out = split_off(rows, section, 0.1)
    assert sorted([*train, *held_out], key=lambda held_row: held_row.number) == rows
    assert 150 < len(held_out) < 250
    # The rows move, others come between them, and the answer changes. Each prompt stays on its side, also where it
    # comes twice.
    moved = [replace(row(number), values={**row(number).values, "answer": "?"}) for number in range(2500, -1, -1)]
    _, moved_out = split_off([*moved, *rows[:100]], section, 0.1)
    assert prompts(held_out) <= prompts(moved_out)
    assert prompts([held_row for held_row in moved_out if held_row.number < 2000]) == prompts(held_out)
    # A larger share holds the same rows out, and further rows.
    _, larger_part = split_off(rows, section, 0.3)
    assert prompts(held_out) < prompts(larger_part)
    with pytest.raises(DataError, match=r"0 of 1 rows are held out by data\.validation\.fraction=0\.0001: both parts"):
        split_off(rows[:1], section, 0.0001)
