"""Random oblivious transfers between two parties, and the AND triples and products they give.

Run by: a hub, which chooses bits, and a member, which has two numbers for each of them, over an
authenticated and encrypted link. Protects from: either of them that sends what it likes, but for
what is said below. One batch of R transfers, after 128 base transfers for all batches
(`apfed_protocols.psi.base_ot`), by which the hub has two keys a column, and the member the one that
its bit of s chooses; r are the hub's bits, T0 and T1 what its keys expand to, (R, 128):

1. The hub sends U, whose columns are T0 + T1 + r. The member takes, of each column, its own, and
   adds U where its bit of s is 1. So it has Q, whose row k is T0_k + r_k s.
2. The member names a key, of which GHASH hashes columns to 128 bits. The hub sends the hash of each
   column of T0 and of r; the member checks that the hash of each of its columns is that of T0, plus
   that of r where its bit of s is 1. 128 random bits follow r, which hide what its hash would tell.
3. The hub has the number H(T0_k), the member H(Q_k) and H(Q_k + s): the hub's is the first of these
   where r_k is 0, the second one where it is 1.

Numbers have 32 bits. A triple takes two transfers, of whose numbers one bit counts: with m0 and m1
the member's, and m = m0 + r (m0 + m1) the hub's, a = r of the first and b = r of the second are the
hub's shares, and b = m0 + m1 of the first, a = m0 + m1 of the second the member's; each adds its
own a b and its m (the hub) or m0 (the member) of both transfers to get its share of c. No message
follows. A product of a bit of each takes one transfer: the member sends m0 - m1 + y modulo 2^32,
which the hub adds to its number where its bit x is 1; it has m0 + x y then, and the member -m0.

Security: whoever deviates chooses its own shares of a, b and c, as it could with a dealer, too, and
learns nothing of the other's: not the member, to whom T1 hides r; nor the hub, which lacks s. A hub
whose U is none of some r in c columns passes the check with probability 2^-c, and knows c bits of s
then; else it is refused. What is computed on the triples is another matter: shares are not checked.
H is tweakable circular correlation robust with AES-256 as an ideal cipher.

Source: Ishai, Kilian, Nissim and Petrank, CRYPTO 2003 (extension); Asharov, Lindell, Schneider and
Zohner, CCS 2013, section 5 (random transfers, triples); Gilboa, CRYPTO 1999 (products); Roy, CRYPTO
2022, section 4 (check by a linear universal hash); Guo, Katz, Wang and Yu, IEEE S&P 2020, section
7.4 (H).
Deviations: both transfers of a triple go the same way, the member giving a random a and b, so that
one extension serves. GHASH is the universal hash (NIST SP 800-38D).
"""

import hmac
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi.hashing import WORD_BITS, WORD_TYPE, TripleShares, Words
from apfed_protocols.psi.ot import (
    COLUMN_HASH_BYTES,
    ColumnHash,
    Columns,
    expand_columns,
    split_blocks,
    transpose_to_rows,
)
from apfed_protocols.psi.store import ELEMENT_BYTES, Elements, from_bytes
from apfed_protocols.randomness import derive_key, fresh_key, keystream

COLUMN_COUNT = 128
PROOF_BYTES = COLUMN_HASH_BYTES * (COLUMN_COUNT + 1)
BATCH_WORDS = 2**15
"""Words of choices in one batch at most, whose vector takes 1 KiB a word."""

Numbers = NDArray[np.uint32]
"""Array of one 32-bit number per transfer, (R,)."""

_MASK_WORD_COUNT = (
    COLUMN_COUNT // WORD_BITS
)  # words of random choices at the end, the last block of a column
_ROWS_PER_CHUNK = 2**12


def _append_masks(choice_words: Words) -> Words:
    """Return the choice bits r, filled up with zeros to whole blocks of 128 bits, and one block of
    random bits, which hide what the hash of r in the proof would reveal.
    """
    padding = np.zeros(-len(choice_words) % _MASK_WORD_COUNT, np.uint64)
    mask_bytes = keystream(fresh_key(), length=WORD_TYPE.itemsize * _MASK_WORD_COUNT)
    return np.concatenate([choice_words, padding, np.frombuffer(mask_bytes, WORD_TYPE)])


