"""Session of one agent: its requests become turns to sample, and each turn a node of the rollout's tree (contract 4).

    request -> place in the history -> ask (sent to the driver) ... answer -> text, calls -> client

Only the endpoint's event loop uses a session. If a client disconnects, its turn is sampled all the same, and the
client's retry gets that turn. A sealed session refuses every request.
"""

import asyncio
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rlctl.data.chat import Chat
from rlctl.data.files import DataError
from rlctl.data.row_chat import chat_of_row
from rlctl.environments.agents.client_request import ClientRequest, RefusedError, check_messages, whole_number
from rlctl.environments.agents.client_turn import ClientTurn, read_turn
from rlctl.environments.agents.history import PlacedRequest, SessionHistory, ToolSets, turn_message
from rlctl.environments.contract import ContractError, Message, Reward, check_reward
from rlctl.environments.messages import AgentAnswer, AgentAsk, AgentWaits
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.utils.user_code import error_text, trace_of

# Bytes from which a request is processed in a thread: 200 KB of tools took 3.8 s on two busy cores.
LARGE = 1 << 14
_THREADS = ThreadPoolExecutor(8, thread_name_prefix="large requests")
Value = TypeVar("Value")
# Most refused requests of a session. Further requests are refused without the driver: each answer of the driver starts
# a new deadline for the agent, so an agent that ignores refusals would never meet a deadline.
_MOST_REFUSED = 64
# Most bytes of requests in one reply of the process, and about the bytes of one token in it.
MAX_ASK_BYTES = 2 << 20
_TOKEN_BYTES = 8
# Name of the driver's budget that is used up -> text for the client.
BUDGETS = {
    "max_turns": "the episode has had its turns (environment.max_turns)",
    "max_length": "the conversation is as long as an episode may be (environment.max_length)",
    "time": "the time of the episode is used up (environment.episode_timeout_s)",
}
# Budgets that stay used up, also for a shorter prompt.
_FINAL = ("max_turns", "time")


class Flight:
    """One turn in flight, and the connections that wait for it: the client's request and its retries."""

    def __init__(self, work: "asyncio.Task[ClientTurn]", wants_stream: "asyncio.Future[bool]") -> None:
        self.work = work
        # Done once the request is read. True if the request asks for a stream.
        self.wants_stream = wants_stream
        # True if a connection that waited for the turn was lost, and no retry has replaced it.
        self.has_lost = False
        # A future for each waiting connection, which is done once the connection is lost.
        self._waiting: set[asyncio.Future[None]] = set()
        # Reads the task's exception, so that asyncio does not report it if no client waits.
        work.add_done_callback(_has_failed)

    @property
    def is_waited_for(self) -> bool:
        """True if a connection waits for the turn and is not known to be lost."""
        return bool(self._waiting)

    def add_connection(self, gone: "asyncio.Future[None]") -> None:
        """Add a connection that waits for the turn. gone: done once the connection is lost."""
        self._waiting.add(gone)

    def remove_connection(self, gone: "asyncio.Future[None]", is_lost: bool) -> None:
        """Remove a connection that no longer waits for the turn, because it got the turn or is lost."""
        if gone in self._waiting:
            self._waiting.discard(gone)
            self.has_lost = self.has_lost or is_lost

    def note_lost(self) -> bool:
        """Remove the lost connections whose handlers have not removed them yet; return `has_lost`."""
        lost = {gone for gone in self._waiting if gone.done()}
        self._waiting -= lost
        if lost:
            self.has_lost = True
        return self.has_lost


