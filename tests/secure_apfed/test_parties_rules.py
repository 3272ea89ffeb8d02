"""What receivers of representations refuse, what a contribution is bound to, what is charged."""

import hashlib
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import RepresentationTerms
from secure_apfed.errors import CheckpointError
from secure_apfed.learning.release import Releases, check_rows, read_representations
from secure_apfed.methods.sum_end import Allowance, StepGate, bind_step
from secure_apfed.privacy.guard import GaussianGuard
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
from tests.secure_apfed.seats import contract, own_of, representations

TERMS = RepresentationTerms(shape=(2,), dtype="float32", minimum_norm=0.5, maximum_norm=2.0)
INFINITY, NAN = float("inf"), float("nan")


def read(rows: Any, z: Any, terms: RepresentationTerms = TERMS) -> tuple[Tensor, Tensor]:
    sent = representations(torch.as_tensor(rows), torch.as_tensor(z))
    return read_representations(sent, terms, aligned=10, minimum=2)


def test_a_batch_within_the_rules_is_read() -> None:
    rows, z = read([9, 0, 4], [[1.0, 0.0], [0.0, -0.5], [0.0, 2.0]])
    assert rows.tolist() == [9, 0, 4]
    assert z.tolist() == [[1.0, 0.0], [0.0, -0.5], [0.0, 2.0]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([3], "a batch of 1 rows; the contract says at least 2"),
        ([0, 5, 1, 5], "repeated a row"),
        ([0, 10], "outside the alignment of 10 rows"),
        ([-1, 4], "outside the alignment"),
        ([0, 2**62], "outside the alignment"),
        ([-(2**63), 2**63 - 1], "outside the alignment"),
    ],
)
def test_rows_outside_the_rules_are_refused(rows: list[int], message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"active .*{message}"):
        read(rows, torch.ones(len(rows), 2))


def test_no_rows_at_all_are_refused() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(RemoteProtocolError, match="a batch of 0 rows"):
        read(empty, torch.ones(0, 2))
    with pytest.raises(RemoteProtocolError, match="outside the alignment of 0 rows"):
        check_rows(torch.arange(2), aligned=0, minimum=1, sender="active")


@pytest.mark.parametrize("bad", [0.0, 0.3, 2.1, 1e30, 3e38, NAN, INFINITY, -INFINITY])
def test_one_row_with_a_norm_out_of_bounds_is_enough(bad: float) -> None:
    for at in range(2):
        z = torch.ones(2, 2)
        z[at] = torch.tensor([bad, 0.0])
        with pytest.raises(RemoteProtocolError, match=r"norm is not within 0\.5 to 2"):
            read([0, 1], z)


def test_the_largest_norm_allows_for_rounding_and_no_more() -> None:
    read([0, 1], torch.tensor([[2.0, 0.0], [2.0 * (1 + 9e-6), 0.0]]))
    with pytest.raises(RemoteProtocolError, match=r"largest 2\.0000"):
        read([0, 1], torch.tensor([[2.0, 0.0], [2.0 * (1 + 2e-5), 0.0]]))


def test_norms_are_of_the_whole_row_whatever_its_shape() -> None:
    terms = TERMS.model_copy(update={"shape": (2, 1, 2)})
    z = torch.full((2, 2, 1, 2), 0.9)  # norm 1.8
    assert torch.equal(read([0, 1], z, terms)[1], z)
    with pytest.raises(RemoteProtocolError, match=r"largest 2\.2"):
        read([0, 1], torch.full((2, 2, 1, 2), 1.1), terms)


def test_a_norm_whose_square_overflows_float32_is_still_measured() -> None:
    terms = TERMS.model_copy(update={"maximum_norm": 1e30})
    read([0, 1], torch.full((2, 2), 5e29), terms)
    with pytest.raises(RemoteProtocolError, match="norm"):
        read([0, 1], torch.full((2, 2), 8e29), terms)


