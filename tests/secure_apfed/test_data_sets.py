"""Sets of a format of their own, from small synthetic files, and their stand-ins; hostile files are
refused.
"""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray
from scipy.io import savemat
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from secure_apfed.data import DATASETS, load_data
from secure_apfed.data.caltech import synthetic_images
from secure_apfed.data.files import TablePool
from secure_apfed.data.mimic import ADMISSION_COLUMNS, synthetic_admissions
from secure_apfed.data.sessions import session_pool, synthetic_sessions
from secure_apfed.errors import DataError
from secure_apfed.settings.data import DataSettings

WIDTHS = (48, 40, 254, 1984, 512, 928)
STAND_INS = {
    "caltech_7": "synthetic_caltech_7", "mimic_iii": "synthetic_mimic_iii",
    "biaffect": "synthetic_keystrokes",
}  # fmt: skip


# Stand-ins for sets that are not here: labelled so, of the same shape, with something to learn.


def pool(name: str, folder: Path | None = None) -> TablePool:
    entry = DATASETS[name]
    read = entry.read(entry, folder)
    assert isinstance(read, TablePool)
    return read


def test_parties_fold_their_sessions_back(tmp_path: Path) -> None:
    told = synthetic_sessions(64, seed=0)
    told.to_parquet(tmp_path / "biaffect.parquet")
    settings = DataSettings(
        dataset="biaffect", folder=tmp_path, partition="horizontal", clients=3,
        views=("special", "alphanum"),
    )  # fmt: skip
    data = load_data(settings, seed=0)
    assert list(data.active.views) == ["special", "alphanum"]
    steps = sorted(len(keys) // 4 for keys in told["alphanum"])
    found = []
    for table in data.tables:
        view = table.views["alphanum"]
        own_NF = table.features[:, view.columns]
        assert view.sequence is not None
        lengths_N, steps_NTC = own_NF[:, 0].long(), own_NF[:, 1:].unflatten(1, view.sequence)
        assert steps_NTC.shape == (len(table.ids), 100, 4)
        for length, steps_TC in zip(lengths_N.tolist(), steps_NTC, strict=True):
            assert bool((steps_TC[:length, 0] > 0).all())  # durations
            assert not bool(steps_TC[length:].any())
        found += lengths_N.tolist()
    assert sorted(found) == steps


def test_a_stand_in_says_that_it_is_synthetic_and_has_the_same_shape() -> None:
    for name, other in STAND_INS.items():
        real, entry = DATASETS[name], DATASETS[other]
        assert "synthetic" in entry.name
        assert entry.title.startswith("Synthetic: ")
        assert entry.how.startswith("synthetic: ")
        assert entry.classes == real.classes
        assert (entry.natural_views, entry.sequences) == (real.natural_views, real.sequences)
        read = pool(entry.name)
        columns = [column for view in real.natural_views.values() for column in view]
        assert list(read.frame.columns) == columns
        assert set(read.labels.tolist()) == set(range(len(real.classes)))


def test_stand_ins_follow_from_their_seed() -> None:
    caltech = DATASETS["synthetic_caltech_7"]

    def made(seed: int) -> list[float]:
        admissions, images = (
            synthetic_admissions(50, seed=seed),
            synthetic_images(caltech, seed=seed),
        )
        readings = np.concatenate(list(synthetic_sessions(20, seed=seed)["accel"]))
        return [admissions.frame.to_numpy().sum(), images.frame.to_numpy().sum(), readings.sum()]

    assert made(1) == made(1)
    assert not set(made(1)) & set(made(2))


def test_synthetic_sessions_differ_in_the_order_of_their_steps() -> None:
    """Their means say nothing; how a step follows the last says most in alphanum."""
    read = session_pool(synthetic_sessions(1200, seed=3), source="x")
    means, order = {}, {}
    for view, (steps, channels) in DATASETS["synthetic_keystrokes"].sequences.items():
        columns = list(DATASETS["synthetic_keystrokes"].natural_views[view])
        flat_NF = read.frame[columns].to_numpy(dtype=np.float64)
        used_N, steps_NTC = flat_NF[:, :1], flat_NF[:, 1:].reshape(-1, steps, channels)
        mean_NC = steps_NTC.sum(1) / used_N
        apart_NTC = steps_NTC - mean_NC[:, None]
        apart_NTC *= (np.arange(steps) < used_N)[..., None]
        lags = (steps_NTC[:, 1:] * steps_NTC[:, :-1]).sum((1, 2))[:, None] / used_N
        further = [(apart_NTC[:, lag:] * apart_NTC[:, :-lag]).sum(1) / used_N for lag in (1, 2, 4)]
        means[view] = accuracy(mean_NC, read.labels)
        order[view] = accuracy(np.concatenate([lags, *further], axis=1), read.labels)
    assert max(means.values()) < 0.57
    assert order["alphanum"] > order["accel"] > order["special"] > 0.6
    assert order["alphanum"] > 0.8


def accuracy(features: NDArray[np.float64], labels: NDArray[np.int64]) -> float:
    scaled = (features - features.mean(0)) / features.std(0)
    return float(cross_val_score(LogisticRegression(), scaled, labels, cv=5).mean())


# BiAffect's sessions, read from small synthetic files of our own format.


def sessions(*rows: tuple[float, int, int, int]) -> pd.DataFrame:
    """Sessions of so many steps a view, whose first numbers count up."""
    columns: dict[str, list[Any]] = {"hdrs": [], "alphanum": [], "special": [], "accel": []}
    for hdrs, keys, special, readings in rows:
        columns["hdrs"].append(hdrs)
        columns["alphanum"].append(np.arange(4.0 * keys))
        columns["special"].append(np.eye(6)[np.arange(special) % 6].ravel())
        columns["accel"].append(np.arange(3.0 * readings))
    return pd.DataFrame(columns)


def test_sessions_are_kept_cut_and_filled(tmp_path: Path) -> None:
    told = sessions((7, 9, 9, 50), (7, 10, 0, 250), (7.5, 120, 100, 2), (20, 120, 101, 2))
    told.to_parquet(tmp_path / "biaffect.parquet")
    read = pool("biaffect", tmp_path)
    assert read.labels.tolist() == [0, 1]
    assert read.frame.shape == (2, 401 + 601 + 301)
    for view, lengths in {"alphanum": [10, 100], "special": [0, 100], "accel": [100, 2]}.items():
        assert read.frame[f"{view}-steps"].tolist() == lengths
    short = read.frame.iloc[0]
    assert short[["alphanum-9-duration", "alphanum-9-distance_y"]].tolist() == [36, 39]
    assert short["alphanum-10-duration":"alphanum-99-distance_y"].abs().sum() == 0
    assert short[["accel-0-x", "accel-99-x"]].tolist() == [0, 249 * 3]  # thinned, ends kept
    assert read.frame.iloc[1]["alphanum-99-duration"] == 99 * 4  # the first hundred


def test_wrong_sessions_are_named() -> None:
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"accel": None}, "lacks the columns accel; it has hdrs, alphanum, special"),
        ({"hdrs": [-1.0]}, "session 0 has no HDRS of 0 or more"),
        ({"hdrs": [np.nan]}, "session 0 has no HDRS"),
        ({"alphanum": [np.zeros(41)]}, r"session 0: alphanum must be a list .* 4 a step"),
        ({"alphanum": [np.full(40, np.inf)]}, "alphanum must be a list of finite numbers"),
        ({"accel": [np.full(15, 1e39)]}, "accel must be a list of finite numbers of at most 1e"),
        ({"alphanum": [["a"] * 40]}, "alphanum is no list of numbers"),
        ({"alphanum": [3.0]}, r"got an array of shape \(\)"),
        ({"special": [np.full(60, 0.5)]}, "each step of special is a one in one of auto_correct"),
        ({"special": [None], "alphanum": [np.zeros(4)]}, "none of 1 sessions has 10 to 100"),
    )
    told = sessions((3, 20, 5, 5))
    for change, message in changes:
        lacking = told.drop(columns=list(change))
        more = {name: pd.Series(column) for name, column in change.items() if column is not None}
        with pytest.raises(DataError, match=message):
            session_pool(lacking.assign(**more), source="biaffect.parquet")
    with pytest.raises(DataError, match="several columns have one name"):
        session_pool(pd.concat([told, told[["hdrs"]]], axis=1), source="biaffect.parquet")


