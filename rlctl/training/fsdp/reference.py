"""This rank's shards of the weights in a model folder: what the reference policy is made of."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from rlctl.models.hf_folder import WeightFiles
from rlctl.training.fsdp.optimizer import Named, local


def read_shards(folder: Path, parameters: Named, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of every parameter, in `dtype`, cut as it is."""
    files = WeightFiles(folder)
    weights = {}
    for name, parameter in parameters.items():
        whole = torch.empty(parameter.shape, dtype=torch.float32)
        files.read_into(name, whole)
        weights[name] = _own_shard(whole, parameter).to(dtype)
    return weights


def _own_shard(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `whole`, which every rank holds, cut as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    return local(distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None))
