"""One call of an agent in its process: a thread, or a command, and its session at the endpoint.

    begin  -> the agent runs until it asks for a turn   -> {"asks": ..., "kept": ...} or {"ended": ..., ...}
    resume -> it gets turns, and runs on                -> likewise

An agent may ask from any thread. Its first request is told at once, so that turns are numbered in the order in which
they arrive.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from rlctl.data.chat import Chat
from rlctl.environments.agents.endpoint import Endpoint
from rlctl.environments.agents.news import AgentTask
from rlctl.environments.agents.session import AgentAnswer, AgentSession
from rlctl.environments.contract import ContractError, EnvironmentContract, checked_reward
from rlctl.environments.episode import Reply
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.utils.user_code import error_text, shortened, trace_of

# Ends the agent's run; called on the endpoint's loop with its value or failure.
Ended = Callable[[Any], None]
# Starts an agent: task, base address, key, generator of its seed, end. Returns the way to stop it.
StartAgent = Callable[[AgentTask, str, str, random.Random, Ended], Callable[[], None]]


def agent_contract(name: str, problems: list[str]) -> EnvironmentContract:
    """Return the contract of an agent, which has no methods that the policy sees."""
    return EnvironmentContract(name, [], False, True, False, problems, [], is_agent=True)


class AgentEpisode:
    """One call of an agent. It has the methods of `Episode`.

    One action at a time is open. It is replied to when there is something to tell, or when the next one comes.
    """

    def __init__(
        self, start: StartAgent, endpoint: Endpoint, chat: Chat, tool_format: str | None, reply: Reply
    ) -> None:
        self._start, self._endpoint, self._reply = start, endpoint, reply
        self._session = AgentSession(chat, tool_format, self._look)
        self._open: int | None = None
        self._stop: Callable[[], None] = lambda: None
        self._ended, self._outcome = False, None

    def start(self) -> None:
        """Start nothing: the endpoint runs already."""

    def submit(self, action: int, kind: str, payload: Any) -> None:
        """Do an action: begin, resume or close."""
        self._endpoint.loop.call_soon_threadsafe(self._contained, partial(self._act, action, kind, payload))

    def _contained(self, work: Callable[[], None]) -> None:
        """Do a part of an action. Its error is the reply: nobody may wait for one in vain."""
        try:
            work()
        except Exception as error:
            if self._open is not None:
                action, self._open = self._open, None
                cause = f"the agent's session failed with {type(error).__name__}"
                self._reply(action, EnvironmentFailure("raised", cause, error_text(error), trace_of(error)))

    def _act(self, action: int, kind: str, payload: Any) -> None:
        if self._open is not None:
            self._tell()
        if kind == "close":
            self._endpoint.close(self._session)
            self._stop()
            self._reply(action, None)
            return
        self._open = action
        if kind == "begin":
            task, seed = payload
            self._endpoint.open(self._session)
            own = (self._endpoint.url(self._session), self._session.secret, random.Random(seed))
            self._stop = self._start(AgentTask(**task), *own, self._end)
        else:
            self._take(payload)
        self._look()

    def _take(self, answers: list[tuple[int, AgentAnswer]]) -> None:
        for number, answer in answers:
            self._session.answer(number, answer)

    def _end(self, outcome: Any) -> None:
        """Learn that the agent has ended: its session takes nothing more."""
        self._ended, self._outcome = True, outcome
        self._endpoint.close(self._session)
        self._look()

    def _look(self) -> None:
        if self._open is not None and (self._ended or self._session.has_asked):
            self._tell()

    def _tell(self) -> None:
        """Reply to the action that is open."""
        assert self._open is not None
        action, self._open = self._open, None
        news = self._session.tell()
        if not self._ended:
            self._reply(action, news)
            return
        outcome, session, raised = self._outcome, self._session, ""
        if isinstance(outcome, EnvironmentFailure):
            if not session.budget:
                self._reply(action, outcome)
                return
            # The agent met the end of a budget: that is no failure.
            outcome, raised = None, str(outcome)
        try:
            reward = None if outcome is None else checked_reward(outcome, "the agent")
        except ContractError as error:
            self._reply(action, EnvironmentFailure("contract", "the agent broke the contract", shortened(str(error))))
            return
        ended = {
            "ended": True,
            "reward": session.reward if reward is None else reward,
            "raised": raised,
            "counts": {name: count for name, count in session.counts.items() if count},
            "rewritten": dict(session.rewritten.most_common(8)),
        }
        self._reply(action, {**news, **ended})
