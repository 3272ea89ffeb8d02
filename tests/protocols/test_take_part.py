"""One role over a link of its own: queues between threads stand for sockets."""

import queue
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from apfed_protocols.conversation import Conversation, Outgoing, take_part
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.ids import IdNormalisation, encode_ids
from apfed_protocols.psi import SET_INTERSECTIONS
from tests.contracts.intersections import Intersection
from tests.waiting import LONG_S, wait_until
from tests.with_crypten import usable

Queue = queue.Queue[tuple[str, bytes]]
IDS = {"bank": [1, 2, 3, 4], "shop": [4, 3, 9], "post": [3, 4, 7]}


def roles(protocol: str) -> dict[str, Conversation]:
    ids = {party: encode_ids(party, column, IdNormalisation()) for party, column in IDS.items()}
    return Intersection(protocol, ids).roles


def mail(me: str, boxes: Mapping[str, Queue]) -> dict[str, Callable[..., object]]:
    def receive(patience_s: float) -> tuple[str, bytes]:
        try:
            return boxes[me].get(timeout=patience_s)
        except queue.Empty:
            raise TimeoutError(f"nothing came for {patience_s} s") from None

    def send(receiver: str, body: bytes) -> None:
        boxes[receiver].put((me, body))

    return {"send": send, "receive": receive}


@pytest.mark.parametrize("protocol", usable(SET_INTERSECTIONS))
def test_parties_in_threads_of_their_own_align(protocol: str) -> None:
    parties = roles(protocol)
    boxes: dict[str, Queue] = {name: queue.Queue() for name in parties}
    threads = [
        threading.Thread(target=take_part, args=(role,), kwargs=mail(name, boxes))
        for name, role in parties.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(role.finished for role in parties.values())
    chosen = [[IDS[name][row] for row in parties[name].rows] for name in IDS]  # type: ignore[attr-defined]  # aligners have rows
    assert chosen[0] == chosen[1] == chosen[2]
    assert sorted(chosen[0]) == [3, 4]


class Died(Exception):  # noqa: N818  # no error of the protocol
    """The process of one party is gone."""


@pytest.mark.parametrize(("protocol", "after"), [("ecdh", 0), ("circuit", 5)])
def test_a_party_that_dies_is_an_error_at_the_others_in_time(protocol: str, after: int) -> None:
    parties = roles(protocol)
    boxes: dict[str, Queue] = {name: queue.Queue() for name in parties}
    said: dict[str, str] = {}

    def play(name: str) -> None:
        link = mail(name, boxes)
        left = [after]

        def dying(patience_s: float) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Died
            return link["receive"](patience_s)

        receive = dying if name == "shop" else link["receive"]
        try:
            take_part(parties[name], send=link["send"], receive=receive, patience_s=0.5)  # type: ignore[arg-type]  # dying gives what the link gives
        except RemoteProtocolError as error:
            said[name] = str(error)
        except Died:
            pass

    threads = [threading.Thread(target=play, args=(name,)) for name in parties]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert not parties["shop"].finished
    assert said.keys() == parties.keys() - {"shop"}
    for text in said.values():
        assert "a peer fell silent before the protocol was finished (nothing came" in text
        assert "start all parties again with a new session" in text


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

    class Sends:
        def __init__(self) -> None:
            self.finished = finished

        def start(self) -> list[Outgoing]:
            return [Outgoing("bank", b"last")]

        def receive(self, _sender: str, _body: bytes) -> list[Outgoing]:
            return []

    def fails(*_: object) -> None:
        raise error

    def answers(_patience_s: float) -> tuple[str, bytes]:
        time.sleep(0.01)
        if time.monotonic() - began > LONG_S:
            raise TimeoutError("nobody said that the sending failed")
        return "bank", b""

    began = time.monotonic()
    expected = RemoteProtocolError if isinstance(error, EOFError) else type(error)
    with pytest.raises(expected, match=str(error)):
        take_part(Sends(), send=fails, receive=answers)


def test_a_link_that_swallows_the_last_message_is_an_error() -> None:
    class Done:
        finished = True

        def start(self) -> list[Outgoing]:
            return [Outgoing("bank", b"last")]

    stuck = threading.Event()

    def swallow(_receiver: str, _body: bytes) -> None:
        stuck.wait(30)

    with pytest.raises(RemoteProtocolError, match="TimeoutError"):
        take_part(
            Done(),  # type: ignore[arg-type]  # a role that receives nothing
            send=swallow,
            receive=lambda _: ("", b""),
            patience_s=0.2,
        )
    stuck.set()
