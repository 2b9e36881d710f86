"""Rewards and environments tried on the first row, in separate processes, before anything else starts."""

import json
from pathlib import Path

import pytest
import yaml

from rlctl.preflight.load import load
from tests.unit.cli.conftest import Rlctl

RECIPE = """\
defaults: grpo-tiny.yaml
rewards:
  - name: exact
  - name: my_rewards:score
    weight: 0.1
"""
HEAD = '"""Mine."""\n\n\ndef score(prompt, completion, answer, row):\n'


@pytest.fixture
def recipe(home: Path) -> Path:
    """Return a recipe. It and its rewards are in a folder below the current directory."""
    folder = home / "recipes"
    folder.mkdir()
    (folder / "my.yaml").write_text(RECIPE)
    return folder / "my.yaml"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (HEAD + "    return 1 / 0\n", "raised ZeroDivisionError at recipes/my_rewards.py:5: division by zero"),
        (HEAD + "    return 'good'\n", "no finite number at recipes/my_rewards.py:4: returned 'good'"),
        (HEAD.replace(", row", ""), "recipes/my_rewards.py:4: not Python: "),
        (
            HEAD.replace(", row", "") + "    return 1\n",
            "wrong signature at recipes/my_rewards.py:4: it must take (prompt, completion, answer, row); too many",
        ),
        ("import nothing_such\n\n" + HEAD + "    return 1\n", "cannot import: ModuleNotFoundError: No module named "
         "'nothing_such' at recipes/my_rewards.py:1"),
        (HEAD + "    import os\n    os._exit(3)\n", "ended its process: exit code 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_reward_is_one_line_with_the_users_file_and_line(
    rlctl: Rlctl, recipe: Path, source: str, problem: str
) -> None:
    (recipe.parent / "my_rewards.py").write_text(source)
    for command in (("config", "check", "recipes/my.yaml", "--try-rewards"),
                    ("train", "grpo", "recipes/my.yaml", "--dry-run")):  # fmt: skip
        done = rlctl(*command)
        lines = done.err.splitlines()
        assert (done.code, len(lines), done.out) == (2, 2, "")
        assert lines[0].startswith(f"error: recipes/my.yaml:4: rewards.1.name: {problem}")
    assert not list(Path().glob("runs/*.dry-run.yaml"))


def test_rewards_that_work_say_what_they_gave(rlctl: Rlctl, recipe: Path) -> None:
    (recipe.parent / "my_rewards.py").write_text(HEAD + "    return len(prompt + completion) / 100\n")
    scores = "exact 1, score 0.08; its own answer is right"
    checked = rlctl("config", "check", "recipes/my.yaml", "--try-rewards")
    assert checked.code == 0 and scores in " ".join(checked.err.split())
    planned = rlctl("train", "grpo", "recipes/my.yaml", "--dry-run")
    assert planned.code == 0 and scores in " ".join(planned.err.split())


TRL_STYLE = """\
def chat(completions, solution, **columns):
    return [float(completions[0][0]["content"] == solution[0])]

def abstains(completions, **columns):
    return [None]
"""


def test_rewards_of_trl_are_tried_on_a_chat_of_any_column_and_references_are_told(rlctl: Rlctl, recipe: Path) -> None:
    (recipe.parent / "my_rewards.py").write_text(TRL_STYLE)
    row = {"question": [{"role": "user", "content": "2+2?"}], "solution": "#### 4"}
    (recipe.parent / "q.jsonl").write_text(json.dumps(row))
    (recipe.parent / "r.jsonl").write_text("\n".join(json.dumps({**row, "solution": text}) for text in ("4", "")))
    names = ["math_verify", "my_rewards.py:chat", "my_rewards.py:abstains"]
    columns = {"prompt_key": "question", "answer_key": "solution"}
    sources = {"q": {"path": "q.jsonl", **columns}, "r": {"path": "r.jsonl", **columns}}
    train = {"path": None, "sources": sources}
    sections = {"data": {"train": train}, "rewards": [{"name": name} for name in names]}
    recipe.write_text("defaults: grpo-tiny.yaml\n" + yaml.safe_dump(sections))
    done = rlctl("config", "check", "recipes/my.yaml", "--try-rewards")
    text = " ".join(done.err.split())
    assert done.code == 0, text
    assert "math_verify 1, chat 1, abstains does not judge it (None) and is left out of the sum; its own" in text
    assert "math_verify reads 2 of 2 answers as mathematics: row 1, '#### 4', is 4" in text
    assert "math_verify cannot read 1 of 3 answers, so that their rollouts fail: first " in text
    assert "r.jsonl:2" in text
    rewards = "rewards=[{name: 'recipes/my_rewards.py:abstains'}]"
    done = rlctl("config", "check", "recipes/my.yaml", "--try-rewards", rewards)
    assert "no reward judges the first row: each returned None" in " ".join(done.err.split())


