"""Real runs for fault tests: started by the command line as by a user, and observed through the run's files."""

import ctypes
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rlctl.telemetry.metrics import read_rows

# Largest time to wait for an event of a run: several times as long as a start on a slow and busy machine.
DEADLINE_S = 600.0
# Overrides for small steps that use every part of the program. One engine, because a second would start slowly and show
# nothing more.
SETTINGS = {
    "grpo": ("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "validation.every=4"),
    "sft": (),
}


# Overrides for an engine without vLLM, whose start takes 9 s of CPU. For faults of other parts.
WITHOUT_VLLM = f"generation.engine={Path(__file__).parents[1] / 'plugins' / 'torch_engine.py'}:KIND"
PR_SET_PDEATHSIG = 1

# All runs that this process has started.
RUNS: list["Run"] = []


class Run:
    """One attempt of a run in `folder/runs/NAME`. within: a command that becomes the one it is given.

    terminal: give the run a new terminal, with the dashboard, for `hang_up`.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *settings: str,
        resume: bool = False,
        kind: str = "grpo",
        within: Sequence[str] = (),
        terminal: bool = False,
    ) -> None:
        self.path = folder / "runs" / name
        command: list[str] = [*within, sys.executable, "-m", "rlctl.cli.main", "train", kind]
        if resume:
            command += ["--resume", str(self.path), *settings]
        else:
            command += [f"run.dir={folder / 'runs'}", f"run.name={name}", *SETTINGS[kind], *settings]
        self._events_before = len(self.events())
        self.output = folder / f"{name}-{time.monotonic_ns()}.out"
        self._terminal = Terminal(self.output) if terminal else None
        with self.output.open("w") as output:
            # The run gets its own session, as in a terminal, so that signals go to its whole process group.
            self.process = subprocess.Popen(
                command,
                stdout=self._terminal.inner if self._terminal else output,
                stderr=self._terminal.inner if self._terminal else output,
                cwd=folder,
                start_new_session=True,
                preexec_fn=partial(prepare_process, self._terminal),
            )
        RUNS.append(self)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the events of all attempts at this run, or only those of one kind."""
        events = read(self.path / "events.jsonl")
        if kind is None:
            return events
        return [event for event in events if event["kind"] == kind]

    def start(self) -> int:
        """Wait until this attempt has begun. Return the step from which it continues."""
        step: int = self.wait_for_event("run_started")["start_step"]
        return step

    def steps(self) -> list[dict[str, Any]]:
        return [record for record in read(self.path / "metrics.jsonl") if record["kind"] == "step"]

    def undeclared_metrics(self) -> set[str]:
        """Return the names in metrics.jsonl that are not declared in the run's table of metrics."""
        table = read_rows(self.path / "metric_rows.json")
        assert table, "the run has no rows"
        names = set[str]().union(*read(self.path / "metrics.jsonl"))
        return {name for name in names - {"kind", "step", "time"} if not table.find(name)}

    def wait_for(self, awaited: str, has_come: Callable[[], bool]) -> None:
        """Wait until `has_come()` is true. If the run ends before or takes too long, fail the test with its output."""
        end = time.monotonic() + DEADLINE_S
        while not has_come():
            assert self.process.poll() is None, f"the run ended before {awaited}:\n{self.text()}"
            assert time.monotonic() < end, f"no {awaited} within {DEADLINE_S} s:\n{self.text()}"
            time.sleep(0.02)

    def wait_for_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Wait for the first event of this attempt that has these fields. Return the event."""
        matches: list[dict[str, Any]] = []

        def has_come() -> bool:
            new_events = self.events()[self._events_before :]
            matches[:] = [event for event in new_events if {"kind": kind, **fields}.items() <= event.items()]
            return bool(matches)

        self.wait_for(f"{kind} {fields}", has_come)
        return matches[0]

    def wait_for_step(self, number: int) -> None:
        """Wait until this attempt works on step `number`."""
        self.wait_for_event("phase", step=number)

    def interrupt(self) -> None:
        """Send Ctrl-C as a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        """Send SIGTERM to the driver, as schedulers and `rlctl runs stop` do."""
        self.process.terminate()

    def hang_up(self) -> None:
        """Close the terminal: the kernel sends SIGHUP to the whole group."""
        assert self._terminal
        self._terminal.close()

    def kill(self) -> list[psutil.Process]:
        """Kill only the driver, with SIGKILL. Return the processes that the driver had started."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        return family

    def end_now(self) -> None:
        """Kill the driver if it still runs; its other processes then end by themselves."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def end(self) -> int:
        """Wait until the run has ended. Return its exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.end_now()
            raise AssertionError(f"the run did not end:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text()


class Terminal:
    """A terminal of 120 columns, whose output goes to a file until it is closed."""

    def __init__(self, output: Path) -> None:
        # inner: descriptor of the terminal's side that the program uses.
        self._outer, self.inner = pty.openpty()
        termios.tcsetwinsize(self.inner, (40, 120))
        self._output = output
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def control(self) -> None:
        """Make this the controlling terminal of the calling process, which must lead a session."""
        fcntl.ioctl(self.inner, termios.TIOCSCTTY, 0)

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
        os.close(self.inner)
        os.close(self._outer)

    def _copy(self) -> None:
        while not self._closed.is_set():
            if select.select([self._outer], [], [], 0.05)[0]:
                with self._output.open("ab") as output:
                    output.write(os.read(self._outer, 1 << 16))


def prepare_process(terminal: Terminal | None) -> None:
    """Prepare a process that becomes a run. The kernel kills it when its parent thread ends, so that no run is left."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if terminal:
        terminal.control()


def read(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a JSONL file."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def survivors(family: list[psutil.Process], within_s: float = 120.0) -> list[psutil.Process]:
    """Return the processes that still live after `within_s`; zombies count as dead."""
    end = time.monotonic() + within_s
    alive = family
    while alive and time.monotonic() < end:
        alive = [process for process in alive if _lives(process)]
        time.sleep(0.2)
    return alive


def in_transit(name: str) -> list[Path]:
    """Return the folders in shared memory that still have weights of the run `name`."""
    return list(Path("/dev/shm").glob(f"rlctl-{name}-*"))


def outcomes(path: Path) -> dict[str, list[int]]:
    """Return prompt id -> steps in which the prompt's group ended. path: outcomes file of a run."""
    steps_by_prompt: dict[str, list[int]] = {}
    for record in read(path / "rollouts.jsonl"):
        if record["kind"] != "prompts":
            continue
        for prompt_ids in (record["trained"], *record["filtered"].values(), *record["dropped"].values()):
            for prompt_id in prompt_ids:
                steps_by_prompt.setdefault(prompt_id, []).append(record["step"])
    return steps_by_prompt


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
