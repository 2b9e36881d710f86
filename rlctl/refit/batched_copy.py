"""Copies prepared once and repeated at every refit.

A launch costs about 10 microseconds of Python: copied one by one, the 310 tensors of Qwen3-0.6B took 6.2 ms to cross
between two H200s, at whose link's rate they need 3.3 ms. Small copies go together in few kernels; large ones by the
copy engines, unless requests run meanwhile: their own small copies would queue behind (an engine of Qwen3-8B then
paused for 39 ms of 47, and for 9 with kernels).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# Above this a separate launch costs nothing.
LARGE = 32 << 20


class BatchedCopy:
    """(target, source) pairs of equal shapes; dtypes may differ."""

    def __init__(self, pairs: Iterable[tuple[Tensor, Tensor]], beside_requests: bool = False) -> None:
        """beside_requests: requests run on the device meanwhile."""
        self._large: list[tuple[Tensor, Tensor]] = []
        groups: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}
        for target, source in pairs:
            dense = target.is_contiguous() and source.is_contiguous()
            same = dense and target.dtype == source.dtype
            if same and not beside_requests and target.numel() * target.element_size() >= LARGE:
                self._large.append((target, source))
                continue
            # Copies without a common kernel would keep the rest of their group from one.
            targets, sources = groups.setdefault((target.dtype, source.dtype, dense), ([], []))
            targets.append(target)
            sources.append(source)
        self._groups = list(groups.values())

    @torch.no_grad()
    def run(self) -> None:
        """Queue all copies on the current stream."""
        for target, source in self._large:
            target.copy_(source, non_blocking=target.is_cuda)
        for targets, sources in self._groups:
            torch._foreach_copy_(targets, sources, non_blocking=targets[0].is_cuda)
