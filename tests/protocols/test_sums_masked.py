"""Masks: what coalitions see is uniform, and what does not fit is refused."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError, UnsafeChoiceWarning
from apfed_protocols.randomness import keystream
from apfed_protocols.sums import MaskedBfvSum, MaskedSum, RecoverableSum, StepBinding
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.masked import MaskedReceiver, PairwiseSeeds, add_keystream
from tests.contracts.hostile import alter_frame, looks_uniform
from tests.contracts.sum_parties import Parties, agreement, binding, fresh_parties, parties
from tests.refusals import list_unrefused

SHAPE = (128, 64)
MASKED = ["plain + pairwise masks", "plain + recoverable masks", "bfv + pairwise masks"]


def numbers(played: Parties, frame: bytes) -> NDArray[np.uint64]:
    """Return what lies under the masks, to whoever holds the active's key."""
    blobs = Frame.parse(frame, sender="peer").blobs
    if isinstance(played.sum, MaskedBfvSum):
        context = vars(played.receiver)["_key_context"]
        slots = played.sum.cipher.decrypt(context, blobs, len(blobs), sender="leak")
        found: NDArray[np.uint64] = np.rint(slots).astype(np.int64).view(np.uint64)
        return found
    return np.frombuffer(blobs[0], dtype="<u4").astype(np.uint64)


def uniform(seen: NDArray[np.uint64], played: Parties) -> bool:
    """Every bit of the ring, of its lowest 32 and of its highest."""
    bits = (
        played.sum.parameters.scale_or_modulus_bits if isinstance(played.sum, MaskedBfvSum) else 32
    )
    highest = (seen & np.uint64(2**bits - 1)) >> np.uint64(bits - 32)
    return looks_uniform(seen.astype(np.uint32)) and looks_uniform(highest.astype(np.uint32))


def seen_by_active(
    played: Parties, frames: dict[str, bytes], told: dict[str, StepBinding]
) -> list[NDArray[np.uint64]]:
    """Contributions that the aggregator leaked to it, less the masks that it shares."""
    seen = []
    for name, frame in frames.items():
        mask_BD = np.zeros(SHAPE, dtype="<u4")
        if isinstance(played.receiver, MaskedReceiver):
            vars(played.receiver)["_seeds"].add_shared_mask(name, told[name], mask_BD, sign=1)
            seen.append(numbers(played, frame) - mask_BD.reshape(-1))
        else:
            seen.append(numbers(played, frame))
    return seen


