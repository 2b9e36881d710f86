"""A rollout function, `async def play(task, policy)`, in the process that runs it: the child's side of its samples.

    BeginFunction  -> the function runs until all of its tasks wait        -> FunctionWaits or FunctionEnded
    ResumeFunction -> the function gets answers, one at a time, and runs   -> FunctionWaits or FunctionEnded

Samples that the function begins side by side are sampled side by side. It gets the answers in the order of its
requests, each when all of its tasks wait again. Its next action then does not depend on the faster engine.
"""

import asyncio
import inspect
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlctl.environments import seeding
from rlctl.environments.contract import EnvironmentContract, check_reward
from rlctl.environments.coroutine_loop import CallbackCount, CoroutineLoop, callback_count
from rlctl.environments.episode import OpenAction, Reply, run_action
from rlctl.environments.messages import (
    BeginFunction,
    CloseEpisode,
    EpisodeMessage,
    FunctionEnded,
    FunctionWaits,
    ResumeFunction,
    Sampled,
)
from rlctl.utils.user_code import shorten_text

# Context that belongs to no episode.
_NO_EPISODE = Context()
PlayFunction = Callable[..., Coroutine[Any, Any, Any]]
# Words in the names of an agent's parameters behind the task.
_AGENT_WORDS = ("url", "key", "api", "endpoint", "address", "client")


@dataclass(frozen=True)
class PlayTask:
    """The task of one rollout."""

    # `e0-r17`: epoch and row.
    id: str
    # The row's prompt as the chat template renders it, and as token ids.
    prompt: str
    tokens: list[int]
    answer: str | None
    # All columns of the row.
    row: dict[str, Any]


class FunctionPolicy:
    """The policy, as a rollout function sees it."""

    def __init__(self, ask: Callable[[list[int]], "asyncio.Future[Sampled]"]) -> None:
        self._ask_for_sample = ask

    async def sample(self, token_ids: list[int]) -> Sampled:
        """Sample a turn after these tokens, of at most `generation.max_new_tokens`.

        Earlier samples at the beginning of `token_ids` stay in their row. Samples that are begun together are sampled
        together, and return in the order of their beginnings. Returns three empty lists once `environment.max_turns`,
        the longest sequence or `environment.episode_timeout_s` is used up; to sample again after that is an error.
        """
        return await self._ask_for_sample([int(token) for token in token_ids])


def is_agent(function: Callable[..., Any]) -> bool:
    """Return True for a function that is meant as an agent, `run(task, base_url, api_key)`, by its parameters."""
    names = list(inspect.signature(function).parameters)
    if "policy" in names:
        return False
    if len(names) < 3 and inspect.iscoroutinefunction(function):
        # A policy may have any name.
        return any(word in "".join(names[1:]).lower() for word in _AGENT_WORDS)
    return True


def read_function(function: Any) -> EnvironmentContract:
    """Return the facts about a rollout function, with its problems."""
    name = str(getattr(function, "__name__", function))
    problems = []
    if not inspect.iscoroutinefunction(function):
        hint = ""
        if inspect.isfunction(function) and is_agent(function):
            hint = "; the key agent names one of (task, base_url, api_key)"
        kind = type(function).__name__
        problems.append(f"must be `async def {shorten_text(name)}(task, policy)`, not a {kind}{hint}")
    else:
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            problems.append(f"is called as {name}(task, policy): {error}")
    return EnvironmentContract(
        name=name, tools=[], has_step=False, has_reward=True, problems=problems, notes=[], is_function=True
    )


