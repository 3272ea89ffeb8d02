"""Run folders: their owner's alone, refused where altered, cut or lost, and hostile ones that
somebody else wrote: every file ends in an error that names it, in time, and links lead nowhere.
"""

import hashlib
import json
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from apfed_experiments.finished import FILE, read_examples
from apfed_experiments.report import read_run, write_report
from apfed_experiments.report import run as audited
from apfed_experiments.study import Point, finish
from secure_apfed.cli import execute
from secure_apfed.data import load_data
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError, ModelError
from secure_apfed.files import (
    MOST_BYTES,
    MOST_JSON_BYTES,
    make_private,
    own_subfolder,
    read_bytes,
    read_json,
    read_json_lines,
)
from secure_apfed.methods import Start, fresh_secrets
from secure_apfed.methods.sum_end import Allowance
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import load_recording
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from tests.secure_apfed.seats import contract, own_of
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

ONE_EPOCH = {"epochs": 1, "batch_size": 64, "device": "cpu"}
OF_ALL = {"config.yaml", "contract.json", "seeds.json", "versions.json", "metrics.jsonl",
          "model.json", "alignment.safetensors", "transcript.msgpack", "transcript.json",
          "result.json", "test-scores.safetensors"}  # fmt: skip


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


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize(("method", "shift"), [("tvfl", 0), ("apfed_c", 1)])
def test_attacks_are_mounted_on_no_altered_recording(
    finished: dict[str, Path], method: str, shift: int, tmp_path: Path
) -> None:
    noted = (finished[method] / "SHA256SUMS").read_text().splitlines()
    names = {line.split("  ")[1] for line in noted}
    whole = finished[method]
    logs = {path.relative_to(whole).as_posix() for kind in ("ledger-*", "answers-*")
            for path in whole.rglob(kind)}  # fmt: skip
    own = {"encoders.safetensors"} if method == "tvfl" else {"model.safetensors"}
    assert names == OF_ALL | own | logs
    for at, name in enumerate(sorted(names), start=shift):
        folder = tmp_path / name
        shutil.copytree(whole, folder)
        (_flip, _cut, Path.unlink)[at % 3](folder / name)
        with pytest.raises(CheckpointError, match=name):
            load_recording(folder)


def test_a_report_and_a_model_are_made_of_no_altered_file(
    finished: dict[str, Path], tmp_path: Path
) -> None:
    for name, read in (("metrics.jsonl", write_report), ("model.safetensors", load_model)):
        folder = tmp_path / name
        shutil.copytree(finished["apfed_c"], folder)
        _flip(folder / name)
        with pytest.raises(CheckpointError, match="not as the run left it"):
            read(folder)


def test_damaged_digests_are_named(finished: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(finished["apfed_c"], tmp_path / "r")
    for content in (b"\xff\xfe", b"one word\n"):
        (tmp_path / "r" / "SHA256SUMS").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"SHA256SUMS(:| holds other lines)"):
            load_recording(tmp_path / "r")


def test_what_was_changed_on_purpose_is_accepted_as_the_error_says(
    finished: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "r")
    shutil.copytree(finished["apfed_c"], folder.path)
    old = folder.config.read_text()
    folder.config.write_text(old.replace("name: test", "name: renamed", 1))
    assert execute(["report", str(folder.path)]) == 3
    assert "sha256sum config.yaml" in " ".join(capsys.readouterr().err.replace("│", "").split())

    told = f"{hashlib.sha256(folder.config.read_bytes()).hexdigest()}  config.yaml\n"
    lines = folder.digests.read_text().splitlines(keepends=True)
    folder.digests.write_text("".join([told, *lines[1:]]))
    assert execute(["report", str(folder.path)]) == 0


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs coreutils")
def test_the_digests_are_as_sha256sum_reads_them(finished: dict[str, Path]) -> None:
    for folder in finished.values():
        subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=folder, check=True)


# Written by somebody else.


NOT_JSON = {
    "nothing": b"",
    "cut": b'{"a": 1',
    "deep": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "no text": b"\xff\xfe\x00",
    "endless digits": b"9" * 100_000,
    "too many digits": b'{"a": 123456789012345678901234567890}',
    "no number": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
}


def test_what_is_no_json_or_of_another_shape_is_told(tmp_path: Path) -> None:
    path, cut = tmp_path / "one.json", r"one\.json: is not JSON, so it was cut off or altered: "
    for content in NOT_JSON.values():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{cut}.*copy"):
            read_json(path, dict[str, Any])
        if content:
            path.write_bytes(b'{"a": 1}\n' + content)
            with pytest.raises(CheckpointError, match=f"{cut}.*line 2"):
                read_json_lines(path, dict[str, Any])
    for content in (b"[]", b"3", b"null", b'"a"', b"true"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"json: is not as this version writes .*dict"):
            read_json(path, dict[str, Any])


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    with path.open("wb") as file:
        file.truncate(MOST_JSON_BYTES + 1)
    for read in (read_json, read_json_lines):
        with pytest.raises(CheckpointError, match=r"one\.json: is larger than \d+ bytes"):
            read(path, dict[str, Any])


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        with pytest.raises(CheckpointError, match=f"{name}: is no plain file"):
            read_json(tmp_path / name, dict[str, Any])
    with pytest.raises(CheckpointError, match="absent: is missing"):
        read_json(tmp_path / "absent", dict[str, Any])


