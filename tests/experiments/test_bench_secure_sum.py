"""The bench of secure sums: its cases and fields, and a Paillier peer that really adds."""

import importlib.util

import numpy as np
import pytest

from apfed_bench import rows as base
from apfed_bench import secure_sum
from apfed_bench.secure_sum import PackedPaillier, why_no_paillier
from apfed_bench.table import run_bench
from apfed_protocols.errors import LocalProtocolError


@pytest.mark.slow
def test_the_quick_bench_has_every_case_and_field() -> None:
    rows = {row["case"]: row for row in run_bench("secure-sum", quick=True)["rows"]}
    for case, most_bytes in {
        "ckks/m4": 16.1,
        "ckks+pool/m4": 16.1,
        "ckks-fast/m4": 8.1,
        "bfv+masks/m4": 7.6,
        "masked/m4": 4.1,
        "masked-recovery/m4": 4.1,
        "plain/m4": 4.1,
    }.items():
        assert rows[case]["bytes_per_value"] <= most_bytes
        assert rows[case]["ratio"] > 1
    assert rows["tutorial/m4"]["ratio"] == 1
    if importlib.util.find_spec("crypten"):
        # eight bytes of a share, and the frames around it and the keys of the others' shares
        assert 8 < rows["crypten/m4"]["bytes_per_value"] < 8.1
        assert rows["crypten/m4"]["ratio"] > 1
    for case in ("crypten/m4", "phe-packed/m4"):
        assert rows[case]["seconds"] is not None or rows[case]["reason"]
    assert 0 < rows["share/masked"]["share"] < rows["share/ckks"]["share"]
    assert rows["share/ckks"]["share"] == rows["share/ckks"]["ratio"]


def test_without_crypten_its_case_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise LocalProtocolError("install CrypTen")

    monkeypatch.setattr(base, "load_crypten", absent)
    monkeypatch.setattr(secure_sum, "_SHAPE", (4, 8))
    (row,) = run_bench("secure-sum", quick=True, cases="crypten/m4")["rows"]
    assert row["seconds"] is None
    assert row["reason"] == "install CrypTen"
    rows = run_bench("secure-sum", quick=True, cases="*a*/m4")["rows"]
    others = {row["case"] for row in rows if row.get("reason") != "install CrypTen"}
    assert others >= {"masked/m4", "plain/m4", "tutorial/m4"}


def test_paillier_is_measured_or_its_absence_explained() -> None:
    if importlib.util.find_spec("phe") is None:
        assert why_no_paillier() == "phe is not installed; pip install phe"
        return
    values = [np.full((1, 100), 0.25 * k, dtype=np.float32) for k in (-1, 2)]
    total = PackedPaillier(passives=2).add(values)
    np.testing.assert_allclose(total, 0.25, atol=1e-4)
