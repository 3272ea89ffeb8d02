"""Facts of methods: true of what is sent, and all that others ask of a method."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from pydantic import ValidationError

from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.defences import DEFENCES, who_applies
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind
from secure_apfed.facts import MethodFacts
from secure_apfed.methods import METHODS, Apfed, Method, SingleView, Tvfl
from secure_apfed.planning.forecast import Forecast, forecast
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


# What names nobody has heard of are like: facts of their own, under a protocol that exists.
class Joint(Tvfl):
    facts = replace(Tvfl.facts, title="Joint")


class Lone(SingleView):
    facts = replace(SingleView.facts, title="Lone")


TOYS: dict[str, Method] = {
    "helped": Apfed("helped", replace(METHODS["apfed_c"].facts, title="Helped")),
    "joint": Joint(),
    "lone": Lone(),
}
LIKE = {"helped": "apfed_c", "joint": "tvfl", "lone": "single_view"}


@pytest.fixture(autouse=True)
def _from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in TOYS.items():
        monkeypatch.setitem(METHODS, name, entry)


def config_of(method: str, **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "train": {"epochs": 2, "batch_size": 64, "device": "cpu"},
        "secure_sum": {"scheme": "plain"},
        "passives": {"default": {"objective": {"name": "contrastive"}}}
        if method == "apfed"
        else {},
    }
    return small_config(method, **{**usual, **changes})


@pytest.mark.parametrize("method", [*METHODS])
def test_facts_are_true_of_what_a_run_sends_and_keeps(method: str) -> None:
    facts = METHODS[method].facts
    looked = {"candidates": 2} if facts.opens_votes == "encrypted" else {}
    needed = {"votes": {"epsilon": 4.0, **looked}} if facts.opens_votes else {}
    recording = run(config_of(method, **needed), None).recording
    active = recording.data.active.name
    sent = {(flow.kind, flow.sender == active) for flow in recording.transcript.flows}
    assert {by_active for kind, by_active in sent if kind is Kind.REPRESENTATIONS} == {
        None: set(), "active": {True}, "passives": {False},
    }[facts.representations_from]  # fmt: skip
    assert ((Kind.CONTRIBUTION, False) in sent) is facts.aggregates
    assert ((Kind.LABELS, True) in sent) is facts.sends_labels
    assert ((Kind.VOTES, False) in sent) is (facts.opens_votes == "randomised")
    assert ((Kind.GRADIENTS, True) in sent) is facts.returns_gradients
    assert bool(sent) is bool(recording.alignment) is facts.has_passives
    assert (recording.model is not None) is facts.predicts_alone
    networks = facts.representations_from == "passives" or facts.sums_representations
    assert bool(recording.encoders) is networks


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"has_passives": False, "sums_gradients": True}, "no passives to exchange"),
        ({"has_passives": False, "predicts_alone": False}, "no passives to exchange"),
        ({"returns_gradients": True, "representations_from": "active"}, "on what no passive sent"),
        ({"own_objective": METHODS["apfed_r"].facts.own_objective}, "contribute nothing"),
    ],
)
def test_facts_that_contradict_each_other_are_refused(facts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"Odd .*{said}"):
        MethodFacts(**{"title": "Odd", "predicts_alone": True, **facts})


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
def test_the_settings_that_a_method_takes_follow_from_its_facts(
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
    both = replace(METHODS["joint"].facts, title="Both", sums_gradients=True)
    quiet = MethodFacts(title="Quiet", predicts_alone=True)
    assert who_applies("compression", both) == "every passive and the active"
    assert who_applies("clip_and_noise", both) == "every passive"
    assert who_applies("marvell", both) == who_applies("confusional_labels", both) == "the active"
    assert who_applies("mid", METHODS["helped"].facts) == "the active"
    assert {who_applies(kind, quiet) for kind in DEFENCES} == {""}


@pytest.mark.parametrize("toy", TOYS)
def test_a_method_is_planned_by_its_facts(toy: str) -> None:
    changes: dict[str, Any] = {
        "guard": {"mechanism": "none"}, "transcript": {"limit_megabytes": 0.001},
    }  # fmt: skip

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
