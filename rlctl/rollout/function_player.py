"""Player of rollout functions: the user's coroutine decides each prompt, token by token (contracts 4 and 11).

What is sampled is a tree of tokens that only grows. A prompt that begins with a path of the tree goes on with that
path, so that one row trains it all; any other prompt begins a row of its own. A sampled token trains exactly once,
whatever prompts it is in afterwards.

Samples that a function begins side by side are requests side by side. Everything is in the order in which the function
asked, whichever engine is faster: the numbers of the turns, from which seeds follow, the answers that the function
gets, and the nodes of the tree.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from rlctl.data.files import DataError
from rlctl.environments.rollout_function import FunctionRequest
from rlctl.generation.requests import Completion
from rlctl.rollout.conversation import Conversation
from rlctl.rollout.player import EpisodePlayer, Play
from rlctl.rollout.types import Ending


@dataclass(eq=False)
class FunctionSample:
    """One sample that a function asked for."""

    prompt: list[int]
    # The turn, or the budget that was used up; None while an engine samples.
    answer: Completion | Ending | None


@dataclass
class FunctionCall:
    """One call of a function, as the driver sees it."""

    # Samples that it has not taken, in the order in which it asked.
    samples: deque[FunctionSample] = field(default_factory=deque)
    # Number of them whose answers were sent.
    sent: int = 0
    # Those that engines sample, by the number of the turn.
    sampling: dict[int, FunctionSample] = field(default_factory=dict)
    # Turns that engines were asked for.
    turns: int = 0
    # Actions that the function's process has not replied to.
    open: int = 0
    # True once several samples were under way at a time.
    side_by_side: bool = False


class FunctionPlayer(EpisodePlayer):
    """Plays rollouts by calls of a rollout function, see `RolloutPlayer` and environments/rollout_function.py.

    Deadlines, retries, budgets and aborts are those of an episode.
    """

    # True if a function must return a value, since no reward gives one.
    must_value: bool = False
    # Ids of the model, some of which a tokenizer may not have; the policy samples these too.
    vocabulary: int = 1 << 31

    def __init__(self, *arguments: Any) -> None:
        self._calls: WeakKeyDictionary[Play, FunctionCall] = WeakKeyDictionary()
        super().__init__(*arguments)

    def _reset(self, play: Play) -> None:
        play.began, play.ending = self._clock.now(), "done"
        play.conversation, play.leaf, play.opening, play.sampled = Conversation(), -1, 0, 0
        self._calls[play] = FunctionCall(open=1)
        task = play.start.task
        asked = {"id": task.id, "prompt": task.text, "tokens": task.tokens, "answer": task.answer, "row": task.row}
        self._ask(play, self._pool.begin(play.start.id, asked, play.start.group_seed), self._told_next)

    def _told_next(self, play: Play, told: FunctionRequest) -> None:
        """Sample what the function asks for, or end the rollout with what it returned."""
        call = self._calls[play]
        call.open -= 1
        if not 0 <= told.taken <= call.sent:
            raise DataError(f"the rollout function took {told.taken} answers of {call.sent}")
        call.sent -= told.taken
        for _ in range(told.taken):
            self._attach(play, call.samples.popleft())
        if told.ended:
            if not play.conversation.turns:
                raise DataError("the rollout function returned without a sample")
            if told.reward is None and self.must_value:
                raise DataError("the rollout function returned None, and rewards is empty: nothing values the rollout")
            self._when_sampled(play, partial(self._end, play, told.reward, None))
            return
        if told.again:
            raise DataError(f"the rollout function sampled again after {play.ending}: three empty lists had come")
        requests = [self._request(play, turn, tokens) for turn, tokens in self._begun(play, call, told.samples)]
        call.side_by_side |= len(call.sampling) > 1
        if requests:
            self._submit(play, requests)
        self._go_on_with(play, call)

    def _begun(self, play: Play, call: FunctionCall, prompts: list[list[int]]) -> Iterator[tuple[int, list[int]]]:
        """Note new samples, and yield (turn, prompt) of those that no budget refuses."""
        for tokens in prompts:
            if not tokens or not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
                raise DataError("the rollout function sampled after ids that are no tokens, or after none")
            sample = FunctionSample(tokens, self._used_up(play, call.turns, len(tokens)))
            call.samples.append(sample)
            if sample.answer is None:
                yield call.turns, tokens
                call.sampling[call.turns] = sample
                call.turns += 1

    def _answered(self, play: Play, turn: int, completion: Completion) -> None:
        call = self._calls[play]
        call.sampling.pop(turn).answer = completion
        self._go_on_with(play, call)

    def _go_on_with(self, play: Play, call: FunctionCall) -> None:
        """Send the answers that are next, if there are any, and be told what the function asks for meanwhile."""
        answers: list[Any] = []
        for sample in list(call.samples)[call.sent :]:
            if sample.answer is None:
                break
            answers.append(_plain(sample.answer))
        call.sent += len(answers)
        waits = call.sent < len(call.samples)
        # A function of several branches may ask at any time, one of a single branch asks when it has its answer.
        if answers or (not call.open and (call.side_by_side or not waits)):
            call.open += 1
            future = self._pool.resume(play.start.id, answers, waits=waits)
            self._ask(play, future, self._told_next, waits_for_it=not waits)

    def _attach(self, play: Play, sample: FunctionSample) -> None:
        """Put a sample that the function took into the tree: below the longest path that its prompt begins with."""
        one, answer = play.conversation, sample.answer
        if not isinstance(answer, Completion):
            play.ending = answer if play.ending == "done" and answer else play.ending
            return
        length, parent = one.longest_beginning(sample.prompt)
        if parent is None or length < len(sample.prompt):
            parent = one.add_context(sample.prompt[length:], parent)
            said = self._chat.turn_text(sample.prompt[length:])
            one.messages.append({"role": "user", "content": said})
            play.opening = play.opening or 1
        one.add_turn(answer, parent)
        one.messages.append({"role": "assistant", "content": self._chat.turn_text(answer.tokens.tolist())})


def _plain(answer: Completion | Ending) -> Any:
    """Return an answer as the function's process takes it; None where a budget is used up."""
    if isinstance(answer, Completion):
        return answer.tokens.tolist(), answer.log_probs.tolist(), answer.versions.tolist()
    return None
