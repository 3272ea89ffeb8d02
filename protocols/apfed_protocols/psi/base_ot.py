"""Base oblivious transfers: of each the sender gets two keys, and the receiver the one it chose.

Run by: two parties over an authenticated and encrypted link, one message of each, in any order.
Protects from: a receiver that sends what it likes (it knows one key of each pair at most, under the
gap Diffie-Hellman assumption with the hashes as random oracles), and a sender that does (messages
of the receiver are the same distribution for all choices, so it learns none, whatever it computes).
In the group of prime order of edwards25519, in which G is the base point:

1. The sender draws a, and sends A = a G.
2. For transfer j with choice c the receiver draws t and a random point R_(1-c), and sends
   R_0, R_1 where R_c = t G - H(j, c, R_(1-c)). One of the two points is thus random, and the other
   one follows from the first as far as H decides; which is which, nobody can tell.
3. The sender computes M_i = R_i + H(j, i, R_(1-i)) and the keys KDF(j, i, A, R_0, R_1, a M_i);
   the receiver the one of its choice, since a M_c = t A.

Who knows the logarithm of M_0 and of M_1 would have found R_0, R_1 of which each is the other's
hash moved by a known multiple of G. One A serves for all transfers, which is safe because the
number of the transfer and all messages go into hash and key: else equal R would give equal keys.
Source: Masny and Rindal, CCS 2019 (endemic OT in one round, from Diffie-Hellman); McQuoid, Rosulek
and Roy, ASIACRYPT 2021 (what batches must hash).

Deviations: (a) H is libsodium's `from_uniform` (Elligator 2, then times 8) of a BLAKE2b hash, which
reaches half of the points. The proof gives H points that it chose itself, and can choose until they
are reached, so this suffices. (b) Multiples of A and M are computed on u-coordinates by X25519
(RFC 7748), so that a point and its negative have one key. Scalars are clamped; t has a random sign,
which makes t G uniform but for a distance of 2^-125.
"""

import hashlib
from collections.abc import Sequence
from typing import TypeAlias

from gmpy2 import invert, mpz  # type: ignore[import-untyped]
from nacl.bindings import (
    crypto_core_ed25519_add,
    crypto_core_ed25519_from_uniform,
    crypto_core_ed25519_sub,
    crypto_scalarmult,
    crypto_scalarmult_base,
    crypto_scalarmult_ed25519_base,
)

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.randomness import KEY_BYTES, derive_key, keystream

__all__ = ["POINT_BYTES", "Receiver", "Sender"]

POINT_BYTES = 32
_PRIME = mpz(2**255 - 19)
_SIGN_BIT = 0x80  # of the last byte of a point on edwards25519
_Pair: TypeAlias = tuple[bytes, bytes]


class Sender:
    """The role of the party that gets both keys of each transfer.

    Args:
        seed: 32 secret bytes, used for this batch of transfers only.
        session: 32 bytes that both parties know, used for this batch only.

    Attributes:
        message: A, 32 bytes, to be sent to the receiver.
    """

    def __init__(self, seed: bytes, *, session: bytes) -> None:
        """Derive the secret scalar a, and compute the message A = a G (step 1 of the module's
        docstring). `seed`: 32 secret bytes; `session`: 32 bytes known to both parties.
        """
        self._scalar = derive_key(seed, b"base ot sender")
        self._session = session
        self.message = crypto_scalarmult_base(self._scalar)

    def compute_keys(self, points: bytes, *, receiver: str) -> list[_Pair]:
        """Return the two keys, 32 bytes each, of every oblivious transfer (step 3 of the module's
        docstring).

        `points`: the receiver's message, two points of 32 bytes for each transfer. `receiver`: name
        of that party, for errors.

        Raises RemoteProtocolError: 32 of the bytes are no point, or a point of low order.
        """
        return [
            (
                self._compute_key(transfer_index, 0, point_pair, receiver),
                self._compute_key(transfer_index, 1, point_pair, receiver),
            )
            for transfer_index, point_pair in enumerate(_split_pairs(points))
        ]

    def _compute_key(
        self, transfer_index: int, choice: int, point_pair: _Pair, receiver: str
    ) -> bytes:
        """Return the key of one choice i (0 or 1) of one transfer j, which is derived from the
        Diffie-Hellman secret a M_i with M_i = R_i + H(j, i, R_(1-i)) (step 3).

        Args:
            transfer_index: j, the number of the transfer, from 0.
            choice: i, which of the two keys.
            point_pair: R_0 and R_1, the receiver's points of the transfer.
            receiver: the receiver's name, for errors.

        Raises RemoteProtocolError: the receiver sent bytes that are no point, or a point of low
        order.
        """
        hash_point = _hash_to_point(self._session, transfer_index, choice, point_pair[1 - choice])
        try:
            m_point = crypto_core_ed25519_add(point_pair[choice], hash_point)
            shared_secret = crypto_scalarmult(self._scalar, _convert_to_montgomery(m_point))
        except (RuntimeError, ZeroDivisionError):
            raise RemoteProtocolError(
                f"{receiver} sent bytes that are no point of edwards25519, or one that would have "
                f"no secret, in transfer {transfer_index}; it does not follow the protocol"
            ) from None
        return _derive_transfer_key(
            self._session, transfer_index, choice, self.message, point_pair, shared_secret
        )


