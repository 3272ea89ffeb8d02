"""What each party and coalition sees: uniform where the proof says so, and what the leaks admit."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols import moments
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from tests.contracts.hostile import looks_uniform
from tests.contracts.moment_parties import (
    OTHERS,
    PEOPLE,
    MomentParties,
    Overheard,
    Planted,
    moment_agreement,
    planted,
)
from tests.memory import traced

HEADER = 76
SHAPE = {"people": 512, "features": 8, "columns": 16, "noise": 40}
Words = NDArray[np.uint32]


def words(frame: bytes) -> Words:
    return np.frombuffer(frame[HEADER:], dtype="<u4")


def votes_of(agreed: moments.MomentAgreement, frame: bytes) -> Words:
    size = agreed.people * agreed.columns
    return words(frame)[:size].reshape(agreed.people, agreed.columns)


def unrelated(left: Words, right: Words) -> bool:
    """Sum and difference look uniform, too."""
    return looks_uniform(left + right) and looks_uniform(left - right)


class Watched:
    """One moment, and the masks that the active took off."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, agreed: moments.MomentAgreement, held: Planted
    ) -> None:
        self.agreed, self.held = agreed, held
        self.parties = MomentParties(agreed)
        self.off: dict[str, Words] = {}
        receiver = self.parties.receiver
        genuine = receiver._unmask

        def watched(people: bytes, F_UK: Any, M_dK: Any) -> None:
            before = F_UK.copy(), M_dK.copy()
            genuine(people, F_UK, M_dK)
            self.off |= {"R": before[0] - F_UK, "Q": before[1] - M_dK}

        monkeypatch.setattr(receiver, "_unmask", watched)
        self.said: Overheard = self.parties.play(held)

    @property
    def masked_votes(self) -> Words:
        parts = [votes_of(self.agreed, frame) for frame in self.said.votes.values()]
        return sum(parts, np.zeros(1, np.uint32))

    @property
    def answered(self) -> Words:
        return votes_of(self.agreed, self.said.answer)

    @property
    def dealt_mask(self) -> Words:
        return moments.mask_of_votes(self.agreed, self.said.seeds[HEADER:][:32])


@pytest.fixture(params=["nobody votes", "all vote for one"])
def watched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Two extremes of votes under the same seeds of the test; both must look alike."""
    agreed = moment_agreement(**SHAPE)
    held = planted(agreed)
    votes = np.zeros((agreed.people, agreed.columns))
    votes[:, 0] = request.param == "all vote for one"
    held.signs[:, 0] = 1
    return Watched(monkeypatch, agreed, replace(held, votes=[votes] * 3))


def test_the_judge_sees_a_planted_leak() -> None:
    rng = np.random.default_rng(0)
    fair = rng.integers(0, 2**32, (2, 8192), dtype=np.uint32)
    assert looks_uniform(fair[0])
    assert unrelated(*fair)
    assert not looks_uniform(fair[0] >> np.uint32(1))
    assert not unrelated(fair[0], fair[0] + np.uint32(4096))


def test_what_the_active_sees_is_uniform(watched: Watched) -> None:
    """c, F, F less what it knows of W, and F against c with and without its alpha."""
    agreed, said = watched.agreed, watched.said
    (c_KNd,) = (words(frame).reshape(16, 512, 8) for frame in said.shares)
    alpha = moments.block_signs(
        agreed, moments.hiding_bits(agreed, said.sign_seed[HEADER:]), slice(0, 512)
    )
    F, R = watched.answered, watched.off["R"]
    for seen in (c_KNd, F, F - R, R):
        assert looks_uniform(seen)
    for j in range(agreed.features):
        shares = np.ascontiguousarray(c_KNd[:, :, j].T)
        for left in (shares, shares * alpha[:, j, None]):
            assert looks_uniform(left)
            assert unrelated(left, F - R)
    assert unrelated(c_KNd[:, :, 0], c_KNd[:, :, 1])
    assert unrelated(c_KNd[:, :, 0] * alpha[:, 0], c_KNd[:, :, 1] * alpha[:, 1])


def test_no_block_repeats_what_hides_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of one stream for two blocks would tell the active alpha B - alpha' B'."""
    monkeypatch.setattr(moments, "BLOCK_BYTES", 2**16)
    agreed = moment_agreement(**SHAPE)
    assert agreed.blocks == 4
    seeds, _, *shares = (out.body for out in MomentParties(agreed).dealer.deal())
    hiding = [moments.combiner_shares(agreed, seeds[-32:], block) for block in range(4)]
    assert unrelated(hiding[0], hiding[1])
    assert unrelated(words(shares[0]), words(shares[1]))
    mask_UK = moments.mask_of_votes(agreed, seeds[-64:-32])
    assert unrelated(mask_UK[:256], mask_UK[256:])


