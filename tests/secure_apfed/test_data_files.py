"""Built-in sets: official files found, checked, parsed or refused with the reason; those of formats
of their own, from small synthetic files; their stand-ins; and hostile files.
"""

import contextlib
import gzip
import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from secure_apfed.base.files import describe_missing
from secure_apfed.data import DATASETS, catalogue, fetch_dataset, load_data
from secure_apfed.data.files import (
    DataFile,
    DataSet,
    Download,
    TablePool,
    default_folder,
    fetch_file,
    is_idx,
    load_file,
    parse_cifar,
    parse_idx,
)
from secure_apfed.data.sessions import synthetic_sessions
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.settings.data import DataSettings
from tests.memory import trace_memory

PLAIN = bytes(range(256)) * 200
PACKED = gzip.compress(PLAIN, mtime=0)
FILE = DataFile("train-images", len(PLAIN), hashlib.sha256(PLAIN).hexdigest())


def idx(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def test_idx_is_read() -> None:
    assert is_idx(idx(IMAGES))
    assert np.array_equal(parse_idx(idx(IMAGES), dimensions=3, source="x"), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found magic nothing"),
        (b"\x1f\x8b\x08\x00" + bytes(30), "found magic 1f8b0800"),
        (idx(IMAGES[0, 0]), "in 3 dimensions"),
        (idx(IMAGES)[:9], "truncated inside its header"),
        (idx(IMAGES)[:-1], "announces sizes .2, 3, 4., 40 bytes in all, the file has 39"),
        (idx(IMAGES) + b"x", "the file has 41"),
    ],
    ids=["empty", "gzip", "one dimension", "a cut header", "cut", "too long"],
)
def test_damaged_idx_is_refused(content: bytes, message: str) -> None:
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
def test_cifar_is_read(label_bytes: int, classes: int) -> None:
    content = synthetic_cifar(120, label_bytes, classes, 0)
    images, labels = parse_cifar(content, label_bytes=label_bytes, classes=classes, source="x")
    assert images.shape == (120, 3, 32, 32)
    assert labels.tolist() == [at % classes for at in range(120)]
    # The first 1024 bytes after the labels are the red plane, row by row.
    assert images[0, 0, 1, 0] == content[label_bytes + 32]
    assert images[0, 1, 0, 0] == content[label_bytes + 1024]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "found 0 bytes"),
        (bytes(3072), "expected records of 3073 bytes"),
        (bytes(3073) + b"\x0a" + bytes(3072), "record 1 has label 10, expected 0 to 9"),
    ],
    ids=["empty", "cut", "a label"],
)
def test_damaged_cifar_is_refused(content: bytes, message: str) -> None:
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


def test_idx_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = small_mnist(tmp_path / "second" / "mnist")
    monkeypatch.setattr(catalogue, "DATASETS", {"mnist": entry})
    monkeypatch.setenv(
        "SECURE_APFED_DATA", f"{tmp_path / 'first'}{os.pathsep}{tmp_path / 'second'}"
    )
    data = load_data(DataSettings(dataset="mnist"), seed=0)
    assert (len(data.train_rows), len(data.test_rows)) == (40, 20)
    assert data.active.features.shape == (60, 1, 14, 28)
    few = load_data(DataSettings(dataset="mnist", rows=30), seed=0)
    assert len(few.active.ids) == 30
    assert 5 <= len(few.test_rows) <= 15  # a third of all images


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
        load_file(tmp_path)


def test_a_missing_file_names_folders_and_the_command(tmp_path: Path) -> None:
    folders = f"{tmp_path / 'cifar10'}, .*cifar-10-batches-bin"
    said = f"data_batch_1.bin.gz is in any of {folders}.*; run `.* data fetch cifar10`"
    with pytest.raises(DataError, match=said):
        load_data(DataSettings(dataset="cifar10", folder=tmp_path), seed=0)


def test_a_wrong_file_names_its_digest_and_the_command(tmp_path: Path) -> None:
    (file, *_) = DATASETS["mnist"].files
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{file.name}.gz").write_bytes(gzip.compress(bytes(file.size)))
    said = f"expected {file.sha256}; .*remove it and run `secure-apfed data fetch mnist`"
    with pytest.raises(DataError, match=said):
        load_data(DataSettings(dataset="mnist", folder=tmp_path), seed=0)


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


def test_what_is_right_is_kept(server: Server, tmp_path: Path) -> None:
    # a packing called an encoding
    server.files["/a.gz"] = PACKED
    server.encoding = "gzip"
    (tmp_path / "train-images.gz").write_bytes(gzip.compress(PLAIN, 1))  # packed otherwise
    fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
    assert server.asked == []


@pytest.mark.parametrize(
    "wrong", [b"not gzip", gzip.compress(b"other", mtime=0)], ids=["not gzip", "other"]
)
def test_what_is_wrong_is_replaced(wrong: bytes, server: Server, tmp_path: Path) -> None:
    server.files["/a.gz"] = PACKED
    server.encoding = "gzip"
    (tmp_path / "train-images.gz").write_bytes(wrong)
    fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
    assert (tmp_path / "train-images.gz").read_bytes() == PACKED


def test_an_interruption_leaves_nothing_and_another_address_is_tried(
    server: Server, tmp_path: Path
) -> None:
    server.files |= {"/a.gz": PACKED, "/b.gz": PACKED}
    server.cuts = [300]
    with pytest.raises(DataError, match=r"was interrupted .* Run it again, or put the file"):
        fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
    assert list(tmp_path.iterdir()) == []
    server.cuts = [300]
    (found,) = fetch_file(download(server, "/a.gz", "/b.gz"), tmp_path, dataset="d")
    assert found.read_bytes() == PACKED


