"""What every backend checks alike: who contributed, to which step, under which parameters.

Run by: every role, through one `AgreedFrames` each. Protects from: missing, unknown,
doubled and replayed contributions; from frames made under other parameters or another
key; and from an active that sends different representations to different passives
(equivocation): their contributions carry different binding digests and are not added.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.fork_check import ForkCheck
from protocols.sums.agreement import StepBinding, SumAgreement
from protocols.sums.frame import Frame, FrameKind

__all__ = ["AgreedFrames", "fingerprint"]


def fingerprint(
    agreement: SumAgreement, parameters: Mapping[str, object], key: bytes = b""
) -> bytes:
    """SHA-256 over agreement, backend parameters and public key: equal at all parties."""
    canonical = json.dumps(dict(parameters), sort_keys=True).encode()
    parts = b"".join(len(part).to_bytes(8, "big") + part for part in (canonical, key))
    return hashlib.sha256(b"secure-apfed sum v1" + agreement.digest + parts).digest()


class AgreedFrames:
    """Writes and checks one role's frames of one backend under one agreement.

    Steps only go up: a step at or below the last one is refused, and so is any step in a forked
    process, whose copy of the role would use it a second time.

    Args:
        agreement: what the parties fixed.
        backend: the backend's name.
        fingerprint: of agreement, parameters and key, as `fingerprint` makes it.
        least: contributors without whom a step has no sum; None where it takes all of them.

    Raises:
        LocalProtocolError: the agreement asks for fewer of a backend that takes all.
    """

    def __init__(
        self, agreement: SumAgreement, backend: str, fingerprint: bytes, least: int | None = None
    ) -> None:
        contributors = len(agreement.contributors)
        if least is None and agreement.threshold not in (None, contributors):
            raise LocalProtocolError(
                f"{backend} needs all {contributors} contributors in every step, the agreement "
                f"says threshold {agreement.threshold}; take masked_recovery, or leave it out"
            )
        self.agreement = agreement
        self.backend = backend
        self.fingerprint = fingerprint
        self.least = contributors if least is None else least
        self._last_step = -1
        self._fork_check = ForkCheck(f"this role of {backend}")

    def begin_step(self, binding: StepBinding) -> None:
        """Mark the step of `binding` as used by this role.

        Raises:
            LocalProtocolError: another session, a step that is not above the last one, or
                another process.
        """
        self.require_own_process()
        if binding.session != self.agreement.session:
            raise LocalProtocolError(
                f"the binding names session {binding.session!r}, the agreement "
                f"{self.agreement.session!r}"
            )
        if binding.step <= self._last_step:
            raise LocalProtocolError(
                f"step {binding.step} is not above step {self._last_step}, the last one that this "
                "party used; each step is used once"
            )
        self._last_step = binding.step

    def require_own_process(self) -> None:
        """Raise LocalProtocolError in a process that holds a copy of this role by a fork."""
        self._fork_check.require()

    def setup(self, *blobs: bytes) -> bytes:
        """Frame a setup message."""
        return Frame(
            kind=FrameKind.SETUP,
            backend=self.backend,
            party=len(self.agreement.contributors),
            step=0,
            rows=0,
            columns=0,
            binding=self.agreement.digest,
            fingerprint=self.fingerprint,
            blobs=blobs,
        ).pack()

    def contribution(
        self, me: str, binding: StepBinding, shape: tuple[int, int], blobs: Sequence[bytes]
    ) -> bytes:
        """Frame the protected values of the contributor called `me`."""
        return self._contributed(me, binding, shape, blobs).pack()

    def _contributed(
        self, me: str, binding: StepBinding, shape: tuple[int, int], blobs: Sequence[bytes]
    ) -> Frame:
        return Frame(
            kind=FrameKind.CONTRIBUTION,
            backend=self.backend,
            party=self.agreement.position(me),
            step=binding.step,
            rows=shape[0],
            columns=shape[1],
            binding=binding.digest,
            fingerprint=self.fingerprint,
            blobs=tuple(blobs),
        )

    def open_contributions(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None
    ) -> tuple[Frame, ...]:
        """Return one frame of each party that sent one, in the agreement's order, for one message.

        Raises:
            RemoteProtocolError: see the top of this file.
        """
        names = self.present(contributions, self.agreement.contributors, "contribution")
        frames = tuple(Frame.parse(contributions[name], sender=name) for name in names)
        for name, frame in zip(names, frames, strict=True):
            self.check(frame, name, FrameKind.CONTRIBUTION)
            position = self.agreement.position(name)
            if frame.party != position:
                raise RemoteProtocolError(
                    f"{name} is contributor {position} and sent the contribution of {frame.party}"
                )
        self._check_one_message(frames, binding_digest)
        if frames[0].step <= self._last_step:
            raise RemoteProtocolError(
                f"contributions to step {frames[0].step} arrived after step {self._last_step} was "
                "added; they are replayed"
            )
        self._last_step = frames[0].step
        return frames

    def present(
        self, bodies: Mapping[str, bytes], expected: Collection[str], what: str
    ) -> tuple[str, ...]:
        """Return which of the `expected` sent something, in their order.

        Raises:
            RemoteProtocolError: too few did, or somebody else.
        """
        present = tuple(name for name in expected if name in bodies)
        unknown = sorted(set(bodies) - set(expected))
        if unknown or len(present) < self.least:
            missing = [name for name in expected if name not in bodies]
            quorum = "each" if self.least == len(expected) else f"at least {self.least}"
            raise RemoteProtocolError(
                f"a sum needs one {what} of {quorum} of {', '.join(expected)}; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        return present

    def sum_of(self, frames: Sequence[Frame], blobs: Sequence[bytes]) -> bytes:
        """Frame the combined values of `frames`."""
        return Frame(
            kind=FrameKind.SUM,
            backend=self.backend,
            party=len(frames),
            step=frames[0].step,
            rows=frames[0].rows,
            columns=frames[0].columns,
            binding=frames[0].binding,
            fingerprint=self.fingerprint,
            blobs=tuple(blobs),
        ).pack()

    def open_sum(self, combined: bytes, shape: tuple[int, int], binding: StepBinding) -> Frame:
        """Return the frame of the sum that answers `binding`; its step is used then.

        Raises:
            LocalProtocolError: the step was opened before, or `shape` is none.
            RemoteProtocolError: the frame is malformed or answers something else.
        """
        _require_shape(shape)
        sender = self.agreement.combiner
        frame = Frame.parse(combined, sender=sender)
        self.check(frame, sender, FrameKind.SUM)
        if not self.least <= frame.party <= len(self.agreement.contributors):
            raise RemoteProtocolError(
                f"{sender} sent a sum of {frame.party} contributions, expected "
                f"{self.least} to {len(self.agreement.contributors)}"
            )
        if (frame.rows, frame.columns) != shape:
            raise RemoteProtocolError(
                f"{sender} sent a sum of shape {(frame.rows, frame.columns)}, expected {shape}"
            )
        if (frame.step, frame.binding) != (binding.step, binding.digest):
            raise RemoteProtocolError(
                f"{sender} sent the sum of step {frame.step} for another message than the one that "
                f"step {binding.step} asked for"
            )
        self.begin_step(binding)
        return frame

    def open_setup(self, body: bytes, sender: str) -> Frame:
        """Return the frame of a setup message; its sender and fingerprint are unchecked.

        Raises:
            RemoteProtocolError: malformed, of another backend, or for another agreement.
        """
        frame = Frame.parse(body, sender=sender)
        if (frame.kind, frame.backend) != (FrameKind.SETUP, self.backend):
            raise RemoteProtocolError(
                f"{sender} sent {frame.kind.told} of {frame.backend}, expected the setup "
                f"of {self.backend}"
            )
        if frame.binding != self.agreement.digest:
            raise RemoteProtocolError(
                f"{sender} sets up a sum under another agreement; compare the two configurations"
            )
        return frame

    def open_own_setup(self, body: bytes, sender: str, me: str) -> Frame:
        """Return the frame of a setup message under the parameters of this role, that of `me`.

        Raises:
            RemoteProtocolError: as `open_setup`; or other parameters.
        """
        frame = self.open_setup(body, sender)
        if frame.fingerprint != self.fingerprint:
            raise RemoteProtocolError(
                f"{sender} sets up {frame.backend} with other parameters than {me}"
            )
        return frame

    def check(self, frame: Frame, sender: str, kind: FrameKind) -> None:
        if (frame.kind, frame.backend) != (kind, self.backend):
            raise RemoteProtocolError(
                f"{sender} sent {frame.kind.told} of {frame.backend}, expected {kind.told} of "
                f"{self.backend}"
            )
        if frame.fingerprint != self.fingerprint:
            raise RemoteProtocolError(
                f"{sender} uses other parameters or another public key for {self.backend}; "
                "all parties must hold the same agreement and setup"
            )

    def _check_one_message(self, frames: Sequence[Frame], binding_digest: bytes | None) -> None:
        first, agreed = frames[0], self.agreement.contributors
        expected = first.binding if binding_digest is None else binding_digest
        for frame in frames:
            name = agreed[frame.party]
            if (frame.step, frame.rows, frame.columns) != (first.step, first.rows, first.columns):
                raise RemoteProtocolError(
                    f"{name} contributed {frame.rows}x{frame.columns} values to step {frame.step}, "
                    f"but {agreed[first.party]} {first.rows}x{first.columns} to step "
                    f"{first.step}"
                )
            if frame.binding != expected:
                raise RemoteProtocolError(
                    f"{name} answered another message than "
                    f"{'the others' if binding_digest is None else 'the one agreed'} in step "
                    f"{frame.step}; {self.agreement.receiver} may have sent them different "
                    "representations"
                )


def _require_shape(shape: object) -> None:
    sizes = shape if isinstance(shape, tuple) else ()
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise LocalProtocolError(
            f"the shape of a sum is two numbers (rows, columns) above 0, got {shape!r}"
        )