def test_what_the_aggregator_sees_is_uniform(watched: Watched) -> None:
    said = watched.said
    for frame in said.votes.values():
        assert looks_uniform(words(frame))
    assert looks_uniform(watched.masked_votes)
    one, two, _ = said.votes.values()
    assert looks_uniform(words(one) + words(two))
    assert looks_uniform(np.frombuffer(said.signs[HEADER:], dtype="<u4"))


def test_single_votes_stay_hidden_from_active_and_aggregator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed = moment_agreement(**SHAPE)
    parties, held = MomentParties(agreed), planted(agreed)
    frames, seeds = parties.contribute(held), vars(parties.receiver)["_seeds"]
    binding = moments._binding(agreed, PEOPLE, moments._MASKED[0])
    bare = {}
    for name, frame in frames.items():
        bare[name] = votes_of(agreed, frame).copy()
        seeds.add_stream(name, binding, bare[name], sign=-1)
        assert looks_uniform(bare[name])
    assert looks_uniform(bare["passive_1"] + bare["passive_2"])
    total = sum(bare.values(), np.zeros(1, np.uint32)).view(np.int32)
    assert np.array_equal(total, held.steps(agreed))  # as the leaks say


def test_dealer_and_active_read_the_sum_of_votes(watched: Watched) -> None:
    """The leaks say so, and here is how; the noise is then known as well."""
    read = (watched.answered + watched.dealt_mask - watched.off["R"]).view(np.int32)
    assert np.array_equal(read, watched.held.steps(watched.agreed))


def test_dealer_and_aggregator_read_the_signs_and_no_vote(watched: Watched) -> None:
    agreed, said = watched.agreed, watched.said
    e = np.frombuffer(said.signs[HEADER:], dtype=np.uint8)
    bits = e ^ moments.hiding_bits(agreed, said.sign_seed[HEADER:])
    assert np.array_equal(bits, moments.packed_signs(agreed, watched.held.signs))
    assert looks_uniform(watched.masked_votes)


