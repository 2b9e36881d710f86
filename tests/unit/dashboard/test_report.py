"""`rlctl runs report`: one HTML page about one or more runs, which loads nothing and works with incomplete files."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlctl.cli.runs import app
from rlctl.config.errors import ConfigError
from rlctl.dashboard.dashboard import render
from rlctl.dashboard.panels.learning import metrics_of
from rlctl.dashboard.report import vega
from rlctl.dashboard.report.metric_charts import MetricChart, MetricSeries, charts_of, stack_sums, thin_points, zeros
from rlctl.dashboard.report.page import page
from rlctl.dashboard.report.source import ConfigValue, evenly, read_run, read_runs
from rlctl.dashboard.state import read_state
from rlctl.preflight.load import load
from rlctl.run.run_dir import RunDir
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.metrics import LEARNING, OTHERS, Metric, PanelRow, ReportChart, installed_rows, write_rows
from rlctl.telemetry.rollouts_file import RolloutsFile
from tests.unit.dashboard.synthetic import async_metrics, step_metrics, write_run


@pytest.fixture
def chart_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the chart library by a short text, which is read at once."""
    monkeypatch.setattr(vega, "is_installed", lambda: True)
    monkeypatch.setattr(vega, "script", lambda: "/* library */")


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["report", *map(str, words)])
    if isinstance(result.exception, ConfigError):
        return 2, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, result.stderr


