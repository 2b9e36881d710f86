"""Session of `rlctl chat`: an engine without a trainer, and the tools that the policy may call.

Also an endpoint to the engine for a person's own client (`served_policy`).
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlctl.config.schema import GrpoConfig
from rlctl.data.chat import Chat, ChatSpec
from rlctl.data.load_data import end_tokens, load_chat
from rlctl.data.tasks import Task
from rlctl.environments.contract import Message, opening_messages
from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.outcomes import AgentSpec, EnvironmentFailure, EnvironmentSpec
from rlctl.evaluation.target import Target
from rlctl.launch.engines import engines
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.settled import settle
from rlctl.rollout.episode_setup import format_of_calls, tool_problems
from rlctl.rollout.players.agent import AgentPlayer
from rlctl.rollout.players.chat import Talk, TalkEngines, TalkError, TalkLimits, TalkTools, talk_id
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.runner import RolloutRunner
from rlctl.rollout.types import Rollout, RolloutStart
from rlctl.rollout.wait_deadline import TICK_S
from rlctl.workers.user_logs import Emit

_KEY = "tools"
# Agent that only writes down the endpoint's address, so that a person's own client can send the requests.
_SERVED = "rlctl.environments.agents.runners:announce"
# Most turns that a person's client may request.
_MOST_TURNS = 32767
# Deadline in seconds for a person's client: in effect none.
_NO_DEADLINE_S = 1e8


@dataclass
class ChatSession:
    """Engine and tools for conversations with one set of weights, one after another."""

    chat: Chat
    engines: TalkEngines
    limits: TalkLimits
    tools: TalkTools | None
    # Columns for the environment's `reset`.
    row: Mapping[str, Any]
    # Messages with which the environment began the latest conversation.
    opening: list[Message] = field(default_factory=list)
    _num_talks: int = 0

    def begin(self) -> Talk:
        """Begin a conversation, with a new instance of the environment if there are tools. Raises TalkError."""
        identity = talk_id(self._num_talks)
        self.opening = []
        if self.tools is not None:
            observation = self.tools.pool.reset(identity, self.row, seed=self._num_talks).result()
            if isinstance(observation, EnvironmentFailure):
                raise TalkError(f"the environment's reset failed: {observation}; --row gives it columns")
            self.opening = list(opening_messages([], observation)) if observation else []
        self._num_talks += 1
        return Talk(self.chat, self.engines, self.limits, identity, self.tools, self.opening)


@contextmanager
def chat_session(
    target: Target,
    config: GrpoConfig,
    sampling: tuple[int, float],
    environment: EnvironmentSpec | None,
    row: Mapping[str, Any],
    logs: Path,
    emit: Emit,
) -> Iterator[ChatSession]:
    """Start an engine with the weights of `target`, and the environment's process. Both end with the block.

    sampling: (most tokens of an answer, temperature). row: columns for the environment's `reset`.
    Raises DataError, ModelError, UnusableEnvironmentError, PlacementError.
    """
    files = ModelFiles.prepare(config.model, logs, config.run.seed)
    chat = load_chat(config, files.chat)
    stops = end_tokens(config, chat).stops
    max_new_tokens, temperature = sampling
    settled = settle(config, RunMachine(), files.facts.sizes)
    limits = TalkLimits(max_new_tokens, settled.max_length, temperature, config.run.seed)
    with ExitStack() as stack:
        tools = None
        if environment is not None:
            # The pool starts before Ray changes this process's variables.
            memory_mib = config.environment.memory_mib
            pool = stack.enter_context(
                EnvironmentPool({_KEY: environment}, memory_mib, processes=1, logs=logs, emit=emit)
            )
            tools = _environment_tools(pool, chat, config.environment.tool_format)
        events = tools.pool.events if tools else None
        dispatcher = stack.enter_context(engines(settled, files, stops, target.step, logs, emit, events))
        yield ChatSession(chat, dispatcher, limits, tools, row)


def _environment_tools(pool: EnvironmentPool, chat: Chat, tool_format: str) -> TalkTools:
    """Return the tools of the pool's environment. tool_format: format of the calls, or `auto`.

    Raises UnusableEnvironmentError.
    """
    contract = pool.contracts()[_KEY]
    format = format_of_calls(tool_format, chat)
    if contract.tools:
        problems = tool_problems(chat, format)
    else:
        problems = [(contract.name, "has no tools to call while you talk")]
    if problems or format is None:
        raise UnusableEnvironmentError(problems)
    return TalkTools(pool, contract, format)


@dataclass
class ServedPolicy:
    """Endpoint that serves one set of weights to a person's client."""

    base_url: str
    api_key: str
    engines: TalkEngines
    runner: RolloutRunner
    ended: list[Rollout]

    def check(self) -> None:
        """Replace lost engines. Raises TalkError if the endpoint has ended, and RuntimeError for a defect."""
        self.runner.check()
        self.engines.repair()
        if self.ended:
            episode = self.ended[0].episode
            raise TalkError(f"the endpoint has ended: {episode.failure if episode else 'its process is gone'}")


@contextmanager
def served_policy(
    target: Target, config: GrpoConfig, sampling: tuple[int, float], logs: Path, emit: Emit
) -> Iterator[ServedPolicy]:
    """Start an engine with the weights of `target`, and an endpoint on this machine. Both end with the block.

    sampling: (most tokens of an answer, temperature). Raises DataError, ModelError, PlacementError, TalkError.
    """
    files = ModelFiles.prepare(config.model, logs, config.run.seed)
    chat = load_chat(config, files.chat)
    stops = end_tokens(config, chat).stops
    settled = settle(config, RunMachine(), files.facts.sizes)
    spec = EnvironmentSpec(_SERVED, _NO_DEADLINE_S, agent=AgentSpec())
    limits = EpisodeLimits(
        max_turns=_MOST_TURNS,
        max_length=settled.max_length,
        timeout_s=float("inf"),
        max_retries=0,
        history="keep",
    )
    (logs / "endpoint").mkdir(mode=0o700, parents=True)
    address_file = logs / "endpoint" / "address.json"
    max_new_tokens, temperature = sampling
    start = RolloutStart(
        id=talk_id(0),
        task=Task(id="endpoint", tokens=[], text="", answer=None, row={"file": str(address_file)}),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=config.run.seed,
        group_seed=0,
    )
    with ExitStack() as stack:
        memory_mib = config.environment.memory_mib
        pool = stack.enter_context(EnvironmentPool({_KEY: spec}, memory_mib, processes=1, logs=logs, emit=emit))
        pool.give_chat(ChatSpec.from_chat(chat), format_of_calls(config.environment.tool_format, chat))
        # Start the process, and wait until it has loaded `_SERVED`.
        pool.contracts()
        dispatcher = stack.enter_context(engines(settled, files, stops, target.step, logs, emit, pool.events))
        runner = RolloutRunner(AgentPlayer(pool, chat, limits), dispatcher)
        stack.callback(runner.close)
        # Gets the one rollout if the endpoint ends.
        ended: list[Rollout] = []
        runner.events.ask(lambda: runner.begin([start], ended.append))
        address = _read_address(address_file)
        while not address and not ended:
            runner.check()
            time.sleep(TICK_S)
            address = _read_address(address_file)
        served = ServedPolicy(address.get("base_url", ""), address.get("api_key", ""), dispatcher, runner, ended)
        served.check()
        yield served


def _read_address(file: Path) -> dict[str, str]:
    """Return `base_url` and `api_key` from a file; empty until the file is complete."""
    try:
        address: dict[str, str] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return address
