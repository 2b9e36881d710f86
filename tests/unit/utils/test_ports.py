"""torch's stores listen where they were told to, and nowhere else."""

import socket
from datetime import timedelta
from importlib import import_module
from typing import Any

import psutil
import pytest

from rlctl.utils.ports import LOOPBACK, free_port, open_store


def listening(port: int) -> list[str]:
    """Addresses at which this process takes connections to a port."""
    found = psutil.Process().net_connections("tcp")
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port]


def test_a_store_is_reached_at_its_address_alone() -> None:
    port = free_port()
    patience = timedelta(seconds=20)
    server = open_store(LOOPBACK, port, server=True, timeout=patience)
    guest = open_store(LOOPBACK, port, server=False, timeout=patience)
    guest.set("weights", "1")
    assert server.get("weights") == b"1"
    assert listening(port) == [LOOPBACK]
    with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
        # Another address of this machine, as a neighbour would use.
        stranger.connect(("127.0.0.2", port))


def test_workers_of_an_engine_meet_at_such_a_store_too() -> None:
    import_module("rlctl.generation.vllm_worker")
    rendezvous: Any = import_module("torch.distributed.rendezvous").rendezvous
    port = free_port()
    store, rank, world = next(rendezvous(f"tcp://{LOOPBACK}:{port}?rank=0&world_size=1"))
    assert (rank, world, store.num_keys() >= 0) == (0, 1, True)
    assert listening(port) == [LOOPBACK]
