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

What this hides is less than masks of sums hide (docs/papers.md): the server learns the
singular values of every single owner's rows exactly, and all rows up to orthogonal
transformations of P's blocks and of the columns; with one owner, who knows P, the others' rows up
to an orthogonal transformation of their columns; with the dealer, everything. The receiver learns
U, from which it computes any column of any owner as soon as it knows D rows of it. Nobody is kept
from deviating: a server may send other vectors that are orthonormal. Links must be sealed
(`apfed_protocols.seal`).
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import (
    require_all,
    require_names,
    require_people,
    require_ranges,
    take_numpy_integers,
)
from apfed_protocols.conversation import Outgoing
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.installing import install_extra
from apfed_protocols.randomness import KEY_BYTES, ForkCheck, fresh_key, keystream
from apfed_protocols.sums.roles import KeepsSecrets

MAX_FEATURES = 2**13
"""Largest number of features of all owners together: the dealer decomposes a matrix of so many rows
and columns."""
MAX_MASK_ROWS = 2**13
"""Largest number of rows in one block of the mask of rows: such a block takes half a gigabyte."""
_RANGE_BY_FIELD = {
    "vectors": (1, MAX_FEATURES),
    "mask_rows": (2, MAX_MASK_ROWS),
    "max_rows": (2, 2**26),
}
try:
    import scipy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"a decomposition needs scipy; run: {install_extra('svd', 'apfed-protocols')}",
        name=error.name,
    ) from None
Floats = NDArray[np.float64]
_FLOAT_BITS = 53
_MAGIC = b"SVDF"
_VERSION = 1
_HEADER = struct.Struct(">4sBBH32s32s")
_HEADER_FIELDS = ("format", "version", "kind", "owner", "agreement", "list of people")
_NO_PEOPLE_DIGEST = bytes(32)  # in place of a digest of people
_NUMBER_BYTES = 8
_MAX_MAGNITUDE = 1e100  # sums and squares of such numbers are still finite
_ORTHONORMAL_TOLERANCE = 1e-8


@dataclass(frozen=True, kw_only=True)
class SvdAgreement:
    """The public terms that all parties agree on before one decomposition.

    Raises LocalProtocolError on construction when a field is of another type or out of its range.

    Attributes:
        session: names this one decomposition; names have 1 to 255 bytes in UTF-8.
        server, dealer: two parties without a table, which must collude with nobody.
        owners: the parties whose tables are joined column-wise, in this order; two or more.
        features: the number of columns of each of these tables.
        receiver: the owner that gets the singular vectors.
        vectors: D, the number of singular vectors, those of the largest singular values first.
        mask_rows: the largest number of rows in one block of the row mask P.
        max_rows: the largest number of rows of a table.
    """

    session: str
    server: str
    dealer: str
    owners: tuple[str, ...]
    features: tuple[int, ...]
    receiver: str
    vectors: int
    mask_rows: int
    max_rows: int

    def __post_init__(self) -> None:
        """Validate all fields, and turn NumPy integers into int. Raises LocalProtocolError: the
        parties, the features and the numbers of vectors and rows do not fit together.
        """
        take_numpy_integers(self)
        if type(self.owners) is not tuple or type(self.features) is not tuple:
            raise LocalProtocolError("owners and features are tuples, of names and of numbers")
        require_names("decomposition", self.session, (self.server, self.dealer, *self.owners))
        if len(self.owners) < 2 or self.receiver not in self.owners:
            raise LocalProtocolError(
                f"a decomposition is of two tables or more, and one of their owners receives it; "
                f"got {', '.join(self.owners)} and the receiver {self.receiver!r:.100}"
            )
        are_counts = all(type(count) is int and count >= 1 for count in self.features)
        if len(self.features) != len(self.owners) or not are_counts:
            raise LocalProtocolError(
                f"each of {len(self.owners)} owners has 1 feature or more, got {self.features!r}"
            )
        require_ranges(self, _RANGE_BY_FIELD)
        if not self.vectors <= self.columns <= MAX_FEATURES:
            raise LocalProtocolError(
                f"the tables have {self.columns} features together; that is at most "
                f"{MAX_FEATURES}, and no fewer than the {self.vectors} singular vectors asked for"
            )

    @property
    def columns(self) -> int:
        """Return F, the features of all owners together."""
        return sum(self.features)

    @cached_property
    def digest(self) -> bytes:
        """Return SHA-256 over all fields."""
        canonical = json.dumps(asdict(self), sort_keys=True).encode()
        return hashlib.sha256(b"secure-apfed svd agreement v1" + canonical).digest()

    def find_position(self, me: str) -> int:
        """Return the position, from 0, of the owner named `me`. Raises LocalProtocolError: no owner
        has that name.
        """
        if me not in self.owners:
            raise LocalProtocolError(
                f"{me!r} holds no table of this decomposition; owners are {', '.join(self.owners)}"
            )
        return self.owners.index(me)

    def get_columns(self, owner: str) -> slice:
        """Return the slice of an owner's columns in the joint table."""
        position = self.find_position(owner)
        start = sum(self.features[:position])
        return slice(start, start + self.features[position])


