"""Intersections over the links of a session: in buckets, with heartbeats, and resumable.

Run by: the hub (the party that all others intersect with, in a session the active) and each member
(another party), one script a role; each gets the row of its own table at each position of the
intersection. By a backend that can be resumed (`ot`, `ecdh`), whose guarantees and leaks hold here:

1. Each member sends the hub 32 random bytes, how many IDs it has, and which intersection it could
   resume. The hub sends everybody all random bytes, its own size and the number of buckets. The
   bytes give the key under which IDs are digested and distributed to buckets.
2. Each bucket is one run of the protocol, on lists that are filled up to sizes that follow from the
   announced sizes (see `secure_apfed.alignment.buckets`). Only the hub learns its result.
3. When all buckets are done, the hub sends the members the positions that are common to all, in one
   random order for all buckets together; or that these are too few.

The parties learn what they learn in one run of the protocol on the whole sets: there, too, hub and
member know each other's size, and the sizes of lists reveal no more. In addition, if there are
several members, all learn the number of buckets, which reveals the size of the largest set to a
factor of two, if it is above `buckets.IDS_PER_BUCKET`. Memory is that of one bucket, plus 8 bytes
for each common row.
"""

import contextlib
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter

from apfed_protocols.conversation import Conversation, Outgoing
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.ids import SizedIds
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.psi.interface import (
    IntersectionAgreement,
    IntersectionTooSmallError,
    Output,
    Progress,
    ResumableIntersection,
)
from apfed_protocols.randomness import derive_key, fresh_key, random_permutation
from secure_apfed.alignment import buckets as bucketing
from secure_apfed.alignment.buckets import (
    BucketedIds,
    choose_bucket_count,
    compute_capacity,
    fingerprint_ids,
)
from secure_apfed.alignment.records import admit_run
from secure_apfed.base.files import load_bytes, write_atomically
from secure_apfed.base.working import report_work
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange.envelope import BEFORE_TRAINING, Envelope, Kind
from secure_apfed.exchange.links import Heartbeats, Links, count_allowed_heartbeats
from secure_apfed.settings.alignment import AlignmentSettings

Rows = NDArray[np.int64]
_MAX_FIRST_MESSAGE_BYTES = 2**16
# First byte of the hub's last message: too few common rows, or their positions follow it.
_TOO_FEW = b"\0"
_POSITIONS_FOLLOW = b"\1"
_Nonce = Annotated[bytes, Field(min_length=32, max_length=32)]
_Count = Annotated[int, Field(ge=0)]
_RECORD_VERSION = 2
_AGREEMENT_FILE = "agreed.msgpack"
_SECRET_FILE = "secret.bin"  # noqa: S105  (the name of a file)
_MAX_RESULT_BYTES = 2**36
_MAX_SMALL_FILE_BYTES = 2**20


def count_alignment_heartbeats(maximum_ids: int, member_count: int) -> int:
    """Return how many heartbeats (progress reports) a party may send for a session's alignment.

    The limit is that of the hub, the party at which the intersection is computed, since it has the
    most work. It reads its IDs up to three times. For each other party (member) it also blinds its
    own IDs and the member's.

    `maximum_ids`: the agreed limit of IDs at each party. `member_count`: number of members.
    """
    # 3 readings, and 2 blindings for each member; counted as 4 and 3, since padding adds some.
    readings = 4
    blindings = 3 * member_count
    return count_allowed_heartbeats((readings + blindings) * maximum_ids)


class ProgressReporter:
    """A callback for a protocol's progress, which informs both the peers and the user.

    Peers get heartbeats (progress reports), which keep them from giving up the wait. The
    progress of a protocol restarts at 0 for each part of its work.
    """

    def __init__(self, heartbeats: Heartbeats) -> None:
        """Start without progress.

        `heartbeats`: the object that sends a heartbeat after enough work has been counted.
        """
        self._heartbeats = heartbeats
        self._last_id_count = 0  # IDs processed in the present part of the work

    def __call__(self, progress: Progress) -> None:
        """Count the IDs processed since the last call, and show the progress of the present part.

        `progress`: name of the part, how many IDs of it are done, and how many there are.
        """
        has_restarted = progress.done <= self._last_id_count
        previous_id_count = 0 if has_restarted else self._last_id_count
        self._heartbeats.count_work(progress.done - previous_id_count)
        report_work(f"alignment, {progress.work}", progress.done, progress.total)
        is_complete = progress.done >= progress.total
        self._last_id_count = 0 if is_complete else progress.done


