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
from tests.tiny_models import KINDS, Kind, make_model

# An import here, 3 s of CPU, would be made by every process that collects tests.
pytestmark = pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core")
DATA = sequences(9, seed=4)
LOSS = WeightedLoss()
STEPS = 3
UNTIED: Kind = "llama"


def copy_to_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def split(**sizes: Any) -> MegatronSection:
    return replace(MEGATRON, **sizes)


# name -> (model, how two ranks share it, further options, shards of data)
LAYOUTS: dict[str, tuple[Kind, MegatronSection, dict[str, Any], int]] = {
    "tensor": ("qwen3", split(tensor_model_parallel_size=2, sequence_parallel=False), {}, 1),
    "tensor, sequence, recompute": (
        "qwen3",
        split(tensor_model_parallel_size=2),
        {"activation_checkpointing": True},
        1,
    ),
    "tensor, untied, biases": ("qwen2", split(tensor_model_parallel_size=2), {}, 1),
    "pipeline": ("qwen3", split(pipeline_model_parallel_size=2), {}, 1),
    "pipeline, untied": (UNTIED, split(pipeline_model_parallel_size=2), {}, 1),
    "data": ("qwen3", MEGATRON, {}, 2),
    "context": ("qwen3", split(context_parallel_size=2), {}, 1),
    "expert": ("qwen3_moe", split(expert_model_parallel_size=2), {}, 2),
    "tensor, whole experts": ("qwen3_moe", split(tensor_model_parallel_size=2), {}, 1),
    "tensor, expert": ("qwen3_moe", split(tensor_model_parallel_size=2, expert_model_parallel_size=2), {}, 1),
}
# On GPUs alone, in tests/gpu: compiling for two ranks takes 105 s of CPU.
COMPILED: dict[str, tuple[Kind, MegatronSection, dict[str, Any], int]] = {
    "tensor, sequence, compiled": ("qwen3", split(tensor_model_parallel_size=2), {"compile": True}, 1)
}


def train_on_two_ranks(rank: int, folder: Path, device: str = "cpu") -> None:
    """One rank of every layout; each rank writes its results."""
    layouts = LAYOUTS if device == "cpu" else LAYOUTS | COMPILED
    for name, (kind, section, options, shards) in layouts.items():
        own = folder / name
        mine = share(DATA, 48, rank % shards, shards)
        settings = {"backend": "megatron", "num_ranks": 2, "megatron": section, **options}
        place = f"{device}:{rank}" if device == "cuda" else device
        with open_trainer(folder / kind, own, rank, 2, place, **settings) as one:
            seen: dict[str, Any] = {"log_probs": [torch.from_numpy(x) for b in one.log_probs(mine) for x in b]}
            seen["exported"] = copy_to_host(weights(one))
            seen["listed"] = one.layout() == [(n, tuple(t.shape), "float32") for n, t in one.export()]
            seen["boxes"] = [(s.name, s.start, s.tensor.cpu().clone()) for s in one.shards()]
            whole = [one.train(mine, LOSS, totals(DATA)) for _ in range(STEPS - 1)]
            seen["trained"] = [*whole, train_in_parts(one, DATA, 48, rank % shards, shards)]
            seen["evaluated"] = one.evaluate(mine, LOSS)
            seen["weights"] = copy_to_host(weights(one))
            one.save(own / "state")
            one.export_folder(own / "exported")
            reference = one.log_probs(mine, "reference")
            seen["reference"] = [torch.from_numpy(x) for b in reference for x in b]
            seen["next"] = one.train(mine, LOSS, totals(DATA))
            refusal = refused(one, DATA, 48, rank % shards, shards)
            seen["rollouts"] = train_rollouts(one, DATA, 48, rank % shards, shards)
            seen["refused"] = {key: copy_to_host(each) if key != "said" else each for key, each in refusal.items()}
            torch.save(seen, own / f"rank-{rank}.pt")


# name -> (model, how two ranks share it, further options), in bfloat16
ROUNDED: dict[str, tuple[str, MegatronSection, dict[str, Any]]] = {
    "tensor": ("deep", split(tensor_model_parallel_size=2), {"activation_checkpointing": True}),
    "pipeline": ("deep", split(pipeline_model_parallel_size=2), {}),
    "expert": ("qwen3_moe", split(tensor_model_parallel_size=2, expert_model_parallel_size=2), {}),
}


def make_deep_model(folder: Path) -> None:
    """Weights as transformers draws them, in bfloat16: half of the error comes of adding to the residual."""
    from transformers import AutoModelForCausalLM

    make_model(folder, "qwen3", layers=24, hidden=64, head_dim=16, scale=1.0)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)


