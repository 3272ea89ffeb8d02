"""What a message costs inside a job of NVFlare's, against the driver in memory.

Cases `round/b131072` and `message/b...`, with the seconds of four messages of 128 KiB between two
sites, one after another (there and back again, twice), and of one message of 64 bytes or 16 MiB,
half of a round trip. Two sites of `SimEnv`, each a process of its own; frames go through NVFlare's
server over TCP on loopback, without TLS, and are sealed between the two sites.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.bench.rows import Row
from protocols.identity import Identity, fresh_identity
from protocols.seal import fresh_run_key
from secure_apfed.exchange import InMemory, Kind, Links, drive
from secure_apfed.errors import ConfigError

__all__ = ["bench"]

_SIZES = {64: 200, 2**17: 100, 2**24: 4}
_ROUND = 4
_FOLDER = "SECURE_APFED_BENCH"


def bench(quick: bool) -> Iterator[Row]:
    """Seconds a message, and the ratio to memory's."""
    try:
        apart = _in_a_job()
    except ConfigError as error:
        yield Row(case="round/b131072", seconds=None, more={"reason": str(error)})
        return
    memory = {size: _in_memory(size) for size in _SIZES}
    for size in _SIZES:
        here, there = statistics.median(memory[size]), statistics.median(apart[size])
        more = {"peer_seconds": here}
        yield Row(
            case=f"message/b{size}", seconds=there, peer="memory", ratio=there / here, more=more
        )
