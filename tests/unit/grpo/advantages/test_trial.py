"""`try_advantage` finds errors in a user's advantage before a run starts."""

from pathlib import Path

import pytest

from rlctl.config.schema import GrpoConfig
from rlctl.grpo.advantages.trial import UnusableAdvantageError, try_advantage
from rlctl.preflight.load import load

HEAD = """\
from dataclasses import dataclass

from rlctl.grpo.advantages.base import Advantage


@dataclass(frozen=True)
class Mine(Advantage):
    def __call__(self, rollouts):
"""


def try_body(folder: Path, body: str, *overrides: str) -> tuple[str, bool]:
    file = folder / "mine.py"
    file.write_text(f"{HEAD}        {body}\n")
    config = load("grpo", "grpo-tiny", [f"grpo.advantage.name={file}:Mine", *overrides]).config
    assert isinstance(config, GrpoConfig)
    line, failed = try_advantage(config)
    assert line.startswith(f"grpo.advantage.name={file}:Mine, tried on made-up rewards of 0 and 1: ")
    return line.partition("0 and 1: ")[2], failed


def test_what_would_end_the_first_step_is_told_with_file_and_line(tmp_path: Path) -> None:
    line, failed = try_body(tmp_path, "return rollouts.parts['other']")
    assert failed and line.startswith("Mine raised KeyError at ") and "mine.py:9" in line


@pytest.mark.parametrize("overrides", [(), ("environment.name=guess",)])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return rollouts.reward[1:]", "Mine returned 15 advantages for 16 rollouts at {}:8; return one for each"),
        ("return 1.0", "Mine returned 1.0 at {}:8; return an advantage for each of 16 rollouts"),
        ("return [[1.0] * 9] * len(rollouts)", "Mine gave rollout 0 advantages of shape (9,) at {}:8: give a number"),
        ("return rollout.reward", "Mine raised NameError at {}:9: name 'rollout' is not defined"),
    ],
)
def test_a_wrong_number_of_advantages_and_a_typo_are_errors_before_the_run(
    tmp_path: Path, body: str, message: str, overrides: tuple[str, ...]
) -> None:
    with pytest.raises(UnusableAdvantageError) as error:
        try_body(tmp_path, body, *overrides)
    assert f": {message.format(tmp_path / 'mine.py')}" in str(error.value)


def test_rewards_have_the_runs_names_and_weights(tmp_path: Path) -> None:
    assert try_body(tmp_path, "return rollouts.parts['exact'] * rollouts.weights['exact']")[1] is False
    with_penalty = ("grpo.overlong.penalty_tokens=2", "grpo.overlong.penalty=0.5")
    assert try_body(tmp_path, "return rollouts.reward + rollouts.parts['overlong']", *with_penalty)[1] is False
    assert try_body(tmp_path, "return rollouts.parts['overlong']")[1] is True


def test_a_group_of_equal_rewards_is_tried_unless_such_groups_are_filtered(tmp_path: Path) -> None:
    largest = "rollouts.reward[rows].max()"
    divides = f"return [{largest} / {largest} for rows in rollouts.groups() for _ in rows]"
    line, failed = try_body(tmp_path, divides)
    assert failed and "nan" in line
    assert try_body(tmp_path, divides, "grpo.dynamic_sampling.filter=rewards")[1] is False


def test_the_columns_that_it_names_are_there_at_every_sampled_token(tmp_path: Path) -> None:
    folder = Path(__file__).parents[3] / "plugins"
    config = load("grpo", "grpo-tiny", [f"grpo.advantage={folder}/reference_pull.py:ReferencePull"]).config
    assert isinstance(config, GrpoConfig)
    line, failed = try_advantage(config)
    assert line.endswith("as many finite numbers as it must give") and not failed
    line, failed = try_body(tmp_path, "return rollouts.columns['age']")
    assert failed and line.startswith("Mine raised KeyError at ")


def test_nothing_is_said_of_rlctls_own() -> None:
    config = load("grpo", "grpo-tiny", []).config
    assert isinstance(config, GrpoConfig)
    assert try_advantage(config) == ("", False)
