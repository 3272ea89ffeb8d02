"""A contributor's role under a key of its owner, for a host that keeps nothing in memory.

Run by: a contributor, between two messages of one sum. Protects from: whoever stores or carries the
sealed role, who reads and changes nothing of it; and from a second use of a step, whose masks would
cancel against the first: a book on the host's disk remembers which sealing of a role was taken up
last, so that each serves once, also among processes. Does not protect from a host that loses the
book, or is restored from a snapshot with it. The key must outlive the process and leave the party
no more than the role may.

For sums of one round. Under recoverable masks and under CrypTen a role holds shares for a step that
is under way, and stays in memory.
"""

import json
import sqlite3
from contextlib import closing
from os import PathLike
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import KEY_BYTES, fresh_key
from apfed_protocols.sums.roles import DescribedSum, SecureSum, SumContributor

__all__ = ["put_away", "take_up"]

_NONCE_BYTES = 12


def put_away(role: SumContributor, key: bytes) -> bytes:
    """Return the role sealed under 32 secret bytes (AES-256-GCM); it is of no use here any more.

    Raises LocalProtocolError: no key of 32 bytes; a sum of two rounds; a forked copy; or a role
    that was put away already.
    """
    cipher, nonce = _cipher(key, role.me), fresh_key()[:_NONCE_BYTES]
    state = json.dumps(role.leave()).encode()
    return nonce + cipher.encrypt(nonce, state, _associated(role.described, role.me))


def take_up(
    described: SecureSum, me: str, sealed: bytes, key: bytes, *, book: str | PathLike[str]
) -> SumContributor:
    """Return the role that was put away, at the step where it was.

    Args:
        described: the same sum.
        me: the contributor.
        sealed: what `put_away` returned; the last one, and once.
        key: the one that sealed it.
        book: a file on this host's disk, made here if it is missing, that outlives the processes.

    Raises:
        LocalProtocolError: another key, sum or party; altered bytes; or a role that was taken up
            since, in this process or another.
    """
    try:
        text = _cipher(key, me).decrypt(
            sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _associated(described, me)
        )
    except (InvalidTag, ValueError, TypeError) as error:
        raise LocalProtocolError(
            f"this is no role of {me} in this sum under this key: it was altered, or belongs to "
            "another party, sum, session or key"
        ) from error
    state: dict[str, Any] = json.loads(text)
    with closing(sqlite3.connect(book)) as opened, opened:
        opened.execute("CREATE TABLE IF NOT EXISTS taken (role TEXT PRIMARY KEY, times INTEGER)")
        last = opened.execute(
            "INSERT INTO taken VALUES (?, ?) ON CONFLICT (role) DO UPDATE "
            "SET times = excluded.times WHERE excluded.times > times RETURNING times",
            (state["role"], state["times"]),
        ).fetchone()
    if last is None:
        raise LocalProtocolError(
            f"this role of {me} was taken up before, so that its next step may be used: take the "
            "one that was put away last, or set up a new session"
        )
    role = described.contributor(me)
    role.enter(state)
    return role


def _cipher(key: bytes, me: str) -> AESGCM:
    if type(key) is not bytes or len(key) != KEY_BYTES:
        raise LocalProtocolError(f"{me}: a key that seals a role is {KEY_BYTES} secret bytes")
    return AESGCM(key)


def _associated(described: DescribedSum, me: str) -> bytes:
    return b"secure-apfed role v1" + described.frames().fingerprint + me.encode()
