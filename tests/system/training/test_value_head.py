"""A model with a value head gives transformers' outputs for each token, trains, and is saved as it was read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.config.errors import ModelError
from rlctl.models.derive import derive_facts
from rlctl.models.value_folder import write_value_folder
from rlctl.preflight.backends.megatron import BACKEND
from rlctl.preflight.declared_columns import RoleModel
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals
from rlctl.training.micro_batching import TrainingSample
from tests.system.training.scenario import (
    CONFIG,
    WeightedLoss,
    assert_close,
    open_trainer,
    rows_of,
    run_ranks,
    sequences,
    share,
    tensors_of,
    totals,
    weights,
)
from tests.zoo import make_family

DATA = sequences()
CLASSES = ("AutoModelForTokenClassification", "AutoModelForSequenceClassification")


@dataclass(frozen=True)
class SquaredLoss:
    """sum((value - advantage)^2) / tokens."""

    needs: ClassVar[LossNeeds] = LossNeeds()

    def __call__(self, batch: TokenBatch) -> LossOutput:
        assert batch.values is not None
        squares = (batch.values - batch.columns["advantage"]) ** 2
        loss = squares[batch.mask].sum()
        return LossOutput(loss, {"train/loss": (loss.detach(), batch.mask.sum())})

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens


def make_value_model(folder: Path, family: str, head: str = CLASSES[0], **options: Any) -> Path:
    """Write a random classifier with one label by transformers alone."""
    import transformers

    source = make_family(folder.with_name(f"{folder.name}-lm"), family)
    config = transformers.AutoConfig.from_pretrained(source)
    for key, setting in {"num_labels": 1, **options}.items():
        setattr(config, key, setting)
    torch.manual_seed(3)
    model = getattr(transformers, head).from_pretrained(source, config=config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("score", "classifier")):
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def load_plain(folder: Path, head: str = CLASSES[0]) -> Any:
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return getattr(transformers, head).from_pretrained(folder, **options).eval()


def plain_values(model: Any, sample: TrainingSample) -> Tensor:
    """Return the head's output at each token of a sequence alone."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    base = getattr(model, model.base_model_prefix)
    hidden = base(tokens[None], use_cache=False).last_hidden_state[0]
    head = model.score if hasattr(model, "score") else model.classifier
    outputs: Tensor = head(hidden)[:, 0]
    return outputs


def plain_loss(model: Any, samples: list[TrainingSample]) -> Tensor:
    loss = torch.zeros(())
    for sample in samples:
        before = plain_values(model, sample)[:-1]
        squares = (before - torch.from_numpy(sample.columns["advantage"][1:])) ** 2
        loss = loss + squares[torch.from_numpy(sample.mask[1:])].sum()
    return loss / totals(samples).tokens


@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("qwen3", CLASSES[0]),
        ("qwen3", CLASSES[1]),
        pytest.param("qwen3_moe", CLASSES[0], marks=pytest.mark.long),
        pytest.param("gpt2", CLASSES[0], marks=pytest.mark.long),
        pytest.param("llama", CLASSES[1], marks=pytest.mark.long),
    ],
)
def test_packed_values_are_those_of_each_sequence_alone(family: str, head: str, tmp_path: Path) -> None:
    folder = make_value_model(tmp_path / "m", family, head)
    model = load_plain(folder, head)
    with open_trainer(folder, tmp_path) as trainer, torch.no_grad():
        [first_rows, no_rows, last_rows] = trainer.values([DATA[:5], [], DATA[5:]])
        assert no_rows == []
        for sample, row in zip(DATA, first_rows + last_rows, strict=True):
            np.testing.assert_allclose(row, plain_values(model, sample).numpy(), atol=2e-5)


def test_the_last_value_is_the_score_of_a_reward_model(tmp_path: Path) -> None:
    folder = make_value_model(tmp_path / "m", "qwen3", CLASSES[1])
    model = load_plain(folder, CLASSES[1])
    with open_trainer(folder, tmp_path) as trainer, torch.no_grad():
        for sample, row in zip(DATA, trainer.values([DATA])[0], strict=True):
            score = model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits.item()
            assert row[-1] == pytest.approx(score, abs=2e-5)


def test_a_resident_value_model_values_beside_a_causal_policy(tmp_path: Path) -> None:
    policy = make_family(tmp_path / "policy", "qwen3")
    folder = make_value_model(tmp_path / "m", "llama")
    with open_trainer(folder, tmp_path) as trainer:
        expected = rows_of(trainer.values(share(DATA, 64)))
    with open_trainer(policy, tmp_path, teacher=RoleModel(str(folder), "resident")) as trainer:
        for row, expected_row in zip(rows_of(trainer.values(share(DATA, 64), "teacher")), expected, strict=True):
            np.testing.assert_array_equal(row, expected_row)
        with pytest.raises(ValueError, match="Qwen3ForCausalLM has no value head"):
            trainer.values(share(DATA, 64))


def test_an_update_is_that_of_plain_torch(tmp_path: Path) -> None:
    folder = make_value_model(tmp_path / "m", "qwen3")
    model = load_plain(folder)
    loss = plain_loss(model, DATA)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with open_trainer(folder, tmp_path) as trainer:
        before = weights(trainer)
        metrics = trainer.train(share(DATA, 64), SquaredLoss(), totals(DATA))
        moved = {name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])}
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)
    assert moved == set(before) >= {"score.weight", "score.bias"}


