"""Runs resumed after a kill: the same result, no more answers, no sum after a refused one."""

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.homomorphic import KeyHolder
from secure_apfed.base.files import to_json
from secure_apfed.config import Config
from secure_apfed.config.file import dump_settings, load_config
from secure_apfed.errors import CheckpointError, ConfigError, NoHelpWarning
from secure_apfed.exchange import Envelope, Kind, Links, TensorSpec, unpack_tensors
from secure_apfed.methods import METHODS, PartyCheckpoint
from secure_apfed.methods.apfed import ApfedActive
from secure_apfed.methods.joint import TvflActive, TvflPassive
from secure_apfed.methods.session_sum import AdmittedRequest, PassiveSum, RefusedSums
from secure_apfed.runs.checkpoint_store import PartyCheckpointStore
from secure_apfed.runs.folder import PartyFolder
from secure_apfed.runs.outcome import RunResult, load_recording
from secure_apfed.runs.run import run
from secure_apfed.runs.training_loop import RunWriter
from tests.contracts.sum_parties import SealKeys, find_secrets, secrets_alive
from tests.secure_apfed.seats import actives_own
from tests.secure_apfed.small_runs import interrupt_run, small_config
from tests.waiting import wait_until
from tests.with_crypten import pair_of, usable_secure_sums

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")


def assert_same_run(one: Path, other: Path) -> None:
    models = [path / "model.safetensors" for path in (one, other)]
    assert models[0].exists() is models[1].exists()
    for name, value in load_file(models[0]).items() if models[0].exists() else ():
        assert torch.equal(value, load_file(models[1])[name]), name
    results = [json.loads((path / "result.json").read_bytes()) for path in (one, other)]
    for result in results:
        for counted in ("seconds", "wire_bytes", "sessions", "steps"):
            del result[counted]  # of all sessions: a resumed run sets its sum up once more
    assert results[0] == results[1]
    histories = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (one, other)
    ]
    for mine, theirs in zip(*histories, strict=True):
        for key in ("epoch", "step", "loss", "accuracy", "epsilon"):
            assert mine[key] == theirs[key], key


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunResult]:
    folder = tmp_path_factory.mktemp("run") / "whole"
    return folder, run(small_config(), folder)


STAGES = {"labels": {"mechanism": "lp_mst", "epsilon": 1.0}}
ALIGNED_ONLY = {
    "epochs": 4,
    "batch_size": 64,
    "learning_rate": 0.05,
    "device": "cpu",
    "use_unaligned": False,
}


FEW_LABELS = {
    "data": {"dataset": "breast_cancer", "labelled": 30},
    "train": {
        "epochs": 2,
        "batch_size": 64,
        "learning_rate": 0.05,
        "device": "cpu",
        "spread_labels": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "changes", "stops"),
    [
        ("apfed_c", {}, [6, 18]),
        ("apfed_c", {"labels": {"mechanism": "randomised_response", "epsilon": 1.0}}, [8]),
        # The second stage is answered between steps 8 and 9, and saved before step 9.
        ("apfed_c", STAGES, [8, 9]),
        ("apfed_c", {**STAGES, "train": ALIGNED_ONLY}, [8]),
        ("apfed_c", FEW_LABELS, [8]),
    ],
)
def test_a_stopped_run_resumes_bit_for_bit(
    method: str, changes: dict[str, Any], stops: list[int], tmp_path: Path
) -> None:
    config = small_config(method, **changes)
    whole = tmp_path / "whole"
    run(config, whole)
    sessions = json.loads((whole / "contract.json").read_bytes())["sessions"]
    assert len(sessions) == 1  # a stage of labels begins within the session
    for at_step in stops:
        folder = tmp_path / f"stopped at {at_step}"
        interrupt_run(config, folder, at_step=at_step)
        run(config, folder, resume=True)
        assert_same_run(whole, folder)


