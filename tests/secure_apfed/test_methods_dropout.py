"""A passive falls silent in the middle of a step: training goes on or stops, as agreed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apfed_protocols.errors import PartyLeftError, RemoteProtocolError
from apfed_protocols.sums import SumContributor
from apfed_protocols.sums.fixed_point import FixedPoint
from apfed_protocols.sums.interface import FloatArray, IntArray, StepBinding
from secure_apfed.config import Config
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope, InMemoryNetwork, Kind
from secure_apfed.methods import (
    METHODS,
    Simulation,
    SimulationInputs,
    fresh_secrets,
    multiview,
    open_session,
)
from secure_apfed.methods.apfed import ApfedPassive
from secure_apfed.methods.session_sum import blame_active_too
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import active_of, passives_of, step_config
from tests.secure_apfed.small_runs import small_config
from tests.secure_apfed.test_methods_apfed import vertical_data
from tests.secure_apfed.test_methods_views import joint_scores
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
ORDER = Kind.SAVED, Kind.CONTRIBUTION, Kind.SUM_ANSWER
BEFORE_SAVING, BEFORE_CONTRIBUTING, BEFORE_ANSWERING = ORDER


class Killing(InMemoryNetwork):
    """Carries nothing that a party sends in training from its death on."""

    deaths: dict[str, tuple[int, Kind]] = {}

    def queue_frame(self, sender: str, receiver: str, frame: bytes) -> None:
        length = int.from_bytes(frame[:2], "big")
        sent = Envelope.parse_header(frame[2 : 2 + length])
        death = self.deaths.get(sender)
        if death and sent.kind in ORDER:
            step, kind = death
            if (sent.step, ORDER.index(sent.kind)) >= (step, ORDER.index(kind)):
                return
        super().queue_frame(sender, receiver, frame)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, Kind]]:
    chosen: dict[str, tuple[int, Kind]] = {}
    monkeypatch.setattr(Killing, "deaths", chosen)
    monkeypatch.setattr("secure_apfed.methods.session.InMemoryNetwork", Killing)
    return chosen


class Recorder:
    """A contributor that remembers the integers that it put in."""

    def __init__(self, inner: SumContributor, fixed_point: FixedPoint) -> None:
        self._inner = inner
        self._fixed_point = fixed_point
        self.integers: dict[int, Any] = {}

    @classmethod
    def into(cls, passive: ApfedPassive, session: Simulation) -> "Recorder":
        recorder = cls(passive.passive_sum.contributor, make_fixed_point(session))
        passive.passive_sum.contributor = recorder  # type: ignore[assignment]  # is set up already
        return recorder

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        self.integers[binding.step] = self._fixed_point.quantise_rows(values_BD, noise_BD)
        return self._inner.contribute(values_BD, binding, noise_BD)

    def answer(self, request: bytes) -> bytes:
        return self._inner.answer(request)


def make_fixed_point(session: Simulation) -> FixedPoint:
    agreed: Any = session.contract.secure_sum
    noise = agreed["noise"]
    facts = {
        "contributor_count": len(session.contract.passives),
        "noise": noise["steps"] if noise else 0,
    }
    return FixedPoint(clip_norm=agreed["clip"], bits=agreed["bits"], **facts)


def open_step_session(
    rules: dict[str, Any], sums: dict[str, Any], passives: int = 4, method: str = "apfed_c"
) -> Simulation:
    secure_sum = {"clip": 0.5, **sums}
    rules = {"minimum_spread": 0.0, **rules}
    config = step_config(method, secure_sum=secure_sum, rules=rules)
    return open_session(config, vertical_data(passives))


RECOVERABLE = {"scheme": "plain", "masks": "recoverable"}


def recovering(passives: int, threshold: int) -> Simulation:
    return open_step_session({}, RECOVERABLE | {"threshold": threshold}, passives)


@pytest.mark.parametrize("kind", [BEFORE_CONTRIBUTING, BEFORE_ANSWERING])
@pytest.mark.parametrize("gone", [("passive-2",), ("passive-1", "passive-4")])
def test_the_sums_of_the_others_stay_exact(
    deaths: dict[str, tuple[int, Kind]], kind: Kind, gone: tuple[str, ...]
) -> None:
    session = recovering(5, 3)
    assert session.contract.silent_passive == "recover"
    recorders = {party.name: Recorder.into(party, session) for party in passives_of(session)}
    deaths.update(dict.fromkeys(gone, (2, kind)))
    last = 1 if kind is BEFORE_CONTRIBUTING else 2
    for step in range(4):
        assert np.isfinite(session.train_step(step, torch.arange(16)))
        counted = [
            recorder.integers[step]
            for name, recorder in recorders.items()
            if name not in gone or step <= last
        ]
        expected = make_fixed_point(session).dequantise_sum(np.sum(counted, axis=0))
        assert session.active_role.last_sum is not None
        assert np.array_equal(session.active_role.last_sum.numpy(), expected), step
    assert session.describe_attendance() == {"left": dict.fromkeys(gone, 2), "steps_without_all": 2}
    to_them = [flow for flow in session.transcript.flows if flow.receiver in gone]
    assert max(flow.last_step for flow in to_them) == 2


def test_one_after_the_other_until_too_few_are_left(deaths: dict[str, tuple[int, Kind]]) -> None:
    session = recovering(4, 3)
    deaths["passive-1"] = (1, BEFORE_ANSWERING)
    deaths["passive-3"] = (3, BEFORE_CONTRIBUTING)
    for step in range(3):
        session.train_step(step, torch.arange(16))
    encoder = active_of(session).trainer.networks.encoder
    before = [parameter.clone() for parameter in encoder.parameters()]
    with pytest.raises(RemoteProtocolError, match=r"at least 3 of .*missing: passive-1, passive-3"):
        session.train_step(3, torch.arange(16))
    after = [*encoder.parameters()]
    assert all(torch.equal(was, now) for was, now in zip(before, after, strict=True))
    sent = [flow for flow in session.transcript.flows if flow.kind is Kind.SUM_ANSWER]
    assert max(flow.last_step for flow in sent) == 2  # nobody answered in the step that stopped


@pytest.mark.parametrize(
    ("protocol", "threshold"), [("plain + pairwise masks", None), ("plain + recoverable masks", 3)]
)
def test_a_contract_that_says_abort_stops_for_all(
    deaths: dict[str, tuple[int, Kind]], protocol: str, threshold: int | None
) -> None:
    session = open_step_session({}, {**pair_of(protocol), "threshold": threshold}, 3)
    assert session.contract.silent_passive == "stop"
    deaths["passive-2"] = (1, BEFORE_CONTRIBUTING)
    session.train_step(0, torch.arange(16))
    said = r"step 1 from passive-2; nothing came; or active .*; the contract"
    with pytest.raises(PartyLeftError, match=said):
        session.train_step(1, torch.arange(16))
    assert session.describe_attendance() == {"left": {}, "steps_without_all": 0}


@pytest.mark.parametrize("gone", [True, False])
def test_who_left_is_not_also_said_to_have_been_passed_over(gone: bool) -> None:
    silence = PartyLeftError("shop closed its link", missing_parties=("shop",), has_left=gone)
    with pytest.raises(PartyLeftError) as told, blame_active_too("bank"):
        raise silence
    assert ("asked others and not them" in str(told.value)) is not gone
    assert told.value.missing_parties == (("shop",) if gone else ("shop", "bank"))


@pytest.mark.parametrize(
    "method",
    [
        name
        for name, one in METHODS.items()
        if one.settings.has_representation_sum or one.settings.averaged_quantity
    ],
)
@pytest.mark.sampled(every=4)
def test_an_average_never_lacks_a_party(method: str) -> None:
    """A sum without one passive was taken as the whole average, and nobody was told."""
    config = small_config(method, secure_sum=pair_of("plain + recoverable masks") | {"clip": 64.0})
    clients = {"clients": 5} if config.data.is_horizontal else {"dataset": "digits", "views": 5}
    data = config.data.model_copy(update={**clients, "limit": 240})
    config = config.model_copy(update={"data": data})
    if method == "apfed_code":  # a passive has seven columns that differ here
        model = config.model.model_copy(update={"representation": 3})
        config = config.model_copy(update={"model": model})
    contract = open_session(config, load_data(data, seed=0)).contract
    assert contract.secure_sum["threshold"] == len(contract.passives) == 4
    assert contract.silent_passive == "stop"
    sums = config.secure_sum.model_copy(update={"threshold": 3})
    with pytest.raises(ConfigError, match=f"threshold: under method {method} no step goes on"):
        open_session(config.model_copy(update={"secure_sum": sums}), load_data(data, seed=0))


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("kind", [BEFORE_CONTRIBUTING, BEFORE_ANSWERING])
@pytest.mark.parametrize("method", ["mmvfl", "v_fedmv"])
def test_pseudo_labels_are_the_mean_of_those_who_answered(
    method: str, kind: Kind, deaths: dict[str, tuple[int, Kind]]
) -> None:
    config = small_config(
        {"name": method, "parties": {"passive-4": {"zeta": 20.0}}},
        data={"dataset": "digits", "views": 5, "limit": 240, "labelled": 100},
        secure_sum=pair_of("plain + recoverable masks") | {"clip": 4.0, "bits": 24, "threshold": 3},
        passives={"passive-2": {"weight": 3.0}},
        rules={"silent_passive": "recover"},
    )
    session = open_session(config, load_data(config.data, seed=0))
    assert session.contract.silent_passive == "recover"
    active: Any = session.active_role
    views = {name: session.helpers[name].trainer.view for name in session.contract.passives}  # type: ignore[attr-defined]
    assert [len({view.zeta for view in views.values()}), views["passive-4"].zeta] == [3, 20.0]
    deaths["passive-2"] = (2, kind)
    last = 1 if kind is BEFORE_CONTRIBUTING else 2
    rows = active.training_rows.numpy()
    counted: list[Any] = []
    for step in range(4):
        assert np.isfinite(session.train_step(step, active.training_rows))
        counted = [view for name, view in views.items() if name != "passive-2" or step <= last]
        counted.append(active.trainer.view)
        total = sum(view.zeta * view.labels_NC[rows] for view in counted)
        zeta = sum(view.zeta for view in counted)
        pull = active.trainer.label_term
        drawn = pull.eta_N1[rows] * (method == "v_fedmv")
        mean = (total + drawn * pull.truth_NC[rows]) / (zeta + drawn)
        np.testing.assert_allclose(active.trainer.common_NC[rows], mean, atol=1e-4)
    assert session.describe_attendance() == {"left": {"passive-2": 2}, "steps_without_all": 2}
    said = session.evaluate(next_step=4, is_final=True)[f"{method}_together"]
    truth = active._party.data.table.labels[active._rows[active.test_positions]].numpy()
    guessed = joint_scores(counted, active.test_positions.numpy()).argmax(1)
    assert float(said) == pytest.approx((guessed == truth).mean(), abs=0.01)
    tested = active.test_positions.numpy()
    part = sum(
        multiview.compute_joint_weight(view.zeta, active.trainer.zetas)
        * view.compute_scores(tested)
        for view in counted[:-1]
    )
    joint = active.trainer.predict_jointly(active.test_positions, part, [2])
    np.testing.assert_allclose(
        joint, joint_scores(counted, active.test_positions.numpy()), atol=1e-9
    )


EPOCH = 4
"""Steps of an epoch of the short runs below."""


def digits(threshold: int | None) -> Config:
    return small_config(
        data={"dataset": "digits", "views": 4, "limit": EPOCH * 128},
        model={"network": "mlp", "hidden": [16], "representation": 8, "projection": 8},
        train={"epochs": 2, "batch_size": 128, "learning_rate": 0.1, "device": "cpu"},
        secure_sum={"scheme": "plain", "masks": "recoverable", "threshold": threshold},
        guard={"mechanism": "none"},
        rules={"minimum_spread": 0.0},
    )


@pytest.mark.parametrize(("at", "kind"), [(7, BEFORE_CONTRIBUTING), (EPOCH, BEFORE_SAVING)])
def test_a_run_goes_on_and_says_so(
    at: int, kind: Kind, deaths: dict[str, tuple[int, Kind]], tmp_path: Path
) -> None:
    deaths["passive-2"] = (at, kind)
    run(digits(2), tmp_path)
    left = {"left": {"passive-2": at}, "steps_without_all": 2 * EPOCH - at}
    assert json.loads((tmp_path / "result.json").read_text())["attendance"] == left
    contract = json.loads((tmp_path / "contract.json").read_text())["document"]
    assert contract["silent_passive"] == "recover"


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize("threshold", [3, 4])
def test_a_step_that_is_played_again_without_somebody_does_not_bare_its_contribution(
    threshold: int, deaths: dict[str, tuple[int, Kind]], tmp_path: Path
) -> None:
    """Two sums of one step with the same noise would differ by it, under its own noise alone."""
    sums = {
        "scheme": "plain",
        "masks": "recoverable",
        "clip": 0.5,
        "threshold": threshold,
        "noise": {"sigma": 0.5},
    }
    config = step_config("apfed_c", secure_sum=sums)
    data = vertical_data(4)
    names = [data.active.name, *(table.name for table in data.passives)]
    secrets = {name: fresh_secrets(config, name, log_folder=tmp_path) for name in names}
    sessions: list[Simulation] = []
    opened = []
    recorded = []
    for again in (False, True):
        if again and threshold == 3:
            deaths["passive-4"] = (0, BEFORE_CONTRIBUTING)
            for circles in tmp_path.glob("circles-*"):
                circles.unlink()  # or nobody would answer: the noise is what stands here
        alignment = sessions[0].alignment if again else None
        start = SimulationInputs(config=config, data=data, secrets=secrets, alignment=alignment)
        session = Simulation(METHODS[config.method.name], start)
        noise: Any = session.secure_sum["noise"]
        assert noise["honest"] == threshold  # a sum may lack the others'
        recorder = Recorder.into(passives_of(session)[-1], session)
        session.train_step(0, torch.arange(16))
        assert session.active_role.last_sum is not None
        sessions.append(session)
        opened.append(session.active_role.last_sum)
        recorded.append(recorder.integers[0])
    alone = torch.from_numpy(make_fixed_point(sessions[0]).dequantise_sum(recorded[0]))
    assert not torch.allclose(opened[0] - opened[1], alone, atol=1e-9)
    assert not torch.allclose(opened[0], opened[1], atol=1e-3)
    # All noised anew, also where nobody may be missing, and so they paid anew.
    paid = {
        account.get_privacy_spent().releases
        for account in sessions[1].contribution_ledgers.values()
    }
    assert paid == {2}


PAIRWISE = {"scheme": "plain", "masks": "pairwise"}
WAIT = {"silent_passive": "wait", "patience_s": 600.0, "restarts": 10}


@pytest.mark.parametrize(
    ("rules", "sums", "passives", "agreed", "threshold"),
    [
        ({}, RECOVERABLE, 4, "stop", 4),
        ({}, RECOVERABLE, 3, "stop", 3),
        ({}, RECOVERABLE | {"threshold": 2}, 3, "recover", 2),
        ({"silent_passive": "recover"}, RECOVERABLE, 4, "recover", 3),
        ({"silent_passive": "stop"}, RECOVERABLE, 4, "stop", 4),
        (WAIT, RECOVERABLE, 4, "wait", 4),
        (WAIT, PAIRWISE, 4, "wait", None),
        ({}, PAIRWISE, 4, "stop", None),
    ],
)
def test_the_contract_says_what_a_silence_does(
    rules: dict[str, Any], sums: dict[str, Any], passives: int, agreed: str, threshold: int | None
) -> None:
    contract = open_step_session(rules, sums, passives).contract
    assert contract.silent_passive == agreed
    assert contract.secure_sum.get("threshold") == threshold
    waits = rules.get("patience_s"), rules.get("restarts", 0)
    assert (contract.patience_s, contract.restarts) == waits


@pytest.mark.parametrize(
    ("rules", "sums", "passives", "message"),
    [
        ({}, pair_of("ckks") | {"threshold": 2}, 4, "with ckks; only recoverable masks"),
        ({}, RECOVERABLE | {"threshold": 5}, 4, r"5 of 4 passives .* with plain \+ recoverable"),
        ({}, RECOVERABLE | {"threshold": 2}, 4, "not above half of 4 passives.*say 3 or more"),
        ({}, {"scheme": "plain", "threshold": 3}, 4, "does not go with plain"),
        ({"silent_passive": "recover"}, PAIRWISE, 4, "needs all 4 passives.*threshold: 3"),
        ({"silent_passive": "recover"}, RECOVERABLE, 3, "needs all 3 passives.*threshold: 2"),
        ({"silent_passive": "recover"}, RECOVERABLE, 2, "with 3 passives or more"),
        ({"silent_passive": "stop"}, RECOVERABLE | {"threshold": 3}, 4, "stop no step goes on"),
        (WAIT, RECOVERABLE | {"threshold": 3}, 4, "wait no step goes on without a passive"),
        ({"restarts": 3}, PAIRWISE, 4, "nobody begins again by itself"),
    ],
)
def test_thresholds_and_policies_that_cannot_be_had_are_refused(
    rules: dict[str, Any], sums: dict[str, Any], passives: int, message: str
) -> None:
    key = r"secure_sum\.threshold: .*" if not rules else ""
    with pytest.raises(ConfigError, match=key + message):
        open_step_session(rules, sums, passives)


@pytest.mark.parametrize(
    "rules", [{"patience_s": None}, {"restarts": 0}, {"patience_s": 0.0}, {"restarts": -1}]
)
def test_waiting_has_a_length_and_a_new_session_to_come(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"patience_s|restarts"):
        step_config("apfed_c", rules={**WAIT, **rules})
