"""Set-up of a run's episodes: loads its environments, and tries one episode before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rlctl.config.errors import one_line
from rlctl.config.schema import GrpoConfig
from rlctl.data.chat import Chat, ChatSpec
from rlctl.data.files import DataError
from rlctl.data.row_chat import chat_of_row
from rlctl.data.tasks import Task
from rlctl.data.templates import choose_template
from rlctl.data.unwritten_messages import UnwrittenMessages
from rlctl.environments.contract import ContractError, EnvironmentContract, Message, opening_messages
from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.function_trial import TriedFunction, try_agent, try_function
from rlctl.environments.outcomes import AgentSpec, EnvironmentFailure, EnvironmentSpec, command_of
from rlctl.environments.tool_formats import PARSERS, tool_format
from rlctl.preflight.settled import SettledGrpo
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.telemetry.metrics import Metric, from_record
from rlctl.utils.user_code import looks_like_bug
from rlctl.workers.user_logs import Emit

# Keys of a rollout function and of an agent in the environment pool. They are the names of the config's sections.
_FUNCTION = "rollout"
_AGENT = "agent"
_UNWRITTEN = "data.chat_template: the template leaves out {}: the model does not see it; set another template"


@dataclass(frozen=True)
class EpisodeSetup:
    """Facts about a run's environments, learned by trying them."""

    # Environment's key in the pool -> its contract.
    contracts: Mapping[str, EnvironmentContract]
    # Parser of tool calls, a key of `tool_formats.PARSERS`; None if no environment has tools.
    tool_format: str | None
    # First messages of the first task's episode, and the schemas of its tools.
    first: list[Message]
    tools: Sequence[dict[str, Any]]
    # Lines for the user on the environments, each led by a config key, and on the chat template.
    environment_notes: list[str]
    template_notes: list[str]
    # Tokens of the first prompt of an agent; empty if no agent plays.
    prompt: Sequence[int] = ()

    @property
    def metrics(self) -> list[Metric]:
        """Metrics that the environments declare."""
        records = chain.from_iterable(contract.metrics for contract in self.contracts.values())
        return [from_record(record) for record in records]

    @property
    def notes(self) -> list[str]:
        """Lines for the user on the environments and on the chat template."""
        return [*self.environment_notes, *self.template_notes]


def environment_pool(config: GrpoConfig, logs: Path | None = None, emit: Emit | None = None) -> EnvironmentPool:
    """Return the pool of a run's environments, without starting its processes. Call it before Ray starts."""
    section = config.environment
    rewards = tuple(reward.name for reward in config.rewards if ":" in reward.name)
    specs = {
        key: EnvironmentSpec(choice.name, section.timeout_s, choice.args, rewards=rewards)
        for key, choice in section.environments.items()
    }
    if config.rollout is not None:
        specs = {_FUNCTION: EnvironmentSpec(config.rollout, section.timeout_s, is_function=True)}
    if config.agent.is_enabled:
        agent = config.agent
        words = tuple(command_of(agent.command, agent.wrap)) if agent.command else ()
        spec = AgentSpec(words, agent.bind)
        specs = {_AGENT: EnvironmentSpec(agent.entry_point, section.timeout_s, agent.args, agent=spec)}
    processes = None if section.processes == "auto" else section.processes
    return EnvironmentPool(specs, section.memory_mib, processes, logs, emit)


def episode_limits(settled: SettledGrpo, trains: bool) -> EpisodeLimits:
    """Return the budgets of an episode. trains: True if its rows will be part of a micro-batch."""
    section = settled.config.environment
    return EpisodeLimits(
        max_turns=section.max_turns,
        max_length=settled.max_length,
        timeout_s=section.episode_timeout_s,
        max_retries=section.max_retries,
        history=section.history,
        max_trained=settled.trainer.micro_batch_tokens if trains and settled.whole_rollouts else None,
    )


def read_environments(config: GrpoConfig, pool: EnvironmentPool) -> dict[str, EnvironmentContract]:
    """Return the contract of each environment, rollout function or agent, by its key in the pool.

    Raises UnusableEnvironmentError with every problem: (key of the config, reason).
    """
    keys = _config_keys(config)
    try:
        return pool.contracts()
    except UnusableEnvironmentError as error:
        raise UnusableEnvironmentError([(keys[key], reason) for key, reason in error.problems]) from None


