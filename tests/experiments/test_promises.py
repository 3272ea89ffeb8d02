"""No surface shows a finite epsilon where nothing bounds it: all methods, guards, noise, labels.

The oracle is `list_bounded_figures`, which reads the settings alone and shares no code with what is
tested.
"""

import html
import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apfed_experiments.report.contents import (
    build_privacy_document,
    iter_tiles,
    list_privacy_rows,
    list_trace,
)
from apfed_experiments.report.run import ReportedRun
from apfed_experiments.run_list import ListedRun, RunState
from secure_apfed.base.files import to_json
from secure_apfed.base.names import ReleaseEpsilonName
from secure_apfed.cli import execute
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings
from secure_apfed.console import progress as shown
from secure_apfed.console.progress import Board
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope, Kind, StatusTracker
from secure_apfed.methods import METHODS
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.guard import make_guard
from secure_apfed.privacy.ledger import PrivacyLedger, PrivacySpent
from secure_apfed.privacy.randomised_response import make_label_mechanism
from secure_apfed.runs import spending
from secure_apfed.runs.outcome import Contributions, Outcome, Privacy, Progress, StoredGuarantee
from secure_apfed.runs.run import run
from secure_apfed.runs.spending import ReleaseMeter, compute_run_cost
from secure_apfed.settings.promises import (
    MEANING_BY_EPSILON,
    NOTHING_SENT,
    Promise,
    find_worst_guarantee,
    list_guarantees,
)
from tests.secure_apfed.small_runs import small_config

GUARDS: Mapping[str, dict[str, Any]] = {
    "none": {"mechanism": "none", "noise": "reproducible_insecure"},
    "gaussian": {"mechanism": "gaussian", "epsilon": 8.0, "noise": "reproducible_insecure"},
    "frozen": {"mechanism": "frozen_gaussian", "epsilon": 8.0, "noise": "reproducible_insecure"},
}
NOISES = ("no noise", "noise")
LABELS: Mapping[str, dict[str, Any]] = {
    "labels as they are": {"mechanism": "none"},
    "labels randomised": {"mechanism": "randomised_response", "epsilon": 2.0},
}
ROLES = ("active", "passive", "aggregator", "dealer")


def config_of(method: str, guard: str, noise: str, labels: str) -> Config | None:
    """Return the settings of a case; None where this method does not take them."""
    said: dict[str, Any] = {"name": method}
    kind = METHODS[method].public_facts
    changes: dict[str, Any] = {"guard": GUARDS[guard], "labels": LABELS[labels]}
    if noise == "noise" and kind.vote_protocol:
        said["epsilon"] = 4.0
    elif noise == "noise":
        summed = {"scheme": "plain", "masks": "pairwise", "clip": 1.0}
        changes["secure_sum"] = {**summed, "noise": {"epsilon": 4.0}}
    if kind.vote_protocol == "encrypted" and noise == "noise":
        said["candidates"] = 20
    changes["train"] = {"epochs": 1, "batch_size": 64, "device": "cpu"}
    try:
        return small_config(said, **changes)
    except (ConfigError, ValueError):
        return None


CASES = {
    f"{method}, guard {guard}, {noise}, {labels}": config
    for method in METHODS
    for guard in GUARDS
    for noise in NOISES
    for labels in LABELS
    if labels == "labels as they are" or (guard, noise) == ("none", "no noise")
    if (config := config_of(method, guard, noise, labels)) is not None
}


def list_bounded_figures(config: Config) -> set[str]:
    """The figures that these settings bound, by what each method is known to do."""
    method = config.method
    found = set()
    if config.labels.mechanism != "none":
        found.add("epsilon_y")
    if method.representation_sender and config.guard.mechanism != "none":
        found.add("epsilon_x")
    if method.vote_protocol and getattr(method, "epsilon", None):
        found.add("epsilon_v")
    if not method.vote_protocol and config.secure_sum.noise:
        found.add("epsilon_c")
    return found


