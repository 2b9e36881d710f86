"""Values that follow others."""

import pytest

from rlctl.config.schema import GrpoConfig
from rlctl.preflight.load import load
from rlctl.preflight.resolved import Resolved


@pytest.mark.parametrize(
    ("settings", "cores", "threads"),
    [
        ((), 8, 8),
        (("trainer.num_ranks=3",), 8, 2),
        (("async.enabled=true",), 2, 1),
        (("async.enabled=true", "generation.num_engines=2", "trainer.num_ranks=2"), 8, 3),
        (("async.enabled=true", "generation.num_engines=4"), 2, 1),
        (("async.enabled=true", "trainer.threads=5"), 2, 5),
    ],
)
def test_a_rank_gets_its_share_of_the_cores_that_engines_beside_it_leave(
    settings: tuple[str, ...], cores: int, threads: int
) -> None:
    config = load("grpo", None, list(settings)).config
    assert isinstance(config, GrpoConfig)
    assert Resolved(config).trainer_threads(cores, config.trainer.num_ranks, config.generation.num_engines) == threads


def test_sft_has_no_engines_beside_it() -> None:
    assert Resolved(load("sft", None, []).config).trainer_threads(4, ranks=1, engines=0) == 4
