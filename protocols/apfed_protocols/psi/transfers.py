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
from apfed_protocols.psi.hashing import BITS, WORD, TripleShares, Words
from apfed_protocols.psi.ot import (
    HASH_BYTES,
    ColumnHash,
    Columns,
    columns_to_rows,
    expand_columns,
    split_blocks,
)
from apfed_protocols.psi.store import ELEMENT_BYTES, Elements, from_bytes
from apfed_protocols.randomness import derive_key, fresh_key, keystream

COLUMNS = 128
PROOF_BYTES = HASH_BYTES * (COLUMNS + 1)
BATCH_WORDS = 2**15
"""Words of choices in one batch at most, whose vector takes 1 KiB a word."""

Numbers = NDArray[np.uint32]
"""Array of one 32-bit number per transfer, (R,)."""

_MASK_WORDS = COLUMNS // BITS  # of random choices after the others, the last block of a column
_HASHED = 2**12


class ExtensionReceiver:
    """The hub's end of the transfers with one member.

    Args:
        keys: two for each column, of transfers that serve for nothing else.
        hash_key: 32 bytes that both know, fresh in each session.
    """

    def __init__(self, keys: Sequence[tuple[bytes, bytes]], hash_key: bytes) -> None:
        self._keys = keys
        self._hash_key = hash_key
        self._batches = 0
        self._zeros: list[bytes] = []
        self._choices: Words = np.empty(0, np.uint64)

    def extend(self, choices: Words) -> tuple[bytes, Numbers]:
        """Return the vector U of one batch, and the number of each transfer.

        `choices` has 64 transfers a word, `BATCH_WORDS` at most.
        """
        number = self._batches
        self._batches += 1
        masks = np.frombuffer(keystream(fresh_key(), length=WORD.itemsize * _MASK_WORDS), WORD)
        padding = np.zeros(-len(choices) % _MASK_WORDS, np.uint64)
        self._choices = np.concatenate([choices, padding, masks])
        self._zeros = _derive_batch_keys([zero for zero, _ in self._keys], number)
        ones = _derive_batch_keys([one for _, one in self._keys], number)
        rows = BITS * len(self._choices)
        vector = np.empty((rows // BITS) * COLUMNS, "<u8")
        numbers = np.empty(rows, np.uint32)
        hashes = TransferHash(self._hash_key, number)
        streams = (expand_columns(keys, rows) for keys in (self._zeros, ones))
        for block, zeros, others in zip(split_blocks(rows), *streams, strict=True):
            others ^= zeros
            others ^= self._choices[_words_of(block)]
            vector[_part_of(block)] = others.ravel()
            numbers[block] = hashes.hash_rows(columns_to_rows(zeros), block.start)
        return vector.tobytes(), numbers[: BITS * len(choices)]

    def prove(self, challenge: bytes) -> bytes:
        """Return the hash of each column of T0, and of the choices, of the batch before.

        `challenge`: random bytes from the other party, drawn after the batch was sent.
        """
        rows = BITS * len(self._choices)
        known = ColumnHash(challenge, COLUMNS)
        chosen = ColumnHash(challenge, 1)
        for block, zeros in zip(split_blocks(rows), expand_columns(self._zeros, rows), strict=True):
            known.update(zeros)
            chosen.update(self._choices[None, _words_of(block)])
        return known.finish().tobytes() + chosen.finish().tobytes()


class ExtensionSender:
    """The member's end of the transfers.

    Args:
        keys: one for each column; choices: s, 16 bytes; hash_key: as of `ExtensionReceiver`.
    """

    def __init__(self, keys: Sequence[bytes], choices: bytes, hash_key: bytes) -> None:
        """Prepare the sender of the OT extension: one 64-bit mask a column, all ones where s is 1.

        `keys`: of the base transfers, for each column. `choices`: s, the secret bits of the base
        transfers, 16 bytes. `hash_key`: 32 bytes that both know, new in each session.
        """
        self._keys = keys
        self._secret = from_bytes(choices)
        self._hash_key = hash_key
        self._batches = 0
        bits = np.unpackbits(np.frombuffer(choices, np.uint8), bitorder="little")
        self._choice_masks = (np.uint64(0) - bits.astype(np.uint64))[:, None]
        self._hashed: Columns = np.empty((0, 2), np.uint64)

    def open_vector(self, vector: bytes, words: int, challenge: bytes) -> tuple[Numbers, Numbers]:
        """Return both numbers of each transfer of a batch of 64 `words` transfers.

        They serve for nothing before `check_proof` passed.

        `challenge`: random bytes from the other party, drawn after the batch was sent.
        """
        number = self._batches
        self._batches += 1
        sent = np.frombuffer(vector, "<u8")
        rows = BITS * len(sent) // COLUMNS
        numbers = np.empty((2, rows), np.uint32)
        hashed = ColumnHash(challenge, COLUMNS)
        hashes = TransferHash(self._hash_key, number)
        columns = expand_columns(_derive_batch_keys(self._keys, number), rows)
        for block, own in zip(split_blocks(rows), columns, strict=True):
            own ^= sent[_part_of(block)].reshape(own.shape) & self._choice_masks
            hashed.update(own)
            opened = columns_to_rows(own)
            numbers[0, block] = hashes.hash_rows(opened, block.start)
            numbers[1, block] = hashes.hash_rows(opened ^ self._secret, block.start)
        self._hashed = hashed.finish()
        return numbers[0, : BITS * words], numbers[1, : BITS * words]

    def check_proof(self, proof: bytes, hub: str) -> None:
        """Check that each column is of one choice of bits. Raises RemoteProtocolError: it is not
        so.

        `proof`: the hub's hashes. `hub`: named in the error.
        """
        hashes = np.frombuffer(proof, "<u8").reshape(-1, HASH_BYTES // 8)
        expected = hashes[:COLUMNS] ^ (hashes[COLUMNS:] & self._choice_masks)
        if not hmac.compare_digest(expected.tobytes(), self._hashed.tobytes()):
            raise RemoteProtocolError(
                f"{hub} sent a vector that is of no bits, or does not prove it; it does not follow "
                "the protocol, and was sent nothing that depends on it"
            )


class TransferHash:
    """H of one batch: E(E(v) + k) + E(v) for row v of transfer k, of which 32 bits are kept.

    E is AES-256 under a key of this session and batch.
    """

    def __init__(self, key: bytes, batch: int) -> None:
        """Derive the AES key of one batch."""
        # blocks are independent of each other on purpose: each is hashed for itself
        mode = modes.ECB()  # noqa: S305
        batch_key = derive_key(key, b"transfers", batch.to_bytes(4, "big"))
        self._cipher = Cipher(algorithms.AES(batch_key), mode).encryptor()
        self._buffer = np.empty(ELEMENT_BYTES * (_HASHED + 1), np.uint8).data

    def hash_rows(self, rows_R2: Elements, first: int) -> Numbers:
        """Return the number of each row, (R,); that of the first one is of transfer `first`."""
        numbers = np.empty(len(rows_R2), np.uint32)
        for start in range(0, len(rows_R2), _HASHED):  # what is worked on stays in the cache
            once = self._encrypt(rows_R2[start : start + _HASHED])
            begin = first + start
            tweaked = once.copy()
            tweaked[:, 0] ^= np.arange(begin, begin + len(once), dtype=np.uint64)
            twice = self._encrypt(tweaked)
            numbers[start : start + len(once)] = (twice[:, 0] ^ once[:, 0]).astype(np.uint32)
        return numbers

    def _encrypt(self, rows: Elements) -> Elements:
        """Return the cipher's block for each row."""
        size = self._cipher.update_into(rows.tobytes(), self._buffer)
        return from_bytes(bytes(self._buffer[:size]))


def vector_bytes(words: int) -> int:
    """Return the bytes of U for so many words of choices: 16 a transfer, and one block of masks."""
    return WORD.itemsize * COLUMNS * (_MASK_WORDS * -(-words // _MASK_WORDS) + _MASK_WORDS)


def split_triples(count: int, *, more: int = 0) -> list[int]:
    """Split this number of words of triples into batches, of two transfers a triple.

    `more` words follow in batches that are no larger, so that no vector is.

    `count`: how many words of 64 triples.
    """
    most = BATCH_WORDS // 2
    batches = [min(most, count - start) for start in range(0, count, most)]
    largest = min(most, count)
    return batches + [min(largest, more - start) for start in range(0, more, largest)]


def choose_triples(choices: Words, numbers: Numbers) -> tuple[Words, Words, Words]:
    """Return the hub's shares of a, b and c from its choices, the a first, and its numbers."""
    a, b = choices.reshape(2, -1)
    first, second = _pack_bits(numbers).reshape(2, -1)
    return a, b, (a & b) ^ first ^ second


def derive_triples(zeros: Numbers, ones: Numbers) -> tuple[Words, Words, Words]:
    """Return the member's shares of a, b and c from both of its numbers."""
    first, second = _pack_bits(zeros).reshape(2, -1)
    b, a = _pack_bits(zeros ^ ones).reshape(2, -1)
    return a, b, (a & b) ^ first ^ second


def join_triples(parts: Sequence[tuple[Words, Words, Words]]) -> TripleShares:
    """Return the shares of several batches as those of one."""
    a, b, c = (
        np.concatenate([np.empty(0, np.uint64), *words]) for words in zip(*parts, strict=True)
    )
    return TripleShares((a, b, c))


def _pack_bits(numbers: Numbers) -> Words:
    """Return the lowest bit of each number, 64 a word."""
    bits = (numbers & np.uint32(1)).astype(np.uint8)
    return np.packbits(bits, bitorder="little").view(WORD)


def _derive_batch_keys(keys: Sequence[bytes], batch: int) -> list[bytes]:
    """Return a key for each column of one batch."""
    number = batch.to_bytes(4, "big")
    return [derive_key(key, b"transfers", number) for key in keys]


def _words_of(block: slice) -> slice:
    """Return where the choices of a block of transfers are."""
    return slice(block.start // BITS, block.stop // BITS)


def _part_of(block: slice) -> slice:
    """Return where a block of transfers is in U."""
    words = _words_of(block)
    return slice(words.start * COLUMNS, words.stop * COLUMNS)
