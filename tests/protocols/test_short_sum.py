"""The short form of a sum: any array in and the same kind out, misuse, threads, hubs, two boxes."""

import copy
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import pytest

import apfed_protocols as ap
from apfed_protocols import LocalProtocolError, RemoteProtocolError, SecureSum, SumName, secure_sum
from tests.contracts.hostile import run_in_fork
from tests.refusals import list_unrefused
from tests.with_crypten import usable

NAMES = ["a", "b", "c"]
KINDS = ["masked", "recoverable", "masked bfv"]


class Pair(NamedTuple):
    left: Any
    right: Any


def trees() -> Iterator[tuple[Any, Any]]:
    """Yield values of a contributor, and three times that."""
    halves = np.full((2, 3, 2), 0.5)
    ones = np.ones((2, 3), np.int16)
    yield halves, halves * 3
    yield halves.astype(np.float16)[0, 0], np.full(2, 1.5, np.float16)
    yield halves.astype(">f4"), (halves * 3).astype("f4")
    yield np.float32(0.5), np.float32(1.5)
    yield 2, 6
    yield ones, ones * 3
    yield Pair({"w": ones, 1: [0.5]}, ()), Pair({"w": ones * 3, 1: [1.5]}, ())
    yield OrderedDict(b=ones[0], a=0.5), OrderedDict(b=ones[0] * 3, a=1.5)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Mapping):
        pairs = zip(found.items(), expected.items(), strict=True)
        return all(one[0] == two[0] and same(one[1], two[1]) for one, two in pairs)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(map(same, found, expected))
    alike = type(found) is type(expected) and np.shape(found) == np.shape(expected)
    return (
        alike
        and np.asarray(found).dtype == np.asarray(expected).dtype
        and np.allclose(found, expected, atol=2e-3)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_is_of_the_kind_that_was_given(kind: SumName) -> None:
    session = secure_sum(kind, dict.fromkeys(NAMES), to="active", clip=8)
    summed = [(session(dict.fromkeys(NAMES, given)), expected) for given, expected in trees()]
    assert [(found, expected) for found, expected in summed if not same(found, expected)] == []
    assert {held.clipped for held in session.clipping.values()} == {0}


def test_tensors_come_back_as_tensors_and_keep_their_place() -> None:
    torch = pytest.importorskip("torch")
    session = secure_sum("masked", NAMES, to="active", clip=8)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64)
    sums = {}
    for dtype in dtypes:
        given = {"w": torch.ones(2, 2, dtype=dtype), "b": torch.ones((), dtype=dtype)}
        sums[dtype] = session(dict.fromkeys(NAMES, given))
    kept = {dtype: {value.dtype for value in found.values()} for dtype, found in sums.items()}
    assert kept == {dtype: {dtype} for dtype in dtypes}
    totals = torch.stack([found["w"].double() for found in sums.values()])
    torch.testing.assert_close(totals, torch.full_like(totals, 3.0), atol=2e-3, rtol=0)
    needs = torch.ones(2, 3, requires_grad=True)
    assert session(dict.fromkeys(NAMES, needs)).requires_grad
    with pytest.raises(LocalProtocolError, match=r"sparse_coo tensor"):
        session(dict.fromkeys(NAMES, torch.eye(2).to_sparse()))


