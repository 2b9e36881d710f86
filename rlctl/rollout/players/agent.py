"""Player of agents: a program that knows nothing of rlctl asks for turns by HTTP (contracts 4 and 11).

The agent's process places each request in the tree of its session (environments/agents/). Here the tree has the exact
tokens: a request names the turn that it continues, and brings the tokens behind it. A turn becomes a node once the
agent got it, so that one that was lost on the way, or asked for twice, trains once or not at all.
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

# Rows of an episode, on average over some episodes, above which the cause is told.
_MANY_ROWS, _EPISODES = 1.5, 8
# Names of a run's counts, and its causes of further rows: clients choose a part of them.
_MOST_NAMES, _OTHERS = 64, "ignored/others"


class AgentPlayer(Player):
    """Plays rollouts by runs of the pool's agent. Deadlines, retries, budgets and aborts are those of an episode.

    must_value, vocabulary: as of `FunctionPlayer`. most: agents that run at one time; others wait for their turn.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        chat: Chat,
        limits: EpisodeLimits,
        must_value: bool = False,
        vocabulary: int = 1 << 31,
        most: int | None = None,
    ) -> None:
        self.chat, self.tries = chat, EpisodeTries(pool, limits)
        self.must_value, self.vocabulary = must_value, vocabulary
        self.several_turns = limits.max_turns > 1
        self._room = asyncio.Semaphore(most) if most else None
        self._rows = Counter[str]()
        self._causes = Counter[str]()
        self._names: set[str] = {_OTHERS}

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
        """Run the agent once. Its room is free again when nothing of it runs, which may be after its failure."""
        if self._room is None:
            return await AgentCall(self, episode, policy).play()
        await self._room.acquire()
        episode.began = asyncio.get_running_loop().time()
        try:
            return await AgentCall(self, episode, policy).play()
        finally:
            self.tries.pool.close(episode.start.id).add_done_callback(lambda _: self._leave_room())

    def _leave_room(self) -> None:
        assert self._room
        # The pool may end on another thread.
        self.tries.pool.events.call(self._room.release)

    def note_causes(self, rewritten: dict[str, int]) -> None:
        """Count why requests of an agent continued no turn."""
        known = {why: count for why, count in rewritten.items() if why in self._causes}
        self._causes.update(rewritten if len(self._causes) < _MOST_NAMES else known)

    def named(self, counts: Mapping[str, int]) -> dict[str, float]:
        """Name counts by the first names of the run; those of further names are one."""
        found = Counter[str]()
        for name, count in counts.items():
            if len(self._names) < _MOST_NAMES:
                self._names.add(name)
            # A name without a slash is rlctl's own.
            found[name if name in self._names or "/" not in name else _OTHERS] += count
        return dict(found)

    def _note_rows(self, rollout: Rollout) -> None:
        """Tell once that episodes train as several rows, with the most common cause."""
        if rollout.rows:
            self._rows += Counter(episodes=1, rows=len(rollout.rows))
        mean = self._rows["rows"] / max(1, self._rows["episodes"])
        if self._rows["episodes"] >= _EPISODES and mean > _MANY_ROWS and self._causes:
            ((cause, _),) = self._causes.most_common(1)
            what = f"its episodes train as {mean:.1f} rows each (agent/rows_per_episode), since it rewrites its history"
            self.tries.pool.failures.note("agent", f"{what}: {cause}")


@dataclass(eq=False)
class PendingTurn:
    """One turn that an agent asked for, and did not get so far."""

    ask: AgentAsk
    # The turn, or the budget that was used up; None while an engine samples.
    answer: Completion | Ending | None
    # Time of the request, by the event loop's clock.
    asked: float


