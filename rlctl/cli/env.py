"""`rlctl env`: environments tried before a run, by a script or by a model."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlctl.cli.arguments import AsJson
from rlctl.cli.completion import complete_run
from rlctl.cli.output import FAILED, busy, console, examples, note, say
from rlctl.cli.weights import arguments_of, config_of, explained_weights, tell
from rlctl.config.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rlctl.config.schema import DatasetSection, GrpoConfig
    from rlctl.data.datasets import Row
    from rlctl.environments.check import CheckReport, ScriptedEpisode
    from rlctl.environments.outcomes import EnvironmentSpec
    from rlctl.evaluation.episodes import PlayedEpisodes
    from rlctl.evaluation.target import Target

app = typer.Typer(no_args_is_help=True)

_WIDEST, _LABEL = 100, 10
_LONGEST = 400
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="One that ships, my_env.py:Class or module:Class, or a rollout function, my.py:play."
    ),
]
Seed = Annotated[int, typer.Option(help="The seed of the first episode or task.", min=0)]


@app.callback()
def env() -> None:
    """Check environments, and list the tasks of those that ship."""


@app.command(
    epilog=examples(
        "rlctl env check my_env.py:Game --data tasks.jsonl",
        "rlctl env check guess --arg guesses=4",
        "rlctl env check my_rollout.py:play --data tasks.jsonl",
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
    timeout: Annotated[float, typer.Option(help="Seconds that each action may take.", min=0.01)] = 5.0,
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

    With --model: episodes with a real engine, each conversation with what was sampled marked.
    """
    from dataclasses import asdict, replace

    from rlctl.environments.check import EPISODES, check_environment
    from rlctl.environments.outcomes import EnvironmentSpec

    require_environment(name, "NAME")
    if episodes is not None and model is None:
        raise ConfigError([Problem("--episodes", "", "needs --model; without one, three scripted episodes are played")])
    section, rows = _rows(name, data, seed, max(EPISODES, episodes or 1))
    weights = _weights(model, seed) if model is not None else None
    own = arguments_of(weights[1], name) if weights else {}
    for each in reward or []:
        require_reward(each)
    arguments = _arguments(arg) if arg else own
    spec = EnvironmentSpec(name, timeout, arguments, is_function=None, rewards=tuple(reward or ()))
    with busy(f"playing {name}"):
        report = check_environment(spec, [row.values for row in rows], memory, seed)
    played = None
    if weights and not report.problems:
        spec = replace(spec, is_function=report.contract is not None and report.contract.is_function)
        played = _play(weights, spec, memory, (section, rows), episodes or 1)
    if as_json:
        found = {"name": name, **asdict(report), **({"played": asdict(played)} if played else {})}
        typer.echo(json.dumps(found, indent=1, default=str))
    else:
        _show(name, str(data) if data else "", report, played)
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

    if name not in ENVIRONMENTS:
        what = f"must be {', '.join(ENVIRONMENTS)}, not {name}{did_you_mean(name, ENVIRONMENTS)}"
        raise ConfigError([Problem("NAME", "", what)])
    for row in islice(_own_tasks(name, seed, held_out), count):
        typer.echo(json.dumps(row))


