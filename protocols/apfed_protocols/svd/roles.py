"""FedSVD as roles: a table X = [X_1 .. X_m] is decomposed, whose columns lie with m owners.

Run by: the active (`SvdReceiver`, an owner as well), each passive (`SvdOwner`), a key generator
without data (`SvdDealer`) and a server (`SvdServer`). Source: FedSVD (Chai et al. 2022), section
3.2, in the exchanges of APC-VFL, Appendix E.3; Q_i are the rows of Q that meet owner i's columns:

1. dealer -> owner i: P (N x N, orthogonal, here its seed: 32 bytes) and Q_i (F_i x F);
   Q_1 .. Q_m together are Q (F x F, orthogonal).
2. owner i -> server: P X_i Q_i (N x F).
3. server: their sum is P X Q = (P U) S (Q^T V)^T; it decomposes the sum.
4. server -> receiver: the first D columns of P U, and zeros beyond the numerical rank.
5. receiver: P^T (P U) = U, each column with the sign by which its largest number is positive.

What this hides is less than masks of sums hide (docs/decomposition.md): the server learns the
singular values of every single owner's rows exactly, and all rows up to orthogonal
transformations of P's blocks and of the columns; with one owner, who knows P, the others' rows up
to an orthogonal transformation of their columns; with the dealer, everything. The receiver learns
U, from which it computes any column of any owner as soon as it knows D rows of it. Nobody is kept
from deviating: a server may send other vectors that are orthonormal. Links must be sealed
(`apfed_protocols.seal`).
"""

from collections.abc import Iterator, Mapping

import numpy as np

from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.fork_check import ForkCheck
from apfed_protocols.randomness import fresh_key
from apfed_protocols.sums.roles import KeepsSecrets
from apfed_protocols.svd.agreement import SvdAgreement
from apfed_protocols.svd.frames import MessageKind, Opened, SvdFrames, is_bounded, require_people
from apfed_protocols.svd.masks import Floats, random_orthogonal, rows_masked, rows_unmasked

__all__ = ["SvdDealer", "SvdOwner", "SvdReceiver", "SvdServer"]

_SLACK = 1e-8


class _SvdRole(KeepsSecrets):
    """One party's end: its frames, what it did already, and the process that it lives in."""

    def __init__(self, agreement: SvdAgreement, me: str) -> None:
        self.agreement, self.me = agreement, me
        self._frames = SvdFrames(agreement)
        self._fork_check = ForkCheck(f"{me}: this role of a decomposition")
        self._done = False

    def _once(self) -> None:
        """Raise LocalProtocolError where this part was played already."""
        self._fork_check.require()
        if self._done:
            raise LocalProtocolError(
                f"{self.me} played its part of {self.agreement.session!r} already; masks are used "
                "once: agree on a new session"
            )
        self._done = True


class SvdDealer(_SvdRole):
    """The key generator: it draws the masks, sends each owner its own, and is sent nothing."""

    def __init__(self, agreement: SvdAgreement) -> None:
        super().__init__(agreement, agreement.dealer)

    def deal(self) -> Iterator[Outgoing]:
        """Return one message for each owner; once.

        Raises:
            LocalProtocolError: it was dealt already, or this is a forked process.
        """
        self._once()
        return self._messages(fresh_key(), fresh_key())

    def _messages(self, rows_seed: bytes, columns_key: bytes) -> Iterator[Outgoing]:
        agreed = self.agreement
        mask_FF = random_orthogonal(agreed.columns, columns_key, b"columns")
        for owner in agreed.owners:
            own = mask_FF[agreed.columns_of(owner)]
            body = self._frames.pack(MessageKind.MASKS, own, owner=owner, seed=rows_seed)
            yield Outgoing(owner, body)


class SvdOwner(_SvdRole):
    """An owner's end: `take` what was dealt, then `mask` its table."""

    def __init__(self, agreement: SvdAgreement, me: str) -> None:
        super().__init__(agreement, me)
        agreement.position(me)
        self._masks: Opened | None = None

    def take(self, dealt: bytes) -> None:
        """Read what the dealer sent.

        Raises:
            LocalProtocolError: it was dealt to already.
            RemoteProtocolError: no seed and rows of an orthogonal matrix, for this owner.
        """
        agreed = self.agreement
        if self._masks is not None:
            raise LocalProtocolError(f"{self.me} holds its masks already")
        masks = self._frames.open(dealt, MessageKind.MASKS, agreed.dealer, owner=self.me)
        _require_orthonormal(masks.matrix.T, agreed.dealer)
        self._masks = masks

    def mask(self, table_NF: Floats, people: bytes) -> bytes:
        """Return P X_i Q_i, framed for the server; once.

        Args:
            table_NF: its own columns of the rows to decompose, in the agreed order, up to 1e100.
            people: 32-byte digest of these rows, the same at all owners.

        Raises:
            LocalProtocolError: no such table, no masks yet, or it masked one already.
        """
        agreed, masks = self.agreement, self._held()
        require_people(people)
        own = agreed.features[agreed.position(self.me)]
        if (
            type(table_NF) is not np.ndarray or table_NF.dtype != np.float64
            or table_NF.ndim != 2 or table_NF.shape[1] != own
            or not agreed.vectors <= len(table_NF) <= agreed.most_rows
            or not is_bounded(table_NF)
        ):  # fmt: skip
            raise LocalProtocolError(
                f"{self.me}: a table is bounded float64 of {agreed.vectors} to {agreed.most_rows} "
                f"rows and {own} columns, got {getattr(table_NF, 'dtype', type(table_NF))} "
                f"{np.shape(table_NF)}"
            )
        self._once()
        rotated_NF = table_NF @ masks.matrix
        masked_NF = rows_masked(rotated_NF, masks.seed, people, mask_rows=agreed.mask_rows)
        return self._frames.pack(MessageKind.TABLE, masked_NF, owner=self.me, people=people)

    def _held(self) -> Opened:
        self._fork_check.require()
        if self._masks is None:
            raise LocalProtocolError(f"{self.me} was dealt no masks yet")
        return self._masks