def test_the_judge_sees_a_planted_leak() -> None:
    rng = np.random.default_rng(0)
    played = parties("bfv + pairwise masks")
    assert isinstance(played.sum, MaskedBfvSum)
    assert looks_uniform(rng.integers(0, 2**32, 8192, dtype=np.uint32))
    assert not looks_uniform(rng.integers(0, 2**31, 8192, dtype=np.uint32))
    assert looks_uniform(rng.integers(0, 2**64, 8192, dtype=np.uint64))
    assert not looks_uniform(rng.integers(0, 2**63, 8192, dtype=np.uint64))
    modulus = 2**played.sum.parameters.scale_or_modulus_bits
    assert uniform(rng.integers(0, modulus, 8192, dtype=np.uint64), played)
    assert not uniform(rng.integers(0, modulus // 2, 8192, dtype=np.uint64), played)


@pytest.mark.parametrize("choice", MASKED)
def test_coalitions_see_uniform_words(choice: str) -> None:
    played = fresh_parties(choice)
    bound = played.next()
    frames = played.contribute([np.full(SHAPE, 0.001)] * 3, bound)
    seen = seen_by_active(played, frames, dict.fromkeys(played.names, bound))
    combined = played.combine(frames, bound.digest)
    if "plain" in choice:  # the aggregator alone: not even the sum
        assert all(
            uniform(numbers(played, frame), played) for frame in (*frames.values(), combined)
        )
    assert all(uniform(each, played) for each in seen)  # active and aggregator: no single one
    assert uniform(seen[0] + seen[1], played)  # nor the sum of some
    opened = played.receiver.decode(combined, SHAPE, bound)
    assert np.unique(np.rint(opened * 32767)).tolist() == [99]  # 3 * round(0.001 * 32767)


@pytest.mark.parametrize("choice", MASKED)
def test_an_equivocating_active_with_the_aggregator_gets_noise(choice: str) -> None:
    """The masks are bound to what was sent, whatever the aggregator lets pass."""
    played = fresh_parties(choice)
    bound = played.next()
    told = dict.fromkeys(played.names, bound) | {"passive_2": binding(bound.step, message=1)}
    frames = played.contribute([np.full(SHAPE, 1e6)] * 3, told)
    opened = sum(seen_by_active(played, frames, told), np.zeros(1, np.uint64))
    assert uniform(opened, played)
    if played.sum.rounds == 1:
        forged = {name: alter_frame(frame, binding=bound.digest) for name, frame in frames.items()}
        with pytest.raises(RemoteProtocolError, match="the passives answered different messages"):
            played.receiver.decode(played.combine(forged), SHAPE, bound)


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
    played = Parties(kind(agreed))
    levels = 2 ** (bits - 1) - 1
    total = np.rint(played.add([values, values]) * levels)
    assert np.array_equal(total, 2 * levels * values) == exact


def test_one_passive_hides_from_the_aggregator_only() -> None:
    with pytest.warns(UnsafeChoiceWarning, match="active alone can read one .* allow_single says"):
        described = MaskedSum(agreement(2, contributors=("passive_1",), allow_single=True))
    played = Parties(described)
    bound = played.next()
    contribution = played.contribute([np.full(SHAPE, 0.01)], bound)
    assert uniform(numbers(played, contribution["passive_1"]), played)
    combined = played.aggregator.combine(contribution)
    assert np.unique(played.receiver.decode(combined, SHAPE, bound)).size == 1


def test_setup_takes_one_good_key_of_each_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    described = MaskedSum(agreement())
    first = described.make_contributor("passive_1")
    second = described.make_contributor("passive_2")
    with pytest.raises(LocalProtocolError, match="no mask key of passive_2, passive_3, active"):
        first.contribute(np.zeros((1, 1)), binding(0))
    good = next(out.body for out in second.start() if out.receiver == "passive_1")
    with pytest.raises(RemoteProtocolError, match="expects one from each of passive_2, passive_3"):
        first.receive("aggregator", good)
    cases = [
        ("no mask key of 32 bytes", "passive_2", alter_frame(good, blobs=(b"",))),
        ("no mask key of 32 bytes", "passive_2", alter_frame(good, blobs=(bytes(31),))),
        ("low order", "passive_2", alter_frame(good, blobs=(bytes(32),))),
    ]
    assert list_unrefused(RemoteProtocolError, first.receive, cases) == []
    monkeypatch.setattr(MaskedSum, "ring_bits", 64)
    (wide, *_) = MaskedSum(agreement()).make_contributor("passive_2").start()
    with pytest.raises(RemoteProtocolError, match="with other parameters than passive_1"):
        first.receive("passive_2", wide.body)
    first.receive("passive_2", good)
    with pytest.raises(RemoteProtocolError, match="sent a mask key to passive_1, who expects"):
        first.receive("passive_2", good)


# Pair seeds and the streams that they give.


def compute_stream(
    end: PairwiseSeeds, peer: str, bound: StepBinding, shape: tuple[int, int]
) -> NDArray[np.uint64]:
    total = np.zeros(shape, dtype=np.uint64)
    end.add_shared_mask(peer, bound, total, sign=1)
    return total.reshape(-1)


def make_pair() -> list[PairwiseSeeds]:
    described = MaskedSum(agreement())
    ends = [
        PairwiseSeeds(*names, described.make_frames()) for names in (("a", ["b"]), ("b", ["a"]))
    ]
    for sender, receiver in (ends, ends[::-1]):
        (message,) = sender.start()
        receiver.receive(sender.me, message.body)
    return ends


def test_both_ends_of_a_pair_have_one_stream_for_a_step_and_shape() -> None:
    ends = make_pair()
    bound = binding(3)
    same = compute_stream(ends[0], "b", bound, (2, 3))
    assert np.array_equal(same, compute_stream(ends[1], "a", bound, (2, 3)))
    assert not np.array_equal(compute_stream(ends[0], "b", binding(4), (2, 3)), same)
    assert not np.array_equal(compute_stream(ends[0], "b", binding(3, message=1), (2, 3)), same)
    assert not np.array_equal(compute_stream(ends[0], "b", bound, (3, 2)), same)


@pytest.mark.parametrize("word", ["<u4", "<u8"])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (128, 129), (700, 100)])
def test_a_stream_added_in_pieces_is_the_whole_stream(word: str, shape: tuple[int, int]) -> None:
    """From the definition: AES-CTR under a sub-key of the seed."""
    ends = make_pair()
    bound = binding(5)
    total = np.full(shape, 7, dtype=word)
    ends[0].add_shared_mask("b", bound, total, sign=1)
    seed = vars(ends[1])["_seed_by_peer"]["a"]
    sizes = b"".join(n.to_bytes(8, "big") for n in shape)
    stream = keystream(seed, b"mask", bound.digest, sizes, length=total.nbytes)
    whole = np.frombuffer(stream, word)
    assert np.array_equal(total - np.dtype(word).type(7), whole.reshape(shape))
    ends[1].add_shared_mask("a", bound, total, sign=-1)
    assert (total == 7).all()


@pytest.mark.parametrize(
    "total",
    [
        pytest.param(np.zeros((3, 4), order="F", dtype="<u4"), id="columns first"),
        pytest.param(np.zeros((6, 4), dtype="<u4")[::2], id="every second row"),
    ],
)
def test_a_mask_never_falls_on_a_copy(total: Any) -> None:
    with pytest.raises(LocalProtocolError, match="rows that follow each other in memory"):
        add_keystream(total, bytes(32), bytes(32), sign=1)
    assert not total.any()
