"""Second rounds: every request and answer belongs to one step, and is used once."""

from dataclasses import replace
from typing import Any

import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import SECURE_SUMS
from apfed_protocols.sums.frames import Frame, FrameKind
from tests.contracts.sum_parties import Parties, agreement, make, random_values
from tests.with_crypten import usable

two_rounds = pytest.mark.parametrize(
    "choice", usable(name for name, kind in SECURE_SUMS.items() if kind.rounds == 2)
)


class Step:
    """One step of three passives up to the requests."""

    def __init__(self, choice: str) -> None:
        self.played = Parties(make(choice, agreement()))
        self.requests = self.asked()

    def asked(self) -> dict[str, bytes]:
        self.bound = self.played.next()
        frames = self.played.contribute(random_values(3), self.bound)
        return dict(self.played.combiner.ask(frames, self.bound.digest))

    def answers(self) -> dict[str, bytes]:
        return {me: self.played.contributors[me].answer(self.requests[me]) for me in self.requests}


@two_rounds
def test_a_request_is_answered_once_after_a_contribution_by_whom_it_is_for(choice: str) -> None:
    step = Step(choice)
    one = step.played.contributors["passive_1"]
    one.answer(step.requests["passive_1"])
    with pytest.raises(LocalProtocolError, match="each step is answered once"):
        one.answer(step.requests["passive_1"])
    fresh = make(choice, agreement())
    with pytest.raises(LocalProtocolError, match="waits for a"):
        fresh.contributor("passive_1").answer(step.requests["passive_1"])
    with pytest.raises(LocalProtocolError, match=r"no contribution waits|nobody was asked yet"):
        fresh.combiner().combine(Step(choice).answers())
    step = Step(choice)
    with pytest.raises(RemoteProtocolError, match="from aggregator is for contributor 1"):
        step.played.contributors["passive_1"].answer(step.requests["passive_2"])


CHANGES: dict[str, dict[str, Any]] = {
    "about step 9, or another message or shape, while step 1": {"step": 9},
    "about step 1, or another message or shape": {"binding": bytes(32)},
    "while step 1 is under way": {"rows": 4},
    "a sum of {name}, expected a request": {"kind": FrameKind.SUM},
    "a request of plain, expected a request of {name}": {"name": "plain"},
    "uses other parameters": {"fingerprint": bytes(32)},
    "for contributor 2": {"party": 2},
}


@two_rounds
def test_altered_requests_and_answers_are_refused(choice: str) -> None:
    for said, change in CHANGES.items():
        message, step = said.format(name=choice).replace("+", r"\+"), Step(choice)
        request = Frame.parse(step.requests["passive_1"], sender="aggregator")
        with pytest.raises(RemoteProtocolError, match=message):
            step.played.contributors["passive_1"].answer(replace(request, **change).pack())
        other = Step(choice)
        answers = other.answers()
        frame = Frame.parse(answers["passive_1"], sender="passive_1")
        altered = replace(frame, **change).pack()
        with pytest.raises(RemoteProtocolError, match=message.replace("a request", "an answer")):
            other.played.combiner.combine({**answers, "passive_1": altered})
        other.played.combiner.combine(answers)


@two_rounds
def test_missing_unknown_and_late_answers_are_refused(choice: str) -> None:
    step = Step(choice)
    combine, answers = step.played.combiner.combine, step.answers()
    renamed = dict(answers)
    renamed["stranger"] = renamed.pop("passive_2")
    with pytest.raises(RemoteProtocolError, match="missing: passive_2; unknown: stranger"):
        combine(renamed)
    with pytest.raises(RemoteProtocolError, match="about another message than the one agreed"):
        combine(answers, bytes(32))
    combine(answers)
    with pytest.raises(LocalProtocolError, match=r"no contribution waits|nobody was asked yet"):
        combine(answers)
    step.requests = step.asked()
    with pytest.raises(RemoteProtocolError, match="about step 1, or another"):
        combine(answers)


def test_backends_of_one_round_say_so() -> None:
    for choice in (name for name, backend in SECURE_SUMS.items() if backend.rounds == 1):
        played = Parties(make(choice, agreement()))
        frames = played.contribute(random_values(3), played.next())
        with pytest.raises(LocalProtocolError, match="has one round: combine the 3 contributions"):
            played.combiner.ask(frames)
        with pytest.raises(LocalProtocolError, match="has one round: its contribution is all"):
            played.contributors["passive_1"].answer(b"request")
        played.combiner.combine(frames)
