"""A finished run whose files were altered, cut or lost is refused by all that read it."""

import hashlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from apfed_experiments.report import write_report
from secure_apfed import run
from secure_apfed.cli import execute
from secure_apfed.config.file import load_config_text
from secure_apfed.errors import CheckpointError
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import load_recording
from secure_apfed.runs.solo import load_model

CONFIG = """
name: small
method: tvfl
data: {dataset: breast_cancer}
model: {hidden: [8], representation: 4, projection: 4}
train: {epochs: 1, batch_size: 128, device: cpu, learning_rate: 0.05}
guard: {mechanism: gaussian, epsilon: 8.0}
"""
OF_ALL = {"config.yaml", "contract.json", "seeds.json", "versions.json", "metrics.jsonl",
          "model.json", "alignment.safetensors", "transcript.msgpack", "transcript.json",
          "result.json", "test-scores.safetensors"}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind of method; between them they write every file."""
    made, masked = {}, "secure_sum: {scheme: plain, masks: pairwise}\n"
    for method, more in (("tvfl", ""), ("apfed_c", masked)):
        made[method] = tmp_path_factory.mktemp("damage") / method
        text = CONFIG.replace("method: tvfl", f"method: {method}") + more
        run(load_config_text(text), made[method])
    return made


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


@pytest.mark.parametrize("harm", [_flip, _cut, Path.unlink], ids=["flip", "cut", "lose"])
@pytest.mark.parametrize("method", ["tvfl", "apfed_c"])
def test_attacks_are_mounted_on_no_altered_recording(
    finished: dict[str, Path], method: str, harm: Callable[[Path], None], tmp_path: Path
) -> None:
    noted = (finished[method] / "SHA256SUMS").read_text().splitlines()
    names = {line.split("  ")[1] for line in noted}
    kinds = ("ledger-*", "answers-*")
    folder = finished[method]
    logs = {path.relative_to(folder).as_posix() for kind in kinds for path in folder.rglob(kind)}
    own = {"encoders.safetensors"} if method == "tvfl" else {"model.safetensors"}
    assert names == OF_ALL | own | logs
    for name in names:
        folder = tmp_path / name
        shutil.copytree(finished[method], folder)
        harm(folder / name)
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
    folder.config.write_text(old.replace("name: small", "name: renamed"))
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
