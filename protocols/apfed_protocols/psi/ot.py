"""Private set intersection without a dealer: an OPRF from OT extension, checked by a linear code.

Run by: the active as the hub, each passive as a member, over authenticated and encrypted links.
Protects from: parties that send what they like, but for what `leaks` and Security below say. With
each member apart, where C is the code of `apfed_protocols.psi.linear_code` (85 bits to 512,
distance 128), and * between words is bit by bit:

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
5. ROWS, DONE or REFUSAL: it compares, and opens what all share; see `reveal_common_rows`.

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
from apfed_protocols.psi import base_ot, linear_code
from apfed_protocols.psi.hashing import WORD_BITS, transpose_bits
from apfed_protocols.psi.interface import (
    CoroutineIntersection,
    Guesses,
    IntersectionAgreement,
    Messages,
    Output,
    ResumableIntersection,
    RoleCoroutine,
    count_message_bytes,
    digest_each,
    parse_revealed_rows,
    require_own_rows,
    reveal_common_rows,
    wait_for,
)
from apfed_protocols.psi.interface import Endpoint as AnyEndpoint
from apfed_protocols.psi.store import (
    Digests,
    Elements,
    Encoder,
    Equations,
    count_cells,
    decode_values,
    digest_ids,
    extract_id_hashes,
)
from apfed_protocols.psi.vole import (
    Tags,
    add_random_tags,
    count_tag_bytes,
    count_vector_elements,
    encode_values,
    match_tags,
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
CHOICES_BYTES = SIZE.size + 2 * base_ot.POINT_BYTES * linear_code.LENGTH
COLUMN_HASH_BYTES = 16
PROOF_BYTES = COLUMN_HASH_BYTES * (linear_code.LENGTH + linear_code.DIMENSION)
_MASK_ROWS = 8 * COLUMN_HASH_BYTES
"""Random rows after the store: the last block of each column, which hide its hash."""

_VERSION = 151
_ROWS_PER_BLOCK = 2**15  # rows that are computed and sent at once
_IDS_PER_CHUNK = 2**16
_WORKING_BYTES = 2**25  # memory of one block of rows, in all its forms
_HASH_PERSONALISATION = b"apfed psi ot"


class Kind(IntEnum):
    """The kinds of messages of this backend."""

    HELLO = 1
    CHOICES = 2
    VECTOR = 3
    CHALLENGE = 4
    PROOF = 5
    TAGS = 6
    ROWS = 7
    DONE = 8
    REFUSAL = 9


class Endpoint(AnyEndpoint[Kind]):
    """A party's endpoint of this backend."""

    kinds = Kind
    version = _VERSION
    work = "evaluating its IDs"


