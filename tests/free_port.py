"""A port of the loopback that nobody listens at, for tests."""

import socket

__all__ = ["free_port"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
