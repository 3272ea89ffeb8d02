"""One organisation may not run parties that together read what they hide from each other."""

from collections.abc import Sequence
from itertools import combinations

import pytest

from apfed_experiments.report.who_learns import COALITIONS as TABLE
from apfed_protocols.sums import SECURE_SUMS
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.methods import METHODS, assign_roles
from secure_apfed.organisations.coalitions import COALITIONS, find_conflicts, list_facts

NAMED = {(row.colluding_parties, row.condition) for row in TABLE}
OURS = {(row.members, row.condition): row for row in COALITIONS}
SINGLE_ROLES = {
    "aggregator and any other party",
    "dealer and any other party",
    "active and the first passive",
    "aggregator and more than 2t - M - 1 passives",
    "aggregator and a party with rows",
}
NOTHING = (
    "The sum only",
    "The sum of the votes only",
    "Nothing beyond",
    "Nothing further",
    "No further",
    "Several gradients",
)


@pytest.mark.parametrize(("who", "when"), sorted(NAMED))
def test_every_coalition_of_the_page_has_its_row(who: str, when: str) -> None:
    (page,) = (row for row in TABLE if (row.colluding_parties, row.condition) == (who, when))
    assert (not OURS[who, when].readable_data) == page.joint_knowledge.startswith(NOTHING), (
        page.joint_knowledge
    )


def test_rows_beyond_the_page_are_of_single_roles() -> None:
    assert {who for who, when in OURS.keys() - NAMED} == SINGLE_ROLES


def config_of(method: str, scheme: str = "", more: Sequence[str] = ()) -> Config:
    text = f"{{name: late, method: {method}, data: {{dataset: digits, views: 4}}, "
    kind = METHODS[method].public_facts
    network = {"apc_vfl": "selu", "vfedtrans": "enriched", "apfed_code": "cross_view"}.get(method)
    network = "identity" if kind.averaged_quantity else network
    text += f"guard: {{mechanism: none}}, model: {{network: {network or 'auto'}}}}}"
    said = list(more)
    if scheme:
        kept = SECURE_SUMS[scheme]
        said += [f"secure_sum.scheme={kept.scheme}", f"secure_sum.masks={kept.masks}"]
    return load_config_text(text, overrides=said)


def gets(config: Config, passives: int, *together: str) -> list[str]:
    names = [f"p{at}" for at in range(passives)]
    roles = assign_roles(METHODS[config.method.name], config, "active", names)
    assert set(together) <= set(roles), roles
    return [each.gained_ability for each in find_conflicts(config, roles, together)]


# By sum, what active and aggregator, and two of the passives' sum, read together.
READ_BY_BOTH = {"plain", "ckks", "bfv", "plain + recoverable masks"}
PAIRS = (("active", "aggregator"), ("p0", "aggregator"), ("active", "p0"), ("p0", "p1"))


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
@pytest.mark.parametrize("passives", [2, 4])
@pytest.mark.parametrize("scheme", SECURE_SUMS)
def test_pairs_under_every_sum(scheme: str, passives: int, pair: tuple[str, str]) -> None:
    found = gets(config_of("apfed_r", scheme), passives, *pair)
    reads = [each for each in found if each.startswith("read ")]
    if pair == ("active", "aggregator"):
        # Recoverable masks need all passives unless a threshold is named.
        below_all = scheme != "plain + recoverable masks"
        assert bool(reads) == (scheme in READ_BY_BOTH and below_all), found
    elif pair == ("active", "p0"):
        assert bool(reads) == (passives == 2), found
    elif pair == ("p0", "aggregator"):
        assert bool(reads) == (scheme == "plain"), found
    else:
        assert found == []
    if "aggregator" in pair:
        assert bool(found) == (scheme != "crypten")


@pytest.mark.parametrize("scheme", SECURE_SUMS)
def test_all_passives_but_one_and_the_active_read_the_last(scheme: str) -> None:
    config = config_of("apfed_r", scheme)
    assert any("remaining passive" in each for each in gets(config, 4, "active", "p0", "p1", "p2"))
    assert not any("remaining" in each for each in gets(config, 4, "active", "p0", "p1"))


def test_active_and_aggregator_read_out_of_recoverable_masks_below_all() -> None:
    scheme = "plain + recoverable masks"
    config = config_of("apfed_r", scheme, ["secure_sum.threshold=3"])
    assert "out of two sums" in gets(config, 4, "active", "aggregator")[0]
    assert not any("read" in each for each in gets(config, 3, "active", "aggregator"))


@pytest.mark.parametrize(
    ("threshold", "passives", "helping", "reads"),
    [
        (3, 4, 1, False),
        (3, 4, 2, True),
        (3, 5, 1, True),
        (4, 5, 2, False),
        (4, 5, 3, True),
    ],
)
def test_recoverable_masks_fall_to_passives_beyond_the_bound(
    threshold: int, passives: int, helping: int, reads: bool
) -> None:
    scheme = "plain + recoverable masks"
    config = config_of("apfed_r", scheme, [f"secure_sum.threshold={threshold}"])
    found = gets(config, passives, "aggregator", *(f"p{at}" for at in range(helping)))
    assert any(each.startswith("read ") for each in found) == reads


@pytest.mark.parametrize("other", ["active", "p0", "aggregator"])
def test_a_dealer_of_ids_works_with_nobody(other: str) -> None:
    config = config_of("apfed_r", "plain + pairwise masks", ["alignment.dealer=true"])
    assert "read which IDs" in gets(config, 2, "dealer", other)[0]


@pytest.mark.parametrize(
    ("pair", "reads"),
    [
        (("aggregator", "dealer"), "exactly"),
        (("active", "aggregator"), "every passive's rows"),
        (("p0", "aggregator"), "every other party's rows"),
        (("active", "dealer"), ""),
        (("p0", "dealer"), ""),
    ],
)
def test_pairs_where_tables_are_decomposed(pair: tuple[str, str], reads: str) -> None:
    found = gets(config_of("vfedtrans"), 2, *pair)
    assert (reads in found[0]) if reads else found == []


# Those without whose epsilon there is no run are of single answers.
ALIGNING = [
    name
    for name, of in METHODS.items()
    if of.public_facts.needs_alignment
    and of.public_facts.vote_protocol not in ("randomised", "count", "encrypted")
]


@pytest.mark.parametrize("method", ALIGNING)
def test_single_parties_and_strangers_are_no_conflict(method: str) -> None:
    config = config_of(method)
    roles = assign_roles(METHODS[config.method.name], config, "active", ["p0", "p1", "p2"])
    assert all(gets(config, 3, name) == [] for name in roles)
    assert [gets(config, 3, *pair) for pair in combinations(("p0", "p1", "p2"), 2)] == [[]] * 3


def test_facts_are_those_of_the_run() -> None:
    facts = list_facts(config_of("apfed_r", "ckks"), 3)
    assert {"sum ckks", "M >= 2", "M >= 3", "gradients are summed"} <= facts
    assert "a dealer aligns" not in facts
    assert "M = 2" not in facts


@pytest.mark.parametrize(("settings", "reads"), [((), True), (("alignment.dealer=true",), False)])
def test_the_first_passive_stands_in_for_a_dealer(settings: Sequence[str], reads: bool) -> None:
    hidden = ["alignment.pairwise_overlaps=hidden", *settings]
    config = config_of("apfed_r", "plain + pairwise masks", hidden)
    said = "read which of the active's people each other passive knows"
    assert (said in gets(config, 3, "active", "p0")) is reads
    assert said not in gets(config, 3, "active", "p1", "p2")
    assert said not in gets(config, 1, "active", "p0")