def make_charged_session(config: Config) -> SimpleNamespace:
    """A session of which each party with a ledger let one row out once."""
    method = config.method
    ledgers = dict[str, PrivacyLedger]()
    contributions = {}

    def ledger(name: str, mechanism: Any, figure: ReleaseEpsilonName) -> PrivacyLedger:
        made = PrivacyLedger(
            mechanism, delta=config.delta, budget=None, rows=4, log=None, figure=figure
        )
        made.charge(step=0, rows=torch.tensor([1]), digest=b"sent")
        ledgers[name] = made
        return made

    senders = {"active": ("active",), "passives": ("passive-1",), None: ()}
    for name in senders[method.representation_sender]:
        guard = make_guard(config.guard, delta=config.delta, releases=1, key=bytes(32))
        ledger(name, guard.mechanism(), "epsilon_x")
    if method.find_noise(config) is not None:
        noisy = SummedRelease(deviation=100, honest=1, sensitivity=20.0, numbers=4)
        contributions = {"passive-1": ledger("passive-1+", noisy, method.passives_epsilon_name)}
    own = SimpleNamespace(config=config)
    return SimpleNamespace(
        ledgers=ledgers,
        contribution_ledgers=contributions,
        active_role=SimpleNamespace(dp_sgd_training=None),
        party_session=SimpleNamespace(party=own),
        helpers=True,
        charged={},
        contract=SimpleNamespace(passives=["passive-1"]),
    )


def iter_text_figures(text: str) -> Iterator[tuple[str, float]]:
    """Every figure that a text gives with a number behind its name or its title."""
    what = "|".join(re.escape(title) for title, _ in MEANING_BY_EPSILON.values())
    form = rf"(epsilon_[a-z]+)(?: of [\w-]+)?(?:, (?:{what}))?(?:, \w+ held fixed)?[\s:=]+"
    for figure, number in re.findall(form + r"([-+]?\d[\d.e+-]*)", text):
        yield figure, float(number.rstrip("."))


def iter_json_figures(document: Any, config: Config, name: str = "") -> Iterator[tuple[str, float]]:
    """Every figure that a document gives as a finite number."""
    keys = {
        **dict(zip(MEANING_BY_EPSILON, MEANING_BY_EPSILON, strict=True)),
        "representations": "epsilon_x",
        "labels": "epsilon_y",
        "model": "epsilon_model",
        "epsilon_passives": config.method.passives_epsilon_name,
    }
    if isinstance(document, Mapping):
        for key, value in document.items():
            figure = keys.get(key, "")
            if key == "epsilon":
                figure = document.get("figure", "epsilon_x")
            yield from iter_json_figures(value, config, figure)
    elif isinstance(document, list):
        for value in document:
            yield from iter_json_figures(value, config)
    elif name and isinstance(document, int | float) and math.isfinite(document):
        yield name, float(document)


