"""Conversations: messages are played first in, first out, and silence is an error."""

import itertools
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

import apfed_protocols
from apfed_protocols.conversation import Conversation, Outgoing, converse, take_part
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.ids import IdNormalisation, encode_ids
from apfed_protocols.psi import SET_INTERSECTIONS
from tests.contracts.intersections import Intersection
from tests.waiting import LONG_S, wait_until
from tests.with_crypten import usable


class Script:
    """Sends its opening, answers each message by a table, and waits for so many messages."""

    def __init__(
        self,
        opening: Sequence[tuple[str, bytes]] = (),
        answers: dict[bytes, list[tuple[str, bytes]]] | None = None,
        *,
        waits_for: int = 0,
    ) -> None:
        self._opening = opening
        self._answers = answers or {}
        self._waits_for = waits_for
        self.got: list[tuple[str, bytes]] = []

    def start(self) -> Sequence[Outgoing]:
        return [Outgoing(*message) for message in self._opening]

    def receive(self, sender: str, body: bytes) -> Sequence[Outgoing]:
        if body == b"nonsense":
            raise RemoteProtocolError(f"{sender} sent nonsense")
        self.got.append((sender, body))
        return [Outgoing(*message) for message in self._answers.get(body, [])]

    @property
    def is_finished(self) -> bool:
        return len(self.got) >= self._waits_for


def test_messages_are_delivered_in_order_with_their_senders() -> None:
    a = Script([("b", b"1"), ("b", b"2")], waits_for=1)
    b = Script([("a", b"hello")], {b"1": [("c", b"3"), ("b", b"to myself")]}, waits_for=3)
    c = Script(waits_for=1)
    converse({"a": a, "b": b, "c": c})
    assert a.got == [("b", b"hello")]
    assert b.got == [("a", b"1"), ("a", b"2"), ("b", b"to myself")]
    assert c.got == [("b", b"3")]


def test_a_message_to_nobody_is_named() -> None:
    with pytest.raises(LocalProtocolError, match=r"a wrote to 'ghost'.*the parties are a, b"):
        converse({"a": Script([("ghost", b"")]), "b": Script()})


def test_silence_names_who_still_waits() -> None:
    roles = {"a": Script(waits_for=1), "b": Script([("c", b"x")]), "c": Script(waits_for=2)}
    with pytest.raises(LocalProtocolError, match="while a, c still expected"):
        converse(roles)


def test_what_a_role_raises_comes_through() -> None:
    with pytest.raises(RemoteProtocolError, match="a sent nonsense"):
        converse({"a": Script([("b", b"nonsense")]), "b": Script()})


def test_a_body_is_absent_from_repr() -> None:
    assert "secret" not in repr(Outgoing("b", b"secret"))


# One role over a link of its own: queues between threads stand for sockets.

Queue = queue.Queue[tuple[str, bytes]]
IDS = {"bank": [1, 2, 3, 4], "shop": [4, 3, 9], "post": [3, 4, 7]}


def roles(protocol: str) -> dict[str, Conversation]:
    ids = {party: encode_ids(party, column, IdNormalisation()) for party, column in IDS.items()}
    return Intersection(protocol, ids).roles


def mail(me: str, boxes: Mapping[str, Queue]) -> dict[str, Any]:
    def receive(patience_s: float) -> tuple[str, bytes]:
        try:
            return boxes[me].get(timeout=patience_s)
        except queue.Empty:
            raise TimeoutError(f"nothing came for {patience_s} s") from None

    def send(receiver: str, body: bytes) -> None:
        boxes[receiver].put((me, body))

    return {"send": send, "receive": receive}


class Died(Exception):  # noqa: N818  # no error of the protocol
    """The process of one party is gone."""


