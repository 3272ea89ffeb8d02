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
factor of two, if it is above `buckets.BUCKET_IDS`. Memory is that of one bucket, plus 8 bytes for
each common row.
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
_MAX_OPENING_BYTES = 2**16
# First byte of the hub's last message: too few common rows, or their places follow it.
_TOO_FEW = b"\0"
_PLACES_FOLLOW = b"\1"
_Nonce = Annotated[bytes, Field(min_length=32, max_length=32)]
_Count = Annotated[int, Field(ge=0)]
_VERSION = 2
_AGREED = "agreed.msgpack"
_SECRET = "secret.bin"  # noqa: S105  (the name of a file)
_RESULT_BYTES = 2**36
_SMALL_BYTES = 2**20


def count_alignment_heartbeats(maximum_ids: int, members: int) -> int:
    """Return how many heartbeats (progress reports) a party may send for a session's alignment.

    The limit is that of the hub, the party at which the intersection is computed, since it has the
    most work. It reads its IDs up to three times. For each other party (member) it also blinds its
    own IDs and the member's.

    `maximum_ids`: the agreed limit of IDs at each party. `members`: number of members.
    """
    # 3 readings, and 2 blindings for each member; counted as 4 and 3, since padding adds some.
    readings = 4
    blindings = 3 * members
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
        self._last_done = 0  # IDs processed in the present part of the work

    def __call__(self, progress: Progress) -> None:
        """Count the IDs processed since the last call, and show the progress of the present part.

        `progress`: name of the part, how many IDs of it are done, and how many there are.
        """
        has_restarted = progress.done <= self._last_done
        previous = 0 if has_restarted else self._last_done
        self._heartbeats.count_work(progress.done - previous)
        report_work(f"alignment, {progress.work}", progress.done, progress.total)
        is_complete = progress.done >= progress.total
        self._last_done = 0 if is_complete else progress.done


@contextmanager
def relay_heartbeats(links: Links) -> Iterator[None]:
    """Pass on each peer's heartbeats (progress reports) to all other peers in the `with` block.

    Run by the hub, the party that the intersection is computed at: while it waits for one peer, the
    other peers wait for it.
    """
    links.heartbeats.relays = True
    try:
        yield
    finally:
        links.heartbeats.relays = False


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
        opening_by_member = {
            name: _parse_opening(_OPENING, await party.receive(name), settings) for name in members
        }
        sizes = {name: opening.size for name, opening in opening_by_member.items()}
        agreed, start, resumes = party.propose_agreement(opening_by_member, session)
        reply = _Reply(
            resumes=resumes,
            start=start,
            session=agreed.session,
            buckets=agreed.buckets,
            size=len(ids),
            nonces=tuple(agreed.nonces.items()),
        )
        for name in members:
            party.send(name, reply.pack())
        await party.intersect_buckets(agreed, sizes, start, resumes=resumes)
    return party.send_common_rows(sizes)


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
    interrupted = party.unfinished.agreed  # None: there is nothing to resume
    opening = _Opening(
        nonce=fresh_key(),
        size=len(ids),
        resumable=interrupted.identity if interrupted else b"",
        finished=party.unfinished.done_buckets if interrupted else 0,
    )
    party.send(hub, opening.pack())
    # More patience than usual, since the hub itself waits for all other members.
    reply = _parse_opening(_REPLY, await party.receive(hub, patience=4), settings)
    agreed = party.check_reply(reply, opening, session)
    await party.intersect_buckets(agreed, {hub: reply.size}, reply.start, resumes=reply.resumes)
    # The last message has at most 8 bytes for each common ID.
    longest = _MAX_OPENING_BYTES + 8 * len(ids)
    last_message = await party.receive(hub, maximum=longest)
    return party.read_common_rows(last_message, reply.size)


class _Opening(NamedTuple):
    """The first message of a member (a party at which the intersection is not computed).

    Attributes:
        nonce: 32 random bytes, which contribute to the common key of all parties.
        size: the number of the member's IDs; untrusted, of any type, until it is checked.
        resumable: identity of the interrupted intersection that the member can resume; b"": none.
        finished: how many buckets of that intersection the member has finished.
    """

    nonce: _Nonce
    size: Any
    resumable: bytes
    finished: _Count

    def pack(self) -> bytes:
        """Encode the message with msgpack."""
        return bytes(msgpack.packb(self))


