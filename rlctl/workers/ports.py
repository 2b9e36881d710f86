"""Ports for processes that must meet."""

import socket

LOOPBACK = "127.0.0.1"


def free_port(address: str = LOOPBACK) -> int:
    """A TCP port of an address of this machine that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
