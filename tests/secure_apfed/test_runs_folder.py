"""Run folders: altered, cut, lost, behind links; runs on the same and on other tables."""

import csv
import errno
import hashlib
import io
import json
import math
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from apfed_experiments.report import load_run, write_report
from apfed_experiments.report import run as audited
from apfed_experiments.study import Point, finish_trial
from secure_apfed.base import files
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.data import PartyTable, VerticalData, load_data
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError, ModelError
from secure_apfed.exchange import Kind
from secure_apfed.learning.release import ChargedGuard
from secure_apfed.methods import PartyContext, SimulationInputs, fresh_secrets
from secure_apfed.methods.session_sum import AnswerLimits
from secure_apfed.privacy.accountants import GaussianRelease
from secure_apfed.privacy.ledger import BudgetExhaustedError
from secure_apfed.runs.active_model import Predictions, RowComparison, load_model
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import RunResult, load_recording
from secure_apfed.runs.run import PastAlignment, run, share_alignments
from tests.secure_apfed.seats import contract, own_of
from tests.secure_apfed.small_runs import interrupt_run, read_stderr, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
ONE_EPOCH = {"epochs": 1, "batch_size": 64, "device": "cpu"}
OF_ALL = {
    "config.yaml",
    "contract.json",
    "seeds.json",
    "versions.json",
    "metrics.jsonl",
    "model.json",
    "alignment.safetensors",
    "transcript.msgpack",
    "transcript.json",
    "transcript-0.bin",
    "result.json",
    "test-scores.safetensors",
    "common.json",
}
SHORT = {"train": ONE_EPOCH}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind of method; between them they write every file."""
    made = {method: tmp_path_factory.mktemp("run") / method for method in ("tvfl", "apfed_c")}
    for method, folder in made.items():
        run(small_config(method, train=ONE_EPOCH), folder)
    return made


@pytest.fixture
def copied(finished: dict[str, Path], tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(finished["apfed_c"], tmp_path / "run"))
    (folder / "SHA256SUMS").unlink()
    return folder


# Altered, cut or lost.


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize(("method", "shift"), [("tvfl", 0), ("apfed_c", 1)])
def test_attacks_are_mounted_on_no_altered_recording(
    finished: dict[str, Path], method: str, shift: int, tmp_path: Path
) -> None:
    noted = (finished[method] / "SHA256SUMS").read_text().splitlines()
    names = {line.split("  ")[1] for line in noted}
    whole = finished[method]
    logs = {
        path.relative_to(whole).as_posix()
        for kind in ("ledger-*", "answers-*")
        for path in whole.rglob(kind)
    }
    own = {"model.safetensors", *(["encoders.safetensors"] if method == "tvfl" else [])}
    assert names == OF_ALL | own | logs
    for at, name in enumerate(sorted(names), start=shift):
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        cut = partial(os.truncate, length=(folder / name).stat().st_size - 3)
        (_flip, cut, Path.unlink)[at % 3](folder / name)
        with pytest.raises(CheckpointError, match=name):
            load_recording(folder)


@pytest.mark.parametrize(
    ("name", "read"), [("metrics.jsonl", write_report), ("model.safetensors", load_model)]
)
def test_no_altered_file_makes_a_report_or_model(
    name: str, read: Callable[[Path], object], finished: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / name
    shutil.copytree(finished["apfed_c"], folder)
    _flip(folder / name)
    with pytest.raises(CheckpointError, match="not as the run left it"):
        read(folder)


def test_what_was_changed_on_purpose_is_accepted_as_the_error_says(
    finished: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "r")
    shutil.copytree(finished["apfed_c"], folder.path)
    old = folder.config.read_text()
    folder.config.write_text(old.replace("name: test", "name: renamed", 1))
    assert execute(["report", str(folder.path)]) == 3
    assert "sha256sum config.yaml" in read_stderr(capsys)

    told = f"{hashlib.sha256(folder.config.read_bytes()).hexdigest()}  config.yaml\n"
    lines = folder.digests.read_text().splitlines(keepends=True)
    folder.digests.write_text("".join([told, *lines[1:]]))
    assert execute(["report", str(folder.path)]) == 0


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
def test_the_digests_are_as_sha256sum_reads_them(finished: dict[str, Path]) -> None:
    for folder in finished.values():
        subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder, check=True)


# Written by somebody else.

NOT_JSON = (
    b"",
    b'{"a": 1',
    b"[" * 200_000,
    b'{"a":' * 200_000,
    b"\xff\xfe\x00",
    b"9" * 100_000,
    b'{"a": 123456789012345678901234567890}',
    b'{"a": NaN}',
    b'{"a": -Infinity}',
)


@pytest.mark.parametrize(
    "content", NOT_JSON, ids=lambda content: f"{len(content)} bytes {content[:12]!r}"
)
def test_what_is_no_json_is_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    cut = r"one\.json: is not JSON, so it was cut off or altered: "
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{cut}.*copy"):
        files.load_json(path, dict[str, Any])
    if content:
        path.write_bytes(b'{"a": 1}\n' + content)
        with pytest.raises(CheckpointError, match=f"{cut}.*line 2"):
            files.load_json_lines(path, dict[str, Any])


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b'"a"', b"true"])
def test_json_of_another_shape_is_told(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"json: is not as this version writes .*dict"):
        files.load_json(path, dict[str, Any])


def _set(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda card: {**card, **changes}


NINE = [{"kind": "numeric", "name": f"c{n}"} for n in range(9)]
CARDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a number": lambda card: 3,
    "empty": lambda card: {},
    "no classes": _set(classes=[]),
    "classes that are a number": _set(classes=10**9),
    "classes that are numbers": _set(classes=[1, 2]),
    "a model that is a text": _set(model="mlp"),
    "an encoding that is a list": _set(encoding=[]),
    "other columns": _set(encoding={"kind": "columns", "columns": NINE}),
    "wide layers": _set(model={"hidden": [65536] * 40, "network": "mlp"}),
    "many layers": _set(model={"hidden": [1] * 100_000, "network": "mlp"}),
    "a large image": _set(
        encoding={
            "kind": "image",
            "channels": 1,
            "height": 10**6,
            "width": 10**6,
            "end_row": 10**6,
        },
        model={"network": "mlp"},
    ),
}


@pytest.mark.parametrize("change", CARDS.values(), ids=CARDS)
def test_a_card_that_somebody_wrote_is_checked(
    change: Callable[[dict[str, Any]], Any], copied: Path
) -> None:
    card = copied / "model.json"
    whole = card.read_bytes()
    card.write_text(json.dumps(change(json.loads(whole))))
    with pytest.raises((CheckpointError, ModelError), match=r"model\.json|holds a run of"):
        load_model(copied)


Tensors = dict[str, torch.Tensor]
PARAMETERS: dict[str, Callable[[Tensors, str], Tensors]] = {
    "none": lambda tensors, first: {},
    "whole numbers": lambda tensors, first: {
        name: one.to(torch.int64) for name, one in tensors.items()
    },
    "one of another kind": lambda tensors, first: {**tensors, first: tensors[first].double()},
    "one of another shape": lambda tensors, first: {**tensors, first: torch.zeros(3)},
}


@pytest.mark.parametrize("change", PARAMETERS.values(), ids=PARAMETERS)
def test_parameters_that_somebody_wrote_are_checked(
    change: Callable[[Tensors, str], Tensors], copied: Path
) -> None:
    path = copied / "model.safetensors"
    tensors = load_file(path)
    save_file(change(tensors, next(iter(tensors))), path)
    with pytest.raises(ModelError, match=r"safetensors and model\.json do not make a model"):
        load_model(copied)


def replace_file(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("transcript.msgpack", load_recording),
        ("alignment.safetensors", load_recording),
        ("model.safetensors", load_recording),
        ("model.safetensors", load_model),
    ],
)
def test_only_plain_files_of_a_finished_run_are_read(
    kind: str, name: str, read: Callable[[Path], object], copied: Path
) -> None:
    """An endless or silent file would take all memory or all time."""
    path = copied / name
    replace_file(path, kind)
    with pytest.raises(CheckpointError, match=f"{name}: is no plain file"):
        read(copied)
    path.rmdir() if kind == "folder" else path.unlink()


def test_a_file_is_read_no_further_than_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    assert files.load_bytes(path, max_bytes=4) == b"1234"
    with pytest.raises(CheckpointError, match=r"x: is larger than 3 bytes"):
        files.load_bytes(path, max_bytes=3)


@pytest.mark.parametrize(
    ("read", "maximum"),
    [
        (files.load_bytes, files.MAX_BYTES),
        (lambda path: files.load_json(path, dict[str, Any]), files.MAX_JSON_BYTES),
        (lambda path: files.load_json_lines(path, dict[str, Any]), files.MAX_JSON_BYTES),
    ],
    ids=["bytes", "JSON", "lines of JSON"],
)
def test_every_reader_reads_no_further_than_its_bound(
    read: Callable[[Path], object], maximum: int, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    os.truncate(path, maximum + 1)  # sparse: reading it would take as much memory
    with pytest.raises(CheckpointError, match=rf"x: is larger than {maximum} bytes"):
        read(path)


def test_an_audit_ends_whatever_is_claimed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited, "_MAX_AUDITED_RELEASES", 3)
    path = copied / "result.json"
    result = json.loads(path.read_bytes())
    result["privacy"]["releases"] = 2**31
    path.write_text(json.dumps(result))
    found = audited.audit_guard(load_run(copied))
    assert found is not None
    assert found.releases == 3


@pytest.mark.parametrize("releases", [-1, 2**31 + 1, 2**63])
def test_a_number_of_releases_out_of_range_is_refused(releases: int, copied: Path) -> None:
    path = copied / "result.json"
    result = json.loads(path.read_bytes())
    result["privacy"]["releases"] = releases
    path.write_text(json.dumps(result))
    with pytest.raises(CheckpointError, match=r"result\.json: .*'privacy\.releases'"):
        write_report(copied)


USUAL = (b"", b"\x00" * 100, b"[" * 5000, b"\xff" * 100, b"{}", b"[]", b"null")
FRAMES = (b"\x90", b"\x80", b"\xc0", b"\x92\x01\x02", b"\x91" * 5000)
NAMES = ("/dev/zero", "../run/model.json", "sub/model.json", ".", "", "..", "model.json\x00")
DIGESTS = (b"\xff\xfe", b"one word\n", *(f"{0:064}  {name}\n".encode() for name in NAMES))
DAMAGES: list[tuple[str, bytes, str | None]] = [
    *(("transcript.msgpack", one, "cannot be read as this version writes them") for one in FRAMES),
    *(("SHA256SUMS", content, r"SHA256SUMS(:| holds other lines)") for content in DIGESTS),
    *(("config.yaml", content, None) for content in USUAL),
    *(("model.json", content, None) for content in USUAL),
    *(("model.safetensors", content, None) for content in USUAL),
    *(("alignment.safetensors", content, None) for content in USUAL),
]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    DAMAGES,
    ids=[f"{name} {content.strip(b'0')[:16]!r}" for name, content, _ in DAMAGES],
)
def test_damage_anywhere_is_an_error_for_people(
    name: str, content: bytes, said: str | None, copied: Path
) -> None:
    (copied / "SHA256SUMS").touch()
    (copied / name).write_bytes(content)
    with pytest.raises(ApfedError, match=said):
        load_recording(copied)


# Behind links, and open to others.


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def open_mask() -> Iterator[None]:
    """Files that are made are everybody's, where nothing shuts them."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "wedding.png").write_text("precious")
    return folder


