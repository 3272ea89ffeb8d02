"""Files that people keep over an upgrade are read, or refused by the name of their format, with
what to do; one of each released format is stored.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pandas as pd
import pytest

from apfed_experiments.finished import load_finished_run
from apfed_experiments.report import load_run
from apfed_experiments.report.own import load_signed_reports
from apfed_protocols.installing import install_checkout
from secure_apfed.base.formats import FORMATS, find_installed_version, find_writer
from secure_apfed.contract import Contract
from secure_apfed.errors import ApfedError, CheckpointError, ConfigError, ModelError
from secure_apfed.runs import checkpoint_store
from secure_apfed.runs.active_model import load_model, predict_file
from secure_apfed.runs.audit_log import verify_log
from secure_apfed.runs.folder import PartyFolder, RunFolder, load_contract, load_with_checksum
from secure_apfed.runs.outcome import compute_guarantees, load_recording
from tests.secure_apfed.stored_formats import FILES, NUMBERS, STORED, fields_of, format_of

NEWER = 1_000_000


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_that_was_released_is_stored(name: str) -> None:
    stored = {format_of(name, number) for number in NUMBERS}
    kind = FORMATS[name]
    assert kind.current_number in stored
    released = range(min(stored), kind.current_number + 1)
    assert stored == set(released)
    assert kind.oldest_readable in released


@pytest.mark.parametrize("number", NUMBERS)
def test_a_stored_model_predicts_as_it_did(number: int) -> None:
    folder = STORED / str(number)
    model = load_model(folder / "finished")
    table = pd.read_csv(folder / "tables" / "own.csv")
    told = predict_file(folder / "finished", folder / "tables" / "own.csv")
    shares = model.predict_frame(table)
    assert told.ids == tuple(table["id"])
    np.testing.assert_allclose(told.outputs.numpy(), shares.numpy(), atol=1e-12)
    tested = load_finished_run(folder / "finished").outcome
    assert tested.accuracy == model.card["accuracy"]
    # What the version said that wrote it.
    recorded = json.loads((folder / "predictions.json").read_bytes())
    assert list(told.classes) == recorded["classes"]
    np.testing.assert_allclose(told.outputs[:8].numpy(), recorded["probabilities"], atol=1e-6)


@pytest.mark.parametrize("run", ["finished", "apart"])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_stored_run_is_reported(number: int, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(STORED / str(number))
    reported = load_run(STORED / str(number) / run)
    assert reported.outcome.wire_bytes == sum(flow.wire_bytes for flow in reported.flows)
    assert compute_guarantees(reported.config, reported.outcome)
    assert (reported.outcome.sessions, reported.outcome.steps) in ((1, None), (1, 6))


@pytest.mark.parametrize("number", NUMBERS)
def test_a_stored_run_can_be_attacked(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(STORED / str(number))
    recording = load_recording(STORED / str(number) / "finished")
    assert recording.transcript.envelopes_by_epoch
    assert len(recording.alignment["lab"]) == 55


@pytest.mark.parametrize("number", NUMBERS)
def test_a_stored_party_s_papers_are_read(number: int, tmp_path: Path) -> None:
    folder = STORED / str(number)
    assert verify_log(folder / "apart" / "parties" / "lab").has_final_signature
    assert (
        load_signed_reports(folder / "apart" / "statements.json")["lab"].verify_costs("lab")
        is not None
    )
    assert Contract.model_validate(fields_of("contract.json", folder / FILES["contract.json"]))
    shutil.copy(folder / "joint.safetensors", tmp_path)
    assert checkpoint_store.load_joint_network(PartyFolder(tmp_path), "lab")[1]


def test_a_checkpoint_of_an_earlier_format_is_refused_with_what_to_do() -> None:
    fields = msgpack.unpackb(
        load_with_checksum(STORED / "1" / "checkpoint.bin"), strict_map_key=False
    )
    with pytest.raises(CheckpointError) as told:
        FORMATS["checkpoint-STEP.bin"].parse_format_number("checkpoint-6.bin", fields)
    message = str(told.value)
    assert "checkpoint of format 5, written by an earlier version" in message
    assert "finish the run with the version that began it" in message


def change_format_number(name: str, folder: Path, number: Any) -> None:
    """Write another number over the format of a stored file."""
    path = folder / FILES[name]
    content = path.read_bytes()
    key = FORMATS[name].number_key
    if name == "checkpoint-STEP.bin":
        fields = {**fields_of(name, path), key: number}
        packed = msgpack.packb(fields)
        content = packed + hashlib.sha256(packed).digest()
    elif name == "transcript.msgpack":
        content = msgpack.packb({**fields_of(name, path), key: number})
    elif name == "joint.safetensors":
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header["__metadata__"]["joint"] = json.dumps({**fields_of(name, path), key: number})
        packed = json.dumps(header).encode()
        content = len(packed).to_bytes(8, "little") + packed + content[8 + size :]
    elif name == "audit.log":
        first = {**fields_of(name, path), key: number}
        body = json.dumps({key: first[key] for key in first if key != "chain"})[1:].encode()
        chain = hashlib.sha256(body).hexdigest().encode()
        content = b'{"chain":"' + chain + b'",' + body + b"\n"
    else:
        fields = json.loads(content)
        inner = {"contract.json": "document", "statements.json": "lab"}.get(name)
        (fields[inner] if inner else fields)[key] = number
        content = json.dumps(fields).encode()
    path.write_bytes(content)
    (folder / "finished" / "SHA256SUMS").unlink(missing_ok=True)
    (folder / "apart" / "SHA256SUMS").unlink(missing_ok=True)


READERS: dict[str, Callable[[Path], object]] = {
    "model.json": lambda folder: load_model(folder / "finished"),
    "result.json": lambda folder: load_run(folder / "finished"),
    "contract.json": lambda folder: load_run(folder / "finished"),
    "statements.json": lambda folder: load_signed_reports(folder / "apart" / "statements.json"),
    "checkpoint-STEP.bin": lambda folder: checkpoint_store._check_format(folder / "checkpoint.bin"),
    "transcript.msgpack": lambda folder: load_recording(folder / "finished"),
    "joint.safetensors": lambda folder: checkpoint_store.load_joint_network(
        PartyFolder(folder), "lab"
    ),
    "audit.log": lambda folder: verify_log(folder / "apart" / "parties" / "lab"),
}


@pytest.fixture
def stored_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "stored"
    shutil.copytree(STORED / str(NUMBERS[-1]), folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("name", FORMATS)
def test_a_newer_format_is_refused_by_name_with_the_line_that_installs(
    name: str, stored_folder: Path
) -> None:
    change_format_number(name, stored_folder, NEWER)
    with pytest.raises(ApfedError) as told:
        READERS[name](stored_folder)
    message = str(told.value)
    kind = FORMATS[name]
    assert f"{kind.title} of format {NEWER}, written by a newer version" in message
    assert find_installed_version() in message
    assert message.endswith(install_checkout())


@pytest.mark.parametrize("number", [0, -1, "x", None, True, 1.5, [1], "\x1b[2J"])
@pytest.mark.parametrize("name", ["model.json", "result.json", "checkpoint-STEP.bin"])
def test_what_is_no_number_is_refused(name: str, number: Any, stored_folder: Path) -> None:
    change_format_number(name, stored_folder, number)
    with pytest.raises(CheckpointError, match="expected a whole number") as told:
        READERS[name](stored_folder)
    assert str(told.value).isprintable()


def test_a_card_without_a_number_is_refused(stored_folder: Path) -> None:
    card = stored_folder / "finished" / "model.json"
    fields = json.loads(card.read_bytes())
    card.write_text(json.dumps({key: fields[key] for key in fields if key != "card_version"}))
    (stored_folder / "finished" / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match="card_version of a model card: expected a whole"):
        load_model(stored_folder / "finished")


def test_an_older_card_that_cannot_be_read_names_its_format_and_what_to_do(
    stored_folder: Path,
) -> None:
    card = stored_folder / "finished" / "model.json"
    fields = json.loads(card.read_bytes())
    fields["card_version"] = 1
    fields["model"]["layers"] = 3  # such as a key that is gone
    card.write_text(json.dumps(fields))
    (stored_folder / "finished" / "SHA256SUMS").unlink()
    with pytest.raises(
        CheckpointError, match=r"at 'model\.layers'.*model card of format 1"
    ) as told:
        load_model(stored_folder / "finished")
    assert "predict with the version that versions.json beside it names" in str(told.value)


@pytest.mark.parametrize(
    ("file", "content", "error"),
    [
        ("transcript.json", '[{"sender": 3}]', CheckpointError),
        ("config.yaml", "name: a\nnothing: 1\n", ConfigError),
        ("result.json", '{"format": 2}', CheckpointError),
    ],
)
@pytest.mark.parametrize("writer", ["0.0.9", "7.0.1", "1 -i http://203.0.113.9", None])
def test_a_run_of_another_version_that_does_not_fit_names_it(
    file: str, content: str, error: type[ApfedError], writer: str | None, stored_folder: Path
) -> None:
    run = stored_folder / "finished"
    versions = json.loads((run / "versions.json").read_bytes())
    (run / "versions.json").write_text(json.dumps({**versions, "secure-apfed": writer}))
    (run / file).write_text(content)
    (run / "SHA256SUMS").unlink()
    with pytest.raises(error) as told:
        load_run(run)
    named = f"secure-apfed {writer} wrote it, and this is {find_installed_version()}"
    is_version = writer is not None and " " not in writer
    assert (named in str(told.value)) is is_version
    assert "203.0.113.9" not in str(told.value)
    assert ("restore it from a copy" in str(told.value)) is (is_version or error is CheckpointError)


@pytest.mark.parametrize(
    ("versions", "writer"),
    [
        ({"secure-apfed": "9.9"}, "9.9"),
        ({"secure-apfed": 3}, ""),
        ({}, ""),
        ([], ""),
        (None, ""),
        ({"secure-apfed": "no version"}, ""),
    ],
)
def test_who_wrote_a_run_is_read_from_its_versions(versions: Any, writer: str) -> None:
    assert find_writer(versions) == writer


def test_a_contract_of_an_older_format_is_refused_by_name(stored_folder: Path) -> None:
    change_format_number("contract.json", stored_folder, 1)
    with pytest.raises(CheckpointError, match="contract of format 1, written by an earlier"):
        load_contract(RunFolder(stored_folder / "finished").contract, dict[str, Any])


def test_a_model_of_another_party_is_told_before_its_content(stored_folder: Path) -> None:
    with pytest.raises(ModelError, match="is of lab, this party is shop"):
        checkpoint_store.load_joint_network(PartyFolder(stored_folder), "shop")
