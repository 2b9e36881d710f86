"""Files that people have: CSV, JSON, gzip, folders of save_to_disk, patterns and lists, each row with its place."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.data_schema import DatasetSection
from rlctl.data.datasets import load_rows
from rlctl.data.files import DataError, files_of

ROWS: list[dict[str, Any]] = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in (1, 2, 3)]
JSONL_HINT = "a file with a row a line is named .jsonl"
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def read(path: Any, section: DatasetSection, **keys: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(row.origin, row.values) for row in load_rows(replace(section, path=path, **keys))]


def test_csv_json_and_gzip_give_the_same_rows_with_their_places(tmp_path: Path, section: DatasetSection) -> None:
    (tmp_path / "a.csv").write_text('\ufeffprompt,answer\n1+1=,2\n"2+2=",4\n3+3=,6\n', encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(LINES)
    for name, second in (("a.csv", ":3"), ("a.json", "[2]"), ("a.jsonl.gz", ":2")):
        rows = read(str(tmp_path / name), section)
        assert [values for _, values in rows] == ROWS
        assert rows[1][0] == f"{tmp_path / name}{second}"


def test_a_cell_may_have_lines_commas_and_quotes_and_an_empty_one_is_null(
    tmp_path: Path, section: DatasetSection
) -> None:
    (tmp_path / "a.csv").write_text('prompt,answer\n"one, ""two""\nthree",\n')
    assert read(str(tmp_path / "a.csv"), section) == [
        (f"{tmp_path}/a.csv:3", {"prompt": 'one, "two"\nthree', "answer": None})
    ]


def test_patterns_and_lists_are_one_data_set_in_order(tmp_path: Path, section: DatasetSection) -> None:
    for name, row in zip(("part-2.jsonl", "part-1.jsonl", "z.csv"), ROWS):
        if name.endswith("csv"):
            (tmp_path / name).write_text("prompt,answer\n{prompt},{answer}\n".format(**row))
        else:
            (tmp_path / name).write_text(json.dumps(row) + "\n")
    pattern = str(tmp_path / "part-*.jsonl")
    assert [values for _, values in read(pattern, section)] == [ROWS[1], ROWS[0]]
    paths = [str(tmp_path / "z.csv"), pattern]
    assert [Path(file).name for file in files_of(paths)] == ["z.csv", "part-1.jsonl", "part-2.jsonl"]
    assert [values for _, values in read(paths, section)] == [ROWS[2], ROWS[1], ROWS[0]]
    assert len(read(paths, section, limit=2)) == 2 and len(read(paths, section, split="train[:1]")) == 1


def test_folders_of_save_to_disk_are_read_by_split(tmp_path: Path, section: DatasetSection) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([2])}).save_to_disk(tmp_path / "two")
    assert [values for _, values in read(str(tmp_path / "one"), section)] == ROWS
    assert read(str(tmp_path / "two"), section, split="test") == [(f"{tmp_path}/two[test]:1", ROWS[2])]
    assert [values for _, values in read(str(tmp_path / "two"), section, split="train[1:]")] == ROWS[1:]
    with pytest.raises(DataError, match="it has train, test"):
        read(str(tmp_path / "two"), section, split="dev")


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


ASK = {"role": "user", "content": "ask"}
CHATS: list[dict[str, Any]] = [
    {
        "messages": [ASK, {"role": "assistant", "tool_calls": [call("weather", {"city": "Oslo"}), call("now", {})]}],
        "tools": [tool("weather", {"city": {"type": "string"}}), tool("now", {})],
    },
    {
        "messages": [{**ASK, "name": "Ann"}, {"role": "assistant", "tool_calls": [call("add", {"a": [1, None]})]}],
        "tools": [tool("add", {"a": {"type": "array", "items": {"enum": ["x", None]}, "title": "A"}})],
        "chat_template_kwargs": {"enable_thinking": False},
        "extra": {"level": "easy"},
    },
    {
        "messages": [ASK, {"role": "assistant", "tool_calls": [call("add", {"a": [3], "deep": {"b": [{"c": 2}]}})]}],
        "tools": None,
        "chat_template_kwargs": {"depth": 3},
    },
]


@pytest.mark.parametrize("key", ["messages", "prompt", "given.prompt"])
@pytest.mark.parametrize("written", ["parquet", "save_to_disk"])
def test_nulls_that_arrow_fills_in_are_no_keys_of_chats_and_stay_in_other_columns(
    tmp_path: Path, section: DatasetSection, written: str, key: str
) -> None:
    import datasets

    chats = [{"tools": None, "chat_template_kwargs": None, "extra": None, **row} for row in CHATS]
    for row in chats:
        outer, _, inner = key.rpartition(".")
        messages = row.pop("messages")
        row |= {outer: {inner: messages, "split": None}} if outer else {key: messages}
    path = tmp_path / f"chats.{written}"
    rows = datasets.Dataset.from_list(chats)
    rows.to_parquet(path) if written == "parquet" else rows.save_to_disk(path)
    keys = {"messages_key": key} if key == "messages" else {"prompt_key": key}
    assert [values for _, values in read(str(path), section, **keys)] == chats


def test_a_null_that_an_author_wrote_is_a_value(tmp_path: Path, section: DatasetSection) -> None:
    import datasets

    call_of_null = call("add", {"a": None, "b": 1})
    row = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call_of_null]}]}
    text = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call("add", '{"a": null}')]}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    datasets.Dataset.from_list([text]).to_parquet(tmp_path / "text.parquet")
    mixed = {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call("add", {"a": "x"})]}]}
    # Types that Arrow cannot unify become columns of JSON.
    datasets.Dataset.from_list([row, mixed], on_mixed_types="use_json").to_parquet(tmp_path / "json.parquet")
    for name, expected in (("a.jsonl", [row]), ("text.parquet", [text]), ("json.parquet", [row, mixed])):
        assert [values for _, values in read(str(tmp_path / name), section)] == expected


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.csv", b"prompt,answer\n1,2,3\n", ":2: 3 cells, and the first line names 2 columns"),
        ("a.csv", b"prompt,prompt\n1,2\n", ":1: two columns have one name: prompt, prompt"),
        ("a.csv", b"prompt\n\xff\n", ": not CSV in UTF-8: "),
        ("a.json", b'{"prompt": "x"}', f": must be a list of rows, not an object; {JSONL_HINT}"),
        ("a.json", LINES.encode(), f": not JSON: Extra data (line 2, column 1); {JSONL_HINT}"),
        ("a.json", b"[{}, 3]", "[2]: a row must be a JSON object, not int"),
        ("a.jsonl.gz", b"no gzip", ": not gzip, or not whole: "),
        ("a.jsonl.gz", gzip.compress(LINES.encode() * 999)[:-30], ": not gzip, or not whole: "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_one_line_with_its_place(
    tmp_path: Path, section: DatasetSection, name: str, content: bytes, complaint: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read(str(path), section)
    assert str(error.value).startswith(f"{path}{complaint}") and "\n" not in str(error.value)