def test_what_swells_or_never_ends_is_stopped(server: Server, tmp_path: Path) -> None:
    place = tmp_path / "train-images.gz"
    server.files["/a.gz"] = swollen = gzip.compress(bytes(50_000_000))
    place.write_bytes(swollen)  # what lies there is not inflated either
    with trace_memory() as peak:
        with pytest.raises(DataError, match=f"more than the {len(PLAIN)} uncompressed bytes exp"):
            fetch_file(download(server, "/a.gz"), tmp_path, dataset="d")
        assert peak() < 20e6
    place.unlink()
    server.files["/a.gz"] = gzip.compress(os.urandom(10_000_000))
    seen: list[int] = []
    with pytest.raises(DataError, match=r"sends more than the \d+ bytes that the file may"):
        fetch_file(
            download(server, "/a.gz"),
            tmp_path,
            dataset="d",
            progress=lambda file, done, total: seen.append(done),
        )
    assert max(seen, default=0) < 1_000_000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "folder", "message"),
    [
        ("/a.gz", "d", r"could not fetch train-images: .*/a.gz answers 404"),
        ("", "d", r"127.0.0.1:1/a.gz was interrupted"),
        ("/turned.gz", "d", f"the SHA-256 .* expected {FILE.sha256}.* it sends other bytes"),
        ("/page.gz", "d", "truncated or damaged gzip file"),
        ("/right.gz", "file/d", "cannot write"),
    ],
    ids=["absent", "nobody", "turned", "a page", "a file in the way"],
)
def test_what_cannot_be_fetched_leaves_nothing(
    path: str, folder: str, message: str, server: Server, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    server.files |= {
        "/right.gz": PACKED,
        "/page.gz": b"<html>sign in</html>",
        "/turned.gz": gzip.compress(PLAIN[::-1], mtime=0),
    }
    nobody = Download(FILE, ("http://127.0.0.1:1/a.gz",))
    with pytest.raises(DataError, match=message):
        fetch_file(download(server, path) if path else nobody, tmp_path / folder, dataset="d")
    assert not list((tmp_path / "d").glob("*"))


def test_addresses_are_tried_until_one_sends_the_file(server: Server, tmp_path: Path) -> None:
    server.files |= {"/right.gz": PACKED, "/wrong.gz": gzip.compress(b"other", mtime=0)}
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

    def fetch_members(**sizes: int) -> list[Path]:
        members = tuple(DataFile(f"{name}.bin", size) for name, size in sizes.items())
        wanted = Download(file, (f"{server.url}/c.tar.gz",), members)
        return fetch_file(wanted, tmp_path / "one" / "two", dataset="c")

    with pytest.raises(DataError, match=r"lacks d\.bin"):
        fetch_members(a=2, d=1)
    with pytest.raises(DataError, match="2 uncompressed bytes, expected 9"):
        fetch_members(a=9)
    assert [path.read_bytes() for path in fetch_members(a=2, b=3)] == [b"aa", b"bbb"]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a.bin", "b.bin"]


def test_fetch_by_name(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/a.gz"] = PACKED
    entry = replace(DATASETS["mnist"], files=(FILE,), downloads=(download(server, "/a.gz"),))
    monkeypatch.setattr(catalogue, "DATASETS", {"mnist": entry})
    seen: list[tuple[str, int, int | None]] = []
    (found,) = fetch_dataset("mnist", tmp_path, lambda *at: seen.append(at))
    assert found == tmp_path / "mnist" / "train-images.gz"
    assert found.read_bytes() == PACKED
    assert seen[-1] == ("train-images", len(PACKED), len(PACKED))
    assert list(found.parent.iterdir()) == [found]
    monkeypatch.setenv("SECURE_APFED_DATA", str(tmp_path / "other"))
    assert fetch_dataset("mnist") == (tmp_path / "other" / "mnist" / "train-images.gz",)
    monkeypatch.delenv("SECURE_APFED_DATA")
    assert default_folder() == Path("~/.cache/secure-apfed").expanduser()


def test_sets_that_need_or_allow_no_download() -> None:
    assert fetch_dataset("digits") == ()
    with pytest.raises(DataError, match=r"credit_card cannot be fetched: put UCI_Credit_Card.csv"):
        fetch_dataset("credit_card")
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        fetch_dataset("mnits")


def pool(name: str, folder: Path | None = None) -> TablePool:
    entry = DATASETS[name]
    read = entry.read(entry, folder)
    assert isinstance(read, TablePool)
    return read


def test_synthetic_sessions_say_so_and_are_made_alike() -> None:
    entry = DATASETS["synthetic_keystrokes"]
    assert entry.title.startswith("Synthetic: ")
    assert entry.how.startswith("synthetic: ")
    assert pool(entry.name).frame.equals(pool(entry.name).frame)


def test_synthetic_sessions_differ_in_the_order_of_their_steps() -> None:
    """Their means say nothing; how a step follows the last says most in alphanum."""
    read = synthetic_sessions(1200, seed=3)
    means = {}
    order = {}
    for view, (steps, channels) in DATASETS["synthetic_keystrokes"].sequences.items():
        columns = list(DATASETS["synthetic_keystrokes"].natural_views[view])
        flat_NF = read.frame[columns].to_numpy(dtype=np.float64)
        used_N = flat_NF[:, :1]
        steps_NTC = flat_NF[:, 1:].reshape(-1, steps, channels)
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


def test_a_missing_file_says_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"there is no file shop.csv in {tmp_path}, where" in describe_missing(Path("shop.csv"))
    whole = tmp_path / "shop.csv"
    assert describe_missing(whole) == f"there is no file {whole}; check the path"
