"""One episode in an environment process: a thread that owns an environment's instance and runs its actions in turn.

The instance stays on one thread from its constructor to `close`, because some resources (a connection of sqlite3) work
only on the thread that created them. Async methods of all episodes run on one event loop of the process. The loop keeps
running between actions, so that episodes may keep or share an async client.
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
from rlctl.environments.outcomes import EnvironmentFailure, InfrastructureError
from rlctl.utils.user_code import error_text, raised_at, raised_inside, shorten_text, trace_of
from rlctl.workers.named_reward import NamedRewardError, named_arguments, named_value
from rlctl.workers.user_logs import MAX_CAUSES

# Causes of failures whose traceback this process has sent.
_traced_causes: set[str] = set()
# Most characters of the tools' answers in one action, all answers added up.
MAX_TEXT = 1 << 18
_TEXT_CUT = "... [cut: a tool may answer with {} characters]"
# Sends (number of an action, its value or EnvironmentFailure) to the driver.
Reply = Callable[[int, Any], None]


class OpenAction:
    """The unanswered action of a running rollout function or agent; at most one at a time.

    It is answered when the function asks for samples or ends, or when the next action comes. subject: name of the
    function or agent, for the cause of an error.
    """

    def __init__(self, subject: str, reply: Reply) -> None:
        self._subject = subject
        self._reply = reply
        self._number: int | None = None

    @property
    def is_open(self) -> bool:
        """True while an action waits for its answer."""
        return self._number is not None

    def keep(self, number: int) -> None:
        """Keep an action open, to answer it later. number: the action's number."""
        self._number = number

    def answer(self, value: Any) -> None:
        """Reply to the action that is open."""
        assert self._number is not None
        number = self._number
        # Closed first: the reply may bring the next action.
        self._number = None
        self._reply(number, value)

    def run_part(self, part: Callable[[], None]) -> None:
        """Run a part of an action. If the part raises, answer the action with a failure.

        Otherwise the event loop would swallow the exception, and the driver would wait for the answer without end.
        """
        try:
            part()
        except Exception as error:
            if self.is_open:
                cause = f"{self._subject} failed with {type(error).__name__}"
                self.answer(EnvironmentFailure("raised", cause, error_text(error), trace_of(error)))


class Episode(threading.Thread):
    """Thread of one episode: an instance of the environment, and a queue of actions.

    tools: names of the contract's tools; no other method can be called. rewards: reward functions by name, which get
    the instance.
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
        """Queue an action. The last action of an episode is `CloseEpisode`."""
        self._actions.put((action, message))

    def run(self) -> None:
        """Run one action after another until the episode is closed."""
        seeding.use(self._generator)
        is_closed = False
        while not is_closed:
            action, message = self._actions.get()
            is_closed = isinstance(message, CloseEpisode)
            # Any method will do: a failure's place is looked for in the whole file of the environment.
            code = getattr(self._class, "reset", self._class)
            self._reply(action, run_action(message.kind, partial(self._action_value, message), code, __file__))

    def _action_value(self, message: EpisodeMessage) -> Any:
        """Run an action and return its value. Raises any exception of the user's code."""
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
        """Return the value of `get_reward`. With reward functions, return their values by name too."""
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
        """Call tools, and return their answers in order.

        First the plain methods run one after another, then all async methods concurrently.
        """
        # For each call its result, its exception, or the coroutine of an async method.
        outcomes = [self._call_tool(name, arguments) for name, arguments in calls]
        async_indices = [index for index, outcome in enumerate(outcomes) if inspect.iscoroutine(outcome)]
        if async_indices:
            coroutines = [seeding.await_using(self._generator, outcomes[index]) for index in async_indices]
            for index, outcome in zip(async_indices, self._loop.gather(coroutines), strict=True):
                outcomes[index] = outcome
        characters_left = MAX_TEXT
        answers = list[ToolAnswer]()
        first_failures = dict[str, EnvironmentFailure]()
        for (name, _), outcome in zip(calls, outcomes, strict=True):
            failed = isinstance(outcome, BaseException)
            cause = ""
            if failed:
                # These, SystemExit and KeyboardInterrupt end the episode. The model reads any other exception.
                if isinstance(outcome, MemoryError | InfrastructureError) or not isinstance(outcome, Exception):
                    raise outcome
                text = f"Error: {_tool_error_text(outcome)}"
                failure = self._describe_raised(name, outcome)
                if failure is not None:
                    cause = failure.cause
                    first_failures.setdefault(cause, failure)
            else:
                text = tool_text(outcome)
            if len(text) > characters_left:
                text = text[:characters_left] + _TEXT_CUT.format(f"{MAX_TEXT:,}")
            characters_left -= min(characters_left, len(text))
            answers.append(ToolAnswer(text=text, failed=failed, cause=cause))
        return ToolsCalled(answers, list(first_failures.values()))

    def _describe_raised(self, name: str, error: Exception) -> EnvironmentFailure | None:
        """Return a failure that describes an exception of a tool's code, with the traceback if its cause is new.

        Return None if the tool's code did not run: the tool is unknown, or does not take the arguments.
        """
        if not raised_inside(error, __file__, seeding.__file__):
            return None
        where = raised_at(error, getattr(self._class, name, self._class), __file__)
        cause = f"raised {type(error).__name__} at {where}" if where else f"raised {type(error).__name__}"
        trace = "" if cause in _traced_causes or len(_traced_causes) > MAX_CAUSES else trace_of(error)
        _traced_causes.add(cause)
        return EnvironmentFailure("raised", cause, error_text(error), trace)

    def _find_method(self, name: str) -> Callable[..., Any]:
        """Return a method of the instance. Raises ContractError if the class lacks the method."""
        method: Callable[..., Any] | None = getattr(self._environment, name, None)
        if method is None:
            raise ContractError(f"{self._class.__name__} has no method {name}")
        return method

    def _call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; return its result, its coroutine if the tool is async, or the exception that it raised."""
        try:
            if name not in self._tools:
                return ValueError(f"there is no tool {name!r}; the tools are {', '.join(self._tools)}")
            return getattr(self._environment, name)(**arguments)
        except Exception as error:
            return error

    def _await_value(self, value: Any) -> Any:
        """Return a plain value unchanged. Await a coroutine and return its result; raises its exception."""
        if not inspect.iscoroutine(value):
            return value
        (outcome,) = self._loop.gather([seeding.await_using(self._generator, value)])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def run_action(kind: str, action: Callable[[], Any], code: Callable[..., Any], caller: str) -> Any:
    """Run an action; return its value, or an EnvironmentFailure if it raises.

    code: the user's function, whose line is named in the failure's cause. caller: file of rlctl that calls it.
    """
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
    except BaseException:  # str of the user's own exception type runs the user's code
        return type(error).__name__