class ExtensionReceiver:
    """The hub's role in the oblivious transfers with one member: it chooses bits, and gets one
    number for each.

    Args:
        keys: both keys of each of the 128 base transfers, one transfer for each column; used for
            nothing else.
        hash_key: 32 bytes that both parties know, fresh in each session.
    """

    def __init__(self, keys: Sequence[tuple[bytes, bytes]], hash_key: bytes) -> None:
        """Store both keys of each base transfer; no batch of transfers was made yet."""
        self._keys = keys
        self._hash_key = hash_key
        self._batch_count = 0
        # Of the last batch, for its proof: the keys of T0's columns, and the choice bits r.
        self._keys_of_t0: list[bytes] = []
        self._choice_words: Words = np.empty(0, np.uint64)

    def extend(self, choice_words: Words) -> tuple[bytes, Numbers]:
        """Run the hub's side of the next batch of oblivious transfers (OT extension).

        T0 and T1 are pseudorandom bit matrices, one row for each transfer and 128 columns, expanded
        from the two keys of each base transfer.

        `choice_words`: r, the hub's choice bits, 64 transfers a word, at most `BATCH_WORDS` words.

        Returns:
            The message to the member, U = T0 + T1 + r (r is added to each column); and the hub's
            32-bit number of each transfer, H(T0_k) for transfer k.
        """
        batch_index = self._batch_count
        self._batch_count += 1
        self._choice_words = _append_masks(choice_words)
        self._keys_of_t0 = _derive_batch_keys(
            [first_key for first_key, _ in self._keys], batch_index
        )
        keys_of_t1 = _derive_batch_keys([second_key for _, second_key in self._keys], batch_index)
        row_count = WORD_BITS * len(self._choice_words)
        vector = np.empty(len(self._choice_words) * COLUMN_COUNT, "<u8")
        numbers = np.empty(row_count, np.uint32)
        transfer_hash = TransferHash(self._hash_key, batch_index)
        t0_blocks = expand_columns(self._keys_of_t0, row_count)
        t1_blocks = expand_columns(keys_of_t1, row_count)
        for block, t0_columns, t1_columns in zip(
            split_blocks(row_count), t0_blocks, t1_blocks, strict=True
        ):
            u_columns = t1_columns  # computed in place
            u_columns ^= t0_columns
            u_columns ^= self._choice_words[_slice_choices(block)]
            vector[_slice_vector(block)] = u_columns.ravel()
            numbers[block] = transfer_hash.hash_rows(transpose_to_rows(t0_columns), block.start)
        return vector.tobytes(), numbers[: WORD_BITS * len(choice_words)]

    def prove(self, challenge: bytes) -> bytes:
        """Return the proof that the last batch used the same choice bits r in all columns of U: the
        hash of each column of T0 (a bit matrix expanded from the hub's keys), and the hash of r.

        `challenge`: the key of the hash, which the member named after it had received U.
        """
        row_count = WORD_BITS * len(self._choice_words)
        t0_hash = ColumnHash(challenge, COLUMN_COUNT)
        choices_hash = ColumnHash(challenge, 1)
        t0_blocks = expand_columns(self._keys_of_t0, row_count)
        for block, t0_columns in zip(split_blocks(row_count), t0_blocks, strict=True):
            t0_hash.update(t0_columns)
            choices_hash.update(self._choice_words[None, _slice_choices(block)])
        return t0_hash.finish().tobytes() + choices_hash.finish().tobytes()


