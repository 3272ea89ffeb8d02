"""BFV: the masks under the encryption, and the limits of the plain modulus."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums import BfvSum
from protocols.sums.fixed_point import FixedPoint
from protocols.sums.frame import Frame
from protocols.sums.headroom import PLAIN_MODULUS_BITS, solve_bfv
from protocols.sums.seal_scheme import Bfv, SealScheme
from tests.contracts.sum_parties import Parties, agreement, binding, parties

SHAPE = (128, 64)


@pytest.fixture(scope="module")
def played() -> Parties:
    return parties("bfv")


def decrypted(played: Parties, frame: bytes) -> NDArray[np.float64]:
    """What the active reads in one contribution that the aggregator leaked to it."""
    assert isinstance(played.sum, BfvSum)
    blobs = Frame.parse(frame, sender="leak").blobs
    context = vars(played.receiver)["_context"]
    return played.sum.scheme.decrypt(context, blobs, len(blobs), sender="leak")


def looks_uniform(slots: NDArray[np.float64], modulus: int) -> bool:
    """Mean and variance of the 4096 slots are those of uniform residues, within 6 deviations."""
    unit = slots / modulus
    count = unit.size
    mean_fits = abs(unit.mean()) < 6 / np.sqrt(12 * count)
    variance_fits = abs(unit.var() - 1 / 12) < 6 * np.sqrt(1 / 180 / count)
    return bool(mean_fits and variance_fits)


def test_the_judge_sees_a_planted_leak() -> None:
    rng = np.random.default_rng(0)
    assert looks_uniform(rng.uniform(-500, 500, 4096), 1000)
    assert not looks_uniform(rng.uniform(-400, 400, 4096), 1000)
    assert not looks_uniform(rng.uniform(-350, 500, 4096), 1000)


def test_active_and_aggregator_together_see_uniform_slots(played: Parties) -> None:
    assert isinstance(played.sum, BfvSum)
    modulus = played.sum.headroom.plain_modulus
    bound = played.next()
    contributions = played.contribute([np.full(SHAPE, 0.001)] * 3, bound)
    seen = [decrypted(played, frame) for frame in contributions.values()]
    assert all(looks_uniform(slots, modulus) for slots in seen)
    two = (seen[0] + seen[1] + modulus / 2) % modulus - modulus / 2
    assert looks_uniform(two, modulus)
    combined = played.combiner.combine(contributions)
    assert len(np.unique(played.receiver.decode(combined, SHAPE, bound))) == 1


def test_an_equivocating_active_with_the_aggregator_gets_noise(played: Parties) -> None:
    """The masks are bound to what was sent, whatever the aggregator lets pass."""
    assert isinstance(played.sum, BfvSum)
    bound = played.next()
    told = dict.fromkeys(played.names, bound) | {"passive_2": binding(bound.step, message=1)}
    contributions = played.contribute([np.full(SHAPE, 1e6)] * 3, told)
    forged = {
        name: replace(Frame.parse(frame, sender=name), binding=bound.digest).pack()
        for name, frame in contributions.items()
    }
    combined = played.combiner.combine(forged)
    assert looks_uniform(decrypted(played, combined), played.sum.headroom.plain_modulus)
    with pytest.raises(RemoteProtocolError, match="the passives answered different messages"):
        played.receiver.decode(combined, SHAPE, bound)


def test_setup_needs_the_key_and_every_seed() -> None:
    described = BfvSum(agreement())
    first, second = described.contributor("passive_1"), described.contributor("passive_2")
    first.receive("active", described.receiver().start()[0].body)
    assert not first.finished
    with pytest.raises(LocalProtocolError, match="no mask key of passive_2, passive_3 yet"):
        first.contribute(np.zeros((1, 1)), binding(0))
    messages = {out.receiver: out.body for out in second.start()}
    assert set(messages) == {"passive_1", "passive_3"}
    first.receive("passive_2", messages["passive_1"])
    with pytest.raises(RemoteProtocolError, match="expects one from each of passive_2, passive_3"):
        first.receive("passive_2", messages["passive_1"])


@pytest.mark.parametrize("passives", [2, 4, 16, 32, 33, 64])
def test_plain_moduli_stay_within_the_bound(passives: int) -> None:
    found = solve_bfv(FixedPoint(clip_norm=1.0, bits=16, contributors=passives))
    assert found.packing.fields == (2 if passives <= 32 else 1)
    assert found.plain_modulus.bit_length() <= PLAIN_MODULUS_BITS
    assert found.plain_modulus % 8192 == 1
    assert found.prime_bits == {2: 50, 4: 50, 16: 55, 32: 57, 33: 50, 64: 50}[passives]


@pytest.mark.parametrize(("bits", "exact"), [(60, True), (54, False)])
def test_a_smaller_prime_decrypts_garbage(bits: int, exact: bool) -> None:
    """64 ciphertexts at the bound of t are exact; with too small a prime SEAL fails in silence."""
    modulus = 4398046486529
    scheme = SealScheme(Bfv(4096, (bits,), modulus))
    keys = scheme.key_pair()
    rng = np.random.default_rng(0)
    slots = rng.integers(-modulus // 2, modulus // 2, (4, 1, 4096))
    parts = {str(k): scheme.encrypt(keys, slots[k % 4]) for k in range(64)}
    total = scheme.decrypt(keys, scheme.add(keys, parts, 1), 1, sender="the test")
    expected = (16 * slots.sum(axis=0)[0] + modulus // 2) % modulus - modulus // 2
    assert np.array_equal(total.astype(np.int64), expected) == exact


def test_what_does_not_fit_says_what_would() -> None:
    wanted = FixedPoint(clip_norm=1.0, bits=34, contributors=1000)
    with pytest.raises(LocalProtocolError, match=r"do not fit a data prime of .* bits; 32 bits"):
        solve_bfv(wanted)
    with pytest.raises(LocalProtocolError, match="less than 128-bit security"):
        solve_bfv(wanted, poly_degree=1024)
