"""The section `environment` of a recipe: its values, and a person's errors, word for word."""

from pathlib import Path

import pytest

from rlctl.config.environment_schema import EnvironmentChoice
from rlctl.config.errors import ConfigError
from rlctl.config.schema import GrpoConfig
from rlctl.preflight.derived import NotKnownError
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.settled import SettledGrpo, settle

GAME = ["environment.name=guess", "rewards=[]", "data.max_prompt_length=null"]


def load_game(*overrides: str) -> GrpoConfig:
    config = load("grpo", "grpo.recipe.yaml", [*GAME, *overrides]).config
    assert isinstance(config, GrpoConfig)
    return config


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_game(*overrides)
    return [f"{problem.key}: {problem.what}" for problem in caught.value.problems]


def test_without_a_name_there_is_no_environment(home: Path) -> None:
    config = load("grpo", "grpo.recipe.yaml", []).config
    assert isinstance(config, GrpoConfig)
    assert not config.environment.is_enabled and config.environment.environments == {}


def test_an_environment_that_values_its_episodes_needs_no_other_reward_and_rows_need_no_prompt(home: Path) -> None:
    (home / "tasks.jsonl").write_text('{"low": 1, "high": 15}\n')
    config = load_game("data.train.path=tasks.jsonl", "environment.args={guesses: 4}")
    assert config.environment.environments == {"guess": EnvironmentChoice("guess", {"guesses": 4})}
    with pytest.raises(ConfigError, match="no column prompt or messages"):
        load("grpo", "grpo.recipe.yaml", ["data.train.path=tasks.jsonl"])


def test_one_of_several_may_be_named_alone_or_with_arguments(home: Path) -> None:
    (home / "mine.py").write_text("class Game: ...\n")
    config = load_game(
        "environment.name=null", "environment.choices={easy: guess, own: {name: mine:Game, args: {n: 3}}}"
    )
    users_class = f"{home / 'mine.py'}:Game"
    assert config.environment.environments == {
        "easy": EnvironmentChoice("guess", {}),
        "own": EnvironmentChoice(users_class, {"n": 3}),
    }


def test_the_longest_conversation_is_the_longest_sequence_of_the_run(home: Path) -> None:
    def settle_game(conversation: str, sequence: str) -> SettledGrpo:
        config = load_game(f"environment.max_length={conversation}", f"model.max_length={sequence}")
        return settle(config, RunMachine(), None)

    assert settle_game("100", "256").max_length == 100
    assert settle_game("null", "256").max_length == 256
    of_unknown_model = settle_game("null", "null")
    assert of_unknown_model.longest_sequence is None
    with pytest.raises(NotKnownError, match="is not on this machine: its longest sequence is not known"):
        of_unknown_model.max_length  # noqa: B018


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("environment.name=gues", "environment.name: must be calculator, guess, maze, sqlite, harbor, openenv, "
         "python, shell, python_shell or module:Class, not gues; did you mean guess?"),
        ("environment.name=mine.py:Gone", "environment.name: mine.py defines no Gone"),
        ("environment.choices={a: maze}", "environment.choices: names environments beside environment.name: leave one "
         "of the two empty"),
        ("environment.choices=maze", "environment.choices: must be a section of `key: value`, not 'maze'"),
        ("environment.args=[1]", "environment.args: must be a section of `key: value`, not a list"),
        ("environment.history=drop", "environment.history: must be one of keep, strip, not 'drop'"),
        ("rollout=mine.py:play", "rollout: plays rollouts, and so does environment: leave one of the two at null"),
        ("environment.timeout_s=600", "environment.timeout_s: must be below run.deadline_s=600, after which the run "
         "ends, not 600"),
        ("environment.max_length=300", "environment.max_length: must be at most the longest sequence, 256, not 300"),
        ("environment.max_length=64", "generation.max_new_tokens: bounds one turn and must be below "
         "environment.max_length=64, not 64"),
        ("data.max_prompt_length=9", "data.max_prompt_length: a prompt is known when its episode begins: leave it "
         "null; environment.max_length bounds the conversation"),
        ("grpo.overlong.penalty_tokens=9", "grpo.overlong.penalty_tokens: is for rollouts of one turn: leave it "
         "null, or value lengths in get_reward or in a reward"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_one_line(home: Path, override: str, expected: str) -> None:
    (home / "mine.py").write_text("class Game: ...\nasync def play(task, policy): ...\n")
    (problem,) = problems(override)
    assert problem.replace(f"{home}/", "") == expected


def test_a_micro_batch_must_hold_all_rows_of_a_rollout_where_the_loss_needs_them(home: Path) -> None:
    strips = ("environment.history=strip", "environment.max_length=100", "environment.max_turns=4")
    needs_rollouts = "grpo.loss.reduction=sequence"
    assert problems(*strips, needs_rollouts, "trainer.micro_batch_tokens=399") == [
        "trainer.micro_batch_tokens: must hold whole rollouts, which grpo.loss needs: with environment.history=strip 4 "
        "turns may be 4 rows of up to 100 tokens, 400 together, not 399; raise it, or set environment.max_turns=3 or "
        "environment.history=keep"
    ]
    for fitting in (
        (*strips, needs_rollouts, "trainer.micro_batch_tokens=auto"),
        (*strips, "trainer.micro_batch_tokens=399"),
        (*strips[1:], needs_rollouts, "trainer.micro_batch_tokens=399"),
        (*strips, needs_rollouts, "environment.max_turns=3", "trainer.micro_batch_tokens=399"),
    ):
        assert load_game(*fitting).environment.max_length == 100


def test_arguments_without_a_name_and_a_choice_that_does_not_exist_are_told_at_once(home: Path) -> None:
    choices = "environment.choices={a: {name: maz}, b: {nmae: maze}}"
    lines = problems("environment.name=null", "environment.args={n: 1}", choices)
    assert [line.partition(": ")[0] for line in lines] == [
        "environment.choices.b.nmae", "environment.choices.b.name", "environment.args", "environment.choices.a.name"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mine.py:plya", "rollout: mine.py defines no plya; did you mean play?"),
        ("play", "rollout: must be module:function or file.py:function, not play"),
        ("gone:play", "rollout: no module gone beside the recipe, in the current directory or on the Python path"),
    ],
)
def test_a_rollout_function_must_be_there_and_may_value_its_rollouts_itself(
    home: Path, name: str, expected: str
) -> None:
    (home / "mine.py").write_text("async def play(task, policy): ...\n")
    alone = ("environment.name=null", "data.max_prompt_length=9")
    assert load_game(*alone, "rollout=mine.py:play").has_turns
    (problem,) = problems(*alone, f"rollout={name}")
    assert problem.replace(f"{home}/", "") == expected


def test_a_program_that_is_not_here_is_one_problem_at_its_own_key(home: Path) -> None:
    absent = "there is no program nosuchprogram on this machine's path"
    assert problems("environment.name=null", "agent.command=nosuchprogram run") == [f"agent.command: {absent}"]
    wrapped = problems("environment.name=null", "agent.command=sh agent.sh", "agent.wrap=nosuchprogram")
    assert wrapped == [f"agent.wrap: {absent}"]
