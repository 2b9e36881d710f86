"""The GRPO loop: draw, generate, score, compare, train, refit. Synchronous: every rollout has age 0.

Each line of `step` is a phase with typed input and output; whatever feeds two phases is an argument, not state.
What comes between the steps, and what a resume needs, is in training/loop.py.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rlctl.config.schema import GrpoConfig
from rlctl.data.cursor import PromptSource
from rlctl.data.prompts import Prompt
from rlctl.generation.pool import GeneratorPool
from rlctl.generation.requests import Completion, SampleRequest
from rlctl.grpo.batch import Batch, Group, make_batch, with_field
from rlctl.grpo.loss import GrpoLoss
from rlctl.grpo.metrics import refit_metrics, rollout_metrics, speed_metrics, update_metrics
from rlctl.grpo.mismatch import mismatch
from rlctl.grpo.seeds import TRAIN, VALIDATION, rollout_seeds
from rlctl.refit.refit import Refit
from rlctl.rewards.base import Item
from rlctl.rewards.scorer import Scorer
from rlctl.telemetry.recorder import StepRecorder
from rlctl.telemetry.throughput import mfu
from rlctl.training.client import TrainerClient
from rlctl.training.keeper import Keeper
from rlctl.training.loop import Loop
from rlctl.training.vitals import Vitals


@dataclass(frozen=True)
class Devices:
    """Devices that train, that generate, and distinct ones in all: the denominators of the throughputs.

    name: of the trainer's device, for its peak; flops: of training, (sequence length) -> FLOPs a token.
    """

    trainer: int
    generator: int
    all: int
    name: str
    flops: Callable[[float], float]


@dataclass(frozen=True)
class Parts:
    """What a run is assembled from."""

    trainer: TrainerClient
    pool: GeneratorPool
    refit: Refit
    source: PromptSource
    validation: list[Prompt]
    scorer: Scorer
    decode: Callable[[list[list[int]]], list[str]]
    keeper: Keeper
    devices: Devices
    vitals: Vitals


class GrpoLoop(Loop):
    """The steps of a run, see `Loop`."""

    def __init__(self, config: GrpoConfig, parts: Parts, stop: Callable[[], bool]) -> None:
        super().__init__(config.grpo.num_steps, parts.keeper, parts.source.cursor, parts.trainer.save, stop)
        self._config, self._parts = config, parts
        self._loss = GrpoLoss.from_config(config.grpo.loss)

    def step(self) -> None:
        """One step: N prompts, their groups, `updates_per_step` updates, the generator brought up to date."""
        number, config = self.done + 1, self._config.grpo
        record = StepRecorder(self._parts.keeper.events, number)
        with record.phase("data"):
            prompts = self._parts.source.draw(config.num_prompts_per_step)
        with record.phase("generation"):
            completions = self._generate(prompts, number)
        with record.phase("reward"):
            groups = self._score(prompts, completions)
        with record.phase("advantage"):
            batch = make_batch(groups, config)
        if self._parts.pool.sleeps:
            with record.phase("sleep"):
                self._parts.pool.rest()
        measured: dict[str, float] = {}
        if self._needs_log_probs and batch.sequences:
            with record.phase("log_probs"):
                batch, measured = self._add_log_probs(batch)
        with record.phase("train"):
            updates = [self._parts.trainer.train(share, self._loss) for share in batch.shares(config.updates_per_step)]
        with record.phase("refit"):
            if self._parts.pool.asleep:
                self._parts.trainer.group.call("rest")
            moved = self._parts.pool.refit(self._parts.refit, number)
        self.done = number
        metrics = rollout_metrics(groups, batch) | update_metrics(updates) | measured | refit_metrics(moved)
        self._record(record, groups, batch, metrics)

    def validate(self) -> None:
        """Every held-out prompt, greedy or k samples of each. A reward that fails counts as a wrong answer."""
        config, prompts = self._config.validation, self._parts.validation
        if not prompts:
            return
        with self._parts.keeper.validation(self.done) as metrics:
            seeds = rollout_seeds(self._config.run.seed, VALIDATION, self.done, len(prompts))
            requests = self._requests(prompts, seeds, config.num_generations, config.temperature)
            groups = self._score(prompts, self._parts.pool.generate(requests, self._parts.refit))
            right = np.array([[score.right for score in group.scores] for group in groups])
            lengths = [len(completion.tokens) for group in groups for completion in group.completions]
            metrics["validation/accuracy"] = float(right.mean())
            if config.num_generations > 1:
                metrics["validation/pass_at_k"] = float(right.any(axis=1).mean())
            metrics["validation/length"] = float(np.mean(lengths))
            metrics["validation/prompts"] = float(len(prompts))

    def _generate(self, prompts: list[Prompt], step: int) -> list[list[Completion]]:
        seeds = rollout_seeds(self._config.run.seed, TRAIN, step, len(prompts))
        group, temperature = self._config.grpo.num_generations_per_prompt, self._config.generation.temperature
        return self._parts.pool.generate(self._requests(prompts, seeds, group, temperature), self._parts.refit)

    def _requests(
        self, prompts: list[Prompt], seeds: list[int], samples: int, temperature: float
    ) -> list[SampleRequest]:
        longest = self._config.generation.max_new_tokens
        return [
            SampleRequest(prompt.id, prompt.tokens, samples, longest, temperature, seed)
            for prompt, seed in zip(prompts, seeds)
        ]

    def _score(self, prompts: list[Prompt], completions: list[list[Completion]]) -> list[Group]:
        texts = iter(self._parts.decode([c.tokens.tolist() for group in completions for c in group]))
        items = [Item(p.text, next(texts), p.answer, p.row) for p, group in zip(prompts, completions) for _ in group]
        scores = iter(self._parts.scorer.score(items))
        return [Group(p, group, [next(scores) for _ in group]) for p, group in zip(prompts, completions)]

    @property
    def _needs_log_probs(self) -> bool:
        loss = self._config.grpo.loss
        return loss.proximal == "recompute" or loss.kl_coef > 0

    def _add_log_probs(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        sequences, measured = batch.sequences, {}
        if self._loss.proximal == "recompute":
            ours = self._parts.trainer.log_probs(sequences)
            theirs = [sequence.fields["behaviour_log_prob"] for sequence in sequences]
            gap = mismatch(theirs, ours, [sequence.mask for sequence in sequences])
            measured = {"mismatch/token_mult_prob_error": gap.token_mult_prob_error, "mismatch/kl": gap.kl}
            sequences = with_field(sequences, "proximal_log_prob", ours)
        if self._loss.kl_coef > 0:
            reference = self._parts.trainer.log_probs(sequences, reference=True)
            sequences = with_field(sequences, "reference_log_prob", reference)
        return Batch(sequences, batch.owners, batch.fates), measured

    def _record(self, record: StepRecorder, groups: list[Group], batch: Batch, metrics: dict[str, float]) -> None:
        keeper, devices = self._parts.keeper, self._parts.devices
        keeper.rollouts(self.done, asdict(batch.fates), lambda: _shown(groups, self._parts.decode))
        vitals = self._parts.vitals.read()
        times = record.finish()
        speed = speed_metrics(metrics, times, devices.trainer, devices.generator, devices.all)
        length = metrics["tokens/trained"] / max(1, len(batch.sequences))
        share = mfu(speed["throughput/training"], devices.flops(length), devices.name)
        measured = speed | ({} if share is None else {"throughput/mfu": share})
        keeper.step(self.done, {"version": self.done, **metrics, **measured, **vitals, **times})


def _shown(groups: list[Group], decode: Callable[[list[list[int]]], list[str]]) -> list[dict[str, Any]]:
    firsts = [(group.prompt, group.completions[0], group.scores[0]) for group in groups]
    texts = decode([completion.tokens.tolist() for _, completion, _ in firsts])
    return [
        {
            "prompt_id": p.id,
            "prompt": p.text,
            "answer": p.answer,
            "completion": text,
            "reward": s.value,
            "finish": c.finish,
        }
        for (p, c, s), text in zip(firsts, texts)
    ]
