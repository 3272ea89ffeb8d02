"""Alignment: which rows of which party belong to the same person, and who may learn how many.

This module builds one party's end of an intersection from the settings that the parties agreed on.
Run by: each party in its own process, which carries the messages over its links with
`apfed_protocols.take_part`. `apfed_protocols.align` runs all parties in one process.
"""

from collections.abc import Callable, Mapping
from functools import partial

from apfed_protocols.checks import MAX_ANNOUNCED_BYTES
from apfed_protocols.ids import IdColumn, encode_ids
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.psi.interface import (
    Guesses,
    IntersectionAgreement,
    Output,
    Progress,
    ResumableIntersection,
    SetIntersection,
)
from secure_apfed.alignment.buckets import choose_bucket_count, compute_capacity
from secure_apfed.alignment.ids import IdFile, make_id_rules
from secure_apfed.alignment.records import AlignmentHistory, admit_run
from secure_apfed.errors import ConfigError
from secure_apfed.settings.alignment import AlignmentSettings

__all__ = [
    "AlignmentHistory",
    "IdFile",
    "canonical_ids",
    "check_alignment",
    "make_intersection",
    "max_guesses",
    "require_overlaps_shown",
]


def check_alignment(settings: AlignmentSettings) -> None:
    """Refuse settings of an alignment that cannot or must not run.

    These are an unknown protocol, one that reveals overlaps that must stay hidden, ambiguous date
    formats, and a maximum of IDs whose announcement alone would use up the peers' memory.
    """
    # Called for its ConfigError: date formats that are ambiguous.
    make_id_rules(settings)
    if settings.backend not in SET_INTERSECTIONS:
        names = ", ".join(["auto", *sorted(SET_INTERSECTIONS)])
        raise ValueError(
            f"protocol: no set intersection is called {settings.protocol!r}; there are: {names}"
        )
    backend = SET_INTERSECTIONS[settings.backend]
    largest = backend.find_largest_size()
    if settings.maximum_ids > largest and not issubclass(backend, ResumableIntersection):
        raise ValueError(
            f"maximum_ids: whoever announced {settings.maximum_ids:,} IDs to {settings.backend} "
            f"would have others take more than {MAX_ANNOUNCED_BYTES / 2**30:g} GiB; say "
            f"{largest:,} at most, or protocol: ot, which takes such sets in parts"
        )
    shows = settings.mode == "pairwise" or backend.pairwise
    if settings.pairwise_overlaps == "hidden" and shows:
        raise ValueError(
            f"pairwise_overlaps is hidden, and the active learns them with mode: {settings.mode} "
            f"and protocol: {settings.protocol}; use mode: all and protocol: auto, or opprf or "
            "circuit with a dealer, or opprf_ot or circuit_ot without one"
        )


def require_overlaps_shown(settings: AlignmentSettings, party: str) -> None:
    """Refuse joint prediction if the people a party knows must stay hidden. Raises ConfigError."""
    if settings.pairwise_overlaps == "hidden":
        raise ConfigError(
            f"{party}: alignment.pairwise_overlaps is hidden, and joint prediction tells the "
            "active which of its people each passive knows; so it is neither served nor asked. "
            "Predict without --jointly, or train a run whose parties all agree to `shown`"
        )


def canonical_ids(party: str, ids: IdColumn, settings: AlignmentSettings) -> list[bytes]:
    """Return the IDs of `party` as bytes in the agreed normal form, one a row."""
    return encode_ids(party, ids, make_id_rules(settings), maximum_ids=settings.maximum_ids)


def make_intersection(
    settings: AlignmentSettings,
    *,
    session: str,
    dealer: str = "",
    output: Output = Output.ROWS,
    sizes: Mapping[str, int] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SetIntersection:
    """Return the configured protocol for one `session`, which is used once.

    Args:
        settings: the agreed settings.
        session: the name of the intersection.
        dealer: the party that supplies randomness, where the protocol needs one.
        output: what is revealed.
        sizes: party -> the number of IDs that it announces in place of the true one, with a dealer.
        progress: called with the progress of this party's work.

    All parties must agree on these. The IDs must come from `canonical_ids`; peers with another
    normalisation are refused. If the settings name a history, creating a role records the run
    there, and raises DataError if a peer had all its runs or the session was used before.
    """
    check_alignment(settings)

    agreement = IntersectionAgreement(
        session=session,
        minimum_rows=settings.minimum_rows,
        maximum_ids=settings.maximum_ids,
        encoding=make_id_rules(settings).encoding,
        dealer=dealer,
        output=output,
        sizes=sizes or {},
    )
    admit = partial(admit_run, settings, session=session)
    return SET_INTERSECTIONS[settings.backend](
        agreement, threads=settings.threads, progress=progress, admit=admit
    )


def max_guesses(settings: AlignmentSettings) -> Guesses:
    """Return the most IDs that a deviating active (`hub`) or passive (`member`) can test in one
    intersection.

    Protocols in buckets pad their lists to fixed sizes, and a deviating party may put guesses in
    place of the padding.
    """
    largest = settings.maximum_ids
    backend = SET_INTERSECTIONS[settings.backend]
    if not issubclass(backend, ResumableIntersection):
        return backend.max_guesses(largest)
    buckets = choose_bucket_count(largest)
    guesses = backend.max_guesses(compute_capacity(largest, buckets))
    return Guesses(hub=buckets * guesses.hub, member=buckets * guesses.member)