def _set(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda card: {**card, **changes}


def _columns(count: int) -> Callable[[dict[str, Any]], Any]:
    columns = [{"kind": "numeric", "name": f"c{n}"} for n in range(count)]
    return _set(encoding={"kind": "columns", "columns": columns})


CARDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda card: [card],
    "a number": lambda card: 3,
    "empty": lambda card: {},
    "no classes": _set(classes=[]),
    "classes that are a number": _set(classes=10**9),
    "classes that are a text": _set(classes="ab"),
    "classes that are numbers": _set(classes=[1, 2]),
    "a model that is a text": _set(model="mlp"),
    "a model that is null": _set(model=None),
    "an encoding that is a list": _set(encoding=[]),
    "other columns": _columns(9),
    "wide layers": _set(model={"hidden": [65536] * 40, "network": "mlp"}),
    "many layers": _set(model={"hidden": [1] * 100_000, "network": "mlp"}),
    "a large image": _set(
        encoding={"kind": "image", "channels": 1, "height": 10**6, "width": 10**6,
                  "end_row": 10**6},
        model={"network": "mlp"},
    ),
    "an image beyond counting": _set(
        encoding={"kind": "image", "channels": 2**62, "height": 2**62, "width": 2**62,
                  "end_row": 2**62},
    ),
}  # fmt: skip


def test_a_card_that_somebody_wrote_is_checked(copied: Path) -> None:
    card = copied / "model.json"
    whole = card.read_bytes()
    for change in CARDS.values():
        card.write_text(json.dumps(change(json.loads(whole))))
        with pytest.raises((CheckpointError, ModelError), match=r"model\.json|holds a run of"):
            load_model(copied)


def test_parameters_that_somebody_wrote_are_checked(copied: Path) -> None:
    path = copied / "model.safetensors"
    tensors = load_file(path)
    first = next(iter(tensors))
    for made in (
        {},
        {name: one.to(torch.int64) for name, one in tensors.items()},
        {**tensors, first: tensors[first].double()},
        {**tensors, first: torch.zeros(3)},
    ):
        save_file(made, path)
        with pytest.raises(ModelError, match=r"safetensors and model\.json do not make a model"):
            load_model(copied)


