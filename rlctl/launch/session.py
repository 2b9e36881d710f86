"""Session of a run for any algorithm: its directory, events, dashboard, Ctrl-C, restarts and exit code.

However a run ends, it emits a `run_ended` event with the next commands to type, and leaves no process. Exit codes: 0
done, 1 failed, 2 bad input, 130 interrupted or stopped with a checkpoint saved.
"""

import contextlib
import errno
import os
import shlex
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlctl.config.errors import UserError, first_line
from rlctl.config.schema import RunConfig
from rlctl.dashboard.view import RunView, show_run
from rlctl.data.datasets import path_text
from rlctl.data.files import DataError
from rlctl.grpo.advantages.base import AdvantageError
from rlctl.launch.next_steps import next_commands
from rlctl.preflight.placement import ResourceRequest
from rlctl.preflight.settled import Settled
from rlctl.preflight.version import earlier_version
from rlctl.run.checkpoints import Checkpoint, Checkpoints, EarlierVersion, NoWholeCheckpoint
from rlctl.run.fingerprint import contradictions
from rlctl.run.interrupts import Interrupts
from rlctl.run.recorder import RunRecorder
from rlctl.run.run_dir import RunDir, RunDirError, automatic_name
from rlctl.telemetry.events import EventLog, MetricsLog
from rlctl.telemetry.jsonl import read_records
from rlctl.telemetry.metrics import installed_rows, write_rows
from rlctl.telemetry.trackers.base import open_trackers
from rlctl.utils.files import Reserve, write_whole
from rlctl.utils.process import age_s, driver_lives
from rlctl.utils.safe_text import neutral
from rlctl.workers.errors import NoEngineLeft, WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.waits import Waits

