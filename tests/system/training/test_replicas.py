"""Two replicas of two ranks train as one process does, and any number of ranks can load their state (gloo)."""

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
    attempt_nan_updates,
    open_trainer,
    run_ranks,
    sequences,
    share,
    tensors_of,
    totals,
    train_in_parts,
    weights,
)
from tests.tiny_models import make_model

RANKS = 4
REPLICAS = 2
# Rank 3 has fewer sequences than the others, so that its last micro-batches are empty.
DATA = sequences(9, seed=4)
LOSS = WeightedLoss()


def train_on_four_ranks(rank: int, folder: Path) -> None:
    """Train as one of four ranks, and write the rank's results."""
    with open_trainer(folder / "model", folder / "group", rank, RANKS, replicas=REPLICAS) as trainer:
        micro_batches = share(DATA, 24, rank, RANKS)
        results: dict[str, Any] = {"trained": [trainer.train(micro_batches, LOSS, totals(DATA))]}
        results["trained"].append(train_in_parts(trainer, DATA, 24, rank, RANKS))
        results["weights"] = weights(trainer)
        # (name, start, shape) and values of the rows that the rank would send.
        shards = trainer.shards()
        results["boxes"] = [(shard.name, tuple(shard.start), tuple(shard.tensor.shape)) for shard in shards]
        results["sent"] = [shard.tensor.clone() for shard in shards]
        trainer.save(folder / "state")
        trainer.export_folder(folder / "exported")
        results["log_probs"] = tensors_of(trainer.log_probs(micro_batches, "reference"))
        results["refused"] = attempt_nan_updates(trainer, DATA, 24, rank, RANKS)
        results["next"] = trainer.train([DATA] if rank == 3 else [[]], LOSS, totals(DATA))
        torch.save(results, folder / f"rank-{rank}.pt")


def continue_on_two_ranks(rank: int, folder: Path) -> None:
    """Continue from the state of four ranks on two: once as two replicas, once as one replica of two ranks."""
    for replicas in (1, 2):
        group_folder = folder / f"of-{replicas}"
        group_folder.mkdir(exist_ok=True)
        with open_trainer(folder / "model", group_folder, rank, 2, replicas=replicas) as trainer:
            trainer.load(folder / "state")
            results: dict[str, Any] = {"weights": weights(trainer)}
            results["next"] = trainer.train([DATA] if rank else [[]], LOSS, totals(DATA))
            torch.save(results, group_folder / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    make_model(folder / "model", "qwen3")
    (folder / "group").mkdir()
    run_ranks(train_on_four_ranks, folder, RANKS)
    return folder


def load_results(run: Path, rank: int) -> dict[str, Any]:
    return torch.load(run / f"rank-{rank}.pt", weights_only=True)


def test_gradients_and_norm_are_those_of_one_process(run: Path, tmp_path: Path) -> None:
    ranks = [load_results(run, rank) for rank in range(RANKS)]
    assert all(rank["trained"] == ranks[0]["trained"] for rank in ranks)
    with open_trainer(run / "model", tmp_path) as trainer:
        # After one update the weights differ in their last bits. Norms then differ by a share of 1.4e-6.
        for metrics, atol in zip(ranks[0]["trained"], (1e-6, 5e-6), strict=True):
            assert_close(metrics, trainer.train(share(DATA, 64), LOSS, totals(DATA)), atol=atol)
        for rank in ranks:
            assert_close(rank["weights"], weights(trainer), atol=1e-6)
        assert_close(ranks[0]["next"], trainer.train([DATA], LOSS, totals(DATA)), atol=5e-6)
    assert all(rank["next"] == ranks[0]["next"] for rank in ranks)


def test_replicas_hold_the_same_rows_to_the_last_bit(run: Path) -> None:
    ranks = [load_results(run, rank) for rank in range(RANKS)]
    num_shards = RANKS // REPLICAS
    for shard in range(num_shards):
        first_replica = ranks[shard]
        second_replica = ranks[shard + num_shards]
        assert first_replica["boxes"] == second_replica["boxes"]
        tensor_pairs = zip(first_replica["sent"], second_replica["sent"], strict=True)
        assert all(torch.equal(first_tensor, second_tensor) for first_tensor, second_tensor in tensor_pairs)
    assert ranks[0]["boxes"] != ranks[1]["boxes"]


def test_a_loss_that_is_not_finite_is_refused_by_all_ranks(run: Path) -> None:
    for rank in range(RANKS):
        assert_refused(load_results(run, rank)["refused"])


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
    assert_close(load_file(run / "exported" / "model.safetensors"), load_results(run, 0)["weights"], atol=0)


def test_the_state_continues_on_one_process_and_on_other_replicas(run: Path, tmp_path: Path) -> None:
    run_ranks(continue_on_two_ranks, run, 2)
    with open_trainer(run / "model", tmp_path) as trainer:
        trainer.load(run / "state")
        expected_weights = weights(trainer)
        assert_close(expected_weights, load_results(run, 0)["weights"], atol=0)
        expected_metrics = trainer.train([DATA], LOSS, totals(DATA))
    for replicas in (1, 2):
        for rank in (0, 1):
            results = load_results(run / f"of-{replicas}", rank)
            assert_close(results["weights"], expected_weights, atol=0)
            assert_close(results["next"], expected_metrics, atol=1e-6)
