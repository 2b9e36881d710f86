"""Process groups of trainers that a test made in its own process are freed with the test."""

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_groups_are_freed() -> Iterator[None]:
    """Collect closed trainers after each test: one of Megatron's holds 64 open files for its gloo groups.

    They are part of cycles, and Python's own collection may come after hundreds of tests. A process may have no more
    than 1,024 files open. Garbage of earlier tests goes along: a coroutine that one of them left is no failure here.
    """
    yield
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        gc.collect()
