"""Masks: what coalitions see is uniform, and what does not fit is refused."""

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import MaskedSum, RecoverableSum, StepBinding
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.masked import MaskedReceiver
from tests.contracts.hostile import looks_uniform
from tests.contracts.sum_parties import Parties, agreement, binding, fresh_parties, parties

SHAPE = (128, 64)


@pytest.fixture(scope="module")
def played() -> Parties:
    return parties("plain + pairwise masks")


def words(frame: bytes) -> NDArray[np.uint32]:
    return np.frombuffer(Frame.parse(frame, sender="peer").blobs[0], dtype="<u4")


def active_masks(played: Parties, bound: StepBinding) -> dict[str, NDArray[np.uint32]]:
    """What the active can take off each contribution."""
    assert isinstance(played.receiver, MaskedReceiver)
    masks = {name: np.zeros(SHAPE, dtype="<u4") for name in played.names}
    for name, mask_BD in masks.items():
        vars(played.receiver)["_seeds"].add_stream(name, bound, mask_BD, sign=1)
    return {name: mask_BD.reshape(-1) for name, mask_BD in masks.items()}


def test_the_judge_sees_a_planted_leak() -> None:
    for bits in [32, 64]:
        rng, kind = np.random.default_rng(0), np.dtype(f"u{bits // 8}")
        assert looks_uniform(rng.integers(0, 2**bits, 8192, dtype=kind))
        assert not looks_uniform(rng.integers(0, 2 ** (bits - 1), 8192, dtype=kind))


def test_coalitions_see_uniform_words(played: Parties) -> None:
    bound = played.next()
    contributions = played.contribute([np.full(SHAPE, 0.001)] * 3, bound)
    seen_by_active = active_masks(played, bound)
    total = sum((words(frame) for frame in contributions.values()), np.zeros(1, np.uint32))
    assert looks_uniform(total)  # the aggregator alone: not even the sum
    for name, frame in contributions.items():
        assert looks_uniform(words(frame))
        assert looks_uniform(words(frame) - seen_by_active[name])  # active and aggregator
    two = [words(contributions[name]) - seen_by_active[name] for name in played.names[:2]]
    assert looks_uniform(two[0] + two[1])  # nor the sum of some
    opened = total - sum(seen_by_active.values(), np.zeros(1, np.uint32))
    assert np.unique(opened).tolist() == [99]  # 3 * round(0.001 * 32767)


def test_an_equivocating_active_with_the_aggregator_gets_noise(played: Parties) -> None:
    """The masks are bound to what was sent, whatever the aggregator lets pass."""
    bound = played.next()
    other = binding(bound.step, message=1)
    told = {"passive_1": bound, "passive_2": other, "passive_3": bound}
    contributions = played.contribute([np.full(SHAPE, 1e6)] * 3, told)
    first, second = active_masks(played, bound), active_masks(played, other)
    opened = np.zeros(SHAPE[0] * SHAPE[1], dtype=np.uint32)
    for name, frame in contributions.items():
        opened += words(frame) - (second if name == "passive_2" else first)[name]
    assert looks_uniform(opened)


def test_an_altered_sum_is_refused() -> None:
    played = fresh_parties("plain + pairwise masks")
    bound = played.next()
    combined = played.combiner.combine(played.contribute([np.ones((2, 2))] * 3, bound))
    altered = combined[:-1] + bytes([combined[-1] ^ 0x40])
    with pytest.raises(RemoteProtocolError, match="lies beyond the range"):
        played.receiver.decode(altered, (2, 2), bound)


def test_sizes_are_checked(played: Parties) -> None:
    contributions = played.contribute([np.ones((2, 2))] * 3, played.next())
    short = bytearray(contributions["passive_1"][:-4])
    short[124:128] = (12).to_bytes(4, "big")
    with pytest.raises(RemoteProtocolError, match="passive_1 announced 2x2 values and sent other"):
        played.combiner.combine({**contributions, "passive_1": bytes(short)})


def test_the_ring_must_hold_the_sum() -> None:
    MaskedSum(agreement(256, bits=24))
    with pytest.raises(LocalProtocolError, match="need 33 bits, the ring has 32; use ring_bits 64"):
        MaskedSum(agreement(257, bits=24))
    with pytest.raises(LocalProtocolError, match="32 or 64, got 16"):
        MaskedSum(agreement(), ring_bits=16)


@pytest.mark.parametrize("kind", [MaskedSum, RecoverableSum])
@pytest.mark.parametrize(("bits", "exact"), [(31, True), (32, False)])
def test_one_bit_more_leaves_the_ring(
    kind: type[MaskedSum], bits: int, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No agreement says so many bits; forced, the last that fits is exact and one more is not."""
    agreed = agreement(2)
    object.__setattr__(agreed, "bits", bits)
    if not exact:
        with pytest.raises(LocalProtocolError, match="need 33 bits, the ring has 32"):
            kind(agreed)
        monkeypatch.setattr(kind, "__post_init__", lambda _: None)
    values = np.array([[1.0], [-1.0]])
    played, levels = Parties(kind(agreed)), 2 ** (bits - 1) - 1
    total = np.rint(played.add([values, values]) * levels)
    assert np.array_equal(total, 2 * levels * values) == exact


def test_the_wide_ring_gives_the_same_sum() -> None:
    values = [np.array([[1e300, -1e300, 0.1]]) * (-1) ** k for k in range(4)]
    for bits in (2, 16, 24):
        agreed = agreement(4, bits=bits)
        narrow, wide = (Parties(MaskedSum(agreed, ring_bits=ring)) for ring in (32, 64))
        assert np.array_equal(narrow.add(values), wide.add(values))


def test_one_passive_hides_from_the_aggregator_only() -> None:
    played = Parties(MaskedSum(agreement(2, contributors=("passive_1",), allow_single=True)))
    bound = played.next()
    contribution = played.contribute([np.full(SHAPE, 0.01)], bound)
    assert looks_uniform(words(contribution["passive_1"]))
    combined = played.combiner.combine(contribution)
    assert np.unique(played.receiver.decode(combined, SHAPE, bound)).size == 1


def test_setup_takes_one_good_key_of_each_peer() -> None:
    described = MaskedSum(agreement())
    first, second = described.contributor("passive_1"), described.contributor("passive_2")
    with pytest.raises(LocalProtocolError, match="no mask key of passive_2, passive_3, active"):
        first.contribute(np.zeros((1, 1)), binding(0))
    good = next(out.body for out in second.start() if out.receiver == "passive_1")
    with pytest.raises(RemoteProtocolError, match="expects one from each of passive_2, passive_3"):
        first.receive("aggregator", good)
    frame = Frame.parse(good, sender="passive_2")
    for key, message in (
        (b"", "no mask key of 32 bytes"),
        (bytes(31), "no mask key of 32 bytes"),
        (bytes(32), "low order"),
    ):
        with pytest.raises(RemoteProtocolError, match=message):
            first.receive("passive_2", Frame(**{**vars(frame), "blobs": (key,)}).pack())
    (wide, *_) = MaskedSum(agreement(), ring_bits=64).contributor("passive_2").start()
    with pytest.raises(RemoteProtocolError, match="with other parameters than passive_1"):
        first.receive("passive_2", wide.body)
    first.receive("passive_2", good)
    with pytest.raises(RemoteProtocolError, match="sent a mask key to passive_1, who expects"):
        first.receive("passive_2", good)
