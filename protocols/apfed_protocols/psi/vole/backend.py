"""Private set intersection by vector OLE: each member evaluates a function that the hub's IDs know.

Run by: the active as the hub, each passive as a member, and a dealer without IDs, over
authenticated and encrypted links. Protects from: semi-honest hub and members, and a member that
sends what it likes, which is then like another set of its (but for pairs of IDs that it searched
for until their tags were equal, 2^40 hashes a pair where tags have 10 bytes); of these parties the
dealer, who is semi-honest, works with none. With each member apart, over GF(2^128):

1. The dealer hands A and C to the hub, B and Delta to the member: C = A Delta + B
   (`apfed_protocols.psi.vole.dealing`), or did so ahead.
2. The hub names a key, under which H(x) has 128 bits, and encodes its set as a store P with
   Decode(P, x) = H(x) (`apfed_protocols.psi.vole.store`). It sends A + P, which A hides.
3. The member adds: K = B + (A + P) Delta = C + P Delta, and tags each of its IDs by
   F(y) = hash(Decode(K, y) + Delta H(y)). The hub tags its own by hash(Decode(C, x)), which is
   F(x); F of another ID is a random number to it, since Delta is unknown.
4. It compares, and opens what all share; as `apfed_protocols.psi.pairwise`.

The hash is keyed by both: the member commits to its part before it sees the hub's, and shows it
with the tags, so that nobody chose it. Lists are in a random order of the member's. Where the
parties agreed on sizes, a smaller set fills its tags up with random ones, and the store is as large
as for the agreed size.
Source: Rindal and Schoppmann, EUROCRYPT 2021, sections 4 and 5; Raghuraman and Rindal, CCS 2022.
Their silent OT is replaced by the dealer, and consistency of vectors with it.
"""

import hashlib
import hmac
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.ids import check_ids
from apfed_protocols.psi.desk import Inbox
from apfed_protocols.psi.interface import (
    Admit,
    Guesses,
    IntersectionAgreement,
    IntersectionTooSmallError,
    Output,
    Progress,
    check_parties,
)
from apfed_protocols.psi.pairwise import check_places, common_rows
from apfed_protocols.psi.result import Opened, check_choices
from apfed_protocols.psi.script import Script, ScriptedRole, Turn
from apfed_protocols.psi.sizes import announced_size, check_announced
from apfed_protocols.psi.supply import Supply
from apfed_protocols.psi.vole.dealing import (
    HubShare,
    MemberShare,
    dealer_script,
    dealt_to_hub,
    dealt_to_member,
)
from apfed_protocols.psi.vole.field import Elements
from apfed_protocols.psi.vole.messages import (
    COMMIT,
    DEAL,
    HELLO,
    Desk,
    Kind,
    hub_dealt_bytes,
    longest_message,
    member_dealt_bytes,
    tag_bytes,
    vector_bytes,
    vector_elements,
)
from apfed_protocols.psi.vole.output import Tags, hub_tags, match, member_tags
from apfed_protocols.psi.vole.store import (
    DependentRowsError,
    Encoder,
    Rows,
    cells_for,
    digest_ids,
    targets_of,
)
from apfed_protocols.randomness import (
    KEY_BYTES,
    derive_key,
    fresh_key,
    keystream,
    random_permutation,
)

__all__ = ["VoleIntersection"]


