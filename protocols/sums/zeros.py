"""Zeros encrypted ahead: to encrypt is then to add to one of them, which is many times faster.

Run by: every passive of a homomorphic sum that wants to use its waiting time, in its own
process or in a worker beside it (SEAL holds Python's lock while it encrypts, so a thread
would stop the training). A zero is a secret of its party until it is used and after: whoever
knows it reads what was added to it. So each is used once and none leaves the party.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from functools import lru_cache
from typing import Any

import numpy as np

from protocols.errors import LocalProtocolError
from protocols.sums.flavours import Flavour
from protocols.sums.roles import KeepsSecrets
from protocols.sums.seal_scheme import SealContext, SealScheme

__all__ = ["ZeroPool"]


class ZeroPool(KeepsSecrets):
    """Zeros of one party under the receiver's public key.

    Args:
        scheme: encrypts and loads.
        context: holds the public key.
    """

    def __init__(self, scheme: SealScheme, context: SealContext) -> None:
        self._scheme, self._context = scheme, context
        self._ready: list[Any] = []
        self._coming: list[tuple[int, Future[list[bytes]]]] = []

    def __len__(self) -> int:
        self._collect()
        return len(self._ready)

    def _fill(self, count: int, worker: Executor | None) -> None:
        """Encrypt `count` zeros now, or let a worker process do it meanwhile."""
        if worker is None:
            self._ready += (self._scheme.zero(self._context) for _ in range(count))
            return
        key = self._scheme.public_key(self._context)
        try:
            future = worker.submit(
                _encrypt_zeros, type(self._scheme), self._scheme.flavour, key, count
            )
        except RuntimeError as error:  # of a pool that is closed, or broken (a subclass)
            raise _worker_died() from error
        self._coming.append((count, future))

    def top_up(self, level: int, worker: Executor | None) -> None:
        """Encrypt as many as `level` needs beyond those that are there or on their way."""
        missing = level - len(self) - sum(count for count, _ in self._coming)
        if missing > 0:
            self._fill(missing, worker)

    def take(self, most: int) -> Sequence[Any]:
        """Remove up to `most` zeros that are there by now."""
        self._collect()
        taken, self._ready = self._ready[:most], self._ready[most:]
        return taken

    def _collect(self) -> None:
        while self._coming and self._coming[0][1].done():
            _, future = self._coming.pop(0)
            if future.cancelled():
                continue
            try:
                blobs = future.result()
            except BrokenExecutor as error:
                raise _worker_died() from error
            self._ready += self._scheme.zeros_in(blobs)


def _worker_died() -> LocalProtocolError:
    return LocalProtocolError(
        "the worker process that encrypts zeros ahead ended on its own (killed, or out of "
        "memory), or was shut down; start again, or encrypt without one (secure_sum.worker: false)"
    )


@lru_cache(maxsize=8)
def _scheme(kind: Callable[[Flavour], SealScheme], flavour: Flavour) -> SealScheme:
    return kind(flavour)


def _encrypt_zeros(
    kind: Callable[[Flavour], SealScheme], flavour: Flavour, key: bytes, count: int
) -> list[bytes]:
    """In the worker: knows public numbers only."""
    scheme = _scheme(kind, flavour)
    context = scheme.public_context(key, sender="the party")
    return scheme.encrypt(context, np.zeros((count, flavour.slots), dtype=np.int64))
