"""One Ray for all tests that need processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray on this machine for the whole session; the folder that its workers' logs go to."""
    from rlctl.cluster.local import local_ray

    logs = tmp_path_factory.mktemp("logs")
    with local_ray(logs):
        yield logs
