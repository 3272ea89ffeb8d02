"""Active and passive one by one: what they send, learn from and refuse."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from secure_apfed.contract import Contract
from secure_apfed.data import ColumnEncoding, PartyTable
from secure_apfed.exchange import Envelope, Kind, TensorSpec, unpack
from secure_apfed.learning.descent import ActiveNetworks
from secure_apfed.learning.release import ContributionNoise
from secure_apfed.methods.apfed import ApfedPassive
from secure_apfed.methods.sum_end import bind_step
from secure_apfed.privacy.contributions import SummedRelease
from secure_apfed.privacy.guard import NoGuard
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger
from tests.secure_apfed.seats import (
    PASSIVES,
    SESSION,
    LoneActive,
    cloned,
    contract,
    contributed,
    envelope,
    lone_passive,
    plain_sum,
    random,
    representations,
    same,
)

pytestmark = pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")

ROWS, COLUMNS, CLASSES, D = 12, 5, 3, 3
ALIGNMENT = torch.tensor([7, 2, 9, 4, 0, 11, 5])  # position in the table of each aligned person
SENT = {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(torch.float64, (None, D))}


class Decoder(nn.Module):
    """A small objective: squared error of a linear decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, COLUMNS, dtype=torch.float64)
        self.calls = 0

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(self.linear(z), x)


FEATURES = random(len(ALIGNMENT), COLUMNS, seed=8)


def passive(agreed: Contract, name: str = "p1", **more: Any) -> tuple[ApfedPassive, Decoder]:
    torch.manual_seed(3)
    objective = Decoder()
    return lone_passive(agreed, objective, FEATURES, name, **more), objective


def opened(contributions: Mapping[str, bytes], sent: Envelope, rows: Tensor) -> Tensor:
    """What the receiver decodes from the contributions to `sent`."""
    sums = plain_sum()
    combined = sums.combiner().combine(contributions)
    binding = bind_step(SESSION, sent.step, rows, sent.payload)
    return torch.from_numpy(sums.receiver().decode(combined, (len(rows), D), binding))


BAD: dict[str, tuple[Any, Any, int]] = {
    "doubled": ([1, 1], random(2, D), 5),
    "huge": ([1, 2], random(2, D) * 1e6, 5),
    "replayed": ([1, 2], random(2, D), 4),
    "before training": ([1, 2], random(2, D), -1),
}


@pytest.mark.parametrize("case", BAD)
def test_a_refused_batch_computes_and_changes_nothing(case: str) -> None:
    party, objective = passive(contract())
    contributed(party, representations(torch.arange(3), random(3, D), step=4))
    state, calls = cloned(party.tensors()), objective.calls
    rows, z, step = BAD[case]
    with pytest.raises(RemoteProtocolError, match="active"):
        contributed(party, representations(torch.tensor(rows), z, step=step))
    assert objective.calls == calls
    assert same(party.tensors(), state)
    with pytest.raises(RemoteProtocolError, match="step 4 after step 4"):
        contributed(party, representations(torch.arange(3), random(3, D), step=4))
    contributed(party, representations(torch.arange(3), random(3, D), step=5))


def test_a_passives_state_comes_back_and_old_steps_stay_refused() -> None:
    party, _ = passive(contract())
    batches = [
        representations(torch.arange(3), random(3, D, seed=step), step=step) for step in range(4)
    ]
    for sent in batches[:2]:
        contributed(party, sent)
    state = cloned(party.tensors())
    contributed(party, batches[2])
    again, _ = passive(contract())
    again.load_tensors(state, next_step=2)
    with pytest.raises(RemoteProtocolError, match="after step 1"):
        contributed(again, batches[1])
    contributed(again, batches[2])
    assert same(again.tensors(), party.tensors())


def test_an_answer_is_the_same_one_bit_for_bit_or_another(tmp_path: Path) -> None:
    """What a later session is answered again for free: the same rows and values, no others."""
    rows, z = torch.arange(3), random(3, D)
    agreed = contract().model_copy(update={"epochs": 1})
    recovers = agreed.model_copy(update={"silent_passive": "recover"})
    later = later_session(recovers)
    for index, (first, second, sent, free) in enumerate(
        [
            (agreed, agreed, z, True),
            (agreed, later_session(agreed), z, True),
            (agreed, agreed, z + 1e-12, False),
            (agreed, agreed, z.flip(0), False),
            (recovers, recovers, z, True),
            (recovers, later, z, False),  # its sums may lack other passives
        ]
    ):
        log = tmp_path / f"answers-{index}.jsonl"
        contributed(passive(first, answers=log)[0], representations(rows, z))
        again, _ = passive(second, answers=log)
        if free:
            contributed(again, representations(rows, sent))
        else:
            with pytest.raises(RemoteProtocolError, match="a row more than 1 times"):
                contributed(again, representations(rows, sent))


