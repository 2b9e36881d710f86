"""Optimizer state on its way between a GPU and the host: bytes counted, memory freed, not one bit changed."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlctl.bench.offload import measure_copies
from rlctl.bench.workload import model_folder
from rlctl.training.fsdp.trainer import FsdpTrainer
from rlctl.training.offload import OffloadedTensors
from tests.system.training.scenario import WeightedLoss, open_trainer, sequences, share, totals, weights
from tests.tiny_models import make_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DATA = sequences(40)
LOSS = WeightedLoss()
DEVICE = "cuda:0"
# torch hands device memory out in multiples of this.
BLOCK = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sums in one order: a difference is then more than rounding."""
    with sdpa_kernel(SDPBackend.MATH):
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


def moved(one: FsdpTrainer) -> tuple[int, int]:
    memory = one.memory()
    return int(memory["moved_to_host"]), int(memory["moved_to_device"])


def steps(one: FsdpTrainer) -> list[Any]:
    """Three as a run on shared devices has them."""
    found: list[Any] = []
    for _ in range(3):
        found += [one.log_probs(share(DATA, 64)), one.log_probs(share(DATA, 64), "reference")]
        made = one.train(share(DATA, 45), LOSS, totals(DATA))
        # Bytes and seconds of the moves themselves differ.
        found.append({name: value for name, value in made.items() if not name.startswith("offload/")})
        one.rest()
    return [*found, {name: tensor.cpu().numpy() for name, tensor in weights(one).items()}]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("switch", ["offload_optimizer_for_logprob", "offload_optimizer_for_generation"])
def test_three_steps_have_the_same_bits(model: Path, tmp_path: Path, switch: str) -> None:
    results = []
    for on in (False, True):
        with open_trainer(model, tmp_path, device=DEVICE, **{switch: on}) as one:
            results.append(steps(one))
            assert all(moved(one)) == on
    np.testing.assert_equal(results[0], results[1])


def allocated() -> int:
    """Bytes of tensors that are in use. First calls leave frames in cycles, which hold tensors, even gradients."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def test_each_phase_moves_eight_bytes_a_parameter_and_frees_as_many(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, device=DEVICE, dtype="bfloat16", offload_optimizer_for_logprob=True) as one:
        # Memory that libraries allocate at first use is there from here on.
        one.log_probs([DATA])
        one.train([DATA], LOSS, totals(DATA))
        size, before, start = 8 * one.info()["parameters"], allocated(), moved(one)
        assert start == (size, size)
        one.log_probs([DATA])
        freed = before - allocated()
        tensors = 2 * len(one.layout())
        assert size <= freed <= size + tensors * BLOCK
        assert moved(one) == (2 * size, size)
        one.log_probs([DATA], "reference")
        assert moved(one) == (2 * size, size)
        told = one.train([DATA], LOSS, totals(DATA))
        assert moved(one) == (2 * size, 2 * size)
        assert (told["offload/to_host_gb"], told["offload/to_device_gb"]) == (size / 1e9, size / 1e9)
        assert 0 < told["offload/seconds"] < 1
        assert abs(allocated() - before) <= tensors * BLOCK


def test_engines_find_the_device_without_optimizer_state_until_the_update(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, device=DEVICE, dtype="bfloat16", offload_optimizer_for_generation=True) as one:
        size = 8 * one.info()["parameters"]
        assert moved(one) == (size, 0)
        one.log_probs([DATA])
        one.train([DATA], LOSS, totals(DATA))
        assert moved(one) == (size, size)
        one.rest()
        one.shards()
        one.save(tmp_path / "state")
        assert moved(one) == (2 * size, size)


def test_state_on_the_host_is_saved_and_loaded_from_there(model: Path, tmp_path: Path) -> None:
    away = {"device": DEVICE, "offload_optimizer_for_generation": True}
    with open_trainer(model, tmp_path, **away) as one:
        one.train([DATA], LOSS, totals(DATA))
        one.save(tmp_path / "away")
    with open_trainer(model, tmp_path, device=DEVICE) as one:
        one.train([DATA], LOSS, totals(DATA))
        one.load(tmp_path / "away")
        one.save(tmp_path / "there")
    with open_trainer(model, tmp_path, **away) as one:
        one.load(tmp_path / "there")
        one.save(tmp_path / "back")
    states = [_tensors(tmp_path / name) for name in ("away", "there", "back")]
    for other in states[1:]:
        assert other.keys() == states[0].keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in states[0].items())


def test_memory_that_is_freed_may_be_written_at_once_and_bits_survive() -> None:
    """Copies are still in progress when others get the memory, and when the step's own work goes on."""
    mine = [torch.randn(32 << 20, device=DEVICE) for _ in range(4)]
    expected = [tensor.cpu() for tensor in mine]
    offloaded = OffloadedTensors(mine)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        assert offloaded.move("host") == offloaded.nbytes == 4 * (128 << 20)
        assert before - torch.cuda.memory_allocated() == offloaded.nbytes
        junk = [torch.full((32 << 20,), float("nan"), device=DEVICE) for _ in range(4)]
        offloaded.settle()
        assert all(torch.equal(offloaded.at_hand(a), b) for a, b in zip(mine, expected))
        assert offloaded.at_hand(mine[0]).is_pinned()
        del junk
        assert offloaded.move("device") == offloaded.nbytes
        offloaded.wait()
        for number, tensor in enumerate(mine):
            tensor.add_(1)
            expected[number] += 1
    assert all(torch.equal(tensor.cpu(), other) for tensor, other in zip(mine, expected))


def test_the_mover_keeps_up_with_the_link(tmp_path: Path) -> None:
    """State of a real model's shape; the bound is far below the speed of an idle machine."""
    copies = measure_copies(model_folder("qwen3-0.6b", tmp_path), DEVICE)
    print(copies, copies.shares)
    assert copies.nbytes > 4e9
    assert min(copies.shares) > 0.5


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items() if "rng" not in name
    }
