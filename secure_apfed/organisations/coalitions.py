"""The coalitions of parties that one organisation must not run together, since they could collude.

Run by: a party that proposes or joins a run. Protects: parties whose contributions a secure sum,
masks or a dealer hide only as long as two others do not collude. The rows are those of the table of
coalitions in `who_learns.md`, and the same facts from the rows of single roles; a test compares
both. `readable_data` is what the coalition reads of a single party, and empty if it reads nothing
of the kind; `alterable_data` is what it could change without being noticed.

Letters: M passives, t threshold of recoverable masks.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from secure_apfed.contract import PartyRole
from secure_apfed.exchange.secure_sums import find_sum_class
from secure_apfed.methods.alignment import hides_overlaps_by_transfers, needs_dealer
from secure_apfed.methods.terms import may_lack_passives
from secure_apfed.settings import RunSettings

__all__ = ["COALITIONS", "Coalition", "Conflict", "find_conflicts", "list_facts"]

_UNNOTICED_SUM_CHANGE = "the sum, without being noticed by parties that it does not run"
_PAIRWISE_MASKS_CONDITION = "sum bfv + pairwise masks or sum plain + pairwise masks"
_ONE_CONTRIBUTION = "what one passive alone contributes"
_OTHER_CONTRIBUTION = "what the other passive contributes: the sum minus the own part"
_REMAINING_CONTRIBUTION = "what the remaining passive contributes: the sum minus the own parts"


@dataclass(frozen=True, kw_only=True)
class Coalition:
    """A group of colluding roles, and what it could read or alter.

    Attributes:
        members: the roles in words, as in the table of coalitions in `who_learns.md`.
        condition: for which runs this holds: facts of a run (see `list_facts`), joined by "; "
            (and) and " or ".
        readable_data: what they read of a single party; empty: nothing.
        alterable_data: what they could alter without being noticed; empty: nothing.
        needs_threshold_below_all: whether this holds only if the masked sum can be decoded without
            some passives (t < M: threshold t of M passives).
    """

    members: str
    condition: str
    readable_data: str = ""
    alterable_data: str = ""
    needs_threshold_below_all: bool = False

    def applies_to(self, facts: Collection[str]) -> bool:
        """Return whether the coalition's condition holds for a run with these facts."""
        alternatives_by_part = [part.split(" or ") for part in self.condition.split("; ")]
        return all(
            any(fact in facts for fact in alternatives) for alternatives in alternatives_by_part
        )


COALITIONS = (
    # As in the table of coalitions.
    Coalition(
        members="active and aggregator",
        condition="sum ckks or sum bfv; M >= 2",
        readable_data=_ONE_CONTRIBUTION,
    ),
    Coalition(
        members="active and aggregator", condition="votes of encrypted labels are summed; M >= 2"
    ),
    Coalition(
        members="active and all passives but one",
        condition="votes of encrypted labels are summed; M >= 2",
        readable_data="the remaining passive's votes",
    ),
    Coalition(
        members="active and aggregator",
        condition="tables are decomposed",
        readable_data="every passive's rows up to one orthogonal transformation of its columns",
    ),
    Coalition(
        members="any passive and the aggregator",
        condition="tables are decomposed",
        readable_data="every other party's rows up to one orthogonal transformation of its columns",
    ),
    Coalition(
        members="aggregator and dealer",
        condition="tables are decomposed",
        readable_data="the aligned training rows of every party, exactly",
    ),
    Coalition(members="active and dealer", condition="tables are decomposed"),
    Coalition(members="active and aggregator", condition=f"{_PAIRWISE_MASKS_CONDITION}; M >= 2"),
    Coalition(
        members="active and aggregator",
        condition="sum plain + recoverable masks; M >= 2",
        readable_data=f"{_ONE_CONTRIBUTION}, out of two sums of the same batch",
        needs_threshold_below_all=True,
    ),
    Coalition(members="active and aggregator", condition="sum crypten; M >= 2"),
    *(
        Coalition(members=members, condition=f"{fact}; {count_fact}", readable_data=contribution)
        for fact in (
            "gradients are summed",
            "the sum of votes is revealed",
            "representations are summed",
            "projections are summed",
            "pseudo-labels are averaged or weights are averaged",
        )
        for members, count_fact, contribution in (
            ("active and one of the two passives", "M = 2", _OTHER_CONTRIBUTION),
            ("active and all passives but one", "M >= 3", _REMAINING_CONTRIBUTION),
        )
    ),
    *(
        Coalition(members="passives among themselves", condition=f"{fact}; M >= 2")
        for fact in (
            "pseudo-labels are averaged",
            "passives vote",
            "the active sends representations",
            "gradients are returned",
        )
    ),
    # As the rows of single roles say it.
    Coalition(
        members="aggregator and any other party",
        condition="sum plain",
        readable_data=f"{_ONE_CONTRIBUTION}, which the aggregator gets as it is",
    ),
    Coalition(
        members="dealer and any other party",
        condition="a dealer aligns",
        readable_data="which IDs that party's peers have, and it has not",
    ),
    Coalition(
        members="active and the first passive",
        condition="transfers hide overlaps; M >= 2",
        readable_data="which of the active's people each other passive knows",
    ),
    Coalition(
        members="aggregator and more than 2t - M - 1 passives",
        condition="sum plain + recoverable masks",
        readable_data=_ONE_CONTRIBUTION,
    ),
    Coalition(
        members="aggregator and a party with rows",
        condition=(
            f"sum ckks or sum bfv or {_PAIRWISE_MASKS_CONDITION} or sum plain + recoverable masks "
            "or tables are decomposed or votes of encrypted labels are summed"
        ),
        alterable_data=_UNNOTICED_SUM_CHANGE,
    ),
)
"""All coalitions in the table of `who_learns.md`, also those that gain nothing by colluding."""


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """A group of parties that one organisation would run, and what it would gain.

    Attributes:
        party_names: the parties' names, by role.
        coalition_members: the roles that collude in words, a value of `Coalition.members`.
        gained_ability: what they would read or alter, in words that follow "the organisation ...".
    """

    party_names: tuple[str, ...]
    coalition_members: str
    gained_ability: str


