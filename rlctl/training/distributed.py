"""What every trainer rank's process is, whatever trains in it: its place in the group, its device, its memory."""

from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rlctl.config.schema import TrainerSection
from rlctl.utils.cores import usable_cores
from rlctl.utils.ports import open_store


def join(section: TrainerSection, rank: int, world: int, init_method: str, device: torch.device) -> None:
    """Join torch's process group; on CPU with this rank's share of the cores."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(section.threads or max(1, usable_cores() // world))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=met_at(init_method, rank, world), rank=rank, world_size=world)


def met_at(init_method: str, rank: int, world: int) -> Any:
    """Return the store that ranks meet at: tcp://host:port, kept by rank 0, or file://path."""
    url = urlsplit(init_method)
    if url.scheme == "file":
        return dist.FileStore(url.path, world)  # type: ignore[attr-defined]
    assert url.hostname and url.port
    return open_store(url.hostname, url.port, server=rank == 0, timeout=default_pg_timeout, world=world)


def compute_dtype(section: TrainerSection) -> torch.dtype:
    """Return the compute dtype; who builds a rank has resolved `auto`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[section.dtype]


def memory(device: torch.device) -> dict[str, float]:
    """See TrainerRank.memory."""
    cuda = device.type == "cuda"
    return {
        "device_allocated": float(torch.cuda.memory_allocated()) if cuda else 0.0,
        "device_peak": float(torch.cuda.max_memory_allocated()) if cuda else 0.0,
        "host_rss": float(psutil.Process().memory_info().rss),
    }


def device_name(device: torch.device) -> str:
    """Of the maker's, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
