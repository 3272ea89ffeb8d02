"""Additive shares added by CrypTen: what coalitions hold is uniform, and nothing is passed off."""

import importlib.util
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.refusals import list_unrefused

if importlib.util.find_spec("crypten") is None:
    pytest.skip("crypten is absent", allow_module_level=True)

from apfed_protocols.crypten import draw_share
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import CryptenSum, StepBinding
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.masked import StepCiphers
from tests.contracts.hostile import alter_frame, looks_uniform
from tests.contracts.sum_parties import Parties, agreement, binding, random_values

SHAPE = (64, 32)


@pytest.fixture
def crypten_parties() -> Parties:
    return Parties(CryptenSum(agreement(3)))


def seals(played: Parties, name: str) -> StepCiphers:
    """Return what one party seals and opens with."""
    role = played.receiver if name == "active" else played.contributors[name]
    found: StepCiphers = vars(role)["_step_ciphers"]
    return found


def sealing_again(played: Parties, liar: str) -> StepCiphers:
    """Return what it seals with, as one that lies has it: the nonce is its own loss."""
    found = seals(played, liar)
    vars(found)["_last_step_by_peer"] = dict.fromkeys((*played.names, "active"), -1)
    return found


def answers(played: Parties, values: list[Any], bound: StepBinding) -> dict[str, bytes]:
    requests = played.aggregator.ask(played.contribute(values, bound), bound.digest)
    return {name: played.contributors[name].answer(requests[name]) for name in requests}


def _list_seals(frame: bytes) -> tuple[bytes, ...]:
    return Frame.parse(frame, sender="peer").blobs


def shares_of_the_sum(
    played: Parties, values: list[Any], bound: StepBinding
) -> list[NDArray[np.uint64]]:
    """Return what the active opens, one share of each passive."""
    active = seals(played, "active")
    return [
        np.frombuffer(active.open(name, bound, SHAPE, _list_seals(body)[0]), "<u8")
        for name, body in answers(played, values, bound).items()
    ]


def test_a_party_seals_once_a_step_for_each_peer(crypten_parties: Parties) -> None:
    mine = seals(crypten_parties, crypten_parties.names[0])
    bound = crypten_parties.next()
    later = crypten_parties.next()
    mine.seal(crypten_parties.names[1], later, SHAPE, b"first")
    mine.seal(crypten_parties.names[2], later, SHAPE, b"another peer, another key")
    said = "a nonce is never used twice"
    cases = [(said, crypten_parties.names[1], again, SHAPE, b"second") for again in (later, bound)]
    assert list_unrefused(LocalProtocolError, mine.seal, cases) == []


def test_the_active_opens_uniform_shares_that_only_together_make_the_sum(
    crypten_parties: Parties,
) -> None:
    values = [np.full(SHAPE, 0.001)] * 3
    first, second, third = shares_of_the_sum(crypten_parties, values, crypten_parties.next())
    parts = (first, second, third, first + second, second + third, first + third)
    assert [looks_uniform(part) for part in parts] == [True] * 6
    assert np.unique(first + second + third).tolist() == [99]  # 3 * round(0.001 * 32767)
    again = shares_of_the_sum(crypten_parties, values, crypten_parties.next())
    assert (again[0] != first).all()


def test_an_active_an_aggregator_and_a_passive_learn_only_the_sum_of_the_other_two(
    crypten_parties: Parties,
) -> None:
    """They take off the shares that the passive held or gave; each remainder is uniform."""
    bound = crypten_parties.next()
    small = np.full(SHAPE, 0.001)
    frames = crypten_parties.contribute([small, 3 * small, small], bound)
    requests = crypten_parties.aggregator.ask(frames, bound.digest)
    traitor = seals(crypten_parties, "passive_3")
    active = seals(crypten_parties, "active")
    rests = []
    for place, name in enumerate(("passive_1", "passive_2")):
        held = traitor.open(name, bound, SHAPE, _list_seals(requests["passive_3"])[place])
        gave = seals(crypten_parties, name).open(
            "passive_3", bound, SHAPE, _list_seals(frames["passive_3"])[place]
        )
        answer = crypten_parties.contributors[name].answer(requests[name])
        opened = np.frombuffer(active.open(name, bound, SHAPE, _list_seals(answer)[0]), "<u8")
        known = draw_share(held, SHAPE) - draw_share(gave, SHAPE)
        rests.append(opened + known.reshape(-1))
    assert all(map(looks_uniform, rests))
    # of 32767 levels the thousandth and three thousandths, rounded: 33 and 98
    assert np.unique(rests[0] + rests[1]).tolist() == [131]