def test_a_subfolder_is_made_and_is_no_link_and_no_file(tmp_path: Path) -> None:
    assert files.own_subfolder(tmp_path / "new").stat().st_mode & 0o077 == 0
    files.own_subfolder(tmp_path / "new")


@pytest.mark.parametrize("name", ["link", "nowhere", "file"])
def test_a_subfolder_is_no_link_and_no_file(name: str, tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=f"{name} is a link or a file in place"):
        files.own_subfolder(tmp_path / name)
    assert not (tmp_path / "absent").exists()


def test_a_report_and_a_study_write_behind_no_link(
    copied: Path, tmp_path: Path, elsewhere: Path
) -> None:
    (copied / "pictures").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="pictures is a link or a file in place"):
        write_report(copied)
    (tmp_path / "test-seed0").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="test-seed0 is a link or a file in place"):
        finish_trial(Point(config=small_config(train=ONE_EPOCH), folder=tmp_path).make_trial(0))
    assert [file.name for file in elsewhere.iterdir()] == ["wedding.png"]


@pytest.mark.slow
def test_a_resumed_run_follows_no_link(tmp_path: Path, elsewhere: Path, open_mask: None) -> None:
    config = small_config(labels={"mechanism": "randomised_response", "epsilon": 1.0})
    folder = tmp_path / "runs" / "sent"
    interrupt_run(config, folder, at_step=9)
    assert mode(folder) == 0o700
    party = folder / "parties" / "active"
    for path in (
        folder / "metrics.jsonl",
        max(party.glob("checkpoint-*.bin")),
        party / "identity.pem",
        party / "labels-active.log",  # read at the run's end, whose checkpoint is another one
    ):
        whole = path.read_bytes()
        replace_file(path, "pipe")
        with pytest.raises(CheckpointError, match=path.name):
            run(config, folder, resume=True)
        path.unlink()
        path.write_bytes(whole)
    shutil.rmtree(folder / "tensorboard")
    (folder / "tensorboard").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="tensorboard is a link or a file in place"):
        run(config, folder, resume=True)
    assert [file.name for file in elsewhere.iterdir()] == ["wedding.png"]
    (folder / "tensorboard").unlink()
    victim = (folder / "metrics.jsonl").rename(tmp_path / "victim")
    before = victim.read_bytes()
    (folder / "metrics.jsonl").symlink_to(victim)
    folder.chmod(0o755)
    run(config, folder, resume=True)
    assert victim.read_bytes() == before
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    assert mode(folder) == 0o700