def test_a_resumed_value_model_trains_on_to_the_last_bit_and_its_export_is_transformers_own(tmp_path: Path) -> None:
    folder = make_value_model(tmp_path / "m", "qwen3")
    with open_trainer(folder, tmp_path) as trainer:
        trainer.train(share(DATA, 64), SquaredLoss(), totals(DATA))
        trainer.save(tmp_path / "saved")
        trainer.export_folder(tmp_path / "export")
        values = rows_of(trainer.values([DATA]))
        trainer.train(share(DATA, 64), SquaredLoss(), totals(DATA))
        expected = weights(trainer)
    with open_trainer(folder, tmp_path) as trainer:
        trainer.load(tmp_path / "saved")
        trainer.train(share(DATA, 64), SquaredLoss(), totals(DATA))
        assert_close(weights(trainer), expected, atol=0)
    model = load_plain(tmp_path / "export")
    with torch.no_grad():
        for sample, row in zip(DATA, values, strict=True):
            np.testing.assert_allclose(row, plain_values(model, sample).numpy(), atol=2e-5)


def _train_rank(rank: int, folder: Path) -> None:
    with open_trainer(folder / "m", folder, rank, 2, num_ranks=2) as trainer:
        metrics = trainer.train(share(DATA, 64, rank, 2), SquaredLoss(), totals(DATA))
        found = {"metrics": metrics, "values": tensors_of(trainer.values(share(DATA, 64, rank, 2)))}
        torch.save(found | {"weights": weights(trainer)}, folder / f"rank-{rank}.pt")


@pytest.mark.long
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    folder = make_value_model(tmp_path / "m", "qwen3")
    run_ranks(_train_rank, tmp_path, 2)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1)]
    with open_trainer(folder, tmp_path / "m") as trainer:
        metrics = trainer.train(share(DATA, 64), SquaredLoss(), totals(DATA))
        for rank, found in enumerate(ranks):
            expected = tensors_of(trainer.values(share(DATA, 64, rank, 2)))
            assert_close(dict(enumerate(found["values"])), dict(enumerate(expected)), atol=1e-5)  # type: ignore[arg-type]
            assert_close(found["weights"], weights(trainer), atol=1e-5)
            assert_close(found["metrics"], metrics, atol=1e-5)


_LONG_FAMILIES = [pytest.param(family, marks=pytest.mark.long) for family in ("qwen3_moe", "gpt2")]


@pytest.mark.parametrize("family", ["qwen3", *_LONG_FAMILIES])
def test_a_value_model_is_made_of_a_causal_lm(family: str, tmp_path: Path) -> None:
    source = make_family(tmp_path / "lm", family)
    write_value_folder(source, tmp_path / "zero", seed=0)
    write_value_folder(source, tmp_path / "drawn", seed=1, std=0.1)
    write_value_folder(tmp_path / "drawn", tmp_path / "again", seed=2, std=0.1)
    facts = derive_facts(tmp_path / "zero")
    assert facts.architecture.endswith("ForTokenClassification") and facts.sizes.head_kind == "value"
    with open_trainer(tmp_path / "zero", tmp_path) as trainer:
        assert not np.concatenate(rows_of(trainer.values([DATA]))).any()
        before = weights(trainer)
    with open_trainer(source, tmp_path) as trainer:
        shared = {name: tensor for name, tensor in weights(trainer).items() if name in before}
        assert len(shared) >= len(before) - 2
        assert_close({name: before[name] for name in shared}, shared, atol=0)
    model = load_plain(tmp_path / "drawn")
    for folder in (tmp_path / "drawn", tmp_path / "again"):
        with open_trainer(folder, tmp_path) as trainer, torch.no_grad():
            for sample, row in zip(DATA, rows_of(trainer.values([DATA])), strict=True):
                np.testing.assert_allclose(row, plain_values(model, sample).numpy(), atol=2e-5)


def test_a_critic_may_begin_with_the_weights_of_a_reward_model(tmp_path: Path) -> None:
    source = make_value_model(tmp_path / "m", "llama", CLASSES[1])
    write_value_folder(source, tmp_path / "critic", seed=0)
    model = load_plain(source, CLASSES[1])
    with open_trainer(tmp_path / "critic", tmp_path) as trainer, torch.no_grad():
        for sample, row in zip(DATA, trainer.values([DATA])[0], strict=True):
            np.testing.assert_allclose(row, plain_values(model, sample).numpy(), atol=2e-5)


def test_what_has_no_value_head_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = make_value_model(tmp_path / "m", "qwen3", num_labels=2)
    with pytest.raises(ModelError, match="Qwen3ForTokenClassification has 2 labels; a value head has one"):
        derive_facts(folder)
    sizes = derive_facts(make_value_model(tmp_path / "one", "qwen3")).sizes
    [violation] = BACKEND.check_model(CONFIG, sizes)
    assert violation.message == "megatron trains no model with a value head; use trainer.backend=fsdp"


def test_a_loss_of_log_probs_gets_zeros(tmp_path: Path) -> None:
    folder = make_value_model(tmp_path / "m", "qwen3")
    with open_trainer(folder, tmp_path) as trainer:
        assert trainer.evaluate(share(DATA, 64), WeightedLoss())["train/loss"] == 0
