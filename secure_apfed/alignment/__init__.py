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
    """Refuse settings by which an alignment cannot run, or reveals what must stay hidden.

    Raises:
        ConfigError: date formats are ambiguous.
        ValueError: no protocol has this name; or the settings allow so many IDs that a peer could
            use up others' memory by announcing that number; or the protocol reveals to the active
            which people it shares with each passive, against `pairwise_overlaps: hidden`.
    """
    # Called for its ConfigError: date formats that are ambiguous.
    make_id_rules(settings)
    if settings.selected_protocol not in SET_INTERSECTIONS:
        names = ", ".join(["auto", *sorted(SET_INTERSECTIONS)])
        raise ValueError(
            f"protocol: no set intersection is called {settings.protocol!r}; there are: {names}"
        )
    backend = SET_INTERSECTIONS[settings.selected_protocol]
    max_size = backend.find_largest_size()
    # A resumable protocol divides IDs into buckets, and takes memory for one bucket only.
    if settings.maximum_ids > max_size and not issubclass(backend, ResumableIntersection):
        raise ValueError(
            f"maximum_ids: whoever announced {settings.maximum_ids:,} IDs to "
            f"{settings.selected_protocol} "
            f"would have others take more than {MAX_ANNOUNCED_BYTES / 2**30:g} GiB; say "
            f"{max_size:,} at most, or protocol: ot, which takes such sets in parts"
        )
    reveals_overlaps = settings.mode == "pairwise" or backend.has_pairwise_leak
    if settings.pairwise_overlaps == "hidden" and reveals_overlaps:
        raise ValueError(
            f"pairwise_overlaps is hidden, and the active learns them with mode: {settings.mode} "
            f"and protocol: {settings.protocol}; use mode: all and protocol: auto, or opprf or "
            "circuit with a dealer, or opprf_ot or circuit_ot without one"
        )


def require_overlaps_shown(settings: AlignmentSettings, party: str) -> None:
    """Raise ConfigError if the settings forbid joint prediction.

    Joint prediction reveals to the active which of its people each passive knows. The setting
    `pairwise_overlaps: hidden` promises that it does not learn this.

    `party`: this party's name, for the error.
    """
    if settings.pairwise_overlaps == "hidden":
        raise ConfigError(
            f"{party}: alignment.pairwise_overlaps is hidden, and joint prediction tells the "
            "active which of its people each passive knows; so it is neither served nor asked. "
            "Predict without --jointly, or train a run whose parties all agree to `shown`"
        )


def canonical_ids(party: str, ids: IdColumn, settings: AlignmentSettings) -> list[bytes]:
    """Return a party's IDs as bytes in the agreed normal form, in the order of `ids`.

    `party`: the party's name, for errors.

    Raises DataError: an ID is missing or repeated, or there are too many.
    """
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
    """Return the configured set-intersection protocol, ready for one intersection.

    All parties must pass equal arguments, except for `progress`. IDs must come from
    `canonical_ids`; peers with another normalisation are refused.

    If the settings name a history (a file of this party's earlier intersections), creating a role
    of the protocol records the run there. It raises DataError if a peer has used up its allowed
    runs, or if the session was used before.

    Args:
        settings: the agreed settings.
        session: the name of the intersection, used once.
        dealer: the party that supplies randomness, if the protocol needs one.
        output: what the intersection reveals, and to whom.
        sizes: the number of IDs that each party announces in place of its true number, by party;
            for protocols with a dealer.
        progress: called with the progress of this party's work.
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
    return SET_INTERSECTIONS[settings.selected_protocol](
        agreement, threads=settings.threads, progress=progress, check_admission=admit
    )


def max_guesses(settings: AlignmentSettings) -> Guesses:
    """Return how many guessed IDs a party that deviates from the protocol can test at most.

    The limits hold for one intersection: `hub` for the active, `member` for a passive. Protocols
    that divide IDs into buckets pad each bucket to a fixed size. A deviating party may put guesses
    in place of the padding, so their limits are above `maximum_ids`.
    """
    max_id_count = settings.maximum_ids
    backend = SET_INTERSECTIONS[settings.selected_protocol]
    if not issubclass(backend, ResumableIntersection):
        return backend.max_guesses(max_id_count)
    bucket_count = choose_bucket_count(max_id_count)
    guesses_per_bucket = backend.max_guesses(compute_capacity(max_id_count, bucket_count))
    return Guesses(
        hub=bucket_count * guesses_per_bucket.hub, member=bucket_count * guesses_per_bucket.member
    )
