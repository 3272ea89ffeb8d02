"""What opens is the integer sum, to the last bit, within the agreed sensitivity and memory."""

import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apfed_protocols import moments as agreements
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.moments import (
    MomentAgreement,
    MomentContributor,
    MomentFrames,
    packed_signs,
    vote_steps,
)
from tests.contracts.moment_parties import PEOPLE, MomentParties, Planted, moment_agreement, planted


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "BLOCK_BYTES", 4096)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("passives", "columns", "noise"), [(2, 10, None), (1, 2, 50), (5, 10, 50)])
def test_the_moment_is_the_integer_sum(passives: int, columns: int, noise: int | None) -> None:
    agreed = moment_agreement(
        passives,
        people=83,
        features=13,
        columns=columns,
        noise=noise,
        allow_single=passives == 1,
    )
    with pytest.raises(LocalProtocolError, match="contributes nothing"):
        MomentContributor(agreed, "active")
    assert agreed.blocks > 1
    assert agreed.people % agreed.block_people
    held = planted(agreed)
    said = MomentParties(agreed).play(held)
    assert np.array_equal(said.opened, held.moment(agreed))
    clear = held.signs.T @ sum(held.votes, np.zeros(1))
    noise_in_all = sum((part for part in held.noise if part is not None), np.zeros(1, np.int64))
    without = (said.opened - noise_in_all) * agreed.scale
    assert np.abs(without - clear / np.sqrt(13)).max() <= agreed.rounding()
    lengths = MomentFrames(agreed).lengths()
    assert sum(map(len, said.frames())) == sum(lengths.values())
    assert len(said.signs) == lengths["SIGNS"] == 76 + -(-83 * 13 // 8)


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


def unanimous(agreed: MomentAgreement, sign: int) -> Planted:
    """Everybody votes 1 for the only column, and every sign is the same."""
    held = planted(agreed)
    held.signs[:] = sign
    return Planted(held.signs, [np.ones_like(votes) for votes in held.votes], held.noise)


def test_the_ring_holds_every_moment() -> None:
    """All agree on everything: the largest moment there is, at the last size of 32 bits."""
    for people, bits, word in [(2**18 - 1, 12, 4), (2**18, 12, 8)]:
        agreed = moment_agreement(2, people=people, features=1, columns=1, noise=None, bits=bits)
        assert agreed.word.itemsize == word
        assert agreed.limit == 2 * people * 2**bits
        assert MomentParties(agreed).play(unanimous(agreed, -1)).opened.tolist() == [
            [-agreed.limit]
        ]


def test_a_narrower_ring_would_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    agreed = moment_agreement(2, people=2**18, features=1, columns=1, noise=None)
    monkeypatch.setattr(MomentAgreement, "word", np.dtype("<u4"))
    opened = MomentParties(agreed).play(unanimous(agreed, 1)).opened
    assert opened.tolist() == [[-agreed.limit]]  # 2^31 and -2^31 are one element of the ring


def test_the_wide_ring_holds_the_largest_agreement() -> None:
    largest = {"people": 2**24, "bits": 18, "noise": 2**24, "features": 1, "columns": 1}
    assert moment_agreement(1024, **largest).word.itemsize == 8
    assert moment_agreement(1024, **largest).limit < 2**53
    for name, beyond in (("people", 2**24 + 1), ("bits", 19), ("noise", 2**24 + 1)):
        with pytest.raises(LocalProtocolError, match=f"{name} is a number in"):
            moment_agreement(1024, **largest | {name: beyond})
    with pytest.raises(LocalProtocolError, match="at most 1024 contributors"):
        moment_agreement(1025, **largest)


def test_rounding_keeps_the_bound_of_a_row() -> None:
    """Rounding to the nearest would not: ten votes of 1/10 are 410 steps each, 4100 of 4096."""
    agreed = moment_agreement(people=1, columns=10)
    steps = vote_steps(agreed, np.full((1, 10), 0.1))
    assert steps.tolist() == [[409] * 10]
    assert vote_steps(agreed, np.eye(10, dtype=np.float32)[:1]).max() == 4096
    barely = np.array([[1 + 2.0**-21] + [0.0] * 9])
    assert vote_steps(agreed, barely).sum() == 4096


@pytest.mark.parametrize("signed", [False, True])
def test_no_signs_exceed_the_sensitivity(signed: bool) -> None:
    """A malicious active may send any bits: one person's votes move the moment no farther."""
    agreed = moment_agreement(2, features=11, columns=4, noise=None, signed=signed)
    rng, held, moved = np.random.default_rng(5), planted(agreed), []
    for trial in range(24):
        sigma = packed_signs(agreed, rng.choice((-1, 1), held.signs.shape).astype(np.int8))
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


@pytest.mark.parametrize("raw", [0, 0b10110])
def test_whatever_bits_are_sent_signs_are_what_multiplies(raw: int) -> None:
    agreed = moment_agreement(2, features=8, noise=None)
    held = planted(agreed)
    opened, sigma = MomentParties(agreed).play_with_bits(
        held, lambda alpha: np.full_like(alpha, raw)
    )
    assert set(np.unique(sigma)) == {-1, 1}
    assert np.array_equal(opened, sigma.T @ held.steps(agreed))


def test_memory_goes_by_blocks() -> None:
    """205 MB of shares pass; each party holds a few blocks, its matrices and its signs."""
    agreed = moment_agreement(2, people=20_000, features=256, columns=10, noise=1000)
    held, parties = planted(agreed), MomentParties(agreed)
    dealt = 0
    tracemalloc.start()
    try:
        messages = parties.dealer.deal()
        seeds, sign_seed = next(messages).body, next(messages).body
        votes = parties.contribute(held)
        signs = parties.receiver.ask(sign_seed, held.signs, PEOPLE)
        for message in messages:
            parties.receiver.take(message.body)
            dealt += len(message.body)
        opened = parties.receiver.open(parties.combiner.answer(seeds, votes, signs, PEOPLE))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(opened, held.moment(agreed))
    assert dealt > 200e6
    assert peak < 48 * 2**20


def test_an_agreement_is_checked() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"people": 0}, r"people is a number in 1..16777216, got 0"),
        ({"features": True}, "features is a number"),
        ({"columns": 2.0}, "columns is a number"),
        ({"bits": 19}, r"bits is a number in 1..18"),
        ({"noise": 0}, r"noise is a number in 1..16777216"),
        ({"features": 2**12, "columns": 2**9}, "more than 1048576 values"),
        ({"dealer": "active"}, "are all different"),
        ({"dealer": "passive_1"}, "are all different"),
        ({"dealer": ""}, "text of 1 to 255 bytes"),
        ({"session": "\ud800"}, "text of 1 to 255 bytes"),
        ({"contributors": ("a",)}, "allow_single"),
        ({"contributors": ["a", "b"]}, "tuple of names"),
        ({"signed": 1}, "signed is True or False"),
    ]
    for changes, message in cases:
        with pytest.raises(LocalProtocolError, match=message):
            moment_agreement(**changes)


def test_every_field_is_in_the_digest() -> None:
    usual = moment_agreement()
    changes: list[dict[str, Any]] = [
        {"session": "x"}, {"receiver": "x"}, {"combiner": "x"}, {"dealer": "x"},
        {"contributors": ("x", "y")}, {"people": 20}, {"features": 6}, {"columns": 4},
        {"noise": None}, {"bits": 11}, {"signed": True}, {"allow_single": True},
    ]  # fmt: skip
    assert {name for change in changes for name in change} == set(usual.__dataclass_fields__)
    digests = {moment_agreement(**{"session": usual.session, **c}).digest for c in changes}
    assert len(digests | {usual.digest}) == len(changes) + 1
