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
from apfed_protocols.sums.masked import StepSeals
from tests.contracts.hostile import altered, looks_uniform
from tests.contracts.sum_parties import Parties, agreement, binding, random_values

SHAPE = (64, 32)


@pytest.fixture
def played() -> Parties:
    return Parties(CryptenSum(agreement(3)))


def seals(played: Parties, name: str) -> StepSeals:
    """Return what one party seals and opens with."""
    role = played.receiver if name == "active" else played.contributors[name]
    found: StepSeals = vars(role)["_seals"]
    return found


def sealing_again(played: Parties, liar: str) -> StepSeals:
    """Return what it seals with, as one that lies has it: the nonce is its own loss."""
    found = seals(played, liar)
    vars(found)["_last"] = dict.fromkeys((*played.names, "active"), -1)
    return found


def answers(played: Parties, values: list[Any], bound: StepBinding) -> dict[str, bytes]:
    requests = played.combiner.ask(played.contribute(values, bound), bound.digest)
    return {name: played.contributors[name].answer(requests[name]) for name in requests}


def _sealed(frame: bytes) -> tuple[bytes, ...]:
    return Frame.parse(frame, sender="peer").blobs


def shares_of_the_sum(
    played: Parties, values: list[Any], bound: StepBinding
) -> list[NDArray[np.uint64]]:
    """Return what the active opens, one share of each passive."""
    active = seals(played, "active")
    return [
        np.frombuffer(active.open(name, bound, SHAPE, _sealed(body)[0]), "<u8")
        for name, body in answers(played, values, bound).items()
    ]


def test_a_party_seals_once_a_step_for_each_peer(played: Parties) -> None:
    mine = seals(played, played.names[0])
    bound = played.next()
    later = played.next()
    mine.seal(played.names[1], later, SHAPE, b"first")
    mine.seal(played.names[2], later, SHAPE, b"another peer, another key")
    said = "a nonce is never used twice"
    cases = [(said, played.names[1], again, SHAPE, b"second") for again in (later, bound)]
    assert list_unrefused(LocalProtocolError, mine.seal, cases) == []


def test_the_active_opens_uniform_shares_that_only_together_make_the_sum(played: Parties) -> None:
    values = [np.full(SHAPE, 0.001)] * 3
    first, second, third = shares_of_the_sum(played, values, played.next())
    parts = (first, second, third, first + second, second + third, first + third)
    assert [looks_uniform(part) for part in parts] == [True] * 6
    assert np.unique(first + second + third).tolist() == [99]  # 3 * round(0.001 * 32767)
    again = shares_of_the_sum(played, values, played.next())
    assert (again[0] != first).all()


def test_an_active_an_aggregator_and_a_passive_learn_only_the_sum_of_the_other_two(
    played: Parties,
) -> None:
    """They take off the shares that the passive held or gave; each remainder is uniform."""
    bound = played.next()
    small = np.full(SHAPE, 0.001)
    frames = played.contribute([small, 3 * small, small], bound)
    requests = played.combiner.ask(frames, bound.digest)
    traitor = seals(played, "passive_3")
    active = seals(played, "active")
    rests = []
    for place, name in enumerate(("passive_1", "passive_2")):
        held = traitor.open(name, bound, SHAPE, _sealed(requests["passive_3"])[place])
        gave = seals(played, name).open(
            "passive_3", bound, SHAPE, _sealed(frames["passive_3"])[place]
        )
        answer = played.contributors[name].answer(requests[name])
        opened = np.frombuffer(active.open(name, bound, SHAPE, _sealed(answer)[0]), "<u8")
        known = draw_share(held, SHAPE) - draw_share(gave, SHAPE)
        rests.append(opened + known.reshape(-1))
    assert all(map(looks_uniform, rests))
    # of 32767 levels the thousandth and three thousandths, rounded: 33 and 98
    assert np.unique(rests[0] + rests[1]).tolist() == [131]