def test_a_small_file_of_many_equal_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secure_apfed.data.sessions._VALUES_AT_MOST", 2**16)
    told = sessions((3, 20, 5, 5))
    told["accel"] = pd.Series([np.zeros(2**16 - 2)])
    told.to_parquet(tmp_path / "biaffect.parquet")
    assert (tmp_path / "biaffect.parquet").stat().st_size < 2**16
    with pytest.raises(DataError, match="more than 65536: leave sessions out"):
        pool("biaffect", tmp_path)


def test_a_damaged_parquet_file_of_sessions(tmp_path: Path) -> None:
    (tmp_path / "biaffect.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"biaffect.parquet: not a readable Parquet file"):
        pool("biaffect", tmp_path)


# MIMIC-III, read from small synthetic tables of its official form.


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


def test_a_damaged_count_is_named(mimic: Path) -> None:
    pool("mimic_iii", mimic)
    kept = mimic / "mimic_iii-admissions.csv"
    whole = kept.read_text()
    for cell, message in (("soon", "are not numbers"), ("", "has cells without a number")):
        kept.write_text(whole.replace("1.5", cell))
        with pytest.raises(DataError, match=message):
            pool("mimic_iii", mimic)


def test_damaged_mimic_tables_are_named(mimic: Path) -> None:
    damaged: tuple[tuple[str, str | None, str], ...] = (
        ("CALLOUT.csv", None, "neither CALLOUT.csv nor CALLOUT.csv.gz"),
        ("CALLOUT.csv", "ROW_ID,TEXT\n1,x\n", "lacks the column HADM_ID"),
        ("CALLOUT.csv", "", "not a readable CSV file"),
        ("CALLOUT.csv", 'HADM_ID\n"', "not a readable CSV file"),
        ("ADMISSIONS.csv", "HADM_ID\n1\n", "lacks SUBJECT_ID, ADMITTIME, DISCHTIME"),
        ("ADMISSIONS.csv", ADMISSIONS.replace(",101,", ",100,"), "HADM_ID occurs twice"),
        ("ADMISSIONS.csv", ADMISSIONS.replace(",101,", ",x,"), "or is no number"),
        ("ADMISSIONS.csv", ADMISSIONS.replace("ROW_ID", "hadm_id"), "HADM_ID several"),
        ("ADMISSIONS.csv", ADMISSIONS.replace("2101-10-22", "soon"), "not a readable"),
        ("PATIENTS.csv", PATIENTS.replace("1,12", "1,13"), "DOB is empty or unknown"),
    )
    whole = {path.name: path.read_bytes() for path in mimic.iterdir()}
    for name, content, message in damaged:
        for path in mimic.iterdir():
            path.unlink()
        for other, bytes_ in whole.items():
            (mimic / other).write_bytes(bytes_)
        (mimic / f"{name}.gz").unlink(missing_ok=True)
        if content is not None:
            (mimic / name).write_text(content)
        with pytest.raises(DataError, match=message):
            pool("mimic_iii", mimic)


# Caltech101-7, read from synthetic MATLAB files of its form; hostile ones are refused.


def write_caltech(folder: Path, **change: Any) -> None:
    """A synthetic file of Caltech101-7's form; view v holds v in all places but the first row."""
    cell = np.empty((1, 6), dtype=object)
    for at, width in enumerate(WIDTHS):
        cell[0, at] = np.full((1474, width), at, dtype=np.uint8)
        cell[0, at][0] = np.arange(width) % 250
    labels = 1 + np.arange(1474)[:, None] % 7
    savemat(
        folder / "Caltech101-7.mat", {"X": cell, "Y": labels, "lenSmp": 1} | change,
        do_compression=True,
    )  # fmt: skip


def test_caltech_is_read_view_by_view(tmp_path: Path) -> None:
    write_caltech(tmp_path)
    read = pool("caltech_7", tmp_path)
    assert read.frame.shape == (1474, sum(WIDTHS))
    assert read.labels.tolist() == [at % 7 for at in range(1474)]
    assert read.frame["hog-1983"].tolist() == [1983 % 250] + [3] * 1473
    assert read.frame["gist-0"].tolist() == [0] + [4] * 1473


CELL_OF_FIVE = np.empty((1, 5), dtype=object)
CELL_OF_FIVE[0] = [np.zeros((2, 2))] * 5
BAD_LABELS = np.full((1474, 1), 8)


def test_another_matlab_file_is_refused(tmp_path: Path) -> None:
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"X": np.zeros((1474, 5))}, r"X holds matrices of shapes \[\], expected \[\(1474, 48\)"),
        ({"X": CELL_OF_FIVE}, r"shapes \[\(2, 2\), .*expected \[\(1474, 48\)"),
        ({"Y": BAD_LABELS}, "row 0 has label 7, expected 0 to 6; 1474 such rows"),
        ({"Y": np.ones((3, 1))}, "Y holds 3 numbers, expected 1474 labels"),
        ({"Y": "none"}, "must hold finite numbers, got <U4"),
        ({"Y": np.full((1474, 1), np.nan)}, "must hold finite numbers, got float64"),
    )
    for change, message in changes:
        write_caltech(tmp_path, **change)
        with pytest.raises(DataError, match=message):
            pool("caltech_7", tmp_path)


