"""The handle of a process that runs rewards which may hang, fork or crash: it asks it, and replaces it.

The child answers one message an item, so that the parent always knows which item it died or hung on.
    parent -> child: the RewardSections, once; then (call id, reward index, [Item, ...]) a call
    child -> parent: {problems} when the functions are loaded, or why not; then {call, item, value or failure} an item
"""

import signal

from rlctl.config.grpo_schema import RewardSection
from rlctl.rewards.base import Outcome, RewardError, RewardFailure, RewardInput, shortened
from rlctl.rewards.replies import MAX_REPLY, outcome, problems
from rlctl.workers.channel import BadReply, Channel
from rlctl.workers.guarded import GuardedProcess

START_TIMEOUT_S = 120.0  # imports only (sympy takes seconds), on a machine that may be busy
# A worker that does not take a request is at nobody's item and cannot be trusted.
SEND_TIMEOUT_S = 60.0
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
        self._sections = sections
        self._process = GuardedProcess("rlctl.rewards.child", MAX_REPLY, output)
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
        """Process id of the keeper."""
        return self._process.pid

    def stop(self) -> None:
        """End the process, and whatever it started."""
        self._process.stop()

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
                outcomes.append(outcome(channel.reply(timeout_s), self._calls, number))
        except TimeoutError:
            self.stop()
            outcomes.append(RewardFailure(f"took longer than {timeout_s:g} s"))
        except BadReply as error:
            self.stop()
            outcomes.append(
                RewardFailure("wrote to a file descriptor that is not its own", detail=shortened(str(error)))
            )
        except (EOFError, ConnectionError):
            outcomes.append(RewardFailure(_ENDED, detail=self._process.ending()))
        return outcomes

    def _started(self) -> Channel:
        # It may have ended, or spoken, since its last call: no item of the next one pays for that.
        if (ready := self._process.ready()) is not None:
            return ready
        channel = self._process.start()
        try:
            channel.send(self._sections, START_TIMEOUT_S)
            reasons = problems(channel.reply(START_TIMEOUT_S))
            if not reasons:
                return channel
        except TimeoutError:
            reasons = [(None, f"rewards took longer than {START_TIMEOUT_S:g} s to load")]
        except (EOFError, ConnectionError):
            reasons = [(None, f"a reward ended its process while loading: {self._process.ending()}")]
        except BadReply:
            reasons = [(None, "a reward wrote to a file descriptor that is not its own while loading")]
        self.stop()
        raise LoadError(reasons)
