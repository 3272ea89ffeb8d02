"""Peers' bytes are hostile: what does not fit is refused by name, and nothing is answered twice."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from apfed_protocols import moments as agreements
from apfed_protocols.conversation import converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.moments import (
    MomentAgreement,
    MomentCombiner,
    MomentContributor,
    MomentDealer,
    MomentReceiver,
)
from tests.contracts.hostile import mutated
from tests.contracts.moment_parties import OTHERS, PEOPLE, MomentParties, moment_agreement, planted

Names = dict[str, bytes]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreements, "BLOCK_BYTES", 512)


class Moment:
    """One moment up to the aggregator's answer, which each test asks for as it likes."""

    def __init__(self, agreed: MomentAgreement | None = None) -> None:
        self.agreed = agreed or moment_agreement()
        self.held = planted(self.agreed)
        self.parties = MomentParties(self.agreed)
        self.seeds, self.sign_seed, *self.shares = (out.body for out in self.parties.dealer.deal())
        self.votes = self.parties.contribute(self.held)
        self.signs = self.parties.receiver.ask(self.sign_seed, self.held.signs, PEOPLE)

    def answer(self, **changes: Any) -> bytes:
        given: dict[str, Any] = {"dealt": self.seeds, "votes": self.votes, "signs": self.signs}
        return self.parties.combiner.answer(**given | {"people": PEOPLE} | changes)

    def answer_to(self, name: str, body: bytes) -> bytes:
        """The aggregator's answer where this came as the votes of one passive."""
        return self.answer(votes=self.votes | {name: body})

    def take_all(self) -> None:
        for block in self.shares:
            self.parties.receiver.take(block)

    def still_opens(self) -> None:
        """After what was refused all goes on as if it had not come."""
        while not self.parties.receiver.complete:
            self.parties.receiver.take(self.shares[vars(self.parties.receiver)["_taken"]])
        opened = self.parties.receiver.open(self.answer())
        assert np.array_equal(opened, self.held.moment(self.agreed))


@pytest.fixture
def moment() -> Moment:
    return Moment()


def test_the_aggregator_refuses_what_does_not_fit(moment: Moment) -> None:
    votes, one = moment.votes, moment.votes["passive_1"]
    foreign = Moment()
    for changes, message in (
        ({"votes": {k: v for k, v in votes.items() if k != "passive_2"}}, "missing: passive_2"),
        ({"votes": {**votes, "active": one}}, "unknown: active"),
        ({"votes": {**votes, "passive_2": one}}, "passive_2 .* its contributor differs"),
        ({"votes": {**votes, "passive_1": foreign.votes["passive_1"]}}, "its agreement differs"),
        ({"votes": {**votes, "passive_1": moment.signs}}, "passive_1 sent .* expected"),
        ({"votes": {**votes, "passive_1": one[:-1]}}, "cut or padded"),
        ({"votes": {**votes, "passive_1": one + b"\0"}}, "cut or padded"),
        ({"votes": {**votes, "passive_1": b""}}, "passive_1 sent 0 bytes"),
        ({"votes": {**votes, "passive_1": b"X" + one[1:]}}, "its format differs"),
        ({"votes": {**votes, "passive_1": one[:4] + b"\2" + one[5:]}}, "its version differs"),
        ({"signs": foreign.signs}, "active .* its agreement differs"),
        ({"signs": moment.signs[:-1]}, "expected .* of SIGNS"),
        ({"signs": moment.signs[:-1] + bytes([moment.signs[-1] | 1])}, "bits after the last"),
        ({"dealt": moment.sign_seed}, "dealer sent 108 bytes, expected 140 of SHARE_SEEDS"),
        ({"dealt": foreign.seeds}, "dealer .* its agreement differs"),
        ({"people": OTHERS}, "its list of people differs"),
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError, match=message):
            moment.answer(**changes)
    moment.still_opens()


