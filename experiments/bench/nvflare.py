"""What a message costs inside a job of NVFlare's, against the driver in memory.

Cases `nvflare/message/b...`: seconds that one sealed message of 64 bytes, 128 KiB or 16 MiB takes
from one site to another, there and back again and halved. Case `nvflare/round/b131072`: four
messages of 128 KiB, one after another. NVFlare's simulator, each site a process of its own; frames
go through its server over TCP on loopback, without TLS, and are sealed between the two sites.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.bench.rows import Row
from experiments.bench.talk import COUNTS, echo, seconds_of
from protocols.seal import fresh_run_key
from secure_apfed.exchange import InMemory

__all__ = ["bench"]

_ROUND, _ROUND_BYTES = 4, 2**17
_LONGEST_S = 240.0


def bench(quick: bool) -> Iterator[Row]:
    """Seconds, and ratios to memory."""
    if importlib.util.find_spec("nvflare") is None:
        why = "pip install 'secure-apfed[nvflare]'"
        yield Row(case="nvflare", seconds=None, more={"reason": f"nvflare is missing: {why}"})
        return
    apart, memory = _in_a_job(), _in_memory()
    for size in COUNTS:
        here, there = statistics.median(memory[size]), statistics.median(apart[size])
        for name, messages in (("message", 1), ("round", _ROUND)):
            if name == "message" or size == _ROUND_BYTES:
                yield Row(
                    case=f"nvflare/{name}/b{size}", seconds=messages * there, peer="memory",
                    ratio=there / here, more={"peer_seconds": messages * here},
                )  # fmt: skip


def _in_a_job() -> Mapping[int, Sequence[float]]:
    """By size of the payload, seconds of each message between two sites."""
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys; from experiments.bench.nvflare_echo import play; play(sys.argv[1])"
        subprocess.run(  # noqa: S603 - this very program
            [sys.executable, "-c", code, folder],
            check=True, timeout=_LONGEST_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        told = json.loads((Path(folder) / "seconds.json").read_bytes())
    return {int(size): seconds for size, seconds in told.items()}


def _in_memory() -> Mapping[int, Sequence[float]]:
    """The same with both in this process."""
    keys = {name: fresh_run_key() for name in ("here", "there")}
    network = InMemory.sealed(session="bench", contract_hash=bytes(32), run_keys=keys)
    network.begin("there", echo(network.links["there"]))
    links = network.links["here"]
    found = seconds_of(links, lambda script: network.complete("here", script))
    network.close()
    return found