class AgentSession:
    """Requests and turns of one agent.

    on_request: called when a request waits to be sent to the driver. tools: sets of tools that all sessions share.
    """

    def __init__(
        self, chat: Chat, tool_format: str | None, on_request: Callable[[], None], tools: ToolSets | None = None
    ) -> None:
        self.id = secrets.token_hex(8)
        self.secret = secrets.token_urlsafe(24)
        self.is_sealed = False
        # True once a request came with the session's key.
        self.was_reached = False
        # Reward that the agent sent to the endpoint.
        self.reward: Reward | None = None
        # First error in the endpoint's code. The rollout then has no reward.
        self.defect: EnvironmentFailure | None = None
        # Name of the budget that refused the last request; empty if none did.
        self.budget = ""
        self.counts: Counter[str] = Counter()
        # Reason why a request continued no turn -> number of such requests.
        self.rewritten: Counter[str] = Counter()
        self._chat = chat
        self._tool_format = tool_format
        self._on_request = on_request
        self._history = SessionHistory(chat, tools or ToolSets())
        # Turns of equal requests in the order of the requests, by the digest of path and body.
        self._flights: defaultdict[bytes, list[Flight]] = defaultdict(list)
        # Locked while a thread processes a large request, so that a session takes one thread at a time.
        self._thread_lock = asyncio.Lock()
        # Futures of the driver's answers, by the number of the request.
        self._answers: dict[int, asyncio.Future[AgentAnswer]] = {}
        # (approximate bytes, request) of each request that the driver has not got yet.
        self._asks: deque[tuple[int, AgentAsk]] = deque()
        self._next_number = 0
        # Turns by the number of their requests.
        self._turns: dict[int, ClientTurn] = {}
        # Numbers of the turns that a client got.
        self._delivered_numbers: set[int] = set()
        # (number, count of tokens) of the delivered turns that the driver has not been told of.
        self._delivered: list[tuple[int, int]] = []

    def use_row(self, row: Mapping[str, Any]) -> None:
        """Set the row's arguments of the chat template as defaults for all requests. Raises DataError."""
        self._chat = chat_of_row(self._chat, row)
        self._history.chat = self._chat

    @property
    def has_asked(self) -> bool:
        """True if a request waits to be sent to the driver."""
        return bool(self._asks)

    def rejoin(self, digest: bytes, retries: int) -> Flight | None:
        """Return the turn in flight of an earlier request if this request is its retry; None for a new request.

        digest: hash of path and body. retries: the request's header `x-stainless-retry-count`. Raises RefusedError.
        """
        self._refuse_if_over()
        # An equal body alone is no retry, because an agent may sample the same prompt twice, also concurrently.
        flights = [flight for flight in self._flights[digest] if not _has_failed(flight.work)]
        lost_flights = [flight for flight in flights if flight.note_lost()]
        idle_flights = [flight for flight in flights if not flight.is_waited_for]
        if lost_flights:
            repeated = lost_flights[0]
        elif not retries or not flights:
            return None
        elif idle_flights:
            # The retry comes although its turn was delivered.
            repeated = idle_flights[-1]
        else:
            # The first connection is probably lost, but its loss is not known yet.
            repeated = flights[0]
        self.counts["coalesced"] += 1
        repeated.has_lost = False
        return repeated

    async def read(self, read_request: Callable[[], ClientRequest], size: int) -> ClientRequest:
        """Call `read_request`, in a thread if the body is large, and return the request. size: bytes of the body.

        Raises RefusedError.
        """
        with self.refuse_on_defect():
            return await self._call_by_size(read_request, size)

    def begin(self, digest: bytes, read_request: Callable[[], ClientRequest], size: int) -> Flight:
        """Start the task that reads a request and samples its turn. size: bytes of the request's body."""
        loop = asyncio.get_running_loop()
        wants_stream: asyncio.Future[bool] = loop.create_future()
        flight = Flight(loop.create_task(self._make_turn(read_request, size, wants_stream)), wants_stream)
        self._flights[digest].append(flight)

        def forget_refused(work: "asyncio.Task[ClientTurn]") -> None:
            # A refused request may be large, and a retry is judged as a new request.
            if _has_failed(work):
                self._flights[digest].remove(flight)

        flight.work.add_done_callback(forget_refused)
        return flight

    async def count_tokens(self, request: ClientRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises RefusedError."""
        with self.refuse_on_defect():
            request = self._add_history(request)
            place = await self._call_by_size(partial(self._history.place, request), request.size)
            return place.length

    def deliver(self, turn: ClientTurn) -> None:
        """Note that a client gets a turn. From now on the turn is a part of the rollout."""
        if turn.number not in self._delivered_numbers and not self.is_sealed:
            self._delivered_numbers.add(turn.number)
            self._delivered.append((turn.number, len(turn.tokens)))

    def take_reward(self, reward: Any) -> None:
        """Store the reward that the agent gives its rollout. Raises RefusedError."""
        if self.is_sealed:
            raise _ended_error()
        try:
            self.reward = check_reward(reward, "the agent")
        except ContractError as error:
            raise RefusedError(str(error)) from error

    def take_answer(self, number: int, answer: AgentAnswer) -> None:
        """Hand the driver's answer to the request with this number."""
        future = self._answers.pop(number, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def take_requests(self) -> AgentWaits:
        """Remove and return the next requests for the driver, at most `MAX_ASK_BYTES`, and the delivered turns."""
        asks = list[AgentAsk]()
        bytes_left = MAX_ASK_BYTES
        while self._asks and (not asks or bytes_left >= self._asks[0][0]):
            size, ask = self._asks.popleft()
            asks.append(ask)
            bytes_left -= size
        delivered = self._delivered
        self._delivered = []
        return AgentWaits(asks, delivered)

    @contextmanager
    def refuse_on_defect(self) -> Iterator[None]:
        """Turn an error in the endpoint's code into a RefusedError for the client, and keep the first error.

        The client gets status 400. After a 5xx the SDKs of OpenAI and Anthropic, litellm and Codex would send the same
        request again, and meet the same error.
        """
        try:
            yield
        except RefusedError:
            raise
        except Exception as error:
            if self.defect is None:
                cause = f"the agents' endpoint failed with {type(error).__name__}"
                self.defect = EnvironmentFailure("raised", cause, error_text(error), trace_of(error))
            raise _defect_error(self.defect) from error

    def seal(self) -> None:
        """Refuse all further requests, and those that wait for an answer."""
        self.is_sealed = True
        for future in self._answers.values():
            if not future.done():
                future.set_exception(_ended_error())
                # Read the exception, so that asyncio does not report it if no client waits.
                future.exception()
        self._answers.clear()

    async def _make_turn(
        self, read_request: Callable[[], ClientRequest], size: int, wants_stream: "asyncio.Future[bool]"
    ) -> ClientTurn:
        with self.refuse_on_defect():
            request = await self._call_by_size(read_request, size)
            # The session may have been sealed while a thread read the request.
            self._refuse_if_over()
            self._count_parameters(request)
            wants_stream.set_result(request.stream)
            return await self._sample_turn(request)

    def _count_parameters(self, request: ClientRequest) -> None:
        """Count the parameters of a request that are not honoured."""
        if self._chat.unknown_kwargs(request.template_kwargs):
            request.counted.append("ignored/chat_template_kwargs")
        self.counts.update(request.counted)

    async def _sample_turn(self, request: ClientRequest) -> ClientTurn:
        if self.budget in _FINAL or self.counts["refused"] >= _MOST_REFUSED:
            self.counts["refused"] += 1
            raise RefusedError(BUDGETS.get(self.budget, "too many requests were refused before"))
        try:
            request = self._add_history(request)
            place = await self._call_by_size(partial(self._history.place, request), request.size)
            # The session may have been sealed while a thread placed the request.
            self._refuse_if_over()
        except RefusedError:
            self.counts["refused"] += 1
            raise
        number = self._next_number
        self._next_number += 1
        self._note_place(place)
        request = self._history.share_objects(request, place)
        answer = await self._ask_driver(number, place, request)
        if isinstance(answer, str):
            self.budget = answer
            self.counts["refused"] += 1
            raise RefusedError(BUDGETS.get(answer, answer))
        self.budget = ""
        turn = read_turn(
            request=request,
            number=number,
            session=self.id,
            prompt_length=place.length,
            sampled=answer,
            chat=self._chat,
            tool_format=self._tool_format,
        )
        self.counts["tool_calls"] += len(turn.calls) + turn.malformed
        self.counts["malformed_calls"] += turn.malformed
        self._turns[number] = turn
        self._history.add(place, turn)
        return turn

    async def _call_by_size(self, function: Callable[[], Value], size: int) -> Value:
        """Call a function that processes a request of `size` bytes. For a large one, call it in a thread.

        Other requests of the event loop go on meanwhile.
        """
        if size < LARGE:
            return function()
        async with self._thread_lock:
            return await asyncio.get_running_loop().run_in_executor(_THREADS, function)

    def _refuse_if_over(self) -> None:
        if self.is_sealed:
            raise _ended_error()
        if self.defect is not None:
            raise _defect_error(self.defect)

    def _add_history(self, request: ClientRequest) -> ClientRequest:
        """Return a request with all messages of its conversation. Raises RefusedError.

        A request that continues a turn by the turn's id brings only the new messages.
        """
        if not request.previous_id:
            return request
        number = whole_number(request.previous_id.removeprefix(f"{self.id}-"))
        turn = None if number is None else self._turns.get(number)
        if turn is None:
            raise RefusedError("previous_response_id is of no turn of this session", 404, "not_found")
        previous_request = turn.request
        # Instructions hold for one request only, so those of the previous request are left out.
        instructions = [message for message in request.messages if message["role"] == "system"]
        previous_messages = [message for message in previous_request.messages if message["role"] != "system"]
        new_messages = [message for message in request.messages if message["role"] != "system"]
        return replace(
            request,
            messages=check_messages(instructions + previous_messages + [turn_message(turn)] + new_messages),
            tools=request.tools or previous_request.tools,
            template_kwargs=request.template_kwargs or previous_request.template_kwargs,
            size=request.size + previous_request.size,
        )

    def _note_place(self, place: PlacedRequest) -> None:
        self.counts["spelled"] += len(place.spelled)
        self.counts["unwritten"] += len(place.unwritten)
        if place.after is not None:
            # The client sent the turn back, so it got the turn, even if its connection broke.
            self.deliver(self._turns[place.after])
        if place.rewritten:
            self.counts["rewritten"] += 1
            self.rewritten[place.rewritten] += 1
        self._history.note(place)

    async def _ask_driver(self, number: int, place: PlacedRequest, request: ClientRequest) -> AgentAnswer:
        new_messages: list[Message] = place.messages[len(place.messages) - place.new_count :]
        # The engine ends the turn at a stop string that is one token. `read_turn` cuts the text at longer stop strings.
        try:
            stops = [tokens[0] for tokens in map(self._chat.encode, request.stop) if len(tokens) == 1]
        except DataError as error:
            raise RefusedError(f"stop: {error}") from error
        ask = AgentAsk(
            number=number,
            after=place.after,
            tokens=place.tokens,
            messages=new_messages,
            max_tokens=None if request.max_tokens is None else max(1, request.max_tokens),
            stops=stops,
        )
        # A key is about as long as its message.
        size = sum(map(len, place.keys[-place.new_count :])) + _TOKEN_BYTES * len(place.tokens)
        self._asks.append((size, ask))
        future: asyncio.Future[AgentAnswer] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        self._on_request()
        return await future


def _ended_error() -> RefusedError:
    """Return the refusal of a sealed session. A new object each time, because it carries a traceback."""
    return RefusedError("the session has ended: this agent's rollout is over", 404, "session_ended")


def _defect_error(defect: EnvironmentFailure) -> RefusedError:
    return RefusedError(f"{defect}; the rollout has no value, and rlctl's log has the traceback", kind="internal_error")


def _has_failed(work: "asyncio.Task[ClientTurn]") -> bool:
    """Return True if a request was refused or cancelled.

    The task's exception counts as read then, so asyncio does not report it.
    """
    return work.done() and (work.cancelled() or work.exception() is not None)
