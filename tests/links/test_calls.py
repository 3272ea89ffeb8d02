"""Links over calls that come in any order, late, twice, or not at all; no NVFlare is needed."""

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from protocols.errors import PartyLeftError
from protocols.identity import fresh_identity
from secure_apfed.exchange import Awaited, Kind
from secure_apfed.exchange.calls import Calls, Carry
from secure_apfed.exchange.linked import Linked
from secure_apfed.exchange.sealed_connection import MOST_SEALED, LocalEnd

NAMES = ("ann", "bob")
NAME = bytes(32)


class Lines:
    """What carries the calls of both: each may be late, and some fail."""

    def __init__(self, *, fails: float = 0.0) -> None:
        identities = {name: fresh_identity() for name in NAMES}
        self._chance, self.fails = random.Random(4), fails
        self.inversions, self._last = 0, 0
        self.calls = {
            name: Calls(
                LocalEnd(
                    name=name, identity=identities[name],
                    known={peer: identities[peer].public for peer in NAMES if peer != name},
                ),
                self.carrying(name),
            )
            for name in NAMES
        }  # fmt: skip
        self.met: dict[str, Linked] = {}

    def carrying(self, caller: str) -> Carry:
        def carry(peer: str, name: bytes, number: int, frame: bytes) -> bool:
            time.sleep(self._chance.random() * 0.004)
            # The word that a connection is over gets through, unless nothing does.
            if (number >= 0 or self.fails == 1.0) and self._chance.random() < self.fails:
                raise ConnectionError("a call failed")
            self.inversions += number < self._last
            self._last = number
            return self.calls[peer].take(caller, name, number, frame)

        return carry

    def meet(self, *names: str, patience_s: float = 20.0, meet_s: float = 20.0) -> None:
        def come(name: str) -> None:
            self.met[name] = Linked.meet(
                name, self.calls[name].ways(), patience_s=patience_s, meet_s=meet_s
            )

        together([lambda name=name: come(name) for name in names])  # type: ignore[misc]  # a default

    def close(self) -> None:
        together([one.close for one in self.met.values()])


def together(tasks: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(params=[0.0, 0.02], ids=["late", "failing"])
def lines(request: pytest.FixtureRequest) -> Iterator[Lines]:
    made = Lines(fails=request.param)
    made.meet(*NAMES)
    yield made
    made.close()


def from_of(me: str, sender: str) -> Awaited:
    return Awaited(me=me, senders=(sender,), kinds=(Kind.SUM,), step=3, least=1, patience=1)


def test_messages_come_in_order_each_once(lines: Lines) -> None:
    sent = [bytes([number % 256]) * (1 + 97 * number) for number in range(150)]
    sent.append(bytes(5 * 2**20))

    def say() -> None:
        for message in sent:
            lines.met["ann"].post("bob", message)

    speaking = threading.Thread(target=say)
    speaking.start()
    assert [lines.met["bob"].take(from_of("bob", "ann"), 20)[1] for _ in sent] == sent
    speaking.join()
    assert lines.inversions > 0  # else nothing was put in order


def test_the_end_of_the_job_ends_who_waits_and_names_party_phase_and_who_was_gone() -> None:
    lines = Lines()
    lines.meet(*NAMES)
    lines.fails = 1.0
    lines.met["bob"].post("ann", b"lost")
    time.sleep(0.3)
    timer = threading.Timer(0.2, lines.calls["bob"].end, ["the job was aborted"])
    timer.start()
    began = time.monotonic()
    with pytest.raises(
        PartyLeftError,
        match="training: bob expected sum of step 3 from ann; the job was aborted; calls to ann",
    ):
        lines.met["bob"].take(from_of("bob", "ann"), 60)
    assert time.monotonic() - began < 5
    lines.close()


def test_a_party_that_ended_before_it_came_is_named_at_once_with_why() -> None:
    lines = Lines()
    lines.calls["ann"].stopped("bob", "DataError: its own log.txt says more\x1b[2J")
    with pytest.raises(
        PartyLeftError, match="ann has no link to bob: bob stopped: DataError: "
    ) as told:
        Linked.meet("ann", lines.calls["ann"].ways(), patience_s=20, meet_s=20)
    assert "\x1b" not in str(told.value)


def test_calls_of_strangers_and_out_of_turn_are_refused(lines: Lines) -> None:
    ann = lines.calls["ann"]
    assert not ann.take("eve", NAME, 0, b"hello")  # not in the session
    assert not ann.take("bob", NAME, 1, b"hello")  # of no connection that began
    assert not ann.take("bob", b"short", 0, b"hello")
    assert not lines.calls["bob"].take("ann", NAME, 0, b"hello")  # who is dialled, does not dial
    assert ann.take("bob", NAME, 0, b"hello")
    assert not ann.take("bob", NAME, 0, b"hello")  # again
    assert not ann.take("bob", NAME, 5, b"hello")  # further ahead than anybody is
    assert not ann.take("bob", NAME, 1, bytes(MOST_SEALED + 1))


def test_somebody_in_a_peers_name_changes_nothing(lines: Lines) -> None:
    """NVFlare says whose a call is; who is there still proves itself."""
    assert lines.calls["ann"].take("bob", NAME, 0, b"no hello")
    lines.met["bob"].post("ann", b"after")
    assert lines.met["ann"].take(from_of("ann", "bob"), 30)[1] == b"after"
