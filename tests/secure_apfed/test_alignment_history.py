"""Counting runs with each peer, across processes."""

import doctest
import resource
import threading
from pathlib import Path

import pytest
from filelock import FileLock
from pydantic import ValidationError

import secure_apfed.alignment.records
from apfed_protocols.conversation import Conversation, converse
from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS
from secure_apfed.alignment import intersection
from secure_apfed.alignment import records as alignment_history
from secure_apfed.alignment.records import AlignmentHistory
from secure_apfed.config.file import load_config
from secure_apfed.errors import CheckpointError, DataError
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.run import run
from secure_apfed.settings.alignment import AlignmentSettings
from tests.secure_apfed.small_runs import interrupted, small_config
from tests.with_crypten import usable


def test_the_example_of_the_module_runs() -> None:
    result = doctest.testmod(secure_apfed.alignment.records, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted


def test_each_peer_has_its_own_count_and_it_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    history = AlignmentHistory(path, runs_with_a_peer=2)
    history.admit(session="1", peers=["shop"])
    history.admit(session="2", peers=["shop", "post"])
    again = AlignmentHistory(path, runs_with_a_peer=2)
    with pytest.raises(DataError, match=r"shop aligned 2 time\(s\) .* limit is 2; a peer that"):
        again.admit(session="3", peers=["post", "shop"])
    again.admit(session="3", peers=["post"])
    with pytest.raises(DataError, match=r"post aligned 2 time"):
        again.admit(session="4", peers=["post"])
    assert len(path.read_text().splitlines()) == 3
    for known in (history, again):
        with pytest.raises(DataError, match="session '1' was used before"):
            known.admit(session="1", peers=["pub"])
    with pytest.raises(DataError, match="at least 1, got 0"):
        AlignmentHistory(path, runs_with_a_peer=0)
    for given in ({"history": "folder"}, {"runs_with_a_peer": 3}):
        with pytest.raises(ValidationError, match="go together: give both, or neither"):
            AlignmentSettings.model_validate(given)


def test_processes_of_one_party_at_once_share_one_count(tmp_path: Path) -> None:
    """Objects that were made before the others noted anything, each in a thread of its own."""
    histories = [AlignmentHistory(tmp_path / "history", runs_with_a_peer=3) for _ in range(8)]
    start, admitted = threading.Barrier(len(histories)), list[int]()

    def admit(number: int) -> None:
        start.wait()
        try:
            histories[number].admit(session=str(number), peers=["shop"])
        except DataError:
            return
        admitted.append(number)

    threads = [threading.Thread(target=admit, args=(k,)) for k in range(len(histories))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(admitted) == 3
    assert len((tmp_path / "history").read_text().splitlines()) == 3


def test_a_process_that_holds_the_file_is_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alignment_history, "_PATIENCE_S", 0.1)
    history = AlignmentHistory(tmp_path / "history", runs_with_a_peer=1)
    with (
        FileLock(tmp_path / "history.lock"),
        pytest.raises(CheckpointError, match=r"another process has held .*history.lock for 0.1 s"),
    ):
        history.admit(session="1", peers=["shop"])


def test_a_name_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for party in ("../shop", "a/b", "", "nul\0"):
        with pytest.raises(DataError, match="cannot name the file of a history: expected a name"):
            AlignmentHistory.of_party(tmp_path, party, runs_with_a_peer=1)


# In an alignment


def settings_of(folder: Path, protocol: str = "ecdh", runs: int = 2) -> AlignmentSettings:
    return AlignmentSettings(protocol=protocol, history=folder, runs_with_a_peer=runs)


@pytest.mark.parametrize("protocol", usable(SET_INTERSECTIONS))
def test_an_alignment_counts_at_every_party(protocol: str, tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "histories", protocol)
    tables = {"bank": [b"1", b"2", b"3"], "shop": [b"2", b"3"], "post": [b"3", b"2"]}

    def play(session: str) -> None:
        ends = intersection(settings, session=session, dealer="dealer")
        roles: dict[str, Conversation] = {
            name: ends.member(name, "bank", tables[name]) for name in ("shop", "post")
        }
        roles["bank"] = ends.hub("bank", ["shop", "post"], tables["bank"])
        if ends.needs_dealer:
            roles["dealer"] = ends.dealer("bank", ["shop", "post"])
        converse(roles)

    play("October")
    play("November")
    with pytest.raises(DataError, match=r"bank aligned 2 time\(s\) with this party already"):
        play("December")
    noted = {path.stem: path.read_text() for path in (tmp_path / "histories").glob("*.jsonl")}
    assert {name: text.count('"peers"') for name, text in noted.items()} == dict.fromkeys(tables, 2)
    assert '["shop", "post"]' in noted["bank"]
    assert '["bank"]' in noted["post"]


def test_a_party_of_its_own_uses_a_session_once(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    for attempt in range(2):
        ends = intersection(settings, session="November")
        if not attempt:
            ends.member("shop", "bank", [b"a"])
            continue
        with pytest.raises(DataError, match="session 'November' was used before"):
            ends.member("shop", "bank", [b"a"])


def test_ids_that_are_refused_do_not_count(tmp_path: Path) -> None:
    ends = intersection(settings_of(tmp_path), session="November")
    with pytest.raises(LocalProtocolError, match="repeated"):
        ends.member("shop", "bank", [b"2", b"2"])
    assert not list(tmp_path.iterdir())


def test_a_history_is_no_part_of_the_contract(tmp_path: Path) -> None:
    kept, none = settings_of(tmp_path), AlignmentSettings()
    assert kept.terms() == none.terms()
    assert {"history", "runs_with_a_peer", "threads"}.isdisjoint(kept.terms())
    assert intersection(kept, session="s").agreement == intersection(none, session="s").agreement
    assert kept.for_a_trial() == AlignmentSettings(protocol=kept.protocol, minimum_rows=1)


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_runs_count_but_neither_resumed_ones_nor_forecasts(tmp_path: Path) -> None:
    histories = tmp_path / "histories"
    config = small_config(
        secure_sum={"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
        alignment={"mode": "pairwise", "history": str(histories), "runs_with_a_peer": 1},
    )
    forecast(config)
    assert not histories.exists()
    interrupted(config, tmp_path / "first", at_step=9)
    run(config, tmp_path / "first", resume=True)
    lines = {path.stem: len(path.read_text().splitlines()) for path in histories.glob("*.jsonl")}
    assert lines == {"active": 2, "passive-1": 1, "passive-2": 1}  # pair by pair
    with pytest.raises(DataError, match="and the limit is 1; a peer that aligns again"):
        run(config, tmp_path / "second")
    assert load_config(tmp_path / "first" / "config.yaml") == config


def test_a_damaged_file_is_no_fresh_start(tmp_path: Path) -> None:
    path = tmp_path / "history"
    AlignmentHistory(path, runs_with_a_peer=1).admit(session="1", peers=["shop"])
    whole = path.read_text()
    other = ('{"session": 1, "peers": []}', '{"session": "1", "peers": "a"}')
    for line in ("", "{", "[]", "{}", *other):
        path.write_text(f"{whole}{line}\n")
        with pytest.raises(CheckpointError, match="line 2, is no run of an alignment; restore"):
            AlignmentHistory(path, runs_with_a_peer=1)


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_leaves_no_half_line(room: int, tmp_path: Path) -> None:
    """As a limit on the size of files has it: the system takes none or some of the line."""
    path = tmp_path / "history"
    history = AlignmentHistory(path, runs_with_a_peer=2)
    history.admit(session="1", peers=["shop"])
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large|part of a line"):
            history.admit(session="2", peers=["shop"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    AlignmentHistory(path, runs_with_a_peer=2).admit(session="2", peers=["shop"])
