"""Aligning the tables of a session over its links: all parties at once, or pair by pair.

An alignment gives every party its row at each position: position k is the same person at all.
`all`: the people that all parties share. `pairwise`: the active intersects with each passive on its
own, and numbers the people that it shares with any of them in a random order of its own. It sends
each passive the numbers (positions) of the people that the two share. A passive learns how many
positions there are, and never who the people at the others are. A party without the person of a
position has -1 there.

One script a role: the active is the hub of the intersection (the party that all others intersect
with), each passive a member, and the dealer sends randomness where the protocol needs it.

Letters: N rows of a table, U alignment positions, P people common to two parties.
"""

import shutil
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from apfed_protocols.checks import MAX_ANNOUNCED_BYTES
from apfed_protocols.conversation import Conversation
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS
from apfed_protocols.psi.interface import Aligner, ResumableIntersection, SetIntersection
from apfed_protocols.randomness import random_permutation
from secure_apfed.alignment import canonical_ids, make_intersection
from secure_apfed.alignment.over_links import (
    ProgressReporter,
    align_hub,
    align_member,
    count_alignment_heartbeats,
    relay_heartbeats,
)
from secure_apfed.alignment.overlap import CommonPeople, describe_common
from secure_apfed.data import UNLABELLED, OwnData
from secure_apfed.errors import DataError, FewRowsWarning, UnmatchedIdsWarning
from secure_apfed.exchange import (
    BEFORE_TRAINING,
    Envelope,
    Kind,
    Links,
    TensorSpec,
    pack_tensors,
    unpack_tensors,
)
from secure_apfed.learning.calibration import RARE_SHARE
from secure_apfed.measures.intervals import MIN_POSITIVES, MIN_ROWS
from secure_apfed.methods.method import FOR_THE_ACTIVE, Method
from secure_apfed.methods.party import PartyContext
from secure_apfed.settings import RunSettings
from secure_apfed.settings.alignment import AlignmentSettings

DEALER = "dealer"
_UNFINISHED = "alignment"
"""The subfolder of a party's logs with the state of an unfinished intersection."""
_POSITION_BYTES = 64
"""Bytes of memory for a position besides its features: the row of the table, and counts of answers.
"""
_ADVICE_ON_LABELS = (
    "give common people of each class a label, or align tables that share more people"
)
"""The remedy in errors and warnings about labels."""
_ADVICE_ON_TEST_ROWS = (
    "take another seed, raise data.test_fraction, or align tables that share more people"
)
"""The remedy in errors and warnings about test rows."""


def needs_dealer(settings: AlignmentSettings) -> bool:
    """Return whether the configured set intersection needs a dealer of randomness."""
    return SET_INTERSECTIONS[settings.selected_protocol].needs_dealer


def hides_overlaps_by_transfers(settings: AlignmentSettings) -> bool:
    """Return whether the intersection hides each passive's overlap with the active by transfers.

    Then the active and the first passive run oblivious transfers, and no dealer is needed.
    """
    backend = SET_INTERSECTIONS[settings.selected_protocol]
    return settings.mode == "all" and not (backend.has_pairwise_leak or backend.needs_dealer)


async def align_as_active(party: PartyContext, links: Links, session: str) -> Tensor:
    """Run the active's part of the alignment; return the row of its table at each position, (U,).

    `session`: name of this session, the same at all parties.

    Raises DataError: IDs that cannot be aligned; IntersectionTooSmallError: fewer common IDs than
    agreed, in mode `pairwise` with any passive.
    """
    common_rows = [
        await _intersect_as_active(party, links, members, name)
        for name, members in _list_intersections(party, session)
    ]
    if party.config.alignment.mode == "all":
        return torch.cat(common_rows)  # there was a single intersection
    # Pairwise: number the people that the active shares with any passive, in a random order.
    rows_U: Tensor = torch.unique(torch.cat(common_rows))
    order_U = torch.from_numpy(random_permutation(len(rows_U)))
    rows_U = rows_U[order_U]
    position_N = torch.full((len(party.data.table.ids),), -1, dtype=torch.int64)
    # -1 stays for rows of people whom no passive shares.
    position_N[rows_U] = torch.arange(len(rows_U))
    for passive, rows_P in zip(party.passives, common_rows, strict=True):
        payload = pack_tensors({"positions": position_N[rows_P]}, {"total": len(rows_U)})
        links.send(passive, Kind.ALIGNMENT, BEFORE_TRAINING, payload)
    return rows_U


