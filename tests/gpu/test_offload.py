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
    """Add in one order: a difference is then more than rounding."""
    with sdpa_kernel(SDPBackend.MATH):
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)


def moved_bytes(trainer: FsdpTrainer) -> tuple[int, int]:
    """Return the bytes moved to the host and the bytes moved to the device."""
    memory = trainer.memory()
    return int(memory["moved_to_host"]), int(memory["moved_to_device"])


def make_steps(trainer: FsdpTrainer) -> list[Any]:
    """Make three steps as a run on shared devices has them; return log-probs, metrics and weights."""
    outputs: list[Any] = []
    for _ in range(3):
        outputs += [trainer.log_probs(share(DATA, 64)), trainer.log_probs(share(DATA, 64), "reference")]
        metrics = trainer.train(share(DATA, 45), LOSS, totals(DATA))
        # Bytes and seconds of the moves themselves differ.
        outputs.append({name: number for name, number in metrics.items() if not name.startswith("offload/")})
        trainer.rest()
    return [*outputs, {name: tensor.cpu().numpy() for name, tensor in weights(trainer).items()}]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("switch", ["offload_optimizer_for_logprob", "offload_optimizer_for_generation"])
def test_three_steps_have_the_same_bits(model: Path, tmp_path: Path, switch: str) -> None:
    outputs = []
    for is_on in (False, True):
        with open_trainer(model, tmp_path, device=DEVICE, **{switch: is_on}) as trainer:
            outputs.append(make_steps(trainer))
            assert all(moved_bytes(trainer)) == is_on
    np.testing.assert_equal(outputs[0], outputs[1])


def allocated_bytes() -> int:
    """Return the bytes of tensors in use. First calls leave frames in cycles, which hold tensors, even gradients."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def test_each_phase_moves_eight_bytes_a_parameter_and_frees_as_many(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, device=DEVICE, dtype="bfloat16", offload_optimizer_for_logprob=True) as trainer:
        # Memory that libraries allocate at first use is there from here on.
        trainer.log_probs([DATA])
        trainer.train([DATA], LOSS, totals(DATA))
        size = 8 * trainer.info()["parameters"]
        before = allocated_bytes()
        assert moved_bytes(trainer) == (size, size)
        trainer.log_probs([DATA])
        freed_bytes = before - allocated_bytes()
        tensors = 2 * len(trainer.layout())
        assert size <= freed_bytes <= size + tensors * BLOCK
        assert moved_bytes(trainer) == (2 * size, size)
        trainer.log_probs([DATA], "reference")
        assert moved_bytes(trainer) == (2 * size, size)
        metrics = trainer.train([DATA], LOSS, totals(DATA))
        assert moved_bytes(trainer) == (2 * size, 2 * size)
        assert metrics["offload/to_host_gb"] == metrics["offload/to_device_gb"] == size / 1e9
        assert 0 < metrics["offload/seconds"] < 1
        assert abs(allocated_bytes() - before) <= tensors * BLOCK


def test_engines_find_the_device_without_optimizer_state_until_the_update(model: Path, tmp_path: Path) -> None:
    options = {"device": DEVICE, "dtype": "bfloat16", "offload_optimizer_for_generation": True}
    with open_trainer(model, tmp_path, **options) as trainer:
        size = 8 * trainer.info()["parameters"]
        assert moved_bytes(trainer) == (size, 0)
        trainer.log_probs([DATA])
        trainer.train([DATA], LOSS, totals(DATA))
        assert moved_bytes(trainer) == (size, size)
        trainer.rest()
        trainer.shards()
        trainer.save(tmp_path / "state")
        assert moved_bytes(trainer) == (2 * size, size)


def test_state_on_the_host_is_saved_and_loaded_from_there(model: Path, tmp_path: Path) -> None:
    options = {"device": DEVICE, "offload_optimizer_for_generation": True}
    with open_trainer(model, tmp_path, **options) as trainer:
        trainer.train([DATA], LOSS, totals(DATA))
        trainer.save(tmp_path / "on host")
    with open_trainer(model, tmp_path, device=DEVICE) as trainer:
        trainer.train([DATA], LOSS, totals(DATA))
        trainer.load(tmp_path / "on host")
        trainer.save(tmp_path / "on device")
    with open_trainer(model, tmp_path, **options) as trainer:
        trainer.load(tmp_path / "on device")
        trainer.save(tmp_path / "on host again")
    expected = load_tensors(tmp_path / "on host")
    for name in ("on device", "on host again"):
        state = load_tensors(tmp_path / name)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())


def test_memory_that_is_freed_may_be_written_at_once_and_bits_survive() -> None:
    """Write while copies are still in progress: others get the memory, and the step goes on with its work."""
    tensors = [torch.randn(32 << 20, device=DEVICE) for _ in range(4)]
    expected = [tensor.cpu() for tensor in tensors]
    offloaded = OffloadedTensors(tensors)
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        assert offloaded.move("host") == offloaded.nbytes == 4 * (128 << 20)
        assert before - torch.cuda.memory_allocated() == offloaded.nbytes
        junk = [torch.full((32 << 20,), float("nan"), device=DEVICE) for _ in range(4)]
        offloaded.settle()
        assert all(torch.equal(offloaded.at_hand(tensor), copy) for tensor, copy in zip(tensors, expected))
        assert offloaded.at_hand(tensors[0]).is_pinned()
        del junk
        assert offloaded.move("device") == offloaded.nbytes
        offloaded.wait()
        for number, tensor in enumerate(tensors):
            tensor.add_(1)
            expected[number] += 1
    assert all(torch.equal(tensor.cpu(), copy) for tensor, copy in zip(tensors, expected))


def test_the_mover_keeps_up_with_the_link(tmp_path: Path) -> None:
    """Move the state of a real model's shape; the bound is far below the speed of an idle machine."""
    copies = measure_copies(model_folder("qwen3-0.6b", tmp_path), DEVICE)
    print(copies, copies.shares)
    assert copies.nbytes > 4e9
    assert min(copies.shares) > 0.5


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint without the states of random generators."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return {name: tensor for name, tensor in tensors.items() if "rng" not in name}
