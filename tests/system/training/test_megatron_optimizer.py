"""Megatron's optimizers on one rank: on the host, resumed, and without the silent faults of megatron-core 0.16.1."""

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


def train(one: Any, updates: int) -> list[dict[str, float]]:
    return [one.train(share(DATA, 64), LOSS, totals(DATA)) for _ in range(updates)]


@pytest.mark.parametrize(
    "section",
    [HOST, replace(HOST, overlap_cpu_optimizer_d2h_h2d=True), replace(HOST, optimizer_offload_fraction=0.5)],
    ids=["whole", "overlapped", "half"],
)
def test_an_optimizer_on_the_host_makes_the_same_updates(section: Any, model: Path, tmp_path: Path) -> None:
    results = []
    for own in (MEGATRON, section):
        with open_trainer(model, tmp_path, backend="megatron", dtype="bfloat16", megatron=own) as one:
            results.append((train(one, 3), weights(one)))
    assert_close(results[0][0][-1], results[1][0][-1], atol=1e-6)
    assert_close(results[0][1], results[1][1], atol=0)


def test_float32_and_an_optimizer_on_the_host_are_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match=r"optimizer_cpu_offload needs trainer.dtype=bfloat16")
    with refused, open_trainer(model, tmp_path, backend="megatron", megatron=HOST):
        pass


@pytest.mark.parametrize("section", [MEGATRON, HOST], ids=["device", "host"])
def test_a_run_goes_on_bit_by_bit_after_save_and_load(section: Any, model: Path, tmp_path: Path) -> None:
    """The float32 weights behind those of bfloat16, the moments and every step count come back.

    Megatron's own loading shares one step count among all parameters, so that an update moves it many times.
    """
    options = {"backend": "megatron", "dtype": "bfloat16", "megatron": section}
    with open_trainer(model, tmp_path, **options) as one:
        train(one, 2)
        one.save(tmp_path / "state")
        expected = train(one, 2), weights(one)
    with open_trainer(model, tmp_path, **options) as one:
        one.load(tmp_path / "state")
        assert (train(one, 2), True) == (expected[0], True)
        assert_close(weights(one), expected[1], atol=0)


@pytest.mark.parametrize("section", [MEGATRON, HOST], ids=["device", "host"])
@pytest.mark.parametrize("before", [0, 1])
def test_warming_up_leaves_every_bit_as_it_was(section: Any, before: int, model: Path, tmp_path: Path) -> None:
    results = []
    for warm in (False, True):
        with open_trainer(model, tmp_path, backend="megatron", dtype="bfloat16", megatron=section) as one:
            train(one, before)
            if warm:
                one.warm_up(share(DATA, 64), LOSS)
            results.append((train(one, 2), weights(one), torch.get_rng_state()))
    assert results[0][0] == results[1][0]
    assert_close(results[0][1], results[1][1], atol=0)
    assert torch.equal(results[0][2], results[1][2])


def test_the_emulation_of_a_gpu_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    before = {name: getattr(torch.cuda, name) for name in ("current_device", "Stream", "get_rng_state")}
    with open_trainer(model, tmp_path, backend="megatron"):
        assert torch.zeros((), device="cuda").device.type == "cpu"
    assert before == {name: getattr(torch.cuda, name) for name in before}
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros((), device="cuda")


def test_a_float32_folder_is_not_rounded_and_a_float32_export_gives_it_back(model: Path, tmp_path: Path) -> None:
    """Weights of bfloat16 are the rounded ones; those that are updated, saved and exported in float32 are not."""
    from safetensors.torch import load_file

    with open_trainer(model, tmp_path, backend="megatron", dtype="bfloat16") as one:
        one.export_folder(tmp_path / "wide", "float32")
        one.export_folder(tmp_path / "own")
    source, wide, own = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "wide", tmp_path / "own")
    )
    assert_close(wide, {name: source[name] for name in wide}, atol=0)
    assert_close(own, {name: source[name].bfloat16() for name in own}, atol=0)


def test_a_state_that_is_not_there_is_an_ordinary_error(model: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "other", "llama")
    with open_trainer(model, tmp_path, backend="megatron") as one:
        one.save(tmp_path / "state")
    with open_trainer(tmp_path / "other", tmp_path, backend="megatron") as one, pytest.raises(OSError, match="lm_head"):
        one.load(tmp_path / "state")
