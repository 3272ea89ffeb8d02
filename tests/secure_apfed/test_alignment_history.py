"""Counting runs with each peer, across processes."""

import doctest
from pathlib import Path

import pytest

import secure_apfed.alignment_history
from secure_apfed.alignment_history import AlignmentHistory
from secure_apfed.errors import CheckpointError, DataError


def test_the_example_of_the_module_runs() -> None:
    result = doctest.testmod(secure_apfed.alignment_history, optionflags=doctest.ELLIPSIS)
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


def test_a_session_is_used_once(tmp_path: Path) -> None:
    history = AlignmentHistory(tmp_path / "history", runs_with_a_peer=9)
    history.admit(session="1", peers=["shop"])
    for known in (history, AlignmentHistory(tmp_path / "history", runs_with_a_peer=9)):
        with pytest.raises(DataError, match="session '1' was used before"):
            known.admit(session="1", peers=["post"])


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="at least 1, got 0"):
        AlignmentHistory(tmp_path / "history", runs_with_a_peer=0)


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", '{"session": 1, "peers": []}', '{"session": "1", "peers": "a"}']
)
def test_a_damaged_file_is_no_fresh_start(line: str, tmp_path: Path) -> None:
    path = tmp_path / "history"
    AlignmentHistory(path, runs_with_a_peer=1).admit(session="1", peers=["shop"])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(CheckpointError, match="line 2, is no run of an alignment; restore"):
        AlignmentHistory(path, runs_with_a_peer=1)
