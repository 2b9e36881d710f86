"""One episode in an environment's process: a thread that owns an instance and does one action after another.

It has its own thread from the constructor to `close`, since some resources (a connection of sqlite3) serve only the
thread that made them. Coroutines of all episodes run on one loop. Their clients may share the loop, which goes on
between actions.
"""

import inspect
import random
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from queue import SimpleQueue
from typing import Any

from rlctl.config.plugins import ENVIRONMENT_REWARD
from rlctl.environments import seeding
from rlctl.environments.contract import (
    ContractError,
    check_observation,
    check_reward,
    check_step,
    reset_arguments,
    tool_text,
)
from rlctl.environments.coroutine_loop import CoroutineLoop
from rlctl.environments.messages import (
    CallTools,
    CloseEpisode,
    EpisodeMessage,
    ResetEpisode,
    RewardEpisode,
    StepEpisode,
    ToolAnswer,
    ToolsCalled,
)
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.utils.user_code import error_text, raised_at, raised_inside, shorten_text, trace_of
from rlctl.workers.named_reward import NamedRewardError, named_arguments, named_value
from rlctl.workers.user_logs import MAX_CAUSES

# Causes whose traceback this process has sent.
_traced_causes: set[str] = set()
# Characters of all results of an action.
MAX_TEXT = 1 << 18
_TEXT_CUT = "... [cut: a tool may answer with {} characters]"
Reply = Callable[[int, Any], None]


class OpenAction:
    """The open action of one call of a rollout function or an agent; at most one at a time.

    The action is answered when there is something to tell, or when the next action comes. subject: named in the cause
    of an error.
    """

    def __init__(self, subject: str, reply: Reply) -> None:
        self._subject = subject
        self._reply = reply
        self._number: int | None = None

    @property
    def is_open(self) -> bool:
        """True while an action waits for its answer."""
        return self._number is not None

    def open(self, number: int) -> None:
        """Take an action, which is answered later."""
        self._number = number

    def answer(self, value: Any) -> None:
        """Reply to the action that is open."""
        assert self._number is not None
        number = self._number
        # Closed first: the reply may bring the next action.
        self._number = None
        self._reply(number, value)

    def contain(self, work: Callable[[], None]) -> None:
        """Do a part of an action. Without this the loop would lose its error, and the caller would wait without end."""
        try:
            work()
        except Exception as error:
            if self.is_open:
                cause = f"{self._subject} failed with {type(error).__name__}"
                self.answer(EnvironmentFailure("raised", cause, error_text(error), trace_of(error)))


