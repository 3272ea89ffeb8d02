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
    """The kinds of messages of a sum."""

    SETUP = 1
    CONTRIBUTION = 2
    SUM = 3
    REQUEST = 4
    ANSWER = 5

    @property
    def noun_with_article(self) -> str:
        """Return this kind with its article, for error messages."""
        return ("an " if self is FrameKind.ANSWER else "a ") + self.name.lower()


_KINDS = frozenset(FrameKind)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A message of a sum: a header that names sum, step and party, and blobs, its content.

    Attributes:
        kind: what the message is: set-up, contribution, sum, or second-round request or answer.
        name: name of the sum, e.g. "plain + pairwise masks"; 1 to 32 printable ASCII characters.
        index_or_count: in contributions, requests and answers the position in the agreement of the
            contributor that sends it or is asked (`contributor_position`); in a sum the number of
            contributions in it (`contribution_count`); in set-up messages the number of
            contributors.
        step: the number of its step; 0 for set-up.
        rows, columns: shape of the values; 0, 0 for set-up.
        binding: 32 bytes; the digest of the step's `StepBinding`, or of the agreement for set-up.
        fingerprint: 32 bytes; the digest of the agreement, the parameters and the public key.
        blobs: the content, e.g. ciphertexts, masked numbers or shares.
    """

    kind: FrameKind
    name: str
    index_or_count: int
    step: int
    rows: int
    columns: int
    binding: bytes
    fingerprint: bytes
    blobs: tuple[bytes, ...] = field(repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def contributor_position(self) -> int:
        """Return the position of the contributor that sends this frame or is asked by it."""
        return self.index_or_count

    @property
    def contribution_count(self) -> int:
        """Return how many contributions are in the sum that this frame carries."""
        return self.index_or_count

    def pack(self) -> bytes:
        """Return the frame as bytes: the header, the size of each blob, the blobs. Raises
        LocalProtocolError: a field is out of range.
        """
        name = self.name.encode("ascii")
        has_valid_name = 0 < len(name) <= _NAME_BYTES
        if not has_valid_name or len(self.blobs) > _MAX_BLOBS:
            raise LocalProtocolError(
                f"a frame has a name of 1 to {_NAME_BYTES} characters and at most {_MAX_BLOBS} "
                f"blobs, got {self.name!r} and {len(self.blobs)}"
            )
        try:
            header = _HEADER.pack(
                _MAGIC,
                _VERSION,
                self.kind,
                self.index_or_count,
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
        """Decode a frame (message); every size is checked before anything is copied.

        Raises:
            RemoteProtocolError: the bytes are no frame of this version; the error names `sender`.
            LocalProtocolError: `data` is of another type, such as bytearray.
        """
        if type(data) is not bytes:
            raise LocalProtocolError(
                f"a frame of a secure sum is bytes, got {type(data).__name__} from {sender}"
            )
        if len(data) < _HEADER.size:
            raise _make_frame_error(
                sender, f"has {len(data)} bytes, its header alone {_HEADER.size}"
            )
        header = _HEADER.unpack_from(data)
        magic, version, kind, position, name, step, rows, columns, binding, fingerprint, count = (
            header
        )
        if magic != _MAGIC or version != _VERSION:
            raise _make_frame_error(
                sender, f"is no frame of version {_VERSION}; run the same release"
            )
        if kind not in _KINDS or rows * columns > _MAX_VALUES:
            raise _make_frame_error(sender, "has an unknown kind or an impossible shape")
        name = name.rstrip(b"\0")  # the header has a field of fixed size for it
        if not name or not name.isascii() or not name.decode("ascii").isprintable():
            raise _make_frame_error(sender, "names no sum")
        return cls(
            kind=FrameKind(kind),
            name=name.decode("ascii"),
            index_or_count=position,
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
                f"{sender} sent {len(self.blobs)} parts in {self.kind.noun_with_article}, "
                f"expected {count}"
            )


def _make_frame_error(sender: str, subject: str) -> RemoteProtocolError:
    """Return the error for a malformed frame; `subject` says what is wrong and continues the
    sentence "a frame of a secure sum from X ...".
    """
    return RemoteProtocolError(f"a frame of a secure sum from {sender} {subject}")


def _parse_blobs(data: bytes, count: int, sender: str) -> tuple[bytes, ...]:
    """Return the `count` blobs (the content) of a frame, whose bytes are a header, the size of each
    blob and the blobs. Raises RemoteProtocolError, which names `sender`: the announced sizes do not
    add up to the bytes that arrived.
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
    """Return SHA-256 over agreement, public parameters and the receiver's public key (empty: none).
    Every frame carries this fingerprint; a party refuses frames with another one.
    """
    canonical = json.dumps(dict(parameters), sort_keys=True).encode()
    fields = b"".join(len(content).to_bytes(8, "big") + content for content in (canonical, key))
    return hashlib.sha256(b"secure-apfed sum v1" + agreement.digest + fields).digest()