def _own_tasks(name: str, seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield tasks of an environment that ships."""
    from rlctl.config.plugins import ENVIRONMENTS
    from rlctl.utils.plugins import load_object

    found: Iterator[dict[str, Any]] = load_object(f"{ENVIRONMENTS[name].partition(':')[0]}:tasks")(seed, held_out)
    return found


def require_environment(name: str, where: str) -> None:
    """Raise ConfigError if there is no such environment, as far as its source says. where: the argument's name."""
    from rlctl.config.plugins import ENVIRONMENTS
    from rlctl.preflight.check_inputs import missing_plugin

    if what := missing_plugin(name, ENVIRONMENTS, "Class"):
        raise ConfigError([Problem(where, "", what)])


def require_reward(name: str) -> None:
    """Raise ConfigError if there is no such reward function, as far as its source says."""
    from rlctl.preflight.check_inputs import missing_plugin

    if what := missing_plugin(name, (), "function"):
        raise ConfigError([Problem("--reward", "", what)])


def _rows(name: str, data: Path | None, seed: int, count: int) -> "tuple[DatasetSection, list[Row]]":
    """Return the first rows of the data; without any, tasks of an environment that ships, else one empty row."""
    from itertools import islice

    from rlctl.config.plugins import ENVIRONMENTS
    from rlctl.config.schema import DatasetSection
    from rlctl.data.datasets import Row, load_rows
    from rlctl.data.files import DataError

    section = DatasetSection(str(data) if data else None, "train", "prompt", "answer", "messages", count, {})
    if data is None:
        own = islice(_own_tasks(name, seed), count) if name in ENVIRONMENTS else [{}]
        return section, [Row(number, f"task {number + 1}", values) for number, values in enumerate(own)]
    try:
        return section, load_rows(section)
    except DataError as error:
        raise ConfigError([Problem("--data", "", str(error))]) from error


def _weights(model: str, seed: int) -> "tuple[Target, GrpoConfig]":
    """Return the weights that `model` names, and the config to sample with; of a run its own."""
    from dataclasses import replace

    from rlctl.config.builtin import runs_folder
    from rlctl.evaluation.target import find_target

    with explained_weights("interrupted"):
        target = find_target(model, runs_folder())
        config, longest = config_of(target, seed)
        return target, replace(config, generation=replace(config.generation, max_new_tokens=longest))


def _play(
    weights: "tuple[Target, GrpoConfig]",
    spec: "EnvironmentSpec",
    memory: int,
    data: "tuple[DatasetSection, list[Row]]",
    count: int,
) -> "PlayedEpisodes":
    """Play episodes that are not tried again, and that no other reward values."""
    import tempfile
    from dataclasses import replace

    target, config = weights
    rollout, name = (spec.name, None) if spec.is_function else (None, spec.name)
    own = replace(config.environment, name=name, args=spec.args, choices={}, timeout_s=spec.timeout_s)
    own = replace(own, max_retries=0, processes=1, memory_mib=memory)
    config = replace(config, environment=own, rollout=rollout, rewards=[])
    with (
        explained_weights("interrupted"),
        tempfile.TemporaryDirectory(prefix="rlctl-env-") as logs,
        busy(f"playing {spec.name} with {target.name}"),
    ):
        # Torch comes with it, which takes seconds.
        from rlctl.evaluation.episodes import play_episodes

        return play_episodes(config, *data, count, target.step, Path(logs), tell)


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


def _show(name: str, data: str, report: "CheckReport", played: "PlayedEpisodes | None") -> None:
    from rlctl.environments.check import signature

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
        _script(report.episodes)
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


def _script(episodes: "Sequence[ScriptedEpisode]") -> None:
    for number, episode in enumerate(episodes, 1):
        _episode(number, episode)
        say("")
    rewards = [each.reward for each in episodes if each.reward is not None]
    actions = sorted(turn.seconds for each in episodes for turn in each.turns)
    if episodes:
        median = f"; an action takes {_seconds(actions[len(actions) // 2])} at the median" if actions else ""
        _line("played", f"{len(episodes)} episodes, {len(rewards)} with a reward{median}")


def _episode(number: int, episode: "ScriptedEpisode") -> None:
    from rlctl.dashboard.formats import count

    begun = "called for" if episode.samples else "reset in"
    _line(f"episode {number}", f"{begun} {_seconds(episode.reset_s)}")
    for message in episode.opening:
        _line(str(message["role"]), str(message.get("content", "")))
    for prompt, answer in episode.samples:
        said = f"got {count(answer, 'token')}" if answer else "got none: the script's budget is used up"
        _line("sample", f"after {count(prompt, 'token')}, {said}")
    for turn in episode.turns:
        _line("assistant", turn.said)
        _line("error" if turn.failed else "answer", turn.answer if turn.answer is not None else "the episode has ended")
    if episode.reward is not None:
        parts = episode.reward.items() if isinstance(episode.reward, dict) else [("", episode.reward)]
        _line("reward", ", ".join(f"{part} {value:g}".strip() for part, value in parts))
    if episode.failure is not None:
        _line("failed", episode.failure)


def _seconds(taken: float) -> str:
    return f"{1e3 * taken:.2g} ms" if taken < 0.0995 else f"{taken:.2g} s"


def _line(label: str, text: str) -> None:
    """Print a label and a text, cut where it is long, in lines of the terminal's width."""
    import shutil
    from textwrap import wrap

    from rich.text import Text

    from rlctl.utils.escapes import neutral

    shown = neutral(" ".join(text.split()))
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    width = min(shutil.get_terminal_size().columns, _WIDEST) - _LABEL - 1
    for index, line in enumerate(wrap(shown, max(width, 20)) or [""]):
        console().print(Text.assemble((f"{label if not index else '':<{_LABEL}} ", "cyan"), line))