def later_session(agreed: Contract) -> Contract:
    """The same terms in the contract of another session."""
    return agreed.model_copy(update={"settings": {"session": 2}})


def test_a_passive_that_does_not_know_everybody_counts_every_session(tmp_path: Path) -> None:
    """It stays as it is where a batch moves others, and its part would fall out of S1 - S2."""
    rows, z = torch.arange(3), random(3, D)
    agreed = contract().model_copy(update={"epochs": 1})
    held_N = torch.arange(len(ALIGNMENT)) < 5
    first = passive(agreed, answers=tmp_path / "log", held_N=held_N)[0]
    contributed(first, representations(rows, z))
    again, _ = passive(later_session(agreed), answers=tmp_path / "log", held_N=held_N)
    with pytest.raises(RemoteProtocolError, match="a row more than 1 times"):
        contributed(again, representations(rows, z))


def test_every_session_has_noise_of_its_own_and_pays_for_it(tmp_path: Path) -> None:
    """Of the difference of two sums no passive's noise falls out."""
    rows, z = torch.arange(3), random(3, D)
    release = SummedRelease(deviation=1000, honest=2, sensitivity=100.0, numbers=3 * D)
    sent = []
    for agreed in (contract(), later_session(contract())):
        ledger = PrivacyLedger(
            release, delta=1e-5, budget=None, rows=len(ALIGNMENT), log=tmp_path / "ledger"
        )
        noise = ContributionNoise(deviation=1000, key=bytes(32), ledger=ledger, secret=True)
        party, _ = passive(agreed, answers=tmp_path / "answers", noise=noise)
        sent.append(contributed(party, representations(rows, z)))
        counts = ledger.state_dict()["counts"][:3].tolist()
        assert counts == [len(sent)] * 3
    assert sent[0] != sent[1]


def test_what_is_admitted_is_answered_once_and_counted_before_it_is_charged(tmp_path: Path) -> None:
    rows, z = torch.arange(3), random(3, D)
    agreed = contract().model_copy(update={"epochs": 1})
    release = SummedRelease(deviation=1000, honest=2, sensitivity=100.0, numbers=3 * D)
    ledger = PrivacyLedger(release, delta=1e-5, budget=None, rows=len(ALIGNMENT), log=None)
    noise = ContributionNoise(deviation=1000, key=bytes(32), ledger=ledger, secret=True)
    party, _ = passive(agreed, answers=tmp_path / "answers", noise=noise)
    admitted, values = party.gradients(representations(rows, z))
    party.sum.contribution(admitted, values)
    with pytest.raises(LocalProtocolError, match="admitted last, and leaves once"):
        party.sum.contribution(admitted, values + 1)
    again, _ = passive(later_session(agreed), answers=tmp_path / "answers", noise=noise)
    with pytest.raises(RemoteProtocolError, match="a row more than 1 times"):
        contributed(again, representations(rows, z))
    assert ledger.state_dict()["counts"].tolist() == [1] * 3 + [0] * 4


class Ledger:
    """Notes what is charged, or refuses."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.charged: list[tuple[int, list[int], bytes]] = []
        self.refuses = refuses

    def charge(self, *, step: int, rows: Tensor, digest: bytes, **_: Any) -> None:
        if self.refuses:
            raise BudgetExhaustedError("spent")
        self.charged.append((step, rows.tolist(), digest))


class Active:
    """An active party with its parts in reach."""

    def __init__(
        self, *, agreed: Contract | None = None, projection: bool = True, refuses: bool = False
    ) -> None:
        torch.manual_seed(5)
        encoder = nn.Sequential(nn.Linear(COLUMNS, D if not projection else 4), nn.Tanh()).double()
        self.networks = ActiveNetworks(
            encoder,
            nn.Linear(4 if projection else D, CLASSES).double(),
            nn.Linear(4, D).double() if projection else None,
        )
        encoding = ColumnEncoding.plain(tuple(f"c{index}" for index in range(COLUMNS)))
        self.table = PartyTable(
            "active", tuple(map(str, range(ROWS))), random(ROWS, COLUMNS, seed=6).float(),
            torch.arange(ROWS) % CLASSES, encoding,
        )  # fmt: skip
        self.ledger = Ledger(refuses=refuses)
        self.sums = plain_sum()
        ledger: Any = self.ledger
        self.party = LoneActive(
            self.table, self.networks, NoGuard(), ledger, alignment=ALIGNMENT, agreed=agreed
        )

    def represent(self, step: int, rows: list[int]) -> Envelope:
        """What a passive receives."""
        payload = self.party.represent(step, torch.tensor(rows))
        assert payload is not None
        return envelope(payload, kind=Kind.REPRESENTATIONS, step=step)

    def sum_of(self, sent: Envelope, gradients: list[Tensor]) -> bytes:
        """The sum of the passives' answers where they return these."""
        rows = unpack(sent.payload, SENT, sender="active")[0]["rows"]
        binding = bind_step(SESSION, sent.step, rows, sent.payload)
        frames = {
            name: self.sums.contributor(name).contribute(gradient.numpy(), binding)
            for name, gradient in zip(PASSIVES, gradients, strict=True)
        }
        return self.sums.combiner().combine(frames)


