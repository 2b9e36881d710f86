"""Messages between the driver and a process of coroutine rewards: calls, questions, and the reading of replies.

coroutine_worker.py describes the protocol. A reply comes from a process that runs the user's code, and is checked.
"""

import json
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlctl.rewards.base import Outcome, ReasonedValue, RewardFailure, RewardInput
from rlctl.rewards.reward_process import MAX_REPLY, check_text, read_failure
from rlctl.workers.guarded_process import BadReply

# Most bytes of a reply: for a task of 256 rollouts whose failures each have a trace.
MAX_GROUP_REPLY = 256 * MAX_REPLY
# Most characters of a reason.
MAX_REASON = 4000
# Called with the answer to a reward's question, from any thread.
TakeAnswer = Callable[[dict[str, Any]], None]


class Answerer(Protocol):
    """Model that answers the questions of a reward. The methods return at once and are called on one thread."""

    def ask(self, question: str, max_tokens: int, temperature: float, take_answer: TakeAnswer) -> None:
        """Begin to answer. The answer has `text`, `input_tokens` and `output_tokens`, or a `problem`."""

    def look_after(self) -> None:
        """Replace what was lost. Called about once a second while questions are open."""


@dataclass(frozen=True)
class QuestionAnswer:
    """QuestionAnswer to a question of the process."""

    question: int
    answer: dict[str, Any]


@dataclass(eq=False)
class RewardCall:
    """One call of the reward: for one rollout, or for all rollouts of a task."""

    items: list[RewardInput]
    outcomes: "Future[list[Outcome]]" = field(default_factory=Future)
    # Time by which a reply must have come, by time.monotonic.
    deadline: float = math.inf
    # True if the call was made again, though it is not known to be the cause of the first process's end.
    is_repeated: bool = False


def finish_call(call: RewardCall, failure: RewardFailure) -> None:
    """End a call: all of its rollouts have failed."""
    call.outcomes.set_result([failure] * len(call.items))


def read_reply(line: bytes) -> dict[str, Any]:
    """Return the reply in a line. Raises BadReply."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadReply(str(error)) from error
    if not isinstance(reply, dict):
        raise BadReply("a reply is a JSON object")
    return reply


def read_reply_outcome(outcome: object) -> Outcome:
    """Return the outcome in a reply. Raises BadReply."""
    if not isinstance(outcome, dict):
        raise BadReply("an outcome is a JSON object")
    if isinstance(failure := outcome.get("failure"), dict):
        return read_failure(failure)
    value = outcome.get("value", math.nan)
    if value is None:
        return None
    if not isinstance(value, float) or not math.isfinite(value):
        raise BadReply("a reply without a finite value")
    if "reason" in outcome:
        return ReasonedValue(value, check_text(outcome["reason"])[:MAX_REASON])
    return value
