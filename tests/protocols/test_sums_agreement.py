"""What parties fix: every field has its type and range, and equal agreements one digest."""

from typing import Any

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.sums import StepBinding
from tests.contracts.sum_parties import agreement, binding

NAMES = ("", b"a", 5, None, ["a"], "\ud800", "a" * 256, "é" * 128)
REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "{} of SumAgreement is of type .*, got": {
        "contributors": (["a", "b"], "ab", None),
        "bits": (16.0, np.bool_(True), True, None),
        "allow_single": (1, "no", None),
        "threshold": (2.0, True),
        "noise": (5.0, "5"),
    },
    r"{} lies in 1e-30\.\.1e\+30": {
        "clip_norm": (float("nan"), float("inf"), 0.0, -1.0, 1e31, 1e-31, 10**400, "1", None, 1j)
    },
    "name for every party, text of 1 to 255 bytes": {
        **dict.fromkeys(("session", "receiver", "combiner"), NAMES),
        "contributors": tuple(("a", name) for name in NAMES),
    },
    "{} lies in 1..3, .*got": {"threshold": (0, -1, 4)},
    "{} lies in": {"noise": (0, -1, 2**24 + 1), "bits": (1, 25)},
    r"hides nothing: .* or say allow_single": {"contributors": ((), ("a",))},
    "the parties of a sum are all different": {
        "contributors": (("a", "a"), ("a", "active"), ("a", "aggregator")),
        "combiner": ("active",),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_parties_cannot_fix_is_refused(message: str) -> None:
    for field, values in REFUSED[message].items():
        for value in values:
            with pytest.raises(LocalProtocolError, match=message.format(field)):
                agreement(**{field: value})


def test_one_contributes_by_name_only_and_at_most_1024_do() -> None:
    with pytest.raises(LocalProtocolError, match=r"over 0 contributor\(s\) hides nothing"):
        agreement(contributors=(), allow_single=True)
    assert agreement(contributors=("a",), allow_single=True).contributors == ("a",)
    assert len(agreement(1024).contributors) == 1024
    with pytest.raises(LocalProtocolError, match="at most 1024 contributors, got 1025"):
        agreement(1025)


def test_equal_agreements_have_one_digest_and_others_another() -> None:
    usual = agreement()
    for clip_norm in (1, 1.0, np.float64(1)):
        assert agreement(clip_norm=clip_norm) == usual
        assert agreement(clip_norm=clip_norm).digest == usual.digest
    others: dict[str, Any] = {
        "session": "other", "receiver": "other", "combiner": "other",
        "contributors": ("passive_2", "passive_1", "passive_3"),
        "clip_norm": np.nextafter(1.0, 2.0), "bits": 15, "allow_single": True, "threshold": 3,
        "noise": 1,
    }  # fmt: skip
    digests = {agreement(**{name: value}).digest for name, value in others.items()}
    digests |= {usual.digest, agreement(noise=2).digest, agreement(threshold=2).digest}
    assert len(digests) == len(others) + 3
    assert usual.digest == agreement(noise=None).digest


def test_a_binding_is_checked_on_construction() -> None:
    refused: dict[str, tuple[Any, str]] = {
        "step of StepBinding is of type int, got 1.0": (1.0, "step"),
        "step of StepBinding is of type int, got True": (True, "step"),
        "a number from 0 to 2\\^63 - 1, got -1": (np.int64(-1), "step"),
        "a number from 0 to .* got 9223372036854775808": (2**63, "step"),
        "rows of StepBinding is of type bytes": ("r" * 32, "rows"),
        "rows is a digest of 32 bytes, got 31": (bytes(31), "rows"),
        "message of StepBinding is of type bytes": (bytearray(32), "message"),
        "message is a digest of 32 bytes, got 0": (b"", "message"),
        "a sum needs a session name .*got b'test'": (b"test", "session"),
        "a sum needs a session name .*got ''": ("", "session"),
    }
    for message, (value, field) in refused.items():
        with pytest.raises(LocalProtocolError, match=message):
            StepBinding(**{**vars(binding(1)), field: value})


def test_every_field_of_a_binding_counts() -> None:
    usual: dict[str, Any] = {"session": "s", "step": 1, "rows": b"r", "message": b"m"}
    digests = {StepBinding.of(**usual).digest}
    for field, other in (("session", "t"), ("step", 2), ("rows", b"x"), ("message", b"x")):
        digests.add(StepBinding.of(**{**usual, field: other}).digest)
    assert len(digests) == 5
    swapped = StepBinding.of("s", 1, rows=b"m", message=b"r").digest
    assert swapped != StepBinding.of("s", 1, rows=b"r", message=b"m").digest
