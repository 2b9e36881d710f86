"""The reference policy: the run's first weights in host memory, put in the policy's place while they are needed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rlctl.training.fsdp.optimizer import Named, local
from rlctl.training.hf_folder import WeightFiles


class Reference:
    """This rank's shards of the weights in `folder`, kept in the compute dtype (forward passes round to it anyway)."""

    def __init__(self, folder: Path, parameters: Named, dtype: torch.dtype) -> None:
        files = WeightFiles(folder)
        self._weights: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            whole = torch.empty(parameter.shape, dtype=torch.float32)
            files.read_into(name, whole)
            self._weights[name] = _host(_own_shard(whole, parameter).to(dtype))

    @contextmanager
    def in_place_of(self, parameters: Named) -> Iterator[None]:
        """Within, `parameters` hold the reference weights; after, bit by bit what they held before."""
        shards = {name: local(p).detach() for name, p in parameters.items()}
        kept = {name: _host(shard) for name, shard in shards.items()}
        try:
            for name, shard in shards.items():
                shard.copy_(self._weights[name], non_blocking=True)
            yield
        finally:
            for name, shard in shards.items():
                shard.copy_(kept[name], non_blocking=True)


def _own_shard(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, which every rank holds, cut as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    return local(distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None))


def _host(tensor: Tensor) -> Tensor:
    """A copy in host memory, page-locked where a GPU will read it."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return copy.copy_(tensor)
