"""One run of an agent in an environment process: a thread or a command, and its session at the endpoint.

    BeginAgent  -> the agent runs until it asks for a turn   -> AgentWaits or AgentEnded
    ResumeAgent -> the agent gets turns, and runs on         -> AgentWaits or AgentEnded

An agent may send requests from any thread. Each request goes to the driver at once, and requests are numbered in the
order of their arrival. A close is answered once the thread or the command has ended. If an agent has not ended at the
deadline of the close, its process gets no new episodes.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlctl.data.chat import Chat
from rlctl.environments.agents.agent_session import AgentSession
from rlctl.environments.agents.endpoint import Endpoint
from rlctl.environments.contract import ContractError, EnvironmentContract, Message, check_reward
from rlctl.environments.episode import OpenAction, Reply
from rlctl.environments.messages import AgentEnded, BeginAgent, CloseEpisode, EpisodeMessage, ResumeAgent
from rlctl.environments.outcomes import NOT_STARTED, UNREACHED, EnvironmentFailure
from rlctl.utils.user_code import looks_like_bug, shorten_text


@dataclass(frozen=True)
class AgentTask:
    """The task of one rollout, as an agent gets it."""

    # Number of the row, for example `r17`.
    id: str
    # Text of the row's prompt; empty if the row has none.
    prompt: str
    # Messages of the row's prompt; empty if the row has none.
    messages: list[Message]
    answer: str | None
    # All columns of the row.
    row: dict[str, Any]


@dataclass(frozen=True)
class AgentLaunch:
    """Arguments with which an agent's function or command is started."""

    task: AgentTask
    # Address of the agent's session at the endpoint.
    base_url: str
    # Key of the session.
    api_key: str
    # Random generator with the group's seed.
    generator: random.Random
    # Takes the agent's value or failure at its end. Called on `loop`.
    on_end: Callable[[Any], None]
    # Event loop of the endpoint.
    loop: asyncio.AbstractEventLoop


# Starts an agent. Returns a function that stops it.
StartAgent = Callable[[AgentLaunch], Callable[[], None]]


def agent_contract(name: str, problems: list[str]) -> EnvironmentContract:
    """Return an agent's contract, which has no tools and no `step`."""
    return EnvironmentContract(
        name=name, tools=[], has_step=False, has_reward=True, problems=problems, notes=[], is_agent=True
    )


class AgentEpisode:
    """One run of an agent. start: starts the agent's function or command."""

    def __init__(
        self, start: StartAgent, endpoint: Endpoint, chat: Chat, tool_format: str | None, reply: Reply
    ) -> None:
        self._start = start
        self._endpoint = endpoint
        self._reply = reply
        self._open_action = OpenAction("the agent's session", reply)
        self._session = AgentSession(chat, tool_format, on_request=self._answer_when_ready, tools=endpoint.tools)
        self._stop: Callable[[], None] = lambda: None
        # True if no code of the agent runs any more, or if it was never started.
        self._has_ended = False
        # Value or failure of an agent that has ended.
        self._outcome: Any = None
        # Number of the close action that came while the agent ran. It is answered once the agent has ended.
        self._waiting_close: int | None = None

    def submit(self, action: int, message: EpisodeMessage) -> None:
        """Schedule an action on the endpoint's event loop."""
        self._endpoint.loop.call_soon_threadsafe(self._open_action.run_part, partial(self._do_action, action, message))

    def _do_action(self, action: int, message: EpisodeMessage) -> None:
        if self._open_action.is_open:
            # The driver waits no longer: it gets what there is so far, before its next action.
            self._answer_action()
        match message:
            case BeginAgent():
                self._open_action.keep(action)
                self._begin_agent(AgentTask(**message.task), message.seed)
            case ResumeAgent():
                self._open_action.keep(action)
                for number, answer in message.answers:
                    self._session.take_answer(number, answer)
                self._answer_when_ready()
            case CloseEpisode():
                self._endpoint.close(self._session)
                self._stop()
                if self._has_ended:
                    self._reply(action, None)
                else:
                    self._waiting_close = action

    def _begin_agent(self, task: AgentTask, seed: int) -> None:
        if not self._endpoint.listens:
            # No agent is started, so a close has nothing to wait for.
            self._has_ended = True
            cause = "the endpoint of its process was closed by code of the process"
            # Lasting: every later agent of this process would fail too, so the driver retires the process.
            self._open_action.answer(EnvironmentFailure("died", cause, lasting=True))
            return
        self._session.use_row(task.row)
        self._endpoint.open(self._session)
        launch = AgentLaunch(
            task=task,
            base_url=self._endpoint.url(self._session),
            api_key=self._session.secret,
            generator=random.Random(seed),
            on_end=self._take_outcome,
            loop=self._endpoint.loop,
        )
        self._stop = self._start(launch)
        # Usually not ready yet: the agent runs on, and its first request or its end answers the action.
        self._answer_when_ready()

    def _take_outcome(self, outcome: Any) -> None:
        """Store the value or failure of an agent that has ended, and close its session."""
        self._has_ended = True
        self._outcome = outcome
        self._endpoint.close(self._session)
        self._answer_when_ready()
        if self._waiting_close is not None:
            self._reply(self._waiting_close, None)

    def _answer_when_ready(self) -> None:
        if self._open_action.is_open and (self._has_ended or self._session.has_asked):
            self._answer_action()

    def _answer_action(self) -> None:
        """Reply to the action that is open."""
        session = self._session
        # An agent that has ended needs no turn, so only the turns that it got are read then.
        message = session.take_requests()
        if not self._has_ended:
            self._open_action.answer(message.plain())
            return
        outcome = self._outcome
        raised = ""
        if session.defect is not None:
            # The agent may have caught the error and returned a value, which must not count.
            self._open_action.answer(session.defect)
            return
        if isinstance(outcome, EnvironmentFailure):
            if not session.budget:
                self._open_action.answer(outcome if session.was_reached else _with_hint(outcome))
                return
            # A used-up budget refused the agent's request. An agent that raises then has not failed.
            raised = str(outcome)
            outcome = None
        try:
            reward = None if outcome is None else check_reward(outcome, "the agent")
        except ContractError as error:
            failure = EnvironmentFailure("contract", "the agent broke the contract", shorten_text(str(error)))
            self._open_action.answer(failure)
            return
        ended = AgentEnded(
            delivered=message.delivered,
            reward=session.reward if reward is None else reward,
            raised=raised,
            counts={name: count for name, count in session.counts.items() if count},
            # Only the most frequent reasons; the count `rewritten` includes all.
            rewritten=dict(session.rewritten.most_common(8)),
        )
        self._open_action.answer(ended.plain())


def _with_hint(failure: EnvironmentFailure) -> EnvironmentFailure:
    """Return the failure of an agent that sent no request, with a hint at the usual reason: a wrong address or key.

    A failure by a bug in the agent's code, or by a command that cannot be started, needs no hint.
    """
    if looks_like_bug(failure.cause) or failure.cause.endswith(NOT_STARTED):
        return failure
    return replace(failure, detail="; ".join(filter(None, (failure.detail.rstrip("."), UNREACHED))))