class _Reply(NamedTuple):
    """The reply of the hub (the party that computes the intersection) to all members' openings.

    Attributes:
        resumes: whether all parties continue an interrupted intersection.
        start: the first bucket to run.
        session: the name of the intersection.
        buckets: number of buckets.
        size: the number of the hub's IDs; untrusted, of any type, until it is checked.
        nonces: name and 32 random bytes of each party, the hub first.
    """

    resumes: bool
    start: int
    session: str
    buckets: int
    size: Any
    nonces: tuple[tuple[str, _Nonce], ...]

    def pack(self) -> bytes:
        """Encode the message with msgpack."""
        return bytes(msgpack.packb(self))


_OPENING: TypeAdapter[_Opening] = TypeAdapter(_Opening, config=ConfigDict(strict=True))
_REPLY: TypeAdapter[_Reply] = TypeAdapter(_Reply, config=ConfigDict(strict=True))
_FirstMessage = TypeVar("_FirstMessage", _Opening, _Reply)


def _parse_opening(
    adapter: TypeAdapter[_FirstMessage], message: Envelope, settings: AlignmentSettings
) -> _FirstMessage:
    """Parse the first message of a peer, and check the announced number of IDs.

    `adapter`: parser of the expected type, an `_Opening` from a member or a `_Reply` from the hub.
    `settings`: the agreed settings, which limit the number of IDs.

    Raises RemoteProtocolError: the message is malformed, or announces more IDs than was agreed.
    """
    try:
        opening = adapter.validate_python(msgpack.unpackb(message.payload, use_list=False))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(
            f"{message.sender} sent {message.receiver} something else than the opening of an "
            "intersection; use the same release at all parties"
        ) from error
    if type(opening.size) is not int or not 0 <= opening.size <= settings.maximum_ids:
        raise RemoteProtocolError(
            f"{message.sender} announces {opening.size!r} IDs, the parties agreed on at most "
            f"{settings.maximum_ids}"
        )
    return opening


