"""Parent's side of a process that awaits a coroutine reward for many rollouts at a time.

The process runs `rewards/coroutine_child.py`. One thread of this module owns it, starts it when first needed, and
replaces it if it hangs or dies.
    parent -> child: one byte with the descriptor of the shared memory; (RewardSection, path of a judge's records); then
        (ticket, [RewardInput, ...]) for each call: one rollout, or all rollouts of a task;
        (ANSWER, number, answer) for each question
    child -> parent: {problem: text} once; then {ticket, outcomes, counts} for each call, in the order of their ends;
        {question, number, max_tokens, temperature} for a question to a model of the run
A ticket is a random number. A reply to no ticket in flight is foreign, and the process is replaced.
The shared memory has the ticket of the running coroutine. If the event loop is blocked or the process has died, that
call has failed, and the other calls in flight are made again.
"""

import math
import mmap
import os
import pickle
import queue
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rlctl.config.grpo_schema import RewardSection
from rlctl.rewards.base import Outcome, RewardFailure, RewardInput
from rlctl.rewards.coroutine_calls import (
    MAX_GROUP_REPLY,
    Answerer,
    QuestionAnswer,
    RewardCall,
    finish_call,
    read_reply,
    read_reply_outcome,
)
from rlctl.rewards.coroutine_child import ANSWER, TICKET, late_failure
from rlctl.rewards.reward_process import (
    FOREIGN,
    MAX_REPLY,
    NOT_TAKEN,
    SEND_TIMEOUT_S,
    START_TIMEOUT_S,
    TERMINATED,
    check_text,
    ended_failure,
)
from rlctl.utils.user_code import shorten_text
from rlctl.workers.guarded_process import BadReply, GuardedProcess

# A call without a reply this many seconds after its timeout shows that the event loop is blocked.
_GRACE_S = 2.0
# Milliseconds after which the answerer is looked after again.
_LOOK_AFTER_MS = 1000.0


