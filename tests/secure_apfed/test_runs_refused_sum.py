"""What breaking off and resuming may not get: more answers, or sums after a refused one."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.homomorphic import KeyHolder
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, unpack
from secure_apfed.methods.apfed import ApfedActive
from secure_apfed.methods.joint import TvflActive, TvflPassive
from secure_apfed.methods.sum_end import Admitted, PassiveSum, RefusedSums
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import actives_own
from tests.secure_apfed.small_runs import interrupted, small_config
from tests.with_crypten import pair_of

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


@pytest.fixture
def key_holders(monkeypatch: pytest.MonkeyPatch) -> list[KeyHolder]:
    made: list[KeyHolder] = []
    genuine = KeyHolder.__init__

    def remembered(self: KeyHolder, *args: Any) -> None:
        genuine(self, *args)
        made.append(self)

    monkeypatch.setattr(KeyHolder, "__init__", remembered)
    return made


def refused_at(step: int, config: Config, folder: Path, *, resume: bool = False) -> None:
    genuine = Links.send

    def altering(links: Links, receiver: str, kind: Kind, at: int, payload: bytes = b"") -> None:
        if kind is Kind.SUM and at >= step:
            present, combined = msgpack.unpackb(payload)
            payload = msgpack.packb([present, combined[:-8] + bytes(8)])
        genuine(links, receiver, kind, at, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "send", altering)
        with pytest.raises(RemoteProtocolError, match=f"sum of step {step} from aggregator"):
            run(config, folder, resume=resume)


def allowing(refused: int, **changes: Any) -> Config:
    settings = {"secure_sum": {"scheme": "bfv"}, **changes}
    return small_config(rules={"refused_sums": refused}, **settings)


def test_a_refused_sum_needs_another_key(key_holders: list[KeyHolder], tmp_path: Path) -> None:
    refused_at(9, allowing(0), tmp_path / "run")
    (first,) = key_holders
    with pytest.raises(LocalProtocolError, match="refused the sum of step 9"):
        first.decode(b"", (1, 1), Any)  # type: ignore[arg-type]  # nothing is looked at any more
    run(allowing(1), tmp_path / "run", resume=True)
    _, second = key_holders
    keys = {vars(holder)["_public_key"] for holder in key_holders}
    assert len(keys) == 2
    assert vars(second).get("_context") is not None
    assert vars(first).get("_context") is None


def test_a_run_goes_on_after_refused_sums_only_as_often_as_its_user_allows(tmp_path: Path) -> None:
    """Each session may tell bits of the same numbers; the refusals count over all of them."""
    folder = tmp_path / "run"
    refused_at(9, allowing(0), folder)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"refused 1 sum of this run.*refused_sums is 0"):
            run(allowing(0), folder, resume=True)
    refused_at(12, allowing(1), folder, resume=True)
    with pytest.raises(CheckpointError, match=r"refused 2 sums of this run.*refused_sums is 1"):
        run(allowing(1), folder, resume=True)
    noted = folder / "parties" / "active" / "refused-active.jsonl"
    assert noted.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in noted.read_text().splitlines() if line]
    assert [line["step"] for line in lines] == [9, 12]
    assert len({line["contract"] for line in lines}) == 2
    run(allowing(2), folder, resume=True)
    assert "refused-active.jsonl" in (folder / "SHA256SUMS").read_text()


def test_a_note_that_nobody_can_read_counts_as_a_refused_sum(tmp_path: Path) -> None:
    """Torn by a kill, or damaged: it was written since a sum was refused."""
    config = small_config()
    interrupted(config, tmp_path / "run", at_step=3)
    assert not list((tmp_path / "run").rglob("refused-active.jsonl"))
    note = tmp_path / "run" / "parties" / "active" / "refused-active.jsonl"
    for content in (b"{", b"\xff\xfe", b"\n\n[]", b"x" * 100):
        note.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"refused 1 sum "):
            run(config, tmp_path / "run", resume=True)
    note.unlink()
    run(config, tmp_path / "run", resume=True)


def test_a_refusal_is_noted_before_it_is_told_or_that_is_the_error(tmp_path: Path) -> None:
    name, other, logs = "refused-active.jsonl", tmp_path / "elsewhere", tmp_path / "linked"
    other.touch()
    logs.mkdir()
    linked, lost = RefusedSums(actives_own(logs)), RefusedSums(actives_own(tmp_path / "gone"))
    (logs / name).symlink_to(other)
    unnoted = "cannot note that active refused the sum of step 3"
    for refused, said in ((lost, unnoted), (linked, "is a symbolic link")):
        with pytest.raises(CheckpointError, match=said), refused.noting(step=3, contract="c"):
            raise RemoteProtocolError("altered")
    assert other.read_bytes() == b""
    for error in (LocalProtocolError("our misuse"), KeyboardInterrupt()):  # nobody else's doing
        refused = RefusedSums(actives_own(tmp_path))
        with pytest.raises(type(error)), refused.noting(step=3, contract="c"):
            raise error
    assert not (tmp_path / name).exists()


EPOCHS = 3


def bare(method: str, **changes: Any) -> Config:
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
            encoder = getattr(party.trainer, "networks", party.trainer).encoder
            with torch.no_grad():
                for value in encoder.parameters():
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


@pytest.mark.parametrize("protocol", ["ckks", "bfv + pairwise masks"])
def test_an_honest_run_that_breaks_off_often_answers_alike(protocol: str, tmp_path: Path) -> None:
    rules = {"spare_answers": 0}
    config = bare("apfed_c", secure_sum=pair_of(protocol), rules=rules)
    interrupted(config, tmp_path, at_step=4)
    break_off(config, tmp_path, times=3)
    run(config, tmp_path, resume=True)
    steps = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    logs = list(tmp_path.glob("parties/*/answers-*.jsonl"))
    assert [len(log.read_bytes().splitlines()) - 1 for log in logs] == [steps] * len(logs)
    assert len(logs) >= 2