@pytest.mark.parametrize("noise", [None, 300])
def test_a_simulator_makes_the_same_view_from_the_moment(
    noise: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A is a function of the rest of the view and the opened moment, exactly."""
    agreed = moment_agreement(people=40, features=6, columns=4, noise=noise)
    watched = Watched(monkeypatch, agreed, planted(agreed))
    said, people = watched.said, slice(0, 40)
    e = np.frombuffer(said.signs[HEADER:], dtype=np.uint8)
    alpha = moments.hiding_bits(agreed, said.sign_seed[HEADER:])
    sigma, e_Nd = (
        moments.block_signs(agreed, alpha ^ e, people),
        moments.block_signs(agreed, e, people),
    )
    c = words(said.shares[0]).reshape(4, 40, 6)
    simulated = said.opened.astype(np.uint32) + watched.off["Q"] - moments.added_shares(e_Nd, c)
    simulated += sigma.T @ (watched.off["R"] - watched.answered)
    assert np.array_equal(words(said.answer)[160:].reshape(6, 4), simulated)
    assert (watched.off["Q"] == 0).all() == (noise is None)


def test_passives_that_answer_about_others_make_noise() -> None:
    """The aggregator compares who is voted on; where it lets it pass, the masks do not."""
    agreed = moment_agreement(**SHAPE)
    parties, held = MomentParties(agreed), planted(agreed)
    seeds, sign_seed, *shares = (out.body for out in parties.dealer.deal())
    votes = {}
    for (name, role), vote, noise in zip(
        parties.contributors.items(), held.votes, held.noise, strict=True
    ):
        people = OTHERS if name == "passive_2" else PEOPLE
        votes[name] = role.contribute(vote, people, noise)
    asked = parties.receiver.ask(sign_seed, held.signs, PEOPLE)
    for block in shares:
        parties.receiver.take(block)
    with pytest.raises(RemoteProtocolError, match=r"passive_2 sent no VOTES .* list of people"):
        parties.combiner.answer(seeds, votes, asked, PEOPLE)
    body = votes["passive_2"][HEADER:]
    relabelled = vars(parties.combiner)["_messages"].pack(
        moments.MessageKind.VOTES, body, people=PEOPLE, party=1
    )
    answer = parties.combiner.answer(seeds, votes | {"passive_2": relabelled}, asked, PEOPLE)
    with pytest.raises(RemoteProtocolError, match="lies beyond the range"):
        parties.receiver.open(answer)


# What opens is the integer sum, to the last bit, within the agreed sensitivity and memory.


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "BLOCK_BYTES", 4096)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("passives", "columns", "noise"), [(2, 10, None), (1, 2, 50), (5, 10, 50)])
def test_the_moment_is_the_integer_sum(passives: int, columns: int, noise: int | None) -> None:
    agreed = moment_agreement(
        passives, people=83, features=13, columns=columns, noise=noise, allow_single=passives == 1
    )
    with pytest.raises(LocalProtocolError, match="contributes nothing"):
        moments.MomentContributor(agreed, "active")
    assert agreed.blocks > 1
    assert agreed.people % agreed.block_people
    held = planted(agreed)
    said = MomentParties(agreed).play(held)
    assert np.array_equal(said.opened, held.moment(agreed))
    clear = held.signs.T @ sum(held.votes, np.zeros(1))
    noise_in_all = sum((part for part in held.noise if part is not None), np.zeros(1, np.int64))
    without = (said.opened - noise_in_all) * agreed.scale
    assert np.abs(without - clear / np.sqrt(13)).max() <= agreed.rounding()
    assert len(said.signs) == 76 + -(-83 * 13 // 8)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 17), st.integers(1, 5), st.integers(1, 18),
    st.booleans(), st.sampled_from([None, 1, 2**24]), st.integers(0, 99),
)  # fmt: skip
def test_every_shape_opens_exactly(
    people: int, features: int, columns: int, bits: int, signed: bool, noise: int | None, seed: int
) -> None:
    agreed = moment_agreement(
        2, people=people, features=features, columns=columns, bits=bits, signed=signed, noise=noise
    )
    held = planted(agreed, seed)
    assert np.array_equal(MomentParties(agreed).play(held).opened, held.moment(agreed))


def test_the_ring_holds_every_moment() -> None:
    """All agree on everything: the largest moment there is, at the last size of 32 bits."""
    for people, bits, word in [(2**18 - 1, 12, 4), (2**18, 12, 8)]:
        agreed = moment_agreement(2, people=people, features=1, columns=1, noise=None, bits=bits)
        assert agreed.word.itemsize == word
        assert agreed.limit == 2 * people * 2**bits
        held = planted(agreed)
        held.signs[:] = -1
        held = replace(held, votes=[np.ones_like(votes) for votes in held.votes])
        assert MomentParties(agreed).play(held).opened.item() == -agreed.limit


def test_the_wide_ring_holds_the_largest_agreement() -> None:
    largest = {"people": 2**24, "bits": 18, "noise": 2**24, "features": 1, "columns": 1}
    assert moment_agreement(1024, **largest).word.itemsize == 8
    assert moment_agreement(1024, **largest).limit < 2**53


def test_rounding_keeps_the_bound_of_a_row() -> None:
    """Rounding to the nearest would not: ten votes of 1/10 are 410 steps each, 4100 of 4096."""
    agreed = moment_agreement(people=1, columns=10)
    assert moments.vote_steps(agreed, np.full((1, 10), 0.1)).tolist() == [[409] * 10]
    assert moments.vote_steps(agreed, np.eye(10, dtype=np.float32)[:1]).max() == 4096
    barely = np.array([[1 + 2.0**-21] + [0.0] * 9])
    assert moments.vote_steps(agreed, barely).sum() == 4096


@pytest.mark.parametrize("signed", [False, True])
def test_no_signs_exceed_the_sensitivity(signed: bool) -> None:
    """A malicious active may send any bits: one person's votes move the moment no farther."""
    agreed = moment_agreement(2, features=11, columns=4, noise=None, signed=signed)
    rng, held, moved = np.random.default_rng(5), planted(agreed), []
    for trial in range(24):
        sigma = moments.packed_signs(agreed, rng.choice((-1, 1), held.signs.shape).astype(np.int8))
        former, latter = np.eye(4)[0], -np.eye(4)[0] if signed else np.eye(4)[1]
        if trial % 2:
            former, latter = (rng.dirichlet(np.ones(4)) for _ in range(2))
        opened = []
        for vote in (former, latter):
            votes = [vote_p.copy() for vote_p in held.votes]
            votes[0][7] = vote
            parties = MomentParties(replace(agreed, session=f"{agreed.session}, {vote}, {trial}"))
            changed = Planted(held.signs, votes, held.noise)
            opened.append(parties.play_with_bits(changed, partial(np.bitwise_xor, sigma))[0])
        moved.append(float(np.linalg.norm(opened[0] - opened[1])))
    bound = agreed.sensitivity()
    assert bound == pytest.approx((2 if signed else 2**0.5) * 11**0.5 * 4096)
    assert max(moved) == pytest.approx(bound)  # it is reached
    assert max(moved) <= bound * (1 + 1e-12)


def test_memory_goes_by_blocks() -> None:
    """205 MB of shares pass; each party holds a few blocks, its matrices and its signs."""
    agreed = moment_agreement(2, people=20_000, features=256, columns=10, noise=1000)
    held, parties = planted(agreed), MomentParties(agreed)
    dealt = 0
    with traced() as peak:
        messages = parties.dealer.deal()
        seeds, sign_seed = next(messages).body, next(messages).body
        votes = parties.contribute(held)
        signs = parties.receiver.ask(sign_seed, held.signs, PEOPLE)
        for message in messages:
            parties.receiver.take(message.body)
            dealt += len(message.body)
        opened = parties.receiver.open(parties.combiner.answer(seeds, votes, signs, PEOPLE))
        assert peak() < 48 * 2**20
    assert np.array_equal(opened, held.moment(agreed))
    assert dealt > 200e6
