"""Who does not belong is refused, each for its own reason; nobody else notices."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import grpc
import pytest

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError, UnsafeChoiceWarning
from apfed_protocols.seal import fresh_identity
from secure_apfed.between.certificates import Credentials, make_authority
from secure_apfed.between.grpc_link import dial
from secure_apfed.errors import ConfigError
from secure_apfed.exchange.sealed_connection import LocalEnd, prove
from secure_apfed.exchange.sockets import parse_address
from tests.links.pair import Pair, say_and_hear, until_somebody_listens


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_those_who_belong_meet_and_speak(host: str, pair: Pair) -> None:
    pair.listen_at(host)
    pair.meet()
    say_and_hear(pair)
    say_and_hear(pair, bytes(range(256)) * 12_000)


def test_both_may_listen(pair: Pair) -> None:
    pair.told["bob"]["listen"] = "127.0.0.1:1"
    pair.peers["ann"]["bob"] = pair.peer("bob", address="127.0.0.1:1")  # bob dials, by their names
    pair.meet()
    say_and_hear(pair)


REMOTE: dict[str, tuple[Callable[[Pair], object], str, str]] = {
    # who is wrong, what bob is told, what ann is told
    "foreign": (
        lambda pair: pair.told["bob"].update(tls=pair.certify("bob", by=make_authority())),
        "of an authority that is not in tls.ca", "bob: it did not dial, or came without",
    ),
    "revoked": (
        lambda pair: pair.revoke("ann", pair.credentials("bob").digest),
        "the certificate of bob is revoked", "bob is revoked",
    ),
    "revoked server": (
        lambda pair: pair.revoke("bob", pair.credentials("ann").digest),
        "ann is revoked by the list of bob", "bob refuses this",
    ),
    "revoked key": (
        lambda pair: pair.revoke("ann", pair.identities["bob"].public.hex()),
        "the identity of bob is revoked", "bob is revoked by",
    ),
    "another key": (
        lambda pair: pair.identities.update(bob=fresh_identity()),
        "ann refuses this connection: what bob signed", "bob signed",
    ),
}  # fmt: skip


def test_who_does_not_belong_is_told_why(tmp_path: Path) -> None:
    """All cases at once: who is refused and who is not there look the same until the end."""
    pairs: dict[str, Pair] = {}
    for case in REMOTE:
        (tmp_path / case).mkdir()
        pairs[case] = Pair(tmp_path / case)
        REMOTE[case][0](pairs[case])
    meeting = [Thread(target=pair.meet, kwargs={"within_s": 15.0}) for pair in pairs.values()]
    for thread in meeting:
        thread.start()
    for thread in meeting:
        thread.join()
    for case, pair in pairs.items():
        for name, reads in zip(("bob", "ann"), REMOTE[case][1:], strict=True):
            error = pair.failed[name]
            assert isinstance(error, PartyLeftError)
            assert reads in str(error), (case, str(error))


class HungUp:
    """The other end said this and then closed; so many writes still go before that shows here."""

    def __init__(self, *said: bytes, writes: int) -> None:
        self.said, self.writes, self.sent = [*said], writes, list[bytes]()

    def send_bytes(self, buf: bytes, /) -> None:
        if len(self.sent) == self.writes:
            raise BrokenPipeError("the connection was closed")
        self.sent.append(buf)

    def recv_bytes(self) -> bytes:
        if not self.said:
            raise EOFError("the other end closed the connection")
        return self.said.pop(0)

    def poll(self, timeout: float, /) -> bool:
        return True

    def trust(self) -> None: ...

    def close(self) -> None: ...


def test_a_refusal_is_read_though_the_connection_broke_under_a_write() -> None:
    ends = {name: fresh_identity() for name in ("ann", "bob")}
    known = {name: one.public for name, one in ends.items()}
    bob = LocalEnd(name="bob", identity=ends["bob"], known=known)
    lost = frozenset({known["bob"].hex()})
    ann = LocalEnd(name="ann", identity=ends["ann"], known=known, revoked=lambda: lost)
    calls = HungUp(writes=1)
    with pytest.raises(EOFError):
        prove(calls, bob, "ann")
    (hello,) = calls.sent
    for writes in range(3):
        with pytest.raises(ConnectionRefusedError, match="why not"):
            prove(HungUp(hello, b"refused why not", writes=writes), replace(ann, revoked=frozenset))
    refusing = HungUp(hello, b"is not read any more", writes=2)
    with pytest.raises(RemoteProtocolError, match="the identity of bob is revoked"):
        prove(refusing, ann)
    assert refusing.sent[-1].startswith(b"refused ann refuses this connection")
    assert not refusing.said  # it waited until the other end had read why, and closed


LOCAL: dict[str, tuple[Callable[[Pair], object], str]] = {
    "expired": (
        lambda pair: pair.told["ann"].update(tls=pair.certify("ann", days=-1)),
        "ann-certificate.pem has expired at",
    ),
    "wrong name": (
        lambda pair: pair.told["ann"].update(tls=pair.certify("ann", as_name="eve")),
        "ann-certificate.pem is for eve, not for ann",
    ),
    "of another authority": (
        lambda pair: pair.told["ann"].update(tls=pair.keep("ann", other_ca(pair, "ann"))),
        "is of another authority than those",
    ),
    "another key": (
        lambda pair: (pair.folder / "ann-key.pem").write_bytes(pair.credentials("bob").key),
        "is not the key of",
    ),
    "no file": (lambda pair: (pair.folder / "ann-key.pem").unlink(), "tls.key: .* cannot be read"),
    "no PEM": (
        lambda pair: (pair.folder / "ann-certificate.pem").write_bytes(b"no PEM"),
        "is not what it should be in PEM",
    ),
    "own one revoked": (
        lambda pair: pair.revoke("ann", pair.credentials("ann").digest),
        "is revoked; have another",
    ),
    "no TLS": (
        lambda pair: pair.told["ann"].pop("tls"),
        "needs `tls` with ca, certificate and key",
    ),
    "plaintext beyond loopback": (
        lambda pair: pair.told["ann"].update(
            tls=None, insecure_plaintext_on_loopback=True, listen="0.0.0.0:7001"
        ),
        "is for loopback alone, not for 0.0.0.0",
    ),
    "nobody listens": (
        lambda pair: pair.told["ann"].update(listen=None),
        "ann has no `listen`, and bob no address",
    ),
    "a list that is none": (
        lambda pair: pair.revoke("ann", "bob's"),
        "line 2: expected a certificate's SHA-256",
    ),
}


def test_own_files_are_checked_before_anything_is_sent(tmp_path: Path) -> None:
    for case, (spoil, reads) in LOCAL.items():
        (tmp_path / case).mkdir()
        pair = Pair(tmp_path / case)
        spoil(pair)
        with pytest.raises(ConfigError, match=reads):
            pair.connect("ann")


def call(pair: Pair, credentials: Credentials | None, name: str | None, me: LocalEnd) -> None:
    """Dial ann, past the checks of one's own files."""
    connection = dial(parse_address(pair.address), credentials, name=name)
    try:
        prove(connection, me, "ann")
    finally:
        connection.close()


