"""Scripted episodes of an environment, a rollout function or an agent, in a run's process and without an engine.

A run's player plays the episodes with a scripted policy. The policy calls each tool once, with arguments derived from
the tool's schema, and then says a few plain messages to `step`. A parameter with the name of a row's column gets the
row's value, so the script may even win if the rows have the answers.
"""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, cast

from rlctl.config.data_schema import DatasetSection
from rlctl.config.paths import resolve
from rlctl.config.plugins import ENVIRONMENTS
from rlctl.config.provenance import Origin
from rlctl.data.chat import Chat
from rlctl.data.datasets import Row, load_rows
from rlctl.data.files import DataError
from rlctl.data.tasks import Task
from rlctl.environments.contract import EnvironmentContract, Message, Observation, Reward, opening_messages
from rlctl.environments.environment_pool import EnvironmentPool, UnusableEnvironmentError
from rlctl.environments.function_trial import try_function
from rlctl.environments.outcomes import EnvironmentFailure, EnvironmentSpec
from rlctl.environments.plain_chat import PLAIN_FORMAT, PlainChat
from rlctl.environments.tool_formats import ToolCall
from rlctl.environments.tool_schema import Schema
from rlctl.environments.tool_values import list_at, properties_of, schema_types
from rlctl.evaluation.scripted_policy import AgentScript, ScriptedPolicy, TimedAction, TimedPool, call_text
from rlctl.generation.requests import RolloutId
from rlctl.rollout.players.agent import AgentPlayer, agent_notes
from rlctl.rollout.players.environment import EnvironmentPlayer
from rlctl.rollout.players.episode_state import EpisodeLimits
from rlctl.rollout.types import RolloutStart
from rlctl.utils.user_code import load_object, looks_like_bug, shorten_text

EPISODES = 3
# Most turns of an agent.
AGENT_TURNS = 8
MESSAGES = ("1", "Hello.", "I do not know.", "8", "The answer is 3.")
# Prompt of an episode if neither `reset` nor a row begins it.
_PROMPT: Message = {"role": "user", "content": "prompt"}
_MADE_UP_PROMPT = (
    "reset returns no message, so each row of a run needs a column prompt; no rows are given here: the episodes begin "
    "with a made-up one, and --data FILE plays rows of yours"
)
# Values of arguments, by JSON type and episode.
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

    # The call, such as `increment(step=1)`, or the message. Scripts read this name in `rlctl env check --json`.
    said: str
    # Text that the model would read; None if the episode has ended.
    answer: str | None
    # True if the tool raised or is unknown.
    failed: bool
    # Seconds until the answer.
    seconds: float
    # Name of the tool; empty for a message.
    tool: str = ""
    # Error and place if the tool's own code raised, else empty.
    raised: str = ""


@dataclass
class ScriptedEpisode:
    """One scripted episode."""

    # Messages that the episode begins with.
    opening: list[Message] = field(default_factory=list)
    turns: list[ScriptedTurn] = field(default_factory=list)
    # (prompt tokens, answer tokens) of each sample of a rollout function.
    samples: list[tuple[int, int]] = field(default_factory=list)
    # Counts of an agent's requests, for example of each parameter that was not used.
    counts: dict[str, float] = field(default_factory=dict)
    # Reason why an agent's request continued no turn -> number of such requests.
    rewritten: dict[str, int] = field(default_factory=dict)
    # None if the class has no `get_reward`, or if the episode failed.
    reward: Reward | None = None
    # Reason why the episode failed; None if it did not.
    failure: str | None = None
    # Seconds of `reset`, or of a whole rollout function or agent.
    reset_s: float = 0.0


@dataclass(frozen=True)
class CheckReport:
    """Findings about one environment."""

    contract: EnvironmentContract | None
    episodes: list[ScriptedEpisode]
    # One line for each reason why the environment cannot be used as it is.
    problems: list[str]
    # Hints for the environment's author, one line each.
    notes: list[str]
    # Seconds until the process had loaded the environment.
    start_s: float