def play_in_threads(
    parties: Mapping[str, Conversation], *, shop_dies_after: int | None = None
) -> dict[str, str]:
    """Play each party in a thread of its own; return what the errors of each said."""
    boxes: dict[str, Queue] = {name: queue.Queue() for name in parties}
    said: dict[str, str] = {}
    patience_s = LONG_S if shop_dies_after is None else 0.5

    def play(name: str) -> None:
        link, received = mail(name, boxes), itertools.count()

        def receive(patience_s: float) -> Any:
            if name == "shop" and next(received) == shop_dies_after:
                raise Died
            return link["receive"](patience_s)

        try:
            take_part(parties[name], send=link["send"], receive=receive, patience_s=patience_s)
        except RemoteProtocolError as error:
            said[name] = str(error)
        except Died:
            pass

    threads = [threading.Thread(target=play, args=(name,)) for name in parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return said


@pytest.mark.parametrize("protocol", usable(SET_INTERSECTIONS))
def test_parties_in_threads_of_their_own_align(protocol: str) -> None:
    parties = roles(protocol)
    assert play_in_threads(parties) == {}
    assert all(role.is_finished for role in parties.values())
    chosen = [[IDS[name][row] for row in parties[name].rows] for name in IDS]  # type: ignore[attr-defined]  # aligners have rows
    assert chosen[0] == chosen[1] == chosen[2]
    assert sorted(chosen[0]) == [3, 4]


@pytest.mark.parametrize(("protocol", "after"), [("ecdh", 0), ("circuit", 5)])
def test_a_party_that_dies_is_an_error_at_the_others_in_time(protocol: str, after: int) -> None:
    parties = roles(protocol)
    said = play_in_threads(parties, shop_dies_after=after)
    assert not parties["shop"].is_finished
    assert said.keys() == parties.keys() - {"shop"}
    silent = "a peer fell silent before the protocol was finished (nothing came"
    assert {name: text for name, text in said.items() if silent not in text} == {}
    advice = "start all parties again with a new session"
    assert {name: text for name, text in said.items() if advice not in text} == {}


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError("gone")])
def test_a_broken_link_is_an_error(error: Exception) -> None:
    def broken(_patience_s: float) -> tuple[str, bytes]:
        raise error

    with pytest.raises(RemoteProtocolError, match=r"fell silent .* \((gone|EOFError)\)"):
        take_part(roles("ecdh")["shop"], send=lambda *_: None, receive=broken)


def test_a_message_that_cannot_be_sent_is_the_reason_given() -> None:
    ends = list[threading.Thread]()

    def refuses(*_: object) -> None:
        ends.append(threading.current_thread())
        raise BrokenPipeError("the bank hung up")

    def nothing(_patience_s: float) -> tuple[str, bytes]:
        wait_until(lambda: ends)
        ends[0].join(LONG_S)
        raise TimeoutError("nothing came")

    with pytest.raises(RemoteProtocolError, match="the bank hung up"):
        take_part(roles("ecdh")["shop"], send=refuses, receive=nothing)


@pytest.mark.parametrize(
    "error", [RemoteProtocolError("broken for 60 s"), EOFError("hung up"), TypeError("not a link")]
)
@pytest.mark.parametrize("finished", [True, False])
def test_whatever_stops_the_sending_is_an_error(error: Exception, finished: bool) -> None:
    """An error of another thread is nobody's, so the party would end as if all was delivered."""

    def fails(*_: object) -> None:
        raise error

    def answers(_patience_s: float) -> tuple[str, bytes]:
        time.sleep(0.01)
        if time.monotonic() - began > LONG_S:
            raise TimeoutError("nobody said that the sending failed")
        return "bank", b""

    sends = Script([("bank", b"last")], waits_for=0 if finished else 10**9)
    began = time.monotonic()
    expected = RemoteProtocolError if isinstance(error, EOFError) else type(error)
    with pytest.raises(expected, match=str(error)):
        take_part(sends, send=fails, receive=answers)


def test_a_link_that_swallows_the_last_message_is_an_error() -> None:
    stuck = threading.Event()

    def swallow(_receiver: str, _body: bytes) -> None:
        stuck.wait(30)

    sends = Script([("bank", b"last")])
    with pytest.raises(RemoteProtocolError, match="TimeoutError"):
        take_part(sends, send=swallow, receive=lambda _: ("", b""), patience_s=0.2)
    stuck.set()


# The everyday names of the light distribution load, each from the module that defines it.


@pytest.mark.parametrize("name", apfed_protocols.__all__)
def test_an_everyday_name_loads(name: str) -> None:
    loaded = getattr(apfed_protocols, name)
    home = getattr(loaded, "__module__", "apfed_protocols")  # a constant has none
    assert home.split(".")[0] in ("apfed_protocols", "builtins", "typing")


def test_another_name_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(AttributeError, match=r"has no 'MaskSum'; its names are .*MaskedSum"):
        getattr(apfed_protocols, "MaskSum")  # noqa: B009 (a type checker refuses the name itself)
