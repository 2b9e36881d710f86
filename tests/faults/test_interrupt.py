"""Ctrl-C before there is anything to save; during steps: test_resume.py."""

import time
from pathlib import Path

import psutil
import pytest

from rlctl.workers.reaper import leftovers
from tests.faults.runs import Run, survivors

# Longer than the prompt takes on a busy machine, and shorter than most parts of a start there.
PROMPT_S = 10.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "wait_s"),
    [
        ("ray", 0.0),
        # Some of Ray's processes are there.
        pytest.param("ray", 2.0, marks=pytest.mark.long),  # variant: the moment
        pytest.param("trainer", 0.0, marks=pytest.mark.long),  # variant: the moment
        pytest.param("generator", 0.0, marks=pytest.mark.long),  # variant: the moment
        pytest.param("probe", 0.0, marks=pytest.mark.long),  # variant: the moment
    ],
)
def test_the_first_ends_a_start_at_once_and_no_process_is_left(tmp_path: Path, part: str, wait_s: float) -> None:
    before = {each.path for each in leftovers()}
    run = Run(tmp_path, "early", "grpo.num_steps=100000")
    run.wait_for_event("startup", what=part)
    time.sleep(wait_s)
    family, begin = psutil.Process(run.process.pid).children(recursive=True), time.monotonic()
    run.interrupt()
    assert run.end() == 130
    assert time.monotonic() - begin < PROMPT_S
    # The reaper of the run waits for nothing: there is nothing to remove.
    assert survivors(family, within_s=1.0) == []
    assert {each.path for each in leftovers()} == before
    ended = [event["what"] for event in run.events() if event["kind"] == "startup" and "seconds" in event]
    # Ray may be there after two seconds, and its part be over.
    assert part not in ended or wait_s
    assert run.steps() == [] and run.events()[-1]["kind"] == "run_ended"
    assert "Traceback" not in run.text()
