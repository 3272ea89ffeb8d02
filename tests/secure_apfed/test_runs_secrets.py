"""A run writes no key or seed of its links and sums: not to its folder, not to a log."""

import logging
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.config import Config
from secure_apfed.runs.run import run
from tests.contracts.sum_secrets import SealKeys, secrets_alive, shown_in
from tests.with_crypten import pair_of, usable_secure_sums


@pytest.mark.parametrize("protocol", usable_secure_sums())
@pytest.mark.sampled(every=3)
def test_no_secret_of_a_session_is_written(
    protocol: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = SealKeys(monkeypatch)
    settings: dict[str, Any] = {
        "name": "secrets",
        "method": "apfed_c",
        "data": {"dataset": "breast_cancer", "overlap": 0.8},
        "model": {"hidden": [8], "representation": 4, "projection": 4},
        "train": {"epochs": 2, "batch_size": 128, "device": "cpu"},
        "secure_sum": pair_of(protocol),
        "guard": {"mechanism": "gaussian", "epsilon": 8.0},
    }
    folder, secrets, written = tmp_path / "run", set[bytes](), set[bytes]()

    def spy(_: object) -> None:
        secrets.update(secrets_alive())
        written.update(file.read_bytes() for file in folder.rglob("checkpoint-*.bin"))

    with caplog.at_level(logging.NOTSET):
        run(Config.model_validate(settings), folder, on_progress=spy)
    secrets |= keys.numbers()
    files = {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert {"transcript.msgpack", "result.json", "contract.json"} <= set(files)
    assert len(secrets) >= 3
    said = "".join([caplog.text, *capfd.readouterr()]).encode()
    for told in (*files.values(), *written, said):
        assert shown_in(secrets, told) == []
    assert shown_in(secrets, files["contract.json"] + next(iter(secrets)).hex().encode())
