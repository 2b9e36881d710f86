"""Megatron-core on GPUs: two ranks train as one in every layout; bfloat16; the optimizer on the host."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from tests.system.training.scenario import MEGATRON, WeightedLoss, assert_close, open_trainer, sequences, share, totals
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
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
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


@two
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_train_as_fsdp_does_on_one_in_float32(name: str, run: Path, tmp_path: Path) -> None:
    ranks, kind = [load_results(run, name, rank) for rank in (0, 1)], LAYOUTS[name][0]
    assert ranks[0]["trained"] == ranks[1]["trained"]
    # A GPU multiplies experts in bfloat16 alone.
    device = "cpu" if kind == "qwen3_moe" else DEVICE
    with open_trainer(run / kind, tmp_path, device=device) as one:
        assert_close(ranks[0]["exported"], copy_to_host(exported(one)), atol=0)
        for got in ranks[0]["trained"]:
            assert_close(got, one.train(share(SHARED, 64), LOSS, totals(SHARED)), atol=1e-3)
        assert_close(ranks[0]["weights"], copy_to_host(exported(one)), atol=1e-3)
        one.load(run / name / "state")
        assert_close(copy_to_host(exported(one)), ranks[0]["weights"], atol=0)
        assert_close(ranks[0]["next"], one.train(share(SHARED, 64), LOSS, totals(SHARED)), atol=1e-3)
    assert len(ranks[0]["trained"]) == STEPS


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_trains_as_fsdp_does(kind: Kind, models: Path, tmp_path: Path) -> None:
    """As near as rounding lets them: an expert chosen on a near tie moves a token's log-prob by more."""
    found: list[Any] = []
    for backend in ("fsdp", "megatron"):
        with open_trainer(models / kind, tmp_path, device=DEVICE, backend=backend, dtype="bfloat16") as one:
            log_probs = np.concatenate([row for batch in one.log_probs(share(DATA, 64)) for row in batch])
            found.append((log_probs, [one.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(3)]))
    gap = np.abs(found[0][0] - found[1][0])
    assert np.quantile(gap, 0.97) < 0.15
    for one, other in zip(found[0][1], found[1][1]):
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=0.05)
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=0.1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [None, 0.5])
def test_what_the_host_updates_never_comes_to_the_device(
    fraction: float | None, overlap: bool, models: Path, tmp_path: Path
) -> None:
    """In no phase: state stays where it lies, no byte is counted as moved, and updates are those of the device."""
    host = replace(MEGATRON, optimizer_cpu_offload=True, optimizer_offload_fraction=fraction)
    sections = (MEGATRON, replace(host, overlap_cpu_optimizer_d2h_h2d=overlap))
    results = []
    for section in sections:
        options = {"backend": "megatron", "dtype": "bfloat16", "megatron": section}
        with open_trainer(models / "qwen3", tmp_path, device=DEVICE, **options) as one:
            places = []
            for _ in range(3):
                one.log_probs(share(DATA, 64))
                metrics = one.train(share(DATA, 64), LOSS, totals(DATA))
                one.shards()
                one.save(tmp_path / "state")
                one.rest()
                tensors = [t for slot in one._optimizer.slots.values() for t in (slot.main, *slot.state.values())]
                places.append([(t.data_ptr(), t.device.type) for t in tensors])
            assert places[0] == places[-1]
            assert one.memory()["moved_to_device"] == one.memory()["moved_to_host"] == 0
            held = sum(t.numel() for slot in one._optimizer.slots.values() for t in [slot.main] if t.is_cuda)
            share_of_all = held / sum(slot.main.numel() for slot in one._optimizer.slots.values())
            expected = 1.0 if section is MEGATRON else 1 - (fraction or 1.0)
            assert share_of_all == pytest.approx(expected, abs=0.25 if fraction else 0)
            results.append(metrics)
    assert results[1]["train/loss"] == pytest.approx(results[0]["train/loss"], abs=1e-2)


def test_gradients_make_room_while_the_optimizer_is_made(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine on the rank's device has memory by the forecast of generation, which counts no gradients."""
    from rlctl.training.megatron.optimizer import Optimizer, gradients

    held: list[int] = []

    class Watched(Optimizer):
        def __init__(self, ddp: Any, *others: Any) -> None:
            held.append(sum(tensor.untyped_storage().nbytes() for tensor in gradients(ddp)))
            super().__init__(ddp, *others)

    monkeypatch.setattr("rlctl.training.megatron.trainer.Optimizer", Watched)
    with open_trainer(models / "qwen3", tmp_path, device=DEVICE, backend="megatron", dtype="bfloat16") as one:
        assert held == [0]
        assert one.train(share(DATA, 64), LOSS, totals(DATA))["train/grad_norm"] > 0
        assert sum(tensor.untyped_storage().nbytes() for tensor in gradients(one._ddp)) > 0
