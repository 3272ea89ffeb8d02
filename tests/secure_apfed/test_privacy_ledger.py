import base64
import hashlib
import io
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apfed_protocols.errors import LocalProtocolError
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.privacy import accountants
from secure_apfed.privacy.ledger import BudgetExhaustedError, PrivacyLedger, PrivacySpent
from secure_apfed.privacy.randomised_response import VoteResponse
from tests.memory import trace_memory

DELTA = 1e-5
NOISY = accountants.GaussianRelease(noise_multiplier=5.0)


def ledger_at(
    log: Path | None,
    *,
    mechanism: accountants.Mechanism | VoteResponse = NOISY,
    budget: float | None = None,
    rows: int = 10,
) -> PrivacyLedger:
    return PrivacyLedger(mechanism, delta=DELTA, budget=budget, rows=rows, log=log)


def charge(ledger: PrivacyLedger, step: int, *rows: int, digest: bytes = b"z") -> None:
    ledger.charge(step=step, rows=torch.tensor(rows, dtype=torch.int64), digest=digest)


class FullDisk(io.FileIO):
    def write(self, data: Any, /) -> int:
        return super().write(memoryview(data)[:10])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.jsonl"


class TestCounting:
    def test_the_row_that_was_sent_most_often_sets_the_price(self) -> None:
        ledger = ledger_at(None)
        for step, rows in enumerate([(0, 1), (1, 2), (3, 1), (9,)]):
            charge(ledger, step, *rows)
        spent = ledger.get_privacy_spent()
        assert spent.releases == 3
        assert spent.epsilon_x == accountants.gdp_epsilon(math.sqrt(3) / 5, DELTA)
        assert spent.delta == DELTA
        assert (spent.epsilon_y, spent.epsilon_model) == (math.inf, math.inf)
        assert "releases of one row: 3 at most" in spent.trace[1]
        assert spent.mu == pytest.approx(math.sqrt(3) / 5)
        assert spent.accountants == {"gdp": spent.epsilon_x}

    def test_a_row_twice_in_a_batch_counts_twice(self) -> None:
        ledger = ledger_at(None)
        charge(ledger, 0, 4, 4)
        assert ledger.get_privacy_spent().releases == 2
        bounded = ledger_at(None, budget=1.01 * NOISY.epsilon_of(1, DELTA))
        with pytest.raises(BudgetExhaustedError, match="release 2 of one row"):
            charge(bounded, 0, 4, 4)
        assert bounded.get_privacy_spent().releases == 0

    def test_without_noise_a_release_costs_everything(self) -> None:
        bare = ledger_at(None, mechanism=accountants.NoPrivacy())
        charge(bare, 0, 4, 4)  # a row twice in a batch counts twice
        assert bare.get_privacy_spent().releases == 2
        assert (bare.get_privacy_spent().epsilon_x, bare.get_privacy_spent().mu) == (
            math.inf,
            math.inf,
        )

    @pytest.mark.parametrize("rows", [10, 0])
    def test_nothing_sent_costs_nothing(self, rows: int) -> None:
        spent = ledger_at(None, rows=rows).get_privacy_spent()
        assert spent == PrivacySpent.for_no_release(delta=DELTA)
        assert (spent.epsilon_x, spent.epsilon_y, spent.mu) == (0, math.inf, 0)
        charged_nobody = ledger_at(None, rows=rows)
        charge(charged_nobody, 0)
        assert charged_nobody.get_privacy_spent() == spent

    def test_the_same_bytes_again_are_free_and_others_are_not(self) -> None:
        ledger = ledger_at(None)
        charge(ledger, 0, 1, 2)
        charge(ledger, 0, 1, 2)
        assert ledger.get_privacy_spent().releases == 1
        charge(ledger, 0, 1, 2, digest=b"other")
        charge(ledger, 1, 1, 2)
        charge(ledger, 0, 1, 3)
        assert ledger.get_privacy_spent().releases == 4


