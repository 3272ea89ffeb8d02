"""A contributor's role, sealed under its owner's key, for a host that keeps nothing in memory.

Run by: a contributor, between two messages of one sum. Protects from a party that stores or carries
the sealed role: it can neither read nor change it. Protects from a second use of a step, whose
masks would cancel against the first: a log on the host's disk lists all sealed roles, and each can
be resumed once, also among processes. A role that the log does not list is refused, so all sealed
roles are lost with their log. Does not protect from a host that is restored from a snapshot with
its log. The key must outlive the process and leave the party no more than the role may.

For sums of one round. Under recoverable masks and under CrypTen a role holds shares for a step that
is under way, and stays in memory.
"""

import json
import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.randomness import KEY_BYTES, ForkCheck, fresh_key
from apfed_protocols.sums.roles import DescribedSum, SecureSum, SumContributor

__all__ = ["InMemoryRoleLog", "resume_role", "suspend_role"]

_AES_NONCE_BYTES = 12


class InMemoryRoleLog:
    """A log of suspended roles that is lost with its process, for tests and trials.

    A role that was suspended with it cannot be resumed with another log or in another process.
    """

    def __init__(self) -> None:
        """Make an empty log."""
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._lock = threading.Lock()
        self._require_own_process = ForkCheck("this log in memory").require_own_process

    @contextmanager
    def _lock_database(self) -> Iterator[sqlite3.Connection]:
        """Yield the database of the log to one thread at a time. Raises LocalProtocolError: this
        is a forked process.
        """
        self._require_own_process()  # before the lock, which a forked copy may hold forever
        with self._lock:
            yield self._database


RoleLog: TypeAlias = str | PathLike[str] | InMemoryRoleLog
"""The log of suspended roles, by which each is resumed once: the path of a file on this host's
disk that outlives the processes; or, in tests, an `InMemoryRoleLog`."""


def suspend_role(role: SumContributor, key: bytes, *, role_log: RoleLog) -> bytes:
    """Suspend a contributor's role: return its encrypted state (AES-256-GCM), close the role in
    this process, and enter it in the log of suspended roles.

    Args:
        role: the role of a contributor to a sum with one round.
        key: 32 secret bytes of the role's owner.
        role_log: the log of suspended roles. It is created, if it does not exist, for a role
            that is suspended for the first time.

    Raises:
        LocalProtocolError: the key has not 32 bytes; the sum has two rounds; this is a forked
            process; the role was suspended already; or the log is missing or does not list it.
    """
    cipher = _make_cipher(key, role.me)
    nonce = fresh_key()[:_AES_NONCE_BYTES]
    _require_disk_file(role_log, role.me)
    is_first_time = not role.was_resumed
    with _open_role_log(role_log, role.me, may_create=is_first_time) as database:
        state = role.export_state()
        # A role that was suspended before must be listed as resumed since; it is suspended again.
        updated = database.execute(
            "UPDATE sealed SET times = ?, taken = 0 WHERE role = ? AND times = ? AND taken = 1 "
            "RETURNING times",
            (state["times"], state["role"], state["times"] - 1),
        ).fetchone()
        if is_first_time:
            database.execute("INSERT INTO sealed VALUES (?, 1, 0)", (state["role"],))
        elif updated is None:
            raise _make_unlisted_role_error(role.me)
    text = json.dumps(state).encode()
    return nonce + cipher.encrypt(nonce, text, _make_associated_data(role.secure_sum, role.me))


