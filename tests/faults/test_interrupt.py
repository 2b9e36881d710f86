"""Signals to a run that has nothing to save yet. Signals during steps: test_resume.py and test_compiled.py."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rlctl.workers.reaper import leftovers
from tests.faults.runs import Run, survivors

pytestmark = pytest.mark.usefixtures("ordinary_workers")


@pytest.mark.parametrize(
    ("part", "wait_s", "end"),
    [
        ("ray", 0.0, Run.hang_up),
        # Some of Ray's processes are there.
        pytest.param("ray", 2.0, Run.interrupt, marks=pytest.mark.long),  # variant: the moment
        pytest.param("ray", 1.0, Run.terminate, marks=pytest.mark.long),  # variant: the signal
        pytest.param("trainer", 0.0, Run.hang_up, marks=pytest.mark.long),  # variant: the moment
        pytest.param("generator", 0.0, Run.interrupt, marks=pytest.mark.long),  # variant: the moment
        pytest.param("probe", 0.0, Run.terminate, marks=pytest.mark.long),  # variant: the moment
    ],
)
def test_the_first_ends_a_start_at_once_and_no_process_is_left(
    tmp_path: Path, part: str, wait_s: float, end: Callable[[Run], None]
) -> None:
    folders_before = {leftover.path for leftover in leftovers()}
    run = Run(tmp_path, "early", "grpo.num_steps=100000", terminal=end is Run.hang_up)
    run.wait_for_event("startup", what=part)
    time.sleep(wait_s)
    family = psutil.Process(run.process.pid).children(recursive=True)
    end(run)
    assert run.end() == 130
    assert survivors(family) == []
    assert {leftover.path for leftover in leftovers()} == folders_before
    started_parts = [event["what"] for event in run.events("startup") if "seconds" in event]
    # Ray may be there after two seconds, and its part be over.
    assert part not in started_parts or wait_s
    last_event = run.events()[-1]
    assert run.steps() == [] and last_event["kind"] == "run_ended"
    assert last_event["status"] == ("interrupted" if end is Run.interrupt else "stopped")
    assert "Traceback" not in run.text()
