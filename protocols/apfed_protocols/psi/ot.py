"""Private set intersection without a dealer: an OPRF from OT extension, checked by a linear code.

Run by: the active as the hub, each passive as a member, over authenticated and encrypted links.
Protects from: parties that send what they like, but for what `leaks` and Security below say.
With each member apart, where C is the code of `apfed_protocols.psi.code` (85 bits to 512, distance
128), and * between words is bit by bit:

1. HELLO, CHOICES. By 512 base OTs (`apfed_protocols.psi.base_ot`) the hub gets two keys a column,
   the member the one that its bit of s chooses. The hub names a key, under which H(x) has 128 bits,
   and encodes its set as a store D with Decode(D, x) = H(x), of which 85 bits count
   (`apfed_protocols.psi.store`). 128 random rows follow the store.
2. VECTOR. The keys expand to columns; T0 and T1 are the matrices of those of the hub, a row for
   each row of D. It sends U = T0 + T1 + C(D). The member takes, of each column, its own if its bit
   of s is 0, and else adds U to it: these are the columns of Q = T0 + C(D) * s.
3. CHALLENGE, PROOF. The member names a key, of which GHASH hashes columns to 128 bits. The hub
   sends the hash of each column of T0 and of D; the member checks that of its columns, since
   hash(Q) = hash(T0) + C(hash(D)) * s. The random rows hide what the hash would tell of D.
4. TAGS. The member tags each of its IDs by F(y) = hash(Decode(Q, y) + C(H(y)) * s, H(y)), in a
   random order. The hub tags its own by hash(Decode(T0, x), H(x)), which is F(x). For another ID it
   lacks C(z) * s with z not 0, at least 128 bits of s.
5. ROWS, DONE or REFUSAL: it compares, and opens what all share; see `open_rows`.

Security: 128 bits against computing, 40 against chance. The OPRF holds against either party if it
deviates, with all hashes as random oracles, AES as a pseudorandom generator, and the gap
Diffie-Hellman assumption. What one that deviates gets:

- The hub, whose U is no code word in c columns, passes the check where it guesses the bits of s
  there: it learns c bits of s with probability 2^-c, and is refused else, before any tag was sent.
  It then lacks 128 - c bits, so that the chance to tag one ID more stays 2^-128. With up to 2^20
  IDs no other error passes but with a chance of 2^-40: parity checks of U that have a rank of 74 or
  more need as many guesses, and GHASH keeps fewer columns apart but with that chance.
- The hub tries out one ID for each cell of its store, 1.3 n + 88 of an announced n. Each one more
  takes guessed IDs whose rows and 85 bits add up to nothing: lists of 2^20 of them or more (Wagner,
  CRYPTO 2002). Counting alone bounds this: no store holds more than 1.1 IDs a cell of 10^7 guessed
  ones, or 1.4 of 2^40, of sets of 100,000.
- A member's tags are those of another set of its, but for pairs of IDs that it searched for until
  their tags were equal (2^40 hashes a pair where tags have 10 bytes). What it changes in transfers
  or tags makes IDs of its own list fail, and tells it nothing: the hub answers by the common rows
  alone.
- Nobody checks the last message: the hub may open fewer common IDs than there are to a member, or
  others of the member's list.

Where the parties agreed on sizes, the store is as large as for the agreed size, and a smaller set
of a member fills its tags up with random ones.

Source: Kolesnikov, Kumaresan, Rosulek and Trieu, CCS 2016 (OPRF from OT extension); Orru, Orsini
and Scholl, CT-RSA 2017 (linear code, consistency check); Pinkas, Rosulek, Trieu and Yanai,
EUROCRYPT 2020 (one store for a whole set, malicious parties).
Deviations: the check hashes columns by GHASH (NIST SP 800-38D) in place of random subsets of rows,
as Roy's (CRYPTO 2022) does with another universal hash; the store is that of Garimella et al.
(CRYPTO 2021), and the tag hashes H(x), too.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import ClassVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from apfed_protocols.conversation import Conversation
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import base_ot, code
from apfed_protocols.psi.hashing import BITS, transpose_bits
from apfed_protocols.psi.interface import Desk as AnyDesk
from apfed_protocols.psi.interface import (
    Guesses,
    Inbox,
    IntersectionAgreement,
    IntersectionResult,
    Output,
    ResumableIntersection,
    Script,
    ScriptedIntersection,
    Turn,
    digest_each,
    message_bytes,
    open_rows,
    parse_opened_rows,
)
from apfed_protocols.psi.store import (
    Digests,
    Elements,
    Encoder,
    Rows,
    cells_for,
    decode_rows,
    digest_ids,
    targets_of,
)
from apfed_protocols.psi.vole import (
    Tags,
    add_random_tags,
    encode_values,
    match_tags,
    tag_bytes,
    vector_elements,
)
from apfed_protocols.randomness import (
    KEY_BYTES,
    derive_key,
    fresh_key,
    keystream,
    keystream_chunks,
    random_permutation,
)

Columns = NDArray[np.uint64]
"""Shape (columns, rows / 64)."""

HELLO = struct.Struct(f">{KEY_BYTES}sI{base_ot.POINT_BYTES}s")
SIZE = struct.Struct(">I")
CHOICES_BYTES = SIZE.size + 2 * base_ot.POINT_BYTES * code.LENGTH
HASH_BYTES = 16
PROOF_BYTES = HASH_BYTES * (code.LENGTH + code.DIMENSION)
_MASKS = 8 * HASH_BYTES
"""Rows: random ones after the store, the last block of each column, which hide its hash."""

_VERSION = 151
_BLOCK = 2**15  # rows that are worked on and sent at once
_EVALUATED = 2**16
_WORKING_BYTES = 2**25  # of one block of rows, in all its forms
_PERSON = b"apfed psi ot"


class Kind(IntEnum):
    HELLO = 1
    CHOICES = 2
    VECTOR = 3
    CHALLENGE = 4
    PROOF = 5
    TAGS = 6
    ROWS = 7
    DONE = 8
    REFUSAL = 9


class Desk(AnyDesk[Kind]):
    kinds = Kind
    version = _VERSION
    work = "evaluating its IDs"


class OtIntersection(ScriptedIntersection, ResumableIntersection):
    """The backend `ot`: little computing, no helper party, about as many bytes as `ecdh`.

    What it reveals is in `leaks`.
    """

    name: ClassVar[str] = "ot"
    needs_dealer: ClassVar[bool] = False
    pairwise: ClassVar[bool] = True
    outputs: ClassVar[frozenset[Output]] = frozenset({Output.ROWS, Output.HUB_ROWS})
    leaks: ClassVar[tuple[str, ...]] = (
        "The hub learns its pairwise intersection with every member, even when it is refused.",
        "A member learns which of its own IDs all parties share, or that these are too few.",
    )

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return the guesses: the hub has one a cell of its store, a member one a tag."""
        return Guesses(hub=vector_elements(maximum_ids), member=maximum_ids)

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the bytes of memory that a peer's announced number of IDs makes this party use.

        A member holds the hub's vector as it came, and what it opens it to, each twice at most; the
        hub takes less to match as many tags.

        `own_size`: how many IDs this party has.
        """
        del own_size, members
        return 4 * vector_bytes(size) + _WORKING_BYTES

    @staticmethod
    def longest_message(ids: int) -> int:
        tags = tag_bytes(ids, ids) * ids
        return message_bytes(max(CHOICES_BYTES, PROOF_BYTES, vector_bytes(ids), tags))

    @property
    def longest(self) -> int:
        return self.longest_message(self.agreement.largest_size)

    def make_dealer(self, hub: str, members: Sequence[str]) -> Conversation:
        raise LocalProtocolError(
            f"an ot intersection has no dealer, only hub {hub} and members {', '.join(members)}"
        )

    def _hub_script(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> Script:
        """Play the hub: base OTs as the sender, one vector to each member, the proof, and the
        comparison of tags (steps 1 to 5 of the module's docstring).
        """
        desk = Desk(me, self.agreement, self.progress)
        agreement = self.agreement
        size = agreement.compute_announced_size(me, len(ids))
        secrets = {member: self._derive_secret(member) for member in members}
        own_secret = self._derive_secret("")
        key = derive_key(own_secret, b"ot key of the hash")
        senders = {
            member: base_ot.Sender(
                derive_key(secret, b"ot base"), session=_derive_base_session(agreement, me, member)
            )
            for member, secret in secrets.items()
        }
        hello = {member: HELLO.pack(key, size, senders[member].message) for member in members}
        yield Turn(desk.make_turn(Kind.HELLO, hello, ()).outgoing, ())
        digests = digest_ids(ids, key)  # while the members draw their points
        rows = Rows.from_digests(digests, cells_for(size))
        targets = targets_of(digests)
        del digests
        values = code.keep_message_bits(targets)
        store = encode_values(
            me,
            Encoder(rows, cells_for(size)),
            values,
            seed=derive_key(own_secret, b"ot store"),
        )
        inbox = yield Turn((), members)
        announced = {member: self._parse_size(desk, inbox, member) for member in members}
        extensions = {}
        own_tags = {}
        for member in members:
            points = inbox[member][-2 * base_ot.POINT_BYTES * code.LENGTH :]
            masked = add_random_rows(store, derive_key(secrets[member], b"ot masks"))
            extension = HubExtension(senders[member].compute_keys(points, receiver=member), masked)
            vector, known = extension.make_vector()
            sending = desk.make_turn(Kind.VECTOR, {member: vector}, ())
            del vector
            yield Turn(sending.outgoing, ())
            del sending
            tagger = Tagger(
                _derive_output_key(agreement, key, member), tag_bytes(size, announced[member])
            )
            own_tags[member] = tagger.tag_known_ids(known[: vector_elements(size)], rows, targets)
            extensions[member] = extension
            del known
        del rows, targets, values, store
        inbox = yield Turn((), members)
        proofs = {}
        for member in members:
            challenge = desk.parse_message(inbox, member, Kind.CHALLENGE, KEY_BYTES)
            proofs[member] = extensions.pop(member).prove(challenge)
        inbox = yield desk.make_turn(Kind.PROOF, proofs, members)
        places = {}
        for member in members:
            length = tag_bytes(size, announced[member])
            body = desk.parse_message(inbox, member, Kind.TAGS, length * announced[member])
            member_tags = np.frombuffer(body, np.uint8).reshape(-1, length)
            places[member] = match_tags(own_tags.pop(member), member_tags, sender=member)
            desk.report_progress(len(places), len(members))
        return (yield from open_rows(desk, places))

    def _member_script(self, me: str, hub: str, ids: Sequence[bytes]) -> Script:
        """Play a member: base OTs as the receiver, the check of the hub's vector, the own tags, and
        what the hub opens (steps 1 to 5 of the module's docstring).
        """
        desk = Desk(me, self.agreement, self.progress)
        agreement = self.agreement
        size = agreement.compute_announced_size(me, len(ids))
        secret = self._derive_secret(hub)
        choices = keystream(secret, b"ot choices", length=code.LENGTH // 8)
        receiver = base_ot.Receiver(
            np.unpackbits(np.frombuffer(choices, np.uint8), bitorder="little").tolist(),
            derive_key(secret, b"ot base"),
            session=_derive_base_session(agreement, hub, me),
        )
        sent = {hub: SIZE.pack(size) + receiver.message}
        inbox = yield desk.make_turn(Kind.CHOICES, sent, [hub])
        key, hub_size, point = HELLO.unpack(desk.parse_message(inbox, hub, Kind.HELLO, HELLO.size))
        self._check_size(hub, hub_size)
        extension = MemberExtension(receiver.compute_keys(point, sender=hub), choices)
        digests = digest_ids(ids, key)
        inbox = yield Turn((), [hub])
        vector = desk.parse_message(inbox, hub, Kind.VECTOR, vector_bytes(hub_size))
        challenge = derive_key(secret, b"ot challenge")
        yield Turn(desk.make_turn(Kind.CHALLENGE, {hub: challenge}, ()).outgoing, ())
        extended = extension.open_vector(vector, challenge)[: vector_elements(hub_size)]
        del inbox, vector
        inbox = yield Turn((), [hub])
        extension.check_proof(desk.parse_message(inbox, hub, Kind.PROOF, PROOF_BYTES), hub)
        tagger = Tagger(_derive_output_key(agreement, key, me), tag_bytes(hub_size, size))
        tags = tagger.tag_ids(digests, extended, extension.choices, desk.report_progress)
        del digests, extended
        order = random_permutation(size, key=derive_key(secret, b"ot order"))
        tags = add_random_tags(tags, size, seed=derive_key(secret, b"ot filling"))
        sent = {hub: tags.take(order, axis=0).tobytes()}
        inbox = yield desk.make_turn(Kind.TAGS, sent, [hub])
        opened = parse_opened_rows(desk, inbox, hub, order, hub_size)
        if (
            isinstance(opened, IntersectionResult)
            and opened.rows is not None
            and (opened.rows >= len(ids)).any()
        ):
            raise RemoteProtocolError(f"{hub} opened a place at which {me} has no ID")
        return opened

    def _derive_secret(self, peer: str) -> bytes:
        """Return the secret for the messages with one peer; with "" that of this party's
        own set.
        """
        if self.secret is None:
            return fresh_key()
        return derive_key(self.secret, b"ot", self.agreement.digest, peer.encode())

    def _parse_size(self, desk: Desk, inbox: Inbox, member: str) -> int:
        """Return the size that a member announces; checked."""
        (size,) = SIZE.unpack_from(desk.parse_message(inbox, member, Kind.CHOICES, CHOICES_BYTES))
        self._check_size(member, size)
        return int(size)

    def _check_size(self, peer: str, size: int) -> None:
        """Raise RemoteProtocolError for a size other than agreed or expected."""
        self.agreement.check_announced_sizes(peer, [size], [peer])
        self.require_expected_size(peer, size)


def vector_bytes(hub_size: int) -> int:
    """Return the bytes of U: 64 a row of D."""
    return extension_bytes(vector_elements(hub_size))


def extension_bytes(cells: int) -> int:
    """Return the bytes of U for a store, or another list of messages, of so many rows."""
    return _count_rows(cells) * code.LENGTH // 8


def _count_rows(cells: int) -> int:
    """Return the rows of D: the store in whole blocks of a hash, and one block that hides it."""
    return _MASKS * (-(-cells // _MASKS) + 1)


def add_random_rows(store: Elements, seed: bytes) -> Elements:
    """Return the messages of the code: the store and random rows after it, 85 bits each."""
    count = _count_rows(len(store)) - len(store)
    random_rows = np.frombuffer(keystream(seed, length=16 * count), "<u8").reshape(-1, 2)
    return code.keep_message_bits(np.concatenate([store, random_rows]))


def _derive_base_session(agreement: IntersectionAgreement, hub: str, member: str) -> bytes:
    """Return the 32 bytes that name the base OTs of one pair."""
    return derive_key(agreement.digest, b"ot base session", hub.encode(), member.encode())


def _derive_output_key(agreement: IntersectionAgreement, key: bytes, member: str) -> bytes:
    """Return the key of the hash F for one member."""
    return derive_key(key, b"ot output", agreement.digest, member.encode())


class HubExtension:
    """The hub's end of the extension with one member: it knows T0, and chooses D.

    Args:
        keys: two for each column; messages: D, (rows, 2), of which 85 bits count.
    """

    def __init__(self, keys: Sequence[tuple[bytes, bytes]], messages: Elements) -> None:
        self._zeros = [pair[0] for pair in keys]
        self._keys_of_one = [pair[1] for pair in keys]
        self._messages = messages

    def make_vector(self) -> tuple[bytes, Elements]:
        """Return U, block by block and in each column by column, and T0, (rows, 8)."""
        count = len(self._messages)
        vector = np.empty(count * code.WORDS, "<u8")
        known = np.empty((count, code.WORDS), np.uint64)
        streams = (expand_columns(keys, count) for keys in (self._zeros, self._keys_of_one))
        for block, zeros, ones in zip(split_blocks(count), *streams, strict=True):
            masked = rows_to_columns(code.encode_words(self._messages[block]))
            masked ^= zeros
            masked ^= ones
            vector[slice_words(block)] = masked.ravel()
            known[block] = columns_to_rows(zeros)
        return vector.tobytes(), known

    def prove(self, challenge: bytes) -> bytes:
        """Return the hash of each column of T0, and of each that counts of D.

        `challenge`: random bytes from the member, drawn after D was sent.
        """
        count = len(self._messages)
        known = ColumnHash(challenge, code.LENGTH)
        chosen = ColumnHash(challenge, code.DIMENSION)
        columns = expand_columns(self._zeros, count)
        for block, zeros in zip(split_blocks(count), columns, strict=True):
            known.update(zeros)
            chosen.update(rows_to_columns(self._messages[block])[: code.DIMENSION])
        return known.finish().tobytes() + chosen.finish().tobytes()


class MemberExtension:
    """The member's end: it knows one key a column, and with U the matrix Q = T0 + C(D) * s.

    Args:
        keys: one for each column; choices: s, 64 bytes.

    Attributes:
        choices: s as words, (8,).
    """

    def __init__(self, keys: Sequence[bytes], choices: bytes) -> None:
        """Prepare the member's end of the OT extension: one 64-bit mask a column, all ones where s
        is 1.

        `keys`: of the base transfers, one for each column. `choices`: s, the member's secret bits,
        64 bytes.
        """
        self._keys = keys
        self.choices = np.frombuffer(choices, "<u8")
        bits = np.unpackbits(self.choices.view(np.uint8), bitorder="little")
        self._choice_masks = (np.uint64(0) - bits.astype(np.uint64))[:, None]
        self._hashed: Columns | None = None

    def open_vector(self, vector: bytes, challenge: bytes) -> Elements:
        """Return Q, (rows, 8); its columns are hashed for `check_proof`.

        `vector`: D, which the hub sent. `challenge`: random bytes from the member, drawn after D
        was sent.
        """
        words = np.frombuffer(vector, "<u8")
        count = len(words) // code.WORDS
        opened = np.empty((count, code.WORDS), np.uint64)
        hashed = ColumnHash(challenge, code.LENGTH)
        columns = expand_columns(self._keys, count)
        for block, own in zip(split_blocks(count), columns, strict=True):
            own ^= words[slice_words(block)].reshape(own.shape) & self._choice_masks
            hashed.update(own)
            opened[block] = columns_to_rows(own)
        self._hashed = hashed.finish()
        return opened

    def check_proof(self, proof: bytes, hub: str) -> None:
        """Check hash(Q) = hash(T0) + C(hash(D)) * s. Raises RemoteProtocolError: it is not so.

        `proof`: the hub's hashes. `hub`: named in the error.
        """
        assert self._hashed is not None
        hashes = np.frombuffer(proof, "<u8").reshape(-1, HASH_BYTES // 8)
        chosen = np.zeros((2 * BITS, hashes.shape[1]), np.uint64)
        chosen[: code.DIMENSION] = hashes[code.LENGTH :]
        encoded = rows_to_columns(code.encode_words(columns_to_rows(chosen)))
        expected = hashes[: code.LENGTH] ^ (encoded & self._choice_masks)
        if not hmac.compare_digest(expected.tobytes(), self._hashed.tobytes()):
            raise RemoteProtocolError(
                f"{hub} sent a vector that is of no store, or does not prove it; it does not "
                "follow the protocol, and was sent no tag"
            )


class ColumnHash:
    """A hash of columns to 128 bits each that is linear over GF(2), by GHASH under a public key.

    Two different columns of b blocks of 16 bytes have one hash under at most b + 1 of 2^128 keys.
    AES-GCM authenticates a column by GHASH plus a constant, which is the tag of zeros.
    """

    def __init__(self, key: bytes, count: int) -> None:
        mode = modes.GCM(bytes(12))  # no secret is encrypted: key and nonce are public
        self._columns = [Cipher(algorithms.AES(key), mode).encryptor() for _ in range(count + 1)]

    def update(self, columns: Columns) -> None:
        """Continue each column by so many rows, a multiple of 128 unless they are the last."""
        *hashers, constant = self._columns
        for hasher, column in zip(hashers, columns.view(np.uint8), strict=True):
            hasher.authenticate_additional_data(column.data)
        constant.authenticate_additional_data(bytes(columns[0].nbytes))

    def finish(self) -> Columns:
        """Return the hashes, (columns, 2)."""
        for hasher in self._columns:
            hasher.finalize()
        tags = np.frombuffer(b"".join(hasher.tag for hasher in self._columns), "<u8")
        tags = tags.reshape(-1, HASH_BYTES // 8)
        hashes: Columns = tags[:-1] ^ tags[-1]
        return hashes


class Tagger:
    """The hash of F: BLAKE2b under a key of this intersection and member, random oracle here."""

    def __init__(self, key: bytes, length: int) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=length, person=_PERSON)

    def tag_known_ids(self, known: Elements, rows: Rows, targets: Elements) -> Tags:
        """Return the tags of the hub's own IDs, from T0."""
        return np.concatenate(
            [
                self.hash_rows(decode_rows(known, rows[chunk]), targets[chunk])
                for chunk in _split_ids(len(rows))
            ]
        )

    def tag_ids(
        self,
        digests: Digests,
        extended: Elements,
        choices: NDArray[np.uint64],
        report: Callable[[int, int], None],
    ) -> Tags:
        """Return the tags of a member's IDs, from Q and s.

        `choices`: s as words. `report`: called with (IDs done, all).
        """
        cells = cells_for(0) + len(extended) - vector_elements(0)
        tags = []
        for chunk in _split_ids(len(digests)):
            part = digests[chunk]
            targets = targets_of(part)
            values = decode_rows(extended, Rows.from_digests(part, cells))
            values ^= code.encode_words(code.keep_message_bits(targets)) & choices
            tags.append(self.hash_rows(values, targets))
            report(min(chunk.stop, len(digests)), len(digests))
        return np.concatenate(tags)

    def hash_rows(self, values: Elements, targets: Elements) -> Tags:
        """Return the tags of rows of words, joined with their targets."""
        hashed = np.concatenate([values, targets], axis=1).astype("<u8", copy=False)
        blocks: list[bytes] = hashed.view(f"V{hashed.itemsize * hashed.shape[1]}")[:, 0].tolist()
        return digest_each(blocks, self._keyed)


def _split_ids(count: int) -> Iterator[slice]:
    """Split so many IDs into pieces, one at least."""
    return (slice(start, start + _EVALUATED) for start in range(0, max(count, 1), _EVALUATED))


def split_blocks(rows: int) -> Iterator[slice]:
    """Split the rows into blocks that are computed and sent together."""
    return (slice(start, min(start + _BLOCK, rows)) for start in range(0, rows, _BLOCK))


def slice_words(block: slice) -> slice:
    """Return where a block of rows is in U."""
    return slice(block.start * code.WORDS, block.stop * code.WORDS)


def expand_columns(keys: Sequence[bytes], rows: int) -> Iterator[Columns]:
    """Yield what the keys expand to, block by block, a column for each key."""
    streams = [
        keystream_chunks(key, b"ot column", length=rows // 8, piece=_BLOCK // 8) for key in keys
    ]
    for pieces in zip(*streams, strict=True):
        yield np.stack([np.frombuffer(piece, "<u8") for piece in pieces])


def rows_to_columns(rows_Rw: Elements) -> Columns:
    """Turn rows of w words into columns, (64 w, R / 64).

    Bit q of word k of a column is of row 64 k + q.
    """
    count, words = rows_Rw.shape
    groups = np.ascontiguousarray(rows_Rw.reshape(count // BITS, BITS, words).transpose(1, 2, 0))
    transpose_bits(groups.reshape(BITS, -1))
    return np.ascontiguousarray(groups.swapaxes(0, 1)).reshape(BITS * words, count // BITS)


def columns_to_rows(columns: Columns) -> Elements:
    """Turn columns, (64 w, R / 64), into rows of w words, (R, w)."""
    words = len(columns) // BITS
    groups = np.ascontiguousarray(columns.reshape(words, BITS, -1).swapaxes(0, 1))
    transpose_bits(groups.reshape(BITS, -1))
    return np.ascontiguousarray(groups.transpose(2, 0, 1)).reshape(-1, words)
