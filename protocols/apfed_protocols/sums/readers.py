"""Readers of a single contribution to a sum, derived from its scheme, masks, threshold and parties.

Run by: every party, before it takes part; `require_no_single_reader` where a role or a hub is made.
Protects from: a sum whose settings let one computer read one party without anybody having said so.

A contribution is read along one of four ways. Each needs certain parties to put together what they
have, and `tests/protocols/test_sums_readers.py` walks each of them:

1. *The message.* Whoever has it takes off what hides it: the receiver what it holds (its key, or
   the mask that it shares), the other contributors what they hold (their masks, or shares).
2. *The sum.* The receiver, and all contributors but one, subtract what they know.
3. *Two sums.* Where a sum may lack a contributor, the receiver leaves one out of the second of two
   related questions, and subtracts. It need not be the aggregator: who is not asked does
   not answer.
4. *The set-up.* A hub that carries unsigned set-up messages puts parties of its own making in the
   place of all but one contributor.

Coalitions beyond the parties of the sum, and what a sum itself says of its addends, are not here.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from apfed_protocols.errors import LocalProtocolError, UnsafeChoiceWarning
from apfed_protocols.sums.interface import SumAgreement

__all__ = [
    "ReadableSum",
    "Readers",
    "describe_readers",
    "find_readers",
    "require_no_single_reader",
    "warn_of_unsigned_hub",
]


class ReadableSum(Protocol):
    """A sum as far as it decides who reads one contribution.

    Attributes:
        needs_receiver_key: whether a contribution alone opens only with what the receiver holds.
        needs_other_contributors: whether it opens only with what all other contributors hold.
        min_contributors: the least number of contributors with which a step has a sum.
    """

    @property
    def agreement(self) -> SumAgreement: ...
    @property
    def name(self) -> str: ...
    @property
    def unsafe(self) -> bool: ...
    @property
    def needs_receiver_key(self) -> bool: ...
    @property
    def needs_other_contributors(self) -> bool: ...
    @property
    def min_contributors(self) -> int: ...
    @property
    def allow_single_reader(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Readers:
    """A smallest set of parties that together can read one contribution in one way.

    Attributes:
        parties: names of the parties in the set, sorted.
        victim: the contributor whose contribution they read, who is not among them.
        way: how they read it, as a clause that continues "X can read the contribution of Y: ...".
        computer_count: the number of computers that these parties run; 1: one computer reads it
            alone.
    """

    parties: tuple[str, ...]
    victim: str
    way: str
    computer_count: int


def find_readers(
    secure_sum: ReadableSum, *, hub: bool = False, signed: bool = True
) -> tuple[Readers, ...]:
    """Return, for each contributor, every smallest set of parties that together can read its
    contribution: no part of the set can.

    Args:
        secure_sum: the sum.
        hub: whether one computer runs receiver and aggregator, as `hub_pump` does.
        signed: whether set-up messages are authenticated from end to end: by links that each join
            two parties, or by `identity` and `peers` where a hub carries them.
    """
    agreement = secure_sum.agreement
    parties_at_hub = {agreement.receiver, agreement.aggregator} if hub else set()
    readers: list[Readers] = []
    for name in agreement.contributors:
        ways = list(_find_ways(secure_sum, name, signed=signed))
        way_by_parties: dict[frozenset[str], str] = {}
        for parties, way in ways:
            has_smaller_set = any(other < parties for other, _ in ways)
            if not has_smaller_set:
                way_by_parties.setdefault(parties, way)
        for parties, way in way_by_parties.items():
            computers = len(parties - parties_at_hub)
            if parties & parties_at_hub:
                computers += 1
            readers.append(
                Readers(
                    parties=tuple(sorted(parties)), victim=name, way=way, computer_count=computers
                )
            )
    return tuple(readers)


def _find_ways(
    secure_sum: ReadableSum, victim: str, *, signed: bool
) -> Iterator[tuple[frozenset[str], str]]:
    """Yield each way in which a set of parties can read the contribution of the contributor
    `victim`, as (parties, how): the set, and a clause for reports.

    `signed`: whether set-up messages are authenticated from end to end.
    """
    agreement = secure_sum.agreement
    receiver = agreement.receiver
    aggregator = agreement.aggregator
    others = frozenset(agreement.contributors) - {victim}

    # From the sum: the receiver and all other contributors subtract what they know.
    subtract = "subtracts its own from the sum" if others else "reads it as the sum"
    yield others | {receiver}, subtract

    # From the message, which the aggregator gets: whoever has the keys or masks that protect it.
    holders = {aggregator}
    if secure_sum.needs_receiver_key:
        holders.add(receiver)
    if secure_sum.needs_other_contributors:
        holders |= others
    yield frozenset(holders), "opens a contribution on its way with what it holds"

    # From two sums, one of them without the victim, if a sum may lack a contributor.
    if secure_sum.min_contributors < len(agreement.contributors):
        yield (
            frozenset({receiver}),
            "asks twice, the second time without one contributor, and subtracts the two sums",
        )
    # In the set-up: with keys of its own for all contributors but the victim.
    if not signed:
        yield (
            frozenset({receiver, aggregator}),
            "plays the other contributors in the set-up messages that it carries unsigned",
        )


def describe_readers(secure_sum: ReadableSum, *, hub: bool = False, signed: bool = True) -> str:
    """Return a text that says who can read single contributions: one line for each set of parties,
    with the contributors whose contributions it can read, and the way.

    `hub`: whether one computer runs receiver and aggregator, as `hub_pump` does. `signed`: whether
    set-up messages are authenticated from end to end.
    """
    # Sets with the same words and the same way share a line.
    victims_by_readers: dict[tuple[str, str, str], list[str]] = {}
    for readers in find_readers(secure_sum, hub=hub, signed=signed):
        names = _name_parties(secure_sum.agreement, readers)
        computers = (
            "one computer"
            if readers.computer_count == 1
            else f"{readers.computer_count} computers together"
        )
        victims = victims_by_readers.setdefault((names, computers, readers.way), [])
        victims.append(readers.victim)
    contributors = len(secure_sum.agreement.contributors)
    lines = []
    for (names, computers, way), victims in victims_by_readers.items():
        whose = "any contributor" if len(victims) == contributors else ", ".join(victims)
        lines.append(f"- {names} ({computers}) can read the contribution of {whose}: {way}")
    return "\n".join(["Who can read one contribution:", *lines])


def _name_parties(agreement: SumAgreement, readers: Readers) -> str:
    """Return the parties that can read a contribution in words, e.g. "clinic and all other
    contributors". Contributors are never named: a set of readers has either no contributor, or all
    but the one whose contribution is read.
    """
    # A dict, since both may be one party, which is named once.
    receiver_and_aggregator = dict.fromkeys((agreement.receiver, agreement.aggregator))
    names = [name for name in receiver_and_aggregator if name in readers.parties]
    has_contributors = any(name not in receiver_and_aggregator for name in readers.parties)
    if has_contributors:
        names.append("all other contributors")
    return " and ".join(names)


def require_no_single_reader(
    secure_sum: ReadableSum, *, hub: bool = False, stacklevel: int = 3
) -> None:
    """Raise LocalProtocolError if one computer can read a single contribution. If the settings
    allow it, by `allow_single_reader` or a single contributor, warn (UnsafeChoiceWarning) instead.

    A sum that protects nothing (`unsafe`) is not checked, since it warns by itself.

    Args:
        secure_sum: the sum.
        hub: whether one computer runs receiver and aggregator, as `hub_pump` does.
        stacklevel: the caller that the warning points at, as `warnings.warn` counts it.
    """
    if secure_sum.unsafe:
        return
    agreement = secure_sum.agreement
    single_readers = [
        reader for reader in find_readers(secure_sum, hub=hub) if reader.computer_count == 1
    ]
    if not single_readers:
        return
    first = single_readers[0]
    computer = " and ".join(first.parties)
    if hub and len(first.parties) > 1:
        computer = f"the hub, which is {computer},"
    sentence = f"{secure_sum.name}: {computer} alone can read one contribution: {first.way}"
    # An agreement with one contributor exists only with `allow_single`.
    is_only_contributor = len(agreement.contributors) == 1
    if not secure_sum.allow_single_reader and not is_only_contributor:
        advice = _suggest_remedy(secure_sum, hub=hub)
        raise LocalProtocolError(
            f"{sentence}. {advice}, or say allow_single_reader=True and accept it"
        )
    warnings.warn(
        f"{sentence}; {'allow_single' if is_only_contributor else 'allow_single_reader'} says that "
        "this is accepted",
        UnsafeChoiceWarning,
        stacklevel=stacklevel,
    )


def _suggest_remedy(secure_sum: ReadableSum, *, hub: bool) -> str:
    """Return advice for an error: the change of settings after which no single computer can read a
    contribution.

    `hub`: whether one computer runs receiver and aggregator, as `hub_pump` does.
    """
    contributors = len(secure_sum.agreement.contributors)
    if secure_sum.min_contributors < contributors:
        return f"Leave threshold out, or say threshold={contributors}: all must answer then"
    if hub:
        return 'Take a sum under masks ("masked", "masked bfv"), or combine at another party'
    return 'Let another party combine, or take a sum under masks ("masked", "masked bfv")'


def warn_of_unsigned_hub(secure_sum: ReadableSum, *, stacklevel: int = 3) -> None:
    """Warn (UnsafeChoiceWarning) that the set-up messages, which a hub carries between the parties,
    are not signed, so that the hub could replace their keys by its own.

    `stacklevel`: the caller that the warning points at, as `warnings.warn` counts it.
    """
    hub = secure_sum.agreement.aggregator
    warnings.warn(
        f"set-up messages pass through {hub} unsigned, so {hub} can play the other contributors "
        "and read each contribution; give identity= and peers= at all parties "
        "(`fresh_identity` makes one)",
        UnsafeChoiceWarning,
        stacklevel=stacklevel,
    )