def _config_keys(config: GrpoConfig) -> dict[str, str]:
    """Return for each environment's key in the pool the config key that names the environment."""
    section = config.environment
    if config.rollout is not None:
        return {_FUNCTION: _FUNCTION}
    if config.agent.is_enabled:
        return {_AGENT: "agent.command" if config.agent.command else "agent.name"}
    return {
        key: f"environment.choices.{key}.name" if section.choices else "environment.name"
        for key in section.environments
    }


def set_up(
    config: GrpoConfig, pool: EnvironmentPool, chat: Chat, first: Task, *, needs_reward: bool = True
) -> EpisodeSetup:
    """Read the environments, and try one episode of the task `first`.

    needs_reward: True if episodes must have a reward.
    Raises UnusableEnvironmentError with every problem: (key of the config, reason).
    """
    section = config.environment
    if config.agent.is_enabled:
        format = format_of_calls(section.tool_format, chat)
        pool.give_chat(ChatSpec.from_chat(chat), format)
        contracts = read_environments(config, pool)
        note, tried = _try_agent(config, pool, chat, first, needs_reward)
        template_notes = [_UNWRITTEN.format("a message of the agent")] if tried.unwritten else []
        return EpisodeSetup(contracts, format, first.messages, [], [note], template_notes, tried.prompt)
    contracts = read_environments(config, pool)
    keys = _config_keys(config)
    if config.rollout is not None:
        return EpisodeSetup(contracts, None, [], [], [_try_function(config, pool, chat, first, needs_reward)], [])
    problems = _unvalued_problems(config, contracts, keys) if needs_reward else []
    environment_notes = []
    for key, contract in contracts.items():
        environment_notes += [f"{keys[key]}: {note}" for note in contract.notes]
    has_tools = any(contract.tools for contract in contracts.values())
    format = format_of_calls(section.tool_format, chat)
    if has_tools:
        problems += tool_problems(chat, format)
    first_key = pool.key_of(first.row)
    first_contract = contracts[first_key]
    row_chat = chat_of_row(chat, first.row)
    messages, reset_problem = _try_reset(pool, first)
    if reset_problem:
        problems.append((keys[first_key], reset_problem))
    else:
        problems += _template_problems(row_chat, messages, first_contract)
    if problems:
        raise UnusableEnvironmentError(problems)
    roles = UnwrittenMessages().find_roles(row_chat, messages, first_contract.tools)
    template_notes = [_UNWRITTEN.format(f"a message of role {role}") for role in dict.fromkeys(roles)]
    if chat.rewrites_history():
        keeps = section.history == "keep"
        effect = "they stay as they were sampled" if keeps else "what differs trains as another row"
        template_notes.append(
            f"environment.history={section.history}: the chat template writes earlier turns otherwise than they were "
            f"sampled, as one that drops thinking; {effect}"
        )
    return EpisodeSetup(
        contracts=contracts,
        tool_format=format if has_tools else None,
        first=messages,
        tools=first_contract.tools,
        environment_notes=environment_notes,
        template_notes=template_notes,
    )


def _try_function(config: GrpoConfig, pool: EnvironmentPool, chat: Chat, first: Task, needs_reward: bool) -> str:
    """Call the rollout function on a task, with the row's answer as each sample. Return a line for the user.

    Raises UnusableEnvironmentError if the function fails. If the row has no answer, the samples are made up, and the
    function may refuse them: then only an exception that looks like a bug is a failure.
    """
    answer: list[int] = []
    if first.answer:
        answer = list(chat.tokenizer(first.answer, add_special_tokens=False).input_ids)
    if answer and chat.ends.trained is not None:
        answer.append(chat.ends.trained)
    task = {"id": first.id, "prompt": first.text, "tokens": first.tokens, "answer": first.answer, "row": first.row}
    tried = try_function(pool, "first", task, 0, [answer or first.tokens[-1:]], config.environment.max_turns)
    failure = None if tried.failure is None else str(tried.failure)
    if failure is None and tried.reward is None and needs_reward and not config.rewards:
        failure = "returned None, and rewards is empty: nothing values its rollouts"
    elif tried.failure and not answer and tried.failure.kind == "raised" and not looks_like_bug(tried.failure.cause):
        return f"rollout: tried on row {first.id} with a made-up answer: {failure}"
    if failure is not None:
        raise UnusableEnvironmentError([(_FUNCTION, f"row {first.id}: {failure}")])
    worth = "no reward" if tried.reward is None else f"reward {tried.reward}"
    return f"rollout: tried on row {first.id} with scripted answers: samples {len(tried.samples)}, {worth}"


