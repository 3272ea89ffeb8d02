import json
import math
from pathlib import Path

import pytest

import apfed_experiments as package
from apfed_attacks import ATTACKS
from apfed_experiments.study import base_config, results_of
from apfed_experiments.tradeoff import (
    Board,
    TradeOff,
    TradeOffError,
    dcs,
    load_tradeoff,
    on_the_front,
    points_of,
    run_tradeoff,
    tradeoff_of,
)
from secure_apfed.cli import execute
from secure_apfed.config.file import load_config_text
from secure_apfed.errors import CheckpointError, ConfigError
from tests.experiments.finished_runs import attacked, finished

STUDY = """
name: tiny
base: base.yaml
seeds: 2
defences:
  - {name: none, undefended: true}
  - {name: noise, set: {guard: {mechanism: gaussian}}, knob: guard.epsilon, values: [1.0, 50.0]}
"""
BASE = """
name: tiny
method: apfed_c
data: {dataset: digits, views: 2, overlap: 0.5, rows: 500}
model: {hidden: [8], representation: 4, projection: 4}
train: {epochs: 2, batch_size: 128, device: cpu, learning_rate: 0.05, max_gradient_norm: 1.0}
secure_sum: {scheme: plain, allow_single_passive: true}
guard: {mechanism: none}
attacks: [{name: model_completion, options: {labels_per_class: 4}}, {name: inverse_network}]
"""


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    file = tmp_path / "study.yaml"
    file.write_text(STUDY)
    return file


def _board(tradeoff: TradeOff, folder: Path, **by_defence: tuple[float, float]) -> Board:
    points = points_of(tradeoff, folder)
    found = []
    for point in points:
        accuracy, advantage = by_defence.get(point.defence, (0.7, 0.1))
        run = finished(accuracy, releases=3, attacks=[attacked(advantage)])
        found += [(point.trial(seed), run) for seed in range(2)]
    return Board.of(points, results_of(found))


def test_dcs_is_one_where_nothing_leaks_and_nothing_is_lost() -> None:
    assert dcs(attack=0.1, ideal=0.1, accuracy=0.9, undefended=0.9) == 1
    assert dcs(attack=0.0, ideal=0.1, accuracy=0.95, undefended=0.9) == 1, "it is one-sided"
    assert dcs(attack=0.6, ideal=0.0, accuracy=0.8, undefended=0.9) == pytest.approx(
        1 / (1 + math.sqrt(0.5 * 0.6**2 + 0.5 * 0.1**2))
    )
    assert dcs(attack=-3.0, ideal=0.0, accuracy=0.9, undefended=0.9) == 1