def resume_role(
    secure_sum: SecureSum, me: str, sealed_role: bytes, key: bytes, *, role_log: RoleLog
) -> SumContributor:
    """Resume a suspended role: decrypt its state, mark it as resumed in the log, so that it is
    resumed once, and return the role, which continues after the last step that it used.

    Args:
        secure_sum: the sum that the role belongs to.
        me: the contributor whose role it is.
        sealed_role: what `suspend_role` returned for this role last; each state is resumed once.
        key: the key that `suspend_role` was given.
        role_log: the log that `suspend_role` was given.

    Raises:
        LocalProtocolError: the key, sum or party differs from that of `suspend_role`, or the bytes
            were altered; the role was resumed since, in this process or another; or the log is
            missing or does not list the role.
    """
    try:
        text = _make_cipher(key, me).decrypt(
            sealed_role[:_AES_NONCE_BYTES],
            sealed_role[_AES_NONCE_BYTES:],
            _make_associated_data(secure_sum, me),
        )
    except (InvalidTag, ValueError, TypeError) as error:
        raise LocalProtocolError(
            f"this is no role of {me} in this sum under this key: it was altered, or belongs to "
            "another party, sum, session or key"
        ) from error
    state: dict[str, Any] = json.loads(text)
    _require_disk_file(role_log, me)
    with _open_role_log(role_log, me, may_create=False) as database:
        # Marks the role as resumed, if this state is its latest and was not resumed yet.
        resumed = database.execute(
            "UPDATE sealed SET taken = 1 WHERE role = ? AND times = ? AND taken = 0 "
            "RETURNING times",
            (state["role"], state["times"]),
        ).fetchone()
        listed = database.execute("SELECT times FROM sealed WHERE role = ?", (state["role"],))
        if resumed is None and listed.fetchone() is None:
            raise _make_unlisted_role_error(me)
    if resumed is None:
        raise LocalProtocolError(
            f"this role of {me} was taken up before, so that its next step may be used: take the "
            "one that was put away last, or set up a new session"
        )
    role = secure_sum.make_contributor(me)
    role.import_state(state)
    return role


def _require_disk_file(role_log: RoleLog, me: str) -> None:
    """Raise LocalProtocolError if the path of a log of suspended roles is a name that makes
    SQLite keep the log in memory: then a role could be resumed twice, in two processes.
    """
    if not isinstance(role_log, InMemoryRoleLog) and os.fsdecode(role_log) in ("", ":memory:"):
        raise LocalProtocolError(
            f"{me}: a log in memory forgets with its process which roles were taken up, and would "
            "let one serve twice: name a file on this host's disk as role_log; in tests pass an "
            "InMemoryRoleLog()"
        )


@contextmanager
def _open_role_log(role_log: RoleLog, me: str, *, may_create: bool) -> Iterator[sqlite3.Connection]:
    """Yield the database of a log of suspended roles for one transaction, which is committed at
    the end of the `with` block, or rolled back if the block raises.

    Args:
        role_log: the log.
        me: the contributor, for errors.
        may_create: whether to create the file if it does not exist.

    Raises LocalProtocolError: the file is missing, no plain file, or no such log.
    """
    try:
        if isinstance(role_log, InMemoryRoleLog):
            with role_log._lock_database() as database:
                yield _create_table(database)
            return
        path = Path(role_log)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise LocalProtocolError(
                f"{me}: the log {path} is a link or no plain file; name the file itself"
            )
        if not may_create and not path.exists():
            raise LocalProtocolError(
                f"{me}: the log {path} is missing, so nobody knows whether this role was taken "
                "up: put the log back, or set up a new session"
            )
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("BEGIN IMMEDIATE")  # locks the file against other processes
            with database:
                yield _create_table(database)
    except sqlite3.Error as error:
        raise LocalProtocolError(
            f"{me}: {role_log} is no log of sealed roles ({error}): name the file that "
            "suspend_role was given, or set up a new session"
        ) from error


def _create_table(database: sqlite3.Connection) -> sqlite3.Connection:
    """Create the table of suspended roles if it is missing, and return the database.

    A row has a role's random identifier, how often the role was suspended, and 1 if it was resumed
    since, else 0.
    """
    database.execute(
        "CREATE TABLE IF NOT EXISTS sealed (role TEXT PRIMARY KEY, times INTEGER, taken INTEGER)"
    )
    return database


def _make_unlisted_role_error(me: str) -> LocalProtocolError:
    """Return the error for a role that the log does not list."""
    return LocalProtocolError(
        f"{me}: the log does not list this role, so it is another log, or an older copy, and "
        "nobody knows whether the role was taken up: put the log back, or set up a new session"
    )


def _make_cipher(key: bytes, me: str) -> AESGCM:
    """Return AES-256-GCM under `key`, by which the contributor `me` protects its suspended roles.
    Raises LocalProtocolError: the key has not 32 bytes.
    """
    if type(key) is not bytes or len(key) != KEY_BYTES:
        raise LocalProtocolError(f"{me}: a key that seals a role is {KEY_BYTES} secret bytes")
    return AESGCM(key)


def _make_associated_data(secure_sum: DescribedSum, me: str) -> bytes:
    """Return the associated data of the encryption, which binds a suspended role to its sum and to
    the contributor `me`.
    """
    return b"secure-apfed role v1" + secure_sum.make_frames().fingerprint + me.encode()
