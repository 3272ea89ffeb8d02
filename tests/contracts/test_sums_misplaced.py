"""Messages in the wrong place: every frame of a session is refused wherever it does not belong."""

import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from tests.contracts.overheard import Overheard
from tests.contracts.reaction import Rearmed
from tests.contracts.sum_parties import (
    CHOICES,
    agreement,
    binding,
    fresh_parties,
    make,
    random_values,
)

SENDERS = ("active", "aggregator", "passive_1", "passive_2", "stranger")


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.sampled(every=3)
def test_a_frame_is_taken_in_its_place_only(choice: str) -> None:
    """Setup, contributions, requests, answers and sums: own ones, and those of other keys."""
    other = Overheard(make(choice, agreement()))
    other.step(binding(1))
    played = fresh_parties(choice)
    played.receiver = Rearmed(played.receiver)  # type: ignore[assignment]  # acts as one
    bound = played.next()
    frames = played.contribute(random_values(3), bound)
    combined = played.combine(frames)
    played.receiver.decode(combined, (3, 5), bound)
    one = played.contributors["passive_1"]

    for frame in (*other.frames, *frames.values(), combined):
        for role in (played.receiver, played.combiner, one):
            for sender in SENDERS:
                with pytest.raises(RemoteProtocolError):
                    role.receive(sender, frame)
        with pytest.raises(RemoteProtocolError):
            played.receiver.decode(frame, (3, 5), played.next())
        with pytest.raises(RemoteProtocolError):
            played.combine(dict.fromkeys(played.names, frame))
        with pytest.raises(LocalProtocolError, match=r"one round|each step is answered once"):
            one.answer(frame)
    assert played.sum.rounds == 2 or played.add(random_values(3)).shape == (3, 5)
