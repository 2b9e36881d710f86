"""Checksums of tensors that are there all at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlctl.refit.checksum import ChecksumTable, lay


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [n] of several tensors of one device, on it."""
    totals = ChecksumTable(len(tensors), tensors[0].device if tensors else torch.device("cpu"))
    for tensor in tensors:
        totals.add(lay(tensor))
    return totals.all()


def checksum(tensor: Tensor) -> int:
    """Return the checksum of one tensor; waits for its device."""
    return int(checksums([tensor])[0])
