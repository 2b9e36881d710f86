"""Trial of a config's rewards, advantage and environments on its first row, before a run starts.

The trials run the user's code in separate processes. They are part of a run, of a dry run, and of `rlctl config check`
with an option such as --try-rewards.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rlctl.config.data_schema import DatasetSection
from rlctl.config.errors import ConfigError, Problem, locate_errors
from rlctl.config.fields import RECIPE
from rlctl.config.plugins import model_rewards
from rlctl.config.run_weights import local_adapter
from rlctl.config.schema import GrpoConfig, RunConfig
from rlctl.data.chat import Chat
from rlctl.data.datasets import Row, load_rows, path_text
from rlctl.data.files import DataError, files_of
from rlctl.data.load_data import (
    load_chat,
    load_prompts,
    may_have_unknown_text,
    may_rewrite,
    read_rows,
)
from rlctl.data.row_columns import describe_columns, first_column
from rlctl.data.rows import question
from rlctl.data.tokenize import tokenize_prompts, tokenize_samples
from rlctl.environments.environment_pool import UnusableEnvironmentError
from rlctl.grpo.advantages.trial import UnusableAdvantageError, try_advantage
from rlctl.models.model_sizes import config_file
from rlctl.preflight.load import Composed
from rlctl.preflight.settled import Settled
from rlctl.rewards.answer_reading import read_reference
from rlctl.rewards.base import UnusableError
from rlctl.rewards.scorer import Score, Scorer
from rlctl.rollout.episode_setup import EpisodeSetup, environment_pool, read_environments, set_up
from rlctl.rollout.scoring import sample_item
from rlctl.sandbox.open_sandbox import use_section

# Most reference answers to describe, because math_verify takes about 0.1 s to parse one.
_ROWS_TO_DESCRIBE = 50


def check_first_rows(settled: Settled) -> list[str]:
    """Read the first row of each data set on this machine, as a run would. Return one line for each finding.

    Data of `validation.recipe` is read too. Raises ConfigError with every problem.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    configs: list[RunConfig] = [settled.config]
    # An SFT run samples only to validate, by the config of `validation.recipe`. Only that config's validation data is
    # read: its training data is not used.
    if settled.sampling and settled.sft:
        configs.append(settled.sampling.config)
    for config in configs:
        sections: list[DatasetSection] = []
        if config is settled.config:
            sections += config.data.train.sources.values() or [config.data.train]
        if config.validation.every > 0:
            sections.append(config.data.validation)
        for section in sections:
            if section.path is None or not all(Path(file).is_file() for file in files_of(section.path)):
                continue
            try:
                rows = read_rows(config, replace(section, limit=1))
                if _needs_tokenizer(config, section, rows[0]):
                    # A run would emit these warnings when it tokenizes all rows.
                    notes += _tokenizing_warnings(config, section, rows)
            except DataError as error:
                problems.append(Problem("data", "", str(error)))
    if problems:
        raise ConfigError(problems)
    return notes


def _tokenizing_warnings(config: RunConfig, section: DatasetSection, rows: list[Row]) -> list[str]:
    """Tokenize rows, and return the warnings for the user, one line each. Raises DataError."""
    chat = load_chat(config, config.model.path)
    if config.sft:
        _, report = tokenize_samples(rows, section, chat, config.sft, max_prompt_length=None, max_length=sys.maxsize)
    else:
        _, report = tokenize_prompts(rows, section, chat, max_prompt_length=None)
    return report.warnings


def _needs_tokenizer(config: RunConfig, section: DatasetSection, row: Row) -> bool:
    """Return True if the chat template may change or drop parts of a row. Else the tokenizer, which takes seconds to
    load, is not needed.
    """
    if not config.needs_prompts or not Path(config.model.tokenizer or config.model.path).is_dir():
        return False
    if config.data.system_prompt is not None or may_have_unknown_text(config) or (config.sft and may_rewrite(config)):
        return True
    messages, _ = question(row, section, needs_prompt=False)
    read, ignored = describe_columns(row, section, messages, shows_tools=True)
    if read or ignored or first_column(row.values, "template"):
        return True
    return any(message["role"] not in ("user", "assistant") for message in messages)


def local_chat(config: RunConfig) -> Chat:
    """Return the tokenizer and chat template of a config, with end tokens of a model that is on this machine."""
    file = None if local_adapter(config.model.path) else config_file(config.model.path)
    return load_chat(config, str(file.parent) if file else config.model.path)