@pytest.mark.parametrize("kind", ["link", "nowhere", "pipe", "folder"])
def test_the_lock_is_a_plain_file(kind: str, tmp_path: Path, elsewhere: Path) -> None:
    precious = elsewhere / "wedding.png"
    folder = tmp_path / kind
    folder.mkdir(mode=0o700)
    lock = folder / ".lock"
    if kind in ("pipe", "folder"):
        replace_file(lock, kind)
    else:
        lock.symlink_to(precious if kind == "link" else elsewhere / "absent")
    with pytest.raises(CheckpointError, match=r"\.lock"):
        run(small_config(train=ONE_EPOCH), folder)
    assert precious.read_text() == "precious"
    assert not (elsewhere / "absent").exists()


@pytest.mark.parametrize(
    ("party", "log"),
    [
        ("active", "ledger-active.jsonl"),
        ("active", "labels-active.log"),
        ("passive-1", "answers-passive-1.jsonl"),
    ],
)
def test_the_logs_are_plain_files(party: str, log: str, tmp_path: Path) -> None:
    folder = tmp_path / log
    folder.mkdir(mode=0o700)
    (folder / "parties").mkdir()
    (folder / "parties" / party).mkdir(mode=0o700)
    (folder / "parties" / party / log).mkdir()
    with pytest.raises(CheckpointError, match=f"remove .*{log}, .* lies in the place of a log"):
        run(small_config(train=ONE_EPOCH), folder)


