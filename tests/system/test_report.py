"""A report in a real browser: drawn without a request or a complaint, in bounded time and size, light, dark and narrow.

Runs where a Chromium is installed.
"""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlctl.cli.runs import app
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.rollouts_file import RolloutsFile
from tests import browser
from tests.unit.dashboard.synthetic import async_metrics, step_metrics, write_run

pytestmark = pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium is installed")

STEPS = 240
MOST_BYTES = 3_000_000
# Of the page's thread, which the load of the machine does not change as it does the time on the wall.
MOST_CPU_S = 2.0


def write(root: Path, name: str, synchronous: bool) -> Path:
    def metrics(step: int) -> dict[str, float]:
        more = {f"further/{number}": float(step * number % 17) for number in range(12)}
        return {**(step_metrics(step) if synchronous else async_metrics(step)), **more}

    run = write_run(root, name, STEPS, metrics=metrics)
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
    return run.path


def test_a_report_of_two_runs_is_drawn_from_one_file_and_explains_a_curve_under_the_pointer(tmp_path: Path) -> None:
    for name in ("sync", "async"):
        write(tmp_path, name, name == "sync")
    path = tmp_path / "both.html"
    arguments = ["report", "sync", "async", "--dir", tmp_path, "-o", path, "--png", tmp_path / "pictures"]
    result = CliRunner().invoke(app, [str(word) for word in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    assert path.stat().st_size < MOST_BYTES
    pictures = {each.name for each in (tmp_path / "pictures").glob("*.png") if each.stat().st_size > 10_000}
    assert {"learning.png", "step-time.png", "ages.png", "mismatch.png"} <= pictures
    with browser.browser(tmp_path / "profile") as page:
        page.call("Performance.enable", timeDomain="threadTicks")
        page.open(path, 1400)
        used = {each["name"]: each["value"] for each in page.call("Performance.getMetrics")["metrics"]}
        assert used["TaskDuration"] < MOST_CPU_S
        # A canvas that holds nothing but its background would be empty of lines.
        assert page.value("[...document.querySelectorAll('[data-chart]')].every(each => each.querySelector('canvas'))")
        assert page.value(COLOURS) >= 3
        x, y = page.value(f"(({MIDDLE})(document.querySelector('.chart')))")
        page.move_to(x, y)
        page.move_to(x + 3, y)
        assert page.value("new Promise(done => setTimeout(() => done(tip.innerText), 300))").startswith("step ")
        assert "share of scored rollouts answered right" in page.value("tip.innerText")
        light = page.value("getComputedStyle(document.body).backgroundColor")
        page.value("document.querySelector('#samples input').value = 0")
        page.value("document.querySelector('#samples input').oninput()")
        assert "step 1 ·" in page.value("document.querySelector('#samples').innerText")
        for width, dark in ((1400, True), (400, False)):
            page.open(path, width, dark=dark)
            assert page.value("document.documentElement.scrollWidth <= innerWidth")
            assert (page.value("getComputedStyle(document.body).backgroundColor") == light) is not dark
        assert page.errors == []
        assert {request for request in page.requests if not request.startswith("data:")} == {path.as_uri()}


MIDDLE = "place => { const box = place.getBoundingClientRect(); return [box.x + box.width / 2, box.y + 120]; }"
# Number of colours in the first chart's picture.
COLOURS = """(() => {
  const canvas = document.querySelector('.chart canvas');
  const points = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  return new Set(new Uint32Array(points.buffer)).size;
})()"""
