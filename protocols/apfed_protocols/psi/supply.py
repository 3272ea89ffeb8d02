"""Randomness dealt ahead: the dealer's part of an intersection, done before the IDs are known.

Run by: hub, members and dealer of backends that have one, under the agreement of the
intersection to come. It names the sizes that the parties will announce, from which what is dealt
follows; sets may turn out smaller. Protects as the dealing within an intersection does. A supply is
as secret as the IDs, and is used once: whoever used it for two intersections would show the
exclusive or of what it masked. So a process uses no part of a supply twice, however often it reads
the bytes, and a forked process none that was there before the fork. It cannot know what another
process did with a copy of them: `secure_apfed.alignment.supply_file` keeps supplies on the disk
such that only one process takes each.
"""

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi.interface import IntersectionAgreement, Script, ScriptedRole, check_parties
from apfed_protocols.randomness import ForkCheck

__all__ = ["DealingAhead", "StockingRole", "Supply"]

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
        self._fork_check = ForkCheck(f"{me}: this supply")

    def add(self, body: bytes) -> None:
        """Put in what was dealt for the next chunk.

        Raises:
            LocalProtocolError: it was read, stored or claimed; it would become another supply.
        """
        self._fork_check.require()
        if self._filled or self._claimed:
            raise LocalProtocolError(
                f"{self._me}: a supply is filled while it is dealt, and not once it was "
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
            raise LocalProtocolError(f"{self._me}: this supply is in use, or was stored already")
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
                "a stored supply does not match its checksum, so it was cut off or "
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
            raise LocalProtocolError(f"{me}: a supply is used once; deal another")
        if (self._agreement, self._me) != (agreement.digest, me):
            raise LocalProtocolError(
                f"{me}: this supply was dealt to {self._me}, or under another agreement"
            )
        self._claimed = True
        Supply._used |= digests

    def __reduce__(self) -> str:
        raise LocalProtocolError("a supply is never copied; store it with to_bytes")

    def take(self, length: int) -> bytes:
        """Return the next body, which must have this length."""
        self._fork_check.require()
        body = self._bodies.pop(0) if self._bodies else b""
        if len(body) != length:
            raise LocalProtocolError(
                f"{self._me}: the supply holds {len(body)} bytes for the next chunk, "
                f"it takes {length}"
            )
        return body


def _no_supply(stored: bytes) -> LocalProtocolError:
    return LocalProtocolError(
        f"{len(stored)} stored bytes match their checksum, but are no supply as "
        "to_bytes writes it; deal another under a new session"
    )


class StockingRole(ScriptedRole):
    """Hub or member while it is dealt; the script fills the supply."""

    def __init__(
        self,
        me: str,
        agreement: IntersectionAgreement,
        supply: Supply,
        script: Script,
        *,
        longest: int,
    ) -> None:
        super().__init__(me, [agreement.dealer], agreement.output, script, longest=longest)
        self._supply = supply

    @property
    def supply(self) -> Supply:
        """What this party was dealt; raises LocalProtocolError before the end."""
        self._opened()
        return self._supply


class DealingAhead(ABC):
    """The parties' roles for dealing ahead; the agreement must say `ahead`."""

    def __init__(self, agreement: IntersectionAgreement) -> None:
        if not agreement.ahead or not agreement.dealer:
            raise LocalProtocolError(
                "randomness is dealt ahead under an agreement that says so and names a dealer"
            )
        self._agreement = agreement

    def hub(self, me: str, members: Sequence[str]) -> StockingRole:
        """The active's side."""
        check_parties(me, members, self._agreement.dealer)
        supply = Supply(self._agreement.digest, me)
        return self._role(me, supply, self._hub_script(me, members, supply))

    def member(self, me: str, hub: str) -> StockingRole:
        """A passive's side."""
        check_parties(hub, [me], self._agreement.dealer)
        supply = Supply(self._agreement.digest, me)
        return self._role(me, supply, self._member_script(me, hub, supply))

    def _role(self, me: str, supply: Supply, script: Script) -> StockingRole:
        return StockingRole(me, self._agreement, supply, script, longest=self._longest())

    def dealer(self, hub: str, members: Sequence[str]) -> ScriptedRole:
        """The dealer's side."""
        me = self._agreement.dealer
        check_parties(hub, members, me)
        script = self._dealer_script(me, hub, members)
        return ScriptedRole(me, [hub], self._agreement.output, script, longest=self._longest())

    @abstractmethod
    def _longest(self) -> int:
        """Bytes of the longest message that a role takes."""

    @abstractmethod
    def _hub_script(self, me: str, members: Sequence[str], supply: Supply) -> Script: ...

    @abstractmethod
    def _member_script(self, me: str, hub: str, supply: Supply) -> Script: ...

    @abstractmethod
    def _dealer_script(self, me: str, hub: str, members: Sequence[str]) -> Script: ...
