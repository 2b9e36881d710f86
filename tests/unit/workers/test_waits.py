"""Who is waited for is told once it lasts unusually long, or at once if a process is stopped."""

import os
import signal
import subprocess
import sys
import threading
import time

from rlctl.workers.waits import Waits
from tests.waiting import until


def test_a_stopped_worker_is_named_with_what_wakes_it_and_where_the_run_is() -> None:
    messages: list[str] = []
    waits = Waits(0.2, messages.append)
    waits.where = lambda: "trainer at version 3"
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        # A call that took far longer before.
        with waits.wait("train", list, 60, "run.deadline_s"):
            time.sleep(1.5)
        os.kill(process.pid, signal.SIGSTOP)
        with waits.wait("train", lambda: [("trainer-0", process.pid)], 60, "run.deadline_s"):
            until(lambda: bool(messages))
    finally:
        process.kill()
        process.wait()
        waits.close()
    state = f"process {process.pid} is stopped: kill -CONT {process.pid}"
    assert messages[0].startswith("the driver has waited ")
    assert messages[0].endswith(
        f" s for trainer-0 ({state}), call train; trainer at version 3; given up after 60 s (run.deadline_s)"
    )


def test_a_call_that_takes_as_long_as_the_one_before_it_is_not_worth_a_word() -> None:
    message_times: list[float] = []
    waits = Waits(0.2, lambda message: message_times.append(time.monotonic()))
    with waits.wait("train", lambda: [("trainer-0", None)], 60, "run.deadline_s"):
        began = time.monotonic()
        until(lambda: len(message_times) == 1)
        first_wait = time.monotonic() - began
    began = time.monotonic()
    with waits.wait("train", lambda: [("trainer-0", None)], 60, "run.deadline_s"):
        until(lambda: len(message_times) == 2)
    assert message_times[1] - began > 3 * first_wait > 3 * 0.2
    waits.close()


def test_an_explanation_that_fails_is_told_and_ends_no_other() -> None:
    messages: list[str] = []
    waits = Waits(0.2, messages.append)

    def fail() -> list[tuple[str, int | None]]:
        raise RuntimeError("no Ray to ask")

    with waits.wait("train", fail, 60, "run.deadline_s"):
        until(lambda: len(messages) == 1)
        assert messages[0].endswith("call train; for whom cannot be told: RuntimeError('no Ray to ask')")
        with waits.wait("refit_send", lambda: [("trainer-0", None)], 60, "refit.timeout_s"):
            until(lambda: any("call refit_send; " in message for message in messages))
    waits.close()


def test_a_wait_that_ends_while_it_is_looked_at_is_not_told() -> None:
    messages: list[str] = []
    look_begins = threading.Event()
    wait_ended = threading.Event()
    waits = Waits(0.2, messages.append)

    def name_late() -> list[tuple[str, int | None]]:
        look_begins.set()
        wait_ended.wait(300)
        return [("trainer-0", None)]

    with waits.wait("train", name_late, 60, "run.deadline_s"):
        assert look_begins.wait(300)
    wait_ended.set()
    with waits.wait("refit_send", lambda: [("trainer-0", None)], 60, "refit.timeout_s"):
        until(lambda: bool(messages))
    waits.close()
    assert "call refit_send" in messages[0]


def test_what_a_wait_refers_to_is_let_go_where_it_was_waited_for() -> None:
    class Reference:
        def __del__(self) -> None:
            freed.append(threading.current_thread())

    freed: list[threading.Thread] = []
    messages: list[str] = []
    waits = Waits(0.0, messages.append)
    reference = Reference()

    def name_trainer(reference: Reference = reference) -> list[tuple[str, int | None]]:
        return [("trainer-0", None)] if reference else []

    with waits.wait("train", name_trainer, 60, "run.deadline_s"):
        until(lambda: bool(messages))
        # Between two looks, which are half a second apart.
        time.sleep(0.1)
    # As Ray's references, which only the driver's own thread may drop at the end of a run.
    del name_trainer, reference
    assert freed == [threading.current_thread()]
    waits.close()
