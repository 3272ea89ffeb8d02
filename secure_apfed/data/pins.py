"""The files of the data sets: official names, digests of uncompressed bytes, addresses.

The SHA-256 sums of MNIST and Fashion-MNIST are of copies whose MD5 sums are the published
ones. Of CIFAR the archives' digests are published; members are held to size and labels.
"""

from collections.abc import Mapping

from secure_apfed.data.files import DataFile
from secure_apfed.data.pool import Download

__all__ = [
    "CIFAR10",
    "CIFAR10_DOWNLOADS",
    "CIFAR100",
    "CIFAR100_DOWNLOADS",
    "CREDIT_CARD",
    "FASHION_MNIST",
    "FASHION_MNIST_DOWNLOADS",
    "HANDWRITTEN",
    "MNIST",
    "MNIST_DOWNLOADS",
]

# Training images and labels, test images and labels: a header and a byte a pixel or label.
_IDX_BYTES = (16 + 60_000 * 784, 8 + 60_000, 16 + 10_000 * 784, 8 + 10_000)
_TORONTO = "https://www.cs.toronto.edu/~kriz"


def _idx_files(digests: Mapping[str, tuple[str, str]]) -> tuple[DataFile, ...]:
    return tuple(
        DataFile(name, size, sha256, md5)
        for size, (name, (sha256, md5)) in zip(_IDX_BYTES, digests.items(), strict=True)
    )


def _archive(file: DataFile, members: tuple[DataFile, ...]) -> tuple[Download, ...]:
    return (Download(file, (f"{_TORONTO}/{file.name}",), members),)


def _gz(files: tuple[DataFile, ...], *folders: str) -> tuple[Download, ...]:
    return tuple(Download(f, tuple(f"{at}/{f.name}.gz" for at in folders)) for f in files)


MNIST = _idx_files({
    "train-images-idx3-ubyte": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "6bbc9ace898e44ae57da46a324031adb",
    ),
    "train-labels-idx1-ubyte": (
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "a25bea736e30d166cdddb491f175f624",
    ),
    "t10k-images-idx3-ubyte": (
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "2646ac647ad5339dbf082846283269ea",
    ),
    "t10k-labels-idx1-ubyte": (
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        "27ae3e4e09519cfbb04c329615203637",
    ),
})  # fmt: skip

FASHION_MNIST = _idx_files({
    "train-images-idx3-ubyte": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    ),
    "train-labels-idx1-ubyte": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "9018921c3c673c538a1fc5bad174d6f9",
    ),
    "t10k-images-idx3-ubyte": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "8181f5470baa50b63fa0f6fddb340f0a",
    ),
    "t10k-labels-idx1-ubyte": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
})  # fmt: skip

CIFAR10 = tuple(
    DataFile(name, size=10_000 * 3073)
    for name in (*(f"data_batch_{at}.bin" for at in range(1, 6)), "test_batch.bin")
)
CIFAR100 = (
    DataFile("train.bin", size=50_000 * 3074),
    DataFile("test.bin", size=10_000 * 3074),
)

_MFEAT = {
    "fou": (1278159, "b517f89501eff177b4daf897d8f7e8eb6a5b0e5671f740e57cc1d768f6b969b3"),
    "fac": (1469530, "fc9f88143a423f7cf9df6ce9a2afcdde23c1d4e3202e436e17447c09945da1ca"),
    "kar": (1013847, "685544902516d302e92f84736cec34cb7268169b1f0dbba706dbd46dc76426df"),
    "pix": (966853, "4aabd68ecf903736cabcaa1c8e4b32e62384c827ced972e540ac2580d1bd26bd"),
    "zer": (668481, "9d89df4f793790fc318e0a598eaa06cea0fd5f22734731e1c3e53fda0c108ea9"),
}

HANDWRITTEN = tuple(DataFile(f"mfeat-{view}.csv", *pins) for view, pins in _MFEAT.items())
CREDIT_CARD = (
    DataFile(
        "UCI_Credit_Card.csv",
        2_862_995,
        "a0f0ab49d6326671d6cd83be5c88dcf18007025fe9a53ecd699119c871176ca1",
    ),
)

MNIST_DOWNLOADS = _gz(
    MNIST,
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
FASHION_MNIST_DOWNLOADS = _gz(
    FASHION_MNIST,
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
)
CIFAR10_DOWNLOADS = _archive(
    DataFile(
        "cifar-10-binary.tar.gz",
        170_052_171,
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        "c32a1d4ab5d03f1284b67883e8d87530",
    ),
    CIFAR10,
)
CIFAR100_DOWNLOADS = _archive(
    DataFile(
        "cifar-100-binary.tar.gz",
        168_513_733,
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        "03b5dce01913d631647c71ecec9e9cb8",
    ),
    CIFAR100,
)
