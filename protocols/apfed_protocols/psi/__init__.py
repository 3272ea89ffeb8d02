"""Private set intersection: who is in several tables, without showing who else is in one.

`align` runs all parties in this process, for simulations and for trying out IDs, and so do
`count_common` and `share_membership`, which reveal less. Two parties in different organisations
each call `align_with` over their link. More parties each make their own role of one of
`SET_INTERSECTIONS` from the same agreement, whose encoding is that of their `IdNormalisation`, on
IDs from `encode_ids`, and exchange the messages over their links with `take_part`. What each party
learns depends on the protocol, see its `leaks`.

Examples:
    >>> from apfed_protocols import IdNormalisation, align
    >>> rows = align({"bank": ["ann", "bob", "eve"], "shop": ["Eve", "bob", "joe"]}, hub="bank",
    ...              normalisation=IdNormalisation(case_fold=True))
    >>> sorted(zip(rows["bank"].tolist(), rows["shop"].tolist()))
    [(1, 1), (2, 0)]
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import require_names
from apfed_protocols.conversation import converse
from apfed_protocols.errors import DataError, LocalProtocolError
from apfed_protocols.ids import (
    MAX_IDS,
    IdColumn,
    IdNormalisation,
    decode_id,
    encode_ids,
    require_comparable,
    require_one_column_order,
)
from apfed_protocols.psi.circuit import (
    CircuitIntersection,
    CryptenCircuitIntersection,
    OpprfIntersection,
)
from apfed_protocols.psi.circuit_ot import CircuitOtIntersection, OpprfOtIntersection
from apfed_protocols.psi.ecdh import EcdhIntersection
from apfed_protocols.psi.interface import (
    Aligner,
    IntersectionAgreement,
    IntersectionTooSmallError,
    Membership,
    Output,
    Progress,
    SetIntersection,
)
from apfed_protocols.psi.ot import OtIntersection
from apfed_protocols.psi.two_parties import align_with
from apfed_protocols.psi.vole import VoleIntersection
from apfed_protocols.randomness import fresh_key

__all__ = [
    "SET_INTERSECTIONS",
    "IntersectionName",
    "align",
    "align_with",
    "choose_protocol",
    "count_common",
    "share_membership",
]

SET_INTERSECTIONS: Mapping[str, type[SetIntersection]] = {
    "circuit": CircuitIntersection,
    "circuit_crypten": CryptenCircuitIntersection,
    "circuit_ot": CircuitOtIntersection,
    "ecdh": EcdhIntersection,
    "opprf": OpprfIntersection,
    "opprf_ot": OpprfOtIntersection,
    "ot": OtIntersection,
    "vole": VoleIntersection,
}

IntersectionName: TypeAlias = Literal[
    "auto", "circuit", "circuit_crypten", "circuit_ot", "ecdh", "opprf", "opprf_ot", "ot", "vole"
]
"""The protocols that `align` takes: the keys of `SET_INTERSECTIONS`, or a choice by sizes."""

_AUTO: Literal["auto"] = "auto"
_DEALER_NAME = "dealer (in memory)"
_MAX_ECDH_IDS = 20_000
_LOGGER = logging.getLogger(__name__)
_AS_WRITTEN = IdNormalisation()


def choose_protocol(sizes: Mapping[str, int]) -> str:
    """Return the name of the protocol that `align` uses for "auto": "ecdh" or "opprf".

    Two parties with few IDs use `ecdh`: it sends little, needs no dealer, and reveals nothing that
    `opprf` would hide. With more parties `ecdh` would reveal pairwise overlaps to the hub, and with
    many IDs it is slow: then `opprf` is used.

    `sizes`: number of IDs by party.
    """
    has_many_ids = max(sizes.values(), default=0) > _MAX_ECDH_IDS
    return "opprf" if len(sizes) > 2 or has_many_ids else "ecdh"


def align(
    ids_by_party: Mapping[str, IdColumn],
    *,
    hub: str,
    protocol: IntersectionName = _AUTO,
    normalisation: IdNormalisation = _AS_WRITTEN,
    minimum_rows: int = 2,
    maximum_ids: int = MAX_IDS,
    threads: int | None = None,
    hub_only: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Mapping[str, NDArray[np.int64]]:
    """Find the rows that all parties share, running all parties in this process.

    Args:
        ids_by_party: the IDs of two or more parties, distinct within each party, in any iterable
            (row k is the k-th of it), of the kinds of `apfed_protocols.ids`. The result is
            positions, so an index that has such numbers as labels of other rows is refused.
        hub: the party that all others exchange messages with; with `ecdh` it learns pairwise
            overlaps.
        protocol: a key of `SET_INTERSECTIONS`; "auto": chosen by `choose_protocol`.
        normalisation: how IDs become bytes.
        minimum_rows: fewer common rows are not revealed; with 0 an empty result is possible.
        maximum_ids: the largest number of IDs that a party may have.
        threads: number of threads that each party computes with; None: the protocol's own choice.
        hub_only: whether the rows are revealed to the hub only; the others then learn only
            whether there are enough.
        progress: called with the progress of every party's work; None: not reported.

    Returns:
        Row positions of each party (of the hub if `hub_only`), int64, shape (common rows,):
        row k of every party is the same ID. The order is random, so that it tells nothing
        about anybody's table.

    Raises:
        DataError: unfit IDs or names, IDs of which no two can match, unknown hub or protocol, or
            fewer common rows than `minimum_rows`.

    Examples:
        >>> from apfed_protocols import align
        >>> rows = align({"bank": ["ann", "bob", "eve"], "shop": ["eve", "kim", "ann"]}, hub="bank")
        >>> sorted(zip(rows["bank"].tolist(), rows["shop"].tolist()))
        [(0, 2), (2, 0)]
    """
    limits: dict[str, Any] = {"minimum_rows": minimum_rows, "maximum_ids": maximum_ids}
    output = Output.HUB_ROWS if hub_only else Output.ROWS
    roles = _run_parties(
        ids_by_party, hub, protocol, normalisation, output, limits, threads, progress
    )
    informed_parties = [hub] if hub_only else ids_by_party
    return {party: roles[party].rows for party in informed_parties}


def count_common(
    ids_by_party: Mapping[str, IdColumn],
    *,
    hub: str,
    protocol: IntersectionName = _AUTO,
    normalisation: IdNormalisation = _AS_WRITTEN,
    minimum_rows: int = 2,
    maximum_ids: int = MAX_IDS,
    threads: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> int:
    """Return how many IDs all parties share, running all parties in this process; no party learns
    which IDs.

    Args:
        ids_by_party: the IDs of two or more parties, distinct within each party.
        hub: the party that all others exchange messages with.
        protocol: a key of `SET_INTERSECTIONS`; "auto": chosen by `choose_protocol`.
        normalisation: how IDs become bytes.
        minimum_rows: a smaller number is not revealed.
        maximum_ids: the largest number of IDs that a party may have.
        threads: number of threads that each party computes with; None: the protocol's own choice.
        progress: called with the progress of every party's work; None: not reported.

    Raises DataError: unfit IDs or names, an unknown hub or protocol, or fewer common IDs than
    `minimum_rows`.
    """
    limits: dict[str, Any] = {"minimum_rows": minimum_rows, "maximum_ids": maximum_ids}
    roles = _run_parties(
        ids_by_party, hub, protocol, normalisation, Output.SIZE, limits, threads, progress
    )
    return roles[hub].size


def share_membership(
    ids_by_party: Mapping[str, IdColumn],
    *,
    hub: str,
    normalisation: IdNormalisation = _AS_WRITTEN,
    minimum_rows: int = 2,
    maximum_ids: int = MAX_IDS,
    threads: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Mapping[str, Membership]:
    """Return each party's secret shares of the bits that say which of the hub's IDs all parties
    have, running all parties in this process by the protocol `circuit`.

    No party learns which IDs are common; the shares are for further protocols.

    Args:
        ids_by_party: the IDs of two or more parties, distinct within each party.
        hub: the party that all others exchange messages with, about whose IDs the bits are.
        normalisation: how IDs become bytes.
        minimum_rows: with fewer common IDs no shares are returned.
        maximum_ids: the largest number of IDs that a party may have.
        threads: number of threads that each party computes with; None: the protocol's own choice.
        progress: called with the progress of every party's work; None: not reported.

    Raises DataError: unfit IDs or names, an unknown hub, or fewer common IDs than `minimum_rows`.
    """
    limits: dict[str, Any] = {"minimum_rows": minimum_rows, "maximum_ids": maximum_ids}
    roles = _run_parties(
        ids_by_party, hub, "circuit", normalisation, Output.SHARED, limits, threads, progress
    )
    return {party: role.membership for party, role in roles.items()}


def _run_parties(
    ids_by_party: Mapping[str, IdColumn],
    hub: str,
    requested_name: str,
    normalisation: IdNormalisation,
    output: Output,
    limits: dict[str, Any],
    threads: int | None,
    progress: Callable[[Progress], None] | None,
) -> Mapping[str, Aligner]:
    """Run all parties in this process until the intersection is finished; return the role of each
    party with IDs.

    Args:
        ids_by_party: the distinct IDs of each party.
        hub: the party that all others exchange messages with.
        requested_name: a key of `SET_INTERSECTIONS`, or "auto".
        normalisation: how IDs become bytes.
        output: what is to be revealed, and to whom.
        limits: `minimum_rows` and `maximum_ids` of the `IntersectionAgreement`.
        threads: number of threads of each party; None: the protocol's own choice.
        progress: called with the progress of every party's work; None: not reported.

    Raises DataError: unfit IDs or names, IDs of which no two can match, an unknown hub or protocol,
    or an intersection below `minimum_rows`.
    """
    members = [party for party in ids_by_party if party != hub]
    if hub not in ids_by_party or not members:
        raise DataError(
            f"alignment takes a hub and at least one other party; the hub is {hub!r}, "
            f"the parties are {', '.join(map(str, ids_by_party)) or 'none'}"
        )
    known_names = [_AUTO, *sorted(SET_INTERSECTIONS)]
    if requested_name not in known_names:
        raise DataError(
            f"no set intersection is called {requested_name!r}; there are: {', '.join(known_names)}"
        )
    session = f"in memory {fresh_key().hex()}"
    encoded_ids: dict[str, list[bytes]] = {}
    try:
        require_names("set intersection", session, list(ids_by_party))
        require_one_column_order(ids_by_party)
        for party, column in ids_by_party.items():
            encoded_ids[party] = encode_ids(
                party, column, normalisation, maximum_ids=limits["maximum_ids"]
            )
        require_comparable({party: map(decode_id, encoded_ids[party]) for party in (hub, *members)})
        sizes = {party: len(ids) for party, ids in encoded_ids.items()}
        protocol_name = choose_protocol(sizes) if requested_name == _AUTO else requested_name
        _LOGGER.info("%s intersects the lists of %s", protocol_name, ", ".join(ids_by_party))
        agreement = IntersectionAgreement(
            session=session,
            **limits,
            encoding=normalisation.encoding,
            dealer=_DEALER_NAME,
            output=output,
        )
        protocol_type = SET_INTERSECTIONS[protocol_name]
        protocol = protocol_type(agreement, threads=threads, progress=progress)
        roles = _converse_in_memory(protocol, hub, members, encoded_ids)
        # Reading the result raises IntersectionTooSmallError below the minimum.
        _ = roles[hub].membership if output is Output.SHARED else roles[hub].size
    except IntersectionTooSmallError as error:
        row_counts = ", ".join(f"{party} {len(ids)}" for party, ids in encoded_ids.items())
        raise DataError(
            f"{error}. Rows by party: {row_counts}; normalisation: {normalisation}"
        ) from error
    except LocalProtocolError as error:
        raise DataError(str(error)) from error
    return roles


def _converse_in_memory(
    protocol: SetIntersection,
    hub: str,
    members: Sequence[str],
    encoded_ids: Mapping[str, Sequence[bytes]],
) -> Mapping[str, Aligner]:
    """Make the roles of all parties and exchange their messages in this process, with a dealer if
    the protocol needs one; return the finished role of each party with IDs.

    `encoded_ids`: the encoded IDs of each party.
    """
    roles = {hub: protocol.make_hub(hub, members, encoded_ids[hub])}
    for member in members:
        roles[member] = protocol.make_member(member, hub, encoded_ids[member])
    dealers = {_DEALER_NAME: protocol.make_dealer(hub, members)} if protocol.needs_dealer else {}
    converse(roles | dealers)
    return roles
