"""Runner of a rollout function, `async def play(task, policy)`, in its process. It asks the driver for the samples.

    BeginFunction  -> the function runs until all of its tasks wait        -> FunctionWaits or FunctionEnded
    ResumeFunction -> the function gets answers, one at a time, and runs   -> FunctionWaits or FunctionEnded

Samples that the function requests concurrently are sampled concurrently. The function gets the answers in the order of
its requests, the next one only when all of its asyncio tasks wait again. So its actions do not depend on the order in
which the engines finish.
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

# Context of callbacks that count for no episode.
_NO_EPISODE = Context()
PlayFunction = Callable[..., Coroutine[Any, Any, Any]]
# Words that tell an agent's parameters from a rollout function's `policy`.
_AGENT_WORDS = ("url", "key", "api", "endpoint", "address", "client")


@dataclass(frozen=True)
class PlayTask:
    """The task of one rollout, as a rollout function gets it."""

    # Epoch and row, for example `e0-r17`.
    id: str
    # The row's prompt as the chat template renders it.
    prompt: str
    # Token ids of the prompt.
    tokens: list[int]
    answer: str | None
    # All columns of the row.
    row: dict[str, Any]


class FunctionPolicy:
    """The policy, as a rollout function sees it."""

    def __init__(self, ask: Callable[[list[int]], "asyncio.Future[Sampled]"]) -> None:
        self._ask_for_sample = ask

    async def sample(self, token_ids: list[int]) -> Sampled:
        """Sample a turn of at most `generation.max_new_tokens` tokens after the prompt `token_ids`.

        If `token_ids` begins with an earlier prompt and its sampled turn, both turns train as one sequence. Concurrent
        calls are sampled concurrently, and return in the order of the calls. Returns three empty lists once
        `environment.max_turns`, the longest sequence or `environment.episode_timeout_s` is used up; to sample again
        after that is an error.
        """
        return await self._ask_for_sample([int(token) for token in token_ids])


def is_agent(function: Callable[..., Any]) -> bool:
    """Return True if the parameters of a function are those of an agent, `run(task, base_url, api_key)`."""
    names = list(inspect.signature(function).parameters)
    if "policy" in names:
        return False
    if len(names) < 3 and inspect.iscoroutinefunction(function):
        # A rollout function may give its policy any name, so only a word such as `url` means an agent.
        return any(word in "".join(names[1:]).lower() for word in _AGENT_WORDS)
    # A rollout function is async and has two parameters.
    return True


def read_function(function: Any) -> EnvironmentContract:
    """Return the contract of a rollout function, with a problem if it cannot be called as `play(task, policy)`."""
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
        self._open_action = OpenAction(function.__name__, reply)
        self._generator = random.Random()
        # Number of callbacks that the function's tasks have scheduled.
        self._count = CallbackCount()
        # Number of callbacks at the last check of the progress.
        self._callbacks_seen = 0
        self._is_check_scheduled = False
        self._task: asyncio.Task[Any] | None = None
        # Prompts that no reply has sent to the driver yet.
        self._new_prompts: list[list[int]] = []
        # Futures of the unanswered samples, in the order of the requests.
        self._waiting: deque[asyncio.Future[Sampled]] = deque()
        # Answers of the driver that the function has not got yet.
        self._answers: deque[Sampled | None] = deque()
        # Number of answers that the function got since the last reply.
        self._answers_given = 0
        # Largest number of samples that waited at the same time.
        self._most_waiting = 0
        # Number of empty answers that the function got.
        self._empty_answers = 0
        # True once the function asked again after as many empty answers as it has had concurrent samples.
        self._asks_again = False

    def submit(self, action: int, message: EpisodeMessage) -> None:
        """Schedule an action on the event loop."""
        self._loop.running.call_soon_threadsafe(self._open_action.run_part, partial(self._do_action, action, message))

    def _do_action(self, action: int, message: EpisodeMessage) -> None:
        if self._open_action.is_open:
            # The driver waits no longer: it gets what there is so far, before its next action.
            self._answer_action()
        match message:
            case BeginFunction():
                self._open_action.keep(action)
                self._begin_task(PlayTask(**message.task), message.seed)
            case ResumeFunction():
                self._open_action.keep(action)
                self._answers += message.answers
                self._schedule_check()
            case CloseEpisode():
                self._cancel()
                self._reply(action, None)

    def _begin_task(self, task: PlayTask, seed: int) -> None:
        self._generator.seed(seed)
        context = copy_context()
        context.run(seeding.use, self._generator)
        context.run(callback_count.set, self._count)
        self._task = self._loop.running.create_task(self._play(task), context=context)
        self._task.add_done_callback(lambda _: self._schedule_check())
        self._schedule_check()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for sample in self._waiting:
            sample.cancel()

    async def _play(self, task: PlayTask) -> Any:
        return await self._function(task, FunctionPolicy(self._ask_for_sample))

    def _ask_for_sample(self, tokens: list[int]) -> "asyncio.Future[Sampled]":
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        # Each concurrent part of the function may get one empty answer before it knows that a budget is used up.
        if 0 < self._most_waiting <= self._empty_answers:
            self._asks_again = True
        self._new_prompts.append(tokens)
        self._waiting.append(future)
        self._most_waiting = max(self._most_waiting, len(self._waiting))
        self._schedule_check()
        return future

    def _schedule_check(self) -> None:
        if not self._is_check_scheduled:
            self._is_check_scheduled = True
            self._loop.running.call_soon(self._open_action.run_part, self._check_progress, context=_NO_EPISODE)

    def _check_progress(self) -> None:
        """If all tasks of the function wait, give it its next answer, or send its new requests to the driver.

        The loop runs callbacks in order. If the function's tasks have scheduled no callback since the last check, none
        of their callbacks is left, and all tasks wait.
        """
        assert self._task is not None
        if not self._task.done() and self._callbacks_seen != self._count.callbacks:
            # The function still runs: check again after the callbacks that it has scheduled.
            self._callbacks_seen = self._count.callbacks
        elif not self._task.done() and self._answers and self._waiting:
            self._give_answer(self._waiting.popleft(), self._answers.popleft())
        else:
            # Nothing changes until the driver's next action, or until something outside wakes a task.
            self._is_check_scheduled = False
            if self._open_action.is_open and (self._task.done() or self._new_prompts):
                self._answer_action()
            return
        self._loop.running.call_soon(self._open_action.run_part, self._check_progress)

    def _give_answer(self, sample: "asyncio.Future[Sampled]", answer: Sampled | None) -> None:
        self._answers_given += 1
        if answer is None:
            self._empty_answers += 1
            answer = Sampled([], [], [])
        if not sample.done():
            # A caller may answer with a plain tuple of the three lists.
            sample.set_result(Sampled._make(answer))

    def _answer_action(self) -> None:
        """Reply to the action that is open."""
        assert self._task is not None
        if self._task.done():
            outcome = run_action(self._function.__name__, self._read_result, self._function, __file__)
            self._open_action.answer(outcome)
        else:
            message = FunctionWaits(
                samples=self._new_prompts, answers_taken=self._answers_given, asks_again=self._asks_again
            )
            self._open_action.answer(vars(message))
            self._new_prompts = []
            self._answers_given = 0

    def _read_result(self) -> dict[str, Any]:
        """Return the function's result as a message for the driver. Raises the function's exception."""
        assert self._task is not None
        value = self._task.result()
        reward = None if value is None else check_reward(value, "the rollout function")
        return vars(FunctionEnded(self._answers_given, reward))
