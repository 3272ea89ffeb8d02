"""Passives fall silent in the middle of a step: the sum of the rest is exact, or there is none."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import SECURE_SUMS, RecoverableSum, StepBinding, SumAgreement
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.frames import Frame, FrameKind
from apfed_protocols.sums.recoverable import (
    Announcement,
    RecoverableContributor,
    join_shares,
    rebuild_seed,
    split_secret,
)
from tests.contracts.hostile import alter_frame
from tests.contracts.sum_parties import Parties, Rearmed, agreement, binding, make, random_values
from tests.refusals import list_unrefused
from tests.with_crypten import usable

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
SHAPE = (3, 5)
SIZES = [(2, 2), (3, 2), (4, 3), (5, 3), (6, 4), (6, 6)]
"""Passives, and how many of them are needed: more than half."""


class Session(Parties):
    """Parties of one session; those who fell silent stay so."""

    def __init__(self, passives: int = 4, threshold: int | None = None) -> None:
        described = agreement(passives, threshold=threshold)
        super().__init__(RecoverableSum(described, allow_single_reader=True))
        self.min_contributors = self.sum.threshold  # type: ignore[attr-defined]  # of this sum
        self.present = list(self.names)

    def next(self) -> StepBinding:
        """Return the next step, with a question of its own."""
        step = super().next().step
        return binding(step, message=step)

    def request_shares(
        self, values: Mapping[str, NDArray[Any]], bound: StepBinding
    ) -> tuple[dict[str, bytes], Mapping[str, bytes]]:
        """Return contributions of those who have values, and what they are asked."""
        frames = self.frames(bound, values)
        return frames, self.aggregator.ask(frames, bound.digest)

    def frames(
        self, bound: StepBinding, values: Mapping[str, NDArray[Any]] | None = None
    ) -> dict[str, bytes]:
        """Return contributions of these passives, or of all."""
        values = self.values(self.names) if values is None else values
        return {me: self.contributors[me].contribute(values[me], bound) for me in values}

    def answers(
        self, requests: Mapping[str, bytes], names: Collection[str] | None = None
    ) -> dict[str, bytes]:
        """Return answers of those who were asked, or of some of them."""
        asked = requests if names is None else names
        return {me: self.contributors[me].answer(requests[me]) for me in asked}

    def step(
        self, values: Mapping[str, NDArray[Any]], *, never_answer: Collection[str] = ()
    ) -> NDArray[Any]:
        """Return the sum of what these passives contribute; the others fell silent before."""
        bound = self.next()
        _, requests = self.request_shares(values, bound)
        answers = self.answers(requests, [me for me in requests if me not in never_answer])
        combined = self.aggregator.combine(answers, bound.digest)
        self.present = list(answers)
        rows, columns = next(iter(values.values())).shape
        return self.receiver.decode(combined, (rows, columns), bound)

    def values(self, names: Collection[str], seed: int = 0) -> dict[str, NDArray[Any]]:
        drawn = random_values(len(self.names), SHAPE, seed)
        return {me: value for me, value in zip(self.names, drawn, strict=True) if me in names}

    def compute_expected(self, values: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        fixed_point = FixedPoint.from_agreement(self.sum.agreement)
        total = sum(fixed_point.quantise_rows(value) for value in values.values())
        return fixed_point.dequantise_sum(np.asarray(total, dtype=np.int64))


def blobs(frame: bytes) -> tuple[bytes, ...]:
    return Frame.parse(frame, sender="peer").blobs


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sum_is_the_integer_sum_of_those_counted(data: st.DataObject) -> None:
    passives, least = data.draw(st.sampled_from(SIZES))
    session = Session(passives, least)
    for seed in range(data.draw(st.integers(1, 3))):
        for _ in range(data.draw(st.sampled_from([0, 0, 3]))):
            session.next()  # skipped steps cost no keys
        before = data.draw(st.lists(st.sampled_from(session.present), unique=True, max_size=3))
        counted = [me for me in session.present if me not in before]
        values = session.values(counted, seed=seed)
        scale = data.draw(st.sampled_from([1e-3, 1.0, 1e300]))
        values = {me: value * scale for me, value in values.items()}
        after = data.draw(st.lists(st.sampled_from(session.present), unique=True, max_size=2))
        if len(counted) < least or len(set(counted) - set(after)) < least:
            with pytest.raises(RemoteProtocolError, match="a sum needs one"):
                session.step(values, never_answer=after)
            return
        total = session.step(values, never_answer=after)
        assert np.array_equal(total, session.compute_expected(values))


def test_too_few_contributions_end_the_session_and_reveal_nothing() -> None:
    session = Session(4, 3)
    bound = session.next()
    frames = session.frames(bound, session.values(session.names[:2]))
    with pytest.raises(RemoteProtocolError, match=r"at least 3 of .*missing: passive_3, passive_4"):
        session.aggregator.ask(frames, bound.digest)
    # An aggregator that asks all the same is told nothing.
    forged = session.aggregator._frames  # of this backend
    forged._pending_header = replace(Frame.parse(frames["passive_1"], sender="passive_1"), blobs=())
    counted = session.sum.agreement.pack_names(session.names[:2])
    parcel = blobs(frames["passive_2"])[2]
    with pytest.raises(RemoteProtocolError, match="counted among 3 or more of"):
        session.contributors["passive_1"].answer(
            forged.pack_request("passive_1", (counted, parcel))
        )
    with pytest.raises(LocalProtocolError, match="no contribution of passive_1 waits"):
        session.contributors["passive_1"].answer(
            forged.pack_request("passive_1", (counted, parcel))
        )
    with pytest.raises(LocalProtocolError, match="its session is over, open a new one"):
        session.contributors["passive_1"].contribute(np.ones(SHAPE), session.next())


def test_too_few_answers_give_no_sum_and_no_secret() -> None:
    session = Session(4, 3)
    bound = session.next()
    announced = dict(session.aggregator._announcement_by_contributor)  # type: ignore[attr-defined]  # of this backend
    _, requests = session.request_shares(session.values(session.names), bound)
    answers = session.answers(requests, session.names[:2])
    with pytest.raises(
        RemoteProtocolError, match=r"one answer of at least 3 of .*: passive_3, pass"
    ):
        session.aggregator.combine(answers, bound.digest)

    def rebuild(at: int, owner: str) -> bytes:
        shares = {place: blobs(answers[me])[at] for place, me in enumerate(answers)}
        return rebuild_seed(shares, announced[owner], session.sum.agreement, owner)

    cases = [
        (f"shares of {owner}'s secret do not give", at, owner)
        for at, owner in enumerate(session.names)
    ]
    assert list_unrefused(RemoteProtocolError, rebuild, cases) == []


def test_the_silent_stay_out() -> None:
    session = Session(4, 3)
    session.step(session.values(session.names[1:]))
    bound = session.next()
    late = session.contributors["passive_1"].contribute(np.ones(SHAPE), bound)
    frames = session.frames(bound, session.values(session.names[1:]))
    with pytest.raises(RemoteProtocolError, match="passive_1 fell silent in an earlier step"):
        session.aggregator.ask({**frames, "passive_1": late}, bound.digest)
    session.aggregator.ask(frames, bound.digest)


def counting(
    session: Session, told: Mapping[str, Sequence[str]], frames: Mapping[str, bytes]
) -> dict[str, bytes]:
    """The requests of an aggregator that tells each passive a set of its own."""
    requests = {}
    for me, counted in told.items():
        parcels = [
            blobs(frames[other])[2 + [x for x in session.names if x != other].index(me)]
            for other in counted
            if other != me
        ]
        header = replace(Frame.parse(frames[me], sender=me), kind=FrameKind.REQUEST)
        named = session.sum.agreement.pack_names(counted)
        requests[me] = replace(header, blobs=(named, *parcels)).pack()
    return requests


@pytest.mark.parametrize(
    ("passives", "minimum", "believers"),
    [(passives, least, believers) for passives, least in SIZES for believers in range(passives)],
)
def test_a_lying_aggregator_gets_no_two_secrets_of_one_passive(
    passives: int, minimum: int, believers: int
) -> None:
    """Some are told that passive_1 is counted, the others that it is not."""
    victim = "passive_1"
    session = Session(passives, minimum)
    announced = session.aggregator._announcement_by_contributor[victim]  # type: ignore[attr-defined]  # backend's
    frames = session.frames(session.next())
    everybody = session.names
    without = session.names[1:]
    told = {me: everybody if at <= believers else without for at, me in enumerate(session.names)}
    requests = counting(session, told, frames)

    def answer(me: str) -> bytes:
        answered: bytes = session.contributors[me].answer(requests[me])
        return answered

    refusing = [me for me in requests if len(told[me]) < minimum]
    cases = [(f"counted among {minimum} or more", me) for me in refusing]
    assert not cases or list_unrefused(RemoteProtocolError, answer, cases) == []
    seed_shares: dict[int, bytes] = {}
    key_shares: dict[int, bytes] = {}
    for me in requests:
        if me not in refusing:
            chosen = seed_shares if told[me] == everybody else key_shares
            chosen[session.names.index(me)] = blobs(answer(me))[0]
    assert min(len(seed_shares), len(key_shares)) < minimum
    found = dict(list(seed_shares.items())[:minimum])
    if len(found) == minimum:
        rebuild_seed(found, announced, session.sum.agreement, victim)


def test_passives_who_were_told_different_sets_do_not_answer_again() -> None:
    session = Session(4, 3)
    bound = session.next()
    frames = session.frames(bound)
    told: dict[str, Sequence[str]] = dict.fromkeys(session.names, session.names)
    told["passive_4"] = session.names[1:]
    for me, request in counting(session, told, frames).items():
        session.contributors[me].answer(request)
    bound = session.next()
    others = session.names[1:]
    frames = {me: session.contributors[me].contribute(np.ones(SHAPE), bound) for me in others}
    parcels = {"passive_2": [blobs(frames["passive_3"])[3], blobs(frames["passive_4"])[2]]}
    named = session.sum.agreement.pack_names(others)
    header = replace(Frame.parse(frames["passive_2"], sender="passive_2"), kind=FrameKind.REQUEST)
    request = replace(header, blobs=(named, *parcels["passive_2"])).pack()
    with pytest.raises(RemoteProtocolError, match="of passive_4 for passive_2 do not authenticate"):
        session.contributors["passive_2"].answer(request)


def test_a_passive_called_silent_is_the_difference_of_two_sums() -> None:
    """The limit that the top of the file names: a question that is related and not the same."""
    session = Session(4, 3)
    values = {me: value / 20 for me, value in session.values(session.names).items()}
    everybody, (left_out, *others) = session.step(values), session.names
    # It contributes as ever; the aggregator keeps that back.
    bound = session.next()
    halved = {me: value / 2 for me, value in values.items()}
    frames = {me: session.contributors[me].contribute(halved[me], bound) for me in values}
    requests = session.aggregator.ask({me: frames[me] for me in others}, bound.digest)
    answers = {me: session.contributors[me].answer(requests[me]) for me in others}
    without = session.receiver.decode(session.aggregator.combine(answers), SHAPE, bound)
    own = session.compute_expected({left_out: values[left_out]})
    assert np.allclose(everybody - 2 * without, own, atol=1e-3)
    with pytest.raises(RemoteProtocolError, match="missing"):
        Session(4, 4).step({me: values[me] for me in others})


def test_keys_that_the_aggregator_swaps_are_noticed() -> None:
    session = Session(3)
    bound = session.next()
    _, requests = session.request_shares(session.values(session.names), bound)
    counted, first, second = blobs(requests["passive_1"])

    def answer_with(*parcels: bytes) -> bytes:
        fresh = Session(3)
        _, requests = fresh.request_shares(fresh.values(fresh.names), fresh.next())
        request = alter_frame(requests["passive_1"], blobs=(counted, *parcels))
        return fresh.contributors["passive_1"].answer(request)

    said = "do not authenticate: they were altered"
    cases = [(said, second, first), (said, first, bytes(len(second))), (said, first, second[:-1])]
    assert list_unrefused(RemoteProtocolError, answer_with, cases) == []


BAD: dict[str, dict[str, Any]] = {
    "request": {
        "counts nobody": lambda parts: (),
        "sent keys of 1 passives, expected 2": lambda parts: parts[:-1],
        "named a set of contributors in 1 bytes": lambda parts: (b"\0", *parts[1:]),
        "counts nobody in this step": lambda parts: (b"", *parts[1:]),
        "only where it is counted among 3": lambda parts: (bytes([0, 1, 0, 2]), *parts[1:]),
        "in 6 bytes .* rising positions below 3": lambda parts: (b"\0\0\0\2\0\1", *parts[1:]),
        "rising positions below 3": lambda parts: (bytes([0, 0, 0, 1, 0, 3]), *parts[1:]),
    },
    "contribution": {
        "passive_2 sent 3 parts in a contribution, expected 4": lambda parts: parts[:-1],
        "announced 3x5 values and sent other bytes": lambda parts: (parts[0][:-4], *parts[1:]),
        "announced its keys in 0 bytes": lambda parts: (parts[0], b"", *parts[2:]),
        "sent keys of another size for the next step": lambda parts: (*parts[:-1], b""),
    },
    "answer": {
        "passive_2 sent 2 parts in an answer, expected 3": lambda parts: parts[:-1],
        "passive_2 sent a share of another size": lambda parts: (b"", *parts[1:]),
        "shares of passive_1's secret do not give": lambda parts: (bytes(16), *parts[1:]),
    },
}


def taken(session: Session, subject: str, sent: Mapping[str, bytes]) -> object:
    """Return what whoever gets these frames makes of them."""
    if subject == "request":
        return session.contributors["passive_2"].answer(sent["passive_2"])
    return (
        session.aggregator.ask(sent)
        if subject == "contribution"
        else session.aggregator.combine(sent)
    )


@pytest.mark.parametrize(
    ("subject", "message"),
    [(what, message) for what, changes in BAD.items() for message in changes],
)
def test_bad_frames_are_refused(subject: str, message: str) -> None:
    change = BAD[subject][message]
    session = Session(3)
    sent = session.frames(session.next())
    if subject != "contribution":
        sent = dict(session.aggregator.ask(sent))
    if subject == "answer":
        sent = session.answers(sent)
    sent["passive_2"] = alter_frame(sent["passive_2"], blobs=change(blobs(sent["passive_2"])))
    with pytest.raises(RemoteProtocolError, match=message):
        taken(session, subject, sent)


def test_a_false_share_that_is_not_needed_goes_unnoticed_and_changes_nothing() -> None:
    """The secrets are put together from the first answers that reach the threshold."""
    session = Session(4, 3)
    again = Session(4, 3)
    values = session.values(session.names)
    totals = []
    for played, false in ((session, b""), (again, bytes(16))):
        bound = played.next()
        _, requests = played.request_shares(values, bound)
        answers = played.answers(requests)
        if false:
            shares = (false,) * len(blobs(answers["passive_4"]))
            answers["passive_4"] = alter_frame(answers["passive_4"], blobs=shares)
        combined = played.aggregator.combine(answers, bound.digest)
        totals.append(played.receiver.decode(combined, SHAPE, bound))
    assert np.array_equal(totals[0], totals[1])


def test_a_sum_names_those_whom_it_counts() -> None:
    session = Session(4, 3)
    bound = session.next()
    _, requests = session.request_shares(session.values(session.names[:3]), bound)
    combined = session.aggregator.combine(session.answers(requests), bound.digest)
    total, counted = blobs(combined)
    assert session.sum.agreement.parse_names(counted, sender="x") == session.names[:3]
    everybody = session.sum.agreement.pack_names(session.names)
    receiver = Rearmed(session.receiver)

    def decode(party: int, *parts: bytes) -> NDArray[Any]:
        bound = session.next()
        about = {"step": bound.step, "binding": bound.digest, "index_or_count": party}
        decoded: NDArray[Any] = receiver.decode(
            alter_frame(combined, blobs=parts, **about), SHAPE, bound
        )
        return decoded

    cases = [
        ("a sum of 3 contributions and names 4 contributors", 3, total, everybody),
        ("sent 1 parts in a sum, expected 2", 3, total),
        ("lies beyond the range", 4, total, everybody),
        ("a sum of 2 contributions, expected 3 to 4", 2, total, everybody),
    ]
    assert list_unrefused(RemoteProtocolError, decode, cases) == []


def test_an_equivocating_active_gets_no_answer() -> None:
    session = Session(3)
    bound = session.next()
    told = dict.fromkeys(session.names, bound) | {"passive_2": binding(1, message=9)}
    frames = session.contribute([np.full(SHAPE, 1e6)] * 3, told)
    # An aggregator that asks all the same: what passive_2 sealed holds on to what it was sent.
    everybody = dict.fromkeys(session.names, session.names)
    with pytest.raises(RemoteProtocolError, match="sent passive_2 another message; no answer"):
        session.contributors["passive_1"].answer(counting(session, everybody, frames)["passive_1"])


def test_every_step_has_other_keys() -> None:
    session = Session(2)
    announced = []
    for _ in range(3):
        frames, requests = session.request_shares(session.values(session.names), session.next())
        session.aggregator.combine(session.answers(requests))
        announced += [
            Announcement.parse(blobs(frame)[1], sender=me) for me, frame in frames.items()
        ]
    assert (
        len({one.public_key for one in announced})
        == len({one.seed_commitment for one in announced})
        == 6
    )


def test_setup_takes_two_messages_of_each_passive() -> None:
    described = RecoverableSum(agreement())
    first = described.make_contributor("passive_1")
    second = described.make_contributor("passive_2")
    with pytest.raises(LocalProtocolError, match="no mask key of active yet"):
        first.contribute(np.zeros((1, 1)), binding(0))
    active = described.make_receiver()
    for message in active.start():
        if message.receiver == "passive_1":
            first.receive("active", message.body)
    with pytest.raises(LocalProtocolError, match="no keys of passive_2, passive_3; run the setup"):
        first.contribute(np.zeros((1, 1)), binding(0))
    link = next(out.body for out in second.start() if out.receiver == "passive_1")
    said = "who expects two from each of passive_2"
    cases = [(said, sender, link) for sender in ("aggregator", "passive_1", "stranger")]
    assert list_unrefused(RemoteProtocolError, first.receive, cases) == []
    public, hello = blobs(link)
    cases = [
        ("sent 0 parts in a setup, expected 2", "passive_2", alter_frame(link, blobs=())),
        ("sent 1 parts in a setup, expected 2", "passive_2", alter_frame(link, blobs=(public,))),
        ("has 32 bytes", "passive_2", alter_frame(link, blobs=(b"", hello))),
        ("low order", "passive_2", alter_frame(link, blobs=(bytes(32), hello))),
        ("a hello of 32 bytes", "passive_2", alter_frame(link, blobs=(public, hello[1:]))),
    ]
    assert list_unrefused(RemoteProtocolError, first.receive, cases) == []
    reply = next(iter(first.receive("passive_2", link)))
    assert reply.receiver == "passive_2"
    with pytest.raises(RemoteProtocolError, match="sent 2 parts in a setup, expected 1"):
        first.receive("passive_2", link)
    with pytest.raises(RemoteProtocolError, match="does not authenticate"):
        first.receive("passive_2", alter_frame(link, blobs=(bytes(80),)))
    fewer = RecoverableSum(agreement(threshold=2), allow_single_reader=True)
    other = [*fewer.make_contributor("passive_3").start()][1].body
    with pytest.raises(RemoteProtocolError, match="another agreement"):
        first.receive("passive_3", other)


def test_the_aggregator_takes_one_announcement_of_each_passive() -> None:
    described = RecoverableSum(agreement())
    aggregator = described.make_aggregator()
    with pytest.raises(LocalProtocolError, match="run the setup"):
        aggregator.ask({})
    with pytest.raises(LocalProtocolError, match="nobody was asked yet"):
        aggregator.combine({})
    told = [*described.make_contributor("passive_1").start()][-1]
    assert told.receiver == "aggregator"
    with pytest.raises(RemoteProtocolError, match="active sent a setup message to the aggregator"):
        aggregator.receive("active", told.body)
    with pytest.raises(RemoteProtocolError, match="announced its keys in 3 bytes, expected 64"):
        aggregator.receive("passive_1", alter_frame(told.body, blobs=(b"abc",)))
    aggregator.receive("passive_1", told.body)
    with pytest.raises(RemoteProtocolError, match="passive_1 sent a setup message"):
        aggregator.receive("passive_1", told.body)
    assert not aggregator.is_finished


def make_agreement(passives: int) -> SumAgreement:
    names = tuple(f"passive_{number}" for number in range(passives))
    return agreement(contributors=names, allow_single=True)


@pytest.mark.parametrize(
    ("passives", "two_thirds"), [(1, 1), (2, 2), (3, 3), (4, 3), (6, 5), (9, 7)]
)
def test_all_are_needed_and_where_that_is_allowed_two_thirds(
    passives: int, two_thirds: int
) -> None:
    made = [
        RecoverableSum(make_agreement(passives), allow_single_reader=one) for one in (False, True)
    ]
    expected = [passives, two_thirds]
    assert [described.threshold for described in made] == expected
    assert [described.min_contributors for described in made] == expected
    assert [described.list_parameters()["threshold"] for described in made] == expected


def test_one_passive_alone_works_where_the_agreement_allows_it() -> None:
    session = Parties(RecoverableSum(make_agreement(1)))
    assert session.add([np.full(SHAPE, 0.1)]).shape == SHAPE
    assert session.add([np.full(SHAPE, 0.1)]).shape == SHAPE


@pytest.mark.parametrize(("passives", "threshold"), [(4, 2), (4, 1), (6, 3), (5, 2), (2, 1)])
def test_a_threshold_that_opens_contributions_is_refused(passives: int, threshold: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"take {passives // 2 + 1} or more"):
        RecoverableSum(agreement(passives, threshold=threshold))


@pytest.mark.parametrize(
    "choice", [name for name in usable(SECURE_SUMS) if SECURE_SUMS[name].needs_all]
)
def test_other_sums_take_all_contributors(choice: str) -> None:
    values = random_values(3)
    assert Parties(make(choice, agreement(threshold=3))).add(values).shape == values[0].shape
    with pytest.raises(LocalProtocolError, match="says threshold 2; take recoverable masks"):
        Parties(make(choice, agreement(threshold=2)))


@settings(max_examples=30, deadline=None)
@given(number=st.integers(0, 2**128 - 160), data=st.data())
def test_as_many_shares_as_the_threshold_give_the_secret(number: int, data: st.DataObject) -> None:
    secret = number.to_bytes(16, "big")
    holders = data.draw(st.integers(1, 6))
    threshold = data.draw(st.integers(1, holders))
    shares = split_secret(secret, threshold=threshold, holder_count=holders)
    chosen = data.draw(st.permutations(range(holders)))[:threshold]
    assert join_shares({holder: shares[holder] for holder in chosen}) == secret
    if threshold > 1:
        fewer = {holder: shares[holder] for holder in chosen[1:]}
        assert join_shares(fewer) != secret


def test_shares_of_equal_secrets_differ() -> None:
    assert split_secret(bytes(16), threshold=2, holder_count=3) != split_secret(
        bytes(16), threshold=2, holder_count=3
    )


@pytest.mark.parametrize(
    "bad",
    [{}, {0: b""}, {0: bytes(16), 1: bytes(15)}, {0: bytes(32)}],
    ids=["none", "an empty one", "two sizes", "too long"],
)
def test_shares_of_other_sizes_are_refused(bad: dict[int, bytes]) -> None:
    with pytest.raises(LocalProtocolError, match="shares of 16 bytes each"):
        join_shares(bad)


@pytest.mark.parametrize(
    ("secret", "threshold", "holders"),
    [
        pytest.param(bytes(15), 1, 2, id="a short secret"),
        pytest.param(bytes(16), 3, 2, id="more needed than there are"),
        pytest.param(bytes(16), 0, 2, id="nobody needed"),
        pytest.param(b"\xff" * 16, 1, 2, id="a secret beyond the field"),
    ],
)
def test_what_cannot_be_shared_is_refused(secret: bytes, threshold: int, holders: int) -> None:
    with pytest.raises(LocalProtocolError, match="is shared among at least"):
        split_secret(secret, threshold=threshold, holder_count=holders)


@given(data=st.binary(max_size=12))
@example(data=bytes(4))
@example(data=b"\0\1\0\0")
def test_any_bytes_name_a_set_or_are_refused(data: bytes) -> None:
    agreed: SumAgreement = agreement(5)
    try:
        names = agreed.parse_names(data, sender="peer")
    except RemoteProtocolError:
        return
    assert agreed.pack_names(names) == data
    assert len(set(names)) == len(names)
    assert isinstance(RecoverableSum(agreed).make_contributor("passive_1"), RecoverableContributor)
