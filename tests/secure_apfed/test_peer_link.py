"""A link in one line: both ends prove who they are, and what is wrong is told at once."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed import align_with, open_link
from secure_apfed.exchange import fresh_identity, resumable_link, sealed_connection
from secure_apfed.exchange.sealed_connection import PeerAcceptor
from secure_apfed.organisations.local import find_free_addresses
from tests.contracts.hostile import run_in_fork
from tests.waiting import LONG_S

SECRET = "long and told in private"


def both(bank: dict[str, Any], shop: dict[str, Any]) -> list[Any]:
    """The rows of the bank, who listens, and of the shop; or what they were told."""
    (place,) = map(str, find_free_addresses(1))

    def play(given: dict[str, Any], ids: list[str]) -> Any:
        try:
            with open_link(**given) as link:
                return [ids[row] for row in align_with(given["peer"], ids, link=link)]
        except RemoteProtocolError as error:
            return str(error)

    ends = (
        {"me": "bank", "peer": "shop", "listen": place, "patience_s": LONG_S, **bank},
        {"me": "shop", "peer": "bank", "dial": place, "patience_s": LONG_S, **shop},
    )
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(play, ends, (["ann", "bob", "eve"], ["eve", "joe", "bob"])))


def test_a_secret_or_two_identities_open_a_link() -> None:
    one = fresh_identity()
    other = fresh_identity()
    ways: tuple[Any, ...] = (
        ({"secret": SECRET}, {"secret": SECRET.encode()}),
        ({"identities": (one, other.public)}, {"identities": (other, one.public)}),
    )
    for bank, shop in ways:
        here, there = both(bank, shop)
        assert here == there
        assert {*here} == {"bob", "eve"}


@pytest.mark.parametrize(
    ("shop", "says"),
    [
        ({"secret": SECRET + "!"}, "what bank signed does not fit the key"),
        ({"secret": SECRET, "me": "post"}, "'post' comes to 'bank', but this is bank"),
    ],
)
def test_another_secret_or_party_is_told_at_both_ends(
    shop: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience ends with attempts: once somebody came, each takes ten seconds of both clocks."""
    came, ahead_s, welcome = Event(), count(step=10.0), PeerAcceptor.admit_stranger

    def note_arrival(acceptor: PeerAcceptor, *stranger: Any) -> None:
        welcome(acceptor, *stranger)
        came.set()

    def hurrying() -> float:
        return time.monotonic() + (next(ahead_s) if came.is_set() else 0)

    clock = SimpleNamespace(monotonic=hurrying, sleep=lambda _: time.sleep(0.01))
    monkeypatch.setattr(resumable_link, "time", clock)
    monkeypatch.setattr(sealed_connection, "_POLL_S", 0.01)
    monkeypatch.setattr(PeerAcceptor, "admit_stranger", note_arrival)
    bank, there = both({"secret": SECRET}, shop)
    assert says in there
    assert f"shop did not come within {LONG_S:g} s (" in bank


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "a link listens or dials"),
        ({"listen": "a:1", "dial": "a:1"}, "a link listens or dials"),
        ({"dial": "a"}, "an address is host:port"),
        ({"dial": "a:1"}, "a link authenticates both ends"),
        ({"dial": "a:1", "secret": "short"}, "at least 16"),
        ({"dial": "a:1", "identities": ("key", b"")}, "got str, bytes"),
        ({"dial": "a:1", "identities": fresh_identity()}, "got Identity$"),
        ({"listen": "192.0.2.1:7000", "secret": SECRET}, "bank cannot listen at 192.0.2.1:7000 "),
    ],
)
def test_a_wrong_call_is_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(LocalProtocolError, match=says), open_link("bank", "shop", **given):
        pass


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_link_to_another_or_of_another_process_is_not_taken() -> None:
    with open_link("bank", "shop", dial="127.0.0.1:1", secret=SECRET, patience_s=0.1) as link:
        with pytest.raises(LocalProtocolError, match=r"peer='post'.*says \('bank', 'shop'\)"):
            align_with("post", ["ann"], link=link)
        said = run_in_fork({"send": lambda: link.send(b""), "receive": lambda: link.receive(9)})
        assert all("belongs to the process that made it" in told for told in said.values())
        assert len(said) == 2
        with pytest.raises(RemoteProtocolError, match=r"did not come within 0.1 s \(bank reached"):
            link.receive(LONG_S)
