"""Network addresses of processes: free ports, torch stores that listen on one address alone, and proxy exemptions."""

import random
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
# Ports that nothing else assigns by itself: Linux assigns ports from 32768 on, and Ray's workers use ports below 20000.
_LEFT_ALONE = range(20_000, 30_000)
_TRIES = 100
# Wildcard address (all addresses of a machine) -> its address family, a remote address, and loopback.
_ANY = {
    "0.0.0.0": (socket.AF_INET, "10.255.255.255", LOOPBACK),
    "::": (socket.AF_INET6, "2001:db8::1", "::1"),
}
_LOCAL_HOSTS = (LOOPBACK, "localhost", "::1")
# Environment variables that name a proxy for addresses of http://.
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def reached_at(bind: str) -> str:
    """Return an address at which clients reach a listener on the address `bind`.

    If `bind` is a wildcard such as 0.0.0.0, return this machine's address on its route to other machines, or loopback
    if it has no route.
    """
    if bind not in _ANY:
        return bind
    family, far, loopback = _ANY[bind]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 1))  # UDP: this chooses a route, and sends nothing
        except OSError:
            return loopback
        return str(probe.getsockname()[0])


def has_proxy(variables: Mapping[str, str]) -> bool:
    """Return True if programs with these environment variables use a proxy for addresses of http://."""
    return any(variables.get(name) for name in _PROXIES)


def past_proxies(variables: Mapping[str, str], *addresses: str) -> dict[str, str]:
    """Return values of `no_proxy` and `NO_PROXY` that also exempt loopback and `addresses` from proxies.

    Both are returned, because programs differ in which they read. If one is unset, it begins with the other's hosts.
    `*` means all hosts. It is returned alone, because programs read `*` in a list as the name of a host.
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
    """Return a TCP port, of an address of this machine, on which nobody listens now.

    The caller may begin to listen seconds later. The port is from a range that Linux and Ray do not assign to others.
    """
    # SystemRandom, because a run's seed does not set it: concurrent runs with one seed must not try the same ports.
    # 0 comes last: Linux then chooses a port.
    for port in (*random.SystemRandom().sample(_LEFT_ALONE, _TRIES), 0):
        with socket.socket(_family(address)) as probe, suppress(OSError):
            probe.bind((address, port))
            return int(probe.getsockname()[1])
    raise OSError(f"no port of {address} is free")


def open_store(host: str, port: int, *, server: bool, timeout: timedelta, world: int | None = None) -> Any:
    """Return torch's TCPStore at host:port. With `server`, this process serves it and listens on `host` alone.

    A server that torch opens listens on every interface, and any client may read and write without a token. world:
    number of processes that the server waits for; None: none.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": world is not None}
    if server:
        listening = socket.create_server((host, port), family=_family(host), backlog=1024)
        # The store owns the descriptor from here on, and closes it.
        options["master_listen_fd"] = listening.detach()
    return TCPStore(host, port, world, server, **options)


def met_at(init_method: str, rank: int, world: int) -> Any:
    """Return the torch store in which ranks find each other.

    init_method: tcp://host:port, where rank 0 serves the store, or file://path.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]
    from torch.distributed.constants import default_pg_timeout

    url = urlsplit(init_method)
    if url.scheme == "file":
        return FileStore(url.path, world)
    assert url.hostname and url.port
    return open_store(url.hostname, url.port, server=rank == 0, timeout=default_pg_timeout, world=world)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