class FunctionEpisode:
    """One call of a rollout function, on the event loop of its process."""

    def __init__(self, function: PlayFunction, loop: CoroutineLoop, reply: Reply) -> None:
        self._function = function
        self._loop = loop
        self._reply = reply
        self._open = OpenAction(function.__name__, reply)
        self._generator = random.Random()
        # Callbacks of the function's own, and their number at the last look.
        self._count = CallbackCount()
        self._callbacks_seen = 0
        self._is_look_due = False
        self._task: asyncio.Task[Any] | None = None
        # Prompts that no reply has brought so far; samples that wait, in order; answers that wait their turn.
        self._new_prompts: list[list[int]] = []
        self._waiting: deque[asyncio.Future[Sampled]] = deque()
        self._answers: deque[Sampled | None] = deque()
        # Answers that were given since the last reply.
        self._answers_given = 0
        # Most samples that waited at a time.
        self._most_waiting = 0
        # Number of empty answers given.
        self._empty_answers = 0
        # True once the function asked again after each concurrent sample could have got an empty answer.
        self._asks_again = False

    def submit(self, action: int, message: EpisodeMessage) -> None:
        """Do an action on the event loop."""
        self._loop.running.call_soon_threadsafe(self._open.contain, partial(self._do_action, action, message))

    def _do_action(self, action: int, message: EpisodeMessage) -> None:
        if self._open.is_open:
            self._answer_action()
        match message:
            case BeginFunction():
                self._open.open(action)
                self._begin_task(PlayTask(**message.task), message.seed)
            case ResumeFunction():
                self._open.open(action)
                self._answers += message.answers
                self._look_soon()
            case CloseEpisode():
                self._cancel()
                self._reply(action, None)

    def _begin_task(self, task: PlayTask, seed: int) -> None:
        self._generator.seed(seed)
        context = copy_context()
        context.run(seeding.use, self._generator)
        context.run(callback_count.set, self._count)
        self._task = self._loop.running.create_task(self._play(task), context=context)
        self._task.add_done_callback(lambda _: self._look_soon())
        self._look_soon()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for sample in self._waiting:
            sample.cancel()

    async def _play(self, task: PlayTask) -> Any:
        return await self._function(task, FunctionPolicy(self._ask_for_sample))

    def _ask_for_sample(self, tokens: list[int]) -> "asyncio.Future[Sampled]":
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        if 0 < self._most_waiting <= self._empty_answers:
            self._asks_again = True
        self._new_prompts.append(tokens)
        self._waiting.append(future)
        self._most_waiting = max(self._most_waiting, len(self._waiting))
        self._look_soon()
        return future

    def _look_soon(self) -> None:
        if not self._is_look_due:
            self._is_look_due = True
            self._loop.running.call_soon(self._open.contain, self._give_or_ask, context=_NO_EPISODE)

    def _give_or_ask(self) -> None:
        """Once no callback of the function is left: give it its next answer, or send its requests.

        The loop runs callbacks in order. Those that were there at the last look have run by now; if none came since,
        none is left.
        """
        assert self._task is not None
        if not self._task.done() and self._callbacks_seen != self._count.callbacks:
            self._callbacks_seen = self._count.callbacks
        elif not self._task.done() and self._answers and self._waiting:
            self._give_answer(self._waiting.popleft(), self._answers.popleft())
        else:
            self._is_look_due = False
            if self._open.is_open and (self._task.done() or self._new_prompts):
                self._answer_action()
            return
        self._loop.running.call_soon(self._open.contain, self._give_or_ask)

    def _give_answer(self, sample: "asyncio.Future[Sampled]", answer: Sampled | None) -> None:
        self._answers_given += 1
        if answer is None:
            self._empty_answers += 1
            answer = Sampled([], [], [])
        if not sample.done():
            sample.set_result(Sampled._make(answer))

    def _answer_action(self) -> None:
        """Reply to the action that is open."""
        assert self._task is not None
        if self._task.done():
            self._open.answer(run_action(self._function.__name__, self._read_result, self._function, __file__))
        else:
            message = FunctionWaits(
                samples=self._new_prompts, answers_taken=self._answers_given, asks_again=self._asks_again
            )
            self._open.answer(vars(message))
            self._new_prompts = []
            self._answers_given = 0

    def _read_result(self) -> dict[str, Any]:
        """Return the function's result as a reply. Raises the function's exception."""
        assert self._task is not None
        value = self._task.result()
        reward = None if value is None else check_reward(value, "the rollout function")
        return vars(FunctionEnded(self._answers_given, reward))