class OtIntersection(CoroutineIntersection, ResumableIntersection):
    """The backend `ot`: little computing, no dealer, about as many bytes as `ecdh`; what it reveals
    is in `leaks`.
    """

    name: ClassVar[str] = "ot"
    needs_dealer: ClassVar[bool] = False
    has_pairwise_leak: ClassVar[bool] = True
    outputs: ClassVar[frozenset[Output]] = frozenset({Output.ROWS, Output.HUB_ROWS})
    leaks: ClassVar[tuple[str, ...]] = (
        "The hub learns its pairwise intersection with every member, even when it is refused.",
        "A member learns which of its own IDs all parties share, or that these are too few.",
    )

    @staticmethod
    def max_guesses(maximum_ids: int) -> Guesses:
        """Return how many guessed IDs a party can test against another's set if it announces
        `maximum_ids` IDs and deviates from the protocol: the hub one ID for each cell of its store
        (oblivious key-value store), a member one ID for each tag.
        """
        return Guesses(hub=count_vector_elements(maximum_ids), member=maximum_ids)

    @classmethod
    def count_announced_bytes(
        cls, announced_size: int, *, own_size: int = 0, member_count: int = 1
    ) -> int:
        """Return the bytes of memory that a role allocates because a peer announces
        `announced_size` IDs; the other arguments do not matter.

        A member needs most: it has the hub's vector U and the matrix Q, which is as large, in
        memory, each in two copies at most. The hub needs less to match as many tags.
        """
        del own_size, member_count
        return 4 * count_vector_bytes(announced_size) + _WORKING_BYTES

    @staticmethod
    def compute_max_message_bytes(id_count: int) -> int:
        tags_bytes = count_tag_bytes(id_count, id_count) * id_count
        return count_message_bytes(
            max(CHOICES_BYTES, PROOF_BYTES, count_vector_bytes(id_count), tags_bytes)
        )

    @property
    def max_message_bytes(self) -> int:
        return self.compute_max_message_bytes(self.agreement.largest_size)

    def make_dealer(self, hub: str, members: Sequence[str]) -> Conversation:
        raise LocalProtocolError(
            f"an ot intersection has no dealer, only hub {hub} and members {', '.join(members)}"
        )

    def _run_hub(self, me: str, members: Sequence[str], ids: Sequence[bytes]) -> RoleCoroutine:
        """Run the role of the hub `me` (the active): base oblivious transfers as the sender, one
        vector U to each member (a passive), the proof, and the comparison of tags (steps 1 to 5 of
        the module's docstring). Large arrays are deleted as soon as they are not needed, to save
        memory.

        `ids`: the hub's encoded IDs.
        """
        endpoint = Endpoint(me, self.agreement, self.progress)
        agreement = self.agreement
        announced_size = agreement.compute_announced_size(me, len(ids))
        secret_by_member = {member: self._derive_secret(member) for member in members}
        own_secret = self._derive_secret("")
        hash_key = derive_key(own_secret, b"ot key of the hash")
        senders = {
            member: base_ot.Sender(
                derive_key(secret, b"ot base"), session=_derive_base_session(agreement, me, member)
            )
            for member, secret in secret_by_member.items()
        }
        hello_bodies = {
            member: HELLO.pack(hash_key, announced_size, senders[member].message)
            for member in members
        }
        yield endpoint.make_round(Kind.HELLO, hello_bodies, awaited=())
        # Meanwhile the members compute their points.
        store_seed = derive_key(own_secret, b"ot store")
        equations, id_hashes, store = _encode_hub_ids(me, ids, announced_size, hash_key, store_seed)
        received = yield wait_for(members)
        member_sizes = {member: self._parse_size(endpoint, received, member) for member in members}
        tag_bytes_by_member = {
            member: count_tag_bytes(announced_size, member_size)
            for member, member_size in member_sizes.items()
        }
        extensions = {}
        own_tags = {}
        for member in members:
            points = received[member][-2 * base_ot.POINT_BYTES * linear_code.LENGTH :]
            messages = add_random_rows(store, derive_key(secret_by_member[member], b"ot masks"))
            extension = HubExtension(
                senders[member].compute_keys(points, receiver=member), messages
            )
            vector, t0 = extension.make_vector()
            vector_round = endpoint.make_round(Kind.VECTOR, {member: vector}, awaited=())
            del vector
            yield vector_round
            del vector_round
            output_key = _derive_output_key(agreement, hash_key, member)
            tagger = Tagger(output_key, tag_bytes_by_member[member])
            t0_of_store = t0[: count_vector_elements(announced_size)]  # without the random rows
            own_tags[member] = tagger.tag_hub_ids(t0_of_store, equations, id_hashes)
            extensions[member] = extension
            del t0, t0_of_store
        del equations, id_hashes, store
        received = yield wait_for(members)
        proofs = {}
        for member in members:
            challenge = endpoint.parse_message(received, member, Kind.CHALLENGE, KEY_BYTES)
            proofs[member] = extensions.pop(member).prove(challenge)
        received = yield endpoint.make_round(Kind.PROOF, proofs, awaited=members)
        positions = {}
        for member in members:
            tag_bytes = tag_bytes_by_member[member]
            body = endpoint.parse_message(
                received, member, Kind.TAGS, tag_bytes * member_sizes[member]
            )
            member_tags = np.frombuffer(body, np.uint8).reshape(-1, tag_bytes)
            positions[member] = match_tags(own_tags.pop(member), member_tags, sender=member)
            endpoint.report_progress(len(positions), len(members))
        return (yield from reveal_common_rows(endpoint, positions))

    def _run_member(self, me: str, hub: str, ids: Sequence[bytes]) -> RoleCoroutine:
        """Run the role of the member `me` (a passive): base oblivious transfers as the receiver,
        the check of the vector of the hub (the active), the tags of its IDs, and what the hub
        reveals (steps 1 to 5 of the module's docstring). Large arrays are deleted as soon as they
        are not needed, to save memory.

        `ids`: the member's encoded IDs.
        """
        endpoint = Endpoint(me, self.agreement, self.progress)
        agreement = self.agreement
        announced_size = agreement.compute_announced_size(me, len(ids))
        secret = self._derive_secret(hub)
        choices = keystream(secret, b"ot choices", length=linear_code.LENGTH // 8)
        receiver = base_ot.Receiver(
            np.unpackbits(np.frombuffer(choices, np.uint8), bitorder="little").tolist(),
            derive_key(secret, b"ot base"),
            session=_derive_base_session(agreement, hub, me),
        )
        size_and_points = SIZE.pack(announced_size) + receiver.message
        received = yield endpoint.make_round(Kind.CHOICES, {hub: size_and_points}, awaited=[hub])
        hello_body = endpoint.parse_message(received, hub, Kind.HELLO, HELLO.size)
        hash_key, hub_size, point = HELLO.unpack(hello_body)
        self._check_size(hub, hub_size)
        extension = MemberExtension(receiver.compute_keys(point, sender=hub), choices)
        digests = digest_ids(ids, hash_key)
        received = yield wait_for([hub])
        vector = endpoint.parse_message(received, hub, Kind.VECTOR, count_vector_bytes(hub_size))
        challenge = derive_key(secret, b"ot challenge")
        yield endpoint.make_round(Kind.CHALLENGE, {hub: challenge}, awaited=())
        q = extension.compute_matrix(vector, challenge)
        q_of_store = q[: count_vector_elements(hub_size)]  # without the random rows
        del received, vector, q
        received = yield wait_for([hub])
        extension.check_proof(endpoint.parse_message(received, hub, Kind.PROOF, PROOF_BYTES), hub)
        output_key = _derive_output_key(agreement, hash_key, me)
        tagger = Tagger(output_key, count_tag_bytes(hub_size, announced_size))
        tags = tagger.tag_member_ids(
            digests, q_of_store, extension.choices, endpoint.report_progress
        )
        del digests, q_of_store
        sent_rows = random_permutation(announced_size, key=derive_key(secret, b"ot order"))
        tags = add_random_tags(tags, announced_size, seed=derive_key(secret, b"ot filling"))
        shuffled_tags = tags.take(sent_rows, axis=0).tobytes()
        received = yield endpoint.make_round(Kind.TAGS, {hub: shuffled_tags}, awaited=[hub])
        result = parse_revealed_rows(endpoint, received, hub, sent_rows, hub_size)
        require_own_rows(result, len(ids), me=me, hub=hub)
        return result

    def _derive_secret(self, peer: str) -> bytes:
        """Return 32 secret bytes from which the randomness of messages with one peer is derived;
        with "" as `peer`, the randomness of the hub's store. They are fresh or, in a resumed
        attempt, the same as in the first attempt.
        """
        if self.secret is None:
            return fresh_key()
        return derive_key(self.secret, b"ot", self.agreement.digest, peer.encode())

    def _parse_size(self, endpoint: Endpoint, received: Messages, member: str) -> int:
        """Return the number of IDs that a member announces at the start of its CHOICES message (the
        points of the base oblivious transfers). Raises RemoteProtocolError: it is not the agreed or
        expected number.

        `received`: messages by sender.
        """
        choices_body = endpoint.parse_message(received, member, Kind.CHOICES, CHOICES_BYTES)
        (announced_size,) = SIZE.unpack_from(choices_body)
        self._check_size(member, announced_size)
        return int(announced_size)

    def _check_size(self, peer: str, announced_size: int) -> None:
        """Raise RemoteProtocolError if the number of IDs that `peer` announces is not the agreed or
        expected one.
        """
        self.agreement.check_announced_sizes(peer, [announced_size], [peer])
        self.require_expected_size(peer, announced_size)


def count_vector_bytes(hub_size: int) -> int:
    """Return the bytes of the vector U that the hub sends for a set of this size: 64 for each row
    of D, which consists of the store that encodes the set and of random rows.
    """
    return count_extension_bytes(count_vector_elements(hub_size))


def _encode_hub_ids(
    me: str, ids: Sequence[bytes], announced_size: int, hash_key: bytes, seed: bytes
) -> tuple[Equations, Elements, Elements]:
    """Encode the IDs of the hub `me` as a store D in which each ID x decodes to 85 bits of H(x).

    Args:
        me: the hub's name, for errors.
        ids: the hub's n encoded IDs.
        announced_size: the number of IDs that the hub announces, on which the store's size depends.
        hash_key: the key of the hash of IDs.
        seed: 32 secret bytes for the cells that no ID needs.

    Returns:
        The equations, which say which cells each ID selects; H(x) of each ID, 128 bits, (n, 2)
        words; and the store, (cells, 2) words.
    """
    cell_count = count_cells(announced_size)
    digests = digest_ids(ids, hash_key)
    equations = Equations.from_digests(digests, cell_count)
    id_hashes = extract_id_hashes(digests)
    del digests  # to save memory while the store is computed
    values = linear_code.mask_message_bits(id_hashes)
    return (
        equations,
        id_hashes,
        encode_values(me, Encoder(equations, cell_count), values, seed=seed),
    )


def count_extension_bytes(cell_count: int) -> int:
    """Return the bytes of the vector U that the hub sends for a list of `cell_count` messages of
    the linear code, such as the cells of a store: 64 for each message and each random row after
    them.
    """
    return _count_rows(cell_count) * linear_code.LENGTH // 8


def _count_rows(cell_count: int) -> int:
    """Return the number of rows of D for a store of this number of cells: the store, filled up to
    whole blocks of the column hash, and one more block of random rows, which hides what the hash
    would reveal about the store.
    """
    store_blocks = -(-cell_count // _MASK_ROWS)  # rounded up
    return _MASK_ROWS * (store_blocks + 1)


def add_random_rows(store: Elements, seed: bytes) -> Elements:
    """Return D, messages of the linear code of 85 bits each: the cells of a store and, after them,
    random rows expanded from a secret seed, which hide the hash of D's columns.
    """
    count = _count_rows(len(store)) - len(store)
    random_rows = np.frombuffer(keystream(seed, length=16 * count), "<u8").reshape(-1, 2)
    return linear_code.mask_message_bits(np.concatenate([store, random_rows]))


def _derive_base_session(agreement: IntersectionAgreement, hub: str, member: str) -> bytes:
    """Return the 32 bytes that identify the base oblivious transfers of hub and member at both."""
    return derive_key(agreement.digest, b"ot base session", hub.encode(), member.encode())


def _derive_output_key(agreement: IntersectionAgreement, hash_key: bytes, member: str) -> bytes:
    """Return the key of the hash that computes tags, the outputs of the oblivious PRF for one
    member, derived from the hub's `hash_key`.
    """
    return derive_key(hash_key, b"ot output", agreement.digest, member.encode())


class HubExtension:
    """The hub's role in the extension of oblivious transfers with one member: it knows the bit
    matrices T0 and T1, expanded from its keys, and chooses the messages D.

    Args:
        keys: both keys of each of the 512 base transfers, one transfer for each column.
        messages: D, the rows to transfer, two words each, (rows, 2), of which 85 bits count.
    """

    def __init__(self, keys: Sequence[tuple[bytes, bytes]], messages: Elements) -> None:
        """Store the keys from which T0 and T1 expand, and the messages D."""
        self._keys_of_t0 = [pair[0] for pair in keys]
        self._keys_of_t1 = [pair[1] for pair in keys]
        self._messages = messages

    def make_vector(self) -> tuple[bytes, Elements]:
        """Compute the hub's message of the OT extension.

        Returns:
            The message U = T0 + T1 + C(D), where C encodes each row of the hub's messages D by the
            linear code, and T0 and T1 are pseudorandom bit matrices; it is sent in blocks of rows,
            and column by column within a block. And T0, eight words a row, (rows, 8).
        """
        row_count = len(self._messages)
        vector = np.empty(row_count * linear_code.WORDS, "<u8")
        t0 = np.empty((row_count, linear_code.WORDS), np.uint64)
        t0_blocks = expand_columns(self._keys_of_t0, row_count)
        t1_blocks = expand_columns(self._keys_of_t1, row_count)
        for block, t0_columns, t1_columns in zip(
            split_blocks(row_count), t0_blocks, t1_blocks, strict=True
        ):
            u_columns = transpose_to_columns(linear_code.encode_words(self._messages[block]))
            u_columns ^= t0_columns
            u_columns ^= t1_columns
            vector[slice_words(block)] = u_columns.ravel()
            t0[block] = transpose_to_rows(t0_columns)
        return vector.tobytes(), t0

    def prove(self, challenge: bytes) -> bytes:
        """Return the proof that the vector U encodes some messages D: the hash of each of the 512
        columns of T0 (a bit matrix expanded from the hub's keys), and of each of the 85 columns of
        D (step 3 of the module's docstring).

        `challenge`: the key of the hash, which the member named after it had received U.
        """
        row_count = len(self._messages)
        t0_hash = ColumnHash(challenge, linear_code.LENGTH)
        message_hash = ColumnHash(challenge, linear_code.DIMENSION)
        t0_blocks = expand_columns(self._keys_of_t0, row_count)
        for block, t0_columns in zip(split_blocks(row_count), t0_blocks, strict=True):
            t0_hash.update(t0_columns)
            message_hash.update(
                transpose_to_columns(self._messages[block])[: linear_code.DIMENSION]
            )
        return t0_hash.finish().tobytes() + message_hash.finish().tobytes()


class MemberExtension:
    """A member's role in the extension of oblivious transfers: it knows one key for each column,
    from which it computes the matrix Q = T0 + C(D) * s once it has the hub's U (C encodes a row by
    the linear code, * is AND with the secret bits s).

    Args:
        keys: the chosen key of each of the 512 base transfers, one transfer for each column.
        choices: s, the member's secret bits, 64 bytes.

    Attributes:
        choices: s as words, (8,).
    """

    def __init__(self, keys: Sequence[bytes], choices: bytes) -> None:
        """Store the keys, the secret bits s, and a 64-bit mask for each column: all ones if its bit
        of s is 1, else zeros.
        """
        self._keys = keys
        self.choices = np.frombuffer(choices, "<u8")
        bits = np.unpackbits(self.choices.view(np.uint8), bitorder="little")
        # Modulo 2^64, 0 - 1 is a word of ones.
        self._choice_masks = (np.uint64(0) - bits.astype(np.uint64))[:, None]
        # The hash of each column of Q, set by `compute_matrix`.
        self._q_hashes: Columns | None = None

    def compute_matrix(self, vector: bytes, challenge: bytes) -> Elements:
        """Return the matrix Q = T0 + C(D) * s, eight words a row, (rows, 8), and store the hash of
        its columns for `check_proof`. T0 and D are known to the hub, C encodes a row by the linear
        code, and * is AND with the member's secret bits s.

        `vector`: U, as the hub sent it. `challenge`: the key of the hash, named to the hub only
        after U had arrived.
        """
        u_words = np.frombuffer(vector, "<u8")
        row_count = len(u_words) // linear_code.WORDS
        q = np.empty((row_count, linear_code.WORDS), np.uint64)
        q_hash = ColumnHash(challenge, linear_code.LENGTH)
        own_blocks = expand_columns(self._keys, row_count)
        for block, q_columns in zip(split_blocks(row_count), own_blocks, strict=True):
            q_columns ^= u_words[slice_words(block)].reshape(q_columns.shape) & self._choice_masks
            q_hash.update(q_columns)
            q[block] = transpose_to_rows(q_columns)
        self._q_hashes = q_hash.finish()
        return q

    def check_proof(self, proof: bytes, hub: str) -> None:
        """Check that the hub's vector U is T0 + T1 + C(D) for some messages D. The check is
        hash(Q) = hash(T0) + C(hash(D)) * s, where hash works column by column.

        `proof`: the hub's message, the bytes that `HubExtension.prove` returned: the hashes of
        T0's 512 columns, then those of D's 85 columns.

        Raises RemoteProtocolError, which names `hub`: the check fails.
        """
        assert self._q_hashes is not None
        proof_hashes = np.frombuffer(proof, "<u8").reshape(-1, COLUMN_HASH_BYTES // 8)
        t0_hashes = proof_hashes[: linear_code.LENGTH]
        # The hashes of D's 85 columns, as columns of 128 bits, are encoded row by row.
        message_hashes = np.zeros((2 * WORD_BITS, proof_hashes.shape[1]), np.uint64)
        message_hashes[: linear_code.DIMENSION] = proof_hashes[linear_code.LENGTH :]
        encoded_hashes = transpose_to_columns(
            linear_code.encode_words(transpose_to_rows(message_hashes))
        )
        expected_hashes = t0_hashes ^ (encoded_hashes & self._choice_masks)
        if not hmac.compare_digest(expected_hashes.tobytes(), self._q_hashes.tobytes()):
            raise RemoteProtocolError(
                f"{hub} sent a vector that is of no store, or does not prove it; it does not "
                "follow the protocol, and was sent no tag"
            )


class ColumnHash:
    """A hash of columns to 128 bits each that is linear over GF(2): GHASH under a public key.

    Two different columns of b blocks of 16 bytes have the same hash under at most b + 1 of 2^128
    keys. GHASH is computed by AES-GCM: the tag of a column, as associated data, is its GHASH plus a
    constant, which is the tag of zeros.
    """

    def __init__(self, key: bytes, column_count: int) -> None:
        """Start the hash of `column_count` columns under a key of 32 bytes."""
        mode = modes.GCM(bytes(12))  # no secret is encrypted: key and nonce are public
        # One for each column, and one for zeros, whose tag is subtracted from the others.
        self._hashers = [
            Cipher(algorithms.AES(key), mode).encryptor() for _ in range(column_count + 1)
        ]

    def update(self, columns: Columns) -> None:
        """Append further rows to each column that is hashed.

        `columns`: the rows, as one bit column for each hash, (columns, rows / 64) words. Their
        number is a multiple of 128 unless they are the last rows.
        """
        *column_hashers, zeros_hasher = self._hashers
        for hasher, column in zip(column_hashers, columns.view(np.uint8), strict=True):
            hasher.authenticate_additional_data(column.data)
        zeros_hasher.authenticate_additional_data(bytes(columns[0].nbytes))

    def finish(self) -> Columns:
        """Return the hash of each column, (columns, 2); the object must not be used afterwards."""
        for hasher in self._hashers:
            hasher.finalize()
        tags = np.frombuffer(b"".join(hasher.tag for hasher in self._hashers), "<u8")
        tags = tags.reshape(-1, COLUMN_HASH_BYTES // 8)
        # The tag of zeros is the constant by which an AES-GCM tag differs from GHASH.
        hashes: Columns = tags[:-1] ^ tags[-1]
        return hashes


class Tagger:
    """The hash that gives the tags of F, modelled as a random oracle: BLAKE2b under a key for this
    intersection and member.
    """

    def __init__(self, key: bytes, tag_bytes: int) -> None:
        """Make the hash under a key of 32 bytes, with tags of `tag_bytes` bytes."""
        self._keyed_hasher = hashlib.blake2b(
            key=key, digest_size=tag_bytes, person=_HASH_PERSONALISATION
        )

    def tag_hub_ids(self, t0: Elements, equations: Equations, id_hashes: Elements) -> Tags:
        """Return the tags of the hub's own n IDs, (n, bytes of a tag), which it compares with a
        member's tags. The tag of an ID x is hash(Decode(T0, x), H(x)), where Decode adds the cells
        of T0 that x selects.

        Args:
            t0: row of T0 for each cell of the store, eight words, (cells, 8).
            equations: which cells of the store each ID selects.
            id_hashes: H(x) of the IDs, (n, 2).
        """
        tags = [
            self.hash_rows(decode_values(t0, equations[chunk]), id_hashes[chunk])
            for chunk in _split_ids(len(equations))
        ]
        return np.concatenate(tags)

    def tag_member_ids(
        self,
        digests: Digests,
        q: Elements,
        choices: NDArray[np.uint64],
        report_progress: Callable[[int, int], None],
    ) -> Tags:
        """Return the tags of a member's n IDs, (n, bytes of a tag), which it sends to the hub. The
        tag of an ID y is hash(Decode(Q, y) + C(H(y)) * s, H(y)), where Decode adds the cells of Q
        that y selects, and C encodes by the linear code. If the hub has y, too, it computes the
        same tag.

        Args:
            digests: digest of each ID, (n, 6) words (`digest_ids`).
            q: row of Q for each cell of the store, eight words, (cells, 8).
            choices: s, the member's secret bits, as eight words, (8,).
            report_progress: called with the number of IDs done and of all IDs.
        """
        # The sparse cells of the store: all but the dense ones.
        cell_count = count_cells(0) + len(q) - count_vector_elements(0)
        tags = []
        for chunk in _split_ids(len(digests)):
            chunk_digests = digests[chunk]
            id_hashes = extract_id_hashes(chunk_digests)
            values = decode_values(q, Equations.from_digests(chunk_digests, cell_count))
            values ^= linear_code.encode_words(linear_code.mask_message_bits(id_hashes)) & choices
            tags.append(self.hash_rows(values, id_hashes))
            report_progress(min(chunk.stop, len(digests)), len(digests))
        return np.concatenate(tags)

    def hash_rows(self, values: Elements, id_hashes: Elements) -> Tags:
        """Return the keyed hash (BLAKE2b) of each of n pairs, (n, bytes of a tag): a value of eight
        words, (n, 8), and the hash H(x) of its ID, two words, (n, 2).
        """
        words = np.concatenate([values, id_hashes], axis=1).astype("<u8", copy=False)
        row_bytes = words.itemsize * words.shape[1]
        inputs: list[bytes] = words.view(f"V{row_bytes}")[:, 0].tolist()
        return digest_each(inputs, self._keyed_hasher)


def _split_ids(id_count: int) -> Iterator[slice]:
    """Return slices of at most `_IDS_PER_CHUNK` that cover this number of IDs, at least one
    slice.
    """
    return (
        slice(start, start + _IDS_PER_CHUNK) for start in range(0, max(id_count, 1), _IDS_PER_CHUNK)
    )


def split_blocks(row_count: int) -> Iterator[slice]:
    """Return slices of at most `_ROWS_PER_BLOCK` rows (32,768) that cover this number of rows; the
    rows of a slice are computed and sent together.
    """
    return (
        slice(start, min(start + _ROWS_PER_BLOCK, row_count))
        for start in range(0, row_count, _ROWS_PER_BLOCK)
    )


def slice_words(block: slice) -> slice:
    """Return the slice of U's words that belongs to a block of rows."""
    return slice(block.start * linear_code.WORDS, block.stop * linear_code.WORDS)


def expand_columns(keys: Sequence[bytes], row_count: int) -> Iterator[Columns]:
    """Expand each key to a pseudorandom bit column of `row_count` bits; yield all columns block by
    block of at most `_ROWS_PER_BLOCK` rows, as 64-bit words, (keys, rows of the block / 64).
    """
    streams = [
        keystream_chunks(key, b"ot column", length=row_count // 8, chunk_bytes=_ROWS_PER_BLOCK // 8)
        for key in keys
    ]
    for column_chunks in zip(*streams, strict=True):
        yield np.stack([np.frombuffer(chunk, "<u8") for chunk in column_chunks])


def transpose_to_columns(rows_Rw: Elements) -> Columns:
    """Transpose a bit matrix: return R rows of w words each, (R, w), as 64 w bit columns of R / 64
    words each, (64 w, R / 64). Bit q of word k of a column belongs to row 64 k + q.
    """
    row_count, word_count = rows_Rw.shape
    blocks = rows_Rw.reshape(row_count // WORD_BITS, WORD_BITS, word_count)
    # Matrices of 64 x 64 bits, whose 64 words lie along the first axis: (64, w, R / 64).
    matrices = np.ascontiguousarray(blocks.transpose(1, 2, 0))
    transpose_bits(matrices.reshape(WORD_BITS, -1))  # in place
    columns = np.ascontiguousarray(matrices.swapaxes(0, 1))  # (w, 64, R / 64)
    return columns.reshape(WORD_BITS * word_count, row_count // WORD_BITS)


def transpose_to_rows(columns: Columns) -> Elements:
    """Transpose a bit matrix back: return 64 w bit columns of R / 64 words each, (64 w, R / 64), as
    R rows of w words each, (R, w).
    """
    word_count = len(columns) // WORD_BITS
    blocks = columns.reshape(word_count, WORD_BITS, -1)
    # Matrices of 64 x 64 bits, whose 64 words lie along the first axis: (64, w, R / 64).
    matrices = np.ascontiguousarray(blocks.swapaxes(0, 1))
    transpose_bits(matrices.reshape(WORD_BITS, -1))  # in place
    rows = np.ascontiguousarray(matrices.transpose(2, 0, 1))  # (R / 64, 64, w)
    return rows.reshape(-1, word_count)
