"""Player of agents: programs that know nothing of rlctl and ask for turns by HTTP (contracts 4 and 11).

The agent's process finds the turn that each request continues (environments/agents/). This module keeps the tree of
turns with exact tokens: a request names the turn that it continues, and has the new tokens. A turn becomes a node once
the agent has received it. So a lost answer is not trained, and the answer to a repeated request is trained once.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlctl.config.environment_schema import AgentSection
from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.environments.contract import Reward
from rlctl.environments.environment_pool import EnvironmentPool
from rlctl.environments.messages import AgentAnswer, AgentAsk, AgentEnded, AgentMessage, AgentTurn, AgentWaits
from rlctl.environments.outcomes import KEY_HINT
from rlctl.generation.requests import Completion
from rlctl.rollout.players.episode_state import EpisodeLimits, EpisodeState
from rlctl.rollout.players.episode_tries import EpisodeTries
from rlctl.rollout.players.running_call import RunningCall
from rlctl.rollout.policy import Player, Policy
from rlctl.rollout.types import Ending, Rollout, RolloutStart
from rlctl.utils.devices import usable_cores

# The user is warned if episodes have more training rows than this on average, over at least this number of episodes.
_MANY_ROWS = 1.5
_MIN_EPISODES = 8
# The most names of counts in a run, and the most causes of further rows. Agents could invent any number of names.
_MAX_NAMES = 64
# Name under which all counts beyond the limit are summed.
_FURTHER_NAMES = "ignored/others"


class AgentPlayer(Player):
    """Plays rollouts by runs of the pool's agent. Deadlines, retries, budgets and aborts are those of an episode.

    needs_reward, num_token_ids: see `FunctionPlayer`. max_agents: most agents that run at a time; further ones wait.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        chat: Chat,
        limits: EpisodeLimits,
        needs_reward: bool = False,
        num_token_ids: int = 1 << 31,
        max_agents: int | None = None,
    ) -> None:
        self.chat = chat
        self.tries = EpisodeTries(pool, limits)
        self.needs_reward = needs_reward
        self.num_token_ids = num_token_ids
        self.several_turns = limits.max_turns > 1
        self._room = asyncio.Semaphore(max_agents) if max_agents else None
        # Number of episodes that have rows, and number of their rows.
        self._num_episodes = 0
        self._num_rows = 0
        self._causes = Counter[str]()
        self._names: set[str] = {_FURTHER_NAMES}

    @property
    def last_step(self) -> float:
        return self.tries.last_step

    def describe(self) -> str:
        return self.tries.describe()

    async def play(self, start: RolloutStart, policy: Policy) -> Rollout:
        rollout = await self.tries.play(start, lambda episode: self._run_once(episode, policy))
        self._note_rows(rollout)
        return rollout

    async def _run_once(self, episode: EpisodeState, policy: Policy) -> Reward | None:
        """Run the agent once. Its place among `max_agents` is free again when its processes have ended."""
        room = self._room
        if room is None:
            return await AgentCall(self, episode, policy).play()
        await room.acquire()
        episode.began = asyncio.get_running_loop().time()  # The time budget does not count the wait for a place.
        pool = self.tries.pool
        try:
            return await AgentCall(self, episode, policy).play()
        finally:
            # The pool may call back on another thread.
            pool.close(episode.start.id).add_done_callback(lambda _: pool.events.call(room.release))

    def note_causes(self, rewritten: dict[str, int]) -> None:
        """Count the reasons why requests of an agent continued no turn. rewritten: reason -> number of requests."""
        may_add = len(self._causes) < _MAX_NAMES
        for cause, count in rewritten.items():
            if may_add or cause in self._causes:
                self._causes[cause] += count

    def merge_names(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Return the counts by name. Counts of names beyond the run's first `_MAX_NAMES` are summed under one name."""
        merged = Counter[str]()
        for name, count in counts.items():
            if len(self._names) < _MAX_NAMES:
                self._names.add(name)
            # A name without a slash comes from rlctl, not from an agent.
            merged[name if name in self._names or "/" not in name else _FURTHER_NAMES] += count
        return dict(merged)

    def _note_rows(self, rollout: Rollout) -> None:
        """Warn once if episodes train as several rows each. The warning names the most common cause."""
        if rollout.rows:
            self._num_episodes += 1
            self._num_rows += len(rollout.rows)
        mean = self._num_rows / max(1, self._num_episodes)
        if self._num_episodes >= _MIN_EPISODES and mean > _MANY_ROWS and self._causes:
            ((cause, _),) = self._causes.most_common(1)
            text = f"its episodes train as {mean:.1f} rows each (agent/rows_per_episode), since it rewrites its history"
            self.tries.pool.failures.note("agent", f"{text}: {cause}")


@dataclass(eq=False)
class PendingTurn:
    """One turn that an agent asked for and has not received yet."""

    ask: AgentAsk
    # The turn, or the budget that was used up; None while an engine samples the turn.
    answer: Completion | Ending | None
    # Time of the request, by the event loop's clock.
    asked_at: float


class AgentCall:
    """The driver's side of one run of an agent."""

    def __init__(self, player: AgentPlayer, episode: EpisodeState, policy: Policy) -> None:
        self._player = player
        self._episode = episode
        self._call = RunningCall[AgentMessage, PendingTurn](player.tries, episode, policy)
        # Request's number -> turn that the agent has not received, and request's number -> node of a received turn.
        self._pending: dict[int, PendingTurn] = {}
        self._nodes: dict[int, int] = {}
        # Numbers of the requests whose answers must be sent next.
        self._ready: list[int] = []

    async def play(self) -> Reward | None:
        """Run the agent; return its reward. Raises DataError for a wrong reward, EpisodeFailed if its process fails.

        When this method ends, no engine samples for the agent: the same requests may be submitted again.
        """
        self._episode.ending = "done"
        self._episode.opening = 0
        async with self._call:
            self._begin_agent()
            while True:
                completions, message = await self._call.wait()
                for turn, completion in completions:
                    self._note_sampled(turn, completion)
                match message:
                    case AgentEnded():
                        self._take_turns(message.delivered)
                        self._take_counts(message)
                        return self._checked_reward(message)
                    case AgentWaits():
                        self._take_turns(message.delivered)
                        self._sample_asks(message.asks)
                self._send_answers()

    def _begin_agent(self) -> None:
        start = self._episode.start
        task = start.task
        fields = {"id": task.id, "prompt": task.text, "messages": task.messages, "answer": task.answer, "row": task.row}
        self._call.act(self._player.tries.pool.begin_agent(start.id, fields, start.group_seed), waits=True)

    def _note_sampled(self, turn: PendingTurn, completion: Completion) -> None:
        turn.answer = completion
        waited = asyncio.get_running_loop().time() - turn.asked_at
        self._episode.longest_turn_s = max(self._episode.longest_turn_s, waited)
        self._ready.append(turn.ask.number)

    def _take_turns(self, lengths: list[tuple[int, int]]) -> None:
        """Add the turns that the agent received to the tree. lengths: (request's number, number of tokens to keep)."""
        conversation = self._episode.conversation
        for number, length in lengths:
            turn = self._pending.pop(number, None)
            if turn is None or not isinstance(turn.answer, Completion) or length > len(turn.answer.tokens):
                raise DataError("the agent's process kept a turn that it never got")
            parent = conversation.add_context(turn.ask.tokens, self._find_parent(turn.ask))
            self._nodes[number] = conversation.add_turn(turn.answer.shorten(length), parent)
            conversation.messages += turn.ask.messages
            self._episode.opening = self._episode.opening or len(conversation.messages)
            text = self._player.chat.turn_text(turn.answer.tokens[:length].tolist())
            conversation.messages.append({"role": "assistant", "content": text})

    def _sample_asks(self, asks: list[AgentAsk]) -> None:
        """Sample the turns that the agent asks for, within the budgets."""
        episode = self._episode
        for ask in asks:
            parent = self._find_parent(ask)
            tokens = ask.tokens if parent is None else episode.conversation.tokens(parent) + ask.tokens
            if not tokens:
                raise DataError("the agent asked for a turn, and its messages have no text: a prompt needs a token")
            if not 0 <= min(ask.tokens, default=0) <= max(ask.tokens, default=0) < self._player.num_token_ids:
                raise DataError("the agent's process asked for a turn after ids that are no tokens")
            now = asyncio.get_running_loop().time()
            turn = PendingTurn(ask, episode.used_up(self._call.turns, len(tokens), now), now)
            self._pending[ask.number] = turn
            if turn.answer is not None:
                if isinstance(turn.answer, str):
                    episode.ending = turn.answer
                self._ready.append(ask.number)
                continue
            request = replace(episode.request(self._call.turns, tokens), stops=tuple(ask.stops))
            if ask.max_tokens is not None:
                request = replace(request, max_new_tokens=min(request.max_new_tokens, ask.max_tokens))
            self._call.sample(turn, request)

    def _find_parent(self, ask: AgentAsk) -> int | None:
        if ask.after is None:
            return None
        if ask.after not in self._nodes:
            raise DataError("the agent's process continued a turn that it never got")
        return self._nodes[ask.after]

    def _send_answers(self) -> None:
        """Send the sampled turns, and wait for the agent's next message: it may ask for further turns at any time."""
        answers = [(number, _agent_answer(self._pending[number])) for number in self._ready]
        self._ready = []
        if answers or not self._call.has_action:
            is_sampling = self._call.num_sampling > 0  # Time then does not count as the environment's.
            action = self._player.tries.pool.resume_agent(self._episode.start.id, answers, waits=is_sampling)
            self._call.act(action, waits=not is_sampling)

    def _take_counts(self, message: AgentEnded) -> None:
        """Add the counts of the agent's session to the episode."""
        episode = self._episode
        counts = self._player.merge_names(message.counts)
        episode.tool_calls += int(counts.pop("tool_calls", 0))
        malformed = int(counts.pop("malformed_calls", 0))
        episode.malformed_calls += malformed
        episode.tool_errors += malformed
        episode.spelled += int(counts.pop("spelled", 0))
        self._player.tries.note_unwritten(episode, int(counts.pop("unwritten", 0)))
        episode.counts = counts
        episode.rewritten = message.rewritten
        self._player.note_causes(episode.rewritten)

    def _checked_reward(self, message: AgentEnded) -> Reward | None:
        """Return the reward that the agent gave its rollout. Raises DataError if it may not be None and is."""
        episode = self._episode
        if not episode.conversation.turns:
            if episode.ending != "done":
                raise DataError(f"the agent's first prompt met a budget ({episode.ending}): nothing was sampled")
            raise DataError(f"the agent ended without a turn: {KEY_HINT}")
        if message.reward is None and self._player.needs_reward:
            if message.raised:
                raise DataError(
                    f"a budget was used up ({episode.ending}), and the agent then failed: {message.raised}; catch the "
                    "error and return a value, or name rewards"
                )
            raise DataError("the agent gave no value, and rewards is empty: nothing values the rollout")
        return message.reward


# First part of a count's name -> what happens to this parameter of a request.
_PARAMETER_FATES = {
    "overridden": "is not used: the run decides how the policy samples",
    "unenforced": "is not enforced: another distribution would be sampled",
    "ignored": "is not known here",
}


def agent_notes(counts: Mapping[str, float], rewritten: Mapping[str, int]) -> list[str]:
    """Return a line for the user on each kind of request that was refused, changed, or began another row."""
    lines = []
    for name, count in counts.items():
        fate, _, parameter = name.partition("/")
        if fate in _PARAMETER_FATES:
            lines.append(f"requests: {parameter} {_PARAMETER_FATES[fate]}")
        elif name == "refused":
            lines.append(f"requests: {count:g} were refused")
        elif name == "coalesced":
            lines.append(f"requests: {count:g} repeated another, and got its turn")
    lines += [f"requests: {count} began another row: {cause}" for cause, count in rewritten.items()]
    if unexplained := counts.get("rewritten", 0) - sum(rewritten.values()):
        lines.append(f"requests: {unexplained:g} began another row for further reasons")
    return lines


def most_agents(section: AgentSection) -> int | None:
    """Return how many agents may run at a time; None: any number, since an agent function needs no process."""
    if section.command is None:
        return None
    return 8 * usable_cores() if section.max_processes == "auto" else section.max_processes


def _agent_answer(turn: PendingTurn) -> AgentAnswer:
    """Return a turn's answer in the form that the agent's process expects."""
    answer = turn.answer
    assert answer is not None
    if isinstance(answer, Completion):
        return AgentTurn(answer.tokens.tolist(), answer.log_probs.tolist(), answer.finish)
    return answer
