"""Driver's side of an environment process: sends actions with deadlines, bounds the memory, and ends the process.

Everything here runs on the pool's event loop, so that many episodes can wait at the same time. An action past its
deadline ends its episode with a failure. The episode's thread hangs, so the process is retired: it gets no new
episodes, and ends when its other episodes have ended. A damaged process that still runs, for example one in which
episode after episode fails, is retired too. If a process dies, all of its episodes fail.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from rlctl.environments.child import MAX_REPLY
from rlctl.environments.contract import EnvironmentContract
from rlctl.environments.messages import (
    ActionReply,
    ActionRequest,
    CloseEpisode,
    EpisodeMessage,
    ProcessStarted,
    read_reply,
)
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec
from rlctl.sandbox.process_tree import is_confined
from rlctl.utils.user_code import shorten_text
from rlctl.workers.guarded_process import ENDING_TIMEOUT_S, GuardedProcess

START_TIMEOUT_S = 120.0  # imports only, on a machine that may be busy
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Contracts by the environment's key, or the reason why the process could not start.
Started = dict[str, EnvironmentContract] | EnvironmentFailure
# Number of failed episodes in a row, of at least two tasks, after which a process is retired. If half of all episodes
# fail, a sound process is retired once in about 500 episodes. A damaged process costs the tries of three rollouts.
FAILURES_IN_A_ROW = 8
HUNG = EnvironmentFailure("timeout", "an episode of its process hung")
_FOREIGN = "wrote to a file descriptor that is not its own"


class EnvironmentProcess:
    """One child process and the episodes in it.

    specs: environments by key. memory_bytes: most resident memory of the process and its children. process: the process
    to launch. spawn: starts a task on the pool's event loop. successes_before: number of the pool's episodes that
    succeeded before this process started.
    """

    def __init__(
        self,
        specs: dict[str, EnvironmentSpec],
        memory_bytes: int,
        process: GuardedProcess,
        spawn: Callable[[Coroutine[Any, Any, Any]], "asyncio.Task[Any]"],
        successes_before: int,
    ) -> None:
        self._specs = specs
        self._memory_bytes = memory_bytes
        self._process = process
        self._spawn = spawn
        self._writer: asyncio.StreamWriter | None = None
        self._actions = itertools.count()
        # Futures of the unanswered actions, by the action's number.
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        # Numbers of the actions past their deadlines, whose replies are dropped.
        self._given_up: set[int] = set()
        # Task that ends the process or waits for its end; at most one.
        self._ending: asyncio.Task[Any] | None = None
        # Process ids of the child process itself and of its inner supervisor.
        self._worker_pid: int | None = None
        self._supervisor_pid: int | None = None
        # First reason why the process ended, with which unanswered actions fail.
        self._reason: EnvironmentFailure | None = None
        # Numbers of the episodes that are in the process.
        self.episodes: set[int] = set()
        # Seed of the task of each episode that failed here since the last success.
        self.failed_seeds = deque[int](maxlen=FAILURES_IN_A_ROW)
        self.successes_before = successes_before
        # Reason why the process gets no new episodes and ends after its last one; None for a sound process. `HUNG` if
        # an action passed its deadline: a thread of the process hangs, and a thread cannot be ended alone.
        self.retired: EnvironmentFailure | None = None
        # True for agents. A late agent can be closed by another thread, so it hangs only if its close is late too.
        self._is_closable = all(spec.agent is not None for spec in specs.values())
        # True when the process has ended, or is about to.
        self.has_ended = False
        # Set once nothing that the process started runs.
        self.is_over = asyncio.Event()
        self._launched = asyncio.create_task(asyncio.to_thread(self._process.launch))
        # Contracts by key, or the reason why the process could not start.
        self.ready: asyncio.Task[Started] = spawn(self._start_process())

    @property
    def load(self) -> int:
        """Number of episodes plus number of failures in a row. A new episode goes to the smallest load."""
        return len(self.episodes) + len(self.failed_seeds)

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor."""
        return self._process.pid

    async def _start_process(self) -> Started:
        try:
            connection = await self._launched
        except OSError as error:  # no memory, no file descriptor, no process left
            failure = EnvironmentFailure("died", "no process could be started", str(error))
            self._fail_actions(failure)
            return failure
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=MAX_REPLY)
        self._writer.write(pickle.dumps(self._specs))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                started = ProcessStarted(**await _next_message(reader))
                self._worker_pid = int(started.pid)
                self._supervisor_pid = int(started.supervisor)
                fields = (await _next_message(reader))["contracts"]
                contracts = {key: EnvironmentContract(**fields[key]) for key in self._specs}
        except TimeoutError:
            failure = EnvironmentFailure("timeout", f"environments took longer than {START_TIMEOUT_S:g} s to load")
        except (EOFError, ConnectionError):
            ending = await self._note_end()
            failure = EnvironmentFailure("died", "an environment ended its process while loading", ending)
        except Exception as error:  # user code may write any text to the connection
            failure = EnvironmentFailure("died", f"an environment {_FOREIGN} while loading", _error_line(error))
        else:
            self._spawn(self._read_replies(reader))
            return contracts
        await self.stop(failure)
        return failure

    async def act(self, episode: int, message: EpisodeMessage, timeout_s: float | None) -> Any:
        """Send an action to an episode; return its value, or the EnvironmentFailure that ended the episode.

        timeout_s: None means no deadline.
        """
        if self.has_ended:  # without a reason the process closed its connection just now
            return self._reason or EnvironmentFailure("died", "its process ended", await self._note_end())
        if self._writer is None:
            return EnvironmentFailure("died", "its process has not started")
        action = next(self._actions)
        try:
            request = pickle.dumps(ActionRequest(action, episode, message))
        except Exception as error:  # a value from the model or the row, for example nested too deep
            cause = f"{message.kind} was given a value that cannot be sent"
            return EnvironmentFailure("contract", cause, type(error).__name__)
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[action] = outcome
        self._writer.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                return await outcome
        except TimeoutError:
            if isinstance(message, CloseEpisode) or not self._is_closable:
                self.retired = HUNG
            return EnvironmentFailure("timeout", f"{message.kind} took longer than {timeout_s:g} s")
        finally:
            del self._waiting[action]
            # Not answered in time, or the caller was cancelled: the reply may come later.
            if not outcome.done() or outcome.cancelled():
                self._given_up.add(action)

    async def check_memory(self, deep: bool) -> None:
        """End the process if it uses too much memory. deep: include the memory of its child processes."""
        if self._worker_pid is None or self.has_ended:
            return
        used_bytes = _resident_bytes(self._worker_pid, deep)
        if used_bytes > self._memory_bytes:
            bound = f"{self._memory_bytes >> 20:,} MiB"
            used = f"{used_bytes >> 20:,} MiB in a process of {len(self.episodes)} episodes"
            detail = f"{used}, and at most {bound} are allowed"
            await self.stop(EnvironmentFailure("memory", f"its process used more than {bound}", detail))

    async def stop(self, reason: EnvironmentFailure) -> None:
        """End the process. Unanswered actions fail for this reason."""
        self._fail_actions(reason)
        await asyncio.wait([self._launched])  # a process that still starts can only be ended after its start
        if self._ending is None:
            self._ending = self._spawn(asyncio.to_thread(self._process.stop))
        await asyncio.shield(self._ending)
        if self._supervisor_pid is not None and not self.is_over.is_set():
            # If the outer supervisor was killed, the inner one ends every process that the child started.
            await asyncio.to_thread(_wait_for_end, self._supervisor_pid)
        self.is_over.set()
        if self._writer is not None:
            self._writer.close()

    def _fail_actions(self, reason: EnvironmentFailure) -> None:
        """Note that the process has ended, and answer its waiting actions with the first reason that was given."""
        self.has_ended = True
        self._reason = self._reason or reason
        for outcome in self._waiting.values():
            if not outcome.done():
                outcome.set_result(self._reason)

    async def _note_end(self) -> str:
        """Note that the process closed its connection, wait for its end, and return a text that says how it ended."""
        self.has_ended = True
        if self._ending is None:
            self._ending = self._spawn(asyncio.to_thread(self._process.ending))
        return str(await asyncio.shield(self._ending))

    async def _read_replies(self, reader: asyncio.StreamReader) -> None:
        """Hand each reply to its action until the process ends, then fail the unanswered actions."""
        try:
            while True:
                self._deliver_reply(read_reply(await _next_message(reader)))
        except (EOFError, ConnectionError):
            reason = EnvironmentFailure("died", "its process ended", await self._note_end())
        except Exception as error:  # user code may write any text; no action may wait after this reader has ended
            reason = EnvironmentFailure("died", f"an environment of its process {_FOREIGN}", _error_line(error))
        await self.stop(reason)

    def _deliver_reply(self, reply: ActionReply) -> None:
        """Hand a reply to its action. Raises KeyError or TypeError for a reply to no action of this process."""
        if reply.action in self._given_up:
            self._given_up.discard(reply.action)
            return
        outcome = self._waiting[reply.action]
        if not outcome.done():
            outcome.set_result(reply.outcome)


