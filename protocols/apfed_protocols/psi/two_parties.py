"""Alignment of two parties in two processes: each calls `align_with` over its link to the other.

Run by: both parties, on the same terms. Protects from: a peer on other terms, or another peer than
expected: both parties notice before any message depends on an ID. The link must authenticate the
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
from apfed_protocols.psi.interface import Aligner, IntersectionAgreement, IntersectionTooSmallError
from apfed_protocols.randomness import fresh_key

__all__ = ["Link", "align_with"]

_MAX_TERMS_BYTES = 2**14
_AS_WRITTEN = IdNormalisation()


class Link(Protocol):
    """A link to one peer that keeps messages whole and in order.

    It may have the attributes `me`, `peer` and `hub`, names of parties.
    """

    def send(self, body: bytes, /) -> None:
        """Send the bytes of one message to the peer."""
        ...

    def receive(self, timeout_s: float, /) -> bytes:
        """Return the bytes of the next message; raise TimeoutError if none comes in time."""
        ...


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
    """Find the rows that this party shares with `peer`, which calls this in its own process.

    The protocol is `ecdh`, which needs no third party. Each party learns how many IDs the other
    has, and which of its own are common; the hub even if these are too few. A link can be used for
    one call after another.

    Args:
        peer: the other party's name.
        ids: distinct IDs in any iterable (row k is the k-th of it), of the kinds of
            `apfed_protocols.ids`; a set counts in its iteration order. The result is positions,
            so an index that has such numbers as labels of other rows is refused.
        link: what `secure_apfed.open_link` returned; or a pair (send, receive) of functions of
            another link that authenticates the peer and encrypts: send(body) delivers bytes,
            receive(timeout_s) returns the peer's next message, or raises TimeoutError, or another
            OSError or EOFError if the link broke.
        me: this party's name; None: the one that the link has.
        hub: which of the two compares the lists; None: the end of the link that listens.
        normalisation: how IDs become bytes.
        minimum_rows: fewer common rows are not revealed; with 0 an empty result is possible.
        maximum_ids: the largest number of IDs that each party may have.
        threads: number of threads that this party computes with; None: one for each processor.
        patience_s: seconds to wait for the peer's next message; must exceed the time that it
            computes, about 40 us for each ID of both parties, divided by its processors.

    Returns:
        This party's row positions, int64, shape (common rows,), in a random order that is the same
        at both: row k of both is the same ID.

    Raises:
        DataError: this party's IDs are unfit (the peer learns no more than that), or there are
            fewer common rows than `minimum_rows`.
        LocalProtocolError: `link` is no link, or names or terms are invalid.
        RemoteProtocolError: the peer has other terms (the error says which), is another party,
            fell silent, or sent what the protocol does not allow.

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
    send, receive = _find_link_functions(link)
    me, hub = _choose_names(link, me, peer, hub)
    require_names("set intersection", "session", (me, peer))
    agreement = IntersectionAgreement(
        session="drawn by both",  # replaced once both parties' random bytes are known
        encoding=normalisation.encoding,
        minimum_rows=minimum_rows,
        maximum_ids=maximum_ids,
    )
    shared_terms = {
        "hub": hub,
        "normalisation": agreement.encoding,
        "minimum_rows": agreement.minimum_rows,
        "maximum_ids": agreement.maximum_ids,
    }
    own_terms = {"me": me, "peer": peer, "fit": True, "fresh": fresh_key().hex()} | shared_terms
    transport: dict[str, Any] = {
        "send": lambda _, body: send(body),
        "receive": lambda timeout_s: (peer, _require_bytes(receive(timeout_s))),
        "patience_s": patience_s,
    }
    try:
        own_ids = encode_ids(me, ids, normalisation, maximum_ids=maximum_ids)
    except DataError:
        # Tell the peer that this party stops; the peer may be gone already.
        with contextlib.suppress(RemoteProtocolError):
            take_part(_TermsRole(own_terms | {"fit": False}, shared_terms), **transport)
        raise
    terms_role = _TermsRole(own_terms, shared_terms)
    take_part(terms_role, **transport)
    protocol = EcdhIntersection(replace(agreement, session=terms_role.session), threads=threads)
    if hub == me:
        role: Aligner = protocol.make_hub(me, [peer], own_ids)
    else:
        role = protocol.make_member(me, peer, own_ids)
    take_part(role, **transport)
    try:
        return role.rows
    except IntersectionTooSmallError as error:
        sizes_and_rules = f"Rows of {me}: {len(own_ids)}; normalisation: {normalisation}"
        raise DataError(f"{error}. {sizes_and_rules}") from error


