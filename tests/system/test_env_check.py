"""`rlctl env check --model` with a real engine: the conversation with its sampled parts, rewards and times."""

import json
import subprocess
import sys

import pytest

from rlctl.config.builtin import RECIPES

# In the characters that the model knows.
WORDS = ("guesses=3", "prompt='{low}-{high}='", "higher='+'", "lower='-'", "unclear='*'")


@pytest.mark.long  # 30 s; the engine and the player are those of tests/system/test_episodes.py
def test_a_model_plays_as_many_episodes_as_asked_for_and_its_turns_are_marked() -> None:
    arguments = []
    for word in WORDS:
        arguments += ["--arg", word]
    model = ["--model", str(RECIPES / "tiny/qwen3-tiny"), "--episodes", "2", "--json"]
    command = [sys.executable, "-m", "rlctl.cli.main", "env", "check", "guess", *arguments, *model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    played = json.loads(done.stdout)["played"]
    assert [record["task"] for record in played["records"]] == ["episode 1", "episode 2"]
    for record in played["records"]:
        (rollout,) = record["rollouts"]
        episode = rollout["episode"]
        assert rollout["failed"] is None and rollout["reward"] in (0.0, 1.0) and episode["ending"] == "done"
        assert [sampled for _, sampled in rollout["text"]] == [False, True] * episode["turns"]
        assert [message["role"] for message in episode["messages"]] == ["user", "assistant"] * episode["turns"]
