"""`rlctl env`: environments tried before a run, by a script or by a model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.arguments import AsJson, finite
from rlctl.cli.completion import complete_run
from rlctl.cli.output import FAILED, busy, console, examples, explained_weights, note, say, tell
from rlctl.config.errors import ConfigError, Problem, locate_errors

if TYPE_CHECKING:
    from rlctl.config.data_schema import DatasetSection
    from rlctl.config.schema import GrpoConfig
    from rlctl.data.datasets import Row
    from rlctl.evaluation.engine_episodes import PlayedEpisodes
    from rlctl.evaluation.environment_check import CheckReport, ScriptedEpisode
    from rlctl.evaluation.target import Target

app = typer.Typer(no_args_is_help=True)

_WIDEST, _LABEL = 100, 10
_LONGEST = 400
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="One that ships, my_env.py:Class or module:Class, a rollout function or an agent, my.py:run.",
    ),
]
Seed = Annotated[int, typer.Option(help="The seed of the first episode or task.", min=0)]


@app.callback()
def env() -> None:
    """Check environments, and list the shipped tasks."""


@app.command(
    epilog=examples(
        "rlctl env check my_env.py:Game --data tasks.jsonl",
        "rlctl env check guess --arg guesses=4",
        "rlctl env check my_rollout.py:play --data tasks.jsonl",
        "rlctl env check my_agent.py:run --data tasks.jsonl",
        "rlctl env check my_env.py:Game --data tasks.jsonl --model my-run --episodes 4",
    )
)
def check(
    name: Name,
    data: Annotated[Path | None, typer.Option(help="Tasks, a row each: JSONL or Parquet.", show_default=False)] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An argument of the class; the value is YAML.", show_default=False),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE:FUNCTION", help="A reward that takes `environments`.", show_default=False),
    ] = None,
    command: Annotated[bool, typer.Option("--command", help="NAME is a command that runs an agent.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that each action may take.", min=0.01, callback=finite)] = 5.0,
    memory: Annotated[int, typer.Option(help="MiB that the process may use.", min=64)] = 4096,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="CHECKPOINT | FOLDER | RUN",
            help="Play with this model in place of the script; it starts an engine.",
            show_default=False,
            autocompletion=complete_run,
        ),
    ] = None,
    episodes: Annotated[
        int | None, typer.Option(help="With --model: the episodes, 1 if left out.", min=1, show_default=False)
    ] = None,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Play three scripted episodes: contract, tools, rewards, times. Exit code 1 if the contract is broken.

    With --model: episodes with a real engine, each conversation with the sampled text marked.
    """
    from dataclasses import asdict, replace

    from rlctl.config.builtin import runs_folder
    from rlctl.config.plugins import ENVIRONMENTS
    from rlctl.data.files import DataError
    from rlctl.environments.outcomes import AgentSpec, EnvironmentSpec, command_of
    from rlctl.evaluation.environment_check import EPISODES, check_environment, rows_to_try
    from rlctl.evaluation.evaluation_configs import arguments_of, config_of, episodes_config
    from rlctl.evaluation.target import find_target
    from rlctl.preflight.check_inputs import require_plugin

    if not command:
        require_plugin("NAME", name, ENVIRONMENTS, "Class")
    if episodes is not None and model is None:
        raise ConfigError([Problem("--episodes", "", "needs --model; without one, three scripted episodes are played")])
    with locate_errors("--data", DataError):
        section, rows = rows_to_try(name, str(data) if data else None, seed, max(EPISODES, episodes or 1))
    own: dict[str, Any] = {}
    if model is not None:
        with explained_weights("interrupted"):
            target = find_target(model, runs_folder())
            config, longest = config_of(target, seed)
        own = arguments_of(config, name)
    for each in reward or []:
        require_plugin("--reward", each, (), "function")
    arguments = _arguments(arg) if arg else own
    spec = EnvironmentSpec(name, timeout, arguments, is_function=None, rewards=tuple(reward or ()))
    if command:
        spec = replace(spec, agent=AgentSpec(tuple(command_of(name, None))))
    with busy(f"playing {name}"):
        values = [row.values for row in rows]
        report = check_environment(spec, values, memory, seed, model_follows=model is not None)
    played = None
    if model is not None and not report.problems:
        contract = report.contract
        agent = spec.agent or (AgentSpec() if contract is not None and contract.is_agent else None)
        spec = replace(spec, is_function=contract is not None and contract.is_function, agent=agent)
        config = episodes_config(config, spec, memory, longest)
        played = _play(config, target, name, (section, rows), episodes or 1)
    if as_json:
        found = {"name": name, **asdict(report), **({"played": asdict(played)} if played else {})}
        typer.echo(json.dumps(found, indent=1, default=str))
    else:
        _show_report(name, str(data) if data else "", report, played)
    if report.problems or (played and played.failures):
        raise typer.Exit(FAILED)


