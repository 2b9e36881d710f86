"""Ports at which processes meet, torch's store, bound to one address alone, and addresses that no proxy serves."""

import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
# Linux hands out those from 32768 on to callers that ask for any port; Ray's workers take those below 20000.
_LEFT_ALONE = range(20_000, 30_000)
_TRIES = 100
# Address that means all of a machine -> its family, an address far away, and loopback.
_ANY = {
    "0.0.0.0": (socket.AF_INET, "10.255.255.255", LOOPBACK),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
_LOCAL_HOSTS = (LOOPBACK, "localhost", "::1")
# Variables whose proxy serves an address of http://.
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def reached_at(bind: str) -> str:
    """Return the address by which others reach a listener on `bind`.

    For all addresses of this machine: that of its route to other machines, or loopback where no network has a route.
    """
    if bind not in _ANY:
        return bind
    family, far, loopback = _ANY[bind]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 1))  # nothing is sent
        except OSError:
            return loopback
        return str(probe.getsockname()[0])


def has_proxy(variables: Mapping[str, str]) -> bool:
    """Return True if programs with these variables reach addresses of http:// by a proxy."""
    return any(variables.get(name) for name in _PROXIES)


def past_proxies(variables: Mapping[str, str], *addresses: str) -> dict[str, str]:
    """Return `no_proxy` and `NO_PROXY` with loopback and `addresses` added: no proxy serves these.

    Some programs read the one, and some the other. One that is unset begins as the other. `*` alone stands for all
    hosts, and stays alone: programs take `*` in a list for a name.
    """
    exempt = {}
    for name, other in (("no_proxy", "NO_PROXY"), ("NO_PROXY", "no_proxy")):
        words = (variables.get(name) or variables.get(other) or "").split(",")
        hosts = [word.strip() for word in words if word.strip()]
        if "*" in hosts:
            exempt[name] = "*"
        else:
            exempt[name] = ",".join(dict.fromkeys(chain(hosts, _LOCAL_HOSTS, addresses)))
    return exempt


def free_port(address: str = LOOPBACK) -> int:
    """Return a TCP port of an address of this machine that nobody listens on at this moment.

    The caller listens there only after seconds of imports. Until then no other program is given it by chance.
    """
    # Not the generator that a run's seed sets: runs side by side would try the same ports.
    for port in (*random.SystemRandom().sample(_LEFT_ALONE, _TRIES), 0):
        with socket.socket(_family(address)) as probe, suppress(OSError):
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no port of {address} is free")


def open_store(host: str, port: int, *, server: bool, timeout: timedelta, world: int | None = None) -> Any:
    """Return torch's TCPStore at host:port; its server listens on that address alone.

    torch's own server listens on every interface, and any client may read and write without a token. world: processes
    that the server waits for; None waits for nobody.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": world is not None}
    if server:
        listening = socket.create_server((host, port), family=_family(host), backlog=1024)
        # The store closes it.
        options["master_listen_fd"] = listening.detach()
    return TCPStore(host, port, world, server, **options)


def met_at(init_method: str, rank: int, world: int) -> Any:
    """Return the store that ranks meet at: tcp://host:port, served by rank 0, or file://path."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.constants import default_pg_timeout

    url = urlsplit(init_method)
    if url.scheme == "file":
        return FileStore(url.path, world)
    assert url.hostname and url.port
    return open_store(url.hostname, url.port, server=rank == 0, timeout=default_pg_timeout, world=world)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
