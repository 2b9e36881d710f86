"""What a run is called that ends by a signal."""

import os
import signal
import threading

import pytest

from rlctl.run.interrupts import Interrupts


@pytest.mark.parametrize(
    ("number", "by", "status"),
    [(signal.SIGINT, "Ctrl-C", "interrupted"), (signal.SIGTERM, "asked to stop", "stopped")],
)
def test_ctrl_c_interrupts_and_a_request_stops(number: signal.Signals, by: str, status: str) -> None:
    before, told = signal.getsignal(number), threading.Event()
    with Interrupts(told.set) as interrupts:
        assert not interrupts.asked
        os.kill(os.getpid(), number)
        assert told.wait(300)
        assert (interrupts.asked, interrupts.by, interrupts.status) == (True, by, status)
    assert signal.getsignal(number) is before
