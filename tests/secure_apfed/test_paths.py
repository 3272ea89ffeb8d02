"""Every public function takes a path as text, as `pathlib.Path`, or as another `os.PathLike`."""

import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import apfed_attacks
import apfed_protocols
import secure_apfed
from secure_apfed import Config, load_config, load_model, run
from secure_apfed.attacks import load_recording
from secure_apfed.config.file import dump_settings
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Transcript
from secure_apfed.privacy import PrivacyLedger
from secure_apfed.privacy.accountants import NoPrivacy
from secure_apfed.psi import AlignmentHistory
from secure_apfed.settings import TranscriptSettings


class Named:
    """An `os.PathLike` that is no `pathlib.Path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for package in (apfed_protocols, secure_apfed, apfed_attacks):
        for name in package.__all__:
            value = getattr(package, name)
            if not inspect.isclass(value):
                if callable(value):
                    yield name, value
                continue
            yield name, value.__init__
            for part, member in inspect.getmembers(value, callable):
                if not part.startswith("_"):
                    yield f"{name}.{part}", getattr(member, "__func__", member)


def annotations_of_own(function: Callable[..., Any]) -> dict[str, str]:
    home = str(getattr(function, "__module__", ""))
    if not home.startswith(("apfed_", "secure_apfed")):
        return {}
    parameters = inspect.signature(function).parameters.values()
    return {each.name: str(each.annotation) for each in parameters}


def test_no_public_function_insists_on_a_path_object() -> None:
    walked = 0
    insisting = []
    for name, function in public_functions():
        walked += 1
        for parameter, annotation in annotations_of_own(function).items():
            if "Path" in annotation and "PathLike" not in annotation:
                insisting.append(f"{name}({parameter}: {annotation})")
    assert not insisting
    assert walked > 100


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paths")
    x, noise = np.random.default_rng(0).normal(size=(2, 40))
    bank = pd.DataFrame({"id": range(40), "x": x, "y": np.where(x + noise > 0, "yes", "no")})
    bank.to_csv(folder / "bank.csv", index=False)
    pd.DataFrame({"id": range(40), "u": -x}).to_csv(folder / "shop.csv", index=False)
    parties = {"bank": {"file": "bank.csv"}, "shop": {"file": "shop.csv"}}
    data = {
        "dataset": "tables",
        "active": "bank",
        "folder": str(folder),
        "id_column": "id",
        "label_column": "y",
        "parties": parties,
    }
    settings = {
        "name": "small",
        "method": "single_view",
        "data": data,
        "model": {"network": "random_features"},
        "train": {"epochs": 1},
        "guard": {"mechanism": "none"},
        "transcript": {"keep": "all"},
    }
    config = Config.model_validate(settings)
    (folder / "run.yaml").write_text(dump_settings(config))
    run(config, str(folder / "run"))
    return folder


@pytest.mark.parametrize("kind", [str, Path, Named])
@pytest.mark.parametrize("name", ["load_model", "load_recording", "load_config", "run"])
def test_runs_and_models(name: str, kind: Callable[[Path], Any], finished: Path) -> None:
    if name == "load_config":
        assert load_config(kind(finished / "run.yaml")).name == "small"
    elif name == "load_model":
        assert set(load_model(kind(finished / "run")).classes) == {"no", "yes"}
    elif name == "load_recording":
        assert load_recording(kind(finished / "run")).config.name == "small"
    else:
        with pytest.raises(secure_apfed.errors.CheckpointError, match="holds a run already"):
            run(load_config(finished / "run.yaml"), kind(finished / "run"))


@pytest.mark.parametrize("kind", [str, Path, Named])
def test_accounts_and_transcripts(kind: Callable[[Path], Any], tmp_path: Path) -> None:
    for attempt in range(2):
        history = AlignmentHistory(kind(tmp_path / "runs.jsonl"), runs_with_a_peer=2)
        history.record_run(session=f"{attempt}", peers=["shop"])
    AlignmentHistory.for_party(kind(tmp_path), "bank", runs_with_a_peer=1)
    log = kind(tmp_path / "ledger.jsonl")
    PrivacyLedger(NoPrivacy(), delta=1e-5, budget=None, rows=3, log=log)
    assert os.path.exists(tmp_path / "ledger.jsonl")  # noqa: PTH110 - any kind of path
    Transcript(TranscriptSettings()).keep_in(kind(tmp_path))


@pytest.mark.parametrize("kind", [str, Path, Named])
@pytest.mark.parametrize("name", ["predict_jointly", "serve_party"])
def test_party_files(name: str, kind: Callable[[Path], Any], tmp_path: Path) -> None:
    party = kind(tmp_path / "party.yaml")
    call = getattr(secure_apfed, name)
    more = (kind(tmp_path / "rows.csv"), kind(tmp_path / "out.csv"))
    with pytest.raises((ConfigError, secure_apfed.ApfedError), match=r"party\.yaml"):
        call(party, *(more if name == "predict_jointly" else ()))
