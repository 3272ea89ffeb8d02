"""The transcript of a simulated run: all envelopes by sender, receiver, kind and step, with their
bytes.

Run by: the experimenter, who drives all parties in one process and records every envelope that is
sent (see `secure_apfed.exchange.drivers`); it is not a party. Privacy reports read the flows.
Attacks read the stored envelopes, decrypted as their receivers saw them. The sums that the active
decodes are in no message, so they are recorded separately. Payloads are stored on disk, in a file
for each epoch.
"""

import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from secure_apfed.base.files import MAX_BYTES, PAYLOADS, PathLike, open_plain, open_regular
from secure_apfed.base.formats import RECORDING
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange.envelope import Envelope, Kind
from secure_apfed.settings.run import TranscriptSettings

_SUM = "sum"
KEPT_KINDS = frozenset(
    {
        Kind.REQUEST,
        Kind.LABELS,
        Kind.ENCRYPTED_LABELS,
        Kind.VOTES,
        Kind.REPRESENTATIONS,
        Kind.GRADIENTS,
        Kind.SUM,
        Kind.CONTRIBUTION,
    }
)
MAX_CONTRIBUTED = 8 * 2**20
"""Largest number of bytes of contributions to sums that are stored of one epoch: ciphertexts take
hundreds of kilobytes each, and a few of them show what the aggregator holds."""


_FlowKey = tuple[str, str, Kind]
"""Sender, receiver and kind."""


def count_free_megabytes(folder: Path | None = None) -> float:
    """Return the free megabytes on the disk where a run's payloads are stored.

    `folder`: folder of the run; None: the system's temporary folder, as for runs without one.
    """
    return shutil.disk_usage(folder or tempfile.gettempdir()).free / 1e6


@dataclass(frozen=True)
class Flow:
    """All messages of one kind from one party to another.

    Attributes:
        messages: number of messages; first_step, last_step: when (-1: before training).
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


class _Folder:
    """A folder of payloads, permanent or temporary."""

    def __init__(self, path: Path | None = None) -> None:
        """Use the folder at `path`; None: create one that is deleted together with this object."""
        self.path = path or Path(tempfile.mkdtemp(prefix="transcript-"))
        if path is None:
            weakref.finalize(self, _remove_folder, self.path, os.getpid())


def _remove_folder(folder: Path, creator: int) -> None:
    """Delete a temporary folder, in the process with this ID, which created it, only."""
    if os.getpid() == creator:  # a forked child has the object, too
        shutil.rmtree(folder, ignore_errors=True)


class _Epoch:
    """The stored messages of one epoch.

    Equal payloads (the same representations to each passive) are written once, and read on request.

    Attributes:
        path: the file of all payloads.
        places: digest of a payload -> its first byte in the file and the one after its last.
        envelopes: each without its payload, with the payload's digest.
        sums: step -> the digest of the stored sum that the active decoded.
        contributed: bytes of the stored contributions.
        synced: whether all payloads are on the disk.
    """

    def __init__(self, number: int, folder: _Folder) -> None:
        """Name the payload file of epoch `number`; it is created with the first payload."""
        self.path = folder.path / PAYLOADS.replace("*", str(int(number)))
        self._folder = folder
        self.places: dict[bytes, list[int]] = {}
        self.envelopes: list[tuple[Envelope, bytes]] = []
        self.sums: dict[int, bytes] = {}
        self.contributed = 0
        self.synced = True

    def keep_envelope(self, envelope: Envelope) -> None:
        """Store an envelope; of contributions only those that fit into `MAX_CONTRIBUTED` bytes."""
        if envelope.kind is Kind.CONTRIBUTION:
            if self.contributed + len(envelope.payload) > MAX_CONTRIBUTED:
                return
            self.contributed += len(envelope.payload)
        digest = self.store_payload(envelope.payload)
        self.envelopes.append((replace(envelope, payload=b""), digest))

    def store_payload(self, payload: bytes) -> bytes:
        """Append a payload to the file unless it is there; return its digest.

        Raises CheckpointError: the disk is full.
        """
        digest = _digest_payload(payload)
        if digest not in self.places:
            last_place = next(reversed(self.places.values()), [0, 0])
            size = last_place[1]
            try:
                with os.fdopen(open_regular(self.path, create=True), "ab") as file:
                    file.truncate(size)  # a session that was interrupted may have written more
                    file.write(payload)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be written ({error.strerror}); make room on its disk and "
                    "resume the run, or set transcript.keep to none"
                ) from error
            self.places[digest] = [size, size + len(payload)]
            self.synced = False
        return digest

    def move_payloads(self, folder: _Folder) -> None:
        """Move the payload file into another folder."""
        if self.places:
            self.path = Path(shutil.move(self.path, folder.path))
        self._folder = folder

    def load_payload(self, digest: bytes) -> bytes:
        """Return the payload of this digest. Raises CheckpointError: the file was altered or is
        missing.
        """
        start, end = self.places[digest]
        payload = b""
        with open_plain(self.path) as file:
            if 0 <= start <= end <= min(os.fstat(file.fileno()).st_size, start + MAX_BYTES):
                file.seek(start)
                payload = file.read(end - start)
        if _digest_payload(payload) != digest:
            raise CheckpointError(
                f"{self.path}: bytes {start} to {end} are not as the run wrote them; restore it "
                "from a copy, or play the run anew"
            )
        return payload


class _StoredEnvelope(Envelope):
    """An envelope whose payload is stored on disk and is read at each access."""

    @classmethod
    def from_epoch(cls, epoch: _Epoch, envelope: Envelope, digest: bytes) -> "_StoredEnvelope":
        """Return an envelope without payload that reads it from the epoch's file when asked."""
        stored = cls.__new__(cls)
        vars(stored).update(vars(envelope), _place=(epoch, digest))
        del vars(stored)["payload"]
        return stored

    def __getattr__(self, name: str) -> bytes:
        """Read the payload from disk; every other missing attribute is an error."""
        if name != "payload":
            raise AttributeError(name)
        epoch, digest = vars(self)["_place"]
        payload: bytes = epoch.load_payload(digest)
        return payload


