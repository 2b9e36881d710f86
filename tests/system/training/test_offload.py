"""Training with its state on the move is training without, to the last bit. On CPU moves are made in earnest here."""

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
OPTIONS = [
    {"offload_optimizer_for_logprob": True},
    {"offload_optimizer_for_generation": True},
    {"offload_optimizer_for_logprob": True, "offload_optimizer_for_generation": True},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors move as those of a device do: into the host buffer, their own memory freed."""
    monkeypatch.setattr(offload, "_select_movable", list)


def steps(one: FsdpTrainer, count: int) -> list[Any]:
    """Steps as a run on shared devices has them: log-probs of policy and reference, an update, room for engines."""
    found: list[Any] = []
    for _ in range(count):
        found.append(one.log_probs(share(DATA, 64)))
        found.append(one.log_probs(share(DATA, 64), "reference"))
        made = one.train(share(DATA, 45), LOSS, totals(DATA))
        # Bytes and seconds of the moves themselves differ.
        found.append({name: value for name, value in made.items() if not name.startswith("offload/")})
        one.rest()
        one.shards()
    return found


def same(one: Any, other: Any) -> None:
    np.testing.assert_equal(one, other)


@pytest.mark.usefixtures("moves")
@pytest.mark.parametrize("options", OPTIONS)
def test_three_steps_and_a_checkpoint_have_the_same_bits(model: Path, options: dict[str, bool], tmp_path: Path) -> None:
    found = []
    for own in ({}, options):
        folder = tmp_path / f"state-{len(own)}"
        with open_trainer(model, tmp_path, **own) as one:
            first = steps(one, 2)
            one.save(folder)
            found.append((first, steps(one, 1), weights(one)))
            moved = one.memory()["moved_to_device"], one.memory()["moved_to_host"]
        assert all(moved) if own else not any(moved)
        with open_trainer(model, tmp_path, **own) as one:
            one.load(folder)
            same(steps(one, 1), found[-1][1])
    same(found[0][:2], found[1][:2])
    assert_close(found[0][2], found[1][2], atol=0)
    states = [load_file(next((tmp_path / f"state-{len(own)}").glob("*.safetensors"))) for own in ({}, options)]
    assert_close(states[0], states[1], atol=0)


@pytest.mark.usefixtures("moves")
def test_each_phase_moves_eight_bytes_a_parameter_at_most_once(model: Path, tmp_path: Path) -> None:
    both = {"offload_optimizer_for_logprob": True, "offload_optimizer_for_generation": True}
    with open_trainer(model, tmp_path, offload_optimizer_for_logprob=True) as one:
        size = 8 * one.info()["parameters"]
        moved = [_moved(one)]
        one.log_probs([DATA])
        one.log_probs([DATA], "reference")
        moved.append(_moved(one))
        one.train([DATA], LOSS, totals(DATA))
        one.train([DATA], LOSS, totals(DATA))
        moved.append(_moved(one))
        one.rest()
        one.shards()
        one.save(tmp_path / "one")
        moved.append(_moved(one))
    assert moved == [(0, 0), (size, 0), (size, size), (size, size)]
    with open_trainer(model, tmp_path, **both) as one:
        moved = [_moved(one)]
        one.log_probs([DATA])
        moved.append(_moved(one))
        one.train([DATA], LOSS, totals(DATA))
        moved.append(_moved(one))
        one.rest()
        one.shards()
        one.save(tmp_path / "two")
        moved.append(_moved(one))
    assert moved == [(size, 0), (size, 0), (size, size), (2 * size, size)]


@pytest.mark.usefixtures("moves")
def test_a_warm_up_with_its_state_away_changes_no_bit(model: Path, tmp_path: Path) -> None:
    found = []
    for warm in (False, True):
        with open_trainer(model, tmp_path, **OPTIONS[1]) as one:
            if warm:
                one.warm_up(share(DATA[:5], 20), LOSS)
                one.rest()
            found.append((steps(one, 1), weights(one)))
    same(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1], atol=0)


def test_on_a_cpu_nothing_moves(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path, **OPTIONS[2]) as one:
        steps(one, 1)
        assert _moved(one) == (0, 0)
        assert all(torch.isfinite(t).all() for t in weights(one).values())


def _moved(one: FsdpTrainer) -> tuple[int, int]:
    memory = one.memory()
    return int(memory["moved_to_host"]), int(memory["moved_to_device"])