class _IntersectingParty:
    """One party's part in an intersection over links, which runs bucket by bucket.

    Attributes:
        terms: SHA-256 of the parties and the agreed settings. An interrupted intersection can only
            be resumed under equal terms.
        unfinished: the record of this intersection, or of the last one if it was interrupted.
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
        self.terms = hashlib.sha256(document.encode()).digest()
        self.unfinished = StoredIntersection.from_folder(folder, self.terms)

    def send(self, peer: str, body: bytes) -> None:
        """Send an alignment message to a peer."""
        self._links.send(peer, Kind.ALIGNMENT, BEFORE_TRAINING, body)

    async def receive(
        self, peer: str, *, patience: int = 2, maximum: int = _MAX_OPENING_BYTES
    ) -> Envelope:
        """Wait for a peer's next alignment message, and return it.

        `patience`: how long to wait, in multiples of the contract's unit of patience. `maximum`:
        the largest number of bytes of the message.
        """
        return await self._links.receive(
            peer, Kind.ALIGNMENT, step=BEFORE_TRAINING, patience=patience, maximum=maximum
        )

    def discard_other_ids(self) -> None:
        """Delete the record of an interrupted intersection if this party's IDs have changed since.

        The intersection could only be resumed with the same IDs.
        """
        stored = self.unfinished
        if stored.agreed is None:
            return
        fingerprint = fingerprint_ids(
            self._me,
            self._ids,
            self._settings,
            stored.agreed.key,
            self._links.heartbeats.count_work,
        )
        if fingerprint != stored.fingerprint:
            stored.delete_files()

    def propose_agreement(
        self, openings: Mapping[str, _Opening], session: str
    ) -> tuple["Agreed", int, bool]:
        """Decide, at the hub, which intersection the parties run, and from which bucket on.

        An interrupted intersection is resumed if all parties can resume it, else a new one starts.

        `openings`: each member's first message, by name. `session`: name of a new intersection.

        Returns what the parties agree on, the first bucket to run, and whether it is resumed.
        """
        agreed = self.unfinished.agreed
        resumable = {opening.resumable for opening in openings.values()}
        if agreed is not None and resumable == {agreed.identity}:
            # It continues with the first bucket that any party has not finished.
            finished = [opening.finished for opening in openings.values()]
            return agreed, min(self.unfinished.done_buckets, *finished), True
        nonces = {self._me: fresh_key()}
        nonces |= {name: opening.nonce for name, opening in openings.items()}
        sizes = [opening.size for opening in openings.values()]
        count = choose_bucket_count(max(len(self._ids), *sizes))
        return Agreed(session, self.terms, count, nonces), 0, False

    def check_reply(self, reply: _Reply, opening: _Opening, session: str) -> "Agreed":
        """Check the hub's reply at a member; return the agreement that it makes.

        The hub is the party that computes the intersection. The number of buckets must fit the
        announced sizes. All parties must have contributed random bytes, and this party's must be
        the ones that it sent.

        Args:
            reply: the hub's reply.
            opening: what this member sent before.
            session: the name of the intersection, the same at all parties.

        Raises RemoteProtocolError: the reply is not what an honest hub may send.
        """
        stored = self.unfinished.agreed
        hub = self._hub
        nonces = dict(reply.nonces)
        offered = Agreed(reply.session, self.terms, reply.buckets, nonces)
        if reply.resumes:
            is_known = stored is not None and offered.identity == stored.identity
            if stored is None or not is_known or reply.start > opening.finished:
                raise RemoteProtocolError(
                    f"{hub} goes on with bucket {reply.start} of an intersection that {self._me} "
                    "does not know; remove the record of it at all parties, and intersect anew"
                )
            return stored
        minimum = choose_bucket_count(max(opening.size, reply.size))
        # With one member both sizes are known; another member's set may need more buckets.
        maximum = minimum
        if len(self._members) > 1:
            maximum = choose_bucket_count(self._settings.maximum_ids)
        is_power_of_two = reply.buckets.bit_count() == 1
        if not (is_power_of_two and minimum <= reply.buckets <= maximum) or reply.start != 0:
            raise RemoteProtocolError(
                f"{hub} wants {reply.buckets} buckets, from {reply.start} on; expected a power of "
                f"two from {minimum} to {maximum}, from 0 on"
            )
        contributors = tuple(nonces)
        if contributors != (hub, *self._members) or nonces[self._me] != opening.nonce:
            raise RemoteProtocolError(
                f"{hub} makes the key of buckets of random bytes of {', '.join(contributors)}; "
                f"expected those of {', '.join((hub, *self._members))}, and of {self._me} those "
                "that it sent"
            )
        if reply.session != session:
            raise RemoteProtocolError(
                f"{hub} names the intersection {reply.session!r}, {self._me} {session!r}"
            )
        return offered

    async def intersect_buckets(
        self, agreed: "Agreed", sizes: Mapping[str, int], start: int, *, resumes: bool
    ) -> None:
        """Intersect all buckets from `start` on, one after another, and store each result.

        A new intersection first replaces the record of an earlier one. The run is also recorded in
        this party's history, which may refuse a peer that has used up its runs.

        Args:
            agreed: what the parties agreed on.
            sizes: announced number of IDs by peer.
            start: the first bucket to run.
            resumes: whether this continues an interrupted intersection.
        """
        if not resumes:
            self.unfinished.store_agreement(agreed)
        with self._links.heartbeats.tighten_limits(
            self._estimate_heartbeats(agreed.buckets, sizes)
        ):
            own_ids = BucketedIds(
                self._me,
                self._ids,
                self._settings,
                key=agreed.key,
                buckets=agreed.buckets,
                secret=self.unfinished.secret,
                folder=self.unfinished.folder,
                count_work=self._links.heartbeats.count_work,
            )
            admit_run(
                self._settings, self._me, self._peers, session=agreed.session, resumes=resumes
            )
            self.unfinished.store_fingerprint(own_ids.fingerprint)
            for bucket in range(start, agreed.buckets):
                report_work("alignment, buckets", bucket, agreed.buckets)
                await self._intersect_bucket(own_ids, agreed, sizes, bucket)
            report_work("alignment, buckets", agreed.buckets, agreed.buckets)
            own_ids.clear()

    def _estimate_heartbeats(self, buckets: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return how many heartbeats (progress reports) each peer may send at most, by peer.

        The work follows from the announced sizes. A member (any party but the hub) digests its IDs
        twice, and in each bucket blinds its own padded list and the hub's. The hub does so for each
        member, and relays the heartbeats of the others.

        `buckets`: number of buckets. `sizes`: announced number of IDs by peer.
        """
        own_list = compute_capacity(len(self._ids), buckets)
        if self._me == self._hub:
            limits = dict[str, int]()
            for peer, size in sizes.items():
                blinded = compute_capacity(size, buckets) + own_list  # in each bucket
                limits[peer] = count_allowed_heartbeats(2 * size + buckets * blinded)
            return limits
        members = len(self._members)
        # The sets of other members are known only to be no larger than the buckets allow.
        largest = buckets * bucketing.BUCKET_IDS
        member_list = own_list if members == 1 else compute_capacity(largest, buckets)
        hub_size = sizes[self._hub]
        hub_list = compute_capacity(hub_size, buckets)
        work = 2 * hub_size + members * largest + buckets * members * (hub_list + member_list)
        return {self._hub: count_allowed_heartbeats(work)}

    async def _intersect_bucket(
        self, own_ids: BucketedIds, agreed: "Agreed", sizes: Mapping[str, int], bucket: int
    ) -> None:
        """Run the set-intersection protocol on one bucket, and store its result.

        At the hub, where it is computed, the result has a row for each common ID: the hub's own row
        number, then the ID's place in each member's list. At a member the result has this party's
        own row number at each place of its list.

        Args:
            own_ids: this party's buckets.
            agreed: what the parties agreed on.
            sizes: announced number of IDs by peer.
            bucket: number of the bucket.
        """
        entries, row_of_entry = own_ids.load_bucket(bucket)
        list_size_by_peer = {
            peer: compute_capacity(size, agreed.buckets) for peer, size in sizes.items()
        }
        agreement = IntersectionAgreement(
            session=f"{agreed.identity.hex()} {bucket} of {agreed.buckets}",
            minimum_rows=0,  # the minimum holds for all buckets together (`send_common_rows`)
            maximum_ids=self._settings.maximum_ids,
            encoding="digests of ids v1",
            output=Output.HUB_ROWS,
        )
        backend = SET_INTERSECTIONS[self._settings.backend]
        assert issubclass(backend, ResumableIntersection)
        protocol = backend(
            agreement,
            threads=self._settings.threads,
            progress=ProgressReporter(self._links.heartbeats),
            secret=self.unfinished.secret,
            expected_sizes=list_size_by_peer,
        )
        largest_list = max(own_ids.capacity, *list_size_by_peer.values())
        longest = protocol.compute_longest_message(largest_list)

        async def run_role(role: Conversation) -> None:
            """Run this party's role over the links, until it is finished.

            Peers must repeat the messages of an interrupted attempt at this bucket unchanged.
            """
            checked = _RepeatCheckedRole(role, partial(self.unfinished.require_same, bucket))
            await self._links.run_conversation(
                Kind.ALIGNMENT, checked, self._peers, maximum=longest
            )

        if self._me == self._hub:
            hub = protocol.make_hub(self._me, self._members, entries)
            await run_role(hub)
            # A member numbers the places of all its lists, which are equally long, in one sequence.
            places = [
                bucket * list_size_by_peer[name] + place for name, place in hub.places.items()
            ]
            result = np.column_stack([row_of_entry[hub.rows], *places])
            if (result < 0).any():  # the row of padding is -1
                raise RemoteProtocolError(
                    f"{', '.join(self._members)} and {self._me} share what fills up a bucket, "
                    "which is random; a peer does not follow the protocol"
                )
        else:
            member = protocol.make_member(self._me, self._hub, entries)
            await run_role(member)
            result = row_of_entry[member.order][:, None]
        self.unfinished.store_result(bucket, result)

    def send_common_rows(self, sizes: Mapping[str, int]) -> Rows:
        """Send each member the places of the n common IDs in its lists; return the hub's n rows.

        All parties get the common IDs in the same random order.

        `sizes`: announced number of IDs by member.

        Raises IntersectionTooSmallError: fewer common IDs than the agreed minimum; the members are
            notified.
        """
        agreed = self.unfinished.agreed
        minimum = self._settings.minimum_rows
        assert agreed is not None
        results = self.unfinished.load_results()
        if len(results) < minimum:
            for name in self._members:
                self.send(name, _TOO_FEW)
            raise IntersectionTooSmallError.for_party(
                self._me, minimum, f" ({len(results)} in common to all)"
            )
        results = results[random_permutation(len(results))]
        # Column 0 has the hub's own rows; then follows a column of places for each member.
        for name, places in zip(self._members, results.T[1:], strict=True):
            integer_type = _pick_place_type(agreed.buckets, sizes[name])
            self.send(name, _PLACES_FOLLOW + places.astype(integer_type).tobytes())
        return results[:, 0].copy()

    def read_common_rows(self, message: Envelope, hub_size: int) -> Rows:
        """Parse the hub's last message at a member; return this party's rows of the n common IDs.

        The hub names the places of the common IDs in this party's lists.

        `message`: the hub's last message, untrusted. `hub_size`: announced number of the hub's IDs.

        Raises:
            IntersectionTooSmallError: the hub reports that too few IDs are common.
            RemoteProtocolError: places are repeated, are of padding, or are too few or too many.
        """
        agreed = self.unfinished.agreed
        minimum = self._settings.minimum_rows
        assert agreed is not None
        kind = message.payload[:1]
        body = message.payload[1:]
        if kind == _TOO_FEW and not body:
            raise IntersectionTooSmallError.for_party(self._me, minimum)
        integer_type = _pick_place_type(agreed.buckets, len(self._ids))
        if kind != _PLACES_FOLLOW or len(body) % integer_type.itemsize:
            raise RemoteProtocolError(f"{self._hub} sent {self._me} no list of common rows")
        row_of_place = self.unfinished.load_results()[:, 0]  # -1 at a place of padding
        places = np.frombuffer(body, integer_type)
        known_places = places[places < len(row_of_place)]
        rows = row_of_place[known_places]
        distinct_places = len(np.unique(places))
        are_known_once = len(known_places) == len(places) == distinct_places
        if not (are_known_once and (rows >= 0).all() and minimum <= len(rows) <= hub_size):
            raise RemoteProtocolError(
                f"{self._hub} opened {len(places)} places, of which {(rows >= 0).sum()} are of IDs "
                f"of {self._me} and {distinct_places} differ; expected {minimum} to "
                f"{min(hub_size, len(self._ids))} different ones"
            )
        return rows


