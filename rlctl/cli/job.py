"""The program of a Ray job that drives a run on a cluster's head node: `python -m rlctl.cli.job RUN_DIR`.

Flags: --wait (wait until the cluster has room), --probe (compare trainer and generator, then stop).
"""

import json
import os
import signal
import sys
from pathlib import Path

from rlctl.cli.output import say
from rlctl.cluster.jobs.head_agent import CONFIG, SECRETS
from rlctl.config.errors import UserError
from rlctl.run.run_dir import JobRecord
from rlctl.utils.process import stop_with_parent


def main() -> int:
    """Drive the run, and return its exit code."""
    _leave_group()
    run = Path(sys.argv[1])
    flags = sys.argv[2:]
    record = JobRecord.read(run)
    assert record is not None, f"{run} has no job.json"
    os.chdir(record.work)
    # A user's rewards are imported from the working directory.
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


def _leave_group() -> None:
    """Fork, and return in a child in a new session. The parent waits, and exits with the child's exit code.

    Ray kills a job's process group when the cluster's head is gone. The child survives this, so it can record why the
    run ended. A stop of the job still reaches the child, because Ray sends SIGTERM to all processes of a job. The
    kernel sends SIGTERM to the child when the parent is gone.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        stop_with_parent()
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _explained_main() -> int:
    """Drive the run and return its exit code. Print a user's error as one line."""
    try:
        return main()
    except UserError as error:
        say(f"error: {error}", err=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_explained_main())
