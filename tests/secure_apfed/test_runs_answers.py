"""What a passive answers at most holds for the whole run, however often it breaks off."""

import json
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, TensorSpec, unpack
from secure_apfed.methods.apfed import ApfedActive
from secure_apfed.methods.joint import TvflActive, TvflPassive
from secure_apfed.methods.sum_end import Admitted, PassiveSum
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
        for party, asks in ((ApfedActive, "forward"), (TvflActive, "learn")):
            patch.setattr(party, asks, self._asking(getattr(party, asks)))
        patch.setattr(TvflPassive, "represent", self._counting(TvflPassive.represent))
        patch.setattr(PassiveSum, "contribution", self._summed(PassiveSum.contribution))

    def _asking(self, honest: Callable[..., Any]) -> Callable[..., Any]:
        def ask(party: Any, *args: Any) -> Any:
            self._asked += 1
            generator = torch.Generator().manual_seed(self._asked)
            with torch.no_grad():
                for value in _networks(party).parameters():
                    value.add_(0.01 * torch.randn(value.shape, generator=generator))
            return honest(party, *args)

        return ask

    def _counting(self, honest: Callable[..., bytes]) -> Callable[..., bytes]:
        def answer(party: Any, envelope: Envelope) -> bytes:
            sent = honest(party, envelope)
            specs = {"rows": TensorSpec(torch.int64, (None,))}
            rows = unpack(envelope.payload, specs, sender="active")[0]["rows"]
            self._note(party.name, envelope.step, rows, sent)
            return sent

        return answer

    def _summed(self, honest: Callable[..., bytes]) -> Callable[..., bytes]:
        def answer(sum_end: PassiveSum, admitted: Admitted, values_BD: Any) -> bytes:
            sent = honest(sum_end, admitted, values_BD)
            self._note(sum_end.name, admitted.step, admitted.rows, values_BD.tobytes())
            return sent

        return answer

    def _note(self, name: str, step: int, rows: Tensor, sent: bytes) -> None:
        if (name, step, sent) not in self._different:
            self._different.add((name, step, sent))
            self.answers.update((name, row) for row in rows.tolist())


def _networks(party: ApfedActive | TvflActive) -> nn.Module:
    """What makes the active ask what it asks."""
    if isinstance(party, ApfedActive):
        return party.trainer.networks.encoder
    return party.trainer.encoder


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