def test_no_name_of_a_passive_reaches_another_file(tmp_path: Path) -> None:
    config = small_config()
    folder = tmp_path / "run"
    secrets = {name: fresh_secrets(config, name, log_folder=folder) for name in ("shop", "../shop")}
    start = SimulationInputs(config=config, data=load_data(config.data, seed=0), secrets=secrets)
    AnswerLimits.from_contract(own_of(start, "shop"), contract(), position_count=3)
    assert (folder / "answers-shop.jsonl").exists()
    with pytest.raises(ConfigError, match="no file of"):
        AnswerLimits.from_contract(own_of(start, "../shop"), contract(), position_count=3)
    with pytest.raises(ConfigError, match="no file of"):
        RunFolder(folder).get_party_path("../shop")


@pytest.mark.usefixtures("open_mask")
def test_a_folder_of_other_things_is_not_shut_from_its_users(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    (shared / "notes.txt").write_text("of all of us")
    with pytest.raises(CheckpointError, match="others may read it, and it holds other files"):
        run(small_config(), shared)
    assert mode(shared) == 0o777
    assert [file.name for file in shared.iterdir()] == ["notes.txt"]
    shared.chmod(0o700)
    files.make_private(shared)
    (tmp_path / "made").mkdir(mode=0o777)
    files.make_private(tmp_path / "made")
    assert mode(tmp_path / "made") == 0o700
    with pytest.raises(CheckpointError, match="cannot be a run folder"):
        run(small_config(), shared / "notes.txt")


# Files kept over sessions, and CSV for spreadsheets, without a formula.

FORMULAS = (
    "=1+1",
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(A1)",
    "=",
    "-",
    "+",
    "@",
    "-inf",
    "-1,5",
    "+49 30 1",
    "--1",
    "-0x1",
    "-1_000",
    "\uff1d1",
    "\uff0b1",
    "\uff0d1",
    "\uff20x",
    "-\uff11",
)


def test_a_file_is_made_for_its_owner_and_written_at_its_end(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "way").symlink_to(tmp_path / "folder")  # folders above may be links
    for text in (b"one", b"two"):
        with os.fdopen(files.open_regular(tmp_path / "way" / "x", create=True), "ab") as file:
            file.write(text)
    made = tmp_path / "folder" / "x"
    assert made.read_bytes() == b"onetwo"
    assert stat.S_IMODE(made.stat().st_mode) & 0o077 == 0


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is gone"):
        files.open_regular(tmp_path / "absent", create=False)
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("link", "symbolic link"),
        ("nowhere", "symbolic link"),
        ("pipe", "regular"),
        ("folder", "regular"),
    ],
)
def test_what_is_no_regular_file_is_refused_whatever_it_is(
    name: str, message: str, tmp_path: Path, elsewhere: Path
) -> None:
    precious = elsewhere / "wedding.png"
    (tmp_path / "link").symlink_to(precious)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    for kind in ("pipe", "folder"):
        replace_file(tmp_path / kind, kind)
    with pytest.raises(CheckpointError, match=message):
        files.open_regular(tmp_path / name, create=True)
    assert precious.read_text() == "precious"


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.bin"
    files.write_atomically(path, b"before")

    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("os.fsync", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint\.bin'"):
        files.write_atomically(path, b"after")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(path.name, b"before")]


