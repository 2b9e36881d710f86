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
from threading import Condition, Lock
from typing import Any, Literal

from rlctl.data.chat import Chat, Prompt
from rlctl.data.files import DataError
from rlctl.environments.contract import EnvironmentContract, Message, Reward, opening
from rlctl.environments.outcomes import EnvironmentFailure, ToolResult
from rlctl.environments.pool import EnvironmentPool
from rlctl.environments.tool_calls import MalformedCall, parse_tool_calls
from rlctl.environments.tool_schema import Schema
from rlctl.generation.requests import Completion, RequestId, RolloutId, TurnRequest, turn_seed
from rlctl.rollout.conversation import Conversation, TrajectoryRow
from rlctl.rollout.patience import Clock, ThreadErrors
from rlctl.rollout.single_turn import Engines
from rlctl.rollout.types import Ending, PlayedEpisode, Rollout, RolloutStart, RolloutTaker
from rlctl.utils.user_code import shortened

_POLL_S = 1.0
_POOL_CLOSED = EnvironmentFailure("died", "the pool was closed")


@dataclass(frozen=True)
class EpisodeLimits:
    """Budgets of one episode."""

    max_turns: int
    # Tokens of a whole conversation.
    max_length: int
    # Seconds from the reset on.
    timeout_s: float
    # How often an episode is tried again after a failure.
    max_retries: int
    # keep: earlier turns stay as they were sampled. strip: they are written as the template writes them, which begins a
    # new row where the two differ.
    history: Literal["keep", "strip"]
    # Most tokens of all rows of an episode that trains, since a micro-batch must hold them; None: no bound.
    max_trained: int | None = None


@dataclass(eq=False)
class Play:
    """One episode under way."""

    start: RolloutStart
    taker: RolloutTaker
    # Its turns come before whatever waits for an engine.
    ahead: bool
    conversation: Conversation = field(default_factory=Conversation)
    # Node that the next turn follows.
    leaf: int = -1
    # Try under way, counted from 0: answers to an earlier one are dropped.
    attempt: int = 0
    # Messages of the first prompt.
    opening: int = 0
    ending: Ending = "failed"
    began: float = 0.0
    environment_s: float = 0.0
    # When the environment was asked what it has not answered yet.
    asked: float | None = None
    tool_calls: int = 0
    tool_errors: int = 0
    tool_raised: int = 0
    malformed_calls: int = 0
    # Control tokens that were spelled to the policy, and encoded as text.
    spelled: int = 0
    # Turns that engines sample, by number; more than one only of a rollout function.
    requests: dict[int, TurnRequest] = field(default_factory=dict)
    # Tokens that were sampled in this try.
    sampled: int = 0
    # Done in place of whatever comes next, once no engine samples for it any more.
    then: Callable[[], None] | None = None


