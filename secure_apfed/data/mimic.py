"""MIMIC-III as one row an admission: counts of what was done a day, and how long the stay was.

Run by: whoever holds access to MIMIC-III (PhysioNet, version 1.4), on its official CSV files. Large
ones are read in chunks and of one column; what was counted is kept beside them, readable by its
owner only, since counting takes long: it is credentialed data, too.

Source: APC-VFL, section 5, which preprocesses as Huang et al. 2023 (VFedTrans): 58,976 admissions,
15 features, 4 classes. The published code of VFedTrans reads a table of which it takes the age, 13
columns Num* and their sum, and the group of the length of stay as label. That these columns are
averages a day, and that the groups are of up to 4, 8 and 12 days and longer, is what others write
of that table; we found no word of its maker on the following, and choose:

- the length of stay is DISCHTIME less ADMITTIME in days; of the few stays that end before they
  begin it is 0, and their counts are divided by 1 day;
- an age is in years at admission; of people above 89, whose dates of birth are shifted, it is 90;
- rows without an admission (HADM_ID) are not counted, and what an admission has none of is 0.
"""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from gzip import BadGzipFile
from pathlib import Path
from warnings import warn

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from secure_apfed.data.files import DataFile, DataSet, TablePool, file_path
from secure_apfed.data.frames import is_numeric, numbers_of, read_frame
from secure_apfed.errors import DataError
from secure_apfed.files import write_atomically
from secure_apfed.seeds import derive_seed

_DAYS = (4, 8, 12)

# Column of counts -> the tables whose rows of an admission are counted.
_COUNTED: Mapping[str, tuple[str, ...]] = {
    "NumCallouts": ("CALLOUT",),
    "NumDiagnosis": ("DIAGNOSES_ICD",),
    "NumProcs": ("PROCEDURES_ICD",),
    "NumCPTevents": ("CPTEVENTS",),
    "NumInput": ("INPUTEVENTS_CV", "INPUTEVENTS_MV"),
    "NumLabs": ("LABEVENTS",),
    "NumMicroLabs": ("MICROBIOLOGYEVENTS",),
    "NumNotes": ("NOTEEVENTS",),
    "NumOutput": ("OUTPUTEVENTS",),
    "NumRx": ("PRESCRIPTIONS",),
    "NumProcEvents": ("PROCEDUREEVENTS_MV",),
    "NumTransfers": ("TRANSFERS",),
    "NumChartEvents": ("CHARTEVENTS",),
}
_TABLES = ("ADMISSIONS", "PATIENTS", *(name for names in _COUNTED.values() for name in names))
_TOTAL = "TotalNumInteract"

ADMISSION_COLUMNS = ("Age", *_COUNTED, _TOTAL)
# The largest, CHARTEVENTS, has some 33 GB.
_FILES = tuple(DataFile(f"{name}.csv", 2**36, exact=False) for name in _TABLES)

_KEPT = "mimic_iii-admissions.csv"
_STAY = "LOSdays"
_CHUNK = 2_000_000
_OLDEST = 90.0
_DAYS_A_YEAR = 365.25


def _read(dataset: DataSet, folder: Path | None) -> TablePool:
    """Of official CSV files, compressed or not; label 0 is the shortest stay."""
    paths = {name: file_path(dataset, file, folder) for name, file in zip(
        _TABLES, dataset.files, strict=True)}  # fmt: skip
    kept = paths["ADMISSIONS"].with_name(_KEPT)
    newest = max(path.stat().st_mtime_ns for path in paths.values())
    if kept.is_file() and kept.stat().st_mtime_ns > newest:
        frame = read_frame(kept, source=dataset.name)
        _require(frame, (*ADMISSION_COLUMNS, _STAY), path=kept)
        if not all(np.isfinite(numbers_of(frame[name], source=str(kept))).all() for name in frame):
            raise DataError(f"{kept}: has cells without a number; remove it, and it is made anew")
    else:
        frame = _count(paths)
        _keep(frame, kept)
    return TablePool(frame[list(ADMISSION_COLUMNS)], _stay_labels(frame[_STAY].to_numpy()))