def test_a_hostile_matlab_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "Caltech101-7.mat"
    write_caltech(tmp_path)
    whole = path.read_bytes()
    bomb = zlib.compress(bytes(2**28 + 1), 9)
    for content, message in (
        (b"", "not a MATLAB file"),
        (whole[:5000], "not a MATLAB file"),
        (whole[:128] + bytes(200), "not a MATLAB file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(600), "save it with the option -v7"),
        (whole[:128] + struct.pack("<II", 15, len(bomb)) + bomb, "268435456 uncompressed bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            pool("caltech_7", tmp_path)


HEADER = bytes(124) + b"\x00\x01IM"


def compressed(plain: bytes) -> bytes:
    packed = zlib.compress(plain)
    return struct.pack("<II", 15, len(packed)) + packed


def element(kind: int, body: bytes) -> bytes:
    return struct.pack("<II", kind, len(body)) + body + bytes(-len(body) % 8)


def array(kind: int, rows: int, body: bytes, *, name: bytes = b"X") -> bytes:
    """A MATLAB array of this class that claims so many rows."""
    flags, dimensions = struct.pack("<II", kind, 0), struct.pack("<ii", rows, 1)
    return element(14, element(6, flags) + element(5, dimensions) + element(1, name) + body)


def test_what_an_array_claims_takes_no_memory(tmp_path: Path) -> None:
    twice = compressed(compressed(array(6, 2**10, element(2, bytes(2**10)))))
    for matrix, message in (
        (array(1, 2**30, b""), "claims 1073741824 entries and holds 0"),
        (array(4, 2**30, element(16, b"")), "claims 1073741824 entries and holds 0"),
        (array(1, 1, array(1, 2**30, b"", name=b"")), "class 1, expected matrices"),
        (array(2, 2**30, element(5, struct.pack("<i", 8)) + element(1, b"a\0")), "class 2"),
        (array(3, 2**30, b""), "class 3, expected matrices"),
        (array(1, -1, b""), "claims -1 entries"),
        (twice, "type 15 where a matrix is expected"),
    ):
        (tmp_path / "Caltech101-7.mat").write_bytes(HEADER + matrix)
        with pytest.raises(DataError, match=message):
            pool("caltech_7", tmp_path)
