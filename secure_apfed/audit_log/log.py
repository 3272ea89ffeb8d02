"""A party's own audit log, open for more: a line an envelope, before it leaves.

Run by: every party that runs in a process of its own, for itself. It holds kinds, sizes and digests
of sealed bytes, and nothing that was in them. A line is with the operating system before its
envelope is sent, so a killed process loses none; a machine that loses power may lose those since
the last checkpoint. Where a line cannot be written, nothing is sent.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, Self

from apfed_protocols.identity import Identity
from secure_apfed.audit_log.lines import (
    MOST_PEERS,
    PURPOSE,
    Agreed,
    Chain,
    Frame,
    Line,
    Opened,
    Refused,
    Signed,
    parse_line,
)
from secure_apfed.contract import Contract
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope
from secure_apfed.names import ReleaseFigure
from secure_apfed.regular_file import open_regular

__all__ = ["AuditLog", "Meter"]


class Meter(Protocol):
    """What a party's releases cost so far."""

    @property
    def charges(self) -> int:
        """Grows with every batch that may be sent."""
        ...

    @property
    def epsilon(self) -> float:
        """Of all of them; infinite without noise."""
        ...

    @property
    def figure(self) -> ReleaseFigure:
        """What `epsilon` is called, of `secure_apfed.privacy_rows.FIGURES`."""
        ...


class AuditLog:
    """See `LinkObserver`, which it is.

    Args:
        path: of the file, which is begun, or gone on with and never shortened but for a torn line.
        party: whose; identity: its key pair, which signs the log when it is closed.
        peers: public identities of the others, by name.
        meter: of its releases.
        clock: seconds since 1970.

    Raises:
        CheckpointError: what lies there is no log, another party's, or altered; or too many peers.
    """

    def __init__(
        self, path: Path, party: str, identity: Identity, peers: Mapping[str, bytes],
        meter: Meter, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        if len(peers) > MOST_PEERS:
            raise CheckpointError(f"{path}: an audit log is of {MOST_PEERS} peers at most")
        self.path, self._party, self._identity = path, party, identity
        self._meter, self._clock = meter, clock
        self._charged, self._released = meter.charges, b""
        self._chain = Chain(path)
        self._file = open_regular(path, create=True)
        try:
            cut = self._follow()
            known = {name: key.hex() for name, key in peers.items()}
            self._write(
                Opened(at=clock(), party=party, identity=identity.public.hex(), peers=known,
                       cut=cut)
            )  # fmt: skip
        except BaseException:
            os.close(self._file)
            raise

    def _follow(self) -> int:
        """Verify what is there; return how many bytes of a torn line were cut off."""
        chain = self._chain
        with os.fdopen(os.dup(self._file), "rb") as file:
            for body in chain.follow(file):
                if chain.lines == 1:
                    self._require_own(body)
        if chain.torn:
            os.ftruncate(self._file, chain.size)
            warnings.warn(
                f"{self.path}: its last line was torn when a process was killed; its "
                f"{len(chain.torn)} bytes are cut off, and the log says so",
                stacklevel=4,
            )
        elif not chain.newline:
            chain.size += os.write(self._file, b"\n")
        return len(chain.torn)

    def _require_own(self, body: bytes) -> None:
        first = parse_line(body, path=self.path, number=1)
        if not isinstance(first, Opened) or first.party != self._party:
            whose = first.party if isinstance(first, Opened) else "nobody"
            raise CheckpointError(
                f"{self.path} is the audit log of {whose}, this party is {self._party}; put it "
                "back where it belongs, or choose another folder"
            )

    def sent(self, envelope: Envelope, frame: bytes) -> None:
        """See `LinkObserver`; on return the line outlives this process.

        Raises:
            CheckpointError, OSError: it does not; nothing may be sent then.
        """
        epsilon = self._epsilon_of(envelope.payload)
        figure = None if epsilon is None else self._meter.figure
        self._write(
            Frame.of("sent", envelope, frame, at=self._clock(), epsilon=epsilon, figure=figure)
        )

    def received(self, envelope: Envelope, frame: bytes) -> None:
        """See `LinkObserver`."""
        self._write(Frame.of("received", envelope, frame, at=self._clock()))

    def refused(self, sender: str, frame: bytes) -> None:
        """See `LinkObserver`."""
        self._write(Refused.of(sender, frame, at=self._clock()))

    def agreed(self, contract: Contract) -> None:
        """Note the contract of a session, which all have signed."""
        resumes = contract.resumes.step if contract.resumes else None
        self._write(
            Agreed(at=self._clock(), session=contract.session, contract=contract.digest.hex(),
                   resumes=resumes)
        )  # fmt: skip

    def sync(self) -> None:
        """Return once all lines are on the disk.

        Raises:
            CheckpointError: the file is gone, or another process writes to it.
        """
        found = os.fstat(self._file)
        if not found.st_nlink or found.st_size != self._chain.size:
            raise CheckpointError(
                f"{self.path} was removed, or is written to by another process; restore it from "
                "a copy, and give each run a folder of its own"
            )
        os.fsync(self._file)

    def close(self) -> None:
        """Sign all lines so far, and let go of the file."""
        try:
            signature = self._identity.sign(PURPOSE, self._party.encode(), self._chain.head)
            self._write(Signed(at=self._clock(), signature=signature.hex()))
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _epsilon_of(self, payload: bytes) -> float | Literal["inf"] | None:
        """What all releases cost, where this payload is one: the first after a charge, and the
        same to others.
        """
        charges = self._meter.charges
        if charges != self._charged:
            self._charged, self._released = charges, payload
        elif not payload or payload != self._released:
            self._released = b""
            return None
        epsilon = self._meter.epsilon
        return "inf" if epsilon == float("inf") else epsilon

    def _write(self, written: Line) -> None:
        line = self._chain.line(written)
        try:
            if os.write(self._file, line) != len(line):
                raise OSError(f"{self.path}: the disk took only part of a line")
        except OSError:
            os.ftruncate(self._file, self._chain.size)
            raise
        self._chain.wrote(line)
