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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from apfed_experiments.bench.rows import Bench, Group, Row, absent
from apfed_experiments.bench.talk import COUNTS, echo, seconds_of
from apfed_protocols.seal import fresh_run_key
from secure_apfed.exchange import InMemory

__all__ = ["BENCH"]

_ROUND, _ROUND_BYTES = 4, 2**17
_LONGEST_S = 240.0


# case -> bytes of a payload, and how many messages there are
_CASES: Mapping[str, tuple[int, int]] = {
    **{f"nvflare/message/b{size}": (size, 1) for size in COUNTS},
    f"nvflare/round/b{_ROUND_BYTES}": (_ROUND_BYTES, _ROUND),
}


def _groups(_quick: bool) -> Sequence[Group]:
    return [Group(tuple(_CASES), _rows)]


BENCH = Bench(groups=_groups, fields=("peer_seconds",))


def _rows(wanted: Collection[str]) -> Iterator[Row]:
    """Seconds, and ratios to memory."""
    if why := _why_missing():
        yield from (absent(case, why) for case in wanted)
        return
    sizes = sorted({_CASES[case][0] for case in wanted})
    apart, memory = _in_a_job(sizes), _in_memory(sizes)
    for case in wanted:
        size, messages = _CASES[case]
        here, there = statistics.median(memory[size]), statistics.median(apart[size])
        yield Row(
            case=case, seconds=messages * there, peer="memory", ratio=there / here,
            more={"peer_seconds": messages * here},
        )  # fmt: skip


def _why_missing() -> str:
    """Return why there is no job; nothing where there can be one."""
    if importlib.util.find_spec("nvflare") is None:
        return "nvflare is missing: pip install 'secure-apfed[nvflare]'"
    return ""


def _in_a_job(sizes: Iterable[int]) -> Mapping[int, Sequence[float]]:
    """By size of the payload, seconds of each message between two sites."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import sys; from apfed_experiments.bench.nvflare_echo import play;"
            "play(sys.argv[1], [int(size) for size in sys.argv[2:]])"
        )
        subprocess.run(  # noqa: S603 - this very program
            [sys.executable, "-c", code, folder, *map(str, sizes)],
            check=True, timeout=_LONGEST_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        told = json.loads((Path(folder) / "seconds.json").read_bytes())
    return {int(size): seconds for size, seconds in told.items()}


def _in_memory(sizes: Iterable[int]) -> Mapping[int, Sequence[float]]:
    """The same with both in this process."""
    keys = {name: fresh_run_key() for name in ("here", "there")}
    network = InMemory.sealed(session="bench", contract_hash=bytes(32), run_keys=keys)
    network.begin("there", echo(network.links["there"]))
    links = network.links["here"]
    found = seconds_of(links, lambda script: network.complete("here", script), sizes)
    network.close()
    return found