def rounded(
    model: Path, folder: Path, wide: bool, rank: int = 0, world: int = 1, **options: Any
) -> dict[str, list[Any]]:
    """Log-probs and an update of a trainer whose residual is float32 if `wide`."""
    section = replace(options.pop("megatron", MEGATRON), fp32_residual_connection=wide)
    settings = {"backend": "megatron", "num_ranks": world, "megatron": section, **options}
    with open_trainer(model, folder, rank, world, **settings) as one:
        log_probs = [torch.from_numpy(x) for x in one.log_probs([DATA])[0]]
        return {"log_probs": log_probs, "trained": [one.train(share(DATA, 48), LOSS, totals(DATA))]}


def train_all_on_two_ranks(rank: int, folder: Path) -> None:
    """One rank of LAYOUTS and ROUNDED."""
    train_on_two_ranks(rank, folder)
    for name, (model, section, options) in ROUNDED.items():
        for wide in (False, True):
            own = folder / f"rounded-{name}-{wide}"
            settings = {"megatron": section, "dtype": "bfloat16", **options}
            torch.save(rounded(folder / model, own, wide, rank, 2, **settings), own / f"rank-{rank}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, however many processes run these tests."""
    shared = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if shared else base) / "megatron-layouts"
    with FileLock(f"{folder}.lock"):
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            for kind in KINDS:
                make_model(folder / kind, kind)
            make_deep_model(folder / "deep")
            for name in [*LAYOUTS, *(f"rounded-{name}-{wide}" for name in ROUNDED for wide in (False, True))]:
                (folder / name).mkdir()
            run_ranks(train_all_on_two_ranks, folder, 2)
            (folder / "done").touch()
    return folder


@pytest.fixture(scope="module")
def expected(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, dict[str, Any]]:
    """Results of FSDP on one rank."""
    found: dict[Kind, dict[str, Any]] = {}
    for kind in KINDS:
        with open_trainer(run / kind, tmp_path_factory.mktemp(kind)) as one:
            found[kind] = {
                "log_probs": [x for batch in one.log_probs([DATA]) for x in batch],
                "exported": weights(one),
                "trained": [one.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(STEPS)],
                "evaluated": one.evaluate([DATA], LOSS),
                "weights": weights(one),
                "next": one.train(share(DATA, 64), LOSS, totals(DATA)),
                "rollouts": train_rollouts(one, DATA, 64),
            }
    return found


