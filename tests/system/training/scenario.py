"""Shared parts of the trainer tests: a loss, sequences, a trainer in this process, plain loops to compare with."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.multiprocessing as mp
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


@dataclass(frozen=True)
class WeightedLoss:
    """-sum(advantage * log p) / tokens - 0.1 * sum(entropy) / tokens."""

    entropy: float = 0.1
    needs: ClassVar[LossNeeds] = LossNeeds()

    def __call__(self, batch: TokenBatch) -> LossOutput:
        terms = batch.columns["advantage"] * batch.log_probs + self.entropy * batch.entropy
        loss = -terms[batch.mask].sum()
        highest = torch.where(batch.mask, batch.entropy, 0).max().detach()
        trained = torch.tensor(batch.sequence[batch.mask].unique().numel(), device=loss.device)
        share = trained, torch.full_like(trained, batch.num_sequences)
        means = {"train/loss": (loss.detach(), batch.mask.sum()), "train/share": share}
        return LossOutput(loss, means, {"train/max_entropy": highest})

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens


def whole_rollout_loss() -> PolicyLoss:
    """GSPO with bounds wide enough for made-up log-probs: a loss that reads all rows of a rollout together."""
    run = load("grpo", None, ["grpo.loss={name: gspo, proximal: rollout, clip_low: 0.9, clip_high: 9}"]).settled
    return make_loss(run)


def rollouts_of(data: list[TrainingSample]) -> list[TrainingSample]:
    """Make rollouts of the sequences, every other one of two rows, with log-probs of a generator."""
    rng = np.random.default_rng(len(data))
    return [
        replace(
            one,
            rollout=index // 3 * 2 + (index % 3 == 2),
            columns={**one.columns, "rollout_log_prob": rng.normal(-4, 0.3, len(one)).astype(np.float32)},
        )
        for index, one in enumerate(data)
    ]


def train_rollouts(
    one: Any, data: list[TrainingSample], max_tokens: int, rank: int = 0, world: int = 1
) -> dict[str, float]:
    """Make one update of `whole_rollout_loss`."""
    rows = rollouts_of(data)
    index = rollout_index([row.rollout for row in rows])
    plan = plan_whole_rollouts([len(row) for row in rows], index, world, max_tokens)
    mine = [[rows[row] for row in batch] for batch in plan[rank]]
    counts = replace(totals(rows), rollouts=int(index.max()) + 1)
    metrics: dict[str, float] = one.train(mine, whole_rollout_loss(), counts)
    return metrics


def sequences(count: int = 9, vocab: int = 64, seed: int = 0) -> list[TrainingSample]:
    """Make sequences of 2 to 20 tokens, the first few masked; no token is the pad token (0)."""
    rng = np.random.default_rng(seed)
    made = []
    for length in rng.integers(2, 21, count):
        fields = {"advantage": rng.normal(size=length).astype(np.float32)}
        mask = np.arange(length) >= rng.integers(1, length)
        made.append(TrainingSample(rng.integers(1, vocab, length).astype(np.int32), mask, fields))
    return made


def totals(data: list[TrainingSample]) -> Totals:
    return Totals(tokens=int(sum(s.mask.sum() for s in data)), sequences=len(data), rollouts=len(data))


def share(data: list[TrainingSample], max_tokens: int, rank: int = 0, world: int = 1) -> list[MicroBatch]:
    plan = plan_micro_batches([len(s) for s in data], world, max_tokens)
    return [[data[i] for i in batch] for batch in plan[rank]]


def train_in_parts(
    one: Any, data: list[TrainingSample], max_tokens: int, rank: int = 0, world: int = 1
) -> dict[str, float]:
    """Make one update in three parts, the last empty; between them engines may ask for the weights."""
    loss = WeightedLoss()
    for part in (data[:2], data[2:]):
        one.accumulate(share(part, max_tokens, rank, world), loss)
        one.shards()
    metrics: dict[str, float] = one.train([], loss, totals(data))
    return metrics


def refused(one: Any, data: list[TrainingSample], max_tokens: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Update on a NaN among the generator's log-probs, which leaves the gradient finite, whole and in parts. Returns
    the errors of the updates, and the weights before and after.
    """
    loss, poisoned = make_loss(load("grpo", None, []).settled), []
    for index, sequence in enumerate(data):
        behaviour = np.where(sequence.mask & (index == 0), np.nan, -1.0).astype(np.float32)
        poisoned.append(replace(sequence, columns={**sequence.columns, "rollout_log_prob": behaviour}))
    mine, first, last = (share(part, max_tokens, rank, world) for part in (poisoned, poisoned[:2], poisoned[2:]))
    seen: dict[str, Any] = {"before": weights(one), "said": []}
    for in_parts in (False, True):
        if in_parts:
            one.accumulate(first, loss)
        try:
            one.train(last if in_parts else mine, loss, totals(data))
        except FloatingPointError as error:
            seen["said"].append(str(error))
    return seen | {"after": weights(one)}


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
    **options: Any,
) -> Iterator[Any]:
    """A trainer in this process; `folder` holds the rendezvous file, options replace CONFIG's.

    reference: folder of that role's model, `model` unless given. adapter: folder of the adapters' first values.
    """
    meeting = folder / f"meeting-{len(list(folder.glob('meeting*'))) if world == 1 else 'shared'}"
    config = replace(CONFIG, adapters=adapters, **options)
    one: Any = make_trainer(
        TrainerSpec(
            config=config, model_path=str(model), tokenizer_path=str(model), rank=rank, world=world,
            init_method=f"file://{meeting}", device=device, temperature=TEMPERATURE, total_updates=TOTAL_UPDATES,
            seed=0, profile=None, roles={"reference": RoleModel(str(reference or model))},
            adapter_folder=str(adapter) if adapter else None,
        )
    )  # fmt: skip
    try:
        yield one
    finally:
        one.close()


