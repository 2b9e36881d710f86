"""Values between an agent's process and the driver: its task, its requests for turns, its end."""

from dataclasses import dataclass, field
from typing import Any

from rlctl.environments.contract import ContractError, Message, Reward, checked_reward
from rlctl.utils.user_code import shortened

# Numbers that an agent's process may tell, and characters of the name of one.
_MOST, _LONGEST = 64, 400
KEY_HINT = "does it use the address and the key that it is given?"
# Remedy for an agent that failed before any request with its session's key.
UNREACHED = f"no request reached its session: {KEY_HINT}"
# End of the cause of a command that the system refused to start.
NOT_STARTED = "cannot be started"


@dataclass(frozen=True)
class AgentTask:
    """The task of one rollout, as an agent is given it."""

    # `r17`: row 17.
    id: str
    # Text of the row's prompt, and its messages; empty if the row has none.
    prompt: str
    messages: list[Message]
    answer: str | None
    # All columns of the row.
    row: dict[str, Any]


@dataclass(frozen=True)
class AgentAsk:
    """A request for one turn, as the driver reads it."""

    number: int
    # Number of the request whose turn it continues; None for a new conversation.
    after: int | None
    # Tokens behind that turn.
    tokens: list[int]
    # Messages that no earlier request had.
    messages: list[Message]
    # Tokens of the turn at most; None: those of the run.
    most: int | None = None
    # Tokens that are one of the request's stops, and end the turn.
    stops: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class AgentNews:
    """State of an agent that waits for turns, or has ended."""

    asks: list[AgentAsk]
    # (number, tokens) of each turn that the agent got since the last time.
    kept: list[tuple[int, int]]
    ended: bool = False
    reward: Reward | None = None
    # Failure of an agent whose last request met a used-up budget.
    raised: str = ""
    counts: dict[str, int] | None = None
    # Why requests continued no turn -> how often.
    rewritten: dict[str, int] | None = None


def checked_news(value: object) -> AgentNews:
    """Return an agent's news, as its process sent it. Raises ContractError."""
    given: dict[str, Any] = dict(value) if isinstance(value, dict) else {}
    try:
        asks = [_ask(each) for each in given.pop("asks")]
        kept = [(int(number), int(length)) for number, length in given.pop("kept")]
        reward = given.pop("reward", None)
        for name in ("counts", "rewritten"):
            given[name] = _numbers(given[name]) if name in given else None
        return AgentNews(asks, kept, **given, reward=None if reward is None else checked_reward(reward, "the agent"))
    except (TypeError, ValueError, KeyError) as error:
        raise ContractError(f"no news of an agent: {shortened(str(error))}") from error


def _numbers(value: Any) -> dict[str, int]:
    """Return numbers by name. Raises ContractError for others, and for more than an agent's session has."""
    given = dict(value)
    if len(given) > _MOST or not all(len(name) <= _LONGEST and 0 <= number < 1e9 for name, number in given.items()):
        raise ContractError("counted in other values than numbers by name")
    return {name: int(number) for name, number in given.items()}


def _ask(value: dict[str, Any]) -> AgentAsk:
    ask = AgentAsk(**value)
    numbers = [ask.number, *(each for each in (ask.after, ask.most) if each is not None)]
    if not all(type(each) is int and each >= 0 for each in numbers) or not isinstance(ask.messages, list):
        raise ContractError("asked for a turn that is none")
    if not all(type(each) is int for each in (*ask.tokens, *ask.stops)):
        raise ContractError("asked for a turn after other values than tokens")
    return ask