def load_results(run: Path, name: str, rank: int) -> dict[str, Any]:
    return torch.load(run / name / f"rank-{rank}.pt", weights_only=True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_fsdp_does_on_one(name: str, run: Path, expected: dict[Kind, dict[str, Any]]) -> None:
    ranks, want = [load_results(run, name, rank) for rank in (0, 1)], expected[LAYOUTS[name][0]]
    for key in ("trained", "evaluated", "next", "rollouts"):
        assert ranks[0][key] == ranks[1][key]
    for one, other in zip(ranks[0]["trained"], want["trained"]):
        assert_close(one, other, atol=1e-4)
    for key in ("evaluated", "weights", "next", "rollouts"):
        assert_close(ranks[0][key], want[key], atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_loss_that_is_not_finite_is_refused_by_both_ranks(name: str, run: Path) -> None:
    for rank in (0, 1):
        assert_refused(load_results(run, name, rank)["refused"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_log_probs_and_reference_are_those_of_fsdp(name: str, run: Path, expected: dict[Kind, dict[str, Any]]) -> None:
    kind, _, _, shards = LAYOUTS[name]
    for rank in (0, 1):
        mine = [sequence for batch in share(DATA, 48, rank % shards, shards) for sequence in batch]
        for key in ("log_probs", "reference"):
            for sequence, got in zip(mine, load_results(run, name, rank)[key], strict=True):
                [want] = [x for x, other in zip(expected[kind]["log_probs"], DATA) if other.tokens is sequence.tokens]
                np.testing.assert_allclose(got.numpy(), want, atol=1e-5)


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_come_and_go_bit_by_bit(name: str, run: Path, expected: dict[Kind, dict[str, Any]]) -> None:
    """Read from the folder, exported whole, sent as boxes, written to a folder."""
    from safetensors.torch import load_file

    ranks, want = [load_results(run, name, rank) for rank in (0, 1)], expected[LAYOUTS[name][0]]
    for rank in ranks:
        assert rank["listed"]
        assert_close(rank["exported"], want["exported"], atol=0)
    covered = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in want["exported"].items()}
    for part, start, tensor in (box for rank in ranks for box in rank["boxes"]):
        where = tuple(slice(begin, begin + size) for begin, size in zip(start, tensor.shape))
        assert torch.equal(want["exported"][part][where], tensor)
        covered[part][where] = True
    assert all(mask.all() for mask in covered.values())
    assert_close(load_file(run / name / "exported" / "model.safetensors"), ranks[0]["weights"], atol=0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_either_backend_goes_on_from_any_layout(name: str, backend: str, run: Path, tmp_path: Path) -> None:
    result = load_results(run, name, 1)
    with open_trainer(run / LAYOUTS[name][0], tmp_path, backend=backend) as one:
        one.load(run / name / "state")
        assert_close(weights(one), result["weights"], atol=0)
        assert_close(one.train(share(DATA, 64), LOSS, totals(DATA)), result["next"], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_trains_as_fsdp_does(kind: Kind, run: Path, tmp_path: Path, expected: dict[Kind, Any]) -> None:
    with open_trainer(run / kind, tmp_path, backend="megatron") as one:
        log_probs = one.log_probs([DATA[:5], [], DATA[5:]])
        assert log_probs[1] == []
        for got, want in zip(log_probs[0] + log_probs[2], expected[kind]["log_probs"], strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
        for want in expected[kind]["trained"]:
            assert_close(one.train(share(DATA, 64), LOSS, totals(DATA)), want, atol=1e-4)
        assert_close(weights(one), expected[kind]["weights"], atol=1e-4)
        assert_decay_by_name(one)


def assert_decay_by_name(one: Any) -> None:
    """Hold the parameter groups of a Megatron model: norms and biases have no decay, all else has the whole."""
    optimizer = one._optimizer
    decays = {}
    for group in optimizer._chained.param_groups:
        decays |= {main.data_ptr(): group["weight_decay"] for main in group["params"]}
    for name, parameter in one._ddp.module.named_parameters():
        decay = 0.0 if "norm" in name or name.endswith("bias") else OPTIMIZER.weight_decay
        assert decays[optimizer.slots[parameter].main.data_ptr()] == decay, name


@pytest.fixture(scope="module")
def on_one_rank(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, Any]]:
    """By (dtype, whether the residual is float32), of the deep model."""
    folder = tmp_path_factory.mktemp("deep")
    return {
        (dtype, wide): rounded(run / "deep", folder, wide, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for wide in (False, True)
    }


def error(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """Mean distance of the log-probs."""
    return float((torch.cat(found["log_probs"]) - torch.cat(exact["log_probs"])).abs().mean())


def test_a_float32_residual_changes_no_bit_where_all_is_float32(on_one_rank: dict[tuple[str, bool], Any]) -> None:
    plain, wide = on_one_rank["float32", False], on_one_rank["float32", True]
    assert error(wide, plain) == 0
    assert wide["trained"] == plain["trained"]


def test_a_float32_residual_brings_log_probs_nearer(on_one_rank: dict[tuple[str, bool], Any], run: Path) -> None:
    exact = on_one_rank["float32", False]
    found = {"one rank": [on_one_rank["bfloat16", wide] for wide in (False, True)]}
    for name, (model, *_) in ROUNDED.items():
        if model == "deep":
            found[name] = [load_results(run, f"rounded-{name}-{wide}", 1) for wide in (False, True)]
    for name, (plain, wide) in found.items():
        assert error(wide, exact) < 0.75 * error(plain, exact), name


def test_stages_hand_the_residual_over_unrounded(on_one_rank: dict[tuple[str, bool], Any], run: Path) -> None:
    assert error(load_results(run, "rounded-pipeline-True", 0), on_one_rank["bfloat16", True]) == 0


@pytest.mark.parametrize("name", ROUNDED)
def test_two_ranks_train_with_a_float32_residual(
    name: str, on_one_rank: dict[tuple[str, bool], Any], expected: dict[Kind, dict[str, Any]], run: Path
) -> None:
    model = ROUNDED[name][0]
    [want] = on_one_rank["float32", False]["trained"] if model == "deep" else expected["qwen3_moe"]["trained"][:1]
    for rank in (0, 1):
        [got] = load_results(run, f"rounded-{name}-True", rank)["trained"]
        assert got["train/loss"] == pytest.approx(want["train/loss"], abs=0.01)
        assert got["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=0.05)


def three_ranks(rank: int, folder: Path) -> None:
    """One of three data-parallel ranks, among which a layer's experts are shared out for writing."""
    with open_trainer(folder / "model", folder, rank, 3, backend="megatron", num_ranks=3) as one:
        seen = {"trained": one.train(share(DATA, 64, rank, 3), LOSS, totals(DATA)), "weights": weights(one)}
        one.save(folder / "state")
        torch.save(seen, folder / f"rank-{rank}.pt")


@pytest.mark.long  # variant: three ranks
def test_three_ranks_save_experts_that_one_goes_on_with(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen3_moe")
    run_ranks(three_ranks, tmp_path, 3)
    result = torch.load(tmp_path / "rank-2.pt", weights_only=True)
    (tmp_path / "one").mkdir()
    with open_trainer(tmp_path / "model", tmp_path / "one") as one:
        assert_close(one.train(share(DATA, 64), LOSS, totals(DATA)), result["trained"], atol=1e-4)
        one.load(tmp_path / "state")
        assert_close(weights(one), result["weights"], atol=0)
