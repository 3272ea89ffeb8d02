"""What every way of adding private vectors must do; a new entry of the table is tested at once."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import SECURE_SUMS
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.frames import FrameKind
from apfed_protocols.sums.interface import StepBinding, SumAgreement, format_sum_name
from tests.contracts.hostile import alter_frame
from tests.contracts.sum_parties import (
    CHOICES,
    Overheard,
    Parties,
    Rearmed,
    agreement,
    binding,
    fresh_parties,
    make,
    parties,
    random_values,
)
from tests.refusals import list_unrefused
from tests.waiting import wait_until
from tests.with_crypten import usable, usable_secure_sums

every = pytest.mark.parametrize("choice", CHOICES)
exact = pytest.mark.parametrize("choice", [name for name in CHOICES if name != "plain"])
secure = pytest.mark.parametrize("choice", usable_secure_sums())

EXTREMES = (0.0, -0.0, 1.0, -1.0, 1e300, -1e300, 1e-300, 5e-324, 0.5, -0.25)


@st.composite
def addends(draw: st.DrawFn, passives: int) -> list[NDArray[np.float64]]:
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 7)))
    size = shape[0] * shape[1]
    number = st.one_of(st.sampled_from(EXTREMES), st.floats(-2, 2, width=32))
    lists = st.lists(number, min_size=size, max_size=size)
    return [np.array(draw(lists)).reshape(shape) for _ in range(passives)]


def integer_sum(agreed: SumAgreement, values: list[NDArray[Any]]) -> NDArray[np.float64]:
    fixed_point = FixedPoint.from_agreement(agreed)
    total = sum(fixed_point.quantise_rows(value) for value in values)
    return fixed_point.dequantise_sum(np.asarray(total, dtype=np.int64))


@pytest.mark.sampled(every=7)
@exact
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_sum_is_the_integer_sum_of_the_quantised_inputs(choice: str, data: st.DataObject) -> None:
    """Whatever the values, their bits, and the order in which contributions arrive."""
    passives = data.draw(st.sampled_from([2, 3, 5]))
    bits = data.draw(st.sampled_from([2, 16, 24]))
    values = data.draw(addends(passives))
    played = parties(choice, passives, bits)
    bound = played.next()
    frames = played.contribute(values, bound)
    arrived = {name: frames[name] for name in data.draw(st.permutations(played.names))}
    total = played.receiver.decode(played.combine(arrived), values[0].shape, bound)
    assert np.array_equal(total, integer_sum(played.sum.agreement, values))


def is_exact(played: Parties, value: NDArray[Any], passives: int) -> bool:
    """Return whether so many times a value add up to the sum of their integers."""
    values = [value] * passives
    return np.array_equal(played.add(values), integer_sum(played.sum.agreement, values))


@pytest.mark.sampled(every=2)
@exact
def test_sum_is_exact_at_full_range(choice: str) -> None:
    """Under CKKS 23 passives are the most of whom two numbers fit a slot."""
    signs = np.where(np.arange(4200) % 3 == 0, -1.0, 1.0)[:, None]
    wrong: list[str] = []
    for passives in (2, 23, 24) if choice == "ckks" else (2, 7):
        wrong += [
            f"{passives} passives: {name}"
            for name, sign in {"largest": 1.0, "smallest": -1.0, "both": signs}.items()
            if not is_exact(parties(choice, passives), np.full((4200, 1), 1e300) * sign, passives)
        ]
    assert wrong == []


@pytest.mark.slow
@exact
@pytest.mark.parametrize("bits", [16, 24])
def test_sum_of_many_is_exact_at_full_range(choice: str, bits: int) -> None:
    """Where pairs of passives agree on keys, setting up more takes minutes."""
    many = {"ckks": 1024, "bfv": 1024, "plain, quantised": 1024, "plain + pairwise masks": 256}
    passives = many.get(choice, 64)
    played = parties(choice, passives, bits)
    assert is_exact(played, np.full((3, 1), 1e300), passives)
    assert is_exact(played, np.full((3, 1), -1e300), passives)
    assert is_exact(played, np.array([[1e300], [-1e300], [1e300]]), passives)


@pytest.mark.parametrize(("width", "slack"), [(np.float64, 1e-15), (np.float32, 1e-6)])
@every
def test_sum_is_close_to_the_sum_of_the_rows(choice: str, width: Any, slack: float) -> None:
    played = parties(choice)
    values = [(value / 10).astype(width) for value in random_values(3)]
    difference = np.abs(played.add(values) - sum(values)).max()
    assert difference <= played.sum.compute_rounding_error() + slack


APART = np.array([[1, np.nan], [np.nan, np.nan]])
# By columns, every second one among others that are no numbers, one row for all.
Layout: TypeAlias = Callable[[NDArray[Any]], NDArray[Any]]
LAYOUTS: dict[str, Layout] = {
    "columns first": np.asfortranarray,
    "apart": lambda values_BD: np.kron(values_BD, APART.astype(values_BD.dtype))[::2, ::2],
    "one row again and again": lambda values_BD: np.broadcast_to(values_BD[:1], values_BD.shape),
}
laid_out = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))


@pytest.mark.parametrize("width", [np.float32, np.float64])
@laid_out
@every
def test_how_values_lie_in_memory_does_not_matter(choice: str, layout: Layout, width: Any) -> None:
    played = parties(choice)
    laid = [layout((value / 10).astype(width)) for value in random_values(3, (6, 4))]
    for value in laid:
        value.flags.writeable = False
    straight = [np.array(value, order="C") for value in laid]
    assert np.array_equal(played.add(laid), played.add(straight))
    assert all(map(np.array_equal, laid, straight))


@every
def test_what_the_caller_owns_stays_the_callers(choice: str) -> None:
    """Values may be overwritten once they are contributed, and sums once they are decoded."""
    played = parties(choice)
    given = [value / 10 for value in random_values(3)]
    expected = played.add(given)
    values = [value.copy() for value in given]
    bound = played.next()
    frames = played.contribute(values, bound)
    for value in values:
        value[:] = np.nan
    first = played.receiver.decode(played.combine(frames), (3, 5), bound)
    assert np.array_equal(first, expected)
    kept = first.copy()
    again = played.add(given)
    assert np.array_equal(first, kept)
    first[:] = np.nan
    assert np.array_equal(again, expected)
    assert np.array_equal(played.add(given), expected)


@pytest.mark.sampled(every=3)
@every
def test_sums_of_several_threads_do_not_mix(choice: str) -> None:
    """Roles of one description share what they encode and encrypt with."""
    described = make(choice, agreement())
    all_values = [random_values(3, (40, 300), seed) for seed in range(4)]
    expected = [Parties(described).add(values) for values in all_values]
    every_party = [Parties(described) for _ in all_values]

    def add_often(number: int) -> bool:
        values = all_values[number]
        played = every_party[number]
        return all(np.array_equal(played.add(values), expected[number]) for _ in range(5))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(add_often, range(4)))


@laid_out
@secure
def test_values_are_protected_however_they_lie_in_memory(choice: str, layout: Layout) -> None:
    """Equal values: where protection fell on a copy, their bytes would repeat."""
    played = parties(choice)
    values = layout(np.full((64, 64), 0.01))
    sent = list(played.contribute([values] * 3, played.next()).values())
    if choice == "crypten":
        sent = list(played.aggregator.ask(dict(zip(played.names, sent, strict=True))).values())
        sent = [
            role.answer(asked)
            for role, asked in zip(played.contributors.values(), sent, strict=True)
        ]
    words = [np.frombuffer(frame[128 : 128 + 4 * 4096], np.uint8).reshape(-1, 4) for frame in sent]
    assert min(len(np.unique(own, axis=0)) for own in words) > 4000


@every
def test_each_role_uses_a_step_once(choice: str) -> None:
    played = parties(choice)
    bound = played.next()
    frames = played.contribute(random_values(3), bound)
    with pytest.raises(LocalProtocolError, match=f"step {bound.step} is not above step"):
        played.contribute(random_values(3), bound)
    combined = played.combine(frames)
    with pytest.raises(RemoteProtocolError, match="they are replayed"):
        played.combine(frames)
    played.receiver.decode(combined, (3, 5), bound)
    with pytest.raises(LocalProtocolError, match="each step is used once"):
        played.receiver.decode(combined, (3, 5), bound)
    with pytest.raises(LocalProtocolError, match="the binding names session 'other'"):
        played.contribute(random_values(3), binding(10**6, session="other"))


@every
def test_the_aggregator_adds_one_contribution_of_each_under_one_agreement(choice: str) -> None:
    other = Parties(make(choice, agreement(clip_norm=2.0)))
    foreign = other.contribute(random_values(3), binding(10**5))["passive_2"]
    changes: list[tuple[str, Callable[[dict[str, bytes]], object]]] = [
        (
            "missing: passive_2; unknown: stranger",
            lambda f: f.update(stranger=f.pop("passive_2")),
        ),
        (
            "passive_3 is contributor 2 and sent the",
            lambda f: f.update(passive_3=f["passive_1"]),
        ),
        ("passive_2 uses other parameters", lambda f: f.update(passive_2=foreign)),
    ]

    def combine(change: Callable[[dict[str, bytes]], object]) -> object:
        played = parties(choice)
        frames = played.contribute(random_values(3), played.next())
        change(frames)
        return played.combine(frames)

    assert list_unrefused(RemoteProtocolError, combine, changes) == []


@pytest.mark.parametrize(
    "as_other",
    [bytearray, memoryview, list, lambda _: None],
    ids=["bytearray", "memoryview", "list", "none"],
)
@every
def test_a_frame_is_bytes_since_a_buffer_could_change_later(
    choice: str, as_other: Callable[[bytes], object]
) -> None:
    played = parties(choice)
    mixed: dict[str, Any] = {**played.contribute(random_values(3), played.next())}
    mixed["passive_2"] = as_other(mixed["passive_2"])
    with pytest.raises(LocalProtocolError, match="a frame of a secure sum is bytes, got"):
        played.combine(mixed)


@every
def test_equivocation_is_refused(choice: str) -> None:
    """An active that sends one passive other representations gets no sum."""
    played = parties(choice)
    bound = played.next()
    told = dict.fromkeys(played.names, bound) | {"passive_2": binding(bound.step, message=1)}
    contributions = played.contribute([np.full((2, 2), 1e6)] * 3, told)
    with pytest.raises(RemoteProtocolError, match="sent them different representations"):
        played.combine(contributions)
    with pytest.raises(RemoteProtocolError, match="passive_2 answered another message than"):
        played.combine(contributions, bound.digest)


@every
def test_steps_and_shapes_do_not_mix(choice: str) -> None:
    played = parties(choice)
    first = played.next()
    values = random_values(3)
    told = dict.fromkeys(played.names, first) | {"passive_3": played.next()}
    late = played.contribute(values, told)
    with pytest.raises(RemoteProtocolError, match="passive_3 contributed 3x5 values to step"):
        played.combine(late)
    if not played.sum.needs_all:
        played = parties(choice)
    values[2] = np.zeros((3, 4))
    shaped = played.contribute(values, played.next())
    with pytest.raises(RemoteProtocolError, match="passive_3 contributed 3x4 values"):
        played.combine(shaped)


REFUSED: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda combined: b"",
    "cut": lambda combined: combined[:-1],
    "another version": lambda combined: combined[:4] + b"\xff" + combined[5:],
    "another key": lambda combined: combined[:88] + bytes(32) + combined[120:],
    # As floats not a number, as integers beyond any sum, and no seal, mask or ciphertext.
    "other values": lambda combined: (
        combined[:128] + ((b"\xff" * 7 + b"\x7f") * len(combined))[: len(combined) - 128]
    ),
}


def still_opens(
    choice: str, error: type[BaseException], harmed: Callable[[bytes], bytes] | None
) -> list[str]:
    """Return what a receiver still does after it refused a harmed sum, or was interrupted."""
    played = fresh_parties(choice)
    values = random_values(3)
    assert played.add(values).shape == (3, 5)
    bound = played.next()
    good = played.combine(played.contribute(values, bound))
    body = harmed(good) if harmed else good

    def raise_error(*_: object) -> None:
        raise error

    with pytest.MonkeyPatch.context() as patch:
        if harmed is None:
            patch.setattr(played.receiver, "_decrypt_sum", raise_error)
        with pytest.raises(error):
            played.receiver.decode(body, (3, 5), bound)
    refused = f"active refused the sum of step {bound.step}, and threw away"
    after = played.next()
    later = played.combine(played.contribute(values, after))
    sums = [(refused, good, (3, 5), bound), (refused, later, (3, 5), after)]
    unrefused = list_unrefused(LocalProtocolError, played.receiver.decode, sums)
    bound = played.next()
    good = played.combine(played.contribute(values, bound))
    setups = [("", sender, good) for sender in (*played.names, "aggregator")]
    unrefused += list_unrefused(RemoteProtocolError, played.receiver.receive, setups)
    played.receiver._forget_secrets()  # an interruption may call it again
    return unrefused + list_unrefused(LocalProtocolError, played.receiver.start, [(refused,)])


@pytest.mark.sampled(every=2)
@every
def test_after_a_refused_sum_the_receiver_opens_and_sets_up_nothing_more(choice: str) -> None:
    """Not the good sum of that step, nor that of the next; whoever alters sums gets one refusal.

    Where an interruption stops may depend on what the sum holds, so it counts as one.
    """
    interruptions = (KeyboardInterrupt, SystemExit, MemoryError)
    cases: dict[str, tuple[type[BaseException], Callable[[bytes], bytes] | None]] = {
        **{name: (RemoteProtocolError, harmed) for name, harmed in REFUSED.items()},
        **{error.__name__: (error, None) for error in interruptions},
    }
    found = {name: still_opens(choice, *case) for name, case in cases.items()}
    assert {name: opened for name, opened in found.items() if opened} == {}


@every
def test_a_receiver_that_refused_a_sum_before_its_setup_has_none(choice: str) -> None:
    receiver = make(choice, agreement()).make_receiver()
    with pytest.raises(RemoteProtocolError):
        receiver.decode(b"", (3, 5), binding(1))
    with pytest.raises(LocalProtocolError, match="refused the sum of step 1"):
        receiver.start()


@every
def test_threads_get_one_refusal_together(choice: str) -> None:
    """Sums are opened one at a time: what comes second finds no key."""
    played, values = fresh_parties(choice), random_values(3)
    bounds = [played.next() for _ in range(4)]
    good = [played.combine(played.contribute(values, bound)) for bound in bounds]
    bad = [REFUSED["other values"](body) for body in good]
    genuine = type(played.receiver)._decrypt_sum
    asked = list[int]()

    def slow(frame: Any, bound: Any) -> Any:
        wait_until(lambda: len(asked) == len(bad), "that all asked")
        return genuine(played.receiver, frame, bound)

    def ask(body: bytes, bound: StepBinding) -> str:
        asked.append(bound.step)
        with pytest.raises((LocalProtocolError, RemoteProtocolError)) as refused:
            played.receiver.decode(body, (3, 5), bound)
        return f"{refused.typename} {'threw away' in str(refused.value)}"

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
        patch.setattr(played.receiver, "_decrypt_sum", slow)
        said = sorted(threads.map(ask, bad, bounds))
    assert said == ["LocalProtocolError True"] * 3 + ["RemoteProtocolError False"]


@every
def test_no_frame_of_a_refusal_holds_what_opens_sums(choice: str) -> None:
    """Whoever keeps the exception, to log it say, keeps no key, and no sum that was opened."""
    played, values = fresh_parties(choice), random_values(3)
    bound = played.next()
    good = played.combine(played.contribute(values, bound))
    opened: list[object] = []
    genuine = type(played.receiver)._decrypt_sum

    def after_opening(frame: Any, step: Any) -> Any:
        secret = genuine(played.receiver, frame, step)
        opened.append(True)
        try:
            raise ValueError
        except ValueError as error:
            raise RemoteProtocolError(f"{len(secret)} rows") from error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(played.receiver, "_decrypt_sum", after_opening)
        with pytest.raises(RemoteProtocolError) as caught:
            played.receiver.decode(good, (3, 5), bound)
    assert opened
    held = caught.value.__traceback__
    while held is not None:
        assert "secret" not in held.tb_frame.f_locals
        held = held.tb_next


@every
def test_our_own_misuse_of_a_receiver_ends_nothing(choice: str) -> None:
    """It shows before the sum is looked at, so it tells the aggregator nothing."""
    played = fresh_parties(choice)
    values = random_values(3)
    shapes: tuple[Any, ...] = ((0, 5), (), (3.0, 5), (True, 5), [3, -5], 15, None)

    def misuse_and_decode() -> tuple[list[str], tuple[int, ...]]:
        """Return what was not refused, and the shape of what is decoded all the same."""
        bound = played.next()
        combined = played.combine(played.contribute(values, bound))
        cases: list[tuple[Any, ...]] = [
            ("is bytes, got bytearray", bytearray(combined), (3, 5), bound),
            *(("the shape of a sum is numbers", combined, shape, bound) for shape in shapes),
        ]
        unrefused = list_unrefused(LocalProtocolError, played.receiver.decode, cases)
        return unrefused, played.receiver.decode(combined, (3, 5), bound).shape

    assert misuse_and_decode() == ([], (3, 5))
    assert misuse_and_decode() == ([], (3, 5))


@every
def test_bad_values_are_refused_and_cost_no_step(choice: str) -> None:
    cases: list[tuple[Any, str]] = [
        (np.zeros((0, 3)), "non-empty, got a ndarray"),
        ([], "non-empty, got a list"),
        (np.array([[np.nan, 1.0]]), "1 of 2 values of a contribution are NaN"),
        ([1.0, float("-inf")], "1 of 2 values of a contribution are NaN"),
        (np.zeros((2, 2), dtype=np.complex128), "is of complex128; expected an array"),
        (np.zeros(2, dtype=bool), "is of bool"),
        ([True], "leaf .0. is a bool"),
        (np.ma.MaskedArray(np.zeros((2, 2)), np.eye(2, dtype=bool)), "a MaskedArray, which may"),
        (np.zeros((2, 2)).view(np.recarray), "a recarray, which may hide"),
        ({"w": [1.0, None]}, "leaf .'w'..1. is None; .*without a gradient"),
        ({(1,): 1.0}, "texts or integers as keys"),
        ("12", "is a str; expected an array"),
    ]
    unrefused: list[str] = []
    for values, message in cases:
        played = parties(choice)
        contribute = played.contributors["passive_1"].contribute
        bound = played.next()
        unrefused += list_unrefused(LocalProtocolError, contribute, [(message, values, bound)])
        contribute(np.zeros((1, 1)), bound)
    assert unrefused == []


@every
def test_a_stranger_cannot_take_a_role(choice: str) -> None:
    with pytest.raises(LocalProtocolError, match="'stranger' contributes nothing"):
        parties(choice).sum.make_contributor("stranger")


@every
def test_parameters_are_public_facts(choice: str) -> None:
    described = parties(choice).sum
    told = json.loads(json.dumps(dict(described.list_parameters())))
    assert format_sum_name(told["scheme"], told["masks"]) == described.name


@pytest.mark.parametrize("name", SECURE_SUMS)
def test_every_pair_of_the_table_states_its_facts(name: str) -> None:
    kind = SECURE_SUMS[name]
    assert kind.name == format_sum_name(kind.scheme, kind.masks) == name
    assert kind.unsafe == (kind.rests_on == "nothing")
    second_round = (kind.leaks.request, kind.leaks.answer)
    assert all(second_round) if kind.rounds == 2 else not any(second_round)
    said = [kind.leaks.active_and_aggregator, kind.leaks.altered]
    for reading in filter(None, (kind.leaks.contribution, *second_round)):
        said += [reading.reads, reading.protects, reading.remains]
    assert all(sentence.endswith(".") for sentence in said)


@every
def test_a_step_that_lost_a_party_has_no_sum_and_the_next_one_has(choice: str) -> None:
    played = parties(choice)
    values = [value / 10 for value in random_values(3)]
    lost = played.next()
    contributions = played.contribute(values, lost)
    del contributions["passive_2"]
    with pytest.raises(RemoteProtocolError, match="missing: passive_2; unknown: none"):
        played.combine(contributions, lost.digest)
    if not played.sum.needs_all:  # the keys for the next step were not passed on
        with pytest.raises(LocalProtocolError, match="its session is over, open a new one"):
            played.add(values)
        return
    assert (
        np.abs(played.add(values) - sum(values)).max()
        <= played.sum.compute_rounding_error() + 1e-15
    )


# Second rounds: every request and answer belongs to one step, and is used once.

two_rounds = pytest.mark.parametrize(
    "choice", usable(name for name, kind in SECURE_SUMS.items() if kind.rounds == 2)
)


class Step:
    """One step of three passives up to the requests."""

    def __init__(self, choice: str) -> None:
        self.played = Parties(make(choice, agreement()))
        self.requests = self.send_requests()

    def send_requests(self) -> dict[str, bytes]:
        self.bound = self.played.next()
        frames = self.played.contribute(random_values(3), self.bound)
        return dict(self.played.aggregator.ask(frames, self.bound.digest))

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
        fresh.make_contributor("passive_1").answer(step.requests["passive_1"])
    with pytest.raises(LocalProtocolError, match=r"no contribution waits|nobody was asked yet"):
        fresh.make_aggregator().combine(Step(choice).answers())
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
    "for contributor 2": {"index_or_count": 2},
}


@pytest.mark.parametrize(("said", "change"), CHANGES.items(), ids=list(CHANGES))
@two_rounds
def test_altered_requests_and_answers_are_refused(
    choice: str, said: str, change: dict[str, Any]
) -> None:
    message = said.format(name=choice).replace("+", r"\+")
    step = Step(choice)
    asked = alter_frame(step.requests["passive_1"], **change)
    with pytest.raises(RemoteProtocolError, match=message):
        step.played.contributors["passive_1"].answer(asked)
    other = Step(choice)
    answers = other.answers()
    bad = answers | {"passive_1": alter_frame(answers["passive_1"], **change)}
    with pytest.raises(RemoteProtocolError, match=message.replace("a request", "an answer")):
        other.played.aggregator.combine(bad)
    other.played.aggregator.combine(answers)


@two_rounds
def test_missing_unknown_and_late_answers_are_refused(choice: str) -> None:
    step = Step(choice)
    combine = step.played.aggregator.combine
    answers = step.answers()
    renamed = dict(answers)
    renamed["stranger"] = renamed.pop("passive_2")
    with pytest.raises(RemoteProtocolError, match="missing: passive_2; unknown: stranger"):
        combine(renamed)
    with pytest.raises(RemoteProtocolError, match="about another message than the one agreed"):
        combine(answers, bytes(32))
    combine(answers)
    with pytest.raises(LocalProtocolError, match=r"no contribution waits|nobody was asked yet"):
        combine(answers)
    step.requests = step.send_requests()
    with pytest.raises(RemoteProtocolError, match="about step 1, or another"):
        combine(answers)


@pytest.mark.parametrize(
    "choice", [name for name, backend in SECURE_SUMS.items() if backend.rounds == 1]
)
def test_backends_of_one_round_say_so(choice: str) -> None:
    played = Parties(make(choice, agreement()))
    frames = played.contribute(random_values(3), played.next())
    with pytest.raises(LocalProtocolError, match="has one round: combine the 3 contributions"):
        played.aggregator.ask(frames)
    with pytest.raises(LocalProtocolError, match="has one round: its contribution is all"):
        played.contributors["passive_1"].answer(b"request")
    played.aggregator.combine(frames)


# Messages in the wrong place: every frame of a session is refused wherever it does not belong.

SENDERS = ("active", "aggregator", "passive_1", "passive_2", "stranger")


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.sampled(every=6)
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

    heard = (*other.frames, *frames.values(), combined)
    receive = lambda role, sender, frame: role.receive(sender, frame)  # noqa: E731
    misplaced = [
        ("", role, sender, frame)
        for frame in heard
        for role in (played.receiver, played.aggregator, one)
        for sender in SENDERS
    ]
    assert list_unrefused(RemoteProtocolError, receive, misplaced) == []
    decode = lambda frame: played.receiver.decode(frame, (3, 5), played.next())  # noqa: E731
    assert list_unrefused(RemoteProtocolError, decode, [("", frame) for frame in heard]) == []

    def combine(frame: bytes) -> object:
        return played.combine(dict.fromkeys(played.names, frame))

    assert list_unrefused(RemoteProtocolError, combine, [("", frame) for frame in heard]) == []
    answers = [(r"one round|each step is answered once", frame) for frame in heard]
    assert list_unrefused(LocalProtocolError, one.answer, answers) == []
    assert played.sum.rounds == 2 or played.add(random_values(3)).shape == (3, 5)
