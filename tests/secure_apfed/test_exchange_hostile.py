"""Thousands of mutated payloads and frames in a process of their own: no crash, no other error.

In a process of their own because tensors are parsed by native code, which could take the
whole test run down with it.
"""

import subprocess
import sys

FUZZ = """
import random
import resource

import torch

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.seal import fresh_run_key
from secure_apfed.exchange import InMemory, Kind, TensorSpec, pack, unpack
from tests.contracts.hostile import mutated

chance = random.Random(11)
expected = {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float32, (None, 8))}
payload = pack({"rows": torch.arange(4), "z": torch.ones(4, 8)}, {"learn": True})
keys = {name: fresh_run_key() for name in ("active", "p1")}
network = InMemory.sealed(session="s", contract_hash=bytes(32), run_keys=keys)
frames = []
network.links["active"]._post = lambda receiver, frame: frames.append(frame)
network.links["active"].send("p1", Kind.REPRESENTATIONS, 0, payload)
(frame,) = frames


def payload_refused(data: bytes) -> bool:
    try:
        unpack(data, expected, sender="active")
    except RemoteProtocolError:
        return True
    return False


def frame_refused(data: bytes) -> bool:
    script = network.links["p1"].receive("active", Kind.REPRESENTATIONS, step=0)
    script.send(None)
    try:
        script.send(("active", data))
    except StopIteration:
        return False
    except RemoteProtocolError:
        return True


before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
refused = sum(payload_refused(mutated(chance, payload)) for _ in range(4_000))
bad_frames = [bad for bad in (mutated(chance, frame) for _ in range(4_000)) if bad != frame]
refused_frames = sum(frame_refused(bad) for bad in bad_frames)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert not payload_refused(payload)
assert not frame_refused(frame)
print(refused, len(bad_frames) - refused_frames, grown // 1024)
"""


def test_mutated_bytes_crash_nothing_and_hold_no_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FUZZ], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    refused, frames_let_through, grown_mib = map(int, done.stdout.split())
    assert refused > 2000  # a changed number or key of the metadata may still be a payload
    assert frames_let_through == 0
    assert grown_mib < 100
