import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.config.data_schema import DatasetSection
from rlctl.data.datasets import load_rows
from rlctl.data.files import DataError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}, {"prompt": "3+3=", "answer": "6"}]


def jsonl(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_jsonl_rows_know_their_number_and_line_and_blank_lines_are_passed_over(tmp_path, section):
    path = jsonl(tmp_path / "a.jsonl", [json.dumps(ROWS[0]), "", json.dumps(ROWS[1])])
    rows = load_rows(replace(section, path=path))
    assert [row.values for row in rows] == ROWS[:2]
    assert [(row.number, row.origin) for row in rows] == [(0, f"{path}:1"), (1, f"{path}:3")]


def test_parquet_gives_the_same_rows_as_jsonl(tmp_path, section):
    import pyarrow
    import pyarrow.parquet

    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert [row.values for row in load_rows(replace(section, path=path))] == ROWS


def test_a_folder_that_the_datasets_library_reads_counts_as_a_hub_dataset(tmp_path, section, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    jsonl(tmp_path / "mine" / "train.jsonl", [json.dumps(row) for row in ROWS])
    rows = load_rows(replace(section, path=str(tmp_path / "mine")))
    assert [row.values for row in rows] == ROWS
    assert rows[1].origin.endswith("mine[train]:2")


def test_limit_keeps_the_first_rows_and_reads_no_further(tmp_path, section):
    path = jsonl(tmp_path / "a.jsonl", [json.dumps(ROWS[0]), json.dumps(ROWS[1]), "broken"])
    assert len(load_rows(replace(section, path=path, limit=2))) == 2


def test_a_list_in_a_file_of_lines_is_told_its_name(tmp_path, section):
    path = jsonl(tmp_path / "a.jsonl", ["[", json.dumps(ROWS[0]), "]"])
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*; a file with a list of rows is named \.json"):
        load_rows(replace(section, path=path))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [('{"prompt": "x"', ":2: not JSON: "), ("[1]", ":2: a row must be a JSON object, not list")],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path, section, line, complaint):
    path = jsonl(tmp_path / "a.jsonl", [json.dumps(ROWS[0]), line])
    with pytest.raises(DataError) as error:
        load_rows(replace(section, path=path))
    assert str(error.value).startswith(path + complaint)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named_by_file_and_line(tmp_path, section):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "x"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: not UTF-8"):
        load_rows(replace(section, path=str(tmp_path / "a.jsonl")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_missing_file_is_named(tmp_path, section, name):
    with pytest.raises(DataError, match="no such file"):
        load_rows(replace(section, path=str(tmp_path / name)))


def test_a_file_that_is_no_parquet_is_named(tmp_path, section):
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match=r"a\.parquet: not Parquet"):
        load_rows(replace(section, path=str(tmp_path / "a.parquet")))


def test_an_empty_data_set_and_none_at_all_are_errors(tmp_path, section: DatasetSection):
    with pytest.raises(DataError, match="no rows"):
        load_rows(replace(section, path=jsonl(tmp_path / "a.jsonl", [""])))
    with pytest.raises(DataError, match="path is null"):
        load_rows(replace(section, path=None))


def test_what_is_neither_file_nor_hub_dataset_is_one_line(tmp_path, section, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match=r"nowhere is no file \(\.jsonl, .*\) and no hub dataset") as error:
        load_rows(replace(section, path=str(tmp_path / "nowhere")))
    assert "\n" not in str(error.value)
