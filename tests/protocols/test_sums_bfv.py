"""BFV over pairwise masks: what is under the encryption."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import BfvSum, MaskedBfvSum
from apfed_protocols.sums.frames import Frame
from tests.contracts.sum_parties import Parties, agreement, binding, fresh_parties, parties

SHAPE = (128, 64)


@pytest.fixture(scope="module")
def played() -> Parties:
    return parties("bfv + pairwise masks")


def decrypted(played: Parties, frame: bytes) -> NDArray[np.float64]:
    """What the active reads in one contribution that the aggregator leaked to it."""
    assert isinstance(played.sum, MaskedBfvSum)
    blobs = Frame.parse(frame, sender="leak").blobs
    context = vars(played.receiver)["_context"]
    return played.sum.cipher.decrypt(context, blobs, len(blobs), sender="leak")


def looks_uniform(slots: NDArray[np.float64], modulus: int) -> bool:
    """Mean and variance of 4096 coefficients are those of uniform residues, to 6 deviations."""
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


def test_active_and_aggregator_together_see_uniform_coefficients(played: Parties) -> None:
    assert isinstance(played.sum, MaskedBfvSum)
    modulus = 2**played.sum.headroom.bits
    bound = played.next()
    contributions = played.contribute([np.full(SHAPE, 0.001)] * 3, bound)
    seen = [decrypted(played, frame) for frame in contributions.values()]
    assert all(looks_uniform(slots, modulus) for slots in seen)
    two = (seen[0] + seen[1] + modulus / 2) % modulus - modulus / 2
    assert looks_uniform(two, modulus)
    combined = played.combiner.combine(contributions)
    assert len(np.unique(played.receiver.decode(combined, SHAPE, bound))) == 1


def test_an_equivocating_active_with_the_aggregator_gets_noise() -> None:
    """The masks are bound to what was sent, whatever the aggregator lets pass."""
    played = fresh_parties("bfv + pairwise masks")
    assert isinstance(played.sum, MaskedBfvSum)
    bound = played.next()
    told = dict.fromkeys(played.names, bound) | {"passive_2": binding(bound.step, message=1)}
    contributions = played.contribute([np.full(SHAPE, 1e6)] * 3, told)
    forged = {
        name: replace(Frame.parse(frame, sender=name), binding=bound.digest).pack()
        for name, frame in contributions.items()
    }
    combined = played.combiner.combine(forged)
    assert looks_uniform(decrypted(played, combined), 2**played.sum.headroom.bits)
    with pytest.raises(RemoteProtocolError, match="the passives answered different messages"):
        played.receiver.decode(combined, SHAPE, bound)


def test_setup_needs_the_key_and_every_seed() -> None:
    described = MaskedBfvSum(agreement())
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


def test_the_smallest_prime_that_fits_is_taken() -> None:
    for passives, prime_bits, plain_bits in [(2, 56, 43), (4, 56, 42), (32, 60, 45), (64, 60, 44)]:
        for kind in (BfvSum, MaskedBfvSum):
            found = kind(agreement(passives)).headroom
            assert found.packing.fields == 2
            assert (found.primes, found.bits) == ((prime_bits,), plain_bits)
