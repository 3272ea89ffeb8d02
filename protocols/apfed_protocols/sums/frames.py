"""The messages of a sum: one framing, and what every role checks of the frames it takes.

Run by: every role, through one `AgreedFrames` each. Protects from: malformed bytes (whatever
arrives parses to a `Frame` or raises `RemoteProtocolError`, and every size is checked before
anything is copied); missing, unknown, doubled and replayed contributions; frames made under other
parameters or another key; an active that sends different representations to different passives
(equivocation), whose contributions carry different binding digests and are not added; and in a
second round, requests and answers of another step, message or party. Authentication is the
link's (`apfed_protocols.seal`): a frame travels inside it.

Layout, big endian: magic, version, kind, party, name, step, rows, columns, binding, fingerprint,
number of blobs, their sizes, the blobs; nothing after.
"""

import hashlib
import json
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.randomness import ForkCheck
from apfed_protocols.sums.interface import StepBinding, SumAgreement
from apfed_protocols.trees import Flattened

_MAGIC = b"SUMF"
_VERSION = 1
_HEADER = struct.Struct(">4sBBH32sQII32s32sI")
_SIZE = struct.Struct(">I")
_NAME_BYTES = 32
_MAX_BLOBS = 2**20
_MAX_VALUES = 2**31


class FrameKind(IntEnum):
    SETUP = 1
    CONTRIBUTION = 2
    SUM = 3
    REQUEST = 4
    ANSWER = 5

    @property
    def noun(self) -> str:
        """Return this kind with its article, for error messages."""
        return ("an " if self is FrameKind.ANSWER else "a ") + self.name.lower()


