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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from secure_apfed.base.files import MAX_BYTES, PAYLOADS, PathLike, open_plain, open_regular
from secure_apfed.base.formats import RECORDING
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange.envelope import Envelope, Kind
from secure_apfed.settings import TranscriptSettings

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
MAX_CONTRIBUTION_BYTES = 8 * 2**20
"""Largest number of bytes of contributions to sums that are stored of one epoch: ciphertexts take
hundreds of kilobytes each, and a few of them show what the aggregator holds."""


_FlowKey = tuple[str, str, Kind]
"""Sender, receiver and kind."""


def count_free_megabytes(folder: Path | None = None) -> float:
    """Return the free megabytes on the disk where a run's messages are stored.

    `folder`: folder of the run; None: the run has no folder and uses the system's temporary folder.
    """
    return shutil.disk_usage(folder or tempfile.gettempdir()).free / 1e6


@dataclass(frozen=True)
class Flow:
    """The number and size of all messages of one kind from one party to another.

    Attributes:
        sender, receiver: names of the two parties.
        kind: kind of the messages.
        messages: number of messages.
        payload_bytes: bytes of their contents.
        wire_bytes: bytes as sent, with headers and encryption.
        first_step, last_step: the steps of training of the first and the last; -1: before training.
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
    """A folder in which message contents are stored, permanent or temporary."""

    def __init__(self, path: Path | None = None) -> None:
        """Use the folder at `path`; None: create one that is deleted together with this object."""
        self.path = path or Path(tempfile.mkdtemp(prefix="transcript-"))
        if path is None:
            weakref.finalize(self, _remove_folder, self.path, os.getpid())


def _remove_folder(folder: Path, creator: int) -> None:
    """Delete a temporary folder, unless this is a forked child of the process that created it.

    `creator`: ID of the process that created the folder.
    """
    if os.getpid() == creator:
        shutil.rmtree(folder, ignore_errors=True)


class _Epoch:
    """The stored messages of one epoch of training.

    Their payloads (contents) are in one file. Equal payloads, such as the same representations to
    each passive, are written once. A payload is read again when it is needed.

    Attributes:
        path: the file of all payloads.
        byte_range_by_digest: by the digest of a payload, where its bytes begin and end in the file.
        envelopes: each message without its payload, and the payload's digest.
        sum_digest_by_step: by step, the digest of the stored secure sum that the active decoded.
        contribution_bytes: how many bytes of passives' contributions to sums are stored.
        is_synced: whether all payloads are surely on the disk (fsync).
    """

    def __init__(self, number: int, folder: _Folder) -> None:
        """Start without messages; the payload file in `folder` is created with the first payload.

        `number`: number of the epoch, from 0, which is in the file's name.
        """
        self.path = folder.path / PAYLOADS.replace("*", str(int(number)))
        self._folder = folder
        self.byte_range_by_digest: dict[
            bytes, list[int]
        ] = {}  # by a payload's digest: its bytes in the file
        self.envelopes: list[tuple[Envelope, bytes]] = []  # each with its payload's digest
        self.sum_digest_by_step: dict[int, bytes] = {}  # by step: digest of the decoded sum
        self.contribution_bytes = 0  # stored bytes of contributions
        self.is_synced = True  # whether all payloads are surely on the disk

    def keep_envelope(self, envelope: Envelope) -> None:
        """Store a message.

        A passive's contribution to a sum is stored only while all stored contributions of the epoch
        fit into `MAX_CONTRIBUTION_BYTES` bytes: ciphertexts are large, and a few of them are
        enough.
        """
        if envelope.kind is Kind.CONTRIBUTION:
            if self.contribution_bytes + len(envelope.payload) > MAX_CONTRIBUTION_BYTES:
                return
            self.contribution_bytes += len(envelope.payload)
        digest = self.store_payload(envelope.payload)
        self.envelopes.append((envelope.with_payload(b""), digest))

    def store_payload(self, payload: bytes) -> bytes:
        """Append a payload to the file unless it is there; return its digest.

        Raises CheckpointError: the file cannot be written, such as on a full disk.
        """
        digest = _digest_payload(payload)
        if digest not in self.byte_range_by_digest:
            _, size = next(
                reversed(self.byte_range_by_digest.values()), [0, 0]
            )  # the end of the last payload
            try:
                with os.fdopen(open_regular(self.path, create=True), "ab") as file:
                    file.truncate(size)  # a session that was interrupted may have written more
                    file.write(payload)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be written ({error.strerror}); make room on its disk and "
                    "resume the run, or set transcript.keep to none"
                ) from error
            self.byte_range_by_digest[digest] = [size, size + len(payload)]
            self.is_synced = False
        return digest

    def load_entries(
        self,
        byte_range_by_digest: Mapping[bytes, Sequence[int]],
        entries: Sequence[tuple[Mapping[str, Any], bytes]],
        sum_digest_by_step: Mapping[int, bytes],
    ) -> None:
        """Restore the epoch from a checkpoint, and check that its payload file is complete.

        Args:
            byte_range_by_digest: by the digest of a payload, where its bytes begin and end in the
                file.
            entries: fields of each message without its payload, and the payload's digest.
            sum_digest_by_step: by step, the digest of the decoded sum.

        Raises:
            KeyError, TypeError, ValueError: the state is malformed, such as by a digest that has no
                place.
            CheckpointError: the last payload is missing or was altered.
        """
        self.byte_range_by_digest = {
            digest: [int(start), int(end)] for digest, (start, end) in byte_range_by_digest.items()
        }
        self.sum_digest_by_step = dict(sum_digest_by_step)
        self.envelopes = [
            (Envelope(**{**fields, "kind": Kind(fields["kind"])}, payload=b""), digest)
            for fields, digest in entries
        ]
        for envelope, digest in self.envelopes:
            if envelope.kind is Kind.CONTRIBUTION:
                start, end = self.byte_range_by_digest[digest]
                self.contribution_bytes += end - start
        for digest in (*sum_digest_by_step.values(), *(digest for _, digest in entries)):
            self.byte_range_by_digest[digest]  # raises KeyError if it has no place
        for last_digest in [*byte_range_by_digest][-1:]:  # no payload, if the epoch has none
            self.load_payload(last_digest)

    def move_payloads(self, folder: _Folder) -> None:
        """Move the payload file, if there is one, into another folder."""
        if self.byte_range_by_digest:
            self.path = Path(shutil.move(self.path, folder.path))
        self._folder = folder

    def load_payload(self, digest: bytes) -> bytes:
        """Return the payload of this digest.

        Raises CheckpointError: the file was altered or is missing.
        """
        start, end = self.byte_range_by_digest[digest]
        payload = b""
        with open_plain(self.path) as file:
            file_bytes = os.fstat(file.fileno()).st_size
            # `byte_range_by_digest` may come from an altered checkpoint.
            if 0 <= start <= end <= min(file_bytes, start + MAX_BYTES):
                file.seek(start)
                payload = file.read(end - start)
        if _digest_payload(payload) != digest:
            raise CheckpointError(
                f"{self.path}: bytes {start} to {end} are not as the run wrote them; restore it "
                "from a copy, or play the run anew"
            )
        return payload


class _StoredEnvelope(Envelope):
    """An envelope whose payload is stored on disk and is read at each access.

    So a transcript of many gigabytes fits into memory.
    """

    @classmethod
    def from_epoch(cls, epoch: _Epoch, envelope: Envelope, digest: bytes) -> "_StoredEnvelope":
        """Return a copy of `envelope` that reads the payload from the epoch's file at each access.

        `digest`: the payload's digest, by which the epoch finds it.
        """
        stored = cls.__new__(cls)
        vars(stored).update(vars(envelope), _place=(epoch, digest))
        del vars(stored)["payload"]  # so that an access calls `__getattr__`
        return stored

    def __getattr__(self, name: str) -> bytes:
        """Read the payload from disk, as `payload` is no stored attribute; refuse other names."""
        if name != "payload":
            raise AttributeError(name)
        epoch, digest = vars(self)["_place"]
        payload: bytes = epoch.load_payload(digest)
        return payload


class Transcript:
    """A record of every message of a simulated run: all are counted, and some stored, by epoch.

    Attributes:
        wire_bytes: bytes of all sent messages, with headers and encryption.
    """

    def __init__(self, settings: TranscriptSettings) -> None:
        """Make an empty record; messages are stored from the first `begin_epoch` on.

        `settings`: the epochs whose messages are stored.
        """
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
        counts_by_key = list(self._flows.items())  # copied first, as another thread may add flows
        return tuple(Flow(*key, *counts) for key, counts in counts_by_key)

    @property
    def envelopes_by_epoch(self) -> Mapping[int, tuple[Envelope, ...]]:
        """The stored messages by epoch, in sending order; each payload is read on access.

        Such an access raises CheckpointError if the payload's file was altered or is missing, since
        an epoch that is no longer stored has none.
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
        """By step, the secure sum that the active decoded: B rows, D numbers each.

        Contains the steps of the stored epochs only.
        """
        return {
            step: safetensors.torch.load(epoch.load_payload(digest))[_SUM]
            for epoch in self._epochs.values()
            for step, digest in epoch.sum_digest_by_step.items()
        }

    def keep_in(self, folder: PathLike) -> None:
        """Store payloads in this folder, which stays.

        The first `begin_epoch` deletes the payloads of an earlier run in it.
        """
        self._folder = _Folder(Path(folder).absolute())

    def take_along(self) -> None:
        """Move the payloads to a temporary folder, since their present folder will be deleted."""
        if self._epochs:
            self._folder = folder = _Folder()
            for epoch in self._epochs.values():
                epoch.move_payloads(folder)

    def begin_epoch(self, epoch: int) -> None:
        """Assign the following messages to `epoch` (from 0), and forget epochs no longer needed.

        Which are needed is a setting, `keep`: all, none, or first_and_last (0 and the present one).
        Payload files that neither a stored epoch nor a checkpoint uses are deleted.
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
        """Delete payload files that neither this record nor the newest two checkpoints use."""
        if self._folder:
            used = self._paths.union(*self._files_by_step.values())
            for file in {*self._folder.path.glob(PAYLOADS)} - used:
                with suppress(OSError):  # such as for a folder, which this program did not create
                    file.unlink()

    @property
    def _paths(self) -> frozenset[Path]:
        """The payload files of the stored epochs."""
        return frozenset(epoch.path for epoch in self._epochs.values())

    def record_envelope(self, envelope: Envelope, wire_bytes: int) -> None:
        """Count a sent message, and store it if attacks read its kind and its epoch is stored.

        `wire_bytes`: size with header and encryption, in bytes.
        """
        self._count_messages(
            (envelope.sender, envelope.receiver, envelope.kind),
            (1, len(envelope.payload), wire_bytes),
            first=envelope.step,
            last=envelope.step,
        )
        if self._epoch is not None and envelope.kind in KEPT_KINDS:
            self._epoch.keep_envelope(envelope)

    def record_sum(self, step: int, sum_BD: Tensor) -> None:
        """Store the secure sum that the active decoded in a step, for attacks on simulated runs.

        No message has this sum, so it would be missing from the record otherwise.

        `sum_BD`: B rows of D numbers each.
        """
        if self._epoch is not None:
            body = safetensors.torch.save({_SUM: sum_BD.detach().cpu().contiguous()})
            self._epoch.sum_digest_by_step[step] = self._epoch.store_payload(body)

    def resume_record(self, state: Mapping[str, Any], sent: Sequence[Flow] = ()) -> None:
        """Continue an earlier session's record; what this session sent so far is added to it.

        Args:
            state: what `state_dict` returned at the checkpoint.
            sent: the flows up to the end of the earlier session, which may have sent more after
                the checkpoint; they replace the checkpoint's flows if they have more bytes.
        """
        current = self.flows
        self.load_state_dict(state)
        if sum(flow.wire_bytes for flow in sent) > self.wire_bytes:
            self._flows = {}
            self.wire_bytes = 0
            self.add_flows(sent)
        self.add_flows(current)

    def add_flows(self, flows: Iterable[Flow]) -> None:
        """Count messages that were sent in an earlier session, or elsewhere in this run."""
        for flow in flows:
            counts = (flow.messages, flow.payload_bytes, flow.wire_bytes)
            key = (flow.sender, flow.receiver, flow.kind)
            self._count_messages(key, counts, flow.first_step, flow.last_step)

    def _count_messages(self, key: _FlowKey, counts: Sequence[int], first: int, last: int) -> None:
        """Add messages to the counts of one flow, and to the bytes of all.

        Args:
            key: sender, receiver and kind of the messages.
            counts: number of messages, their payload bytes, their wire bytes.
            first, last: the first and the last step of these messages.
        """
        _, _, wire_bytes = counts
        self.wire_bytes += wire_bytes
        totals = self._flows.setdefault(key, [0, 0, 0, first, last])
        for index, count in enumerate(counts):
            totals[index] += count
        totals[-1] = max(totals[-1], last)

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """Return the record, without payloads, as plain msgpack types; `load_state_dict` reads it.

        The payloads are flushed to the disk. Their files, which the state names, are not deleted
        while the state belongs to one of the newest two checkpoints.

        `step`: step of the checkpoint that the state belongs to; None: it is the last state of the
        run, so payload files of other epochs are deleted.
        """
        if step is None:
            self._files_by_step = {}
            self._remove_stale_files()
        else:
            self._keep_files_for(step)
        self._flush_payloads()
        return {
            RECORDING.number_key: RECORDING.current_number,
            "step": step,
            "flows": [{**vars(flow), "kind": flow.kind.value} for flow in self.flows],
            "epochs": [
                [
                    number,
                    epoch.byte_range_by_digest,
                    [[_list_fields(envelope), digest] for envelope, digest in epoch.envelopes],
                    epoch.sum_digest_by_step,
                ]
                for number, epoch in self._epochs.items()
            ],
        }

    def _keep_files_for(self, step: int) -> None:
        """Keep the payload files of the checkpoint of this step and of the newest one before it."""
        earlier_steps = [saved_step for saved_step in self._files_by_step if saved_step < step]
        kept_steps = earlier_steps[-1:]  # none at the first checkpoint, else one
        self._files_by_step = {
            kept_step: self._files_by_step[kept_step] for kept_step in kept_steps
        }
        self._files_by_step[step] = self._paths

    def _flush_payloads(self) -> None:
        """Flush the payload files with new content to the disk, so that a crash cannot lose it."""
        for epoch in self._epochs.values():
            if not epoch.is_synced:
                with os.fdopen(open_regular(epoch.path, create=False), "ab") as file:
                    os.fsync(file.fileno())
                epoch.is_synced = True

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a record that `state_dict` returned; `keep_in` has named the payloads' folder.

        Raises:
            KeyError, TypeError, ValueError: the state is malformed.
            CheckpointError: the last payload of an epoch is missing or was altered.
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
            epoch.load_entries(places, entries, sums)
        if state["step"] is not None:
            # Files that this state does not name may belong to the checkpoint before it, whose step
            # is not known: -1 is before any step.
            files = frozenset(self._folder.path.glob(PAYLOADS))
            self._files_by_step = {-1: files, int(state["step"]): self._paths}


def _digest_payload(payload: bytes) -> bytes:
    """Return the 16 bytes of BLAKE2b by which a payload is stored."""
    return hashlib.blake2b(payload, digest_size=16).digest()


def _list_fields(envelope: Envelope) -> dict[str, Any]:
    """Return an envelope's fields without its payload, as plain types."""
    fields = {**vars(envelope), "kind": envelope.kind.value}
    del fields["payload"]
    return fields
