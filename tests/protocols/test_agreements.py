"""What parties fix: every field has its type and range, and its part in the digest."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.products import SumOfProducts
from apfed_protocols.psi.interface import IntersectionAgreement, Output
from apfed_protocols.sums import StepBinding
from tests.contracts import product_parties
from tests.contracts.sum_parties import agreement, binding
from tests.refusals import list_unrefused

Cases = list[dict[str, Any]]


def decomposition() -> Any:
    pytest.importorskip("scipy")
    from tests.protocols import test_svd

    return test_svd.agreement()


USUAL: dict[str, Callable[[], Any]] = {
    "sum": agreement,
    "binding": partial(binding, 1),
    "products": product_parties.agreement,
    "decomposition": decomposition,
    "intersection": partial(IntersectionAgreement, session="s", sizes={"p": 1, "q": 2}),
}
OTHERS: dict[str, dict[str, Any]] = {
    "sum": {
        "session": "other",
        "receiver": "other",
        "aggregator": "other",
        "contributors": ("passive_2", "passive_1", "passive_3"),
        "clip_norm": np.nextafter(1.0, 2.0),
        "bits": 15,
        "allow_single": True,
        "threshold": 3,
        "noise": 1,
    },
    "binding": {"session": "t", "step": 2, "rows": b"x" * 32, "message": b"x" * 32},
    "products": {
        "session": "x",
        "receiver": "x",
        "aggregator": "x",
        "contributors": ("x", "y"),
        "people": 31,
        "columns": 4,
        "labelled": 5,
        "bits": 15,
        "row_bound": 2.0,
        "noise": 9,
        "security": 41,
        "allow_single": True,
        "candidates": 2,
    },
    "decomposition": {
        "session": "x",
        "server": "x",
        "dealer": "x",
        "owners": ("active", "x"),
        "features": (4, 3),
        "receiver": "p1",
        "vectors": 2,
        "mask_rows": 9,
        "max_rows": 9,
    },
    "intersection": {
        "session": "t",
        "minimum_rows": 3,
        "maximum_ids": 9,
        "encoding": "x",
        "dealer": "x",
        "output": Output.SIZE,
        "sizes": {"p": 2, "q": 1},
    },
}


def digest_of(agreed: Any) -> bytes:
    products = hasattr(agreed, "labelled")
    found: bytes = SumOfProducts(agreed).make_frames().fingerprint if products else agreed.digest
    return found


@pytest.mark.parametrize("subject", USUAL)
def test_every_field_is_in_the_digest(subject: str) -> None:
    usual = USUAL[subject]()
    assert set(OTHERS[subject]) == {field.name for field in fields(usual)}
    changed = [replace(usual, **{name: other}) for name, other in OTHERS[subject].items()]
    assert len({digest_of(agreed) for agreed in (usual, *changed)}) == 1 + len(changed)


def test_other_values_have_other_digests_and_equal_ones_the_same() -> None:
    usual = agreement()
    equal = [agreement(clip_norm=clip_norm) for clip_norm in (1, 1.0, np.float64(1))]
    assert equal == [usual] * 3
    assert {agreed.digest for agreed in equal} == {usual.digest}
    changed = [agreement(**{name: k}) for name in ("noise", "threshold") for k in (1, 2)]
    assert len({agreed.digest for agreed in (usual, *changed)}) == 5
    sets = [IntersectionAgreement(session="s", output=output) for output in Output]
    turned = IntersectionAgreement(session="s", sizes={"q": 2, "p": 1})
    assert turned.digest == USUAL["intersection"]().digest
    fewer = IntersectionAgreement(session="s", sizes={"p": 1})
    assert len({agreed.digest for agreed in (*sets, turned, fewer)}) == len(Output) + 2
    swapped = StepBinding.from_contents("s", 1, rows=b"m", message=b"r").digest
    assert swapped != StepBinding.from_contents("s", 1, rows=b"r", message=b"m").digest


def each(field: str, *values: Any) -> Cases:
    return [{field: value} for value in values]


NAMES = ("", b"a", 5, None, ["a"], "\ud800", "a" * 256, "é" * 128)
REFUSED: dict[str, dict[str, Cases]] = {
    "sum": {
        "{} of SumAgreement is of type .*, got": [
            *each("bits", 16.0, np.bool_(True), True, None),
            *each("allow_single", 1, "no", None),
            *each("threshold", 2.0, True),
            *each("noise", 5.0, "5"),
        ],
        "contributors are several names, got": each("contributors", "ab", None, 5),
        r"{} lies in 1e-30\.\.1e\+30": each(
            "clip_norm", float("nan"), float("inf"), 0.0, -1.0, 1e31, 1e-31, 10**400, "1", None, 1j
        ),
        "name for every party, text of 1 to 255 bytes": [
            *(
                case
                for role in ("session", "receiver", "aggregator")
                for case in each(role, *NAMES)
            ),
            *each("contributors", *(("a", name) for name in NAMES)),
        ],
        "{} lies in 1..3, .*got": each("threshold", 0, -1, 4),
        "{} lies in": [*each("noise", 0, -1, 2**24 + 1), *each("bits", 1, 25)],
        "hides nothing: .* or say allow_single": each("contributors", (), ("a",)),
        r"over 0 contributor\(s\) hides nothing": [{"contributors": (), "allow_single": True}],
        "at most 1024 contributors, got 1025": each("contributors", tuple(map(str, range(1025)))),
        "the parties of a sum are all different": [
            *each("contributors", ("a", "a"), ("a", "active"), ("a", "aggregator")),
        ],
    },
    "binding": {
        "step of StepBinding is of type int, got 1.0": each("step", 1.0),
        "step of StepBinding is of type int, got True": each("step", True),
        r"a number from 0 to 2\^63 - 1, got -1": each("step", np.int64(-1)),
        "a number from 0 to .* got 9223372036854775808": each("step", 2**63),
        "rows of StepBinding is of type bytes": each("rows", "r" * 32),
        "rows is a digest of 32 bytes, got 31": each("rows", bytes(31)),
        "message of StepBinding is of type bytes": each("message", bytearray(32)),
        "message is a digest of 32 bytes, got 0": each("message", b""),
        "a sum needs a session name .*got b'test'": each("session", b"test"),
        "a sum needs a session name .*got ''": each("session", ""),
    },
    "products": {
        "{}": [
            *each("people", 0, 2.0),
            {"columns": 513},
            {"labelled": 0},
            {"bits": 25},
            {"noise": 0},
            *each("security", 10, True),
            *each("candidates", 1, 1025, True, 2.0),
        ],
        "clip_norm": each("row_bound", 0.0),
        "hides nothing": each("contributors", (), ("a",)),
    },
    "decomposition": {
        "two tables or more": [{"owners": ("active",), "features": (3,)}],
        "one of their owners receives it": each("receiver", "p2"),
        "are all different": each("server", "p1"),
        "text of 1 to 255 bytes": each("dealer", ""),
        "1 feature or more": each("features", (3,), (3, 0)),
        "are tuples": each("features", [3, 4]),
        "at most 8192": each("features", (3, 2**13)),
        "no fewer than the 8": each("vectors", 8),
        r"vectors is a number in 1..8192": each("vectors", 0),
        r"mask_rows is a number in 2..8192": each("mask_rows", 1),
        "max_rows is a number": each("max_rows", True),
    },
    "intersection": {
        "session name": each("session", ""),
        "maximum_ids lies in": each("maximum_ids", 0, 2**32),
        "minimum_rows lies in": [{"minimum_rows": -1}, {"minimum_rows": 6, "maximum_ids": 5}],
        r"sizes lie in 0..maximum_ids \(9\)": [
            {"maximum_ids": 9, "sizes": {"p": size}} for size in (-1, 10)
        ],
    },
}


@pytest.mark.parametrize(
    ("subject", "message", "cases"),
    [
        (what, message, cases)
        for what, by_message in REFUSED.items()
        for message, cases in by_message.items()
    ],
)
def test_what_parties_cannot_fix_is_refused(subject: str, message: str, cases: Cases) -> None:
    usual = USUAL[subject]()
    change = lambda changes: replace(usual, **changes)  # noqa: E731
    refused = [(message.format(*changes), changes) for changes in cases]
    assert list_unrefused(LocalProtocolError, change, refused) == []


def test_one_contributes_by_name_only_and_1024_may() -> None:
    assert agreement(contributors=("a",), allow_single=True).contributors == ("a",)
    assert len(agreement(1024).contributors) == 1024
