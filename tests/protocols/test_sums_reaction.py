"""Altered sums, of which only the receiver's reaction is seen: what it tells, where it ends."""

from dataclasses import replace

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.seal import RunKey
from apfed_protocols.sums import BfvSum
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.frames import Frame
from tests.contracts.reaction import (
    Reactions,
    Rearmed,
    key_coefficients,
    number_from_reactions,
    shifted,
)
from tests.contracts.sum_parties import Parties, agreement, binding, make, random_values

SHAPE = (3, 5)
COEFFICIENTS = 100


def fresh(choice: str) -> Parties:
    return Parties(make(choice, agreement()))


def true_key(played: Parties) -> list[int]:
    """The key's first coefficients, from decrypting (0, step): for the judge alone."""
    assert isinstance(played.sum, BfvSum)
    cipher, context = played.sum.cipher, vars(played.receiver)["_context"]
    step = cipher.residues.modulus >> played.sum.headroom.bits
    numbers = np.zeros(2 * played.sum.packing.slots, dtype=np.uint64)
    numbers[played.sum.packing.slots] = step
    blob = cipher.residues.pack(numbers)
    found = cipher.decrypt(context, [blob], 1, sender="judge")[:COEFFICIENTS]
    return [int(number) for number in found]


def limit(played: Parties) -> int:
    return FixedPoint.of(played.sum.agreement).limit


def held_sum(played: Parties) -> tuple[Frame, tuple[bytes, ...], int]:
    """A sum's frame, the blobs that an aggregator asks about, and the first number in them.

    Under encryption alone that is one passive's contribution in place of the sum.
    """
    bound, values = played.next(), random_values(3, SHAPE, seed=7)
    contributions = played.contribute(values, bound)
    frame = Frame.parse(played.combine(contributions, bound.digest), sender="aggregator")
    fixed_point = FixedPoint.of(played.sum.agreement)
    levels = [int(fixed_point.quantise(value)[0, 0]) for value in values]
    if played.sum.name not in ("ckks", "bfv"):
        return frame, frame.blobs, sum(levels)
    alone = Frame.parse(contributions["passive_2"], sender="passive_2").blobs
    return frame, alone, levels[1]


@pytest.mark.parametrize("choice", ["ckks", "bfv", "bfv + pairwise masks"])
def test_reactions_to_altered_sums_would_tell_a_number_and_end_with_the_first_refusal(
    choice: str,
) -> None:
    """Whoever could ask on reads it in 18 questions, without the active."""
    played = fresh(choice)
    frame, blobs, number = held_sum(played)
    reactions = Reactions(played, Rearmed(played.receiver), frame)

    def takes_with(offset: int) -> bool:
        return reactions.takes(*shifted(played, blobs, offset))

    assert number_from_reactions(limit(played), takes_with) == number
    assert reactions.refused > 1
    reactions = Reactions(played, played.receiver, frame)
    with pytest.raises(LocalProtocolError, match="refused the sum of step"):
        number_from_reactions(limit(played), takes_with)
    assert reactions.refused == 1


@pytest.mark.parametrize("choice", ["bfv", "bfv + pairwise masks"])
def test_reactions_would_tell_the_secret_key_and_end_with_the_first_refusal(choice: str) -> None:
    played = fresh(choice)
    bound = played.next()
    combined = played.combine(played.contribute([np.zeros((1, 1))] * 3, bound))
    frame, key = Frame.parse(combined, sender="aggregator"), true_key(played)
    assert set(key) == {-1, 0, 1}
    without_end = Reactions(played, Rearmed(played.receiver), frame)
    assert key_coefficients(played, without_end.takes, COEFFICIENTS) == key
    reactions = Reactions(played, played.receiver, frame)
    with pytest.raises(LocalProtocolError, match="refused the sum of step"):
        key_coefficients(played, reactions.takes, COEFFICIENTS)
    assert reactions.refused == 1


@pytest.mark.parametrize("choice", ["bfv", "plain + pairwise masks"])
def test_every_new_session_about_the_same_values_tells_one_reaction_more(choice: str) -> None:
    """The limit of the rule: 18 resumed runs in which the same sum is altered tell a number."""
    first = fresh(choice)
    _, _, number = held_sum(first)
    sessions = []

    def takes_with(offset: int) -> bool:
        played = Parties(first.sum)
        frame, blobs, _ = held_sum(played)
        sessions.append(played)
        asked = replace(frame, blobs=shifted(played, blobs, offset)).pack()
        try:
            played.receiver.decode(asked, SHAPE, binding(frame.step))
        except RemoteProtocolError:
            return False
        return True

    assert number_from_reactions(limit(first), takes_with) == number
    assert len(sessions) == 18


@pytest.mark.parametrize("choice", ["plain + pairwise masks", "plain + recoverable masks"])
def test_no_mask_seed_is_left_after_a_refusal_nor_the_key_that_agrees_it_again(choice: str) -> None:
    played = fresh(choice)
    seeds = vars(played.receiver)["_seeds"]
    assert any(isinstance(held, RunKey) for held in vars(seeds).values())
    with pytest.raises(RemoteProtocolError):
        played.receiver.decode(b"", SHAPE, played.next())
    assert not [held for held in vars(seeds).values() if isinstance(held, RunKey)]
    assert not vars(seeds)["_seeds"]