def test_points_are_every_strength_and_the_references(study_file: Path) -> None:
    listed = points_of(load_tradeoff(study_file), Path("out"))
    assert [point.label for point in listed] == [
        "SingleVL (the active alone)", "centralised (one table of all features)",
        "TVFL (all parties predict)", "none", "noise, epsilon 1.0", "noise, epsilon 50.0",
    ]  # fmt: skip
    assert [point.reference for point in listed] == [True, True, True, False, False, False]
    assert len({point.config.name for point in listed}) == 6
    assert listed[4].config.guard.epsilon == 1.0
    assert [point.centralised for point in listed] == [False, True, False, False, False, False]
    whole = listed[1].config
    assert (whole.method.name, whole.data.overlap, whole.attacks) == ("single_view", 1.0, ())
    study_file.write_text(STUDY + "references: [tvfl, single_view]\n")
    listed = points_of(load_tradeoff(study_file), Path("out"))
    assert [point.label for point in listed if point.reference] == [
        "TVFL (all parties predict)", "SingleVL (the active alone)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("undefended: true", "undefended: false", "exactly one defence says undefended"),
        ("knob: guard.epsilon, ", "", "knob and values go together"),
        ("name: noise", "name: none", "defences are all different"),
        ("name: tiny", "name: ../tiny", "name"),
        ("base: base.yaml", "base: bace.yaml", "there is no 'bace.yaml' beside"),
        ("seeds: 2", "seed: 2", "did you mean 'seeds'"),
        ("seeds: 2", "references: [tvlf]", "references"),
        ("seeds: 2", "seeds: [", "study.yaml"),
    ],
)
def test_a_wrong_study_is_refused(study_file: Path, old: str, new: str, told: str) -> None:
    study_file.write_text(STUDY.replace(old, new))
    with pytest.raises(ConfigError, match=told):
        load_tradeoff(study_file)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("knob: guard.epsilon", "knob: guard.epsilonn", r"noise epsilonn 1\.0: .*epsilonn"),
        ("mechanism: gaussian", "mechanism: gausian", r"study tiny, noise epsilon 1\.0: "),
        ("values: [1.0, 50.0]", "values: [.nan]", "noise epsilon nan: "),
        ("values: [1.0, 50.0]", "values: [2.0, 2.0]", "would share the folder"),
        ("undefended: true}", "undefended: true}\n  - {name: None}", "would share the folder"),
        ("seeds: 2", "set: {attacks: [{name: temporall}]}", "none: .*did you mean 'temporal'"),
        ("seeds: 2", "set: {attacks: [{name: temporal, options: {x: 1}}]}", "none: .*options: x"),
    ],
)
def test_what_no_run_could_do_is_refused_before_the_first(
    study_file: Path, tmp_path: Path, old: str, new: str, told: str
) -> None:
    study_file.write_text(STUDY.replace(old, new))
    with pytest.raises(ConfigError, match=told):
        run_tradeoff(load_tradeoff(study_file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_leaderboard_ranks_by_dcs_and_keeps_references_apart(
    study_file: Path, tmp_path: Path
) -> None:
    board = _board(load_tradeoff(study_file), tmp_path, none=(0.9, 0.4), noise=(0.88, 0.0))
    assert [row["reference"] for row in board.rows] == [True] * 3 + [False] * 3
    assert [row["defence"] for row in board.rows[3:]] == ["noise", "noise", "none"]
    undefended = board.rows[-1]
    assert undefended["dcs_baseline"] == pytest.approx(1 / (1 + math.sqrt(0.5 * 0.4**2)))
    assert undefended["dcs_vflair"] == pytest.approx(1 / (1 + math.sqrt(0.5 * 0.9**2)))
    assert board.as_markdown().count("\n") == 2 + 6
    assert "dcs_baseline" in board.table.csv().splitlines()[0]


def test_the_front_holds_what_nothing_beats(study_file: Path, tmp_path: Path) -> None:
    board = _board(load_tradeoff(study_file), tmp_path, none=(0.9, 0.4), noise=(0.88, 0.0))
    front = on_the_front(board.rows, "labels")
    assert [row["defence"] for row in front] == ["noise", "none"]
    worse = _board(load_tradeoff(study_file), tmp_path, noise=(0.5, 0.3))
    assert [row["defence"] for row in on_the_front(worse.rows, "labels")] == ["none"]


def test_a_study_runs_resumes_and_writes_its_page(study_file: Path, tmp_path: Path) -> None:
    study, folder = load_tradeoff(study_file), tmp_path / "out"
    told: list[tuple[int, int]] = []
    board = run_tradeoff(study, folder, on_done=lambda done, total: told.append((done, total)))
    assert told[-1] == (12, 12)
    assert board.targets == ("features", "labels")
    page = (folder / "index.html").read_text()
    assert "ε_x holds at delta 1e-05." in page
    assert page.count("data:image/png;base64,") == 2
    for link in (part.split('"')[0] for part in page.split('href="')[1:]):
        assert (folder / link).is_file()
    labels = [row["label"] for row in board.rows]
    assert labels[1] == "centralised (one table of all features)"
    assert board.rows[1]["accuracy"].mean > board.rows[0]["accuracy"].mean + 0.02
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("*/result.json")}
    stamps |= {path: path.stat().st_mtime_ns for path in folder.glob("*seed*.json")}
    assert len(stamps) == 10 + 2
    again = run_tradeoff(study, folder)
    assert again.table.plain() == board.table.plain()
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert json.loads((folder / "points.json").read_bytes())[0]["seeds"] == 2


def _short(text: str = STUDY) -> str:
    return text.replace("seeds: 2", "seeds: 1\nreferences: []").replace("[1.0, 50.0]", "[1.0]")


def test_the_folder_of_another_study_or_of_a_run_is_refused(
    study_file: Path, tmp_path: Path
) -> None:
    study_file.write_text(_short())
    study, out = load_tradeoff(study_file), tmp_path / "out"
    run_tradeoff(study, out)
    before = {path: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(CheckpointError, match="holds the study 'tiny', this one is 'other'"):
        run_tradeoff(study.model_copy(update={"name": "other"}), out)
    assert {path: path.read_bytes() for path in out.iterdir() if path.is_file()} == before
    with pytest.raises(CheckpointError, match="holds a run, not a study"):
        run_tradeoff(study, out / "tiny-none-seed0")
    for damage in ("", "{", "[]", "base: x"):
        (out / "study.yaml").write_text(damage)
        with pytest.raises(CheckpointError, match=r"study\.yaml names no study"):
            run_tradeoff(study, out)
    (out / "study.yaml").write_text("{name: tiny, of_an_earlier_version: 1}")
    run_tradeoff(study, out)
    (tmp_path / "base.yaml").write_text(BASE.replace("epochs: 2", "epochs: 1"))
    with pytest.raises(CheckpointError, match="run with other settings"):
        run_tradeoff(load_tradeoff(study_file), out)


def test_a_trial_that_fails_leaves_its_point_out_and_the_others_whole(
    study_file: Path, tmp_path: Path
) -> None:
    diverging = "{name: diverging, set: {train: {learning_rate: 1.0e+30, device: cpu}}}"
    study_file.write_text(f"{_short()}  - {diverging}\n")
    board = run_tradeoff(load_tradeoff(study_file), tmp_path / "out")
    labels = {row["label"] for row in board.rows}
    assert labels == {"none", "noise, epsilon 1.0"}, board.failures
    assert [one.trial for one in board.failures] == ["tiny-diverging-seed0"]
    for name in ("leaderboard.md", "index.html"):
        assert "tiny-diverging-seed0: " in (tmp_path / "out" / name).read_text()


def test_without_the_undefended_point_there_is_no_board(study_file: Path, tmp_path: Path) -> None:
    undefended = "undefended: true, set: {train: {learning_rate: 1.0e+30}}"
    study_file.write_text(_short().replace("undefended: true", undefended))
    with pytest.raises(TradeOffError, match="'none', which the others are compared with, failed"):
        run_tradeoff(load_tradeoff(study_file), tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0  # its owner's alone
    assert (tmp_path / "out" / "tiny-noise-epsilon-1-0-seed0" / "result.json").exists()


def _own_study(**study: object) -> str:
    return f"{BASE}tradeoff: {json.dumps({'seeds': 1, 'references': [], **study})}\n"


DEFENCES = [
    {"name": "none", "undefended": True},
    {"name": "noise", "set": {"guard": {"mechanism": "gaussian"}}, "knob": "guard.epsilon",
     "values": [1.0]},
]  # fmt: skip


@pytest.mark.parametrize(
    ("study", "told"),
    [
        ({"defences": DEFENCES, "name": "mine"}, "tradeoff.name: the study of a run has the run's"),
        ({"defences": DEFENCES, "base": "b.yaml"}, "tradeoff.base"),
        ({"defenses": DEFENCES}, "did you mean 'defences'"),
        ({"defences": DEFENCES, "set": {"attacks": [{"name": "tempral"}]}}, "did you mean 'tempor"),
        ({"defences": DEFENCES, "set": {"trian.epochs": 1}}, "did you mean 'train'"),
    ],
)
def test_a_runs_study_is_checked_before_the_run(
    study: dict[str, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(_own_study(**study))
    assert execute(["run", str(file), "--output", str(folder), "--json"]) == 2
    assert told in json.loads(capsys.readouterr().out)["error"]["message"]
    assert not folder.exists()


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_run_is_followed_by_its_own_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(_own_study(defences=DEFENCES))
    told = ["run", str(file), "--output", str(folder), "--no-baselines", "--set", "attacks=[]"]
    assert execute([*told, "--set", 'tradeoff.set={"attacks": [{"name": "temporal"}]}',
                    "--json"]) == 0  # fmt: skip
    found = json.loads(capsys.readouterr().out)
    assert {point["defence"] for point in found["tradeoff"]} == {"none", "noise"}
    assert all("labels" in point["leakage"] for point in found["tradeoff"])
    assert not found["attacks"]
    assert (folder / "tradeoff" / "index.html").is_file()
    played = folder / "tradeoff" / "tiny-tradeoff-none-seed0" / "config.yaml"
    assert not load_config_text(played.read_text()).tradeoff


def test_the_card_holds_what_it_says() -> None:
    """The design in one file; `secure-apfed run` of it is a slow test of the command."""
    card = base_config("card")
    objectives = [one.objective.name for one in card.passives.values() if one.objective]
    assert objectives == ["reconstruction", "contrastive"]
    assert (card.secure_sum.scheme, card.alignment.protocol) == ("ckks", "circuit_crypten")
    assert (card.guard.mechanism, card.guard.epsilon) == ("gaussian", 8.0)
    assert (card.labels.mechanism, [one.name for one in card.attacks]) == (
        "randomised_response", ["all"],
    )  # fmt: skip
    points = points_of(tradeoff_of(card), Path("out"))
    epsilons = [one.config.guard.epsilon for one in points if not one.reference]
    assert epsilons == [None, 1.0, 8.0, 64.0, 512.0]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_card_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = Path(package.__file__).parent / "configs" / "card.yaml"
    assert execute(["run", str(card), "--output", str(tmp_path / "run"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["privacy"]["epsilon_x"] == pytest.approx(8.0, abs=0.01)
    assert {one["attack"] for one in found["attacks"]} == set(ATTACKS)
    assert sum(one["applicable"] for one in found["attacks"]) > 10
    assert len(found["tradeoff"]) == 6
