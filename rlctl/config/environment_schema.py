"""Schema of a GRPO run's environment and agent."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Any, Literal

from rlctl.config.fields import MOST_PROCESSES, seconds, spec


@dataclass
class EnvironmentChoice:
    """One of several environments."""

    name: str = spec(
        "A shipped environment (guess, calculator, sqlite, maze), tools in the sandbox (python, shell, python_shell), "
        "a shelf (harbor, openenv), or a class: module:Class or "
        "file.py:Class.",
        path="plugin",
    )
    args: dict[str, Any] = spec("The keyword arguments of the class.")


@dataclass
class EnvironmentSection:
    """The environment with which the policy interacts in its rollouts."""

    name: str | None = spec(
        "A shipped environment (guess, calculator, sqlite, maze), tools in the sandbox (python, shell, python_shell), "
        "a shelf (harbor, openenv), or a class: module:Class or "
        "file.py:Class. null has one prompt and one answer a rollout.",
        path="plugin",
    )
    args: dict[str, Any] = spec("The keyword arguments of the class.")
    choices: dict[str, EnvironmentChoice] = spec(
        "In place of a name: several environments, each {name, args} under a key. A row's column "
        "environment holds its key."
    )
    max_turns: int = spec("An episode ends after this many turns.", ge=1, most=32767)
    max_length: int | None = spec(
        "An episode ends when its conversation has this many tokens. null is the longest sequence of the model.", ge=2
    )
    timeout_s: float = seconds(
        "A reset, tool call, step or reward that takes longer than this, in seconds, has failed.", gt=0
    )
    episode_timeout_s: float = seconds("After this many seconds an episode begins no further turn.", gt=0)
    max_retries: int = spec(
        "An episode whose environment failed is played again from its task, at most this many times. Then it is left "
        "out and counted.",
        ge=0,
    )
    history: Literal["keep", "strip"] = spec(
        "Earlier turns stay as they were sampled (keep), or are written as the chat template writes them (strip). "
        "Where the two differ, strip trains on several rows a rollout."
    )
    tool_format: Literal["auto", "hermes", "qwen3_coder", "llama3", "mistral"] = spec(
        "The format of tool calls. auto is that of the chat template."
    )
    processes: int | Literal["auto"] = spec(
        "The processes that environments run in. auto is one a core, at most 4.", ge=1, most=MOST_PROCESSES
    )
    memory_mib: int = spec("The memory that each of these processes may use, in MiB.", ge=64, most=1 << 30)

    @property
    def is_enabled(self) -> bool:
        """True if rollouts are played against an environment."""
        return self.name is not None or bool(self.choices)

    @property
    def environments(self) -> dict[str, EnvironmentChoice]:
        """Key -> environment, for all environments of the run. A single environment has its name as key."""
        if self.name is None:
            return self.choices
        return {self.name.rpartition(":")[2]: EnvironmentChoice(self.name, self.args)}


@dataclass
class AgentSection:
    """A program that plays rollouts through an endpoint of the policy."""

    name: str | None = spec(
        "A function run(task, base_url, api_key), async or not: module:function or file.py:function. It asks for turns "
        "at base_url as at OpenAI's or Anthropic's API. Budgets, deadlines and processes are those of environment. "
        "verifiers is an environment server of verifiers v1. `agent: file.py:run` is short for this key. null has no "
        "agent.",
        path="plugin",
    )
    args: dict[str, Any] = spec("Further keyword arguments of the function.")
    command: str | None = spec(
        "In place of a name: a command, run once a rollout. It gets OPENAI_BASE_URL, OPENAI_API_KEY, "
        "ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, and the task as JSON in RLCTL_TASK."
    )
    wrap: str | None = spec(
        "Words that are put before the command, as `docker run --rm --network host -e OPENAI_BASE_URL "
        "-e OPENAI_API_KEY -e RLCTL_TASK my-image`. rlctl itself isolates nothing."
    )
    max_processes: int | Literal["auto"] = spec(
        "Only with a command: the commands that run at one time; further rollouts wait. auto is eight a core.",
        ge=1,
        most=MOST_PROCESSES,
    )
    bind: str = spec(
        "The address that the endpoint listens on. Another one than 127.0.0.1 serves sandboxes on other machines. "
        "Every session has a key of its own."
    )

    @property
    def is_enabled(self) -> bool:
        """True if an agent plays the rollouts."""
        return self.name is not None or self.command is not None

    @property
    def entry_point(self) -> str:
        """The config's function or command."""
        return self.name or self.command or ""
