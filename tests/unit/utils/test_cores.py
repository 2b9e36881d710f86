"""Cores that a process may use."""

import os
from pathlib import Path

import pytest

from rlctl.utils.cores import usable_cores


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 4, 7})


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 3), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 3), ("", 3)]
)
def test_affinity_and_quota_both_bound_them(three: None, tmp_path: Path, quota: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path / "cpu.max") == cores


def test_without_control_groups_the_affinity_counts(three: None, tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "cpu.max") == 3