@contextmanager
def relay_heartbeats(links: Links) -> Iterator[None]:
    """Pass on each peer's heartbeats (progress reports) to all other peers in the `with` block.

    Run by the hub, the party that the intersection is computed at: while it waits for one peer, the
    other peers wait for it.
    """
    links.heartbeats.is_relaying = True
    try:
        yield
    finally:
        links.heartbeats.is_relaying = False


async def align_hub(
    links: Links,
    members: Sequence[str],
    ids: SizedIds,
    settings: AlignmentSettings,
    *,
    session: str,
    folder: Path | None = None,
) -> Rows:
    """Intersect IDs with all other parties, as the hub, at which the intersection is computed.

    Returns, for each of the n common people in a random order that is the same at all parties, the
    row of the hub's own table, (n,).

    Args:
        links: the hub's encrypted links.
        members: names of all other parties.
        ids: the hub's IDs, one for each row; read several times, so no generator.
        settings: the agreed settings.
        session: the name of the intersection, used once.
        folder: stores what is needed to resume after an interruption; None: it cannot be resumed.

    Raises:
        IntersectionTooSmallError: fewer people are common than the settings demand.
        RemoteProtocolError: a member does not follow the protocol.
    """
    party = _IntersectingParty(links, links.me, tuple(members), ids, settings, folder)
    with relay_heartbeats(links):
        party.discard_other_ids()
        announcement_by_member = {
            name: _parse_first_message(_ANNOUNCEMENT_PARSER, await party.receive(name), settings)
            for name in members
        }
        id_count_by_member = {
            name: announcement.id_count for name, announcement in announcement_by_member.items()
        }
        agreement, first_bucket, resumes = party.propose_agreement(announcement_by_member, session)
        reply = _HubReply(
            resumes=resumes,
            first_bucket=first_bucket,
            session=agreement.session,
            bucket_count=agreement.bucket_count,
            id_count=len(ids),
            nonces=tuple(agreement.nonce_by_party.items()),
        )
        for name in members:
            party.send(name, reply.pack())
        await party.intersect_buckets(agreement, id_count_by_member, first_bucket, resumes=resumes)
    return party.send_common_rows(id_count_by_member)


async def align_member(
    links: Links,
    hub: str,
    ids: SizedIds,
    settings: AlignmentSettings,
    *,
    members: Sequence[str],
    session: str,
    folder: Path | None = None,
) -> Rows:
    """Intersect IDs with the hub, the party at which the intersection is computed, as a member.

    Returns, for each of the n common people in a random order that is the same at all parties, the
    row of this party's own table, (n,).

    Args:
        links: this party's encrypted links.
        hub: the hub's name.
        ids: this party's IDs, one for each row; read several times, so no generator.
        settings: the agreed settings.
        members: names of all parties but the hub, this party included.
        session: the name of the intersection, used once.
        folder: stores what is needed to resume after an interruption; None: it cannot be resumed.

    Raises:
        IntersectionTooSmallError: fewer people are common than the settings demand.
        RemoteProtocolError: the hub does not follow the protocol.
    """
    party = _IntersectingParty(links, hub, tuple(members), ids, settings, folder)
    party.discard_other_ids()
    interrupted_agreement = party.stored_intersection.agreement  # None: there is nothing to resume
    announcement = _MemberAnnouncement(
        nonce=fresh_key(),
        id_count=len(ids),
        resumable_identity=interrupted_agreement.identity if interrupted_agreement else b"",
        finished_buckets=party.stored_intersection.done_buckets if interrupted_agreement else 0,
    )
    party.send(hub, announcement.pack())
    # More patience than usual, since the hub itself waits for all other members.
    reply = _parse_first_message(_REPLY_PARSER, await party.receive(hub, patience=4), settings)
    agreement = party.check_reply(reply, announcement, session)
    await party.intersect_buckets(
        agreement, {hub: reply.id_count}, reply.first_bucket, resumes=reply.resumes
    )
    # The last message has at most 8 bytes for each common ID.
    max_bytes = _MAX_FIRST_MESSAGE_BYTES + 8 * len(ids)
    last_message = await party.receive(hub, max_bytes=max_bytes)
    return party.read_common_rows(last_message, reply.id_count)


class _MemberAnnouncement(NamedTuple):
    """The first message of a member (a party at which the intersection is not computed).

    Attributes:
        nonce: 32 random bytes, which contribute to the common key of all parties.
        id_count: the number of the member's IDs; untrusted, of any type, until it is checked.
        resumable_identity: identity of the interrupted intersection that the member can resume;
            b"": none.
        finished_buckets: how many buckets of that intersection the member has finished.
    """

    nonce: _Nonce
    id_count: Any
    resumable_identity: bytes
    finished_buckets: _Count

    def pack(self) -> bytes:
        """Encode the message with msgpack."""
        return bytes(msgpack.packb(self))