def adapters_of(model: Path, rank: int = 4, dropout: float = 0.0, targets: str | list[str] = "all") -> AdapterSpec:
    """Adapters of a model, scaled by 2."""
    chosen, problems = choose_targets(load_facts(model).sizes.linears, targets)
    assert not problems
    return AdapterSpec(rank, alpha=2.0 * rank, rslora=False, dropout=dropout, targets=chosen)


def assert_compiled_trains_alike(model: Path, folder: Path, data: list[TrainingSample], **options: Any) -> None:
    """Train compiled and not: micro-batches of many shapes, as a run has them, passes without a gradient between."""
    results, loss = [], WeightedLoss()
    for on in (False, True):
        own = folder / f"compiled-{on}"
        own.mkdir(exist_ok=True)
        with (
            torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
            open_trainer(model, own, compile=on, **options) as one,
        ):
            log_probs = [one.log_probs(share(data, most)) for most in (30, 64)]
            metrics = [one.train(share(data, most), loss, totals(data)) for most in (20, 45, 64)]
            results.append((log_probs, metrics, weights(one)))
    for one, other in zip(*[[row for part in found[0] for batch in part for row in batch] for found in results]):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for one, other in zip(results[0][1], results[1][1]):
        assert_close(one, other, atol=1e-5)
    assert_close(results[0][2], results[1][2], atol=1e-5)


def weights(one: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in one.export()}


def plain_log_probs(lm: Any, sequence: TrainingSample) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [T - 1] of tokens 1.. of one sequence, from transformers' own logits."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    log_p = (lm(tokens[None], use_cache=False).logits[0, :-1].float() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(1, tokens[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_loss(lm: Any, data: list[TrainingSample]) -> Tensor:
    """WeightedLoss, one sequence at a time."""
    loss = torch.zeros(())
    for sequence in data:
        log_probs, entropy = plain_log_probs(lm, sequence)
        advantage = torch.from_numpy(sequence.columns["advantage"][1:])
        mask = torch.from_numpy(sequence.mask[1:])
        loss = loss - (advantage * log_probs + 0.1 * entropy)[mask].sum()
    return loss / totals(data).tokens


def assert_close(got: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    """Assert that values are equal by name within `atol`, relative for values above 1."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.as_tensor(got[name]), torch.as_tensor(value), atol=atol, rtol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_refused(seen: dict[str, Any]) -> None:
    """Assert that both updates were refused for their loss alone, and no bit of the weights changed."""
    assert seen["said"] == ["the loss is nan; the weights were left as they were"] * 2
    assert_close(seen["after"], seen["before"], atol=0)
