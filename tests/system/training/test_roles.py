"""A role's log-probs are those of its model alone, in either place, and leave the policy as it was to the last bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlctl.preflight.declared_columns import RoleModel, RolePlace
from rlctl.training.fsdp import resident
from tests.system.training.scenario import (
    WeightedLoss,
    adapters_of,
    open_trainer,
    plain_log_probs,
    rows_of,
    run_ranks,
    sequences,
    share,
    tensors_of,
    totals,
    weights,
)
from tests.zoo import make_family

DATA = sequences()
LOSS = WeightedLoss()
# Other layers, another width, a padded vocabulary, untied heads.
OTHERS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 80, "tie_word_embeddings": False},
    "llama": {},
    "mamba": {},
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("policy") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model of the policy's architecture with other weights."""
    return make_family(tmp_path_factory.mktemp("twin") / "qwen3", "qwen3", seed=1)


def log_probs(trainer: Any, role: str = "policy") -> list[np.ndarray]:
    return rows_of(trainer.log_probs(share(DATA, 64), role))


def train(trainer: Any) -> dict[str, float]:
    metrics: dict[str, float] = trainer.train(share(DATA, 64), LOSS, totals(DATA))
    return metrics


def assert_same(rows: list[np.ndarray], expected_rows: list[np.ndarray]) -> None:
    for row, expected_row in zip(rows, expected_rows, strict=True):
        np.testing.assert_array_equal(row, expected_row)


def assert_of_model(rows: list[np.ndarray], folder: Path) -> None:
    """Compare with transformers alone."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    shared = [sequence for micro_batch in share(DATA, 64) for sequence in micro_batch]
    for sequence, row in zip(shared, rows, strict=True):
        np.testing.assert_allclose(row[1:], plain_log_probs(lm, sequence)[0].detach().numpy(), atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_places_give_the_log_probs_of_a_trainer_of_the_teacher(
    dtype: str, policy: Path, twin: Path, tmp_path: Path
) -> None:
    with open_trainer(twin, tmp_path, dtype=dtype) as trainer:
        expected = log_probs(trainer)
    for place in ("swapped", "resident"):
        with open_trainer(policy, tmp_path, dtype=dtype, teacher=RoleModel(str(twin), place)) as trainer:
            before = weights(trainer)
            own = log_probs(trainer)
            assert_same(log_probs(trainer, "teacher"), expected)
            assert_same(log_probs(trainer, "reference"), own)
            assert_same(log_probs(trainer), own)
            assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
            train(trainer)
            assert_same(log_probs(trainer, "teacher"), expected)
            assert_same(log_probs(trainer, "reference"), own)


def test_a_resident_teacher_changes_no_bit_of_the_training(policy: Path, twin: Path, tmp_path: Path) -> None:
    results = []
    for teacher in (None, RoleModel(str(twin), "resident")):
        with open_trainer(policy, tmp_path, teacher=teacher) as trainer:
            if teacher:
                log_probs(trainer, "teacher")
            results.append((train(trainer), weights(trainer)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


@pytest.mark.parametrize("family", OTHERS)
def test_a_teacher_of_another_size_or_architecture_is_resident(family: str, policy: Path, tmp_path: Path) -> None:
    folder = make_family(tmp_path / family, family, seed=2, **OTHERS[family])
    with open_trainer(policy, tmp_path, teacher=RoleModel(str(folder), "resident")) as trainer:
        assert_of_model(log_probs(trainer, "teacher"), folder)


@pytest.mark.parametrize("place", ["swapped", "resident"])
def test_a_whole_model_teaches_adapters(place: RolePlace, policy: Path, twin: Path, tmp_path: Path) -> None:
    """If it is swapped, it replaces the base below the adapters, which are off."""
    teacher = RoleModel(str(twin), place)
    with open_trainer(policy, tmp_path, adapters=adapters_of(policy), teacher=teacher) as trainer:
        base = log_probs(trainer)
        train(trainer)
        own = log_probs(trainer)
        before = weights(trainer)
        assert_of_model(log_probs(trainer, "teacher"), twin)
        assert_same(log_probs(trainer, "reference"), base)
        assert_same(log_probs(trainer), own)
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())


def test_a_teacher_that_is_an_adapter_over_the_same_base_swaps_adapters_alone(policy: Path, tmp_path: Path) -> None:
    spec = adapters_of(policy)
    with open_trainer(policy, tmp_path, adapters=spec) as trainer:
        train(trainer)
        trainer.export_folder(tmp_path / "teacher")
        expected = log_probs(trainer)
    with open_trainer(policy, tmp_path, adapters=spec, teacher=RoleModel(str(tmp_path / "teacher"))) as trainer:
        assert_same(log_probs(trainer, "teacher"), expected)
        [frozen] = trainer._swapped._frozen.values()
        assert all(".lora_" in name for name in frozen._weights)
        train(trainer)
        assert_same(log_probs(trainer, "teacher"), expected)


def test_a_resident_that_leaves_the_device_between_its_passes_comes_back_whole(
    policy: Path, twin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the memory of a CPU is freed as that of a GPU is."""
    monkeypatch.setattr(resident, "select_movable", list)
    with open_trainer(twin, tmp_path) as trainer:
        expected = log_probs(trainer)
    with open_trainer(policy, tmp_path, teacher=RoleModel(str(twin), "resident")) as trainer:
        weights_away = trainer._residents["teacher"].model.lm.parameters()
        assert all(parameter.untyped_storage().nbytes() == 0 for parameter in weights_away)
        for _ in range(2):
            assert_same(log_probs(trainer, "teacher"), expected)
            train(trainer)


def score_on_two_ranks(rank: int, folder: Path) -> None:
    """Be one rank, and write its share of both teachers' log-probs. Residents leave the device between their passes."""
    resident.select_movable = list
    for place in ("swapped", "resident"):
        teacher = RoleModel(str(folder / "twin"), place)
        with open_trainer(folder / "policy", folder / place, rank, 2, teacher=teacher) as trainer:
            micro_batches = share(DATA, 24, rank, 2)
            torch.save(tensors_of(trainer.log_probs(micro_batches, "teacher")), folder / f"{place}-{rank}.pt")
            trainer.train(micro_batches, LOSS, totals(DATA))
    other = RoleModel(str(folder / "other"), "resident")
    with open_trainer(folder / "policy", folder / "wide", rank, 2, teacher=other) as trainer:
        micro_batches = share(DATA, 24, rank, 2)
        torch.save(tensors_of(trainer.log_probs(micro_batches, "teacher")), folder / f"other-{rank}.pt")


def test_two_ranks_score_as_one_does(tmp_path: Path) -> None:
    make_family(tmp_path / "policy", "qwen3")
    make_family(tmp_path / "twin", "qwen3", seed=1)
    make_family(tmp_path / "other", "qwen3", seed=2, **OTHERS["qwen3"])
    for name in ("swapped", "resident", "wide"):
        (tmp_path / name).mkdir()
    run_ranks(score_on_two_ranks, tmp_path, 2)
    for name, folder in (("swapped", "twin"), ("resident", "twin"), ("other", "other")):
        with open_trainer(tmp_path / folder, tmp_path) as trainer:
            for rank in range(2):
                micro_batches = share(DATA, 24, rank, 2)
                expected = rows_of(trainer.log_probs(micro_batches))
                rows = torch.load(tmp_path / f"{name}-{rank}.pt")
                for row, expected_row in zip(rows, expected, strict=True):
                    np.testing.assert_allclose(np.asarray(row), expected_row, atol=2e-5)