class _HubReply(NamedTuple):
    """The reply of the hub, which computes the intersection, to all members' announcements.

    Attributes:
        resumes: whether all parties continue an interrupted intersection.
        first_bucket: the first bucket to run.
        session: the name of the intersection.
        bucket_count: number of buckets.
        id_count: the number of the hub's IDs; untrusted, of any type, until it is checked.
        nonces: name and 32 random bytes of each party, the hub first.
    """

    resumes: bool
    first_bucket: int
    session: str
    bucket_count: int
    id_count: Any
    nonces: tuple[tuple[str, _Nonce], ...]

    def pack(self) -> bytes:
        """Encode the message with msgpack."""
        return bytes(msgpack.packb(self))


_ANNOUNCEMENT_PARSER: TypeAdapter[_MemberAnnouncement] = TypeAdapter(
    _MemberAnnouncement, config=ConfigDict(strict=True)
)
_REPLY_PARSER: TypeAdapter[_HubReply] = TypeAdapter(_HubReply, config=ConfigDict(strict=True))
_FirstMessage = TypeVar("_FirstMessage", _MemberAnnouncement, _HubReply)


def _parse_first_message(
    parser: TypeAdapter[_FirstMessage], message: Envelope, settings: AlignmentSettings
) -> _FirstMessage:
    """Parse the first message of a peer, and check the announced number of IDs.

    `parser`: parser of the expected type, an `_MemberAnnouncement` from a member or a `_HubReply`
    from the hub. `settings`: the agreed settings, which limit the number of IDs.

    Raises RemoteProtocolError: the message is malformed, or announces more IDs than was agreed.
    """
    try:
        first_message = parser.validate_python(msgpack.unpackb(message.payload, use_list=False))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(
            f"{message.sender} sent {message.receiver} something else than the opening of an "
            "intersection; use the same release at all parties"
        ) from error
    if (
        type(first_message.id_count) is not int
        or not 0 <= first_message.id_count <= settings.maximum_ids
    ):
        raise RemoteProtocolError(
            f"{message.sender} announces {first_message.id_count!r} IDs, the parties agreed on at "
            f"most {settings.maximum_ids}"
        )
    return first_message


