"""What hub and member of `apfed_protocols.psi.ecdh` share: the messages, and blinding the own set.

Run by: both roles. Protects as `apfed_protocols.psi.ecdh` says.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.fork_check import ForkCheck
from apfed_protocols.psi import curve, ladder
from apfed_protocols.psi.framing import Framing
from apfed_protocols.psi.interface import IntersectionAgreement, Output, Progress
from apfed_protocols.psi.pairwise import POSITION_BYTES
from apfed_protocols.randomness import derive_key, fresh_key, random_permutation

__all__ = ["LAST", "TAG_BYTES", "Kind", "Side"]

Rows = NDArray[np.int64]

_VERSION = 3
TAG_BYTES = 16


class Kind(IntEnum):
    """What a message is."""

    BLINDED = 1
    TAGS = 2
    ROWS = 3
    REFUSAL = 4
    DONE = 5
    SIZE = 6


_ITEM_BYTES: Mapping[int, int] = {
    Kind.BLINDED: ladder.POINT_BYTES,
    Kind.TAGS: TAG_BYTES,
    Kind.ROWS: POSITION_BYTES,
    Kind.REFUSAL: 0,
    Kind.DONE: 0,
    Kind.SIZE: POSITION_BYTES,
}
LAST: Mapping[Output, Kind] = {
    Output.ROWS: Kind.ROWS,
    Output.HUB_ROWS: Kind.DONE,
    Output.SIZE: Kind.SIZE,
}


class Side:
    """The own set and the message format."""

    def __init__(
        self,
        me: str,
        ids: Sequence[bytes],
        agreement: IntersectionAgreement,
        *,
        threads: int | None,
        pool: Executor | None,
        progress: Callable[[Progress], None] | None,
        secret: bytes | None,
    ) -> None:
        self.agreement, self._progress, self._secret = agreement, progress, secret
        self._threads, self._pool = threads, pool
        self.me, self.size = me, len(ids)
        self._framing = Framing(self.agreement, _VERSION, _ITEM_BYTES, self.agreement.maximum_ids)
        self._digests = curve.digest_ids(ids, session=self.agreement.digest)
        self._started = False
        self._fork_check = ForkCheck(f"{me}: this role of an intersection")

    def begin(self) -> None:
        self._fork_check.require()
        if self._started:
            raise LocalProtocolError(f"{self.me}: an intersection is started once")
        self._started = True

    def draw(self, peer: str) -> tuple[bytes, Rows]:
        """Return the scalar, and the order of the own IDs, for the run with this peer."""
        if self._secret is None:
            return fresh_key(), random_permutation(self.size)
        key = derive_key(self._secret, b"ecdh", self.agreement.digest, peer.encode())
        order = random_permutation(self.size, key=derive_key(key, b"order"))
        return derive_key(key, b"scalar"), order

    def blind(self, scalar: bytes, order: Rows) -> bytes:
        """Return the own IDs, blinded, with the ID of row `order[k]` at place k."""
        rows = np.frombuffer(self._digests, np.uint8).reshape(-1, ladder.POINT_BYTES)
        report = self._reporter("blinding its own IDs", self.size)
        return curve.blind_digests(
            scalar, rows[order].tobytes(), threads=self._threads, pool=self._pool, report=report
        )

    def multiply(self, sender: str, scalar: bytes, points: bytes) -> bytes:
        """Check and blind what `sender` sent."""
        curve.check_points(sender, points)
        report = self._reporter(f"blinding the IDs of {sender}", len(points) // ladder.POINT_BYTES)
        found = curve.multiply_points(
            scalar, points, threads=self._threads, pool=self._pool, report=report
        )
        if len(set(ladder.split_points(found))) * ladder.POINT_BYTES < len(found):
            # they differ by points of low order, which multiplying by a scalar takes away
            raise RemoteProtocolError(
                f"{sender} sent one blinded ID in two ways; it does not follow the protocol"
            )
        return found

    def _reporter(self, work: str, total: int) -> Callable[[int], None] | None:
        progress = self._progress
        if progress is None:
            return None
        return lambda done: progress(Progress(self.me, work, done, total))

    def pack(self, kind: Kind, items: bytes = b"") -> bytes:
        return self._framing.pack(kind, items)

    def unpack(self, sender: str, message: bytes) -> tuple[Kind, bytes]:
        self._fork_check.require()
        if not self._started:
            raise LocalProtocolError(f"{self.me}: call start before receive")
        kind, items = self._framing.unpack(sender, message)
        return Kind(kind), items
