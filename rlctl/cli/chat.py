"""`rlctl chat`: a conversation with a model in the terminal, or an endpoint for one client. Not for production."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from rlctl.cli.arguments import WEIGHTS, OfStep, finite
from rlctl.cli.output import busy, console, examples, explain_engine_errors, note, say, tell
from rlctl.config.builtin import runs_folder
from rlctl.config.errors import ConfigError, Problem
from rlctl.utils.ports import has_proxy, past_proxies
from rlctl.utils.safe_text import neutral

if TYPE_CHECKING:
    from rlctl.config.schema import GrpoConfig
    from rlctl.environments.contract import Message
    from rlctl.environments.outcomes import EnvironmentSpec
    from rlctl.evaluation.chat_session import ChatSession
    from rlctl.evaluation.target import Target

EPILOG = examples(
    "rlctl chat sums                                  the newest checkpoint of a run",
    "rlctl chat Qwen/Qwen3-0.6B --temperature 0       any model, greedily",
    "rlctl chat my-run --tools my_env.py:Game         with an environment's tools",
    "rlctl chat sums < questions.txt                  a line, an answer",
    "rlctl chat my-run --endpoint                     an address for your client",
)
_NEW = "/new"
_HELP = "/help"
_ENDS = ("/exit", "/quit", "/bye")
_HELP_TEXT = f"""\
{_NEW}     begins another conversation
{_HELP}    shows this
/exit    ends, and so does Ctrl-D
Ctrl-C   stops an answer
All else is said to the model. --temperature, --max-tokens, --system, --tools and --step are options of the command."""


def chat(
    target: Annotated[str, WEIGHTS],
    step: OfStep = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy; if left out, the run's.", min=0, callback=finite, show_default=False),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an answer; if left out, the run's.", min=1, show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt in place of the run's.")] = None,
    seed: Annotated[int, typer.Option(help="The seed of the answers.", min=0)] = 0,
    tools: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An environment whose tools may be called: shipped, or my_env.py:Class."),
    ] = None,
    row: Annotated[
        str | None, typer.Option(metavar="JSON", help="With --tools: the row for the environment's reset.")
    ] = None,
    endpoint: Annotated[
        bool, typer.Option("--endpoint", help="Serve OpenAI's and Anthropic's APIs on this machine, to one client.")
    ] = False,
) -> None:
    """Talk to a model. /new begins another conversation; /help says more; Ctrl-C stops an answer; Ctrl-D ends."""
    from rlctl.evaluation.evaluation_configs import config_of
    from rlctl.evaluation.target import find_target
    from rlctl.workers.reaper import scratch_folder

    with explain_engine_errors("interrupted"):
        weights = find_target(target, runs_folder(), step)
        config, run_max_tokens = config_of(weights, seed, system)
        if endpoint and tools is not None:
            raise ConfigError([Problem("--tools", "", "are those of the client with --endpoint: leave it out")])
        if temperature is None:
            temperature = config.generation.temperature
        # (most tokens of an answer, temperature)
        sampling = (max_tokens or run_max_tokens, temperature)
        environment = None if endpoint else _tools_environment(tools, config)
        columns = {} if endpoint else _chat_row(row, tools)
        with scratch_folder("rlctl-chat-") as folder:
            if endpoint:
                _serve(weights, config, sampling, folder)
            else:
                _talk(weights, config, sampling, environment=environment, row=columns, logs=folder)


def _talk(
    target: "Target",
    config: "GrpoConfig",
    sampling: tuple[int, float],
    environment: "EnvironmentSpec | None",
    row: dict[str, Any],
    logs: Path,
) -> None:
    from contextlib import ExitStack

    from rlctl.evaluation.chat_session import chat_session

    with ExitStack() as stack:
        with busy(f"starting an engine for {target.name}"):
            session = stack.enter_context(chat_session(target, config, sampling, environment, row, logs, tell))
        _, temperature = sampling
        settings = f"{target.name}, temperature {temperature:g}"
        say(f"{settings}; {_NEW} begins another conversation, Ctrl-D ends, {_HELP} shows more", err=True)
        converse(session)


def _serve(target: "Target", config: "GrpoConfig", sampling: tuple[int, float], logs: Path) -> None:
    """Serve the model at an HTTP endpoint until Ctrl-C. Print the lines of shell that tell a client its address."""
    import time
    from contextlib import ExitStack

    from rlctl.evaluation.chat_session import served_policy

    with ExitStack() as stack:
        with busy(f"starting an engine for {target.name}"):
            served = stack.enter_context(served_policy(target, config, sampling, logs, tell))
        for line in client_lines(served.base_url, served.api_key, os.environ):
            say(line)
        _, temperature = sampling
        say(f"{target.name}, temperature {temperature:g}, which clients do not change; Ctrl-C ends", err=True)
        with suppress(KeyboardInterrupt):
            while True:
                served.check()
                time.sleep(0.2)


def client_lines(base_url: str, api_key: str, variables: Mapping[str, str]) -> list[str]:
    """Return the lines of shell that set the endpoint's address and key for clients.

    If the environment `variables` name an HTTP proxy, the lines exempt the endpoint from it.
    """
    exemptions = past_proxies(variables, str(urlsplit(base_url).hostname)) if has_proxy(variables) else {}
    no_proxy = "".join(f" {name}={shlex.quote(hosts)}" for name, hosts in exemptions.items())
    return [
        f"export OPENAI_BASE_URL={base_url} OPENAI_API_KEY={api_key}{no_proxy}",
        f"export ANTHROPIC_BASE_URL={base_url.removesuffix('/v1')} ANTHROPIC_API_KEY={api_key}{no_proxy}",
    ]


def converse(session: "ChatSession") -> None:
    """Read lines from stdin and print the model's answer to each, until the input ends."""
    from rlctl.rollout.players.chat import TalkError

    talk = None
    for line in _typed_lines():
        word = line.strip()
        if word in _ENDS:
            return
        if word == _NEW:
            talk = None
            continue
        if re.fullmatch(r"/\w+|/\?", word):
            say(_HELP_TEXT if word in (_HELP, "/?") else f"no command {word}; {_HELP} shows them", err=True)
            continue
        try:
            if talk is None:
                talk = session.begin()
                for message in session.opening:
                    _show_message(message)
            with suppress(KeyboardInterrupt):
                for message in talk.say(line):
                    _show_message(message)
                continue
            # Only an answer that Ctrl-C stopped gets here.
            say("stopped; what you said last is left out", err=True)
        except TalkError as error:
            say(f"error: {error}", err=True)


