"""Tables of clusters and of their jobs, and a status that is printed again and again."""

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rlctl.cli import cluster
from rlctl.cli.cluster_view import runs_table
from tests.unit.cli.conftest import Rlctl


def render_table(runs: list[dict[str, object]], width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(runs_table(runs))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_run_has_its_step_rate_and_devices() -> None:
    run = {"name": "grpo--tiny--1", "status": "running", "step": 4, "num_steps": 20, "throughput": 1234.0}
    header, row = render_table([{**run, "devices": {"trainer": 2, "generator": 1}}])
    assert header.split() == ["run", "status", "step", "tok/s/device", "train", "generate"]
    assert row.split() == ["grpo--tiny--1", "running", "4/20", "1,234", "2", "1"]


def test_what_is_not_known_yet_is_a_dash_and_a_long_name_folds() -> None:
    name = "grpo--" + "x" * 60 + "--1"
    lines = render_table([{"name": name, "status": "new"}])
    assert "".join(line.split()[0] for line in lines[1:]) == name
    assert lines[1].split()[1:] == ["starting", "–", "–", "–", "–"]
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize(("words", "printed"), [(("--watch",), ["seen 1", "seen 2", "seen 3"]), ((), ["seen 1"])])
def test_a_watched_status_is_printed_every_3_seconds_until_ctrl_c(
    words: tuple[str, ...], printed: list[str], rlctl: Rlctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[object] = []
    sleeps: list[float] = []

    def read_status(state: object) -> Any:
        states.append(state)
        return SimpleNamespace(condition="up")

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cluster, "_find_cluster", lambda name: None)
    monkeypatch.setattr("rlctl.cluster.status.cluster_status", read_status)
    monkeypatch.setattr("rlctl.cli.cluster_view.render", lambda state, status: f"seen {len(states)}")
    monkeypatch.setattr("time.sleep", sleep)
    done = rlctl("cluster", "status", *words)
    assert (done.out.splitlines(), done.code) == (printed, 130 if words else 0)
    assert sleeps == ([3.0, 3.0, 3.0] if words else [])
