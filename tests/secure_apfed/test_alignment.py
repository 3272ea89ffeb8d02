"""Aligning tables by IDs as people have them."""

import doctest
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pydantic import ValidationError

import secure_apfed.alignment.tables
from apfed_protocols.conversation import converse
from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS
from secure_apfed.alignment import (
    AlignmentSettings,
    IdColumn,
    IdNormalisation,
    align,
    canonical_ids,
    choose_protocol,
    count_common,
    intersection,
    most_guesses,
    share_membership,
)
from secure_apfed.errors import DataError
from tests.with_crypten import usable

ANY_SIZE = AlignmentSettings(minimum_rows=1)


def pairs(rows: Mapping[str, NDArray[np.int64]]) -> list[tuple[int, ...]]:
    return sorted(zip(*(column.tolist() for column in rows.values()), strict=True))


def match(left: IdColumn, right: IdColumn, **rules: bool) -> list[tuple[int, ...]]:
    chosen = AlignmentSettings(minimum_rows=1, normalisation=IdNormalisation.model_validate(rules))
    return pairs(align({"a": left, "b": right}, hub="a", settings=chosen))


def test_the_example_of_the_module_runs() -> None:
    result = doctest.testmod(secure_apfed.alignment.tables)
    assert (result.failed, result.attempted) == (0, 3)


def test_rows_of_three_parties_name_the_same_ids() -> None:
    ids = {"a": [5, 3, 9, 1, 7], "b": [7, 8, 9, 5], "c": [0, 9, 7, 5, 4]}
    rows = align(ids, hub="b")
    assert list(rows) == ["a", "b", "c"]
    chosen = [[ids[party][row] for row in rows[party]] for party in ids]
    assert chosen[0] == chosen[1] == chosen[2]
    assert sorted(chosen[0]) == [5, 7, 9]
    assert all(column.dtype == np.int64 for column in rows.values())


@pytest.mark.parametrize("protocol", usable(SET_INTERSECTIONS))
def test_every_protocol_aligns(protocol: str) -> None:
    ids = {"a": [5, 3, 9, 1, 7], "b": [7, 8, 9, 5], "c": [0, 9, 7, 5, 4]}
    rows = align(ids, hub="a", settings=AlignmentSettings(protocol=protocol))
    assert pairs(rows) == [(0, 3, 3), (2, 2, 1), (4, 0, 2)]
    with pytest.raises(DataError, match=r"minimum of 4.*Rows by party: a 5, b 4, c 5"):
        align(ids, hub="a", settings=AlignmentSettings(protocol=protocol, minimum_rows=4))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (["1", "2"], [2, 3], [(1, 0)]),
        (["01"], [1, "01"], [(0, 1)]),
        ([b"x", b"y"], ["y"], [(1, 0)]),
        (np.array([4, 5]), ["5"], [(1, 0)]),
        (np.array(["u", "v"]), pd.Series(["v", "u"]), [(0, 1), (1, 0)]),
        ([" a ", "b"], ["a"], [(0, 0)]),
        (["e\u0301"], ["\u00e9"], [(0, 0)]),
        (["A", "a"], ["a"], [(1, 0)]),
        ([("ab", "c"), ("a", "bc")], [("a", "bc"), ("ab", "c")], [(0, 1), (1, 0)]),
        ([("x", 1), ("x", 2.0)], [["x", "1"], ["x", "2"]], [(0, 0), (1, 1)]),
        ([1.0, 2.5 - 0.5], {2: "two", 3: "three"}, [(1, 0)]),
        ((one for one in "ab"), ["b"], [(1, 0)]),
        (
            pd.DataFrame({"name": ["ann", "bob"], "born": [1990, 1985]}),
            [("bob", 1985), ("ann", 1991)],
            [(1, 0)],
        ),
        (pd.DataFrame({"id": [3, 4]}), np.array([4]), [(1, 0)]),
        (range(3), (2, 9), [(2, 0)]),
        ([("a|b", "c"), ("a", "b|c")], [("a", "b|c"), ("a|b", "c")], [(0, 1), (1, 0)]),
        ([-1, 2**64], np.array(["-1", str(2**64)]), [(0, 0), (1, 1)]),
        ([10**4000 - 1], ["9" * 4000], [(0, 0)]),
        (["a\0", "a", "\0"], ["\0", "a"], [(1, 1), (2, 0)]),
        (["a" * 10**6], ["a" * (10**6 + 1), "a" * 10**6], [(0, 1)]),
        (np.array([1, 2], np.int8), np.array([2], np.uint64), [(1, 0)]),
    ],
)
def test_kinds_of_ids(left: IdColumn, right: IdColumn, expected: list[tuple[int, int]]) -> None:
    assert match(left, right) == expected


def test_each_normalisation_rule_can_be_turned() -> None:
    assert match(["STRASSE", "q"], ["straße", "q"], case_fold=True) == [(0, 0), (1, 1)]
    assert match(["STRASSE", "q"], ["straße", "q"]) == [(1, 1)]
    assert match([" a", "q"], ["a", "q"], strip=False) == [(1, 1)]
    assert match(["e\u0301", "q"], ["\u00e9", "q"], unicode_nfc=False) == [(1, 1)]


