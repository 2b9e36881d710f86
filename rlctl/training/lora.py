"""LoRA: linear layers with a low-rank adapter over frozen weights, computed and initialized as in PEFT.

Adapter weights are float32. The layers compute in the dtype to which FSDP casts the weights, and in the same order of
operations as engines. Nothing here merges an adapter into the frozen weights: `models/merge_adapter.py` writes a merged
model from two folders.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from rlctl.models.adapter_folder import AdapterFile, write_adapter
from rlctl.models.adapters import LORA_A, LORA_B, AdapterSpec
from rlctl.models.hf_folder import Companions
from rlctl.models.layer_kinds import LinearLayer
from rlctl.models.parameter_table import TensorRow
from rlctl.refit.weight_source import Shard
from rlctl.training.interface import MicroBatch


class LoraLinear(nn.Linear):
    """A frozen linear layer plus the product of two small trained matrices A and B.

    The frozen parameters keep their names. A is `lora_A.weight` [rank, inputs], B is `lora_B.weight` [outputs, rank].
    """

    def __init__(self, base: nn.Linear, spec: AdapterSpec) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.weight = base.weight
        self.bias = base.bias  # type: ignore[assignment]
        self.lora_A = nn.Linear(base.in_features, spec.rank, bias=False, device="meta")
        self.lora_B = nn.Linear(spec.rank, base.out_features, bias=False, device="meta")
        self.scale = spec.scale
        self.dropout = spec.dropout
        # False while the layer must compute without its adapter.
        self.adapts = True

    def forward(self, input: Tensor) -> Tensor:
        """Return W x + b + scale * B A x for each row x of `input`. Training applies dropout to A's input only."""
        output = F.linear(input, self.weight, self.bias)
        if not self.adapts:
            return output
        if self.dropout and torch.is_grad_enabled():
            input = F.dropout(input, self.dropout)
        product: Tensor = self.lora_B(self.lora_A(input))
        return output + product * self.scale


def add_adapters(lm: Any, spec: AdapterSpec) -> None:
    """Freeze every parameter of a causal LM, and replace the target layers of `spec` by `LoraLinear`.

    `lm` is on the meta device, and so are the new adapters. Must be called before `fully_shard`.
    """
    lm.requires_grad_(False)
    for target in spec.targets:
        owner, _, leaf = target.name.rpartition(".")
        base = lm.get_submodule(target.name)
        assert type(base) is nn.Linear, f"{target.name} is a {type(base).__name__}"
        setattr(lm.get_submodule(owner), leaf, LoraLinear(base, spec))


@dataclass(frozen=True)
class FirstAdapters:
    """Initial values of adapters: read from a folder, or drawn at random as in PEFT."""

    spec: AdapterSpec
    # PEFT folder to read the values from; None to draw them.
    folder: Path | None
    # Seed of drawn values.
    seed: int

    def value(self, name: str, shape: torch.Size) -> Tensor:
        """Return the initial value of one whole tensor, float32.

        A drawn A is uniform in +-1 / sqrt(inputs), and B is 0. A's values depend only on the seed and on `name`, so
        that all ranks draw equal values.
        """
        if self.folder:
            return AdapterFile(self.folder).tensor(name)
        drawn = torch.zeros(shape)
        if name.endswith(LORA_A):
            # torch's generator uses only 32 bits of a seed.
            generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        return drawn

    def read_into(self, rows: Iterable[TensorRow], target: Tensor) -> None:
        """Fill `target`, a whole A or B matrix, with its initial value. rows: the matrix's one row in the table."""
        for row in rows:
            target.copy_(self.value(row.name, target.shape))


@contextmanager
def without_adapters(lm: nn.Module) -> Iterator[None]:
    """Switch all adapters off within the block: layers compute with the frozen weights alone."""
    layers = [module for module in lm.modules() if isinstance(module, LoraLinear)]
    for layer in layers:
        layer.adapts = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapts = True


def needs_attention(micro_batches: Iterable[MicroBatch]) -> bool:
    """Return True if any trained token has at least two tokens before it.

    Only the loss of such a token depends on queries and keys: the second token of a row attends to one token only.
    """
    return any(bool(sample.mask[2:].any()) for batch in micro_batches for sample in batch)


@contextmanager
def require_moved(
    sent: Iterable[TensorRow], shards: Callable[[], list[Shard]], lr: float, attends: bool
) -> Iterator[bool]:
    """Check that the optimizer step within the block changes every B matrix. All ranks call together.

    Raises RuntimeError on all ranks, naming a B that did not change. Yields True if the step is checked. A step is not
    checked without adapters, at learning rate 0, or if no rank's samples need attention. A caller should check only one
    step, because later changes may round to zero.

    sent: rows of the tensors that refits send. shards: returns this rank's shards of these tensors. attends:
    `needs_attention` of this rank's samples.
    """
    names = []
    if lr:
        names = [row.name for row in sent if row.name.endswith(LORA_B)]
    if names:
        any_attends = torch.tensor(int(attends))
        dist.all_reduce(any_attends, dist.ReduceOp.MAX)
        if not any_attends:
            names = []
    if not names:
        yield False
        return
    sums_before = _sum_bits(names, shards)
    yield True
    sums_after = _sum_bits(names, shards)
    has_moved = torch.tensor([sums_before[name] != sums_after[name] for name in names], dtype=torch.int32)
    dist.all_reduce(has_moved, dist.ReduceOp.MAX)
    unmoved = [name for name, moved in zip(names, has_moved.tolist()) if not moved]
    if unmoved:
        raise RuntimeError(
            f"the first optimizer step left {len(unmoved)} of {len(names)} adapters as they were, first {unmoved[0]}: "
            "the model computes without them, so that no gradient reaches them (leave them out of lora.targets), or "
            f"the rate {lr:g} is too small (trainer.optimizer.lr)"
        )


def _sum_bits(names: Sequence[str], shards: Callable[[], list[Shard]]) -> dict[str, int]:
    """Return for each named tensor the sum of its float32 values read as int32, over this rank's shards."""
    sums = dict.fromkeys(names, 0)
    for shard in shards():
        if shard.name in sums:
            sums[shard.name] += int(shard.tensor.view(torch.int32).sum(dtype=torch.int64))
    return sums


@dataclass(frozen=True)
class Base:
    """Facts about the base model that an exported adapter folder contains."""

    # Name of the base model in adapter_config.json: a folder, or a hub name.
    name: str
    # `digest_of_weights` of the base model's folder.
    digest: str
    # Linear layers of the base model.
    linears: tuple[LinearLayer, ...]
    # Prefixes of module names in the text model and in the whole model, from `meta_model.text_in_whole`.
    place: tuple[str, str]


@dataclass(frozen=True)
class AdapterJob:
    """Writes a checkpoint's adapters as a PEFT folder. Rank 0 writes everything."""

    folder: Path
    spec: AdapterSpec
    base: Base
    # Files of the base model to copy, such as the tokenizer; None on ranks other than 0.
    companions: Companions | None
    # Parameter name in memory -> whole tensor; empty on ranks other than 0.
    tensors: dict[str, Tensor]

    def write(self) -> int:
        """Write the folder. Return 0 as the checksum, because no file is written by several ranks. Raises OSError."""
        if self.companions:
            rows = {row.name: row for row in self.spec.tensors}
            write_adapter(
                self.folder,
                self.spec,
                linears=self.base.linears,
                base=self.base.name,
                digest=self.base.digest,
                tensors=((rows[name], tensor) for name, tensor in self.tensors.items()),
                place=self.base.place,
            )
            self.companions.write(self.folder, None)
        return 0