class Receiver:
    """The role of the party that gets one key of each transfer.

    Args:
        choices: 0 or 1 for each transfer.
        seed: 32 secret bytes, used for this batch of transfers only.
        session: 32 bytes that both parties know, used for this batch only.

    Attributes:
        message: R_0 and R_1 of every transfer, 32 bytes each, to be sent to the sender.
    """

    def __init__(self, choices: Sequence[int], seed: bytes, *, session: bytes) -> None:
        """Derive a scalar t and the two points R_0, R_1 of each transfer from the seed (step 2 of
        the module's docstring).
        """
        self._choices = choices
        self._session = session
        transfer_count = len(choices)
        self._scalars = _split_items(
            keystream(seed, b"base ot scalars", length=KEY_BYTES * transfer_count)
        )
        unchosen_scalars = _split_items(
            keystream(seed, b"base ot others", length=KEY_BYTES * transfer_count)
        )
        sign_bytes = keystream(seed, b"base ot signs", length=2 * transfer_count)
        self._point_pairs = [
            self._make_pair(
                transfer_index,
                unchosen_scalars[transfer_index],
                sign_bytes[2 * transfer_index : 2 * transfer_index + 2],
            )
            for transfer_index in range(transfer_count)
        ]
        self.message = b"".join(first + second for first, second in self._point_pairs)

    def _make_pair(self, transfer_index: int, unchosen_scalar: bytes, sign_bytes: bytes) -> _Pair:
        """Return the points R_0 and R_1 of one transfer. The point that is not chosen is random;
        the chosen point is t G minus a hash of the other point (step 2), so that the receiver knows
        the logarithm t for the chosen point only.

        Args:
            transfer_index: number of the transfer, from 0.
            unchosen_scalar: a random scalar for the point that is not chosen.
            sign_bytes: two random bytes, whose top bits are the signs of the two multiples of the
                base point G.
        """
        choice = self._choices[transfer_index]
        chosen_multiple = _multiply_base(self._scalars[transfer_index], sign_bytes[0])
        unchosen_point = _multiply_base(unchosen_scalar, sign_bytes[1])
        hash_point = _hash_to_point(self._session, transfer_index, choice, unchosen_point)
        chosen_point = crypto_core_ed25519_sub(chosen_multiple, hash_point)
        return (unchosen_point, chosen_point) if choice == 1 else (chosen_point, unchosen_point)

    def compute_keys(self, sender_point: bytes, *, sender: str) -> list[bytes]:
        """Return the chosen key, 32 bytes, of every transfer, derived from the Diffie-Hellman
        secret t A (step 3).

        `sender_point`: the sender's message A, 32 bytes. `sender`: name of that party, for errors.

        Raises RemoteProtocolError: the point is of low order.
        """
        keys = []
        for transfer_index, choice in enumerate(self._choices):
            try:
                shared_secret = crypto_scalarmult(self._scalars[transfer_index], sender_point)
            except RuntimeError:
                raise RemoteProtocolError(
                    f"{sender} sent a point of low order, under which keys would be no secret; it "
                    "does not follow the protocol"
                ) from None
            key = _derive_transfer_key(
                self._session,
                transfer_index,
                choice,
                sender_point,
                self._point_pairs[transfer_index],
                shared_secret,
            )
            keys.append(key)
        return keys


def _split_items(items: bytes) -> list[bytes]:
    """Return the points or scalars, 32 bytes each, that these bytes consist of."""
    return [items[start : start + POINT_BYTES] for start in range(0, len(items), POINT_BYTES)]


def _split_pairs(points: bytes) -> list[_Pair]:
    """Return the two points of each transfer in a receiver's message."""
    items = _split_items(points)
    return list(zip(items[::2], items[1::2], strict=True))


def _multiply_base(scalar: bytes, sign_byte: int) -> bytes:
    """Return the clamped scalar times the base point G, negated if the top bit of `sign_byte` is
    set.
    """
    point = crypto_scalarmult_ed25519_base(scalar)
    return point[:-1] + bytes([point[-1] ^ (sign_byte & _SIGN_BIT)])


def _hash_to_point(session: bytes, transfer_index: int, choice: int, point: bytes) -> bytes:
    """Return H(j, choice, point) of the transfer j = `transfer_index`, a point on edwards25519."""
    digest = derive_key(
        session, b"base ot point", _pack_index(transfer_index), bytes([choice]), point
    )
    return crypto_core_ed25519_from_uniform(digest)


def _derive_transfer_key(
    session: bytes,
    transfer_index: int,
    choice: int,
    sender_point: bytes,
    point_pair: _Pair,
    shared_secret: bytes,
) -> bytes:
    """Return the key of one choice of one transfer: KDF(j, choice, A, R_0, R_1, secret).

    Args:
        session: 32 bytes that both parties know.
        transfer_index: j, the number of the transfer, from 0.
        choice: 0 or 1.
        sender_point: the sender's message A.
        point_pair: R_0 and R_1, the receiver's two points of the transfer.
        shared_secret: the Diffie-Hellman secret of this choice, the u-coordinate of a M_choice.
    """
    transcript = hashlib.sha256(b"".join((sender_point, *point_pair))).digest()
    transfer_and_choice = _pack_index(transfer_index) + bytes([choice])
    return derive_key(session, b"base ot key", transfer_and_choice, transcript, shared_secret)


def _pack_index(transfer_index: int) -> bytes:
    """Encode the number of a transfer in four bytes."""
    return transfer_index.to_bytes(4, "big")


def _convert_to_montgomery(point: bytes) -> bytes:
    """Return the u-coordinate (1 + y) / (1 - y) on Curve25519, 32 bytes, of a point on edwards25519
    (RFC 7748, section 4.1).

    Raises ZeroDivisionError: the point is the neutral element.
    """
    # The top bit is the sign of x, on which u does not depend.
    y = mpz(int.from_bytes(point, "little") & (2**255 - 1))
    u = (1 + y) * invert(1 - y, _PRIME) % _PRIME
    return int(u).to_bytes(POINT_BYTES, "little")