def test_a_wrong_number_of_advantages_is_an_error_at_its_key(rlctl: Rlctl, recipe: Path) -> None:
    (recipe.parent / "mine.py").write_text(
        "from rlctl.grpo.advantages.base import Advantage\n\nclass Mine(Advantage):\n"
        "    def __call__(self, rollouts):\n        return rollouts.reward[1:]\n"
    )
    recipe.write_text("defaults: grpo-tiny.yaml\ngrpo:\n  advantage: {name: 'mine.py:Mine'}\n")
    done = rlctl("config", "check", "recipes/my.yaml", "--try-rewards")
    assert done.code == 2 and done.err.startswith("error: recipes/my.yaml:3: grpo.advantage.name: ")
    problem = "Mine returned 15 advantages for 16 rollouts at recipes/mine.py:4; return one for each"
    assert problem in done.err.splitlines()[0]


GAME = """\
defaults: grpo-tiny.yaml
environment: {name: "my_env.py:Game"}
rewards: []
"""
ENV = """\
class Game:
    def reset(self, **row):
        return "begin"

    def step(self, message):
        return None

    def get_reward(self):
        return 1.0
"""


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        (ENV.replace("def reset", "def rest"), ["tool rest: has no docstring", "has no method reset"]),
        ("import nothing_such\n" + ENV, ["cannot import: ModuleNotFoundError: No module named 'nothing_such' at "]),
        (ENV.replace('return "begin"', "return 1 / 0"), ["row r0: reset raised ZeroDivisionError at "]),
    ],
)
def test_a_dry_run_tells_what_is_wrong_with_environments_and_rewards_at_once(
    rlctl: Rlctl, recipe: Path, source: str, problems: list[str]
) -> None:
    (recipe.parent / "my_env.py").write_text(source)
    (recipe.parent / "my_rewards.py").write_text(HEAD + "    return 'good'\n")
    recipe.write_text(GAME.replace("[]", '["my_rewards.py:score"]'))
    done = rlctl("train", "grpo", "recipes/my.yaml", "--dry-run")
    error_of_reward, *errors_of_environment, count = done.err.splitlines()
    assert (done.code, done.out) == (2, "") and not list(Path().glob("runs/*.dry-run.yaml"))
    assert error_of_reward.startswith("error: recipes/my.yaml:3: rewards.0.name: no finite number")
    for error, problem in zip(errors_of_environment, problems, strict=True):
        assert error.startswith(f"error: recipes/my.yaml:2: environment.name: {problem}")
    assert count == f"{1 + len(problems)} problems; nothing was started"


PLAY = """\
async def play(task, policy):
    completion = await policy.sample(task.tokens)
    return float(len(completion.tokens) > 0)
"""


def test_a_rollout_function_is_tried_on_the_first_row_and_a_typo_costs_no_run(rlctl: Rlctl, recipe: Path) -> None:
    recipe.write_text("defaults: grpo-tiny.yaml\nrollout: my_rollout.py:play\nrewards: []\n")
    (recipe.parent / "my_rollout.py").write_text(PLAY)
    done = rlctl("config", "check", "recipes/my.yaml", "--try-environments")
    assert done.code == 0
    assert "rollout: tried on row r0 with scripted answers: samples 1, reward 1.0" in " ".join(done.err.split())
    for prompt, problem in (
        ("task.tokns", "play raised AttributeError at recipes/my_rollout.py:2: 'PlayTask' object has no attribute"),
        ("[]", "sampled after no tokens"),
    ):
        (recipe.parent / "my_rollout.py").write_text(PLAY.replace("task.tokens", prompt))
        for command in (("config", "check", "recipes/my.yaml", "--try-environments"),
                        ("train", "grpo", "recipes/my.yaml", "--dry-run")):  # fmt: skip
            done = rlctl(*command)
            assert (done.code, done.out) == (2, "")
            assert done.err.startswith(f"error: recipes/my.yaml:2: rollout: row r0: {problem}")
    (recipe.parent / "my_rollout.py").write_text(PLAY.replace("return float", "float"))
    done = rlctl("config", "check", "recipes/my.yaml", "--try-environments")
    assert done.code == 2 and "rollout: row r0: returned None, and rewards is empty" in done.err


