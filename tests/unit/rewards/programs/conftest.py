"""A sandbox for the tests of programs."""

from collections.abc import Iterator

import pytest

from rlctl.sandbox.base import Sandbox
from rlctl.sandbox.open_sandbox import open_sandbox


@pytest.fixture(scope="package")
def sandbox() -> Iterator[Sandbox]:
    opened = open_sandbox()
    yield opened
    opened.close()