def test_what_begins_a_formula_stands_behind_an_apostrophe() -> None:
    assert [files.escape_cell(text) for text in FORMULAS] == [f"'{text}" for text in FORMULAS]
    assert files.escape_cell("  =1") == "  '=1"
    usual = (
        "",
        "a",
        "a=1",
        "-1",
        "-1.5",
        "+2",
        "-.5",
        "-1e-9",
        "'=1",
        " x",
        -1.5,
        -3,
        None,
        True,
        "a = b; c - d",
    )
    assert [files.escape_cell(value) for value in usual] == [*usual]
    blank = "\n" * 1_000_000  # takes no time
    assert (files.escape_cell(blank), files.escape_cell(f"{blank}=")) == (blank, f"{blank}'=")


def test_no_cell_begins_a_formula_where_a_spreadsheet_splits_elsewhere() -> None:
    """Split at other signs: a semicolon separates where a comma is the decimal mark."""
    for separator, before in product((";", "\t", "\r", "\n", "; ", ';"', "x\t;"), ("", 'x"', "-1")):
        text = f"{before}{separator}="
        frame = pd.DataFrame({"a": ["y"], f"{text}A": [f"{text}1+1"]})
        for split in (",", ";", "\t"):
            for row in csv.reader(io.StringIO(files.to_csv(frame), newline=""), delimiter=split):
                assert not [value for value in row if value.lstrip().startswith(("=", "-"))], text