class VoleIntersection:
    """The backend `vole`: little computing, few bytes, a dealer; see `leaks`.

    Args:
        agreement: equal at all parties; names the dealer.
        threads: at least 1; this backend computes on whole arrays in this process.
        progress: told of every few IDs.
        admit: asked before each role with IDs is made.
    """

    name: ClassVar[str] = "vole"
    needs_dealer: ClassVar[bool] = True
    pairwise: ClassVar[bool] = True
    outputs: ClassVar[frozenset[Output]] = frozenset({Output.ROWS, Output.HUB_ROWS})
    leaks: ClassVar[tuple[str, ...]] = (
        "The hub learns its pairwise intersection with every member, even when it is refused.",
        "A member learns which of its own IDs all parties share, or that these are too few.",
        "The dealer learns how large the hub's set is.",
    )

    @staticmethod
    def most_guesses(maximum_ids: int) -> Guesses:
        """The hub's store solves as many equations as it has cells; a member's tag is of one ID.

        So an announced n lets the hub try out about 1.3 n + 88 IDs at each member, with a store for
        each. A store of n cells alone would
        be a polynomial of degree n - 1, which takes n log^2 n multiplications to find.
        """
        return Guesses(hub=vector_elements(maximum_ids), member=maximum_ids)

    def __init__(
        self,
        agreement: IntersectionAgreement,
        *,
        threads: int | None = None,
        progress: Callable[[Progress], None] | None = None,
        admit: Admit | None = None,
    ) -> None:
        check_choices(self.name, self.outputs, agreement, threads)
        if not agreement.dealer:
            raise LocalProtocolError("a vole intersection needs a dealer; name it in the agreement")
        self.agreement, self._progress, self._admit = agreement, progress, admit

    @property
    def longest(self) -> int:
        """Bytes of the longest message that a role takes."""
        return longest_message(self.agreement)

    def hub(
        self, me: str, members: Sequence[str], ids: Sequence[bytes], *, supply: Supply | None = None
    ) -> ScriptedRole:
        """The active's side; `supply` where the agreement says that it was dealt ahead.

        Raises LocalProtocolError on duplicate or empty IDs, and on a supply that does not fit.
        """
        check_parties(me, members, self.agreement.dealer)
        self._enter(me, members, ids, supply)
        script = _hub_script(self._desk(me), members, ids, supply)
        return self._role(me, [*members, self.agreement.dealer], script)

    def member(
        self, me: str, hub: str, ids: Sequence[bytes], *, supply: Supply | None = None
    ) -> ScriptedRole:
        """A passive's side; as `hub`."""
        check_parties(hub, [me], self.agreement.dealer)
        self._enter(me, [hub], ids, supply)
        script = _member_script(self._desk(me), hub, ids, supply)
        return self._role(me, [hub, self.agreement.dealer], script)

    def dealer(self, hub: str, members: Sequence[str]) -> ScriptedRole:
        """The dealer's side."""
        me = self.agreement.dealer
        check_parties(hub, members, me)
        script = _nothing() if self.agreement.ahead else dealer_script(self._desk(me), hub, members)
        return self._role(me, [hub], script)

    def _enter(
        self, me: str, peers: Sequence[str], ids: Sequence[bytes], supply: Supply | None
    ) -> None:
        """Check all that can be checked before the first message; claim the supply last."""
        check_ids(me, ids, self.agreement.maximum_ids)
        announced_size(self.agreement, me, len(ids))
        if (supply is not None) != self.agreement.ahead:
            raise LocalProtocolError(
                f"{me} has {'a' if supply else 'no'} supply, the agreement says "
                f"ahead={self.agreement.ahead}"
            )
        if self._admit is not None:
            self._admit(me, peers)
        if supply is not None:
            supply.claim(self.agreement, me)

    def _desk(self, me: str) -> Desk:
        return Desk(me, self.agreement, self._progress)

    def _role(self, me: str, peers: Sequence[str], script: Script) -> ScriptedRole:
        return ScriptedRole(me, peers, self.agreement.output, script, longest=self.longest)


def _nothing() -> Script:
    """What a dealer that dealt ahead does."""
    yield Turn((), ())
    return Opened()


def _hub_script(
    desk: Desk, members: Sequence[str], ids: Sequence[bytes], supply: Supply | None
) -> Script:
    agreement, key = desk.agreement, fresh_key()
    size = announced_size(agreement, desk.me, len(ids))
    first = [desk.turn(Kind.HELLO, dict.fromkeys(members, HELLO.pack(key, size)), members)]
    if supply is None:
        first.append(desk.turn(Kind.DEAL, {agreement.dealer: DEAL.pack(size)}, [agreement.dealer]))
    inbox = yield _together(first)
    commits = {m: COMMIT.unpack(desk.read(inbox, m, Kind.COMMIT, COMMIT.size)) for m in members}
    for member, (_, announced) in commits.items():
        check_announced(agreement, member, [announced], [member])
    shares = yield from _dealt(desk, inbox, size, members, supply)
    rows, store = _encoded(desk.me, ids, key, cells_for(size))
    parts = {member: fresh_key() for member in members}
    sending = desk.turn(
        Kind.VECTOR, {m: shares[m].masked(store, head=parts[m]) for m in members}, members
    )
    del store
    inbox = yield sending
    del sending
    places = {}
    for member, (commitment, announced) in commits.items():
        length = tag_bytes(size, announced)
        body = desk.read(inbox, member, Kind.TAGS, KEY_BYTES + length * announced)
        part = _shown(member, body, commitment)
        output = _output_key(agreement, member, parts[member], part)
        own = hub_tags(shares[member].c, rows, output, length)
        theirs = np.frombuffer(body, np.uint8, offset=KEY_BYTES).reshape(-1, length)
        places[member] = match(own, theirs, sender=member)
        desk.report(len(places), len(members))
        del body, theirs, own
    del shares, rows, inbox
    return (yield from _open(desk, places))


def _dealt(
    desk: Desk, inbox: Inbox, size: int, members: Sequence[str], supply: Supply | None
) -> Generator[Turn, Inbox, dict[str, HubShare]]:
    """What the dealer made for each member: out of the supply, or as ordered one by one.

    The first order is answered in `inbox`.
    """
    if supply is not None:
        length = hub_dealt_bytes(vector_elements(size))
        return {member: HubShare.of(supply.take(length)) for member in members}
    shares, dealer = dict[str, HubShare](), desk.agreement.dealer
    for member in members:
        if shares:
            inbox = yield desk.turn(Kind.DEAL, {dealer: DEAL.pack(size)}, [dealer])
        shares[member] = HubShare.of(dealt_to_hub(desk, inbox, size))
    return shares


