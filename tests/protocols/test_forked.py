"""A forked process is no second end of a link, and its copy of a supply or role is refused."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, os
import numpy as np
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import ForkCheck
from apfed_protocols.psi.ecdh import EcdhIntersection
from apfed_protocols.psi.interface import IntersectionAgreement
from tests.protocols.test_psi_supply import AHEAD, SETS, MEMBERS, play, stock
from tests.contracts.hostile import said_in_a_fork
from tests.contracts.sum_parties import agreement, binding, make
from tests.protocols.test_seal import ends, pair_of_links
from apfed_protocols.psi.circuit import CircuitIntersection
from apfed_protocols.psi.interface import Supply


def said(action):
    return said_in_a_fork({"it": action})["it"]


alice, bob = ends()
begun, _ = pair_of_links()
sealed = bob.seal(b"", sequence=0, associated=b"")
supply = stock()["hub"]
claimed = stock()["hub"]
claimed.claim(AHEAD, "hub")
ecdh = EcdhIntersection(IntersectionAgreement(session="s")).hub("hub", ["p"], [b"1"])
circuit = CircuitIntersection(IntersectionAgreement(session="s", dealer="d"))
script = circuit.hub("hub", ["p"], [b"1"])
# Made before the fork, set up after it: the copy would agree the same seeds.
sums = [make(f"{scheme} + pairwise masks", agreement()) for scheme in ("plain", "bfv")]
masked, bfv = (described.contributor("passive_1") for described in sums)
key = {out.receiver: out.body for out in sums[1].receiver().start()}["passive_1"]
peers = {"passive_2", "passive_3"}
hellos = {name: sums[1].contributor(name).start()[0].body for name in peers}


def set_up():
    bfv.receive("active", key)
    for name, hello in hellos.items():
        bfv.receive(name, hello)
    bfv.contribute(np.ones((1, 4)) / 9, binding(1))


told = {
    "masked, start": said(masked.start),
    "bfv, start": said(bfv.start),
    "bfv, receive": said(lambda: bfv.receive("passive_2", hellos["passive_2"])),
    "bfv, set up": said(set_up),
    "link, seal": said(lambda: alice.seal(b"", sequence=0, associated=b"")),
    "link, open": said(lambda: alice.open(sealed, sequence=0, associated=b"")),
    "link, agree": said(lambda: begun.agree(bytes(32), bytes(32))),
    "supply, claim": said(lambda: supply.claim(AHEAD, "hub")),
    "supply, store": said(supply.to_bytes),
    "supply, take": said(lambda: claimed.take(1)),
    "supply, add": said(lambda: claimed.add(b"")),
    "ecdh, start": said(ecdh.start),
    "circuit, start": said(script.start),
}
ecdh.start()
script.start()
told["ecdh, receive"] = said(lambda: ecdh.receive("p", b""))
for name, hello in hellos.items():
    bfv.receive(name, hello)
words = np.zeros((1, 4), dtype=np.uint64)
told["bfv, mask"] = said(lambda: bfv._seeds.add_stream("passive_2", binding(1), words, sign=1))
bfv.receive("active", key)
bfv.contribute(np.ones((1, 4)) / 9, binding(1))
told["circuit, receive"] = said(lambda: script.receive("p", b""))
alice.seal(b"", sequence=0, associated=b"")
alice.open(sealed, sequence=0, associated=b"")
supply.claim(AHEAD, "hub")
# As in a process namespace of its own, where the copy has the number of the original.
number, os.getpid = os.getpid(), lambda: number
same = ForkCheck("it")
told["same number"] = said(same.require)
same.require()
print(json.dumps(told))
"""


@cache
def told() -> dict[str, str]:
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-2000:]
    result: dict[str, str] = json.loads(finished.stdout)
    return result


@pytest.mark.parametrize(
    "use",
    [
        "link, seal", "link, open", "link, agree", "supply, claim", "supply, store",
        "supply, take", "supply, add", "ecdh, start", "ecdh, receive", "circuit, start",
        "circuit, receive", "masked, start", "bfv, start", "bfv, receive", "bfv, set up",
        "bfv, mask", "same number",
    ],
)  # fmt: skip
def test_a_forked_copy_is_refused_and_the_original_goes_on(use: str) -> None:
    assert "belongs to the process that made it" in told()[use]