# A mask is the orthogonal factor of a matrix of independent normal numbers, with the signs by which
# it is uniform among orthogonal matrices (Mezzadri 2007). The mask of rows is block-diagonal
# (FedSVD, section 3.3), so that N rows take N b numbers and N b^2 steps instead of N^2 and N^3.
# Blocks are of equal size, but for one row: a short last one would hide few people among few.


def draw_orthogonal(size: int, key: bytes, *context: bytes) -> Floats:
    """Return a uniformly random orthogonal matrix, (size, size), which key and context determine:
    the orthogonal factor of a matrix of normal numbers (Mezzadri 2007).

    `key`: 32 secret bytes. `context`: labels of this use.
    """
    stream = keystream(key, b"orthogonal mask v1", *context, length=8 * size * size)
    words = np.frombuffer(stream, dtype="<u8") >> np.uint64(64 - _FLOAT_BITS)
    uniforms = (words + 0.5) * 2.0**-_FLOAT_BITS  # midpoints of 2^53 cells of [0, 1]
    normals = scipy.special.ndtri(uniforms).reshape(size, size)
    orthogonal_factor, triangular_factor = np.linalg.qr(normals)
    # By these signs the factor is uniform among all orthogonal matrices.
    signs = np.where(np.diag(triangular_factor) < 0, -1.0, 1.0)
    return np.asarray(orthogonal_factor * signs, dtype=np.float64)