def _pick_place_type(buckets: int, size: int) -> np.dtype[np.unsignedinteger]:
    """Return the smallest integer type that can number all places in a member's padded lists.

    `buckets`: number of buckets, each with a list. `size`: announced number of the member's IDs.
    """
    places = buckets * compute_capacity(size, buckets)
    return np.dtype("<u4" if places <= 2**32 else "<u8")


@dataclass
class _RepeatCheckedRole:
    """A role of a protocol that refuses changed messages when a bucket is run again.

    After an interruption peers must repeat their messages: another message in the place of the
    first could reveal more than one run does.

    Attributes:
        role: the role.
        require_same: called with the sender, the number of its message, and the message; raises
            RemoteProtocolError if another message was received in its place before.
        received: number of received messages, by sender.
    """

    role: Conversation
    require_same: Callable[[str, int, bytes], None]
    received: Counter[str] = field(default_factory=Counter)

    def start(self) -> Iterable[Outgoing]:
        """Return the role's first messages."""
        return self.role.start()

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        """Check that a repeated message is the same as before; return the role's reply to it."""
        self.require_same(sender, self.received[sender], body)
        self.received[sender] += 1
        return self.role.receive(sender, body)

    @property
    def is_finished(self) -> bool:
        """True if the role awaits no further message."""
        return self.role.is_finished