def _stay_labels(days_N: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.searchsorted(_DAYS, days_N, side="left").astype(np.int64)


def _count(paths: Mapping[str, Path]) -> pd.DataFrame:
    admissions = _whole(paths["ADMISSIONS"], "SUBJECT_ID", "HADM_ID", "ADMITTIME", "DISCHTIME")
    patients = _whole(paths["PATIENTS"], "SUBJECT_ID", "DOB").drop_duplicates("SUBJECT_ID")
    births = patients.set_index("SUBJECT_ID")["DOB"].reindex(admissions["SUBJECT_ID"])
    begin, end = (_times(admissions[name], paths["ADMISSIONS"])
                  for name in ("ADMITTIME", "DISCHTIME"))  # fmt: skip
    age_N = (begin - _times(births, paths["PATIENTS"])) / _DAYS_A_YEAR
    days_N = np.maximum(end - begin, 0.0)
    ids = pd.Index(admissions["HADM_ID"])
    if not (ids.is_unique and is_numeric(admissions["HADM_ID"])):
        raise DataError(
            f"{paths['ADMISSIONS']}: a HADM_ID occurs twice, or is no number; get the file again"
        )
    divided_N = np.where(days_N > 0, days_N, 1.0)
    frame = pd.DataFrame({"Age": np.where(age_N < _OLDEST, age_N, _OLDEST)})
    for column, tables in _COUNTED.items():
        counts_N = sum(_rows_of(paths[table], ids) for table in tables)
        frame[column] = counts_N / divided_N
    frame[_TOTAL] = frame[list(_COUNTED)].sum(axis=1)
    frame[_STAY] = days_N
    return frame


def _whole(path: Path, *columns: str) -> pd.DataFrame:
    with _readable(path):
        frame = pd.read_csv(path)
    frame.columns = frame.columns.str.upper()
    _require(frame, columns, path=path)
    return frame[list(columns)]


def _rows_of(path: Path, admissions: pd.Index) -> NDArray[np.int64]:
    counts_N = np.zeros(len(admissions), dtype=np.int64)
    with (
        _readable(path),
        pd.read_csv(
            path, usecols=lambda name: name.upper() == "HADM_ID", chunksize=_CHUNK
        ) as parts,
    ):
        for part in parts:
            if part.shape[1] != 1:
                raise DataError(f"{path}: lacks the column HADM_ID; get the file again")
            places = admissions.get_indexer(pd.Index(part.iloc[:, 0]))
            counts_N += np.bincount(places[places >= 0], minlength=len(admissions))
    return counts_N


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, EOFError, zlib.error, BadGzipFile) as error:
        raise DataError(f"{path}: not a readable CSV file ({error}); get it again") from error


def _require(frame: pd.DataFrame, columns: tuple[str, ...], *, path: Path) -> None:
    absent = [name for name in columns if name not in frame.columns]
    if absent or not len(frame):
        raise DataError(
            f"{path}: lacks {', '.join(absent) or 'rows'}; it has the columns "
            f"{', '.join(map(str, frame.columns))}: get the file again"
        )
    if repeated := [name for name in columns if (frame.columns == name).sum() > 1]:
        raise DataError(f"{path}: has {', '.join(repeated)} several times; get the file again")


def _times(column: "pd.Series", path: Path) -> NDArray[np.float64]:
    """Return times as days; in seconds, since nanoseconds end before shifted years do."""
    with _readable(path):
        times = pd.to_datetime(column, format="%Y-%m-%d %H:%M:%S").to_numpy("datetime64[s]")
    if np.isnat(times).any():
        raise DataError(f"{path}: {column.name} is empty or unknown in some rows; get it again")
    days: NDArray[np.float64] = times.astype(np.int64) / 86_400
    return days


def _keep(frame: pd.DataFrame, place: Path) -> None:
    """Write what was counted, for the next time, into a file of its own: no link, no other's."""
    try:
        write_atomically(place, frame.to_csv(index=False).encode(), private=True)
    except OSError as error:
        warn(f"{place} cannot be written ({error.strerror}); counting starts anew next time",
             stacklevel=2)  # fmt: skip


def synthetic_admissions(rows: int, *, seed: int) -> TablePool:
    """Return counts a day that follow how ill somebody is, which also makes the stay longer."""
    draw = np.random.default_rng(derive_seed(seed, "synthetic admissions"))
    ill_N = draw.normal(size=rows)
    days_N = np.exp(1.87 + 0.55 * ill_N + draw.normal(0, 0.65, rows))
    newborn_N = draw.random(rows) < 0.13
    age_N = np.clip(draw.normal(62 + 3 * ill_N, 17, rows), 16, 90)
    frame = pd.DataFrame({"Age": np.where(newborn_N, 0.0, age_N)})
    for name in ADMISSION_COLUMNS[1:-1]:
        usual, illness, per_stay = np.exp(draw.normal(0, 1.2)), draw.normal(0, 0.5), draw.random()
        # Some are done once a stay, so that there are fewer of them a day in a long one.
        expected_N = usual * np.exp(illness * ill_N) * days_N ** (1 - per_stay)
        frame[name] = draw.poisson(expected_N) / days_N
    frame[ADMISSION_COLUMNS[-1]] = frame[list(ADMISSION_COLUMNS[1:-1])].sum(axis=1)
    return TablePool(frame, _stay_labels(days_N))


MIMIC_III = DataSet(
    name="mimic_iii",
    title="MIMIC-III, length of stay by what was done a day",
    source="https://physionet.org/content/mimiciii/1.4/",
    licence="PhysioNet Credentialed Health Data License 1.5.0; asks for an account and training",
    citation="A. Johnson, T. Pollard, L. Shen et al., Scientific Data 3, 2016",
    how="put its official CSV files (.csv or .csv.gz, with CHARTEVENTS) in a data folder",
    shape="58976 rows of 15 columns",
    classes=("up to 4 days", "up to 8 days", "up to 12 days", "longer"),
    views=2,
    natural_views={"few": ADMISSION_COLUMNS[:5], "many": ADMISSION_COLUMNS[5:]},
    files=_FILES,
    subfolders=("mimiciii", "mimic-iii-clinical-database-1.4"),
    read=_read,
)
SYNTHETIC_MIMIC_III = MIMIC_III.stand_in(
    "synthetic_mimic_iii", "columns of mimic_iii, and no patient",
    shape="4000 rows of 15 columns", read=lambda *_: synthetic_admissions(4000, seed=0),
)  # fmt: skip
