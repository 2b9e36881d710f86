"""Two replicas of two ranks train as one process does, and hand their state on to any number. Four gloo processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.system.training.scenario import (
    WeightedLoss,
    assert_close,
    assert_refused,
    open_trainer,
    refused,
    run_ranks,
    sequences,
    share,
    totals,
    train_in_parts,
    weights,
)
from tests.tiny_models import make_model

RANKS, REPLICAS = 4, 2
# Rank 3 has fewer sequences than the others, so that its last micro-batches are empty.
DATA = sequences(9, seed=4)
LOSS = WeightedLoss()


def four_ranks(rank: int, folder: Path) -> None:
    with open_trainer(folder / "model", folder / "group", rank, RANKS, replicas=REPLICAS) as one:
        mine = share(DATA, 24, rank, RANKS)
        seen: dict[str, Any] = {"trained": [one.train(mine, LOSS, totals(DATA))]}
        seen["trained"].append(train_in_parts(one, DATA, 24, rank, RANKS))
        seen["weights"] = weights(one)
        # (name, start, shape) and values of the rows that the rank would send.
        shards = one.shards()
        seen["boxes"] = [(each.name, tuple(each.start), tuple(each.tensor.shape)) for each in shards]
        seen["sent"] = [each.tensor.clone() for each in shards]
        one.save(folder / "state")
        one.export_folder(folder / "exported")
        seen["log_probs"] = [torch.from_numpy(x) for batch in one.log_probs(mine, "reference") for x in batch]
        seen["refused"] = refused(one, DATA, 24, rank, RANKS)
        seen["next"] = one.train([DATA] if rank == 3 else [[]], LOSS, totals(DATA))
        torch.save(seen, folder / f"rank-{rank}.pt")


def two_ranks(rank: int, folder: Path) -> None:
    """Go on with the state of four ranks: as two replicas of one rank, and as one of two."""
    for replicas in (1, 2):
        (folder / f"of-{replicas}").mkdir(exist_ok=True)
        with open_trainer(folder / "model", folder / f"of-{replicas}", rank, 2, replicas=replicas) as one:
            one.load(folder / "state")
            found = {"weights": weights(one), "next": one.train([DATA] if rank else [[]], LOSS, totals(DATA))}
            torch.save(found, folder / f"of-{replicas}" / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    make_model(folder / "model", "qwen3")
    (folder / "group").mkdir()
    run_ranks(four_ranks, folder, RANKS)
    return folder


def seen(run: Path, rank: int) -> dict[str, Any]:
    return torch.load(run / f"rank-{rank}.pt", weights_only=True)


def test_gradients_and_norm_are_those_of_one_process(run: Path, tmp_path: Path) -> None:
    ranks = [seen(run, rank) for rank in range(RANKS)]
    assert all(each["trained"] == ranks[0]["trained"] for each in ranks)
    with open_trainer(run / "model", tmp_path) as one:
        # After one update the weights differ in their last bits. Norms then differ by a share of 1.4e-6.
        for metrics, atol in zip(ranks[0]["trained"], (1e-6, 5e-6), strict=True):
            assert_close(metrics, one.train(share(DATA, 64), LOSS, totals(DATA)), atol=atol)
        for each in ranks:
            assert_close(each["weights"], weights(one), atol=1e-6)
        assert_close(ranks[0]["next"], one.train([DATA], LOSS, totals(DATA)), atol=5e-6)
    assert all(each["next"] == ranks[0]["next"] for each in ranks)


def test_replicas_hold_the_same_rows_to_the_last_bit(run: Path) -> None:
    ranks = [seen(run, rank) for rank in range(RANKS)]
    shards = RANKS // REPLICAS
    for rank in range(shards):
        first, other = ranks[rank], ranks[rank + shards]
        assert first["boxes"] == other["boxes"]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first["sent"], other["sent"], strict=True))
    assert ranks[0]["boxes"] != ranks[1]["boxes"]


def test_a_loss_that_is_not_finite_is_refused_by_all_ranks(run: Path) -> None:
    for rank in range(RANKS):
        assert_refused(seen(run, rank)["refused"])


def test_a_checkpoint_has_each_row_once(run: Path) -> None:
    numbers: dict[str, int] = {}
    for file in (run / "state").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:  # type: ignore[no-untyped-call]
            for name in tensors.keys():  # noqa: SIM118
                numbers[name] = numbers.get(name, 0) + tensors.get_tensor(name).numel()
    for name, tensor in load_file(run / "exported" / "model.safetensors").items():
        for kind in ("model", "exp_avg", "exp_avg_sq"):
            assert numbers[f"{kind}.{name}"] == tensor.numel(), name


def test_the_exported_folder_has_the_weights(run: Path) -> None:
    assert_close(load_file(run / "exported" / "model.safetensors"), seen(run, 0)["weights"], atol=0)


def test_the_state_continues_on_one_process_and_on_other_replicas(run: Path, tmp_path: Path) -> None:
    run_ranks(two_ranks, run, 2)
    with open_trainer(run / "model", tmp_path) as one:
        one.load(run / "state")
        own = weights(one)
        assert_close(own, seen(run, 0)["weights"], atol=0)
        following = one.train([DATA], LOSS, totals(DATA))
    for replicas in (1, 2):
        for rank in (0, 1):
            found = torch.load(run / f"of-{replicas}" / f"rank-{rank}.pt", weights_only=True)
            assert_close(found["weights"], own, atol=0)
            assert_close(found["next"], following, atol=1e-6)
