"""Megatron-core on CPU: one rank and every way to share a model out over two train as FSDP does on one.

Two processes, started once; each layout trains there in turn, and then those that a float32 residual goes through.
Compiled parts, 105 s of CPU: test_megatron_compiled.py.
"""

import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from rlctl.preflight.backends.megatron import MegatronSection
from tests.system.training.scenario import (
    MEGATRON,
    OPTIMIZER,
    WeightedLoss,
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
from tests.tiny_models import KINDS, Kind, make_model

# An import here, 3 s of CPU, would be made by every process that collects tests.
pytestmark = pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core")
DATA = sequences(9, seed=4)
LOSS = WeightedLoss()
STEPS = 3
UNTIED: Kind = "llama"


def copy_to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def layout_of(**sizes: Any) -> MegatronSection:
    return replace(MEGATRON, **sizes)


# name -> (model, how two ranks share it, further options, shards of data)
LAYOUTS: dict[str, tuple[Kind, MegatronSection, dict[str, Any], int]] = {
    "tensor": ("qwen3", layout_of(tensor_model_parallel_size=2, sequence_parallel=False), {}, 1),
    "tensor, sequence, recompute": (
        "qwen3",
        layout_of(tensor_model_parallel_size=2),
        {"activation_checkpointing": True},
        1,
    ),
    "tensor, untied, biases": ("qwen2", layout_of(tensor_model_parallel_size=2), {}, 1),
    "pipeline": ("qwen3", layout_of(pipeline_model_parallel_size=2), {}, 1),
    "pipeline, untied": (UNTIED, layout_of(pipeline_model_parallel_size=2), {}, 1),
    "data": ("qwen3", MEGATRON, {}, 2),
    "context": ("qwen3", layout_of(context_parallel_size=2), {}, 1),
    "expert": ("qwen3_moe", layout_of(expert_model_parallel_size=2), {}, 2),
    "tensor, whole experts": ("qwen3_moe", layout_of(tensor_model_parallel_size=2), {}, 1),
    "tensor, expert": ("qwen3_moe", layout_of(tensor_model_parallel_size=2, expert_model_parallel_size=2), {}, 1),
}
# On GPUs alone, in tests/gpu: compiling for two ranks takes 105 s of CPU.
COMPILED: dict[str, tuple[Kind, MegatronSection, dict[str, Any], int]] = {
    "tensor, sequence, compiled": ("qwen3", layout_of(tensor_model_parallel_size=2), {"compile": True}, 1)
}


def train_on_two_ranks(rank: int, folder: Path, device: str = "cpu") -> None:
    """Train as one of two ranks in every layout, and write the rank's results."""
    layouts = LAYOUTS if device == "cpu" else LAYOUTS | COMPILED
    for name, (kind, section, options, shards) in layouts.items():
        layout_folder = folder / name
        shard = rank % shards
        micro_batches = share(DATA, 48, shard, shards)
        settings = {"backend": "megatron", "num_ranks": 2, "megatron": section, **options}
        rank_device = f"{device}:{rank}" if device == "cuda" else device
        with open_trainer(folder / kind, layout_folder, rank, 2, rank_device, **settings) as trainer:
            results: dict[str, Any] = {"log_probs": tensors_of(trainer.log_probs(micro_batches))}
            results["exported"] = copy_to_host(weights(trainer))
            layout = [(name, tuple(tensor.shape), "float32") for name, tensor in trainer.export()]
            results["listed"] = trainer.layout() == layout
            results["boxes"] = [(box.name, box.start, box.tensor.cpu().clone()) for box in trainer.shards()]
            updates = [trainer.train(micro_batches, LOSS, totals(DATA)) for _ in range(STEPS - 1)]
            results["trained"] = [*updates, train_in_parts(trainer, DATA, 48, shard, shards)]
            results["evaluated"] = trainer.evaluate(micro_batches, LOSS)
            results["weights"] = copy_to_host(weights(trainer))
            trainer.save(layout_folder / "state")
            trainer.export_folder(layout_folder / "exported")
            results["reference"] = tensors_of(trainer.log_probs(micro_batches, "reference"))
            results["next"] = trainer.train(micro_batches, LOSS, totals(DATA))
            refused = attempt_nan_updates(trainer, DATA, 48, shard, shards)
            results["rollouts"] = train_rollouts(trainer, DATA, 48, shard, shards)
            before = copy_to_host(refused["before"])
            after = copy_to_host(refused["after"])
            results["refused"] = {"before": before, "errors": refused["errors"], "after": after}
            torch.save(results, layout_folder / f"rank-{rank}.pt")


# name -> (model, how two ranks share it, further options), in bfloat16
ROUNDED: dict[str, tuple[str, MegatronSection, dict[str, Any]]] = {
    "tensor": ("deep", layout_of(tensor_model_parallel_size=2), {"activation_checkpointing": True}),
    "pipeline": ("deep", layout_of(pipeline_model_parallel_size=2), {}),
    "expert": ("qwen3_moe", layout_of(tensor_model_parallel_size=2, expert_model_parallel_size=2), {}),
}


def make_deep_model(folder: Path) -> None:
    """Write a deep bfloat16 model with transformers' random weights, half of whose error comes from the residual."""
    from transformers import AutoModelForCausalLM

    make_model(folder, "qwen3", layers=24, hidden=64, head_dim=16, scale=1.0)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


def train_with_residual(
    model: Path, folder: Path, is_float32: bool, rank: int = 0, world: int = 1, **options: Any
) -> dict[str, list[Any]]:
    """Return log-probs and the results of an update, with a residual in float32 or in the compute dtype."""
    section = replace(options.pop("megatron", MEGATRON), fp32_residual_connection=is_float32)
    settings = {"backend": "megatron", "num_ranks": world, "megatron": section, **options}
    with open_trainer(model, folder, rank, world, **settings) as trainer:
        log_probs = tensors_of(trainer.log_probs([DATA]))
        return {"log_probs": log_probs, "trained": [trainer.train(share(DATA, 48), LOSS, totals(DATA))]}


def train_all_on_two_ranks(rank: int, folder: Path) -> None:
    """Train as one of two ranks in all LAYOUTS and ROUNDED, and write the rank's results."""
    train_on_two_ranks(rank, folder)
    for name, (model, section, options) in ROUNDED.items():
        for is_float32 in (False, True):
            layout_folder = folder / f"rounded-{name}-{is_float32}"
            settings = {"megatron": section, "dtype": "bfloat16", **options}
            results = train_with_residual(folder / model, layout_folder, is_float32, rank, 2, **settings)
            torch.save(results, layout_folder / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on two ranks, only once for all processes that run these tests. Return the folder of the results."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "megatron-layouts"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            for kind in KINDS:
                make_model(folder / kind, kind)
            make_deep_model(folder / "deep")
            for name in LAYOUTS:
                (folder / name).mkdir()
            for name in ROUNDED:
                (folder / f"rounded-{name}-False").mkdir()
                (folder / f"rounded-{name}-True").mkdir()
            run_ranks(train_all_on_two_ranks, folder, 2)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="module")
def fsdp_results(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, dict[str, Any]]:
    """Return the results of FSDP on one rank."""
    results: dict[Kind, dict[str, Any]] = {}
    for kind in KINDS:
        with open_trainer(run / kind, tmp_path_factory.mktemp(kind)) as trainer:
            results[kind] = {
                "log_probs": rows_of(trainer.log_probs([DATA])),
                "exported": weights(trainer),
                "trained": [trainer.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(STEPS)],
                "evaluated": trainer.evaluate([DATA], LOSS),
                "weights": weights(trainer),
                "next": trainer.train(share(DATA, 64), LOSS, totals(DATA)),
                "rollouts": train_rollouts(trainer, DATA, 64),
            }
    return results


def load_results(run: Path, name: str, rank: int) -> dict[str, Any]:
    return torch.load(run / name / f"rank-{rank}.pt", weights_only=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_fsdp_does_on_one(name: str, run: Path, fsdp_results: dict[Kind, dict[str, Any]]) -> None:
    ranks = [load_results(run, name, rank) for rank in (0, 1)]
    expected = fsdp_results[LAYOUTS[name][0]]
    for key in ("trained", "evaluated", "next", "rollouts"):
        assert ranks[0][key] == ranks[1][key]
    for metrics, expected_metrics in zip(ranks[0]["trained"], expected["trained"]):
        assert_close(metrics, expected_metrics, atol=1e-4)
    for key in ("evaluated", "weights", "next", "rollouts"):
        assert_close(ranks[0][key], expected[key], atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_that_is_not_finite_is_refused_by_both_ranks(name: str, run: Path) -> None:
    for rank in (0, 1):
        assert_refused(load_results(run, name, rank)["refused"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_and_reference_are_those_of_fsdp(
    name: str, run: Path, fsdp_results: dict[Kind, dict[str, Any]]
) -> None:
    kind, _, _, shards = LAYOUTS[name]
    expected_rows = {id(sequence.tokens): row for sequence, row in zip(DATA, fsdp_results[kind]["log_probs"])}
    for rank in (0, 1):
        rank_sequences = rows_of(share(DATA, 48, rank % shards, shards))
        for key in ("log_probs", "reference"):
            for sequence, row in zip(rank_sequences, load_results(run, name, rank)[key], strict=True):
                np.testing.assert_allclose(row.numpy(), expected_rows[id(sequence.tokens)], atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_come_and_go_bit_by_bit(name: str, run: Path, fsdp_results: dict[Kind, dict[str, Any]]) -> None:
    """Weights are read from the folder, exported whole, sent as boxes and written to a folder without a change."""
    from safetensors.torch import load_file

    ranks = [load_results(run, name, rank) for rank in (0, 1)]
    expected = fsdp_results[LAYOUTS[name][0]]["exported"]
    for rank in ranks:
        assert rank["listed"]
        assert_close(rank["exported"], expected, atol=0)
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in expected.items()}
    for tensor_name, start, tensor in [*ranks[0]["boxes"], *ranks[1]["boxes"]]:
        box = tuple(slice(begin, begin + size) for begin, size in zip(start, tensor.shape))
        assert torch.equal(expected[tensor_name][box], tensor)
        covered[tensor_name][box] = True
    assert all(mask.all() for mask in covered.values())
    assert_close(load_file(run / name / "exported" / "model.safetensors"), ranks[0]["weights"], atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_either_backend_goes_on_from_any_layout(name: str, backend: str, run: Path, tmp_path: Path) -> None:
    results = load_results(run, name, 1)
    with open_trainer(run / LAYOUTS[name][0], tmp_path, backend=backend) as trainer:
        trainer.load(run / name / "state")
        assert_close(weights(trainer), results["weights"], atol=0)
        assert_close(trainer.train(share(DATA, 64), LOSS, totals(DATA)), results["next"], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_trains_as_fsdp_does(kind: Kind, run: Path, tmp_path: Path, fsdp_results: dict[Kind, Any]) -> None:
    expected = fsdp_results[kind]
    with open_trainer(run / kind, tmp_path, backend="megatron") as trainer:
        log_probs = trainer.log_probs([DATA[:5], [], DATA[5:]])
        assert log_probs[1] == []
        for row, expected_row in zip(log_probs[0] + log_probs[2], expected["log_probs"], strict=True):
            np.testing.assert_allclose(row, expected_row, atol=1e-5)
        for expected_metrics in expected["trained"]:
            assert_close(trainer.train(share(DATA, 64), LOSS, totals(DATA)), expected_metrics, atol=1e-4)
        assert_close(weights(trainer), expected["weights"], atol=1e-4)
        assert_decay_by_name(trainer)


def assert_decay_by_name(trainer: Any) -> None:
    """Check Megatron's parameter groups: norms and biases have no decay, all other parameters have full decay."""
    optimizer = trainer._optimizer
    decays = {}
    for group in optimizer._chained.param_groups:
        decays |= {main.data_ptr(): group["weight_decay"] for main in group["params"]}
    for name, parameter in trainer._ddp.module.named_parameters():
        decay = 0.0 if "norm" in name or name.endswith("bias") else OPTIMIZER.weight_decay
        assert decays[optimizer.slots[parameter].main.data_ptr()] == decay, name


@pytest.fixture(scope="module")
def one_rank_results(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, Any]]:
    """Return the results of the deep model by (dtype, True if the residual is float32)."""
    folder = tmp_path_factory.mktemp("deep")
    results = {}
    for dtype in ("float32", "bfloat16"):
        for is_float32 in (False, True):
            results[dtype, is_float32] = train_with_residual(run / "deep", folder, is_float32, dtype=dtype)
    return results


def mean_error(results: dict[str, Any], exact: dict[str, Any]) -> float:
    """Return the mean distance of the log-probs from the exact ones."""
    return float((torch.cat(results["log_probs"]) - torch.cat(exact["log_probs"])).abs().mean())


def test_a_float32_residual_changes_no_bit_where_all_is_float32(one_rank_results: dict[tuple[str, bool], Any]) -> None:
    plain_results = one_rank_results["float32", False]
    float32_results = one_rank_results["float32", True]
    assert mean_error(float32_results, plain_results) == 0
    assert float32_results["trained"] == plain_results["trained"]


def test_a_float32_residual_brings_log_probs_nearer(one_rank_results: dict[tuple[str, bool], Any], run: Path) -> None:
    exact = one_rank_results["float32", False]
    rounded_error = mean_error(one_rank_results["bfloat16", False], exact)
    assert mean_error(one_rank_results["bfloat16", True], exact) < 0.75 * rounded_error
    for name, (model, *_) in ROUNDED.items():
        if model == "deep":
            rounded_error = mean_error(load_results(run, f"rounded-{name}-False", 1), exact)
            assert mean_error(load_results(run, f"rounded-{name}-True", 1), exact) < 0.75 * rounded_error, name


def test_stages_hand_the_residual_over_unrounded(one_rank_results: dict[tuple[str, bool], Any], run: Path) -> None:
    assert mean_error(load_results(run, "rounded-pipeline-True", 0), one_rank_results["bfloat16", True]) == 0


@pytest.mark.parametrize("name", ROUNDED)
def test_two_ranks_train_with_a_float32_residual(
    name: str, one_rank_results: dict[tuple[str, bool], Any], fsdp_results: dict[Kind, dict[str, Any]], run: Path
) -> None:
    expected = fsdp_results["qwen3_moe"]["trained"][0]
    if ROUNDED[name][0] == "deep":
        [expected] = one_rank_results["float32", False]["trained"]
    for rank in (0, 1):
        [metrics] = load_results(run, f"rounded-{name}-True", rank)["trained"]
        assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=0.01)
        assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.05)


def train_on_three_ranks(rank: int, folder: Path) -> None:
    """Train as one of three data-parallel ranks, which share the writing of a layer's experts."""
    with open_trainer(folder / "model", folder, rank, 3, backend="megatron", num_ranks=3) as trainer:
        metrics = trainer.train(share(DATA, 64, rank, 3), LOSS, totals(DATA))
        results = {"trained": metrics, "weights": weights(trainer)}
        trainer.save(folder / "state")
        torch.save(results, folder / f"rank-{rank}.pt")


@pytest.mark.long  # variant: three ranks
def test_three_ranks_save_experts_that_one_goes_on_with(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3_moe")
    run_ranks(train_on_three_ranks, tmp_path, 3)
    results = torch.load(tmp_path / "rank-2.pt", weights_only=True)
    (tmp_path / "one").mkdir()
    with open_trainer(tmp_path / "model", tmp_path / "one") as trainer:
        assert_close(trainer.train(share(DATA, 64), LOSS, totals(DATA)), results["trained"], atol=1e-4)
        trainer.load(tmp_path / "state")
        assert_close(weights(trainer), results["weights"], atol=0)
