"""Triples dealt ahead: the dealer's part of an intersection, done before the IDs are known.

Run by: hub, members and dealer of `protocols.psi.circuit.backend`, under the agreement of the
intersection to come. It names the sizes that the parties will announce, from which the
number of triples follows; sets may turn out smaller. Protects as the dealing within
an intersection does. A supply is as secret as the IDs, and is used once: whoever used it for
two intersections would show the exclusive or of what it masked. So a process uses no part of a
supply twice, however often it reads the bytes, and a forked process none that was there before the
fork. It cannot know what another process did with a copy of them:
`secure_apfed.alignment.supply_file` keeps supplies on the disk such that only one process takes
each.
"""

import hashlib
import struct
from collections.abc import Generator, Sequence
from typing import ClassVar

from protocols.errors import LocalProtocolError
from protocols.fork_check import ForkCheck
from protocols.psi.circuit.bits import WORD
from protocols.psi.circuit.dealer import deal_request, stocking_script
from protocols.psi.circuit.hashing import BITS
from protocols.psi.circuit.messages import Desk, Inbox, Kind, chunks, triple_words
from protocols.psi.circuit.sizes import planned_bins_and_slots
from protocols.psi.interface import IntersectionAgreement, check_parties
from protocols.psi.result import Opened
from protocols.psi.script import Script, ScriptedRole, Turn
from protocols.randomness import KEY_BYTES

__all__ = ["Stocking", "StockingRole", "Supply", "hub_triples", "member_triples"]

_HEAD = struct.Struct(">32sHI")
_LENGTH = struct.Struct(">I")
_CHECK_BYTES = 32


class Supply:
    """What one party was dealt: a body for each chunk of bins, taken in order, once.

    Args:
        agreement: its digest, 32 bytes; me: the party.
        bodies: of the chunks.
    """

    _used: ClassVar[set[bytes]] = set()
    """Digests of the bodies that this process used, or may use still."""

    def __init__(self, agreement: bytes, me: str, bodies: Sequence[bytes] = ()) -> None:
        self._agreement, self._me, self._bodies = agreement, me, list(bodies)
        self._filled = self._claimed = False
        self._fork_check = ForkCheck(f"{me}: this supply of triples")

    def add(self, body: bytes) -> None:
        """Put in what was dealt for the next chunk.

        Raises:
            LocalProtocolError: it was read, stored or claimed; it would become another supply.
        """
        self._fork_check.require()
        if self._filled or self._claimed:
            raise LocalProtocolError(
                f"{self._me}: a supply is filled while triples are dealt, and not once it was "
                "read, stored or used; deal another"
            )
        self._bodies.append(body)

    def to_bytes(self) -> bytes:
        """Return it for a file that nobody else can read; from now on only that can be used.

        Raises:
            LocalProtocolError: it is in use, or in a file, already.
        """
        self._fork_check.require()
        if self._claimed:
            raise LocalProtocolError(
                f"{self._me}: this supply of triples is in use, or was stored already"
            )
        self._claimed = True
        framed = self._framed()
        return framed + hashlib.sha256(framed).digest()

    def _framed(self) -> bytes:
        name = self._me.encode()
        bodies = b"".join(_LENGTH.pack(len(body)) + body for body in self._bodies)
        return _HEAD.pack(self._agreement, len(name), len(self._bodies)) + name + bodies

    @classmethod
    def from_bytes(cls, stored: bytes) -> "Supply":
        """Read what `to_bytes` gave; from a file by `secure_apfed.alignment.supply_file`.

        Raises:
            LocalProtocolError: it was cut off or altered, or is none.
        """
        stored, check = stored[:-_CHECK_BYTES], stored[-_CHECK_BYTES:]
        if hashlib.sha256(stored).digest() != check:
            raise LocalProtocolError(
                "a stored supply of triples does not match its checksum, so it was cut off or "
                "altered; deal another under a new session"
            )
        try:
            supply = cls._parsed(stored)
        except (struct.error, UnicodeDecodeError) as error:
            raise _no_supply(stored) from error
        if supply._framed() != stored:  # lengths beyond the end, or bytes behind it
            raise _no_supply(stored)
        supply._filled = True
        return supply

    @classmethod
    def _parsed(cls, stored: bytes) -> "Supply":
        agreement, name_bytes, count = _HEAD.unpack_from(stored)
        at = _HEAD.size + name_bytes
        me, bodies = stored[_HEAD.size : at].decode(), []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(stored, at)
            at += _LENGTH.size + length
            bodies.append(stored[at - length : at])
        return cls(agreement, me, bodies)

    def claim(self, agreement: IntersectionAgreement, me: str) -> None:
        """Reserve it for one intersection.

        Raises:
            LocalProtocolError: it or a part of it was used before, or it is another party's or
                agreement's.
        """
        self._fork_check.require()
        digests = {hashlib.sha256(body).digest() for body in self._bodies if body}
        if self._claimed or digests & Supply._used:
            raise LocalProtocolError(f"{me}: a supply of triples is used once; deal another")
        if (self._agreement, self._me) != (agreement.digest, me):
            raise LocalProtocolError(
                f"{me}: this supply of triples was dealt to {self._me}, or under another agreement"
            )
        self._claimed = True
        Supply._used |= digests

    def __reduce__(self) -> str:
        raise LocalProtocolError("a supply of triples is never copied; store it with to_bytes")

    def take(self, length: int) -> bytes:
        """Return the next body, which must have this length."""
        self._fork_check.require()
        body = self._bodies.pop(0) if self._bodies else b""
        if len(body) != length:
            raise LocalProtocolError(
                f"{self._me}: the supply of triples holds {len(body)} bytes for the next chunk, "
                f"it takes {length}"
            )
        return body


