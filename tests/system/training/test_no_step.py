"""Updates that make no optimizer step: discarded, failed or empty, with a loss that is not finite, or gradient 0."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from rlctl.training.interface import LossOutput, TokenBatch, Totals
from rlctl.training.update import learning_rate
from tests.system.training.scenario import (
    OPTIMIZER,
    TOTAL_UPDATES,
    WeightedLoss,
    assert_close,
    assert_refused,
    attempt_nan_updates,
    open_trainer,
    sequences,
    share,
    totals,
    weights,
)
from tests.tiny_models import make_model

DATA = sequences()
LOSS = WeightedLoss()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def test_discarded_parts_leave_nothing_behind(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path) as trainer:
        expected_metrics = trainer.train(share(DATA, 64), LOSS, totals(DATA))
        expected_weights = weights(trainer)
    with open_trainer(model, tmp_path) as trainer:
        trainer.accumulate(share(DATA[:4], 64), LOSS)
        trainer.discard()
        assert trainer.train(share(DATA, 64), LOSS, totals(DATA)) == expected_metrics
        assert_close(weights(trainer), expected_weights, atol=0)


@dataclass(frozen=True)
class FailingLoss(WeightedLoss):
    def __call__(self, batch: TokenBatch) -> LossOutput:
        if 7 in batch.columns["advantage"]:
            raise KeyError("seven")
        return super().__call__(batch)


def test_an_update_that_fails_halfway_leaves_nothing_behind(model: Path, tmp_path: Path) -> None:
    failing_sample = replace(DATA[0], columns={"advantage": np.full_like(DATA[0].columns["advantage"], 7)})
    with open_trainer(model, tmp_path) as trainer:
        expected_metrics = trainer.train([DATA], LOSS, totals(DATA))
    with open_trainer(model, tmp_path) as trainer:
        with pytest.raises(KeyError, match="seven"):
            trainer.train([DATA[1:], [failing_sample]], FailingLoss(), totals(DATA))
        assert trainer.train([DATA], LOSS, totals(DATA)) == expected_metrics


@dataclass(frozen=True)
class ExplodingLoss(WeightedLoss):
    def __call__(self, batch: TokenBatch) -> LossOutput:
        return LossOutput(batch.log_probs.sum() * float("inf"))


@pytest.mark.parametrize(("backend", "first_name"), [("fsdp", r"model\.embed_t"), ("megatron", r"embedding\.word")])
def test_a_gradient_that_is_not_finite_stops_the_update(
    backend: str, first_name: str, model: Path, tmp_path: Path
) -> None:
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    message = rf"loss is -inf and the gradient norm is nan \(first in {first_name}"
    with open_trainer(model, tmp_path, backend=backend) as trainer:
        before = weights(trainer)
        with pytest.raises(FloatingPointError, match=message):
            trainer.train([DATA], ExplodingLoss(), totals(DATA))
        assert_close(weights(trainer), before, atol=0)
        trainer.train([DATA], LOSS, totals(DATA))


def test_a_loss_that_is_not_finite_stops_it_though_the_gradient_is(model: Path, tmp_path: Path) -> None:
    with open_trainer(model, tmp_path) as trainer:
        assert_refused(attempt_nan_updates(trainer, DATA, 64))
        trainer.train([DATA], LOSS, totals(DATA))


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_an_update_of_nothing_makes_no_step(backend: str, model: Path, tmp_path: Path) -> None:
    """Update without micro-batches, and without a trained token. A step of AdamW would still decay the weights."""
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    silent = [replace(sample, mask=np.zeros_like(sample.mask)) for sample in DATA]
    with open_trainer(model, tmp_path, backend=backend) as trainer:
        before = weights(trainer)
        assert trainer.train([], LOSS, Totals(0, 0, 0)) == {}
        assert trainer.train([silent], LOSS, totals(silent)) == {}
        assert_close(weights(trainer), before, atol=0)
        assert trainer.train([DATA], LOSS, totals(DATA))["train/lr"] == learning_rate(0, OPTIMIZER, TOTAL_UPDATES)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_gradient_of_exactly_zero_makes_no_step(backend: str, model: Path, tmp_path: Path) -> None:
    """A step would move the weights by momentum and decay. Later updates are as if this update had not been tried."""
    if backend == "megatron":
        pytest.importorskip("megatron.core")
    flat = [replace(sample, columns={"advantage": np.zeros_like(sample.columns["advantage"])}) for sample in DATA]
    metrics = []
    trained_weights = []
    for way in ("plain", "flat", "resumed"):
        with open_trainer(model, tmp_path, backend=backend) as trainer:
            trainer.train(share(DATA, 64), LOSS, totals(DATA))
            if way != "plain":
                before = weights(trainer)
                flat_metrics = trainer.train(share(flat, 64), WeightedLoss(entropy=0.0), totals(flat))
                assert flat_metrics["train/grad_norm"] == flat_metrics["train/loss"] == 0
                assert "train/lr" not in flat_metrics
                assert_close(weights(trainer), before, atol=0)
            trainer.save(tmp_path / way)
            if way != "resumed":
                metrics.append(trainer.train(share(DATA, 64), LOSS, totals(DATA)))
                trained_weights.append(weights(trainer))
    with open_trainer(model, tmp_path, backend=backend) as trainer:
        trainer.load(tmp_path / "resumed")
        metrics.append(trainer.train(share(DATA, 64), LOSS, totals(DATA)))
        trained_weights.append(weights(trainer))
    assert metrics[0] == metrics[1] == metrics[2]
    assert_close(trained_weights[1], trained_weights[0], atol=0)
    assert_close(trained_weights[2], trained_weights[0], atol=0)
