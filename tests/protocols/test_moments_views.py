"""What each party and coalition sees: uniform where the proof says so, and what the leaks admit."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols import moments as agreements
from apfed_protocols import moments as roles
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.moments import (
    MessageKind,
    MomentAgreement,
    added_shares,
    block_signs,
    combiner_shares,
    dealt_shares,
    hiding_bits,
    mask_of_votes,
    packed_signs,
)
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

HEADER = 76
SHAPE = {"people": 512, "features": 8, "columns": 16, "noise": 40}
Words = NDArray[np.uint32]


def words(frame: bytes) -> Words:
    return np.frombuffer(frame[HEADER:], dtype="<u4")


def votes_of(agreed: MomentAgreement, frame: bytes) -> Words:
    size = agreed.people * agreed.columns
    return words(frame)[:size].reshape(agreed.people, agreed.columns)


def unrelated(left: Words, right: Words) -> bool:
    """Sum and difference look uniform, too."""
    return looks_uniform(left + right) and looks_uniform(left - right)


class Watched:
    """One moment, and the masks that the active took off."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, agreed: MomentAgreement, held: Planted
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
        return mask_of_votes(self.agreed, self.said.seeds[HEADER:][:32])


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
    alpha = block_signs(agreed, hiding_bits(agreed, said.sign_seed[HEADER:]), slice(0, 512))
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
    monkeypatch.setattr(agreements, "BLOCK_BYTES", 2**16)
    agreed = moment_agreement(**SHAPE)
    assert agreed.blocks == 4
    seeds, _, *shares = (out.body for out in MomentParties(agreed).dealer.deal())
    hiding = [combiner_shares(agreed, seeds[-32:], block) for block in range(4)]
    assert unrelated(hiding[0], hiding[1])
    assert unrelated(words(shares[0]), words(shares[1]))
    mask_UK = mask_of_votes(agreed, seeds[-64:-32])
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
    binding = roles._binding(agreed, PEOPLE, roles._MASKED[0])
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
    bits = e ^ hiding_bits(agreed, said.sign_seed[HEADER:])
    assert np.array_equal(bits, packed_signs(agreed, watched.held.signs))
    assert looks_uniform(watched.masked_votes)


def test_other_votes_of_the_same_moment_give_the_same_view() -> None:
    """The proof as a bijection: to every (V', N') of the same moment there is one (B', c') more
    under which each byte that the active sees is the same, whatever bits it sends for e."""
    agreed = moment_agreement(people=24, features=5, columns=3)
    rng, word, votes, moment = np.random.default_rng(3), agreed.word, (24, 3), (5, 3)
    V, R, B, other_V, N, Q = (
        rng.integers(0, 2**32, shape, dtype=np.uint32) for shape in (votes,) * 4 + (moment,) * 2
    )
    alpha, seed = packed_signs(agreed, signs(rng, agreed)), bytes(32)
    (c,) = dealt_shares(agreed, alpha, B, seed)
    e = packed_signs(agreed, signs(rng, agreed))  # any bits
    sigma_Ud, e_Nd = (block_signs(agreed, bits, slice(0, 24)) for bits in (alpha ^ e, e))
    other_N = N + sigma_Ud.T @ (V - other_V)  # the same M

    def answer(V: Any, N: Any, B: Any, shares: Any) -> tuple[Any, Any]:
        return V + R - B, added_shares(e_Nd, shares) + N + Q

    shares = combiner_shares(agreed, seed, 0)
    F, A = answer(V, N, B, shares)
    other_B = B + other_V - V
    other_shares = (other_B.T[:, :, None] * block_signs(agreed, alpha, slice(0, 24))) - c
    other_F, other_A = answer(other_V, other_N, other_B, other_shares)
    assert np.array_equal(F, other_F)
    assert np.array_equal(A, other_A)
    _, with_more = answer(other_V, other_N + word.type(1), other_B, other_shares)
    assert not np.array_equal(A, with_more)  # another moment shows, as it must


def signs(rng: np.random.Generator, agreed: MomentAgreement) -> NDArray[np.int8]:
    return rng.choice((-1, 1), (agreed.people, agreed.features)).astype(np.int8)


@pytest.mark.parametrize("noise", [None, 300])
def test_a_simulator_makes_the_same_view_from_the_moment(
    noise: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A is a function of the rest of the view and the opened moment, exactly."""
    agreed = moment_agreement(people=40, features=6, columns=4, noise=noise)
    watched = Watched(monkeypatch, agreed, planted(agreed))
    said, people = watched.said, slice(0, 40)
    e = np.frombuffer(said.signs[HEADER:], dtype=np.uint8)
    alpha = hiding_bits(agreed, said.sign_seed[HEADER:])
    sigma, e_Nd = block_signs(agreed, alpha ^ e, people), block_signs(agreed, e, people)
    c = words(said.shares[0]).reshape(4, 40, 6)
    simulated = said.opened.astype(np.uint32) + watched.off["Q"] - added_shares(e_Nd, c)
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
        MessageKind.VOTES, body, people=PEOPLE, party=1
    )
    answer = parties.combiner.answer(seeds, votes | {"passive_2": relabelled}, asked, PEOPLE)
    with pytest.raises(RemoteProtocolError, match="lies beyond the range"):
        parties.receiver.open(answer)


def test_the_noise_is_in_what_opens() -> None:
    agreed = moment_agreement(people=8, features=64, columns=64, noise=30)
    held = planted(agreed)
    opened = MomentParties(agreed).play(held).opened
    added = opened - held.signs.astype(np.int64).T @ held.steps(agreed)
    deviation = float(np.std(added))
    for wrong in (2 / 3, 3 / 2):
        assert abs(deviation / (30 * 3**0.5) - 1) < 0.1 < abs(deviation / (30 * 3**0.5) - wrong)


def test_secrets_stay_out_of_sight() -> None:
    parties = MomentParties(moment_agreement())
    for role in (parties.receiver, parties.dealer, *parties.contributors.values()):
        with pytest.raises(LocalProtocolError, match="never serialised"):
            role.__reduce__()
        assert "at 0x" in repr(role)