def _typed_lines() -> Iterator[str]:
    """Yield the lines that a user types, or the lines of a pipe. Skip empty lines."""
    with suppress(ImportError):
        import readline  # noqa: F401  (editing and history at the prompt)
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("you > " if is_terminal else "")
        except EOFError:
            if is_terminal:
                say("", err=True)
            return
        if line.strip():
            yield line


def _show_message(message: "Message") -> None:
    """Print a message, with its control characters made visible."""
    from rich.text import Text

    labels = {"tool": ("tool", "cyan"), "assistant": ("model", "bold green")}
    role, style = labels.get(message["role"], ("task", "dim"))
    line = Text.assemble((f"{role} > ", style), neutral(str(message["content"]).replace("\r", "")))
    if message.get("cut"):
        line.append(" (cut: --max-tokens)", style="yellow")
    console().print(line)


def _tools_environment(name: str | None, config: "GrpoConfig") -> "EnvironmentSpec | None":
    """Return the environment that --tools names; None without --tools.

    The spec of the run's own environment has the run's arguments. Raises ConfigError if the name cannot be loaded.
    """
    from rlctl.config.plugins import NAMED_ENVIRONMENTS
    from rlctl.environments.outcomes import EnvironmentSpec
    from rlctl.evaluation.evaluation_configs import arguments_of
    from rlctl.preflight.check_inputs import require_plugin

    if name is None:
        if config.environment.is_enabled:
            names = ", ".join(choice.name for choice in config.environment.environments.values())
            note([f"the run's environment, {names}, takes no part: --tools offers the tools of one"])
        return None
    require_plugin("--tools", name, NAMED_ENVIRONMENTS, "Class")
    return EnvironmentSpec(name, config.environment.timeout_s, arguments_of(config, name))


def _chat_row(text: str | None, tools: str | None) -> dict[str, Any]:
    """Return the row of --row, the JSON object `text`; empty without --row. tools: value of --tools."""
    if text is None:
        return {}
    if tools is None:
        raise ConfigError([Problem("--row", "", "needs --tools, whose environment it begins")])
    with suppress(ValueError):
        if isinstance(row := json.loads(text), dict):
            return row
    raise ConfigError([Problem("--row", "", f"must be a JSON object of columns, not {text}")])
