"""Loading of a run's data. In a run it is tokenized on a thread while Ray, ranks and engines start."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, TypeVar

from rlctl.config.schema import RunConfig
from rlctl.data.chat import Chat
from rlctl.data.cursor import Drawn
from rlctl.data.end_tokens import EndTokens
from rlctl.data.load_data import RunRows, check_teachers, end_tokens, load_chat, load_prompts, load_samples
from rlctl.data.mixture import first_of_each
from rlctl.data.tasks import SupervisedSample, Task
from rlctl.data.tokenize import LengthReport
from rlctl.launch.sampling import SamplingParts, check_room
from rlctl.launch.session import Session
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.settled import Settled, SettledGrpo, SettledSft
from rlctl.workers.user_logs import Emit

Value = TypeVar("Value")


@dataclass(frozen=True)
class RunData(Generic[Drawn]):
    """Tokenized tasks (GRPO) or samples (SFT) of a run."""

    train: list[Drawn]
    validation: list[Drawn]


def load_run_tasks(settled: SettledGrpo, rows: RunRows, chat: Chat, emit: Emit) -> RunData[Task]:
    """Tokenize the tasks of a run. emit: called with a `data` or `warning` event for each finding in the rows.

    Raises DataError at the first bad row, for a row without a teacher, or for a prompt that leaves no room for an
    answer.
    """
    config = settled.config
    loaded: dict[str, list[Task]] = {"train": [], "validation": []}
    for part in rows.parts(config.data):
        if part.purpose == "train":
            check_teachers(config, part.rows)
        tasks, report = load_prompts(config, part.section, chat, part.rows)
        loaded[part.purpose] += tasks
        _emit_report(part.name, report, emit)
        check_room(tasks, config.generation.max_new_tokens, settled.max_length)
    return RunData(loaded["train"], first_of_each(loaded["validation"], config.validation.max_prompts))


def load_run_samples(settled: SettledSft, rows: RunRows, chat: Chat, emit: Emit) -> RunData[SupervisedSample]:
    """Tokenize the samples of a run. emit: as in `load_run_tasks`. Raises DataError at the first bad row."""
    config = settled.config
    loaded: dict[str, list[SupervisedSample]] = {"train": [], "validation": []}
    for part in rows.parts(config.data):
        samples, report = load_samples(config, part.section, chat, part.rows, settled.max_length)
        loaded[part.purpose] += samples
        _emit_report(part.name, report, emit)
    return RunData(loaded["train"], first_of_each(loaded["validation"], config.validation.max_prompts))


def _emit_report(name: str, report: LengthReport, emit: Emit) -> None:
    emit("data", what=f"{name}: {report}")
    for line in report.warnings:
        emit("warning", what=line)


def meanwhile(stack: ExitStack, work: Callable[[], Value]) -> "Future[Value]":
    """Call `work` on another thread and return its future. `stack` waits for the thread, unless the run is interrupted.

    In an interrupted run the thread may read rows for minutes more. It ends with the process, because it is a daemon.
    """
    future: Future[Value] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # also the interrupt that `Session.starting` raises
            future.set_exception(error)

    def end(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or not issubclass(kind, KeyboardInterrupt):
            future.exception()

    threading.Thread(target=run, name="loading", daemon=True).start()
    stack.push(end)
    return future


def load_chats(
    session: Session, settled: Settled, files: ModelFiles, sampling: SamplingParts | None
) -> tuple[Chat, EndTokens]:
    """Load the tokenizer and chat template of the run, and of its validation recipe. Return the run's with its end
    tokens.
    """
    configs: dict[str, RunConfig] = {"": settled.config}
    if sampling and not settled.grpo:
        configs["validation.recipe: "] = sampling.config
    loaded: list[tuple[Chat, EndTokens]] = []
    for prefix, config in configs.items():
        with session.starting(f"{prefix}tokenizer"):
            chat = load_chat(config, files.chat)
            ends = end_tokens(config, chat)
        session.events.emit("data", what=f"{prefix}answers end at {ends}")
        for warning in ends.warnings:
            session.events.emit("warning", what=warning)
        loaded.append((chat, ends))
    if sampling:
        # In a GRPO run these are the run's own; in an SFT run, those of the recipe.
        sampling.chat, sampling.ends = loaded[-1]
    return loaded[0]
