"""Trainer with one rank in this process, for `rlctl model check`."""

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

# Lengths in tokens of the sequences in a pack. One has a single prediction; one is longer than the others together.
LENGTHS = (5, 2, 72, 17)
# Learning rate of the update that changes the weights.
_RATE = 1e-3


@dataclass(frozen=True)
class PlainLoss:
    """-sum(log p) over tokens. Any loss with a gradient would serve here."""

    needs = LossNeeds()

    def __call__(self, batch: TokenBatch) -> LossOutput:
        return LossOutput(-torch.where(batch.mask, batch.log_probs, 0).sum(), {})

    def normalizer(self, totals: Totals) -> float:
        return totals.tokens


class CheckedTrainer:
    """A trainer with one rank in this process. Its methods take sequences of token ids."""

    def __init__(
        self, trainer: TrainerSettings, folder: str, device: str, scratch: Path, adapter: str | None = None
    ) -> None:
        """folder: the model's. scratch: an empty folder. adapter: PEFT's folder of an adapter to train.

        Raises ValueError for a model that cannot train.
        """
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
        # True for the name of a parameter or buffer that stays in float32. With adapters all names do, because an
        # adapter is rounded separately from its base.
        self.keeps_float32 = (lambda name: True) if self.adapts else facts.keeps_float32
        # Names of the tensors that a refit must bring to engines.
        if settings.adapters:
            self.refit_names = {tensor.name for tensor in settings.adapters.tensors}
        else:
            self.refit_names = names_to_send(Path(folder), facts)
        # True if each sequence has a padded row, False if sequences are packed.
        self.padded = trainer.is_padded
        # Names of the tensors that training does not change, and of the embedding.
        self._buffers = facts.buffers
        self._embedding = f"{facts.embedding}.weight"
        self.sender = SendsWeights(self.rank, 0, torch.device(device))

    def log_probs(self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True) -> list[NDArray[np.float32]]:
        """Return the log-prob of every token given the tokens before it, float32 [T] for each sequence, first 0.

        packed: all sequences in one micro-batch; else one micro-batch for each.
        """
        return list(chain.from_iterable(self.rank.log_probs(self._batches(sequences, packed))))

    def exact_log_probs(
        self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True
    ) -> list[NDArray[np.float32]] | None:
        """Return `log_probs` computed in float32 with the weights that the dtype has rounded.

        Return None for a backend that cannot do this, and in float32, which rounds nothing.
        """
        if self.dtype == "float32":
            return None
        batches = self.rank.exact_log_probs(self._batches(sequences, packed))
        return None if batches is None else list(chain.from_iterable(batches))

    def train(self, sequences: Sequence[NDArray[np.int32]], *, packed: bool = True) -> float:
        """Run one optimizer update; return the norm of its gradient."""
        tokens = sum(len(sequence) - 1 for sequence in sequences)
        totals = Totals(tokens, len(sequences), len(sequences))
        return self.rank.train(self._batches(sequences, packed), PlainLoss(), totals)[GRAD_NORM.name]

    @contextmanager
    def other_weights(self, dtype: str, scratch: Path) -> Iterator[None]:
        """Change every tensor that a refit sends, so that the change shows in `dtype`. Restore all after the block.

        scratch: an empty folder.
        """
        values = OtherValues(self.rank.shards())
        self.rank.save(scratch)
        # An update changes most tensors. `values` changes the others.
        self.train(random_sequences(int(self.rank.info()["vocab_size"]), LENGTHS, 3))
        values.put(dtype)
        yield
        values.undo()
        self.rank.load(scratch)

    @contextmanager
    def faint_weights(self, scratch: Path) -> Iterator[None]:
        """Scale the weights down until the epsilon of every norm matters. Restore all after the block.

        The weights of norms are not scaled. scratch: an empty folder.
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
        """True if `faint_weights` can show a wrong epsilon of a norm.

        It cannot in bfloat16, because rounding is larger, and not with adapters, because the base stays unchanged.
        """
        return self.dtype == "float32" and not self.adapts

    def close(self) -> None:
        """Leave the process group."""
        self.sender.refit_close()
        self.rank.close()


def random_sequences(vocab: int, lengths: Sequence[int], seed: int) -> list[NDArray[np.int32]]:
    """Return one sequence of random token ids below `vocab` for each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab, length).astype(np.int32) for length in lengths]


@contextmanager
def checked_trainer(
    settings: TrainerSettings, folder: str, device: str, scratch: Path, adapter: str | None = None
) -> Iterator[CheckedTrainer]:
    """Build a `CheckedTrainer`, and close it after the block."""
    with ExitStack() as stack:
        trainer = CheckedTrainer(settings, folder, device, scratch, adapter)
        stack.callback(trainer.close)
        yield trainer
