"""A run whose aggregator alters a sum: it ends, its key with it; a resumed run has another key.

It is resumed only where its user says by name that it may.
"""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums.homomorphic import KeyHolder
from secure_apfed.config import Config
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange import Kind, Links
from secure_apfed.methods.sum_end import RefusedSums
from secure_apfed.runs.run import run
from tests.secure_apfed.seats import own_of
from tests.secure_apfed.small_runs import interrupted, small_config


@pytest.fixture
def key_holders(monkeypatch: pytest.MonkeyPatch) -> list[KeyHolder]:
    """The receivers of all sessions."""
    made: list[KeyHolder] = []
    genuine = KeyHolder.__init__

    def remembered(self: KeyHolder, *args: Any) -> None:
        genuine(self, *args)
        made.append(self)

    monkeypatch.setattr(KeyHolder, "__init__", remembered)
    return made


def refused_at(step: int, config: Config, folder: Path, *, resume: bool = False) -> None:
    """Play the run with an aggregator that alters the sums from `step` on."""
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


def test_a_refused_sum_ends_the_run_and_resuming_makes_another_key(
    key_holders: list[KeyHolder], tmp_path: Path
) -> None:
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


def test_a_refusal_that_cannot_be_noted_says_so(tmp_path: Path) -> None:
    """The note is on the disk before the refusal is told; where it cannot be, that is the error."""
    log = tmp_path / "gone" / "refused-active.jsonl"
    refused = RefusedSums(own_of(log.parent))
    with (
        pytest.raises(CheckpointError, match=r"cannot note that active refused the sum of step 3"),
        refused.noting(step=3, contract="c"),
    ):
        raise RemoteProtocolError("altered")


@pytest.mark.parametrize("error", [LocalProtocolError("our misuse"), KeyboardInterrupt()])
def test_what_the_aggregator_did_not_cause_is_not_noted(
    error: BaseException, tmp_path: Path
) -> None:
    refused = RefusedSums(own_of(tmp_path))
    with pytest.raises(type(error)), refused.noting(step=3, contract="c"):
        raise error
    assert not list(tmp_path.iterdir())


def test_a_refusal_is_not_noted_behind_a_link(tmp_path: Path) -> None:
    other, log = tmp_path / "elsewhere", tmp_path / "refused-active.jsonl"
    other.touch()
    refused = RefusedSums(own_of(tmp_path))
    log.symlink_to(other)
    with (
        pytest.raises(CheckpointError, match="is a symbolic link"),
        refused.noting(step=3, contract="ab"),
    ):
        raise RemoteProtocolError("altered")
    assert other.read_bytes() == b""
