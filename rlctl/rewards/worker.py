"""The handle of a process that runs rewards which may hang, fork or crash: it talks to it, ends and replaces it.

The child answers one message an item, so that the parent always knows which item it died or hung on.
    parent -> child: the RewardSections, once; then (call id, reward index, [Item, ...]) a call
    child -> parent: {problems} when the functions are loaded, or why not; then {call, item, value or failure} an item
"""

import os
import signal
import socket
import subprocess
import sys

from rlctl.config.schema import RewardSection
from rlctl.rewards.base import Outcome, RewardError, RewardFailure, RewardInput
from rlctl.rewards.channel import BadReply, Channel

START_TIMEOUT_S = 120.0  # imports only (sympy takes seconds), on a machine that may be busy
# A worker that does not take a request is at nobody's item and cannot be trusted.
SEND_TIMEOUT_S = 60.0
ENDING_TIMEOUT_S = 10.0
_ENDED = "ended its process"
_TERMINATED = RewardFailure(_ENDED, detail=signal.SIGTERM.name)
_NOT_TAKEN = RewardFailure("could not be asked", detail="its process took no request")


class LoadError(RewardError):
    """Rewards that cannot be loaded. problems: (index of the reward, why); index None: which is not known."""

    def __init__(self, problems: list[tuple[int | None, str]]) -> None:
        super().__init__("\n".join(reason for _, reason in problems))
        self.problems = problems


class RewardWorker:
    """One child process, started when first needed and again after it hung or died.

    output: descriptor for what functions print; None: the standard error.
    """

    def __init__(self, sections: list[RewardSection], output: int | None) -> None:
        self._sections, self._output = sections, output
        # Taken now: while Ray starts, this process has Ray's, and whoever has that ends with Ray's folder.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._calls = 0

    def score(self, reward: int, items: list[RewardInput]) -> list[Outcome]:
        """The outcome of each item; an item that hangs or kills the process costs itself alone."""
        outcomes: list[Outcome] = []
        tried_again = -1
        while len(outcomes) < len(items):
            try:
                outcomes += self._call(self._started(), reward, items[len(outcomes) :])
                # Neither says anything of the item: whoever ends a job sends this to all of its processes.
                if outcomes[-1] in (_TERMINATED, _NOT_TAKEN) and tried_again != len(outcomes):
                    tried_again = len(outcomes)
                    outcomes.pop()
            except LoadError as error:
                reason = "; ".join(reason for index, reason in error.problems if index in (reward, None)) or str(error)
                outcomes += [RewardFailure("could not be loaded", detail=reason)] * (len(items) - len(outcomes))
        return outcomes

    def start(self) -> None:
        """Load the functions now. Raises LoadError."""
        self._started()

    @property
    def pid(self) -> int | None:
        """Process id of the keeper, see child.py."""
        return self._process.pid if self._process else None

    def stop(self) -> None:
        """End the process, and whatever it started."""
        if self._process is not None:
            assert self._process.stdin
            self._process.stdin.close()
            try:
                self._process.wait(ENDING_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._channel is not None:
            self._channel.close()
        self._process = self._channel = None

    def _call(self, channel: Channel, reward: int, items: list[RewardInput]) -> list[Outcome]:
        """Outcomes of the items up to the last, or to the one that ended the process."""
        self._calls += 1
        timeout_s = self._sections[reward].timeout_s
        outcomes: list[Outcome] = []
        try:
            channel.send((self._calls, reward, items), SEND_TIMEOUT_S)
        except (TimeoutError, ConnectionError):
            self.stop()
            return [_NOT_TAKEN]
        try:
            for number in range(len(items)):
                outcomes.append(channel.outcome(self._calls, number, timeout_s))
        except TimeoutError:
            self.stop()
            outcomes.append(RewardFailure(f"took longer than {timeout_s:g} s"))
        except BadReply as error:
            self.stop()
            outcomes.append(RewardFailure("wrote to a file descriptor that is not its own", detail=str(error)))
        except (EOFError, ConnectionError):
            outcomes.append(RewardFailure(_ENDED, detail=self._ending()))
        return outcomes

    def _started(self) -> Channel:
        if self._process is not None and self._channel is not None:
            # It may have ended, or spoken, since its last call: no item of the next one pays for that.
            if self._process.poll() is None and self._channel.is_quiet():
                return self._channel
            self.stop()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlctl.rewards.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=2 if self._output is None else self._output,
            stderr=self._output,
            env=self._environment,
            start_new_session=True,
        )
        theirs.close()
        try:
            self._channel.send(self._sections, START_TIMEOUT_S)
            reasons = self._channel.problems(START_TIMEOUT_S)
            if not reasons:
                return self._channel
        except TimeoutError:
            reasons = [(None, f"rewards took longer than {START_TIMEOUT_S:g} s to load")]
        except (EOFError, ConnectionError):
            reasons = [(None, f"a reward ended its process while loading: {self._ending()}")]
        except BadReply:
            reasons = [(None, "a reward wrote to a file descriptor that is not its own while loading")]
        self.stop()
        raise LoadError(reasons)

    def _ending(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(ENDING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        finally:
            self.stop()
        try:
            return signal.Signals(code - 128).name
        except ValueError:
            return f"exit code {code}"
