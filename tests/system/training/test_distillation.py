"""Divergences from a teacher in a trainer rank: equal to plain transformers' logits, for any pack, part and rank."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.config.role_schema import DistillationSection
from rlctl.models.vocabulary import count_tokens
from rlctl.preflight.declared_columns import TEACHER_TOP, RoleModel
from rlctl.training.divergence import Divergence
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.trainer_worker import RankBatch
from tests.system.training.scenario import (
    TEMPERATURE,
    adapters_of,
    assert_close,
    open_trainer,
    run_ranks,
    sequences,
    share,
    totals,
    weights,
)
from tests.tiny_models import make_model

DATA = sequences(7, seed=4)
OVER_VOCABULARY = DistillationSection(
    coef=1.0,
    over="vocabulary",
    divergence="reverse_kl",
    beta=0.3,
    num_top_tokens=5,
    rest="bin",
    log_ratio_floor=-10.0,
)
OVER_TOP = replace(OVER_VOCABULARY, over="top_k", divergence="forward_kl")


@dataclass(frozen=True)
class DivergenceLoss:
    """Mean divergence of the masked tokens."""

    section: DistillationSection

    @property
    def needs(self) -> LossNeeds:
        return LossNeeds(divergence=self.section)

    def __call__(self, batch: TokenBatch) -> LossOutput:
        assert batch.divergence is not None and not batch.divergence[~batch.mask].any()
        loss = batch.divergence.sum()
        return LossOutput(loss, {"divergence": (loss.detach(), batch.mask.sum())})

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a student, a teacher of its architecture, and one of another with another width; all with padding.

    The tokenizer has 75 tokens, the heads have 80 and 96.
    """
    folder = tmp_path_factory.mktemp("distilled")
    make_model(folder / "student", vocab=80)
    make_model(folder / "equal", vocab=80, seed=1)
    make_model(folder / "other", "llama", vocab=96, hidden=96, heads=3, kv_heads=1, layers=3, seed=2)
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load_plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def plain_divergence(student: Any, teacher: Any, section: DistillationSection, vocab: int) -> Tensor:
    """Return the mean divergence of DATA, one sequence at a time, from all logits."""
    total = torch.zeros(())
    divergence = Divergence(section.divergence, section.beta)
    for sample in DATA:
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        log_p, log_q = (
            (lm(tokens, use_cache=False).logits[0, :-1, :vocab].float() / TEMPERATURE).log_softmax(-1)
            for lm in (student, teacher)
        )
        if section.over == "top_k":
            ids = log_q.topk(section.num_top_tokens).indices
            log_p, log_q = (
                torch.cat((all_of.gather(1, ids), all_of.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)), -1)
                for all_of in (log_p, log_q)
            )
        total = total + divergence.measure(log_p, log_q)[torch.from_numpy(sample.mask[1:])].sum()
    return total / totals(DATA).tokens