def list_facts(config: RunSettings, passive_count: int) -> frozenset[str]:
    """Return the facts of a run on which coalitions depend, in the words of `Coalition.when`.

    `passive_count`: number of passives of the run, M.
    """
    holds_by_count_fact = {
        "M = 2": passive_count == 2,
        "M >= 2": passive_count >= 2,
        "M >= 3": passive_count >= 3,
    }
    facts = {fact for fact, holds in holds_by_count_fact.items() if holds}
    if "contributions are summed" in config.method.exchange_facts:
        facts.add(f"sum {find_sum_class(config.secure_sum).name}")
    if config.method.needs_alignment and needs_dealer(config.alignment):
        facts.add("a dealer aligns")
    if config.method.needs_alignment and hides_overlaps_by_transfers(config.alignment):
        facts.add("transfers hide overlaps")
    return frozenset(facts | config.method.exchange_facts)


def find_conflicts(
    config: RunSettings,
    role_by_party: Mapping[str, PartyRole],
    organisation_parties: Collection[str],
) -> Iterator[Conflict]:
    """Yield what an organisation gains by running several parties of a run.

    There is one conflict for each coalition all of whose members the organisation runs. Coalitions
    that read something come before those that only alter something.

    Args:
        config: the run's settings.
        role_by_party: name -> role of each party of the run.
        organisation_parties: names of the parties that the organisation runs.
    """
    passive_count = sum(role == "passive" for role in role_by_party.values())
    facts = list_facts(config, passive_count)
    harmful_coalitions = [
        coalition
        for coalition in COALITIONS
        if (coalition.readable_data or coalition.alterable_data) and coalition.applies_to(facts)
    ]
    for coalition in sorted(harmful_coalitions, key=lambda coalition: not coalition.readable_data):
        if (
            coalition.needs_threshold_below_all
            and _find_threshold(config, passive_count) >= passive_count
        ):
            continue
        min_passives = _count_needed_passives(config, coalition, passive_count)
        party_names = _list_members(
            coalition.members, role_by_party, organisation_parties, min_passives=min_passives
        )
        if party_names:
            gained_ability = f"could alter {coalition.alterable_data}"
            if coalition.readable_data:
                gained_ability = f"read {coalition.readable_data}"
            yield Conflict(
                party_names=party_names,
                coalition_members=coalition.members,
                gained_ability=gained_ability,
            )


def _count_needed_passives(config: RunSettings, coalition: Coalition, passive_count: int) -> int:
    """Return the smallest number of passives of a run that can form a coalition.

    It is 1 unless the coalition's words say several. `passive_count`: number of passives of the
    run, M.
    """
    if coalition.members == "active and all passives but one":
        return max(1, passive_count - 1)
    if coalition.members == "aggregator and more than 2t - M - 1 passives":
        return max(1, 2 * _find_threshold(config, passive_count) - passive_count)
    return 1


def _find_threshold(config: RunSettings, passive_count: int) -> int:
    """Return how many passives suffice to decode a sum under recoverable masks: the threshold t.

    By default they are more than two thirds if a step may lack passives, and else all.

    `passive_count`: number of passives of the run, M.
    """
    if config.secure_sum.threshold is not None:
        return config.secure_sum.threshold
    return 2 * passive_count // 3 + 1 if may_lack_passives(config) else passive_count


def _list_members(
    coalition_members: str,
    role_by_party: Mapping[str, PartyRole],
    organisation_parties: Collection[str],
    *,
    min_passives: int,
) -> tuple[str, ...]:
    """Return the parties of one organisation that form a coalition; empty if members are missing.

    Args:
        coalition_members: the coalition's roles in words, such as "active and aggregator".
        role_by_party: name -> role of each party of the run.
        organisation_parties: names of the parties that the organisation runs.
        min_passives: how many passives a coalition of several passives needs.
    """
    names_by_role: dict[str, list[str]] = {
        role: [] for role in ("active", "passive", "aggregator", "dealer")
    }
    for name in role_by_party:
        if name in organisation_parties:
            names_by_role[role_by_party[name]].append(name)
    active = names_by_role["active"]
    passives = names_by_role["passive"]
    aggregator = names_by_role["aggregator"]
    dealer = names_by_role["dealer"]
    enough_passives = passives if len(passives) >= min_passives else []
    first_passive = [name for name, role in role_by_party.items() if role == "passive"][:1]
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
    groups = groups_by_coalition[coalition_members]
    is_complete = all(groups)
    return tuple(name for group in groups for name in group) if is_complete else ()
