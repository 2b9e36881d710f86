"""Megatron's optimizer on one rank: on the host, after a resume, and without silent bugs of megatron-core 0.16.1."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.training.scenario import (
    MEGATRON,
    WeightedLoss,
    assert_close,
    open_trainer,
    sequences,
    share,
    totals,
    weights,
)
from tests.tiny_models import make_model

# An import here, 3 s of CPU, would be made by every process that collects tests.
pytestmark = pytest.mark.skipif(not find_spec("megatron"), reason="needs megatron-core")
DATA = sequences()
LOSS = WeightedLoss()
HOST = replace(MEGATRON, optimizer_cpu_offload=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(trainer: Any, updates: int) -> list[dict[str, float]]:
    return [trainer.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(updates)]


@pytest.mark.parametrize(
    "section",
    [HOST, replace(HOST, overlap_cpu_optimizer_d2h_h2d=True), replace(HOST, optimizer_offload_fraction=0.5)],
    ids=["whole", "overlapped", "half"],
)
def test_an_optimizer_on_the_host_makes_the_same_updates(section: Any, model: Path, tmp_path: Path) -> None:
    metrics = []
    trained_weights = []
    for megatron in (MEGATRON, section):
        with open_trainer(model, tmp_path, backend="megatron", dtype="bfloat16", megatron=megatron) as trainer:
            metrics.append(train(trainer, 3))
            trained_weights.append(weights(trainer))
    assert_close(metrics[0][-1], metrics[1][-1], atol=1e-6)
    assert_close(trained_weights[0], trained_weights[1], atol=0)


def test_float32_and_an_optimizer_on_the_host_are_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    refusal = pytest.raises(ValueError, match=r"optimizer_cpu_offload needs trainer.dtype=bfloat16")
    with refusal, open_trainer(model, tmp_path, backend="megatron", megatron=HOST):
        pass


@pytest.mark.parametrize("section", [MEGATRON, HOST], ids=["device", "host"])
def test_a_run_goes_on_bit_by_bit_after_save_and_load(section: Any, model: Path, tmp_path: Path) -> None:
    """The float32 weights behind those of bfloat16, the moments and every step count come back.

    Megatron's own loading shares one step count among all parameters, so that an update moves it many times.
    """
    options = {"backend": "megatron", "dtype": "bfloat16", "megatron": section}
    with open_trainer(model, tmp_path, **options) as trainer:
        train(trainer, 2)
        trainer.save(tmp_path / "state")
        expected_metrics = train(trainer, 2)
        expected_weights = weights(trainer)
    with open_trainer(model, tmp_path, **options) as trainer:
        trainer.load(tmp_path / "state")
        assert train(trainer, 2) == expected_metrics
        assert_close(weights(trainer), expected_weights, atol=0)


@pytest.mark.parametrize("section", [MEGATRON, HOST], ids=["device", "host"])
@pytest.mark.parametrize("updates_before", [0, 1])
def test_warming_up_leaves_every_bit_as_it_was(section: Any, updates_before: int, model: Path, tmp_path: Path) -> None:
    metrics = []
    trained_weights = []
    random_states = []
    for is_warmed in (False, True):
        with open_trainer(model, tmp_path, backend="megatron", dtype="bfloat16", megatron=section) as trainer:
            train(trainer, updates_before)
            if is_warmed:
                trainer.warm_up(share(DATA, 64), LOSS)
            metrics.append(train(trainer, 2))
            trained_weights.append(weights(trainer))
            random_states.append(torch.get_rng_state())
    assert metrics[0] == metrics[1]
    assert_close(trained_weights[0], trained_weights[1], atol=0)
    assert torch.equal(random_states[0], random_states[1])


def test_the_emulation_of_a_gpu_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "get_rng_state")}
    with open_trainer(model, tmp_path, backend="megatron"):
        assert torch.zeros((), device="cuda").device.type == "cpu"
    assert before == {name: getattr(torch.cuda, name) for name in before}
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros((), device="cuda")


def test_a_float32_folder_is_not_rounded_and_a_float32_export_gives_it_back(model: Path, tmp_path: Path) -> None:
    """Only the bfloat16 weights are rounded. The main weights, which are updated, saved and exported, are float32."""
    from safetensors.torch import load_file

    with open_trainer(model, tmp_path, backend="megatron", dtype="bfloat16") as trainer:
        trainer.export_folder(tmp_path / "float32", "float32")
        trainer.export_folder(tmp_path / "bfloat16")
    source = load_file(model / "model.safetensors")
    float32_export = load_file(tmp_path / "float32/model.safetensors")
    assert_close(float32_export, {name: source[name] for name in float32_export}, atol=0)
    bfloat16_export = load_file(tmp_path / "bfloat16/model.safetensors")
    assert_close(bfloat16_export, {name: source[name].bfloat16() for name in bfloat16_export}, atol=0)


def test_a_state_that_is_not_there_is_an_ordinary_error(model: Path, tmp_path: Path) -> None:
    llama = make_model(tmp_path / "llama", "llama")
    refusal = pytest.raises(OSError, match="lm_head")
    with open_trainer(model, tmp_path, backend="megatron") as trainer:
        trainer.save(tmp_path / "state")
    with open_trainer(llama, tmp_path, backend="megatron") as trainer, refusal:
        trainer.load(tmp_path / "state")
