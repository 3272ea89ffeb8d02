"""Official formats: found, checked and parsed, or refused with the reason.

The CIFAR files here are synthetic: made in the test in the official format.
"""

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from secure_apfed.data import DATASETS, catalogue, fetch, load_data
from secure_apfed.data.files import (
    DataFile,
    DataSet,
    Download,
    check_digest,
    data_folders,
    default_folder,
    fetch_file,
    is_idx,
    parse_cifar,
    parse_idx,
    read_file,
)
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.settings.data import DataSettings

PLAIN = bytes(range(256)) * 200
PACKED = gzip.compress(PLAIN, mtime=0)
FILE = DataFile("train-images", len(PLAIN), hashlib.sha256(PLAIN).hexdigest())


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def test_idx_is_read_and_refused_where_it_is_damaged() -> None:
    assert is_idx(idx(IMAGES))
    assert np.array_equal(parse_idx(idx(IMAGES), dimensions=3, source="x"), IMAGES)
    for content, message in (
        (b"", "found magic nothing"),
        (b"\x1f\x8b\x08\x00" + bytes(30), "found magic 1f8b0800"),
        (idx(IMAGES[0, 0]), "in 3 dimensions"),
        (idx(IMAGES)[:9], "truncated inside its header"),
        (idx(IMAGES)[:-1], "announces sizes .2, 3, 4., 40 bytes in all, the file has 39"),
        (idx(IMAGES) + b"x", "the file has 41"),
    ):
        with pytest.raises(DataError, match=message):
            parse_idx(content, dimensions=3, source="train-images")


@given(st.binary(max_size=40) | st.binary(max_size=30).map(lambda tail: idx(IMAGES)[:8] + tail))
def test_any_bytes_parse_or_are_refused(content: bytes) -> None:
    for parse in (
        lambda: parse_idx(content, dimensions=3, source="x"),
        lambda: parse_cifar(content, label_bytes=1, classes=10, source="x"),
    ):
        with contextlib.suppress(DataError):
            parse()


def synthetic_cifar(rows: int, label_bytes: int, classes: int, seed: int) -> bytes:
    """Deterministic synthetic records of CIFAR's binary format; labels go round the classes."""
    draw = np.random.default_rng(seed)
    records = draw.integers(0, 256, (rows, label_bytes + 3072), dtype=np.uint8)
    records[:, label_bytes - 1] = np.arange(rows) % classes
    records[:, : label_bytes - 1] = 200  # a coarse label is not looked at
    return records.tobytes()


@pytest.mark.parametrize(("label_bytes", "classes"), [(1, 10), (2, 100)])
def test_cifar_records(label_bytes: int, classes: int) -> None:
    content = synthetic_cifar(120, label_bytes, classes, 0)
    images, labels = parse_cifar(content, label_bytes=label_bytes, classes=classes, source="x")
    assert images.shape == (120, 3, 32, 32)
    assert labels.tolist() == [at % classes for at in range(120)]
    # The first 1024 bytes after the labels are the red plane, row by row.
    assert images[0, 0, 1, 0] == content[label_bytes + 32]
    assert images[0, 1, 0, 0] == content[label_bytes + 1024]