def test_crypten_does_the_adding(crypten_parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    from crypten.mpc.primitives import ArithmeticSharedTensor

    genuine = ArithmeticSharedTensor.__add__
    add = create_autospec(genuine, side_effect=genuine)
    monkeypatch.setattr(ArithmeticSharedTensor, "__add__", add)
    crypten_parties.add(random_values(3))
    added = [tuple(map(type, pair)) for pair, _ in add.call_args_list]
    assert added == [(ArithmeticSharedTensor,) * 2] * 6  # three passives, each three shares


def test_a_colluding_aggregator_cannot_join_answers_to_different_messages(
    crypten_parties: Parties,
) -> None:
    bound = crypten_parties.next()
    other = binding(bound.step, message=1)
    frames = crypten_parties.contribute(
        random_values(3), dict.fromkeys(crypten_parties.names, bound) | {"passive_1": other}
    )
    frames["passive_1"] = alter_frame(frames["passive_1"], binding=bound.digest)
    requests = crypten_parties.aggregator.ask(frames, bound.digest)
    answer = lambda name: crypten_parties.contributors[name].answer(requests[name])  # noqa: E731
    cases = [
        (f"passive_1 sealed for {name} .* different", name) for name in ("passive_2", "passive_3")
    ]
    assert list_unrefused(RemoteProtocolError, answer, cases) == []


@pytest.mark.parametrize("change", ["swap", "repeat", "other recipient", "old step", "drop", "add"])
def test_a_relay_that_mixes_up_shares_is_refused(crypten_parties: Parties, change: str) -> None:
    values = random_values(3)
    before = crypten_parties.next()
    old = crypten_parties.aggregator.ask(crypten_parties.contribute(values, before), before.digest)
    bound = crypten_parties.next()
    requests = dict(
        crypten_parties.aggregator.ask(crypten_parties.contribute(values, bound), bound.digest)
    )
    first, second = _list_seals(requests["passive_1"])
    blobs = {
        "swap": (second, first),
        "repeat": (first, first),
        "other recipient": (_list_seals(requests["passive_3"])[1], second),
        "old step": (_list_seals(old["passive_1"])[0], second),
        "drop": (first,),
        "add": (first, second, second),
    }[change]
    with pytest.raises(RemoteProtocolError, match=r"does not authenticate|relays [13] shares"):
        crypten_parties.contributors["passive_1"].answer(
            alter_frame(requests["passive_1"], blobs=blobs)
        )
    crypten_parties.contributors["passive_1"].answer(requests["passive_1"])


def test_an_answer_for_another_step_is_not_opened(crypten_parties: Parties) -> None:
    values = random_values(3)
    bound = crypten_parties.next()
    stale = _list_seals(crypten_parties.aggregator.combine(answers(crypten_parties, values, bound)))
    again = crypten_parties.next()
    fresh = crypten_parties.aggregator.combine(answers(crypten_parties, values, again))
    with pytest.raises(RemoteProtocolError, match="does not authenticate"):
        crypten_parties.receiver.decode(alter_frame(fresh, blobs=stale), (3, 5), again)


def test_a_relay_cannot_turn_a_sum_into_another_shape(crypten_parties: Parties) -> None:
    bound = crypten_parties.next()
    combined = crypten_parties.aggregator.combine(answers(crypten_parties, random_values(3), bound))
    with pytest.raises(RemoteProtocolError, match=r"sealed for active .* does not authenticate"):
        crypten_parties.receiver.decode(alter_frame(combined, rows=5, columns=3), (5, 3), bound)


def test_what_a_lying_passive_seals_is_checked(crypten_parties: Parties) -> None:
    bound = crypten_parties.next()
    frames = crypten_parties.contribute(random_values(3), bound)
    short = sealing_again(crypten_parties, "passive_1").seal("passive_2", bound, (3, 5), b"no key")
    _, good = _list_seals(frames["passive_1"])
    frames["passive_1"] = alter_frame(frames["passive_1"], blobs=(short, good))
    requests = crypten_parties.aggregator.ask(frames, bound.digest)
    with pytest.raises(RemoteProtocolError, match="passive_1 sealed 6 bytes, expected a key"):
        crypten_parties.contributors["passive_2"].answer(requests["passive_2"])


@pytest.mark.parametrize(
    ("share", "error"),
    [
        (bytes(15 * 8 - 1), "passive_2 sealed 119 bytes of a share"),
        (np.full(15, 2**40, "<u8").tobytes(), "beyond the range of its contributions"),
    ],
)
def test_what_a_lying_passive_answers_is_checked(
    crypten_parties: Parties, share: bytes, error: str
) -> None:
    bound = crypten_parties.next()
    given = answers(crypten_parties, [np.zeros((3, 5))] * 3, bound)
    sealed = sealing_again(crypten_parties, "passive_2").seal("active", bound, (3, 5), share)
    given["passive_2"] = alter_frame(given["passive_2"], blobs=(sealed,))
    combined = crypten_parties.aggregator.combine(given)
    with pytest.raises(RemoteProtocolError, match=error):
        crypten_parties.receiver.decode(combined, (3, 5), bound)


def test_wrong_numbers_of_shares_are_named_by_the_aggregator(crypten_parties: Parties) -> None:
    bound = crypten_parties.next()
    frames = crypten_parties.contribute(random_values(3), bound)
    one = alter_frame(frames["passive_2"], blobs=_list_seals(frames["passive_2"])[:1])
    with pytest.raises(RemoteProtocolError, match="passive_2 sealed 1 shares, expected one for"):
        crypten_parties.aggregator.ask({**frames, "passive_2": one})
    bound = crypten_parties.next()
    given = answers(crypten_parties, random_values(3), bound)
    given["passive_3"] = alter_frame(given["passive_3"], blobs=_list_seals(given["passive_3"]) * 2)
    with pytest.raises(RemoteProtocolError, match="passive_3 answered with 2 shares of the sum"):
        crypten_parties.aggregator.combine(given)
    again = crypten_parties.next()
    told = crypten_parties.aggregator.combine(answers(crypten_parties, random_values(3), again))
    with pytest.raises(RemoteProtocolError, match="gathered 2 shares of the sum, expected 3"):
        crypten_parties.receiver.decode(
            alter_frame(told, blobs=_list_seals(told)[:2]), (3, 5), again
        )