def _shown(member: str, body: bytes, commitment: bytes) -> bytes:
    """The member's part of the output's key.

    Raises:
        RemoteProtocolError: it is not the one that it committed to.
    """
    part = body[:KEY_BYTES]
    if not hmac.compare_digest(hashlib.sha256(part).digest(), commitment):
        raise RemoteProtocolError(f"{member} showed another key part than it committed to")
    return part


def _encoded(me: str, ids: Sequence[bytes], key: bytes, cells: int) -> tuple[Rows, Elements]:
    """The rows of the hub's set and the store P."""
    digests = digest_ids(ids, key)
    rows, targets = Rows.of(digests, cells), targets_of(digests)
    del digests
    try:
        return rows, Encoder(rows, cells).encode(targets)
    except DependentRowsError as error:
        raise LocalProtocolError(
            f"{me}: its IDs have no store under this key, which chance brings about once in 2^47 "
            "intersections; begin another one under a new session"
        ) from error


def _open(desk: Desk, places: Mapping[str, NDArray[np.int64]]) -> Script:
    rows = common_rows(desk.me, places, desk.agreement.minimum_rows)
    if isinstance(rows, IntersectionTooSmallError):
        yield desk.turn(Kind.REFUSAL, dict.fromkeys(places, b""), ())
        return rows
    if desk.agreement.output is Output.HUB_ROWS:
        yield desk.turn(Kind.DONE, dict.fromkeys(places, b""), ())
    else:
        opened = {member: place[rows].astype(">u4").tobytes() for member, place in places.items()}
        yield desk.turn(Kind.ROWS, opened, ())
    return Opened(rows=rows)


def _member_script(desk: Desk, hub: str, ids: Sequence[bytes], supply: Supply | None) -> Script:
    agreement, part = desk.agreement, fresh_key()
    size = announced_size(agreement, desk.me, len(ids))
    commit = COMMIT.pack(hashlib.sha256(part).digest(), size)
    inbox = yield desk.turn(Kind.COMMIT, {hub: commit}, [hub])
    key, hub_size = HELLO.unpack(desk.read(inbox, hub, Kind.HELLO, HELLO.size))
    check_announced(agreement, hub, [hub_size], [hub])
    digests = digest_ids(ids, key)
    inbox = yield Turn((), [hub] if supply else [hub, agreement.dealer])
    dealt = supply.take(member_dealt_bytes()) if supply else dealt_to_member(desk, inbox)
    share = MemberShare.of(dealt, dealer=agreement.dealer)
    body = desk.read(inbox, hub, Kind.VECTOR, KEY_BYTES + vector_bytes(vector_elements(hub_size)))
    store = share.unmasked(hub, memoryview(body)[KEY_BYTES:])
    output = _output_key(agreement, desk.me, body[:KEY_BYTES], part)
    del inbox, body
    length = tag_bytes(hub_size, size)
    tags = member_tags(digests, store, share.delta, output, length, report=desk.report)
    del digests, store
    order = random_permutation(size)
    tags = _filled_up(tags, size).take(order, axis=0)
    inbox = yield desk.turn(Kind.TAGS, {hub: part + tags.tobytes()}, [hub])
    kind = desk.kind_of(inbox, hub)
    if kind is Kind.REFUSAL and agreement.minimum_rows:
        return IntersectionTooSmallError.of(desk.me, agreement.minimum_rows)
    if agreement.output is Output.HUB_ROWS:
        desk.read(inbox, hub, Kind.DONE, 0)
        return Opened()
    items = desk.read(inbox, hub, Kind.ROWS)
    places = check_places(
        hub, items, minimum=agreement.minimum_rows, own_size=size, hub_size=hub_size
    )
    rows = order[places]
    if (rows >= len(ids)).any():
        raise RemoteProtocolError(f"{hub} opened a place at which {desk.me} has no ID")
    return Opened(rows=rows)


def _filled_up(tags: Tags, size: int) -> Tags:
    """The same with random ones behind them, shape (size, length)."""
    count, length = tags.shape
    missing = keystream(fresh_key(), length=length * (size - count))
    return np.concatenate([tags, np.frombuffer(missing, np.uint8).reshape(-1, length)])


def _output_key(agreement: IntersectionAgreement, member: str, hubs: bytes, own: bytes) -> bytes:
    """Of the hash of tags: from the hub's part and the member's."""
    return derive_key(hubs, b"vole output", own, agreement.digest, member.encode())


def _together(turns: Sequence[Turn]) -> Turn:
    """Send all at once and wait for all."""
    return Turn(
        [one for turn in turns for one in turn.outgoing],
        [one for turn in turns for one in turn.awaited],
    )