class CoroutineWorker:
    """One child process for one reward, started when first needed. Several threads may call `score`.

    output: file descriptor for the output of the reward function; None means standard error. records: file of a
    judge's requests; None: nothing outlives the process.
    """

    def __init__(self, section: RewardSection, output: int | None, records: Path | None = None) -> None:
        self._section = section
        self._records = records
        self._process = GuardedProcess("rlctl.rewards.coroutine_child", MAX_REPLY, output)
        # Messages to the thread: make a call, pass an answer on, or end (None).
        self._inbox: queue.SimpleQueue[RewardCall | QuestionAnswer | None] = queue.SimpleQueue()
        # Answers the questions of the reward; None for a reward that asks none.
        self.answerer: Answerer | None = None
        self._is_stopped = False
        self._wake_reader, self._wake_writer = os.pipe()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        # The fields below belong to the thread.
        self._waiting: deque[RewardCall] = deque()
        self._running: dict[int, RewardCall] = {}
        self._connection: socket.socket | None = None
        self._received = b""
        self._shared_file = os.memfd_create("rlctl-reward")
        os.ftruncate(self._shared_file, TICKET.size)
        self._running_ticket = mmap.mmap(self._shared_file, TICKET.size)

    def score(self, calls: Sequence[list[RewardInput]]) -> list[list[Outcome]]:
        """Call the reward for each list of rollouts, at most `concurrency` at a time; return their outcomes."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_thread, name="coroutine-rewards", daemon=True)
                self._thread.start()
        begun = [RewardCall(items) for items in calls]
        for call in begun:
            self._put_message(call)
        return [call.outcomes.result() for call in begun]

    def take_counts(self) -> dict[str, float]:
        """Return the counts that the reward reported since the last call of this method."""
        with self._lock:
            counts = self._counts
            self._counts = {}
        return counts

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor."""
        return self._process.pid

    def stop(self) -> None:
        """End the process and all processes that it started. Calls in flight fail."""
        self._put_message(None)
        with self._lock:
            self._is_stopped = True
        if self._thread is not None:
            self._thread.join()
        for descriptor in (self._wake_reader, self._wake_writer, self._shared_file):
            os.close(descriptor)

    def _put_message(self, message: RewardCall | QuestionAnswer | None) -> None:
        with self._lock:
            if not self._is_stopped:
                self._inbox.put(message)
                os.write(self._wake_writer, b".")

    # On the thread.

    def _run_thread(self) -> None:
        """Make calls and take their replies until `stop`."""
        is_stopped = False
        while not is_stopped:
            self._wait_for_news()
            with suppress(queue.Empty):
                while not is_stopped:
                    message = self._inbox.get_nowait()
                    is_stopped = message is None
                    if isinstance(message, RewardCall):
                        self._waiting.append(message)
                    elif message is not None:
                        self._send_answer(message)
            if not is_stopped:
                if self.answerer is not None and self._running:
                    self.answerer.look_after()
                self._take_replies()
                self._end_blocked_process()
                self._send_calls()
        self._close_connection()
        self._process.stop()
        for call in [*self._waiting, *self._running.values()]:
            finish_call(call, NOT_TAKEN)

    def _wait_for_news(self) -> None:
        """Wait for a new call, a reply, or the first deadline of a running call."""
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        if self._connection is not None:
            poll.register(self._connection, select.POLLIN)
        timeout_ms = None
        if self._running:
            first_deadline = min(call.deadline for call in self._running.values())
            timeout_ms = max(0.0, first_deadline - time.monotonic()) * 1000 + 1
            if self.answerer is not None:
                timeout_ms = min(timeout_ms, _LOOK_AFTER_MS)
        ready = [descriptor for descriptor, _ in poll.poll(timeout_ms)]
        if self._wake_reader in ready:
            os.read(self._wake_reader, 1 << 16)

    def _send_calls(self) -> None:
        """Make waiting calls while fewer than `concurrency` are running."""
        while self._waiting and len(self._running) < self._section.concurrency:
            if self._connection is None and (problem := self._start_process()):
                # No call can be made. The next one tries to start the process again.
                while self._waiting:
                    finish_call(self._waiting.popleft(), problem)
                return
            self._send_call(self._waiting.popleft())

    def _send_call(self, call: RewardCall) -> None:
        assert self._connection is not None
        ticket = secrets.randbits(63) | 1
        try:
            message = pickle.dumps((ticket, call.items))
        except Exception as error:  # a value that pickle refuses, such as one nested too deep
            finish_call(call, RewardFailure("was given a value that cannot be sent", detail=type(error).__name__))
            return
        self._running[ticket] = call
        call.deadline = time.monotonic() + self._section.timeout_s + _GRACE_S
        try:
            self._connection.settimeout(SEND_TIMEOUT_S)
            self._connection.sendall(message)
        except OSError:  # a timeout too
            self._replace_process(NOT_TAKEN, is_retried=True)

    def _start_process(self) -> RewardFailure | None:
        """Start the process and load the reward; return the failure if that is not possible."""
        TICKET.pack_into(self._running_ticket, 0, 0)
        self._received = b""
        self._connection = self._process.launch()
        kind = "could not be loaded"
        try:
            self._connection.settimeout(START_TIMEOUT_S)
            socket.send_fds(self._connection, [b"."], [self._shared_file])
            self._connection.sendall(pickle.dumps((self._section, self._records)))
            problem = check_text(read_reply(self._receive_line()).get("problem"))
        except TimeoutError:
            problem = f"it took longer than {START_TIMEOUT_S:g} s to load"
        except (EOFError, ConnectionError):
            problem = f"it ended its process while loading: {self._process.ending()}"
        except BadReply:
            problem = f"it {FOREIGN} while loading"
        if not problem:
            return None
        self._close_connection()
        self._process.stop()
        return RewardFailure(kind, detail=problem)

    def _receive_line(self) -> bytes:
        """Return the first line that the process sends."""
        assert self._connection is not None
        while b"\n" not in self._received:
            part = self._connection.recv(1 << 16)
            if not part:
                raise EOFError
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _take_replies(self) -> None:
        """Take all replies that have come."""
        if self._connection is None:
            return
        self._connection.setblocking(False)
        try:
            while part := self._connection.recv(1 << 16):
                self._received += part
            is_ended = True
        except BlockingIOError:
            is_ended = False
        except OSError:
            is_ended = True
        *lines, self._received = self._received.split(b"\n")
        try:
            for line in lines:
                reply = read_reply(line)
                if "question" in reply:
                    self._pass_question(reply)
                else:
                    self._take_reply(reply)
            if len(self._received) > MAX_GROUP_REPLY:
                raise BadReply("more bytes than a reply has")
        except BadReply as error:
            self._replace_process(RewardFailure(FOREIGN, detail=shorten_text(str(error))))
            return
        if is_ended:
            failure = ended_failure(self._process.ending())
            self._replace_process(failure, is_retried=failure == TERMINATED)

    def _take_reply(self, reply: dict[str, Any]) -> None:
        """End the call that a reply answers. Raises BadReply for a reply to no call in flight."""
        ticket = reply.get("ticket")
        if not isinstance(ticket, int) or ticket not in self._running:
            raise BadReply("a reply to no call in flight")
        call = self._running[ticket]
        outcomes = reply.get("outcomes")
        if not isinstance(outcomes, list) or len(outcomes) != len(call.items):
            raise BadReply("a reply without an outcome for each rollout")
        call_outcomes = [read_reply_outcome(outcome) for outcome in outcomes]
        self._add_counts(reply.get("counts"))
        del self._running[ticket]
        call.outcomes.set_result(call_outcomes)

    def _pass_question(self, reply: dict[str, Any]) -> None:
        """Ask the answerer a question of the process. Raises BadReply."""
        number = reply.get("number")
        max_tokens = reply.get("max_tokens")
        temperature = reply.get("temperature")
        if not isinstance(number, int) or not isinstance(max_tokens, int) or not isinstance(temperature, float):
            raise BadReply("a question without its number, tokens or temperature")
        if self.answerer is None:
            raise BadReply("a question that nobody answers")
        question = check_text(reply["question"])
        take_answer = partial(self._take_answer, number)
        self.answerer.ask(question, max_tokens, temperature, take_answer)

    def _take_answer(self, number: int, answer: dict[str, Any]) -> None:
        """Pass an answer on to the process. Any thread may call it."""
        self._put_message(QuestionAnswer(number, answer))

    def _send_answer(self, answer: QuestionAnswer) -> None:
        """Send an answer. A process that was replaced meanwhile knows no such question, and ignores it."""
        if self._connection is None:
            return
        try:
            self._connection.settimeout(SEND_TIMEOUT_S)
            self._connection.sendall(pickle.dumps((ANSWER, answer.question, answer.answer)))
        except OSError:  # a timeout too
            self._replace_process(NOT_TAKEN, is_retried=True)

    def _add_counts(self, counts: object) -> None:
        if not isinstance(counts, dict):
            raise BadReply("a reply without counts")
        with self._lock:
            for name, count in counts.items():
                if not isinstance(count, int | float) or not math.isfinite(count):
                    raise BadReply("a count that is no number")
                self._counts[name] = self._counts.get(name, 0.0) + count

    def _end_blocked_process(self) -> None:
        """Replace the process if a call in flight is overdue: the process answers each call within its timeout."""
        if any(call.deadline < time.monotonic() for call in self._running.values()):
            self._replace_process(late_failure(self._section.timeout_s))

    def _replace_process(self, failure: RewardFailure, is_retried: bool = False) -> None:
        """End the process. The call whose coroutine was running fails, and the other calls in flight are made again.

        If no coroutine was running, overdue calls fail. If there is none, all calls are made again, once.
        is_retried: make the failed call again too, once.
        """
        (running_ticket,) = TICKET.unpack_from(self._running_ticket, 0)
        self._close_connection()
        self._process.stop()
        now = time.monotonic()
        calls = self._running
        self._running = {}
        blamed = [call for ticket, call in calls.items() if ticket == running_ticket]
        blamed = blamed or [call for call in calls.values() if call.deadline < now]
        repeated: list[RewardCall] = []
        for call in calls.values():
            is_failed = call in blamed and not (is_retried and not call.is_repeated)
            is_failed = is_failed or (not blamed and call.is_repeated)
            if is_failed:
                finish_call(call, failure)
                continue
            call.is_repeated = call.is_repeated or not blamed or call in blamed
            repeated.append(call)
        self._waiting.extendleft(reversed(repeated))

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None