def train(
    models: Path, folder: Path, teacher: str, place: Any, section: DistillationSection, max_tokens: int, **options: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Make one update; return its metrics, and the weights after it."""
    role = RoleModel(str(models / teacher), place)
    with open_trainer(models / "student", folder, teacher=role, **options) as trainer:
        metrics = trainer.train(share(DATA, max_tokens), DivergenceLoss(section), totals(DATA))
        return metrics, weights(trainer)


TEACHERS = [("equal", "resident"), ("equal", "swapped"), ("other", "resident")]
SECTIONS = {
    "reverse": OVER_VOCABULARY,
    "forward": replace(OVER_VOCABULARY, divergence="forward_kl"),
    "js": replace(OVER_VOCABULARY, divergence="jensen_shannon"),
    "top": OVER_TOP,
}


@pytest.mark.parametrize(("teacher", "place"), TEACHERS)
@pytest.mark.parametrize("name", SECTIONS)
def test_values_and_gradients_are_those_of_plain_logits(
    models: Path, tmp_path: Path, teacher: str, place: str, name: str
) -> None:
    student = load_plain(models / "student")
    with torch.no_grad():
        plain_teacher = load_plain(models / teacher).requires_grad_(False)
    vocab = count_tokens(models / "student")
    assert vocab == 75
    expected = plain_divergence(student, plain_teacher, SECTIONS[name], vocab)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in student.parameters()])
    metrics, trained = train(models, tmp_path, teacher, place, SECTIONS[name], 24)
    assert metrics["divergence"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    # The teacher's weights are not left in the policy's place: a pack of another size trains to the same weights.
    _, whole = train(models, tmp_path, teacher, place, SECTIONS[name], 200)
    assert_close(trained, whole, atol=1e-5)


@pytest.mark.parametrize(("teacher", "place"), TEACHERS)
def test_an_update_in_parts_and_an_evaluation_have_the_values_of_a_whole_one(
    models: Path, tmp_path: Path, teacher: str, place: Any
) -> None:
    loss = DivergenceLoss(OVER_VOCABULARY)
    expected_metrics, expected_weights = train(models, tmp_path, teacher, place, OVER_VOCABULARY, 64)
    with open_trainer(models / "student", tmp_path, teacher=RoleModel(str(models / teacher), place)) as trainer:
        trainer.warm_up(share(DATA, 40), loss)
        evaluated = trainer.evaluate(share(DATA, 30), loss)
        for part in (DATA[:2], DATA[2:], []):
            trainer.accumulate(share(part, 24), loss)
            trainer.shards()
        metrics = trainer.train([], loss, totals(DATA))
        assert_close(metrics, expected_metrics, atol=1e-5)
        assert evaluated["divergence"] == pytest.approx(metrics["divergence"], rel=1e-5)
        assert_close(weights(trainer), expected_weights, atol=1e-5)


@pytest.mark.parametrize(("teacher", "place"), TEACHERS)
def test_adapters_are_distilled_below_a_frozen_head(models: Path, tmp_path: Path, teacher: str, place: Any) -> None:
    """Adapters begin at 0: the student is its base, whose divergence plain logits know."""
    spec = adapters_of(models / "student")
    metrics, trained = train(models, tmp_path, teacher, place, OVER_VOCABULARY, 24, adapters=spec)
    with torch.no_grad():
        student, plain_teacher = (load_plain(models / name) for name in ("student", teacher))
        expected = plain_divergence(student, plain_teacher, OVER_VOCABULARY, 75)
    assert metrics["divergence"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["train/grad_norm"] > 0
    _, whole = train(models, tmp_path, teacher, place, OVER_VOCABULARY, 200, adapters=spec)
    assert_close(trained, whole, atol=1e-5)


def add_top(sample: TrainingSample, teacher: Any) -> TrainingSample:
    """Return the sample with the likeliest tokens of a teacher, as engines give them."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    with torch.no_grad():
        log_q = (teacher(tokens, use_cache=False).logits[0, :-1, :75].float() / TEMPERATURE).log_softmax(-1)
    log_probs, ids = log_q.topk(OVER_TOP.num_top_tokens)
    column = np.zeros((len(sample), OVER_TOP.num_top_tokens, 2), np.float32)
    column[1:] = torch.stack((ids.float(), log_probs), -1)
    return replace(sample, columns={**sample.columns, TEACHER_TOP.name: column})


def test_likeliest_tokens_of_engines_are_distilled_as_those_of_the_rank(models: Path, tmp_path: Path) -> None:
    expected_metrics, expected_weights = train(models, tmp_path, "other", "resident", OVER_TOP, 24)
    teacher = load_plain(models / "other")
    samples = [add_top(sample, teacher) for sample in DATA]
    with open_trainer(models / "student", tmp_path) as trainer:
        batch = RankBatch.from_micro_batches([*share(samples, 24), []])
        metrics = trainer.train(batch.micro_batches(), DivergenceLoss(OVER_TOP), totals(DATA))
        assert_close(metrics, expected_metrics, atol=1e-5)
        assert_close(weights(trainer), expected_weights, atol=1e-5)


def test_a_rank_without_a_teacher_refuses_a_divergence(models: Path, tmp_path: Path) -> None:
    with (
        open_trainer(models / "student", tmp_path) as trainer,
        pytest.raises(ValueError, match="the trainer has no teacher: its roles are policy, reference"),
    ):
        trainer.train(share(DATA, 24), DivergenceLoss(OVER_VOCABULARY), totals(DATA))


def run_group(rank: int, folder: Path) -> None:
    """Be one of two ranks for each teacher, and write the rank's results."""
    for teacher, place in TEACHERS:
        role = RoleModel(str(folder / teacher), place)  # type: ignore[arg-type]
        group = folder / f"{teacher}-{place}"
        with open_trainer(folder / "student", group, rank, 2, teacher=role) as trainer:
            results: dict[str, Any] = {}
            for name, section in (("whole", OVER_VOCABULARY), ("top", OVER_TOP)):
                loss = DivergenceLoss(section)
                results[name] = trainer.train(share(DATA, 24, rank, 2), loss, totals(DATA)), weights(trainer)
            # All sequences are on rank 1. Rank 0 has an empty micro-batch.
            lopsided = trainer.train([[]] if rank == 0 else [DATA], DivergenceLoss(OVER_VOCABULARY), totals(DATA))
            results["lopsided"] = lopsided, weights(trainer)
            torch.save(results, group / f"rank-{rank}.pt")


def test_two_ranks_distil_as_one_does(models: Path, tmp_path: Path) -> None:
    for teacher, place in TEACHERS:
        (models / f"{teacher}-{place}").mkdir()
    run_ranks(run_group, models, 2)
    for teacher, place in TEACHERS:
        role = RoleModel(str(models / teacher), place)  # type: ignore[arg-type]
        with open_trainer(models / "student", tmp_path, teacher=role) as trainer:
            expected = {}
            for name, section in (("whole", OVER_VOCABULARY), ("top", OVER_TOP), ("lopsided", OVER_VOCABULARY)):
                metrics = trainer.train(share(DATA, 64), DivergenceLoss(section), totals(DATA))
                expected[name] = metrics, weights(trainer)
        for rank in (0, 1):
            results = torch.load(models / f"{teacher}-{place}" / f"rank-{rank}.pt")
            for name, (expected_metrics, expected_weights) in expected.items():
                metrics, trained = results[name]
                assert_close(metrics, expected_metrics, atol=2e-5)
                assert_close(trained, expected_weights, atol=2e-5)


@pytest.mark.long  # It compiles.
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(("teacher", "place"), TEACHERS)
def test_compiled_ranks_distil_alike(models: Path, tmp_path: Path, teacher: str, place: Any) -> None:
    torch.compiler.reset()
    eager_metrics, eager_weights = train(models, tmp_path, teacher, place, OVER_VOCABULARY, 24)
    metrics, trained = train(models, tmp_path, teacher, place, OVER_VOCABULARY, 24, compile=True)
    assert_close(metrics, eager_metrics, atol=1e-4)
    assert_close(trained, eager_weights, atol=1e-4)
