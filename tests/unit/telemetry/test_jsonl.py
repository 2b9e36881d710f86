"""JSONL files: a reader gets whole records only, even if a writer dies or is still writing."""

import threading
from pathlib import Path

import pytest

from rlctl.telemetry.jsonl import JsonlWriter, Tail, damaged_lines, read_records


def test_a_record_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    JsonlWriter(path).write({"a": 1})
    assert read_records(path) == [{"a": 1}]


def test_an_unfinished_last_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    tail = Tail(path)
    assert tail.read() == [{"a": 1}]
    with path.open("a") as file:
        file.write("2}\n")
    assert tail.read() == [{"a": 2}]
    assert tail.read() == []


def test_lines_that_are_no_records_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n\xff\xfe\n{"a": 2}\n')
    assert read_records(path) == [{"a": 1}, {"a": 2}]


def test_a_line_torn_by_a_kill_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b')
    JsonlWriter(path).write({"a": 3})
    assert read_records(path) == [{"a": 1}, {"a": 3}]


def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    tail = Tail(path)
    tail.read()
    new_file = tmp_path / "new"
    new_file.write_text('{"a": 1}\n{"a": 7}\n{"a": 8}\n')
    new_file.replace(path)
    assert tail.read() == [{"a": 1}, {"a": 7}, {"a": 8}]


def test_a_missing_file_holds_no_records(tmp_path: Path) -> None:
    assert read_records(tmp_path / "none.jsonl") == []


def test_a_full_disk_is_one_warning_and_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    writer = JsonlWriter(Path("/dev/full"))
    for _ in range(3):
        writer.write({"a": 1})
    assert capfd.readouterr().err.count("No space left on device") == 1


def test_records_of_many_threads_do_not_mix(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "a.jsonl")

    def write_records(number: int) -> None:
        for _ in range(50):
            writer.write({"number": number, "text": "x" * 500})

    threads = [threading.Thread(target=write_records, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_records(tmp_path / "a.jsonl")) == 200


def test_half_a_surrogate_pair_is_written_as_a_question_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    JsonlWriter(path).write({"a": "bad \ud83d"})
    assert read_records(path) == [{"a": "bad ?"}]


def test_damaged_lines_are_counted_but_not_the_one_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert damaged_lines(path) == 0
    path.write_bytes(b'{"a": 1}\n{"a"\n\n[1]\n\xff\n{"a": 2}\n{"half')
    assert damaged_lines(path) == 3 and len(read_records(path)) == 2
