"""Run folders that somebody else wrote: every file ends in an error that names it, in time."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from apfed_experiments.finished import FILE, read_examples
from apfed_experiments.report import read_run, write_report
from apfed_experiments.report import run as audited
from secure_apfed.errors import ApfedError, CheckpointError, ModelError
from secure_apfed.files import MOST_BYTES, MOST_JSON_BYTES, read_bytes, read_json, read_json_lines
from secure_apfed.runs.outcome import load_recording
from secure_apfed.runs.run import run
from secure_apfed.runs.solo import load_model
from tests.secure_apfed.small_runs import interrupted, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "whole"
    run(small_config(train={"epochs": 1, "batch_size": 64, "device": "cpu"}), folder)
    (folder / "SHA256SUMS").unlink()
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


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


KINDS = ("pipe", "device", "folder")


@pytest.mark.parametrize("kind", KINDS)
def test_only_plain_files_of_a_finished_run_are_read(kind: str, copied: Path) -> None:
    """An endless or silent file would take all memory or all time."""
    for name in ("transcript.msgpack", "alignment.safetensors", "model.safetensors"):
        path = copied / name
        whole = path.read_bytes()
        _in_place_of(path, kind)
        with pytest.raises(CheckpointError, match=f"{name}: is no plain file"):
            load_recording(copied)
        if name.startswith("model"):
            with pytest.raises(CheckpointError, match=f"{name}: is no plain file"):
                load_model(copied)
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(whole)
    _in_place_of(copied / FILE, kind)
    with pytest.raises(CheckpointError, match=f"{FILE}: is no plain file"):
        read_examples(copied)


def test_only_plain_files_are_read_to_resume_a_run(tmp_path: Path) -> None:
    labels = {"mechanism": "randomised_response", "epsilon": 1.0}
    config = small_config(labels=labels)
    interrupted(config, tmp_path, at_step=9)
    party = tmp_path / "parties" / "active"
    for path in (
        tmp_path / "metrics.jsonl",
        max(party.glob("checkpoint-*.bin")),
        party / "identity.pem",
        party / "labels-active.log",  # read at the run's end, whose checkpoint is another one
    ):
        name = path.name
        whole = path.read_bytes()
        _in_place_of(path, "pipe")
        with pytest.raises(CheckpointError, match=f"{name}"):
            run(config, tmp_path, resume=True)
        path.unlink()
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
