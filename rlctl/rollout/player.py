"""Player of episodes: one rollout of several turns, between the engines and an environment (contracts 4 and 11).

    RESETTING -- first prompt --> SAMPLING -- turn --> ACTING -- answer, budget left --> SAMPLING ...
                                                            \
                                                             +-- game over, no tool called, budget --> SCORING --> ENDED

A failure in RESETTING, ACTING or SCORING leads back to RESETTING, or to ENDED; an abort leads to ENDED from anywhere.

An episode's next prompt is its tokens so far and what was said since (`Chat.link`), so that nothing sampled is encoded
again. Everything happens on one thread, `play_next`; engines and environments only post to it. A failure of the
environment is no reward: the episode is played again from its task with the same seeds, or given up.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Condition
from typing import Any, Literal, Protocol

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.environments.contract import EnvironmentContract, Message, Reward, opening
from rlctl.environments.outcomes import EnvironmentFailure, ToolResult
from rlctl.environments.pool import EnvironmentPool
from rlctl.environments.tool_calls import parse_tool_calls
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest, turn_seed
from rlctl.rollout.conversation import Conversation
from rlctl.rollout.patience import Clock, ThreadErrors

_POLL_S = 1.0
# Why an episode ended: the environment said so; the policy called no tool; a budget was used up; it failed too often.
Ending = Literal["done", "answered", "max_turns", "max_length", "time", "failed"]


class Engines(Protocol):
    """Interface that a player needs of `RolloutDispatcher`."""

    def submit(self, requests: Sequence[TurnRequest], submitter: Any, *, ahead: bool = False) -> None:
        """Sample requests."""

    def abort(self, ids: Collection[RequestId]) -> list[RequestId]:
        """Stop sampling requests."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Budgets of one episode."""

    max_turns: int
    # Tokens of one turn, and of a whole conversation.
    max_new_tokens: int
    max_length: int
    # Seconds from the reset on.
    timeout_s: float
    # How often an episode is tried again after a failure.
    max_retries: int
    # keep: earlier turns stay as they were sampled. strip: they are written as the template writes them, which begins a
    # new row where the two differ.
    history: Literal["keep", "strip"]


@dataclass(frozen=True)
class EpisodeStart:
    """One episode to play."""

    id: RolloutId
    # Messages of the task.
    messages: list[Message]
    # Columns of its row, for `reset`.
    row: Mapping[str, Any]
    temperature: float
    # Seed of the first turn; that of a further one follows from it.
    seed: int
    # Seed of the environment, equal for the rollouts of a group.
    group_seed: int


@dataclass(frozen=True)
class PlayedEpisode:
    """One episode that ended."""

    start: EpisodeStart
    conversation: Conversation
    ending: Ending
    # None if it failed.
    reward: Reward | None
    # The last failure of the environment; None if the episode did not fail in the end.
    failure: EnvironmentFailure | None
    # Tries that failed.
    failures: int
    # Of all tries: seconds that the environment took, calls, and calls that were malformed or whose tool raised.
    environment_s: float
    tool_calls: int
    tool_errors: int


@dataclass(eq=False)
class _Play:
    """One episode under way."""

    start: EpisodeStart
    done: Callable[[PlayedEpisode], None]
    conversation: Conversation = field(default_factory=Conversation)
    # Node that the next turn follows.
    leaf: int = -1
    # Try under way, counted from 0: answers to an earlier one are dropped.
    attempt: int = 0
    ending: Ending = "failed"
    began: float = 0.0
    environment_s: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0