class ExtensionSender:
    """A member's role in the oblivious transfers with the hub: it gets two numbers for each.

    Args:
        keys: the chosen key of each of the 128 base transfers, one transfer for each column.
        choices: s, the member's secret bits in the base transfers, 16 bytes.
        hash_key: 32 bytes that both parties know, fresh in each session.
    """

    def __init__(self, keys: Sequence[bytes], choices: bytes, hash_key: bytes) -> None:
        """Store the keys, the secret bits s, and a 64-bit mask for each column: all ones if its bit
        of s is 1, else zeros.
        """
        self._keys = keys
        self._secret_row = from_bytes(choices)
        self._hash_key = hash_key
        self._batch_count = 0
        bits = np.unpackbits(np.frombuffer(choices, np.uint8), bitorder="little")
        # Modulo 2^64, 0 - 1 is a word of ones.
        self._choice_masks = (np.uint64(0) - bits.astype(np.uint64))[:, None]
        # The hash of each column of Q in the last batch, for `check_proof`.
        self._q_hashes: Columns = np.empty((0, 2), np.uint64)

    def extend(self, vector: bytes, word_count: int, challenge: bytes) -> tuple[Numbers, Numbers]:
        """Run the member's side of the next batch of oblivious transfers (OT extension), and store
        the hash of Q's columns for `check_proof`.

        The member computes the bit matrix Q, whose row k is T0_k + r_k s: T0_k is the hub's
        pseudorandom row of transfer k, r_k the hub's choice bit, and s the member's secret bits.

        Args:
            vector: U, as the hub sent it.
            word_count: W, the number of words of the hub's choices, 64 transfers each.
            challenge: the key of the hash of columns, named to the hub only after U had arrived.

        Returns:
            The member's two numbers of each transfer, for choice 0 and for choice 1: H(Q_k) and
            H(Q_k + s), each (64 W,). They must not be used before `check_proof` has passed.
        """
        batch_index = self._batch_count
        self._batch_count += 1
        u_words = np.frombuffer(vector, "<u8")
        row_count = WORD_BITS * len(u_words) // COLUMN_COUNT
        numbers = np.empty((2, row_count), np.uint32)
        q_hash = ColumnHash(challenge, COLUMN_COUNT)
        transfer_hash = TransferHash(self._hash_key, batch_index)
        own_blocks = expand_columns(_derive_batch_keys(self._keys, batch_index), row_count)
        for block, own_columns in zip(split_blocks(row_count), own_blocks, strict=True):
            u_columns = u_words[_slice_vector(block)].reshape(own_columns.shape)
            q_columns = own_columns ^ (u_columns & self._choice_masks)
            q_hash.update(q_columns)
            q_rows = transpose_to_rows(q_columns)
            numbers[0, block] = transfer_hash.hash_rows(q_rows, block.start)
            numbers[1, block] = transfer_hash.hash_rows(q_rows ^ self._secret_row, block.start)
        self._q_hashes = q_hash.finish()
        return numbers[0, : WORD_BITS * word_count], numbers[1, : WORD_BITS * word_count]

    def check_proof(self, proof: bytes, hub: str) -> None:
        """Check that the hub used the same choice bits r in all columns of U. The check is, column
        by column, hash(Q) = hash(T0) + hash(r) s, where s is the column's bit of this member.

        `proof`: the hub's message, the bytes that `ExtensionReceiver.prove` returned: the hashes of
        T0's columns, then the hash of r.

        Raises RemoteProtocolError, which names `hub`: the check fails.
        """
        proof_hashes = np.frombuffer(proof, "<u8").reshape(-1, COLUMN_HASH_BYTES // 8)
        t0_hashes = proof_hashes[:COLUMN_COUNT]
        choices_hash = proof_hashes[COLUMN_COUNT:]
        expected_hashes = t0_hashes ^ (choices_hash & self._choice_masks)
        if not hmac.compare_digest(expected_hashes.tobytes(), self._q_hashes.tobytes()):
            raise RemoteProtocolError(
                f"{hub} sent a vector that is of no bits, or does not prove it; it does not follow "
                "the protocol, and was sent nothing that depends on it"
            )


class TransferHash:
    """The hash H of the transfers of one batch, which turns the row v of transfer k into a 32-bit
    number: 32 bits of E(E(v) + k) + E(v), where E is AES-256 under a key of this session and batch.
    """

    def __init__(self, key: bytes, batch_index: int) -> None:
        """Derive the AES key from the session's hash key and the number of the batch."""
        # ECB, since each block is hashed independently of the others.
        mode = modes.ECB()  # noqa: S305
        batch_key = derive_key(key, b"transfers", batch_index.to_bytes(4, "big"))
        self._cipher = Cipher(algorithms.AES(batch_key), mode).encryptor()
        # `update_into` needs a spare block.
        self._buffer = np.empty(ELEMENT_BYTES * (_ROWS_PER_CHUNK + 1), np.uint8).data

    def hash_rows(self, rows_R2: Elements, first_transfer: int) -> Numbers:
        """Return the 32-bit hash E(E(v) + k) + E(v) of each row v, (R,), where E is AES and k the
        index of the row's transfer.

        `rows_R2`: one row of 128 bits, two words, for each of R consecutive transfers.
        `first_transfer`: the index of the first transfer.
        """
        hashes = np.empty(len(rows_R2), np.uint32)
        for start in range(0, len(rows_R2), _ROWS_PER_CHUNK):  # in chunks that stay in cache
            encrypted = self._encrypt(rows_R2[start : start + _ROWS_PER_CHUNK])
            first_index = first_transfer + start
            tweaked = encrypted.copy()
            tweaked[:, 0] ^= np.arange(first_index, first_index + len(encrypted), dtype=np.uint64)
            encrypted_twice = self._encrypt(tweaked)
            hashes[start : start + len(encrypted)] = (
                encrypted_twice[:, 0] ^ encrypted[:, 0]
            ).astype(np.uint32)
        return hashes

    def _encrypt(self, rows: Elements) -> Elements:
        """Return the AES encryption of each row, a block of 128 bits."""
        size = self._cipher.update_into(rows.tobytes(), self._buffer)
        return from_bytes(bytes(self._buffer[:size]))


def count_vector_bytes(word_count: int) -> int:
    """Return the bytes of U for this number of words of choices: 16 for each transfer, filled up to
    whole blocks of the hash, and one block of random choices.
    """
    padded_words = _MASK_WORD_COUNT * -(-word_count // _MASK_WORD_COUNT)
    return WORD_TYPE.itemsize * COLUMN_COUNT * (padded_words + _MASK_WORD_COUNT)


def split_triples(word_count: int, *, extra_word_count: int = 0) -> list[int]:
    """Split `word_count` words of 64 AND triples into batches of oblivious transfers; return the
    number of words in each batch. Batches for `extra_word_count` further words follow.

    A triple takes two transfers. The further batches are at most as large as the first batches, so
    that no message is longer.
    """
    max_words = BATCH_WORDS // 2
    batches = [min(max_words, word_count - start) for start in range(0, word_count, max_words)]
    max_extra_words = min(max_words, word_count)
    return batches + [
        min(max_extra_words, extra_word_count - start)
        for start in range(0, extra_word_count, max_extra_words)
    ]


def choose_triples(choice_words: Words, numbers: Numbers) -> tuple[Words, Words, Words]:
    """Return the hub's XOR shares of bit triples (a, b, c = a AND b), made from two random
    oblivious transfers for each triple.

    Its share of c is (a AND b) plus its numbers of both transfers.

    `choice_words`: the hub's choice bits in words of 64; the first half are its shares of a, the
    second half its shares of b. `numbers`: the 32-bit numbers that it got in these transfers; the
    lowest bit of each is used.
    """
    a, b = choice_words.reshape(2, -1)
    first_bits, second_bits = _pack_bits(numbers).reshape(2, -1)
    return a, b, (a & b) ^ first_bits ^ second_bits


def derive_triples(
    numbers_for_zero: Numbers, numbers_for_one: Numbers
) -> tuple[Words, Words, Words]:
    """Return a member's XOR shares of bit triples (a, b, c = a AND b), made from two random
    oblivious transfers for each triple.

    The hub's choice in the first transfer is its share of a, so the member's share of b is the XOR
    of its two numbers there: the numbers then add up to a product of the two shares. The second
    transfer serves the other product in the same way.

    `numbers_for_zero`, `numbers_for_one`: the member's 32-bit numbers for choice 0 and for choice
    1; the lowest bit of each is used, the first half for the first transfers.
    """
    first_bits, second_bits = _pack_bits(numbers_for_zero).reshape(2, -1)
    b, a = _pack_bits(numbers_for_zero ^ numbers_for_one).reshape(2, -1)
    return a, b, (a & b) ^ first_bits ^ second_bits


def join_triples(batches: Sequence[tuple[Words, Words, Words]]) -> TripleShares:
    """Return the shares (a, b, c) of one or more batches of triples, joined."""
    a, b, c = (
        np.concatenate([np.empty(0, np.uint64), *batch_words])
        for batch_words in zip(*batches, strict=True)
    )
    return TripleShares((a, b, c))


def _pack_bits(numbers: Numbers) -> Words:
    """Return the lowest bit of each number, packed in words of 64 bits."""
    bits = (numbers & np.uint32(1)).astype(np.uint8)
    return np.packbits(bits, bitorder="little").view(WORD_TYPE)


def _derive_batch_keys(keys: Sequence[bytes], batch_index: int) -> list[bytes]:
    """Return the key of each column for one batch, derived from its base key and the batch's
    number.
    """
    batch_bytes = batch_index.to_bytes(4, "big")
    return [derive_key(key, b"transfers", batch_bytes) for key in keys]


def _slice_choices(block: slice) -> slice:
    """Return the slice of the words of choices that belongs to a block of transfers."""
    return slice(block.start // WORD_BITS, block.stop // WORD_BITS)


def _slice_vector(block: slice) -> slice:
    """Return the slice of U's words that belongs to a block of transfers."""
    words = _slice_choices(block)
    return slice(words.start * COLUMN_COUNT, words.stop * COLUMN_COUNT)
