"""Aligning tables by IDs as people have them."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from apfed_protocols import psi
from apfed_protocols.errors import DataError, LocalProtocolError
from apfed_protocols.ids import IdColumn, IdNormalisation
from tests.with_crypten import usable

THREE = {"a": [5, 3, 9, 1, 7], "b": [7, 8, 9, 5], "c": [0, 9, 7, 5, 4]}


def pairs(rows: Mapping[str, NDArray[np.int64]]) -> list[tuple[int, ...]]:
    return sorted(zip(*(column.tolist() for column in rows.values()), strict=True))


def match(left: IdColumn, right: IdColumn, **rules: Any) -> list[tuple[int, ...]]:
    ids = {"a": left, "b": right}
    return pairs(psi.align(ids, hub="a", minimum_rows=1, normalisation=IdNormalisation(**rules)))


@pytest.mark.parametrize("protocol", ["auto", *usable(psi.SET_INTERSECTIONS)])
def test_every_protocol_aligns(protocol: psi.IntersectionName) -> None:
    rows = psi.align(THREE, hub="a", protocol=protocol)
    assert list(rows) == ["a", "b", "c"]
    assert pairs(rows) == [(0, 3, 3), (2, 2, 1), (4, 0, 2)]
    assert all(column.dtype == np.int64 for column in rows.values())
    with pytest.raises(DataError, match=r"minimum of 4.*Rows by party: a 5, b 4, c 5"):
        psi.align(THREE, hub="a", protocol=protocol, minimum_rows=4)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        pytest.param(["1", "2"], [2, 3], [(1, 0)], id="texts and integers"),
        pytest.param(["01"], [1, "01"], [(0, 1)], id="a zero before"),
        pytest.param([b"x", b"y"], ["y"], [(1, 0)], id="bytes and texts"),
        pytest.param(np.array([4, 5]), ["5"], [(1, 0)], id="an array of integers"),
        pytest.param(np.array(["u", "v"]), ["v", "u"], [(0, 1), (1, 0)], id="an array of texts"),
        pytest.param([" a ", "b"], ["a"], [(0, 0)], id="blanks"),
        pytest.param(["e\u0301"], ["\u00e9"], [(0, 0)], id="accents"),
        pytest.param(["A", "a"], ["a"], [(1, 0)], id="capitals"),
        pytest.param(
            [("ab", "c"), ("a", "bc")],
            [("a", "bc"), ("ab", "c")],
            [(0, 1), (1, 0)],
            id="two columns",
        ),
        pytest.param(
            [("x", 1), ("x", 2.0)],
            [["x", "1"], ["x", "2"]],
            [(0, 0), (1, 1)],
            id="columns of numbers",
        ),
        pytest.param(
            [1.0, 2.5 - 0.5], {2: "two", 3: "three"}.keys(), [(1, 0)], id="floats and keys"
        ),
        pytest.param((one for one in "ab"), ["b"], [(1, 0)], id="a generator"),
        pytest.param(range(3), (2, 9), [(2, 0)], id="a range and a tuple"),
        pytest.param(
            [("a|b", "c"), ("a", "b|c")],
            [("a", "b|c"), ("a|b", "c")],
            [(0, 1), (1, 0)],
            id="separators",
        ),
        pytest.param(
            [-1, 2**64], np.array(["-1", str(2**64)]), [(0, 0), (1, 1)], id="large integers"
        ),
        pytest.param([10**4000 - 1], ["9" * 4000], [(0, 0)], id="many digits"),
        pytest.param(["a\0", "a", "\0"], ["\0", "a"], [(1, 1), (2, 0)], id="zeros"),
        pytest.param(
            ["a" * 10**6], ["a" * (10**6 + 1), "a" * 10**6], [(0, 1)], id="a million characters"
        ),
        pytest.param(
            np.array([1, 2], np.int8),
            np.array([2], np.uint64),
            [(1, 0)],
            id="arrays of other widths",
        ),
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
    assert {rules.normalise_text(text) for text in ("007", " 7", "+7", "7.0", "7.", "7")} == {"7"}
    kept = ["7.5", "7e0", "0x7", "7-", "\u0667", "", "1" * 5000]
    assert [rules.normalise_text(text) for text in kept] == kept
    assert (
        rules.normalise_text("-0"),
        rules.normalise_text("-07"),
        rules.normalise_text("007\x1f08"),
    ) == ("0", "-7", "7\x1f8")
    assert IdNormalisation().normalise_text("007") == "007"


def test_dates_are_one_id_in_every_agreed_form() -> None:
    rules = IdNormalisation(date_formats=("%d.%m.%Y", "%m/%d/%Y"))
    written = ("31.1.2026", "31.01.2026", "1/31/2026", "2026-01-31")
    assert {rules.normalise_text(text) for text in written} == {"2026-01-31"}
    kept = ["31.2.2026", "31-1-2026", "31.1.26", "a 31.1.2026"]
    assert [rules.normalise_text(text) for text in kept] == kept


@pytest.mark.parametrize(
    "form",
    ["%d.%m", "%d%m%Y", "%d.%m.%y", "%d.%m.%Y %H", "%Y-%d-%m", "%d.%d.%m.%Y", "", "%d1%m2%Y"],
)
def test_ambiguous_formats_of_dates_are_refused(form: str) -> None:
    with pytest.raises(LocalProtocolError, match="date_formats"):
        IdNormalisation(date_formats=(form,))


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(max_size=8) | st.from_regex(r"[+-]?[0-9]{1,4}[./-]?[0-9]{0,2}[./-]?[0-9]{0,4}"),
    fold=st.booleans(),
    nfc=st.booleans(),
    strip=st.booleans(),
    numbers=st.booleans(),
    dates=st.sampled_from([(), ("%d.%m.%Y",), ("%Y/%m/%d", "%m-%d-%Y")]),
)
def test_normalising_twice_changes_nothing(
    text: str, fold: bool, nfc: bool, strip: bool, numbers: bool, dates: tuple[str, ...]
) -> None:
    rules = IdNormalisation(
        case_fold=fold, unicode_nfc=nfc, strip=strip, whole_numbers=numbers, date_formats=dates
    )
    assert rules.normalise_text(rules.normalise_text(text)) == rules.normalise_text(text)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        pytest.param(
            ["a", "b ", " b"],
            r"shop has 1 repeated ID\(s\), in row\(s\) 2 \(as 1\); .*strip=True",
            id="repeated after stripping",
        ),
        pytest.param(
            ["a", "1", 1],
            r"shop has 1 repeated ID\(s\), in row\(s\) 2",
            id="repeated as another type",
        ),
        pytest.param(
            ["a", " ", None, ""],
            r"shop: its ID column is empty in 3 rows, first in rows 1, 2, 3 ",
            id="empty",
        ),
        pytest.param(
            [("", None), ("a", "b")],
            r"shop: its ID column is empty in 1 rows, first in row 0 ",
            id="empty columns",
        ),
        pytest.param(
            ["a", "\ud800"],
            r"holds text that is not valid Unicode in 1 rows, first in row 1 ",
            id="no Unicode",
        ),
        pytest.param(
            ["a", -(10**5000)],
            r"more than 4000 digits in 1 rows, first in row 1 \(from 0\)",
            id="many digits",
        ),
        pytest.param(
            ["a", tuple(range(2**16))],
            "shop, row 1: an ID of 65536 columns, at most 65535",
            id="many columns",
        ),
        pytest.param("abc", "shop: its ID column is of type str; give a list", id="a text"),
        pytest.param(
            np.array(3), "shop: its ID column is of type int; give a list", id="an array of no rank"
        ),
        pytest.param(3, "shop: its ID column is of type int; give a list", id="a number"),
    ],
)
def test_unfit_ids_name_party_and_rows_only(ids: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        psi.align({"bank": ["a", "b"], "shop": ids}, hub="bank")


NOBODY = "a hub and at least one other party; the hub is 'a'"


@pytest.mark.parametrize(
    ("ids", "more", "says"),
    [
        pytest.param(
            {"a": [1], "b": range(4)},
            {"maximum_ids": 3},
            "b has 4 IDs, .* agreed on at most 3",
            id="too many",
        ),
        pytest.param({}, {}, NOBODY, id="nobody"),
        pytest.param({"a": [1]}, {}, NOBODY, id="a hub alone"),
        pytest.param({"b": [1], "c": [1]}, {}, NOBODY, id="no hub"),
        pytest.param({"a": [1], "": [1]}, {}, "a name for every party", id="no name"),
        pytest.param({"a": [1], "x" * 256: [1]}, {}, "a name for every party", id="a long name"),
        pytest.param({"a": [1], 7: [1]}, {}, "a name for every party", id="a number as name"),
        pytest.param(
            THREE,
            {"protocol": "fast"},
            "no set intersection is called 'fast'; there are: auto, circuit",
            id="unknown protocol",
        ),
    ],
)
def test_what_cannot_be_aligned_says_why(ids: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        psi.align(ids, hub="a", **more)


def test_an_empty_intersection_says_what_to_check() -> None:
    with pytest.raises(DataError) as caught:
        psi.align({"a": ["x", "y"], "b": ["X", "Y", "Z"]}, hub="a", minimum_rows=1)
    text = str(caught.value)
    parts = ("minimum of 1", "0 with b", "a 2, b 3", "same ID column", "case_fold=False")
    assert [part for part in parts if part not in text] == []


def test_aligning_needs_neither_torch_nor_pandas_nor_pydantic() -> None:
    script = (
        "import sys\nfrom apfed_protocols import align\n"
        "assert len(align({'a': [1, 2], 'b': [2, 1]}, hub='a')['a']) == 2\n"
        "other = {'torch', 'pandas', 'pydantic', 'secure_apfed'}\n"
        "raise SystemExit(str(other & set(sys.modules) or ''))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.stderr.strip() == b""


@pytest.mark.parametrize(
    ("sizes", "protocol"),
    [
        pytest.param({"a": 3, "b": 20_000}, "ecdh", id="few rows"),
        pytest.param({"a": 3, "b": 20_001}, "opprf", id="a row more"),
        pytest.param({"a": 3, "b": 3, "c": 3}, "opprf", id="three parties"),
    ],
)
def test_auto_hides_pairwise_overlaps_and_is_fast(sizes: dict[str, int], protocol: str) -> None:
    assert psi.choose_protocol(sizes) == protocol


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        pytest.param(
            {"case_fold": "yes"},
            "case_fold: expected True or False, got 'yes'",
            id="text for a truth",
        ),
        pytest.param(
            {"date_formats": "%d.%m.%Y"}, "date_formats takes several", id="text for texts"
        ),
    ],
)
def test_rules_of_another_type_are_refused(rules: dict[str, Any], says: str) -> None:
    with pytest.raises(LocalProtocolError, match=says):
        IdNormalisation(**rules)


@pytest.mark.parametrize("protocol", usable(psi.SET_INTERSECTIONS))
def test_rows_for_the_hub_alone(protocol: psi.IntersectionName) -> None:
    rows = psi.align(THREE, hub="b", protocol=protocol, hub_only=True)
    assert {party: sorted(found.tolist()) for party, found in rows.items()} == {"b": [0, 2, 3]}


def test_counting_opens_a_number() -> None:
    assert psi.count_common(THREE, hub="a") == 3
    assert psi.count_common({"a": [1, 2, 3], "b": [3, 2]}, hub="a") == 2
    with pytest.raises(DataError, match="IDs common to two parties, here are 3; circuit"):
        psi.count_common(THREE, hub="a", protocol="ecdh")
    with pytest.raises(DataError, match=r"minimum of 4.*Rows by party"):
        psi.count_common(THREE, hub="a", protocol="circuit", minimum_rows=4)


def test_shares_of_membership() -> None:
    shared = psi.share_membership(THREE, hub="a")
    places = shared["a"].row_of_bin
    assert places is not None
    common = np.bitwise_xor.reduce([part.shares for part in shared.values()])
    assert sorted(places[common].tolist()) == [0, 2, 4]
    with pytest.raises(DataError, match="minimum of 4"):
        psi.share_membership(THREE, hub="a", minimum_rows=4)