def has_users_reward(config: GrpoConfig) -> bool:
    """Return True if a reward is a user's function."""
    return any(":" in reward.name for reward in config.rewards)


def try_all(composed: Composed[Settled], *, rewards: bool, environments: bool, fetch: bool) -> list[str]:
    """Try rewards and environments on the first row. Return lines with the results, or with the reason why one was not
    tried.

    fetch: models and data may be downloaded from the hub. Raises ConfigError with every problem of both trials.
    """
    if composed.settled.sampling:
        use_section(composed.settled.sampling.config.sandbox)
    trials = []
    if rewards:
        trials.append(_try_rewards)
    if environments:
        trials.append(_try_environments)
    lines: list[str] = []
    problems: list[Problem] = []
    for trial in trials:
        try:
            lines += trial(composed, fetch)
        except ConfigError as error:
            problems += error.problems
    if problems:
        # Both trials may find the same wrong row or tokenizer.
        raise ConfigError(dict.fromkeys(problems))
    return lines


def try_all_rows(composed: Composed[Settled]) -> list[str]:
    """Score the answer of every row of data.train; return lines with the counts. Raises ConfigError."""
    from rlctl.launch.all_rows import score_all_answers

    if composed.settled.sampling is None:
        return ["rewards: an SFT run has none without validation.recipe"]
    config = composed.settled.sampling.config
    if config.has_turns or model_rewards(config.rewards):
        return ["rewards: all rows need a run, for episodes or a reward model score them: not tried here"]
    with _as_config_errors(composed):
        return score_all_answers(config)


def try_environments(composed: Composed[Settled], section: DatasetSection, row: Row, chat: Chat) -> EpisodeSetup:
    """Import each environment in a separate process, and begin one episode. Return the facts about the environments.

    section, row: first row of the data, for the episode. Raises ConfigError with every problem.
    """
    assert composed.settled.sampling
    config = composed.settled.sampling.config
    with _as_config_errors(composed), environment_pool(config) as pool:
        return set_up(config, pool, chat, load_prompts(config, section, chat, [row])[0][0])


def _try_rewards(composed: Composed[Settled], fetch: bool) -> list[str]:
    if composed.settled.sampling is None:
        return ["rewards: an SFT run has none without validation.recipe"]
    config = composed.settled.sampling.config
    if absent := _absent_file(config, fetch):
        return [f"rewards: not tried, {absent} is not on this machine; rlctl config check --try-rewards fetches it"]
    try:
        with _as_config_errors(composed):
            score = _score_of_first_row(config)
    except ImportError as error:
        return [f"rewards: not tried, {error.name or error} is not installed; see rlctl doctor"]
    parts = ", ".join(
        f"{name} does not judge it (None) and is left out of the sum" if value is None else f"{name} {value:g}"
        for name, value in score.parts.items()
        # With environments, a reward of None here is called at the end of an episode.
        if value is not None or not config.environment.is_enabled
    )
    if score.failed:
        return ["rewards: no reward judges the first row: each returned None; such rollouts are left out and counted"]
    model_lines = []
    if model_rewards(config.rewards):
        from rlctl.launch.reward_models import try_encoders

        with _as_config_errors(composed):
            section, row = _first_row(config)
            tasks, _ = load_prompts(config, section, load_chat(config, config.model.path), [row])
            model_lines = try_encoders(config.rewards, sample_item(tasks[0]))
    if model_lines and not parts:
        return model_lines
    if score.value is None and not model_lines:
        return ["rewards: called with the environment at the end of each episode, so not tried here"]
    tried = f"rewards: tried on the first row of {path_text(config.data.train.paths)}: {parts}"
    if not model_lines:
        tried += f"; its own answer is {'right' if score.right else 'not right'}"
    advantage_line = ""
    if composed.settled.grpo:
        with _as_config_errors(composed):
            advantage_line, _ = try_advantage(config)
    lines = [tried, *model_lines, *_reference_lines(config)]
    if advantage_line:
        lines.append(advantage_line)
    return lines


