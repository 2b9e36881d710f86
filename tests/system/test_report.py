"""A report with the real library, in a real browser where one is installed: drawn without a request or a complaint, in
bounded time and size, light, dark and narrow.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlctl.cli.runs import app
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.rollouts_file import RolloutsFile
from tests import browser
from tests.unit.dashboard.synthetic import async_metrics, step_metrics, write_run
from tests.waiting import until

STEPS = 240
MOST_BYTES = 3_000_000
# CPU seconds of the page's thread. The machine's load changes wall time, but hardly these.
MOST_CPU_S = 10.0


def write_long_run(root: Path, name: str, make_metrics: Callable[[int], dict[str, float]]) -> None:
    def make_more_metrics(step: int) -> dict[str, float]:
        further = {f"further/{number}": float(step * number % 17) for number in range(12)}
        return make_metrics(step) | further

    run = write_run(root, name, STEPS, metrics=make_more_metrics)
    run.config.write_text(f"kind: grpo\nrun:\n  name: {name}  # from override 1: run.name={name}\n")
    EventLog(run.events).emit("warning", what="accuracy fell", check="accuracy_drop", step=120)
    file = RolloutsFile(run.rollouts, 1 << 30, lambda *_, **__: None)
    text = "Let me think. " * 40
    rollouts = [
        {"index": index, "text": [[text, True]], "reward": index % 2, "right": index == 1} for index in range(8)
    ]
    for step in range(1, STEPS + 1):
        for task in range(2):
            record = {"task": f"e0-r{task}", "prompt": "2+2=", "answer": "4", "outcome": "trained"}
            file.groups(step, "train", [{**record, "rollouts": rollouts}])


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report of two runs, and a folder of its charts as pictures. Return the file of the report."""
    folder = tmp_path_factory.mktemp("report")
    write_long_run(folder, "sync", step_metrics)
    write_long_run(folder, "async", async_metrics)
    path = folder / "both.html"
    for arguments in (["async"], ["sync", "async", "-o", str(path), "--png", str(folder / "pictures")]):
        outcome = CliRunner().invoke(app, ["report", "--dir", str(folder), *arguments], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.stderr
    return path


def test_a_report_of_two_long_runs_is_small_and_has_a_picture_of_each_section(report: Path) -> None:
    assert 900_000 < report.stat().st_size < MOST_BYTES
    pictures = {path.name: path.read_bytes() for path in (report.parent / "pictures").glob("*.png")}
    assert {"learning.png", "step-time.png", "ages.png", "mismatch.png"} <= pictures.keys()
    assert all(picture[:4] == b"\x89PNG" and len(picture) > 10_000 for picture in pictures.values())


@pytest.mark.skipif(browser.PROGRAM is None, reason="needs a browser: apt-get install chromium")
def test_a_page_is_drawn_from_one_file_and_explains_a_curve_under_the_pointer(report: Path, tmp_path: Path) -> None:
    with browser.browser(tmp_path / "profile") as page:
        page.call("Performance.enable", timeDomain="threadTicks")
        page.open(report.parent / "async/report.html", 1400)
        metrics = {metric["name"]: metric["value"] for metric in page.call("Performance.getMetrics")["metrics"]}
        assert metrics["TaskDuration"] < MOST_CPU_S
        page.requests.clear()
        page.open(report, 1400)
        # A canvas that holds nothing but its background would be empty of lines.
        assert page.value("[...document.querySelectorAll('[data-chart]')].every(each => each.querySelector('canvas'))")
        assert page.value(COLOURS) >= 3
        middle_x, middle_y = page.value(f"(({MIDDLE})(document.querySelector('.chart')))")
        page.move_to(middle_x, middle_y)
        page.move_to(middle_x + 3, middle_y)
        until(lambda: page.value("tip.innerText").startswith("step "))
        assert "share of scored rollouts answered right" in page.value("tip.innerText")
        light_background = page.value("getComputedStyle(document.body).backgroundColor")
        page.value("document.querySelector('#samples input').value = 0")
        page.value("document.querySelector('#samples input').oninput()")
        assert "step 1 ·" in page.value("document.querySelector('#samples').innerText")
        for width, is_dark in ((1400, True), (400, False)):
            page.open(report, width, dark=is_dark)
            assert page.value("document.documentElement.scrollWidth <= innerWidth")
            background = page.value("getComputedStyle(document.body).backgroundColor")
            assert (background != light_background) == is_dark
        assert page.errors == []
        assert {request for request in page.requests if not request.startswith("data:")} == {report.as_uri()}


MIDDLE = "place => { const box = place.getBoundingClientRect(); return [box.x + box.width / 2, box.y + 120]; }"
# Number of colours in the first chart's picture.
COLOURS = """(() => {
  const canvas = document.querySelector('.chart canvas');
  const points = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(points.buffer)).size;
})()"""
