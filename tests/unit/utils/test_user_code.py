"""An error of a plug-in is placed in the user's own files, also where a library raised it."""

from pathlib import Path

import pytest

from rlctl.config.grpo_schema import RewardSection
from rlctl.config.plugin_options import load_plugin
from rlctl.config.plugins import ADVANTAGE_BASE, LOSS_BASE
from rlctl.config.telemetry_schema import UserTrackerSection
from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.outcomes import EnvironmentSpec
from rlctl.rewards.base import RewardError
from rlctl.rewards.load_rewards import load_reward
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.trackers.base import open_trackers


@pytest.mark.parametrize(
    ("helper", "message"),
    [
        ('import json\n\nvalue = json.loads("{")\n', "JSONDecodeError: "),
        ("import os\n\nvalue = (\n", "SyntaxError: "),
        ("from os import path\n\nfrom os import pth\n", "ImportError: cannot import name 'pth'"),
    ],
)
def test_a_plug_in_that_cannot_be_imported_names_the_users_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helper: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    # Each case has modules of other names.
    name = f"{message.partition(':')[0].lower()}_helper"
    Path(f"{name}.py").write_text(helper)
    Path(f"{name}_mine.py").write_text(f"import {name}\n\nclass Mine: ...\n")
    plugin = f"{name}_mine.py:Mine"
    lines = list[str]()
    for base in (LOSS_BASE, ADVANTAGE_BASE):
        _, problem = load_plugin(plugin, base)
        lines.append(problem)
    with pytest.raises(RewardError) as reward_error:
        load_reward(RewardSection(plugin, 1.0, None, None, 5.0, 64))
    lines.append(str(reward_error.value))
    environments = EnvironmentPool({"mine": EnvironmentSpec(plugin, 20.0)}, 1024, 1)
    with environments as pool, pytest.raises(UnusableEnvironmentError) as environment_error:
        pool.contracts()
    lines.append(str(environment_error.value))
    open_trackers([UserTrackerSection(plugin, {})], tmp_path, {}, EventLog(tmp_path / "events.jsonl"))
    (event,) = read_records(tmp_path / "events.jsonl")
    lines.append(event["what"])
    for line in lines:
        assert message in line and f" at {name}.py:3" in line, line