def _no_supply(stored: bytes) -> LocalProtocolError:
    return LocalProtocolError(
        f"{len(stored)} stored bytes match their checksum, but are no supply of triples as "
        "to_bytes writes it; deal another under a new session"
    )


class StockingRole(ScriptedRole):
    """Hub or member while triples are dealt ahead; the script fills the supply."""

    def __init__(self, desk: Desk, supply: Supply, script: Script) -> None:
        super().__init__(desk.me, [desk.agreement.dealer], desk.agreement.output, script)
        self._supply = supply

    @property
    def supply(self) -> Supply:
        """What this party was dealt; raises LocalProtocolError before the end."""
        self._opened()
        return self._supply


class Stocking:
    """The parties' roles for dealing ahead; the agreement must say `ahead`."""

    def __init__(self, agreement: IntersectionAgreement) -> None:
        if not agreement.ahead or not agreement.dealer:
            raise LocalProtocolError(
                "triples are dealt ahead under an agreement that says so and names a dealer"
            )
        self._agreement = agreement

    def hub(self, me: str, members: Sequence[str]) -> StockingRole:
        """The active's side."""
        check_parties(me, members, self._agreement.dealer)
        desk, supply = self._desk(me), Supply(self._agreement.digest, me)
        return StockingRole(desk, supply, _hub_script(desk, members, supply))

    def member(self, me: str, hub: str) -> StockingRole:
        """A passive's side."""
        check_parties(hub, [me], self._agreement.dealer)
        desk, supply = self._desk(me), Supply(self._agreement.digest, me)
        return StockingRole(desk, supply, _member_script(desk, hub, supply))

    def dealer(self, hub: str, members: Sequence[str]) -> ScriptedRole:
        """The dealer's side."""
        me = self._agreement.dealer
        check_parties(hub, members, me)
        script = stocking_script(self._desk(me), hub, members)
        return ScriptedRole(me, [hub], self._agreement.output, script)

    def _desk(self, me: str) -> Desk:
        return Desk(me, self._agreement)


def _hub_script(desk: Desk, members: Sequence[str], supply: Supply) -> Script:
    bins, slots = planned_bins_and_slots(desk.agreement, desk.me, members)
    for chunk in chunks(bins, slots):
        words = (chunk.stop - chunk.start) // BITS
        supply.add((yield from hub_triples(desk, words, slots)))
    return Opened()


def _member_script(desk: Desk, hub: str, supply: Supply) -> Script:
    members = [party for party in desk.agreement.sizes if party != hub]
    bins, slots = planned_bins_and_slots(desk.agreement, hub, members)
    for chunk in chunks(bins, slots):
        words = (chunk.stop - chunk.start) // BITS
        supply.add((yield from member_triples(desk, words, slots, members.index(desk.me))))
    return Opened()


def hub_triples(
    desk: Desk, words: int, slots: Sequence[int], supply: Supply | None = None
) -> Generator[Turn, Inbox, bytes]:
    """Return the hub's seeds and correction of one chunk: from its supply, or ordered now."""
    dealer, (_, all_words) = desk.agreement.dealer, triple_words(words, slots)
    length = KEY_BYTES * (len(slots) + 1) + WORD.itemsize * all_words
    if supply is not None:
        return supply.take(length)
    inbox = yield desk.turn(Kind.DEAL, {dealer: deal_request(words, slots)}, [dealer])
    return desk.read(inbox, dealer, Kind.TRIPLES, length)


def member_triples(
    desk: Desk, words: int, slots: Sequence[int], place: int, supply: Supply | None = None
) -> Generator[Turn, Inbox, bytes]:
    """Return a member's seeds and correction of one chunk."""
    dealer, (pair_words, _) = desk.agreement.dealer, triple_words(words, slots)
    length = 2 * KEY_BYTES + WORD.itemsize * pair_words[place]
    if supply is not None:
        return supply.take(length)
    inbox = yield Turn((), [dealer])
    return desk.read(inbox, dealer, Kind.TRIPLES, length)