def test_names_of_columns_and_predictions_are_cells_too(tmp_path: Path) -> None:
    frame = pd.DataFrame({"=a": [-1.5, 2.0], "b": ["=1", "x,\n=y"]})
    lines = list(csv.reader(io.StringIO(files.to_csv(frame))))
    assert lines == [["'=a", "b"], ["-1.5", "'=1"], ["2.0", "x,\n'=y"]]
    told = Predictions(
        ids=("=HYPERLINK(1)", "-7"),
        classes=("@late", "paid"),
        what="probabilities",
        outputs=torch.tensor([[0.75, 0.25], [0.25, 0.75]]),
        decided=torch.tensor([0, 1]),
        compared=RowComparison(rows=2),
    )
    told.write_file(tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["id", "class", "p(@late)", "p(paid)"],
            ["'=HYPERLINK(1)", "'@late", "0.75", "0.25"],
            ["-7", "paid", "0.25", "0.75"],
        ]
    told.write_file(tmp_path / "out.json")
    assert pd.read_json(tmp_path / "out.json")["id"].tolist()[0] == "=HYPERLINK(1)"


def rows_of(result: RunResult) -> torch.Tensor:
    return result.recording.alignment["active"]


def alignment_bytes(result: RunResult) -> int:
    flows = result.recording.transcript.flows
    return sum(flow.wire_bytes for flow in flows if flow.kind is Kind.ALIGNMENT)


@pytest.mark.slow
def test_runs_on_the_same_tables_stand_in_one_order_count_its_bytes_and_find_the_same() -> None:
    config = small_config("apfed_c", **SHORT)
    votes = small_config("votes", **SHORT)
    past: dict[str, PastAlignment] = {}
    with share_alignments(past):
        first = run(config, None)
        second = run(config, None)
        other_method = run(votes, None)
        assert run(small_config("single_view", **SHORT), None).wire_bytes == 0
        assert len(past) == 1
        other_tables = run(votes.model_copy(update={"seed": 1}), None)
    apart = run(config, None)
    for later in (second, other_method):
        assert torch.equal(rows_of(first), rows_of(later))
        assert alignment_bytes(first) == alignment_bytes(later) > 0
    for other in (other_tables, apart):
        assert not torch.equal(rows_of(first), rows_of(other))
    assert apart.accuracy == first.accuracy == second.accuracy
    # Numbers of messages are shorter where an alignment did not use any.
    assert second.wire_bytes == pytest.approx(first.wire_bytes, rel=1e-3)


@pytest.mark.slow
def test_tables_that_are_brought_share_an_alignment_where_their_ids_are_the_same() -> None:
    config = small_config("votes", **SHORT)
    tables, again = (load_data(config.data, seed=config.seed) for _ in range(2))
    features_changed = change_table(config, "passive-1", negate_features)
    with share_alignments({}):
        first = run(config, None, data=tables)
        for same_people in (tables, again, features_changed):
            assert torch.equal(rows_of(first), rows_of(run(config, None, data=same_people)))
        others = [
            run(config, None, data=change_table(config, "passive-1", reverse_rows)),
            run(config, None),
        ]
    for other in others:
        assert not torch.equal(rows_of(first), rows_of(other))


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_its_own_order(tmp_path: Path) -> None:
    config = small_config("apfed_c")
    interrupt_run(config, tmp_path / "run", at_step=9)
    with share_alignments({}):
        shared = run(small_config("votes", **SHORT), None)
        resumed = run(config, tmp_path / "run", resume=True)
    assert not torch.equal(rows_of(shared), rows_of(resumed))


def change_table(
    config: Config, party: str, change: Callable[[PartyTable], PartyTable]
) -> VerticalData:
    """Return the run's tables, one of them changed."""
    data = load_data(config.data, seed=config.seed)
    tables = [change(one) if one.name == party else one for one in data.tables]
    return replace(data, table=tables[0], passives=tuple(tables[1:]))


