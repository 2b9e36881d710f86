"""Training with offloaded state equals training without, bit by bit. Here even tensors of a CPU trainer are moved."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlctl.training import offload
from rlctl.training.fsdp.trainer import FsdpTrainer
from tests.system.training.scenario import WeightedLoss, assert_close, open_trainer, sequences, share, totals, weights
from tests.tiny_models import make_model

DATA = sequences()
LOSS = WeightedLoss()
FOR_LOGPROB = {"offload_optimizer_for_logprob": True}
FOR_GENERATION = {"offload_optimizer_for_generation": True}
OPTIONS = [FOR_LOGPROB, FOR_GENERATION, FOR_LOGPROB | FOR_GENERATION]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture
def move_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload CPU tensors like tensors of a GPU: copy them to the host buffer and free their memory."""
    monkeypatch.setattr(offload, "select_movable", list)


def run_steps(trainer: FsdpTrainer, count: int) -> list[Any]:
    """Make steps as on shared devices: log-probs of policy and reference, an update, then memory is left to engines.

    Return all log-probs and metrics.
    """
    outputs: list[Any] = []
    for _ in range(count):
        outputs.append(trainer.log_probs(share(DATA, 64)))
        outputs.append(trainer.log_probs(share(DATA, 64), "reference"))
        metrics = trainer.train(share(DATA, 45), LOSS, totals(DATA))
        # Bytes and seconds of the moves themselves differ.
        outputs.append({name: metric for name, metric in metrics.items() if not name.startswith("offload/")})
        trainer.rest()
        trainer.shards()
    return outputs


@pytest.mark.usefixtures("move_cpu_tensors")
@pytest.mark.parametrize("options", OPTIONS)
def test_three_steps_and_a_checkpoint_have_the_same_bits(model: Path, options: dict[str, bool], tmp_path: Path) -> None:
    outputs = []
    trained_weights = []
    states = []
    for trainer_options in ({}, options):
        state_folder = tmp_path / f"state-{len(trainer_options)}"
        with open_trainer(model, tmp_path, **trainer_options) as trainer:
            first_outputs = run_steps(trainer, 2)
            trainer.save(state_folder)
            last_outputs = run_steps(trainer, 1)
            outputs.append([*first_outputs, *last_outputs])
            trained_weights.append(weights(trainer))
            moved = bytes_moved(trainer)
        assert all(moved) if trainer_options else not any(moved)
        with open_trainer(model, tmp_path, **trainer_options) as trainer:
            trainer.load(state_folder)
            np.testing.assert_equal(run_steps(trainer, 1), last_outputs)
        states.append(load_file(next(state_folder.glob("*.safetensors"))))
    np.testing.assert_equal(outputs[0], outputs[1])
    assert_close(trained_weights[0], trained_weights[1], atol=0)
    assert_close(states[0], states[1], atol=0)


@pytest.mark.usefixtures("move_cpu_tensors")
def test_each_phase_moves_eight_bytes_a_parameter_at_most_once(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, **FOR_LOGPROB) as trainer:
        size = 8 * trainer.info()["parameters"]
        moved = [bytes_moved(trainer)]
        trainer.log_probs([DATA])
        trainer.log_probs([DATA], "reference")
        moved.append(bytes_moved(trainer))
        trainer.train([DATA], LOSS, totals(DATA))
        trainer.train([DATA], LOSS, totals(DATA))
        moved.append(bytes_moved(trainer))
        trainer.rest()
        trainer.shards()
        trainer.save(tmp_path / "one")
        moved.append(bytes_moved(trainer))
    assert moved == [(0, 0), (size, 0), (size, size), (size, size)]
    with open_trainer(model, tmp_path, **FOR_LOGPROB, **FOR_GENERATION) as trainer:
        moved = [bytes_moved(trainer)]
        trainer.log_probs([DATA])
        moved.append(bytes_moved(trainer))
        trainer.train([DATA], LOSS, totals(DATA))
        moved.append(bytes_moved(trainer))
        trainer.rest()
        trainer.shards()
        trainer.save(tmp_path / "two")
        moved.append(bytes_moved(trainer))
    assert moved == [(size, 0), (size, 0), (size, size), (2 * size, size)]


@pytest.mark.usefixtures("move_cpu_tensors")
def test_a_warm_up_with_its_state_away_changes_no_bit(model: Path, tmp_path: Path) -> None:
    outputs = []
    trained_weights = []
    for is_warmed in (False, True):
        with open_trainer(model, tmp_path, **FOR_GENERATION) as trainer:
            if is_warmed:
                trainer.warm_up(share(DATA[:5], 20), LOSS)
                trainer.rest()
            outputs.append(run_steps(trainer, 1))
            trained_weights.append(weights(trainer))
    np.testing.assert_equal(outputs[0], outputs[1])
    assert_close(trained_weights[0], trained_weights[1], atol=0)


def test_on_a_cpu_nothing_moves(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, **FOR_LOGPROB, **FOR_GENERATION) as trainer:
        run_steps(trainer, 1)
        assert bytes_moved(trainer) == (0, 0)
        assert all(torch.isfinite(tensor).all() for tensor in weights(trainer).values())


def bytes_moved(trainer: FsdpTrainer) -> tuple[int, int]:
    """Return the number of bytes that were moved to the host and to the device."""
    memory = trainer.memory()
    return int(memory["moved_to_host"]), int(memory["moved_to_device"])
