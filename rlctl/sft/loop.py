"""The SFT loop: each step makes one optimizer update, while the next batch is prepared on a thread.

Validation measures the held-out loss, and with `validation.recipe` also sampled answers.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from rlctl.config.schema import SftConfig
from rlctl.data.cursor import SampleSource
from rlctl.data.tasks import SupervisedSample
from rlctl.run.health import WEIGHT_VERSION, Decline, Health, failed_validation, gradient_jump
from rlctl.run.loop import Loop
from rlctl.run.recorder import RunRecorder
from rlctl.sft.loss import make_loss
from rlctl.sft.metric_rows import HELD_OUT_KL_TO_TEACHER, HELD_OUT_LOSS, NLL
from rlctl.telemetry import throughput
from rlctl.telemetry.clock import StepRecorder
from rlctl.training.metric_rows import KL_TO_TEACHER
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.trainer_group import PreparedBatch, TrainerGroup


class HeldOutAnswers(Protocol):
    """Samples and scores answers to held-out prompts, as a GRPO recipe describes it (`validation.recipe`)."""

    def measure(self, version: int) -> dict[str, float]:
        """Sample and score answers with the trainer's current weights; return the metrics. version: of the weights."""

    def close(self) -> None:
        """Stop sampling, and release the engines."""


@dataclass(frozen=True)
class SftComponents:
    """Components of an SFT run. `launch` makes them, and the loop uses them."""

    trainer: TrainerGroup
    source: SampleSource
    # Held-out samples for the loss.
    validation: list[SupervisedSample]
    # None without `validation.recipe`.
    answers: HeldOutAnswers | None
    recorder: RunRecorder
    # Number of devices that train, and their name, for example "NVIDIA H100 80GB HBM3".
    devices: int
    device: str
    # FLOPs to train on a token, by sequence length.
    flops: throughput.TrainingFlops


class SftLoop(Loop):
    """The `Loop` of an SFT run."""

    def __init__(self, config: SftConfig, parts: SftComponents, stop: Callable[[], bool]) -> None:
        write = parts.trainer.begin_save
        super().__init__(config.sft.num_steps, parts.recorder, parts.source.cursor, write, stop, _health(config))
        self._config = config
        self._parts = parts
        self._loss = make_loss(config.sft.loss)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next = self._prepare(parts.source.cursor.position)

    def step(self) -> None:
        """Make one step: a batch of samples, one update."""
        number = self.done + 1
        size = self._config.sft.batch_size
        cursor = self._parts.source.cursor
        record = StepRecorder(self._parts.recorder.events, number)
        with record.phase("data"):
            batch = self._next.result()
            self._next = self._prepare(cursor.position + size)
        with record.phase("train"), self._parts.trainer.update(self._loss) as update:
            update.accumulate(batch)
        # The cursor moves only now, because the update may raise: a checkpoint counts only samples that were trained.
        cursor.draw(size)
        self.done = number
        tokens = sum(batch.lengths)
        times = record.finish()
        speed = {
            throughput.TRAINED_TOKENS.name: float(tokens),
            throughput.EFFECTIVE.name: throughput.effective(tokens, times, self._parts.devices),
            throughput.TRAINING.name: throughput.training_only(tokens, times, self._parts.devices),
            throughput.TRAINER_IDLE.name: throughput.idle_share(times, ("train",)),
        }
        length = throughput.length_of_a_token(batch.lengths)
        speed |= self._parts.flops.metrics(speed[throughput.TRAINING.name], length, self._parts.device)
        metrics = update.metrics | self._count_skipped_updates(number, [update.skip_cause]) | speed
        self._parts.recorder.step(number, {WEIGHT_VERSION.name: number, **metrics, **times})

    def close(self) -> None:
        """Stop preparing batches, and stop sampling held-out answers."""
        self._threads.shutdown(cancel_futures=True)
        if self._parts.answers:
            self._parts.answers.close()

    def _prepare(self, first: int) -> "Future[PreparedBatch]":
        """Start to prepare the batch whose first sample is draw number `first`. This does not move the cursor."""

        def prepare_batch() -> PreparedBatch:
            samples = self._parts.source.read_ahead(first, self._config.sft.batch_size)
            return self._parts.trainer.prepare(_sequences(samples))

        return self._threads.submit(prepare_batch)

    def validate(self) -> None:
        """Measure the held-out loss and divergence (means over all tokens that would be trained on), and the recipe's
        answers.
        """
        samples = self._parts.validation
        answers = self._parts.answers
        if not samples and not answers:
            return
        with self._parts.recorder.validation(self.done) as metrics:
            if samples:
                means = self._parts.trainer.evaluate(_sequences(samples), self._loss)
                metrics |= {HELD_OUT_LOSS.name: means[NLL.name], "validation/samples": float(len(samples))}
                if KL_TO_TEACHER.name in means:
                    metrics[HELD_OUT_KL_TO_TEACHER.name] = means[KL_TO_TEACHER.name]
            if answers:
                metrics |= answers.measure(self.done)


def _health(config: SftConfig) -> Health:
    bounds = config.health
    rise = Decline(
        "loss",
        HELD_OUT_LOSS.name,
        bounds.max_loss_rise,
        "held-out loss is {value:.4g}, {lost:.3g} above its start of {start:.4g}, at most {bound:g} "
        "(health.max_loss_rise)",
        worse=1,
    )
    # A teacher alone may lead away from the given tokens.
    losses = [rise] if config.sft.loss.nll_coef else []
    jump = gradient_jump(bounds.max_grad_norm_ratio, bounds.grad_norm_window)
    # If more than half of the held-out answers have no score, the validation measured nothing.
    return Health([jump, *losses, failed_validation(0.5)], stop=bounds.stop)


def _sequences(samples: list[SupervisedSample]) -> list[TrainingSample]:
    return [TrainingSample(sample.tokens, sample.mask) for sample in samples]
