"""The program of a Ray job that drives a run, on the cluster's head: `python -m rlctl.cli.job RUN_DIR`.

Flags: --wait (until the cluster has room), --probe (compare trainer and generator, then stop).
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


def _leave_group() -> None:
    """Go on as a child in a new session. The parent waits for the child, and ends with the child's exit code.

    Ray kills a job's group when the cluster's head is gone: nobody would learn why the run ended. A stop reaches the
    child, since Ray sends it to all processes of a job. The kernel asks the child to stop when the parent is gone.
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
    """Drive the run. Print a mistake of the input as one line."""
    try:
        return main()
    except UserError as error:
        say(f"error: {error}", err=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(_explained_main())