class Episode(threading.Thread):
    """An instance of the environment and its waiting actions.

    tools: names of the contract's tools, which alone can be called. rewards: functions that get the instance, by name.
    reply: called with (id of the action, value or EnvironmentFailure).
    """

    def __init__(
        self,
        environment: Callable[..., Any],
        arguments: Mapping[str, Any],
        tools: Collection[str],
        rewards: Mapping[str, Callable[..., Any]],
        loop: CoroutineLoop,
        reply: Reply,
    ) -> None:
        super().__init__(name="episode", daemon=True)
        self._class = environment
        self._arguments = arguments
        self._tools = tools
        self._rewards = rewards
        self._loop = loop
        self._reply = reply
        self._actions: SimpleQueue[tuple[int, EpisodeMessage]] = SimpleQueue()
        self._generator = random.Random()
        self._environment: Any = None

    def submit(self, action: int, message: EpisodeMessage) -> None:
        """Queue an action. A close is the last action."""
        self._actions.put((action, message))

    def run(self) -> None:
        """Do one action after another until the episode is closed."""
        seeding.use(self._generator)
        is_closed = False
        while not is_closed:
            action, message = self._actions.get()
            is_closed = isinstance(message, CloseEpisode)
            code = getattr(self._class, "reset", self._class)
            self._reply(action, run_action(message.kind, partial(self._action_value, message), code, __file__))

    def _action_value(self, message: EpisodeMessage) -> Any:
        """Return the value of an action. Raises anything that the user's code raises."""
        match message:
            case ResetEpisode():
                return self._reset(message.row, message.seed)
            case CallTools():
                return self._call_tools(message.calls).plain()
            case StepEpisode():
                return check_step(self._await_value(self._find_method("step")(message.message)))
            case RewardEpisode():
                return self._reward(message.columns)
            case CloseEpisode() if hasattr(self._environment, "close"):
                self._await_value(self._environment.close())
        return None

    def _reset(self, row: dict[str, Any], seed: int) -> Any:
        self._generator.seed(seed)
        self._environment = self._class(**self._arguments)
        reset = self._environment.reset
        return check_observation(self._await_value(reset(**reset_arguments(reset, row, seed))))

    def _reward(self, columns: Mapping[str, Any] | None) -> Any:
        """Return the instance's own value, and those of reward functions."""
        if not self._rewards:
            return check_reward(self._await_value(self._find_method("get_reward")()))
        parts: dict[str, float] = {}
        if hasattr(self._class, "get_reward"):
            reward = check_reward(self._await_value(self._environment.get_reward()))
            parts |= reward if isinstance(reward, dict) else {ENVIRONMENT_REWARD: reward}
        for name, function in self._rewards.items():
            values = {"environments": self._environment, **(columns or {})}
            try:
                result = self._await_value(function(**named_arguments(function, values)))
                part = named_value(function, result)
            except NamedRewardError as error:
                raise ContractError(f"{name}: {error}") from error
            if part is not None:
                parts[name] = part
        if not parts:
            raise ContractError(f"{', '.join(self._rewards)} returned None: nothing values the episode")
        return parts

    def _call_tools(self, calls: list[tuple[str, dict[str, Any]]]) -> ToolsCalled:
        """Call tools. Coroutines run side by side, after all others."""
        outcomes = [self._call_tool(name, arguments) for name, arguments in calls]
        waiting = [index for index, outcome in enumerate(outcomes) if inspect.iscoroutine(outcome)]
        if waiting:
            coroutines = [seeding.await_using(self._generator, outcomes[index]) for index in waiting]
            for index, outcome in zip(waiting, self._loop.gather(coroutines), strict=True):
                outcomes[index] = outcome
        room = MAX_TEXT
        results = list[ToolAnswer]()
        raised = dict[str, EnvironmentFailure]()
        for (name, _), outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, BaseException) and (
                isinstance(outcome, MemoryError) or not isinstance(outcome, Exception)
            ):
                raise outcome
            failure = None
            if isinstance(outcome, Exception):
                text = f"Error: {_tool_error_text(outcome)}"
                failure = self._note_raised(name, outcome)
            else:
                text = tool_text(outcome)
            if failure is not None:
                raised.setdefault(failure.cause, failure)
            if len(text) > room:
                text = text[:room] + _TEXT_CUT.format(f"{MAX_TEXT:,}")
            room -= min(room, len(text))
            results.append(ToolAnswer(text, isinstance(outcome, Exception), failure.cause if failure else ""))
        return ToolsCalled(results, list(raised.values()))

    def _note_raised(self, name: str, error: Exception) -> EnvironmentFailure | None:
        """Describe the exception of a tool's own code, with its trace the first time.

        None for an unknown tool, and for arguments that it does not take.
        """
        if not raised_inside(error, __file__, seeding.__file__):
            return None
        where = raised_at(error, getattr(self._class, name, self._class), __file__)
        cause = f"raised {type(error).__name__} at {where}" if where else f"raised {type(error).__name__}"
        trace = "" if cause in _traced_causes or len(_traced_causes) > MAX_CAUSES else trace_of(error)
        _traced_causes.add(cause)
        return EnvironmentFailure("raised", cause, error_text(error), trace)

    def _find_method(self, name: str) -> Callable[..., Any]:
        """Return a method that the class may lack. Raises ContractError."""
        method: Callable[..., Any] | None = getattr(self._environment, name, None)
        if method is None:
            raise ContractError(f"{self._class.__name__} has no method {name}")
        return method

    def _call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Return a tool's result, its coroutine, or the exception that it raised."""
        try:
            if name not in self._tools:
                return ValueError(f"there is no tool {name!r}; the tools are {', '.join(self._tools)}")
            return getattr(self._environment, name)(**arguments)
        except Exception as error:
            return error

    def _await_value(self, value: Any) -> Any:
        """Return a value; of a coroutine the value that it returns."""
        if not inspect.iscoroutine(value):
            return value
        (outcome,) = self._loop.gather([seeding.await_using(self._generator, value)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def run_action(kind: str, action: Callable[[], Any], code: Callable[..., Any], caller: str) -> Any:
    """Run an action; return its value or failure. code: the user's function; caller: our own file that calls it."""
    try:
        return action()
    except ContractError as error:
        return EnvironmentFailure("contract", f"{kind} broke the contract", shorten_text(str(error)))
    except MemoryError as error:
        return EnvironmentFailure("memory", f"{kind} raised MemoryError", error_text(error), trace_of(error))
    except BaseException as error:  # SystemExit and CancelledError too
        where = raised_at(error, code, caller)
        cause = f"{kind} raised {type(error).__name__}"
        if where:
            cause += f" at {where}"
        return EnvironmentFailure("raised", cause, error_text(error), trace_of(error))


def _tool_error_text(error: Exception) -> str:
    """Return an exception's text for the model; the name of its type if it has no text."""
    try:
        return str(error) or type(error).__name__
    except BaseException:  # the user's own exception type, whose text is the user's code
        return type(error).__name__
