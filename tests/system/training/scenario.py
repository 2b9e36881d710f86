"""Helpers of all trainer tests: a loss, sequences, a trainer in this process, and plain loops to compare with."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
import torch.multiprocessing as mp
from numpy.typing import NDArray
from torch import Tensor

from rlctl.config.trainer_schema import OptimizerSection
from rlctl.grpo.losses.base import PolicyLoss, make_loss
from rlctl.models.adapters import AdapterSpec, choose_targets
from rlctl.models.derive import load_facts
from rlctl.preflight.backends.megatron import MegatronSection
from rlctl.preflight.declared_columns import RoleModel
from rlctl.preflight.load import load
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.training.interface import LossNeeds, LossOutput, MicroBatch, TokenBatch, Totals
from rlctl.training.metric_rows import TEACHER_IN_UPDATE
from rlctl.training.micro_batching import TrainingSample, plan_micro_batches, plan_whole_rollouts, rollout_index
from rlctl.training.rank import make_trainer
from rlctl.training.spec import TrainerSpec

TEMPERATURE = 0.8
# A large epsilon makes AdamW smooth in the gradient, so that equal gradients give equal weights.
OPTIMIZER = OptimizerSection(
    name="adamw", lr=1e-2, betas=[0.9, 0.99], eps=1e-2, weight_decay=0.1, max_grad_norm=1.0,
    schedule="linear", warmup_steps=1, min_lr_ratio=0.0,
)  # fmt: skip
MEGATRON = MegatronSection(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, context_parallel_size=1,
    expert_model_parallel_size=1, sequence_parallel=None, fp32_residual_connection=False,
    optimizer_cpu_offload=False, optimizer_offload_fraction=None, overlap_cpu_optimizer_d2h_h2d=False,
)  # fmt: skip
CONFIG = TrainerSettings(
    backend="fsdp", num_ranks=1, replicas=1, micro_batch_tokens=64, dtype="float32", activation_checkpointing=False,
    logprob_chunk_tokens=10, logprob_kept_tokens=20, compile=False, threads=1,
    offload_optimizer_for_logprob=False, offload_optimizer_for_generation=False,
    optimizer=OPTIMIZER, megatron=MEGATRON,
)  # fmt: skip
TOTAL_UPDATES = 10
T = TypeVar("T")


@dataclass(frozen=True)
class WeightedLoss:
    """-sum(advantage * log p) / tokens - 0.1 * sum(entropy) / tokens."""

    entropy: float = 0.1
    needs: ClassVar[LossNeeds] = LossNeeds()

    def __call__(self, batch: TokenBatch) -> LossOutput:
        terms = batch.columns["advantage"] * batch.log_probs + self.entropy * batch.entropy
        loss = -terms[batch.mask].sum()
        max_entropy = torch.where(batch.mask, batch.entropy, 0).max().detach()
        num_trained = torch.tensor(batch.sequence[batch.mask].unique().numel(), device=loss.device)
        means = {
            "train/loss": (loss.detach(), batch.mask.sum()),
            "train/share": (num_trained, torch.full_like(num_trained, batch.num_sequences)),
        }
        return LossOutput(loss, means, {"train/max_entropy": max_entropy})

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens


def whole_rollout_loss() -> PolicyLoss:
    """Return GSPO, which needs all rows of a rollout together, with bounds wide enough for made-up log-probs."""
    run = load("grpo", None, ["grpo.loss={name: gspo, proximal: rollout, clip_low: 0.9, clip_high: 9}"]).settled
    return make_loss(run)


def rollouts_of(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Return the sequences as rollouts with made-up log-probs of a generator. Every other rollout has two rows."""
    rng = np.random.default_rng(len(samples))
    rows = []
    for index, sequence in enumerate(samples):
        log_probs = rng.normal(-4, 0.3, len(sequence)).astype(np.float32)
        columns = {**sequence.columns, "rollout_log_prob": log_probs}
        rows.append(replace(sequence, rollout=index // 3 * 2 + (index % 3 == 2), columns=columns))
    return rows


def train_rollouts(
    trainer: Any, samples: list[TrainingSample], max_tokens: int, rank: int = 0, world: int = 1
) -> dict[str, float]:
    """Make one update with `whole_rollout_loss`."""
    rows = rollouts_of(samples)
    index = rollout_index([row.rollout for row in rows])
    plan = plan_whole_rollouts([len(row) for row in rows], index, world, max_tokens)
    micro_batches = [[rows[row] for row in batch] for batch in plan[rank]]
    counts = replace(totals(rows), rollouts=int(index.max()) + 1)
    metrics: dict[str, float] = trainer.train(micro_batches, whole_rollout_loss(), counts)
    return metrics


def sequences(count: int = 9, vocab: int = 64, seed: int = 0) -> list[TrainingSample]:
    """Return random sequences of 2 to 20 tokens, whose first few tokens are not trained. None has the pad token 0."""
    rng = np.random.default_rng(seed)
    samples = []
    for length in rng.integers(2, 21, count):
        columns = {"advantage": rng.normal(size=length).astype(np.float32)}
        mask = np.arange(length) >= rng.integers(1, length)
        samples.append(TrainingSample(rng.integers(1, vocab, length).astype(np.int32), mask, columns))
    return samples


def totals(samples: list[TrainingSample]) -> Totals:
    num_tokens = sum(sequence.mask.sum() for sequence in samples)
    return Totals(tokens=int(num_tokens), sequences=len(samples), rollouts=len(samples))


def share(samples: list[TrainingSample], max_tokens: int, rank: int = 0, world: int = 1) -> list[MicroBatch]:
    """Distribute the sequences over `world` ranks. Return the micro-batches of rank `rank`."""
    plan = plan_micro_batches([len(sequence) for sequence in samples], world, max_tokens)
    return [[samples[row] for row in batch] for batch in plan[rank]]


def rows_of(micro_batches: Iterable[Iterable[T]]) -> list[T]:
    """Return the rows of all micro-batches in one list."""
    return list(chain.from_iterable(micro_batches))


def tensors_of(log_probs: Iterable[Iterable[NDArray[np.float32]]]) -> list[Tensor]:
    """Return the rows of all micro-batches as tensors, which `torch.load` reads back."""
    return [torch.from_numpy(row) for row in rows_of(log_probs)]


def train_in_parts(
    trainer: Any, samples: list[TrainingSample], max_tokens: int, rank: int = 0, world: int = 1
) -> dict[str, float]:
    """Make one update in three parts, of which the last is empty. Between parts a refit may read the weights."""
    loss = WeightedLoss()
    for part in (samples[:2], samples[2:]):
        trainer.accumulate(share(part, max_tokens, rank, world), loss)
        trainer.shards()
    metrics: dict[str, float] = trainer.train([], loss, totals(samples))
    return metrics


def attempt_nan_updates(
    trainer: Any, samples: list[TrainingSample], max_tokens: int, rank: int = 0, world: int = 1
) -> dict[str, Any]:
    """Try an update in one part and one in several, with a NaN in the generator's log-probs. The gradient stays finite.

    Return the errors of the updates, and the weights before and after.
    """
    loss = make_loss(load("grpo", None, []).settled)
    poisoned = []
    for index, sequence in enumerate(samples):
        log_probs = np.where(sequence.mask & (index == 0), np.nan, -1.0).astype(np.float32)
        poisoned.append(replace(sequence, columns={**sequence.columns, "rollout_log_prob": log_probs}))
    before = weights(trainer)
    errors = []
    for in_parts in (False, True):
        if in_parts:
            trainer.accumulate(share(poisoned[:2], max_tokens, rank, world), loss)
        last_part = poisoned[2:] if in_parts else poisoned
        try:
            trainer.train(share(last_part, max_tokens, rank, world), loss, totals(samples))
        except FloatingPointError as error:
            errors.append(str(error))
    return {"before": before, "errors": errors, "after": weights(trainer)}


def run_ranks(function: Callable[[int, Path], None], folder: Path, count: int) -> None:
    """Run `function(rank, folder)` in `count` processes, forked from one that has imported torch: 3 s of CPU a rank."""
    mp.spawn(_fork_ranks, (function, folder, count), nprocs=1)


def _fork_ranks(_: int, function: Callable[[int, Path], None], folder: Path, count: int) -> None:
    mp.start_processes(function, (folder,), nprocs=count, start_method="fork")


@contextmanager
def open_trainer(
    model: Path,
    folder: Path,
    rank: int = 0,
    world: int = 1,
    device: str = "cpu",
    reference: Path | None = None,
    adapters: AdapterSpec | None = None,
    adapter: Path | None = None,
    teacher: RoleModel | None = None,
    **options: Any,
) -> Iterator[Any]:
    """Open a trainer in this process; `folder` holds the rendezvous file, options replace CONFIG's.

    reference: folder of that role's model, `model` unless given. teacher: a further role. adapter: folder of the
    adapters' first values.
    """
    meeting = folder / "meeting-shared"
    if world == 1:
        meeting = folder / f"meeting-{len(list(folder.glob('meeting*')))}"
    config = replace(CONFIG, adapters=adapters, **options)
    roles = {"reference": RoleModel(str(reference or model))}
    if teacher:
        roles["teacher"] = teacher
    trainer: Any = make_trainer(
        TrainerSpec(
            config=config, model_path=str(model), tokenizer_path=str(model), rank=rank, world=world,
            init_method=f"file://{meeting}", device=device, temperature=TEMPERATURE, total_updates=TOTAL_UPDATES,
            seed=0, profile=None, roles=roles,
            adapter_folder=str(adapter) if adapter else None,
        )
    )  # fmt: skip
    try:
        yield trainer
    finally:
        trainer.close()


def adapters_of(model: Path, rank: int = 4, dropout: float = 0.0, targets: str | list[str] = "all") -> AdapterSpec:
    """Return the spec of adapters for a model, with scale 2."""
    chosen, problems = choose_targets(load_facts(model).sizes.linears, targets)
    assert not problems
    return AdapterSpec(rank, alpha=2.0 * rank, rslora=False, dropout=dropout, targets=chosen)


def assert_compiled_trains_alike(model: Path, folder: Path, samples: list[TrainingSample], **options: Any) -> None:
    """Assert that training is equal with and without compilation, on micro-batches of many shapes as in a run.

    Between updates there are passes without gradient.
    """
    log_probs: list[list[NDArray[np.float32]]] = []
    metrics = []
    exported = []
    for is_compiled in (False, True):
        meeting_folder = folder / f"compiled-{is_compiled}"
        meeting_folder.mkdir(exist_ok=True)
        with (
            torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
            open_trainer(model, meeting_folder, compile=is_compiled, **options) as trainer,
        ):
            passes = [trainer.log_probs(share(samples, max_tokens)) for max_tokens in (30, 64)]
            log_probs.append(rows_of(chain.from_iterable(passes)))
            updates = (share(samples, max_tokens) for max_tokens in (20, 45, 64))
            metrics.append([trainer.train(micro_batches, WeightedLoss(), totals(samples)) for micro_batches in updates])
            exported.append(weights(trainer))
    for eager_row, compiled_row in zip(*log_probs):
        np.testing.assert_allclose(eager_row, compiled_row, atol=1e-5)
    for eager_metrics, compiled_metrics in zip(*metrics):
        assert_close(eager_metrics, compiled_metrics, atol=1e-5)
    assert_close(exported[0], exported[1], atol=1e-5)


def weights(trainer: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.export()}


def plain_log_probs(lm: Any, sequence: TrainingSample) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [T - 1] of all tokens but the first of a sequence, from transformers' logits."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    log_p = (lm(tokens[None], use_cache=False).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, tokens[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_loss(lm: Any, samples: list[TrainingSample]) -> Tensor:
    """Compute WeightedLoss one sequence at a time."""
    loss = torch.zeros(())
    for sequence in samples:
        log_probs, entropy = plain_log_probs(lm, sequence)
        advantage = torch.from_numpy(sequence.columns["advantage"][1:])
        mask = torch.from_numpy(sequence.mask[1:])
        loss = loss - (advantage * log_probs + 0.1 * entropy)[mask].sum()
    return loss / totals(samples).tokens


def assert_close(got: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    """Assert that values are equal by name within `atol`, relative for values above 1. Seconds are not compared."""
    names = got.keys() - {TEACHER_IN_UPDATE.name}
    assert names == expected.keys() - {TEACHER_IN_UPDATE.name}
    for name in names:
        torch.testing.assert_close(
            torch.as_tensor(got[name]),
            torch.as_tensor(expected[name]),
            atol=atol,
            rtol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_refused(results: dict[str, Any]) -> None:
    """Assert that both updates of `attempt_nan_updates` were refused only for the loss, and changed no weight."""
    assert results["errors"] == ["the loss is nan; the weights were left as they were"] * 2
    assert_close(results["after"], results["before"], atol=0)