def _wait_for_end(pid: int) -> None:
    """Wait until a supervisor has ended, at most `ENDING_TIMEOUT_S`."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        end = time.monotonic() + ENDING_TIMEOUT_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            time.sleep(0.005)


def _error_line(error: Exception) -> str:
    return shorten_text(f"{type(error).__name__}: {error}")


async def _next_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message of the process, one line of JSON.

    Raises EOFError at the end of the connection, and ValueError or RecursionError for a line that is no JSON object.
    """
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    message: Any = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message is a JSON object")
    if b"\\ud" in line or b"\\uD" in line:  # a lone surrogate, which no tokenizer takes, is replaced
        message = json.loads(json.dumps(message, ensure_ascii=False).encode("utf-8", "replace"))
    return dict(message)


def _resident_bytes(pid: int, deep: bool) -> int:
    """Return the resident memory of a process in bytes, with all its descendants if `deep`; 0 if it has ended.

    Memory that processes share counts once for each process. Programs in a sandbox have another limit, and do not
    count: else a few programs at their limit would end an environment's process.
    """
    total = 0
    pids = [pid]
    while pids:
        descendant = pids.pop()
        if descendant != pid and is_confined(descendant):
            continue
        folder = f"/proc/{descendant}"
        try:
            with open(f"{folder}/statm", "rb") as statm:
                total += int(statm.read().split()[1]) * _PAGE
            if deep:
                for task in Path(folder, "task").iterdir():
                    pids += map(int, (task / "children").read_text().split())
        except (OSError, ValueError, IndexError):  # the process has ended, or the kernel keeps no list of children
            continue
    return total
