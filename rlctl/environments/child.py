"""Child process that runs episodes of environments: `python -m rlctl.environments.child FD`, below a supervisor.

`messages.py` defines the messages between the driver and this process. Each action is answered when it ends, so the
answers may come in another order than the actions.
"""

import contextlib
import inspect
import json
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from rlctl.config.plugins import AGENTS, NAMED_ENVIRONMENTS
from rlctl.environments import seeding
from rlctl.environments.contract import NO_REWARD, EnvironmentContract, read_contract
from rlctl.environments.coroutine_loop import CoroutineLoop
from rlctl.environments.episode import Episode
from rlctl.environments.messages import ActionReply, ActionRequest, CloseEpisode, OpeningMessage, ProcessStarted
from rlctl.environments.outcomes import AgentSpec, EnvironmentFailure, EnvironmentSpec
from rlctl.environments.plain_chat import PLAIN_FORMAT, PlainChat
from rlctl.environments.rollout_function import FunctionEpisode, is_agent, read_function
from rlctl.environments.shelves.served_tools import add_served_tools
from rlctl.utils.user_code import error_text, import_error, load_object
from rlctl.workers.named_reward import takes_environments
from rlctl.workers.supervisor import run_guarded

if TYPE_CHECKING:
    from rlctl.environments.agents.agent_episode import AgentEpisode

# Most bytes of a reply. JSON escapes a character as 6 bytes, and a character beyond the basic plane as 12.
MAX_REPLY = 8 << 20
# The kernel ends this process before others when the machine has no memory left.
_OOM_SCORE = "500"


# AgentEpisode is named in quotes, because its import loads aiohttp, which no other environment needs.
AnyEpisode = Union[Episode, FunctionEpisode, "AgentEpisode"]


