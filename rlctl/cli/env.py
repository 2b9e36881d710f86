"""`rlctl env`: tries an environment before a run, with scripted answers or with a model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlctl.cli.arguments import AsJson, finite, parse_arguments
from rlctl.cli.completion import complete_run
from rlctl.cli.env_tasks import Seed, tasks
from rlctl.cli.output import FAILED, busy, console, examples, explain_engine_errors, note, say, tell
from rlctl.config.errors import ConfigError, Problem, locate_errors

if TYPE_CHECKING:
    from rlctl.config.data_schema import DatasetSection
    from rlctl.config.schema import GrpoConfig
    from rlctl.data.datasets import Row
    from rlctl.evaluation.engine_episodes import PlayedEpisodes
    from rlctl.evaluation.environment_check import CheckReport, ScriptedEpisode

app = typer.Typer(no_args_is_help=True)

_MAX_WIDTH = 100
_LABEL_WIDTH = 10
_MAX_TEXT = 400
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="One that ships, my_env.py:Class or module:Class, a rollout function or an agent, my.py:run.",
    ),
]


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
    data: Annotated[Path | None, typer.Option(help="Rows of tasks: JSONL, CSV, Parquet.", show_default=False)] = None,
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
    from rlctl.config.plugins import AGENTS, NAMED_ENVIRONMENTS
    from rlctl.data.files import DataError
    from rlctl.environments.outcomes import AgentSpec, EnvironmentSpec, command_of
    from rlctl.evaluation.environment_check import EPISODES, check_environment, rows_to_try
    from rlctl.evaluation.evaluation_configs import arguments_of, config_of, episodes_config
    from rlctl.evaluation.target import find_target
    from rlctl.preflight.check_inputs import require_plugin

    if not command:
        require_plugin("NAME", name, NAMED_ENVIRONMENTS | AGENTS, "Class")
    if episodes is not None and model is None:
        raise ConfigError([Problem("--episodes", "", "needs --model; without one, three scripted episodes are played")])
    with locate_errors("--data", DataError):
        section, rows = rows_to_try(name, str(data) if data else None, seed, max(EPISODES, episodes or 1))
    arguments = parse_arguments(arg)
    if model is not None:
        with explain_engine_errors("interrupted"):
            target = find_target(model, runs_folder())
            config, max_new_tokens = config_of(target, seed)
        arguments = arguments or arguments_of(config, name)
    for function in reward or []:
        require_plugin("--reward", function, (), "function")
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
        config = episodes_config(config, spec, memory, max_new_tokens)
        title = f"playing {name} with {target.name}"
        played = _play_episodes(config, section, rows, episodes or 1, step=target.step, title=title)
    if as_json:
        played_fields = {"played": asdict(played)} if played else {}
        typer.echo(json.dumps({"name": name, **asdict(report), **played_fields}, indent=1, default=str))
    else:
        _show_report(name, str(data) if data else "", report, played)
    if report.problems or (played and played.failures):
        raise typer.Exit(FAILED)


app.command(
    epilog=examples(
        "rlctl env tasks guess --count 500 > train.jsonl",
        "rlctl env tasks guess --count 100 --held-out > validation.jsonl",
        "rlctl env tasks harbor --folder my-tasks > train.jsonl",
    )
)(tasks)


def _play_episodes(
    config: "GrpoConfig", section: "DatasetSection", rows: "list[Row]", count: int, *, step: int, title: str
) -> "PlayedEpisodes":
    from rlctl.workers.reaper import scratch_folder

    # `busy` is the innermost, so that its moving line is gone when an error is printed.
    with explain_engine_errors("interrupted"), scratch_folder("rlctl-env-") as logs, busy(title):
        # Imported within `busy`, because it imports torch, which takes seconds.
        from rlctl.evaluation.engine_episodes import play_episodes

        return play_episodes(config, section, rows, count, step, logs, tell)


def _show_report(name: str, data: str, report: "CheckReport", played: "PlayedEpisodes | None") -> None:
    from rlctl.evaluation.environment_check import signature

    tasks = f", tasks of {data}" if data else ""
    _print_labelled("check", f"{name}{tasks}; loaded in {report.start_s:.2f} s")
    for tool in report.contract.tools if report.contract else ():
        _print_labelled("tool", signature(tool))
        _print_labelled("", tool["function"]["description"])
    if report.contract and report.contract.has_step:
        _print_labelled("step", "answers messages that call no tool")
    say("")
    notes = list(report.notes)
    problems = list(report.problems)
    if played:
        _show_conversations(played)
        notes += played.notes
        problems += played.failures
    else:
        _show_script(report.episodes, is_agent=report.contract is not None and report.contract.is_agent)
    note(notes)
    for problem in problems:
        from rich.text import Text

        console(stderr=True).print(Text.assemble(("error: ", "bold red"), problem))


def _show_conversations(played: "PlayedEpisodes") -> None:
    from rlctl.cli.rollouts import print_group
    from rlctl.dashboard.formats import count, duration

    for record in played.records:
        print_group(record, console())
    tokens = sum(sum(rollout["tokens"] for rollout in record["rollouts"]) for record in played.records)
    amounts = f"{count(len(played.records), 'episode')}, {count(tokens, 'token')} sampled"
    times = f"in {duration(played.play_s)}; the engine started in {duration(played.start_s)}"
    _print_labelled("played", f"{amounts}, {times}")


def _show_script(episodes: "Sequence[ScriptedEpisode]", is_agent: bool) -> None:
    seconds = list[float]()
    for number, episode in enumerate(episodes, 1):
        _show_episode(number, episode, is_agent)
        say("")
        seconds += [turn.seconds for turn in episode.turns]
    if episodes:
        rewards = [episode.reward for episode in episodes if episode.reward is not None]
        median = ""
        if seconds and not is_agent:
            median = f"; an action takes {_took_text(sorted(seconds)[len(seconds) // 2])} at the median"
        _print_labelled("played", f"{len(episodes)} episodes, {len(rewards)} with a reward{median}")


def _show_episode(number: int, episode: "ScriptedEpisode", is_agent: bool) -> None:
    from rlctl.dashboard.formats import count

    # For an agent or a rollout function, `reset_s` is the time of its whole call.
    verb = "ran for" if is_agent else "reset in"
    if episode.samples:
        verb = "called for"
    _print_labelled(f"episode {number}", f"{verb} {_took_text(episode.reset_s)}")
    for message in episode.opening:
        _print_labelled(str(message["role"]), str(message.get("content", "")))
    for prompt_tokens, answer_tokens in episode.samples:
        answer = f"got {count(answer_tokens, 'token')}"
        if not answer_tokens:
            answer = "got none: the script's budget is used up"
        _print_labelled("sample", f"after {count(prompt_tokens, 'token')}, {answer}")
    for turn in episode.turns:
        _print_labelled("assistant", turn.said)
        if turn.answer is not None or not is_agent:
            label = "error" if turn.failed else "answer"
            _print_labelled(label, turn.answer if turn.answer is not None else "the episode has ended")
    if is_agent and episode.failure is None:
        _print_labelled("end", "the agent has ended by itself")
    if episode.reward is not None:
        rewards = episode.reward if isinstance(episode.reward, dict) else {"": episode.reward}
        _print_labelled("reward", ", ".join(f"{name} {reward:g}".strip() for name, reward in rewards.items()))
    if episode.failure is not None:
        _print_labelled("failed", episode.failure)


def _took_text(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms" if seconds < 0.0995 else f"{seconds:.2g} s"


def _print_labelled(label: str, text: str) -> None:
    """Print a label and a text, wrapped to the terminal's width. Cut the text after 400 characters."""
    import shutil
    from textwrap import wrap

    from rich.text import Text

    from rlctl.utils.safe_text import neutral

    text = neutral(" ".join(text.split()))
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH) - _LABEL_WIDTH - 1
    for line in wrap(text, max(width, 20)) or [""]:
        console().print(Text.assemble((f"{label:<{_LABEL_WIDTH}} ", "cyan"), line))
        # Further lines have no label.
        label = ""
