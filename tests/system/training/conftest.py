"""Process groups of trainers that a test made in its own process are freed with the test."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_groups_are_freed() -> Iterator[None]:
    """Collect closed trainers after each test: one of Megatron's holds 64 open files for its gloo groups.

    They are part of cycles, and Python's own collection may come after hundreds of tests. A process may have no more
    than 1,024 files open.
    """
    yield
    gc.collect()