class _IntersectingParty:
    """One party's part in an intersection over links, which runs bucket by bucket.

    Attributes:
        terms_digest: SHA-256 of the parties and the agreed settings. An interrupted intersection
            can only be resumed under equal terms.
        stored_intersection: the record of this intersection, or of the last one if it was
            interrupted.
    """

    def __init__(
        self,
        links: Links,
        hub: str,
        members: tuple[str, ...],
        ids: SizedIds,
        settings: AlignmentSettings,
        folder: Path | None,
    ) -> None:
        """Load the record of an interrupted intersection if parties and settings are the same.

        Args:
            links: this party's encrypted links.
            hub: name of the hub, the party at which the intersection is computed.
            members: names of all other parties.
            ids: this party's IDs.
            settings: the agreed settings.
            folder: folder of the record; None: the record is in memory only.
        """
        self._links = links
        self._me = links.me
        self._hub = hub
        self._members = members
        self._ids = ids
        self._settings = settings
        self._peers = members if self._me == hub else (hub,)
        # A member exchanges messages with the hub alone.
        document = json.dumps([hub, members, settings.collect_terms()], sort_keys=True)
        self.terms_digest = hashlib.sha256(document.encode()).digest()
        self.stored_intersection = StoredIntersection.from_folder(folder, self.terms_digest)

    def send(self, peer: str, body: bytes) -> None:
        """Send an alignment message to a peer."""
        self._links.send(peer, Kind.ALIGNMENT, BEFORE_TRAINING, body)

    async def receive(
        self, peer: str, *, patience: int = 2, max_bytes: int = _MAX_FIRST_MESSAGE_BYTES
    ) -> Envelope:
        """Wait for a peer's next alignment message, and return it.

        `patience`: how long to wait, in multiples of the contract's unit of patience. `max_bytes`:
        the largest number of bytes of the message.
        """
        return await self._links.receive(
            peer, Kind.ALIGNMENT, step=BEFORE_TRAINING, patience=patience, max_bytes=max_bytes
        )

    def discard_other_ids(self) -> None:
        """Delete the record of an interrupted intersection if this party's IDs have changed since.

        The intersection could only be resumed with the same IDs.
        """
        stored_intersection = self.stored_intersection
        if stored_intersection.agreement is None:
            return
        fingerprint = fingerprint_ids(
            self._me,
            self._ids,
            self._settings,
            stored_intersection.agreement.key,
            self._links.heartbeats.count_work,
        )
        if fingerprint != stored_intersection.fingerprint:
            stored_intersection.delete_files()

    def propose_agreement(
        self, announcement_by_member: Mapping[str, _MemberAnnouncement], session: str
    ) -> tuple["BucketAgreement", int, bool]:
        """Decide, at the hub, which intersection the parties run, and from which bucket on.

        An interrupted intersection is resumed if all parties can resume it, else a new one starts.

        `announcement_by_member`: each member's first message, by name. `session`: name of a new
        intersection.

        Returns what the parties agree on, the first bucket to run, and whether it is resumed.
        """
        agreement = self.stored_intersection.agreement
        resumable_identities = {
            announcement.resumable_identity for announcement in announcement_by_member.values()
        }
        if agreement is not None and resumable_identities == {agreement.identity}:
            # It continues with the first bucket that any party has not finished.
            finished_buckets = [
                announcement.finished_buckets for announcement in announcement_by_member.values()
            ]
            return agreement, min(self.stored_intersection.done_buckets, *finished_buckets), True
        nonce_by_party = {self._me: fresh_key()}
        nonce_by_party |= {
            name: announcement.nonce for name, announcement in announcement_by_member.items()
        }
        id_counts = [announcement.id_count for announcement in announcement_by_member.values()]
        bucket_count = choose_bucket_count(max(len(self._ids), *id_counts))
        return BucketAgreement(session, self.terms_digest, bucket_count, nonce_by_party), 0, False

    def check_reply(
        self, reply: _HubReply, announcement: _MemberAnnouncement, session: str
    ) -> "BucketAgreement":
        """Check the hub's reply at a member; return the agreement that it makes.

        The hub is the party that computes the intersection. The number of buckets must fit the
        announced sizes. All parties must have contributed random bytes, and this party's must be
        the ones that it sent.

        Args:
            reply: the hub's reply.
            announcement: what this member sent before.
            session: the name of the intersection, the same at all parties.

        Raises RemoteProtocolError: the reply is not what an honest hub may send.
        """
        hub = self._hub
        nonce_by_party = dict(reply.nonces)
        offered_agreement = BucketAgreement(
            reply.session, self.terms_digest, reply.bucket_count, nonce_by_party
        )
        if reply.resumes:
            stored_agreement = self.stored_intersection.agreement
            are_earlier_buckets_finished = reply.first_bucket <= announcement.finished_buckets
            if (
                stored_agreement is None
                or offered_agreement.identity != stored_agreement.identity
                or not are_earlier_buckets_finished
            ):
                raise RemoteProtocolError(
                    f"{hub} goes on with bucket {reply.first_bucket} of an intersection that "
                    f"{self._me} does not know; remove the record of it at all parties, and "
                    "intersect anew"
                )
            return stored_agreement
        self._check_new_buckets(reply, announcement)
        contributors = tuple(nonce_by_party)
        if contributors != (hub, *self._members) or nonce_by_party[self._me] != announcement.nonce:
            raise RemoteProtocolError(
                f"{hub} makes the key of buckets of random bytes of {', '.join(contributors)}; "
                f"expected those of {', '.join((hub, *self._members))}, and of {self._me} those "
                "that it sent"
            )
        if reply.session != session:
            raise RemoteProtocolError(
                f"{hub} names the intersection {reply.session!r}, {self._me} {session!r}"
            )
        return offered_agreement

    def _check_new_buckets(self, reply: _HubReply, announcement: _MemberAnnouncement) -> None:
        """Check that a new intersection begins at bucket 0 of a number that fits the ID counts.

        Raises RemoteProtocolError: it begins elsewhere, or the number of buckets does not fit.
        """
        min_bucket_count = choose_bucket_count(max(announcement.id_count, reply.id_count))
        # With one member both sizes are known; another member's set may need more buckets.
        max_bucket_count = min_bucket_count
        if len(self._members) > 1:
            max_bucket_count = choose_bucket_count(self._settings.maximum_ids)
        is_power_of_two = reply.bucket_count.bit_count() == 1
        is_in_range = min_bucket_count <= reply.bucket_count <= max_bucket_count
        if not (is_power_of_two and is_in_range) or reply.first_bucket != 0:
            raise RemoteProtocolError(
                f"{self._hub} wants {reply.bucket_count} buckets, from {reply.first_bucket} on; "
                f"expected a power of two from {min_bucket_count} to {max_bucket_count}, from 0 on"
            )

    async def intersect_buckets(
        self,
        agreement: "BucketAgreement",
        id_count_by_peer: Mapping[str, int],
        first_bucket: int,
        *,
        resumes: bool,
    ) -> None:
        """Intersect all buckets from `first_bucket` on, one after another, and store each result.

        A new intersection first replaces the record of an earlier one. The run is also recorded in
        this party's history, which may refuse a peer that has used up its runs.

        Args:
            agreement: what the parties agreed on.
            id_count_by_peer: announced number of IDs by peer.
            first_bucket: the first bucket to run.
            resumes: whether this continues an interrupted intersection.
        """
        if not resumes:
            self.stored_intersection.store_agreement(agreement)
        with self._links.heartbeats.tighten_limits(
            self._estimate_heartbeats(agreement.bucket_count, id_count_by_peer)
        ):
            own_ids = BucketedIds(
                self._me,
                self._ids,
                self._settings,
                key=agreement.key,
                bucket_count=agreement.bucket_count,
                padding_secret=self.stored_intersection.secret,
                folder=self.stored_intersection.folder,
                count_work=self._links.heartbeats.count_work,
            )
            admit_run(
                self._settings, self._me, self._peers, session=agreement.session, resumes=resumes
            )
            self.stored_intersection.store_fingerprint(own_ids.fingerprint)
            for bucket in range(first_bucket, agreement.bucket_count):
                report_work("alignment, buckets", bucket, agreement.bucket_count)
                await self._intersect_bucket(own_ids, agreement, id_count_by_peer, bucket)
            report_work("alignment, buckets", agreement.bucket_count, agreement.bucket_count)
            own_ids.clear()

    def _estimate_heartbeats(
        self, bucket_count: int, id_count_by_peer: Mapping[str, int]
    ) -> dict[str, int]:
        """Return how many heartbeats (progress reports) each peer may send at most, by peer.

        The work follows from the announced sizes. A member (any party but the hub) digests its IDs
        twice, and in each bucket blinds its own padded list and the hub's. The hub does so for each
        member, and relays the heartbeats of the others.

        `bucket_count`: number of buckets. `id_count_by_peer`: announced number of IDs by peer.
        """
        own_list_size = compute_capacity(len(self._ids), bucket_count)
        if self._me == self._hub:
            limit_by_peer = dict[str, int]()
            for peer, id_count in id_count_by_peer.items():
                blinded_ids = (
                    compute_capacity(id_count, bucket_count) + own_list_size
                )  # in each bucket
                limit_by_peer[peer] = count_allowed_heartbeats(
                    2 * id_count + bucket_count * blinded_ids
                )
            return limit_by_peer
        member_count = len(self._members)
        # The sets of other members are known only to be no larger than the buckets allow.
        max_id_count = bucket_count * bucketing.IDS_PER_BUCKET
        member_list_size = (
            own_list_size if member_count == 1 else compute_capacity(max_id_count, bucket_count)
        )
        hub_id_count = id_count_by_peer[self._hub]
        hub_list_size = compute_capacity(hub_id_count, bucket_count)
        ids_to_process = (
            2 * hub_id_count
            + member_count * max_id_count
            + bucket_count * member_count * (hub_list_size + member_list_size)
        )
        return {self._hub: count_allowed_heartbeats(ids_to_process)}

    async def _intersect_bucket(
        self,
        own_ids: BucketedIds,
        agreement: "BucketAgreement",
        id_count_by_peer: Mapping[str, int],
        bucket: int,
    ) -> None:
        """Run the set-intersection protocol on one bucket, and store its result.

        At the hub, where it is computed, the result has a row for each common ID: the hub's own row
        number, then the ID's position in each member's list. At a member the result has this
        party's own row number at each position of its list.

        Args:
            own_ids: this party's buckets.
            agreement: what the parties agreed on.
            id_count_by_peer: announced number of IDs by peer.
            bucket: number of the bucket.
        """
        entries, row_by_entry = own_ids.load_bucket(bucket)
        list_size_by_peer = {
            peer: compute_capacity(size, agreement.bucket_count)
            for peer, size in id_count_by_peer.items()
        }
        bucket_agreement = IntersectionAgreement(
            session=f"{agreement.identity.hex()} {bucket} of {agreement.bucket_count}",
            minimum_rows=0,  # the minimum holds for all buckets together (`send_common_rows`)
            maximum_ids=self._settings.maximum_ids,
            encoding="digests of ids v1",
            output=Output.HUB_ROWS,
        )
        backend = SET_INTERSECTIONS[self._settings.selected_protocol]
        assert issubclass(backend, ResumableIntersection)
        protocol = backend(
            bucket_agreement,
            threads=self._settings.threads,
            progress=ProgressReporter(self._links.heartbeats),
            secret=self.stored_intersection.secret,
            expected_sizes=list_size_by_peer,
        )
        largest_list = max(own_ids.bucket_capacity, *list_size_by_peer.values())
        max_message_bytes = protocol.compute_max_message_bytes(largest_list)

        async def run_role(role: Conversation) -> None:
            """Run this party's role over the links, until it is finished.

            Peers must repeat the messages of an interrupted attempt at this bucket unchanged.
            """
            checked_role = _RepeatCheckedRole(
                role, partial(self.stored_intersection.require_same, bucket)
            )
            await self._links.run_conversation(
                Kind.ALIGNMENT, checked_role, self._peers, max_bytes=max_message_bytes
            )

        if self._me == self._hub:
            hub = protocol.make_hub(self._me, self._members, entries)
            await run_role(hub)
            # A member numbers the positions in all its lists, which are equally long, in one
            # sequence.
            positions_by_member = [
                bucket * list_size_by_peer[name] + position
                for name, position in hub.positions_by_member.items()
            ]
            result = np.column_stack([row_by_entry[hub.rows], *positions_by_member])
            if (result < 0).any():  # the row of padding is -1
                raise RemoteProtocolError(
                    f"{', '.join(self._members)} and {self._me} share what fills up a bucket, "
                    "which is random; a peer does not follow the protocol"
                )
        else:
            member = protocol.make_member(self._me, self._hub, entries)
            await run_role(member)
            result = row_by_entry[member.sent_rows][:, None]
        self.stored_intersection.store_result(bucket, result)

    def send_common_rows(self, id_count_by_member: Mapping[str, int]) -> Rows:
        """Send each member the positions of the n common IDs in its lists; return the hub's n rows.

        All parties get the common IDs in the same random order.

        `id_count_by_member`: announced number of IDs by member.

        Raises IntersectionTooSmallError: fewer common IDs than the agreed minimum; the members are
            notified.
        """
        agreement = self.stored_intersection.agreement
        min_common_rows = self._settings.minimum_rows
        assert agreement is not None
        results = self.stored_intersection.load_results()
        if len(results) < min_common_rows:
            for name in self._members:
                self.send(name, _TOO_FEW)
            raise IntersectionTooSmallError.for_party(
                self._me, min_common_rows, f" ({len(results)} in common to all)"
            )
        results = results[random_permutation(len(results))]
        # Column 0 has the hub's own rows; then follows a column of positions for each member.
        for name, row_positions in zip(self._members, results.T[1:], strict=True):
            integer_type = _pick_position_type(agreement.bucket_count, id_count_by_member[name])
            self.send(name, _POSITIONS_FOLLOW + row_positions.astype(integer_type).tobytes())
        return results[:, 0].copy()

    def read_common_rows(self, message: Envelope, hub_id_count: int) -> Rows:
        """Parse the hub's last message at a member; return this party's rows of the n common IDs.

        The hub names the positions of the common IDs in this party's lists.

        `message`: the hub's last message, untrusted. `hub_id_count`: announced number of the hub's
        IDs.

        Raises:
            IntersectionTooSmallError: the hub reports that too few IDs are common.
            RemoteProtocolError: positions are repeated, are of padding, or are too few or too many.
        """
        agreement = self.stored_intersection.agreement
        min_common_rows = self._settings.minimum_rows
        assert agreement is not None
        message_kind = message.payload[:1]
        encoded_positions = message.payload[1:]
        if message_kind == _TOO_FEW and not encoded_positions:
            raise IntersectionTooSmallError.for_party(self._me, min_common_rows)
        integer_type = _pick_position_type(agreement.bucket_count, len(self._ids))
        if message_kind != _POSITIONS_FOLLOW or len(encoded_positions) % integer_type.itemsize:
            raise RemoteProtocolError(f"{self._hub} sent {self._me} no list of common rows")
        row_by_position = self.stored_intersection.load_results()[:, 0]  # -1: padding
        positions = np.frombuffer(encoded_positions, integer_type)
        positions_in_range = positions[positions < len(row_by_position)]
        rows = row_by_position[positions_in_range]
        is_row = rows >= 0
        distinct_count = len(np.unique(positions))
        are_all_rows = len(positions_in_range) == len(positions) and is_row.all()
        are_distinct = distinct_count == len(positions)
        is_expected_number = min_common_rows <= len(rows) <= hub_id_count
        if not (are_all_rows and are_distinct and is_expected_number):
            raise RemoteProtocolError(
                f"{self._hub} opened {len(positions)} places, of which {is_row.sum()} are "
                f"of IDs of {self._me} and {distinct_count} differ; expected {min_common_rows} "
                f"to {min(hub_id_count, len(self._ids))} different ones"
            )
        return rows


