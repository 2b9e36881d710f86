"""Parent's side of a reward process: sends items to score, and replaces a process that hangs or crashes.

The process runs `rewards/child.py`. `workers/guarded_process.py` ends it with all processes that it started.
The child sends one reply for each item, so the parent always knows at which item the child died or hung.
    parent -> child: the RewardSections, once; then (call id, reward index, [RewardInput, ...]) for each call
    child -> parent: {problems: [[index, reason], ...]} once; then {call, item, value or failure} for each item
User code can write to the connection too. A line that is no reply to the current call and item is a `BadReply`, and the
process is replaced.
"""

import math
import reprlib
import signal
from typing import Any, get_args

from rlctl.config.grpo_schema import AnyRewardSection, RewardSection
from rlctl.rewards.base import Form, Outcome, RewardFailure, RewardInput, UnusableError
from rlctl.utils.user_code import MAX_DETAIL, MAX_TRACE, shorten_text
from rlctl.workers.guarded_process import BadReply, Channel, GuardedProcess

START_TIMEOUT_S = 120.0  # imports only (sympy takes seconds), possibly on a busy machine
# Seconds after which a process that does not read a call is replaced.
SEND_TIMEOUT_S = 60.0
# Most bytes of a reply. JSON escapes a character as 6 bytes, and a character beyond the basic plane as 12.
MAX_REPLY = 12 * (MAX_TRACE + 2 * MAX_DETAIL) + 65536
_ENDED = "ended its process"
TERMINATED = RewardFailure(_ENDED, detail=signal.SIGTERM.name)
NOT_TAKEN = RewardFailure("could not be asked", detail="its process took no request")
FOREIGN = "wrote to a file descriptor that is not its own"