class AgentCall:
    """One run of an agent, as the driver sees it."""

    def __init__(self, player: AgentPlayer, episode: EpisodeState, policy: Policy) -> None:
        self._player, self._episode = player, episode
        self._call = RunningCall[AgentMessage, PendingTurn](player.tries, episode, policy)
        # By the number of the request: turns on their way to the agent, and nodes of delivered turns.
        self._pending: dict[int, PendingTurn] = {}
        self._nodes: dict[int, int] = {}
        # Numbers of requests whose answers are to be sent.
        self._ready: list[int] = []

    async def play(self) -> Reward | None:
        """Run the agent; return its value. Raises DataError for a wrong one, EpisodeFailed if its process fails.

        No engine samples for the agent any more then: the same requests may be submitted again.
        """
        self._episode.ending, self._episode.opening = "done", 0
        async with self._call:
            self._begin_agent()
            while True:
                completions, message = await self._call.wait()
                for turn, completion in completions:
                    self._note_sampled(turn, completion)
                match message:
                    case AgentEnded():
                        self._take_turns(message.kept)
                        self._take_counts(message)
                        return self._checked_reward(message)
                    case AgentWaits():
                        self._take_turns(message.kept)
                        self._sample_asks(message.asks)
                self._send_answers()

    def _begin_agent(self) -> None:
        start = self._episode.start
        task = start.task
        fields = {"id": task.id, "prompt": task.text, "messages": task.messages, "answer": task.answer, "row": task.row}
        self._call.act(self._player.tries.pool.begin_agent(start.id, fields, start.group_seed), waits=True)

    def _note_sampled(self, turn: PendingTurn, completion: Completion) -> None:
        turn.answer = completion
        waited = asyncio.get_running_loop().time() - turn.asked
        self._episode.longest_turn_s = max(self._episode.longest_turn_s, waited)
        self._ready.append(turn.ask.number)

    def _take_turns(self, kept: list[tuple[int, int]]) -> None:
        """Put the turns that the agent got into the tree. kept: number of the request, tokens that are left."""
        one = self._episode.conversation
        chat = self._player.chat
        for number, length in kept:
            turn = self._pending.pop(number, None)
            if turn is None or not isinstance(turn.answer, Completion) or length > len(turn.answer.tokens):
                raise DataError("the agent's process kept a turn that it never got")
            parent = one.add_context(turn.ask.tokens, self._parent(turn.ask))
            self._nodes[number] = one.add_turn(_cut_turn(turn.answer, length), parent)
            one.messages += turn.ask.messages
            self._episode.opening = self._episode.opening or len(one.messages)
            one.messages.append({"role": "assistant", "content": chat.turn_text(turn.answer.tokens[:length].tolist())})

    def _sample_asks(self, asks: list[AgentAsk]) -> None:
        """Sample the turns that the agent asks for, within the budgets."""
        episode = self._episode
        vocabulary = self._player.vocabulary
        for ask in asks:
            parent = self._parent(ask)
            tokens = [*(episode.conversation.tokens(parent) if parent is not None else ()), *ask.tokens]
            if not tokens or not 0 <= min(ask.tokens, default=0) <= max(ask.tokens, default=0) < vocabulary:
                raise DataError("the agent's process asked for a turn after ids that are no tokens, or after none")
            now = asyncio.get_running_loop().time()
            turn = PendingTurn(ask, episode.used_up(self._call.turns, len(tokens), now), now)
            self._pending[ask.number] = turn
            if turn.answer is not None:
                episode.ending = turn.answer if isinstance(turn.answer, str) else episode.ending
                self._ready.append(ask.number)
                continue
            request = replace(episode.request(self._call.turns, tokens), stops=tuple(ask.stops))
            if ask.most is not None:
                request = replace(request, max_new_tokens=min(request.max_new_tokens, ask.most))
            self._call.sample(turn, request)

    def _parent(self, ask: AgentAsk) -> int | None:
        if ask.after is None:
            return None
        if ask.after not in self._nodes:
            raise DataError("the agent's process continued a turn that it never got")
        return self._nodes[ask.after]

    def _send_answers(self) -> None:
        """Send the turns that are there, and listen: an agent may ask at any time."""
        answers = [(number, _agent_answer(self._pending[number])) for number in self._ready]
        self._ready = []
        if answers or not self._call.has_action:
            waits = self._call.num_sampling > 0
            pool = self._player.tries.pool
            self._call.act(pool.resume_agent(self._episode.start.id, answers, waits=waits), waits=not waits)

    def _take_counts(self, message: AgentEnded) -> None:
        """Take the counts of the agent's session into the episode."""
        episode = self._episode
        counts = self._player.named(message.counts)
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
        """Return the value that the agent gave its rollout."""
        episode = self._episode
        if not episode.conversation.turns:
            if episode.ending != "done":
                raise DataError(f"the agent's first prompt met a budget ({episode.ending}): nothing was sampled")
            raise DataError(f"the agent ended without a turn: {KEY_HINT}")
        if message.reward is None and self._player.must_value:
            if message.raised:
                raise DataError(
                    f"a budget was used up ({episode.ending}), and the agent then failed: {message.raised}; catch the "
                    "error and return a value, or name rewards"
                )
            raise DataError("the agent gave no value, and rewards is empty: nothing values the rollout")
        return message.reward


_HOW = {
    "overridden": "is not used: the run decides how the policy samples",
    "unenforced": "is not enforced: another distribution would be sampled",
    "ignored": "is not known here",
}


def agent_notes(counts: Mapping[str, float], rewritten: Mapping[str, int]) -> list[str]:
    """Return lines for a person on requests that were not honoured, or continued no turn."""
    lines = []
    for name, count in counts.items():
        how, _, parameter = name.partition("/")
        if how in _HOW:
            lines.append(f"requests: {parameter} {_HOW[how]}")
        elif name in ("refused", "coalesced"):
            what = "were refused" if name == "refused" else "repeated another, and got its turn"
            lines.append(f"requests: {count:g} {what}")
    lines += [f"requests: {count} began another row: {why}" for why, count in rewritten.items()]
    if others := counts.get("rewritten", 0) - sum(rewritten.values()):
        lines.append(f"requests: {others:g} began another row for further reasons")
    return lines


def most_agents(section: AgentSection) -> int | None:
    """Return the agents that run at one time; None for any number, since a function needs no process."""
    if section.command is None:
        return None
    return 8 * usable_cores() if section.max_processes == "auto" else section.max_processes


def _cut_turn(answer: Completion, length: int) -> Completion:
    """Return the first tokens of a turn."""
    if length == len(answer.tokens):
        return answer
    return Completion(answer.tokens[:length], answer.log_probs[:length], answer.versions[:length], "stop")


def _agent_answer(turn: PendingTurn) -> AgentAnswer:
    """Return the answer to a request as the agent's process takes it."""
    answer = turn.answer
    assert answer is not None
    if isinstance(answer, Completion):
        return AgentTurn(answer.tokens.tolist(), answer.log_probs.tolist(), answer.finish)
    return answer
