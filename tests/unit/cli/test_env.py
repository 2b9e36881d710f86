"""`rlctl env`: its report fits 80 columns or is JSON, and the exit code tells if a class keeps the contract."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from rlctl.config.schema import GrpoConfig
from rlctl.evaluation.evaluation_configs import arguments_of
from rlctl.preflight.load import load
from tests.unit.cli.conftest import Rlctl

GAME = '''
class Game:
    def __init__(self, most: int = 3):
        self.most = most

    def reset(self, target: int = 1, **row) -> str:
        self.count, self.target = 0, target
        return f"Bring the counter to {target}, in at most {self.most} moves. " + "Mind the steps. " * 10

    def increment(self, step: int = 1) -> int:
        """Add to the counter.

        Args:
            step: The number to add.
        """
        self.count += step
        return self.count

    def get_reward(self) -> float:
        return float(self.count == self.target)

class Broken(Game):
    def look(self, where):
        """Look."""
'''


@pytest.fixture(autouse=True)
def game(home: Path) -> None:
    (home / "my_env.py").write_text(GAME)
    (home / "tasks.jsonl").write_text('{"target": 1}\n{"target": 2}\n')


def test_check_shows_tools_conversation_and_rewards_within_80_columns(rlctl: Rlctl) -> None:
    done = rlctl("env", "check", "my_env.py:Game", "--data", "tasks.jsonl", "--arg", "most=5")
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert lines[0].startswith("check      my_env.py:Game, tasks of tasks.jsonl; loaded in ")
    assert lines[1:3] == ["tool       increment(step: integer = ...) -> integer", "           Add to the counter."]
    assert "user       Bring the counter to 2, in at most 5 moves. Mind the steps. Mind the" in lines
    assert [line for line in lines if line.startswith(("assistant", "reward"))] == [
        *["assistant  increment(step=1)", "reward     1"],
        *["assistant  increment(step=2)", "reward     1"],
        *["assistant  increment(step=3)", "reward     0"],
    ]
    assert lines[-1].startswith("played     3 episodes, 3 with a reward; an action takes ")
    assert max(map(len, lines)) <= 80 and "\x1b" not in done.out


def test_check_of_a_broken_class_exits_with_1_and_names_the_parameter(rlctl: Rlctl) -> None:
    done = rlctl("env", "check", "my_env.py:Broken")
    assert (done.code, done.err) == (1, "error: tool look: parameter where has no type hint\n")


def test_check_of_an_agent_names_the_columns_of_rows_without_a_prompt(rlctl: Rlctl, home: Path) -> None:
    (home / "sums.csv").write_text("question,sum\n1+1=,2\n")
    source = """
        import json
        from urllib.request import Request, urlopen

        def run(task, base_url, api_key):
            body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": task.prompt}]}).encode()
            headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
            urlopen(Request(f"{base_url}/chat/completions", body, headers))
            return 1.0
    """
    (home / "my_agent.py").write_text(dedent(source))
    done = rlctl("env", "check", "my_agent.py:run", "--data", "sums.csv")
    assert done.code == 1
    assert "error: episodes 1, 2, 3: the agent asked for a turn, and its messages have no text" in done.err
    assert "note: the rows have no column prompt or messages, but question, sum: task.prompt is empty here" in done.err
    (home / "sums.csv").write_text("prompt,sum\n1+1=,2\n")
    done = rlctl("env", "check", "my_agent.py:run", "--data", "sums.csv")
    assert done.code == 0 and "no column prompt" not in done.err


def test_check_of_a_rollout_function_shows_what_it_sampled(rlctl: Rlctl, home: Path) -> None:
    source = (
        "async def play(task, policy):\n"
        "    completion = await policy.sample(task.tokens)\n"
        "    return len(completion.tokens)\n"
    )
    (home / "my_rollout.py").write_text(source)
    done = rlctl("env", "check", "my_rollout.py:play")
    assert done.code == 0 and "sample     after 6 tokens, got 1 token" in done.out
    (home / "my_rollout.py").write_text(source.replace("len(", "length("))
    done = rlctl("env", "check", "my_rollout.py:play")
    assert done.code == 1 and "play raised NameError at my_rollout.py:3: name 'length' is" in done.err


def test_check_scores_episodes_by_functions_of_the_users(rlctl: Rlctl, home: Path) -> None:
    (home / "mine.py").write_text(
        "def doubled(environments, **kwargs):\n    return [2.0 * e.count for e in environments]\n"
    )
    done = rlctl("env", "check", "my_env.py:Game", "--reward", "mine.py:doubled")
    assert [line for line in done.out.splitlines() if "doubled" in line] == [
        "reward     environment 1, mine.py:doubled 2",
        "reward     environment 0, mine.py:doubled 4",
        "reward     environment 0, mine.py:doubled 6",
    ]
    done = rlctl("env", "check", "my_env.py:Game", "--reward", "mine.py:double")
    assert done.code == 2 and "--reward: mine.py defines no double; did you mean doubled?" in done.err


def test_check_in_json(rlctl: Rlctl) -> None:
    report = json.loads(rlctl("env", "check", "guess", "--json").out)
    assert report["name"] == "guess" and report["contract"]["has_step"] and report["problems"] == []
    assert len(report["episodes"]) == 3 and report["episodes"][0]["reward"] in (0.0, 1.0)
    turn_keys = {"said", "answer", "failed", "seconds", "tool", "raised"}
    for episode in report["episodes"]:
        assert episode["turns"] and all(turn.keys() == turn_keys for turn in episode["turns"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "gues"], "did you mean guess?"),
        (["check", "my_env.py:Gam"], "my_env.py defines no Gam; did you mean Game?"),
        (["check", "my_en.py:Game"], "no file my_en.py; did you mean my_env.py?"),
        (["check", "my_env.py"], "my_env.py names a file alone: write my_env.py:Class"),
        (["check", "my_env.py:Game", "--data", "none.jsonl"], "no file or folder none.jsonl"),
        (["check", "my_env.py:Game", "--arg", "most"], "must be KEY=VALUE with a YAML value, not most"),
        (["check", "guess", "--episodes", "2"], "needs --model"),
        (["check", "guess", "--model", "none"], "none: no run, no checkpoint, and no folder"),
        (["tasks", "mase"], "did you mean maze?"),
    ],
)
def test_what_is_mistyped_is_bad_input(rlctl: Rlctl, words: list[str], message: str) -> None:
    done = rlctl("env", *words)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


def test_a_runs_environment_keeps_its_arguments_by_whichever_name_it_is_asked_for() -> None:
    overrides = ["environment.name=my_env.py:Game", "environment.args={most: 2}", "rewards=[]"]
    config = load("grpo", None, overrides).config
    assert isinstance(config, GrpoConfig)
    for name in ("my_env.py:Game", "./my_env.py:Game", "my_env:Game"):
        assert arguments_of(config, name) == {"most": 2}
    for name in ("my_env.py:Broken", "guess"):
        assert arguments_of(config, name) == {}


def test_tasks_are_rows(rlctl: Rlctl) -> None:
    lines = rlctl("env", "tasks", "guess", "--count", "3").out.splitlines()
    assert [sorted(json.loads(line)) for line in lines] == [["high", "low", "secret"]] * 3
    assert lines != rlctl("env", "tasks", "guess", "--count", "3", "--held-out").out.splitlines()