class Transcript:
    """A record of every sent envelope: all are counted, and some stored, by epoch.

    Attributes:
        wire_bytes: bytes of all sent envelopes, with headers and seals.
    """

    def __init__(self, settings: TranscriptSettings) -> None:
        """Make an empty record of messages; nothing is stored before `begin_epoch`."""
        self._settings = settings
        self._flows: dict[_FlowKey, list[int]] = {}  # the numbers of a `Flow`, in its order
        self._epochs: dict[int, _Epoch] = {}
        self._epoch: _Epoch | None = None  # the current one
        self._folder: _Folder | None = None
        # By step of the newest two checkpoints: the payload files that its state names.
        self._files_by_step: dict[int, frozenset[Path]] = {}
        self.wire_bytes = 0

    @property
    def flows(self) -> tuple[Flow, ...]:
        """The number and size of sent messages, by sender, receiver and kind."""
        return tuple(Flow(*key, *numbers) for key, numbers in [*self._flows.items()])

    @property
    def envelopes_by_epoch(self) -> Mapping[int, tuple[Envelope, ...]]:
        """The stored envelopes by epoch, in sending order; payloads are read on access.

        The access raises CheckpointError if the payload's file was altered, or is missing, as it
        is for an epoch that is no longer stored.
        """
        return {
            number: tuple(
                _StoredEnvelope.from_epoch(epoch, envelope, digest)
                for envelope, digest in epoch.envelopes
            )
            for number, epoch in self._epochs.items()
        }

    @property
    def sums_by_step(self) -> dict[int, Tensor]:
        """By step, the sum that the active decoded, (B, D); for the stored epochs."""
        return {
            step: safetensors.torch.load(epoch.load_payload(digest))[_SUM]
            for epoch in self._epochs.values()
            for step, digest in epoch.sums.items()
        }

    def keep_in(self, folder: PathLike) -> None:
        """Store payloads in this folder permanently; the first `begin_epoch` deletes those of an
        earlier run.
        """
        self._folder = _Folder(Path(folder).absolute())

    def take_along(self) -> None:
        """Move the payloads out of a folder that will be deleted."""
        if self._epochs:
            self._folder = folder = _Folder()
            for epoch in self._epochs.values():
                epoch.move_payloads(folder)

    def begin_epoch(self, epoch: int) -> None:
        """Assign the following envelopes to `epoch` (from 0); drop what need not be kept.

        With `keep: first_and_last`, epochs other than 0 and this one are forgotten.
        """
        self._epoch = None
        if self._settings.keep == "first_and_last":
            self._epochs = {
                number: stored for number, stored in self._epochs.items() if number in (0, epoch)
            }
        if self._settings.keep != "all" or not self._epochs:
            self._remove_stale_files()
        if self._settings.keep != "none":
            self._folder = self._folder or _Folder()
            self._epoch = self._epochs.setdefault(epoch, _Epoch(epoch, self._folder))

    def _remove_stale_files(self) -> None:
        """Delete payload files that neither this record nor one of the checkpoints uses."""
        if self._folder:
            used = self._paths.union(*self._files_by_step.values())
            for file in {*self._folder.path.glob(PAYLOADS)} - used:
                with suppress(OSError):  # such as for a folder, which this program did not create
                    file.unlink()

    @property
    def _paths(self) -> frozenset[Path]:
        return frozenset(epoch.path for epoch in self._epochs.values())

    def record_envelope(self, envelope: Envelope, wire_bytes: int) -> None:
        """Count a sent envelope, and store it if its kind and epoch are to be kept.

        `wire_bytes`: size with header and seal, in bytes.
        """
        self._count_messages(
            (envelope.sender, envelope.receiver, envelope.kind),
            (1, len(envelope.payload), wire_bytes),
            envelope.step,
            envelope.step,
        )
        if self._epoch is not None and envelope.kind in KEPT_KINDS:
            self._epoch.keep_envelope(envelope)

    def record_sum(self, step: int, sum_BD: Tensor) -> None:
        """Store the sum (B, D) that the active decoded in `step`; only the experimenter sees it."""
        if self._epoch is not None:
            body = safetensors.torch.save({_SUM: sum_BD.detach().cpu().contiguous()})
            self._epoch.sums[step] = self._epoch.store_payload(body)

    def resume_record(self, state: Mapping[str, Any], sent: Sequence[Flow] = ()) -> None:
        """Continue from an earlier record; what this session sent so far is added.

        Args:
            state: what `state_dict` returned at the checkpoint.
            sent: the flows up to the end of the last session, which may be later than the
                checkpoint; they count if they have more bytes.
        """
        current = self.flows
        self.load_state_dict(state)
        if sum(flow.wire_bytes for flow in sent) > self.wire_bytes:
            self._flows = {}
            self.wire_bytes = 0
            self.add_flows(sent)
        self.add_flows(current)

    def add_flows(self, flows: Iterable[Flow]) -> None:
        """Add messages that were sent in an earlier session, or elsewhere in this run."""
        for flow in flows:
            counts = (flow.messages, flow.payload_bytes, flow.wire_bytes)
            key = (flow.sender, flow.receiver, flow.kind)
            self._count_messages(key, counts, flow.first_step, flow.last_step)

    def _count_messages(self, key: _FlowKey, counts: Sequence[int], first: int, last: int) -> None:
        """Add messages to one flow.

        Args:
            key: the flow.
            counts: messages, payload bytes, wire bytes.
            first, last: the first and the last step of these messages.
        """
        _, _, wire_bytes = counts
        self.wire_bytes += wire_bytes
        totals = self._flows.setdefault(key, [0, 0, 0, first, last])
        for index, count in enumerate(counts):
            totals[index] += count
        totals[-1] = max(totals[-1], last)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the whole record as plain msgpack types; payloads stay in their files.

        Files that this state names are kept as long as it is one of the newest two.

        `step`: step of the checkpoint that the state belongs to; None: it is the last state of the
        run, and all other files are deleted.
        """
        if step is None:
            self._files_by_step = {}
            self._remove_stale_files()
        else:
            earlier_steps = [saved for saved in self._files_by_step if saved < step]
            newest_steps = earlier_steps[-1:]
            self._files_by_step = {saved: self._files_by_step[saved] for saved in newest_steps}
            self._files_by_step[step] = self._paths
        for epoch in self._epochs.values():
            if not epoch.synced:
                with os.fdopen(open_regular(epoch.path, create=False), "ab") as file:
                    os.fsync(file.fileno())
                epoch.synced = True
        return {
            RECORDING.key: RECORDING.number,
            "step": step,
            "flows": [{**vars(flow), "kind": flow.kind.value} for flow in self.flows],
            "epochs": [
                [
                    number,
                    epoch.places,
                    [[_list_fields(envelope), digest] for envelope, digest in epoch.envelopes],
                    epoch.sums,
                ]
                for number, epoch in self._epochs.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the payloads lie in the folder given to `keep_in`.

        Raises:
            KeyError, TypeError, ValueError: the state is malformed.
            CheckpointError: the last payload of an epoch is missing.
        """
        flows = [Flow(**{**flow, "kind": Kind(flow["kind"])}) for flow in state["flows"]]
        self._flows = {}
        self.wire_bytes = 0
        self.add_flows(flows)
        self._epochs = {}
        self._epoch = None
        self._folder = self._folder or _Folder()
        for number, places, entries, sums in state["epochs"]:
            epoch = _Epoch(number, self._folder)
            self._epochs[number] = epoch
            epoch.places = {
                digest: [int(start), int(end)] for digest, (start, end) in places.items()
            }
            epoch.sums = dict(sums)
            epoch.envelopes = [
                (Envelope(**{**fields, "kind": Kind(fields["kind"])}, payload=b""), digest)
                for fields, digest in entries
            ]
            for envelope, digest in epoch.envelopes:
                if envelope.kind is Kind.CONTRIBUTION:
                    start, end = epoch.places[digest]
                    epoch.contributed += end - start
            for digest in (*sums.values(), *(digest for _, digest in entries)):
                places[digest]  # raises KeyError if it has no place
            for last_digest in [*places][-1:]:
                epoch.load_payload(last_digest)  # so the file is complete
        if state["step"] is not None:
            # Files that this state does not name may belong to the checkpoint before it.
            files = frozenset(self._folder.path.glob(PAYLOADS))
            self._files_by_step = {-1: files, int(state["step"]): self._paths}


def _digest_payload(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=16).digest()


def _list_fields(envelope: Envelope) -> dict[str, Any]:
    """Return an envelope's fields without its payload, as plain types."""
    fields = {**vars(envelope), "kind": envelope.kind.value}
    del fields["payload"]
    return fields