class EpisodePlayer:
    """Plays episodes with a dispatcher's engines and a pool of environments."""

    def __init__(
        self,
        engines: Engines,
        pool: EnvironmentPool,
        contracts: Mapping[str, EnvironmentContract],
        chat: Chat,
        limits: EpisodeLimits,
        tool_format: str | None,
        clock: Clock | None = None,
    ) -> None:
        self._engines, self._pool, self._contracts = engines, pool, contracts
        self._chat, self._limits, self._format = chat, limits, tool_format
        self._stops = frozenset(chat.ends.stops)
        self._plays: dict[RolloutId, _Play] = {}
        self._events: deque[tuple[_Play, int, Callable[[], None]]] = deque()
        self._changed, self._closed = Condition(), False
        self._clock, self._errors = clock or Clock(), ThreadErrors(self._changed)
        self._thread = self._clock.spawn("episodes", self._errors.guarded(self.play_next))

    def play(self, starts: Sequence[EpisodeStart], done: Callable[[PlayedEpisode], None]) -> None:
        """Begin episodes; `done` gets each as it ends, on the player's thread.

        Raises the error that ended that thread.
        """
        self._errors.check()
        for start in starts:
            play = self._plays[start.id] = _Play(start, done)
            self._post(play, 0, partial(self._reset, play))

    def abort(self, ids: Collection[RolloutId]) -> list[RolloutId]:
        """Stop playing these episodes; none of them is handed out afterwards. Returns those that had not ended."""
        self._errors.check()
        with self._changed:
            plays = [play for each in ids if (play := self._plays.pop(each, None))]
        self._engines.abort([RequestId(play.start.id, play.conversation.turns) for play in plays])
        for play in plays:
            self._pool.close(play.start.id)
        return [play.start.id for play in plays]

    def close(self) -> None:
        """Play nothing from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(2 * _POLL_S)

    def completed(self, answers: list[tuple[TurnRequest, Completion]]) -> None:
        """Take sampled turns, see `dispatcher.Submitter`."""
        for request, completion in answers:
            if play := self._plays.get(request.id.rollout):
                self._post(play, play.attempt, partial(self._answered, play, completion))

    def restarted(self, requests: list[TurnRequest]) -> None:
        """Learn that turns are sampled again; the turns before them stay."""

    def play_next(self) -> bool:
        """Handle what was posted next; return False at the end."""
        with self._changed:
            if not self._events and not self._closed:
                self._clock.wait(self._changed, _POLL_S)
            if self._closed or not self._events:
                return not self._closed
            play, attempt, handle = self._events.popleft()
            if self._plays.get(play.start.id) is not play or attempt != play.attempt:
                return True
        try:
            handle()
        except DataError as error:
            # A row or a template that cannot be played: another try would end alike.
            self._end(play, None, EnvironmentFailure("contract", str(error)))
        return True

    def _post(self, play: _Play, attempt: int, handle: Callable[[], None]) -> None:
        with self._changed:
            self._events.append((play, attempt, handle))
            self._changed.notify_all()

    # Each of these is one transition; the environment's answers come back through `_ask`.

    def _reset(self, play: _Play) -> None:
        play.began = self._clock.now()
        play.conversation, play.leaf = Conversation(), -1
        future = self._pool.reset(play.start.id, play.start.row, play.start.group_seed)
        self._ask(play, future, self._opened)

    def _opened(self, play: _Play, observation: Any) -> None:
        messages = opening(play.start.messages, observation)
        if not messages:
            raise DataError("the row has no prompt, and reset returned None: there is nothing to answer")
        play.conversation.messages = list(messages)
        tokens = self._chat.prompt_tokens(self._chat.prompt_text(messages, self._contract(play).tools))
        play.leaf = play.conversation.add_context(tokens, None)
        self._sample(play)

    def _sample(self, play: _Play) -> None:
        """Sample the next turn, unless a budget is used up."""
        limits, start, tokens = self._limits, play.start, play.conversation.tokens(play.leaf)
        room = min(limits.max_new_tokens, limits.max_length - len(tokens))
        if play.conversation.turns >= limits.max_turns:
            self._score(play, "max_turns")
        elif room < 1:
            self._score(play, "max_length")
        elif self._clock.now() - play.began > limits.timeout_s:
            self._score(play, "time")
        else:
            turn = play.conversation.turns
            seed = turn_seed(start.seed, turn)
            request = TurnRequest(RequestId(start.id, turn), tokens, room, start.temperature, seed)
            self._engines.submit([request], self)

    def _answered(self, play: _Play, completion: Completion) -> None:
        play.leaf = play.conversation.add_turn(completion, play.leaf)
        said = completion.tokens.tolist()
        text = self._chat.decode(said[:-1] if said and said[-1] in self._stops else said)
        message: Message = {"role": "assistant", "content": text}
        play.conversation.messages.append(message)
        contract = self._contract(play)
        calls = parse_tool_calls(text, self._format, contract.tools).calls if self._format and contract.tools else []
        if calls:
            play.tool_calls += len(calls)
            self._ask(play, self._pool.call(play.start.id, calls), self._tools_answered)
        elif contract.has_step:
            self._ask(play, self._pool.step(play.start.id, text), self._stepped)
        else:
            self._score(play, "answered")

    def _tools_answered(self, play: _Play, results: list[ToolResult]) -> None:
        play.tool_errors += sum(each.failed for each in results)
        self._go_on(play, [each.message() for each in results])

    def _stepped(self, play: _Play, answer: str | None) -> None:
        if answer is None:
            self._score(play, "done")
        else:
            self._go_on(play, [{"role": "user", "content": answer}])

    def _go_on(self, play: _Play, added: list[Message]) -> None:
        """Add what was said after the last turn, and sample the next one."""
        one, limits = play.conversation, self._limits
        before, last = one.messages[:-1], one.completions[-1].tokens.tolist()
        one.messages.extend(added)
        link = self._chat.link(before, added, self._contract(play).tools).after(last, self._stops)
        if limits.history == "strip" and one.turns < limits.max_turns:
            rendered = self._chat.prompt_tokens(self._chat.prompt_text(one.messages, self._contract(play).tools))
            if rendered != one.tokens(play.leaf) + link:
                play.leaf = one.add_context(rendered, None)
                self._sample(play)
                return
        play.leaf = one.add_context(link, play.leaf)
        self._sample(play)

    def _contract(self, play: _Play) -> EnvironmentContract:
        """Return the contract of an episode's environment, once its reset has shown that there is one."""
        return self._contracts[self._pool.key_of(play.start.row)]

    def _score(self, play: _Play, ending: Ending) -> None:
        play.ending = ending
        if self._contract(play).has_reward:
            self._ask(play, self._pool.reward(play.start.id), self._scored)
        else:
            self._end(play, None, None)

    def _scored(self, play: _Play, reward: Reward) -> None:
        self._end(play, reward, None)

    def _ask(self, play: _Play, future: Any, handle: Callable[[_Play, Any], None]) -> None:
        """Have `handle` called with the environment's answer, on the player's thread."""
        asked, attempt = self._clock.now(), play.attempt

        def answered(done: Any) -> None:
            seconds = self._clock.now() - asked
            self._post(play, attempt, partial(self._told, play, done.result(), seconds, handle))

        future.add_done_callback(answered)

    def _told(self, play: _Play, answer: Any, seconds: float, handle: Callable[[_Play, Any], None]) -> None:
        play.environment_s += seconds
        if not isinstance(answer, EnvironmentFailure):
            handle(play, answer)
            return
        play.attempt += 1
        if play.attempt <= self._limits.max_retries:
            self._reset(play)
        else:
            self._end(play, None, answer)

    def _end(self, play: _Play, reward: Reward | None, failure: EnvironmentFailure | None) -> None:
        with self._changed:
            if self._plays.pop(play.start.id, None) is None:
                return
        # Without effect where a failure ended it.
        self._pool.close(play.start.id)
        play.done(
            PlayedEpisode(
                play.start,
                play.conversation,
                "failed" if failure else play.ending,
                reward,
                failure,
                play.attempt,
                play.environment_s,
                play.tool_calls,
                play.tool_errors,
            )
        )