GOOD = {name: np.full((2, 2), 0.1) for name in NAMES}
MISUSES: dict[str, Any] = {
    "no sum is called 'mask'.*masked": lambda: secure_sum("mask", NAMES, to="x", clip=1),  # type: ignore[arg-type]
    "contributors are several names": lambda: secure_sum("masked", "abc", to="x", clip=1),
    "hides nothing": lambda: secure_sum("masked", ["a"], to="x", clip=1),
    "clip_norm lies in .* got 0": lambda: secure_sum("masked", NAMES, to="x", clip=0),
    'clip is a number or "agree"': lambda: secure_sum("masked", NAMES, to="x", clip="auto"),  # type: ignore[arg-type]
    "bits lies in 2..24, got 32": lambda: secure_sum("masked", NAMES, to="x", clip=1, bits=32),
    "x receives and combines, and ckks has no masks": lambda: secure_sum(
        "ckks", NAMES, to="x", clip=1
    ),
    "x alone can read one .*threshold=4: all must .*allow_single_reader=True": lambda: secure_sum(
        "recoverable", [*NAMES, "d"], to="x", clip=1, threshold=3
    ),
    "hub, which is x and y, alone can read .*Take a sum under masks": lambda: ap.hub_pump(
        {"x": make_unmasked_sum().make_receiver(), "y": make_unmasked_sum().make_aggregator()},
        print,
        lambda: ("a", b""),
    ),
    "y and x|x and y, alone can read one": lambda: ap.answer_hub(
        make_unmasked_sum().make_contributor("a"), b"\0\0\0\5start"
    ),
    "allow_single_reader of MaskedSum is of type bool": lambda: secure_sum(
        "masked",
        NAMES,
        to="x",
        clip=1,
        allow_single_reader=1,  # type: ignore[arg-type]
    ),
    "threshold 1 of 3": lambda: secure_sum("recoverable", NAMES, to="x", clip=1, threshold=1),
    "by its name, as {'a': ...}; got a list": lambda: call([1, 2, 3]),
    "needs 3 of a, b, c; missing: c; unknown: nobody": lambda: call({"a": 1.0, "b": 1.0}),
    "missing: nobody; unknown: d": lambda: call({**GOOD, "d": 1.0}),
    "b gives .*3, 2.*, but a .*2, 2": lambda: call({**GOOD, "b": np.ones((3, 2))}),
    "c gives leaf ..w.. .2. ?, but a .*structure": lambda: call(
        {"a": {"v": np.ones(2)}, "b": {"v": np.ones(2)}, "c": {"w": np.ones(2)}}
    ),
    "b: 1 of 4 values .* NaN": lambda: call({**GOOD, "b": np.array([[np.nan, 1], [1, 1]])}),
    "c: a contribution is non-empty": lambda: call({**GOOD, "c": np.zeros((0, 2))}),
    "a: a contribution is a str": lambda: call({**GOOD, "a": "0.1"}),
    "a: leaf .0. is None; .*without a gradient": lambda: call({**GOOD, "a": [None]}),
    "a: a contribution is of object": lambda: call({**GOOD, "a": np.array([None])}),
    "is of integers, and a sum is off by up to": lambda: secure_sum(
        "masked", NAMES, to="x", clip=1e6, bits=16
    )(dict.fromkeys(NAMES, np.ones(2, int))),
    "beyond 127, the end of its type": lambda: secure_sum("masked", NAMES, to="x", clip=999)(
        dict.fromkeys(NAMES, np.full(2, 100, np.int8))
    ),
    "has no clip yet": lambda: secure_sum("masked", NAMES, to="x", clip="agree").make_receiver(),
    "zero at all contributors": lambda: secure_sum("masked", NAMES, to="x", clip="agree")(
        dict.fromkeys(NAMES, 0.0)
    ),
    "receives and combines in one role": lambda: short().make_aggregator(),
    "'d' contributes nothing": lambda: short().make_contributor("d"),
    "run the setup first": lambda: short().make_contributor("a").contribute(0.1),
    "holds secrets .* never serialised": lambda: pickle.dumps(short()),
    "holds secrets .*serialised": lambda: copy.deepcopy(short().make_contributor("a")),
    "a key that seals a role is 32": lambda: ap.suspend_role(
        short().make_contributor("a"), b"1", role_log=ap.InMemoryRoleLog()
    ),
    "no role of b": lambda: short().resume_role(
        "b",
        suspend_in_memory(short().make_contributor("a")),
        bytes(32),
        role_log=ap.InMemoryRoleLog(),
    ),
    "holds shares for the next step": lambda: suspend_in_memory(
        secure_sum("recoverable", NAMES, to="x", clip=1).make_contributor("a")
    ),
    "a hub has the receiver": lambda: ap.hub_pump({}, print, lambda: ("a", b"")),
    "a step needs `values`": lambda: ap.answer_hub(
        short().make_contributor("a"), b"\0\0\0\4step\0\0\0\10" + bytes(8) + bytes(4)
    ),
    "is signed with `identity` and `peers`": lambda: ap.answer_hub(
        short().make_contributor("a"), b"", identity=ap.fresh_identity()
    ),
}


def short() -> ap.SumSession:
    return secure_sum("masked", NAMES, to="x", clip=1, session="short")