@pytest.mark.parametrize("projection", [True, False])
def test_an_active_sends_aligned_rows_only_by_their_common_position(projection: bool) -> None:
    active = Active(projection=projection)
    sent = active.represent(0, [1, 9, 3, 0, 7, 10])  # 9, 0 and 7 are aligned, at 2, 4 and 0
    tensors, meta = unpack(sent.payload, SENT, sender="active")
    assert tensors["rows"].tolist() == [2, 4, 0]
    assert meta == {}
    with torch.no_grad():
        h = active.networks.encoder(active.table.features[[9, 0, 7]].double())
        expected = h if active.networks.projection is None else active.networks.projection(h)
    torch.testing.assert_close(tensors["z"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [[1, 3], [7, 1, 3, 6, 8]])
def test_below_the_minimum_nothing_is_sent_and_the_active_learns_alone(batch: list[int]) -> None:
    active = Active()
    twin = copy.deepcopy(active.networks)
    state = cloned(active.party.role.tensors())
    rows = torch.tensor(batch)
    assert active.party.represent(0, rows) is None
    assert active.ledger.charged == []
    labels = torch.arange(ROWS)[rows] % CLASSES
    loss = F.cross_entropy(twin.head(twin.encoder(active.table.features[rows].double())), labels)
    assert active.party.update(None) == pytest.approx(loss.item(), abs=1e-12)
    after = active.party.role.tensors()
    changed = {key.split(".")[0] for key in state if not torch.equal(after[key], state[key])}
    assert changed == {"encoder", "head", "steps done"}


def test_the_minimum_is_the_contracts() -> None:
    batch = torch.tensor([7, 2, 9])
    assert Active(agreed=contract(minimum_batch=3)).party.represent(0, batch)
    assert Active(agreed=contract(minimum_batch=4)).party.represent(0, batch) is None


def test_a_ledger_that_refuses_lets_nothing_out_and_nothing_be_learnt() -> None:
    active = Active(refuses=True)
    state = cloned(active.party.role.tensors())
    rows = torch.tensor([7, 2, 9])
    with pytest.raises(BudgetExhaustedError):
        active.party.represent(0, rows)
    assert same(active.party.role.tensors(), state)
    active.ledger.refuses = False
    assert active.party.represent(0, rows) is not None


def wrong_sums(active: Active, sent: Envelope) -> Iterator[bytes]:
    good = active.sum_of(sent, [random(3, D)] * 2)
    rows = unpack(sent.payload, SENT, sender="active")[0]["rows"]
    z = unpack(sent.payload, SENT, sender="active")[0]["z"]
    yield good[:-1]
    yield active.sum_of(representations(rows, z + 1), [random(3, D)] * 2)
    yield active.sum_of(representations(rows.flip(0), z), [random(3, D)] * 2)
    yield active.sum_of(representations(rows, z, step=1), [random(3, D)] * 2)
    yield active.sum_of(sent, [random(2, D)] * 2)


@pytest.mark.parametrize("number", range(5))
def test_a_sum_of_something_else_changes_nothing_and_is_the_last(number: int) -> None:
    active = Active()
    state = cloned(active.party.role.tensors())
    sent = active.represent(0, [7, 2, 9])
    bad = next(itertools.islice(wrong_sums(active, sent), number, None))
    with pytest.raises(RemoteProtocolError):
        active.party.update(bad)
    assert same(active.party.role.tensors(), state)
    again = active.represent(1, [7, 2, 9])
    with pytest.raises(LocalProtocolError, match="active refused the sum of step 0"):
        active.party.update(active.sum_of(again, [random(3, D)] * 2))
    assert same(active.party.role.tensors(), state)