def _choose_names(link: Any, me: str | None, peer: str, hub: str | None) -> tuple[str, str]:
    """Return the names of this party and of the hub, taken from the link's attributes `me` and
    `hub` where the caller gave none (None).

    Raises LocalProtocolError: a name is missing, the hub is neither party, or the link names other
    parties at its ends.
    """
    me = me or getattr(link, "me", None)
    hub = hub or getattr(link, "hub", None)
    ends_of_link = (getattr(link, "me", me), getattr(link, "peer", peer))
    if me is None or hub is None or hub not in (me, peer) or ends_of_link != (me, peer):
        raise LocalProtocolError(
            "align_with needs the two names of the link's ends, me= and peer, and hub=, one of "
            f"them; got me={me!r}, peer={peer!r}, hub={hub!r}; the link says {ends_of_link}"
        )
    return me, hub


def _find_link_functions(link: Any) -> tuple[Callable[[bytes], object], Callable[[float], Any]]:
    """Return the send and receive functions of a link, which is an object with these methods or a
    pair of functions. Raises LocalProtocolError: `link` is neither.
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


class _TermsRole:
    """A party's role in the exchange of terms (names, hub, normalisation, limits) before an
    intersection: each party sends its terms and compares them with the peer's.

    Attributes:
        session: a fresh name that both parties derive from the two messages; "" before.
    """

    def __init__(self, own_terms: Mapping[str, Any], shared_terms: Mapping[str, Any]) -> None:
        """Make the role.

        Args:
            own_terms: all terms that this party sends: "me", "peer", "fit" (whether its IDs are
                usable), "fresh" (random text), and the shared terms.
            shared_terms: the terms that must be equal at both parties.
        """
        self._own_terms = own_terms
        self._shared_terms = shared_terms
        self.session = ""
        self._own_message = json.dumps(own_terms).encode()

    def start(self) -> Iterable[Outgoing]:
        return [Outgoing(self._own_terms["peer"], self._own_message)]

    @property
    def is_finished(self) -> bool:
        return bool(self.session) or not self._own_terms["fit"]

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Compare the peer's terms, `body`, with this party's, and set `session`, a name derived
        from both messages. Return no messages, since none follow.

        Raises RemoteProtocolError: the peer is another party than expected, has other terms, or
        says that its own IDs are unfit.
        """
        peer_terms = self._parse_terms(sender, body)
        me = self._own_terms["me"]
        if (peer_terms["me"], peer_terms["peer"]) != (sender, me):
            raise RemoteProtocolError(
                f"{me} expects {sender} at the other end of the link, and there is "
                f"{peer_terms['me']!r:.80}, who aligns with {peer_terms['peer']!r:.80}; correct "
                "the names, or take the link to the right one"
            )
        differences = [
            f"{name} is {own_value!r} at {me} and {peer_terms[name]!r:.200} at {sender}"
            for name, own_value in self._shared_terms.items()
            if own_value != peer_terms[name]
        ]
        if differences:
            raise RemoteProtocolError(
                f"the two parties call align_with on other terms: {'; '.join(differences)}; agree "
                "on one, and call it again at both"
            )
        if not peer_terms["fit"]:
            raise RemoteProtocolError(
                f"{sender} stopped before the intersection: its own IDs are unfit, and it was told "
                "why; call align_with again at both once they are mended"
            )
        # Sorted, so that both parties hash the two messages in the same order.
        messages = sorted((self._own_message, body))
        digests = b"".join(hashlib.sha256(message).digest() for message in messages)
        self.session = f"two parties {hashlib.sha256(digests).hexdigest()}"
        return ()

    def _parse_terms(self, sender: str, body: bytes) -> dict[str, Any]:
        """Decode the peer's terms. Raises RemoteProtocolError: the bytes are no JSON object with
        the same fields, of the same types, as this party's terms.
        """
        own_types = {name: type(value) for name, value in self._own_terms.items()}
        peer_terms = dict[str, Any]()
        is_valid = False
        try:
            peer_terms = json.loads(body) if len(body) <= _MAX_TERMS_BYTES else {}
            is_valid = {name: type(peer_terms[name]) for name in peer_terms} == own_types
        except (ValueError, TypeError, LookupError, RecursionError):
            pass  # not JSON, no object, or nested too deeply: invalid
        if not is_valid:
            raise RemoteProtocolError(
                f"{sender} sent {len(body)} bytes that are no terms of align_with; call it at both "
                "ends of the link, with nothing else on it, in the same release"
            )
        return peer_terms