def surfaces_of(config: Config, session: Any) -> dict[str, Any]:
    """Return what people and programs are shown of these accounts: by surface, text or document."""
    labels = make_label_mechanism(config.labels, classes=2)
    spent = compute_run_cost(session, labels, delta=config.delta)
    accounts = {name: of.summarise_cost() for name, of in session.contribution_ledgers.items()}
    all_promises = list_guarantees(config, spent, spent_by_passive=accounts)
    outcome = Outcome(
        method=config.method.name,
        accuracy={config.method.name: 0.9},
        wire_bytes=1,
        seconds=1.0,
        privacy=Privacy.from_spent(spent),
        contributions={name: Contributions(**account) for name, account in accounts.items()},
        promises=tuple(StoredGuarantee(**promise.as_json()) for promise in all_promises),
    )
    reported = ReportedRun(
        config=config,
        outcome=outcome,
        attacks=None,
        path=Path("none"),
        epochs=(),
        flows=(),
        contract_sha256="",
        roles={},
        seeds={},
        versions={},
        charges={},
    )
    row = ListedRun(
        path=Path("none"),
        name="none",
        state=RunState.FINISHED,
        date=datetime.fromtimestamp(0, UTC),
        config=config,
        guarantee=reported.weakest_guarantee,
        leak_by_direction={},
    )
    found: dict[str, Any] = {
        "result.json": json.loads(to_json(outcome.model_dump(mode="python"))),
        "tiles": "\n".join(f"{tile.name} {tile.value}" for tile in iter_tiles(reported)),
        "accounting": "\n".join(f"{name} {value}" for name, value in list_privacy_rows(reported)),
        "privacy.json": json.loads(to_json(build_privacy_document(reported)["accounting"])),
        "run list": row.as_json()["promise"],
        "terminal": "\n".join(f"{of.format_title()}  {of.sentence}" for of in all_promises),
    }
    first = find_worst_guarantee(all_promises, config.method.epsilon_name)
    far = Progress(
        epoch=1,
        epochs=1,
        step=1,
        steps=1,
        loss=None,
        accuracy=None,
        wire_bytes=1,
        figure=first.figure,
        epsilon=first.epsilon,
        promise=first.state,
    )
    found["progress"] = shown.describe_figures(far)
    for role in ROLES:
        found |= surfaces_of_party(config, role, session)
    return found


def surfaces_of_party(config: Config, role: str, session: Any) -> dict[str, Any]:
    """Return what a party's status line, its metrics and its own report show."""
    meter = ReleaseMeter(config, role)
    for name, ledger in session.ledgers.items():
        if name.startswith(role):
            meter.add_ledger(name, ledger)
    tracker = StatusTracker()
    tracker.start_session(role, ["peer"], meter)
    tracker.observe_outgoing(_envelope(role), b"frame")
    board = Board(lambda: (tracker.build_status(),))
    status = tracker.build_status()
    return {
        f"status line of {role}": shown._format_status_line(status),
        f"status of {role}": json.loads(to_json(status.model_dump(mode="python"))),
        f"metrics of {role}": [
            {"figure": figure, "epsilon": float(value)}
            for figure, value in re.findall(
                r'epsilon\{party="\w+",figure="(\w+)"\} (\S+)', shown._format_metrics(board)
            )
        ],
    }


def _envelope(sender: str) -> Envelope:
    return Envelope(
        session="unnamed",
        step=0,
        kind=Kind.REQUEST,
        sender=sender,
        receiver="peer",
        sequence=0,
        payload=b"x",
    )


def list_unpromised_figures(surfaces: Mapping[str, Any], config: Config) -> list[str]:
    """Each finite figure that a surface shows and these settings do not bound."""
    allowed = list_bounded_figures(config)
    trains_alone = not config.method.has_passives
    found = []
    for name, surface in surfaces.items():
        figures = (
            iter_text_figures(surface)
            if isinstance(surface, str)
            else iter_json_figures(surface, config)
        )
        for figure, value in figures:
            is_zero_of_nothing = trains_alone and figure == "epsilon_x" and value == 0
            if figure not in allowed and not (
                is_zero_of_nothing and name.endswith((".json", ".jsonl"))
            ):
                found.append(f"{name}: {figure} {value:g}")
            elif value == 0 and not trains_alone:
                found.append(f"{name}: {figure} 0, which promises more than there is")
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_surface_shows_a_finite_epsilon_that_nothing_bounds(name: str) -> None:
    config = CASES[name]
    surfaces = surfaces_of(config, make_charged_session(config))
    assert list_unpromised_figures(surfaces, config) == []
    shown = {of for of, _ in iter_text_figures(surfaces["terminal"])}
    assert list_bounded_figures(config) - {"epsilon_y"} <= shown, "what is bounded is shown as such"


