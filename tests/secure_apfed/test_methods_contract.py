"""What every method of the table keeps to: true of what it declares, resumed, and hard to fool."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from apfed_experiments.variants import title_inference
from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.config.file import load_config_text
from secure_apfed.data import VerticalData, load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Kind
from secure_apfed.methods import METHODS, method_settings
from secure_apfed.methods.joint import TvflSettings
from secure_apfed.privacy.defences import describe_runners
from secure_apfed.runs.active_model import load_model
from secure_apfed.runs.folder import RunFolder
from secure_apfed.runs.outcome import RunResult, load_outcome
from secure_apfed.runs.run import run
from secure_apfed.testing import check_declared, exchange_hidden_labels
from tests.secure_apfed.seats import alter_message
from tests.secure_apfed.small_runs import Said, interrupt_run, small_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning"),
]


def config_of(method: Said, **changes: Any) -> Config:
    usual: dict[str, Any] = {
        "train": {"epochs": 2, "batch_size": 64, "device": "cpu"},
        "secure_sum": {"scheme": "plain"},
    }
    return small_config(method, **{**usual, **changes})


@dataclass(frozen=True)
class Played:
    """A short run of a method, where few rows have a label, and where it may be broken off."""

    config: Config
    data: VerticalData
    folder: Path
    result: RunResult
    midway: int


_PLAYED: dict[str, Played] = {}  # not of a module's scope: under what every test runs under


@pytest.fixture(params=[*METHODS])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    if request.param not in _PLAYED:
        _PLAYED[request.param] = _play(request.param, tmp_path_factory.mktemp("run"))
    return _PLAYED[request.param]


def _play(method: str, folder: Path) -> Played:
    epochs = (
        3 if METHODS[method].public_facts.averaged_quantity else 2
    )  # of GRUs two, and one after
    config = config_of(method, train={"epochs": epochs, "batch_size": 64, "device": "cpu"})
    few = config.data.model_copy(update={"labelled": 20})
    config = config.model_copy(update={"data": few})
    data = load_data(few, seed=config.seed)
    steps = list[int]()
    result = run(
        config, folder / "whole", data=data, on_progress=lambda now: steps.append(now.step)
    )
    return Played(config, data, folder, result, steps[len(steps) // 2])


def test_what_is_declared_is_true_of_what_a_run_sends_and_keeps(played: Played) -> None:
    check_declared(played.config, played.result)
    told = played.config.method
    recording = played.result.recording
    assert bool(recording.alignment) is told.has_passives
    measured = played.result.measures[METHODS[told.name].headline]
    assert measured.keys() >= {"accuracy", "auc", "brier"}
    assert measured["accuracy"] == played.result.accuracy[METHODS[told.name].headline]
    networks = told.representation_sender == "passives" or told.has_representation_sum
    assert networks or told.has_joint_svd or told.teacher is None
    assert told.has_gradient_sum or told.fixed_objective is None


def test_every_way_to_predict_has_a_title_and_its_rows(played: Played) -> None:
    result = played.result
    titles = [title_inference(played.config.method, name) for name in result.accuracy]
    assert len(set(titles)) == len(titles)
    assert not set(titles) & set(result.accuracy)
    counts = {name: len(scored.truth) for name, scored in result.test_scores.items()}
    outcome = load_outcome(RunFolder(played.folder / "whole"))
    assert outcome.measured_rows == result.measured_rows == counts
    assert counts.keys() == result.accuracy.keys()


def test_who_predicts_alone_does_so_from_its_folder(played: Played) -> None:
    name = played.config.method.name
    active = played.data.active
    rows = played.data.test_rows
    if played.config.method.can_predict_locally:
        assert active.labels is not None
        with torch.no_grad():
            said = load_model(played.folder / "whole").network(active.features[rows]).argmax(1)
        right = (said == active.labels[rows]).double().mean().item()
        assert right == pytest.approx(played.result.accuracy[name])


@pytest.mark.sampled(every=7)
def test_a_run_that_was_broken_off_goes_on_and_gives_the_same(played: Played) -> None:
    folder = played.folder / "broken"
    whole = played.result
    interrupt_run(played.config, folder, at_step=played.midway)
    again = run(played.config, folder, resume=True)
    assert again.accuracy == whole.accuracy
    assert again.privacy.releases == whole.privacy.releases
    assert again.contributions == whole.contributions
    outcomes = [load_outcome(RunFolder(played.folder / name)) for name in ("broken", "whole")]
    assert outcomes[0].agreement == outcomes[1].agreement
    models = [one.recording.model for one in (again, whole) if one.recording.model is not None]
    pairs = zip(*(one.state_dict().values() for one in models), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.sampled(every=5)
def test_no_hidden_label_reaches_training(played: Played) -> None:
    lying = exchange_hidden_labels(played.data)
    assert run(played.config, None, data=lying).accuracy == played.result.accuracy


CUTS: tuple[Callable[[bytes], bytes], ...] = (
    lambda body: body[:-1],
    lambda body: b"",
    lambda body: body + b"x",
)
_NOT_READ = {Kind.GREETING, Kind.SESSION, Kind.SIGNATURE, Kind.ALIGNMENT, Kind.ALIVE}  # own tests
_WORDS = {Kind.READY, Kind.CHECKPOINT, Kind.SAVED, Kind.END, Kind.ABORT}


def kinds_of(played: Played) -> list[Kind]:
    sent = {flow.kind for flow in played.result.recording.transcript.flows}
    return sorted(sent - _NOT_READ - _WORDS)


@pytest.mark.sampled(every=10)
def test_what_is_no_message_is_refused_and_its_sender_named(played: Played) -> None:
    for at, kind in enumerate(kinds_of(played)):
        with pytest.MonkeyPatch.context() as patch:
            senders = alter_message(patch, kind, CUTS[at % len(CUTS)])
            with pytest.raises(RemoteProtocolError) as refused:
                run(played.config, None, data=played.data)
        assert senders[0] in str(refused.value), kind


@pytest.mark.sampled(every=5)
def test_who_falls_silent_is_named(played: Played) -> None:
    silent = [kind for kind in kinds_of(played) if kind is not Kind.GRADIENTS]  # nobody waits so
    for kind in silent[[*METHODS].index(played.config.method.name) % 2 :: 2]:
        with pytest.MonkeyPatch.context() as patch:
            senders = alter_message(patch, kind, lambda _: None)
            with pytest.raises(RemoteProtocolError) as silence:
                run(played.config, None, data=played.data)
        assert senders[0] in str(silence.value), kind


def explain_refusal(method: dict[str, Any]) -> str:
    """Return why these settings of a method are refused."""
    with pytest.raises(ValidationError) as refused:
        config_of(method)
    return str(refused.value)


@pytest.mark.parametrize("method", [*METHODS])
def test_a_method_has_its_own_settings_and_no_other_s(method: str) -> None:
    config = config_of(method)
    assert method_settings(config.model_dump(exclude_defaults=True)["method"]) == config.method
    keys = {key for one in METHODS.values() for key in one.settings.model_fields}
    others = keys - set(METHODS[method].settings.model_fields)
    refusals = {key: explain_refusal({"name": method, key: 1}) for key in others}
    assert not [
        key
        for key, said in refusals.items()
        if not re.search(rf"method\.{key}\s+Extra inputs", said)
    ]


def test_a_misspelt_method_names_the_nearest() -> None:
    text = "name: a\nmethod: apfedc\ndata: {}\nguard: {mechanism: none}"
    with pytest.raises(ConfigError) as caught:
        load_config_text(text, source="run.yaml")
    assert str(caught.value).startswith(
        "run.yaml:2: method: 'apfedc' is unknown; did you mean 'apfed_c'? Known are apfed, apfed_r"
    )


def test_who_runs_a_defence_follows_from_who_lets_out_what_it_protects() -> None:
    class BothSettings(TvflSettings):
        has_gradient_sum = True

    both = BothSettings(name="tvfl")
    assert describe_runners("compression", both) == "every passive and the active"
    assert describe_runners("marvell", both) == "the active"


_SPREAD = {"train": {"spread_labels": True}}
_LP_MST = {"labels": {"mechanism": "lp_mst", "epsilon": 2.0}}
_GUARDED = {"guard": {"mechanism": "gaussian", "epsilon": 8.0}}
_BARE = {"guard": {"mechanism": "none"}}
_PAIRWISE = {"alignment": {"mode": "pairwise"}}
_NOISED = {"secure_sum": {"scheme": "plain", "noise": {"sigma": 1.0}}}
_PATIENT = {"train": {"patience": 3}}
_PRIVATE = {"dp_sgd": {"noise_multiplier": 1.0}}
_TEACHER = {"name": "joint_teacher_sum", "labels": "spreading"}
REFUSED: tuple[tuple[Said, Mapping[str, Any], str], ...] = (
    ("tvfl", _PAIRWISE, "use all, or apfed, apfed_r, apfed_c, votes, votes_randomised or votes_re"),
    ("apfed_c", {**_PAIRWISE, "secure_sum": {"scheme": "ckks"}}, "the gradient of every row"),
    ("apfed_c", {"alignment": {"mode": "some"}}, "'all' or 'pairwise'"),
    ("apfed_c", {**_SPREAD, **_PRIVATE}, r"without the noise of\s+dp_sgd"),
    ("tvfl", _NOISED, "adds no gradients or representations of passives"),
    ("apfed_c", {"secure_sum": {"noise": {}}}, "exactly one of sigma and epsilon"),
    ("apfed_c", {"secure_sum": {"noise": {"sigma": 0.0}}}, "greater than 0"),
    ("apfed_c", {"train": {"schedule_steps": 5, "warmup_steps": 5}}, "leave none of 5"),
    ("apfed_c", {"train": {"keep_best": True}}, "told by held-out rows"),
    ("tvfl", _PRIVATE, "dp_sgd: method tvfl gives the passives more"),
    ("apfed_c", {**_PRIVATE, "train": {"precision": "bfloat16"}}, "dp_sgd: gradients of single"),
    ("apfed_c", {"dp_sgd": {"epsilon": 4.0}, **_BARE}, r"dp_sgd\.epsilon cannot"),
    (
        "tvfl",
        {"train": {"patience": 3, "keep_best": True}},
        "other parties' networks of that epoch",
    ),
    ("single_view", {**_PATIENT, **_PRIVATE}, "would tell of the held-out rows"),
    ("single_view", {**_PATIENT, **_LP_MST}, "lp_mst answers labels as the epochs go on"),
    ("h_fedmv", {"data": {"dataset": "breast_cancer"}}, "say horizontal"),
    ("h_fedmv", {"model": {"network": "mlp"}}, "takes identity"),
    ("h_fedmv", _GUARDED, "no noise of a guard"),
    ("h_fedmv", {"passives": {"passive-1": {"weight": 2.0}}}, "leave weight out"),
    ("mmvfl", {"model": {"network": "mlp"}}, "takes identity"),
    ("mmvfl", _GUARDED, "no noise of a guard"),
    ("mmvfl", _NOISED, r"secure_sum\.noise"),
    ("mmvfl", _LP_MST, "lp_mst"),
    ("mmvfl", _SPREAD, "spread_labels"),
    ("mmvfl", {"defences": [{"kind": "marvell"}]}, "marvell"),
    ("split_nn_sum", _GUARDED, "nobody reads a representation"),
    ("joint_teacher_sum", _GUARDED, "nobody reads a representation"),
    ({**_TEACHER, "epsilon": 1}, {}, "no epsilon of one"),
    ({**_TEACHER, "labels": "spredding"}, {}, "did you mean 'spreading'"),
    ({**_TEACHER, "labels": "private_logistic"}, {}, "is unknown"),
    ("joint_teacher_sum", _PAIRWISE, "needs all passives"),
    ("joint_teacher_sum", _SPREAD, "use apfed"),
    ("joint_teacher_sum", _LP_MST, "none that predicts alone"),
    ({"name": "votes_randomised", "epsilon": None}, {}, "method votes_randomised protects"),
    ({"name": "votes", "labeller": "spreding"}, {}, "did you mean 'spreading'"),
    ({"name": "votes", "labeller": "private_logistic"}, {}, "private_logistic, which needs it"),
    ("votes", _NOISED, r"noise on votes is method\.epsilon"),
    ("votes", _PRIVATE, "dp_sgd"),
    ("votes", _LP_MST, "labels.mechanism: lp_mst"),
    ("votes", _PATIENT, "method votes learns no labels by steps"),
    ({"name": "votes_encrypted", "labeller": "logistic"}, {}, "is not linear in the labels"),
    ({"name": "votes_encrypted", "epsilon": 4.0}, {}, "let the passives look"),
    ("vfedtrans", _GUARDED, "adds no noise to"),
    ("vfedtrans", {"model": {"network": "selu"}}, "use enriched"),
    ("vfedtrans", {"model": {"network": "enriched", "head": [4]}}, r"without model\.head"),
    ("vfedtrans", _PAIRWISE, "needs all passives for every row"),
    ({"name": "vfedtrans", "mask_rows": 1}, {}, "greater than or equal to 2"),
    ("apc_vfl", {"model": {"network": "mlp"}}, "use one of selu, linear, enriched"),
    ("apc_vfl", {"model": {"network": "selu", "head": [8]}}, "fits one linear layer on"),
)


@pytest.mark.parametrize(
    ("method", "changes", "said"), REFUSED, ids=[f"{each[0]} {each[2]}" for each in REFUSED]
)
def test_what_does_not_fit_is_refused(method: Said, changes: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        config_of(method, **changes)
