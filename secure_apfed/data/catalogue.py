"""The one table of data sets: source, licence, classes, and files with digests and addresses.

To add a set, write an entry here and, for a new format, a reader in `secure_apfed.data.files`, or
in a file of its own if only this set has the format. A user's own files are `dataset: tables`. The
settings of a run are checked here: a partition that the set does not allow is refused.

SHA-256 sums are of uncompressed bytes. Those of MNIST and Fashion-MNIST are of copies whose MD5
sums are the published ones. For CIFAR the digests of the archives are published; of the files
inside, size and labels are checked.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from secure_apfed.data.files import (
    DataFile,
    DataSet,
    Download,
    Progress,
    default_folder,
    fetch_file,
    load_cifar,
    load_credit_card,
    load_digits,
    load_handwritten,
    load_idx,
    load_sklearn_table,
    make_column_names,
)
from secure_apfed.data.sessions import SYNTHETIC_KEYSTROKES
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.settings import describe_unknown_name
from secure_apfed.settings.data import BUILT_IN_ACTIVE_NAME, OWN_TABLES, DataSettings
from secure_apfed.settings.plugins import PluginTable, find_import_path

_TEN = tuple("0123456789")
_FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_CIFAR100_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach "
    "couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster "
    "house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree "
    "motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear "
    "pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket "
    "rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip "
    "turtle wardrobe whale willow_tree wolf woman worm"
)
# Bytes of each IDX file: a header, and a byte for each pixel or label.
_IDX = {
    "train-images-idx3-ubyte": 16 + 60_000 * 784,
    "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 784,
    "t10k-labels-idx1-ubyte": 8 + 10_000,
}
_MEASURES = (
    "radius",
    "texture",
    "perimeter",
    "area",
    "smoothness",
    "compactness",
    "concavity",
    "concave points",
    "symmetry",
    "fractal dimension",
)
_MONTHS = range(1, 7)


def _make_idx_files(*sha256: str) -> tuple[DataFile, ...]:
    """Return the four IDX files of a set: training images and labels, test images and labels.

    `sha256`: their digests (hex), in this order.
    """
    files = zip(_IDX.items(), sha256, strict=True)
    return tuple(DataFile(name, size, digest) for (name, size), digest in files)


def _make_gz_downloads(files: tuple[DataFile, ...], *folders: str) -> tuple[Download, ...]:
    """Return the download of each of these gzip files.

    `folders`: URLs of folders; each of them has all files.
    """
    return tuple(
        Download(file, tuple(f"{folder}/{file.name}.gz" for folder in folders)) for file in files
    )


_MNIST = _make_idx_files(
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
_FASHION_MNIST = _make_idx_files(
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
_CIFAR10 = tuple(
    DataFile(name, size=10_000 * 3073)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
)
_CIFAR100 = (DataFile("train.bin", 50_000 * 3074), DataFile("test.bin", 10_000 * 3074))
# By view: number of columns, then size and SHA-256 of its file.
_MFEAT = {
    "fou": (76, 1_278_159, "b517f89501eff177b4daf897d8f7e8eb6a5b0e5671f740e57cc1d768f6b969b3"),
    "fac": (216, 1_469_530, "fc9f88143a423f7cf9df6ce9a2afcdde23c1d4e3202e436e17447c09945da1ca"),
    "kar": (64, 1_013_847, "685544902516d302e92f84736cec34cb7268169b1f0dbba706dbd46dc76426df"),
    "pix": (240, 966_853, "4aabd68ecf903736cabcaa1c8e4b32e62384c827ced972e540ac2580d1bd26bd"),
    "zer": (47, 668_481, "9d89df4f793790fc318e0a598eaa06cea0fd5f22734731e1c3e53fda0c108ea9"),
    "mor": (6, 58_768, "44c5c8cc7a06b3540947729c55f95dabd8bfc4eb422ccfecad625e769c2a99e8"),
}


def _make_handwritten_set(
    name: str, title: str, *views: str, subfolders: tuple[str, ...] = ()
) -> DataSet:
    """Return the catalogue entry of UCI's handwritten numerals with these feature sets as views.

    `name`: name of the entry. `title`: what distinguishes it. `subfolders`: folders in which the
    files may lie besides one of the entry's name.
    """
    widths = {view: _MFEAT[view][0] for view in views}
    return DataSet(
        name=name,
        title=f"Multiple features (handwritten numerals), {title}",
        source="https://archive.ics.uci.edu/dataset/72",
        licence="CC BY 4.0",
        citation="R. Duin, UCI Machine Learning Repository, 1998",
        how="ships with this package",
        shape=f"2000 rows of {sum(widths.values())} columns",
        classes=_TEN,
        views=len(views),
        natural_views={view: make_column_names(view, width) for view, width in widths.items()},
        files=tuple(DataFile(f"mfeat-{view}.csv", *_MFEAT[view][1:]) for view in views),
        subfolders=subfolders,
        read=load_handwritten,
    )


def _make_cifar_set(
    name: str,
    title: str,
    subfolder: str,
    classes: tuple[str, ...],
    files: tuple[DataFile, ...],
    size: int,
    sha256: str,
) -> DataSet:
    """Return the catalogue entry of CIFAR-10 or CIFAR-100, whose files lie in one archive.

    Args:
        name, title: name of the entry, and its title for people.
        subfolder: the folder inside the archive.
        classes: names of the classes.
        files: files in the archive; the last one is the test split.
        size: bytes of the archive.
        sha256: SHA-256 of the archive, hex.
    """
    archive = DataFile(f"cifar-{len(classes)}-binary.tar.gz", size, sha256)
    address = f"https://www.cs.toronto.edu/~kriz/{archive.name}"
    return DataSet(
        name=name,
        title=title,
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="none stated; asks for the citation",
        citation="A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009",
        how=f"`secure-apfed data fetch {name}`, or its binary version's .bin files",
        shape="60000 images of 3x32x32",
        classes=classes,
        views=2,
        height=32,
        split=True,
        files=files,
        subfolders=(subfolder,),
        downloads=(Download(archive, (address,), files),),
        read=load_cifar,
    )


_SETS = (
    DataSet(
        name="digits",
        title="Optical recognition of handwritten digits",
        source="https://archive.ics.uci.edu/dataset/80",
        licence="CC BY 4.0",
        citation="E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, 1998",
        how="ships with scikit-learn",
        shape="1797 images of 1x8x8",
        classes=_TEN,
        views=4,
        height=8,
        read=load_digits,
    ),
    DataSet(
        name="mnist",
        title="MNIST",
        source="http://yann.lecun.com/exdb/mnist/",
        licence="CC BY-SA 3.0",
        citation="Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Proc. IEEE 86(11), 1998",
        how="`secure-apfed data fetch mnist`, or the four IDX files in a data folder",
        shape="70000 images of 1x28x28",
        classes=_TEN,
        views=2,
        height=28,
        split=True,
        files=_MNIST,
        downloads=_make_gz_downloads(
            _MNIST,
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            "https://storage.googleapis.com/cvdf-datasets/mnist",
        ),
        read=load_idx,
    ),
    DataSet(
        name="fashion_mnist",
        title="Fashion-MNIST",
        source="https://github.com/zalandoresearch/fashion-mnist",
        licence="MIT",
        citation="H. Xiao, K. Rasul, R. Vollgraf, arXiv:1708.07747, 2017",
        how="`secure-apfed data fetch fashion_mnist`, or Debian's package dataset-fashion-mnist",
        shape="70000 images of 1x28x28",
        classes=_FASHION_CLASSES,
        views=2,
        height=28,
        split=True,
        files=_FASHION_MNIST,
        subfolders=("fashion-mnist",),
        downloads=_make_gz_downloads(
            _FASHION_MNIST,
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        ),
        read=load_idx,
    ),
    _make_cifar_set(
        "cifar10",
        "CIFAR-10",
        "cifar-10-batches-bin",
        _CIFAR10_CLASSES,
        _CIFAR10,
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
    _make_cifar_set(
        "cifar100",
        "CIFAR-100 (fine labels)",
        "cifar-100-binary",
        tuple(_CIFAR100_NAMES.split(" ")),
        _CIFAR100,
        168_513_733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    ),
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
        read=load_sklearn_table,
    ),
    _make_handwritten_set(
        "handwritten", "without the 6 morphological columns", "fou", "fac", "kar", "pix", "zer"
    ),
    _make_handwritten_set("handwritten_six", "all six views", *_MFEAT, subfolders=("handwritten",)),
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
        natural_views={
            "body": ("alcohol", "malic_acid", "ash", "alcalinity_of_ash", "magnesium"),
            "phenols": ("total_phenols", "flavanoids", "nonflavanoid_phenols", "proanthocyanins"),
            "look": ("color_intensity", "hue", "od280/od315_of_diluted_wines", "proline"),
        },
        read=load_sklearn_table,
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
        files=(
            DataFile(
                "UCI_Credit_Card.csv",
                2_862_995,
                "a0f0ab49d6326671d6cd83be5c88dcf18007025fe9a53ecd699119c871176ca1",
            ),
        ),
        read=load_credit_card,
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
        read=load_sklearn_table,
    ),
    SYNTHETIC_KEYSTROKES,
)


def _require_dataset(dataset: Any, code: str) -> DataSet:
    """Return a plug-in's entry. Raises TypeError: it is no `DataSet`.

    `code`: the plug-in's import path, which every table of plug-ins passes; unused here.
    """
    del code
    if not isinstance(dataset, DataSet):
        raise TypeError(f"expected a secure_apfed.data.files.DataSet, got {type(dataset).__name__}")
    return dataset


DATASETS: PluginTable[DataSet] = PluginTable(
    {entry.name: entry for entry in _SETS}, plugin_kind="datasets", make_entry=_require_dataset
)


def find_dataset(name: str) -> DataSet:
    """Return the catalogue entry of this name.

    Raises ConfigError: there is no such entry; the error names the most similar one.
    """
    if name not in DATASETS:
        raise ConfigError(
            f"dataset: {describe_unknown_name(name, (*DATASETS.list_names(), OWN_TABLES))}"
        )
    return DATASETS[name]


def take_dataset(settings: DataSettings) -> DataSettings:
    """Return the settings with the data set's name in the catalogue.

    If the setting `dataset` is an import path, the plug-in's data set is imported and added to the
    catalogue, and its name takes the path's place. An unknown name is left unchanged.

    Raises ConfigError: another party named the plug-in's code, which is not imported then.
    """
    name = settings.dataset
    if name == OWN_TABLES or name in DATASETS or find_import_path(name, "datasets") is None:
        return settings  # `find_dataset` reports unknown names, with a suggestion
    dataset_name = DATASETS.import_entry(name, setting="dataset")
    return settings.model_copy(update={"dataset": dataset_name})


def describe_dataset(dataset: DataSet) -> dict[str, str]:
    """Return the facts that `secure-apfed data list` shows about a set."""
    descriptions = {
        "classes": "numbers" if dataset.numeric_labels else str(len(dataset.classes)),
        "views": str(dataset.views),
        "split": "official" if dataset.split else "seeded",
    }
    keys = ("name", "title", "shape", *descriptions, "licence", "source", "citation", "how")
    return {name: descriptions.get(name) or getattr(dataset, name) for name in keys}


def fetch_dataset(
    name: str, folder: Path | None = None, progress: Progress | None = None
) -> tuple[Path, ...]:
    """Download the files of a data set into a subfolder of its name; return their paths.

    Files that exist and match their checksum are not fetched again.

    Args:
        name: name of the data set.
        folder: where the subfolder is made; None: the default folder of downloads.
        progress: called with (file, bytes so far, bytes in all); None: not called.

    Raises:
        ConfigError: there is no such set.
        DataError: it cannot be downloaded, or no address sends the right bytes.
    """
    dataset = find_dataset(name)
    if dataset.files and not dataset.downloads:
        raise DataError(f"{name} cannot be fetched: {dataset.how}; see {dataset.source}")
    target = (folder or default_folder()).expanduser() / name
    groups = (
        fetch_file(download, target, dataset=name, progress=progress)
        for download in dataset.downloads
    )
    return tuple(path for paths in groups for path in paths)


def labels_are_numbers(settings: DataSettings) -> bool:
    """Return whether the labels of the configured data are numbers to predict, not classes."""
    if settings.dataset == OWN_TABLES:
        return settings.classes == "numbers"
    return find_dataset(settings.dataset).numeric_labels


def view_count(settings: DataSettings) -> int:
    """Return the number of parties with features that the settings make."""
    if settings.dataset == OWN_TABLES:
        return len(settings.parties or ())
    if settings.is_horizontal:
        return settings.clients or 4
    if settings.columns is not None:
        return len(settings.columns)
    if isinstance(settings.views, int):
        return settings.views
    return len(settings.explicit_views) or find_dataset(settings.dataset).views


def view_names(settings: DataSettings) -> tuple[str, ...]:
    """Return the names of the views that columns are cut into, in order; empty for images."""
    if settings.dataset == OWN_TABLES:
        return tuple(settings.view_columns or ())
    return settings.explicit_views or tuple(find_dataset(settings.dataset).natural_views)


def party_names(settings: DataSettings) -> tuple[str, ...]:
    """Return the names of all parties with features, the active first.

    Parties of a built-in set are called "active", "passive-1", "passive-2" and so on, unless the
    settings name them under `columns`.
    """
    if settings.dataset == OWN_TABLES:
        names: Iterable[str] = settings.parties or {}
    elif settings.columns is not None:
        names = settings.columns
    else:
        names = (f"passive-{number}" for number in range(1, view_count(settings)))
    active = settings.active_name
    return (active, *(name for name in names if name != active))


def check_data(settings: DataSettings) -> None:
    """Refuse an unknown data set, and a partition that does not fit it.

    Raises ConfigError: the first fault that is found.
    """
    first_problem = next(_list_problems(settings), None)
    if first_problem is not None:
        raise ConfigError(first_problem)


def _list_given_keys(settings: DataSettings, *keys: str) -> str:
    """Return the names of the keys that the user set, joined by "and"; "" if none is set.

    A key counts as set if its value differs from its default.
    """
    fields = DataSettings.model_fields
    return " and ".join(key for key in keys if getattr(settings, key) != fields[key].default)


def _list_problems(settings: DataSettings) -> Iterator[str]:
    """Yield the faults of data settings, each as the text of an error."""
    if settings.dataset == OWN_TABLES:
        yield from _list_table_problems(settings)
    else:
        yield from _list_dataset_problems(settings)
    passives = party_names(settings)[1:]
    unknown = [name for name in settings.labels_at if name not in passives]
    if unknown:
        yield f"labels_at: {', '.join(unknown)} is no passive; there are {', '.join(passives)}"
    if labels_are_numbers(settings):
        # Rows cannot be sampled by class, and only the active can standardise such labels.
        if settings.rows_per_class is not None:
            yield (
                f"rows_per_class: the labels of {settings.dataset} are numbers and no classes; say "
                "rows"
            )
        if settings.is_horizontal or settings.labels_at:
            alternative = "partition" if settings.is_horizontal else "labels_at"
            yield (
                f"{alternative}: labels that are numbers are the active's alone; take partition: "
                "vertical without labels_at"
            )


def _list_table_problems(settings: DataSettings) -> Iterator[str]:
    """Yield the faults of settings for the parties' own tables."""
    prepared_keys = ("views", "columns", "clients", "rows", "rows_per_class", "aligned")
    if misplaced := _list_given_keys(settings, *prepared_keys):
        yield (
            f"dataset: {OWN_TABLES} takes its views from parties and view_columns, and people as "
            f"they are; leave {misplaced} out"
        )
    parties = settings.parties or {}
    if not parties:
        yield f"dataset: {OWN_TABLES} needs an entry in parties for each party"
    if settings.active not in parties:
        yield f"active: {settings.active!r} is not one of parties: {', '.join(parties)}"
    if (settings.is_horizontal or settings.labels_at) and settings.classes is None:
        yield (
            "classes: several parties hold labels, and must number them alike; list the classes, "
            "as classes: ['no', 'yes']"
        )