def test_an_environment_that_works_is_begun_and_without_the_data_it_is_read(rlctl: Rlctl, recipe: Path) -> None:
    (recipe.parent / "my_env.py").write_text(ENV)
    recipe.write_text(GAME)
    done = rlctl("train", "grpo", "recipes/my.yaml", "--dry-run")
    assert done.code == 0 and "environment: read, and begun on the first row of " in " ".join(done.err.split())
    without_data = ("train", "grpo", "recipes/my.yaml", "data.train.path=some/dataset", "--dry-run")
    done = rlctl(*without_data)
    assert done.code == 0 and "read, but not begun on a row: some/dataset is not on this machine" in done.err
    (recipe.parent / "my_env.py").write_text("import nothing_such\n" + ENV)
    assert "cannot import" in rlctl(*without_data).err


def test_a_rollout_function_is_read_where_it_is_asked_for(rlctl: Rlctl, recipe: Path) -> None:
    recipe.write_text("defaults: grpo-tiny.yaml\nrollout: my_rollout.py:play\nrewards: []\n")
    (recipe.parent / "my_rollout.py").write_text("async def play(task):\n    return 1.0\n")
    error = "error: recipes/my.yaml:2: rollout: is called as play(task, policy): too many positional arguments"
    assert rlctl("config", "check", "recipes/my.yaml").code == 0
    for command in (("config", "check", "recipes/my.yaml", "--try-environments"),
                    ("train", "grpo", "recipes/my.yaml", "--dry-run")):  # fmt: skip
        done = rlctl(*command)
        assert done.code == 2 and done.err.splitlines()[0] == error


def test_a_dry_run_fetches_nothing_for_it(rlctl: Rlctl, recipe: Path) -> None:
    (recipe.parent / "my_rewards.py").write_text(HEAD + "    return 1 / 0\n")
    done = rlctl("train", "grpo", "recipes/my.yaml", "data.train.path=some/dataset", "--dry-run")
    assert done.code == 0
    assert "not tried, some/dataset is not on this machine; rlctl config check --try-rewards fetches it" in " ".join(
        done.err.split()
    )


def test_a_module_is_looked_up_beside_the_recipe_and_the_resolved_config_knows_where(
    rlctl: Rlctl, recipe: Path, home: Path
) -> None:
    (recipe.parent / "my_rewards.py").write_text(HEAD + "    return 1\n")
    (home / "my_rewards.py").write_text("")
    resolved = yaml.safe_load(load("grpo", "recipes/my.yaml", []).to_yaml())
    assert resolved["rewards"][1]["name"] == f"{recipe.parent / 'my_rewards.py'}:score"
    (recipe.parent / "my_rewards.py").unlink()
    assert "my_rewards.py defines no score" in rlctl("config", "check", "recipes/my.yaml").err


@pytest.mark.long  # 3 s of CPU a try: the agent's process imports the tokenizer's library
def test_an_agent_may_refuse_made_up_turns_but_not_fail_before_the_first(rlctl: Rlctl, recipe: Path) -> None:
    recipe.write_text("defaults: calculator-agent-tiny\nagent: my_agent.py:run\n")
    source = (
        "import json, urllib.request\n\n\ndef run(task, base_url, api_key):\n"
        "    body = {'model': 'policy', 'n': 1, 'messages': [{'role': 'user', 'content': 'Add.'}]}\n"
        "    head = {'Authorization': f'Bearer {api_key}', 'Content-Type': 'application/json'}\n"
        "    address = f'{base_url}/chat/completions'\n"
        "    urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), head)).read()\n"
        "    raise ValueError('no such answer')\n"
    )
    (recipe.parent / "my_agent.py").write_text(source)
    done = rlctl("config", "check", "recipes/my.yaml", "--try-environments")
    assert done.code == 0 and "with made-up turns: run raised ValueError at " in " ".join(done.err.split())
    (recipe.parent / "my_agent.py").write_text(source.replace("'n': 1", "'n': 2"))
    done = rlctl("config", "check", "recipes/my.yaml", "--try-environments")
    error = "error: recipes/my.yaml:2: agent.name: row r0: run raised HTTPError at "
    assert done.code == 2 and done.err.startswith(error)
