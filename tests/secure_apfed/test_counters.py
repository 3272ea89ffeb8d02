"""Every counter of a party stands a second time in its audit log, and none restarts unasked."""

import atexit
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from secure_apfed.base.files import add_line, make_private
from secure_apfed.cli import execute
from secure_apfed.errors import CheckpointError, ConfigError
from secure_apfed.organisations.counters import COUNTER_CHECKPOINT, COUNTERS, open_counters
from secure_apfed.organisations.party import ServeSettings
from secure_apfed.organisations.served import AnswerLog
from secure_apfed.privacy.ledger import Release, ReleaseCounts
from secure_apfed.runs.audit_log import AuditLog, verify_log
from secure_apfed.runs.folder import PartyFolder
from tests.secure_apfed.test_audit_log import FakeMeter


def count_release(path: Path, number: int) -> None:
    counts = ReleaseCounts(rows=9, log=path, about={"answers": 9})
    digest = f"{path.parent.parent.name} {number}".encode()
    counts.add_release(Release(number, digest, np.array([1, 2])))


def count_line(path: Path, number: int) -> None:
    add_line(path, {"step": number, "contract": path.parent.parent.name})


def count_stage(path: Path, number: int) -> None:
    with path.open("a") as log:
        log.write(f"{path.parent.parent.name}-{number:060x}\n")


def count_answer(path: Path, number: int) -> None:
    book = AnswerLog(path, "shop", ServeSettings(), person_count=9, run=path.parent.parent.name)
    book.count_answers([f"person {number}".encode()], None)
    book.close()


# By the pattern of each kind: a file's name, and what counts in it.
COUNTING: Mapping[str, tuple[str, Callable[[Path, int], None]]] = {
    "ledger-*.jsonl": ("ledger-shop.jsonl", count_release),
    "answers-*.jsonl": ("answers-shop.jsonl", count_release),
    "audits-*.jsonl": ("audits-shop.jsonl", count_line),
    "refused-*.jsonl": ("refused-shop.jsonl", count_line),
    "circles-*.jsonl": ("circles-shop.jsonl", count_line),
    "labels-*.log": ("labels-shop.log", count_stage),
    "answered.sqlite": ("answered.sqlite", count_answer),
}


def open_log(folder: Path) -> AuditLog:
    identity = PartyFolder(folder).load_identity()
    counters = open_counters(folder, "shop")
    return AuditLog(
        folder / "audit.log", "shop", identity, {"bank": bytes(32)}, FakeMeter(), counters=counters
    )


def run_session(folder: Path, pattern: str, *numbers: int) -> None:
    """One session of a party that counts so often, as far as a checkpoint."""
    log = open_log(folder)
    name, count = COUNTING[pattern]
    for number in numbers:
        count(folder / name, number)
        log.sync()
    log.close()


@cache
def prepare_folder(pattern: str, run: str) -> Path:
    """Make a party's folder of a session that counted three times; it is copied, never used."""
    folder = Path(tempfile.mkdtemp(prefix="counters-")) / run / "shop"
    atexit.register(shutil.rmtree, folder.parent.parent)
    make_private(folder)
    run_session(folder, pattern, 1, 2, 3)
    return folder


def begun(folder: Path, pattern: str) -> Path:
    return shutil.copytree(prepare_folder(pattern, folder.name), folder / "shop")


def take_away(folder: Path, other: Path, name: str) -> None:
    (folder / name).unlink()


def lower(folder: Path, other: Path, name: str) -> None:
    """Put the copy back that was made after the first of three."""
    shutil.copy(folder.parent / "earlier" / name, folder / name)


def exchange(folder: Path, other: Path, name: str) -> None:
    shutil.copy(other / name, folder / name)


def spoil(folder: Path, other: Path, name: str) -> None:
    (folder / name).write_bytes(b"\x00garbage\xff\n" * 9)


def truncate(folder: Path, other: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])


def empty(folder: Path, other: Path, name: str) -> None:
    (folder / name).write_bytes(b"")


def link(folder: Path, other: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "moved")
    (folder / name).symlink_to(folder.parent / "moved")


