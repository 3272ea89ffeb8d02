"""The coalitions of parties that one organisation must not run together, since they could collude.

Run by: a party that proposes or joins a run. Protects: parties whose contributions a secure sum,
masks or a dealer hide only as long as two others do not collude. The rows are those of the table of
coalitions in `who_learns.md`, and the same facts from the rows of single roles; a test compares
both. `reads` is what the coalition reads of a single party, and empty if it reads nothing of the
kind; `alters` is what it could change without being noticed.

Letters: M passives, t threshold of recoverable masks.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from secure_apfed.contract import PartyRole
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.methods.alignment import hides_overlaps_by_transfers, needs_dealer
from secure_apfed.methods.terms import may_lack_passives
from secure_apfed.settings.run import RunSettings

__all__ = ["COALITIONS", "Coalition", "Conflict", "find_conflicts", "list_facts"]

_ALTERS = "the sum, without being noticed by parties that it does not run"
_MASKED = "sum bfv + pairwise masks or sum plain + pairwise masks"
_CONTRIBUTION = "what one passive alone contributes"
_THE_OTHERS = "what the other passive contributes: the sum minus the own part"
_THE_REMAINING = "what the remaining passive contributes: the sum minus the own parts"


@dataclass(frozen=True, kw_only=True)
class Coalition:
    """A group of colluding roles, and what it could read or alter.

    Attributes:
        who: the roles in words, as in the table of coalitions in `who_learns.md`.
        when: for which runs this holds: facts of a run (see `list_facts`), joined by "; " (and)
            and " or ".
        reads: what they read of a single party; empty: nothing.
        alters: what they could alter without being noticed; empty: nothing.
        needs_threshold_below_all: whether this holds only if the masked sum can be decoded without
            some passives (t < M: threshold t of M passives).
    """

    who: str
    when: str
    reads: str = ""
    alters: str = ""
    needs_threshold_below_all: bool = False

    def applies_to(self, facts: Collection[str]) -> bool:
        """Return whether the condition `when` holds for a run with these facts."""
        alternatives_of_each = [part.split(" or ") for part in self.when.split("; ")]
        return all(
            any(fact in facts for fact in alternatives) for alternatives in alternatives_of_each
        )


COALITIONS = (
    # As in the table of coalitions.
    Coalition(who="active and aggregator", when="sum ckks or sum bfv; M >= 2", reads=_CONTRIBUTION),
    Coalition(who="active and aggregator", when="votes of encrypted labels are summed; M >= 2"),
    Coalition(
        who="active and all passives but one",
        when="votes of encrypted labels are summed; M >= 2",
        reads="the remaining passive's votes",
    ),
    Coalition(
        who="active and aggregator",
        when="tables are decomposed",
        reads="every passive's rows up to one orthogonal transformation of its columns",
    ),
    Coalition(
        who="any passive and the aggregator",
        when="tables are decomposed",
        reads="every other party's rows up to one orthogonal transformation of its columns",
    ),
    Coalition(
        who="aggregator and dealer",
        when="tables are decomposed",
        reads="the aligned training rows of every party, exactly",
    ),
    Coalition(who="active and dealer", when="tables are decomposed"),
    Coalition(who="active and aggregator", when=f"{_MASKED}; M >= 2"),
    Coalition(
        who="active and aggregator",
        when="sum plain + recoverable masks; M >= 2",
        reads=f"{_CONTRIBUTION}, out of two sums of the same batch",
        needs_threshold_below_all=True,
    ),
    Coalition(who="active and aggregator", when="sum crypten; M >= 2"),
    *(
        Coalition(who=who, when=f"{summed}; {count}", reads=reads)
        for summed in (
            "gradients are summed",
            "the sum of votes is revealed",
            "representations are summed",
            "projections are summed",
            "pseudo-labels are averaged or weights are averaged",
        )
        for who, count, reads in (
            ("active and one of the two passives", "M = 2", _THE_OTHERS),
            ("active and all passives but one", "M >= 3", _THE_REMAINING),
        )
    ),
    *(
        Coalition(who="passives among themselves", when=f"{happens}; M >= 2")
        for happens in (
            "pseudo-labels are averaged",
            "passives vote",
            "the active sends representations",
            "gradients are returned",
        )
    ),
    # As the rows of single roles say it.
    Coalition(
        who="aggregator and any other party",
        when="sum plain",
        reads=f"{_CONTRIBUTION}, which the aggregator gets as it is",
    ),
    Coalition(
        who="dealer and any other party",
        when="a dealer aligns",
        reads="which IDs that party's peers have, and it has not",
    ),
    Coalition(
        who="active and the first passive",
        when="transfers hide overlaps; M >= 2",
        reads="which of the active's people each other passive knows",
    ),
    Coalition(
        who="aggregator and more than 2t - M - 1 passives",
        when="sum plain + recoverable masks",
        reads=_CONTRIBUTION,
    ),
    Coalition(
        who="aggregator and a party with rows",
        when=(
            f"sum ckks or sum bfv or {_MASKED} or sum plain + recoverable masks or "
            "tables are decomposed or votes of encrypted labels are summed"
        ),
        alters=_ALTERS,
    ),
)
"""All coalitions in the table of `who_learns.md`, also those that gain nothing by colluding."""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A group of parties that one organisation would run, and what it would gain.

    Attributes:
        parties: the parties' names, by role.
        who: the roles that collude in words, a value of `Coalition.who`.
        gets: what they would read or alter, in words that follow "the organisation ...".
    """

    parties: tuple[str, ...]
    who: str
    gets: str