@dataclass(frozen=True)
class Agreed:
    """An agreement of the parties of an intersection, which is public among them.

    Attributes:
        session: the name of the intersection.
        terms: SHA-256 of the parties' names and the agreed settings.
        buckets: number of buckets.
        nonces: 32 random bytes of each party, the hub first.
    """

    session: str
    terms: bytes
    buckets: int
    nonces: Mapping[str, bytes]

    @property
    def _seed(self) -> bytes:
        """The SHA-256 of all fields; random, since every party contributed random bytes."""
        fields = [self.session.encode(), self.terms, self.buckets.to_bytes(4, "big")]
        for name, nonce in self.nonces.items():
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
        agreed: what the parties agreed on; None: there is no intersection yet.
        fingerprint: digest of the party's IDs, from `fingerprint_ids`.
        secret: 32 bytes from which the party's keys and orders in all buckets are derived.
    """

    folder: Path | None
    agreed: Agreed | None = None
    fingerprint: bytes = field(default=b"", repr=False)
    secret: bytes = field(default_factory=fresh_key, repr=False)
    _contents: dict[str, bytes] = field(default_factory=dict, repr=False)  # without a folder

    @classmethod
    def from_folder(cls, folder: Path | None, terms: bytes) -> "StoredIntersection":
        """Return the record stored in a folder if it has these terms, else an empty record.

        `terms`: SHA-256 of the parties' names and the agreed settings.

        Raises CheckpointError: the stored record is damaged.
        """
        if folder is None or not (folder / _AGREED).exists():
            return cls(folder)
        path = folder / _AGREED
        try:
            version, session, stored_terms, buckets, nonces, fingerprint = msgpack.unpackb(
                load_bytes(path, maximum=_SMALL_BYTES)
            )
            agreed = Agreed(session, stored_terms, buckets, dict(nonces))
            secret = load_bytes(folder / _SECRET, maximum=_SMALL_BYTES)
            if version != _VERSION or len(secret) != len(fresh_key()):
                raise ValueError("another version")
            _ = agreed.identity  # raises an error if a field has a wrong type
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise CheckpointError(
                f"{path} is no record of an intersection; remove its folder, then all parties "
                "intersect anew"
            ) from error
        if stored_terms != terms:
            return cls(folder)
        return cls(folder, agreed, fingerprint, secret)

    def store_agreement(self, agreed: Agreed) -> None:
        """Delete the former record, and store the new agreement with a fresh secret.

        `agreed`: what the parties agreed on.
        """
        self.delete_files()
        self.agreed = agreed
        self.secret = fresh_key()
        self.fingerprint = b""
        if self.folder is not None:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
        self._write_file(_SECRET, self.secret)

    def store_fingerprint(self, fingerprint: bytes) -> None:
        """Store the agreement with the fingerprint of the party's IDs.

        From then on the intersection can be resumed. So it is called only once all IDs are in their
        buckets and the run has been admitted.
        """
        assert self.agreed is not None
        self.fingerprint = fingerprint
        session, terms, buckets, nonces = astuple(self.agreed)
        fields = [_VERSION, session, terms, buckets, list(nonces.items()), fingerprint]
        self._write_file(_AGREED, msgpack.packb(fields))

    @property
    def done_buckets(self) -> int:
        """The number of finished buckets before the first unfinished one."""
        assert self.agreed is not None
        for bucket in range(self.agreed.buckets):
            if not self._has_file(f"result-{bucket}.bin"):
                return bucket
        return self.agreed.buckets

    def store_result(self, bucket: int, result: Rows) -> None:
        """Store the result of a bucket, a matrix, as its shape and then its numbers."""
        shape = np.array(result.shape, "<i8").tobytes()
        self._write_file(f"result-{bucket}.bin", shape + result.astype("<i8").tobytes())

    def load_results(self) -> Rows:
        """Return the results of all buckets as one matrix, one bucket below the other."""
        assert self.agreed is not None
        results = []
        for bucket in range(self.agreed.buckets):
            content = self._load_file(f"result-{bucket}.bin", maximum=_RESULT_BYTES)
            numbers = np.frombuffer(content, "<i8")
            rows, columns = numbers[:2].tolist()
            results.append(numbers[2:].reshape(rows, columns))
        return np.concatenate(results)

    def require_same(self, bucket: int, peer: str, number: int, message: bytes) -> None:
        """Require that a peer's message is the same as at an earlier attempt at the bucket.

        A digest of the first message is stored, and later ones are compared with it. A different
        message, such as hashes of IDs under a second key, would reveal more than one run does.

        Args:
            bucket: number of the bucket.
            peer: the sender.
            number: number of the message among the peer's messages in the bucket, from 0.
            message: the message's bytes.

        Raises RemoteProtocolError: the message differs from the first one.
        """
        digest = hashlib.sha256(message).digest()
        name = f"seen-{bucket}-{number}-{peer.encode().hex()}.bin"
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
        self._contents.clear()
        self.agreed = None
        if self.folder is not None and not self.folder.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self.folder)

    def _has_file(self, name: str) -> bool:
        """Return whether a file of the record is stored, on disk or in memory."""
        if self.folder is None:
            return name in self._contents
        return (self.folder / name).exists()

    def _load_file(self, name: str, *, maximum: int = _SMALL_BYTES) -> bytes:
        """Return the content of a file of the record, on disk or in memory.

        `maximum`: the largest number of bytes that is read from the disk.
        """
        if self.folder is None:
            return self._contents[name]
        return load_bytes(self.folder / name, maximum=maximum)

    def _write_file(self, name: str, content: bytes) -> None:
        """Store a file of the record, on disk if there is a folder, else in memory."""
        if self.folder is None:
            self._contents[name] = content
        else:
            write_atomically(self.folder / name, content, private=True)