def test_crypten_does_the_adding(played: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    from crypten.mpc.primitives import ArithmeticSharedTensor

    genuine = ArithmeticSharedTensor.__add__
    add = create_autospec(genuine, side_effect=genuine)
    monkeypatch.setattr(ArithmeticSharedTensor, "__add__", add)
    played.add(random_values(3))
    added = [tuple(map(type, pair)) for pair, _ in add.call_args_list]
    assert added == [(ArithmeticSharedTensor,) * 2] * 6  # three passives, each three shares


def test_a_colluding_aggregator_cannot_join_answers_to_different_messages(played: Parties) -> None:
    bound = played.next()
    other = binding(bound.step, message=1)
    frames = played.contribute(
        random_values(3), dict.fromkeys(played.names, bound) | {"passive_1": other}
    )
    frames["passive_1"] = altered(frames["passive_1"], binding=bound.digest)
    requests = played.combiner.ask(frames, bound.digest)
    answer = lambda name: played.contributors[name].answer(requests[name])  # noqa: E731
    cases = [
        (f"passive_1 sealed for {name} .* different", name) for name in ("passive_2", "passive_3")
    ]
    assert list_unrefused(RemoteProtocolError, answer, cases) == []


@pytest.mark.parametrize("change", ["swap", "repeat", "other recipient", "old step", "drop", "add"])
def test_a_relay_that_mixes_up_shares_is_refused(played: Parties, change: str) -> None:
    values = random_values(3)
    before = played.next()
    old = played.combiner.ask(played.contribute(values, before), before.digest)
    bound = played.next()
    requests = dict(played.combiner.ask(played.contribute(values, bound), bound.digest))
    first, second = _sealed(requests["passive_1"])
    blobs = {
        "swap": (second, first),
        "repeat": (first, first),
        "other recipient": (_sealed(requests["passive_3"])[1], second),
        "old step": (_sealed(old["passive_1"])[0], second),
        "drop": (first,),
        "add": (first, second, second),
    }[change]
    with pytest.raises(RemoteProtocolError, match=r"does not authenticate|relays [13] shares"):
        played.contributors["passive_1"].answer(altered(requests["passive_1"], blobs=blobs))
    played.contributors["passive_1"].answer(requests["passive_1"])


def test_an_answer_for_another_step_is_not_opened(played: Parties) -> None:
    values = random_values(3)
    bound = played.next()
    stale = _sealed(played.combiner.combine(answers(played, values, bound)))
    again = played.next()
    fresh = played.combiner.combine(answers(played, values, again))
    with pytest.raises(RemoteProtocolError, match="does not authenticate"):
        played.receiver.decode(altered(fresh, blobs=stale), (3, 5), again)


def test_a_relay_cannot_turn_a_sum_into_another_shape(played: Parties) -> None:
    bound = played.next()
    combined = played.combiner.combine(answers(played, random_values(3), bound))
    with pytest.raises(RemoteProtocolError, match=r"sealed for active .* does not authenticate"):
        played.receiver.decode(altered(combined, rows=5, columns=3), (5, 3), bound)


def test_what_a_lying_passive_seals_is_checked(played: Parties) -> None:
    bound = played.next()
    frames = played.contribute(random_values(3), bound)
    short = sealing_again(played, "passive_1").seal("passive_2", bound, (3, 5), b"no key")
    _, good = _sealed(frames["passive_1"])
    frames["passive_1"] = altered(frames["passive_1"], blobs=(short, good))
    requests = played.combiner.ask(frames, bound.digest)
    with pytest.raises(RemoteProtocolError, match="passive_1 sealed 6 bytes, expected a key"):
        played.contributors["passive_2"].answer(requests["passive_2"])


@pytest.mark.parametrize(
    ("share", "error"),
    [
        (bytes(15 * 8 - 1), "passive_2 sealed 119 bytes of a share"),
        (np.full(15, 2**40, "<u8").tobytes(), "beyond the range of its contributions"),
    ],
)
def test_what_a_lying_passive_answers_is_checked(played: Parties, share: bytes, error: str) -> None:
    bound = played.next()
    given = answers(played, [np.zeros((3, 5))] * 3, bound)
    sealed = sealing_again(played, "passive_2").seal("active", bound, (3, 5), share)
    given["passive_2"] = altered(given["passive_2"], blobs=(sealed,))
    combined = played.combiner.combine(given)
    with pytest.raises(RemoteProtocolError, match=error):
        played.receiver.decode(combined, (3, 5), bound)


def test_wrong_numbers_of_shares_are_named_by_the_aggregator(played: Parties) -> None:
    bound = played.next()
    frames = played.contribute(random_values(3), bound)
    one = altered(frames["passive_2"], blobs=_sealed(frames["passive_2"])[:1])
    with pytest.raises(RemoteProtocolError, match="passive_2 sealed 1 shares, expected one for"):
        played.combiner.ask({**frames, "passive_2": one})
    bound = played.next()
    given = answers(played, random_values(3), bound)
    given["passive_3"] = altered(given["passive_3"], blobs=_sealed(given["passive_3"]) * 2)
    with pytest.raises(RemoteProtocolError, match="passive_3 answered with 2 shares of the sum"):
        played.combiner.combine(given)
    again = played.next()
    told = played.combiner.combine(answers(played, random_values(3), again))
    with pytest.raises(RemoteProtocolError, match="gathered 2 shares of the sum, expected 3"):
        played.receiver.decode(altered(told, blobs=_sealed(told)[:2]), (3, 5), again)
