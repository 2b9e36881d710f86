"""The program of a Ray job that drives a run, on the cluster's head: `python -m rlctl.cli.job RUN_DIR`.

Flags: --wait (for room), --probe (only that).
"""

import json
import os
import sys
from pathlib import Path

from rlctl.cluster.jobs.head_agent import CONFIG, SECRETS
from rlctl.run.run_dir import JobRecord


def main() -> int:
    """Drive the run, and return its exit code."""
    run, flags = Path(sys.argv[1]), sys.argv[2:]
    record = JobRecord.read(run)
    assert record is not None, f"{run} has no job.json"
    os.chdir(record.work)
    # Rewards of the user's own are modules of the working directory.
    sys.path.insert(0, record.work)
    if (secrets := run / SECRETS).exists():
        os.environ.update(json.loads(secrets.read_text(encoding="utf-8")))
        secrets.unlink()

    from rlctl.launch.assembly import launch
    from rlctl.launch.runtime import ClusterRuntime
    from rlctl.preflight.load import load

    composed = load(None, str(run / CONFIG), [], resume=True)
    runtime = ClusterRuntime("--wait" in flags)
    return launch(composed.settled, composed.to_yaml(), runtime, run, probe_only="--probe" in flags)


if __name__ == "__main__":
    sys.exit(main())