def check_environment(
    spec: EnvironmentSpec, rows: Sequence[Mapping[str, Any]], memory_mib: int, seed: int, model_follows: bool = False
) -> CheckReport:
    """Load an environment and play `EPISODES` episodes, each with the next row. Its errors are in the report.

    model_follows: a model plays afterwards, so equal rewards of the script get no note.
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
        reset_notes: list[str] = []
        if not contract.is_function and not contract.is_agent:
            reset_notes = _reset_again(pool, episodes[0], rows[0], seed)
    notes = list(contract.notes)
    for name in spec.rewards:
        if name not in contract.rewards:
            notes.append(f"{name} takes no parameter `environments`: it is not tried here")
    if any(episode.opening == [_PROMPT] for episode in episodes):
        notes.append(_MADE_UP_PROMPT)
    notes += reset_notes
    if contract.is_agent and _failures(episodes):
        notes += _empty_prompts(rows)
    notes += _silent_tools(episodes)
    if not model_follows:
        notes += _equal_rewards(episodes)
    notes += _agent_lines(episodes)
    return CheckReport(contract, episodes, [*_failures(episodes), *_bugs(episodes)], notes, start_s)


def _empty_prompts(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note if the prompt of each task is empty, because the rows have other columns."""
    if not rows[0] or any("prompt" in row or "messages" in row for row in rows):
        return []
    columns = f"the rows have no column prompt or messages, but {', '.join(rows[0])}"
    remedy = "a run reads the column that data.train.prompt_key names: rlctl train grpo RECIPE --dry-run tries it there"
    return [f"{columns}: task.prompt is empty here; {remedy}"]