def make_unmasked_sum() -> ap.SumSession:
    return secure_sum("ckks", NAMES, to="x", by="y", clip=1, session="short")


def call(values: Any) -> Any:
    return short()(values)


@pytest.mark.parametrize("said", MISUSES)
def test_misuse_has_its_sentence(said: str) -> None:
    with pytest.raises(LocalProtocolError, match=said):
        MISUSES[said]()


def test_misuse_costs_a_session_nothing_and_a_fork_is_refused() -> None:
    session = secure_sum("recoverable", NAMES, to="x", clip=1)
    cases = [("", {**GOOD, "c": np.full((2, 2), np.inf)}), ("", {"a": 1.0})]
    assert list_unrefused((LocalProtocolError, RemoteProtocolError), session, cases) == []
    assert np.allclose(session(GOOD), 0.3, atol=1e-3)
    with pytest.warns(ap.UnsafeChoiceWarning, match="x alone can read one contribution"):
        four = secure_sum(
            "recoverable", [*NAMES, "d"], to="x", clip=1, threshold=3, allow_single_reader=True
        )
    assert np.allclose(four(GOOD), 0.3, atol=1e-3)  # without d, who stays out
    with pytest.raises(LocalProtocolError, match="d was left out of an earlier step"):
        four({**GOOD, "d": GOOD["a"]})
    if hasattr(os, "fork"):
        said = run_in_fork({"step": lambda: session(GOOD)})
        assert "belongs to the process that made it" in said["step"]


def warnings_of(call: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if one.category is ap.ClippingWarning]


def test_rows_beyond_the_clip_are_counted_and_said_at_1_10_100() -> None:
    session = secure_sum("masked", NAMES, to="x", clip=2)
    long = {name: np.ones((3, 16)) if name == "b" else np.zeros((3, 16)) for name in NAMES}
    with pytest.warns(ap.ClippingWarning, match="b clipped 3 of 3 rows to norm 2, .* norm 4"):
        assert np.allclose(session(long), 0.5, atol=1e-3)
    said = [warnings_of(lambda: session(long)) for _ in range(40)]
    assert [3 * (at + 2) for at, each in enumerate(said) if each] == [12, 102]
    held = session.clipping["b"]
    assert (held.rows, held.clipped, held.largest_norm) == (123, 123, 4.0)


def test_numbers_below_the_rounding_are_counted_and_said_at_1_10_100() -> None:
    session = secure_sum("masked", NAMES, to="x", clip=10, bits=16)
    small = {name: np.full(4, 1e-5) if name == "a" else np.ones(4) for name in NAMES}
    with pytest.warns(ap.ClippingWarning, match="a: 4 of 4 numbers are below half a step"):
        session(small)
    said = [warnings_of(lambda: session(small)) for _ in range(30)]
    assert [at + 2 for at, each in enumerate(said) if each] == [10]
    held = session.clipping["a"]
    assert (held.numbers, held.lost, held.too_small) == (124, 124, 31)
    assert session.clipping["b"].too_small == 0
    assert not warnings_of(lambda: session(dict.fromkeys(NAMES, np.zeros(4))))
    many = {name: np.array([1e-5] + [1.0] * 10) for name in NAMES}  # fewer than a tenth are lost
    assert not warnings_of(lambda: secure_sum("masked", NAMES, to="x", clip=10, bits=16)(many))


def test_a_sum_with_noise_says_nothing_of_numbers_below_the_rounding() -> None:
    session = secure_sum("masked", NAMES, to="x", clip=10, noise=30)
    assert not warnings_of(lambda: session(dict.fromkeys(NAMES, np.full(4, 1e-5))))


def draw_rows_of_norm(norm: float, seed: int = 0, rows: int = 5) -> Any:
    drawn = np.random.default_rng(seed).normal(size=(rows, 8))
    return norm * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def relative_error(found: Any, right: Any) -> float:
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


def test_an_agreed_clip_has_headroom() -> None:
    session = secure_sum("masked", NAMES, to="x", clip="agree")
    session({name: draw_rows_of_norm(2.0) for name in NAMES})
    assert session.clip == 8.0
    assert not warnings_of(lambda: session({name: draw_rows_of_norm(7.9) for name in NAMES}))
    assert (session.clip, session.clipping["a"].clipped) == (8.0, 0)