class RewardWorker:
    """One child process, started when first needed and again after it hung or died.

    output: file descriptor for the output of the reward functions; None means standard error.
    """

    def __init__(self, sections: list[AnyRewardSection], output: int | None) -> None:
        self._sections = sections
        self._process = GuardedProcess("rlctl.rewards.child", MAX_REPLY, output)
        self._calls = 0
        # Form of each reward, known after the first `start`.
        self.forms: list[Form] = []

    def score(self, reward: int, items: list[RewardInput]) -> list[Outcome]:
        """Score items by the reward with index `reward`; return one outcome for each item, in order.

        If an item hangs or kills the process, only this item fails.
        """
        outcomes: list[Outcome] = []
        # Number of the last item that was tried again, from 1 on.
        last_retried = 0
        while len(outcomes) < len(items):
            try:
                outcomes += self._call(self.start(), reward, items[len(outcomes) :])
                # The item is not the cause, so it is tried once more: the end of a job sends SIGTERM to all processes.
                if outcomes[-1] in (TERMINATED, NOT_TAKEN) and last_retried != len(outcomes):
                    last_retried = len(outcomes)
                    outcomes.pop()
            except UnusableError as error:
                reason = "; ".join(reason for index, reason in error.problems if index in (reward, None)) or str(error)
                outcomes += [RewardFailure("could not be loaded", detail=reason)] * (len(items) - len(outcomes))
        return outcomes

    def start(self) -> Channel:
        """Start the process unless it runs, load the reward functions, and return the connection.

        Raises UnusableError if a function cannot be loaded.
        """
        # If the process ended or wrote something since its last call, it is replaced before the next call.
        if (running_channel := self._process.ready()) is not None:
            return running_channel
        channel = self._process.start()
        try:
            channel.send(self._sections, START_TIMEOUT_S)
            reply = channel.reply(START_TIMEOUT_S)
            reasons = _read_problems(reply)
            if not reasons:
                self.forms = _read_forms(reply, len(self._sections))
                return channel
        except TimeoutError:
            reasons = [(None, f"rewards took longer than {START_TIMEOUT_S:g} s to load")]
        except (EOFError, ConnectionError):
            reasons = [(None, f"a reward ended its process while loading: {self._process.ending()}")]
        except BadReply:
            reasons = [(None, f"a reward {FOREIGN} while loading")]
        self.stop()
        raise UnusableError(reasons, self._sections)

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor."""
        return self._process.pid

    def stop(self) -> None:
        """End the process and all processes that it started."""
        self._process.stop()

    def _call(self, channel: Channel, reward: int, items: list[RewardInput]) -> list[Outcome]:
        """Send items to the process; return their outcomes, up to the item that ended the process."""
        self._calls += 1
        section = self._sections[reward]
        assert isinstance(section, RewardSection), "no process calls a model"
        timeout_s = section.timeout_s
        outcomes: list[Outcome] = []
        try:
            channel.send((self._calls, reward, items), SEND_TIMEOUT_S)
        except (TimeoutError, ConnectionError):
            self.stop()
            return [NOT_TAKEN]
        except Exception as error:  # a value that pickle refuses, such as one nested too deep: nothing was sent
            # Halve the items until the bad one is alone. The caller sends the rest in another call.
            if len(items) > 1:
                return self._call(channel, reward, items[: len(items) // 2])
            return [RewardFailure("was given a value that cannot be sent", detail=type(error).__name__)]
        try:
            for number in range(len(items)):
                outcomes.append(_read_outcome(channel.reply(timeout_s), self._calls, number))
        except TimeoutError:
            self.stop()
            outcomes.append(RewardFailure(f"took longer than {timeout_s:g} s"))
        except BadReply as error:
            self.stop()
            outcomes.append(RewardFailure(FOREIGN, detail=shorten_text(str(error))))
        except (EOFError, ConnectionError):
            outcomes.append(ended_failure(self._process.ending()))
        return outcomes


def _read_problems(reply: dict[str, Any]) -> list[tuple[int | None, str]]:
    """Return (index, reason) for each reward that the child could not load. Raises BadReply."""
    try:
        return [(int(index), check_text(reason)) for index, reason in reply["problems"]]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadReply("a reply that lists no problems") from error


def _read_forms(reply: dict[str, Any], count: int) -> list[Form]:
    """Return the form of each reward. Raises BadReply."""
    forms = reply.get("forms")
    if not isinstance(forms, list) or len(forms) != count or not set(forms) <= set(get_args(Form)):
        raise BadReply("a reply without the rewards' forms")
    return forms


def _read_outcome(reply: dict[str, Any], call: int, item: int) -> Outcome:
    """Return the outcome in a reply. Raises BadReply for a reply to another call or item, or without an outcome."""
    if (reply.get("call"), reply.get("item")) != (call, item):
        other_call = reprlib.repr(reply.get("call"))
        other_item = reprlib.repr(reply.get("item"))
        raise BadReply(check_text(f"a reply to call {other_call}, item {other_item}"))
    if isinstance(failure := reply.get("failure"), dict):
        return read_failure(failure)
    value = reply.get("value", math.nan)
    if value is None:
        return None
    if not isinstance(value, float) or not math.isfinite(value):
        raise BadReply("a reply without a finite value")
    return value


def read_failure(reply: dict[str, Any]) -> RewardFailure:
    """Return the failure in a reply. Raises BadReply."""
    texts = {key: check_text(reply.get(key, "")) for key in ("kind", "where", "detail", "trace")}
    return RewardFailure(**texts, stops_run=reply.get("stops_run") is True)


def ended_failure(ending: str) -> RewardFailure:
    """Return the failure of a rollout during which the process ended. ending: text on how it ended."""
    return RewardFailure(_ENDED, detail=ending)


def check_text(text: object) -> str:
    """Return a text of the child without lone surrogates, which no file can encode. Raises BadReply for no text."""
    if not isinstance(text, str):
        raise BadReply("a reply whose text is none")
    return text.encode("utf-8", "replace").decode()
