"""Shares of 16-byte secrets: some of them together give the secret, fewer say nothing of it.

Run by: passives (split) and the aggregator (join). Protects from: holders of fewer shares
than the threshold, whatever they can compute. Does not give: detection of a false share;
whoever joins compares the secret with what its owner announced.

Shamir 1979 over GF(2^128), through PyCryptodome, whose coefficients come from the operating
system's generator.
"""

from collections.abc import Mapping, Sequence

from Crypto.Protocol.SecretSharing import Shamir

from protocols.errors import LocalProtocolError

__all__ = ["SECRET_BYTES", "join", "split"]

SECRET_BYTES = 16
"""Bytes of a secret, and of each share of it."""


def split(secret: bytes, *, threshold: int, holders: int) -> Sequence[bytes]:
    """Return the shares of 16 secret bytes, one for each of `holders`, in their order.

    Any `threshold` of them (1 to `holders`) give the secret.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= holders:
        raise LocalProtocolError(
            f"a secret of {SECRET_BYTES} bytes is shared among at least `threshold` holders, got "
            f"{len(secret)} bytes, threshold {threshold} and {holders} holders"
        )
    return [share for _, share in Shamir.split(threshold, holders, secret, False)]


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret of which these are shares.

    Args:
        shares: exactly as many as the threshold, by the holder's position from 0. With fewer,
            or a false one among them, the result is some other 16 bytes.
    """
    if not shares or any(len(share) != SECRET_BYTES for share in shares.values()):
        raise LocalProtocolError(f"a secret is joined from shares of {SECRET_BYTES} bytes each")
    return Shamir.combine([(holder + 1, share) for holder, share in shares.items()], False)