@pytest.mark.parametrize(("kind", "steps"), [("masked", 7), ("recoverable", 3), ("masked bfv", 2)])
@pytest.mark.parametrize("growth", [10.0, 0.1])
def test_a_clip_is_agreed_anew_where_values_outgrow_or_fall_below_it(
    kind: SumName, steps: int, growth: float
) -> None:
    session = secure_sum(kind, NAMES, to="x", clip="agree", bits=16)
    found: list[Any] = []
    warned: list[Any] = []
    errors: list[float] = []
    for step in range(steps):
        values = {
            name: draw_rows_of_norm(growth ** (step * 7 / steps), seed=place)
            for place, name in enumerate(NAMES)
        }
        warned += warnings_of(lambda given=values: found.append(session(given)))  # type: ignore[misc]
        errors.append(relative_error(found[-1], sum(values.values())))
    assert warned == []
    assert [error for error in errors if not error < 0.1] == []
    assert {one.clipped for one in session.clipping.values()} == {0}
    assert {one.rows for one in session.clipping.values()} == {5 * steps}  # counted on through all


@pytest.mark.parametrize("others", [1, 2, 9])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lie", [0.0, 1e25])
def test_one_contributor_moves_the_agreed_clip_by_256_at_most(
    lie: float, seed: int, others: int
) -> None:
    honest = {f"p{place}": draw_rows_of_norm(3.0, seed=seed + place) for place in range(others)}
    names = ["liar", *honest] if seed else [*honest, "liar"]
    session = secure_sum("masked", names, to="x", clip="agree")
    values = {**honest, "liar": draw_rows_of_norm(lie)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ap.ClippingWarning)
        total = session(values)
        session(values)
    assert 4 * 4 <= session.clip <= 256 * 4
    added = draw_rows_of_norm(session.clip) if lie else 0
    right = sum(honest.values())
    assert relative_error(total - added, right) < 1e-3
    assert {session.clipping[name].clipped for name in honest} == {0}


@pytest.mark.parametrize(("count", "is_clipped"), [(2, True), (3, False)])
def test_a_tiny_size_clips_the_other_of_two_which_is_told_and_nobody_of_three(
    count: int, is_clipped: bool
) -> None:
    session = secure_sum("masked", NAMES[:count], to="x", clip="agree")
    values = {name: draw_rows_of_norm(1e-20 if name == "a" else 1.0) for name in NAMES[:count]}
    said = warnings_of(lambda: session(values))
    assert any(each.startswith("b clipped 5 of 5 rows") for each in said) is is_clipped
    assert any(each.startswith("a: 40 of 40 numbers") for each in said) is not is_clipped


def play_apart(session_of: Callable[[], ap.SumSession], values: Any) -> list[Any]:
    """Each party in a thread with a session and a queue of its own; what each ends with."""
    inboxes: dict[str, Any] = {me: SimpleQueue() for me in (*NAMES, "x")}
    bodies: dict[str, Any] = {}

    def party(me: str) -> Any:
        session = session_of()
        links: dict[str, Any] = {
            "send": lambda to, body: inboxes[to].put((me, body)),
            "receive": lambda: inboxes[me].get(timeout=20),
        }
        own = [None if me == "x" else one[me] for one in values]
        role: Any = session.join(me, first=own[0], **links)
        clips = [session.clip]
        for step in own:
            before = role
            role = session.agree_anew(role, me, values=step, **links)
            assert (role is before) is (session.clip == clips[-1])
            clips.append(session.clip)
        if me != "x":
            bodies[me] = role.contribute(own[-1])
            return clips
        return clips, role

    with ThreadPoolExecutor(4) as pool:
        ended = [*pool.map(party, (*NAMES, "x"))]
    clips, receiver = ended.pop()
    total = receiver.decode(receiver.combine(bodies), values[-1]["a"])
    return [total, clips, *ended]


def test_parties_apart_agree_anew_on_what_one_process_agrees_on() -> None:
    sizes = (1.0, 3.0, 100.0, 100.0, 1e-4)
    values = [{name: draw_rows_of_norm(size, seed=ord(name)) for name in NAMES} for size in sizes]
    total, *clips = play_apart(
        lambda: secure_sum("masked", NAMES, to="x", clip="agree", session="s", bits=16), values
    )
    alone = secure_sum("masked", NAMES, to="x", clip="agree", bits=16)
    here = []
    for given in values:
        alone(given)
        here.append(alone.clip)
    assert len({tuple(each) for each in clips}) == 1
    assert clips[0][1:] == here
    assert len(set(here)) == 3
    assert relative_error(total, sum(values[-1].values())) < 0.01


