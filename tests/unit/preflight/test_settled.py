"""Values that follow others."""

from pathlib import Path

import pytest

from rlctl.config.plugins import LOSSES
from rlctl.grpo.losses.base import make_loss
from rlctl.preflight.load import load


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
    run = load("grpo", None, list(settings)).settled
    ranks, engines = run.config.trainer.num_ranks, run.config.generation.num_engines
    assert run.trainer_threads(cores, ranks, engines) == threads


@pytest.mark.parametrize("name", [*LOSSES, "mine.py:Mine"])
def test_a_config_knows_if_its_loss_needs_whole_rollouts(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlctl.grpo.losses.gspo import GspoLoss\n\n\nclass Mine(GspoLoss):\n    pass\n"
    )
    name = name.replace("mine.py", f"{tmp_path}/mine.py")
    masked = ["async.enabled=true", "grpo.loss.sequence_mask=[0.5, 2]"] if name not in ("cispo", "dppo") else []
    found = set()
    for more in ([], masked, ["grpo.loss.reduction=sequence"] * (name == "grpo")):
        own = ("level=token", "clip_low=0.1", "clip_high=0.1", "dual_clip=null")
        settings = [f"grpo.loss.{each}" for each in own if name.endswith("Mine")]
        run = load("grpo", None, [f"grpo.loss.name={name}", *settings, *more]).settled
        needs = make_loss(run).needs.whole_rollouts
        assert run.whole_rollouts is needs
        found.add(needs)
    assert True in found or not masked


def test_sft_has_no_engines_beside_it() -> None:
    assert load("sft", None, []).settled.trainer_threads(4, ranks=1, engines=0) == 4
