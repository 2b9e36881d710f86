"""`rlctl runs list / show / dash` as a user and as a script meet them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlctl.cli.runs import app

from .synthetic import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path, "a", ended="done")
    write_run(tmp_path, "b", steps=12, ended=None)
    (tmp_path / "notes").mkdir()
    return tmp_path


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr


def test_list_shows_every_run_with_its_state(runs: Path) -> None:
    code, out, _ = call("list", "--dir", runs)
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    assert code == 0 and set(rows) == {"name", "a", "b"}
    assert rows["a"][1:6] == ["grpo", "done", "20/20", "80.0%", "1,200"]
    assert rows["b"][1:5] == ["grpo", "running", "12/20", "60.0%"]


def test_list_for_scripts(runs: Path) -> None:
    code, out, _ = call("list", "--dir", runs, "--json")
    assert code == 0
    assert {(entry["name"], entry["status"], entry["step"]) for entry in json.loads(out)} == {
        ("a", "done", 20),
        ("b", "running", 12),
    }


def test_an_empty_folder_says_how_to_begin(tmp_path: Path) -> None:
    code, out, _ = call("list", "--dir", tmp_path)
    assert code == 0 and "rlctl train grpo" in out


def test_show_explains_every_metric_of_the_last_step(runs: Path) -> None:
    code, out, _ = call("show", "a", "--dir", runs)
    assert code == 0
    assert "held-out accuracy" in out and "mean response, tokens" in out and "Next steps" in out


def test_show_for_scripts(runs: Path) -> None:
    _, out, _ = call("show", runs / "a", "--json")
    shown = json.loads(out)
    assert (shown["name"], shown["status"], shown["last"]["version"]) == ("a", "done", 20)
    assert shown["best_checkpoint"]["step"] == 20


def test_a_run_that_does_not_exist_is_one_line_and_exit_code_2(runs: Path) -> None:
    code, out, err = call("show", "zzz", "--dir", runs)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "no such run" in err


def test_dash_draws_a_finished_run_once(runs: Path) -> None:
    code, out, _ = call("dash", "a", "--dir", runs, "--width", 80, "--height", 24)
    assert code == 0 and out.count("Learning") == 1


def test_dash_writes_a_picture(runs: Path, tmp_path: Path) -> None:
    code, _, _ = call("dash", "a", "--dir", runs, "--svg", tmp_path / "x.svg", "--width", 140, "--height", 40)
    assert code == 0 and "</svg>" in (tmp_path / "x.svg").read_text()


def test_without_a_name_the_newest_run_is_meant(runs: Path) -> None:
    code, out, _ = call("show", "--dir", runs, "--json")
    assert code == 0 and json.loads(out)["name"] in ("a", "b")
