"""The transcript: who saw what, when, and how many bytes.

Run by: the experimenter, who drives all parties in one process and is told of every envelope that
is sent (see `secure_apfed.exchange.drivers`); it is not a party. Privacy reports
read the flows; attacks read the kept envelopes, opened as their receivers saw them. What the
active decodes is in no message, so its record of the sums is kept beside them.
"""

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
from torch import Tensor

from secure_apfed.errors import DroppedTranscriptWarning
from secure_apfed.exchange.envelope import Envelope, Kind
from secure_apfed.settings.run import TranscriptSettings

MOST_MEGABYTES = 512.0
"""Of payloads that are kept."""

_SUM = "sum"
KEPT_KINDS = frozenset(
    {Kind.REQUEST, Kind.LABELS, Kind.VOTES, Kind.REPRESENTATIONS, Kind.GRADIENTS, Kind.SUM}
)


_Way = tuple[str, str, Kind]


@dataclass(frozen=True)
class Flow:
    """All messages of one kind from one party to another.

    Attributes:
        messages: their number; first_step, last_step: when (-1: before training).
        payload_bytes: what the receiver read; wire_bytes: with headers and seals.
    """

    sender: str
    receiver: str
    kind: Kind
    messages: int
    payload_bytes: int
    wire_bytes: int
    first_step: int
    last_step: int


class Transcript:
    """Records every envelope that is sent; keeps some, from the first `begin_epoch` on."""

    def __init__(self, settings: TranscriptSettings) -> None:
        self._settings = settings
        self._flows: dict[_Way, list[int]] = {}  # the numbers of a `Flow`, in its order
        self._epochs: dict[int, list[Envelope]] = {}
        self._opened: dict[int, dict[int, bytes]] = {}
        self._epoch: int | None = None
        self._payloads: dict[bytes, bytes] = {}
        self._held_bytes = 0
        self.wire_bytes = 0

    @property
    def flows(self) -> tuple[Flow, ...]:
        """What was sent, by sender, receiver and kind."""
        return tuple(Flow(*way, *numbers) for way, numbers in [*self._flows.items()])

    @property
    def kept(self) -> Mapping[int, tuple[Envelope, ...]]:
        """The kept envelopes by epoch, in the order of sending."""
        return {epoch: tuple(envelopes) for epoch, envelopes in self._epochs.items()}

    @property
    def opened(self) -> dict[int, Tensor]:
        """Step -> (B, D), the sum that the active decoded, of the kept epochs."""
        return {
            step: safetensors.torch.load(body)[_SUM]
            for opened in self._opened.values()
            for step, body in opened.items()
        }

    def begin_epoch(self, epoch: int) -> None:
        """Say that the envelopes from now on belong to `epoch` (from 0)."""
        self._epoch = None
        if self._settings.keep == "none":
            return
        if self._settings.keep == "first_and_last":
            for past in [past for past in self._epochs if past not in (0, epoch)]:
                del self._epochs[past]
                self._opened.pop(past, None)
            used = {id(item.payload) for envelopes in self._epochs.values() for item in envelopes}
            used |= {id(body) for opened in self._opened.values() for body in opened.values()}
            kept = {key: body for key, body in self._payloads.items() if id(body) in used}
            self._payloads, self._held_bytes = kept, sum(map(len, kept.values()))
        self._epoch = epoch
        self._epochs.setdefault(epoch, [])
        self._opened.setdefault(epoch, {})

    def record(self, envelope: Envelope, wire_bytes: int) -> None:
        """Count an envelope that is sent, and keep it where the settings say so."""
        self._count(
            (envelope.sender, envelope.receiver, envelope.kind),
            (1, len(envelope.payload), wire_bytes), envelope.step, envelope.step,
        )  # fmt: skip
        if self._epoch is not None and envelope.kind in KEPT_KINDS:
            payload = self._store(envelope.payload)
            if self._epoch is not None:
                self._epochs[self._epoch].append(replace(envelope, payload=payload))

    def keep_opened(self, step: int, sum_BD: Tensor) -> None:
        """Keep what the active decoded in `step`; only the experimenter has this record."""
        if self._epoch is not None:
            body = safetensors.torch.save({_SUM: sum_BD.detach().cpu().contiguous()})
            body = self._store(body)
            if self._epoch is not None:
                self._opened[self._epoch][step] = body

    def _store(self, payload: bytes) -> bytes:
        """Hold equal payloads (the same representations to each passive) once; more than the limit
        are no reason to stop a training: then nothing is held, from now on either.
        """
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        if digest not in self._payloads:
            self._payloads[digest] = payload
            self._held_bytes += len(payload)
        if self._held_bytes > MOST_MEGABYTES * 1e6:
            told, self._held_bytes, self._epoch = self._held_bytes / 1e6, 0, None
            self._epochs, self._opened, self._payloads = {}, {}, {}
            self._settings = TranscriptSettings(keep="none")
            warnings.warn(
                f"the transcript would hold {told:.0f} MB, over the limit of {MOST_MEGABYTES:g} "
                "MB, and is dropped: attacks have nothing to read; send a smaller representation "
                "(model.projection), or set transcript.keep to none",
                DroppedTranscriptWarning,
                stacklevel=3,
            )
            return payload
        return self._payloads[digest]

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on after what `state` recorded; what this session sent so far adds to it."""
        current = self.flows
        self.load_state_dict(state)
        self.add(current)

    def add(self, flows: Iterable[Flow]) -> None:
        """Count what was sent before, or elsewhere for this run."""
        for flow in flows:
            counts = (flow.messages, flow.payload_bytes, flow.wire_bytes)
            key = (flow.sender, flow.receiver, flow.kind)
            self._count(key, counts, flow.first_step, flow.last_step)

    def _count(self, key: _Way, counts: Sequence[int], first: int, last: int) -> None:
        self.wire_bytes += counts[-1]
        held = self._flows.setdefault(key, [0, 0, 0, first, last])
        for place, count in enumerate(counts):
            held[place] += count
        held[-1] = max(held[-1], last)

    def state_dict(self) -> dict[str, Any]:
        """Everything recorded, as plain msgpack types."""
        digests = {id(payload): digest for digest, payload in self._payloads.items()}
        return {
            "flows": [{**vars(flow), "kind": flow.kind.value} for flow in self.flows],
            "payloads": dict(self._payloads),
            "keep": self._settings.keep,
            "epochs": [
                [epoch, [[_fields(item), digests[id(item.payload)]] for item in envelopes]]
                for epoch, envelopes in self._epochs.items()
            ],
            "opened": [
                [epoch, [[step, digests[id(body)]] for step, body in opened.items()]]
                for epoch, opened in self._opened.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        flows = [Flow(**{**flow, "kind": Kind(flow["kind"])}) for flow in state["flows"]]
        self._flows, self.wire_bytes = {}, 0
        self.add(flows)
        if state.get("keep") == "none":  # also where it was dropped
            self._settings = TranscriptSettings(keep="none")
        self._payloads = dict(state["payloads"])
        self._held_bytes = sum(map(len, self._payloads.values()))
        self._epochs = {
            epoch: [
                Envelope(**{**fields, "kind": Kind(fields["kind"])}, payload=self._payloads[digest])
                for fields, digest in items
            ]
            for epoch, items in state["epochs"]
        }
        self._opened = {
            epoch: {step: self._payloads[digest] for step, digest in items}
            for epoch, items in state.get("opened", [])
        }
        self._epoch = None


def _fields(envelope: Envelope) -> dict[str, Any]:
    fields = {**vars(envelope), "kind": envelope.kind.value}
    del fields["payload"]
    return fields
