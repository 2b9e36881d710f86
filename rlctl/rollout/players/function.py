"""Player of rollout functions: the user's coroutine decides each prompt, token by token (contracts 4 and 11).

Sampled tokens are nodes of a tree that only grows. A prompt that begins with a path of the tree continues it: one row
trains both. Any other prompt begins a new row. A sampled token trains exactly once, however often later prompts contain
it.

Samples that a function begins together are sampled together. Turn numbers, seeds, answers and nodes follow the order in
which the function asked. No engine's speed changes it.
"""

import asyncio
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.environments.contract import Reward
from rlctl.environments.pool import EnvironmentPool
from rlctl.environments.rollout_function import FunctionRequest
from rlctl.generation.requests import Completion
from rlctl.rollout.players.course import Course, EpisodeLimits
from rlctl.rollout.players.episodes import Episodes
from rlctl.rollout.policy import Player, Policy
from rlctl.rollout.types import Ending, Rollout, RolloutStart


class FunctionPlayer(Player):
    """Plays rollouts by calls of the pool's rollout function, see environments/rollout_function.py.

    Deadlines, retries, budgets and aborts are those of an episode. must_value: the function must return a value, since
    no reward gives one. vocabulary: ids of the model, some of which a tokenizer may not have; it samples these too.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        chat: Chat,
        limits: EpisodeLimits,
        must_value: bool = False,
        vocabulary: int = 1 << 31,
    ) -> None:
        self.chat, self.episodes = chat, Episodes(pool, limits)
        self.must_value, self.vocabulary = must_value, vocabulary
        self.several_turns = limits.max_turns > 1

    @property
    def last_step(self) -> float:
        return self.episodes.last_step

    def describe(self) -> str:
        return self.episodes.describe()

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        return await self.episodes.play(start, lambda course: FunctionCall(self, course, policy).play())


@dataclass(eq=False)
class FunctionSample:
    """One sample that a function asked for."""

    prompt: list[int]
    # The turn, or the budget that was used up; None while an engine samples.
    answer: Completion | Ending | None


class FunctionCall:
    """One call of a function, as the driver sees it."""

    def __init__(self, player: FunctionPlayer, course: Course, policy: Policy) -> None:
        self._player, self._course, self._policy = player, course, policy
        # Samples not taken yet, in the order of the requests, and the number of answers sent.
        self._samples: deque[FunctionSample] = deque()
        self._sent = 0
        # Those that engines sample.
        self._sampling: dict[asyncio.Task[Completion], Any] = {}
        # Actions that its process has not replied to, oldest first.
        self._open: deque[asyncio.Task[FunctionRequest]] = deque()
        # Turns that engines were asked for.
        self._turns = 0
        # True once several samples were in flight at a time.
        self._side_by_side = False

    async def play(self) -> Reward | None:
        """Call the function; return its value. Raises DataError for a wrong one, EpisodeFailed if its process fails.

        No engine samples for the call any more then: the same requests may be submitted again.
        """
        self._course.ending, self._course.opening = "done", 0
        try:
            self._act(self._started(), waits=True)
            while (told := await self._next()) is None or not told.ended:
                pass
            value = self._value(told)
        except (Exception, asyncio.CancelledError):
            await self._end()
            raise
        await self._end()
        return value

    def _started(self) -> "Future[Any]":
        """Begin the call."""
        start, task = self._course.start, self._course.start.task
        asked = {"id": task.id, "prompt": task.text, "tokens": task.tokens, "answer": task.answer, "row": task.row}
        return self._player.episodes.pool.begin(start.id, asked, start.group_seed)

    async def _end(self) -> None:
        """Wait until no engine samples for the call; drop the actions without a reply."""
        for action in self._open:
            action.cancel()
        await _all_ended([*self._sampling, *self._open])

    async def _next(self) -> FunctionRequest | None:
        """Wait until a sample has ended or the process has replied, and go on with that. Return a reply."""
        await asyncio.wait([*self._sampling, *list(self._open)[:1]], return_when=asyncio.FIRST_COMPLETED)
        for task in [each for each in self._sampling if each.done()]:
            self._sampled(self._sampling.pop(task), task.result())
        told = None
        if self._open and self._open[0].done():
            told = self._open.popleft().result()
            self._take(told)
            if told.ended:
                return told
            self._begin(told)
        self._send()
        return told

    def _sampled(self, sample: FunctionSample, completion: Completion) -> None:
        """Take the end of a sample."""
        sample.answer = completion

    def _act(self, action: "Future[Any]", *, waits: bool) -> None:
        work = self._player.episodes.ask(self._course, action, waits=waits)
        self._open.append(asyncio.get_running_loop().create_task(work))

    def _take(self, told: FunctionRequest) -> None:
        """Put the samples that the function took into the tree."""
        if not 0 <= told.taken <= self._sent:
            raise DataError(f"the rollout function took {told.taken} answers of {self._sent}")
        self._sent -= told.taken
        for _ in range(told.taken):
            self._attach(self._samples.popleft())

    def _value(self, told: FunctionRequest) -> Reward | None:
        """Return the value that the function returned."""
        if not self._course.conversation.turns:
            raise DataError("the rollout function returned without a sample")
        if told.reward is None and self._player.must_value:
            raise DataError("the rollout function returned None, and rewards is empty: nothing values the rollout")
        return told.reward

    def _begin(self, told: FunctionRequest) -> None:
        """Sample after the function's prompts, within the budgets."""
        loop, course, most = asyncio.get_running_loop(), self._course, self._player.vocabulary
        if told.again:
            raise DataError(f"the rollout function sampled again after {course.ending}: three empty lists had come")
        if any(not tokens or not 0 <= min(tokens) <= max(tokens) < most for tokens in told.samples):
            raise DataError("the rollout function sampled after ids that are no tokens, or after none")
        for tokens in told.samples:
            sample = FunctionSample(tokens, course.used_up(self._turns, len(tokens), loop.time()))
            self._samples.append(sample)
            if sample.answer is None:
                request = course.request(self._turns, tokens)
                self._sampling[loop.create_task(self._policy.sample(request))] = sample
                self._turns += 1
        self._side_by_side |= len(self._sampling) > 1

    def _send(self) -> None:
        """Send the next answers, and ask the function's process for further samples."""
        answers: list[Any] = []
        for sample in list(self._samples)[self._sent :]:
            if sample.answer is None:
                break
            answers.append(_plain(sample.answer))
        self._sent += len(answers)
        waits = self._sent < len(self._samples)
        # A function of several branches may ask at any time, one of a single branch asks when it has its answer.
        if answers or (not self._open and (self._side_by_side or not waits)):
            self._act(self._player.episodes.pool.resume(self._course.start.id, answers, waits=waits), waits=not waits)

    def _attach(self, sample: FunctionSample) -> None:
        """Put a sample that the function took into the tree: below the longest path that its prompt begins with."""
        course, one, answer, chat = self._course, self._course.conversation, sample.answer, self._player.chat
        if not isinstance(answer, Completion):
            course.ending = answer if course.ending == "done" and answer else course.ending
            return
        length, parent = one.longest_beginning(sample.prompt)
        if parent is None or length < len(sample.prompt):
            parent = one.add_context(sample.prompt[length:], parent)
            one.messages.append({"role": "user", "content": chat.turn_text(sample.prompt[length:])})
            course.opening = course.opening or 1
        one.add_turn(answer, parent)
        one.messages.append({"role": "assistant", "content": chat.turn_text(answer.tokens.tolist())})


async def _all_ended(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Wait until tasks have ended; cancel them if the wait is cancelled."""
    if not tasks:
        return
    try:
        if (own := asyncio.current_task()) and own.cancelling():
            raise asyncio.CancelledError
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
        raise
    finally:
        for each in tasks:
            # An error that is looked at is not reported again by asyncio.
            _ = each.done() and not each.cancelled() and each.exception()


def _plain(answer: Completion | Ending) -> Any:
    """Return an answer as the function's process takes it; None where a budget is used up."""
    if isinstance(answer, Completion):
        return answer.tokens.tolist(), answer.log_probs.tolist(), answer.versions.tolist()
    return None