class TestBudget:
    def test_a_calibrated_run_ends_at_its_budget_and_not_before(self, log: Path) -> None:
        noise = accountants.calibrate_sigma(2.0, DELTA, releases=6, clip=0.5)
        mechanism = accountants.GaussianRelease(noise_multiplier=noise)
        ledger = ledger_at(log, mechanism=mechanism, budget=2.0)
        for step in range(6):
            charge(ledger, step, 0, 1)
        written = log.read_bytes()
        with pytest.raises(
            BudgetExhaustedError, match=r"step 6 was not sent: release 7 .* budget is 2"
        ):
            charge(ledger, 6, 1, 2)
        assert ledger.get_privacy_spent().releases == 6
        assert ledger.get_privacy_spent().epsilon_x == pytest.approx(2.0, rel=1e-5)
        assert log.read_bytes() == written
        charge(ledger, 6, 2, 3)
        charge(ledger, 5, 0, 1)

    def test_bad_settings_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="cannot be kept without noise"):
            ledger_at(None, budget=1.0, mechanism=accountants.NoPrivacy())
        with pytest.raises(ConfigError, match="at least 0 rows, got -1"):
            ledger_at(None, rows=-1)
        with pytest.raises(ConfigError, match="delta lies between 0 and 1"):
            PrivacyLedger(NOISY, delta=0, budget=None, rows=1, log=None)

    @pytest.mark.parametrize("budget", [0.0, math.inf])
    def test_a_budget_out_of_range_is_refused(self, budget: float) -> None:
        with pytest.raises(ConfigError, match=f"positive and finite, got {budget:g}"):
            ledger_at(None, budget=budget)