def test_messages_that_run_ahead_of_an_agreement_are_kept_for_what_they_belong_to() -> None:
    session = secure_sum("masked", NAMES, to="x", clip="agree", session="s")
    other = secure_sum("masked", NAMES, to="x", clip="agree", session="s")
    other({name: draw_rows_of_norm(1.5) for name in NAMES})  # settles on the same clip
    ahead = next(iter(other.make_contributor("b").start())).body
    fits = b"\x65"  # what b and c say of the next agreement, which a has not begun
    arriving = iter(
        [
            ("b", b"\1"),
            ("b", ahead),
            ("c", b"\1"),
            ("b", fits),
            ("c", ahead),
            ("c", fits),
            ("x", ahead),
        ]
    )
    links: Any = {"send": lambda *_: None, "receive": lambda: next(arriving)}
    role = session.join("a", first=draw_rows_of_norm(1.5), **links)
    assert role.is_finished
    assert session.agree_anew(role, "a", values=draw_rows_of_norm(1.5), **links) is role


BAD_SIZES = {"nothing": b"", "two bytes": b"\1\1", "no exponent": b"\x65", "a flag": b"\x66"}


@pytest.mark.parametrize("bad", BAD_SIZES)
def test_a_size_that_is_none_is_refused(bad: str) -> None:
    session = secure_sum("masked", NAMES, to="x", clip="agree", session="s")
    with pytest.raises(RemoteProtocolError, match="b told a no size of its rows"):
        session.join("a", first=1.0, send=lambda *_: None, receive=lambda: ("b", BAD_SIZES[bad]))


@pytest.mark.parametrize("kind", [*KINDS, "ckks", "bfv", *usable(["crypten"])])
@pytest.mark.parametrize("contributors", [2, 3, 20, 200])
def test_default_bits_are_the_most_at_no_more_bytes(kind: SumName, contributors: int) -> None:
    names = [f"p{place}" for place in range(contributors)]

    def make(bits: int | None) -> Any:
        try:
            return secure_sum(kind, names, to="x", by="y", clip=1, bits=bits).secure_sum
        except LocalProtocolError:
            return None

    chosen = make(None)
    bits, usual = chosen.agreement.bits, make(16)
    finer = [make(more) for more in range(bits + 1, 25)]
    assert bits >= 16 or usual is None
    assert all(one is None or takes_more_bytes(one, chosen) for one in finer)
    if usual is not None:
        assert not takes_more_bytes(chosen, usual)


def takes_more_bytes(one: SecureSum, other: SecureSum) -> bool:
    """For many values each, or for one value alone."""
    return one.value_bytes > other.value_bytes or one.min_bytes > other.min_bytes


def test_noise_in_steps_keeps_the_bits_that_its_steps_go_by() -> None:
    session = secure_sum("masked", NAMES, to="x", clip=1, noise=5)
    assert session.secure_sum.agreement.bits == 16


@pytest.mark.parametrize("kind", [*KINDS, "ckks", "bfv"])
def test_bytes_of_a_value_are_those_that_a_contribution_has(kind: SumName) -> None:
    session = secure_sum(kind, NAMES, to="x", by="y", clip=1)
    contributors, _ = session._roles
    body = contributors["a"].contribute(np.zeros((64, 256)))
    assert len(body) / (64 * 256) == pytest.approx(session.secure_sum.value_bytes, rel=0.1)