def test_damaged_cifar_is_refused() -> None:
    for content, message in (
        (b"", "found 0 bytes"),
        (bytes(3072), "expected records of 3073 bytes"),
        (bytes(3073) + b"\x0a" + bytes(3072), "record 1 has label 10, expected 0 to 9"),
    ):
        with pytest.raises(DataError, match=message):
            parse_cifar(content, label_bytes=1, classes=10, source="data_batch_1.bin")


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_folder_is_read_with_its_official_split(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = DATASETS[name]
    label_bytes, classes = (1, 10) if name == "cifar10" else (2, 100)
    files = []
    home = tmp_path / entry.subfolders[0]
    home.mkdir()
    for seed, file in enumerate(entry.files):
        content = synthetic_cifar(200, label_bytes, classes, seed)
        (home / file.name).write_bytes(content)
        files.append(replace(file, size=len(content)))
    monkeypatch.setattr(catalogue, "DATASETS", {name: replace(entry, files=tuple(files))})
    data = load_data(DataSettings(dataset=name, views=3, folder=tmp_path), seed=0)
    assert (len(data.train_rows), len(data.test_rows)) == (200 * (len(files) - 1), 200)
    assert data.active.features.shape[1:] == (3, 10, 32)
    assert 0 <= float(data.active.features.min()) < float(data.active.features.max()) == 1


def small_mnist(folder: Path, *, labels: int = 40) -> DataSet:
    """Synthetic images of MNIST's size in `folder`, and MNIST's entry pinned to them."""
    draw = np.random.default_rng(5)
    arrays = [
        draw.integers(0, 256, (40, 28, 28), dtype=np.uint8),
        (np.arange(labels) % 10).astype(np.uint8),
        draw.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        (np.arange(20) % 10).astype(np.uint8),
    ]
    files = []
    folder.mkdir(parents=True, exist_ok=True)
    for file, array in zip(DATASETS["mnist"].files, arrays, strict=True):
        content = idx(array)
        (folder / f"{file.name}.gz").write_bytes(gzip.compress(content))
        files.append(DataFile(file.name, size=len(content)))
    return replace(DATASETS["mnist"], files=tuple(files))


def test_idx_folder_is_found_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = small_mnist(tmp_path / "second" / "mnist")
    monkeypatch.setattr(catalogue, "DATASETS", {"mnist": entry})
    monkeypatch.setenv(
        "SECURE_APFED_DATA", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}"
    )
    data = load_data(DataSettings(dataset="mnist"), seed=0)
    assert (len(data.train_rows), len(data.test_rows)) == (40, 20)
    assert data.active.features.shape == (60, 1, 14, 28)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="40 images, but 39 labels"):
        (entry := small_mnist(tmp_path / "mnist", labels=39)).read(entry, tmp_path)
    entry = small_mnist(tmp_path / "mnist")
    with pytest.raises(DataError, match="images of 28 rows, mnist's have 32"):
        (other := replace(entry, height=32)).read(other, tmp_path)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="truncated or damaged gzip file"):
        entry.read(entry, tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        read_file(tmp_path)


def test_a_missing_file_names_the_folders_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_data(DataSettings(dataset="cifar10", folder=tmp_path), seed=0)
    for part in (str(tmp_path / "cifar10"), "cifar-10-batches-bin", "data_batch_1.bin.gz"):
        assert part in str(caught.value)
    assert "run `secure-apfed data fetch cifar10`" in str(caught.value)


def test_a_wrong_file_says_what_was_expected_and_found(tmp_path: Path) -> None:
    small_mnist(tmp_path / "mnist")
    (file, *_) = DATASETS["mnist"].files
    (tmp_path / "mnist" / f"{file.name}.gz").write_bytes(gzip.compress(bytes(file.size)))
    with pytest.raises(DataError) as caught:
        load_data(DataSettings(dataset="mnist", folder=tmp_path), seed=0)
    assert f"expected {DATASETS['mnist'].files[0].sha256}" in str(caught.value)
    assert "remove it and run `secure-apfed data fetch mnist`" in str(caught.value)


def test_sizes_and_digests_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 uncompressed bytes, expected 4"):
        check_digest(b"abc", DataFile("a", size=4), path=tmp_path, remedy="")
    with pytest.raises(DataError, match="the SHA-256 of its uncompressed bytes is ba7816bf"):
        check_digest(b"abc", DataFile("a", 3, "0" * 64), path=tmp_path, remedy="")
    right = DataFile("a", 3, hashlib.sha256(b"abc").hexdigest())
    check_digest(b"abc", right, path=tmp_path, remedy="")


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SECURE_APFED_DATA", raising=False)
    assert default_folder() == Path("~/.cache/secure-apfed").expanduser()
    monkeypatch.setenv("SECURE_APFED_DATA", str(tmp_path))
    assert data_folders(None) == (tmp_path,)
    assert data_folders(Path("x")) == (Path("x"),)


# Downloads from a server on this machine: whole, interrupted, wrong, absent.


@dataclass
class Server:
    """A loopback server; `asked` holds the paths, `cuts` bytes end answers early, once each."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    encoding: str = ""
    cuts: list[int] = field(default_factory=list)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
            """Keep the test's output clean."""

        def do_GET(self) -> None:
            state.asked.append(self.path)
            content = state.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            if state.encoding:
                self.send_header("Content-Encoding", state.encoding)
            self.end_headers()
            with suppress(ConnectionError):  # the other side may have heard enough
                self.wfile.write(content[: state.cuts.pop(0)] if state.cuts else content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        state.url = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield state
        running.shutdown()
        thread.join()


def download(server: Server, *paths: str) -> Download:
    return Download(FILE, tuple(server.url + path for path in paths))


def test_a_file_arrives_whole_under_its_name(server: Server, tmp_path: Path) -> None:
    server.files["/a.gz"] = PACKED
    seen: list[tuple[str, int, int | None]] = []
    found = fetch_file(
        download(server, "/a.gz"),
        tmp_path / "new",
        dataset="d",
        progress=lambda *at: seen.append(at),
    )
    assert found == [tmp_path / "new" / "train-images.gz"]
    assert found[0].read_bytes() == PACKED
    assert seen[-1] == ("train-images", len(PACKED), len(PACKED))
    assert list((tmp_path / "new").iterdir()) == found


def test_what_is_there_is_kept_if_right_and_replaced_if_wrong(
    server: Server, tmp_path: Path
) -> None:
    server.files["/a.gz"], server.encoding = PACKED, "gzip"  # a packing called an encoding
    (tmp_path / "train-images.gz").write_bytes(gzip.compress(PLAIN, 1))  # packed otherwise
    fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
    assert server.asked == []
    for wrong in (b"not gzip", gzip.compress(b"other", mtime=0)):
        (tmp_path / "train-images.gz").write_bytes(wrong)
        fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
        assert (tmp_path / "train-images.gz").read_bytes() == PACKED


def test_an_interruption_is_tried_again_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    server.files["/a.gz"] = PACKED
    server.cuts = [300, 100, 10]
    with pytest.raises(DataError, match=r"was interrupted .* Run it again, or put the file"):
        fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
    assert list(tmp_path.iterdir()) == []
    server.cuts = [300]
    (found,) = fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
    assert found.read_bytes() == PACKED


def test_wrong_bytes_are_refused_and_removed(server: Server, tmp_path: Path) -> None:
    other = f"the SHA-256 .* expected {FILE.sha256}.* sends other bytes"
    for content, message in (
        (gzip.compress(PLAIN[::-1], mtime=0), other),
        (b"<html>sign in</html>", "truncated or damaged gzip file"),
    ):
        server.files["/a.gz"] = content
        with pytest.raises(DataError, match=message):
            fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
        assert list(tmp_path.iterdir()) == []


@contextmanager
def in_little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


def test_a_small_download_is_not_inflated_to_a_large_one(server: Server, tmp_path: Path) -> None:
    """6.6 MB became 3.2 GB before the digest was looked at."""
    server.files["/a.gz"] = gzip.compress(bytes(50_000_000))
    refusal = f"more than the {len(PLAIN)} uncompressed bytes expected"
    with in_little_memory(), pytest.raises(DataError, match=refusal):
        fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_sends_on_and_on_is_stopped(server: Server, tmp_path: Path) -> None:
    server.files["/a.gz"] = gzip.compress(os.urandom(10_000_000))
    seen: list[int] = []
    with pytest.raises(DataError, match=r"sends more than the \d+ bytes that the file may"):
        fetch_file(
            download(server, "/a.gz"), tmp_path, dataset="d",
            progress=lambda file, done, total: seen.append(done),
        )  # fmt: skip
    assert max(seen, default=0) < 1_000_000
    assert list(tmp_path.iterdir()) == []


def test_what_lies_there_is_not_inflated_either(server: Server, tmp_path: Path) -> None:
    server.files["/a.gz"] = PACKED
    (tmp_path / "train-images.gz").write_bytes(gzip.compress(bytes(200_000_000)))
    with in_little_memory():
        fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
    assert (tmp_path / "train-images.gz").read_bytes() == PACKED


def test_what_cannot_be_fetched_names_the_address(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    server.files |= {"/wrong.gz": gzip.compress(b"other", mtime=0), "/right.gz": PACKED}
    nobody = Download(FILE, ("http://127.0.0.1:1/a.gz",))
    for wanted, folder, message in (
        (download(server, "/a.gz"), "d", r"could not fetch train-images: .*/a.gz answers 404"),
        (nobody, "d", r"127.0.0.1:1/a.gz was interrupted"),
        (download(server, "/right.gz"), "file/d", "cannot write"),
    ):
        with pytest.raises(DataError, match=message):
            fetch_file(wanted, tmp_path / folder, dataset="d")
    addresses = download(server, "/absent.gz", "/wrong.gz", "/right.gz")
    (found,) = fetch_file(addresses, tmp_path / "e", dataset="d")
    assert found.read_bytes() == PACKED


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def test_an_archive_gives_its_members_and_nothing_else(server: Server, tmp_path: Path) -> None:
    packed = archive({"c/a.bin": b"aa", "../../evil": b"x", "/b.bin": b"bbb"})
    server.files["/c.tar.gz"] = packed
    file = DataFile("c.tar.gz", len(packed), hashlib.sha256(packed).hexdigest())

    def fetched(**sizes: int) -> list[Path]:
        members = tuple(DataFile(f"{name}.bin", size) for name, size in sizes.items())
        wanted = Download(file, (f"{server.url}/c.tar.gz",), members)
        return fetch_file(wanted, tmp_path / "one" / "two", dataset="c")

    with pytest.raises(DataError, match=r"lacks d\.bin"):
        fetched(a=2, d=1)
    with pytest.raises(DataError, match="2 uncompressed bytes, expected 9"):
        fetched(a=9)
    assert [path.read_bytes() for path in fetched(a=2, b=3)] == [b"aa", b"bbb"]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.bin", "b.bin"]


def test_fetch_by_name(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/a.gz"] = PACKED
    entry = replace(DATASETS["mnist"], files=(FILE,), downloads=(download(server, "/a.gz"),))
    monkeypatch.setattr(catalogue, "DATASETS", {"mnist": entry})
    assert fetch("mnist", tmp_path) == (tmp_path / "mnist" / "train-images.gz",)
    monkeypatch.setenv("SECURE_APFED_DATA", str(tmp_path / "other"))
    assert fetch("mnist") == (tmp_path / "other" / "mnist" / "train-images.gz",)


def test_sets_that_need_or_allow_no_download() -> None:
    assert fetch("digits") == ()
    with pytest.raises(DataError, match=r"credit_card cannot be fetched: put UCI_Credit_Card.csv"):
        fetch("credit_card")
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        fetch("mnits")