async def align_as_passive(party: PartyContext, links: Links, session: str) -> Tensor:
    """Run a passive's part of the alignment; return the row of its table at each position, (U,).

    The row is -1 where it does not know the person. `session`: name of this session, the same at
    all parties. Raises DataError: IDs that cannot be aligned; IntersectionTooSmallError: fewer
    common IDs than agreed.
    """
    settings = party.config.alignment
    own_intersections = [
        (name, members)
        for name, members in _list_intersections(party, session)
        if party.name in members
    ]
    # A passive takes part in exactly one intersection.
    ((name, members),) = own_intersections
    if _uses_buckets(settings):
        rows = await align_member(
            links,
            party.active,
            party.data.table.ids,
            settings,
            members=members,
            session=name,
            folder=_choose_folder(party, members),
        )
        rows_P = torch.from_numpy(rows)
    else:
        protocol = _make_protocol(party, links, name)
        ids = canonical_ids(party.name, party.data.table.ids, settings)
        member = protocol.make_member(party.name, party.active, ids)
        rows_P = await _run_aligner(
            links, member, party, (party.active,), maximum=protocol.max_message_bytes
        )
    # With one intersection of all parties, its order is the order of the positions.
    if settings.mode == "all":
        return rows_P
    message = await links.receive(
        party.active, Kind.ALIGNMENT, step=BEFORE_TRAINING, patience=FOR_THE_ACTIVE
    )
    row_bytes = party.data.table.features[:1].nbytes
    return place_rows(message, rows_P, max_positions=settings.maximum_ids, row_bytes=row_bytes)


def describe_people(party: PartyContext, rows_U: Tensor) -> CommonPeople:
    """Return how many of a party's people are aligned.

    `rows_U`: the row of its table at each of the U alignment positions, -1 for none. Warns
    UnmatchedIdsWarning: IDs of one pattern hardly ever matched, unlike its other IDs.
    """
    people = describe_common(
        party.name,
        party.data.table.ids,
        rows_U.numpy(),
        party.config.alignment,
        active=party.active,
    )
    if people.warning:
        warnings.warn(people.warning, UnmatchedIdsWarning, stacklevel=3)
    return people


async def deal_randomness(party: PartyContext, links: Links, session: str) -> None:
    """Run the dealer's part of the alignment: send the correlated randomness of each intersection.

    `session`: name of this session, the same at all parties.
    """
    for name, members in _list_intersections(party, session):
        protocol = _make_protocol(party, links, name)
        dealer = protocol.make_dealer(party.active, members)
        await links.run_conversation(
            Kind.ALIGNMENT, dealer, (party.active, *members), max_bytes=protocol.max_message_bytes
        )
        for member in members:
            links.send(member, Kind.READY, BEFORE_TRAINING)
    # READY lets the dealer leave: no peer waits for it any more.
    links.send(party.active, Kind.READY, BEFORE_TRAINING)


async def receive_dealt(links: Links) -> Envelope:
    """Return the dealer's next message with randomness.

    If the dealer has also dealt for an alignment, its READY comes first, and is skipped.
    """
    message = await links.receive(DEALER, Kind.DEALT, Kind.READY)
    return await links.receive(DEALER, Kind.DEALT) if message.kind is Kind.READY else message


def _list_intersections(party: PartyContext, session: str) -> list[tuple[str, Sequence[str]]]:
    """Return the name and the passives of each intersection.

    There is one intersection with all passives, or in mode `pairwise` one with each passive.
    `session`: name of this session, the same at all parties.
    """
    if party.config.alignment.mode == "all":
        return [(session, party.passives)]
    return [(f"{session} {passive}", (passive,)) for passive in party.passives]


def _uses_buckets(settings: AlignmentSettings) -> bool:
    """Return whether the intersection runs in buckets of IDs, so that it can be resumed."""
    return issubclass(SET_INTERSECTIONS[settings.selected_protocol], ResumableIntersection)