class EpisodePlayer:
    """Plays episodes with a dispatcher's engines and a pool of environments, see `RolloutPlayer`."""

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
        self.aborted_tokens, self.last_step = 0, 0.0
        self._plays: dict[RolloutId, Play] = {}
        self._events: deque[tuple[Play, int, Callable[[], None]]] = deque()
        self._changed, self._closed = Condition(), False
        # Held while a transition is made: one that was begun must not submit a turn after an abort.
        self._moving = Lock()
        self._clock, self._errors = clock or Clock(), ThreadErrors(self._changed)
        self._thread = self._clock.spawn("episodes", self._errors.guarded(self.play_next))

    def play(self, starts: Sequence[RolloutStart], taker: RolloutTaker, *, ahead: bool = False) -> None:
        """Begin episodes; `taker` gets each as it ends, on the player's thread.

        Raises the error that ended that thread.
        """
        self.check()
        for start in starts:
            with self._changed:
                play = self._plays[start.id] = Play(start, taker, ahead)
            self._post(play, 0, partial(self._reset, play))

    def abort(self, ids: Collection[RolloutId]) -> list[RolloutId]:
        """Stop playing these episodes; none of them is handed out afterwards. Returns those that had not ended.

        Raises the error that ended the player's thread.
        """
        self.check()
        with self._moving, self._changed:
            plays = [play for each in ids if (play := self._plays.pop(each, None))]
        self._engines.abort([each.id for play in plays for each in play.requests.values()])
        self._engines.finish([play.start.id for play in plays])
        for play in plays:
            self.aborted_tokens += play.sampled
            self._pool.close(play.start.id)
        return [play.start.id for play in plays]

    def check(self) -> None:
        """Raise the error that ended the player's thread or an action of the pool, if there was one."""
        self._errors.check()
        self._pool.check()

    def describe(self) -> str:
        """Return how many episodes wait for their environment, and since when."""
        with self._changed:
            asked = [play.asked for play in self._plays.values() if play.asked is not None]
        if not asked:
            return ""
        longest = self._clock.now() - min(asked)
        return f"; {len(asked)} episodes wait for their environment, the longest for {longest:.0f} s"

    def close(self) -> None:
        """Play nothing from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(2 * _POLL_S)

    def completed(self, answers: list[tuple[TurnRequest, Completion]]) -> None:
        """Take sampled turns, see `engine_queue.Submitter`."""
        for request, completion in answers:
            if play := self._plays.get(request.id.rollout):
                self._post(play, play.attempt, partial(self._received, play, request.id.turn, completion))

    def restarted(self, requests: list[TurnRequest]) -> None:
        """Learn that turns are sampled again; the turns before them stay."""
        with self._changed:
            lost = dict.fromkeys(each.id.rollout for each in requests)
            plays = [play for each in lost if (play := self._plays.get(each))]
        for taker in {play.taker for play in plays}:
            taker.restarted([play.start.id for play in plays if play.taker is taker], afresh=False)

    def play_next(self) -> bool:
        """Handle what was posted next; return False at the end."""
        with self._changed:
            if not self._events and not self._closed:
                self._clock.wait(self._changed, _POLL_S)
            if self._closed or not self._events:
                return not self._closed
            play, attempt, handle = self._events.popleft()
        with self._moving:
            self.last_step = self._clock.now()
            if self._plays.get(play.start.id) is not play or attempt != play.attempt:
                return True
            try:
                handle()
            except DataError as error:
                # A row or a template that cannot be played: another try would end alike.
                failure = EnvironmentFailure("contract", str(error))
                self._pool.failures.add("rollout", failure, then="the episode is left out and counted")
                self._when_sampled(play, partial(self._end, play, None, failure))
        return True

    def _post(self, play: Play, attempt: int, handle: Callable[[], None]) -> None:
        with self._changed:
            self._events.append((play, attempt, handle))
            self._changed.notify_all()

    # Each of these is one transition; the environment's answers come back through `_ask`.

    def _reset(self, play: Play) -> None:
        play.began = self._clock.now()
        play.conversation, play.leaf, play.sampled = Conversation(), -1, 0
        future = self._pool.reset(play.start.id, play.start.task.row, play.start.group_seed)
        self._ask(play, future, self._opened)

    def _opened(self, play: Play, observation: Any) -> None:
        messages = opening(play.start.task.messages, observation)
        if not messages:
            raise DataError("the row has no prompt, and reset returned None: there is nothing to answer")
        play.conversation.messages, play.opening = list(messages), len(messages)
        prompt = self._rendered(messages, self._contract(play).tools)
        self._note_spelled(play, prompt.spelled)
        play.leaf = play.conversation.add_context(prompt.tokens, None)
        self._sample(play)

    def _sample(self, play: Play) -> None:
        """Sample the next turn, unless a budget is used up."""
        tokens, turn = play.conversation.tokens(play.leaf), play.conversation.turns
        if ending := self._used_up(play, turn, len(tokens)):
            self._score(play, ending)
        else:
            self._submit(play, [self._request(play, turn, tokens)])

    def _used_up(self, play: Play, turn: int, length: int) -> Ending | None:
        """Return the budget that allows no turn of this number after so many tokens, as an ending."""
        limits = self._limits
        if turn >= limits.max_turns:
            return "max_turns"
        if length >= limits.max_length or play.start.max_new_tokens < 1:
            return "max_length"
        return "time" if self._clock.now() - play.began > limits.timeout_s else None

    def _request(self, play: Play, turn: int, tokens: list[int]) -> TurnRequest:
        start = play.start
        room = min(start.max_new_tokens, self._limits.max_length - len(tokens))
        return TurnRequest(RequestId(start.id, turn), tokens, room, start.temperature, turn_seed(start.seed, turn))

    def _submit(self, play: Play, requests: list[TurnRequest]) -> None:
        play.requests |= {each.id.turn: each for each in requests}
        self._engines.submit(requests, self, ahead=play.ahead, more=self._limits.max_turns > 1)

    def _received(self, play: Play, turn: int, completion: Completion) -> None:
        """Take a turn from an engine."""
        del play.requests[turn]
        play.sampled += len(completion.tokens)
        if play.then is None:
            self._answered(play, turn, completion)
        elif not play.requests:
            play.then()

    def _when_sampled(self, play: Play, then: Callable[[], None]) -> None:
        """Have nothing but `then` happen to an episode, once the turns have ended that engines sample for it.

        An abort would have to wait for the engines too: the same requests may be submitted again, and engines that
        sleep must be idle.
        """
        play.then = play.then or then
        if not play.requests:
            play.then()

    def _answered(self, play: Play, turn: int, completion: Completion) -> None:
        play.leaf = play.conversation.add_turn(completion, play.leaf)
        text = self._chat.turn_text(completion.tokens.tolist())
        message: Message = {"role": "assistant", "content": text}
        play.conversation.messages.append(message)
        contract = self._contract(play)
        calls = parse_tool_calls(text, self._format, contract.tools).calls if self._format and contract.tools else []
        if calls:
            play.tool_calls += len(calls)
            play.malformed_calls += sum(isinstance(each, MalformedCall) for each in calls)
            self._ask(play, self._pool.call(play.start.id, calls), self._tools_answered)
        elif contract.has_step:
            self._ask(play, self._pool.step(play.start.id, text), self._stepped)
        else:
            self._score(play, "answered")

    def _tools_answered(self, play: Play, results: list[ToolResult]) -> None:
        play.tool_errors += sum(each.failed for each in results)
        play.tool_raised += sum(bool(each.raised) for each in results)
        self._go_on(play, [each.message() for each in results])

    def _stepped(self, play: Play, answer: str | None) -> None:
        if answer is None:
            self._score(play, "done")
        else:
            self._go_on(play, [{"role": "user", "content": answer}])

    def _go_on(self, play: Play, added: list[Message]) -> None:
        """Add what was said after the last turn, and sample the next one."""
        one, limits = play.conversation, self._limits
        before, last = one.messages[:-1], one.completions[-1].tokens.tolist()
        one.messages.extend(added)
        self._note_spelled(play, self._chat.spelled(added))
        link = self._chat.link(before, added, self._contract(play).tools).after(last, self._stops)
        if limits.history == "strip" and one.turns < limits.max_turns:
            rendered = self._rendered(one.messages, self._contract(play).tools).tokens
            if rendered != one.tokens(play.leaf) + link:
                play.leaf = one.add_context(rendered, None)
                self._sample(play)
                return
        play.leaf = one.add_context(link, play.leaf)
        self._sample(play)

    def _rendered(self, messages: list[Message], tools: list[Schema]) -> Prompt:
        """Return a prompt. Raises DataError for messages that the chat template refuses."""
        try:
            return self._chat.prompt(messages, tools)
        except DataError:
            raise
        except Exception as error:  # whatever a template raises, or a tokenizer for text that is none
            reason = shortened(f"{type(error).__name__}: {error}")
            raise DataError(f"the chat template refuses the messages of this episode: {reason}") from error

    def _note_spelled(self, play: Play, spelled: list[str]) -> None:
        play.spelled += len(spelled)
        if spelled:
            what = f"spells {spelled[0]}, which is encoded as text and not as that control token"
            mend = "counted in environment/spelled_tokens; data.special_tokens=allow makes tokens of them"
            self._pool.failures.note(self._pool.key_of(play.start.task.row), f"{what}; {mend}")

    def _contract(self, play: Play) -> EnvironmentContract:
        """Return the contract of an episode's environment, once its reset has shown that there is one."""
        return self._contracts[self._pool.key_of(play.start.task.row)]

    def _score(self, play: Play, ending: Ending) -> None:
        play.ending = ending
        contract = self._contract(play)
        if contract.rewards:
            messages, row = play.conversation.messages, play.start.task.row
            said = {"prompts": messages[: play.opening], "completions": messages[play.opening :]}
            self._ask(play, self._pool.reward(play.start.id, {**row, **said}), self._scored)
        elif contract.has_reward:
            self._ask(play, self._pool.reward(play.start.id), self._scored)
        else:
            self._end(play, None, None)

    def _scored(self, play: Play, reward: Reward) -> None:
        self._end(play, reward, None)

    def _ask(self, play: Play, future: Any, handle: Callable[[Play, Any], None], *, waits_for_it: bool = True) -> None:
        """Have `handle` called with the environment's answer, on the player's thread.

        waits_for_it: the episode waits for nothing else, so that the time is the environment's.
        """
        asked, attempt = self._clock.now(), play.attempt
        if waits_for_it:
            play.asked = asked

        def answered(done: Any) -> None:
            seconds = self._clock.now() - asked if waits_for_it else None
            self._post(play, attempt, partial(self._told, play, done, seconds, handle))

        future.add_done_callback(answered)

    def _told(self, play: Play, done: Any, seconds: float | None, handle: Callable[[Play, Any], None]) -> None:
        # On the player's thread: a callback's error would be lost, and the episode would wait for ever.
        answer = _POOL_CLOSED if done.cancelled() else done.result()
        if seconds is not None:
            play.environment_s += seconds
            play.asked = None
        if play.then is not None:
            return
        if isinstance(answer, EnvironmentFailure):
            self._when_sampled(play, partial(self._try_again, play, answer))
        else:
            handle(play, answer)

    def _try_again(self, play: Play, failure: EnvironmentFailure) -> None:
        """Play an episode again from its task, unless that was its last try."""
        play.then = None
        play.attempt += 1
        if play.attempt <= self._limits.max_retries:
            self._reset(play)
        else:
            self._end(play, None, failure)

    def _end(self, play: Play, reward: Reward | None, failure: EnvironmentFailure | None) -> None:
        with self._changed:
            del self._plays[play.start.id]
        # Without effect where a failure ended it.
        self._pool.close(play.start.id)
        self._engines.finish([play.start.id])
        one = play.conversation
        rows = [] if failure else one.rows()
        if failure := failure or self._too_long(play, rows):
            rows, reward = [], None
        episode = PlayedEpisode(
            one.messages,
            play.opening,
            "failed" if failure else play.ending,
            one.turns,
            reward,
            str(failure) if failure else None,
            play.attempt,
            play.environment_s,
            play.tool_calls,
            play.tool_errors,
            play.tool_raised,
            play.spelled,
            play.malformed_calls,
        )
        finish = one.completions[-1].finish if one.turns else "stop"
        play.taker.ended([Rollout(play.start.id, rows, finish, episode=episode)])

    def _too_long(self, play: Play, rows: list[TrajectoryRow]) -> EnvironmentFailure | None:
        """Return why an episode cannot train, if no micro-batch holds it; the first one is told."""
        most, tokens = self._limits.max_trained, sum(len(row.tokens) for row in rows)
        if most is None or len(rows) < 2 or tokens <= most or play.start.id.purpose != "train":
            return None
        cause = f"rows of an episode have more tokens than a micro-batch, {most}, and grpo.loss needs whole rollouts"
        remedy = f"{len(rows)} rows of {tokens}; raise trainer.micro_batch_tokens or lower environment.max_turns"
        failure = EnvironmentFailure("too_long", cause, remedy)
        self._pool.failures.add("history", failure, then="the episode is left out and counted")
        return failure