def list_facts(config: RunSettings, passives: int) -> frozenset[str]:
    """Return the facts of a run on which coalitions depend, in the words of `Coalition.when`.

    `passives`: number of passives of the run, M.
    """
    counts = {"M = 2": passives == 2, "M >= 2": passives >= 2, "M >= 3": passives >= 3}
    facts = {word for word, holds in counts.items() if holds}
    if "contributions are summed" in config.method.exchange_facts:
        facts.add(f"sum {find_sum_class(config.secure_sum).name}")
    if config.method.needs_alignment and needs_dealer(config.alignment):
        facts.add("a dealer aligns")
    if config.method.needs_alignment and hides_overlaps_by_transfers(config.alignment):
        facts.add("transfers hide overlaps")
    return frozenset(facts | config.method.exchange_facts)


def find_conflicts(
    config: RunSettings, roles: Mapping[str, PartyRole], together: Collection[str]
) -> Iterator[Conflict]:
    """Yield what an organisation gains by running several parties of a run.

    There is one conflict for each coalition all of whose members the organisation runs. Coalitions
    that read something come before those that only alter something.

    Args:
        config: the run's settings.
        roles: name -> role of each party of the run.
        together: names of the parties that the organisation runs.
    """
    passives = sum(role == "passive" for role in roles.values())
    facts = list_facts(config, passives)
    harmful_coalitions = [
        coalition
        for coalition in COALITIONS
        if (coalition.reads or coalition.alters) and coalition.applies_to(facts)
    ]
    for coalition in sorted(harmful_coalitions, key=lambda coalition: not coalition.reads):
        if coalition.needs_threshold_below_all and _find_threshold(config, passives) >= passives:
            continue
        minimum = _count_needed_passives(config, coalition, passives)
        parties = _list_members(coalition.who, roles, together, minimum_passives=minimum)
        if parties:
            gets = f"could alter {coalition.alters}"
            if coalition.reads:
                gets = f"read {coalition.reads}"
            yield Conflict(parties=parties, who=coalition.who, gets=gets)


def _count_needed_passives(config: RunSettings, coalition: Coalition, passives: int) -> int:
    """Return the smallest number of passives of a run that can form a coalition.

    It is 1 unless the coalition's words say several. `passives`: number of passives of the run, M.
    """
    if coalition.who == "active and all passives but one":
        return max(1, passives - 1)
    if coalition.who == "aggregator and more than 2t - M - 1 passives":
        return max(1, 2 * _find_threshold(config, passives) - passives)
    return 1


def _find_threshold(config: RunSettings, passives: int) -> int:
    """Return how many passives suffice to decode a sum under recoverable masks: the threshold t.

    By default they are more than two thirds if a step may lack passives, and else all.

    `passives`: number of passives of the run, M.
    """
    if config.secure_sum.threshold is not None:
        return config.secure_sum.threshold
    return 2 * passives // 3 + 1 if may_lack_passives(config) else passives


def _list_members(
    who: str, roles: Mapping[str, PartyRole], together: Collection[str], *, minimum_passives: int
) -> tuple[str, ...]:
    """Return the parties of one organisation that form a coalition; empty if members are missing.

    Args:
        who: the coalition's roles in words, such as "active and aggregator".
        roles: name -> role of each party of the run.
        together: names of the parties that the organisation runs.
        minimum_passives: how many passives a coalition of several passives needs.
    """
    members: dict[str, list[str]] = {
        role: [] for role in ("active", "passive", "aggregator", "dealer")
    }
    for name in roles:
        if name in together:
            members[roles[name]].append(name)
    active = members["active"]
    passives = members["passive"]
    aggregator = members["aggregator"]
    dealer = members["dealer"]
    enough_passives = passives if len(passives) >= minimum_passives else []
    first_passive = [name for name, role in roles.items() if role == "passive"][:1]
    own_first_passive = [name for name in passives if name in first_passive]
    # By coalition: its groups of parties. The coalition is complete if no group is empty.
    groups_by_coalition: dict[str, tuple[list[str], ...]] = {
        "active and aggregator": (active, aggregator),
        "active and dealer": (active, dealer),
        "aggregator and dealer": (aggregator, dealer),
        "any passive and the aggregator": (passives, aggregator),
        "active and one of the two passives": (active, passives),
        "active and all passives but one": (active, enough_passives),
        "active and the first passive": (active, own_first_passive),
        "aggregator and more than 2t - M - 1 passives": (enough_passives, aggregator),
        "passives among themselves": (passives[:1], passives[1:]),
        "aggregator and a party with rows": ([*active, *passives], aggregator),
        "aggregator and any other party": ([*active, *passives, *dealer], aggregator),
        "dealer and any other party": ([*active, *passives, *aggregator], dealer),
    }
    groups = groups_by_coalition[who]
    is_complete = all(groups)
    return tuple(name for group in groups for name in group) if is_complete else ()