def _choose_folder(party: PartyContext, members: Sequence[str]) -> Path | None:
    """Return the folder in which an unfinished intersection is stored; None: the party stores none.

    `members`: names of the passives that take part in the intersection.
    """
    if party.secrets.log_folder is None:
        return None
    subfolder = "all" if party.config.alignment.mode == "all" else members[0]
    return party.secrets.log_folder / _UNFINISHED / party.name / subfolder


def delete_unfinished_alignment(logs: Path) -> None:
    """Delete unfinished intersections in a party's log folder, once a checkpoint has the result."""
    folder = logs / _UNFINISHED
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)


def raise_heartbeat_limits(party: PartyContext, links: Links) -> None:
    """Raise the links' limit on heartbeats to the number that an alignment may take.

    A heartbeat is a message from a peer that is still computing; it extends the wait for the peer.
    """
    peers = [name for name in party.identity_by_party if name != party.name]
    max_heartbeats = count_alignment_heartbeats(
        party.config.alignment.maximum_ids, len(party.passives)
    )
    links.heartbeats.set_limits(dict.fromkeys(peers, max_heartbeats))


def _make_protocol(party: PartyContext, links: Links, session: str) -> SetIntersection:
    """Return the configured set intersection, which reports its progress to the peers.

    `session`: the name of this intersection; it differs in each one of a session.
    """
    settings = party.config.alignment
    dealer = DEALER if needs_dealer(settings) else ""
    progress = ProgressReporter(links.heartbeats)
    return make_intersection(settings, session=session, dealer=dealer, progress=progress)


async def _intersect_as_active(
    party: PartyContext, links: Links, members: Sequence[str], session: str
) -> Tensor:
    """Run an intersection with these passives; return the active's rows of the P common people.

    Their order is the same at all parties of the intersection. `members`: names of the passives.
    `session`: the name of this intersection.
    """
    settings = party.config.alignment
    # An intersection in buckets of IDs can be interrupted and resumed.
    if _uses_buckets(settings):
        rows = await align_hub(
            links,
            members,
            party.data.table.ids,
            settings,
            session=session,
            folder=_choose_folder(party, members),
        )
        return torch.from_numpy(rows)
    ids = canonical_ids(party.name, party.data.table.ids, settings)
    protocol = _make_protocol(party, links, session)
    hub = protocol.make_hub(party.name, members, ids)
    # Passives that wait for each other talk only to the active, which relays their heartbeats.
    with relay_heartbeats(links):
        return await _run_aligner(links, hub, party, members, maximum=protocol.max_message_bytes)


async def _run_aligner(
    links: Links, aligner: Aligner, party: PartyContext, others: Sequence[str], *, maximum: int
) -> Tensor:
    """Run one party's side of an intersection; return its rows of the P common people.

    `aligner`: the protocol's object for this party's side. `others`: the names of the other parties
    with IDs. `maximum`: the longest message in bytes that a peer may send.
    """
    peers = (*others, DEALER) if needs_dealer(party.config.alignment) else tuple(others)
    role: Conversation = aligner
    await links.run_conversation(Kind.ALIGNMENT, role, peers, max_bytes=maximum)
    return torch.from_numpy(aligner.rows.copy())


