"""What a passive answers at most holds for the whole run, however often it breaks off."""

import json
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, TensorSpec, unpack
from secure_apfed.parties import ActiveParty, PassiveParty, TvflActive, TvflPassive
from secure_apfed.parties.rules import representation_specs
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import interrupted, small_config
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

EPOCHS = 3


def bare(method: str, **changes: Any) -> Config:
    """Nothing hides whether an answer is the same again."""
    train = {"epochs": EPOCHS, "batch_size": 64, "learning_rate": 0.05, "device": "cpu"}
    single = {"scheme": "plain", "allow_single_passive": True}
    settings = {"train": train, "guard": {"mechanism": "none"}, "secure_sum": single}
    return small_config(method, **{**settings, **changes})


class Probe:
    """An active that asks otherwise in every step, and a count of different answers by row."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self._different: set[tuple[str, int, bytes]] = set()
        self._asked = 0
        for party, asks in ((ActiveParty, "represent"), (TvflActive, "learn")):
            patch.setattr(party, asks, self._asking(getattr(party, asks)))
        for passive, answers in ((PassiveParty, "contribute"), (TvflPassive, "represent")):
            patch.setattr(passive, answers, self._counting(getattr(passive, answers)))

    def _asking(self, honest: Callable[..., Any]) -> Callable[..., Any]:
        def ask(party: Any, *args: Any) -> Any:
            self._asked += 1
            generator = torch.Generator().manual_seed(self._asked)
            with torch.no_grad():
                for value in _networks(party).parameters():
                    value.add_(0.01 * torch.randn(value.shape, generator=generator))
            return honest(party, *args)

        return ask

    def _counting(self, honest: Callable[..., Any]) -> Callable[..., Any]:
        def answer(party: Any, envelope: Envelope) -> bytes:
            sent: bytes = honest(party, envelope)
            different = (party.name, envelope.step, sent)
            if different not in self._different:
                self._different.add(different)
                self.answers.update((party.name, row) for row in _rows(party, envelope))
            return sent

        return answer


def _networks(party: ActiveParty | TvflActive) -> nn.Module:
    """What makes the active ask what it asks."""
    return party.networks.encoder if isinstance(party, ActiveParty) else party.trainer.encoder


def _rows(party: Any, envelope: Envelope) -> list[int]:
    specs = {"rows": TensorSpec(torch.int64, (None,))}
    if isinstance(party, PassiveParty):
        specs = representation_specs(party.terms.representation)
    rows: list[int] = unpack(envelope.payload, specs, sender="active")[0]["rows"].tolist()
    return rows


@pytest.mark.parametrize(("method", "beyond"), [("apfed_c", 0), ("tvfl", 1)])
def test_breaking_off_and_resuming_gets_no_more_answers(
    method: str, beyond: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, probe = bare(method), Probe(monkeypatch)
    interrupted(config, tmp_path, at_step=4)
    agreed = EPOCHS + config.rules.spare_answers + beyond
    refusal = f"asked passive-[12] for a row more than {agreed} times, all sessions"
    with pytest.raises(RemoteProtocolError, match=refusal):
        break_off(config, tmp_path, times=12)
    assert max(probe.answers.values()) == agreed


def break_off(config: Config, folder: Path, *, times: int) -> None:
    for _ in range(times):
        interrupted(config, folder, at_step=4, resume=True)


def answers_in(folder: Path) -> dict[str, int]:
    """How many answers each passive has counted."""
    logs = folder.glob("parties/*/answers-*.jsonl")
    return {log.name: len(log.read_bytes().splitlines()) - 1 for log in logs}


@pytest.mark.parametrize(
    "protocol", ["plain + pairwise masks", "ckks", "bfv", "bfv + pairwise masks"]
)
def test_an_honest_run_that_breaks_off_often_gives_the_same_answers_again(
    protocol: str, tmp_path: Path
) -> None:
    rules = {"spare_answers": 0}
    config = bare("apfed_c", secure_sum=pair_of(protocol), rules=rules)
    interrupted(config, tmp_path, at_step=4)
    break_off(config, tmp_path, times=3)
    run(config, tmp_path, resume=True)
    answers, metrics = answers_in(tmp_path), (tmp_path / "metrics.jsonl").read_text()
    steps = json.loads(metrics.splitlines()[-1])["step"]
    assert answers == dict.fromkeys(answers, steps)
    assert len(answers) >= 2


@pytest.mark.parametrize("method", ["apfed_r", "tvfl"])
def test_a_log_of_answers_that_was_removed_is_missed(method: str, tmp_path: Path) -> None:
    config = bare(method, secure_sum={"scheme": "plain", "masks": "pairwise"})
    interrupted(config, tmp_path, at_step=9)
    log = tmp_path / "parties" / "passive-1" / "answers-passive-1.jsonl"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    log.unlink()
    with pytest.raises(CheckpointError, match=r"answers-passive-1.jsonl misses"):
        run(config, tmp_path, resume=True)
