"""MIMIC-III, read from small synthetic tables of its official form."""

import gzip
from pathlib import Path

import pandas as pd
import pytest

from secure_apfed.data import DATASETS
from secure_apfed.data.mimic import ADMISSION_COLUMNS
from secure_apfed.data.readers import TablePool
from secure_apfed.errors import DataError


def pool(name: str, folder: Path | None = None) -> TablePool:
    entry = DATASETS[name]
    read = entry.read(entry, folder)
    assert isinstance(read, TablePool)
    return read


ADMISSIONS = """ROW_ID,SUBJECT_ID,HADM_ID,ADMITTIME,DISCHTIME,ADMISSION_TYPE
1,10,100,2101-10-20 12:00:00,2101-10-22 12:00:00,EMERGENCY
2,11,101,2150-01-01 00:00:00,2150-01-09 00:00:00,ELECTIVE
3,11,102,2151-01-01 00:00:00,2151-02-01 00:00:00,URGENT
4,12,103,2120-05-05 10:00:00,2120-05-05 09:00:00,EMERGENCY
"""
# Subject 11 is above 89: the date of birth is shifted, and lies 300 years before.
PATIENTS = """ROW_ID,SUBJECT_ID,GENDER,DOB
1,12,M,2060-05-05 00:00:00
2,10,F,2101-10-20 00:00:00
3,11,F,1850-01-01 00:00:00
"""


@pytest.fixture
def mimic(tmp_path: Path) -> Path:
    """Small synthetic tables of MIMIC-III's form; the larger ones compressed."""
    (tmp_path / "ADMISSIONS.csv").write_text(ADMISSIONS)
    (tmp_path / "PATIENTS.csv").write_text(PATIENTS)
    rows = {"INPUTEVENTS_CV": [100, 100], "INPUTEVENTS_MV": [100, 103], "CHARTEVENTS": [102] * 62}
    for file in DATASETS["mimic_iii"].files[2:]:
        name = file.name.removesuffix(".csv")
        lines = [f'{at},"a note\nof two lines",{one}' for at, one in enumerate(rows.get(name, []))]
        # Rows outside the hospital have no admission; others are of one that is not listed.
        text = "\n".join(["ROW_ID,TEXT,HADM_ID", *lines, "9,x,", "10,x,555"])
        (tmp_path / f"{file.name}.gz").write_bytes(gzip.compress(text.encode()))
    return tmp_path


def test_mimic_counts_what_was_done_a_day(mimic: Path) -> None:
    read = pool("mimic_iii", mimic)
    assert tuple(read.frame.columns) == ADMISSION_COLUMNS
    assert read.labels.tolist() == [0, 1, 3, 0]
    assert read.frame["Age"].round(1).tolist() == [0.0, 90.0, 90.0, 60.0]
    # Two days; the last stay ends before it begins and counts as one day.
    assert read.frame["NumInput"].tolist() == [1.5, 0, 0, 1]
    assert read.frame["NumChartEvents"].tolist() == [0, 0, 2, 0]
    assert read.frame["TotalNumInteract"].tolist() == [1.5, 0, 2, 1]


def test_mimic_is_counted_once(mimic: Path) -> None:
    first = pool("mimic_iii", mimic)
    kept = mimic / "mimic_iii-admissions.csv"
    assert kept.stat().st_mode & 0o077 == 0
    again = pool("mimic_iii", mimic)
    pd.testing.assert_frame_equal(first.frame, again.frame)
    assert first.labels.tolist() == again.labels.tolist()
    kept.write_text(kept.read_text().replace("1.5", "7.5"))
    assert pool("mimic_iii", mimic).frame["NumInput"][0] == 7.5  # it is what is read
    (mimic / "PATIENTS.csv").touch()
    assert pool("mimic_iii", mimic).frame["NumInput"][0] == 1.5


def test_what_was_counted_goes_into_no_file_of_somebody_else(mimic: Path) -> None:
    fresh, other = mimic / ".mimic_iii-admissions.csv.fresh", mimic / "other"
    other.write_text("precious")
    fresh.symlink_to(other)
    pool("mimic_iii", mimic)
    assert other.read_text() == "precious"
    kept = mimic / "mimic_iii-admissions.csv"
    kept.unlink()
    fresh.write_text("")
    fresh.chmod(0o666)
    pool("mimic_iii", mimic)
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("cell", "message"), [("soon", "are not numbers"), ("", "has cells without a number")]
)
def test_a_damaged_count_is_named(mimic: Path, cell: str, message: str) -> None:
    pool("mimic_iii", mimic)
    kept = mimic / "mimic_iii-admissions.csv"
    kept.write_text(kept.read_text().replace("1.5", cell))
    with pytest.raises(DataError, match=message):
        pool("mimic_iii", mimic)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("CALLOUT.csv", None, "neither CALLOUT.csv nor CALLOUT.csv.gz"),
        ("CALLOUT.csv", b"ROW_ID,TEXT\n1,x\n", "lacks the column HADM_ID"),
        ("CALLOUT.csv", b"", "not a readable CSV file"),
        ("CALLOUT.csv", b'HADM_ID\n"', "not a readable CSV file"),
        ("ADMISSIONS.csv", b"HADM_ID\n1\n", "lacks SUBJECT_ID, ADMITTIME, DISCHTIME"),
        ("ADMISSIONS.csv", ADMISSIONS.replace(",101,", ",100,").encode(), "HADM_ID occurs twice"),
        ("ADMISSIONS.csv", ADMISSIONS.replace(",101,", ",x,").encode(), "or is no number"),
        ("ADMISSIONS.csv", ADMISSIONS.replace("ROW_ID", "hadm_id").encode(), "HADM_ID several"),
        ("ADMISSIONS.csv", ADMISSIONS.replace("2101-10-22", "soon").encode(), "not a readable"),
        ("PATIENTS.csv", PATIENTS.replace("1,12", "1,13").encode(), "DOB is empty or unknown"),
    ],
)
def test_damaged_mimic_tables_are_named(
    mimic: Path, name: str, content: bytes | None, message: str
) -> None:
    (mimic / f"{name}.gz").unlink(missing_ok=True)
    if content is not None:
        (mimic / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        pool("mimic_iii", mimic)