def test_threads_take_turns_and_a_step_is_used_once() -> None:
    session = secure_sum("masked", NAMES, to="x", clip=128, bits=24)

    def adds(number: int) -> bool:
        rest = np.full(9, number), np.zeros(9, int)
        totals = [session(dict(zip("bac", (np.full(9, k), *rest), strict=True))) for k in range(25)]
        return all((total == number + k).all() for k, total in enumerate(totals))

    roles: dict[str, Any] = {name: session.make_contributor(name) for name in NAMES}
    ap.converse({"x": session.make_receiver(), **roles})
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(adds, range(4)))
        sent = [*pool.map(lambda _: roles["a"].contribute(GOOD["a"]), range(4))]
    steps = {ap.sums.frames.Frame.parse(body, sender="a").step for body in sent}
    assert steps == {0, 1, 2, 3}


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "ckks", *usable(["crypten"])])
def test_a_hub_drives_hosts_that_keep_nothing(kind: SumName, signed: bool, tmp_path: Path) -> None:
    """By packets alone; roles of one round are put away between them."""
    by = {"x", "ckks", "crypten"} & {kind} and "y"
    key = bytes(range(32))
    role_log = tmp_path / "role-log"
    open_to_hub = kind == "ckks"
    session = secure_sum(
        kind, NAMES, to="x", by=by or None, clip=8, allow_single_reader=open_to_hub
    )
    identities = {name: ap.fresh_identity() for name in (*NAMES, "x")} if signed else {}
    identities |= {"y": identities["x"]} if signed else {}
    public = {name: held.public for name, held in identities.items()}
    own: dict[str, Any] = {me: {"identity": one, "peers": public} for me, one in identities.items()}
    apart = session.secure_sum.rounds == 1
    kept: dict[str, Any] = {name: session.make_contributor(name) for name in NAMES}
    kept = {
        me: ap.suspend_role(role, key, role_log=role_log) if apart else role
        for me, role in kept.items()
    }
    answers, old = [], dict(kept)

    def send(me: str, packet: bytes) -> None:
        role = session.resume_role(me, kept[me], key, role_log=role_log) if apart else kept[me]
        answer = ap.answer_hub(role, packet, lambda m: np.frombuffer(m) * 2, **own.get(me, {}))
        kept[me] = ap.suspend_role(role, key, role_log=role_log) if apart else role
        answers.append((me, answer))

    ends = {"x": session.make_receiver()} | ({"y": session.make_aggregator()} if by else {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hub = ap.hub_pump(ends, send, lambda: answers.pop(0), **own.get("x", {}))
    told = [str(warning.message) for warning in caught]
    # The hub and each of three hosts say so.
    assert sum("unsigned" in one for one in told) == (0 if signed else 4)
    assert sum("alone can read one contribution" in one for one in told) == 4 * open_to_hub
    totals = [hub.step(np.full(3, number).tobytes(), (3,)) for number in (0.25, -0.5)]
    np.testing.assert_allclose(totals, [[1.5] * 3, [-3.0] * 3], atol=2e-3, rtol=0)
    if apart:
        with pytest.raises(LocalProtocolError, match="was taken up before"):
            session.resume_role("a", old["a"], key, role_log=role_log)
        stranger = tmp_path / "stranger"
        ap.suspend_role(session.make_contributor("a"), key, role_log=stranger)
        with pytest.raises(LocalProtocolError, match="does not list this role"):
            session.resume_role("a", kept["a"], key, role_log=stranger)
        role_log.rename(tmp_path / "lost")
        with pytest.raises(LocalProtocolError, match="is missing, so nobody knows"):
            session.resume_role("a", kept["a"], key, role_log=role_log)
    if signed and kind == "masked":
        with pytest.raises(RemoteProtocolError, match="does not fit the key"):
            ap.answer_hub(
                session.make_contributor("a"),
                b"".join(len(p).to_bytes(4, "big") + p for p in (b"letters", b"b", bytes(200))),
                **own["a"],
            )
    with pytest.raises(RemoteProtocolError, match="no packet of a hub"):
        ap.answer_hub(session.make_contributor("a"), b"\0\0\0\xffstep")


BAD_BOOKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "memory": (lambda folder: ":memory:", "a log in memory forgets"),
    "nameless": (lambda folder: "", "a log in memory forgets"),
    "memory as bytes": (lambda folder: b":memory:", "a log in memory forgets"),
    "folder": (lambda folder: folder, "no plain file"),
    "device": (lambda folder: os.devnull, "no plain file"),
    "no folder": (lambda folder: folder / "none" / "role-log", "is no log of sealed roles"),
    "garbage": (lambda folder: written(folder, b"no database" * 99), "is no log of sealed roles"),
    "link": (lambda folder: make_link(folder), "is a link"),
}


def written(folder: Path, content: bytes) -> Path:
    (folder / "role-log").write_bytes(content)
    return folder / "role-log"


def make_link(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "elsewhere")
    return folder / "link"


def suspend_in_memory(role: Any) -> bytes:
    return ap.suspend_role(role, bytes(32), role_log=ap.InMemoryRoleLog())


@pytest.mark.parametrize("name", BAD_BOOKS)
def test_what_is_no_role_log_keeps_no_role_and_the_role_stays(name: str, tmp_path: Path) -> None:
    make, says = BAD_BOOKS[name]
    role_log: Any = make(tmp_path)
    session = short()
    good = tmp_path / "good"
    role = session.make_contributor("a")
    with pytest.raises(LocalProtocolError, match=says):
        ap.suspend_role(role, bytes(32), role_log=role_log)
    sealed = ap.suspend_role(role, bytes(32), role_log=good)
    with pytest.raises(LocalProtocolError, match=says + "|is missing"):
        session.resume_role("a", sealed, bytes(32), role_log=role_log)
    session.resume_role("a", sealed, bytes(32), role_log=good)


def test_a_role_log_in_memory_serves_once_and_only_its_own(tmp_path: Path) -> None:
    session = short()
    role_log = ap.InMemoryRoleLog()
    sealed = ap.suspend_role(session.make_contributor("a"), bytes(32), role_log=role_log)
    with pytest.raises(LocalProtocolError, match="does not list this role"):
        session.resume_role("a", sealed, bytes(32), role_log=ap.InMemoryRoleLog())
    role = session.resume_role("a", sealed, bytes(32), role_log=role_log)
    with pytest.raises(LocalProtocolError, match="was taken up before"):
        session.resume_role("a", sealed, bytes(32), role_log=role_log)
    with pytest.raises(LocalProtocolError, match="does not list this role"):
        ap.suspend_role(role, bytes(32), role_log=ap.InMemoryRoleLog())


def test_an_older_copy_of_a_role_log_takes_up_nothing(tmp_path: Path) -> None:
    session = short()
    role_log = tmp_path / "role-log"
    key = bytes(32)
    first = ap.suspend_role(session.make_contributor("a"), key, role_log=role_log)
    copy_of_log = role_log.read_bytes()
    second = ap.suspend_role(
        session.resume_role("a", first, key, role_log=role_log), key, role_log=role_log
    )
    role_log.write_bytes(copy_of_log)
    with pytest.raises(LocalProtocolError, match="was taken up before"):
        session.resume_role("a", second, key, role_log=role_log)


def test_a_role_log_in_memory_serves_nobody_in_a_forked_copy() -> None:
    session, role_log = short(), ap.InMemoryRoleLog()
    sealed = ap.suspend_role(session.make_contributor("a"), bytes(32), role_log=role_log)
    action = lambda: session.resume_role("a", sealed, bytes(32), role_log=role_log)  # noqa: E731
    assert "belongs to the process that made it" in run_in_fork({"take up": action})["take up"]


SMALL_BATCH: tuple[tuple[SumName, int, int | None, str], ...] = (
    ("bfv", 3, None, r"\| `bfv`, up to 16 passives \| N = 2048, 54 bits \| {} \|"),
    ("masked bfv", 16, 16, r"\| `bfv`, up to 16 passives \| N = 2048, 54 bits \| {} \|"),
    ("bfv", 3, 19, r"\| N = 4096, 56 or 60 bits \| {} or [\d.]+ \|"),
    ("bfv", 17, 16, r"\| N = 4096, 56 or 60 bits \| [\d.]+ or {} \|"),
    ("ckks", 3, None, r"\| `ckks` \| N = 4096, 60 and 49 bits \| {} \|"),
    ("masked", 3, None, r"\| pairwise masks \| none \| {} \|"),
)


@pytest.mark.parametrize(("kind", "passives", "bits", "row"), SMALL_BATCH)
def test_the_page_says_what_a_small_batch_costs(
    kind: SumName, passives: int, bits: int | None, row: str
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "secure-sum.md").read_text("utf-8")
    names = [f"p{place}" for place in range(passives)]
    session = secure_sum(kind, names, to="x", by="y", clip=1, bits=bits)
    contributors, _ = session._roles
    body = contributors["p0"].contribute(np.zeros((64, 16)))
    assert re.search(row.format(re.escape(f"{len(body) / (64 * 16):.1f}")), page)