# Errors whose message is enough for the user. Any other error is a bug of rlctl, and its traceback is needed.
_EXPLAINED = (OSError, RuntimeError, AdvantageError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_PAUSE_S = 60.0
# Seconds to wait for the run's lock. The command that submits a job releases the lock after Ray has accepted the job,
# and the driver may start earlier.
_HANDED_OVER_S = 30.0
# Text for the end of a run before its first step.
_NOT_BEGUN = "ending the start, with nothing new to save"
# Bytes of disk space reserved for the last events, a traceback and a summary's files.
_LAST_WORDS_BYTES = 64 << 10
# Exit code of a run that ends because its input is wrong.
_BAD_INPUT = 2


@dataclass
class Session:
    """State of a running run."""

    settled: Settled
    # Resolved config as YAML.
    resolved: str
    run_dir: RunDir
    events: EventLog
    recorder: RunRecorder
    interrupts: Interrupts
    reserve: Reserve
    # True if the run had an attempt before this one.
    resumed: bool
    waits: Waits
    # Ends the process at once, with `lost` as the reason. May be called from any thread.
    give_up: Callable[[], None]
    attempts: int = 1
    # Reason to end the run after its step with a checkpoint, for example that Ray's head is gone; else empty.
    lost: str = ""
    # Checkpoint to continue from; None: from the start.
    checkpoint: Checkpoint | None = None
    # Damaged checkpoints that are newer than `checkpoint`: folder -> its problem in one line.
    damaged: dict[Path, str] = field(default_factory=dict)
    # Part of this attempt's start-up -> its seconds.
    startup: dict[str, float] = field(default_factory=dict)
    # Start of this attempt by `time.monotonic`. The first attempt starts with the process.
    start_time: float = field(default_factory=lambda: time.monotonic() - age_s())
    # Command that starts the run from the beginning, if all checkpoints are damaged; else empty.
    begin_command: str = ""
    # True if a resumed run would fail in the same way: the input is wrong, or the run failed before its first
    # checkpoint.
    fails_again: bool = False
    # True once the steps have begun. A first signal then ends the run after its step.
    training: bool = False
    # After a loss of nodes: sizes of the run that fit the remaining nodes, the largest first. Empty if none is known.
    smaller: list[ResourceRequest] = field(default_factory=list)

    @property
    def config(self) -> RunConfig:
        """The config."""
        return self.settled.config

    @property
    def start(self) -> int:
        """Number of steps done before this attempt."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def logs(self) -> Path:
        """Folder of this attempt's logs, with one file per process."""
        return self.run_dir.logs.resolve()

    def find_checkpoint(self) -> None:
        """Set `checkpoint` to the newest undamaged one, and warn about newer damaged ones. Raises NoWholeCheckpoint."""
        with self.starting("checkpoint"):
            try:
                newest = self.recorder.checkpoints.newest_whole()
            except EarlierVersion as error:
                raise EarlierVersion(f"{self.run_dir.path}: {error}") from None
            except NoWholeCheckpoint as error:
                command = ["rlctl", "train", self.config.kind, str(self.run_dir.config), "run.name=null"]
                self.begin_command = shlex.join(command)
                raise NoWholeCheckpoint(f"{error}; to begin anew: {self.begin_command}") from None
        self.checkpoint = newest.checkpoint
        self.damaged = newest.damaged
        for line in newest.damaged.values():
            self.events.emit("warning", what=f"damaged checkpoint: {line}; going on after step {self.start} instead")
        for line in newest.notes:
            self.events.emit("warning", what=line)

    def depend_on(self, made_with: dict[str, Any]) -> None:
        """Save `made_with`, the fingerprint of config and model, with each checkpoint.

        Raises RunDirError if the checkpoint to continue from was made with contradicting values.
        """
        self.recorder.made_with = made_with
        if self.checkpoint:
            then = self.checkpoint.state.get("made_with")
            if then is None:
                raise RunDirError(earlier_version(self.run_dir.path, "its checkpoints do not say what made them"))
            contradicted = contradictions(then, made_with, self.start)
            if contradicted:
                raise RunDirError("; ".join(f"{contradiction.key}: {contradiction}" for contradiction in contradicted))

    def depend_on_rows(self, digest: str) -> None:
        """Save the digest of the training rows with each checkpoint, see `digest_rows`.

        Raises DataError if the checkpoint to continue from has another digest.
        """
        self.recorder.made_with["rows"] = digest
        if self.checkpoint and self.checkpoint.state["made_with"].get("rows") != digest:
            reason = f"its rows are not those that the cursor of the checkpoint of step {self.start} counts"
            raise DataError(f"data.train.path: {path_text(self.config.data.train.paths)}: {reason}")

    def commit_attempt(self) -> None:
        """Commit the run's directory to this attempt after the checkpoint is loaded.

        In a resumed run this writes config.yaml, removes metrics after the checkpoint, and renames damaged checkpoints.
        """
        if self.resumed:
            # A run without a checkpoint validates step 0 again.
            self.run_dir.truncate_metrics(self.start if self.checkpoint else -1)
            write_whole(self.run_dir.config, self.resolved)
            for path in self.damaged:
                self.recorder.checkpoints.set_aside(path)

    @property
    def ending(self) -> str:
        """Text that tells the user how the run ends after a signal."""
        return "finishing this step and saving" if self.training else _NOT_BEGUN

    def stops(self) -> bool:
        """Return True if the run must end after its step."""
        return self.interrupts.is_requested or bool(self.lost)

    def lose(self, reason: str) -> None:
        """Let the run end after its step, as failed with this reason. May be called from any thread."""
        self.lost = reason
        self.events.emit("warning", what=f"{reason}: {self.ending}")

    def begin_again(self) -> None:
        """Start the next attempt in this process. It continues from the newest checkpoint, like a resumed run."""
        self.recorder = RunRecorder(self.run_dir, self.events, self.recorder.metrics, self.config)
        _start_attempt(self.run_dir, self.resolved)
        self.resumed = True
        self.startup = {}
        self.smaller = []
        self.start_time = time.monotonic()
        self.training = False
        self.attempts += 1

    def end_start(self) -> None:
        """Emit `started` with the seconds of the start-up, and of its parts. Parts run in parallel, so their sum is
        larger.
        """
        self.training = True
        self.events.emit("started", seconds=time.monotonic() - self.start_time, parts=self.startup)

    @contextlib.contextmanager
    def starting(self, part: str) -> Iterator[None]:
        """Emit `startup` events at the begin and end of a part of the start-up, the last with its seconds."""
        if self.interrupts.is_requested:
            # End at once: there is nothing to save yet.
            raise KeyboardInterrupt
        if self.lost:
            raise RuntimeError(self.lost)
        self.events.emit("startup", what=part)
        begin = time.perf_counter()
        yield
        if self.interrupts.is_requested and threading.current_thread() is not threading.main_thread():
            # The main thread has already ended the start-up, and perhaps the run.
            raise KeyboardInterrupt
        self.startup[part] = time.perf_counter() - begin
        self.events.emit("startup", what=part, seconds=self.startup[part])


def run_session(
    settled: Settled,
    resolved: str,
    resume: Path | None,
    body: Callable[[Session], None],
    on_directory: Callable[[RunDir], None] | None = None,
) -> int:
    """Run `body` in a new session and return the exit code. resolved: the config as YAML, saved in the run's directory.

    on_directory: called once the run has its directory. Raises RunDirError if the directory cannot be used, for example
    because it is in use.
    """
    config = settled.config
    with contextlib.ExitStack() as stack:
        events: EventLog | None = None
        view: RunView | None = None
        session: Session | None = None

        def notify() -> None:
            if events:
                text = f"{interrupts.by}: {session.ending if session else _NOT_BEGUN}; again: stop now"
                events.emit("warning", what=text, asked_to_stop=True)

        def end_at_once(status: str, reason: str) -> None:
            if view:
                view.give_back(f"{reason}; go on: {resume_command}")
            # A view has an end once the session has emitted `run_ended`.
            if events and not (view and view.end):
                # A new EventLog writes the event, because the interrupted thread may hold the lock of the session's.
                EventLog(run_dir.events).emit("run_ended", status=status, reason=reason, next=[resume_command])

        def last_words() -> None:
            end_at_once(interrupts.status, "stopped at once, without a checkpoint of this step")

        def give_up() -> None:
            assert session
            try:
                EventLog(run_dir.events).emit("error", what=session.lost)
                end_at_once("failed", session.lost)
            finally:
                os._exit(1)

        try:
            run_dir = stack.enter_context(claim_run_dir(config, resume))
            # The signal handler is set before config.yaml exists, so that every run emits an event at its end.
            interrupts = stack.enter_context(Interrupts(notify, last_words))
            if resume is None:
                write_whole(run_dir.config, resolved)
            _start_attempt(run_dir, resolved)
        except OSError as error:
            print(f"error: {neutral(_explain(error))}", file=sys.stderr)
            return 1 if error.errno in _FULL else _BAD_INPUT
        if on_directory is not None:
            on_directory(run_dir)
        resume_command = next_commands(settled, run_dir, "interrupted")[0]
        events = EventLog(run_dir.events)
        start_time = events.now()
        # Trackers get the config as on disk, without values from the environment, which may be secret.
        trackers = open_trackers(config.telemetry.trackers, run_dir.path, yaml.safe_load(resolved), events)
        metrics = MetricsLog(run_dir.metrics, events, trackers)
        recorder = RunRecorder(run_dir, events, metrics, config)
        reserve = Reserve(run_dir.path / ".reserve", _LAST_WORDS_BYTES)
        view = stack.enter_context(show_run(run_dir, config.telemetry.dashboard, config.run.log_every, start_time))
        waits = Waits(config.run.explain_after_s, lambda text: events.emit("warning", what=text))
        session = Session(
            settled=settled,
            resolved=resolved,
            run_dir=run_dir,
            events=events,
            recorder=recorder,
            interrupts=interrupts,
            reserve=reserve,
            resumed=resume is not None,
            waits=waits,
            give_up=give_up,
        )
        code, status, reason = _run(session, body)
        view.end = _end_session(session, status, reason)
    return code


def _end_session(session: Session, status: str, reason: str) -> dict[str, Any]:
    """Close the files of a session, emit `run_ended`, and return that event."""
    session.waits.close()
    metrics = session.recorder.metrics
    metrics.close()
    session.reserve.release()
    lost = session.events.num_lost + metrics.num_lost
    if lost:
        reason = f"{reason + '; ' if reason else ''}{lost} records could not be written"
    commands = [session.begin_command] if session.begin_command else []
    commands = commands or next_commands(session.settled, session.run_dir, status, session.smaller, session.fails_again)
    end = {"status": status, "reason": reason, "next": commands}
    session.events.emit("run_ended", **end)
    return {"kind": "run_ended", "time": session.events.now(), **end}


@contextlib.contextmanager
def claim_run_dir(config: RunConfig, resume: Path | None) -> Iterator[RunDir]:
    """Create or find the run's directory, and lock it until the block is left.

    Raises RunDirError if another driver on this machine uses the directory, because two drivers would corrupt it.
    """
    if resume is None:
        root = Path(config.run.dir)
        run_dir = RunDir.create(config.run.name or automatic_name(config.kind, config.model.path, root), root)
        lock = run_dir.claim()
    else:
        run_dir = RunDir.open(resume)
        starts = [event for event in read_records(run_dir.events) if event.get("kind") == "run_started"]
        if starts and starts[-1].get("host") == socket.gethostname() and driver_lives(starts[-1]):
            pid = starts[-1].get("pid")
            raise RunDirError(f"{run_dir.path} is still running (process {pid}): watch it with `rlctl runs dash`")
        lock = run_dir.claim(_HANDED_OVER_S)
    try:
        yield run_dir
    finally:
        os.close(lock)


def _start_attempt(run_dir: RunDir, resolved: str) -> None:
    """Create the log folder of a new attempt with its config, and write the table of rlctl's metrics."""
    run_dir.start_attempt()
    write_whole(run_dir.logs.resolve() / "config.yaml", resolved)
    write_rows(run_dir.metric_rows, installed_rows().rows)


def _run(session: Session, body: Callable[[Session], None]) -> tuple[int, str, str]:
    """Run `body`. After a loss of processes run it again from the newest checkpoint, at most `run.max_restarts` times.

    Returns (exit code, status, reason).
    """
    run = session.config.run
    pause: float | None = None
    while True:
        try:
            if pause is not None:
                _sleep(session, pause)
                session.begin_again()
            if session.resumed:
                session.find_checkpoint()
            body(session)
            break
        except UserError as error:
            session.fails_again = error.exit_code == _BAD_INPUT
            return _fail(session, str(error), error.exit_code)
        except KeyboardInterrupt:
            if session.lost:
                # The interrupt came from the cluster, which stops its drivers when its head is gone.
                return _fail(session, session.lost, 1)
            return 130, session.interrupts.status, session.interrupts.by
        except Exception as error:
            _keep_traceback(session, error)
            reason = _explain(error)
            processes_lost = isinstance(error, WorkerDied | WorkerTimeout | NoEngineLeft)
            # `lost` is the cause, for example that Ray is gone, and would end the next attempt too.
            if processes_lost and session.lost:
                return _fail(session, f"{session.lost}; then {reason}", 1)
            if processes_lost and session.attempts <= run.max_restarts and not session.interrupts.is_requested:
                pause = min(_LONGEST_PAUSE_S, run.restart_backoff_s * 2 ** (session.attempts - 1))
                count = f"{session.attempts} of {run.max_restarts}"
                session.events.emit("restart", reason=reason, count=count, pause_s=pause)
                continue
            has_saved = Checkpoints(session.run_dir.checkpoints, keep_last=1, keep_best=0).latest() is not None
            session.fails_again = not (processes_lost or _has_no_room(reason) or has_saved)
            if not isinstance(error, _EXPLAINED):
                reason = f"{type(error).__name__}: {reason}; see {session.logs / 'driver.log'}"
            return _fail(session, reason, 1)
    if session.lost:
        return _fail(session, session.lost, 1)
    if session.interrupts.is_requested:
        return 130, session.interrupts.status, session.interrupts.by
    return 0, "done", ""


def _sleep(session: Session, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if session.interrupts.is_requested:
            raise KeyboardInterrupt
        time.sleep(0.1)


def _fail(session: Session, reason: str, code: int) -> tuple[int, str, str]:
    """Emit the run's error. Return (exit code, status, reason) as `_run` does."""
    session.reserve.release()
    session.events.emit("error", what=reason)
    return code, "failed", reason


def _explain(error: BaseException) -> str:
    first = first_line(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        first = f"{error.filename}: {error.strerror}"
    return f"{first}; make room there, then resume" if _has_no_room(first) else first


def _has_no_room(reason: str) -> bool:
    """Return True if `reason` names a full disk or an exceeded quota. A worker's error has a text and no errno."""
    return any(os.strerror(code) in reason for code in _FULL)


def _keep_traceback(session: Session, error: BaseException) -> None:
    session.reserve.release()
    with contextlib.suppress(OSError), (session.logs / "driver.log").open("a") as log:
        traceback.print_exception(error, file=log)
        if isinstance(error, WorkerError):
            log.write(error.tracebacks())
