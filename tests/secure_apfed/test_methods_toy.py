"""A method added from outside by one line in the table: two stages, one exchange, then alone.

Stage one: every passive sends its guarded features once. Stage two: the active trains by itself.
It is no method that anybody should use; it shows that nothing else asks which method it is.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from pydantic import Field
from torch import Tensor

from apfed_attacks.run import mount
from apfed_experiments.report import write_report
from secure_apfed.config import AttackChoice, Config
from secure_apfed.contract import Contract, PassiveTerms, RepresentationTerms
from secure_apfed.exchange import Kind, Links, pack
from secure_apfed.methods import METHODS, Course, Helper, Learner, Method, Own, SingleView
from secure_apfed.methods.accounts import guard_for, ledger_for
from secure_apfed.methods.apfed import ApfedLearner
from secure_apfed.methods.method import Agreed, Save, keep_or_end
from secure_apfed.methods.terms import representation_terms
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.recording import load_recording
from secure_apfed.runs.run import run
from secure_apfed.settings.method import MethodSettings


class OneExchangeSettings(MethodSettings):
    """What a run may say of it, and what others may know of it.

    Attributes:
        columns: of a passive's features that it sends, the first ones.
    """

    name: Literal["one_exchange"]
    columns: int = Field(64, ge=1)

    title = "one exchange"
    predicts_alone = True
    representations_from = "passives"

    def sent(self, features_NF: Tensor) -> Tensor:
        return features_NF.flatten(1)[:, : self.columns]


class Speaker(Helper):
    """A passive: its features of the aligned people, once, then it waits."""

    def __init__(self, own: Own, contract: Contract, rows: Tensor) -> None:
        self.name, self._active = own.name, contract.active
        self._guard = guard_for(own)
        self._x_ND = OneExchangeSettings.of(own.config).sent(own.data.table.features[rows])
        self._ledger = ledger_for(own, self._guard, aligned=len(rows))
        self.ledgers = {own.name: self._ledger}

    async def help(self, links: Links, save: Save) -> None:
        await links.receive(self._active, Kind.REQUEST, step=0, patience=8)
        rows = torch.arange(len(self._x_ND))
        payload = pack({"rows": rows, "z": self._guard.release(self._x_ND, step=0, rows=rows)})
        self._ledger.charge(step=0, rows=rows, digest=payload[:32])
        links.send(self._active, Kind.REPRESENTATIONS, 0, payload)
        going = True
        while going:
            message = await links.receive(self._active, Kind.CHECKPOINT, Kind.END, patience=8)
            going = keep_or_end(message.kind, message.step, links, self._active, save)


class Listener(ApfedLearner):
    """The active: hears every passive once, then trains alone."""

    async def learn(self, links: Links, course: Course) -> None:
        for name in self.party.contract.passives:
            links.send(name, Kind.REQUEST, 0)
            await links.receive(name, Kind.REPRESENTATIONS, step=0)
        await super().learn(links, course)


class OneExchange(SingleView):
    settings = OneExchangeSettings

    def offer(self, own: Own) -> RepresentationTerms | None:
        if own.name == own.active:
            return None
        sent = OneExchangeSettings.of(own.config).sent(own.data.table.features[:1])
        return representation_terms(own.config, sent[0].shape, guard_for(own), projected=False)

    def agree(self, own: Own, offers: Mapping[str, RepresentationTerms], session: str) -> Agreed:
        terms = {
            name: PassiveTerms(objective=None, weight=1.0, representation=offers[name])
            for name in own.passives
        }
        return Agreed(passives=terms)

    def learner(self, own: Own, contract: Contract, rows: Tensor) -> Learner:
        alone = super().learner(own, contract, rows[:0])
        assert isinstance(alone, ApfedLearner)
        return Listener(
            alone.party, headline=self.headline, ledgers=alone.ledgers, training=alone.training,
            guarantee="every passive's features are released once", rounding=None,
            train_rows=alone.training_rows, test_rows=own.data.test_rows, classes=len(own.data.classes),
            config=own.config,
        )  # fmt: skip

    def passive(self, own: Own, contract: Contract, rows: Tensor) -> Helper:
        return Speaker(own, contract, rows)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(cast("dict[str, Method]", METHODS), "one_exchange", OneExchange())
    settings: dict[str, Any] = {
        "name": "toy",
        "party_seeds": "shared_for_comparison",
        "method": {"name": "one_exchange", "columns": 12},
        "data": {"dataset": "digits", "limit": 300},
        "model": {"network": "mlp", "hidden": [16], "representation": 8},
        "train": {"epochs": 3, "batch_size": 64, "learning_rate": 0.1, "device": "cpu"},
        "guard": {"mechanism": "none"},
    }
    return Config.model_validate(settings)


def test_it_runs_and_resumes(config: Config, tmp_path: Path) -> None:
    whole = run(config, tmp_path / "whole")

    def stop(progress: Any) -> None:
        if progress.epoch == 2 and progress.step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "broken", on_progress=stop)
    resumed = run(config, tmp_path / "broken", resume=True)
    assert resumed.accuracy == whole.accuracy
    assert whole.recording.model is not None
    assert resumed.recording.model is not None
    for mine, other in zip(
        whole.recording.model.parameters(), resumed.recording.model.parameters(), strict=True
    ):
        assert torch.equal(mine, other)
    sent = json.loads((tmp_path / "whole" / "transcript.json").read_text())
    assert {flow["sender"] for flow in sent if flow["kind"] == "representations"} == {
        "passive-1", "passive-2", "passive-3",
    }  # fmt: skip


def test_it_is_planned_reported_and_attacked_as_what_it_is(config: Config, tmp_path: Path) -> None:
    run(config, tmp_path / "run")
    planned = forecast(config)
    assert any(link.kind == "representations" for link in planned.links)
    page = write_report(tmp_path / "run").read_text()
    assert "one exchange" in page
    assert "TVFL" not in page
    results = mount(
        load_recording(tmp_path / "run"), [AttackChoice(name="inverse_network")], seed=0
    )
    assert any(result.applicable and result.role == "active" for result in results)
