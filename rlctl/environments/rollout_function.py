"""A rollout function, `async def play(task, policy)`, in the process that runs it: the child's side of its samples.

    begin  -> the function runs until it samples or returns    -> {"sample": token ids} or {"reward": value}
    resume -> it gets the tokens, and runs on                  -> likewise

Each of the two is an action of an episode, with the deadline of one. Samples that a function begins side by side are
taken one after the other.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from rlctl.environments import seeding
from rlctl.environments.contract import ContractError, EnvironmentContract, checked_reward
from rlctl.environments.episode import CoroutineLoop, Episode, Reply
from rlctl.utils.user_code import shortened

PlayFunction = Callable[..., Coroutine[Any, Any, Any]]
# {"sample": token ids}, or {"reward": value or None} at the end.
FunctionRequest = dict[str, Any]


class Sampled(NamedTuple):
    """One sampled turn; all three are empty where a budget is used up."""

    tokens: list[int]
    # Of the distribution that was sampled from.
    log_probs: list[float]
    # Weight version that sampled each token.
    versions: list[int]


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


class Policy:
    """The policy, as a rollout function sees it."""

    def __init__(self, ask: Callable[[list[int]], "asyncio.Future[Sampled]"]) -> None:
        self._ask = ask

    async def sample(self, token_ids: list[int]) -> Sampled:
        """Sample a turn after these tokens, of at most `generation.max_new_tokens`.

        What was sampled before and is at the beginning of `token_ids` stays in its row. Returns three empty lists once
        `environment.max_turns`, the longest sequence or `environment.episode_timeout_s` is used up; to sample again
        after that is an error.
        """
        return await self._ask([int(token) for token in token_ids])


def read_function(function: Any) -> EnvironmentContract:
    """Return the facts about a rollout function, with what is wrong with it."""
    name = str(getattr(function, "__name__", function))
    problems = []
    if not inspect.iscoroutinefunction(function):
        problems.append(f"must be `async def {shortened(name)}(task, policy)`, not a {type(function).__name__}")
    else:
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            problems.append(f"is called as {name}(task, policy): {error}")
    return EnvironmentContract(name, [], False, True, False, problems, [])


def checked_request(value: object) -> FunctionRequest:
    """Return what a rollout function asks for, as its process told it. Raises ContractError."""
    match value:
        case {"sample": list(tokens), **rest} if not rest and all(type(each) is int for each in tokens):
            return {"sample": tokens}
        case {"reward": reward, **rest} if not rest:
            return {"reward": None if reward is None else checked_reward(reward)}
    raise ContractError("neither tokens to sample after nor a reward")


class FunctionEpisode(Episode):
    """One call of a rollout function, and what waits for it."""

    def __init__(self, function: PlayFunction, loop: CoroutineLoop, reply: Reply) -> None:
        super().__init__(function, {}, loop, reply)
        self._function = function
        # (token ids, future of what was sampled), or what the function returned or raised.
        self._events: SimpleQueue[tuple[list[int], asyncio.Future[Sampled]] | Future[Any]] = SimpleQueue()
        self._waiting: asyncio.Future[Sampled] | None = None
        self._running: Future[Any] | None = None

    def _begin(self, payload: tuple[dict[str, Any], int]) -> FunctionRequest:
        task, seed = payload
        self._generator.seed(seed)
        playing = seeding.using(self._generator, self._function(PlayTask(**task), Policy(self._asked)))
        self._running = asyncio.run_coroutine_threadsafe(playing, self._loop.running)
        self._running.add_done_callback(self._events.put)
        return self._next()

    def _resume(self, sampled: tuple[list[int], list[float], list[int]]) -> FunctionRequest:
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            raise ContractError("the function waits for no sample")
        self._loop.running.call_soon_threadsafe(_give, waiting, Sampled(*sampled))
        return self._next()

    def _close(self, payload: None) -> None:
        if self._running is not None:
            self._running.cancel()

    def _asked(self, tokens: list[int]) -> "asyncio.Future[Sampled]":
        future: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        self._events.put((tokens, future))
        return future

    def _next(self) -> FunctionRequest:
        """Return what the function asks for next, or what it returned. Raises what it raised."""
        event = self._events.get()
        if isinstance(event, Future):
            value = event.result()
            return {"reward": None if value is None else checked_reward(value, "the rollout function")}
        tokens, self._waiting = event
        return {"sample": tokens}


def _give(waiting: "asyncio.Future[Sampled]", sampled: Sampled) -> None:
    if not waiting.done():
        waiting.set_result(sampled)
