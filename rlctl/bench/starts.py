"""`rlctl bench start`: seconds from the command to the end of the first step, and the CPU seconds of each process."""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from rlctl.bench.frame import Bench, Cells, Line, Results, ResultTable, Say, until_interrupted
from rlctl.bench.runs import train_command
from rlctl.telemetry.jsonl import read_records

# Seconds between two readings of the processes' CPU times. The last ones of a process are missed.
_READ_S = 0.2
_BARE = (
    "run.name=start",
    "validation.every=0",
    "checkpoint.every=0",
    "checkpoint.at_end=false",
    "telemetry.dashboard=off",
)
_STEPS_KEY = {"grpo": "grpo.num_steps", "sft": "sft.num_steps"}
# Packages that a cold start reads from the disk.
_PACKAGES = ("torch", "vllm", "transformers", "ray", "triton", "numpy", "rlctl")
# Part of a command line -> name of the process in the table. The first that matches counts.
_NAMES = {
    # First, for its command line has the stubs'.
    "raylet/raylet": "Ray's raylet",
    "fork_server.py": "imports for workers",
    "fork_stub.py": "stubs of workers",
    "gcs_server": "Ray's gcs_server",
    "idle_agent.py": "Ray's idle agents",
    "default_worker.py": "workers that start",
    "reaper.py": "reapers",
    "rlctl.workers.supervisor": "reward processes",
}
_LEGEND = (
    "command: imports and checks, until the run has a directory; the other parts overlap. first step: its own seconds; "
    "to first step: from the command to the end of that step"
)


@dataclass(frozen=True)
class StartBench(Bench):
    """Starts of one recipe, each a whole run of one step."""

    recipe: str
    kind: str
    rounds: int
    # True: package files leave the page cache before each start, and compiled code is kept elsewhere.
    cold: bool
    overrides: Sequence[str]

    def measure(self, folder: Path, say: Say) -> "StartResults":
        def starts() -> Iterator[StartRow]:
            for index in range(self.rounds):
                say(f"start {index + 1} of {self.rounds}")
                yield self._start(folder / f"start-{index}")

        rows, interrupted = until_interrupted(starts())
        return StartResults(rows, interrupted)

    def _start(self, folder: Path) -> "StartRow":
        """Make one run of one step in `folder`. Raises RuntimeError with the end of its output if it fails."""
        folder.mkdir()
        environment = dict(os.environ)
        if self.cold:
            environment["XDG_CACHE_HOME"] = str(folder / "cache")
            for package in _PACKAGES:
                drop_from_page_cache(package)
        command = train_command(self.kind, self.recipe, [*self.overrides, f"{_STEPS_KEY[self.kind]}=1", *_BARE])
        with (folder / "out").open("w") as output:
            begin = time.time()
            run = subprocess.Popen(
                [*command, f"run.dir={folder}"], stdout=output, stderr=output, env=environment, start_new_session=True
            )
            reading = _CpuReading(run.pid)
            try:
                while run.poll() is None:
                    reading.read()
                    time.sleep(_READ_S)
            except KeyboardInterrupt:
                run.terminate()
                run.wait()
                raise
        if run.returncode:
            last_lines = (folder / "out").read_text().strip().splitlines()[-3:]
            raise RuntimeError(f"the run ended with {run.returncode}: {' / '.join(last_lines)}")
        return _read_row(folder / "start", begin, reading)


class _CpuReading:
    """CPU seconds of a process and its descendants, by process id, as they were when last read."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self.seconds: dict[int, float] = {}
        self._names: dict[int, str] = {}

    def read(self) -> None:
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                times = process.cpu_times()
                self.seconds[process.pid] = times.user + times.system
                # A process that has ended has no command line any more.
                if line := " ".join(process.cmdline()):
                    self._names[process.pid] = self._name_of(process.pid, line)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue

    def by_name(self, workers: dict[int, str]) -> dict[str, float]:
        """Return name -> CPU seconds. workers: process id -> name of a rank or an engine."""
        totals: dict[str, float] = {}
        for pid, seconds in self.seconds.items():
            name = workers.get(pid) or self._names.get(pid, "others")
            totals[name] = totals.get(name, 0.0) + seconds
        return totals

    def _name_of(self, pid: int, line: str) -> str:
        """Return the name of the process `pid` with the command line `line`."""
        if pid == self._root.pid:
            return "driver"
        return next((name for part, name in _NAMES.items() if part in line), "others")


@dataclass(frozen=True)
class StartRow:
    """One start."""

    # Part of the start -> its seconds, in the order of their ends.
    parts: dict[str, float]
    # Seconds of the first step.
    step: float
    # Seconds from the command to the end of the first step.
    total: float
    # Name -> CPU seconds of a process, or of several of one kind, over the whole run.
    cpu: dict[str, float]


def _read_row(run: Path, begin: float, reading: _CpuReading) -> StartRow:
    """Return the row of a finished run. begin: time of its command."""
    parts: dict[str, float] = {}
    workers: dict[int, str] = {}
    started = begin
    for event in read_records(run / "events.jsonl"):
        if event["kind"] == "run_started":
            parts["command"] = event["time"] - begin
        elif event["kind"] == "startup" and "seconds" in event:
            parts[event["what"]] = event["seconds"]
        elif event["kind"] == "processes":
            workers = {pid: name for name, pid in event.items() if isinstance(pid, int)}
        elif event["kind"] == "started":
            started = event["time"]
    step = next(record for record in read_records(run / "metrics.jsonl") if record["kind"] == "step")
    return StartRow(parts=parts, step=step["time"] - started, total=step["time"] - begin, cpu=reading.by_name(workers))


@dataclass(frozen=True)
class StartResults(Results):
    """All starts."""

    rows: list[StartRow]
    interrupted: bool = False

    def report(self, wide: bool) -> list[Line | ResultTable]:
        best = min(self.rows, key=lambda row: row.total)
        names = list(dict.fromkeys(name for row in self.rows for name in row.parts))
        seconds = {name: [row.parts.get(name) for row in self.rows] for name in names}
        seconds["first step"] = [row.step for row in self.rows]
        seconds["to first step"] = [row.total for row in self.rows]
        phases = [self._start_cells("seconds", name, values) for name, values in seconds.items()]
        processes = sorted(best.cpu.items(), key=lambda item: -item[1])
        cpu = []
        for name, _ in processes:
            cpu.append(self._start_cells("CPU seconds", name, [row.cpu.get(name) for row in self.rows]))
        cpu.append(self._start_cells("CPU seconds", "all", [sum(row.cpu.values()) for row in self.rows]))
        return [
            Line(_LEGEND, "dim"),
            ResultTable(phases, bold=[len(phases) - 1]),
            Line(""),
            ResultTable(cpu, bold=[len(cpu) - 1]),
        ]

    @staticmethod
    def _start_cells(title: str, name: str, values: Sequence[float | None]) -> Cells:
        """Return a row: its name, the value of each start, and the smallest."""
        cells = [(title, name)]
        for index, value in enumerate(values):
            cells.append((f"start {index + 1}", "" if value is None else f"{value:.2f}"))
        measured = [value for value in values if value is not None]
        cells.append(("smallest", f"{min(measured):.2f}" if measured else ""))
        return cells


def drop_from_page_cache(package: str) -> None:
    """Have the system forget the content of a package's files, so that the next import reads them from the disk."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)