def reverse_rows(table: PartyTable) -> PartyTable:
    labels = None if table.labels is None else table.labels.flip(0)
    return replace(table, ids=table.ids[::-1], features=table.features.flip(0), labels=labels)


def negate_features(table: PartyTable) -> PartyTable:
    return replace(table, features=-table.features)


OTHERS: list[tuple[str, Callable[[PartyTable], PartyTable]]] = [
    ("active", reverse_rows),
    ("passive-1", reverse_rows),
    (
        "passive-2",
        lambda table: replace(
            table,
            ids=(*table.ids, "else"),
            features=torch.cat([table.features, table.features[:1]]),
        ),
    ),
    ("passive-1", lambda table: replace(table, ids=("else", *table.ids[1:]))),
    ("active", lambda table: replace(table, labels=1 - cast("torch.Tensor", table.labels))),
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("mechanism", ["gaussian", "frozen_gaussian"])
def test_other_people_or_labels_are_refused(mechanism: str, tmp_path: Path) -> None:
    config = small_config(guard={"mechanism": mechanism, "sigma": 1.0})
    interrupt_run(config, tmp_path, at_step=9)
    for party, change in OTHERS:
        with pytest.raises(CheckpointError, match=f"the table of {party} .* positions"):
            run(config, tmp_path, resume=True, data=change_table(config, party, change))


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("changes", "refusal", "log"),
    [
        ({"guard": {"mechanism": "gaussian", "epsilon": 8.0}}, "release 5 of one row", "active"),
        (
            {"guard": {"mechanism": "gaussian", "sigma": 20.0}, "dp_sgd": {"epsilon": 12.0}},
            "training would cost one record epsilon",
            "active+updates",
        ),
    ],
)
def test_changed_features_are_charged(
    changes: dict[str, Any], refusal: str, log: str, tmp_path: Path
) -> None:
    """The noise depends on what it hides: the steps after the checkpoint are played anew."""
    config = small_config(**changes)
    interrupt_run(config, tmp_path, at_step=9)
    ledger = tmp_path / "parties" / "active" / f"ledger-{log}.jsonl"
    before = ledger.read_bytes()
    with pytest.raises(BudgetExhaustedError, match=refusal):
        run(config, tmp_path, resume=True, data=change_table(config, "active", negate_features))
    assert ledger.read_bytes().startswith(before)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(("noise", "ends"), [("reproducible_insecure", True), ("secret", False)])
@pytest.mark.parametrize("method", ["apfed_c", "single_view"])
def test_noise_of_the_seed_ends_every_claim(
    method: str, noise: str, ends: bool, tmp_path: Path
) -> None:
    """The steps that are played anew have the same noise: their difference has none."""
    guard = {"mechanism": "gaussian", "sigma": 20.0, "noise": noise}
    config = small_config(method, guard=guard, dp_sgd={"noise_multiplier": 20.0})
    interrupt_run(config, tmp_path, at_step=9)
    data = change_table(config, "active", negate_features)
    privacy = run(config, tmp_path, resume=True, data=data).privacy
    sent = method == "apfed_c"
    assert math.isinf(privacy.epsilon_x) is (ends and sent)
    assert math.isinf(privacy.epsilon_y) is math.isinf(privacy.epsilon_model) is ends
    assert privacy.releases == 5 * sent


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("busy", ["passive-1", "passive-2"])
def test_the_account_is_of_who_spent_most(busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_releases = PartyContext.open_releases

    def open_busy(party: PartyContext, people: int) -> ChargedGuard:
        releases = open_releases(party, people)
        if party.name == busy:
            releases.ledger.charge(step=1000, rows=torch.arange(people), digest=b"one more")
        return releases

    monkeypatch.setattr(PartyContext, "open_releases", open_busy)
    config = small_config("tvfl", guard={"mechanism": "gaussian", "sigma": 20.0})
    result = run(config, None)
    assert result.privacy.releases == config.train.epochs + 1
    once = GaussianRelease(noise_multiplier=10.0).mu
    assert result.privacy.mu == pytest.approx(once * math.sqrt(config.train.epochs + 1))
