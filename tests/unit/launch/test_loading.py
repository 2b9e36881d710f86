"""Rows are read on a separate thread. An interrupted run does not wait for this thread."""

import threading
from contextlib import ExitStack

import pytest

from rlctl.launch.loading import meanwhile


def test_its_value_or_error_is_the_futures() -> None:
    with ExitStack() as stack:
        assert meanwhile(stack, lambda: threading.current_thread()).result(300) is not threading.current_thread()
        assert isinstance(meanwhile(stack, lambda: 1 / 0).exception(300), ZeroDivisionError)


@pytest.mark.parametrize(("error", "waits"), [(None, True), (RuntimeError, True), (KeyboardInterrupt, False)])
def test_the_end_of_the_stack_waits_for_it_unless_the_run_is_interrupted(
    error: type[BaseException] | None, waits: bool
) -> None:
    may_end = threading.Event()
    has_begun = threading.Event()
    has_ended = threading.Event()

    def work() -> None:
        has_begun.set()
        may_end.wait(300)
        has_ended.set()

    stack = ExitStack()
    future = meanwhile(stack, work)
    assert has_begun.wait(300)
    timer = threading.Timer(0.2, may_end.set)
    if waits:
        timer.start()
    if error:
        with pytest.raises(error), stack:
            raise error
    else:
        stack.close()
    assert has_ended.is_set() is waits
    may_end.set()
    future.result(300)
