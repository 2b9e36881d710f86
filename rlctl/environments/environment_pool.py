"""Pool of processes that run environments: submit an action from any thread, get a future of its outcome.

The caller chooses a name for each episode, and submits the episode's actions one after another: reset, then calls or
steps, then the reward, then close. An outcome of `EnvironmentFailure` ends the episode, also without a close.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rlctl.config.errors import UserError
from rlctl.config.plugins import ENVIRONMENT_COLUMN
from rlctl.data.chat import ChatSpec
from rlctl.environments.child import MAX_REPLY
from rlctl.environments.contract import (
    ContractError,
    EnvironmentContract,
    Observation,
    Reward,
    check_observation,
    check_reward,
    check_step,
)
from rlctl.environments.environment_process import FAILURES_IN_A_ROW, HUNG, EnvironmentProcess
from rlctl.environments.messages import (
    AgentAnswer,
    AgentEnded,
    AgentMessage,
    BeginAgent,
    BeginFunction,
    CallTools,
    CloseEpisode,
    EpisodeMessage,
    FunctionEnded,
    FunctionMessage,
    OpeningMessage,
    ResetEpisode,
    ResumeAgent,
    ResumeFunction,
    RewardEpisode,
    Sampled,
    StepEpisode,
    ToolsCalled,
    read_agent_message,
    read_function_message,
    read_tools_called,
)
from rlctl.environments.metric_rows import TOOL_RAISED
from rlctl.environments.outcomes import LATE, EnvironmentFailure, EnvironmentSpec, ToolResult
from rlctl.environments.tool_formats import Call, MalformedCall
from rlctl.utils.devices import usable_cores
from rlctl.utils.event_loop import EventLoop
from rlctl.utils.ports import past_proxies, reached_at
from rlctl.workers.guarded_process import GuardedProcess
from rlctl.workers.user_logs import Emit, FailureLog, OutputLog

Value = TypeVar("Value")

MAX_PROCESSES = 4
# Seconds between two measurements of all processes' memory. Every fifth one includes their child processes.
_MEMORY_EVERY_S = 0.2
# Consequences of an environment's failure and of a tool's error, as the log states them.
_RETRIED = "its episodes are played again, environment.max_retries times at most, or else left out and counted"
_READ_BY_MODEL = "the model reads the error, and the episode goes on"
POOL_CLOSED = EnvironmentFailure("died", "the pool was closed")


class UnusableEnvironmentError(UserError):
    """Environments that cannot be used. problems: (key of the environment, reason) of each problem."""

    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__("\n".join(f"{key}: {reason}" for key, reason in problems))
        self.problems = problems


@dataclass(eq=False)
class PlacedEpisode:
    """A running episode and its process."""

    process: EnvironmentProcess
    # Number of the episode in messages to the process.
    number: int
    # Key of the environment.
    key: str
    # Seed of its task.
    seed: int
    # True once an action after the opening one was answered.
    has_acted: bool = False


class EnvironmentPool:
    """Environments of a run, and the processes that run them. Call `shutdown` at the end, or use the pool in a `with`.

    specs: environments by key; with several, a row's column `environment` names the key. memory_mib: most resident
    memory of a process with its children. processes: most processes; None means one a core, up to `MAX_PROCESSES`.
    logs: folder for environments.log (output, up to a bound), environment-errors.log and tool-errors.log (tracebacks);
    None means standard error. emit: writes an event at the first failure of each cause.
    """

    def __init__(
        self,
        specs: Mapping[str, EnvironmentSpec],
        memory_mib: int,
        processes: int | None = None,
        logs: Path | None = None,
        emit: Emit | None = None,
    ) -> None:
        self._specs = dict(specs)
        self._memory_bytes = memory_mib << 20
        self._size = processes or min(MAX_PROCESSES, usable_cores())
        addresses = [reached_at(spec.agent.bind) for spec in specs.values() if spec.agent]
        # Copied, because Ray changes this process's variables when it starts, and the pool may start a process then.
        self._variables = {**os.environ, **past_proxies(os.environ, *addresses)}
        self.failures = FailureLog("environment", logs / "environment-errors.log" if logs else None, emit, _RETRIED)
        # Warns of the first error of each cause. The model reads the error, so that its episode goes on.
        self.tool_errors = FailureLog(
            "tool", logs / "tool-errors.log" if logs else None, emit, _READ_BY_MODEL, TOOL_RAISED.name
        )
        self._log = OutputLog("environment", logs / "environments.log", emit) if logs else None
        # Event loop of the pool. Rollouts run on it too, see `rollout.runner`.
        self.events = EventLoop("rollouts")
        self._ended = False
        # Only the event loop's thread uses the attributes below.
        self._processes: list[EnvironmentProcess] = []
        self._episodes: dict[Hashable, PlacedEpisode] = {}
        self._numbers = itertools.count()
        # Number of episodes that ended without a failure.
        self._successes = 0
        # Running removals of ended episodes from their processes, by the episode's name.
        self._leaving: dict[Hashable, asyncio.Task[EnvironmentFailure | None]] = {}
        self._submit(self._watch_memory())

    def contracts(self) -> dict[str, EnvironmentContract]:
        """Return the contract of each environment by its key. Starts a process, and waits until it is ready.

        Raises UnusableEnvironmentError with every problem of every environment.
        """
        contracts = self._submit(self._load_contracts()).result()
        if isinstance(contracts, EnvironmentFailure):
            raise UnusableEnvironmentError([(key, str(contracts)) for key in self._specs])
        problems: list[tuple[str, str]] = []
        for key, contract in contracts.items():
            problems += [(key, problem) for problem in contract.problems]
        if problems:
            raise UnusableEnvironmentError(problems)
        return contracts

    def reset(self, episode: Hashable, row: Mapping[str, Any], seed: int) -> "Future[Observation | EnvironmentFailure]":
        """Create an instance, begin an episode, and return the observation. seed: equal for all rollouts of a group."""
        return self._submit(self._reset(episode, dict(row), seed))

    def begin(
        self, episode: Hashable, task: Mapping[str, Any], seed: int
    ) -> "Future[FunctionMessage | EnvironmentFailure]":
        """Call the rollout function; return its first message. task: fields of `PlayTask`; seed: the group's seed."""
        message = BeginFunction(next(iter(self._specs)), dict(task), seed)
        return self._submit(self._start_episode(episode, message, read_function_message))

    def resume(
        self, episode: Hashable, answers: Sequence[Sampled | None], *, waits: bool
    ) -> "Future[FunctionMessage | EnvironmentFailure]":
        """Give the rollout function answers in the order of its requests; return its next message.

        An answer of None means that a budget is used up. The message comes when the function asks for samples or
        returns, and at the latest when the episode's next action is submitted. waits: engines still sample for the
        function, so the action has no deadline.
        """
        message = ResumeFunction(list(answers))
        return self._submit(self._send_action(episode, message, read_function_message, timed=not waits))

    def give_chat(self, chat: ChatSpec, tool_format: str | None) -> None:
        """Give the agent the policy's tokenizer and chat template. Call this before the first process starts."""
        self._specs = {
            key: replace(spec, agent=replace(spec.agent, chat=chat, tool_format=tool_format)) if spec.agent else spec
            for key, spec in self._specs.items()
        }

    def begin_agent(
        self, episode: Hashable, task: Mapping[str, Any], seed: int
    ) -> "Future[AgentMessage | EnvironmentFailure]":
        """Start the agent, and return its first message. task: fields of `AgentTask`; seed: the group's seed."""
        message = BeginAgent(next(iter(self._specs)), dict(task), seed)
        return self._submit(self._start_episode(episode, message, read_agent_message))

    def resume_agent(
        self, episode: Hashable, answers: Sequence[tuple[int, AgentAnswer]], *, waits: bool
    ) -> "Future[AgentMessage | EnvironmentFailure]":
        """Give the agent (number of a request, answer) pairs; return its next message. waits: see `resume`."""
        message = ResumeAgent(list(answers))
        return self._submit(self._send_action(episode, message, read_agent_message, timed=not waits))

    def call(self, episode: Hashable, calls: Sequence[Call]) -> "Future[list[ToolResult] | EnvironmentFailure]":
        """Call tools, and return one result for each call, in order.

        For a tool that raises and for a malformed call, the result is the text of the error.
        """
        return self._submit(self._call_tools(episode, list(calls)))

    def step(self, episode: Hashable, message: str) -> "Future[str | EnvironmentFailure | None]":
        """Send the assistant's message to `step`; return its answer, or None if the environment ended the episode."""
        return self._submit(self._send_action(episode, StepEpisode(message), check_step))

    def reward(
        self, episode: Hashable, columns: Mapping[str, Any] | None = None
    ) -> "Future[Reward | EnvironmentFailure]":
        """Return the reward of the episode.

        columns: `prompts`, `completions` and columns of the row, for the reward functions in its contract's `rewards`.
        """
        return self._submit(self._send_action(episode, RewardEpisode(columns and dict(columns)), check_reward))

    def close(self, episode: Hashable) -> "Future[EnvironmentFailure | None]":
        """End an episode: call its instance's `close`, if any. The future is done once no code of the episode runs.

        If a failure ended the episode, the future waits until the episode has left its process. After `shutdown` the
        future is done at once.
        """
        if self._ended:
            future: Future[EnvironmentFailure | None] = Future()
            future.set_result(None)
            return future
        return self._submit(self._close(episode))

    def check(self) -> None:
        """Raise the first unexpected error of the pool itself, if there was one. Its futures may then never be done."""
        self.events.check()

    def pids(self) -> list[int]:
        """Return the process ids of the supervisors."""
        return [process.pid for process in self._processes if process.pid is not None]

    def shutdown(self) -> None:
        """End all processes. Unanswered actions fail, and a later action raises RuntimeError."""
        self._ended = True
        self.events.submit(self._end_processes()).result()
        self.events.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _submit(self, work: Coroutine[Any, Any, Value]) -> "Future[Value]":
        if self._ended:
            work.close()
            raise RuntimeError("the pool of environments is shut down")
        return self.events.submit(work)

    async def _load_contracts(self) -> dict[str, EnvironmentContract] | EnvironmentFailure:
        return await asyncio.shield(self._choose_process().ready)

    async def _reset(self, episode: Hashable, row: dict[str, Any], seed: int) -> Observation | EnvironmentFailure:
        key = self.key_of(row)
        if key not in [*self._specs]:  # a list, because the row's value may be of a type without a hash
            names = ", ".join(self._specs)
            failure = EnvironmentFailure("contract", f"no such environment: a row must name one of {names}", repr(key))
            return self._count_failure(str(key), failure)
        return await self._start_episode(episode, ResetEpisode(key, row, seed), check_observation)

    async def _start_episode(
        self, episode: Hashable, message: OpeningMessage, check_value: Callable[[Any], Value]
    ) -> Value | EnvironmentFailure:
        """Place an episode in a process, and return the checked value of its first action."""
        key = message.key
        if episode in self._episodes:
            return self._count_failure(
                key, EnvironmentFailure("contract", f"{message.kind} of an episode that is going on", repr(episode))
            )
        process = self._choose_process()
        placed = PlacedEpisode(process, next(self._numbers), key, message.seed)
        process.episodes.add(placed.number)
        self._episodes[episode] = placed
        ready = await asyncio.shield(process.ready)
        if self._episodes.get(episode) is not placed:
            # The episode was closed meanwhile, and a new episode may have its name.
            return EnvironmentFailure("contract", f"{message.kind} of an episode that has ended", repr(episode))
        failure = None
        if isinstance(ready, EnvironmentFailure):
            failure = ready
        elif problems := ready[key].problems:
            failure = EnvironmentFailure("contract", problems[0])
        if failure is None:
            return await self._send_action(episode, message, check_value)
        self._episodes.pop(episode, None)
        process.episodes.discard(placed.number)
        return self._count_failure(key, failure)

    async def _call_tools(self, episode: Hashable, calls: list[Call]) -> list[ToolResult] | EnvironmentFailure:
        formed = [call for call in calls if not isinstance(call, MalformedCall)]

        def read_answers(value: object) -> ToolsCalled:
            called = read_tools_called(value)
            if len(called.results) != len(formed):
                raise ContractError("not one result a call")
            return called

        called: ToolsCalled | EnvironmentFailure = ToolsCalled([], [])
        if formed:
            message = CallTools([(call.name, call.arguments) for call in formed])
            called = await self._send_action(episode, message, read_answers)
        if isinstance(called, EnvironmentFailure):
            return called
        for failure in called.raised:
            names = [call.name for call, answer in zip(formed, called.results) if answer.cause == failure.cause]
            self.tool_errors.add(names[0], failure, count=len(names))
        answers = iter(called.results)
        results = list[ToolResult]()
        for call in calls:
            if isinstance(call, MalformedCall):
                results.append(ToolResult("", f"Error: no tool was called: {call.error}", failed=True))
            else:
                answer = next(answers)
                results.append(ToolResult(call.name, answer.text, answer.failed, answer.cause))
        return results

    async def _send_action(
        self, episode: Hashable, message: EpisodeMessage, check_value: Callable[[Any], Value], timed: bool = True
    ) -> Value | EnvironmentFailure:
        """Send an action; return its checked value, or the failure that ended the episode. Failures are counted.

        timed: the action has the environment's deadline.
        """
        if episode not in self._episodes:
            return EnvironmentFailure("contract", f"{message.kind} of an episode that has ended", repr(episode))
        placed = self._episodes[episode]
        process = placed.process
        spec = self._specs[placed.key]
        outcome = await process.act(placed.number, message, spec.timeout_s if timed else None)
        if not isinstance(outcome, EnvironmentFailure):
            with suppress(Exception):  # user code runs in the process, so the reply may be any value
                value = check_value(outcome)
                if not isinstance(message, OpeningMessage):
                    placed.has_acted = True
                elif isinstance(value, AgentEnded | FunctionEnded):  # the process may be the cause
                    self._note_failure(placed, EnvironmentFailure("contract", "it ended without a turn"))
                return value
            outcome = EnvironmentFailure("contract", f"its process answered a {message.kind} with something else")
        if outcome.kind == "timeout" and isinstance(message, BeginAgent):
            # An agent's first action ends with its first request, so none has come.
            outcome = replace(outcome, detail=LATE)
        if self._episodes.get(episode) is not placed:
            # Another action of this episode has failed, or the episode was closed meanwhile.
            return outcome
        self._note_failure(placed, outcome)
        # An instance that hangs cannot be closed, because its own thread does that. An agent is closed by another.
        hangs = outcome.kind == "timeout" and spec.agent is None
        self._begin_leaving(episode, closes=not hangs)
        return self._count_failure(placed.key, outcome)

    def _note_failure(self, placed: PlacedEpisode, failure: EnvironmentFailure) -> None:
        """Note that an episode failed. Retire its process if the process seems to be the cause, not the environment."""
        process = placed.process
        process.failed_seeds.append(placed.seed)
        fails_in_a_row = len(process.failed_seeds) >= FAILURES_IN_A_ROW and len(set(process.failed_seeds)) > 1
        # If no episode of the pool succeeded since this process started, a new process would fail too.
        is_damaged = failure.lasting or (fails_in_a_row and self._successes > process.successes_before)
        if not is_damaged or process.has_ended or process.retired:
            return
        process.retired = EnvironmentFailure("died", "its process was damaged", str(failure))
        reason = "it is damaged" if failure.lasting else f"{FAILURES_IN_A_ROW} tries in a row failed in it"
        self.failures.note("process", f"another one takes its place, since {reason}: {failure}")

    async def _close(self, episode: Hashable) -> EnvironmentFailure | None:
        if episode not in self._episodes:
            if (leaving := self._leaving.get(episode)) is not None:
                await asyncio.wait([leaving])
            return None
        placed = self._episodes[episode]
        failure = await asyncio.shield(self._begin_leaving(episode, closes=True))
        if failure is not None:
            return self._count_failure(placed.key, failure)
        if placed.has_acted:
            placed.process.failed_seeds.clear()
            self._successes += 1
        return None

    def _begin_leaving(self, episode: Hashable, *, closes: bool) -> "asyncio.Task[EnvironmentFailure | None]":
        """Start the task that removes an episode from its process. closes: see `_leave`."""
        task = self.events.spawn(self._leave(self._episodes.pop(episode), closes))
        self._leaving[episode] = task

        def forget_task(_: object) -> None:
            if self._leaving.get(episode) is task:
                del self._leaving[episode]

        task.add_done_callback(forget_task)
        return task

    async def _leave(self, placed: PlacedEpisode, closes: bool) -> EnvironmentFailure | None:
        """Remove an episode from its process. End a retired process after its last episode.

        closes: close the episode first; False for an episode that hangs.
        """
        outcome = None
        process = placed.process
        if closes and not process.has_ended:
            outcome = await process.act(placed.number, CloseEpisode(), self._specs[placed.key].timeout_s)
        process.episodes.discard(placed.number)
        if process.has_ended or (process.retired and not process.episodes):
            await process.stop(process.retired or HUNG)
        elif isinstance(outcome, EnvironmentFailure) and process.retired == HUNG:
            # The close hangs. Code of the episode may run until its process ends.
            await process.is_over.wait()
        return outcome if isinstance(outcome, EnvironmentFailure) else None

    def key_of(self, row: Mapping[str, Any]) -> Any:
        """Return the key of a row's environment: the only key, or with several the row's column `environment`."""
        return row.get(ENVIRONMENT_COLUMN) if len(self._specs) > 1 else next(iter(self._specs))

    def _choose_process(self) -> EnvironmentProcess:
        """Choose the process with the smallest load (episodes and failures in a row).

        Start another process if each process has a load and the pool may have more processes.
        """
        self._processes = [process for process in self._processes if not process.has_ended]
        usable = [process for process in self._processes if not process.retired]
        if usable and (len(usable) >= self._size or any(process.load == 0 for process in usable)):
            return min(usable, key=lambda process: process.load)
        output = self._log.descriptor if self._log else None
        child = GuardedProcess("rlctl.environments.child", MAX_REPLY, output, self._variables)
        process = EnvironmentProcess(self._specs, self._memory_bytes, child, self.events.spawn, self._successes)
        self._processes.append(process)
        return process

    def _count_failure(self, key: str, failure: EnvironmentFailure) -> EnvironmentFailure:
        self.failures.add(key, failure)
        return failure

    async def _watch_memory(self) -> None:
        for count in itertools.count():
            await asyncio.sleep(_MEMORY_EVERY_S)
            for process in list(self._processes):
                await process.check_memory(deep=count % 5 == 0)

    async def _end_processes(self) -> None:
        stopped = set[EnvironmentProcess]()
        # Another thread's action may start a process while the others end.
        while running := {*self._processes} - stopped:
            stopped |= running
            await asyncio.gather(*(process.stop(POOL_CLOSED) for process in running), return_exceptions=True)
        await asyncio.sleep(0)  # let each waiter read its action's failure before the loop closes
