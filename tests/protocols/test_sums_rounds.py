"""Second rounds: every request and answer belongs to one step, and is used once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import SECURE_SUMS, PlainSum, StepBinding
from apfed_protocols.sums.frames import Frame, FrameKind
from apfed_protocols.sums.interface import FloatArray, IntArray
from apfed_protocols.sums.roles import NoSetup
from tests.contracts.sum_parties import Parties, agreement, make, random_values

SHAPE = (2, 3)


@dataclass(frozen=True)
class TwiceSum(PlainSum):
    """Unprotected: the first round announces, the second brings the values."""

    scheme: ClassVar[str] = "twice"
    name: ClassVar[str] = "twice"
    rounds: ClassVar[int] = 2

    def contributor(self, me: str) -> "TwiceContributor":  # type: ignore[override]  # other rounds
        return TwiceContributor(self, me)

    def combiner(self) -> "TwiceCombiner":  # type: ignore[override]  # other rounds
        return TwiceCombiner(self)


class TwiceContributor(NoSetup):
    def __init__(self, twice: TwiceSum, me: str) -> None:
        self.me, self.frames = me, twice.frames()
        self._values: NDArray[Any] = np.empty(0)

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        assert noise_BD is None
        self.frames.begin_step(binding)
        self._values = values_BD.astype("<f8")
        return self.frames.contribution(self.me, binding, values_BD.shape, ())

    def answer(self, request: bytes) -> bytes:
        self.frames.open_request(request, self.me)
        return self.frames.answer(self.me, (self._values.tobytes(),))


class TwiceCombiner(NoSetup):
    def __init__(self, twice: TwiceSum) -> None:
        self.names, self.frames = twice.agreement.contributors, twice.frames()

    def ask(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> Mapping[str, bytes]:
        self.frames.open_contributions(contributions, binding_digest)
        return {name: self.frames.request(name, ()) for name in self.names}

    def combine(self, bodies: Mapping[str, bytes], binding_digest: bytes | None = None) -> bytes:
        frames = self.frames.open_answers(bodies, self.names, binding_digest)
        total = sum(np.frombuffer(frame.blobs[0]) for frame in frames)
        return self.frames.sum_of(frames, (np.asarray(total).tobytes(),))


class Twice:
    """One step of three passives up to the requests."""

    def __init__(self) -> None:
        made = TwiceSum(agreement())
        self.receiver = made.receiver()
        self.combiner = TwiceCombiner(made)
        self.passives = {name: TwiceContributor(made, name) for name in agreement().contributors}
        self.values = dict(zip(self.passives, random_values(3, SHAPE), strict=True))

    def ask(self, step: int = 1) -> Mapping[str, bytes]:
        self.bound = StepBinding(session="test", step=step, rows=bytes(32), message=bytes(32))
        frames = {
            me: role.contribute(self.values[me], self.bound) for me, role in self.passives.items()
        }
        return self.combiner.ask(frames, self.bound.digest)

    def answers(self, step: int = 1) -> dict[str, bytes]:
        requests = self.ask(step)
        return {me: role.answer(requests[me]) for me, role in self.passives.items()}


pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def test_two_rounds_give_the_sum() -> None:
    world = Twice()
    for step in (1, 2, 9):
        combined = world.combiner.combine(world.answers(step), world.bound.digest)
        total = world.receiver.decode(combined, SHAPE, world.bound)
        np.testing.assert_allclose(total, sum(world.values.values()))


def test_a_request_is_answered_once() -> None:
    world = Twice()
    requests = world.ask()
    world.passives["passive_1"].answer(requests["passive_1"])
    with pytest.raises(LocalProtocolError, match="each step is answered once"):
        world.passives["passive_1"].answer(requests["passive_1"])


def test_a_request_before_any_contribution_is_refused() -> None:
    world = Twice()
    request = world.ask()["passive_1"]
    with pytest.raises(LocalProtocolError, match="no contribution waits"):
        TwiceContributor(TwiceSum(agreement()), "passive_1").answer(request)
    with pytest.raises(LocalProtocolError, match="no contribution waits"):
        TwiceCombiner(TwiceSum(agreement())).combine(world.answers(2))


def test_a_request_for_another_party_is_refused() -> None:
    world = Twice()
    requests = world.ask()
    with pytest.raises(RemoteProtocolError, match="from aggregator is for contributor 1"):
        world.passives["passive_1"].answer(requests["passive_2"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 2}, "about step 2, or another message or shape, while step 1"),
        ({"binding": bytes(32)}, "or another message or shape"),
        ({"rows": 3}, "or another message or shape"),
        ({"kind": FrameKind.SUM}, "a sum of twice, expected a request"),
        ({"name": "plain"}, "a request of plain, expected a request of twice"),
        ({"fingerprint": bytes(32)}, "uses other parameters"),
        ({"party": 2}, "for contributor 2"),
    ],
)
def test_altered_requests_and_answers_are_refused(change: dict[str, Any], message: str) -> None:
    world = Twice()
    request = Frame.parse(world.ask()["passive_1"], sender="aggregator")
    with pytest.raises(RemoteProtocolError, match=message):
        world.passives["passive_1"].answer(replace(request, **change).pack())
    other = Twice()
    answers = other.answers()
    frame = Frame.parse(answers["passive_1"], sender="passive_1")
    altered = replace(frame, **change).pack()
    with pytest.raises(RemoteProtocolError, match=message.replace("a request", "an answer")):
        other.combiner.combine({**answers, "passive_1": altered})
    other.combiner.combine(answers)


def test_missing_unknown_and_late_answers_are_refused() -> None:
    world = Twice()
    answers = world.answers()
    renamed = dict(answers)
    renamed["stranger"] = renamed.pop("passive_2")
    with pytest.raises(RemoteProtocolError, match="missing: passive_2; unknown: stranger"):
        world.combiner.combine(renamed)
    with pytest.raises(RemoteProtocolError, match="about another message than the one agreed"):
        world.combiner.combine(answers, bytes(32))
    world.combiner.combine(answers)
    with pytest.raises(LocalProtocolError, match="no contribution waits"):
        world.combiner.combine(answers)
    world.ask(2)
    with pytest.raises(RemoteProtocolError, match="about step 1, or another"):
        world.combiner.combine(answers)


@pytest.mark.parametrize(
    "choice", [name for name, backend in SECURE_SUMS.items() if backend.rounds == 1]
)
def test_backends_of_one_round_say_so(choice: str) -> None:
    played = Parties(make(choice, agreement()))
    frames = played.contribute(random_values(3), played.next())
    with pytest.raises(LocalProtocolError, match="has one round: combine the 3 contributions"):
        played.combiner.ask(frames)
    with pytest.raises(LocalProtocolError, match="has one round: its contribution is all"):
        played.contributors["passive_1"].answer(b"request")
    played.combiner.combine(frames)
