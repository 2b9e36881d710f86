"""Messages between the driver and a process of environments. Each side matches them by type.

    driver -> process: the environments' specs, once; then an `ActionRequest` for each action, pickled
    process -> driver: `ProcessStarted`, the contracts, then an `ActionReply` for each action, as JSON

The driver never unpickles a reply, because user code runs in the process. A function checks each reply and refuses a
value of another form. Replies of rollout functions and agents are checked here, other replies in `contract.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

from rlctl.environments.contract import ContractError, Message, Reward, check_reward
from rlctl.environments.outcomes import EnvironmentFailure
from rlctl.utils.user_code import shorten_text

# Most counts that an agent's process may send, and most characters of a count's name.
_MOST_COUNTS = 64
_LONGEST_NAME = 400


class Sampled(NamedTuple):
    """One sampled turn of a rollout function; all three lists are empty if a budget is used up."""

    tokens: list[int]
    # Log-prob of each token under the sampled distribution.
    log_probs: list[float]
    # Weight version that sampled each token.
    versions: list[int]


@dataclass(frozen=True)
class AgentTurn:
    """One sampled turn, as an agent's process gets it."""

    tokens: list[int]
    log_probs: list[float]
    # Reason why the turn ended: `stop` or `length`.
    finish: str


# A turn, or the name of the budget that is used up, for example `max_turns`.
AgentAnswer = AgentTurn | str