@pytest.mark.parametrize(
    ("rows", "z", "message"),
    [
        (torch.arange(2), torch.ones(3, 2), "2 row positions for 3 representations"),
        (torch.arange(2), torch.ones(2, 2).double(), "torch.float64"),
        (torch.arange(2), torch.ones(2, 3), "expected torch.float32"),
        (torch.arange(2), torch.ones(2), "expected torch.float32"),
        (torch.arange(2), torch.ones(2, 2, 1), "expected torch.float32"),
        (torch.arange(2).int(), torch.ones(2, 2), "torch.int32"),
        (torch.arange(2)[:, None], torch.ones(2, 2), "expected torch.int64"),
    ],
)
def test_other_tensors_are_refused(rows: Tensor, z: Tensor, message: str) -> None:
    with pytest.raises(RemoteProtocolError, match=message):
        read(rows, z)


def test_float64_terms_want_float64() -> None:
    terms = TERMS.model_copy(update={"dtype": "float64"})
    assert read([0, 1], torch.ones(2, 2).double(), terms)[1].dtype == torch.float64
    with pytest.raises(RemoteProtocolError, match=r"torch\.float32"):
        read([0, 1], torch.ones(2, 2), terms)


def test_a_step_passes_once_and_only_upwards() -> None:
    gate = StepGate("p1")
    for step in (0, 1, 7):
        gate.enter(step, sender="active")
    for step in (7, 6, 0, -1):
        with pytest.raises(RemoteProtocolError, match=f"active sent step {step} after step 7"):
            gate.enter(step, sender="active")
    assert gate.last == 7


def test_setup_messages_are_no_step() -> None:
    with pytest.raises(RemoteProtocolError, match="step -1 after step -1"):
        StepGate("p1").enter(-1, sender="active")


def test_a_binding_changes_with_everything_it_binds() -> None:
    rows = torch.tensor([4, 2, 9])
    usual = bind_step("s", 3, rows, b"payload")
    assert usual == bind_step("s", 3, torch.arange(10)[rows], b"payload")
    others = [
        bind_step("t", 3, rows, b"payload"),
        bind_step("s", 4, rows, b"payload"),
        bind_step("s", 3, rows.flip(0), b"payload"),
        bind_step("s", 3, rows[:2], b"payload"),
        bind_step("s", 3, torch.tensor([4, 2, 8]), b"payload"),
        bind_step("s", 3, rows, b"payloae"),
        bind_step("s", 3, rows, b"payload\x00"),
    ]
    assert len({binding.digest for binding in (usual, *others)}) == len(others) + 1
    assert others[2].message == usual.message
    assert others[5].rows == usual.rows


def allowance(
    *, epochs: int = 2, beyond: int = 0, spare: int = 0, log: Path | None = None
) -> Allowance:
    agreed = {"batch_size": 3, "epochs": epochs, "spare_answers": spare}
    terms = contract().model_copy(update=agreed)
    return Allowance("p1", terms, aligned=10, log=log, beyond=beyond)


def take(own: Allowance, rows: list[int], *, step: int, digest: bytes = b"answer") -> None:
    own.take(step, torch.tensor(rows), digest, sender="active")


def test_a_batch_above_the_contracts_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match=r"a batch of 4 rows to p1.*at most 3"):
        allowance().check(0, torch.arange(4), sender="active")


