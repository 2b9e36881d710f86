"""Three errors of a worker, each one line that names it."""

import pickle

from rlctl.workers.actor import WorkerActor
from rlctl.workers.errors import Failure, WorkerDied, WorkerError, WorkerTimeout

FAILURES = [Failure(f"trainer-{rank}", "ValueError", f"no {rank}", f"Traceback {rank}") for rank in range(3)]


def test_an_error_names_the_first_worker_that_raised_and_counts_the_others() -> None:
    assert str(WorkerError("train", FAILURES[:1])) == "train on trainer-0: ValueError: no 0"
    assert str(WorkerError("train", FAILURES)) == "train on trainer-0: ValueError: no 0 (and 2 more)"


def test_an_error_keeps_every_workers_traceback_under_its_name() -> None:
    text = WorkerError("train", FAILURES[:2]).tracebacks()
    assert text == "--- trainer-0\nTraceback 0\n--- trainer-1\nTraceback 1"


def test_a_death_names_all_that_died_and_why() -> None:
    error = WorkerDied("train", ["trainer-1", "trainer-2"], "exit code 9")
    assert str(error) == "trainer-1, trainer-2 died during train: exit code 9"


def test_a_silence_says_who_waits_for_whom_how_long_and_what_to_turn() -> None:
    error = WorkerTimeout("refit_receive", ["engine-1"], 300.4, "refit.timeout_s")
    assert str(error) == (
        "the driver waited 300 s for engine-1 to finish refit_receive; if the work is just long, raise "
        "refit.timeout_s; kill -USR1 PID makes a process write what it does into its log"
    )


def test_a_host_hands_back_what_was_raised_as_a_value_that_travels() -> None:
    host = WorkerActor("engine-0", lambda: [3, 1, 2], {}, None, threads=1)
    assert host.build() == (None, None)
    assert host.call("index", (1,), {}) == (None, 1)
    failure, result = host.call("index", (9,), {})
    assert result is None and failure is not None
    assert (failure.worker, failure.type, failure.text) == ("engine-0", "ValueError", "9 is not in list")
    assert "Traceback" in failure.traceback
    assert pickle.loads(pickle.dumps(failure)) == failure
    missing, _ = host.call("train", (), {})
    assert missing is not None and missing.type == "AttributeError"


def test_a_worker_that_cannot_be_built_is_a_value_too() -> None:
    failure, _ = WorkerActor("engine-0", lambda: 1 // 0, {}, None, threads=1).build()
    assert failure is not None and failure.type == "ZeroDivisionError"
