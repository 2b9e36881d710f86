"""Two gloo ranks train as one rank does, and one rank can load their state. The two processes start only once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.models.adapter_folder import AdapterFile
from tests.system.training.scenario import (
    WeightedLoss,
    adapters_of,
    assert_close,
    assert_refused,
    attempt_nan_updates,
    open_trainer,
    rows_of,
    run_ranks,
    sequences,
    share,
    tensors_of,
    totals,
    train_in_parts,
    train_rollouts,
    weights,
)
from tests.tiny_models import Kind, make_model

KINDS: tuple[Kind, ...] = ("qwen3", "qwen3_moe")
# Name of the run with adapters of rank 1: one of the two ranks has no row of A.
ADAPTED = "adapted"
# Sequences for which rank 0 gets three micro-batches and an empty one, and rank 1 gets four.
DATA = sequences(7, seed=4)
LOSS = WeightedLoss()


def train_on_two_ranks(rank: int, folder: Path) -> None:
    """Train as one of two ranks: both models, then adapters. Write the rank's results."""
    for kind in KINDS:
        with open_trainer(folder / kind, folder / f"{kind}-group", rank, 2) as trainer:
            micro_batches = share(DATA, 24, rank, 2)
            results: dict[str, Any] = {"sizes": [len(batch) for batch in micro_batches]}
            results["log_probs"] = tensors_of(trainer.log_probs(micro_batches))
            results["trained"] = [
                trainer.train(micro_batches, LOSS, totals(DATA)),
                train_in_parts(trainer, DATA, 24, rank, 2),
            ]
            results["weights"] = weights(trainer)
            layout = [(name, tuple(tensor.shape), "float32") for name, tensor in trainer.export()]
            results["listed"] = trainer.layout() == layout
            trainer.save(folder / kind / "state")
            trainer.export_folder(folder / kind / "exported")
            results["reference"] = tensors_of(trainer.log_probs(micro_batches, "reference"))
            # All sequences are on rank 0. Rank 1 takes part without a sequence, and gets the metrics too.
            results["lopsided"] = trainer.evaluate([DATA] if rank == 0 else [[]], LOSS)
            results["next"] = trainer.train([[]] if rank == 0 else [DATA], LOSS, totals(DATA))
            results["refused"] = attempt_nan_updates(trainer, DATA, 24, rank, 2)
            results["rollouts"] = train_rollouts(trainer, DATA, 40, rank, 2)
            torch.save(results, folder / kind / f"rank-{rank}.pt")
    spec = adapters_of(folder / "qwen3", 1)
    with open_trainer(folder / "qwen3", folder / f"{ADAPTED}-group", rank, 2, adapters=spec) as trainer:
        micro_batches = share(DATA, 24, rank, 2)
        first_metrics = trainer.train(micro_batches, LOSS, totals(DATA))
        results = {"trained": [first_metrics, train_in_parts(trainer, DATA, 24, rank, 2)]}
        results["weights"] = weights(trainer)
        results["sent"] = [(shard.name, shard.start) for shard in trainer.shards()]
        trainer.save(folder / ADAPTED / "state")
        trainer.export_folder(folder / ADAPTED / "exported")
        results["reference"] = tensors_of(trainer.log_probs(micro_batches, "reference"))
        results["next"] = trainer.train(micro_batches, LOSS, totals(DATA))
        torch.save(results, folder / ADAPTED / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    for kind in KINDS:
        make_model(folder / kind, kind)
        (folder / f"{kind}-group").mkdir()
    for name in (ADAPTED, f"{ADAPTED}-group"):
        (folder / name).mkdir()
    run_ranks(train_on_two_ranks, folder, 2)
    return folder


def load_results(run: Path, kind: str, rank: int) -> dict[str, Any]:
    return torch.load(run / kind / f"rank-{rank}.pt", weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(kind: Kind, run: Path, tmp_path: Path) -> None:
    ranks = [load_results(run, kind, 0), load_results(run, kind, 1)]
    assert ranks[0]["trained"] == ranks[1]["trained"]
    with open_trainer(run / kind, tmp_path) as trainer:
        for metrics in ranks[0]["trained"]:
            assert_close(metrics, trainer.train(share(DATA, 64), LOSS, totals(DATA)), atol=1e-6)
        for rank in ranks:
            assert_close(rank["weights"], weights(trainer), atol=1e-6)
        assert_close(ranks[0]["lopsided"], trainer.evaluate([DATA], LOSS), atol=1e-6)
        # The weights are not the same to the last bit: the gradient's norm differs by a share of 1.4e-6 on some
        # processors.
        assert_close(ranks[0]["next"], trainer.train([DATA], LOSS, totals(DATA)), atol=5e-6)
        assert_close(ranks[0]["rollouts"], train_rollouts(trainer, DATA, 100), atol=1e-5)
        assert ranks[0]["rollouts"] == ranks[1]["rollouts"] and ranks[0]["rollouts"]["train/grad_norm"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_not_finite_on_one_rank_is_refused_by_both(kind: Kind, run: Path) -> None:
    for rank in (0, 1):
        assert_refused(load_results(run, kind, rank)["refused"])


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_reference_are_the_single_ranks(kind: Kind, run: Path, tmp_path: Path) -> None:
    with open_trainer(run / kind, tmp_path) as trainer:
        for rank in (0, 1):
            micro_batches = share(DATA, 24, rank, 2)
            expected_rows = rows_of(trainer.log_probs(micro_batches))
            results = load_results(run, kind, rank)
            assert [len(batch) for batch in micro_batches] == results["sizes"]
            assert (0 in results["sizes"]) == (rank == 0)
            for name in ("log_probs", "reference"):
                for row, expected_row in zip(results[name], expected_rows, strict=True):
                    np.testing.assert_allclose(row.numpy(), expected_row, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_two_ranks_continues_on_one(kind: Kind, run: Path, tmp_path: Path) -> None:
    with open_trainer(run / kind, tmp_path) as trainer:
        trainer.load(run / kind / "state")
        results = load_results(run, kind, 1)
        assert_close(weights(trainer), results["weights"], atol=0)
        assert_close(trainer.train([DATA], LOSS, totals(DATA)), results["next"], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_and_the_exported_folder_hold_full_tensors(kind: Kind, run: Path) -> None:
    from safetensors.torch import load_file

    results = load_results(run, kind, 0)
    assert results["listed"]
    assert_close(load_file(run / kind / "exported" / "model.safetensors"), results["weights"], atol=0)


def test_adapters_of_two_ranks_are_those_of_one(run: Path, tmp_path: Path) -> None:
    ranks = [load_results(run, ADAPTED, 0), load_results(run, ADAPTED, 1)]
    spec = adapters_of(run / "qwen3", 1)
    with open_trainer(run / "qwen3", tmp_path, adapters=spec) as trainer:
        for metrics in ranks[0]["trained"]:
            assert_close(metrics, trainer.train(share(DATA, 64), LOSS, totals(DATA)), atol=1e-6)
        for rank in ranks:
            assert_close(rank["weights"], weights(trainer), atol=1e-6)
    sent = [dict(rank["sent"]) for rank in ranks]
    assert sent[0].keys() == {tensor.name for tensor in spec.tensors}
    assert sent[1].keys() == {tensor.name for tensor in spec.tensors if not tensor.is_a}
    with open_trainer(run / "qwen3", tmp_path) as base:
        for rank in (0, 1):
            expected_rows = rows_of(base.log_probs(share(DATA, 24, rank, 2)))
            for row, expected_row in zip(ranks[rank]["reference"], expected_rows, strict=True):
                np.testing.assert_allclose(row.numpy(), expected_row, atol=1e-6)


def test_adapters_of_two_ranks_continue_on_one_and_are_exported_whole(run: Path, tmp_path: Path) -> None:
    spec = adapters_of(run / "qwen3", 1)
    results = load_results(run, ADAPTED, 1)
    with open_trainer(run / "qwen3", tmp_path, adapters=spec) as trainer:
        trainer.load(run / ADAPTED / "state")
        assert_close(weights(trainer), results["weights"], atol=0)
        assert_close(trainer.train([DATA], LOSS, totals(DATA)), results["next"], atol=1e-6)
    file = AdapterFile(run / ADAPTED / "exported")
    exported = {tensor.name: file.tensor(tensor.name) for tensor in spec.tensors}
    assert_close(exported, results["weights"], atol=0)