def _list_dataset_problems(settings: DataSettings) -> Iterator[str]:
    """Yield the faults of settings for a built-in set: its views, columns and partition."""
    dataset = find_dataset(settings.dataset)
    name = settings.dataset
    if misplaced := _list_given_keys(settings, "parties", "classes", "view_columns"):
        yield f"{misplaced} belong to dataset: {OWN_TABLES}, not to {name}"
    known = dataset.natural_views
    named = settings.explicit_views
    if set(named) - set(known) or len(set(named)) != len(named):
        yield (
            f"views: expected different ones of {', '.join(known) or 'none'}, which {name} has; "
            f"got {', '.join(named)}"
        )
    if settings.is_horizontal:
        vertical_keys = ["active_view", "columns", "overlap", "aligned"]
        # Names of views choose features, which a horizontal partition allows. A number of views
        # says into how many parts features are cut, which it does not.
        if not named:
            vertical_keys.insert(0, "views")
        misplaced = _list_given_keys(settings, *vertical_keys)
        if misplaced:
            yield (
                "partition: horizontal gives every party all features of people of its own; leave "
                f"{misplaced} out, or take partition: vertical"
            )
    elif settings.columns is not None:
        if dataset.height is not None:
            yield f"{name} holds images, which views cut; columns are for tables"
        if BUILT_IN_ACTIVE_NAME not in settings.columns or view_count(settings) < 2:
            yield "columns needs an entry for active and one for each passive, such as passive-1"
        if settings.views is not None:
            yield "give columns or views, not both"
    else:
        yield from _list_view_problems(settings, dataset)


def _list_view_problems(settings: DataSettings, dataset: DataSet) -> Iterator[str]:
    """Yield the faults in the number of views, and in the choice of the active's view.

    `dataset`: catalogue entry of the built-in set that is cut into views.
    """
    name = settings.dataset
    height = dataset.height
    natural = len(dataset.natural_views)
    views = view_count(settings)
    if height is None and isinstance(settings.views, int) and views != natural:
        yield (
            f"views: {name} is a table of {natural} natural views, got {views}; leave views "
            "out or cut it with columns"
        )
    if height is not None and views > height:
        yield f"views: an image of {name} has {height} rows, fewer than {views} views"
    if views < 2:
        yield (
            "views: a vertical partition is of two at least; name another, or take partition: "
            "horizontal"
        )
    if settings.active_view > views:
        view = settings.active_view
        yield f"active_view: must be 1 to {views}, the number of views, got {view}"