def test_the_active_refuses_what_does_not_fit() -> None:
    moment, foreign = Moment(), Moment()
    receiver, shares = moment.parties.receiver, moment.shares
    assert len(shares) > 2
    for body, message in (
        (shares[1], "no SHARES .* its block differs"), (shares[0][:-4], "cut or padded"),
        (foreign.shares[0], "its agreement differs"), (moment.sign_seed, "of SHARES"),
    ):  # fmt: skip
        with pytest.raises(RemoteProtocolError, match=message):
            receiver.take(body)
    receiver.take(shares[0])
    with pytest.raises(RemoteProtocolError, match="its block differs"):
        receiver.take(shares[0])  # replayed
    with pytest.raises(LocalProtocolError, match=r"took 1 of \d block"):
        receiver.open(moment.answer())
    for block in shares[1:]:
        receiver.take(block)
    with pytest.raises(RemoteProtocolError, match="dealer sent more than"):
        receiver.take(shares[-1])
    fresh = Moment()
    with pytest.raises(RemoteProtocolError, match="expected 108 of SIGN_SEED"):
        MomentParties(moment_agreement()).receiver.ask(fresh.seeds, fresh.held.signs, PEOPLE)


@pytest.mark.parametrize("at", [20, 79, -1])  # header, top byte of F, top byte of A
def test_an_altered_answer_ends_the_session(at: int) -> None:
    """A header that differs, or a moment out of range; not a small change, as the leaks say."""
    moment = Moment()
    moment.take_all()
    genuine = moment.answer()
    answer = bytearray(genuine)
    answer[at] ^= 0x40
    message = "its agreement differs" if at == 20 else "lies beyond the range"
    with pytest.raises(RemoteProtocolError, match=message):
        moment.parties.receiver.open(bytes(answer))
    with pytest.raises(LocalProtocolError, match="opened or refused"):
        moment.parties.receiver.open(genuine)
    with pytest.raises(LocalProtocolError, match="threw its mask key away"):
        moment.parties.receiver.start()


def test_everything_is_used_once(moment: Moment) -> None:
    parties, held, agreed = moment.parties, moment.held, moment.agreed
    votes, noise = held.votes[0], held.noise[0]
    moment.still_opens()
    passive = parties.contributors["passive_1"]
    again: list[Callable[[], object]] = [
        lambda: passive.contribute(votes, PEOPLE, noise),
        lambda: passive.contribute(votes, OTHERS, noise), moment.answer, parties.dealer.deal,
        lambda: parties.receiver.ask(moment.sign_seed, held.signs, PEOPLE),
    ]  # fmt: skip
    others = MomentParties(agreed)  # new keys, the same agreement
    again += [
        lambda: others.contributors["passive_1"].contribute(votes, PEOPLE, noise),
        lambda: others.combiner.answer(moment.seeds, moment.votes, moment.signs, PEOPLE),
        others.dealer.deal,
        lambda: others.receiver.ask(moment.sign_seed, held.signs, PEOPLE),
    ]
    for action in again:
        with pytest.raises(LocalProtocolError, match=r"used once, and a|threw its mask key"):
            action()
    for role in (passive, parties.receiver):  # nobody can expand the masks any more
        assert not vars(vars(role)["_seeds"])["_seeds"]
    for late in (lambda: parties.receiver.open(b""), lambda: parties.receiver.take(b"")):
        with pytest.raises(LocalProtocolError, match="opened or refused; each is once"):
            late()


