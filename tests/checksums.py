"""Checksums of whole tensors, as a refit computes them of tensors that arrive in chunks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlctl.refit.checksum import ChecksumTable, lay


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the checksums of several tensors of one device, int64 [n] on that device."""
    table = ChecksumTable(len(tensors), tensors[0].device if tensors else torch.device("cpu"))
    for tensor in tensors:
        table.add(lay(tensor))
    return table.all()


def checksum(tensor: Tensor) -> int:
    """Return the checksum of one tensor; wait for its device."""
    return int(checksums([tensor])[0])
