"""`rlctl runs list / show / dash`, as used by people and by scripts."""

import json
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rlctl.cli.runs import app
from rlctl.cluster.remote_scripts.logs import NODES
from rlctl.dashboard.state import read_state
from rlctl.preflight.placement import NodeResources, ResourceRequest, place
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.exact_tokens import TokenRow, pack
from rlctl.telemetry.rollouts_file import RolloutsFile
from rlctl.utils.process import start_id
from tests.unit.dashboard.synthetic import START, write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path, "a", ended="done")
    write_run(tmp_path, "b", steps=12, ended=None)
    (tmp_path / "notes").mkdir()
    return tmp_path


def call(*words: object) -> tuple[int, str, str]:
    """Return the exit code, output and errors of `rlctl runs` with these words."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "100"})
    return result.exit_code, result.stdout, result.stderr


def test_list_shows_every_run_with_its_state(runs: Path) -> None:
    code, out, _ = call("list", "--dir", runs)
    rows = {line.split()[0]: line.split() for line in out.splitlines()}
    assert code == 0 and set(rows) == {"name", "a", "b"}
    assert rows["a"][1:6] == ["grpo", "done", "20/20", "80.0%", "1,200"]
    assert rows["b"][1:5] == ["grpo", "running", "12/20", "60.0%"]


def test_a_last_validation_without_scores_has_no_accuracy_in_the_list(runs: Path) -> None:
    record = {"kind": "validation", "step": 20, "time": START + 1e6, "validation/failed_rewards": 100.0}
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    _, out, _ = call("list", "--dir", runs)
    assert "80.0%" not in out and "60.0%" in out


def test_list_for_scripts(runs: Path) -> None:
    code, out, _ = call("list", "--dir", runs, "--json")
    assert code == 0
    assert {(run["name"], run["status"], run["step"]) for run in json.loads(out)} == {
        ("a", "done", 20),
        ("b", "running", 12),
    }


def test_an_empty_folder_says_how_to_begin(tmp_path: Path) -> None:
    code, out, _ = call("list", "--dir", tmp_path)
    assert code == 0 and "rlctl train grpo" in out


def test_show_explains_every_metric_of_the_last_step(runs: Path) -> None:
    code, out, _ = call("show", "a", "--dir", runs)
    assert code == 0
    assert "validation accuracy" in out and "mean length of a response, tokens" in out and "Next steps" in out


def test_show_for_scripts(runs: Path) -> None:
    _, out, _ = call("show", runs / "a", "--json")
    run = json.loads(out)
    assert (run["name"], run["status"], run["last"]["version"]) == ("a", "done", 20)
    assert run["best_checkpoint"]["step"] == 20


def test_a_run_that_does_not_exist_is_one_line_and_exit_code_2(runs: Path) -> None:
    code, out, err = call("show", "zzz", "--dir", runs)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and "no such run" in err


def test_dash_draws_a_finished_run_once(runs: Path) -> None:
    code, out, _ = call("dash", "a", "--dir", runs, "--width", 80, "--height", 24)
    assert code == 0 and out.count("Learning") == 1


def test_dash_leaves_a_row_of_the_terminal_to_the_prompt(runs: Path) -> None:
    terminal = {"FORCE_COLOR": "1", "COLUMNS": "80", "LINES": "24"}
    screen = CliRunner().invoke(app, ["dash", "a", "--dir", str(runs)], env=terminal).stdout
    assert screen.count("\n") == 23 and "mismatch 1: exact" in screen.splitlines()[-1]


def test_dash_writes_a_picture(runs: Path, tmp_path: Path) -> None:
    code, _, _ = call("dash", "a", "--dir", runs, "--svg", tmp_path / "x.svg", "--width", 140, "--height", 40)
    assert code == 0 and "</svg>" in (tmp_path / "x.svg").read_text()


def test_logs_of_a_process_that_there_is_not_name_those_there_are(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = runs / "a/logs/latest"
    (logs / "trainer-0.log").write_text("a line\n")
    (logs / "engine-0.log").write_text("")

    def read_logs(process: str) -> tuple[int, str, str]:
        code = call("logs", "a", "--dir", runs, "--process", process)[0]
        return (code, *capfd.readouterr())

    assert read_logs("NONE") == (2, "", "error: a has no process NONE; there are engine-0, trainer-0\n")
    # The end of a process's name does not name it.
    assert read_logs("0")[0] == 2
    assert read_logs("trainer-0") == (0, "a trainer-0.log | a line\n", "")
    assert read_logs("engine-0") == (0, "a: engine-0 wrote nothing\n", "")


def test_logs_of_a_run_over_several_nodes_begin_with_the_node_and_can_be_those_of_one(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = runs / "a/logs/latest"
    for name in ("driver", "engine-0", "engine-1", "trainer-0"):
        (logs / f"{name}.log").write_text(f"of {name}\n")

    def read_logs(*words: str) -> tuple[int, str, str]:
        code = call("logs", "a", "--dir", runs, *words)[0]
        return (code, *capfd.readouterr())

    # The lines of a run on one node do not name the node.
    assert read_logs()[1].splitlines()[0] == "a driver.log | of driver"
    assert read_logs("--node", "gpu1") == (2, "", "error: a has no node gpu1: it is on one node\n")
    placement = place([NodeResources("gpu1", 1), NodeResources("gpu2", 2)], ResourceRequest(1, 2, colocated=False))
    (logs / NODES).write_text(json.dumps({**placement.node_by_process, "driver": "gpu1"}))
    lines = ["driver.log | of driver", "engine-0.log | of engine-0", "engine-1.log | of engine-1"]
    lines.append("trainer-0.log | of trainer-0")
    nodes = ["gpu1"]
    nodes += [placement.node_by_process[line.split(".")[0]] for line in lines[1:]]
    assert set(nodes) == {"gpu1", "gpu2"}
    lines_with_nodes = [f"{node} {line}\n" for node, line in zip(nodes, lines)]
    lines_of_gpu2 = [line for line in lines_with_nodes if line.startswith("gpu2 ")]
    assert read_logs() == (0, "".join(lines_with_nodes), "")
    assert read_logs("--node", "gpu2") == (0, "".join(lines_of_gpu2), "")
    assert read_logs("--node", "gpu3") == (2, "", "error: a has no node gpu3; there are gpu1, gpu2\n")


def test_a_stopped_run_is_called_so(runs: Path) -> None:
    run = write_run(runs, "c", steps=3, ended="stopped")
    _, out, _ = call("list", "--dir", runs)
    row = next(line.split() for line in out.splitlines() if line[0] == "c")
    assert row[2] == "stopped"
    assert "c stopped" in call("show", "c", "--dir", runs)[1]
    assert "■ stopped" in call("dash", "c", "--dir", runs, "--width", 80, "--height", 24)[1]
    assert call("stop", "c", "--dir", runs)[1] == "c does not run: stopped\n"
    # The next attempt does not read a request to this one.
    request = "asked to stop: finishing this step and saving; again: stop now"
    EventLog(run.events, now=lambda: START + 1000).emit("warning", what=request)
    assert request in [event.get("what") for event in read_state(run.path).events_of_attempt()]
    EventLog(run.events, now=lambda: START + 1001).emit("run_started", num_steps=20, start_step=3)
    assert [event["kind"] for event in read_state(run.path).events_of_attempt()] == ["run_started"]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"what": "Ray's gcs_server (process 7) is gone"}, "d ends before its next step; watch: "),
        ({"kind": "phase", "name": "train", "step": 4}, "d ends after its step, and is saved; watch: "),
        ({"what": "asked to stop: finishing this step and saving", "asked_to_stop": True}, "d ends now"),
    ],
)
def test_a_stop_is_the_second_only_after_a_first(tmp_path: Path, event: dict[str, Any], message: str) -> None:
    run = write_run(tmp_path, "d", steps=3, ended=None)
    driver = subprocess.Popen(["sleep", "600"])
    try:
        log = EventLog(run.events)
        log.emit(
            "run_started",
            host=socket.gethostname(),
            num_steps=20,
            start_step=3,
            pid=driver.pid,
            start_id=start_id(driver.pid),
        )
        log.emit(**{"kind": "warning", **event})
        assert message in call("stop", "d", "--dir", tmp_path)[1]
        assert driver.wait(300) == -signal.SIGTERM
    finally:
        driver.kill()
        driver.wait()


def test_what_is_printed_fits_80_columns_whole(runs: Path) -> None:
    name = "grpo--sft-qwen3-0.6b-base-1-step_800--2-of-the-long-named-ones"
    write_run(runs, name)
    for words in (("list", "--dir", runs), ("show", name, "--dir", runs)):
        result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "80"})
        lines = result.stdout.split("Next steps")[0].splitlines()
        assert max(map(len, lines)) <= 80 and "…" not in result.stdout
        assert name in "".join(line.strip().split("  ")[0] for line in lines)


def test_on_a_narrow_terminal_the_list_keeps_names_and_drops_columns(runs: Path) -> None:
    write_run(runs, "a-name-of-twenty-ones")
    result = CliRunner().invoke(app, ["list", "--dir", str(runs)], env={"COLUMNS": "44"})
    header, *rows = result.stdout.splitlines()
    assert header.split() in (["name", "status", "step", "accuracy"], ["name", "status", "step"])
    assert {row.split()[0] for row in rows} == {"a", "b", "a-name-of-twenty-ones"}


def test_without_a_name_the_newest_run_is_meant(runs: Path) -> None:
    code, out, _ = call("show", "--dir", runs, "--json")
    assert code == 0 and json.loads(out)["name"] in ("a", "b")


def record_groups(run: Path, **rewards: float) -> None:
    """Record a group of one rollout for each task. rewards: task -> reward of its rollout."""
    groups = []
    for task, reward in rewards.items():
        rollout = {"index": 0, "text": [["49<eos>", True]], "reward": reward, "right": True, "advantage": 0.5}
        group = {"task": task, "prompt": "15+34=", "answer": "49", "outcome": "trained", "rollouts": [rollout]}
        groups.append(group)
    RolloutsFile(run / "rollouts.jsonl", 1 << 20, lambda *_, **__: None).groups(3, "train", groups)


@pytest.fixture
def runs_with_rollouts(runs: Path) -> Path:
    record_groups(runs / "a", **{"e0-r1": 1.0})
    return runs


@pytest.mark.parametrize(("order", "tasks"), [("--worst", ["low", "middle"]), ("--best", ["high", "middle"])])
def test_groups_come_in_the_order_of_their_rewards_and_no_more_than_asked_for(
    runs: Path, order: str, tasks: list[str]
) -> None:
    record_groups(runs / "a", middle=0.5, low=0.0, high=1.0)
    _, out, _ = call("rollouts", "a", "--dir", runs, order, "--limit", "2", "--json")
    assert [json.loads(line)["task"] for line in out.splitlines()] == tasks


def test_rollouts_are_plain_lines_in_a_pipe_and_an_object_a_group_for_scripts(runs_with_rollouts: Path) -> None:
    code, out, _ = call("rollouts", "a", "--dir", runs_with_rollouts)
    assert code == 0 and "┃  49<eos>" in out and "\x1b" not in out
    _, out, _ = call("rollouts", "a", "--dir", runs_with_rollouts, "--step", "1-9", "--json")
    (line,) = out.splitlines()
    assert (json.loads(line)["task"], json.loads(line)["rollouts"][0]["advantage"]) == ("e0-r1", 0.5)
    code, out, _ = call("rollouts", "a", "--dir", runs_with_rollouts, "--follow", "--json")
    assert code == 0 and json.loads(out)["step"] == 3


def test_tokens_are_shown_with_log_probs_and_versions_if_asked_for(runs_with_rollouts: Path) -> None:
    row = TokenRow(
        tokens=np.array([15, 34, 49, 1], np.int32),
        sampled=np.array([False, False, True, True]),
        log_probs=np.array([0, 0, -0.25, -1e-5], np.float32),
        versions=np.array([-1, -1, 2, 3], np.int32),
        turns=np.array([-1, -1, 0, 0], np.int16),
    )
    group = {
        "task": "e0-r2",
        "prompt": "15+34=",
        "answer": "49",
        "rollouts": [{"index": 0, "text": [["49<eos>", True]]}],
    }
    file = RolloutsFile(runs_with_rollouts / "a" / "rollouts.jsonl", 1 << 20, lambda *_, **__: None)
    file.groups(4, "train", [{**group, "exact": pack([[row]], "kept")}])
    _, out, _ = call("rollouts", "a", "--dir", runs_with_rollouts, "--tokens")
    tokens_of_v2 = "-- tokens of #0: 2 given, 2 sampled\n   15 34\n┃  v2 49:-0.25\n"
    tokens_of_v3 = "-- weights changed within the turn: v3 read keys by v2 of tokens 1 to 2\n┃  v3 1:-1e-05\n"
    assert tokens_of_v2 + tokens_of_v3 in out
    _, out, _ = call("rollouts", "a", "--dir", runs_with_rollouts, "--step", "3", "--tokens")
    assert "-- no tokens were recorded (telemetry.record_tokens; runs of earlier versions have none)" in out
    _, out, _ = call("rollouts", "a", "--dir", runs_with_rollouts, "--tokens", "--json")
    (row_json,) = json.loads(out)["rollouts"][0]["rows"]
    assert (row_json["tokens"], row_json["sampled"]) == ([15, 34, 49, 1], [False, False, True, True])
    assert row_json["log_probs"] == row.log_probs.tolist() and row_json["versions"] == [-1, -1, 2, 3]
    _, out, _ = call("rollouts", "a", "--dir", runs_with_rollouts, "--json")
    assert "exact" not in json.loads(out) and "rows" not in json.loads(out)["rollouts"][0]


def test_rollouts_that_are_not_there_are_one_line_and_exit_code_2(runs_with_rollouts: Path) -> None:
    for words in (("a", "--step", "7"), ("b",), ("a", "--validation")):
        code, out, err = call("rollouts", *words, "--dir", runs_with_rollouts)
        assert (code, out, err.count("\n")) == (2, "", 1), err
    code, out, err = call("rollouts", "a", "--dir", runs_with_rollouts, "--grep", "no such text")
    assert (code, out, err) == (0, "", "no group has that text\n")