@dataclass(frozen=True)
class ResetEpisode:
    """Create an instance of an environment, and call its `reset`."""

    kind: ClassVar = "reset"
    # Key of the environment.
    key: str
    row: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class CallTools:
    """Call tools: (name, arguments) of each call."""

    kind: ClassVar = "call"
    calls: list[tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class StepEpisode:
    """Give the assistant's message to `step`."""

    kind: ClassVar = "step"
    message: str


@dataclass(frozen=True)
class RewardEpisode:
    """Compute the episode's reward. columns: `prompts`, `completions` and columns of the row, for reward functions."""

    kind: ClassVar = "reward"
    columns: Mapping[str, Any] | None


@dataclass(frozen=True)
class BeginFunction:
    """Call a rollout function. task: fields of `PlayTask`."""

    kind: ClassVar = "begin"
    key: str
    task: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class ResumeFunction:
    """Give a rollout function its next answers in the order of its requests; None if a budget is used up."""

    kind: ClassVar = "resume"
    answers: Sequence[Sampled | None]


@dataclass(frozen=True)
class BeginAgent:
    """Start an agent. task: fields of `AgentTask`."""

    kind: ClassVar = "begin"
    key: str
    task: dict[str, Any]
    seed: int


@dataclass(frozen=True)
class ResumeAgent:
    """Give an agent answers: (number of the request, answer) pairs."""

    kind: ClassVar = "resume"
    answers: Sequence[tuple[int, AgentAnswer]]


@dataclass(frozen=True)
class CloseEpisode:
    """End the episode."""

    kind: ClassVar = "close"


# Messages that begin an episode.
OpeningMessage = ResetEpisode | BeginFunction | BeginAgent
EpisodeMessage = OpeningMessage | CallTools | StepEpisode | RewardEpisode | ResumeFunction | ResumeAgent | CloseEpisode


@dataclass(frozen=True)
class ActionRequest:
    """One action of an episode."""

    # Number of the action, which the reply repeats.
    action: int
    # Number of the episode.
    episode: int
    message: EpisodeMessage


@dataclass(frozen=True)
class ProcessStarted:
    """Process ids of an environment process that has started, and of its supervisor."""

    pid: int
    supervisor: int


@dataclass(frozen=True)
class ActionReply:
    """Reply to an action. outcome: the action's value as JSON data, or the failure that ended the episode."""

    action: int
    outcome: Any

    def plain(self) -> dict[str, Any]:
        """Return the reply as JSON data."""
        if isinstance(self.outcome, EnvironmentFailure):
            return {"action": self.action, "failure": asdict(self.outcome)}
        return {"action": self.action, "value": self.outcome}


def read_reply(message: dict[str, Any]) -> ActionReply:
    """Return the reply that a process sent as JSON. Raises KeyError or TypeError for a message that is no reply."""
    failure = message.get("failure")
    outcome = message.get("value") if failure is None else EnvironmentFailure(**failure)
    return ActionReply(message["action"], outcome)


class ToolAnswer(NamedTuple):
    """Answer of one tool."""

    text: str
    # True if the tool raised, or is unknown.
    failed: bool
    # Cause of the failure if the tool's own code raised, else empty.
    cause: str


@dataclass(frozen=True)
class ToolsCalled:
    """Answers of tools, in the order of the calls."""

    results: list[ToolAnswer]
    # First failure of each cause.
    raised: list[EnvironmentFailure]

    def plain(self) -> dict[str, Any]:
        """Return the message as JSON data."""
        return {"results": self.results, "raised": [asdict(failure) for failure in self.raised]}


def read_tools_called(value: object) -> ToolsCalled:
    """Return the answers of tools that a process sent as JSON. Raises ContractError for another value."""
    match value:
        case {"results": list(results), "raised": list(raised), **rest} if not rest:
            answers = [ToolAnswer(str(text), bool(failed), str(cause)) for text, failed, cause in results]
            return ToolsCalled(answers, [EnvironmentFailure(**failure) for failure in raised])
    raise ContractError("no answers of tools")


@dataclass(frozen=True)
class FunctionWaits:
    """A rollout function waits for samples."""

    # Token ids of each prompt for which the function asked for a sample since its last message, in order.
    samples: list[list[int]]
    # Number of answers that the function got since its last message.
    answers_taken: int
    # True if the function asked again although it knew that a budget is used up.
    asks_again: bool = False


@dataclass(frozen=True)
class FunctionEnded:
    """A rollout function has returned. reward: None leaves the reward to the run's reward functions."""

    answers_taken: int
    reward: Reward | None


FunctionMessage = FunctionWaits | FunctionEnded


def read_function_message(value: object) -> FunctionMessage:
    """Return a rollout function's message, which its process sent as JSON. Raises ContractError for another value."""
    match value:
        case {"samples": list(prompts), "answers_taken": int(taken), "asks_again": bool(again), **rest} if not rest:
            if all(isinstance(prompt, list) and _are_tokens(prompt) for prompt in prompts):
                return FunctionWaits(samples=prompts, answers_taken=taken, asks_again=again)
        case {"reward": reward, "answers_taken": int(taken), **rest} if not rest:
            return FunctionEnded(answers_taken=taken, reward=None if reward is None else check_reward(reward))
    raise ContractError("neither tokens to sample after nor a reward")


def _are_tokens(values: Iterable[object]) -> bool:
    return all(type(value) is int for value in values)


@dataclass(frozen=True)
class AgentAsk:
    """An agent's request for one turn, as the driver reads it."""

    # Number of the request in its session.
    number: int
    # Number of the earlier request whose turn this one continues; None for a new conversation.
    after: int | None
    # Tokens of the prompt behind that turn; all tokens of the prompt for a new conversation.
    tokens: list[int]
    # Messages that no earlier request had.
    messages: list[Message]
    # Most tokens of the turn; None means the run's limit.
    max_tokens: int | None = None
    # Ids of the tokens that end the turn: the request's stop strings that are one token.
    stops: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class AgentWaits:
    """An agent waits for turns."""

    asks: list[AgentAsk]
    # (number of the request, number of tokens) of each turn that the agent got since its last message.
    delivered: list[tuple[int, int]]

    def plain(self) -> dict[str, Any]:
        """Return the message as JSON data."""
        return {"asks": [vars(ask) for ask in self.asks], "delivered": self.delivered}


@dataclass(frozen=True)
class AgentEnded:
    """An agent has ended."""

    # As in `AgentWaits`.
    delivered: list[tuple[int, int]]
    # None leaves the reward to the run's reward functions.
    reward: Reward | None
    # Text of the agent's failure if a used-up budget refused its last request; else empty.
    raised: str
    # Counts of the session, for example `coalesced`.
    counts: dict[str, int]
    # Reason why a request continued no turn -> number of such requests.
    rewritten: dict[str, int]

    def plain(self) -> dict[str, Any]:
        """Return the message as JSON data."""
        return {"ended": True, **vars(self)}


AgentMessage = AgentWaits | AgentEnded


def read_agent_message(value: object) -> AgentMessage:
    """Return an agent's message, which its process sent as JSON. Raises ContractError for another value."""
    fields: dict[str, Any] = dict(value) if isinstance(value, dict) else {}
    # A missing field raises KeyError. An unknown field is left in `fields`, and the constructor raises TypeError.
    try:
        delivered = [(int(number), int(length)) for number, length in fields.pop("delivered")]
        if not fields.pop("ended", False):
            return AgentWaits([_read_ask(ask) for ask in fields.pop("asks")], delivered, **fields)
        reward = fields.pop("reward")
        for name in ("counts", "rewritten"):
            fields[name] = _read_counts(fields[name])
        return AgentEnded(delivered, None if reward is None else check_reward(reward, "the agent"), **fields)
    except (TypeError, ValueError, KeyError) as error:
        raise ContractError(f"no message of an agent: {shorten_text(str(error))}") from error


def _read_counts(value: Any) -> dict[str, int]:
    """Return counts by name. Raises ContractError for other values, and for more counts than a session has."""
    counts = dict(value)
    if len(counts) > _MOST_COUNTS or not all(
        len(name) <= _LONGEST_NAME and 0 <= count < 1e9 for name, count in counts.items()
    ):
        raise ContractError("counted in other values than numbers by name")
    return {name: int(count) for name, count in counts.items()}


def _read_ask(value: dict[str, Any]) -> AgentAsk:
    ask = AgentAsk(**value)
    integers = [integer for integer in (ask.number, ask.after, ask.max_tokens) if integer is not None]
    if not all(type(integer) is int and integer >= 0 for integer in integers) or not isinstance(ask.messages, list):
        raise ContractError("asked for a turn that is none")
    if not (_are_tokens(ask.tokens) and _are_tokens(ask.stops)):
        raise ContractError("asked for a turn after other values than tokens")
    return ask