def _try_environments(composed: Composed[Settled], fetch: bool) -> list[str]:
    sampling = composed.settled.sampling
    if sampling is None or not sampling.config.has_turns:
        return ["environment: rollouts have one turn, without one"]
    config = sampling.config
    if absent := _absent_file(config, fetch):
        obstacle = f"{absent} is not on this machine; rlctl config check --try-environments fetches it"
    else:
        try:
            with _as_config_errors(composed):
                section, row = _first_row(config)
                chat = load_chat(config, config.model.path)
            setup = try_environments(composed, section, row, chat)
        except ImportError as error:
            obstacle = f"{error.name or error} is not installed; see rlctl doctor"
        else:
            lines = list(setup.notes)
            if config.environment.is_enabled:
                lines.append(f"environment: read, and begun on the first row of {path_text(config.data.train.paths)}")
            return lines
    with _as_config_errors(composed), environment_pool(config) as pool:
        read_environments(config, pool)
    return [f"environment: read, but not begun on a row: {obstacle}"]


def _reference_lines(config: GrpoConfig) -> list[str]:
    """Return lines on how math_verify parses the first reference answers, and how many of all it cannot parse."""
    if all(reward.name != "math_verify" for reward in config.rewards):
        return []
    # Imported here because SymPy takes seconds to import.
    from rlctl.rewards.mathematics import describe_references

    described: list[tuple[str, str]] = []
    unreadable: list[str] = []
    count = 0
    for section in config.data.train.sources.values() or [config.data.train]:
        for row in load_rows(section):
            answer = question(row, section, needs_prompt=False)[1] or ""
            count += 1
            if read_reference(answer) is None:
                unreadable.append(row.origin)
            elif len(described) < _ROWS_TO_DESCRIBE:
                described.append((f"row {row.number + 1}", answer))
    lines = describe_references(described)
    if unreadable:
        share = f"{len(unreadable)} of {count} answers"
        lines.append(f"math_verify cannot read {share}, so that their rollouts fail: first {unreadable[0]}")
    return lines


def _absent_file(config: GrpoConfig, fetch: bool) -> str:
    """Return the name of the tokenizer or data file that is not on this machine; empty if none, or if it may be
    fetched.
    """
    if fetch:
        return ""
    files = [config.model.tokenizer or config.model.path, *files_of(config.data.train.paths)]
    return next((file for file in files if not Path(file).exists()), "")


def _score_of_first_row(config: GrpoConfig) -> Score:
    """Score the reference answer of the first row of data.train, as if the policy had given it.

    Raises UnusableError if rewards fail, and DataError for a bad row or tokenizer.
    """
    section, row = _first_row(config)
    unlimited = replace(config, data=replace(config.data, max_prompt_length=None))
    prompts, _ = load_prompts(unlimited, section, load_chat(config, config.model.path), [row])
    with Scorer(config.rewards, episodes=config.environment.is_enabled) as scorer:
        return scorer.try_on_sample(sample_item(prompts[0]))


def _first_row(config: GrpoConfig) -> tuple[DatasetSection, Row]:
    """Return the section and the first row of data.train, or of its first source. Raises DataError."""
    first_source = next(iter(config.data.train.sources.values()), config.data.train)
    section = replace(first_source, limit=1)
    return section, read_rows(config, section)[0]


@contextmanager
def _as_config_errors(composed: Composed[Settled]) -> Iterator[None]:
    """Turn errors about data, rewards, advantages and environments into ConfigError with their keys.

    In an SFT run these keys are in the recipe, so they get the prefix `validation.recipe.`.
    """
    within = "" if composed.settled.grpo else f"{RECIPE}."

    def problem(key: str, reason: str, section: str = "") -> Problem:
        # A problem of a whole section names the section. Its line is that of `key`.
        return Problem(str(composed.origins.get(f"{within}{key}", "")), f"{within}{section or key}", reason)

    try:
        with locate_errors("data", DataError):
            yield
    except UnusableEnvironmentError as error:
        raise ConfigError(problem(key, reason) for key, reason in error.problems) from error
    except UnusableError as error:
        # A problem of all rewards together gets the line of the first reward.
        raise ConfigError(
            problem(f"rewards.{index or 0}.name", reason, "rewards" if index is None else "")
            for index, reason in error.problems
        ) from error
    except UnusableAdvantageError as error:
        # The message begins with the key and "=", and a Problem names the key by itself.
        raise ConfigError([problem("grpo.advantage.name", str(error).partition("=")[2])]) from error
