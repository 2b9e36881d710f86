"""Rewards called on the first row, in their own process, before anything else starts."""

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
    """A recipe with its rewards beside it, away from the current directory."""
    folder = home / "recipes"
    folder.mkdir()
    (folder / "my.yaml").write_text(RECIPE)
    return folder / "my.yaml"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        (HEAD + "    return 1 / 0\n", "raised ZeroDivisionError at recipes/my_rewards.py:5: division by zero"),
        (HEAD + "    return 'good'\n", "no finite number at recipes/my_rewards.py:4: returned 'good'"),
        (HEAD.replace(", row", ""), "recipes/my_rewards.py is not Python: "),
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
    rlctl: Rlctl, recipe: Path, source: str, what: str
) -> None:
    (recipe.parent / "my_rewards.py").write_text(source)
    for command in (("config", "check", "recipes/my.yaml", "--try-rewards"),
                    ("train", "grpo", "recipes/my.yaml", "--dry-run")):  # fmt: skip
        done = rlctl(*command)
        lines = done.err.splitlines()
        assert (done.code, len(lines), done.out) == (2, 2, "")
        assert lines[0].startswith(f"error: recipes/my.yaml:4: rewards.1.name: {what}")
    assert not list(Path().glob("runs/*.dry-run.yaml"))


def test_rewards_that_work_say_what_they_gave(rlctl: Rlctl, recipe: Path) -> None:
    (recipe.parent / "my_rewards.py").write_text(HEAD + "    return len(prompt + completion) / 100\n")
    said = "exact 1, score 0.08; its own answer is right"
    checked = rlctl("config", "check", "recipes/my.yaml", "--try-rewards")
    assert checked.code == 0 and said in " ".join(checked.err.split())
    dry = rlctl("train", "grpo", "recipes/my.yaml", "--dry-run")
    assert dry.code == 0 and said in " ".join(dry.err.split())


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
