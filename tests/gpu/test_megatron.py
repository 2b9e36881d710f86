"""Megatron-core on GPUs: two ranks train as one in every layout; bfloat16; the optimizer on the host."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from tests.system.training.scenario import (
    MEGATRON,
    WeightedLoss,
    assert_close,
    open_trainer,
    rows_of,
    sequences,
    share,
    totals,
)
from tests.system.training.scenario import weights as exported
from tests.system.training.test_megatron import COMPILED, STEPS, copy_to_host, load_results, train_on_two_ranks
from tests.system.training.test_megatron import DATA as SHARED
from tests.system.training.test_megatron import LAYOUTS as SPLITS
from tests.tiny_models import KINDS, Kind, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
needs_two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
LAYOUTS = SPLITS | COMPILED
DATA = sequences(40)
LOSS = WeightedLoss()
DEVICE = "cuda:0"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    for kind in KINDS:
        make_model(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def run(models: Path) -> Path:
    for name in LAYOUTS:
        (models / name).mkdir()
    mp.spawn(train_on_two_ranks, (models, "cuda"), nprocs=2)
    return models


@needs_two_devices
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_fsdp_does_on_one_in_float32(name: str, run: Path, tmp_path: Path) -> None:
    first = load_results(run, name, 0)
    second = load_results(run, name, 1)
    kind = LAYOUTS[name][0]
    assert first["trained"] == second["trained"]
    # A GPU multiplies experts in bfloat16 alone.
    device = "cpu" if kind == "qwen3_moe" else DEVICE
    with open_trainer(run / kind, tmp_path, device=device) as trainer:
        assert_close(first["exported"], copy_to_host(exported(trainer)), atol=0)
        for metrics in first["trained"]:
            assert_close(metrics, trainer.train(share(SHARED, 64), LOSS, totals(SHARED)), atol=1e-3)
        assert_close(first["weights"], copy_to_host(exported(trainer)), atol=1e-3)
        trainer.load(run / name / "state")
        assert_close(copy_to_host(exported(trainer)), first["weights"], atol=0)
        assert_close(first["next"], trainer.train(share(SHARED, 64), LOSS, totals(SHARED)), atol=1e-3)
    assert len(first["trained"]) == STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_trains_as_fsdp_does(kind: Kind, models: Path, tmp_path: Path) -> None:
    """Compare within rounding: an expert chosen on a near tie moves a token's log-prob by more."""
    log_probs: dict[str, np.ndarray] = {}
    metrics: dict[str, list[dict[str, float]]] = {}
    for backend in ("fsdp", "megatron"):
        with open_trainer(models / kind, tmp_path, device=DEVICE, backend=backend, dtype="bfloat16") as trainer:
            log_probs[backend] = np.concatenate(rows_of(trainer.log_probs(share(DATA, 64))))
            metrics[backend] = [trainer.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(3)]
    gap = np.abs(log_probs["fsdp"] - log_probs["megatron"])
    assert np.quantile(gap, 0.97) < 0.15
    for fsdp, megatron in zip(metrics["fsdp"], metrics["megatron"], strict=True):
        assert megatron["train/loss"] == pytest.approx(fsdp["train/loss"], abs=0.05)
        assert megatron["train/grad_norm"] == pytest.approx(fsdp["train/grad_norm"], rel=0.1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [None, 0.5])
def test_what_the_host_updates_never_comes_to_the_device(
    fraction: float | None, overlap: bool, models: Path, tmp_path: Path
) -> None:
    """Check every phase: state stays where it lies, no byte counts as moved, updates are those of the device."""
    host = replace(MEGATRON, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    sections = (MEGATRON, replace(host, overlap_cpu_optimizer_d2h_h2d=overlap))
    losses = []
    for section in sections:
        options = {"backend": "megatron", "dtype": "bfloat16", "megatron": section}
        with open_trainer(models / "qwen3", tmp_path, device=DEVICE, **options) as trainer:
            places = []
            for _ in range(3):
                trainer.log_probs(share(DATA, 64))
                metrics = trainer.train(share(DATA, 64), LOSS, totals(DATA))
                trainer.shards()
                trainer.save(tmp_path / "state")
                trainer.rest()
                tensors: list[Tensor] = []
                for slot in trainer._optimizer.slots.values():
                    tensors += [slot.main, *slot.state.values()]
                places.append([(tensor.data_ptr(), tensor.device.type) for tensor in tensors])
            assert places[0] == places[-1]
            assert trainer.memory()["moved_to_device"] == trainer.memory()["moved_to_host"] == 0
            main_weights = [slot.main for slot in trainer._optimizer.slots.values()]
            on_device = sum(tensor.numel() for tensor in main_weights if tensor.is_cuda)
            expected = 1.0 if section is MEGATRON else 1 - (fraction or 1.0)
            share_on_device = on_device / sum(tensor.numel() for tensor in main_weights)
            assert share_on_device == pytest.approx(expected, abs=0.25 if fraction else 0)
            losses.append(metrics["train/loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-2)


def test_gradients_make_room_while_the_optimizer_is_made(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave an engine on the rank's device its memory: the forecast of generation counts no gradients."""
    from rlctl.training.megatron.optimizer import Optimizer, gradients

    def gradient_bytes(ddp: Any) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in gradients(ddp))

    bytes_at_start: list[int] = []

    class WatchedOptimizer(Optimizer):
        def __init__(self, ddp: Any, *arguments: Any) -> None:
            bytes_at_start.append(gradient_bytes(ddp))
            super().__init__(ddp, *arguments)

    monkeypatch.setattr("rlctl.training.megatron.trainer.Optimizer", WatchedOptimizer)
    with open_trainer(models / "qwen3", tmp_path, device=DEVICE, backend="megatron", dtype="bfloat16") as trainer:
        assert bytes_at_start == [0]
        assert trainer.train(share(DATA, 64), LOSS, totals(DATA))["train/grad_norm"] > 0
        assert gradient_bytes(trainer._ddp) > 0