def test_own_misuse_is_named() -> None:
    agreed = moment_agreement()
    held, receiver = planted(agreed), MomentReceiver(agreed)
    passive = MomentContributor(agreed, "passive_2")
    votes, noise, signs = held.votes[0], held.noise[0], held.signs
    with pytest.raises(LocalProtocolError, match="no mask key of passive_1, passive_3, active"):
        passive.contribute(votes, PEOPLE, noise)
    with pytest.raises(LocalProtocolError, match="no mask key of passive_1"):
        receiver.ask(b"", signs, PEOPLE)
    parties = MomentParties(agreed)
    passive = parties.contributors["passive_2"]
    for changes, message in (
        ({"votes_UK": votes[:-1]}, r"array \(19, 3\), got float64 \(18, 3\)"),
        ({"votes_UK": votes.astype(int)}, "got int64"),
        ({"votes_UK": votes.tolist()}, "got list"),
        ({"votes_UK": votes * 1.001}, "19 of 19 rows of votes have an L1 norm above 1"),
        ({"votes_UK": np.full((19, 3), np.nan)}, "not finite"),
        ({"votes_UK": np.full((19, 3), 1e308)}, "not finite"),
        ({"votes_UK": np.full((19, 3), -np.inf)}, "not finite"),
        ({"votes_UK": -votes}, "some votes are negative"),
        ({"people": b"short"}, "people is a digest of 32 bytes"),
        ({"people": bytes(32)}, "people is a digest of 32 bytes"),
        ({"noise_dK": None}, "says noise, and none was given"),
        ({"noise_dK": np.ones((5, 2), np.int64)}, r"shape \(5, 3\), got int64 \(5, 2\)"),
        ({"noise_dK": np.full((5, 3), 0.0)}, "got float64"),
        ({"noise_dK": np.full((5, 3), 10**6)}, "ends at 268; what was given lies beyond"),
    ):  # fmt: skip
        given: dict[str, Any] = {"votes_UK": votes, "people": PEOPLE, "noise_dK": noise} | changes
        with pytest.raises(LocalProtocolError, match=message):
            passive.contribute(**given)
    for given_signs in (signs.astype(int), signs[1:], signs * 0, signs * 2, signs.tolist()):
        with pytest.raises(LocalProtocolError, match="signs are"):
            parties.receiver.ask(b"", given_signs, PEOPLE)
    with pytest.raises(LocalProtocolError, match="asked nothing yet"):
        parties.receiver.take(b"")
    with pytest.raises(LocalProtocolError, match="is bytes, got bytearray from dealer"):
        parties.receiver.ask(bytearray(108), signs, PEOPLE)  # type: ignore[arg-type]
    quiet = MomentParties(moment_agreement(noise=None)).contributors["passive_1"]
    with pytest.raises(LocalProtocolError, match="says no noise, and some was given"):
        quiet.contribute(votes, PEOPLE, noise)


def test_setup_under_another_agreement_is_refused() -> None:
    """Another number of features, say: masks would not cancel, so the keys are not taken."""
    one = moment_agreement()
    other = moment_agreement(session=one.session, features=6)
    roles = {"active": MomentReceiver(one)} | {
        name: MomentContributor(other if name == "passive_3" else one, name)
        for name in one.contributors
    }
    with pytest.raises(RemoteProtocolError, match="under another agreement"):
        converse({**roles})
    silent = MomentCombiner(one), MomentDealer(one)
    for role in silent:
        assert role.finished
        with pytest.raises(RemoteProtocolError, match="none is expected"):
            role.receive("active", b"hello")


def test_any_bytes_are_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies are words of a ring or bits, so that every body of the right length has a meaning."""
    rng, moment = random.Random(7), Moment()
    receiver = moment.parties.receiver
    monkeypatch.setattr("apfed_protocols.moments._require_unused", lambda agreement, me: None)
    answer, kept = moment.answer(), dict(vars(receiver))
    monkeypatch.setattr(vars(receiver)["_seeds"], "forget", lambda: None)
    refused = taken = 0
    for _ in range(1500):
        block, name = rng.randrange(len(moment.shares)), rng.choice(sorted(moment.votes))
        targets: list[tuple[Callable[[bytes], object], bytes]] = [
            (lambda body: moment.answer(dealt=body), moment.seeds),
            (partial(moment.answer_to, name), moment.votes[name]),
            (lambda body: moment.answer(signs=body), moment.signs),
            (lambda body: receiver.ask(body, moment.held.signs, PEOPLE), moment.sign_seed),
            (receiver.take, moment.shares[block]),
            (receiver.open, answer),
        ]
        target, original = rng.choice(targets)
        taken_blocks = len(moment.shares) if original is answer else block
        added = kept["_added_dK"].copy()
        vars(receiver).update(kept | {"_taken": taken_blocks, "_added_dK": added})
        try:
            target(mutated(rng, original, edge=80))
            taken += 1
        except RemoteProtocolError:
            refused += 1
    assert refused > 900
    assert taken > 50