def test_whole_numbers_are_one_id_in_every_form() -> None:
    rules = IdNormalisation(whole_numbers=True)
    assert {rules.text(text) for text in ("007", " 7", "+7", "7.0", "7.", "7")} == {"7"}
    kept = ["7.5", "7e0", "0x7", "7-", "\u0667", "", "1" * 5000]
    assert [rules.text(text) for text in kept] == kept
    assert (rules.text("-0"), rules.text("-07"), rules.text("007\x1f08")) == ("0", "-7", "7\x1f8")
    assert IdNormalisation().text("007") == "007"


def test_dates_are_one_id_in_every_agreed_form() -> None:
    rules = IdNormalisation(date_formats=("%d.%m.%Y", "%m/%d/%Y"))
    written = ("31.1.2026", "31.01.2026", "1/31/2026", "2026-01-31")
    assert {rules.text(text) for text in written} == {"2026-01-31"}
    kept = ["31.2.2026", "31-1-2026", "31.1.26", "a 31.1.2026"]
    assert [rules.text(text) for text in kept] == kept


@pytest.mark.parametrize(
    "form",
    ["%d.%m", "%d%m%Y", "%d.%m.%y", "%d.%m.%Y %H", "%Y-%d-%m", "%d.%d.%m.%Y", "", "%d1%m2%Y"],
)
def test_ambiguous_formats_of_dates_are_refused(form: str) -> None:
    with pytest.raises(ValidationError, match="date_formats"):
        IdNormalisation(date_formats=(form,))


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=8) | st.from_regex(r"[+-]?[0-9]{1,4}[./-]?[0-9]{0,2}[./-]?[0-9]{0,4}"),
    fold=st.booleans(), nfc=st.booleans(), strip=st.booleans(), numbers=st.booleans(),
    dates=st.sampled_from([(), ("%d.%m.%Y",), ("%Y/%m/%d", "%m-%d-%Y")]),
)  # fmt: skip
def test_normalising_twice_changes_nothing(
    text: str, fold: bool, nfc: bool, strip: bool, numbers: bool, dates: tuple[str, ...]
) -> None:
    rules = IdNormalisation(
        case_fold=fold, unicode_nfc=nfc, strip=strip, whole_numbers=numbers, date_formats=dates
    )
    assert rules.text(rules.text(text)) == rules.text(text)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "b ", " b"], r"shop has 1 repeated ID\(s\), in row\(s\) 2 \(as 1\); .*strip=True"),
        (["a", "1", 1], r"shop has 1 repeated ID\(s\), in row\(s\) 2"),
        (["a", " ", None, ""], r"shop: its ID column is empty in 3 rows, first in rows 1, 2, 3 "),
        ([("", None), ("a", "b")], r"shop: its ID column is empty in 1 rows, first in row 0 "),
        (["a", "\ud800"], r"holds text that is not valid Unicode in 1 rows, first in row 1 "),
        (["a", -(10**5000)], r"more than 4000 digits in 1 rows, first in row 1 \(from 0\)"),
        (["a", tuple(range(2**16))], "shop, row 1: an ID of 65536 columns, at most 65535"),
        ("abc", "shop: its ID column is of type str; give a list"),
        (np.array(3), "shop: its ID column is of type int; give a list"),
        (3, "shop: its ID column is of type int; give a list"),
    ],
)
def test_unfit_ids_name_party_and_rows_only(ids: IdColumn, message: str) -> None:
    with pytest.raises(DataError, match=message):
        align({"bank": ["a", "b"], "shop": ids}, hub="bank")


def test_too_many_ids_are_refused() -> None:
    with pytest.raises(DataError, match="a has 4 IDs, the parties agreed on at most 3"):
        align({"a": range(4), "b": [1]}, hub="b", settings=AlignmentSettings(maximum_ids=3))


def test_an_empty_intersection_says_what_to_check() -> None:
    with pytest.raises(DataError) as caught:
        align({"a": ["x", "y"], "b": ["X", "Y", "Z"]}, hub="a", settings=ANY_SIZE)
    text = str(caught.value)
    for part in ("minimum of 1", "0 with b", "a 2, b 3", "same ID column", "case_fold=False"):
        assert part in text


def test_fewer_rows_than_the_minimum_are_not_opened() -> None:
    with pytest.raises(DataError, match="minimum of 2"):
        align({"a": [1, 2], "b": [2, 3]}, hub="a")
    assert pairs(align({"a": [1, 2], "b": [2, 3]}, hub="a", settings=ANY_SIZE)) == [(1, 0)]