class SvdServer(_SvdRole):
    """The server's end: it adds what is masked, and decomposes the sum."""

    def __init__(self, agreement: SvdAgreement) -> None:
        super().__init__(agreement, agreement.server)

    def factor(self, tables: Mapping[str, bytes]) -> bytes:
        """Return P U for the receiver; once.

        Args:
            tables: frames by the authenticated names of their senders.

        Raises:
            LocalProtocolError: it answered already, or this is a forked process.
            RemoteProtocolError: a frame is malformed, an owner is missing or unknown, the tables
                are of different rows, or their sum has no decomposition. No answer was given then.
        """
        agreed = self.agreement
        if set(tables) != set(agreed.owners):
            missing, unknown = set(agreed.owners) - set(tables), set(tables) - set(agreed.owners)
            raise RemoteProtocolError(
                f"a decomposition needs the tables of {', '.join(agreed.owners)}; missing: "
                f"{', '.join(sorted(missing)) or 'none'}; unknown: "
                f"{', '.join(sorted(map(str, unknown))) or 'none'}"
            )
        first, *others = agreed.owners
        opened = self._table(tables[first], first)
        total_NF, people = opened.matrix, opened.people
        for owner in others:
            table = self._table(tables[owner], owner)
            if table.people != people or len(table.matrix) != len(total_NF):
                raise RemoteProtocolError(
                    f"{first} and {owner} sent tables of different rows; one of them answered "
                    "another request"
                )
            total_NF += table.matrix
        vectors_ND = self._vectors(total_NF)
        self._once()
        return self._frames.pack(
            MessageKind.VECTORS, vectors_ND, owner=agreed.receiver, people=people
        )

    def _table(self, frame: bytes, owner: str) -> Opened:
        return self._frames.open(frame, MessageKind.TABLE, owner, owner=owner)

    def _vectors(self, masked_NF: Floats) -> Floats:
        """The first left singular vectors of the sum, zeros beyond its numerical rank."""
        count = self.agreement.vectors
        try:
            left, values, _ = np.linalg.svd(masked_NF, full_matrices=False)
        except np.linalg.LinAlgError as error:
            raise RemoteProtocolError(
                "the sum of the masked tables has no decomposition; an owner sent other numbers "
                "than a table"
            ) from error
        # As `numpy.linalg.matrix_rank` draws the line: what lies below is of rounding alone.
        least = values[0] * max(masked_NF.shape) * np.finfo(np.float64).eps
        vectors_ND: Floats = left[:, :count] * (values[:count] > least)
        return vectors_ND


class SvdReceiver(SvdOwner):
    """The active's end: an owner's, and then `open`."""

    def __init__(self, agreement: SvdAgreement) -> None:
        super().__init__(agreement, agreement.receiver)
        self._opened = False

    def open(self, vectors: bytes, people: bytes, *, rows: int) -> Floats:
        """Return U, (N, D): orthonormal columns, of the largest singular values first; once.

        Columns beyond the numerical rank of the table are zeros.

        Args:
            vectors: what the server sent.
            people: as the tables were masked.
            rows: N.

        Raises:
            LocalProtocolError: its table was not masked yet, or this was opened before.
            RemoteProtocolError: vectors of other rows, or none that are orthonormal.
        """
        agreed, masks = self.agreement, self._held()
        if not self._done or self._opened:
            raise LocalProtocolError(
                f"{self.me} sent no table yet, or opened its answer; each is once"
            )
        came = self._frames.open(vectors, MessageKind.VECTORS, agreed.server, owner=self.me)
        if came.people != people or len(came.matrix) != rows:
            raise RemoteProtocolError(
                f"{agreed.server} sent {len(came.matrix)} rows of vectors, expected {rows}, of the "
                "people asked for"
            )
        kept_D = np.abs(came.matrix).max(axis=0) > 0
        _require_orthonormal(came.matrix[:, kept_D], agreed.server)
        if (kept_D[1:] > kept_D[:-1]).any():
            raise RemoteProtocolError(f"{agreed.server} sent a vector after one of zeros")
        self._opened = True
        left_ND = rows_unmasked(came.matrix, masks.seed, people, mask_rows=agreed.mask_rows)
        largest_D = np.take_along_axis(left_ND, np.abs(left_ND).argmax(axis=0)[None], axis=0)
        return np.asarray(left_ND * np.where(largest_D < 0, -1.0, 1.0), dtype=np.float64)


def _require_orthonormal(vectors: Floats, sender: str) -> None:
    """Refuse columns that are not of length 1 and at right angles."""
    apart = np.abs(vectors.T @ vectors - np.eye(vectors.shape[1]))
    if not (apart < _SLACK).all():
        raise RemoteProtocolError(
            f"{sender} sent vectors that are not orthonormal; what it drew or computed is not what "
            "was agreed"
        )