@pytest.mark.slow
def test_a_run_that_broke_off_at_its_end_keeps_its_last_epoch(
    finished: tuple[Path, RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*result: object, **more: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "write_results", stop)
        with pytest.raises(KeyboardInterrupt):
            run(small_config(), folder)
    run(small_config(), folder, resume=True)
    whole, resumed = (load_recording(of).transcript for of in (finished[0], folder))
    assert list(resumed.sums_by_step) == list(whole.sums_by_step)
    shapes = [
        {
            epoch: {(sent.kind, sent.step, len(sent.payload)) for sent in sent_in}
            for epoch, sent_in in of.envelopes_by_epoch.items()
        }
        for of in (whole, resumed)
    ]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_rare_checkpoints_find_the_same(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    rare = small_config(checkpoint_every=2)
    folder = tmp_path / "run"
    interrupt_run(rare, folder, at_step=18)
    steps = sorted(int(path.stem.split("-")[1]) for path in folder.rglob("checkpoint-*.bin"))
    assert set(steps) == {0, steps[-1]}
    run(rare, folder, resume=True)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in metrics] == [1, 2, 3, 4]
    assert steps[-1] == metrics[1]["step"]
    result = json.loads((folder / "result.json").read_bytes())
    assert result["accuracy"] == finished[1].accuracy


PRIVATE: dict[str, Any] = {"dp_sgd": {"clip": 0.5, "epsilon": 12.0}}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", ["apfed_c", "single_view"])
def test_private_training_resumes_and_refunds_nothing(method: str, tmp_path: Path) -> None:
    config = small_config(method, **PRIVATE)
    run(config, tmp_path / "whole")
    interrupt_run(config, tmp_path / "run", at_step=15)
    ledger = tmp_path / "run" / "parties" / "active" / "ledger-active+updates.jsonl"
    charged = len(ledger.read_text().splitlines())
    assert charged == 1 + 15  # beyond the checkpoint, which lies at step 12
    run(config, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    spent = json.loads((tmp_path / "run" / "result.json").read_bytes())["privacy"]
    assert 11.99 < spent["epsilon_model"] <= 12.0
    # Where nothing is sent, the updates are all that either figure counts.
    label = spent["epsilon_y"]
    assert label == spent["epsilon_model"] if method == "single_view" else label < 12.0 - 0.1


@pytest.mark.slow
def test_secret_noise_is_the_same_after_a_resume(tmp_path: Path) -> None:
    """Steps after the last checkpoint were sent already: sending other noise would cost more."""
    config = small_config(guard={"mechanism": "gaussian", "epsilon": 8.0})
    interrupt_run(config, tmp_path / "run", at_step=9)
    shutil.copytree(tmp_path / "run", tmp_path / "twin")
    for name in ("run", "twin"):
        run(config, tmp_path / name, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "twin")
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert result["privacy"]["releases"] == config.train.epochs


@pytest.mark.slow
def test_a_killed_process_resumes_alike(finished: tuple[Path, RunResult], tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    folder = tmp_path / "run"
    config.write_text(dump_settings(small_config()))
    script = f"""
        import time, warnings
        from pathlib import Path
        from secure_apfed.config.file import load_config
        from secure_apfed import run
        warnings.simplefilter("ignore")
        run(load_config({str(config)!r}), Path({str(folder)!r}),
            on_progress=lambda progress: time.sleep(0 if progress.epoch < 2 else 600))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=Path.cwd())
    metrics = folder / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.read_bytes(), "an epoch")
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    run(load_config(folder / "config.yaml"), folder, resume=True)
    assert_same_run(finished[0], folder)


def test_the_folder_tells_the_whole_run(finished: tuple[Path, RunResult]) -> None:
    folder, result = finished
    assert load_config(folder / "config.yaml") == small_config()
    contract = json.loads((folder / "contract.json").read_bytes())
    assert contract["sha256"] == contract["sessions"][-1]
    assert contract["document"]["secure_sum"]["masks"] == "pairwise"
    card = json.loads((folder / "model.json").read_bytes())
    assert card["contract"] == contract["sha256"]
    assert card["accuracy"] == result.accuracy
    recording = load_recording(folder)
    sent = [flow for flow in result.recording.transcript.flows if flow.kind is not Kind.END]
    assert list(recording.transcript.flows) == sent  # the end follows the result
    assert set(recording.transcript.envelopes_by_epoch) == {0, 3}
    assert json.loads(to_json([float("inf"), float("nan"), 1.5])) == ["inf", "nan", 1.5]


@pytest.mark.slow
def test_secrets_are_their_owners_and_go_with_the_run(tmp_path: Path) -> None:
    config = small_config(guard={"mechanism": "gaussian", "epsilon": 8.0})
    interrupt_run(config, tmp_path / "run", at_step=9)
    for name in ("active", "passive-1", "passive-2"):
        party = tmp_path / "run" / "parties" / name
        assert (party / "checkpoint-5.bin").stat().st_mode & 0o077 == 0
        assert (party / "identity.pem").stat().st_mode & 0o077 == 0
    assert (tmp_path / "run" / "recording-5.bin").stat().st_mode & 0o077 == 0
    run(config, tmp_path / "run", resume=True)
    assert not list((tmp_path / "run").rglob("checkpoint-*"))
    assert not list((tmp_path / "run").rglob("recording-*"))
    for name in ("transcript.msgpack", "transcript-0.bin", "alignment.safetensors"):
        assert (tmp_path / "run" / name).stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_damage_is_told_before_training_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupt_run(small_config(), folder, at_step=9)
    with pytest.raises(CheckpointError, match="no finished run"):
        load_recording(folder)
    with pytest.raises(CheckpointError, match="another configuration"):
        run(small_config(seed=1), folder, resume=True)
    passive, active = (
        folder / "parties" / name / "checkpoint-5.bin" for name in ("passive-1", "active")
    )
    metrics = folder / "metrics.jsonl"
    nonsense = b"\x93\x01\x02\x03"
    cut = r"^restore .*checkpoint-5\.bin from a copy.* truncated or altered"
    lacks = r"^restore .*metrics\.jsonl .* each of 1 epochs"
    whole = {path: path.read_bytes() for path in (passive, active, metrics)}
    for path, content, says in (
        *((passive, whole[passive][:size], cut) for size in (0, 10, -1)),
        (passive, bytes([whole[passive][0] ^ 1]) + whole[passive][1:], cut),
        (passive, whole[passive][:-1] + bytes([whole[passive][-1] ^ 1]), cut),
        (active, nonsense + hashlib.sha256(nonsense).digest(), "not a checkpoint"),
        *((metrics, content, lacks) for content in (b"", b'{"epoch": 1\n', b"\xff\n")),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=says):
            run(small_config(), folder, resume=True, on_progress=lambda now: pytest.fail(f"{now}"))
        path.write_bytes(whole[path])
    run(small_config(), folder, resume=True)


@pytest.mark.slow
def test_a_start_that_failed_before_anything_was_sent_is_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("name: half written")
    folder.chmod(0o700)
    (folder / "parties").mkdir()
    (folder / "parties" / "active").mkdir(mode=0o700)
    (folder / "parties" / "active" / "ledger-active.jsonl").write_text("{}")
    assert run(small_config(), folder).accuracy
    assert (folder / "result.json").exists()


@pytest.mark.slow
def test_one_process_at_a_time_runs_in_a_folder(tmp_path: Path) -> None:
    def once_more(progress: Any) -> None:
        with pytest.raises(CheckpointError, match="another process is running"):
            run(small_config(), tmp_path / "run", resume=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small_config(), tmp_path / "run", on_progress=once_more)
    assert run(small_config(), tmp_path / "run", resume=True).accuracy


@pytest.mark.slow
def test_training_alone_does_not_pass_for_training_with_others() -> None:
    with pytest.warns(NoHelpWarning, match="the active trains alone"):
        run(small_config(rules={"minimum_batch": 1000}), None)


def test_settings_for_nobody_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"passives\.passive-9: no passive has that name"):
        run(small_config(passives={"passive-9": {"weight": 2.0}}), None)


def test_nothing_begins_anew_over_what_was_released(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    interrupt_run(small_config(), folder, at_step=9)
    for checkpoint in (folder / "parties" / "active").glob("checkpoint-*"):
        checkpoint.unlink()
    kept = {path: path.read_bytes() for path in (folder / "parties").rglob("*-*.*")}
    with pytest.raises(CheckpointError, match=r"jsonl counts what left its party .* is gone"):
        run(small_config(), folder)
    assert {path: path.read_bytes() for path in (folder / "parties").rglob("*-*.*")} == kept
    for checkpoint in (folder / "parties").rglob("checkpoint-*"):
        checkpoint.unlink()
    left = r"answers-passive-1\.jsonl counts what left its party"
    passive = PartyFolder(folder / "parties" / "passive-1")
    with pytest.raises(CheckpointError, match=left), passive.lock_for_run(resume=False):
        pass


@pytest.mark.slow
def test_the_accuracy_told_with_an_epoch_is_its_own(tmp_path: Path) -> None:
    told = {}
    found = run(
        small_config(),
        tmp_path / "run",
        on_progress=lambda one: told.update({one.epoch: one.accuracy}),
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    kept = {one["epoch"]: one["accuracy"][found.method] for one in map(json.loads, lines)}
    assert told == kept
    assert len(kept) > 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(every=21)
def test_whatever_step_the_active_saves_all_others_saved_before(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[str, int]] = []

    def save(store: PartyCheckpointStore, state: PartyCheckpoint) -> None:
        kept(store, state)
        saved.append((store._name, state.step))

    kept = PartyCheckpointStore.save
    monkeypatch.setattr(PartyCheckpointStore, "save", save)
    run(
        small_config(method, train={"epochs": 2, "batch_size": 128, "device": "cpu"}),
        tmp_path / "run",
    )
    others = {path.name for path in (tmp_path / "run/parties").iterdir()} - {"active", "dealer"}
    assert bool(others) is METHODS[method].settings.has_passives
    of_active = [place for place, (name, _) in enumerate(saved) if name == "active"]
    assert len({saved[place][1] for place in of_active}) >= 2
    before = 0
    for place in of_active:
        step = saved[place][1]
        assert {(name, step) for name in others} <= {*saved[before:place]}, (method, step)
        before = place + 1


@pytest.mark.parametrize("protocol", usable_secure_sums())
@pytest.mark.sampled(every=6)
def test_no_secret_of_a_session_is_written(
    protocol: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = SealKeys(monkeypatch)
    config = small_config(
        party_seeds="secret",
        train={"epochs": 1, "batch_size": 128, "device": "cpu"},
        secure_sum=pair_of(protocol),
        guard={"mechanism": "gaussian", "epsilon": 8.0},
    )
    folder, secrets, written = tmp_path / "run", set[bytes](), set[bytes]()

    def spy(_: object) -> None:
        secrets.update(secrets_alive())
        written.update(file.read_bytes() for file in folder.rglob("checkpoint-*.bin"))

    with caplog.at_level(logging.NOTSET):
        run(config, folder, on_progress=spy)
    secrets |= keys.numbers()
    files = {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert {"transcript.msgpack", "result.json", "contract.json"} <= set(files)
    assert len(secrets) >= 3
    said = "".join([caplog.text, *capfd.readouterr()]).encode()
    shown = {name: find_secrets(secrets, content) for name, content in files.items()}
    assert {name: found for name, found in shown.items() if found} == {}
    assert not [found for found in (find_secrets(secrets, told) for told in written) if found]
    assert find_secrets(secrets, said) == []
    assert find_secrets(secrets, files["contract.json"] + next(iter(secrets)).hex().encode())


@pytest.fixture
def key_holders(monkeypatch: pytest.MonkeyPatch) -> list[KeyHolder]:
    made: list[KeyHolder] = []
    genuine = KeyHolder.__init__

    def remember_holder(self: KeyHolder, *args: Any) -> None:
        genuine(self, *args)
        made.append(self)

    monkeypatch.setattr(KeyHolder, "__init__", remember_holder)
    return made


def require_refusal(step: int, config: Config, folder: Path, *, resume: bool = False) -> None:
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


@pytest.mark.slow
def test_a_refused_sum_needs_another_key(key_holders: list[KeyHolder], tmp_path: Path) -> None:
    require_refusal(9, allowing(0), tmp_path / "run")
    (first,) = key_holders
    with pytest.raises(LocalProtocolError, match="refused the sum of step 9"):
        first.decode(b"", (1, 1), Any)  # type: ignore[call-overload]  # nothing is looked at any more
    run(allowing(1), tmp_path / "run", resume=True)
    _, second = key_holders
    keys = {vars(holder)["_public_key"] for holder in key_holders}
    assert len(keys) == 2
    assert vars(second).get("_key_context") is not None
    assert vars(first).get("_key_context") is None


@pytest.mark.slow
def test_a_run_goes_on_after_refused_sums_only_as_often_as_its_user_allows(tmp_path: Path) -> None:
    """Each session may tell bits of the same numbers; the refusals count over all of them."""
    folder = tmp_path / "run"
    require_refusal(9, allowing(0), folder)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"refused 1 sum of this run.*refused_sums is 0"):
            run(allowing(0), folder, resume=True)
    require_refusal(12, allowing(1), folder, resume=True)
    with pytest.raises(CheckpointError, match=r"refused 2 sums of this run.*refused_sums is 1"):
        run(allowing(1), folder, resume=True)
    noted = folder / "parties" / "active" / "refused-active.jsonl"
    assert noted.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in noted.read_text().splitlines() if line]
    assert [line["step"] for line in lines] == [9, 12]
    assert len({line["contract"] for line in lines}) == 2
    run(allowing(2), folder, resume=True)
    assert "refused-active.jsonl" in (folder / "SHA256SUMS").read_text()


@pytest.mark.slow
def test_a_note_that_nobody_can_read_counts_as_a_refused_sum(tmp_path: Path) -> None:
    """Torn by a kill, or damaged: it was written since a sum was refused."""
    config = small_config()
    interrupt_run(config, tmp_path / "run", at_step=3)
    assert not list((tmp_path / "run").rglob("refused-active.jsonl"))
    note = tmp_path / "run" / "parties" / "active" / "refused-active.jsonl"
    for content in (b"{", b"\xff\xfe", b"\n\n[]", b"x" * 100):
        note.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"refused 1 sum "):
            run(config, tmp_path / "run", resume=True)
    note.unlink()
    run(config, tmp_path / "run", resume=True)


def test_a_refusal_is_noted_before_it_is_told_or_that_is_the_error(tmp_path: Path) -> None:
    name = "refused-active.jsonl"
    other = tmp_path / "elsewhere"
    logs = tmp_path / "linked"
    other.touch()
    logs.mkdir()
    linked = RefusedSums(actives_own(logs))
    lost = RefusedSums(actives_own(tmp_path / "gone"))
    (logs / name).symlink_to(other)
    unnoted = "cannot note that active refused the sum of step 3"
    for refused, said in ((lost, unnoted), (linked, "is a symbolic link")):
        with pytest.raises(CheckpointError, match=said), refused.note_refusal(step=3, contract="c"):
            raise RemoteProtocolError("altered")


@pytest.mark.parametrize(
    "error",
    [LocalProtocolError("our misuse"), KeyboardInterrupt()],
    ids=["our misuse", "interrupted"],
)
def test_an_error_that_is_no_refusal_is_not_noted(error: BaseException, tmp_path: Path) -> None:
    refused = RefusedSums(actives_own(tmp_path))
    with pytest.raises(type(error)), refused.note_refusal(step=3, contract="c"):
        raise error
    for error in (LocalProtocolError("our misuse"), KeyboardInterrupt()):  # nobody else's doing
        refused = RefusedSums(actives_own(tmp_path))
        with pytest.raises(type(error)), refused.note_refusal(step=3, contract="c"):
            raise error


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
        for party, asks in ((ApfedActive, "forward"), (TvflActive, "train_on_parts")):
            patch.setattr(party, asks, self._asking(getattr(party, asks)))
        patch.setattr(TvflPassive, "represent", self._counting(TvflPassive.represent))
        patch.setattr(PassiveSum, "protect_answer", self.wrap_answer(PassiveSum.protect_answer))

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
            rows = unpack_tensors(envelope.payload, specs, sender="active")[0]["rows"]
            self._note(party.name, envelope.step, rows, sent)
            return sent

        return answer

    def wrap_answer(self, honest: Callable[..., bytes]) -> Callable[..., bytes]:
        def answer(passive_sum: PassiveSum, admitted: AdmittedRequest, values_BD: Any) -> bytes:
            sent = honest(passive_sum, admitted, values_BD)
            self._note(passive_sum.name, admitted.step, admitted.rows, values_BD.tobytes())
            return sent

        return answer

    def _note(self, name: str, step: int, rows: Tensor, sent: bytes) -> None:
        if (name, step, sent) not in self._different:
            self._different.add((name, step, sent))
            self.answers.update((name, row) for row in rows.tolist())


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("method", "extra_answers"), [("apfed_c", 0), ("tvfl", 1)])
def test_breaking_off_and_resuming_gets_no_more_answers(
    method: str, extra_answers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bare(method)
    probe = Probe(monkeypatch)
    interrupt_run(config, tmp_path, at_step=4)
    agreed = EPOCHS + config.rules.spare_answers + extra_answers
    refusal = f"asked passive-[12] for a row more than {agreed} times, all sessions"
    with pytest.raises(RemoteProtocolError, match=refusal):
        break_off(config, tmp_path, times=12)
    assert max(probe.answers.values()) == agreed


def break_off(config: Config, folder: Path, *, times: int) -> None:
    for _ in range(times):
        interrupt_run(config, folder, at_step=4, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["ckks", "bfv + pairwise masks"])
def test_an_honest_run_that_breaks_off_often_answers_alike(protocol: str, tmp_path: Path) -> None:
    rules = {"spare_answers": 0}
    config = bare("apfed_c", secure_sum=pair_of(protocol), rules=rules)
    interrupt_run(config, tmp_path, at_step=4)
    break_off(config, tmp_path, times=3)
    run(config, tmp_path, resume=True)
    steps = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    logs = list(tmp_path.glob("parties/*/answers-*.jsonl"))
    assert [len(log.read_bytes().splitlines()) - 1 for log in logs] == [steps] * len(logs)
    assert len(logs) >= 2


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("keep", "attacks", "refused"),
    [
        ("all", (), True),
        ("auto", ("model_completion",), True),
        ("auto", (), False),
        ("none", ("model_completion",), False),
    ],
)
def test_what_a_transcript_cannot_hold_is_refused_before_the_first_step(
    keep: str, attacks: tuple[str, ...], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(free=10_000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: full)
    config = small_config(transcript={"keep": keep}, attacks=[{"name": name} for name in attacks])
    steps: list[int] = []
    play = partial(run, config, None, on_progress=lambda progress: steps.append(progress.step))
    if not refused:
        play()
        assert steps
        return
    with pytest.raises(ConfigError, match=r"transcript.keep .* MB of payloads .* make room"):
        play()
    assert not steps
