"""Ray in the driver's process for the time of a block. It is quiet and leaves the process's signals alone."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def ray_session(logs: Path, **options: Any) -> Iterator[None]:
    """Connect by `ray.init(**options)` until the block is left. Ray's messages go to a file in `logs`."""
    import rlctl.workers  # noqa: F401  (sets what Ray reads at its import)
    import ray  # isort: skip

    _log_to_file(logging.getLogger("ray"), logs / "ray.log")
    try:
        with _own_signals():
            ray.init(log_to_driver=False, configure_logging=False, **options)
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    # Ray's handler of SIGTERM leaves the process at once: a run that is to stop would not be saved.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _log_to_file(logger: logging.Logger, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logger.handlers = [logging.FileHandler(path)]
    logger.propagate = False
