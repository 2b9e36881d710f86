"""The run directory: the paths of a run's files, and the lock that keeps other drivers out.

`runs/NAME/{config.yaml, events.jsonl, metrics.jsonl, metric_rows.json, rollouts.jsonl, checkpoints/, logs/attempt_N/}`.
The start of a run and each resume are attempts with separate logs. `logs/latest` points to the newest attempt's.
"""

import fcntl
import json
import os
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from rlctl.config.errors import UserError, did_you_mean
from rlctl.config.run_weights import is_run, run_names
from rlctl.telemetry.metrics import METRIC_ROWS
from rlctl.utils.files import sync, write_whole

_CLAIM_POLL_S = 0.1
# The most characters of a model's name in a run's name. The name of a run from a checkpoint contains the earlier run's
# name, so names would otherwise grow beyond the length allowed for a folder.
_LONGEST_MODEL = 80
_CHECKPOINT = re.compile(r"([^/]+)/checkpoints/(step_\d+)/hf/*$")


class RunDirError(UserError):
    """A run directory cannot be used as asked. The message is one line with the remedy."""


class RunDir:
    """The directory of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.checkpoints = path / "checkpoints"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.metric_rows = path / METRIC_ROWS
        # Folder of the newest attempt's logs, with one file for each process.
        self.logs = path / "logs" / "latest"

    @classmethod
    def create(cls, name: str, root: Path) -> "RunDir":
        """Make `root/name`, which only this user can enter: prompts, answers and configs may hold secrets.

        Raises RunDirError if the name is no plain folder name, or is in use.
        """
        if not re.fullmatch(r"\w[\w.+=-]*", name):
            raise RunDirError(f"run.name={name}: letters, digits and any of . _ - + = (it names a folder)")
        path = root / name
        try:
            root.mkdir(parents=True, exist_ok=True)
            path.mkdir(0o700)
        except FileExistsError:
            resume = f"continue it with --resume {quote(str(path))}"
            raise RunDirError(f"run.name={name} is in use ({path}): {resume}, or choose another name") from None
        except OSError as error:
            raise RunDirError(f"run.dir={root}: {error.strerror or error}: choose another folder") from error
        run = cls(path)
        run.checkpoints.mkdir()
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """Return the run in the folder `path`. Raises RunDirError if the folder is missing or is no run directory."""
        if not path.is_dir():
            raise RunDirError(f"{path}: no such run; `rlctl runs list` shows what there is")
        run = cls(path)
        if not (run.config.exists() or run.events.exists()):
            raise RunDirError(f"{path} is no run directory: it has neither config.yaml nor events.jsonl")
        return run

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        names = (re.fullmatch(r"attempt_(\d+)", path.name) for path in (self.path / "logs").glob("attempt_*"))
        return max((int(name[1]) for name in names if name), default=0)

    def recorded_config(self) -> dict[str, Any]:
        """Return the config with which the run was started. Raises RunDirError if its file is damaged."""
        damage = "no config of a run"
        try:
            config = yaml.safe_load(self.config.read_text(encoding="utf-8"))
            if isinstance(config, dict) and isinstance(config.get("kind"), str):
                # The sections that the readers of a recorded config use.
                sections = (config.get("model", {}), config.get("data", {}))
                if all(isinstance(section, dict) for section in sections):
                    return dict(config)
        except OSError as error:
            damage = f"cannot be read: {error.strerror}"
        except (ValueError, yaml.YAMLError, RecursionError):
            damage = "no YAML"
        raise RunDirError(f"{self.config}: damaged, {damage}; rename it to use the run's weights without it")

    def claim(self, wait_s: float = 0.0) -> int:
        """Lock the run for this process. The lock ends when the returned descriptor is closed or the process ends.

        Raises RunDirError if another process still holds the lock after `wait_s` seconds.
        """
        descriptor = os.open(self.path / ".driver", os.O_RDWR | os.O_CREAT, 0o644)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    raise RunDirError(f"{self.path} is being driven already: watch it with `rlctl runs dash`") from None
            time.sleep(_CLAIM_POLL_S)

    def start_attempt(self) -> int:
        """Make the next `logs/attempt_N`, point `logs/latest` there, and return N."""
        number = self.attempt + 1
        folder = self.path / "logs" / f"attempt_{number}"
        folder.mkdir(parents=True)
        # Make a new link and rename it, so that `logs/latest` exists at every moment.
        new_link = folder.parent / ".latest"
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(folder.name)
        new_link.replace(self.logs)
        return number

    def truncate_metrics(self, step: int) -> None:
        """Drop the records of steps after `step` from metrics.jsonl and rollouts.jsonl, because a resume repeats them.

        step: -1 drops all records, also those of step 0. Each file is replaced atomically: a kill leaves the old file
        or the new one.
        """
        for path in (self.metrics, self.rollouts):
            if path.exists():
                _drop_after(path, step)


@dataclass(frozen=True)
class JobRecord:
    """The job that drives a run on a cluster."""

    # Name by which this machine knows the cluster.
    cluster: str
    # Ray's submission id of the job.
    job: str
    # Working directory of the driver on the cluster's head node.
    work: str
    # Number of times that the run was submitted.
    attempt: int = 1
    # Path of the run directory on the head node, if this directory is a copy.
    remote: str | None = None
    # Path of the run directory on the machine that submitted the run; None: this directory's path.
    called: str | None = None

    @classmethod
    def read(cls, run: Path) -> "JobRecord | None":
        """Return the record in the run directory `run`; None if there is none. Raises RunDirError if it is damaged."""
        path = run / "job.json"
        try:
            record = cls(**json.loads(path.read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise RunDirError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, RecursionError):
            record = None
        if record is None or not all(isinstance(text, str) for text in (record.cluster, record.job, record.work)):
            raise RunDirError(
                f"{path} is damaged, so that no cluster is known that drives the run; "
                "remove it to use the run without one"
            )
        return record

    def write(self, run: Path) -> None:
        """Write the record into the run directory `run`, atomically."""
        write_whole(run / "job.json", json.dumps(asdict(self)))


def find_run(text: str, root: Path) -> Path:
    """Return a run's directory. text: the run's name below `root`, or a path. Raises RunDirError if there is none."""
    for path in (root / text, Path(text)):
        if is_run(path):
            return path
    folder = root if Path(text).name == text else Path(text).parent
    near = did_you_mean(Path(text).name, run_names(folder))
    if not near and Path(text).is_dir():
        raise RunDirError(f"{text} is no run directory: it has neither config.yaml nor events.jsonl")
    raise RunDirError(f"{text}: no such run{near or '; `rlctl runs list` shows what there is'}")


def model_name(path: str) -> str:
    """Return a model's short name: the last part of its path or hub name; for a checkpoint, its run and step."""
    checkpoint = _CHECKPOINT.search(path)
    return f"{checkpoint[1]}-{checkpoint[2]}" if checkpoint else Path(path).name


def automatic_name(kind: str, model: str, root: Path) -> str:
    """Return a run's name KIND--MODEL--N, such as grpo--qwen3-0.6b--3. N is 1 more than the largest number in use.

    If the model is a checkpoint, MODEL is its run and step: grpo--sft-qwen3-0.6b-1-step_800--1.
    """
    short = re.sub(r"[^\w.]+", "-", model_name(model).lower())[-_LONGEST_MODEL:].strip("-.") or "model"
    prefix = f"{kind}--{short}--"
    suffixes = (path.name.removeprefix(prefix) for path in root.glob(f"{prefix}*"))
    newest = max((int(suffix) for suffix in suffixes if suffix.isdigit()), default=0)
    return f"{prefix}{newest + 1}"


def _drop_after(path: Path, step: int) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with path.open("rb") as old, temporary.open("wb") as new:
        new.writelines(line for line in old if _belongs(line, step))
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def _belongs(line: bytes, step: int) -> bool:
    """Return True for a record of a step up to `step`, False for later ones and for a damaged or unfinished line."""
    try:
        return line.endswith(b"\n") and int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return False
