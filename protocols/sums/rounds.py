"""Frames of a second round: what a backend asks and answers after the contributions.

Run by: every role of a sum of two rounds. Protects from: requests and answers of another step,
message or party, and a second answer to one step; the frames remember the contribution that
is under way, and forget it with the answer.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from protocols.errors import LocalProtocolError, RemoteProtocolError
from protocols.sums.agreed_frames import AgreedFrames
from protocols.sums.agreement import StepBinding
from protocols.sums.frame import Frame, FrameKind

__all__ = ["TwoRoundFrames"]


class TwoRoundFrames(AgreedFrames):
    """Frames of a backend with a second round; one for each role.

    A step is `contribution`, `open_request`, `answer` at a passive, and `open_contributions`,
    `request`, `open_answers` at the aggregator.
    """

    _underway: Frame | None = None

    def contribution(
        self, me: str, binding: StepBinding, shape: tuple[int, int], blobs: Sequence[bytes]
    ) -> bytes:
        """Frame the protected values of `me`, and expect a request about them."""
        self._underway = self._contributed(me, binding, shape, blobs=())
        return super().contribution(me, binding, shape, blobs)

    def open_contributions(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None
    ) -> tuple[Frame, ...]:
        """See `AgreedFrames`; the answers must be about these contributions."""
        frames = super().open_contributions(contributions, binding_digest)
        self._underway = replace(frames[0], blobs=())
        return frames

    def request(self, to: str, blobs: Sequence[bytes]) -> bytes:
        """Frame what the aggregator asks of the contributor called `to`.

        Raises:
            LocalProtocolError: no contributions were taken.
        """
        return self._about_underway(FrameKind.REQUEST, to, blobs)

    def open_request(self, request: bytes, me: str) -> Frame:
        """Return the aggregator's request about the last contribution of `me`.

        Raises:
            LocalProtocolError: nothing waits for a request.
            RemoteProtocolError: it is malformed, or about another party, step or message.
        """
        sender = self.agreement.combiner
        frame = Frame.parse(request, sender=sender)
        self._check_about_underway(frame, sender, FrameKind.REQUEST, me)
        return frame

    def answer(self, me: str, blobs: Sequence[bytes]) -> bytes:
        """Frame the answer of `me`; nothing waits for a request then.

        Raises:
            LocalProtocolError: the step was answered before, or by another process.
        """
        self.require_own_process()
        body = self._about_underway(FrameKind.ANSWER, me, blobs)
        self._underway = None
        return body

    def open_answers(
        self, answers: Mapping[str, bytes], asked: Collection[str], binding_digest: bytes | None
    ) -> tuple[Frame, ...]:
        """Return the answers that came in the order of `asked`, all about the last contributions.

        Raises:
            LocalProtocolError: nobody was asked.
            RemoteProtocolError: too few came, or one is unknown, malformed, or about something
                else.
        """
        names = self.present(answers, asked, "answer")
        frames = tuple(Frame.parse(answers[name], sender=name) for name in names)
        for name, frame in zip(names, frames, strict=True):
            self._check_about_underway(frame, name, FrameKind.ANSWER, name)
        if binding_digest is not None and self._waiting().binding != binding_digest:
            raise RemoteProtocolError(
                f"the answers to step {self._waiting().step} are about another message than the "
                "one agreed"
            )
        return frames

    def sum_of(self, frames: Sequence[Frame], blobs: Sequence[bytes]) -> bytes:
        """See `AgreedFrames`; nothing is under way then."""
        self._underway = None
        return super().sum_of(frames, blobs)

    def _waiting(self) -> Frame:
        if self._underway is None:
            raise LocalProtocolError(
                "no contribution waits for a second round; each step is answered once"
            )
        return self._underway

    def _about_underway(self, kind: FrameKind, party: str, blobs: Sequence[bytes]) -> bytes:
        position = self.agreement.position(party)
        return replace(self._waiting(), kind=kind, party=position, blobs=tuple(blobs)).pack()

    def _check_about_underway(self, frame: Frame, sender: str, kind: FrameKind, party: str) -> None:
        underway, position = self._waiting(), self.agreement.position(party)
        self.check(frame, sender, kind)
        about = (frame.step, frame.binding, frame.rows, frame.columns)
        if about != (underway.step, underway.binding, underway.rows, underway.columns):
            raise RemoteProtocolError(
                f"{sender} sent {kind.told} about step {frame.step}, or another message "
                f"or shape, while step {underway.step} is under way"
            )
        if frame.party != position:
            raise RemoteProtocolError(
                f"{party} is contributor {position}, and the {kind.name.lower()} from {sender} is "
                f"for contributor {frame.party}"
            )