def read_data(html: str) -> Any:
    """Return the data that is embedded in a report's page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert match
    return json.loads(match[1])


def list_series(charts: list[MetricChart]) -> list[MetricSeries]:
    """Return the series of all charts."""
    all_series: list[MetricSeries] = []
    for chart in charts:
        all_series += chart.series
    return all_series


def read_series(html: str) -> list[dict[str, Any]]:
    """Return the series of all charts of a page."""
    all_series = []
    for chart in read_data(html)["charts"]:
        all_series += chart.get("series", [])
    return all_series


def find_chart(title: str, charts: list[MetricChart]) -> MetricChart:
    """Return the only chart with a title."""
    (chart,) = [chart for chart in charts if chart.title == title]
    return chart


def make_group(step: int, text: str = "4<eos>") -> dict[str, Any]:
    rollout = {"index": 0, "text": [[text, True]], "tokens": 2, "finish": "stop", "reward": 1.0, "right": True}
    return {"task": f"e0-r{step}", "prompt": "2+2=", "answer": "4", "outcome": "trained", "rollouts": [rollout]}


def write_groups(run: RunDir, steps: range, text: str = "4<eos>") -> None:
    file = RolloutsFile(run.rollouts, 1 << 30, lambda *_, **__: None)
    for step in steps:
        file.groups(step, "train", [make_group(step, text)])


def test_every_metric_that_is_not_always_0_is_in_exactly_one_chart(tmp_path: Path) -> None:
    metrics = {**async_metrics(1), "reward/mine/mean": 1.0, "of/my_own": 2.0, "reward/failed": 0.0}
    write_run(tmp_path, "a", metrics=lambda step: {**metrics, "train/lr": step})
    state = read_state(tmp_path / "a")
    drawn_names = [series.name for series in list_series(charts_of([state]))]
    names = {name for name in metrics if not name.startswith(("time/step", "version"))}
    assert len(drawn_names) == len(set(drawn_names))
    assert set(drawn_names) == (names - {"reward/failed", "buffer/age_2"}) | {"train/lr", "validation/accuracy"}
    assert zeros([state]) == ["buffer/age_2", "reward/failed"]
    assert [chart.section for chart in charts_of([state]) if chart.title == "of/my_own"] == ["Other metrics"]


@pytest.mark.parametrize(
    ("probed_bound", "legend"),
    [
        (None, "dashed: 1.02, health.max_token_mult_prob_error<"),
        (1.02, "dashed: 1.02, health.max_token_mult_prob_error<"),
        (1.1207, "dashed: 1.121, twice the rounding that the probe found; health.max_token_mult_prob_error is 1.02<"),
    ],
)
def test_the_bound_on_the_mismatch_has_its_value_and_source(
    tmp_path: Path, chart_library: None, probed_bound: float | None, legend: str
) -> None:
    run = write_run(tmp_path, "a", metrics=lambda step: step_metrics(step) | {"mismatch/token_mult_prob_error": 1.06})
    if probed_bound:
        EventLog(run.events).emit("probe", token_mult_prob_error=1.06, bound=probed_bound)
    assert legend in page(read_runs([run.path]), "today")


def test_the_areas_of_a_step_add_up_to_its_wall_time(tmp_path: Path) -> None:
    def metrics(step: int) -> dict[str, float]:
        metrics = step_metrics(step)
        if step % 5 == 0:
            metrics["time/checkpoint"] = 1.0
            metrics["time/step"] += 1.0
        return metrics

    write_run(tmp_path, "a", metrics=metrics)
    state = read_state(tmp_path / "a")
    chart = find_chart("Phases of a step", charts_of([state]))
    assert stack_sums(chart.series) == pytest.approx(dict(state.series("time/step")))
    assert {len(series.values) for series in chart.series} == {20}


def test_stacks_of_two_runs_have_the_same_colours_and_axis(tmp_path: Path) -> None:
    write_run(tmp_path, "a")
    write_run(tmp_path, "b", metrics=async_metrics)
    charts = charts_of([read_state(tmp_path / name) for name in "ab"])
    stacks = [chart for chart in charts if chart.title == "Phases of a step"]
    assert len(stacks) == 2
    assert stacks[0].names == stacks[1].names and stacks[0].top == stacks[1].top
    assert stacks[0].series != stacks[1].series


def test_a_slow_first_step_is_cut_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, "a", 100, metrics=lambda step: {"time/train": 100.0 if step == 1 else 1.0, "reward/mean": 1})
    chart = find_chart("Phases of a step", charts_of([read_state(tmp_path / "a")]))
    assert chart.top == 1.5 and vega.steps_above(chart) == [(1, 100.0)]


def test_a_long_series_is_thinned_to_means_that_end_with_its_last_step() -> None:
    steps, values = thin_points(list(range(1, 1002)), [float(step) for step in range(1, 1002)], limit=100)
    assert len(steps) <= 100 and steps[0] == 11 and values[0] == 6.0 and steps[-1] == 1001
    assert thin_points([1, 2], [3.0, 4.0]) == ([1, 2], [3.0, 4.0])


def test_steps_are_chosen_evenly_with_the_first_and_the_last() -> None:
    assert evenly(list(range(101)), 5) == [0, 25, 50, 75, 100]
    assert evenly([3, 9], 5) == [3, 9] and evenly([3, 9, 11], 1) == [11]


def test_the_page_has_curves_meanings_events_samples_and_origins(tmp_path: Path, chart_library: None) -> None:
    run = write_run(tmp_path, "a")
    write_groups(run, range(1, 21))
    run.config.write_text("kind: grpo\nrun:\n  seed: 5  # from override 1: run.seed=5\n  log_every: 1\n")
    EventLog(run.events).emit("warning", what="grad norm is <high>", check="grad_norm", step=7)
    html = page([read_run(run.path, "a")], "today")
    kl = next(series for series in read_series(html) if series["metric"] == "loss/kl")
    assert kl["meaning"] == "KL to the reference, nats a token" and kl["values"][:2] == [0.001, 0.002]
    assert "warning: grad norm is &lt;high&gt;" in html
    page_data = read_data(html)
    assert {"step": 7, "label": "grad norm"}.items() <= page_data["charts"][-1]["rows"][-1].items()
    assert [group["step"] for group in page_data["samples"][0]["groups"]["train"]] == list(range(1, 21))
    assert "<td class='own'><code>5</code><span class='origin'>override 1: run.seed=5</span>" in html
    assert "<tr class='default'><th title=\"Print a line" in html or "<tr class='default'>" in html
    assert "default-src 'none'" in html and not re.search(r'(src|href)="(?!#)', html)


def test_what_the_policy_wrote_cannot_become_a_part_of_the_page(tmp_path: Path, chart_library: None) -> None:
    run = write_run(tmp_path, "a")
    write_groups(run, range(1, 2), text="</script><script>alert(1)</script>\ud800<!--")
    html = page([read_run(run.path, "<b>")], "today")
    assert "<script>alert" not in html and "<b> <span" not in html
    html.encode()
    rollout = read_data(html)["samples"][0]["groups"]["train"][0]["rollouts"][0]
    assert rollout["text"][0][0].startswith("</script><script>alert(1)")


def test_samples_take_a_bounded_part_of_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path, "a")
    write_groups(run, range(1, 101), text="long " * 20_000)
    groups = read_run(run.path, "a").samples["train"]
    assert (groups[0]["step"], groups[-1]["step"], len(groups)) == (1, 100, 24)
    assert len(json.dumps(groups)) < 100_000 and "more letters" in groups[0]["rollouts"][0]["text"][0][0]


def test_two_runs_are_drawn_together_with_what_differs(tmp_path: Path, chart_library: None) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_run(tmp_path, name).config.write_text(f"kind: grpo\nrun:\n  seed: {seed}\n  log_every: 1\n")
    runs = read_runs([tmp_path / "a", tmp_path / "b"])
    html = page(runs, "today")
    differing = html.partition("<h2>What differs</h2>")[2].partition("</section>")[0]
    assert "run.seed" in differing and "run.log_every" not in differing
    assert [series["label"] for series in read_data(html)["charts"][0]["series"]] == [
        "a · reward/accuracy",
        "b · reward/accuracy",
        "a · validation/accuracy",
        "b · validation/accuracy",
    ]


def test_runs_of_two_kinds_have_a_table_of_what_both_have_and_fold_the_rest(
    tmp_path: Path, chart_library: None
) -> None:
    for name, kind in (("played", "grpo"), ("start", "sft")):
        run = write_run(tmp_path, name)
        run.config.write_text(load(kind, None, [f"run.name={name}"]).to_yaml())
    html = page(read_runs([tmp_path / "played", tmp_path / "start"]), "")
    assert html.index('<section id="learning">') < html.index('<section id="what-differs">')
    differs = html.split('<section id="what-differs">')[1].split("</section>")[0]
    shared, of_played, of_start = differs.split("<details>")
    assert "checkpoint.metric" in shared and "grpo.num_steps" not in shared and "<td><code>–" not in differs
    assert re.match(
        r"<summary>\d+ keys of played alone: rewards, environment, rollout, agent, sandbox, grpo,", of_played
    )
    assert "grpo.num_steps" in of_played and "sft.num_steps" not in of_played
    assert re.match(r"<summary>\d+ keys of start alone: sft,", of_start) and "sft.num_steps" in of_start


def test_a_run_has_one_colour_in_all_charts_and_is_named_where_it_is_alone(tmp_path: Path) -> None:
    write_run(tmp_path, "a", metrics=async_metrics)
    write_run(tmp_path, "b", metrics=lambda step: {"loss/nll": 1.0 / step, "train/lr": step})
    charts = charts_of([read_state(tmp_path / name) for name in ("a", "b")])
    encodings = []
    for chart in charts:
        if not chart.stacked:
            encodings += [layer["encoding"] for layer in vega.spec_of(chart, ["a", "b"], False)["layer"]]
    colours = [encoding["color"] for encoding in encodings if "color" in encoding]
    assert {str(colour["scale"]["domain"]) for colour in colours} == {"['a', 'b']"}
    assert {str(colour["legend"]["values"]) for colour in colours} == {"['a']", "['b']", "['a', 'b']", "['b', 'a']"}


def test_episodes_and_tools_have_a_section_of_their_own(tmp_path: Path) -> None:
    metrics = {"environment/turns": 3, "environment/tool_errors": 0.5, "environment/failed": 2, "environment/new": 1}
    metrics |= {"environment/endings/done": 0.75, "reward/turns_2": 0.5, "environment/tool_calls": 2}
    write_run(tmp_path, "a", metrics=lambda step: {**step_metrics(step), **metrics})
    charts = charts_of([read_state(tmp_path / "a")])
    episode_charts = [chart for chart in charts if chart.section == "Episodes and tools"]
    assert {series.name for series in list_series(episode_charts)} == set(metrics)
    assert [chart.title for chart in episode_charts[:3]] == [
        "Turns of an episode",
        "Tool calls of an episode",
        "Tool calls that failed",
    ]
    sections = [chart.section for chart in charts]
    assert sections == sorted(sections, key=list(dict.fromkeys(sections)).index)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        write_run(tmp_path / folder, "a")
    names = [run.name for run in read_runs([tmp_path / "x/a", tmp_path / "y/a"])]
    assert names == [f"a ({tmp_path / folder})" for folder in ("x", "y")]


def test_damaged_files_are_read_as_far_as_they_go_and_named(tmp_path: Path, chart_library: None) -> None:
    run = write_run(tmp_path, "a")
    write_groups(run, range(1, 4))
    lines = run.metrics.read_bytes().split(b"\n")
    nan = b'{"kind": "step", "step": 20, "time": 1800000060.0, "loss/kl": NaN, "loss/policy": 1e999}'
    run.metrics.write_bytes(b"\n".join([*lines[:5], b"\xff\x00{", b'{"kind": "st', nan, b'{"half']))
    run.rollouts.write_bytes(run.rollouts.read_bytes()[:-40])
    run.config.write_text("kind: [")
    reported_run = read_run(run.path, "a")
    assert [len(reported_run.samples[purpose]) for purpose in ("validation", "train")] == [0, 2]
    assert reported_run.remarks[0] == "metrics.jsonl: without 2 damaged lines"
    assert "its config is left out: " in reported_run.remarks[1]
    for series in read_series(page([reported_run], "now")):
        assert not any(math.isnan(figure) for figure in series["values"])


def test_a_run_under_way_and_one_that_has_no_step_are_shown_as_they_are(tmp_path: Path, chart_library: None) -> None:
    live_run = read_run(write_run(tmp_path, "a", steps=7, ended=None).path, "a")
    assert live_run.remarks[0].startswith("is under way: 7 steps of 20 done")
    failed_run = read_run(write_run(tmp_path, "b", steps=0, ended="failed").path, "b")
    assert "has no metrics.jsonl" in failed_run.remarks
    assert "has done no step yet, so there are no curves" in failed_run.remarks
    assert "Config" in page([failed_run], "now")
    assert failed_run.config["checkpoint.metric"] == ConfigValue("validation/accuracy", "")


def test_the_command_writes_the_page_beside_the_run_or_where_it_is_told(
    tmp_path: Path, chart_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        write_run(tmp_path, name)
    code, out, err = call("a", "--dir", tmp_path)
    assert code == 0 and out.startswith(f"{tmp_path / 'a' / 'report.html'} (0.") and "records no origins" in err
    assert call("a", "b", "--dir", tmp_path)[0] == 0 and (tmp_path / "a/report--b.html").is_file()
    addresses: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: addresses.append(address) or True)
    assert call("a", "--dir", tmp_path, "-o", tmp_path / "it.html", "--open")[1].startswith(str(tmp_path / "it.html"))
    assert addresses == [(tmp_path / "it.html").as_uri()]


def test_a_run_whose_name_is_not_utf8_is_reported(tmp_path: Path, chart_library: None) -> None:
    name = os.fsdecode(b"a\xff")
    write_run(tmp_path, "a")
    (tmp_path / "a").rename(tmp_path / name)
    code, out, _ = call(tmp_path / name)
    assert code == 0 and "report.html" in out
    assert "<h1>a\ufffd" in (tmp_path / name / "report.html").read_text(encoding="utf-8")


def test_mistakes_are_one_line_with_the_remedy(
    tmp_path: Path, chart_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "sums")
    assert call("sumz", "--dir", tmp_path) == (2, "", "error: sumz: no such run; did you mean sums?\n")
    code, _, error = call("sums", "--dir", tmp_path, "-o", tmp_path / "none" / "it.html")
    assert code == 2 and "cannot be written: No such file or directory; --output names another file" in error
    monkeypatch.setattr(vega, "is_installed", lambda: False)
    assert call("sums", "--dir", tmp_path)[::2] == (
        2,
        "runs report: needs vl-convert-python: pip install 'rlctl[report]'",
    )


def test_metrics_of_a_users_part_are_shown_as_the_runs_own_rows_say(tmp_path: Path, chart_library: None) -> None:
    """Show a metric by its row: meaning, chart, and row of the live view. An undeclared metric is drawn too."""
    gate = Metric(
        "gate/mean", "mean of the gate", "share", chart=ReportChart(LEARNING, "Gate"), panel=[PanelRow("gate", 45)]
    )
    gate_metrics = {"gate/mean": 0.25, "gate/spread": 0.5}
    run = write_run(tmp_path, "a", metrics=lambda step: {**step_metrics(step), **gate_metrics})
    write_rows(run.metric_rows, [*installed_rows().rows, gate])
    state = read_state(run.path)
    declared = find_chart("Gate", charts_of([state]))
    assert (declared.section, declared.unit) == (LEARNING, "share")
    assert declared.meanings == {"gate/mean": "mean of the gate"}
    undeclared = find_chart("gate/spread", charts_of([state]))
    assert (undeclared.section, undeclared.meanings) == (OTHERS, {"gate/spread": ""})
    labels = [metric.label for metric in metrics_of(state)]
    assert labels[labels.index("reward") :][:3] == ["reward", "gate", "accuracy"]
    screen = ["".join(part.text for part in row) for row in render(state, 120, 40).rows]
    assert any(re.search(r"gate +25\.0%", line) for line in screen)
    html = page([read_run(run.path, "a")], "")
    meanings = {series["metric"]: series["meaning"] for series in read_series(html)}
    assert meanings["gate/mean"] == "mean of the gate" and meanings["gate/spread"] == ""


def test_a_run_without_rows_of_its_own_has_those_installed(tmp_path: Path) -> None:
    run = write_run(tmp_path, "old")
    assert not run.metric_rows.exists()
    assert read_state(run.path).declared is installed_rows()
    run.metric_rows.write_text("[")
    assert read_state(run.path).declared is installed_rows()
