"""Two lists in two processes: each party calls `align_with` over its link to the other.

Run by: both parties, on the same terms. Protects from: a peer on other terms, or another peer than
expected: both are told before any message says anything of an ID. The link must authenticate the
peer and encrypt.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import require_names
from apfed_protocols.conversation import Outgoing, take_part
from apfed_protocols.errors import DataError, LocalProtocolError, RemoteProtocolError
from apfed_protocols.ids import MAX_IDS, IdColumn, IdNormalisation, encode_ids
from apfed_protocols.psi.ecdh import EcdhIntersection
from apfed_protocols.psi.interface import IntersectionAgreement, IntersectionTooSmallError
from apfed_protocols.randomness import fresh_key

__all__ = ["Link", "align_with"]

_MAX_TERMS = 2**14  # bytes
_AS_WRITTEN = IdNormalisation()


class Link(Protocol):
    """A link that keeps messages whole and in order.

    It may have `me`, `peer` and `hub`, names of parties.
    """

    def send(self, body: bytes, /) -> None: ...

    def receive(self, timeout_s: float, /) -> bytes: ...


def align_with(
    peer: str,
    ids: IdColumn,
    *,
    link: Link | tuple[Callable[[bytes], object], Callable[[float], bytes]],
    me: str | None = None,
    hub: str | None = None,
    normalisation: IdNormalisation = _AS_WRITTEN,
    minimum_rows: int = 2,
    maximum_ids: int = MAX_IDS,
    threads: int | None = None,
    patience_s: float = 60.0,
) -> NDArray[np.int64]:
    """Find the rows that this party shares with `peer`, who calls this in its own process.

    By `ecdh`, for which two parties need no third. Each learns how many IDs the other has, and
    which of its own are common; the hub also where these are too few. A link serves one call after
    another.

    Args:
        peer: the other party's name.
        ids: distinct, in any iterable (row k is the k-th of it), of the kinds of
            `apfed_protocols.ids`; of a set in the order of this very object. What is returned
            are positions, so an index with such numbers at other rows is refused.
        link: as of `secure_apfed.open_link`; or (send, receive) of another that authenticates the
            peer and encrypts: send(body) delivers bytes, receive(timeout_s) returns the peer's
            next, or raises TimeoutError, or another OSError or EOFError where it broke.
        me: this party's name; by default as the link says.
        hub: which of the two compares the lists; by default the end of the link that listens.
        normalisation: how IDs become bytes.
        minimum_rows: fewer common rows are not revealed. Under 0, none in common is a result.
        maximum_ids: the largest set that each may have.
        threads: how many this party computes with; None: one for each processor.
        patience_s: how long the peer may send nothing: longer than it computes, about 40 us for
            each ID of both, divided by its processors.

    Returns:
        This party's row positions, int64, shape (common rows,), in a random order that is the same
        at both: row k of both is the same ID.

    Raises:
        DataError: unfit IDs, of which the peer is told no more, or fewer common rows than
            `minimum_rows`.
        LocalProtocolError: no link, or names or terms that cannot be.
        RemoteProtocolError: the peer holds other terms (says which), is another party, fell
            silent, or sent what the protocol does not allow.

    Examples:
        >>> from queue import Queue
        >>> from threading import Thread
        >>> from apfed_protocols import align_with
        >>> to_bank, to_shop = Queue(), Queue()  # stand for a network
        >>> def run_shop():  # in a process of its own
        ...     link = (to_bank.put, lambda timeout_s: to_shop.get())
        ...     align_with("bank", ["eve", "bob"], link=link, me="shop", hub="bank", minimum_rows=1)
        >>> Thread(target=run_shop).start()
        >>> link = (to_shop.put, lambda timeout_s: to_bank.get())
        >>> align_with("shop", ["ann", "eve"], link=link, me="bank", hub="bank", minimum_rows=1)
        array([1])
    """
    send, receive = _find_ends(link)
    me = me or getattr(link, "me", None)
    hub = hub or getattr(link, "hub", None)
    leads = (getattr(link, "me", me), getattr(link, "peer", peer))
    if me is None or hub not in (me, peer) or leads != (me, peer):
        raise LocalProtocolError(
            "align_with needs the two names of the link's ends, me= and peer, and hub=, one of "
            f"them; got me={me!r}, peer={peer!r}, hub={hub!r}; the link says {leads}"
        )
    require_names("set intersection", "session", (me, peer))
    agreed = IntersectionAgreement(
        session="drawn by both",
        encoding=normalisation.encoding,
        minimum_rows=minimum_rows,
        maximum_ids=maximum_ids,
    )
    shared = {"hub": hub, "normalisation": agreed.encoding}
    shared |= {name: getattr(agreed, name) for name in ("minimum_rows", "maximum_ids")}
    terms = {"me": me, "peer": peer, "fit": True, "fresh": fresh_key().hex()} | shared
    carry: dict[str, Any] = {
        "send": lambda _, body: send(body),
        "receive": lambda timeout_s: (peer, _require_bytes(receive(timeout_s))),
        "patience_s": patience_s,
    }
    try:
        own_ids = encode_ids(me, ids, normalisation, maximum_ids=maximum_ids)
    except DataError:
        with contextlib.suppress(RemoteProtocolError):  # who is gone already needs no telling
            take_part(_Terms(terms | {"fit": False}, shared), **carry)
        raise
    compared = _Terms(terms, shared)
    take_part(compared, **carry)
    protocol = EcdhIntersection(replace(agreed, session=compared.session), threads=threads)
    role = (
        protocol.make_hub(me, [peer], own_ids)
        if hub == me
        else protocol.make_member(me, peer, own_ids)
    )
    take_part(role, **carry)
    try:
        return role.rows
    except IntersectionTooSmallError as error:
        details = f"Rows of {me}: {len(own_ids)}; normalisation: {normalisation}"
        raise DataError(f"{error}. {details}") from error


def _find_ends(link: Any) -> tuple[Callable[[bytes], object], Callable[[float], Any]]:
    """Return the send and receive functions of a link or a pair. Raises LocalProtocolError: it has
    none.
    """
    names = ("send", "receive")
    pair: Any = link
    if not isinstance(link, tuple):
        pair = [getattr(link, name, None) for name in names]
    if len(pair) != len(names) or not all(map(callable, pair)):
        raise LocalProtocolError(
            "link= takes what secure_apfed.open_link gives, or a pair (send, receive) of functions "
            "of a link that authenticates the peer and encrypts; got " + type(link).__name__
        )
    send, receive = pair
    return send, receive


def _require_bytes(body: object) -> bytes:
    """Return a received message as bytes. Raises LocalProtocolError: the link returned something
    else.
    """
    if not isinstance(body, bytes | bytearray | memoryview):
        raise LocalProtocolError(
            f"receive of the link returned {type(body).__name__}, expected the bytes of a message; "
            "raise TimeoutError where none came"
        )
    return bytes(body)


class _Terms:
    """A conversation that tells the peer this party's terms, and compares them with the peer's.

    Both then know a fresh session.
    """

    def __init__(self, terms: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        """Take the terms to send and those of them that must be equal at both parties."""
        self._terms = terms
        self._shared = shared
        self.session = ""
        self._sent = json.dumps(terms).encode()

    def start(self) -> Iterable[Outgoing]:
        return [Outgoing(self._terms["peer"], self._sent)]

    @property
    def is_finished(self) -> bool:
        return bool(self.session) or not self._terms["fit"]

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Compare the peer's terms with the own ones, and derive the session from both messages.
        Raises RemoteProtocolError: another peer, other terms, or unfit IDs at the peer.

        `body`: the peer's message.
        """
        peer_terms = self._parse_terms(sender, body)
        me = self._terms["me"]
        if (peer_terms["me"], peer_terms["peer"]) != (sender, me):
            raise RemoteProtocolError(
                f"{me} expects {sender} at the other end of the link, and there is "
                f"{peer_terms['me']!r:.80}, who aligns with {peer_terms['peer']!r:.80}; correct "
                "the names, or take the link to the right one"
            )
        other = [
            f"{name} is {own_value!r} at {me} and {peer_terms[name]!r:.200} at {sender}"
            for name, own_value in self._shared.items()
            if own_value != peer_terms[name]
        ]
        if other:
            raise RemoteProtocolError(
                f"the two parties call align_with on other terms: {'; '.join(other)}; agree on "
                "one, and call it again at both"
            )
        if not peer_terms["fit"]:
            raise RemoteProtocolError(
                f"{sender} stopped before the intersection: its own IDs are unfit, and it was told "
                "why; call align_with again at both once they are mended"
            )
        digests = b"".join(
            hashlib.sha256(message).digest() for message in sorted((self._sent, body))
        )
        self.session = f"two parties {hashlib.sha256(digests).hexdigest()}"
        return ()

    def _parse_terms(self, sender: str, body: bytes) -> dict[str, Any]:
        """Parse terms with the same fields, of the same types, as this party's own.

        `body`: the peer's message.
        """
        terms = dict[str, Any]()
        fits = False
        try:
            terms = json.loads(body) if len(body) <= _MAX_TERMS else {}
            fits = {name: type(terms[name]) for name in terms} == {
                name: type(own_value) for name, own_value in self._terms.items()
            }
        except (ValueError, TypeError, LookupError, RecursionError):
            pass
        if not fits:
            raise RemoteProtocolError(
                f"{sender} sent {len(body)} bytes that are no terms of align_with; call it at both "
                "ends of the link, with nothing else on it, in the same release"
            )
        return terms
