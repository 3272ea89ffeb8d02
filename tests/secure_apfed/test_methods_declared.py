"""What methods say of themselves: true of what is sent, and all that others ask of a method."""

from dataclasses import asdict
from typing import Any

import pytest
from pydantic import ValidationError

from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.defences import DEFENCES, who_applies
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS, Method, method_settings
from secure_apfed.methods.joint import TvflSettings
from secure_apfed.planning.forecast import Forecast, forecast
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import Said, renamed, small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


# Names that nobody has heard of, under a protocol that exists.
LIKE = {"helped": "apfed_c", "joint": "tvfl", "lone": "single_view"}
TOYS: dict[str, Method] = {name: renamed(METHODS[like], name) for name, like in LIKE.items()}


@pytest.fixture(autouse=True)
def _from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in TOYS.items():
        monkeypatch.setitem(METHODS, name, entry)


def config_of(method: Said, **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "train": {"epochs": 2, "batch_size": 64, "device": "cpu"},
        "secure_sum": {"scheme": "plain"},
    }
    return small_config(method, **{**usual, **changes})


@pytest.mark.parametrize("method", [*METHODS])
def test_what_is_declared_is_true_of_what_a_run_sends_and_keeps(method: str) -> None:
    config = config_of(method)
    told = config.method
    recording = run(config, None).recording
    active = recording.data.active.name
    sent = {(flow.kind, flow.sender == active) for flow in recording.transcript.flows}
    assert {by_active for kind, by_active in sent if kind is Kind.REPRESENTATIONS} == {
        None: set(), "active": {True}, "passives": {False},
    }[told.representations_from]  # fmt: skip
    assert ((Kind.CONTRIBUTION, False) in sent) is told.aggregates
    assert ((Kind.LABELS, True) in sent) is told.sends_labels
    assert ((Kind.VOTES, False) in sent) is (told.opens_votes == "randomised")
    assert ((Kind.GRADIENTS, True) in sent) is told.returns_gradients
    assert bool(sent) is bool(recording.alignment) is told.has_passives
    assert (recording.model is not None) is told.predicts_alone
    networks = told.representations_from == "passives" or told.sums_representations
    assert bool(recording.encoders) is networks


@pytest.mark.parametrize("method", [*METHODS])
def test_what_is_declared_does_not_contradict_itself(method: str) -> None:
    told = METHODS[method].declared
    assert told.name == method
    exchanges = bool(told.offers or told.sums or told.returns_gradients)
    assert exchanges is told.has_passives
    assert told.has_passives or told.predicts_alone
    tells = told.representations_from == "passives" or told.sums_representations
    assert tells or not told.returns_gradients
    assert tells or told.decomposes or told.teacher is None
    assert told.sums_gradients or told.own_objective is None


@pytest.mark.parametrize("method", [*METHODS])
def test_a_method_has_its_own_settings_and_no_other_s(method: str) -> None:
    config = config_of(method)
    assert method_settings(config.model_dump(exclude_defaults=True)["method"]) == config.method
    keys = {key for one in METHODS.values() for key in one.settings.model_fields}
    for key in keys - set(METHODS[method].settings.model_fields):
        with pytest.raises(ValidationError, match=rf"method\.{key}\s+Extra inputs"):
            config_of({"name": method, key: 1})


def test_a_misspelt_method_names_the_nearest() -> None:
    text = "name: a\nmethod: apfedc\ndata: {}\nguard: {mechanism: none}"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, source="run.yaml")
    assert str(caught.value).startswith(
        "run.yaml:2: method: 'apfedc' is unknown; did you mean 'apfed_c'? Known are apfed, apfed_r"
    )


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize(
    "changes",
    [
        {"secure_sum": {"scheme": "plain", "masks": "pairwise", "noise": {"sigma": 1.0}}},
        {"alignment": {"mode": "pairwise"}},
        {"alignment": {"mode": "pairwise"}, "secure_sum": {"allow_single_passive": True}},
        {"dp_sgd": {"clip": 1.0, "noise_multiplier": 1.0}},
        {"dp_sgd": {"clip": 1.0, "epsilon": 1.0}, "guard": {"mechanism": "none"}},
        *({"defences": [{"kind": kind}]} for kind in DEFENCES),
    ],
    ids=str,
)
def test_the_settings_that_a_method_takes_follow_from_what_it_declares(
    toy: str, changes: dict[str, Any]
) -> None:
    refused = []
    for method in (LIKE[toy], toy):
        try:
            config_of(method, **changes)
        except ValidationError as error:
            refused.append(error.errors()[0]["msg"].replace(method, "it"))
    assert len(refused) in (0, 2)
    assert len({words.partition("; use")[0] for words in refused}) <= 1


def test_who_runs_a_defence_follows_from_who_lets_out_what_it_protects() -> None:
    class BothSettings(TvflSettings):
        sums_gradients = True

    both, quiet = BothSettings(name="tvfl"), METHODS["single_view"].declared
    assert who_applies("compression", both) == "every passive and the active"
    assert who_applies("clip_and_noise", both) == "every passive"
    assert who_applies("marvell", both) == who_applies("confusional_labels", both) == "the active"
    assert who_applies("mid", METHODS["helped"].declared) == "the active"
    assert {who_applies(kind, quiet) for kind in DEFENCES} == {""}


@pytest.mark.parametrize("toy", TOYS)
def test_a_method_is_planned_by_what_it_declares(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"guard": {"mechanism": "none"}}
    monkeypatch.setattr("secure_apfed.exchange.transcript.MOST_MEGABYTES", 0.001)

    def told(plan: Forecast) -> dict[str, Any]:
        links = [(link.sender, link.receiver, link.kind, link.messages) for link in plan.links]
        told = {key: value for key, value in asdict(plan).items() if "second" not in key}
        told["intersections"] = [one.protocol for one in plan.intersections]
        # A contract holds the method's name, so what is sealed under it differs by some bytes.
        return {**told, "wire_bytes": None, "links": links, "warnings": len(plan.warnings)}

    plan = forecast(config_of(toy, **changes))
    assert told(plan) == told(forecast(config_of(LIKE[toy], **changes)))
    assert (plan.releases == 0) is (toy == "lone")
    assert any("reads every gradient" in line for line in plan.warnings) is (toy == "helped")


def test_a_sentence_for_people_lists_methods_from_the_table() -> None:
    with pytest.raises(
        ValidationError,
        match="use all, or apfed, apfed_r, apfed_c, votes, votes_randomised or helped",
    ):
        config_of("tvfl", alignment={"mode": "pairwise"})
