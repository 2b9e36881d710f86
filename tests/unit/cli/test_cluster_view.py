"""Tables of clusters and of their jobs."""

from rich.console import Console

from rlctl.cli.cluster_view import runs_table


def _shown(runs: list[dict[str, object]], width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as captured:
        console.print(runs_table(runs))
    return [line.rstrip() for line in captured.get().splitlines()]


def test_a_run_has_its_step_rate_and_devices() -> None:
    run = {"name": "grpo--tiny--1", "status": "running", "step": 4, "num_steps": 20, "throughput": 1234.0}
    header, row = _shown([{**run, "devices": {"trainer": 2, "generator": 1}}])
    assert header.split() == ["run", "status", "step", "tok/s/device", "train", "generate"]
    assert row.split() == ["grpo--tiny--1", "running", "4/20", "1,234", "2", "1"]


def test_what_is_not_known_yet_is_a_dash_and_a_long_name_folds() -> None:
    name = "grpo--" + "x" * 60 + "--1"
    lines = _shown([{"name": name, "status": "new"}])
    assert "".join(line.split()[0] for line in lines[1:]) == name
    assert lines[1].split()[1:] == ["starting", "–", "–", "–", "–"]
    assert max(len(line) for line in lines) <= 80
