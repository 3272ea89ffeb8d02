"""Our shared bits beside CrypTen: the same triples and inputs give the very same shares.

Two processes run CrypTen's `BinarySharedTensor` and `beaver.AND` with our dealer's triples,
through the six levels that compare 64-bit tags; CrypTen adds public terms at rank 0, as our
leading party does.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from protocols.psi.circuit import bits

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("crypten") is None, reason="crypten is absent"),
    pytest.mark.slow,
]

LEVELS = (32, 16, 8, 4, 2, 1)
RNG = np.random.default_rng(11)
# Registering an empty converter first lets CrypTen 0.4.1 load with a torch that dropped what
# its ONNX conversion imports.
PARTY = """
import os, sys, types, warnings
warnings.simplefilter("ignore")
converter = types.ModuleType("crypten.nn.onnx_converter")
converter.from_onnx = converter.from_pytorch = converter.from_tensorflow = None
converter.TF_AND_TF2ONNX = False
sys.modules[converter.__name__] = converter
import crypten, numpy, torch
from crypten.mpc.primitives import BinarySharedTensor, beaver

torch.set_num_threads(1)
folder, rank = sys.argv[1:]
given = numpy.load(f"{folder}/in{rank}.npz")
used = 0

def shared(words):
    return BinarySharedTensor.from_shares(torch.from_numpy(words.view(numpy.int64).copy()))

class OurDealer:
    def generate_binary_triple(self, size, _, device=None):
        global used
        start, used = used, used + size.numel()
        return tuple(shared(given[k][start:used].reshape(tuple(size))) for k in "abc")

crypten.init()
crypten.mpc.get_default_provider = lambda: OurDealer()
planes = shared(given["planes"])
for half in (32, 16, 8, 4, 2, 1):
    planes = beaver.AND(planes[:half], planes[half:])
numpy.save(f"{folder}/out{rank}.npy", planes.share.numpy().view(numpy.uint64))
torch.distributed.barrier()
os._exit(0)  # gloo's threads now and then abort an orderly end
"""


def ours(
    planes: list[NDArray[np.uint64]], triples: list[bits.TripleShares]
) -> list[NDArray[np.uint64]]:
    for half in LEVELS:
        taken = [triple.take(planes[0][:half].shape) for triple in triples]
        sent = [bits.mask(x[:half], x[half:], t) for x, t in zip(planes, taken, strict=True)]
        opened = sent[0] ^ sent[1]
        planes = [bits.multiply(opened, t, leads=k == 0) for k, t in enumerate(taken)]
    return planes


def crypten(folder: Path, inputs: list[dict[str, NDArray[np.uint64]]]) -> list[NDArray[np.uint64]]:
    started = []
    for rank, arrays in enumerate(inputs):
        np.savez(folder / f"in{rank}.npz", allow_pickle=False, **arrays)
        environment = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": "2", "RENDEZVOUS": f"file://{folder}/meet",
            "DISTRIBUTED_BACKEND": "gloo", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", PARTY, str(folder), str(rank)]
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
    for party in started:
        _, complaint = party.communicate(timeout=120)
        assert party.returncode == 0, complaint.decode()[-2000:]
    return [np.load(folder / f"out{rank}.npy") for rank in range(2)]


def test_equality_of_tags_gives_the_shares_that_crypten_gives(tmp_path: Path) -> None:
    slots, bins = 3, 128
    hub_tags = RNG.integers(0, 2**64, (slots, bins), np.uint64)
    member_tags = RNG.integers(0, 2**64, (slots, bins), np.uint64)
    equal = RNG.random((slots, bins)) < 0.4
    member_tags[equal] = hub_tags[equal]
    planes = [~bits.bit_planes(hub_tags), bits.bit_planes(member_tags)]
    count = 63 * slots * bins // 64
    seeds, correction = bits.deal_triples(2, count)
    triples = [
        bits.TripleShares.expand(seeds[0], count),
        bits.TripleShares.expand(seeds[1], count, correction),
    ]
    inputs = [
        {"planes": x, **dict(zip("abc", (word.copy() for word in t.words), strict=True))}
        for x, t in zip(planes, triples, strict=True)
    ]
    theirs = crypten(tmp_path, inputs)
    mine = ours(planes, triples)
    for one, other in zip(mine, theirs, strict=True):
        assert (one == other).all()
    opened = np.unpackbits((mine[0] ^ mine[1])[0].view(np.uint8), bitorder="little")
    assert (opened.reshape(slots, bins).astype(bool) == equal).all()