def test_each_method_is_walked_with_and_without_what_it_takes() -> None:
    walked = {name: [case for case in CASES if case.startswith(f"{name},")] for name in METHODS}
    assert all(walked.values())
    assert sum(any(", noise," in case for case in of) for of in walked.values()) >= 9
    assert sum(any("guard gaussian" in case for case in of) for of in walked.values()) >= 8


SUMMED = "split_nn_sum, guard none, no noise, labels as they are"


@pytest.mark.parametrize("fault", ["a run that counts nothing", "a party without a ledger"])
def test_a_planted_zero_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    zero = Promise(figure="epsilon_x", epsilon=0.0, delta=1e-5, releases=0)
    if fault == "a party without a ledger":
        monkeypatch.setattr(spending, "find_party_guarantee", lambda *_: zero)
    else:
        monkeypatch.setattr(
            spending,
            "_compute_remote_cost",
            lambda session, delta: PrivacySpent.for_no_release(delta=delta),
        )
    config = CASES[SUMMED]
    assert list_unpromised_figures(surfaces_of(config, make_charged_session(config)), config)


def real_surfaces_of(config: Config, folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what a run that is played writes and prints."""
    path = folder / "run.yaml"
    path.write_text(dump_settings(config))
    assert execute(["run", str(path), "--output", str(folder / "run"), "--no-baselines"]) == 0
    printed = capsys.readouterr()
    page = html.unescape(re.sub(r"<pre>.*?</pre>", "", (folder / "run/report.html").read_text()))
    accounting = json.loads((folder / "run/privacy.json").read_text())["accounting"]
    return {
        **files_of(folder / "run"),
        "terminal": printed.out,
        "progress": printed.err,
        "report": re.sub(r"<[^>]+>", " ", page),
        "privacy.json": accounting,
    }


def files_of(folder: Path) -> dict[str, Any]:
    """Return what the run's files say of epsilons, without its settings."""
    result = json.loads((folder / "result.json").read_text())
    model = json.loads((folder / "model.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {
        "metrics.jsonl": [json.loads(line) for line in lines],
        "result.json": {key: result[key] for key in ("privacy", "contributions", "promises")},
        "model.json": [model["epsilon"], model["promises"]],
    }


def test_other_accountants_check_no_epsilon_of_nothing() -> None:
    checked: dict[str, float | str] = {"gdp": 0.0, "prv": 7.9, "rdp": "not installed"}
    privacy = Privacy(epsilon_x=0.0, epsilon_y=0.0, epsilon_model=math.inf, accountants=checked)
    run_read: Any = SimpleNamespace(outcome=SimpleNamespace(privacy=privacy))
    assert [line.partition(":")[0] for line in list_trace(run_read)] == [
        "cross-check, prv accountant",
        "cross-check, rdp accountant",
    ]


def test_a_run_without_noise_writes_no_finite_epsilon(tmp_path: Path) -> None:
    config = CASES[SUMMED]
    lines = list[str]()
    run(
        config,
        tmp_path,
        on_progress=lambda progress: lines.append(shown.describe_figures(progress)),
    )
    surfaces = {"progress": "\n".join(lines), **files_of(tmp_path)}
    assert list_unpromised_figures(surfaces, config) == []
    assert surfaces["result.json"]["privacy"]["epsilon_x"] == "inf"
    assert "epsilon_c no guarantee" in lines[-1]


@pytest.mark.parametrize(("method", "sends"), [("apfed_r", True), ("single_view", False)])
def test_no_line_says_nothing_is_sent_of_a_run_that_sends(
    method: str, sends: bool, tmp_path: Path
) -> None:
    states = list[str | None]()
    config = small_config(method, train={"epochs": 2, "device": "cpu"})
    run(config, tmp_path / "run", on_progress=lambda progress: states.append(progress.promise))
    assert (NOTHING_SENT in states) is not sends
    assert states[-1] is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_run_writes_or_prints_a_finite_epsilon_that_nothing_bounds(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        list_unpromised_figures(real_surfaces_of(CASES[name], tmp_path, capsys), CASES[name]) == []
    )