class AgreedFrames:
    """The writer and checker of one role's frames (messages) of one sum under one agreement.

    A step is `pack_contribution` at a passive and `parse_contributions`, `pack_sum` at the
    aggregator. A second round adds `pack_request` and `parse_answers` at the aggregator,
    `parse_request` and `pack_answer` at the passive. The contribution that waits for its second
    round is remembered, and forgotten with the answer.

    Steps only go up: a step at or below the last one is refused, and so is any step in a forked
    process, whose copy of the role would use it a second time.

    Attributes:
        min_contributors: the least number of contributors with which a step has a sum.
    """

    def __init__(
        self, agreement: SumAgreement, name: str, fingerprint: bytes, minimum: int | None = None
    ) -> None:
        """Make the writer and checker of one role, before its first step.

        Args:
            agreement: what all parties agreed on.
            name: name of the sum, which its frames carry.
            fingerprint: SHA-256 of agreement, parameters and public key (`compute_fingerprint`).
            minimum: the least number of contributors with which a step has a sum; None: all.

        Raises LocalProtocolError: the agreement has a threshold below the number of contributors,
        but this sum (`minimum` is None) needs all of them.
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
        self.min_contributors = contributors if minimum is None else minimum
        self._last_step = -1  # the last step that was used; none yet
        self._is_closed = False  # set when the role is suspended
        # The contribution that waits for its second round, without its blobs.
        self._pending_header: Frame | None = None
        # A function that raises LocalProtocolError in a forked process, which has a copy of this
        # role and would use its steps a second time.
        self.require_own_process = ForkCheck(f"this role of {name}").require_own_process

    def begin_step(self, binding: StepBinding) -> None:
        """Mark the step of `binding` as used. Raises LocalProtocolError: the binding belongs to
        another session, or its step is not above all former steps, so that a mask or nonce would be
        used twice; or the role is suspended or a forked copy.
        """
        self.require_usable()
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

    def require_usable(self) -> None:
        """Raise LocalProtocolError in a forked process, or if the role was suspended
        (`suspended_roles.suspend_role`).
        """
        self.require_own_process()
        if self._is_closed:
            raise LocalProtocolError(f"this role of {self.name} was put away; take it up first")

    def export_step(self) -> int:
        """Return the last step that was used, from which a suspended role is resumed, and close
        this object: it can begin no further step.
        """
        self._is_closed = True
        return self._last_step

    def import_step(self, last_step: int) -> None:
        """Continue after the last step that `export_step` returned."""
        self._last_step = last_step

    def next_binding(self, flat: Flattened) -> StepBinding:
        """Return the binding (step and message that a contribution answers) for a caller that gives
        none: this party's next step, a digest of the structure and shapes of its values in place of
        row positions, and an empty message.
        """
        session = self.agreement.session
        return StepBinding.from_contents(
            session, self._last_step + 1, rows=flat.digest, message=b""
        )

    def pack_setup(self, *blobs: bytes) -> bytes:
        """Encode a set-up message with these blobs."""
        return replace(self.make_frame(FrameKind.SETUP, (0, 0)), blobs=blobs).pack()

    def make_frame(self, kind: FrameKind, shape: tuple[int, int]) -> Frame:
        """Return a frame (message) of this kind without blobs, for values of `shape` (rows,
        columns). Its other fields are those of a set-up message, such as step 0; callers replace
        the fields that differ.
        """
        return Frame(
            kind=kind,
            name=self.name,
            index_or_count=len(self.agreement.contributors),
            step=0,
            rows=shape[0],
            columns=shape[1],
            binding=self.agreement.digest,
            fingerprint=self.fingerprint,
            blobs=(),
        )

    def parse_setup(self, body: bytes, sender: str) -> Frame:
        """Decode a set-up message. The caller checks whether the sender may send it, and its
        fingerprint, which covers a public key that this role may not have yet.

        Raises RemoteProtocolError: the message is no set-up message of this sum and agreement.
        """
        frame = Frame.parse(body, sender=sender)
        self._check_frame(frame, sender, FrameKind.SETUP, fingerprint=None)
        if frame.binding != self.agreement.digest:
            raise RemoteProtocolError(
                f"{sender} sets up a sum under another agreement; compare the two configurations"
            )
        return frame

    def parse_own_setup(self, body: bytes, sender: str, me: str) -> Frame:
        """Decode a set-up message to `me`, whose fingerprint (digest of agreement, parameters and
        public key) must be this role's.

        Raises RemoteProtocolError: the message is no set-up message of this sum, agreement and
        parameters.
        """
        frame = self.parse_setup(body, sender)
        if frame.fingerprint != self.fingerprint:
            raise RemoteProtocolError(
                f"{sender} sets up {frame.name} with other parameters than {me}"
            )
        return frame

    def pack_contribution(
        self, me: str, binding: StepBinding, shape: tuple[int, int], blobs: Sequence[bytes]
    ) -> bytes:
        """Return a passive's contribution as a message, and store its header, with which a request
        of the second round, if there is one, must agree.

        Args:
            me: the passive's name.
            binding: the step and the active's message that the contribution answers.
            shape: (rows, columns) of the values.
            blobs: the protected values, e.g. ciphertexts or shares.
        """
        self._pending_header = replace(
            self.make_frame(FrameKind.CONTRIBUTION, shape),
            index_or_count=self.agreement.find_position(me),
            step=binding.step,
            binding=binding.digest,
        )
        return replace(self._pending_header, blobs=tuple(blobs)).pack()

    def parse_contributions(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None
    ) -> tuple[Frame, ...]:
        """Decode and check the contributions to one step at the aggregator, and mark the step as
        used; return the frames in the agreement's order.

        Args:
            contributions: bytes by authenticated sender.
            binding_digest: digest of the step and of the active's message that all contributions
                must answer; None: the aggregator does not know it, and the contributions are only
                compared with each other.

        Raises RemoteProtocolError: a sender is missing or unknown, a frame is malformed, the frames
        answer different messages (equivocation by the active), or they are replayed.
        """
        names = self._check_senders(contributions, self.agreement.contributors, "contribution")
        frames = []
        for name in names:
            frame = Frame.parse(contributions[name], sender=name)
            self._check_frame(frame, name, FrameKind.CONTRIBUTION, self.fingerprint)
            position = self.agreement.find_position(name)
            if frame.contributor_position != position:
                raise RemoteProtocolError(
                    f"{name} is contributor {position} and sent the contribution of "
                    f"{frame.contributor_position}"
                )
            frames.append(frame)
        self._check_one_message(frames, binding_digest)
        if frames[0].step <= self._last_step:
            raise RemoteProtocolError(
                f"contributions to step {frames[0].step} arrived after step {self._last_step} was "
                "added; they are replayed"
            )
        self._last_step = frames[0].step
        self._pending_header = replace(frames[0], blobs=())
        return tuple(frames)

    def pack_sum(self, frames: Sequence[Frame], blobs: Sequence[bytes]) -> bytes:
        """Return the aggregator's message to the receiver with the sum of contributions. It says
        how many contributions are in the sum.

        Args:
            frames: the contributions, whose step and shape the message repeats.
            blobs: the sum of the contributions, still encrypted or masked.
        """
        self._pending_header = None
        return replace(
            frames[0], kind=FrameKind.SUM, index_or_count=len(frames), blobs=tuple(blobs)
        ).pack()

    def parse_sum(self, combined: bytes, shape: tuple[int, int], binding: StepBinding) -> Frame:
        """Decode the aggregator's message with a sum at the receiver, and mark its step as used.

        Args:
            combined: the bytes of the message.
            shape: (rows, columns) that the sum must have.
            binding: the step and the active's message that the sum must answer.

        Raises RemoteProtocolError: the message is malformed, has another shape, belongs to another
        step or message of the active, or has too few contributions.
        """
        sender = self.agreement.aggregator
        frame = Frame.parse(combined, sender=sender)
        self._check_frame(frame, sender, FrameKind.SUM, self.fingerprint)
        contributor_count = len(self.agreement.contributors)
        if not self.min_contributors <= frame.contribution_count <= contributor_count:
            raise RemoteProtocolError(
                f"{sender} sent a sum of {frame.contribution_count} contributions, expected "
                f"{self.min_contributors} to {contributor_count}"
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

    def pack_request(self, contributor: str, blobs: Sequence[bytes]) -> bytes:
        """Encode the aggregator's second-round request to `contributor` about the current
        step.
        """
        return self._pack_second_round(FrameKind.REQUEST, contributor, blobs)

    def parse_request(self, request: bytes, me: str) -> Frame:
        """Decode the aggregator's request about the last contribution of `me`. Raises
        RemoteProtocolError: the request is malformed, or about another step, message or party.
        """
        sender = self.agreement.aggregator
        frame = Frame.parse(request, sender=sender)
        self._check_second_round(frame, sender, FrameKind.REQUEST, me)
        return frame

    def pack_answer(self, me: str, blobs: Sequence[bytes]) -> bytes:
        """Return the answer of the contributor `me` to the aggregator's second-round request. The
        contribution is forgotten afterwards, so that only one request about it is answered.

        `blobs`: the content of the answer, e.g. shares.
        """
        self.require_own_process()
        body = self._pack_second_round(FrameKind.ANSWER, me, blobs)
        self._pending_header = None
        return body

    def parse_answers(
        self,
        answers: Mapping[str, bytes],
        asked_contributors: Collection[str],
        binding_digest: bytes | None,
    ) -> tuple[Frame, ...]:
        """Decode and check the second-round answers at the aggregator; return the frames in the
        order of `asked`.

        Args:
            answers: bytes by authenticated sender; some of those asked may be missing, as long as
                `min_contributors` answered.
            asked: the contributors that got a request.
            binding_digest: digest of the step and of the active's message that all contributions
                must answer; None: the aggregator does not know it.

        Raises RemoteProtocolError: there are too few answers, or one is malformed or about another
        step or message.
        """
        names = self._check_senders(answers, asked_contributors, "answer")
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
        self, bodies: Mapping[str, bytes], expected: Collection[str], message_noun: str
    ) -> tuple[str, ...]:
        """Return the expected senders that sent a message, in the order of `expected`.

        Args:
            bodies: messages by sender.
            expected: the parties that may send one.
            message_noun: what errors call the message.

        Raises RemoteProtocolError: fewer parties than `min_contributors` sent a message, or a party
            that is not expected sent one.
        """
        present_senders = tuple(name for name in expected if name in bodies)
        unknown = sorted(set(bodies) - set(expected))
        if unknown or len(present_senders) < self.min_contributors:
            missing = [name for name in expected if name not in bodies]
            quorum = (
                "each"
                if self.min_contributors == len(expected)
                else f"at least {self.min_contributors}"
            )
            raise RemoteProtocolError(
                f"a sum needs one {message_noun} of {quorum} of {', '.join(expected)}; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        return present_senders

    def _check_frame(
        self, frame: Frame, sender: str, kind: FrameKind, fingerprint: bytes | None
    ) -> None:
        """Raise RemoteProtocolError, which names `sender`, unless the frame (message) has this
        kind, this sum's name, and this fingerprint: a digest of agreement, parameters and public
        key (None: any fingerprint).
        """
        if (frame.kind, frame.name) != (kind, self.name):
            raise RemoteProtocolError(
                f"{sender} sent {frame.kind.noun_with_article} of {frame.name}, expected "
                f"{kind.noun_with_article} of {self.name}"
            )
        if fingerprint is not None and frame.fingerprint != fingerprint:
            raise RemoteProtocolError(
                f"{sender} uses other parameters or another public key for {self.name}; "
                "all parties must hold the same agreement and setup"
            )

    def _check_one_message(self, frames: Sequence[Frame], binding_digest: bytes | None) -> None:
        """Raise RemoteProtocolError unless all contributions have the same step and shape and
        answer the same message of the active.

        `frames`: the contributions. `binding_digest`: digest of the step and the message that they
        must answer; None: that of the first contribution.
        """
        first = frames[0]
        contributors = self.agreement.contributors
        expected = first.binding if binding_digest is None else binding_digest
        for frame in frames:
            name = contributors[frame.contributor_position]
            if (frame.step, frame.shape) != (first.step, first.shape):
                raise RemoteProtocolError(
                    f"{name} contributed {frame.rows}x{frame.columns} values to step {frame.step}, "
                    f"but {contributors[first.contributor_position]} {first.rows}x{first.columns} "
                    f"to step {first.step}"
                )
            if frame.binding != expected:
                raise RemoteProtocolError(
                    f"{name} answered another message than "
                    f"{'the others' if binding_digest is None else 'the one agreed'} in step "
                    f"{frame.step}; {self.agreement.receiver} may have sent them different "
                    "representations"
                )

    def _require_pending(self) -> Frame:
        """Return the header of the contribution that waits for its second round. Raises
        LocalProtocolError: no contribution waits.
        """
        if self._pending_header is None:
            raise LocalProtocolError(
                "no contribution waits for a second round; each step is answered once"
            )
        return self._pending_header

    def _pack_second_round(self, kind: FrameKind, party: str, blobs: Sequence[bytes]) -> bytes:
        """Return a message of the second round about the contribution of the current step: a
        request to `party`, or an answer from `party`, depending on `kind`.

        `blobs`: the content of the message.
        """
        position = self.agreement.find_position(party)
        frame = replace(
            self._require_pending(), kind=kind, index_or_count=position, blobs=tuple(blobs)
        )
        return frame.pack()

    def _check_second_round(self, frame: Frame, sender: str, kind: FrameKind, party: str) -> None:
        """Raise RemoteProtocolError unless a message of the second round is of this kind and about
        the current step's contribution, and names `party`, which is asked or answers.

        `sender`: the party that sent the frame, for errors.
        """
        pending = self._require_pending()
        position = self.agreement.find_position(party)
        self._check_frame(frame, sender, kind, self.fingerprint)
        contribution = (frame.step, frame.binding, frame.shape)
        if contribution != (pending.step, pending.binding, pending.shape):
            raise RemoteProtocolError(
                f"{sender} sent {kind.noun_with_article} about step {frame.step}, or another "
                f"message or shape, while step {pending.step} is under way"
            )
        if frame.contributor_position != position:
            raise RemoteProtocolError(
                f"{party} is contributor {position}, and the {kind.name.lower()} from {sender} is "
                f"for contributor {frame.contributor_position}"
            )