def _failures(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return one line for each reason why episodes failed, with their numbers."""
    by_reason: dict[str, list[str]] = {}
    for number, episode in enumerate(episodes, 1):
        if episode.failure:
            by_reason.setdefault(episode.failure, []).append(str(number))
    return [
        f"{'episodes' if len(numbers) > 1 else 'episode'} {', '.join(numbers)}: {reason}"
        for reason, numbers in by_reason.items()
    ]


def _bugs(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return one line for each error of a tool that looks like a bug, because the call fits the tool's schema."""
    # Cause of an error -> line on the first turn with this cause.
    lines: dict[str, str] = {}
    for turn in chain.from_iterable(episode.turns for episode in episodes):
        if looks_like_bug(turn.raised):
            error = shorten_text((turn.answer or "").removeprefix("Error: "))
            bug = f"it looks like a bug, since {turn.said} fits the tool's schema"
            lines.setdefault(turn.raised, f"tool {turn.tool} {turn.raised}: {error}: {bug}")
    return list(lines.values())


def _silent_tools(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return a note on each tool that answered None."""
    turns = chain.from_iterable(episode.turns for episode in episodes)
    silent = dict.fromkeys(turn.tool for turn in turns if turn.tool and turn.answer == "None")
    return [f"tool {name} answered None, and the model reads that word: return its answer" for name in silent]


def _equal_rewards(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return a note if all episodes have the same reward."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    if len(rewards) < 2 or any(reward != rewards[0] for reward in rewards):
        return []
    parts = rewards[0].items() if isinstance(rewards[0], dict) else [("", rewards[0])]
    same = ", ".join(f"{part} {value:g}".strip() for part, value in parts)
    remedy = "--model plays by a model, whose rewards may differ"
    return [f"every episode has the same reward, {same}: equal rewards teach nothing; {remedy}"]


def _call_function(pool: EnvironmentPool, index: int, row: Mapping[str, Any], seed: int) -> ScriptedEpisode:
    """Call a rollout function with scripted answers: the row's answer, then `MESSAGES`.

    Each byte of a text is a token.
    """
    prompt = _prompt(row)
    text = "\n".join(str(message.get("content", "")) for message in prompt) or "prompt"
    answer = _answer(row)
    task = {"id": f"row {index}", "prompt": text, "tokens": list(text.encode()), "answer": answer, "row": dict(row)}
    answers = [list(message.encode()) for message in (answer, *MESSAGES) if message]
    begin = time.perf_counter()
    # Each episode begins with another answer.
    tried = try_function(pool, index, task, seed, answers[index:] + answers[:index])
    failure = None if tried.failure is None else str(tried.failure)
    took = time.perf_counter() - begin
    return ScriptedEpisode(prompt, samples=tried.samples, reward=tried.reward, failure=failure, reset_s=took)


def _run_agent(pool: EnvironmentPool, index: int, row: Mapping[str, Any], seed: int) -> ScriptedEpisode:
    """Run an agent with scripted turns: a call of each tool in its requests, then the row's answer, then `MESSAGES`.

    Each byte of a text is a token. After `AGENT_TURNS` turns the agent's budget is used up.
    """
    prompt = _prompt(row)
    answer = _answer(row)
    messages = [message for message in (answer, *MESSAGES) if message is not None]
    text = "\n".join(str(message.get("content") or "") for message in prompt)
    task = Task(id=f"row {index}", tokens=[], text=text, answer=answer, row=dict(row), messages=prompt)

    def call_tools(tools: list[Schema]) -> list[str]:
        calls = scripted_calls(tools, row, index)
        # Each episode begins with another call, because a call may end the episode.
        first = index % max(1, len(calls))
        return [call_text(call) for call in calls[first:] + calls[:first]]

    player = AgentPlayer(pool, cast(Chat, PlainChat()), _episode_limits(AGENT_TURNS))
    begin = time.perf_counter()
    rollout = player.play(_rollout_start(task, index, seed), AgentScript(call_tools, messages))
    played = pool.events.submit(rollout).result().episode
    assert played is not None
    turns: list[ScriptedTurn] = []
    # Message after each message; None after the last.
    replies = [*played.messages[1:], None]
    for message, reply in zip(played.messages, replies, strict=False):
        if message["role"] == "assistant":
            reply_text = str(reply["content"]) if reply and reply["role"] != "assistant" else None
            turns.append(ScriptedTurn(said=str(message["content"]), answer=reply_text, failed=False, seconds=0.0))
    return ScriptedEpisode(
        opening=played.messages[: played.opening],
        turns=turns,
        counts=dict(played.counts or {}),
        rewritten=dict(played.rewritten or {}),
        reward=played.reward,
        failure=played.failure,
        reset_s=time.perf_counter() - begin,
    )


def _episode_limits(max_turns: int) -> EpisodeLimits:
    """Return limits of an episode without a bound on tokens and time. Each action has a deadline anyway."""
    return EpisodeLimits(
        max_turns=max_turns, max_length=sys.maxsize, timeout_s=float("inf"), max_retries=0, history="keep"
    )


def _rollout_start(task: Task, index: int, seed: int) -> RolloutStart:
    return RolloutStart(
        id=RolloutId("validation", task.id, index, 0),
        task=task,
        max_new_tokens=sys.maxsize,
        temperature=0.0,
        seed=seed,
        group_seed=seed,
    )


def _agent_lines(episodes: Sequence[ScriptedEpisode]) -> list[str]:
    """Return notes on an agent's parameters that were not used, and on its requests that continued no turn."""
    lines = chain.from_iterable(agent_notes(episode.counts, episode.rewritten) for episode in episodes)
    return list(dict.fromkeys(lines))


def scripted_calls(tools: Sequence[Schema], row: Mapping[str, Any], index: int) -> list[ToolCall]:
    """Return one call of each tool. index: number of the episode, which chooses the values of arguments."""
    calls = []
    for tool in tools:
        values = {name: row.get(name, _schema_value(schema, index)) for name, schema in properties_of(tool).items()}
        calls.append(ToolCall(tool["function"]["name"], values))
    return calls


def _schema_value(schema: Any, index: int) -> Any:
    """Return a value that fits a schema. The schema may be any JSON value. index: number of the episode."""
    if values := list_at(schema, "enum"):
        return values[index % len(values)]
    if choices := list_at(schema, "anyOf"):
        return _schema_value(choices[0], index)
    if parts := list_at(schema, "prefixItems"):
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
    """Play an episode with a run's player and a policy that calls each tool once and then says `MESSAGES`.

    made_up: prompt to use if the row has none.
    """
    texts = [call_text(call) for call in scripted_calls(contract.tools, row, index)]
    if contract.has_step:
        first = index % len(MESSAGES)
        texts += MESSAGES[first:] + MESSAGES[:first]
    timed = TimedPool(pool)
    player = EnvironmentPlayer(
        cast(EnvironmentPool, timed),
        {pool.key_of(row): contract},
        cast(Chat, PlainChat()),
        _episode_limits(len(texts)),
        PLAIN_FORMAT,
    )
    prompt = _prompt(row) or [*made_up]
    task = Task(id=f"row {index}", tokens=[], text="", answer=None, row=dict(row), messages=prompt)
    rollout = player.play(_rollout_start(task, index, seed), ScriptedPolicy(texts))
    played = pool.events.submit(rollout).result().episode
    assert played is not None
    if not row and not played.messages and timed.actions[0].outcome.result() is None:
        # Neither the row nor `reset` gave a message, so the episode had no prompt. Play it with a made-up prompt.
        return _play_scripted(pool, contract, index, row, seed, [_PROMPT])
    reset = next(action for action in timed.actions if action.kind == "reset")
    close = next(action for action in timed.actions if action.kind == "close")
    close_failure = close.outcome.result()
    turns = map(_scripted_turn, timed.actions)
    return ScriptedEpisode(
        opening=played.messages[: played.opening],
        turns=[turn for turn in turns if turn is not None],
        reward=played.reward,
        failure=played.failure or (None if close_failure is None else str(close_failure)),
        reset_s=reset.seconds,
    )


def _scripted_turn(action: TimedAction) -> ScriptedTurn | None:
    """Return a call or a message with its answer; None for a reset, a reward or a close."""
    outcome = action.outcome.result()
    failed = isinstance(outcome, EnvironmentFailure)
    if action.kind == "step":
        answer = None if failed else outcome
        return ScriptedTurn(said=action.arguments[0], answer=answer, failed=failed, seconds=action.seconds)
    if action.kind != "call":
        return None
    # The scripted policy makes one call in each turn.
    (call,) = action.arguments[0]
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    turn = ScriptedTurn(said=f"{call.name}({arguments})", answer=None, failed=True, seconds=action.seconds)
    if failed:
        return turn
    (result,) = outcome
    return replace(turn, answer=result.content, failed=result.failed, tool=call.name, raised=result.raised)


def _reset_again(pool: EnvironmentPool, first: ScriptedEpisode, row: Mapping[str, Any], seed: int) -> list[str]:
    """Begin a second episode with the same row and seed; return a note if its first messages are others."""
    observation: Observation | EnvironmentFailure = pool.reset("again", row, seed).result()
    if first.failure or isinstance(observation, EnvironmentFailure):
        return []
    if (opening_messages(_prompt(row), observation) or [_PROMPT]) == first.opening:
        return []
    return [
        "two resets of one row with one seed began differently: the rollouts of a group would play different tasks; "
        "take the parameter seed in reset, and draw from it"
    ]


def _prompt(row: Mapping[str, Any]) -> list[Message]:
    """Return a row's prompt as messages; empty if it has none. The prompt may be text or messages."""
    prompt = row.get("messages", row.get("prompt"))
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [message for message in prompt if isinstance(message, dict)] if isinstance(prompt, list) else []


def _answer(row: Mapping[str, Any]) -> str | None:
    """Return the answer of a row as text."""
    answer = row.get("answer")
    return None if answer is None else str(answer)


def shipped_tasks(name: str, seed: int, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Yield tasks of an environment that rlctl ships. held_out: yield tasks that training never uses."""
    module = ENVIRONMENTS[name].partition(":")[0]
    tasks: Iterator[dict[str, Any]] = load_object(f"{module}:tasks")(seed, held_out)
    return tasks


def rows_to_try(name: str, data: str | None, seed: int, count: int) -> tuple[DatasetSection, list[Row]]:
    """Return a section and the first `count` rows of the file `data`. Raises DataError.

    Without a file, return tasks of an environment that rlctl ships, or else one empty row.
    """
    section = DatasetSection(
        data, "train", prompt_key="prompt", answer_key="answer", messages_key="messages", limit=count, args={}
    )
    if data is not None:
        try:
            path = resolve(data, "dataset", Origin())
        except FileNotFoundError as error:
            raise DataError(str(error)) from error
        return section, load_rows(replace(section, path=path))
    tasks = islice(shipped_tasks(name, seed), count) if name in ENVIRONMENTS else [{}]
    return section, [Row(number, f"task {number + 1}", values) for number, values in enumerate(tasks)]


def signature(tool: Schema) -> str:
    """Return a tool's signature as text, for example `increment(step: integer, fast: boolean = ...) -> integer`."""
    function = tool["function"]
    parameters = function["parameters"]
    required = parameters.get("required", ())
    arguments = []
    for name, schema in parameters["properties"].items():
        default = "" if name in required else " = ..."
        arguments.append(f"{name}: {_type_name(schema)}{default}")
    returned = f" -> {_type_name(function['return'])}" if "return" in function else ""
    return f"{function['name']}({', '.join(arguments)}){returned}"


def _type_name(schema: Schema) -> str:
    if "enum" in schema:
        return shorten_text(" | ".join(map(repr, schema["enum"])))
    if "anyOf" in schema:
        return " | ".join(_type_name(choice) for choice in schema["anyOf"])
    kind = schema.get("type", "any")
    name = kind if isinstance(kind, str) else " | ".join(kind)
    name += f" of {_type_name(schema['items'])}" if "items" in schema else ""
    return f"{name} | null" if schema.get("nullable") else name
