"""Trainer of one rank in this process, for the checks of a model."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rlctl.evaluation.served_weights import OtherValues, make_faint, names_to_send
from rlctl.models.facts import find_facts
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.refit.sender import SendsWeights
from rlctl.training.interface import LossNeeds, LossOutput, TokenBatch, Totals
from rlctl.training.metric_rows import GRAD_NORM
from rlctl.training.micro_batching import TrainingSample
from rlctl.training.rank import TrainerRank, make_trainer
from rlctl.training.spec import TrainerSpec

# Tokens of the sequences that are packed: one of a single prediction, one longer than the others together.
LENGTHS = (5, 2, 72, 17)
# Rate of the update that makes other weights.
_RATE = 1e-3


@dataclass(frozen=True)
class PlainLoss:
    """-sum(log p) over tokens: any gradient would do."""

    needs = LossNeeds()

    def __call__(self, batch: TokenBatch) -> LossOutput:
        return LossOutput(-torch.where(batch.mask, batch.log_probs, 0).sum(), {})

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens


class CheckedTrainer:
    """A trainer of one rank in this process, asked by sequences of tokens."""

    def __init__(
        self, trainer: TrainerSettings, folder: str, device: str, scratch: Path, adapter: str | None = None
    ) -> None:
        """scratch: an empty folder. adapter: PEFT's folder. Raises ValueError for a model that cannot train."""
        optimizer = replace(trainer.optimizer, lr=_RATE, weight_decay=0.1, warmup_steps=0, schedule="constant")
        self.dtype = trainer.dtype
        settings = replace(trainer, num_ranks=1, optimizer=optimizer, threads=None, compile=False)
        spec = TrainerSpec(
            config=settings,
            model_path=folder,
            tokenizer_path=folder,
            rank=0,
            world=1,
            init_method=f"file://{scratch}/meeting",
            device=device,
            temperature=1.0,
            total_updates=100,
            seed=0,
            profile=None,
            roles={},
            adapter_folder=adapter,
        )
        self.adapts = adapter is not None
        self.rank: TrainerRank = make_trainer(spec)
        facts = find_facts(Path(folder))
        # True for the name of a parameter or buffer that no pass rounds. Adapters are rounded apart from their base.
        self.keeps_float32 = (lambda name: True) if self.adapts else facts.keeps_float32
        # Tensors that a refit must bring to engines.
        if settings.adapters:
            self.refit_names = {tensor.name for tensor in settings.adapters.tensors}
        else:
            self.refit_names = names_to_send(Path(folder), facts)
        # True for a model whose sequences have a row each.
        self.padded = trainer.is_padded
        # Tensors that training leaves alone, and the embedding.
        self._buffers = facts.buffers
        self._embedding = f"{facts.embedding}.weight"
        self.sender = SendsWeights(self.rank, 0, torch.device(device))

    def log_probs(self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True) -> list[NDArray[np.float32]]:
        """Return the log-probs of every token given those before it, 0 at the first."""
        return list(chain.from_iterable(self.rank.log_probs(self._batches(sequences, packed))))

    def exact_log_probs(
        self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True
    ) -> list[NDArray[np.float32]] | None:
        """Return `log_probs` in float32 of the weights as they are rounded; None for a backend that cannot, and where
        nothing is rounded.
        """
        if self.dtype == "float32":
            return None
        batches = self.rank.exact_log_probs(self._batches(sequences, packed))
        return None if batches is None else list(chain.from_iterable(batches))

    def train(self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True) -> float:
        """Make one update; return the norm of its gradient."""
        tokens = sum(len(sequence) - 1 for sequence in sequences)
        totals = Totals(tokens, len(sequences), len(sequences))
        return self.rank.train(self._batches(sequences, packed), PlainLoss(), totals)[GRAD_NORM.name]

    @contextmanager
    def other_weights(self, dtype: str, scratch: Path) -> Iterator[None]:
        """Have other values, in `dtype`, of every tensor that is sent; the first ones are back after the block.

        scratch: an empty folder.
        """
        values = OtherValues(self.rank.shards())
        self.rank.save(scratch)
        self.train(random_sequences(int(self.rank.info()["vocab_size"]), LENGTHS, 3))
        values.put(dtype)
        yield
        values.undo()
        self.rank.load(scratch)

    @contextmanager
    def faint_weights(self, scratch: Path) -> Iterator[None]:
        """Have weights so small that the epsilon of every norm decides; the first ones are back after the block.

        Weights of norms stay. scratch: an empty folder.
        """
        self.rank.save(scratch)
        make_faint(self.rank.shards(), self._embedding, self._buffers)
        yield
        self.rank.load(scratch)

    def _batches(self, sequences: Sequence[NDArray[np.int32]], packed: bool) -> list[list[TrainingSample]]:
        samples = [TrainingSample(sequence, np.arange(len(sequence)) > 0) for sequence in sequences]
        return [samples] if packed else [[sample] for sample in samples]

    @property
    def shows_epsilons(self) -> bool:
        """True where `faint_weights` shows them: rounding to bfloat16 is larger, and adapters leave their base."""
        return self.dtype == "float32" and not self.adapts

    def close(self) -> None:
        """Leave the process group."""
        self.sender.refit_close()
        self.rank.close()


def random_sequences(vocab: int, lengths: Sequence[int], seed: int) -> list[NDArray[np.int32]]:
    """Return sequences of random tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, length).astype(np.int32) for length in lengths]


@contextmanager
def checked_trainer(
    settings: TrainerSettings, folder: str, device: str, scratch: Path, adapter: str | None = None
) -> Iterator[CheckedTrainer]:
    """Run a `CheckedTrainer` until the block is left."""
    with ExitStack() as stack:
        trainer = CheckedTrainer(settings, folder, device, scratch, adapter)
        stack.callback(trainer.close)
        yield trainer