class TestCharging:
    @pytest.mark.parametrize(
        ("step", "rows", "digest", "message"),
        [
            (-1, torch.arange(2), b"z", "step from 0 and a digest, got step -1"),
            (0, torch.arange(2), b"", "step from 0 and a digest"),
            (0, torch.arange(2.0), b"z", "int64 positions"),
            (0, torch.zeros(2, 2, dtype=torch.int64), b"z", "int64 positions"),
            (0, torch.tensor([3, 10]), b"z", r"positions lie in 0\.\.9, got 3\.\.10"),
            (0, torch.tensor([-1]), b"z", r"positions lie in 0\.\.9, got -1\.\.-1"),
        ],
    )
    def test_wrong_arguments_are_named_and_nothing_is_charged(
        self, step: int, rows: torch.Tensor, digest: bytes, message: str
    ) -> None:
        ledger = ledger_at(None)
        with pytest.raises(LocalProtocolError, match=message):
            ledger.charge(step=step, rows=rows, digest=digest)
        assert ledger.get_privacy_spent().releases == 0

    def test_a_charge_is_on_the_disk_before_it_returns(self, log: Path) -> None:
        ledger = ledger_at(log)
        charge(ledger, 7, 5, 2, digest=b"\x01\x02")
        line = json.loads(log.read_text().splitlines()[1])
        assert (line["step"], line["digest"], line["count"]) == (7, "0102", 2)
        assert ledger_at(log).get_privacy_spent() == ledger.get_privacy_spent()

    def test_a_line_that_the_disk_takes_in_part_is_taken_back(
        self, log: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ledger = ledger_at(log)
        charge(ledger, 0, 1)
        before = log.read_bytes()
        with monkeypatch.context() as full:
            full.setattr("secure_apfed.privacy.ledger.FileIO", FullDisk)
            with pytest.raises(OSError, match="the disk took only part of a line"):
                charge(ledger, 1, 1)
        assert log.read_bytes() == before
        assert ledger.get_privacy_spent().releases == 1
        charge(ledger, 1, 1)
        assert ledger_at(log).get_privacy_spent().releases == 2

    def test_two_ledgers_cannot_write_one_log(self, log: Path) -> None:
        first = ledger_at(log)
        second = ledger_at(log)
        charge(first, 0, 1)
        with pytest.raises(CheckpointError, match="another process writes to it"):
            charge(second, 0, 2)
        assert second.get_privacy_spent().releases == 0
        charge(first, 1, 1)

    def test_checkpoints_wait_for_disks(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ledger = ledger_at(log)
        synced: list[int] = []
        monkeypatch.setattr("os.fsync", synced.append)
        charge(ledger, 0, 1)
        assert not synced
        ledger.state_dict()
        assert len(synced) == 1


class TestResuming:
    def test_a_rolled_back_checkpoint_refunds_nothing(self, log: Path) -> None:
        first = ledger_at(log)
        charge(first, 0, 1)
        checkpoint = first.state_dict()
        charge(first, 1, 1)
        charge(first, 2, 1)
        second = ledger_at(log)
        second.load_state_dict(checkpoint)
        assert second.get_privacy_spent().releases == 3
        charge(second, 1, 1)
        charge(second, 2, 1)
        assert second.get_privacy_spent().releases == 3
        charge(second, 3, 1)
        assert second.get_privacy_spent().releases == 4

    def test_without_a_log_the_checkpoint_is_continued(self) -> None:
        first = ledger_at(None)
        charge(first, 0, 1, 2)
        second = ledger_at(None)
        second.load_state_dict(first.state_dict())
        charge(second, 1, 2)
        assert second.get_privacy_spent().releases == 2
        second.load_state_dict(ledger_at(None).state_dict())  # which never lowers a count
        assert second.get_privacy_spent().releases == 2

    def test_a_log_that_misses_what_the_checkpoint_counts_is_refused(self, log: Path) -> None:
        first = ledger_at(log)
        charge(first, 0, 1)
        log.unlink()
        with pytest.raises(CheckpointError, match="misses releases that the checkpoint counts"):
            ledger_at(log).load_state_dict(first.state_dict())

    @pytest.mark.parametrize(
        "state",
        [{}, {"counts": torch.zeros(9).long()}, {"counts": torch.zeros(10)}],
        ids=["nothing", "too few", "floats"],
    )
    def test_a_checkpoint_of_other_rows_is_refused(self, state: dict[str, Any]) -> None:
        with pytest.raises(CheckpointError, match="does not count 10 rows"):
            ledger_at(None).load_state_dict(state)


class TestDamage:
    @pytest.fixture
    def written(self, log: Path) -> list[bytes]:
        ledger = ledger_at(log)
        for step in range(3):
            charge(ledger, step, 0, 4, 9)
        return log.read_bytes().splitlines(keepends=True)

    def test_every_cut_of_a_line_drops_its_release(self, log: Path, written: list[bytes]) -> None:
        """The line was not whole on the disk, so `charge` had not returned and nothing was sent."""
        for length in (*range(0, len(written[-1]) - 1, 11), len(written[-1]) - 2):
            log.write_bytes(b"".join(written[:-1]) + written[-1][:length])
            assert ledger_at(log).get_privacy_spent().releases == 2
        charge(ledger_at(log), 2, 0, 4, 9)
        assert log.read_bytes() == b"".join(written)

    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_a_last_line_counts_without_its_newline(
        self, number: int, log: Path, written: list[bytes]
    ) -> None:
        """Read on: whoever cut the newline off, the chain says that the release was made."""
        log.write_bytes(b"".join(written[: number + 1])[:-1])
        assert ledger_at(log).get_privacy_spent().releases == number
        assert log.read_bytes() == b"".join(written[: number + 1])  # reading it mends it
        charge(ledger_at(log), 9, 0)
        assert ledger_at(log).get_privacy_spent().releases == number + 1

    @pytest.mark.parametrize("length", [1, 10, -2])
    def test_a_cut_first_line_is_begun_anew(
        self, length: int, log: Path, written: list[bytes]
    ) -> None:
        log.write_bytes(written[0][:length])
        assert ledger_at(log).get_privacy_spent().releases == 0
        assert log.read_bytes() == written[0]

    def test_a_link_that_takes_the_place_of_an_open_log_is_not_followed(
        self, log: Path, tmp_path: Path
    ) -> None:
        ledger = ledger_at(log)
        moved = log.rename(tmp_path / "moved")
        log.symlink_to(moved)
        before = moved.read_bytes()
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            charge(ledger, 0, 1)
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            ledger.state_dict()
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            ledger_at(log)
        assert moved.read_bytes() == before
        assert ledger.get_privacy_spent().releases == 0

    def test_any_changed_line_is_found(self, log: Path, written: list[bytes]) -> None:
        for number, line in enumerate(written):
            for position in range(number, len(line) - 1, 13):
                changed = bytearray(line)
                changed[position] ^= 1
                lines = [*written[:number], bytes(changed), *written[number + 1 :]]
                log.write_bytes(b"".join(lines))
                said = f"not as a ledger wrote it from line {number + 1} on"
                with pytest.raises(CheckpointError, match=said):
                    ledger_at(log)

    def test_what_was_altered_is_refused_from_its_line_on_and_left_as_it_is(
        self, log: Path, written: list[bytes]
    ) -> None:
        """A torn line is the beginning of one; what reads as JSON was altered after it was sent."""
        changed = json.dumps(json.loads(written[-1]) | {"digest": "00"}).encode()
        whole = b"".join(written[:-1])
        torn = written[-1][:20]
        other = (b"[]\n", b"{}\n", b"null\n", b"\xff\n", b'{"chain": 3}\n', b"[" * 100_000 + b"\n")
        found = {
            4: [whole + last for last in (changed, written[-1][:-1] + b"x", b"x" + torn)],
            2: [
                (whole + torn).replace(b'"step":0', b'"step":7', 1),
                b"".join(written[:1] + written[2:]),
                b"".join(written[i] for i in (0, 2, 1, 3)),
                *(b"".join([written[0], line, written[2]]) for line in other),
            ],
            1: [b"no ledger at all", b"{}", b'{"a": 1}\n{"b"', b"\x00" * 9],
        }
        for line, contents in found.items():
            for content in contents:
                log.write_bytes(content)
                with pytest.raises(CheckpointError, match=f"a ledger wrote it from line {line} on"):
                    ledger_at(log)
                assert log.read_bytes() == content

    @pytest.mark.parametrize(
        "more",
        [
            {"rows": 11},
            {"mechanism": accountants.GaussianRelease(noise_multiplier=6.0)},
            {"mechanism": VoteResponse(epsilon=1 / 5, classes=2)},  # of the same noise multiplier
        ],
        ids=["rows", "louder", "votes"],
    )
    def test_a_log_of_another_run_is_refused_and_kept(
        self, more: dict[str, Any], log: Path, written: list[bytes]
    ) -> None:
        log.write_bytes(torn := b"".join(written[:-1]) + written[-1][:20])
        with pytest.raises(CheckpointError, match="is the log of another run"):
            ledger_at(log, **more)
        assert log.read_bytes() == torn


def chain_lines(*lines: dict[str, Any]) -> bytes:
    """Return a log whose running hash holds: whoever writes the file can compute it."""
    chain = b""
    content = b""
    for fields in lines:
        plain = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
        chain = hashlib.blake2b(chain + plain, digest_size=16).digest()
        content += json.dumps({**fields, "chain": chain.hex()}).encode() + b"\n"
    return content


HEADER = {"accountant": "gdp", "format": 1, "noise_multiplier": 5.0, "rows": 10}


def pack_rows(content: bytes, count: int, /, **changes: Any) -> dict[str, Any]:
    rows = base64.b64encode(zlib.compress(content, 9)).decode()
    return {"step": 0, "digest": "00", "count": count, "rows": rows, **changes}


class TestHostileLog:
    @pytest.mark.parametrize("count", [20_000_000, 10, 1])
    def test_rows_are_inflated_to_those_that_there_are_and_no_further(
        self, count: int, log: Path
    ) -> None:
        """A line of 2.8 MB took 10.5 GB."""
        log.parent.mkdir()
        packed_rows = pack_rows(bytes(80_000_000), 0)
        log.write_bytes(chain_lines(HEADER, {**packed_rows, "count": count}))
        with trace_memory() as peak:
            with pytest.raises(CheckpointError, match="not as a ledger wrote it from line 2"):
                ledger_at(log)
            assert peak() < 5e6

    def test_releases_are_read_one_by_one(self, log: Path) -> None:
        rows = 20_000
        times = 400
        every = pack_rows(np.ones(rows, dtype="<u4").tobytes(), rows)
        lines = ({**every, "step": step} for step in range(times))
        log.parent.mkdir()
        log.write_bytes(chain_lines({**HEADER, "rows": rows + 1}, *lines))
        with trace_memory() as peak:
            assert ledger_at(log, rows=rows + 1).get_privacy_spent().releases == times
            assert peak() < 20e6  # all at once: 64 MB

    @pytest.mark.parametrize(
        "line",
        [
            pack_rows(bytes(4), 1, step=math.inf),
            pack_rows(bytes(4), 1, step=math.nan),
            pack_rows(bytes(4), 1, step=[]),
            pack_rows(bytes(4), 1, digest=3),
            pack_rows(bytes(4), 1, count="1"),
            pack_rows(bytes(4), -1),
            pack_rows(bytes(3), 1),
            pack_rows(bytes(8), 1),
            pack_rows(bytes(4), 1, rows="AAAA"),
            pack_rows(bytes(4), 1, rows=3),
            pack_rows(bytes(44), 11),
        ],
        ids=range(11),
    )
    def test_a_line_whose_hash_holds_is_checked_all_the_same(
        self, line: dict[str, Any], log: Path
    ) -> None:
        log.parent.mkdir()
        log.write_bytes(chain_lines(HEADER, line))
        with pytest.raises(CheckpointError, match="is not as a ledger wrote it from line 2 on"):
            ledger_at(log)

    def test_what_could_not_be_read_back_is_not_written(self, log: Path) -> None:
        with pytest.raises(LocalProtocolError, match="11 rows of 10"):
            charge(ledger_at(log), 0, *[1] * 11)


def test_noise_of_one_step_under_two_releases_leaves_nothing_to_claim(tmp_path: Path) -> None:
    """Noise from the seed depends on the step alone: the difference of the two carries none."""

    def open_ledger(*, seeded: bool, budget: float | None = None) -> PrivacyLedger:
        mechanism = accountants.GaussianRelease(noise_multiplier=2.0)
        log = tmp_path / f"{seeded}.jsonl"
        return PrivacyLedger(
            mechanism, delta=1e-5, budget=budget, rows=4, log=log, is_reproducible=seeded
        )

    rows = torch.tensor([1, 2])
    nobody = torch.tensor([], dtype=torch.int64)
    for seeded in (True, False):
        ledger = open_ledger(seeded=seeded)
        ledger.charge(step=0, rows=rows, digest=b"first")
        ledger.charge(step=0, rows=rows, digest=b"first")
        ledger.charge(step=0, rows=nobody, digest=b"of nobody")
        ledger.charge(step=1, rows=rows, digest=b"next")
        assert ledger.get_privacy_spent().epsilon_x < math.inf
    with pytest.raises(BudgetExhaustedError, match="epsilon inf"):
        open_ledger(seeded=True, budget=50.0).charge(step=0, rows=rows, digest=b"second")
    assert open_ledger(seeded=True).get_privacy_spent().epsilon_x < math.inf
    for seeded in (True, False):
        open_ledger(seeded=seeded).charge(step=0, rows=rows, digest=b"second")
        again = open_ledger(seeded=seeded).get_privacy_spent()
        assert (again.releases, math.isinf(again.epsilon_x), math.isinf(again.mu)) == (
            3,
            seeded,
            seeded,
        )


def test_a_repeated_step_stays_repeated_in_a_checkpoint_without_a_log() -> None:
    def open_ledger(state: dict[str, torch.Tensor] | None = None) -> PrivacyLedger:
        ledger = PrivacyLedger(
            NOISY, delta=DELTA, budget=None, rows=4, log=None, is_reproducible=True
        )
        if state is not None:
            ledger.load_state_dict(state)
        return ledger

    once = open_ledger()
    charge(once, 0, 1, digest=b"first")
    assert open_ledger(once.state_dict()).get_privacy_spent().epsilon_x < math.inf
    later = open_ledger(once.state_dict())  # the same step with other bytes, after resuming
    charge(later, 0, 1, digest=b"second")
    assert later.get_privacy_spent().epsilon_x == math.inf
    assert open_ledger(later.state_dict()).get_privacy_spent().epsilon_x == math.inf
