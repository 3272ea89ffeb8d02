"""A passive falls silent in the middle of a step: training goes on or stops, as agreed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protocols.errors import PartyLeftError, RemoteProtocolError
from protocols.sums.fixed_point import FixedPoint
from protocols.sums.interface import FloatArray, IntArray, StepBinding, SumAgreement
from protocols.sums.recoverable import RecoverableContributor
from secure_apfed.config import Config
from secure_apfed.errors import ConfigError
from secure_apfed.exchange import Envelope, InMemoryTransport, Kind
from secure_apfed.methods import Start, stage
from secure_apfed.methods.apfed_opening import open_apfed
from secure_apfed.runs import RunResult, run
from tests.secure_apfed.test_methods_apfed import (
    CONTRASTIVE,
    Spy,
    config_of,
    opened,
    vertical_data,
)
from tests.with_crypten import pair_of

BEFORE_CONTRIBUTING, BEFORE_ANSWERING = Kind.CONTRIBUTION, Kind.SUM_ANSWER
ORDER = (BEFORE_CONTRIBUTING, BEFORE_ANSWERING)


class Killing(InMemoryTransport):
    """Carries nothing that a party sends in training from its death on."""

    deaths: dict[str, tuple[int, Kind]] = {}

    def send(self, envelope: Envelope) -> int:
        death = self.deaths.get(envelope.sender)
        if death and envelope.kind in ORDER:
            step, kind = death
            if (envelope.step, ORDER.index(envelope.kind)) >= (step, ORDER.index(kind)):
                return 0
        return super().send(envelope)


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, Kind]]:
    chosen: dict[str, tuple[int, Kind]] = {}
    monkeypatch.setattr(Killing, "deaths", chosen)
    monkeypatch.setattr(stage, "InMemoryTransport", Killing)
    return chosen


class Recorder:
    """A contributor that remembers the integers that it put in."""

    def __init__(self, inner: RecoverableContributor, agreement: SumAgreement) -> None:
        self._inner, self._fixed_point = inner, FixedPoint.of(agreement)
        self.integers: dict[int, Any] = {}

    def contribute(
        self, values_BD: FloatArray, binding: StepBinding, noise_BD: IntArray | None = None
    ) -> bytes:
        self.integers[binding.step] = self._fixed_point.quantise(values_BD, noise_BD)
        return self._inner.contribute(values_BD, binding, noise_BD)

    def answer(self, request: bytes) -> bytes:
        return self._inner.answer(request)


def recovering(passives: int, threshold: int | None) -> Any:
    sums = {"scheme": "plain", "masks": "recoverable", "clip": 0.5, "threshold": threshold}
    config = config_of(passives={"default": {"objective": CONTRASTIVE}}, secure_sum=sums)
    return opened(config, vertical_data(passives))


@pytest.mark.parametrize("kind", ORDER)
@pytest.mark.parametrize("gone", [("passive-2",), ("passive-1", "passive-4")])
def test_the_sums_of_the_others_stay_exact(
    deaths: dict[str, tuple[int, Kind]], kind: Kind, gone: tuple[str, ...]
) -> None:
    method = recovering(5, 3)
    assert method.contract.when_a_party_leaves == "recover"
    agreement = method.active.receiver._sum.agreement
    for passive in method.passives:
        passive.contributor = Recorder(passive.contributor, agreement)
    method.active.receiver = spy = Spy(method.active.receiver)
    deaths.update(dict.fromkeys(gone, (2, kind)))
    for step in range(4):
        assert np.isfinite(method.step(step, torch.arange(16)))
    for step, decoded in enumerate(spy.decoded):
        last = 1 if kind is BEFORE_CONTRIBUTING else 2
        counted = [
            passive.contributor.integers[step]
            for passive in method.passives
            if passive.name not in gone or step <= last
        ]
        expected = FixedPoint.of(agreement).dequantise(np.sum(counted, axis=0))
        assert np.array_equal(decoded, expected), step
    assert method.attendance() == {"left": dict.fromkeys(gone, 2), "steps_without_all": 2}


def test_one_after_the_other_until_too_few_are_left(deaths: dict[str, tuple[int, Kind]]) -> None:
    method = recovering(4, 3)
    deaths["passive-1"] = (1, BEFORE_ANSWERING)
    deaths["passive-3"] = (3, BEFORE_CONTRIBUTING)
    for step in range(3):
        method.step(step, torch.arange(16))
    before = [parameter.clone() for parameter in method.active.networks.encoder.parameters()]
    with pytest.raises(RemoteProtocolError, match=r"at least 3 of .*missing: passive-1, passive-3"):
        method.step(3, torch.arange(16))
    for was, now in zip(before, method.active.networks.encoder.parameters(), strict=True):
        assert torch.equal(was, now)
    sent = [flow for flow in method.transcript.flows if flow.kind is Kind.SUM_ANSWER]
    assert max(flow.last_step for flow in sent) == 2  # nobody answered in the step that stopped


def test_too_few_answers_stop_the_run(deaths: dict[str, tuple[int, Kind]]) -> None:
    method = recovering(4, 3)
    deaths["passive-1"] = deaths["passive-2"] = (1, BEFORE_ANSWERING)
    method.step(0, torch.arange(16))
    with pytest.raises(
        RemoteProtocolError, match=r"one answer of at least 3 of .*missing: passive"
    ):
        method.step(1, torch.arange(16))


def test_nothing_is_sent_to_who_left(deaths: dict[str, tuple[int, Kind]]) -> None:
    method = recovering(4, 3)
    deaths["passive-2"] = (1, BEFORE_CONTRIBUTING)
    for step in range(4):
        method.step(step, torch.arange(16))
    to_it = [flow for flow in method.transcript.flows if flow.receiver == "passive-2"]
    assert max(flow.last_step for flow in to_it) == 1


@pytest.mark.parametrize(
    ("protocol", "threshold"), [("plain + pairwise masks", None), ("plain + recoverable masks", 3)]
)
def test_a_contract_that_says_abort_stops_for_all(
    deaths: dict[str, tuple[int, Kind]], protocol: str, threshold: int | None
) -> None:
    sums = {**pair_of(protocol), "threshold": threshold}
    config = config_of(passives={"default": {"objective": CONTRASTIVE}}, secure_sum=sums)
    method = opened(config, vertical_data(3))
    assert method.contract.when_a_party_leaves == "abort"
    deaths["passive-2"] = (1, BEFORE_CONTRIBUTING)
    method.step(0, torch.arange(16))
    with pytest.raises(PartyLeftError, match=r"step 1 from passive-2; nothing came; the contract"):
        method.step(1, torch.arange(16))
    assert method.attendance() == {"left": {}, "steps_without_all": 0}


@pytest.mark.parametrize(
    ("protocol", "threshold", "message"),
    [
        ("ckks", 2, "does not go with ckks; only recoverable masks"),
        ("plain + recoverable masks", 5, r"5 of 4 passives does not go with plain \+ recoverable"),
        ("plain + recoverable masks", 2, "not above half of 4 passives.*say 3 or more"),
        ("plain", 3, "does not go with plain"),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(
    protocol: str, threshold: int, message: str
) -> None:
    sums = {**pair_of(protocol), "threshold": threshold}
    config = config_of(passives={"default": {"objective": CONTRASTIVE}}, secure_sum=sums)
    with pytest.raises(ConfigError, match=rf"secure_sum\.threshold: .*{message}"):
        opened(config, vertical_data(4))


def test_the_contract_names_the_threshold_that_holds() -> None:
    assert recovering(4, None).contract.secure_sum["threshold"] == 3
    assert recovering(4, None).contract.when_a_party_leaves == "recover"
    assert recovering(3, None).contract.when_a_party_leaves == "abort"
    assert recovering(3, 2).contract.when_a_party_leaves == "recover"
    passives = {"default": {"objective": CONTRASTIVE}}
    other = opened(
        config_of(passives=passives, secure_sum={"scheme": "plain", "masks": "pairwise"}),
        vertical_data(3),
    )
    assert "threshold" not in other.contract.secure_sum


def digits(threshold: int | None, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "name": "dropout",
        "method": "apfed_c",
        "data": {"dataset": "digits", "views": 4},
        "model": {"network": "mlp", "hidden": [16], "representation": 8, "projection": 8},
        "train": {"epochs": 12, "batch_size": 128, "learning_rate": 0.1, "device": "cpu"},
        "secure_sum": {"scheme": "plain", "masks": "recoverable", "threshold": threshold},
        "guard": {"mechanism": "none"},
        "rules": {"minimum_spread": 0.0},
    }
    return Config.model_validate({**settings, **changes})


def test_a_run_on_digits_goes_on_and_says_so(
    deaths: dict[str, tuple[int, Kind]], tmp_path: Path
) -> None:
    deaths["passive-2"] = (7, BEFORE_CONTRIBUTING)
    finished: RunResult = run(digits(2), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["attendance"]["left"] == {"passive-2": 7}
    steps = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert result["attendance"]["steps_without_all"] == steps - 7
    contract = json.loads((tmp_path / "run" / "contract.json").read_text())["document"]
    assert contract["when_a_party_leaves"] == "recover"
    assert finished.accuracy["apfed_c"] > 0.3  # ten classes


def test_a_run_on_digits_that_may_not_go_on_stops_and_resumes_with_all(
    deaths: dict[str, tuple[int, Kind]], tmp_path: Path
) -> None:
    deaths["passive-2"] = (7, BEFORE_ANSWERING)
    with pytest.raises(PartyLeftError, match="from passive-2; nothing came; the contract says"):
        run(digits(None), tmp_path / "run")
    deaths.clear()
    run(digits(None), tmp_path / "run", resume=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["attendance"] == {"left": {}, "steps_without_all": 0}


@pytest.mark.filterwarnings("ignore::protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize("threshold", [3, 4])
def test_a_step_that_is_played_again_without_somebody_does_not_bare_its_contribution(
    threshold: int, deaths: dict[str, tuple[int, Kind]], tmp_path: Path
) -> None:
    """Two sums of one step with the same noise would differ by it, under its own noise alone."""
    sums = {
        "scheme": "plain", "masks": "recoverable", "clip": 0.5, "threshold": threshold,
        "noise": {"sigma": 0.5},
    }  # fmt: skip
    config = config_of(passives={"default": {"objective": CONTRASTIVE}}, secure_sum=sums)
    data = vertical_data(4)
    names = [data.active.name, *(table.name for table in data.passives)]
    keys = {name: bytes([index]) * 32 for index, name in enumerate(names)}
    method: Any = None
    alignment: Any = None
    agreement: Any = None
    opened_sums: list[torch.Tensor] = []
    recorded: dict[int, Any] = {}
    for session in range(2):
        if session and threshold == 3:
            deaths["passive-4"] = (0, BEFORE_CONTRIBUTING)
        start = Start(config=config, data=data, noise_keys=keys, logs=tmp_path, alignment=alignment)
        method = open_apfed(start)
        alignment = method.alignment
        assert method.secure_sum["noise"]["honest"] == threshold  # a sum may lack the others'
        agreement = method.active.receiver._sum.agreement
        last = method.passives[-1]
        last.contributor = recorder = Recorder(last.contributor, agreement)
        method.step(0, torch.arange(16))
        opened_sums.append(method.active.opened)
        recorded = recorded or recorder.integers
    paid = {name: ledger.spent().releases for name, ledger in method.contributions.items()}
    first, second = opened_sums
    alone = torch.from_numpy(FixedPoint.of(agreement).dequantise(recorded[0]))
    assert not torch.allclose(first - second, alone, atol=1e-9)
    assert not torch.allclose(first, second, atol=1e-3)
    # All noised anew, also where nobody may be missing, and so they paid anew.
    assert set(paid.values()) == {2}
