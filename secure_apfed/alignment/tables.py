"""Aligning tables: which rows of which party belong to the same person or thing.

`align` plays all parties in this process, for simulations and for trying out IDs, and so do
`count_common` and `share_membership`, which open less. Parties in different organisations
each build their own end with `intersection` from the same settings, and carry the messages
over their links with `take_part`. Who learns what is the business of the protocol, see
`apfed_protocols.psi`. Nothing else of this package is needed to use this module.

Example:
    >>> from secure_apfed.alignment import AlignmentSettings, IdNormalisation, align
    >>> rows = align({"bank": ["ann", "bob", "eve"], "shop": ["Eve", "bob", "joe"]}, hub="bank",
    ...              settings=AlignmentSettings(normalisation=IdNormalisation(case_fold=True)))
    >>> sorted(zip(rows["bank"].tolist(), rows["shop"].tolist()))
    [(1, 1), (2, 0)]
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.conversation import converse
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.psi.interface import (
    Aligner,
    Guesses,
    IntersectionAgreement,
    IntersectionTooSmallError,
    Membership,
    Output,
    Progress,
    SetIntersection,
)
from apfed_protocols.randomness import fresh_key
from secure_apfed.alignment.buckets import bucket_count, capacity
from secure_apfed.alignment.history import admit_run
from secure_apfed.alignment.ids import IdColumn, encode_ids, text_of
from secure_apfed.alignment.settings import AlignmentSettings
from secure_apfed.errors import DataError
from secure_apfed.id_kinds import require_comparable
from secure_apfed.names import check_parties

__all__ = [
    "align",
    "canonical_ids",
    "choose_protocol",
    "count_common",
    "intersection",
    "most_guesses",
    "share_membership",
]

_AUTO = "auto"
_DEALER = "dealer (in memory)"
_MANY_IDS = 20_000


def canonical_ids(party: str, ids: IdColumn, settings: AlignmentSettings) -> list[bytes]:
    """Return the IDs of `party` as the bytes that the parties agreed on, one a row.

    Raises:
        DataError: see `secure_apfed.alignment.ids.encode_ids`.
    """
    return encode_ids(party, ids, settings.normalisation, maximum_ids=settings.maximum_ids)


def choose_protocol(sizes: Mapping[str, int]) -> str:
    """Return the protocol that `align` takes for `auto`, from how many IDs each party has.

    Two parties with few IDs use `ecdh`: it sends little, needs no dealer, and reveals
    nothing that `opprf` would hide. Among more parties it would show the hub pairwise
    overlaps, and with many IDs it is slow: these use `opprf`.
    """
    return "opprf" if len(sizes) > 2 or max(sizes.values(), default=0) > _MANY_IDS else "ecdh"


def intersection(
    settings: AlignmentSettings,
    *,
    session: str,
    dealer: str = "",
    output: Output = Output.ROWS,
    sizes: Mapping[str, int] | None = None,
    ahead: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> SetIntersection:
    """Return the protocol that `settings` names, for one `session` that is used once.

    `dealer` names the party that hands out randomness where the protocol needs one, `output`
    what opens. With `circuit`, `sizes` are what the parties announce in place of their true
    numbers of IDs, and `ahead` says that the dealer dealt before, see `docs/alignment.md`. All
    parties must agree on all of these. `progress` is told of this party's work.
    The IDs must come from `canonical_ids`; peers with another normalisation are refused. Where the
    settings name a history, making a role notes it, and raises DataError where a peer had all its
    runs or the session was used before.
    """

    def admit(me: str, peers: Sequence[str]) -> None:
        admit_run(settings, me, peers, session=session)

    agreement = IntersectionAgreement(
        session=session,
        minimum_rows=settings.minimum_rows,
        maximum_ids=settings.maximum_ids,
        encoding=f"ids v1 {settings.normalisation.model_dump_json()}",
        dealer=dealer,
        output=output,
        sizes=sizes or {},
        ahead=ahead,
    )
    return SET_INTERSECTIONS[settings.backend](
        agreement, threads=settings.threads, progress=progress, admit=admit
    )


def most_guesses(settings: AlignmentSettings) -> Guesses:
    """How many IDs a deviating active (`hub`) or passive tries out in an intersection, at most.

    A session plays `ecdh` in buckets, whose lists are filled up: a party may guess there, too.
    """
    most = settings.maximum_ids
    if settings.backend != "ecdh":
        return SET_INTERSECTIONS[settings.backend].most_guesses(most)
    buckets = bucket_count(most)
    return SET_INTERSECTIONS["ecdh"].most_guesses(buckets * capacity(most, buckets))


def align(
    ids_by_party: Mapping[str, IdColumn],
    *,
    hub: str,
    backend: str | None = None,
    settings: AlignmentSettings | None = None,
    hub_only: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Mapping[str, NDArray[np.int64]]:
    """Find the rows that all parties share, playing all parties in this process.

    Args:
        ids_by_party: the IDs of two or more parties, distinct within each party, in any iterable
            (row k is the k-th of it), of the kinds of `secure_apfed.id_kinds`.
        hub: the party that all others talk to; with `ecdh` it learns pairwise overlaps.
        backend: a protocol, or `auto` for what `choose_protocol` says; None for the one that
            `settings` take, and `auto` without settings.
        settings: how to match; the defaults if None.
        hub_only: open the rows to the hub alone; the others learn that there are enough.
        progress: told of every party's work.

    Returns:
        Row positions of each party (of the hub if `hub_only`), int64, shape (common rows,):
        row k of every party is the same ID. The order is random, so that it tells nothing
        about anybody's table.

    Raises:
        DataError: unfit IDs or names, IDs of which no two can match, unknown hub or backend, or
            fewer common rows than `minimum_rows`.
    """
    output = Output.HUB_ROWS if hub_only else Output.ROWS
    aligners = _play(ids_by_party, hub, backend, settings, output, progress)
    opened = [hub] if hub_only else ids_by_party
    return {party: aligners[party].rows for party in opened}


def count_common(
    ids_by_party: Mapping[str, IdColumn],
    *,
    hub: str,
    backend: str | None = None,
    settings: AlignmentSettings | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> int:
    """Return how many IDs all parties share; no party learns which. See `align`."""
    return _play(ids_by_party, hub, backend, settings, Output.SIZE, progress)[hub].size


def share_membership(
    ids_by_party: Mapping[str, IdColumn],
    *,
    hub: str,
    settings: AlignmentSettings | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Mapping[str, Membership]:
    """Return each party's shares of which of the hub's IDs are common, by `circuit`.

    Nobody learns them; they are for further protocols on shares. See `align`.
    """
    aligners = _play(ids_by_party, hub, "circuit", settings, Output.SHARED, progress)
    return {party: aligner.membership for party, aligner in aligners.items()}


def _play(
    ids_by_party: Mapping[str, IdColumn],
    hub: str,
    backend: str | None,
    settings: AlignmentSettings | None,
    output: Output,
    progress: Callable[[Progress], None] | None,
) -> Mapping[str, Aligner]:
    """Play all parties; every aligner has something to open."""
    backend = backend or (settings.backend if settings else _AUTO)
    settings = settings or AlignmentSettings()
    members = [party for party in ids_by_party if party != hub]
    if hub not in ids_by_party or not members:
        raise DataError(
            f"alignment takes a hub and at least one other party; the hub is {hub!r}, "
            f"the parties are {', '.join(ids_by_party) or 'none'}"
        )
    try:
        check_parties(ids_by_party)
    except ValueError as error:
        raise DataError(str(error)) from None
    ids = {party: canonical_ids(party, ids_by_party[party], settings) for party in ids_by_party}
    require_comparable({party: map(text_of, ids[party]) for party in (hub, *members)})
    chosen = _with_protocol(settings, backend, {party: len(rows) for party, rows in ids.items()})
    session = f"in memory {fresh_key().hex()}"
    try:
        protocol = intersection(
            chosen, session=session, dealer=_DEALER, output=output, progress=progress
        )
        aligners = {hub: protocol.hub(hub, members, ids[hub])}
        aligners |= {member: protocol.member(member, hub, ids[member]) for member in members}
        helpers = {_DEALER: protocol.dealer(hub, members)} if protocol.needs_dealer else {}
        converse(aligners | helpers)
        _ = aligners[hub].membership if output is Output.SHARED else aligners[hub].size
    except IntersectionTooSmallError as error:
        sizes = ", ".join(f"{party} {len(rows)}" for party, rows in ids.items())
        raise DataError(
            f"{error}. Rows by party: {sizes}; normalisation: {settings.normalisation}"
        ) from error
    except LocalProtocolError as error:
        raise DataError(str(error)) from error
    return aligners


def _with_protocol(
    settings: AlignmentSettings, backend: str, sizes: Mapping[str, int]
) -> AlignmentSettings:
    protocol = choose_protocol(sizes) if backend == _AUTO else backend
    if protocol not in SET_INTERSECTIONS:
        known = ", ".join([_AUTO, *sorted(SET_INTERSECTIONS)])
        raise DataError(f"no backend is called {backend!r}; there are: {known}")
    return settings.model_copy(update={"protocol": protocol})
