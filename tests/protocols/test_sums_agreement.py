"""What parties fix: every field has its type and range, and equal agreements one digest."""

from typing import Any

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums import StepBinding, SumAgreement
from tests.contracts.sum_parties import agreement, binding


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("contributors", ["a", "b"]),
        ("contributors", "ab"),
        ("contributors", None),
        ("bits", 16.0),
        ("bits", np.bool_(True)),
        ("bits", True),
        ("bits", None),
        ("allow_single", 1),
        ("allow_single", "no"),
        ("allow_single", None),
        ("threshold", 2.0),
        ("threshold", True),
        ("noise", 5.0),
        ("noise", "5"),
    ],
)
def test_a_field_of_another_type_is_refused(field: str, value: Any) -> None:
    with pytest.raises(LocalProtocolError, match=f"{field} of SumAgreement is of type .*, got"):
        agreement(**{field: value})


@pytest.mark.parametrize("clip_norm", [float("nan"), float("inf"), 0.0, -1.0, 1e31, 1e-31, 10**400])
def test_a_clip_norm_out_of_range_is_refused(clip_norm: float) -> None:
    with pytest.raises(LocalProtocolError, match=r"clip_norm lies in 1e-30\.\.1e\+30"):
        agreement(clip_norm=clip_norm)


@pytest.mark.parametrize("clip_norm", ["1", None, 1j])
def test_a_clip_norm_is_a_number(clip_norm: Any) -> None:
    with pytest.raises(LocalProtocolError, match="clip_norm lies in"):
        agreement(clip_norm=clip_norm)


@pytest.mark.parametrize("name", ["", b"a", 5, None, ["a"], "\ud800", "a" * 256, "é" * 128])
@pytest.mark.parametrize("field", ["session", "receiver", "combiner", "contributors"])
def test_names_are_text_that_frames_can_hold(field: str, name: Any) -> None:
    changes: dict[str, Any] = {field: ("a", name) if field == "contributors" else name}
    with pytest.raises(LocalProtocolError, match="name for every party, text of 1 to 255 bytes"):
        agreement(**changes)


def test_one_contributor_and_one_party_in_two_places_are_refused() -> None:
    for contributors in ((), ("a",)):
        with pytest.raises(LocalProtocolError, match=r"hides nothing: .* or say allow_single"):
            agreement(contributors=contributors)
    with pytest.raises(LocalProtocolError, match=r"over 0 contributor\(s\) hides nothing"):
        agreement(contributors=(), allow_single=True)
    assert agreement(contributors=("a",), allow_single=True).contributors == ("a",)
    for changes in (
        {"contributors": ("a", "a")},
        {"contributors": ("a", "active")},
        {"contributors": ("a", "aggregator")},
        {"combiner": "active"},
    ):
        with pytest.raises(LocalProtocolError, match="the parties of a sum are all different"):
            agreement(**changes)


def test_at_most_1024_contribute() -> None:
    assert len(agreement(1024).contributors) == 1024
    with pytest.raises(LocalProtocolError, match="at most 1024 contributors, got 1025"):
        agreement(1025)


def test_equal_agreements_have_one_digest_and_others_another() -> None:
    usual = agreement()
    for clip_norm in (1, 1.0, np.float64(1)):
        assert agreement(clip_norm=clip_norm) == usual
        assert agreement(clip_norm=clip_norm).digest == usual.digest
    others: list[dict[str, Any]] = [
        {"session": "other"},
        {"receiver": "other"},
        {"combiner": "other"},
        {"contributors": ("passive_2", "passive_1", "passive_3")},
        {"clip_norm": np.nextafter(1.0, 2.0)},
        {"bits": 15},
        {"allow_single": True},
        {"threshold": 3},
        {"noise": 1},
    ]
    digests = {agreement(**changes).digest for changes in others} | {usual.digest}
    assert len(digests) == len(others) + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 1.0}, "step of StepBinding is of type int, got 1.0"),
        ({"step": True}, "step of StepBinding is of type int, got True"),
        ({"step": np.int64(-1)}, "a number from 0 to"),
        ({"step": -1}, "a number from 0 to"),
        ({"step": 2**63}, "a number from 0 to"),
        ({"rows": "r" * 32}, "rows of StepBinding is of type bytes"),
        ({"rows": bytes(31)}, "rows is a digest of 32 bytes, got 31"),
        ({"message": bytearray(32)}, "message of StepBinding is of type bytes"),
        ({"message": b""}, "message is a digest of 32 bytes, got 0"),
        ({"session": b"test"}, "a sum needs a session name"),
        ({"session": ""}, "a sum needs a session name"),
    ],
)
def test_a_binding_is_checked_on_construction(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LocalProtocolError, match=message):
        StepBinding(**{**vars(binding(1)), **changes})


def test_every_field_of_a_binding_counts() -> None:
    usual: dict[str, Any] = {"session": "s", "step": 1, "rows": b"r", "message": b"m"}
    digests = {StepBinding.of(**usual).digest}
    for field, other in (("session", "t"), ("step", 2), ("rows", b"x"), ("message", b"x")):
        digests.add(StepBinding.of(**{**usual, field: other}).digest)
    assert len(digests) == 5
    swapped = StepBinding.of("s", 1, rows=b"m", message=b"r").digest
    assert swapped != StepBinding.of("s", 1, rows=b"r", message=b"m").digest


def test_an_agreement_is_public_and_shows_itself() -> None:
    assert "clip_norm=1.0" in repr(agreement())
    assert isinstance(agreement(), SumAgreement)