def place_rows(
    envelope: Envelope, rows_P: Tensor, *, max_positions: int, row_bytes: int = 0
) -> Tensor:
    """Return the passive's own row at each of the U positions, -1 where it has no such person.

    It parses and checks the positions that the active sent.

    Args:
        envelope: the active's message with the positions of the P people that the two share.
        rows_P: the passive's rows of these people, in the order of the intersection.
        maximum: the largest number of positions that the settings allow.
        row_bytes: memory that this party needs for the features of a position.

    Raises RemoteProtocolError: positions that repeat, are missing or out of range, or need more
    memory than this party has.
    """
    expected = {"positions": TensorSpec(torch.int64, (len(rows_P),))}
    tensors, meta = unpack_tensors(envelope.payload, expected, sender=envelope.sender)
    positions_P = tensors["positions"]
    total = meta.get("total")
    # A peer's number decides how much memory is allocated, so it is bounded first.
    max_positions = min(max_positions, MAX_ANNOUNCED_BYTES // (_POSITION_BYTES + row_bytes))
    if type(total) is not int or not len(rows_P) <= total <= max_positions:
        raise RemoteProtocolError(
            f"{envelope.sender} announces {total} positions for {len(rows_P)} common people; "
            f"expected a number from there to {max_positions}"
        )
    are_distinct = len(torch.unique(positions_P)) == len(positions_P)
    are_in_range = bool(((positions_P >= 0) & (positions_P < total)).all())
    if not are_distinct or not are_in_range:
        raise RemoteProtocolError(
            f"{envelope.sender} gave two people one position, or one outside 0 to {total - 1}"
        )
    rows_U = torch.full((total,), -1, dtype=torch.int64)
    rows_U[positions_P] = rows_P
    return rows_U


def intersect_rows(rows: Tensor, only: Tensor | None) -> Tensor:
    """Return the rows that are also in `only`, in the order of `rows`; all rows if it is None."""
    return rows if only is None else rows[torch.isin(rows, only)]


# The labels of common people, looked at once the parties know whom they have in common.
#
# Run by: the active, before anything is trained; the planner checks the same where all tables are
# at hand. A table may have several classes, and the common people only one, or no label: a model of
# these is a constant, and its accuracy says nothing. Other parties hear that the active stops, and
# not why.


def require_labels(method: Method, config: RunSettings, data: OwnData, aligned: Tensor) -> None:
    """Refuse a run that would train on labels of one class, or be measured on rows of one class.

    `data`: the active's data. `aligned`: the row of its table at each alignment position; ignored
    if the method aligns nothing.

    Raises DataError: its text says how many rows have a label, and what to do. Warns
    FewRowsWarning: one of two classes has fewer than `MIN_ROWS` test rows; one of several classes
    has no test row, or no label among common people; or too few test rows are aligned for a method
    in which all parties predict together.
    """
    learnt_rows = method.find_learnt_labels(config, data, aligned)
    learnt_counts = _count_labels(data, learnt_rows)
    # Passives with labels of their own may know the classes that the active lacks.
    if not config.data.labels_at:
        _require_learnt_labels(method, data, aligned, learnt_counts)
    if not len(data.test_rows):
        return
    tested = method.find_testable_rows(data, aligned)
    min_tested = 1 if method.settings.can_predict_locally else config.rules.minimum_batch
    if len(tested) < min_tested:
        warnings.warn(
            f"{data.table.name}: {len(tested)} of its {len(data.test_rows)} test rows are among "
            f"the {len(aligned)} common people, and passives answer {min_tested} at least, so "
            f"nothing measures {method.settings.title} with all parties; {_ADVICE_ON_TEST_ROWS}",
            FewRowsWarning,
            stacklevel=2,
        )
        return
    if data.targets is not None:
        return  # labels are numbers, so there are no classes that could be rare
    test_counts = _count_labels(data, tested)
    if len(test_counts) < 2:
        raise DataError(
            f"{data.table.name}: the {len(tested)} rows that {method.settings.title} is tested on "
            f"are all {_describe_label(data, test_counts)}: whoever always says so is always "
            f"right; {_ADVICE_ON_TEST_ROWS}"
        )
    _warn_of_few_positives(method, config, data, learnt_counts, test_counts)
    _warn_of_rare_test_label(method, data, learnt_counts, test_counts, tested=len(tested))


def _require_learnt_labels(
    method: Method, data: OwnData, aligned: Tensor, learnt_counts: "Counter[float]"
) -> None:
    """Refuse training on no label or on labels of one class; warn of classes that are not learnt.

    `aligned`: the row of the active's table at each alignment position. `learnt_counts`: the number
    of training rows with each label. Raises DataError: there is no label, or one class only. Warns
    FewRowsWarning: a class has labelled rows, but none among common people.
    """
    owner = data.table.name
    common = f"the {len(aligned)} common people"
    labelled_rows = data.labelled_rows
    if not learnt_counts:
        raise DataError(
            f"{owner}: none of its {len(labelled_rows)} labelled training rows is among {common}, "
            f"so there is nothing to learn; {_ADVICE_ON_LABELS}"
        )
    if len(learnt_counts) < 2:
        selection = ""
        if method.public_facts.needs_alignment:
            selection = f" (of {len(labelled_rows)}; the others are not among {common})"
        raise DataError(
            f"{owner}: the {learnt_counts.total()} labelled training rows that "
            f"{method.settings.title} learns from{selection} are all "
            f"{_describe_label(data, learnt_counts)}, so there is nothing to learn; "
            f"{_ADVICE_ON_LABELS}"
        )
    missing_labels = set(_count_labels(data, labelled_rows)) - set(learnt_counts)
    if missing_labels and data.targets is None:
        description = ", ".join(data.classes[int(label)] for label in sorted(missing_labels))
        warnings.warn(
            f"{owner}: {method.settings.title} learns nothing of class {description}: none of its "
            f"labelled training rows is among {common}; {_ADVICE_ON_LABELS}",
            FewRowsWarning,
            stacklevel=3,
        )


def _warn_of_rare_test_label(
    method: Method,
    data: OwnData,
    learnt_counts: "Counter[float]",
    test_counts: "Counter[float]",
    *,
    tested: int,
) -> None:
    """Warn (FewRowsWarning) of the label with the fewest test rows, if these are too few.

    Too few are fewer than `MIN_ROWS` in a task of two classes, or none with more classes.

    `learnt_counts`, `test_counts`: the number of training rows, and of test rows, with each label.
    `tested`: how many test rows there are.
    """
    # Learnt labels without a test row count as 0.
    all_counts = dict.fromkeys(learnt_counts, 0) | test_counts
    rarest, rarest_count = min(all_counts.items(), key=lambda item: item[1])
    min_rows = MIN_ROWS if len(data.classes) == 2 else 1
    if rarest_count >= min_rows:
        return
    label = _describe_label(data, [rarest])
    if rarest_count:
        description = (
            f"{rarest_count} are {label}, fewer than {MIN_ROWS}: its measures say little, and "
            "their intervals are widened; raise data.test_fraction, or add rows"
        )
    else:
        description = (
            f"none is {label}, so nothing tells how well it is found; {_ADVICE_ON_TEST_ROWS}"
        )
    warnings.warn(
        f"{data.table.name}: of the {tested} rows that {method.settings.title} is tested on "
        f"{description}",
        FewRowsWarning,
        stacklevel=3,
    )


def _warn_of_few_positives(
    method: Method,
    config: RunSettings,
    data: OwnData,
    learnt_counts: "Counter[float]",
    test_counts: "Counter[float]",
) -> None:
    """Warn (FewRowsWarning) of few rows of the rare class, in a task of two skewed classes.

    The number of labelled rows is printed only if labels have no privacy guarantee, since it would
    reveal something about them.

    `learnt_counts`, `test_counts`: the number of training rows, and of test rows, with each label.
    """
    counts = learnt_counts + test_counts
    if len(data.classes) != 2 or len(counts) < 2:
        return
    rarest, rarest_count = min(counts.items(), key=lambda item: item[1])
    if rarest_count >= RARE_SHARE * counts.total():
        return
    shortages = list[str]()
    if learnt_counts[rarest] < MIN_POSITIVES and not config.are_labels_private:
        shortages.append(f"{learnt_counts[rarest]} labelled training rows")
    # With fewer test rows, `require_labels` warns.
    if MIN_ROWS <= test_counts[rarest] < MIN_POSITIVES:
        shortages.append(f"{test_counts[rarest]} test rows")
    if shortages:
        warnings.warn(
            f"{data.table.name}: {' and '.join(shortages)} that {method.settings.title} knows are "
            f"{_describe_label(data, [rarest])}, fewer than {MIN_POSITIVES}: what is learnt of "
            "it may be chance, and so may measures be; read their intervals, or add such rows",
            FewRowsWarning,
            stacklevel=3,
        )


def _count_labels(data: OwnData, rows: Tensor) -> Counter[float]:
    """Return how often each label occurs among these table rows; unlabelled rows do not count."""
    labels_N = data.table.labels
    assert labels_N is not None
    labels = labels_N[rows]
    return Counter(labels[labels != UNLABELLED].tolist())


def _describe_label(data: OwnData, counts: "Counter[float] | list[float]") -> str:
    """Return the first of these labels in the user's words: "of class NAME", or a number.

    `counts`: labels, or a mapping whose keys are labels.
    """
    label = next(iter(counts))
    if data.targets is None:
        return f"of class {data.classes[int(label)]}"
    return f"{float(data.targets.decode(torch.tensor(label))):g}"