@pytest.mark.parametrize("ids", [{}, {"a": [1]}, {"b": [1], "c": [1]}])
def test_the_hub_and_one_more_party_are_needed(ids: dict[str, Sequence[int]]) -> None:
    with pytest.raises(DataError, match="a hub and at least one other party; the hub is 'a'"):
        align(ids, hub="a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"protocol": "edch"}, "no set intersection is called 'edch'; there are: "),
        ({"minimum_rows": 0}, "greater than or equal to 1"),
        ({"minimum_rows": 9, "maximum_ids": 8}, "above maximum_ids"),
        ({"threads": 0}, "greater than or equal to 1"),
        ({"protocoll": "ecdh"}, "Extra inputs"),
    ],
)
def test_unfit_settings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlignmentSettings.model_validate(fields)


def test_organisations_with_different_normalisation_are_refused() -> None:
    folding = AlignmentSettings(normalisation=IdNormalisation(case_fold=True))
    plain = AlignmentSettings()
    hub = intersection(folding, session="s").hub("a", ["b"], canonical_ids("a", ["X"], folding))
    member = intersection(plain, session="s").member("b", "a", canonical_ids("b", ["x"], plain))
    with pytest.raises(RemoteProtocolError, match=r"another agreement; .*normalisation"):
        converse({"a": hub, "b": member})


def test_the_number_of_threads_is_each_partys_own_choice() -> None:
    one, two = AlignmentSettings(threads=1), AlignmentSettings(threads=2)
    hub = intersection(one, session="s").hub("a", ["b"], canonical_ids("a", ["x", "y"], one))
    member = intersection(two, session="s").member("b", "a", canonical_ids("b", ["y", "x"], two))
    converse({"a": hub, "b": member})
    assert pairs({"a": hub.rows, "b": member.rows}) == [(0, 1), (1, 0)]


def test_aligning_needs_neither_torch_nor_pandas() -> None:
    script = (
        "import sys\nfrom secure_apfed.alignment import align\n"
        "assert len(align({'a': [1, 2], 'b': [2, 1]}, hub='a')['a']) == 2\n"
        "raise SystemExit(str({'torch', 'pandas'} & set(sys.modules) or ''))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.stderr.strip() == b""


THREE = {"a": [5, 3, 9, 1, 7], "b": [7, 8, 9, 5], "c": [0, 9, 7, 5, 4]}


@pytest.mark.parametrize(
    ("sizes", "protocol"),
    [
        ({"a": 3, "b": 20_000}, "ecdh"),
        ({"a": 3, "b": 20_001}, "opprf"),
        ({"a": 3, "b": 3, "c": 3}, "opprf"),
    ],
)
def test_auto_hides_pairwise_overlaps_and_is_fast(sizes: dict[str, int], protocol: str) -> None:
    assert choose_protocol(sizes) == protocol


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
    with pytest.raises(ValidationError, match=says):
        AlignmentSettings.model_validate({"pairwise_overlaps": "hidden", **given})


@pytest.mark.parametrize("backend", ["auto", *usable(SET_INTERSECTIONS), None])
def test_every_backend_gives_the_same_rows(backend: str | None) -> None:
    assert pairs(align(THREE, hub="a", backend=backend)) == [(0, 3, 3), (2, 2, 1), (4, 0, 2)]


def works(backend: str | None, settings: AlignmentSettings | None) -> set[str]:
    seen: set[str] = set()
    ids = {"a": [1, 2], "b": [1, 2]}
    progress = lambda step: seen.add(step.work)  # noqa: E731
    align(ids, hub="a", backend=backend, settings=settings, progress=progress)
    return seen


def test_the_backend_argument_goes_before_the_settings_and_these_before_auto() -> None:
    circuit = AlignmentSettings(protocol="circuit")
    assert works(None, circuit) == works("circuit", None) == {"comparing bins"}
    ecdh = works("ecdh", circuit)
    assert "blinding its own IDs" in ecdh
    assert works("auto", circuit) == works(None, None) == ecdh


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(DataError, match="no backend is called 'fast'; there are: auto, circuit"):
        align(THREE, hub="a", backend="fast")


def test_rows_for_the_hub_alone() -> None:
    for backend in usable(SET_INTERSECTIONS):
        rows = align(THREE, hub="b", backend=backend, hub_only=True)
        assert {party: sorted(found.tolist()) for party, found in rows.items()} == {"b": [0, 2, 3]}


def test_counting_opens_a_number() -> None:
    assert count_common(THREE, hub="a") == 3
    assert count_common({"a": [1, 2, 3], "b": [3, 2]}, hub="a") == 2
    with pytest.raises(DataError, match="ecdh counts the IDs common to two parties"):
        count_common(THREE, hub="a", backend="ecdh")
    with pytest.raises(DataError, match=r"minimum of 4.*Rows by party"):
        count_common(THREE, hub="a", settings=AlignmentSettings(protocol="circuit", minimum_rows=4))


def test_shares_of_membership() -> None:
    shared = share_membership(THREE, hub="a")
    places = shared["a"].row_of_place
    assert places is not None
    common = np.bitwise_xor.reduce([part.shares for part in shared.values()])
    assert sorted(places[common].tolist()) == [0, 2, 4]
    with pytest.raises(DataError, match="minimum of 4"):
        share_membership(THREE, hub="a", settings=AlignmentSettings(minimum_rows=4))