def someone(pair: Pair, name: str = "bob") -> LocalEnd:
    identity = pair.identities.get(name) or fresh_identity()
    return LocalEnd(name=name, identity=identity, known={"ann": pair.identities["ann"].public})


def certified(pair: Pair, **how: object) -> Credentials:
    return pair.authority.issue("bob", **how)  # type: ignore[arg-type]  # a test's own


def other_ca(pair: Pair, name: str = "bob") -> Credentials:
    made = make_authority().issue(name)
    return Credentials(pair.authority.certificate, made.certificate, made.key)


CALLERS: dict[
    str, tuple[Callable[[Pair], tuple[Credentials | None, str | None, LocalEnd]], str]
] = {
    "expired": (
        lambda pair: (certified(pair, days=-1), "ann", someone(pair)),
        "certificate, which may have expired",
    ),
    "foreign": (
        lambda pair: (other_ca(pair), "ann", someone(pair)),
        "authority that is foreign there",
    ),
    "wrong server": (lambda pair: (certified(pair), "eve", someone(pair)), "has another name than"),
    "plaintext": (lambda pair: (None, None, someone(pair)), "the connection broke|closed"),
    "another's name": (
        lambda pair: (pair.authority.issue("cid"), "ann", someone(pair)),
        "bob came with a certificate for cid",
    ),
    "not in the session": (
        lambda pair: (pair.authority.issue("eve"), "ann", someone(pair, "eve")),
        "'eve' comes to 'ann', but this is ann, whose session is with bob",
    ),
}


def test_a_caller_without_the_right_papers_gets_nowhere(pair: Pair) -> None:
    coming = pair.come("ann")
    until_somebody_listens(pair)
    for make, reads in CALLERS.values():
        with pytest.raises((OSError, EOFError, RemoteProtocolError), match=reads):
            call(pair, *make(pair))
    bob = pair.come("bob")
    coming.join()
    bob.join()
    say_and_hear(pair)


def test_without_a_certificate_there_is_no_call(pair: Pair) -> None:
    pair.meet()
    tls = grpc.ssl_channel_credentials(pair.authority.certificate)
    options = [("grpc.ssl_target_name_override", "ann")]
    with grpc.secure_channel(pair.address, tls, options) as channel:
        carry = channel.stream_stream("/secure_apfed.Link/Carry")
        with pytest.raises(grpc.RpcError) as refused:
            next(carry(iter([b"hello"])))
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    say_and_hear(pair)


def test_plaintext_on_loopback_is_said_to_be_insecure(pair: Pair) -> None:
    for told in pair.told.values():
        told |= {"tls": None, "insecure_plaintext_on_loopback": True}
    with pytest.warns(UnsafeChoiceWarning, match="links without TLS"):
        pair.meet()
    say_and_hear(pair)