class _Child:
    """State of the child process: factories of episodes by the environment's key, running episodes by number."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._makers: dict[str, Callable[[], AnyEpisode]] = {}
        self._episodes: dict[int, AnyEpisode] = {}
        self._loop = CoroutineLoop()

    def serve(self) -> None:
        """Send the contracts, then hand each action to its episode until the driver closes the connection."""
        requests = self._connection.makefile("rb")
        self._send(asdict(ProcessStarted(self._pid, os.getppid())))
        specs: dict[str, EnvironmentSpec] = pickle.load(requests)
        contracts = {key: asdict(self._load_environment(key, spec)) for key, spec in specs.items()}
        self._send({"contracts": contracts})
        while True:
            try:
                request: ActionRequest = pickle.load(requests)
            except (EOFError, OSError):
                return
            self._hand_over(request)

    def _hand_over(self, request: ActionRequest) -> None:
        """Hand an action to its episode. The episode sends the reply itself when the action ends."""
        if isinstance(request.message, OpeningMessage):
            try:
                self._episodes[request.episode] = self._make_episode(request.message.key)
            except RuntimeError as error:  # no thread is left; episodes that have a thread go on
                failure = EnvironmentFailure("died", "no thread could be started", str(error))
                self._reply(request.action, failure)
                return
        episode = self._episodes.get(request.episode)
        if isinstance(request.message, CloseEpisode):
            self._episodes.pop(request.episode, None)
        if episode is None:  # the close of an episode that could not be started
            self._reply(request.action, None)
        else:
            episode.submit(request.action, request.message)

    def _make_episode(self, key: str) -> AnyEpisode:
        episode = self._makers[key]()
        if isinstance(episode, Episode):
            episode.start()
        return episode

    def _load_environment(self, key: str, spec: EnvironmentSpec) -> EnvironmentContract:
        """Import an environment, store the factory of its episodes, and return its contract."""
        if spec.agent is not None:
            return self._load_agent(key, spec, spec.agent)
        if spec.name in AGENTS:
            return self._load_agent(key, spec, AgentSpec())
        name = NAMED_ENVIRONMENTS.get(spec.name, spec.name)
        try:
            environment = load_object(name)
        except AttributeError as error:
            problem = import_error(error, __file__)
            # The module itself lacks the named object. Any other AttributeError is one of the user's code.
            if error.name and name.endswith(f":{error.name}"):
                problem = f"{name.rpartition(':')[0]} has no {error.name}"
            return _unusable_contract(name, problem)
        except BaseException as error:  # any error of the user's module at import
            return _unusable_contract(name, import_error(error, __file__))
        is_function = spec.is_function
        if is_function is None:
            is_function = inspect.isfunction(environment)
            if is_function and is_agent(environment):
                return self._load_agent(key, spec, AgentSpec())
        if is_function:
            contract = read_function(environment)
        else:
            contract = add_served_tools(read_contract(environment, spec.args), environment, spec.args)
        if contract.problems:
            return contract
        if is_function:
            self._makers[key] = partial(FunctionEpisode, function=environment, loop=self._loop, reply=self._reply)
            return contract
        rewards = _environment_rewards(spec, environment)
        self._makers[key] = partial(
            Episode,
            environment=environment,
            arguments=spec.args,
            tools=[tool["function"]["name"] for tool in contract.tools],
            rewards=rewards,
            loop=self._loop,
            reply=self._reply,
        )
        if not rewards:
            return contract
        # The reward functions value the episodes, so the class needs no `get_reward`.
        notes = [note for note in contract.notes if not note.startswith(NO_REWARD)]
        return replace(contract, rewards=list(rewards), has_reward=True, notes=notes)

    def _load_agent(self, key: str, spec: EnvironmentSpec, agent: AgentSpec) -> EnvironmentContract:
        """Import an agent, start its endpoint, store the factory of its episodes, and return its contract."""
        from rlctl.environments.agents.agent_command import start_command
        from rlctl.environments.agents.agent_episode import AgentEpisode, agent_contract
        from rlctl.environments.agents.endpoint import Endpoint
        from rlctl.environments.agents.runners import read_agent, start_function

        name = AGENTS.get(spec.name, spec.name)
        function: Any = None
        if not agent.command:
            try:
                function = load_object(name)
            except BaseException as error:  # any error of the user's module at import
                return agent_contract(name, [import_error(error, __file__)])
            if problems := read_agent(function, spec.args):
                return agent_contract(name, problems)
            if spec.args:
                function = wraps(function)(partial(function, **spec.args))
        chat: Any = agent.chat.load() if agent.chat else PlainChat()
        try:
            endpoint = Endpoint(agent.bind)
        except OSError as error:
            return agent_contract(name, [f"agent.bind={agent.bind} is no address of this machine: {error}"])
        start: Any = partial(start_function, function)
        if agent.command:
            start = partial(start_command, list(agent.command))
        self._makers[key] = partial(
            AgentEpisode,
            start=start,
            endpoint=endpoint,
            chat=chat,
            tool_format=agent.tool_format if agent.chat else PLAIN_FORMAT,
            reply=self._reply,
        )
        return agent_contract(name, [])

    def _reply(self, action: int, outcome: Any) -> None:
        if os.getpid() != self._pid:
            os._exit(0)  # the user's code forked this process, and only the parent may answer
        try:
            self._send(ActionReply(action, outcome).plain())
        except BaseException as error:  # a value may be of the user's own type, and json.dumps may run its code
            failure = EnvironmentFailure("contract", "returned a value that is no JSON", error_text(error))
            self._send(ActionReply(action, failure).plain())

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, allow_nan=False).encode() + b"\n"
        if len(line) > MAX_REPLY:
            raise ValueError(f"{len(line):,} bytes, and at most {MAX_REPLY:,} can be sent")
        with self._lock, contextlib.suppress(OSError):  # the driver closed the connection: this process will end
            self._connection.sendall(line)


def _environment_rewards(spec: EnvironmentSpec, environment: Any) -> dict[str, Callable[..., Any]]:
    """Return by name the run's reward functions that have a parameter `environments`.

    A function that cannot be imported is left out here: the process of the reward functions reports it.
    """
    functions = {}
    for name in spec.rewards:
        module, _, attribute = name.rpartition(":")
        with contextlib.suppress(Exception, SystemExit):
            if module == spec.name.rpartition(":")[0]:
                # The reward is in the environment's own file. A second import of that file would have other globals.
                function = getattr(sys.modules[environment.__module__], attribute)
            else:
                function = load_object(name)
            if takes_environments(function):
                functions[name] = function
    return functions


def _unusable_contract(name: str, problem: str) -> EnvironmentContract:
    return EnvironmentContract(
        name=name.rpartition(":")[2], tools=[], has_step=False, has_reward=False, problems=[problem], notes=[]
    )


def work(connection: socket.socket) -> None:
    """Serve episodes until the driver closes the connection."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    seeding.install()
    _Child(connection).serve()


if __name__ == "__main__":
    run_guarded(work)