def _in_place_of(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def test_only_plain_files_of_a_finished_run_are_read(copied: Path) -> None:
    """An endless or silent file would take all memory or all time."""
    for name, read in (
        ("transcript.msgpack", load_recording), ("alignment.safetensors", load_recording),
        ("model.safetensors", load_recording), ("model.safetensors", load_model),
        (FILE, read_examples),
    ):  # fmt: skip
        path = copied / name
        whole = path.read_bytes() if path.exists() else b""
        for kind in ("pipe", "device", "folder"):
            _in_place_of(path, kind)
            with pytest.raises(CheckpointError, match=f"{name}: is no plain file"):
                read(copied)
            path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(whole)


def test_a_file_is_read_no_further_than_its_bound(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1234")
    assert read_bytes(path, most=4) == b"1234"
    with pytest.raises(CheckpointError, match=r"x: is larger than 3 bytes"):
        read_bytes(path, most=3)
    os.truncate(path, MOST_BYTES + 1)  # sparse: reading it would take as much memory
    with pytest.raises(CheckpointError, match=rf"x: is larger than {MOST_BYTES} bytes"):
        read_bytes(path)


def test_an_audit_ends_however_many_releases_are_claimed(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audited, "_MOST_RELEASES", 3)
    path = copied / "result.json"
    result = json.loads(path.read_bytes())
    for releases in (-1, 2**31 + 1, 2**63):
        result["privacy"]["releases"] = releases
        path.write_text(json.dumps(result))
        with pytest.raises(CheckpointError, match=r"result\.json: .*'privacy\.releases'"):
            write_report(copied)
    result["privacy"]["releases"] = 2**31
    path.write_text(json.dumps(result))
    found = audited.audit_of(read_run(copied))
    assert found is not None
    assert found.releases == 3


def test_a_transcript_that_somebody_wrote_is_checked(copied: Path) -> None:
    for content in (b"\x90", b"\x80", b"\xc0", b"\x92\x01\x02", b"\x91" * 5000):
        (copied / "transcript.msgpack").write_bytes(content)
        with pytest.raises(CheckpointError, match="cannot be read as this version writes them"):
            load_recording(copied)


def test_digests_are_of_files_of_the_folder(copied: Path) -> None:
    above = ("/dev/zero", "../run/model.json", "sub/model.json")
    for name in (*above, ".", "", "..", "model.json\x00"):
        (copied / "SHA256SUMS").write_text(f"{'0' * 64}  {name}\n")
        with pytest.raises(CheckpointError, match="SHA256SUMS holds other lines"):
            load_recording(copied)


def test_damage_anywhere_is_an_error_for_people(copied: Path) -> None:
    for name in ("config.yaml", "model.json", "model.safetensors", "alignment.safetensors"):
        path = copied / name
        whole = path.read_bytes()
        for content in (b"", b"\x00" * 100, b"[" * 5000, b"\xff" * 100, b"{}", b"[]", b"null"):
            path.write_bytes(content)
            with pytest.raises(ApfedError):
                load_recording(copied)
        path.write_bytes(whole)


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
    """A folder of the user's that no run folder holds."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "wedding.png").write_text("precious")
    return folder


def test_a_subfolder_is_made_and_is_no_link_and_no_file(tmp_path: Path, elsewhere: Path) -> None:
    assert own_subfolder(tmp_path / "new").stat().st_mode & 0o077 == 0
    own_subfolder(tmp_path / "new")
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "file").touch()
    for name in ("link", "nowhere", "file"):
        with pytest.raises(CheckpointError, match=f"{name} is a link or a file in place"):
            own_subfolder(tmp_path / name)
    assert not (tmp_path / "absent").exists()


def test_a_report_removes_no_pictures_behind_a_link(copied: Path, elsewhere: Path) -> None:
    (copied / "pictures").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="pictures is a link or a file in place"):
        write_report(copied)
    assert [file.name for file in elsewhere.iterdir()] == ["wedding.png"]


def test_a_resumed_run_reads_plain_files_and_writes_behind_no_link(
    tmp_path: Path, elsewhere: Path, open_mask: None
) -> None:
    config = small_config(labels={"mechanism": "randomised_response", "epsilon": 1.0})
    folder = tmp_path / "runs" / "sent"
    interrupted(config, folder, at_step=9)
    assert mode(folder) == 0o700
    party = folder / "parties" / "active"
    for path in (
        folder / "metrics.jsonl",
        max(party.glob("checkpoint-*.bin")),
        party / "identity.pem",
        party / "labels-active.log",  # read at the run's end, whose checkpoint is another one
    ):
        whole = path.read_bytes()
        _in_place_of(path, "pipe")
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


def test_a_run_of_a_study_lies_in_its_folder(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "test-seed0").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="test-seed0 is a link or a file in place"):
        finish(Point(config=small_config(train=ONE_EPOCH), folder=tmp_path).trial(0))
    assert [file.name for file in elsewhere.iterdir()] == ["wedding.png"]


def test_the_lock_and_the_logs_are_plain_files(tmp_path: Path, elsewhere: Path) -> None:
    precious, config = elsewhere / "wedding.png", small_config(train=ONE_EPOCH)
    for kind in ("link", "nowhere", "pipe", "folder"):
        folder = tmp_path / kind
        folder.mkdir(mode=0o700)
        lock = folder / ".lock"
        if kind in ("pipe", "folder"):
            _in_place_of(lock, kind)
        else:
            lock.symlink_to(precious if kind == "link" else elsewhere / "absent")
        with pytest.raises(CheckpointError, match=r"\.lock"):
            run(config, folder)
    assert precious.read_text() == "precious"
    assert not (elsewhere / "absent").exists()
    for party, log in (("active", "ledger-active.jsonl"), ("active", "labels-active.log"),
                       ("passive-1", "answers-passive-1.jsonl")):  # fmt: skip
        folder = tmp_path / log
        folder.mkdir(mode=0o700)
        (folder / "parties").mkdir()
        (folder / "parties" / party).mkdir(mode=0o700)
        (folder / "parties" / party / log).mkdir()
        with pytest.raises(CheckpointError, match=f"{log} lies in the place of a log"):
            run(config, folder)


def test_no_name_of_a_passive_reaches_another_file(tmp_path: Path) -> None:
    config = small_config()
    folder = tmp_path / "run"
    secrets = {name: fresh_secrets(config, name, logs=folder) for name in ("shop", "../shop")}
    start = Start(config=config, data=load_data(config.data, seed=0), secrets=secrets)
    Allowance.of(own_of(start, "shop"), contract(), aligned=3)
    assert (folder / "answers-shop.jsonl").exists()
    with pytest.raises(ConfigError, match="no file of"):
        Allowance.of(own_of(start, "../shop"), contract(), aligned=3)
    with pytest.raises(ConfigError, match="no file of"):
        RunFolder(folder).party("../shop")


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
    make_private(shared)
    (tmp_path / "made").mkdir(mode=0o777)
    make_private(tmp_path / "made")
    assert mode(tmp_path / "made") == 0o700
    with pytest.raises(CheckpointError, match="cannot be a run folder"):
        run(small_config(), shared / "notes.txt")