_KINDS = frozenset(FrameKind)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A message of a sum, with the header that names what it belongs to.

    Attributes:
        name: of the sum, 1 to 32 printable ASCII characters.
        party: the contributor's position in the agreement, for what it sends or is asked;
            else the number of contributors.
        step: that it belongs to; 0 for setup.
        rows, columns: shape of the values; 0, 0 for setup.
        binding: 32 bytes; the step binding's digest, or the agreement's for setup.
        fingerprint: 32 bytes; of the agreement, the parameters and the public key.
    """

    kind: FrameKind
    name: str
    party: int
    step: int
    rows: int
    columns: int
    binding: bytes
    fingerprint: bytes
    blobs: tuple[bytes, ...] = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def pack(self) -> bytes:
        """Return the frame's bytes: header, sizes of the blobs, blobs. Raises LocalProtocolError: a
        field is out of range.
        """
        name = self.name.encode("ascii")
        if not 0 < len(name) <= _NAME_BYTES or len(self.blobs) > _MAX_BLOBS:
            raise LocalProtocolError(
                f"a frame has a name of 1 to {_NAME_BYTES} characters and at most {_MAX_BLOBS} "
                f"blobs, got {self.name!r} and {len(self.blobs)}"
            )
        try:
            header = _HEADER.pack(
                _MAGIC,
                _VERSION,
                self.kind,
                self.party,
                name,
                self.step,
                self.rows,
                self.columns,
                self.binding,
                self.fingerprint,
                len(self.blobs),
            )
            sizes = struct.pack(f">{len(self.blobs)}I", *map(len, self.blobs))
        except struct.error as error:
            raise LocalProtocolError(f"a field of a frame is out of range: {error}") from error
        return b"".join((header, sizes, *self.blobs))

    @classmethod
    def parse(cls, data: bytes, *, sender: str) -> "Frame":
        """Parse bytes from `sender`; every size is checked before anything is copied. Raises
        RemoteProtocolError: the bytes are no frame of this version.
        """
        if type(data) is not bytes:
            raise LocalProtocolError(
                f"a frame of a secure sum is bytes, got {type(data).__name__} from {sender}"
            )
        if len(data) < _HEADER.size:
            raise _make_frame_error(
                sender, f"has {len(data)} bytes, its header alone {_HEADER.size}"
            )
        magic, version, kind, party, name, *sizes, binding, fingerprint, count = (
            _HEADER.unpack_from(data)
        )
        step, rows, columns = sizes
        if magic != _MAGIC or version != _VERSION:
            raise _make_frame_error(
                sender, f"is no frame of version {_VERSION}; run the same release"
            )
        if kind not in _KINDS or rows * columns > _MAX_VALUES:
            raise _make_frame_error(sender, "has an unknown kind or an impossible shape")
        name = name.rstrip(b"\0")
        if not name or not name.isascii() or not name.decode("ascii").isprintable():
            raise _make_frame_error(sender, "names no sum")
        return cls(
            kind=FrameKind(kind),
            name=name.decode("ascii"),
            party=party,
            step=step,
            rows=rows,
            columns=columns,
            binding=binding,
            fingerprint=fingerprint,
            blobs=_parse_blobs(data, count, sender),
        )

    def require_blobs(self, sender: str, count: int) -> None:
        """Raise RemoteProtocolError, which names the sender, unless the frame has `count` blobs."""
        if len(self.blobs) != count:
            raise RemoteProtocolError(
                f"{sender} sent {len(self.blobs)} parts in {self.kind.noun}, expected {count}"
            )


def _make_frame_error(sender: str, subject: str) -> RemoteProtocolError:
    """Return the error for a malformed frame; `subject` continues the sentence "a frame
    from X ...".
    """
    return RemoteProtocolError(f"a frame of a secure sum from {sender} {subject}")


def _parse_blobs(data: bytes, count: int, sender: str) -> tuple[bytes, ...]:
    """Split the bytes after the header into `count` blobs. Raises RemoteProtocolError: their
    announced sizes do not add up to the bytes that arrived.
    """
    start = _HEADER.size + _SIZE.size * count
    if count > _MAX_BLOBS or start > len(data):
        raise _make_frame_error(sender, f"announces {count} blobs in {len(data)} bytes")
    sizes = struct.unpack_from(f">{count}I", data, _HEADER.size)
    if start + sum(sizes) != len(data):
        raise _make_frame_error(
            sender,
            f"announces {start + sum(sizes)} bytes and has {len(data)}; it was cut or padded",
        )
    blobs = []
    for size in sizes:
        blobs.append(data[start : start + size])
        start += size
    return tuple(blobs)


def compute_fingerprint(
    agreement: SumAgreement, parameters: Mapping[str, object], key: bytes = b""
) -> bytes:
    """Return SHA-256 over agreement, parameters and public key: equal at all parties."""
    canonical = json.dumps(dict(parameters), sort_keys=True).encode()
    parts = b"".join(len(part).to_bytes(8, "big") + part for part in (canonical, key))
    return hashlib.sha256(b"secure-apfed sum v1" + agreement.digest + parts).digest()


class AgreedFrames:
    """The writer and checker of one role's frames of one sum under one agreement.

    A step is `pack_contribution` at a passive and `open_contributions`, `sum_of` at the aggregator.
    A second round adds `pack_request` and `open_answers` there, `open_request` and `pack_answer`
    here. The frames remember the contribution that is under way, and forget it with the answer.

    Steps only go up: a step at or below the last one is refused, and so is any step in a forked
    process, whose copy of the role would use it a second time.

    Raises LocalProtocolError: the agreement asks for fewer of a sum that takes all.
    """

    def __init__(
        self, agreement: SumAgreement, name: str, fingerprint: bytes, minimum: int | None = None
    ) -> None:
        """Make the frames of one role; `minimum` is the number of contributors that a sum needs,
        None for all of them.

        `fingerprint`: SHA-256 of agreement, parameters and public key.
        """
        contributors = len(agreement.contributors)
        if minimum is None and agreement.threshold not in (None, contributors):
            raise LocalProtocolError(
                f"{name} needs all {contributors} contributors in every step, the agreement says "
                f"threshold {agreement.threshold}; take recoverable masks, or leave it out"
            )
        self.agreement = agreement
        self.name = name
        self.fingerprint = fingerprint
        self.least = contributors if minimum is None else minimum
        self._last_step = -1
        self._closed = False
        self._underway: Frame | None = None
        # Raises LocalProtocolError in a process that holds a copy of this role by a fork.
        self.require_own_process = ForkCheck(f"this role of {name}").require_own_process

    def begin_step(self, binding: StepBinding) -> None:
        """Use the step of `binding`. Raises LocalProtocolError: another session, or a step that is
        not above all former ones, so that no mask or nonce is used twice.
        """
        self.require_here()
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

    def require_here(self) -> None:
        """Raise LocalProtocolError in a forked process, or if the role was suspended
        (`put_away`).
        """
        self.require_own_process()
        if self._closed:
            raise LocalProtocolError(f"this role of {self.name} was put away; take it up first")

    def export_step(self) -> int:
        """Close these frames and return their last step, for the role that is resumed elsewhere."""
        self._closed = True
        return self._last_step

    def import_step(self, last_step: int) -> None:
        """Continue after the last step that `export_step` returned."""
        self._last_step = last_step

    def next_binding(self, flat: Flattened) -> StepBinding:
        """Return a binding to this party's next step and to the shape of its values, but to no
        message.
        """
        session = self.agreement.session
        return StepBinding.from_contents(
            session, self._last_step + 1, rows=flat.digest, message=b""
        )

    def pack_setup(self, *blobs: bytes) -> bytes:
        return replace(self.make_frame(FrameKind.SETUP, (0, 0)), blobs=blobs).pack()

    def make_frame(self, kind: FrameKind, shape: tuple[int, int]) -> Frame:
        """Return a frame without blobs that belongs to no step and to no single contributor."""
        return Frame(
            kind=kind,
            name=self.name,
            party=len(self.agreement.contributors),
            step=0,
            rows=shape[0],
            columns=shape[1],
            binding=self.agreement.digest,
            fingerprint=self.fingerprint,
            blobs=(),
        )

    def open_setup(self, body: bytes, sender: str) -> Frame:
        """Return the frame of a setup message; its sender and fingerprint are unchecked.

        `body`: the bytes of the message.
        """
        frame = Frame.parse(body, sender=sender)
        self._check_frame(frame, sender, FrameKind.SETUP, None)
        if frame.binding != self.agreement.digest:
            raise RemoteProtocolError(
                f"{sender} sets up a sum under another agreement; compare the two configurations"
            )
        return frame

    def open_own_setup(self, body: bytes, sender: str, me: str) -> Frame:
        """Return the frame of a setup message under the parameters of this role, that of `me`.

        `body`: the bytes of the message.
        """
        frame = self.open_setup(body, sender)
        if frame.fingerprint != self.fingerprint:
            raise RemoteProtocolError(
                f"{sender} sets up {frame.name} with other parameters than {me}"
            )
        return frame

    def pack_contribution(
        self, me: str, binding: StepBinding, shape: tuple[int, int], blobs: Sequence[bytes]
    ) -> bytes:
        """Pack a passive's protected values of `shape` (rows, columns), and remember the
        contribution for a possible second round.

        `blobs`: the frame's parts, such as ciphertexts or shares.
        """
        self._underway = replace(
            self.make_frame(FrameKind.CONTRIBUTION, shape),
            party=self.agreement.find_position(me),
            step=binding.step,
            binding=binding.digest,
        )
        return replace(self._underway, blobs=tuple(blobs)).pack()

    def open_contributions(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None
    ) -> tuple[Frame, ...]:
        """Parse one contribution of each sender and use their step; return the frames in the
        agreement's order.

        Args:
            contributions: bytes by authenticated sender.
            binding_digest: what all must answer; None where the aggregator does not know it, so
                that the contributions are only compared with each other.

        Raises RemoteProtocolError: a sender is missing or unknown, a frame is malformed, the frames
        answer different messages (equivocation), or they are replayed.
        """
        names = self._check_senders(contributions, self.agreement.contributors, "contribution")
        frames = []
        for name in names:
            frame = Frame.parse(contributions[name], sender=name)
            self._check_frame(frame, name, FrameKind.CONTRIBUTION, self.fingerprint)
            position = self.agreement.find_position(name)
            if frame.party != position:
                raise RemoteProtocolError(
                    f"{name} is contributor {position} and sent the contribution of {frame.party}"
                )
            frames.append(frame)
        self._check_one_message(frames, binding_digest)
        if frames[0].step <= self._last_step:
            raise RemoteProtocolError(
                f"contributions to step {frames[0].step} arrived after step {self._last_step} was "
                "added; they are replayed"
            )
        self._last_step = frames[0].step
        self._underway = replace(frames[0], blobs=())
        return tuple(frames)

    def sum_of(self, frames: Sequence[Frame], blobs: Sequence[bytes]) -> bytes:
        """Pack the sum of these contributions, with their number in the frame's party field."""
        self._underway = None
        return replace(frames[0], kind=FrameKind.SUM, party=len(frames), blobs=tuple(blobs)).pack()

    def open_sum(self, combined: bytes, shape: tuple[int, int], binding: StepBinding) -> Frame:
        """Return the frame of the sum that answers `binding`; its step is used then.

        `combined`: what the aggregator sent.
        """
        sender = self.agreement.combiner
        frame = Frame.parse(combined, sender=sender)
        self._check_frame(frame, sender, FrameKind.SUM, self.fingerprint)
        if not self.least <= frame.party <= len(self.agreement.contributors):
            raise RemoteProtocolError(
                f"{sender} sent a sum of {frame.party} contributions, expected "
                f"{self.least} to {len(self.agreement.contributors)}"
            )
        if frame.shape != shape:
            raise RemoteProtocolError(
                f"{sender} sent a sum of shape {frame.shape}, expected {shape}"
            )
        if (frame.step, frame.binding) != (binding.step, binding.digest):
            raise RemoteProtocolError(
                f"{sender} sent the sum of step {frame.step} for another message than the one that "
                f"step {binding.step} asked for"
            )
        self.begin_step(binding)
        return frame

    def pack_request(self, to: str, blobs: Sequence[bytes]) -> bytes:
        """Pack the aggregator's second-round request to contributor `to` about the current step."""
        return self._pack_second_round(FrameKind.REQUEST, to, blobs)

    def open_request(self, request: bytes, me: str) -> Frame:
        """Return the aggregator's request about the last contribution of `me`."""
        sender = self.agreement.combiner
        frame = Frame.parse(request, sender=sender)
        self._check_second_round(frame, sender, FrameKind.REQUEST, me)
        return frame

    def pack_answer(self, me: str, blobs: Sequence[bytes]) -> bytes:
        """Pack the answer of `me` to a second-round request, and forget the contribution: each is
        answered once.

        `blobs`: the frame's parts, such as ciphertexts or shares.
        """
        self.require_own_process()
        body = self._pack_second_round(FrameKind.ANSWER, me, blobs)
        self._underway = None
        return body

    def open_answers(
        self, answers: Mapping[str, bytes], asked: Collection[str], binding_digest: bytes | None
    ) -> tuple[Frame, ...]:
        """Parse one second-round answer of each party that was asked; return the frames in the
        order of `asked`. Raises RemoteProtocolError: an answer is missing, or about another step or
        message.

        `binding_digest`: what all must answer; None: the messages are only compared with each
        other.
        """
        names = self._check_senders(answers, asked, "answer")
        frames = tuple(Frame.parse(answers[name], sender=name) for name in names)
        for name, frame in zip(names, frames, strict=True):
            self._check_second_round(frame, name, FrameKind.ANSWER, name)
        if binding_digest is not None and self._require_pending().binding != binding_digest:
            raise RemoteProtocolError(
                f"the answers to step {self._require_pending().step} are about another message "
                "than the one agreed"
            )
        return frames

    def _check_senders(
        self, bodies: Mapping[str, bytes], expected: Collection[str], subject: str
    ) -> tuple[str, ...]:
        """Return the expected senders that are present, in order. Raises RemoteProtocolError: fewer
        than `least` of them, or a sender that is not expected; `subject` names their message.

        `bodies`: each sender's message.
        """
        present = tuple(filter(bodies.__contains__, expected))
        unknown = sorted(set(bodies) - set(expected))
        if unknown or len(present) < self.least:
            missing = [name for name in expected if name not in bodies]
            quorum = "each" if self.least == len(expected) else f"at least {self.least}"
            raise RemoteProtocolError(
                f"a sum needs one {subject} of {quorum} of {', '.join(expected)}; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        return present

    def _check_frame(self, frame: Frame, sender: str, kind: FrameKind, mark: bytes | None) -> None:
        """Raise RemoteProtocolError unless the frame has this kind, this sum's name and, where
        `mark` is given, this fingerprint.
        """
        if (frame.kind, frame.name) != (kind, self.name):
            raise RemoteProtocolError(
                f"{sender} sent {frame.kind.noun} of {frame.name}, expected {kind.noun} of "
                f"{self.name}"
            )
        if mark is not None and frame.fingerprint != mark:
            raise RemoteProtocolError(
                f"{sender} uses other parameters or another public key for {self.name}; "
                "all parties must hold the same agreement and setup"
            )

    def _check_one_message(self, frames: Sequence[Frame], binding_digest: bytes | None) -> None:
        """Raise RemoteProtocolError unless all frames have one step, one shape and one binding
        digest: that of the first frame where `binding_digest` is None.
        """
        first = frames[0]
        agreed = self.agreement.contributors
        expected = first.binding if binding_digest is None else binding_digest
        for frame in frames:
            name = agreed[frame.party]
            if (frame.step, frame.shape) != (first.step, first.shape):
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

    def _require_pending(self) -> Frame:
        """Return the contribution that waits for its second round. Raises LocalProtocolError: none
        does.
        """
        if self._underway is None:
            raise LocalProtocolError(
                "no contribution waits for a second round; each step is answered once"
            )
        return self._underway

    def _pack_second_round(self, kind: FrameKind, party: str, blobs: Sequence[bytes]) -> bytes:
        """Pack a second-round frame to or from `party` about the contribution of the
        current step.

        `blobs`: the frame's parts, such as ciphertexts or shares.
        """
        position = self.agreement.find_position(party)
        return replace(
            self._require_pending(), kind=kind, party=position, blobs=tuple(blobs)
        ).pack()

    def _check_second_round(self, frame: Frame, sender: str, kind: FrameKind, party: str) -> None:
        """Raise RemoteProtocolError unless a second-round frame is about the current step's
        contribution and about `party`.
        """
        underway = self._require_pending()
        position = self.agreement.find_position(party)
        self._check_frame(frame, sender, kind, self.fingerprint)
        about = (frame.step, frame.binding, frame.shape)
        if about != (underway.step, underway.binding, underway.shape):
            raise RemoteProtocolError(
                f"{sender} sent {kind.noun} about step {frame.step}, or another message "
                f"or shape, while step {underway.step} is under way"
            )
        if frame.party != position:
            raise RemoteProtocolError(
                f"{party} is contributor {position}, and the {kind.name.lower()} from {sender} is "
                f"for contributor {frame.party}"
            )
