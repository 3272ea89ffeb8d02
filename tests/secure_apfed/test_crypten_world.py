"""A real CrypTen world on the loopback: exact sums, limits on every wait, nothing left behind."""

import json
import math
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apfed_protocols.crypten import load_crypten
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.contrib.crypten_world import crypten_world
from tests.docs.pages import blocks
from tests.waiting import free_port
from tests.with_crypten import installed

pytestmark = installed

START = """
import json, os, sys, time, warnings
warnings.simplefilter("error")
import numpy as np
from apfed_protocols.crypten import sum_at_first
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contrib.crypten_world import crypten_world

rank, size, port = map(int, sys.argv[1:4])
numbers = np.array([[rank + 1, -(2**40) * (rank + 1)], [2**61 if rank == 0 else -(2**61), 0]])
"""
SUM = """
class Witness:
    '''Keeps every array that reaches this party.'''
    def __init__(self, world):
        self.world, self.seen = world, []
    def __getattr__(self, name):
        def call(*given, **named):
            got = getattr(self.world, name)(*given, **named)
            parts = got if isinstance(got, list) else [got]
            self.seen += [p.numpy().copy() for p in parts if hasattr(p, "numpy")]
            return got
        return call

before = dict(os.environ)
with crypten_world(rank, size, port=port, timeout_s=30) as world:
    during = dict(os.environ)
    witness = Witness(world)
    total = sum_at_first(witness, numbers)
    quiet = len(witness.seen)
    import torch
    leak = witness.all_reduce(torch.from_numpy(numbers.copy()))
plain = leak.numpy()
found = [bool((plain == seen).any()) for seen in witness.seen]
print(json.dumps({
    "total": None if total is None else total.tolist(),
    "plain": plain.tolist(),
    "leaked": any(found[:quiet]), "detected": any(found[quiet:]), "messages": quiet,
    "environment": before == during == dict(os.environ),
}))
"""
SILENT = """
with crypten_world(rank, size, port=port, timeout_s=2) as world:
    world.barrier()
    if rank == 1:
        time.sleep(HOW_LONG)
        os._exit(0)
    began = time.monotonic()
    try:
        sum_at_first(world, numbers)
    except RemoteProtocolError as error:
        print(json.dumps({"error": str(error), "seconds": time.monotonic() - began}))
        sys.stdout.flush()
        os._exit(0)
"""


def play(script: str, size: int, *options: str) -> list[str]:
    """Run the script at every rank; return what each printed."""
    port, path = str(free_port()), os.pathsep.join(sys.path)
    started = [
        subprocess.Popen(
            [sys.executable, *options, "-c", script, str(rank), str(size), port],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    said = [party.communicate(timeout=120) for party in started]
    assert {party.returncode for party in started} == {0}, said
    return [out for out, _ in said]


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_first_party_alone_learns_the_exact_sum(size: int) -> None:
    results = [json.loads(said) for said in play(START + SUM, size)]
    ranks = range(1, size + 1)
    exact = [[sum(ranks), -(2**40) * sum(ranks)], [2**61 * (2 - size), 0]]
    assert [result["total"] for result in results] == [exact] + [None] * (size - 1)
    for result in results:
        assert result["environment"]
        assert result["messages"] >= size
    for result in results[1:]:
        assert result["detected"], "the witness would see plaintext"
        assert not result["leaked"]
        assert result["plain"] == exact


def test_the_guides_example_runs() -> None:
    every = blocks("docs/secure-sum.md", "python")
    (example,) = [block for block in every if "crypten_world" in block]
    assert play(example, 2, "-W", "error") == ["[0 3 6]\n", "None\n"]


@pytest.mark.parametrize(
    ("how_long", "least"), [(0, 0.0), pytest.param(6, 1.0, marks=pytest.mark.slow)]
)
def test_a_party_that_dies_or_falls_silent_ends_the_wait(how_long: int, least: float) -> None:
    first = json.loads(play(START + SILENT.replace("HOW_LONG", str(how_long)), 2)[0])
    assert "another party fell silent or went away" in first["error"]
    assert "open a new world" in first["error"]
    assert first["seconds"] >= least


@pytest.mark.parametrize("rank", [0, 1])
def test_parties_that_do_not_come_are_not_waited_for(
    rank: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(RemoteProtocolError, match=rf"party {rank}: the 2 parties .* within 1 s"),
        crypten_world(rank, 2, port=free_port(), timeout_s=1),
    ):
        pass
    assert capfd.readouterr().out == ""


def refused(says: str, rank: int, size: int, **how: Any) -> None:
    with (
        pytest.raises(LocalProtocolError, match=says),
        crypten_world(rank, size, **{"port": free_port(), **how}),
    ):
        pass


def listening() -> set[str]:
    """Addresses at which this process listens, as Linux tells them."""
    own = {str(at.readlink()) for at in Path("/proc/self/fd").iterdir() if at.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                found.add(words[1])
    return found


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads /proc")
def test_a_world_is_the_only_one_listens_at_the_loopback_and_leaves_nothing() -> None:
    crypten = load_crypten()
    before, generators = listening(), crypten.generators
    primitives = crypten.mpc.primitives
    for _ in range(2):
        with crypten_world(0, 1, port=free_port()) as world:
            assert {at.partition(":")[0] for at in listening() - before} == {"0100007F"}
            refused("close that world first", 0, 1)
            with pytest.raises(LocalProtocolError, match="'prev', which is no cryptographic one"):
                crypten.cryptensor([1.0])
            bits = primitives.BinarySharedTensor.from_shares(torch.tensor([1]))
            with pytest.raises(LocalProtocolError, match="adds but does not multiply"):
                _ = bits & bits
            shared = primitives.ArithmeticSharedTensor.from_shares(torch.tensor([7]), precision=0)
            with pytest.raises(LocalProtocolError, match="leave plaintext at other parties"):
                shared.reveal(dst=0)
            assert shared.reveal().tolist() == [7]
            world.barrier()
        with pytest.raises(LocalProtocolError, match="this CrypTen world is closed"):
            world.barrier()
        assert crypten.generators is generators


def test_a_process_group_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/m", rank=0, world_size=1)
    try:
        with crypten_world(0, 1, port=free_port()) as world:
            world.barrier()
        assert dist.is_initialized()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_a_port_in_use_and_bad_ranks_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused(r"cannot listen .* choose another port", 0, 1, port=taken.getsockname()[1])
    for rank, size, timeout_s in (
        (2, 2, 1.0), (-1, 2, 1.0), (0, 1, 0.0),
        (0, 1, math.nan), (0, 1, math.inf), (1, 2, 1e12),
    ):  # fmt: skip
        refused("ranks 0 to size - 1", rank, size, timeout_s=timeout_s)
    for port in (-1, 0, 2**16):
        refused("a port from 1 to 65535", 0, 1, port=port, timeout_s=1)
