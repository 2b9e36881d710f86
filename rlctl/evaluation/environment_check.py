"""Scripted episodes of an environment or a rollout function, in the process that a run would use, without an engine.

The player of a run plays them with a scripted policy. It calls each tool once, with arguments made from its schema, and
then says a few plain messages to `step`. A parameter named like a column of the row gets the row's value, so that a
script for a data set with the answers may even win.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, cast

from rlctl.config.data_schema import DatasetSection
from rlctl.config.paths import resolve
from rlctl.config.plugins import ENVIRONMENTS
from rlctl.config.provenance import Origin
from rlctl.data.chat import Chat
from rlctl.data.datasets import Row, load_rows
from rlctl.data.files import DataError
from rlctl.data.tasks import Task
from rlctl.environments.contract import EnvironmentContract, Message, Observation, Reward, opening
from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.function_trial import try_function
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec
from rlctl.environments.plain_chat import PLAIN_FORMAT, PlainChat
from rlctl.environments.tool_formats import ToolCall
from rlctl.environments.tool_schema import Schema
from rlctl.environments.tool_values import listed, properties_of, schema_types
from rlctl.evaluation.scripted_policy import AgentScript, ScriptedPolicy, TimedAction, TimedPool, call_text
from rlctl.generation.requests import RolloutId
from rlctl.rollout.players.agent import AgentPlayer, agent_notes
from rlctl.rollout.players.environment import EnvironmentPlayer
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.types import RolloutStart
from rlctl.utils.user_code import load_object, looks_like_bug, shortened

EPISODES = 3
# Turns of a tried agent.
AGENT_TURNS = 8
MESSAGES = ("1", "Hello.", "I do not know.", "8", "The answer is 3.")
# Where neither the class nor a row begins an episode, and no rows are given.
_PROMPT: Message = {"role": "user", "content": "prompt"}
_MADE_UP = (
    "reset returns no message, so each row of a run needs a column prompt; no rows are given here: the episodes begin "
    "with a made-up one, and --data FILE plays rows of yours"
)
_VALUES: dict[str, tuple[Any, ...]] = {
    "integer": (1, 2, 3),
    "number": (1.0, 2.5, -1.0),
    "string": ("text", "1", "hello"),
    "boolean": (True, False, True),
    "array": ([], [], []),
    "object": ({}, {}, {}),
    "null": (None, None, None),
}


@dataclass(frozen=True)
class ScriptedTurn:
    """One action of the script and its answer."""

    # `increment(step=1)`, or the message itself.
    said: str
    # Text that the model would read; None: the episode has ended.
    answer: str | None
    # True if the tool raised or is unknown.
    failed: bool
    seconds: float
    # Name of the tool; empty for a message. Error and place, if the tool's own code raised.
    tool: str = ""
    raised: str = ""


@dataclass
class ScriptedEpisode:
    """One scripted episode."""

    # Messages that it begins with.
    opening: list[Message] = field(default_factory=list)
    turns: list[ScriptedTurn] = field(default_factory=list)
    # Tokens of each prompt of a rollout function and of its answer.
    samples: list[tuple[int, int]] = field(default_factory=list)
    # Names of an agent's parameters that were not used, and why its requests continued no turn, with their numbers.
    counts: dict[str, float] = field(default_factory=dict)
    rewritten: dict[str, int] = field(default_factory=dict)
    # None: the class has no `get_reward`, or the episode failed before.
    reward: Reward | None = None
    # Reason why it ended early.
    failure: str | None = None
    # Seconds that `reset`, or a whole rollout function, took.
    reset_s: float = 0.0


@dataclass(frozen=True)
class CheckReport:
    """Findings about one environment."""

    contract: EnvironmentContract | None
    episodes: list[ScriptedEpisode]
    # One line for each reason why the environment cannot be used as it is.
    problems: list[str]
    # One line for each thing worth knowing.
    notes: list[str]
    # Seconds until the process had loaded the environment.
    start_s: float


def check_environment(
    spec: EnvironmentSpec, rows: Sequence[Mapping[str, Any]], memory_mib: int, seed: int, model_follows: bool = False
) -> CheckReport:
    """Load an environment and play `EPISODES` episodes, one a row in turn. Its errors are in the report.

    model_follows: a model plays afterwards, so that the script's rewards say nothing.
    """
    begin = time.perf_counter()
    with EnvironmentPool({spec.name: spec}, memory_mib, processes=1) as pool:
        try:
            contract = pool.contracts()[spec.name]
        except UnusableEnvironmentError as error:
            return CheckReport(None, [], [reason for _, reason in error.problems], [], time.perf_counter() - begin)
        start_s = time.perf_counter() - begin
        episodes = []
        for index in range(EPISODES):
            row = rows[index % len(rows)]
            if contract.is_agent:
                episodes.append(_run_agent(pool, index, row, seed + index))
            elif contract.is_function:
                episodes.append(_call_function(pool, index, row, seed + index))
            else:
                episodes.append(_play_scripted(pool, contract, index, row, seed + index))
        again = [] if contract.is_function or contract.is_agent else _reset_again(pool, episodes[0], rows[0], seed)
    made_up = [_MADE_UP] * any(each.opening == [_PROMPT] for each in episodes)
    unused = [f"{name} takes no parameter `environments`: it is not tried here" for name in _unused(spec, contract)]
    doubts = [*_silent_tools(episodes), *([] if model_follows else _equal_rewards(episodes))]
    notes = [*contract.notes, *unused, *made_up, *again, *doubts, *_told_of_agents(episodes)]
    return CheckReport(contract, episodes, [*_failures(episodes), *_bugs(episodes)], notes, start_s)


def _unused(spec: EnvironmentSpec, contract: EnvironmentContract) -> list[str]:
    return [name for name in spec.rewards if name not in contract.rewards]


def _failures(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return a line for each reason why episodes ended early."""
    failed: dict[str, list[str]] = {}
    for index, each in enumerate(episodes, 1):
        if each.failure:
            failed.setdefault(each.failure, []).append(str(index))
    return [f"episode{'s' * (len(those) > 1)} {', '.join(those)}: {why}" for why, those in failed.items()]


