"""Where one training label differs and the mechanism answers the same, all that is written does."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from apfed_experiments import baselines
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config_text
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.privacy.randomised_response import LabelResponse, MultiStageResponse
from secure_apfed.runs.training_loop import RunWriter
from tests.experiments.run_folder import own_tables

RESPONSE = {"labels": {"mechanism": "randomised_response", "epsilon": 0.01}}
STAGES = {"labels": {"mechanism": "lp_mst", "epsilon": 0.01}}
TRAIN = {"epochs": 2, "batch_size": 32, "learning_rate": 0.01, "device": "cpu"}
GUARD = {"mechanism": "none", "noise": "reproducible_insecure"}
SUM = {"scheme": "plain", "masks": "pairwise"}
CASES: dict[str, dict[str, Any]] = {
    "alone": {
        "method": "single_view",
        **RESPONSE,
        "threshold": "f1",
        "train": {**TRAIN, "class_weights": "balanced", "patience": 1},
    },
    "stages": {"method": "single_view", **STAGES, "measure": "auc"},
    "apfed": {"method": "apfed_r", "secure_sum": SUM, **RESPONSE, "threshold": "accuracy"},
    "votes": {"method": "votes", "secure_sum": SUM, **RESPONSE, "data": {"labelled": 40}},
    "tvfl": {"method": "tvfl", **RESPONSE},
}
# Of every run its own, whatever the labels are.
DRAWN = re.compile(
    r"[0-9a-f]{32,}|\"seconds\": [0-9.e+-]+|[0-9.]+(?:\u202f|\\u202f)s\b|/[^\"<\s]*/w\d"
)
DRAWN_FILES = (
    "identity.pem",
    "events.out.*",
    "answers-*",
    "ledger-*",
    "alignment.*",
    "transcript.msgpack",
)


def config_of(**settings: Any) -> Config:
    usual = {"name": "private", "party_seeds": "shared_for_comparison", "guard": GUARD}
    return load_config_text(json.dumps({**usual, "train": TRAIN, **settings}))


def make_answers_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the chances of both worlds had fallen so that the answers are the same."""
    for mechanism in (LabelResponse, MultiStageResponse):
        monkeypatch.setattr(
            mechanism,
            "randomise_labels",
            lambda self, labels_N, **_: torch.arange(len(labels_N)) * 7 % 3 % 2,
        )


def collect_outputs(
    case: Mapping[str, Any], folder: Path, flipped: int | None, capsys: pytest.CaptureFixture[str]
) -> dict[str, str]:
    """All that a run says where the label of this training row is another one, by file."""
    tables = folder / "tables"
    tables.mkdir(exist_ok=True)
    data = {**own_tables(tables), **case.get("data", {})}
    config = config_of(**{**case, "data": data})
    if flipped is not None:
        row = int(load_data(config.data, seed=config.seed).labelled_rows[flipped])
        frame = pd.read_csv(tables / "active.csv")
        labels = frame["label"].tolist()
        labels[row] = {"yes": "no", "no": "yes"}[labels[row]]
        frame.assign(label=labels).to_csv(tables / "active.csv", index=False)
    (folder / "run.yaml").write_text(dump_settings(config))
    place = folder / f"w{0 if flipped is None else flipped}"
    capsys.readouterr()
    assert execute(["run", str(folder / "run.yaml"), "--output", str(place), "--json"]) == 0
    found = {"printed": capsys.readouterr().out}
    for path in place.rglob("*"):
        if path.is_file() and not any(path.match(drawn) for drawn in DRAWN_FILES):
            name = path.relative_to(place).as_posix()
            found[name] = path.read_bytes().decode("utf-8", "backslashreplace")
    return {name: DRAWN.sub("", text) for name, text in found.items()}


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    assert set(one) == set(other)
    return {name for name, text in one.items() if text != other[name]}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("name", CASES)
def test_all_that_is_written_follows_from_the_answers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_answers_equal(monkeypatch)
    before = collect_outputs(CASES[name], tmp_path, None, capsys)
    after = collect_outputs(CASES[name], tmp_path, 3, capsys)
    assert differing(before, after) == set()
    assert {"printed", "result.json", "solo.json", "report.html"} <= set(before)
    record = json.loads(before["solo.json"])
    assert record["labels"] == "answered"
    assert all(one["validation"] is not None for one in record["baselines"])
    assert "by the answers for its labels" in before["report.html"]


def fit_on_true_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = baselines._measure_baselines

    def plant_leak(config: Any, path: Path, own: Any, **more: Any) -> Any:
        known = load_data(config.data, seed=config.seed).select_party("active")
        assert known is not None
        return measured(config, path, known)

    monkeypatch.setattr(baselines, "_measure_baselines", plant_leak)


def count_in_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = RunWriter._build_card

    def plant_leak(self: Any, session: Any, data: Any, *more: Any) -> dict[str, Any]:
        counts = data.table.labels[data.labelled_rows].bincount().tolist()
        return {**card(self, session, data, *more), "labels": counts}

    monkeypatch.setattr(RunWriter, "_build_card", plant_leak)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (fit_on_true_labels, {"printed", "solo.json", "report.html", "privacy.json"}),
        (count_in_card, {"model.json"}),
    ],
)
def test_a_planted_figure_of_true_labels_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    found: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_answers_equal(monkeypatch)
    plant(monkeypatch)
    case = CASES["stages"]
    before, after = (collect_outputs(case, tmp_path, flipped, capsys) for flipped in (None, 3))
    assert differing(before, after) == found


def test_dp_sgd_leaves_out_what_its_noise_does_not_cover(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = {"method": "single_view", "dp_sgd": {"noise_multiplier": 2.0}}
    found = collect_outputs(case, tmp_path, None, capsys)
    assert "solo.json" not in found
    assert json.loads(found["printed"])["solo"] is None
    assert "What the active does alone is left out" in found["report.html"]
    assert set(re.findall(r'"loss": ([^,]*),', found["metrics.jsonl"])) == {"null"}


def test_baselines_of_the_labels_as_they_are_are_refused(tmp_path: Path) -> None:
    config = config_of(**{**CASES["apfed"], "data": own_tables(tmp_path)})
    with pytest.raises(ConfigError, match="baselines of the labels as they are would tell them"):
        baselines.load_or_measure_baselines(config, tmp_path / "solo.json")


@pytest.mark.parametrize("private", [RESPONSE, {"dp_sgd": {"noise_multiplier": 2.0}}])
def test_private_labels_do_not_decide_who_tests(private: dict[str, Any], tmp_path: Path) -> None:
    case = {"method": "single_view", **private}
    assert config_of(**case, data=own_tables(tmp_path)).data.split == "at_random"
    with pytest.raises(ConfigError, match=r"data\.split: by_class draws rows by their labels"):
        config_of(**case, data={**own_tables(tmp_path), "split": "by_class"})
