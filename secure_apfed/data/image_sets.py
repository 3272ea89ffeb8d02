"""The catalogue's sets of images: source, licence, classes, and files with digests and addresses.

The SHA-256 sums are of uncompressed bytes; those of MNIST and Fashion-MNIST are of copies whose MD5
sums are the published ones. Of CIFAR the archives' digests are published; members are held to size
and labels.
"""

from secure_apfed.data.files import DataFile, Download
from secure_apfed.data.readers import DataSet, read_cifar, read_digits, read_idx

__all__ = ["IMAGE_SETS"]

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

IMAGE_SETS = (
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
)
