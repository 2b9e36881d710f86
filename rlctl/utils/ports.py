"""Ports at which processes meet, and torch's store, bound to one address alone."""

import random
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
# Linux hands out those from 32768 on to callers that ask for any port; Ray's workers take those below 20000.
_LEFT_ALONE = range(20_000, 30_000)
_TRIES = 100


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