def stand_in(folder: Path, other: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


HARMS = [take_away, lower, exchange, spoil, truncate, empty, link, stand_in]


@pytest.fixture
def harmed(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """A party's folder whose counter was harmed; the counter's pattern and the file's name."""
    pattern, name, harm = request.param
    folder = begun(tmp_path / "run", pattern)
    other = begun(tmp_path / "else", pattern)
    make_private(folder.parent / "earlier")
    if name != "audit.log" and harm is lower:
        run_session(folder.parent / "earlier", pattern, 1)
    if name == "audit.log" or pattern == "answered.sqlite":  # as it was after the first session
        shutil.copy(folder / name, folder.parent / "earlier" / name)
        run_session(folder, pattern, 4)
    harm(folder, other, name)
    return folder, pattern, name


CASES = [
    pytest.param((pattern, name, harm), id=f"{name}-{harm.__name__}")
    for pattern, (file, _) in COUNTING.items()
    for harm in HARMS
    for name in ([file, "audit.log"] if pattern == "answers-*.jsonl" else [file])
]


def test_every_kind_of_counter_is_walked() -> None:
    assert [kind.file_pattern for kind in COUNTERS] == [*COUNTING]
    kinds = {pattern for pattern in COUNTING if pattern != "answered.sqlite"}
    from secure_apfed.runs import folder

    assert set(folder._LOG_PATTERNS) == kinds


@pytest.mark.parametrize("pattern", COUNTING)
def test_a_counter_goes_on_over_sessions(pattern: str, tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", pattern)
    run_session(folder, pattern, 4, 5)
    summary = verify_log(folder)
    name = COUNTING[pattern][0]
    assert summary.counters[name].number == 5
    assert summary.has_final_signature
    assert not summary.restarts


@pytest.mark.sampled(every=2)
@pytest.mark.filterwarnings("ignore:.*its last line was torn")
@pytest.mark.parametrize("harmed", CASES, indirect=True)
def test_a_counter_that_is_not_as_noted_is_refused_until_it_is_restarted_by_name(
    harmed: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pattern, name = harmed
    with pytest.raises(CheckpointError, match=f"{name} .*audit-log restart-counter") as refused:
        open_counters(folder, "shop")
    command = str(refused.value).split("run: secure-apfed ")[1].replace("'", "").split(" ")
    before = {path.name for path in folder.iterdir()}
    assert execute(command) == 0, "the advice works as it stands"
    assert name in capsys.readouterr().err
    counted = verify_log(folder)
    assert counted.has_final_signature
    assert [restart.counter for restart in counted.restarts] == [name]
    assert counted.restarts[0].noted > counted.restarts[0].number
    aside = {path.name for path in folder.iterdir()} - before - {".lock"}
    assert all(new.startswith(f"{name}.aside-") or new == name for new in aside)
    run_session(folder, pattern, 7)
    assert verify_log(folder).counters[COUNTING[pattern][0]].number >= 1
    with pytest.raises(ConfigError, match="nothing to restart"):
        raise_of(command)


def raise_of(command: list[str]) -> None:
    from secure_apfed.organisations.counters import restart_and_log

    restart_and_log(Path(command[2]), command[3], party=command[5])


def test_an_older_copy_goes_on_from_what_it_holds(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "answered.sqlite")
    shutil.copy(folder / "answered.sqlite", tmp_path / "copy")
    run_session(folder, "answered.sqlite", 4)
    shutil.copy(tmp_path / "copy", folder / "answered.sqlite")
    command = ["audit-log", "restart-counter", str(folder), "answered.sqlite", "--party", "shop"]
    assert execute(command) == 0
    (restart,) = verify_log(folder).restarts
    assert (restart.why, restart.noted, restart.number) == ("lower", 4, 3)
    limits = ServeSettings(a_person=1)
    book = AnswerLog(folder / "answered.sqlite", "shop", limits, person_count=9, run="run")
    assert book.list_exhausted_people([b"person 3", b"person 4"], None) == [0]
    book.close()


def test_restarting_one_counter_leaves_the_others_refused(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "answers-*.jsonl")
    run_session(folder, "ledger-*.jsonl", 1)
    for name in ("answers-shop.jsonl", "ledger-shop.jsonl"):
        (folder / name).unlink()
    command = ["audit-log", "restart-counter", str(folder), "ledger-shop.jsonl", "--party", "shop"]
    assert execute(command) == 0
    with pytest.raises(CheckpointError, match=r"answers-shop\.jsonl back: it is missing"):
        open_counters(folder, "shop")


def test_the_audit_log_restarted_knows_still_what_others_counted(tmp_path: Path) -> None:
    """Its second record, `counters.json`, holds all counters."""
    folder = begun(tmp_path / "run", "answers-*.jsonl")
    (folder / "audit.log").unlink()
    (folder / "answers-shop.jsonl").unlink()
    command = ["audit-log", "restart-counter", str(folder), "audit.log", "--party", "shop"]
    assert execute(command) == 0
    with pytest.raises(CheckpointError, match=r"answers-shop\.jsonl back: it is missing"):
        open_counters(folder, "shop")


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[", b'{"party":"eve"}', b"\xff" * 99])
def test_without_its_second_record_the_audit_log_is_not_believed(
    content: bytes | None, tmp_path: Path
) -> None:
    folder = begun(tmp_path / "run", "answers-*.jsonl")
    (folder / COUNTER_CHECKPOINT).unlink()
    if content is not None:
        (folder / COUNTER_CHECKPOINT).write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"audit\.log back: it cannot be relied on .*counters\.json"
    ):
        open_counters(folder, "shop")


def test_a_folder_of_nobody_begins(tmp_path: Path) -> None:
    assert open_counters(tmp_path, "shop").nonzero_counters == frozenset()
    (tmp_path / "audit.log").touch()  # as a process leaves it that is killed there
    assert open_counters(tmp_path, "shop").nonzero_counters == frozenset()


def test_nothing_is_sent_before_the_log_holds_what_was_counted_for_it(tmp_path: Path) -> None:
    make_private(tmp_path / "shop")
    log = open_log(tmp_path / "shop")
    folder = tmp_path / "shop"
    count_release(folder / "answers-shop.jsonl", 1)
    log._log_counters(is_before_checkpoint=False)
    lines = [json.loads(line) for line in (folder / "audit.log").read_bytes().splitlines()]
    assert (lines[-1]["event"], lines[-1]["number"]) == ("counted", 1)
    (folder / "answers-shop.jsonl").unlink()
    with pytest.raises(CheckpointError, match="is gone, and this session counted in it"):
        log._log_counters(is_before_checkpoint=False)
    with pytest.raises(CheckpointError, match="is gone"):
        log.close()


def test_answers_to_labels_count_once_a_checkpoint_holds_them(tmp_path: Path) -> None:
    """A start that was broken off before it draws them again, and nobody has seen the first."""
    make_private(tmp_path / "shop")
    log = open_log(tmp_path / "shop")
    folder = tmp_path / "shop"
    count_stage(folder / "labels-shop.log", 1)
    log.close()
    (folder / "labels-shop.log").unlink()
    log = open_log(folder)
    count_stage(folder / "labels-shop.log", 1)
    log.sync()
    log.close()
    with (
        pytest.raises(CheckpointError, match=r"labels-shop\.log counts what left"),
        PartyFolder(folder).lock_for_run(
            resume=False, list_nonzero_counters=lambda: {"labels-shop.log"}
        ),
    ):
        pass
    assert (folder / "labels-shop.log").exists()


@pytest.mark.parametrize("name", ["ledger", "../ledger-a.jsonl", "joint.safetensors", ""])
def test_what_is_no_counter_is_not_restarted(name: str, tmp_path: Path) -> None:
    make_private(tmp_path / "shop")
    with pytest.raises(ConfigError, match="is no counter"):
        raise_of(["", "", str(tmp_path / "shop"), name, "", "shop"])


@pytest.mark.parametrize(("party", "run"), [("clinic", "run"), ("shop", "another")])
def test_a_book_of_another_party_or_run_is_refused(party: str, run: str, tmp_path: Path) -> None:
    AnswerLog(tmp_path / "book", "shop", ServeSettings(), person_count=9, run="run").close()
    with pytest.raises(CheckpointError, match="is the book of answers of shop"):
        AnswerLog(tmp_path / "book", party, ServeSettings(), person_count=9, run=run)


@pytest.mark.parametrize("table", ["hashed", "running", "whose"])
def test_a_book_that_lacks_a_part_is_a_sentence(table: str, tmp_path: Path) -> None:
    AnswerLog(tmp_path / "book", "shop", ServeSettings(), person_count=9).close()
    with sqlite3.connect(tmp_path / "book") as book:
        book.execute(f"DROP TABLE {table}")
        book.execute(f"CREATE TABLE {table} (something)")
    with pytest.raises(CheckpointError, match="is no book of answers"):
        AnswerLog(tmp_path / "book", "shop", ServeSettings(), person_count=9)
