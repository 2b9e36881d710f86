"""Shortened steps sample the same bits as vLLM's own steps, and leave the same cache."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.workers.group import Worker
from tests.system.engines import spec_for
from tests.system.replayed_steps import DEADLINE, check_conversations, check_schedules, start_engines
from tests.tiny_models import make_model


@pytest.fixture(scope="module")
def engines(ray_here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    """Start an engine with shortened steps and one without. Their caches hold a part of their sequences at a time."""
    folder = make_model(tmp_path_factory.mktemp("m"), max_length=256, seed=1)
    spec = replace(
        spec_for(folder, 256), stop_token_ids=(1, 5, 9), top_p=0.9, top_k=20, kv_cache_mib=2, max_num_seqs=32
    )
    workers = start_engines(spec, [], ray_here)
    for worker in workers:
        worker.built().wait(DEADLINE)
    yield workers
    for worker in workers:
        worker.kill()


def test_a_shortened_step_samples_what_vllms_own_samples(engines: list[Worker]) -> None:
    check_conversations(engines, give_up=True)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_shortened_step_schedules_ends_and_caches_as_vllms_own(engines: list[Worker], ahead: bool) -> None:
    # No model runs: the schedulers that GPUs have are there on a CPU too.
    check_schedules(engines, ahead)