def _pick_position_type(bucket_count: int, id_count: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest integer type that can number all positions in a member's padded lists.

    `bucket_count`: number of buckets, each with a list. `id_count`: announced number of the
    member's IDs.
    """
    position_count = bucket_count * compute_capacity(id_count, bucket_count)
    return np.dtype("<u4" if position_count <= 2**32 else "<u8")


@dataclass
class _RepeatCheckedRole:
    """A role of a protocol that refuses changed messages when a bucket is run again.

    After an interruption peers must repeat their messages: another message in the place of the
    first could reveal more than one run does.

    Attributes:
        role: the role.
        require_same: called with the sender, the number of its message, and the message; raises
            RemoteProtocolError if another message was received in its place before.
        message_count_by_sender: number of received messages, by sender.
    """

    role: Conversation
    require_same: Callable[[str, int, bytes], None]
    message_count_by_sender: Counter[str] = field(default_factory=Counter)

    def start(self) -> Iterable[Outgoing]:
        """Return the role's first messages."""
        return self.role.start()

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Check that a repeated message is the same as before; return the role's reply to it."""
        self.require_same(sender, self.message_count_by_sender[sender], body)
        self.message_count_by_sender[sender] += 1
        return self.role.receive(sender, body)

    @property
    def is_finished(self) -> bool:
        """True if the role awaits no further message."""
        return self.role.is_finished


@dataclass(frozen=True)
class BucketAgreement:
    """An agreement of the parties of an intersection, which is public among them.

    Attributes:
        session: the name of the intersection.
        terms_digest: SHA-256 of the parties' names and the agreed settings.
        bucket_count: number of buckets.
        nonce_by_party: 32 random bytes of each party, the hub first.
    """

    session: str
    terms_digest: bytes
    bucket_count: int
    nonce_by_party: Mapping[str, bytes]

    @property
    def _seed(self) -> bytes:
        """The SHA-256 of all fields; random, since every party contributed random bytes."""
        fields = [self.session.encode(), self.terms_digest, self.bucket_count.to_bytes(4, "big")]
        for name, nonce in self.nonce_by_party.items():
            fields += [name.encode(), nonce]
        # With its length before each field, different fields never give the same bytes.
        framed = b"".join(len(item).to_bytes(4, "big") + item for item in fields)
        return hashlib.sha256(b"secure-apfed buckets v1" + framed).digest()

    @property
    def identity(self) -> bytes:
        """The 32 bytes that identify this intersection, by which it is found again to resume it."""
        return derive_key(self._seed, b"identity")

    @property
    def key(self) -> bytes:
        """The key under which IDs are digested and so distributed to buckets.

        No party knows it before the session, so nobody can choose IDs that fill one bucket.
        """
        return derive_key(self._seed, b"digests")


@dataclass
class StoredIntersection:
    """A party's record of an intersection under way, by which it can be resumed.

    Attributes:
        folder: the folder in which it is stored; None: it is in memory only.
        agreement: what the parties agreed on; None: there is no intersection yet.
        fingerprint: digest of the party's IDs, from `fingerprint_ids`.
        secret: 32 bytes from which the party's keys and orders in all buckets are derived.
    """

    folder: Path | None
    agreement: BucketAgreement | None = None
    fingerprint: bytes = field(default=b"", repr=False)
    secret: bytes = field(default_factory=fresh_key, repr=False)
    _content_by_file: dict[str, bytes] = field(default_factory=dict, repr=False)  # without a folder

    @classmethod
    def from_folder(cls, folder: Path | None, terms_digest: bytes) -> "StoredIntersection":
        """Return the record stored in a folder if it has these terms, else an empty record.

        `terms_digest`: SHA-256 of the parties' names and the agreed settings.

        Raises CheckpointError: the stored record is damaged.
        """
        if folder is None or not (folder / _AGREEMENT_FILE).exists():
            return cls(folder)
        path = folder / _AGREEMENT_FILE
        try:
            version, session, stored_terms_digest, bucket_count, nonce_by_party, fingerprint = (
                msgpack.unpackb(load_bytes(path, max_bytes=_MAX_SMALL_FILE_BYTES))
            )
            agreement = BucketAgreement(
                session, stored_terms_digest, bucket_count, dict(nonce_by_party)
            )
            secret = load_bytes(folder / _SECRET_FILE, max_bytes=_MAX_SMALL_FILE_BYTES)
            if version != _RECORD_VERSION or len(secret) != len(fresh_key()):
                raise ValueError("another version")
            _ = agreement.identity  # raises an error if a field has a wrong type
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise CheckpointError(
                f"{path} is no record of an intersection; remove its folder, then all parties "
                "intersect anew"
            ) from error
        if stored_terms_digest != terms_digest:
            return cls(folder)
        return cls(folder, agreement, fingerprint, secret)

    def store_agreement(self, agreement: BucketAgreement) -> None:
        """Delete the former record, and store the new agreement with a fresh secret.

        `agreement`: what the parties agreed on.
        """
        self.delete_files()
        self.agreement = agreement
        self.secret = fresh_key()
        self.fingerprint = b""
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        self._write_file(_SECRET_FILE, self.secret)

    def store_fingerprint(self, fingerprint: bytes) -> None:
        """Store the agreement with the fingerprint of the party's IDs.

        From then on the intersection can be resumed. So it is called only once all IDs are in their
        buckets and the run has been admitted.
        """
        assert self.agreement is not None
        self.fingerprint = fingerprint
        session, terms_digest, bucket_count, nonce_by_party = astuple(self.agreement)
        fields = [
            _RECORD_VERSION,
            session,
            terms_digest,
            bucket_count,
            list(nonce_by_party.items()),
            fingerprint,
        ]
        self._write_file(_AGREEMENT_FILE, msgpack.packb(fields))

    @property
    def done_buckets(self) -> int:
        """The number of finished buckets before the first unfinished one."""
        assert self.agreement is not None
        for bucket in range(self.agreement.bucket_count):
            if not self._has_file(f"result-{bucket}.bin"):
                return bucket
        return self.agreement.bucket_count

    def store_result(self, bucket: int, result: Rows) -> None:
        """Store the result of a bucket, a matrix, as its shape and then its numbers."""
        shape = np.array(result.shape, "<i8").tobytes()
        self._write_file(f"result-{bucket}.bin", shape + result.astype("<i8").tobytes())

    def load_results(self) -> Rows:
        """Return the results of all buckets as one matrix, one bucket below the other."""
        assert self.agreement is not None
        results = []
        for bucket in range(self.agreement.bucket_count):
            content = self._load_file(f"result-{bucket}.bin", max_bytes=_MAX_RESULT_BYTES)
            numbers = np.frombuffer(content, "<i8")
            row_count, column_count = numbers[:2].tolist()
            results.append(numbers[2:].reshape(row_count, column_count))
        return np.concatenate(results)

    def require_same(self, bucket: int, peer: str, message_number: int, message: bytes) -> None:
        """Require that a peer's message is the same as at an earlier attempt at the bucket.

        A digest of the first message is stored, and later ones are compared with it. A different
        message, such as hashes of IDs under a second key, would reveal more than one run does.

        Args:
            bucket: number of the bucket.
            peer: the sender.
            message_number: number of the message among the peer's messages in the bucket, from 0.
            message: the message's bytes.

        Raises RemoteProtocolError: the message differs from the first one.
        """
        digest = hashlib.sha256(message).digest()
        name = f"seen-{bucket}-{message_number}-{peer.encode().hex()}.bin"
        if not self._has_file(name):
            self._write_file(name, digest)
        if self._load_file(name) != digest:
            raise RemoteProtocolError(
                f"{peer} sent another message for bucket {bucket} than before the intersection "
                "was broken off; what is repeated must be the same. Remove the record of the "
                "intersection at all parties (the folder `alignment` in the folder of each), and "
                "intersect anew"
            )

    def delete_files(self) -> None:
        """Delete the record, in memory and in the folder."""
        self._content_by_file.clear()
        self.agreement = None
        if self.folder is not None and not self.folder.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder)

    def _has_file(self, name: str) -> bool:
        """Return whether a file of the record is stored, on disk or in memory."""
        if self.folder is None:
            return name in self._content_by_file
        return (self.folder / name).exists()

    def _load_file(self, name: str, *, max_bytes: int = _MAX_SMALL_FILE_BYTES) -> bytes:
        """Return the content of a file of the record, on disk or in memory.

        `max_bytes`: the largest number of bytes that is read from the disk.
        """
        if self.folder is None:
            return self._content_by_file[name]
        return load_bytes(self.folder / name, max_bytes=max_bytes)

    def _write_file(self, name: str, content: bytes) -> None:
        """Store a file of the record, on disk if there is a folder, else in memory."""
        if self.folder is None:
            self._content_by_file[name] = content
        else:
            write_atomically(self.folder / name, content, private=True)
