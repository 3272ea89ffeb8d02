"""Record of a session by one party for its own report: the flows of all its messages, and the
content of those that it sent.

Run by: every party that runs in a process of its own, for itself. It counts messages and bytes that
it receives. If its settings name attacks, it keeps what it sent, in memory alone, to measure after
the run what that reveals of its own rows.
"""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from secure_apfed.contract import PartyRole
from secure_apfed.data import OwnData
from secure_apfed.exchange import Envelope, Flow, Kind, Transcript, unpack_own_tensors
from secure_apfed.runs.past_sessions import NO_EARLIER_SESSIONS, PastSessions
from secure_apfed.settings import RunSettings, TranscriptSettings

_MAX_STORED_BYTES = 2**28  # stored bytes of the first releases, and as many of the last
_NO_ROWS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class SentBatch:
    """A batch of B rows whose values this party sent, or contributed to a secure sum.

    Attributes:
        kind: kind of the message.
        receiver: the peer that reads the message, or the sum.
        step: step of the run.
        row_positions: positions of the rows in the order of the aligned people, (B,).
        values: representations or gradients of these rows, (B, *shape of one row).
    """

    kind: Kind
    receiver: str
    step: int
    row_positions: Tensor = field(repr=False)
    values: Tensor = field(repr=False)

    @property
    def byte_count(self) -> int:
        """The bytes of the batch in memory."""
        return self.values.nbytes + self.row_positions.nbytes


class OwnRecord:
    """A record of one party's own messages: their number and size, and maybe what it sent.

    As a `LinkObserver` it is told of each message. Attacks on the party itself read what it sent,
    to measure what others could learn from it.

    Attributes:
        sent_by_me: number and size of the messages that it sent in all sessions, by receiver and
            kind; received_by_me: of those that it received.
        earlier_sessions: totals of its sessions before this one.
        table_row_by_person: for each aligned person, in their common order, the row of the party's
            table; -1: the party does not have the person. Set by the party once it is known.
    """

    def __init__(
        self,
        me: str,
        role: PartyRole,
        config: RunSettings,
        data: OwnData | None,
        *,
        active: str,
        should_store_batches: bool = False,
        earlier_sessions: PastSessions = NO_EARLIER_SESSIONS,
    ) -> None:
        """Start with the totals of earlier sessions, and no stored batches.

        Args:
            me: the party's name.
            role: the party's role.
            config: the run's settings.
            data: the party's data; None: it has no rows.
            active: the active's name.
            should_store_batches: whether the batches that the party sends are stored: of a long run
                up to 256 MB from the start, and as many from the end.
            earlier_sessions: the totals of its earlier sessions, to which its counts are added.
        """
        self.me = me
        self.role = role
        self.config = config
        self.data = data
        self.active = active
        only_counts = TranscriptSettings(keep="none")  # without the messages' contents
        self.sent_by_me = Transcript(only_counts)
        self.received_by_me = Transcript(only_counts)
        self.earlier_sessions = earlier_sessions
        self.sent_by_me.add_flows(earlier_sessions.sent)
        self.received_by_me.add_flows(earlier_sessions.received)
        self.table_row_by_person = _NO_ROWS
        self._should_store_batches = should_store_batches
        self._first_batches = list[SentBatch]()  # batches from the start of the run
        self._first_bytes = 0
        # The newest batches, once `_first_batches` are full.
        self._last_batches = deque[SentBatch]()
        self._last_bytes = 0
        # By receiver: step and rows of the last request.
        self._last_request_by_receiver: dict[str, tuple[int, Tensor]] = {}
        self._last_digest_by_kind: dict[Kind, bytes] = {}  # of the last payload

    @property
    def message_flows(self) -> tuple[Flow, ...]:
        """The number and size of messages sent and received, by sender, receiver and kind."""
        return (*self.sent_by_me.flows, *self.received_by_me.flows)

    @property
    def flows_as_json(self) -> list[dict[str, Any]]:
        """The flows, as JSON values."""
        return [asdict(flow) for flow in self.message_flows]

    @property
    def batches_by_receiver(self) -> Mapping[tuple[Kind, str], Sequence[SentBatch]]:
        """The stored batches by kind and receiver, in the order of sending.

        Those in the middle of a long run are missing, since memory is limited.
        """
        batches: dict[tuple[Kind, str], list[SentBatch]] = {}
        for batch in (*self._first_batches, *self._last_batches):
            batches.setdefault((batch.kind, batch.receiver), []).append(batch)
        return batches

    def observe_outgoing(self, envelope: Envelope, frame: bytes) -> None:
        """Count a sent message, and store the batch in it, if batches are stored."""
        self.sent_by_me.record_envelope(envelope, len(frame))
        if self._should_store_batches:
            for batch in self._parse_batches(envelope):
                self._keep_batch(batch)

    def observe_incoming(self, envelope: Envelope, frame: bytes) -> None:
        """Count a received message."""
        self.received_by_me.record_envelope(envelope, len(frame))

    def observe_refusal(self, sender: str, frame: bytes) -> None:
        """Do nothing: a message that could not be decrypted has no kind to count it under."""

    def record_contribution(self, step: int, rows_B: Tensor, values_BD: Tensor) -> None:
        """Store a contribution to a secure sum as it was before encryption or masks.

        `rows_B`: positions of the B rows among the aligned people. `values_BD`: D numbers for each
        of the B rows.
        """
        if self._should_store_batches:
            self._keep_batch(SentBatch(Kind.CONTRIBUTION, self.active, step, rows_B, values_BD))

    def _parse_batches(self, envelope: Envelope) -> Iterator[SentBatch]:
        """Yield the batch of representations or gradients in a sent message, if it has one.

        The same payload to several receivers is one batch. A message of gradients does not name its
        rows: they are the rows of the request to the same receiver in the same step.
        """
        kind = envelope.kind
        receiver = envelope.receiver
        step = envelope.step
        if kind not in (Kind.REQUEST, Kind.REPRESENTATIONS, Kind.GRADIENTS):
            return
        tensors = unpack_own_tensors(envelope.payload)
        digest = hashlib.sha256(envelope.payload).digest()
        if kind is Kind.REQUEST:
            self._last_request_by_receiver[receiver] = step, tensors.get("rows", _NO_ROWS)
        elif self._last_digest_by_kind.get(kind) != digest:  # else the same, to another receiver
            self._last_digest_by_kind[kind] = digest
            if kind is Kind.REPRESENTATIONS:
                yield SentBatch(kind, receiver, step, tensors["rows"], tensors["z"])
            else:
                requested_step, rows = self._last_request_by_receiver.get(
                    receiver, (step, _NO_ROWS)
                )
                rows = rows if requested_step == step else _NO_ROWS
                yield SentBatch(kind, receiver, step, rows, tensors["gradient"])

    def _keep_batch(self, batch: SentBatch) -> None:
        """Store a batch: the first ones up to the memory limit, after that only the newest."""
        if len(batch.row_positions) != len(batch.values) or not len(batch.row_positions):
            return  # attacks need the row of each value
        if self._first_bytes + batch.byte_count <= _MAX_STORED_BYTES and not self._last_batches:
            self._first_bytes += batch.byte_count
            self._first_batches.append(batch)
            return
        self._last_batches.append(batch)
        self._last_bytes += batch.byte_count
        while self._last_bytes > _MAX_STORED_BYTES:
            self._last_bytes -= self._last_batches.popleft().byte_count
