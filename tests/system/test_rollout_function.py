"""Whole runs whose rollouts a function of the user's plays: the example of the page, and a run that is killed."""

import re
from itertools import chain
from pathlib import Path

import pytest

import rlctl.environments.rollout_function as function_module
from tests.faults.runs import Run, read
from tests.faults.test_resume import check_same_runs

PAGE = (Path(function_module.__file__).parent / "README.md").read_text()
SETTINGS = ("rollout=my_rollout.py:play", "rewards=[]", "grpo.num_steps=3", "checkpoint={every: 1, keep_last: 100}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write the example of the page into a folder."""
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", PAGE)
    (tmp_path / "my_rollout.py").write_text(blocks[-1])
    return tmp_path


@pytest.mark.long  # the parts are in tests/unit/rollout/test_function_player.py and tests/unit/environments
def test_the_example_trains_what_it_sampled_and_a_killed_run_goes_on_bit_for_bit(folder: Path) -> None:
    unhurt = Run(folder, "whole", *SETTINGS)
    assert unhurt.end() == 0, unhurt.text()
    for step in unhurt.steps():
        assert step["mismatch/token_mult_prob_error"] < 1.001
        assert (step["environment/turns"], step["environment/rows"], step["environment/failed"]) == (3, 2, 0)
        assert {"reward/agreement/mean", "reward/length/mean"} <= step.keys()
    groups = [record for record in read(unhurt.path / "rollouts.jsonl") if record["kind"] == "group"]
    assert groups
    for rollout in chain.from_iterable(group["rollouts"] for group in groups):
        assert rollout["episode"]["ending"] == "done"
        assert sum(sampled for _, sampled in rollout["text"]) >= 2
    killed = Run(folder, "killed", *SETTINGS)
    killed.wait_for_step(2)
    killed.kill()
    resumed = Run(folder, "killed", resume=True)
    assert resumed.end() == 0, resumed.text()
    check_same_runs(resumed, unhurt, 3)
