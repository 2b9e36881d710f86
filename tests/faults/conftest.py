"""Fixtures that several fault tests use."""

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 1 MiB, with a short path."""
    small = Path(tempfile.mkdtemp(prefix="rls-", dir="/tmp"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    try:
        if mounted.returncode:
            pytest.skip(f"mounting a small file system is not permitted: {mounted.stderr.decode().strip()}")
        yield small
    finally:
        subprocess.run(["umount", "-l", str(small)], capture_output=True)
        small.rmdir()
