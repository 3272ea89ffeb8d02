"""Alignment as settings say it: what they take and refuse, and one party's end made of them."""

import pytest
from pydantic import ValidationError

from apfed_protocols.conversation import converse
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.ids import IdNormalisation
from apfed_protocols.psi.interface import Aligner, IntersectionAgreement
from secure_apfed.alignment import canonical_ids, check_alignment, intersection, most_guesses
from secure_apfed.alignment.ids import id_rules
from secure_apfed.config.file import load_config_text
from secure_apfed.errors import ConfigError
from secure_apfed.settings.alignment import AlignmentSettings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"minimum_rows": 0}, "greater than or equal to 1"),
        ({"minimum_rows": 9, "maximum_ids": 8}, "above maximum_ids"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"protocoll": "ecdh"}, "Extra inputs"),
    ],
)
def test_unfit_settings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlignmentSettings.model_validate(fields)


def ends_of(one: AlignmentSettings, other: AlignmentSettings) -> tuple[Aligner, Aligner]:
    """A hub and a member that hold these."""
    hub = intersection(one, session="s").hub("a", ["b"], canonical_ids("a", ["X", "y"], one))
    ids = canonical_ids("b", ["y", "x"], other)
    return hub, intersection(other, session="s").member("b", "a", ids)


def test_rules_hold_in_any_order_and_are_one_for_all_parties() -> None:
    said = [("strip", "case_fold"), ("case_fold", "strip", "strip")]
    one, other = (
        AlignmentSettings.model_validate({"normalisation": rules, "threads": 2}) for rules in said
    )
    assert one.terms() == other.terms()
    assert id_rules(one) == IdNormalisation(unicode_nfc=False, case_fold=True)
    hub, member = ends_of(one, other.model_copy(update={"threads": 1}))  # each chooses for itself
    converse({"a": hub, "b": member})
    assert sorted(zip(hub.rows, member.rows, strict=True)) == [(0, 1), (1, 0)]
    hub, member = ends_of(one, AlignmentSettings())
    with pytest.raises(RemoteProtocolError, match=r"another agreement; .*normalisation"):
        converse({"a": hub, "b": member})


def test_defaults_are_those_of_the_protocols() -> None:
    settings, agreement = AlignmentSettings(), IntersectionAgreement(session="s")
    assert id_rules(settings) == IdNormalisation()
    assert settings.maximum_ids == agreement.maximum_ids
    assert settings.minimum_rows == agreement.minimum_rows


@pytest.mark.parametrize(
    ("alignment", "says"),
    [
        ("{protocol: edch}", r"run.yaml:4: alignment.protocol: no set .* 'edch'; there are: auto"),
        ("{protocol: vole, pairwise_overlaps: hidden}", "run.yaml:4: alignment: pairwise_overlaps"),
        ("{date_formats: ['%d%m%Y']}", r"run.yaml:4: alignment.date_formats: '%d%m%Y' must have"),
        ("{normalisation: [case_fodl]}", "did you mean 'case_fold'"),
        ("{normalisation: {case_fold: true}}", r"alignment.normalisation: expected a list"),
    ],
)  # fmt: skip
def test_a_run_says_where_its_alignment_is_wrong(alignment: str, says: str) -> None:
    text = f"name: run\nmethod: apfed_c\nguard: {{mechanism: none}}\nalignment: {alignment}\n"
    with pytest.raises(ConfigError, match=says):
        load_config_text(text + "data: {dataset: digits}\n", source="run.yaml")


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({}, "ecdh"),
        ({"dealer": True}, "vole"),
        ({"dealer": True, "pairwise_overlaps": "hidden"}, "opprf"),
        ({"protocol": "circuit", "pairwise_overlaps": "hidden"}, "circuit"),
    ],
)
def test_a_run_takes_what_its_settings_allow(given: dict[str, object], backend: str) -> None:
    settings = AlignmentSettings.model_validate(given)
    assert settings.backend == backend
    assert settings.terms() == AlignmentSettings(protocol=backend).terms()


@pytest.mark.parametrize(
    ("protocol", "most", "hub", "member"),
    [
        ("ecdh", 10**7, 16 * 630_988, 16 * 630_988),
        ("vole", 2, 91, 2),
        ("opprf", 1000, 1408, 3 * 1388),
        ("circuit", 1000, 1408, 22 * 1408),
    ],
)
def test_a_size_limit_bounds_the_guesses_of_who_deviates(
    protocol: str, most: int, hub: int, member: int
) -> None:
    guesses = most_guesses(AlignmentSettings(protocol=protocol, maximum_ids=most))
    assert (guesses.hub, guesses.member) == (hub, member)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "takes a dealer"),
        ({"protocol": "vole"}, "the active learns them with mode: all and protocol: vole"),
        ({"dealer": True, "mode": "pairwise"}, "the active learns them with mode: pairwise"),
    ],
)
def test_what_would_show_hidden_overlaps_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_alignment(AlignmentSettings.model_validate({"pairwise_overlaps": "hidden", **given}))
