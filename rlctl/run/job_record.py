"""What a run directory remembers of the Ray job that drives it: `job.json`, beside config.yaml."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rlctl.utils.files import write_whole


@dataclass(frozen=True)
class JobRecord:
    """cluster: its name here. job: Ray's submission id. work: the driver's working directory, on the head.
    attempt: how often the run was submitted.

    remote: path of the run directory on the head where this one is a copy of it; None where it is the run's own.
    called: path by which whoever submitted the run knows it; None: its own.
    """

    cluster: str
    job: str
    work: str
    attempt: int = 1
    remote: str | None = None
    called: str | None = None

    @classmethod
    def read(cls, run: Path) -> "JobRecord | None":
        """None for a run without a job."""
        try:
            return cls(**json.loads((run / "job.json").read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, run: Path) -> None:
        """Whole or not at all."""
        write_whole(run / "job.json", json.dumps(asdict(self)))
