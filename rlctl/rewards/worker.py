"""A process that runs rewards which may hang or crash, and the handle that talks to it and replaces it.

The child answers one message an item, so that the parent always knows which item it died or hung on.
    parent -> child: the RewardSections, once; then (reward index, [Item, ...]) a call
    child -> parent: None when the functions are loaded, or why not; then an Outcome an item
"""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import IO

from rlctl.config.schema import RewardSection
from rlctl.rewards.base import Item, Outcome, RewardError, RewardFunction, attempt, load_function

START_TIMEOUT_S = 120.0  # imports only (sympy takes seconds), on a machine that may be busy
ENDING_TIMEOUT_S = 5.0


class Worker:
    """One child process, started when first needed and again after it hung or died."""

    def __init__(self, sections: list[RewardSection], log: IO[str] | None) -> None:
        self._sections, self._log = sections, log
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def score(self, reward: int, items: list[Item]) -> list[Outcome]:
        """The outcome of each item; an item that hangs or kills the process costs itself alone."""
        outcomes: list[Outcome] = []
        while len(outcomes) < len(items):
            try:
                connection = self._started()
                connection.send((reward, items[len(outcomes) :]))
                while len(outcomes) < len(items):
                    if not connection.poll(self._sections[reward].timeout_s):
                        self.stop()
                        outcomes.append((None, f"took longer than {self._sections[reward].timeout_s:g} s"))
                        break
                    outcomes.append(connection.recv())
            except (EOFError, ConnectionError):
                outcomes.append((None, f"ended its process: {self._ending()}"))
            except RewardError as error:
                outcomes += [(None, f"could not be loaded: {error}")] * (len(items) - len(outcomes))
        return outcomes

    def start(self) -> None:
        """Load the functions now. Raises RewardError, a line for each that cannot be loaded."""
        self._started()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _started(self) -> Connection:
        if self._connection is not None:
            return self._connection
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlctl.rewards.worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log or 2,
            stderr=self._log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()
        self._connection.send(self._sections)
        reason = f"rewards took longer than {START_TIMEOUT_S:g} s to load"
        try:
            if self._connection.poll(START_TIMEOUT_S) and (reason := self._connection.recv()) is None:
                return self._connection
        except (EOFError, ConnectionError):
            reason = f"a reward ended its process while loading: {self._ending()}"
        self.stop()
        raise RewardError(reason)

    def _ending(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(ENDING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        finally:
            self.stop()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def main(connection: Connection) -> None:
    """The child: load, then score until the parent hangs up."""
    for number in (signal.SIGINT, signal.SIGTERM):  # both let the parent finish its step
        signal.signal(number, signal.SIG_IGN)
    sections: list[RewardSection] = connection.recv()
    functions: list[RewardFunction] = []
    problems: list[str] = []
    for section in sections:
        try:
            functions.append(load_function(section))
        except RewardError as error:
            problems.append(f"{section.name}: {error}")
    connection.send("\n".join(problems) or None)
    while not problems:
        try:
            reward, items = connection.recv()
            for item in items:
                connection.send(_timed(functions[reward], item, sections[reward].timeout_s))
        except (EOFError, ConnectionError):
            return


def _timed(function: RewardFunction, item: Item, timeout_s: float) -> Outcome:
    # Should the parent be gone, nobody kills a hanging child: this alarm's default action ends it.
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 1)
    outcome = attempt(function, item)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return outcome


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
