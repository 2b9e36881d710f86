"""Two gloo ranks train as one does, and hand their state on to one. Two processes, started once."""

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
    open_trainer,
    refused,
    run_ranks,
    sequences,
    share,
    totals,
    train_in_parts,
    train_rollouts,
    weights,
)
from tests.tiny_models import Kind, make_model

KINDS: tuple[Kind, ...] = ("qwen3", "qwen3_moe")
# The same of rank-1 adapters: one of the two ranks has no row of A.
ADAPTED = "adapted"
# Dealt so that rank 0 has three micro-batches and an empty one, rank 1 four.
DATA = sequences(7, seed=4)
LOSS = WeightedLoss()


def two_ranks(rank: int, folder: Path) -> None:
    """One rank of both models; each rank writes its results."""
    for kind in KINDS:
        with open_trainer(folder / kind, folder / f"{kind}-group", rank, 2) as one:
            mine = share(DATA, 24, rank, 2)
            seen: dict[str, Any] = {"sizes": [len(batch) for batch in mine]}
            seen["log_probs"] = [torch.from_numpy(x) for batch in one.log_probs(mine) for x in batch]
            seen["trained"] = [one.train(mine, LOSS, totals(DATA)), train_in_parts(one, DATA, 24, rank, 2)]
            seen["weights"] = weights(one)
            seen["listed"] = one.layout() == [(n, tuple(t.shape), "float32") for n, t in one.export()]
            one.save(folder / kind / "state")
            one.export_folder(folder / kind / "exported")
            reference = one.log_probs(mine, "reference")
            seen["reference"] = [torch.from_numpy(x) for batch in reference for x in batch]
            # Everything is on rank 0: rank 1 sees no sequence, yet takes part and learns the metrics' names.
            seen["lopsided"] = one.evaluate([DATA] if rank == 0 else [[]], LOSS)
            seen["next"] = one.train([[]] if rank == 0 else [DATA], LOSS, totals(DATA))
            seen["refused"] = refused(one, DATA, 24, rank, 2)
            seen["rollouts"] = train_rollouts(one, DATA, 40, rank, 2)
            torch.save(seen, folder / kind / f"rank-{rank}.pt")
    with open_trainer(
        folder / "qwen3", folder / f"{ADAPTED}-group", rank, 2, adapters=adapters_of(folder / "qwen3", 1)
    ) as one:
        mine = share(DATA, 24, rank, 2)
        seen = {"trained": [one.train(mine, LOSS, totals(DATA)), train_in_parts(one, DATA, 24, rank, 2)]}
        seen |= {"weights": weights(one), "sent": [(each.name, each.start) for each in one.shards()]}
        one.save(folder / ADAPTED / "state")
        one.export_folder(folder / ADAPTED / "exported")
        reference = one.log_probs(mine, "reference")
        seen["reference"] = [torch.from_numpy(x) for batch in reference for x in batch]
        seen["next"] = one.train(mine, LOSS, totals(DATA))
        torch.save(seen, folder / ADAPTED / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    for kind in KINDS:
        make_model(folder / kind, kind)
        (folder / f"{kind}-group").mkdir()
    for name in (ADAPTED, f"{ADAPTED}-group"):
        (folder / name).mkdir()
    run_ranks(two_ranks, folder, 2)
    return folder


def seen(run: Path, kind: str, rank: int) -> dict[str, Any]:
    return torch.load(run / kind / f"rank-{rank}.pt", weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_train_as_one(kind: Kind, run: Path, tmp_path: Path) -> None:
    ranks = [seen(run, kind, 0), seen(run, kind, 1)]
    assert ranks[0]["trained"] == ranks[1]["trained"]
    with open_trainer(run / kind, tmp_path) as one:
        whole = share(DATA, 64)
        for metrics in ranks[0]["trained"]:
            assert_close(metrics, one.train(whole, LOSS, totals(DATA)), atol=1e-6)
        for rank in ranks:
            assert_close(rank["weights"], weights(one), atol=1e-6)
        assert_close(ranks[0]["lopsided"], one.evaluate([DATA], LOSS), atol=1e-6)
        # The weights are not the same to the last bit: the gradient's norm differs by a share of 1.4e-6 on some
        # processors.
        assert_close(ranks[0]["next"], one.train([DATA], LOSS, totals(DATA)), atol=5e-6)
        assert_close(ranks[0]["rollouts"], train_rollouts(one, DATA, 100), atol=1e-5)
        assert ranks[0]["rollouts"] == ranks[1]["rollouts"] and ranks[0]["rollouts"]["train/grad_norm"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_not_finite_on_one_rank_is_refused_by_both(kind: Kind, run: Path) -> None:
    for rank in (0, 1):
        assert_refused(seen(run, kind, rank)["refused"])


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_and_reference_are_the_single_ranks(kind: Kind, run: Path, tmp_path: Path) -> None:
    with open_trainer(run / kind, tmp_path) as one:
        for rank in (0, 1):
            mine = share(DATA, 24, rank, 2)
            expected = [x for batch in one.log_probs(mine) for x in batch]
            result = seen(run, kind, rank)
            assert [len(batch) for batch in mine] == result["sizes"] and (0 in result["sizes"]) == (rank == 0)
            for name in ("log_probs", "reference"):
                for got, want in zip(result[name], expected, strict=True):
                    np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_two_ranks_continues_on_one(kind: Kind, run: Path, tmp_path: Path) -> None:
    with open_trainer(run / kind, tmp_path) as one:
        one.load(run / kind / "state")
        result = seen(run, kind, 1)
        assert_close(weights(one), result["weights"], atol=0)
        assert_close(one.train([DATA], LOSS, totals(DATA)), result["next"], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_layout_and_the_exported_folder_hold_full_tensors(kind: Kind, run: Path) -> None:
    from safetensors.torch import load_file

    result = seen(run, kind, 0)
    assert result["listed"]
    assert_close(load_file(run / kind / "exported" / "model.safetensors"), result["weights"], atol=0)


def test_adapters_of_two_ranks_are_those_of_one(run: Path, tmp_path: Path) -> None:
    ranks = [seen(run, ADAPTED, 0), seen(run, ADAPTED, 1)]
    spec = adapters_of(run / "qwen3", 1)
    with open_trainer(run / "qwen3", tmp_path, adapters=spec) as one:
        for metrics in ranks[0]["trained"]:
            assert_close(metrics, one.train(share(DATA, 64), LOSS, totals(DATA)), atol=1e-6)
        for rank in ranks:
            assert_close(rank["weights"], weights(one), atol=1e-6)
    sent = [dict(rank["sent"]) for rank in ranks]
    assert sent[0].keys() == {each.name for each in spec.tensors}
    assert sent[1].keys() == {each.name for each in spec.tensors if not each.is_a}
    with open_trainer(run / "qwen3", tmp_path) as base:
        for rank in (0, 1):
            expected = [x for batch in base.log_probs(share(DATA, 24, rank, 2)) for x in batch]
            for got, want in zip(ranks[rank]["reference"], expected, strict=True):
                np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


def test_adapters_of_two_ranks_continue_on_one_and_are_exported_whole(run: Path, tmp_path: Path) -> None:
    spec, result = adapters_of(run / "qwen3", 1), seen(run, ADAPTED, 1)
    with open_trainer(run / "qwen3", tmp_path, adapters=spec) as one:
        one.load(run / ADAPTED / "state")
        assert_close(weights(one), result["weights"], atol=0)
        assert_close(one.train([DATA], LOSS, totals(DATA)), result["next"], atol=1e-6)
    file = AdapterFile(run / ADAPTED / "exported")
    assert_close({each.name: file.tensor(each.name) for each in spec.tensors}, result["weights"], atol=0)