def _try_agent(
    config: GrpoConfig, pool: EnvironmentPool, chat: Chat, first: Task, needs_reward: bool
) -> tuple[str, TriedFunction]:
    """Run the agent on a task; each turn is the row's answer, or "yes". Return (line for the user, the trial's record).

    Raises UnusableEnvironmentError for a bug, a broken contract, and an agent whose rollouts would have no reward. The
    agent may fail on the made-up turns, but not before it has received one.
    """
    turn = list(chat.tokenizer(first.answer or "yes", add_special_tokens=False).input_ids)
    if chat.ends.trained is not None:
        turn.append(chat.ends.trained)
    task = {"id": first.id, "prompt": first.text, "messages": first.messages, "answer": first.answer, "row": first.row}
    tried = try_agent(pool, "first", task, 0, turn, config.environment.max_turns)
    failure = tried.failure
    trial = f"agent: tried on row {first.id} with made-up turns"
    if failure is not None and failure.kind == "raised" and tried.samples and not looks_like_bug(failure.cause):
        return f"{trial}: {failure}", tried
    reason = None if failure is None else str(failure)
    if reason is None and tried.reward is None and needs_reward and not config.rewards:
        reason = "gave no value, and rewards is empty: nothing values its rollouts"
    if reason is not None:
        raise UnusableEnvironmentError([(_config_keys(config)[_AGENT], f"row {first.id}: {reason}")])
    worth = "no reward" if tried.reward is None else f"reward {tried.reward}"
    return f"{trial}: requests {len(tried.samples)}, {worth}", tried


def _unvalued_problems(
    config: GrpoConfig, contracts: Mapping[str, EnvironmentContract], keys: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return a problem (config key, reason) for each environment whose episodes would have no reward."""
    if config.rewards:
        return []
    problem = (
        "has no get_reward, and rewards is empty: nothing values its episodes; name a function of yours in rewards, as "
        "`def reward(environments, **kwargs)`"
    )
    return [(keys[key], problem) for key, contract in contracts.items() if not contract.has_reward]


def format_of_calls(setting: str, chat: Chat) -> str | None:
    """Return the parser of tool calls; None if the chat template's format is unknown. setting: a parser, or "auto"."""
    if setting != "auto":
        return setting
    return None if chat.template is None else tool_format(choose_template(chat.template, with_tools=True))


def tool_problems(chat: Chat, format: str | None) -> list[tuple[str, str]]:
    """Return a problem (config key, reason) if the model cannot be shown tools, or if its calls cannot be parsed."""
    if chat.template is None:
        return [("data.chat_template", "there is none, and tools are shown to the model by a chat template")]
    if format is None:
        names = ", ".join(PARSERS)
        return [
            ("environment.tool_format", f"the chat template has no format of tool calls that is known: set {names}")
        ]
    return []


def _try_reset(pool: EnvironmentPool, task: Task) -> tuple[list[Message], str]:
    """Begin an episode of a task, and close it. Return its first messages and "", or no messages and the reason."""
    observation = pool.reset("first", task.row, 0).result()
    pool.close("first")
    if isinstance(observation, EnvironmentFailure):
        return [], f"row {task.id}: {observation}"
    try:
        messages = opening_messages(task.messages, observation)
    except ContractError as error:
        return [], f"row {task.id}: {error}"
    return messages, "" if messages else f"row {task.id} has no prompt, and reset returned None"


def _template_problems(chat: Chat, messages: list[Message], contract: EnvironmentContract) -> list[tuple[str, str]]:
    """Return a problem (config key, reason) if the template refuses the first prompt, or messages after a turn."""
    answer = {"role": "tool", "content": "answer"} if contract.tools else {"role": "user", "content": "answer"}
    try:
        chat.prompt(messages, contract.tools)
        chat.link(messages, [answer], contract.tools)
    except DataError as error:
        return [("data.chat_template", str(error))]
    except Exception as error:  # a template may raise any exception
        return [("data.chat_template", f"refuses the first prompt: {one_line(error)}")]
    return []
