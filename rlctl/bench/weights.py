"""Random weights in a model's shape. Ranks shard the rows as FSDP2 does. Every process computes the same bits."""

import zlib
from pathlib import Path

import torch
from torch import Tensor

from rlctl.refit.weight_source import Shard

NamedShape = tuple[str, tuple[int, ...]]


def parameters_of(folder: Path) -> list[NamedShape]:
    """Return (Hugging Face name, shape) of each tensor of a model's checkpoint. Only its config.json is needed."""
    from rlctl.models.derive import table_of
    from rlctl.models.meta_model import language_model

    return [(row.name, row.shape) for row in table_of(language_model(folder), folder).sent_rows]


def make_tensor(name: str, shape: tuple[int, ...], version: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the whole tensor `name` of a weight version, as `dtype`. All devices of one kind compute the same bits."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) * 1000 + version)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator) * 0.02


class RandomShards:
    """One rank's rows of every tensor. It implements the protocol `Sharded`."""

    def __init__(self, rows: list[NamedShape], rank: int, world: int, master: str, device: torch.device) -> None:
        """Allocate zeros. rows: name and shape of every whole tensor. master: dtype of the trainer's weights."""
        self._rank = rank
        self._world = world
        self._device = device
        self._dtype: torch.dtype = getattr(torch, master)
        self._rows = rows
        self._tensors = {
            name: torch.zeros(self._padded_shape(shape), dtype=self._dtype, device=device) for name, shape in self._rows
        }

    def fill(self, version: int) -> None:
        """Set this rank's rows to those of weight version `version`."""
        for name, shape in self._rows:
            shard = self._shard_of(name, shape)
            first = self._rank * self._padded_shape(shape)[0]
            tensor = make_tensor(name, shape, version, self._dtype, self._device)
            shard.copy_(tensor[first : first + shard.shape[0]])

    def layout(self, dtype: str | None = None) -> list[tuple[str, tuple[int, ...], str]]:
        return [(name, shape, dtype or str(self._dtype).removeprefix("torch.")) for name, shape in self._rows]

    def shards(self) -> list[Shard]:
        shards = []
        for name, shape in self._rows:
            shard = self._shard_of(name, shape)
            if shard.numel():
                start = (self._rank * self._padded_shape(shape)[0],) + (0,) * (len(shape) - 1)
                shards.append(Shard(name, start, shard))
        return shards

    def _padded_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of every rank's rows of a tensor, with the padding rows that the last ranks have."""
        return (-(-shape[0] // self._world), *shape[1:])

    def _shard_of(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's rows of a tensor, without the padding rows that the last ranks have."""
        rows = self._padded_shape(shape)[0]
        return self._tensors[name][: max(0, min(rows, shape[0] - self._rank * rows))]