def _bugs(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return a line for each cause for which a tool raised although the call fits its schema."""
    turns = [turn for each in episodes for turn in each.turns if looks_like_bug(turn.raised)]
    lines = [
        f"tool {turn.tool} {turn.raised}: {shortened((turn.answer or '').removeprefix('Error: '))}: it looks like a "
        f"bug, since {turn.said} fits the tool's schema"
        for turn in turns
    ]
    return list({turn.raised: line for turn, line in zip(reversed(turns), reversed(lines))}.values())[::-1]


def _silent_tools(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return a note on each tool without an answer."""
    turns = [turn for episode in episodes for turn in episode.turns]
    silent = dict.fromkeys(turn.tool for turn in turns if turn.tool and turn.answer == "None")
    return [f"tool {name} answered None, and the model reads that word: return its answer" for name in silent]


def _equal_rewards(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return a note if all episodes have one reward."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    if len(rewards) < 2 or any(reward != rewards[0] for reward in rewards):
        return []
    parts = rewards[0].items() if isinstance(rewards[0], dict) else [("", rewards[0])]
    same = ", ".join(f"{part} {value:g}".strip() for part, value in parts)
    remedy = "--model plays by a model, whose rewards may differ"
    return [f"every episode has the same reward, {same}: equal rewards teach nothing; {remedy}"]


def _call_function(pool: EnvironmentPool, index: int, row: Mapping[str, Any], seed: int) -> ScriptedEpisode:
    """Call a rollout function; its answers are the row's own, and others. Tokens are the bytes of the text."""
    prompt, answer = _prompt(row), row.get("answer")
    text = "\n".join(str(message.get("content", "")) for message in prompt) or "prompt"
    answer = None if answer is None else str(answer)
    task = {"id": f"row {index}", "prompt": text, "tokens": list(text.encode()), "answer": answer, "row": dict(row)}
    answers = [list(said.encode()) for said in (answer, *MESSAGES) if said]
    begin = time.perf_counter()
    tried = try_function(pool, index, task, seed, answers[index:] + answers[:index])
    failure = None if tried.failure is None else str(tried.failure)
    took = time.perf_counter() - begin
    return ScriptedEpisode(prompt, samples=tried.samples, reward=tried.reward, failure=failure, reset_s=took)


def _run_agent(pool: EnvironmentPool, index: int, row: Mapping[str, Any], seed: int) -> ScriptedEpisode:
    """Run an agent; its turns call each tool that it shows once, and then say a few messages, the row's answer first.

    Tokens are the bytes of the text. After `AGENT_TURNS` turns its budget is used up.
    """
    prompt, answer = _prompt(row), row.get("answer")
    said = [str(each) for each in (answer, *MESSAGES) if each is not None]
    limits = EpisodeLimits(AGENT_TURNS, sys.maxsize, float("inf"), 0, "keep")
    player = AgentPlayer(pool, cast(Chat, PlainChat()), limits)
    text = "\n".join(str(each.get("content") or "") for each in prompt)
    own_answer = None if answer is None else str(answer)
    task = Task(f"row {index}", [], text, own_answer, dict(row), messages=prompt)
    start = RolloutStart(RolloutId("validation", task.id, index, 0), task, sys.maxsize, 0.0, seed, seed)
    script = AgentScript(
        lambda tools: [call_text(each) for each in _rotated(scripted_calls(tools, row, index), index)], said
    )
    begin = time.perf_counter()
    played = pool.events.submit(player.play(start, script)).result().episode
    assert played is not None
    turns: list[ScriptedTurn] = []
    for number, message in enumerate(played.messages):
        if message["role"] == "assistant":
            after = played.messages[number + 1 : number + 2]
            next_said = str(after[0]["content"]) if after and after[0]["role"] != "assistant" else None
            turns.append(ScriptedTurn(str(message["content"]), next_said, False, 0.0))
    return ScriptedEpisode(
        opening=played.messages[: played.opening],
        turns=turns,
        counts=dict(played.counts or {}),
        rewritten=dict(played.rewritten or {}),
        reward=played.reward,
        failure=played.failure,
        reset_s=time.perf_counter() - begin,
    )


def _rotated(calls: list[ToolCall], index: int) -> list[ToolCall]:
    """Return calls with another one first in each episode, since that one may end it."""
    first = index % max(1, len(calls))
    return [*calls[first:], *calls[:first]]


def _told_of_agents(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return notes on parameters that were not used, and on requests that continued no turn."""
    lines = [line for each in episodes for line in agent_notes(each.counts, each.rewritten)]
    return list(dict.fromkeys(lines))


def scripted_calls(tools: Sequence[Schema], row: Mapping[str, Any], index: int) -> list[ToolCall]:
    """Return one call of each tool. index: of the episode; it varies the values."""
    calls = []
    for tool in tools:
        values = {name: row.get(name, _schema_value(schema, index)) for name, schema in properties_of(tool).items()}
        calls.append(ToolCall(tool["function"]["name"], values))
    return calls


def _schema_value(schema: Any, index: int) -> Any:
    """Return a value of a schema, which may be any JSON."""
    if values := listed(schema, "enum"):
        return values[index % len(values)]
    if choices := listed(schema, "anyOf"):
        return _schema_value(choices[0], index)
    if parts := listed(schema, "prefixItems"):
        return [_schema_value(part, index) for part in parts]
    if isinstance(schema, dict) and "items" in schema:
        return [_schema_value(schema["items"], index)]
    kind = next((name for name in schema_types(schema) if name in _VALUES), "string")
    return _VALUES[kind][index % EPISODES]


def _play_scripted(
    pool: EnvironmentPool,
    contract: EnvironmentContract,
    index: int,
    row: Mapping[str, Any],
    seed: int,
    made_up: Sequence[Message] = (),
) -> ScriptedEpisode:
    """Play an episode as a run does, with a policy that calls each tool once and then says a few messages.

    made_up: prompt of a row that has none.
    """
    calls = scripted_calls(contract.tools, row, index)
    said = [MESSAGES[(index + offset) % len(MESSAGES)] for offset in range(len(MESSAGES) * contract.has_step)]
    limits = EpisodeLimits(len(calls) + len(said), sys.maxsize, float("inf"), 0, "keep")
    timed, contracts = TimedPool(pool), {pool.key_of(row): contract}
    player = EnvironmentPlayer(cast(EnvironmentPool, timed), contracts, cast(Chat, PlainChat()), limits, PLAIN_FORMAT)
    task = Task(f"row {index}", [], "", None, dict(row), messages=_prompt(row) or [*made_up])
    start = RolloutStart(RolloutId("validation", task.id, index, 0), task, sys.maxsize, 0.0, seed, seed)
    policy = ScriptedPolicy([*map(call_text, calls), *said])
    # Each action has its own deadline.
    played = pool.events.submit(player.play(start, policy)).result().episode
    assert played is not None
    if not row and not played.messages and timed.actions[0].outcome.result() is None:
        return _play_scripted(pool, contract, index, row, seed, [_PROMPT])
    actions = {kind: [each for each in timed.actions if each.kind == kind] for kind in ("reset", "reward", "close")}
    closed = actions["close"][0].outcome.result()
    return ScriptedEpisode(
        opening=played.messages[: played.opening],
        turns=[turn for each in timed.actions if (turn := _scripted_turn(each))],
        reward=played.reward,
        failure=played.failure or (None if closed is None else str(closed)),
        reset_s=actions["reset"][0].seconds,
    )


def _scripted_turn(action: TimedAction) -> ScriptedTurn | None:
    """Return a call or a message with its answer; None for another action."""
    outcome, seconds = action.outcome.result(), action.seconds
    failed = isinstance(outcome, EnvironmentFailure)
    if action.kind == "step":
        return ScriptedTurn(action.arguments[0], None if failed else outcome, failed, seconds)
    if action.kind != "call":
        return None
    (call,) = action.arguments[0]
    said = f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
    if failed:
        return ScriptedTurn(said, None, True, seconds)
    (result,) = outcome
    return ScriptedTurn(said, result.content, result.failed, seconds, call.name, result.raised)


def _reset_again(pool: EnvironmentPool, first: ScriptedEpisode, row: Mapping[str, Any], seed: int) -> list[str]:
    """Begin a second episode of the same row and seed; return a note if it begins otherwise than the first."""
    observation: Observation | EnvironmentFailure = pool.reset("again", row, seed).result()
    if first.failure or isinstance(observation, EnvironmentFailure):
        return []
    if (opening(_prompt(row), observation) or [_PROMPT]) == first.opening:
        return []
    return [
        "two resets of one row with one seed began differently: the rollouts of a group would play different tasks; "
        "take the parameter seed in reset, and draw from it"
    ]


def _prompt(row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of a row's own prompt, which may be text or messages."""
    prompt = row.get("messages", row.get("prompt"))
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [each for each in prompt if isinstance(each, dict)] if isinstance(prompt, list) else []


def shipped_tasks(name: str, seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield tasks of an environment that ships. held_out: those that are never among the others."""
    found: Iterator[dict[str, Any]] = load_object(f"{ENVIRONMENTS[name].partition(':')[0]}:tasks")(seed, held_out)
    return found


def rows_to_try(name: str, data: str | None, seed: int, count: int) -> tuple[DatasetSection, list[Row]]:
    """Return the first rows of the file `data`; without one, tasks of an environment that ships, else one empty row.

    Raises DataError.
    """
    section = DatasetSection(data, "train", "prompt", "answer", "messages", count, {})
    if data is not None:
        try:
            path = resolve(data, "dataset", Origin())
        except FileNotFoundError as error:
            raise DataError(str(error)) from error
        return section, load_rows(replace(section, path=path))
    own = islice(shipped_tasks(name, seed), count) if name in ENVIRONMENTS else [{}]
    return section, [Row(number, f"task {number + 1}", values) for number, values in enumerate(own)]


def signature(tool: Schema) -> str:
    """Return a tool as `increment(step: integer, fast: boolean = ...) -> integer`."""
    function = tool["function"]
    parameters = function["parameters"]
    required = parameters.get("required", ())
    shown = [
        f"{name}: {_type_name(schema)}" + " = ..." * (name not in required)
        for name, schema in parameters["properties"].items()
    ]
    returned = f" -> {_type_name(function['return'])}" if "return" in function else ""
    return f"{function['name']}({', '.join(shown)}){returned}"


def _type_name(schema: Schema) -> str:
    if "enum" in schema:
        return shortened(" | ".join(map(repr, schema["enum"])))
    if "anyOf" in schema:
        return " | ".join(_type_name(each) for each in schema["anyOf"])
    kind = schema.get("type", "any")
    named = kind if isinstance(kind, str) else " | ".join(kind)
    named = f"{named} of {_type_name(schema['items'])}" if "items" in schema else named
    return f"{named} | null" if schema.get("nullable") else named
