"""Outcomes of an environment's actions, as plain data on both sides of the connection: results of tools, failures."""

import shlex
from dataclasses import dataclass, field
from typing import Any, Literal

from rlctl.data.chat import ChatSpec
from rlctl.environments.contract import Message

FailureKind = Literal["raised", "timeout", "died", "memory", "contract", "too_long"]
KEY_HINT = "does it use the address and the key that it is given?"
# Remedy for an agent that failed before any request with its session's key.
UNREACHED = f"no request reached its session: {KEY_HINT}"
# Remedy for an agent that ran out of time before any request. With a new client of the `openai` SDK in each call, all
# 512 calls of a step ran out of 30 s, on two cores at load 14.
LATE = f"{UNREACHED} Does each call make a client? One for the whole process spares 20 ms of CPU a call"
# Last words of a failure's cause if the system refused to start an agent's command.
NOT_STARTED = "cannot be started"


class InfrastructureError(RuntimeError):
    """A server or a sandbox that an environment needs has failed. It ends the episode, also if a tool raises it."""


@dataclass(frozen=True)
class AgentSpec:
    """The agent of a run; `EnvironmentSpec.name` names its function or its command."""

    # Words of the command; empty for a function.
    command: tuple[str, ...] = ()
    # Address that its endpoint listens on.
    bind: str = "127.0.0.1"
    # Tokenizer and chat template; None means that each byte of a text is a token, for a trial without a model.
    chat: ChatSpec | None = None
    # Format of tool calls, a key of `tool_formats.PARSERS`; None if the template has no known format.
    tool_format: str | None = None


def command_of(command: str, wrap: str | None) -> list[str]:
    """Return the words of `wrap`, then those of `command`. Raises ValueError for a quotation without an end."""
    return [*shlex.split(wrap or ""), *shlex.split(command)]


@dataclass(frozen=True)
class EnvironmentSpec:
    """One environment of a run."""

    # A name of NAMED_ENVIRONMENTS or AGENTS in config/plugins.py, module:Class or file.py:Class.
    name: str
    # Seconds that a reset, a tool, a step or a reward may take.
    timeout_s: float
    # Keyword arguments of the class, or of the agent's function.
    args: dict[str, Any] = field(default_factory=dict)
    # True for a rollout function, False for a class. None: the imported object decides; a function with three
    # parameters is then an agent.
    is_function: bool | None = False
    # Names of the run's reward functions. Those with a parameter `environments` get the instance.
    rewards: tuple[str, ...] = ()
    # None if the environment is no agent.
    agent: AgentSpec | None = None


@dataclass(frozen=True)
class EnvironmentFailure:
    """Reason why an episode ended without a reward. It is no reward of 0: the rollout is tried again or left out."""

    # raised: by reset, step or get_reward (a tool's exception goes to the model instead). timeout: past its deadline.
    # died: its process ended. memory: its process used more than its bound. contract: a value of the wrong type.
    # too_long: no micro-batch holds its rows.
    kind: FailureKind
    # Action and place of the failure, without text of the rollout. Failures with an equal cause are counted together.
    cause: str
    # One line of the failure's text.
    detail: str = ""
    # Traceback in the user's code.
    trace: str = ""
    # True if later episodes of the process would fail in the same way.
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.cause}: {self.detail}" if self.detail else self.cause


@dataclass(frozen=True)
class ToolResult:
    """Answer to one call."""

    # Name of the tool; empty for a malformed call.
    name: str
    # Text that the model reads.
    content: str
    # True if the tool raised, is unknown, or the call was malformed.
    failed: bool
    # `raised KeyError at my_env.py:20`, if the tool's own code raised.
    raised: str = ""

    def message(self) -> Message:
        """Return the message of role `tool`."""
        message: Message = {"role": "tool"}
        if self.name:
            message["name"] = self.name
        message["content"] = self.content
        return message