def split_rows(row_count: int, max_rows: int) -> tuple[int, ...]:
    """Return the sizes of the fewest blocks of at most `max_rows` rows into which `row_count` rows
    can be split, equal up to one row.
    """
    block_count = -(-row_count // max_rows)  # rounded up
    size, larger_block_count = divmod(row_count, block_count)
    return (size + 1,) * larger_block_count + (size,) * (block_count - larger_block_count)


def mask_table_rows(
    table_NF: Floats, row_mask_seed: bytes, people_digest: bytes, *, mask_rows: int
) -> Floats:
    """Return P X for a table X, (N, F), with the orthogonal row mask P, (N, N), which the seed
    determines. P is block-diagonal: it mixes rows within blocks.

    Args:
        table_NF: X, N rows of F features.
        row_mask_seed: the dealer's secret bytes for P.
        people_digest: SHA-256 of the aligned rows, on which P depends, too.
        mask_rows: the largest number of rows in one block of P.
    """
    blocks = _make_mask_blocks(len(table_NF), row_mask_seed, people_digest, mask_rows)
    return np.concatenate([mask_bb @ table_NF[rows] for rows, mask_bb in blocks])


def _unmask_table_rows(
    table_NF: Floats, row_mask_seed: bytes, people_digest: bytes, *, mask_rows: int
) -> Floats:
    """Return P^T X for a table X, N rows of F features, with the orthogonal row mask P, which the
    seed determines. This undoes `mask_table_rows` with the same arguments, since P^T P = I.

    `row_mask_seed`: the dealer's secret bytes for P. `people_digest`: SHA-256 of the aligned rows.
    `mask_rows`: the largest number of rows in one block of P.
    """
    blocks = _make_mask_blocks(len(table_NF), row_mask_seed, people_digest, mask_rows)
    return np.concatenate([mask_bb.T @ table_NF[rows] for rows, mask_bb in blocks])


def _make_mask_blocks(
    row_count: int, row_mask_seed: bytes, people_digest: bytes, mask_rows: int
) -> Iterator[tuple[slice, Floats]]:
    """Yield each block of the block-diagonal row mask P: the slice of rows that the block mixes, at
    most `mask_rows`, and an orthogonal matrix of b rows and columns, as many as the slice has rows.

    Args:
        row_count: the number of all rows.
        row_mask_seed: the dealer's secret bytes, from which P is derived.
        people_digest: SHA-256 of the aligned rows, from which P is derived, too.
        mask_rows: the largest number of rows in one block.
    """
    start = 0
    for block_index, block_size in enumerate(split_rows(row_count, mask_rows)):
        mask_bb = draw_orthogonal(
            block_size, row_mask_seed, b"rows", people_digest, block_index.to_bytes(8, "big")
        )
        yield slice(start, start + block_size), mask_bb
        start += block_size


# The messages: layout, big endian: magic, version, kind, place, digest of the agreement, people;
# then the body, little endian, and nothing after. `place` is that of the owner who sends or gets
# it. `people` is the digest of whose rows these are, and zeros in what is dealt. How many rows
# follows from the length.


class MessageKind(IntEnum):
    """The kinds of messages of a decomposition."""

    MASKS = 1  # dealer to an owner: a seed of P, and Q_i
    TABLE = 2  # an owner to the server: P X_i Q_i
    VECTORS = 3  # server to receiver: P U


def _is_bounded(matrix: Floats) -> bool:
    """Return whether all numbers are small enough that their sums and squares are finite."""
    return bool((np.abs(matrix) <= _MAX_MAGNITUDE).all())


@dataclass(frozen=True, eq=False)
class SvdMessage:
    """A decoded message of a decomposition.

    Attributes:
        people_digest: SHA-256 of the aligned rows; zeros in MASKS.
        row_mask_seed: 32 secret bytes from which the row mask P is derived, in MASKS; else empty.
        matrix: the numbers, magnitudes up to 1e100, a copy: an owner's rows of the column mask Q
            (MASKS), a masked table (TABLE), or masked singular vectors (VECTORS).
    """

    people_digest: bytes
    row_mask_seed: bytes = field(repr=False)
    matrix: Floats = field(repr=False)


class SvdFrames:
    """The writer and checker of the messages of one decomposition."""

    def __init__(self, agreement: SvdAgreement) -> None:
        """Write and check messages under this agreement."""
        self._agreement = agreement

    def pack_matrix(
        self,
        kind: MessageKind,
        matrix: Floats,
        *,
        owner: str,
        people_digest: bytes = _NO_PEOPLE_DIGEST,
        row_mask_seed: bytes = b"",
    ) -> bytes:
        """Encode a message with a matrix: header, seed, the numbers in float64.

        Args:
            kind: what the message is: masks, a masked table, or singular vectors.
            matrix: the numbers that the message carries, (rows, columns).
            owner: the owner that sends or gets the message.
            people_digest: SHA-256 of the aligned rows, the same at all owners; not in MASKS.
            row_mask_seed: 32 secret bytes from which the row mask P is derived; only in MASKS, else
                empty.
        """
        return (
            self._pack_header(kind, owner, people_digest)
            + row_mask_seed
            + matrix.astype("<f8").tobytes()
        )

    def parse_message(
        self, frame: bytes, kind: MessageKind, sender: str, *, owner: str
    ) -> SvdMessage:
        """Decode a message of this kind.

        Args:
            frame: the bytes of the message.
            kind: kind that the message must have.
            sender: the party that sent it, for errors.
            owner: the owner that sent it, or to whom it was sent.

        Raises RemoteProtocolError: the message has another kind, agreement, owner or size, or
        numbers that are not finite or too large.
        """
        if type(frame) is not bytes:
            raise LocalProtocolError(
                f"a frame of a decomposition is bytes, got {type(frame).__name__} from {sender}"
            )
        self._check_header(frame, kind, sender, owner)
        # The last field of the header.
        people_digest = frame[_HEADER.size - len(_NO_PEOPLE_DIGEST) : _HEADER.size]
        seed_bytes = KEY_BYTES if kind is MessageKind.MASKS else 0
        matrix_start = _HEADER.size + seed_bytes
        row_mask_seed = frame[_HEADER.size : matrix_start]
        matrix = self._parse_matrix(frame[matrix_start:], kind, sender, owner)
        return SvdMessage(people_digest, row_mask_seed, matrix)

    def _check_header(self, frame: bytes, kind: MessageKind, sender: str, owner: str) -> None:
        """Raise RemoteProtocolError, which names the field that differs, unless the header of a
        message has this kind, owner and agreement.
        """
        if len(frame) < _HEADER.size:
            raise RemoteProtocolError(
                f"{sender} sent {len(frame)} bytes, too few for {kind.name}; it was cut"
            )
        header = _HEADER.unpack_from(frame)
        # The digest of people is compared by the caller; masks are dealt before it is known.
        people_digest = _NO_PEOPLE_DIGEST if kind is MessageKind.MASKS else header[-1]
        expected_header = _HEADER.unpack(self._pack_header(kind, owner, people_digest))
        for field_name, value, expected in zip(
            _HEADER_FIELDS, header, expected_header, strict=True
        ):
            if value != expected:
                raise RemoteProtocolError(
                    f"{sender} sent no {kind.name} of this decomposition: its {field_name} "
                    "differs; it is another message, or made under another agreement"
                )

    def _parse_matrix(self, body: bytes, kind: MessageKind, sender: str, owner: str) -> Floats:
        """Decode the matrix of a message, which follows header and seed, (rows, columns). The kind
        and owner of the message decide how many rows and columns it may have.

        Raises RemoteProtocolError: the matrix has other numbers of rows or columns, or numbers that
        are not finite or beyond 1e100; the error names `sender`.
        """
        agreement = self._agreement
        column_count = agreement.vectors if kind is MessageKind.VECTORS else agreement.columns
        row_count, bytes_left = divmod(len(body), _NUMBER_BYTES * column_count)
        min_rows = agreement.vectors
        max_rows = agreement.max_rows
        if kind is MessageKind.MASKS:  # exactly one row for each feature of the owner
            own_feature_count = agreement.features[agreement.find_position(owner)]
            min_rows = own_feature_count
            max_rows = own_feature_count
        if bytes_left or not min_rows <= row_count <= max_rows:
            raise RemoteProtocolError(
                f"{sender} sent a body of {len(body)} bytes, expected {kind.name} of {min_rows} to "
                f"{max_rows} rows of {column_count} numbers; it was cut or padded"
            )
        matrix = (
            np.frombuffer(body, dtype="<f8").reshape(row_count, column_count).astype(np.float64)
        )
        if not _is_bounded(matrix):
            raise RemoteProtocolError(
                f"{sender} sent {kind.name} with numbers that are none, or beyond "
                f"{_MAX_MAGNITUDE:g}"
            )
        return matrix

    def _pack_header(self, kind: MessageKind, owner: str, people_digest: bytes) -> bytes:
        """Return the header of a message to or from one owner; `people_digest` is SHA-256 of the
        aligned rows, zeros in MASKS.
        """
        agreement = self._agreement
        position = agreement.find_position(owner)
        return _HEADER.pack(_MAGIC, _VERSION, kind, position, agreement.digest, people_digest)


class _SvdRole(KeepsSecrets):
    """Base of the roles of a decomposition; each plays its part once."""

    def __init__(self, agreement: SvdAgreement, me: str) -> None:
        """Make the role of the party `me`."""
        self.agreement = agreement
        self.me = me
        self._frames = SvdFrames(agreement)
        self._fork_check = ForkCheck(f"{me}: this role of a decomposition")
        self._is_used = False

    def _require_first_use(self) -> None:
        """Mark the role as used. Raises LocalProtocolError: the role was used before, or this is a
        forked process.
        """
        self._fork_check.require_own_process()
        if self._is_used:
            raise LocalProtocolError(
                f"{self.me} played its part of {self.agreement.session!r} already; masks are used "
                "once: agree on a new session"
            )
        self._is_used = True


class SvdDealer(_SvdRole):
    """The dealer's role: it draws the masks, sends each owner its own, and gets no message."""

    def __init__(self, agreement: SvdAgreement) -> None:
        super().__init__(agreement, agreement.dealer)

    def deal_masks(self) -> Iterator[Outgoing]:
        """Draw fresh masks and yield one message for each owner; once."""
        self._require_first_use()
        return self._make_messages(fresh_key(), fresh_key())

    def _make_messages(self, row_mask_seed: bytes, column_mask_key: bytes) -> Iterator[Outgoing]:
        """Yield, for each owner, the message with its masks: the seed of the row mask P, and the
        rows of the column mask Q that belong to its columns.

        `row_mask_seed`: 32 secret bytes that each owner expands to P. `column_mask_key`: 32 secret
        bytes from which Q is drawn here.
        """
        agreement = self.agreement
        mask_FF = draw_orthogonal(agreement.columns, column_mask_key, b"columns")
        for owner in agreement.owners:
            own_rows = mask_FF[agreement.get_columns(owner)]
            body = self._frames.pack_matrix(
                MessageKind.MASKS, own_rows, owner=owner, row_mask_seed=row_mask_seed
            )
            yield Outgoing(owner, body)


class SvdOwner(_SvdRole):
    """An owner's role: `take_masks`, then `mask_table`."""

    def __init__(self, agreement: SvdAgreement, me: str) -> None:
        super().__init__(agreement, me)
        agreement.find_position(me)
        self._masks: SvdMessage | None = None

    def take_masks(self, message: bytes) -> None:
        """Take the dealer's message with this owner's masks, once: the seed of the row
        mask P, and this owner's rows of the column mask Q.

        Raises:
            RemoteProtocolError: the message is malformed, or the rows of Q are not orthonormal.
            LocalProtocolError: this owner has its masks already.
        """
        agreement = self.agreement
        if self._masks is not None:
            raise LocalProtocolError(f"{self.me} holds its masks already")
        masks = self._frames.parse_message(
            message, MessageKind.MASKS, agreement.dealer, owner=self.me
        )
        _require_orthonormal(masks.matrix.T, agreement.dealer)
        self._masks = masks

    def mask_table(self, table_NF: Floats, people_digest: bytes) -> bytes:
        """Return the message to the server with this owner's masked table, P X_i Q_i: its table X_i
        with rows mixed by P and columns by Q_i. Called once.

        Args:
            table_NF: X_i, N rows to decompose by this owner's F columns, in the agreed order;
                float64, magnitudes up to 1e100.
            people_digest: 32-byte digest of these rows, the same at all owners.

        Raises LocalProtocolError: the table has another type, shape or range, the masks have not
        arrived, or the role was used.
        """
        agreement = self.agreement
        masks = self._require_masks()
        require_people(people_digest, "ordered rows to decompose")
        own_feature_count = agreement.features[agreement.find_position(self.me)]
        if (
            type(table_NF) is not np.ndarray
            or table_NF.dtype != np.float64
            or table_NF.ndim != 2
            or table_NF.shape[1] != own_feature_count
            or not agreement.vectors <= len(table_NF) <= agreement.max_rows
            or not _is_bounded(table_NF)
        ):
            raise LocalProtocolError(
                f"{self.me}: a table is an array of bounded float64 of {agreement.vectors} to "
                f"{agreement.max_rows} rows and {own_feature_count} columns, got "
                f"{getattr(table_NF, 'dtype', type(table_NF))} {np.shape(table_NF)}"
            )
        self._require_first_use()
        rotated_NF = table_NF @ masks.matrix
        masked_NF = mask_table_rows(
            rotated_NF, masks.row_mask_seed, people_digest, mask_rows=agreement.mask_rows
        )
        return self._frames.pack_matrix(
            MessageKind.TABLE, masked_NF, owner=self.me, people_digest=people_digest
        )

    def _require_masks(self) -> SvdMessage:
        """Return this owner's masks: the seed of the row mask P, and its rows of the column mask Q.
        Raises LocalProtocolError: the masks have not arrived yet, or this is a forked process.
        """
        self._fork_check.require_own_process()
        if self._masks is None:
            raise LocalProtocolError(f"{self.me} was dealt no masks yet")
        return self._masks


class SvdServer(_SvdRole):
    """The server's role: it adds the masked tables and decomposes the sum."""

    def __init__(self, agreement: SvdAgreement) -> None:
        super().__init__(agreement, agreement.server)

    def factor_tables(self, message_by_owner: Mapping[str, bytes]) -> bytes:
        """Add the masked tables, decompose the sum, and return the message to the receiver with its
        left singular vectors, P U (masked by the row mask P). Called once.

        `message_by_owner`: each owner's message with its masked table, by name.

        Raises RemoteProtocolError: a table is malformed, they have different rows, or the sum has
        no decomposition.
        """
        agreement = self.agreement
        require_all("a decomposition needs the tables of", message_by_owner, agreement.owners)
        first_owner, *other_owners = agreement.owners
        first_table = self._parse_table(message_by_owner[first_owner], first_owner)
        total_NF = first_table.matrix
        people_digest = first_table.people_digest
        for owner in other_owners:
            table = self._parse_table(message_by_owner[owner], owner)
            if table.people_digest != people_digest or len(table.matrix) != len(total_NF):
                raise RemoteProtocolError(
                    f"{first_owner} and {owner} sent tables of different rows; one of them "
                    "answered another request"
                )
            total_NF += table.matrix
        vectors_ND = self._compute_vectors(total_NF)
        self._require_first_use()
        return self._frames.pack_matrix(
            MessageKind.VECTORS, vectors_ND, owner=agreement.receiver, people_digest=people_digest
        )

    def _parse_table(self, frame: bytes, owner: str) -> SvdMessage:
        """Decode the message with the masked table of one owner."""
        return self._frames.parse_message(frame, MessageKind.TABLE, owner, owner=owner)

    def _compute_vectors(self, masked_NF: Floats) -> Floats:
        """Return the first D left singular vectors of the sum of the masked tables, (N, D), with
        zeros beyond its numerical rank.

        `masked_NF`: the sum, N rows of F columns.

        Raises RemoteProtocolError: the sum has no decomposition.
        """
        vector_count = self.agreement.vectors
        try:
            left_vectors, singular_values, _ = np.linalg.svd(masked_NF, full_matrices=False)
        except np.linalg.LinAlgError as error:
            raise RemoteProtocolError(
                "the sum of the masked tables has no decomposition; an owner sent other numbers "
                "than a table"
            ) from error
        # The threshold of `numpy.linalg.matrix_rank`: smaller values come from rounding alone.
        rank_threshold = singular_values[0] * max(masked_NF.shape) * np.finfo(np.float64).eps
        is_in_rank_D = singular_values[:vector_count] > rank_threshold
        vectors_ND: Floats = left_vectors[:, :vector_count] * is_in_rank_D
        return vectors_ND


class SvdReceiver(SvdOwner):
    """The active's role: that of an owner, and then `open_vectors`."""

    def __init__(self, agreement: SvdAgreement) -> None:
        super().__init__(agreement, agreement.receiver)
        self._has_opened_vectors = False

    def open_vectors(self, message: bytes, people_digest: bytes, *, row_count: int) -> Floats:
        """Remove the row mask P from the server's message, and return the left singular vectors U
        of the joint table, (N, D): orthonormal columns, largest singular values first. Called once.

        Columns beyond the numerical rank of the joint table are zeros. The number of largest
        magnitude in each column is positive, which fixes the sign.

        Args:
            message: the server's message with P U.
            people_digest: SHA-256 of the aligned rows, the same at all owners.
            row_count: N, how many rows there must be.

        Raises:
            RemoteProtocolError: the message is malformed, about other people, or its columns are
                not orthonormal.
            LocalProtocolError: this party sent no table yet, or called this before.
        """
        agreement = self.agreement
        masks = self._require_masks()
        has_sent_table = self._is_used
        if not has_sent_table or self._has_opened_vectors:
            raise LocalProtocolError(
                f"{self.me} sent no table yet, or opened its answer; each is once"
            )
        answer = self._frames.parse_message(
            message, MessageKind.VECTORS, agreement.server, owner=self.me
        )
        if answer.people_digest != people_digest or len(answer.matrix) != row_count:
            raise RemoteProtocolError(
                f"{agreement.server} sent {len(answer.matrix)} rows of vectors, expected "
                f"{row_count}, of the people asked for"
            )
        is_nonzero_D = np.abs(answer.matrix).max(axis=0) > 0
        _require_orthonormal(answer.matrix[:, is_nonzero_D], agreement.server)
        has_vector_after_zeros = (is_nonzero_D[1:] > is_nonzero_D[:-1]).any()
        if has_vector_after_zeros:
            raise RemoteProtocolError(f"{agreement.server} sent a vector after one of zeros")
        self._has_opened_vectors = True
        vectors_ND = _unmask_table_rows(
            answer.matrix, masks.row_mask_seed, people_digest, mask_rows=agreement.mask_rows
        )
        largest_row_D = np.abs(vectors_ND).argmax(axis=0)
        largest_1D = np.take_along_axis(vectors_ND, largest_row_D[None], axis=0)
        signs_1D = np.where(largest_1D < 0, -1.0, 1.0)
        return np.asarray(vectors_ND * signs_1D, dtype=np.float64)


def _require_orthonormal(vectors: Floats, sender: str) -> None:
    """Raise RemoteProtocolError, which names `sender`, unless the columns of `vectors`, (N, D), are
    orthonormal to within 1e-8.
    """
    deviation = np.abs(vectors.T @ vectors - np.eye(vectors.shape[1]))
    if not (deviation < _ORTHONORMAL_TOLERANCE).all():
        raise RemoteProtocolError(
            f"{sender} sent vectors that are not orthonormal; what it drew or computed is not what "
            "was agreed"
        )
