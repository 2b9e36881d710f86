"""torch's stores listen where they were told to, and nowhere else."""

import socket
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest
from psutil import CONN_LISTEN

from rlctl.utils.ports import LOOPBACK, free_port, has_proxy, open_store, past_proxies


def listening_addresses(port: int) -> list[str]:
    """Return the addresses at which this process takes connections to a port."""
    connections = psutil.Process().net_connections("tcp")
    addresses = [connection.laddr for connection in connections if connection.status == CONN_LISTEN]
    return [address.ip for address in addresses if address.port == port]


def test_a_free_port_can_be_bound_and_is_none_that_the_kernel_gives_to_whoever_asks_for_any() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for address in (LOOPBACK, "::1"):
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            try:
                server.bind((address, 0))
            except OSError:
                continue  # a machine without IPv6
        port = free_port(address)
        assert port < first_ephemeral or first_ephemeral < 30_000
        with socket.create_server((address, port), family=server.family):
            assert free_port(address) != port


def test_a_store_is_reached_at_its_address_alone() -> None:
    port = free_port()
    patience = timedelta(seconds=300)
    server = open_store(LOOPBACK, port, server=True, timeout=patience)
    guest = open_store(LOOPBACK, port, server=False, timeout=patience)
    guest.set("weights", "1")
    assert server.get("weights") == b"1"
    assert listening_addresses(port) == [LOOPBACK]
    with socket.socket() as stranger, pytest.raises(ConnectionRefusedError):
        # Another address of this machine, as a neighbour would use.
        stranger.connect(("127.0.0.2", port))


def test_workers_of_an_engine_meet_at_such_a_store_too() -> None:
    import_module("rlctl.generation.vllm.worker_extension")
    rendezvous: Any = import_module("torch.distributed.rendezvous").rendezvous
    port = free_port()
    store, rank, world = next(rendezvous(f"tcp://{LOOPBACK}:{port}?rank=0&world_size=1"))
    assert (rank, world, store.num_keys() >= 0) == (0, 1, True)
    assert listening_addresses(port) == [LOOPBACK]


@pytest.mark.parametrize(
    ("variables", "lower", "upper"),
    [
        ({}, "", ""),
        ({"NO_PROXY": "a.org, .b.org"}, "a.org,.b.org,", "a.org,.b.org,"),
        ({"no_proxy": "a.org", "NO_PROXY": "b.org"}, "a.org,", "b.org,"),
    ],
)
def test_own_addresses_are_added_to_those_that_no_proxy_serves(
    variables: dict[str, str], lower: str, upper: str
) -> None:
    own_addresses = "127.0.0.1,localhost,::1,10.0.0.2"
    exempt = past_proxies(variables, "10.0.0.2")
    assert exempt == {"no_proxy": lower + own_addresses, "NO_PROXY": upper + own_addresses}
    assert past_proxies(exempt, "10.0.0.2") == exempt
    assert not has_proxy({**exempt, "https_proxy": "http://p:1", "http_proxy": ""})
    assert has_proxy({"ALL_PROXY": "http://p:1"})
    assert past_proxies({"no_proxy": "*"}, "10.0.0.2") == {"no_proxy": "*", "NO_PROXY": "*"}
