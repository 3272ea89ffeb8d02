"""Trade-off studies: what they may vary, what they write, and that a stopped one goes on."""

import json
import math
import shutil
from pathlib import Path

import pytest
from joblib import parallel_config
from matplotlib.figure import Figure

import apfed_experiments as package
from apfed_attacks import ATTACKS
from apfed_attacks.headlines import Direction
from apfed_experiments.runner import StudyResults, run_study
from apfed_experiments.shown import JOINT_TRAINING
from apfed_experiments.study import collect_metrics, load_base_config
from apfed_experiments.tradeoff import (
    Leaderboard,
    TradeOff,
    TradeOffError,
    compute_dcs,
    declare_study,
    draw_board,
    load_tradeoff,
    make_points,
    make_tradeoff,
    select_front,
)
from secure_apfed.baselines import BASELINES
from secure_apfed.config.file import load_config_text
from secure_apfed.errors import CheckpointError, ConfigError
from tests.experiments.run_folder import check_all_directions, make_attack_result, make_finished_run
from tests.secure_apfed.small_runs import run_as_json

AGGREGATOR_READS = Direction(reader="aggregator", target="features").kind
STUDY = """
name: tiny
base: base.yaml
seeds: 1
references: [single_view, centralised]
defences:
  - {name: none, undefended: true}
  - {name: noise, set: {guard: {mechanism: gaussian}}, knob: guard.epsilon, values: [1.0]}
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
DIVERGING = "{name: diverging, set: {train: {learning_rate: 1.0e+30, device: cpu}}}"


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path / "study.yaml"


@pytest.fixture(scope="module")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[TradeOff, Path, StudyResults]:
    """A study one of whose defences diverges."""
    place = tmp_path_factory.mktemp("tradeoff")
    (place / "base.yaml").write_text(BASE)
    (place / "study.yaml").write_text(f"{STUDY}  - {DIVERGING}\n")
    study = load_tradeoff(place / "study.yaml")
    told = list[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patch:
        few = {"ridge": BASELINES["ridge"]}
        patch.setattr("apfed_experiments.baselines.list_candidates", lambda: few)
        answer = run_study(
            declare_study(study, place / "out"), on_done=lambda *now: told.append(now)
        )
    assert told[-1] == (5, 5)
    return study, place / "out", answer


def board_of(tradeoff: TradeOff, **by_defence: tuple[float, float]) -> Leaderboard:
    found = []
    points = make_points(tradeoff, Path("out"))
    for point in points:
        accuracy, advantage = by_defence.get(point.defence, (0.7, 0.1))
        run = make_finished_run(accuracy, releases=3, attacks=[make_attack_result(advantage)])
        found += [(point.make_trial(seed), run) for seed in range(2)]
    return Leaderboard.from_results(points, collect_metrics(found))


def test_points_are_every_strength_and_the_references(study_file: Path) -> None:
    study_file.write_text(STUDY.replace("[1.0]", "[1.0, 50.0]").replace("d]", "d, tvfl]"))
    listed = make_points(load_tradeoff(study_file), Path("out"))
    assert [(point.label, point.is_reference, point.is_centralised) for point in listed] == [
        ("SingleVL (the active alone)", True, False),
        ("centralised (one table of all features)", True, True),
        ("TVFL (all parties predict)", True, False),
        ("none", False, False),
        ("noise, epsilon 1.0", False, False),
        ("noise, epsilon 50.0", False, False),
    ]
    assert len({point.config.name for point in listed}) == 6
    assert listed[4].config.guard.epsilon == 1.0
    whole = listed[1].config
    assert (whole.method.name, whole.data.overlap, whole.attacks) == ("single_view", 1.0, ())


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("undefended: true", "undefended: false", "exactly one defence says undefended"),
        ("knob: guard.epsilon, ", "", "knob and values go together"),
        ("name: noise", "name: none", "defences are all different"),
        ("name: tiny", "name: ../tiny", "name"),
        ("base: base.yaml", "base: bace.yaml", "there is no 'bace.yaml' beside"),
        ("seeds: 1", "seeds: [", "study.yaml"),
        ("knob: guard.epsilon", "knob: guard.epsilonn", r"noise epsilonn 1\.0: .*epsilonn"),
        ("values: [1.0]", "values: [2.0, 2.0]", "would share the folder"),
        ("undefended: true}", "undefended: true}\n  - {name: None}", "would share the folder"),
        ("seeds: 1", "set: {attacks: [{name: temporal, options: {x: 1}}]}", "none: .*options: x"),
    ],
)
def test_a_wrong_study_is_refused_before_its_first_run(
    study_file: Path, tmp_path: Path, old: str, new: str, told: str
) -> None:
    study_file.write_text(STUDY.replace(old, new))
    with pytest.raises(ConfigError, match=told):
        declare_study(load_tradeoff(study_file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_leaderboard_ranks_by_dcs_and_keeps_references_apart(study_file: Path) -> None:
    assert (
        compute_dcs(attack_score=0.1, ideal_score=0.1, accuracy=0.9, undefended_accuracy=0.9) == 1
    )
    assert (
        compute_dcs(attack_score=0.0, ideal_score=0.1, accuracy=0.95, undefended_accuracy=0.9) == 1
    ), "it is one-sided"
    assert (
        compute_dcs(attack_score=-3.0, ideal_score=0.0, accuracy=0.9, undefended_accuracy=0.9) == 1
    )
    assert compute_dcs(
        attack_score=0.6, ideal_score=0.0, accuracy=0.8, undefended_accuracy=0.9
    ) == pytest.approx(1 / (1 + math.sqrt(0.5 * 0.6**2 + 0.5 * 0.1**2)))
    study = load_tradeoff(study_file)
    board = board_of(study, none=(0.9, 0.4), noise=(0.88, 0.0))
    assert [row["reference"] for row in board.rows] == [True, True, False, False]
    assert [row["defence"] for row in board.rows[2:]] == ["noise", "none"]
    undefended = board.rows[-1]
    assert undefended["dcs_baseline"] == pytest.approx(1 / (1 + math.sqrt(0.5 * 0.4**2)))
    assert undefended["dcs_vflair"] == pytest.approx(1 / (1 + math.sqrt(0.5 * 0.9**2)))
    assert [row["defence"] for row in select_front(board.rows, "passive reads labels")] == [
        "noise",
        "none",
    ]
    worse = board_of(study, noise=(0.5, 0.3))
    assert [row["defence"] for row in select_front(worse.rows, "passive reads labels")] == ["none"]


@pytest.mark.slow
def test_a_study_runs_leaves_out_what_fails_and_writes_its_page(
    finished_study: tuple[TradeOff, Path, StudyResults],
) -> None:
    study, folder, answer = finished_study
    (part,) = answer.parts
    assert [picture.title for picture in part.pictures] == [
        "Accuracy against leakage: passive reads features of active",
        "Accuracy against leakage: passive reads labels",
    ]
    single, centralised, *defended = part.table.rows
    assert centralised["label"] == "centralised (one table of all features)"
    assert centralised["accuracy"].mean > single["accuracy"].mean + 0.02
    assert {row["label"] for row in defended} == {"none", "noise, epsilon 1.0"}
    assert [of.trial for of in answer.failures] == ["tiny-diverging-seed0"]
    page = (folder / "index.html").read_text()
    assert "ε_x holds at delta 1e-05." in page
    assert page.count("data:image/png;base64,") == 2
    for link in (part.split('"')[0] for part in page.split('href="')[1:]):
        assert (folder / link).is_file()
    for name in ("leaderboard.md", "index.html"):
        assert "tiny-diverging-seed0: " in (folder / name).read_text()
    again = run_study(declare_study(study, folder))
    assert again.tables[0].export_rows() == part.table.export_rows()
    stored = json.loads((folder / "leaderboard.json").read_bytes())
    assert stored["rows"][0]["seeds"] == 1


def test_the_folder_of_another_study_or_of_a_run_is_refused(
    finished_study: tuple[TradeOff, Path, StudyResults], tmp_path: Path
) -> None:
    study = finished_study[0]
    out = tmp_path / "out"
    shutil.copytree(finished_study[1], out)

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.iterdir() if path.is_file()}

    before = files()
    with pytest.raises(CheckpointError, match="holds the study 'tiny', this one is 'other'"):
        run_study(declare_study(study.model_copy(update={"name": "other"}), out))
    assert files() == before
    with pytest.raises(CheckpointError, match="holds a run, not a study"):
        run_study(declare_study(study, out / "tiny-none-seed0"))
    for damage in ("", "{", "[]", "base: x"):
        (out / "study.yaml").write_text(damage)
        with pytest.raises(CheckpointError, match=r"study\.yaml names no study"):
            run_study(declare_study(study, out))
    (out / "study.yaml").write_text("{name: tiny, of_an_earlier_version: 1}")
    other = study.model_copy(update={"base": BASE.replace("epochs: 2", "epochs: 1")})
    with pytest.raises(CheckpointError, match="run with other settings"):
        run_study(declare_study(other, out))


@pytest.mark.slow
@pytest.mark.parametrize("promise", ["short", "epsilon_x 64, 4 releases of a row; " * 3])
def test_no_word_of_a_picture_is_cut(study_file: Path, promise: str) -> None:
    board = board_of(load_tradeoff(study_file), none=(0.8, 0.2), noise=(0.6, 0.1))
    figure = Figure(layout="constrained")
    draw_board(figure, board, board.directions[0], describe_guarantee=lambda row: promise)
    figure.draw_without_rendering()
    whole = figure.bbox
    legend = figure.legends[0].get_window_extent()
    axes = figure.axes[0].get_window_extent()
    assert whole.x0 <= legend.x0
    assert legend.x1 <= whole.x1
    assert whole.y0 <= legend.y0
    assert legend.y1 <= axes.y0
    assert axes.height > 2.5 * figure.dpi


def test_without_the_undefended_point_there_is_no_board(study_file: Path, tmp_path: Path) -> None:
    undefended = "undefended: true, set: {train: {learning_rate: 1.0e+30}}"
    study_file.write_text(STUDY.replace("undefended: true", undefended))
    study = load_tradeoff(study_file).model_copy(update={"references": ()})
    with pytest.raises(TradeOffError, match="'none', which the others are compared with, failed"):
        run_study(declare_study(study, tmp_path / "out"))
    assert (tmp_path / "out").stat().st_mode & 0o077 == 0  # its owner's alone
    assert (tmp_path / "out" / "tiny-noise-epsilon-1-0-seed0" / "result.json").exists()


def own_study(**study: object) -> str:
    return f"{BASE}tradeoff: {json.dumps({'seeds': 1, 'references': [], **study})}\n"


DEFENCES = [
    {"name": "none", "undefended": True},
    {
        "name": "noise",
        "set": {"guard": {"mechanism": "gaussian"}},
        "knob": "guard.epsilon",
        "values": [1.0],
    },
]


@pytest.mark.parametrize(
    ("study", "says"),
    [
        ({"defences": DEFENCES, "name": "mine"}, "tradeoff.name: the study of a run has the run's"),
        ({"defences": DEFENCES, "base": "b.yaml"}, "tradeoff.base"),
        ({"defences": DEFENCES, "set": {"trian.epochs": 1}}, "did you mean 'train'"),
    ],
)
def test_a_runs_study_is_checked_before_the_run(
    study: dict[str, object], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    folder = tmp_path / "run"
    file.write_text(own_study(**study))
    assert says in run_as_json(capsys, "run", file, "--output", folder, code=2)["error"]["message"]
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_a_run_is_followed_by_its_own_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    folder = tmp_path / "run"
    file.write_text(own_study(defences=DEFENCES))
    command = ["run", file, "--output", folder, "--no-baselines", "--set", "attacks=[]"]
    attacks = 'tradeoff.set={"attacks": [{"name": "temporal"}]}'
    with parallel_config(backend="sequential"):
        found = run_as_json(capsys, *command, "--set", attacks)
    assert {point["defence"] for point in found["tradeoff"]} == {"none", "noise"}
    assert all("passive reads labels" in point["leakage"] for point in found["tradeoff"])
    assert not found["attacks"]
    assert (folder / "tradeoff" / "index.html").is_file()
    played = folder / "tradeoff" / "tiny-tradeoff-none-seed0" / "config.yaml"
    assert not load_config_text(played.read_text()).tradeoff


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_card_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = Path(package.__file__).parent / "configs" / "card.yaml"
    found = run_as_json(capsys, "run", card, "--output", tmp_path / "run")
    assert found["privacy"]["epsilon_x"] == pytest.approx(1.0, abs=0.01)
    assert {one["attack"] for one in found["attacks"]} == set(ATTACKS)
    assert sum(one["applicable"] for one in found["attacks"]) > 10
    assert len(found["tradeoff"]) == 6
    for point in (one for one in found["tradeoff"] if not one["reference"]):
        assert {"active reads features of passives", AGGREGATOR_READS} <= set(point["leakage"])
    declined = [one for one in found["attacks"] if one["attack"] == "contribution_regression"]
    assert {one["reason"] for one in declined} == {"nothing to read: ciphertexts (ckks)"}


def test_labels_train_references_where_they_come_after_an_exchange() -> None:
    study = make_tradeoff(load_base_config("card"))
    reference, *others = make_points(study, Path())
    assert reference.is_reference
    assert reference.config.train.labels == "joint"
    assert reference.config.train.epochs == JOINT_TRAINING["epochs"]
    assert {point.config.train.labels for point in others} == {"after"}


def test_the_card_attacks_every_direction_in_which_something_leaves() -> None:
    config = load_base_config("card")
    study = make_tradeoff(config)
    undefended = next(point for point in make_points(study, Path()) if point.is_undefended)
    for of in (config, undefended.config):
        check_all_directions(of)
