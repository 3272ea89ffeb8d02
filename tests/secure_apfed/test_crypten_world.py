"""A real CrypTen world on the loopback: exact sums, limits on every wait, nothing left behind."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from secure_apfed.contrib.crypten_world import crypten_world
from tests.free_port import free_port
from tests.with_crypten import installed

pytestmark = installed

ROOT = Path(__file__).parents[2]
START = """
import json, os, sys, time, warnings
warnings.simplefilter("error")
import numpy as np
from apfed_protocols.crypten import sum_at_first
from apfed_protocols.crypten import load_crypten
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
FIRST_PARTY = """
warnings.simplefilter("ignore")
crypten = load_crypten()
first_party = crypten.mpc.provider.TrustedFirstParty()
with crypten_world(rank, size, port=port, provider=first_party, insecure_development=True):
    x = crypten.cryptensor([1.0, -2.0, 3.0], src=1)
    opened = (x * x).get_plain_text().tolist()
empty = not any(crypten.generators[name] for name in crypten.generators)
print(json.dumps({"opened": opened, "generators_gone": empty}))
"""


def play(script: str, size: int) -> list[dict[str, Any]]:
    """Run the script at every rank; return what each printed."""
    port, started = str(free_port()), []
    for rank in range(size):
        command = [sys.executable, "-c", START + script, str(rank), str(size), port]
        started.append(
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    results = []
    for party in started:
        out, complaint = party.communicate(timeout=120)
        assert party.returncode == 0, complaint[-3000:]
        results.append(json.loads(out) if out else {})
    return results


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_first_party_alone_learns_the_exact_sum(size: int) -> None:
    results = play(SUM, size)
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


def test_the_guides_example_runs(tmp_path: Path) -> None:
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/secure-sum.md").read_text(), re.DOTALL
    )
    (example,) = [block for block in blocks if "crypten_world" in block]
    script, port = tmp_path / "party.py", str(free_port())
    script.write_text(example)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), str(rank), "2", port],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [party.communicate(timeout=120) for party in started] == [
        ("[0 3 6]\n", ""),
        ("None\n", ""),
    ]


@pytest.mark.parametrize(
    ("how_long", "least"), [(0, 0.0), pytest.param(6, 1.0, marks=pytest.mark.slow)]
)
def test_a_party_that_dies_or_falls_silent_ends_the_wait(how_long: int, least: float) -> None:
    first = play(SILENT.replace("HOW_LONG", str(how_long)), 2)[0]
    assert "another party fell silent or went away" in first["error"]
    assert "open a new world" in first["error"]
    assert first["seconds"] >= least


@pytest.mark.slow
def test_the_first_partys_triples_are_for_development_only() -> None:
    for result in play(FIRST_PARTY, 2):
        assert result == {"opened": [1.0, 4.0, 9.0], "generators_gone": True}


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


def test_providers_of_crypten_are_refused() -> None:
    from apfed_protocols.crypten import load_crypten

    provider = load_crypten().mpc.provider
    for unsafe in (provider.TrustedFirstParty(), provider.TrustedThirdParty(), object()):
        refused("or say insecure_development", 0, 1, provider=unsafe)
    how: Any = {"provider": provider.TrustedFirstParty(), "insecure_development": True}
    with (
        pytest.warns(UnsafeChoiceWarning, match="for development only"),
        crypten_world(0, 1, port=free_port(), **how),
    ):
        pass


def test_crypten_does_not_share_numbers_by_its_own_generators() -> None:
    from apfed_protocols.crypten import load_crypten

    crypten = load_crypten()
    before = crypten.generators
    with (
        crypten_world(0, 1, port=free_port()),
        pytest.raises(LocalProtocolError, match="'prev', which is no cryptographic one"),
    ):
        crypten.cryptensor([1.0])
    assert crypten.generators is before


def test_without_a_provider_there_is_no_multiplication() -> None:
    import torch

    from apfed_protocols.crypten import load_crypten

    with crypten_world(0, 1, port=free_port()):
        shared = load_crypten().mpc.primitives.BinarySharedTensor.from_shares(torch.tensor([1]))
        with pytest.raises(LocalProtocolError, match="adds but does not multiply"):
            _ = shared & shared


def test_plaintext_for_one_party_is_gathered_not_reduced() -> None:
    import torch

    from apfed_protocols.crypten import load_crypten

    with crypten_world(0, 1, port=free_port()):
        arithmetic = load_crypten().mpc.primitives.ArithmeticSharedTensor
        shared = arithmetic.from_shares(torch.tensor([7]), precision=0)
        with pytest.raises(LocalProtocolError, match="leave plaintext at other parties"):
            shared.reveal(dst=0)
        assert shared.reveal().tolist() == [7]


def test_worlds_follow_one_another_but_do_not_overlap() -> None:
    for _ in range(2):
        with crypten_world(0, 1, port=free_port()) as world:
            refused("close that world first", 0, 1)
            world.barrier()
        with pytest.raises(LocalProtocolError, match="this CrypTen world is closed"):
            world.barrier()


def test_a_process_group_of_the_caller_is_left_alone(tmp_path: Path) -> None:
    import torch.distributed as dist

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


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="reads /proc")
def test_only_the_loopback_listens() -> None:
    def listening() -> set[str]:
        own = {str(at.readlink()) for at in Path("/proc/self/fd").iterdir() if at.is_symlink()}
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                    found.add(words[1])
        return found

    before = listening()
    with crypten_world(0, 1, port=free_port()):
        opened = listening() - before
        assert opened
        assert {address.partition(":")[0] for address in opened} == {"0100007F"}


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