@app.command(
    epilog=examples(
        "rlctl env tasks guess --count 500 > train.jsonl",
        "rlctl env tasks guess --count 100 --held-out > validation.jsonl",
    )
)
def tasks(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One that ships.")],
    count: Annotated[int, typer.Option("--count", "-n", help="The tasks to print.", min=1)] = 10,
    held_out: Annotated[bool, typer.Option("--held-out", help="Print tasks that are never among the others.")] = False,
    seed: Seed = 0,
) -> None:
    """Print tasks of an environment that ships, a JSON row each, equal for equal seeds."""
    from itertools import islice

    from rlctl.config.errors import did_you_mean
    from rlctl.config.plugins import ENVIRONMENTS
    from rlctl.evaluation.environment_check import shipped_tasks

    if name not in ENVIRONMENTS:
        what = f"must be {', '.join(ENVIRONMENTS)}, not {name}{did_you_mean(name, ENVIRONMENTS)}"
        raise ConfigError([Problem("NAME", "", what)])
    for row in islice(shipped_tasks(name, seed, held_out), count):
        typer.echo(json.dumps(row))


def _play(
    config: "GrpoConfig", target: "Target", name: str, data: "tuple[DatasetSection, list[Row]]", count: int
) -> "PlayedEpisodes":
    from rlctl.workers.reaper import scratch_folder

    with (
        explained_weights("interrupted"),
        scratch_folder("rlctl-env-") as logs,
        busy(f"playing {name} with {target.name}"),
    ):
        # It imports torch, which takes seconds.
        from rlctl.evaluation.engine_episodes import play_episodes

        return play_episodes(config, *data, count, target.step, logs, tell)


def _arguments(given: list[str] | None) -> dict[str, Any]:
    """Return the class's arguments. Raises ConfigError for one that is no KEY=VALUE."""
    import yaml

    arguments: dict[str, Any] = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        try:
            arguments[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals or not key.isidentifier():
            raise ConfigError([Problem("--arg", "", f"must be KEY=VALUE with a YAML value, not {text}")])
    return arguments


def _show_report(name: str, data: str, report: "CheckReport", played: "PlayedEpisodes | None") -> None:
    from rlctl.evaluation.environment_check import signature

    _line("check", f"{name}{f', tasks of {data}' if data else ''}; loaded in {report.start_s:.2f} s")
    for tool in report.contract.tools if report.contract else ():
        _line("tool", signature(tool))
        _line("", tool["function"]["description"])
    if report.contract and report.contract.has_step:
        _line("step", "answers messages that call no tool")
    say("")
    if played:
        _conversations(played)
    else:
        _script(report.episodes, is_agent=report.contract is not None and report.contract.is_agent)
    note([*report.notes, *(played.notes if played else ())])
    for problem in (*report.problems, *(played.failures if played else ())):
        from rich.text import Text

        console(stderr=True).print(Text.assemble(("error: ", "bold red"), problem))


def _conversations(played: "PlayedEpisodes") -> None:
    from rlctl.cli.rollouts import print_group
    from rlctl.dashboard.formats import count, duration

    for record in played.records:
        print_group(record, console())
    tokens = sum(rollout["tokens"] for record in played.records for rollout in record["rollouts"])
    what = f"{count(len(played.records), 'episode')}, {count(tokens, 'token')} sampled, in {duration(played.play_s)}"
    _line("played", f"{what}; the engine started in {duration(played.start_s)}")


def _script(episodes: "Sequence[ScriptedEpisode]", is_agent: bool) -> None:
    for number, episode in enumerate(episodes, 1):
        _episode(number, episode, is_agent)
        say("")
    rewards = [each.reward for each in episodes if each.reward is not None]
    actions = [] if is_agent else sorted(turn.seconds for each in episodes for turn in each.turns)
    if episodes:
        median = f"; an action takes {_took_text(actions[len(actions) // 2])} at the median" if actions else ""
        _line("played", f"{len(episodes)} episodes, {len(rewards)} with a reward{median}")


def _episode(number: int, episode: "ScriptedEpisode", is_agent: bool) -> None:
    from rlctl.dashboard.formats import count

    begun = "called for" if episode.samples else "reset in" if not is_agent else "ran for"
    _line(f"episode {number}", f"{begun} {_took_text(episode.reset_s)}")
    for message in episode.opening:
        _line(str(message["role"]), str(message.get("content", "")))
    for prompt, answer in episode.samples:
        said = f"got {count(answer, 'token')}" if answer else "got none: the script's budget is used up"
        _line("sample", f"after {count(prompt, 'token')}, {said}")
    for turn in episode.turns:
        _line("assistant", turn.action)
        if turn.answer is not None or not is_agent:
            label = "error" if turn.failed else "answer"
            _line(label, turn.answer if turn.answer is not None else "the episode has ended")
    if is_agent and episode.failure is None:
        _line("end", "the agent has ended by itself")
    if episode.reward is not None:
        parts = episode.reward.items() if isinstance(episode.reward, dict) else [("", episode.reward)]
        _line("reward", ", ".join(f"{part} {value:g}".strip() for part, value in parts))
    if episode.failure is not None:
        _line("failed", episode.failure)


def _took_text(taken: float) -> str:
    return f"{1e3 * taken:.2g} ms" if taken < 0.0995 else f"{taken:.2g} s"


def _line(label: str, text: str) -> None:
    """Print a label and a text, cut where it is long, in lines of the terminal's width."""
    import shutil
    from textwrap import wrap

    from rich.text import Text

    from rlctl.utils.safe_text import neutral

    shown = neutral(" ".join(text.split()))
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    width = min(shutil.get_terminal_size().columns, _WIDEST) - _LABEL - 1
    for index, line in enumerate(wrap(shown, max(width, 20)) or [""]):
        console().print(Text.assemble((f"{label if not index else '':<{_LABEL}} ", "cyan"), line))
