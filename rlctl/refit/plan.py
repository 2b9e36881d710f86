"""The refit plan: what is sent, in which order, at which offset; made once by the trainer, verified by receivers.

Pure. The plan's `digest` travels in the header of every refit, so that two sides that disagree about a name, a
shape, a dtype or the order stop before a single byte is loaded.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
ALIGNMENT = 512


@dataclass(frozen=True)
class Entry:
    """One tensor: Hugging Face name, shape, dtype, and its place in the flat buffer in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Plan:
    """All tensors of a refit in sending order."""

    entries: tuple[Entry, ...]

    @classmethod
    def build(cls, layout: Iterable[tuple[str, tuple[int, ...], str]]) -> "Plan":
        """A plan of a trainer's `layout()`. Offsets are aligned to 512 bytes, so any dtype can be viewed in place."""
        entries, offset = [], 0
        for name, shape, dtype in layout:
            entry = Entry(name, tuple(shape), dtype, offset)
            entries.append(entry)
            offset += _aligned(entry.nbytes)
        return cls(tuple(entries))

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer."""
        return self.entries[-1].offset + _aligned(self.entries[-1].nbytes)

    @cached_property
    def digest(self) -> str:
        """Hash of names, shapes, dtypes, order and offsets."""
        rows = [[e.name, list(e.shape), e.dtype, e.offset] for e in self.entries]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def verify(self, header: "Header") -> None:
        """Raise RefitError unless the header was made for this plan."""
        if self.digest != header.digest:
            raise RefitError(f"the trainer sends by plan {header.digest}, this end was given plan {self.digest}")


def planned(plan: Plan, tensors: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[Entry, Tensor]]":
    """Each entry with the tensor exported for it. Raises RefitError at the first that departs from the plan."""
    for entry, item in zip_longest(plan.entries, tensors):
        wanted = f"{entry.name} {entry.shape} {entry.dtype}" if entry else "nothing more"
        given = f"{item[0]} {tuple(item[1].shape)} {dtype_name(item[1])}" if item else "nothing more"
        if wanted != given:
            raise RefitError(f"the plan has {wanted}, the trainer exported {given}")
        yield entry, item[1]


def dtype_name(tensor: "Tensor") -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(tensor.dtype).removeprefix("torch.")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Header:
    """What both ends are told before a refit: the version, the plan's digest, whether to take checksums."""

    version: int
    digest: str
    checksums: bool


@dataclass(frozen=True)
class TransportSpec:
    """Which transport, and how its two ends find each other.

    folder: shm's. host, port, world: broadcast's rendezvous; trainer rank 0 is its rank 0. timeout_s: of each
    collective.
    """

    kind: Literal["shm", "broadcast"]
    folder: str = ""
    host: str = ""
    port: int = 0
    world: int = 0
    timeout_s: float = 300.0

    @property
    def rendezvous(self) -> bool:
        """True if sender and receivers must run at the same time."""
        return self.kind == "broadcast"


class RefitError(RuntimeError):
    """A refit that must not be trusted: the message names the tensor or the rank at fault."""
