"""`secure-apfed plan`: calibration with and without a config, and what sweeps say of it."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from secure_apfed.cli import execute

CONFIG = """
name: planned
method: apfed_c
data: {dataset: breast_cancer, overlap: 0.8}
model: {hidden: [8], representation: 4, projection: 8}
train: {epochs: 3, batch_size: 64, device: cpu}
secure_sum: {scheme: plain}
guard: {mechanism: none}
"""


@pytest.fixture(name="config")
def _config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert execute([*map(str, arguments), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_without_a_config_both_guards_are_calibrated(capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "plan", "--epsilon", 2, "--epochs", 50)
    fresh, frozen = answer["calibration"]
    assert (fresh["mechanism"], frozen["mechanism"]) == ("gaussian", "frozen_gaussian")
    assert (fresh["releases"], frozen["releases"]) == (50, 1)
    # The published sigma / (2C) at delta 1e-5.
    assert f"{fresh['noise_multiplier']:.3g}" == "14.1"
    assert f"{frozen['noise_multiplier']:.3g}" == "1.99"
    assert fresh["sigma"] == pytest.approx(math.sqrt(50) * frozen["sigma"])
    assert (fresh["clip"], fresh["delta"]) == (1.0, 1e-5)
    assert "rows" not in answer


def test_expected_losses_are_those_of_the_stored_sweeps(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "plan", "--epsilon", 4, "--epochs", 50)["expected"]
    assert len(found) == 4
    for dataset in ("digits", "breast_cancer"):
        assert sum(f"on {dataset} at epsilon_x 4 (delta 1e-05, T " in one for one in found) == 2
    assert told(capsys, "plan", "--epsilon", 100)["expected"] == []


def test_it_is_shown_to_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["plan", "--epsilon", "4", "--epochs", "50"]) == 0
    shown = capsys.readouterr().out
    assert "Noise for epsilon_x 4 at delta 1e-05, 50 epochs" in shown
    assert "encoder held fixed; no label" in shown
    assert "where the active alone reached" in shown
    assert execute(["plan", "--epsilon", "0.001"]) == 0
    assert "no stored sweep fits" in capsys.readouterr().out


def test_with_a_config_its_numbers_are_taken_and_options_win(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = told(capsys, "plan", config, "--epsilon", 4, "--set", "guard.clip=2.0")
    aligned = {one["protocol"]: one for one in answer["intersections"]}
    assert [name for name, one in aligned.items() if one["chosen"]] == ["ecdh"]
    assert aligned["vole"]["wire_bytes"] < aligned["opprf"]["wire_bytes"]
    assert aligned["opprf"]["wire_bytes"] < aligned["circuit"]["wire_bytes"] / 5
    (noise,) = answer["calibration"]
    assert (noise["mechanism"], noise["epochs"], noise["clip"]) == ("gaussian", 3, 2.0)
    assert answer["epsilon_x"] == pytest.approx(4.0)
    assert answer["epsilon_y"] == answer["epsilon_model"] == "inf"
    assert [one.partition(" at ")[0] for one in answer["expected"]] == [
        "APFed-C, fresh noise on breast_cancer"
    ]
    frozen = ["--set", "guard={mechanism: frozen_gaussian, sigma: 3.0}"]
    answer = told(capsys, "plan", config, "--epsilon", 1, "--epochs", 7, "--delta", 1e-6, *frozen)
    (noise,) = answer["calibration"]
    assert (noise["mechanism"], noise["epochs"], noise["releases"]) == ("frozen_gaussian", 7, 1)
    assert (noise["delta"], answer["delta"]) == (1e-6, 1e-6)


def test_labels_and_private_training_are_forecast(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["--set", "labels={mechanism: lp_mst, epsilon: 4.0}"]
    answer = told(capsys, "plan", config, *labels)
    assert answer["epsilon_y"] == 4.0
    assert answer["steps"] == 3 + 6 + 6  # of 355 rows, half of them in the first epoch
    assert [one.partition(" on ")[0] for one in answer["expected"]] == [
        "APFed-C, label DP (LP-MST)"
    ]
    private = ["--set", "guard={mechanism: gaussian, epsilon: 2.0}", "--set", "dp_sgd={epsilon: 6}"]
    answer = told(capsys, "plan", config, *private)
    assert answer["epsilon_x"] == pytest.approx(2.0)
    assert answer["epsilon_model"] == pytest.approx(6.0)
    assert 0 < answer["epsilon_y"] < 6.0


def test_nothing_is_invented(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, "plan", config, "--epsilon", 4, "--set", "method=tvfl")
    assert answer["expected"] == []
    assert told(capsys, "plan", config)["epsilon_passives"] == {}


def test_what_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        ("", "give CONFIG, or --epsilon"),
        ("--epochs 5", "give CONFIG, or --epsilon"),
        ("--epsilon 4 --set train.epochs=3", "give CONFIG, or --epsilon"),
        ("--epsilon -1", "positive and finite, got -1"),
        ("--epsilon nan", "positive and finite, got nan"),
        ("--epsilon inf", "positive and finite, got inf"),
        ("--epsilon 4 --delta 0", "delta lies between 0 and 1"),
        ("--epsilon 4 --delta 1", "delta lies between 0 and 1"),
        ("--epsilon 4 --epochs 0", "epochs"),
    ):
        assert execute(["plan", *arguments.split(), "--json"]) == 2
        assert message in capsys.readouterr().out


SUM = "secure_sum={scheme: plain, masks: pairwise, noise: {sigma: 4.0}}"


@pytest.mark.parametrize(
    ("method", "changes", "row"),
    [
        ("apfed_c", [SUM, "train.epochs=3"], "epsilon_c of passive-1, one person in sums 3"),
        ("votes", ["secure_sum.masks=pairwise", "method.epsilon=3"],
         "epsilon_v of passive-1, one person's votes 1"),
        ("votes_randomised", ["method.epsilon=3"], "epsilon_v of passive-1, one person's votes 1"),
    ],
)  # fmt: skip
def test_passives_forecast_what_their_noise_costs_and_the_run_agrees(
    method: str, changes: list[str], row: str, config: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "300")
    changed = [f"--set={one}" for one in (f"method={method}", *changes)]
    planned = told(capsys, "plan", config, *changed)["epsilon_passives"]
    folder = tmp_path / "run"
    arguments = ["run", str(config), *changed, "--output", str(folder), "--no-baselines"]
    assert execute(arguments) == 0
    result = json.loads((folder / "result.json").read_text())["contributions"]
    assert planned == {name: account["epsilon"] for name, account in result.items()}
    assert len(planned) == 2
    name, _, releases = row.rpartition(" ")
    assert re.search(rf"{name} +\S+ at delta 1e-05, T {releases}", capsys.readouterr().out)
    assert execute(["plan", str(config), *changed]) == 0
    assert re.search(rf"{name} +\S+ at delta 1e-05, T {releases}", capsys.readouterr().out)


@pytest.mark.parametrize(("method", "private"), [
    ("single_view", "dp_sgd={noise_multiplier: 4}"),
    ("apfed_c", "labels={mechanism: lp_mst, epsilon: 1}"),
])  # fmt: skip
def test_any_noise_from_the_seed_is_warned_of(
    private: str, method: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("--set", f"method={method}", "--set", private)
    for noise, warned in (("reproducible_insecure", True), ("secret", False)):
        answer = told(capsys, "plan", config, *changes, "--set", f"guard.noise={noise}")
        assert any("knows the seed" in one for one in answer["warnings"]) is warned


def test_links_are_summed_by_kind_unless_they_are_asked_for(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    links = told(capsys, "plan", config)["links"]
    kinds = {link["kind"] for link in links}
    assert len(kinds) < len(links)
    for option, header, rows in (((), "kind", len(kinds)), (("--links",), "from", len(links))):
        assert execute(["plan", str(config), *option]) == 0
        lines = capsys.readouterr().out.splitlines()
        (at,) = [at for at, line in enumerate(lines) if line.startswith("By ")]
        table = lines[at + 2 : at + 2 + rows]
        assert lines[at + 1].split()[0] == header
        assert all(line.split()[-1] in ("B", "kB", "MB") for line in table)
        assert sum(int(line.split()[-3].replace(",", "")) for line in table) == sum(
            link["messages"] for link in links
        )


def test_a_forecast_tells_the_one_figure_of_what_leaves_a_party(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, figure in (("votes", "epsilon_v"), ("apfed_c", "epsilon_x")):
        assert execute(["plan", str(config), f"--set=method={method}"]) == 0
        told = re.findall(r"^(epsilon_[xvc])\S* .* inf$", capsys.readouterr().out, re.MULTILINE)
        assert told == [figure]