@pytest.mark.parametrize(("epochs", "spare", "beyond"), [(2, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_a_row_is_answered_as_often_as_agreed(epochs: int, spare: int, beyond: int) -> None:
    own = allowance(epochs=epochs, spare=spare, beyond=beyond)
    take(own, [1, 2], step=0)
    take(own, [1, 2], step=1)
    with pytest.raises(RemoteProtocolError, match=r"more than 2 times.*rules\.spare_answers"):
        take(own, [2, 3], step=2)
    with pytest.raises(RemoteProtocolError, match="more than 2 times"):
        own.check(2, torch.tensor([2, 3]), sender="active")
    take(own, [3, 4], step=2)


def test_the_same_answer_to_the_same_step_counts_once() -> None:
    own = allowance(epochs=1)
    for _ in range(3):
        own.check(7, torch.tensor([1, 2]), sender="active")
        take(own, [1, 2], step=7)
    for step, rows, digest in ((8, [1, 2], b"answer"), (7, [1], b"answer"), (7, [1, 2], b"other")):
        with pytest.raises(RemoteProtocolError, match="more than 1 times"):
            take(own, rows, step=step, digest=digest)


def test_answers_are_counted_over_checkpoints() -> None:
    own, again = allowance(epochs=1), allowance(epochs=1)
    take(own, [1, 2], step=0)
    again.load_tensors(own.tensors())
    take(own, [5], step=1)
    with pytest.raises(RemoteProtocolError, match="more than 1 times"):
        take(again, [2], step=1)
    take(again, [5], step=1)


def test_answers_are_counted_over_sessions_whatever_the_checkpoint_says(tmp_path: Path) -> None:
    log = tmp_path / "answers-p1.jsonl"
    own = allowance(epochs=1, log=log)
    checkpoint = own.tensors()
    take(own, [1, 2], step=0)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    again = allowance(epochs=1, log=log)
    again.load_tensors(checkpoint)
    take(again, [1, 2], step=0)
    with pytest.raises(RemoteProtocolError, match="more than 1 times"):
        take(again, [2], step=1)


def test_an_answer_is_on_the_disk_before_it_may_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, synced = tmp_path / "answers-p1.jsonl", []
    own = allowance(log=log)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(log.read_bytes()))
    take(own, [1, 2], step=0)
    assert [content.count(b"\n") for content in synced] == [2]


def test_an_answer_that_stays_in_its_process_is_on_the_disk_with_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, synced = tmp_path / "answers-active.jsonl", []
    brought = own_of(tmp_path)
    inside = replace(brought, secrets=replace(brought.secrets, sends_out=False))
    own = Allowance.of(inside, contract(), aligned=10)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(log.read_bytes()))
    take(own, [1, 2], step=0)
    assert log.read_bytes().count(b"\n") == 2
    assert not synced
    own.tensors()
    assert [content.count(b"\n") for content in synced] == [2]


def test_a_log_that_was_deleted_or_is_of_other_terms_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "answers-p1.jsonl"
    own = allowance(epochs=1, log=log)
    take(own, [1, 2], step=0)
    with pytest.raises(CheckpointError, match="log of another run"):
        allowance(epochs=2, log=log)
    log.unlink()
    with pytest.raises(CheckpointError, match="misses releases that the checkpoint counts"):
        allowance(epochs=1, log=log).load_tensors({"counts": torch.ones(10, dtype=torch.int64)})


ROWS = torch.tensor([4, 1])


def releases(budget: float | None = None) -> Releases:
    guard = GaussianGuard(clip=1.0, sigma=2.0, key=bytes(32))
    ledger = PrivacyLedger(guard.mechanism(), delta=1e-5, budget=budget, rows=5, log=None)
    return Releases(guard, ledger)


def charged(ours: Releases) -> list[int]:
    counts: list[int] = ours.ledger.state_dict()["counts"].tolist()
    return counts


def test_what_comes_out_is_counted_then_charged_by_its_digest() -> None:
    ours, seen = releases(), []

    def count(digest: bytes) -> None:
        assert charged(ours) == [0] * 5
        seen.append(digest)

    h_B = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    released = ours.release(h_B, step=3, rows=ROWS, count=count)
    assert seen == [hashlib.sha256(released.payload).digest()]
    assert charged(ours) == [0, 1, 0, 0, 1]
    assert released.z.shape == h_B.shape
    assert released.z.requires_grad
    again = ours.release(h_B, step=3, rows=ROWS)
    assert again.payload == released.payload
    assert charged(ours) == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("error", [RemoteProtocolError, BudgetExhaustedError])
def test_a_refusal_charges_nothing_and_gives_nothing_out(error: type[Exception]) -> None:
    ours = releases(budget=1e-3 if error is BudgetExhaustedError else None)

    def count(digest: bytes) -> None:
        if error is RemoteProtocolError:
            raise error("asked too often")

    facts: dict[str, Any] = {"step": 0, "rows": ROWS, "count": count}
    with pytest.raises(error):
        ours.release(torch.ones(2, 3), **facts)
    assert charged(ours) == [0] * 5
