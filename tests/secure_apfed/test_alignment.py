"""Alignment: its settings, a party's history of intersections, the IDs of files, and the guide."""

import ast
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
from filelock import FileLock

from apfed_protocols import align
from apfed_protocols.conversation import Conversation, converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.ids import IdNormalisation
from apfed_protocols.psi.interface import Aligner, IntersectionAgreement
from secure_apfed.alignment import (
    IdFile,
    canonical_ids,
    check_alignment,
    make_intersection,
    max_guesses,
    records,
)
from secure_apfed.alignment.ids import make_id_rules
from secure_apfed.alignment.records import AlignmentHistory
from secure_apfed.config.file import load_config, load_config_text
from secure_apfed.data.tables import load_raw_table
from secure_apfed.errors import CheckpointError, ConfigError, DataError
from secure_apfed.planning.forecast import forecast
from secure_apfed.runs.run import run
from secure_apfed.settings.alignment import AlignmentSettings
from secure_apfed.settings.data import DataSettings
from tests.docs.pages import blocks, program_of
from tests.memory import trace_memory
from tests.secure_apfed.small_runs import interrupt_run, small_config
from tests.waiting import free_port

BLOCKS = blocks("docs/alignment.md", "python")


def ends_of(one: AlignmentSettings, other: AlignmentSettings) -> tuple[Aligner, Aligner]:
    hub = make_intersection(one, session="s").make_hub(
        "a", ["b"], canonical_ids("a", ["X", "y"], one)
    )
    own = canonical_ids("b", ["y", "x"], other)
    return hub, make_intersection(other, session="s").make_member("b", "a", own)


def test_rules_hold_in_any_order_and_are_one_for_all_parties() -> None:
    said = [("strip", "case_fold"), ("case_fold", "strip", "strip")]
    one, other = (
        AlignmentSettings.model_validate({"normalisation": rules, "threads": 2}) for rules in said
    )
    assert one.collect_terms() == other.collect_terms()
    assert make_id_rules(one) == IdNormalisation(unicode_nfc=False, case_fold=True)
    hub, member = ends_of(one, other.model_copy(update={"threads": 1}))  # each chooses for itself
    converse({"a": hub, "b": member})
    assert sorted(zip(hub.rows, member.rows, strict=True)) == [(0, 1), (1, 0)]
    hub, member = ends_of(one, AlignmentSettings())
    with pytest.raises(RemoteProtocolError, match=r"another agreement; .*normalisation"):
        converse({"a": hub, "b": member})


@pytest.mark.parametrize(
    ("alignment", "says"),
    [
        ("{minimum_rows: 9, maximum_ids: 8}", "above maximum_ids"),
        ("{protocol: edch}", r"run.yaml:4: alignment.protocol: no set .* 'edch'; there are: auto"),
        ("{protocol: vole, pairwise_overlaps: hidden}", "run.yaml:4: alignment: pairwise_overlaps"),
        ("{date_formats: ['%d%m%Y']}", r"run.yaml:4: alignment.date_formats: '%d%m%Y' must have"),
        ("{normalisation: [case_fodl]}", "did you mean 'case_fold'"),
        ("{normalisation: {case_fold: true}}", r"alignment.normalisation: expected a list"),
        ("{history: folder}", "go together: give both, or neither"),
        ("{runs_with_a_peer: 3}", "go together: give both, or neither"),
    ],
)
def test_a_run_says_where_its_alignment_is_wrong(alignment: str, says: str) -> None:
    text = f"name: run\nmethod: apfed_c\nguard: {{mechanism: none}}\nalignment: {alignment}\n"
    with pytest.raises(ConfigError, match=says):
        load_config_text(text + "data: {dataset: digits}\n", source="run.yaml")


HIDDEN = {"pairwise_overlaps": "hidden"}


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({}, "ot"),
        ({"dealer": True}, "vole"),
        ({"dealer": True, **HIDDEN}, "opprf"),
        (HIDDEN, "opprf_ot"),
        ({"protocol": "circuit", **HIDDEN}, "circuit"),
    ],
)
def test_a_run_takes_what_its_settings_allow(given: dict[str, Any], backend: Any) -> None:
    settings = AlignmentSettings.model_validate(given)
    assert settings.selected_protocol == backend
    assert settings.collect_terms() == AlignmentSettings(protocol=backend).collect_terms()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"protocol": "ot"}, "or opprf_ot or circuit_ot without one"),
        ({"protocol": "vole"}, "the active learns them with mode: all and protocol: vole"),
        ({"dealer": True, "mode": "pairwise"}, "the active learns them with mode: pairwise"),
    ],
)
def test_hidden_overlaps_need_what_hides_them(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_alignment(AlignmentSettings.model_validate(HIDDEN | given))


@pytest.mark.parametrize(
    ("protocol", "maximum", "hub", "member"),
    [
        ("ecdh", 10**7, 16 * 630_988, 16 * 630_988),
        ("ot", 10**7, 16 * 820_373, 16 * 630_988),
        ("vole", 2, 91, 2),
        ("opprf", 1000, 1408, 3 * 1388),
        ("circuit", 1000, 1408, 22 * 1408),
        ("opprf_ot", 1000, 1408, 3 * 1388),
        ("circuit_ot", 1000, 1408, 22 * 1408),
    ],
)
def test_a_size_limit_bounds_guesses(protocol: str, maximum: int, hub: int, member: int) -> None:
    guesses = max_guesses(AlignmentSettings(protocol=protocol, maximum_ids=maximum))
    assert (guesses.hub, guesses.member) == (hub, member)


def test_each_peer_has_its_own_count_and_it_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    history = AlignmentHistory(path, runs_with_a_peer=2)
    history.record_run(session="1", peers=["shop"])
    history.record_run(session="2", peers=["shop", "post"])
    again = AlignmentHistory(path, runs_with_a_peer=2)
    with pytest.raises(DataError, match=r"shop aligned 2 time\(s\) .* limit is 2; a peer that"):
        again.record_run(session="3", peers=["post", "shop"])
    again.record_run(session="3", peers=["post"])
    with pytest.raises(DataError, match="session '1' was used before"):
        history.record_run(session="1", peers=["pub"])
    with pytest.raises(DataError, match="session '1' was used before"):
        again.record_run(session="1", peers=["pub"])
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(DataError, match="at least 1, got 0"):
        AlignmentHistory(path, runs_with_a_peer=0)
    with pytest.raises(DataError, match="cannot name the file of a history: expected a name"):
        AlignmentHistory.for_party(tmp_path, "../shop", runs_with_a_peer=1)


def test_processes_of_one_party_at_once_share_one_count(tmp_path: Path) -> None:
    """Objects that were made before the others noted anything, each in a thread of its own."""
    histories = [AlignmentHistory(tmp_path / "history", runs_with_a_peer=3) for _ in range(8)]
    start = threading.Barrier(len(histories))

    def is_admitted(number: int) -> bool:
        start.wait(30)
        with suppress(DataError):
            histories[number].record_run(session=str(number), peers=["shop"])
            return True
        return False

    with ThreadPoolExecutor(len(histories)) as pool:
        assert sum(pool.map(is_admitted, range(len(histories)))) == 3
    assert len((tmp_path / "history").read_text().splitlines()) == 3


def test_a_held_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_LOCK_TIMEOUT_S", 0.1)
    history = AlignmentHistory(tmp_path / "history", runs_with_a_peer=1)
    with (
        FileLock(tmp_path / "history.lock"),
        pytest.raises(CheckpointError, match=r"another process has held .*history.lock for 0.1 s"),
    ):
        history.record_run(session="1", peers=["shop"])
    history.record_run(session="1", peers=["shop"])


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "{}", '{"session": 1, "peers": []}', '{"session": "1", "peers": "a"}']
)
def test_a_damaged_history(line: str, tmp_path: Path) -> None:
    path = tmp_path / "history"
    AlignmentHistory(path, runs_with_a_peer=1).record_run(session="1", peers=["shop"])
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(CheckpointError, match="line 2, is no run of an alignment; restore"):
        AlignmentHistory(path, runs_with_a_peer=1)


@pytest.mark.parametrize("room", [0, 10])
def test_a_full_disk_leaves_no_half_line(room: int, tmp_path: Path) -> None:
    """As a limit on the size of files has it: the system takes none or some of the line."""
    path = tmp_path / "history"
    history = AlignmentHistory(path, runs_with_a_peer=2)
    history.record_run(session="1", peers=["shop"])
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
    try:
        with pytest.raises(OSError, match=r"too large|part of a line"):
            history.record_run(session="2", peers=["shop"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    AlignmentHistory(path, runs_with_a_peer=2).record_run(session="2", peers=["shop"])


def test_an_alignment_counts_at_every_party_and_no_ids_that_are_refused(tmp_path: Path) -> None:
    settings = AlignmentSettings(history=tmp_path / "kept", runs_with_a_peer=1)
    tables = {"bank": [b"1", b"2", b"3"], "shop": [b"2", b"3"], "post": [b"3", b"2"]}

    def play(session: str) -> None:
        ends = make_intersection(settings, session=session)
        roles: dict[str, Conversation] = {
            name: ends.make_member(name, "bank", tables[name]) for name in ("shop", "post")
        }
        roles["bank"] = ends.make_hub("bank", ["shop", "post"], tables["bank"])
        converse(roles)

    with pytest.raises(LocalProtocolError, match="repeated"):
        make_intersection(settings, session="October").make_member("shop", "bank", [b"2", b"2"])
    play("October")
    with pytest.raises(DataError, match=r"bank aligned 1 time\(s\) with this party already"):
        play("November")
    noted = {path.stem: path.read_text() for path in (tmp_path / "kept").glob("*.jsonl")}
    assert {name: text.count('"peers"') for name, text in noted.items()} == dict.fromkeys(tables, 1)
    assert '["shop", "post"]' in noted["bank"]
    assert '["bank"]' in noted["post"]


def test_a_history_is_not_agreed_on(tmp_path: Path) -> None:
    kept = AlignmentSettings(history=tmp_path, runs_with_a_peer=2)
    none = AlignmentSettings()
    agreement = IntersectionAgreement(session="s")
    assert make_id_rules(none) == IdNormalisation()
    assert none.maximum_ids == agreement.maximum_ids
    assert none.minimum_rows == agreement.minimum_rows
    assert (
        make_intersection(kept, session="s").agreement
        == make_intersection(none, session="s").agreement
    )
    assert kept.for_trial_ids() == AlignmentSettings(
        protocol=kept.selected_protocol, minimum_rows=1
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
def test_runs_count_but_neither_resumed_ones_nor_forecasts(tmp_path: Path) -> None:
    histories = tmp_path / "histories"
    config = small_config(
        secure_sum={"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
        alignment={"mode": "pairwise", "history": str(histories), "runs_with_a_peer": 1},
    )
    forecast(config)
    assert not histories.exists()
    interrupt_run(config, tmp_path / "first", at_step=9)
    run(config, tmp_path / "first", resume=True)
    lines = {path.stem: len(path.read_text().splitlines()) for path in histories.glob("*.jsonl")}
    assert lines == {"active": 2, "passive-1": 1, "passive-2": 1}  # pair by pair
    with pytest.raises(DataError, match="and the limit is 1; a peer that aligns again"):
        run(config, tmp_path / "second")
    assert load_config(tmp_path / "first" / "config.yaml") == config


FRAME = pd.DataFrame({"name": ["ann ", "bob", "eve"], "year": [1990, 7, 3], "label": [*"aba"]})


def write_frame(folder: Path, ending: str) -> Path:
    """Write the frame as a file of this ending."""
    path = folder / f"own{ending}"
    FRAME.to_parquet(path) if ending == ".parquet" else FRAME.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("ending", [".csv.gz", ".csv.xz", ".parquet"])
def test_files_align_as_lists_do(ending: str, tmp_path: Path) -> None:
    file = IdFile("bank", write_frame(tmp_path, ending), "name")
    assert len(file) == 3
    found = align({"bank": file, "shop": ["eve", "joe", "ann"]}, hub="bank")
    pairs = zip(found["bank"].tolist(), found["shop"].tolist(), strict=True)
    assert sorted(pairs) == [(0, 2), (2, 0)]


@pytest.mark.parametrize("columns", ["year", ("name", "year")], ids=str)
@pytest.mark.parametrize("ending", [".csv.gz", ".csv.xz", ".parquet"])
def test_files_have_the_ids_of_own_tables(ending: str, columns: Any, tmp_path: Path) -> None:
    path = write_frame(tmp_path, ending)
    data = DataSettings.model_validate(
        {
            "dataset": "tables",
            "id_column": columns,
            "label_column": "label",
            "active": "bank",
            "parties": {"bank": {"file": str(path)}, "shop": {"file": str(path)}},
            "test_fraction": 0.4,
            "split": "at_random",
        }
    )
    read = [row for piece in IdFile("bank", path, columns).pieces() for row in piece]
    assert tuple(read) == load_raw_table(data, "bank").ids


def test_no_other_column_is_read_and_no_more_than_a_piece_is_held(tmp_path: Path) -> None:
    count = 300_000
    path = tmp_path / "own.parquet"
    pd.DataFrame({f"x{k}": np.random.default_rng(k).random(count) for k in range(10)}).assign(
        id=range(count)
    ).to_parquet(path)
    usual = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(pool := pyarrow.proxy_memory_pool(usual))
    try:
        with trace_memory() as peak:
            file = IdFile("bank", path, "id")
            assert sum(map(len, file.pieces())) == len(file) == count
            assert pool.max_memory() < 8e6  # of 26 MB in all
            assert peak() < 15e6  # all IDs take 21 MB
    finally:
        pyarrow.set_memory_pool(usual)


@pytest.mark.parametrize(
    ("ending", "content", "says"),
    [
        (".csv", "name,x\nann,1\n,2\n", "column 'name' of .* is empty in 1 rows, first in line 3;"),
        (
            ".csv",
            "id,x\nann,1\n",
            r".*own.csv must have each of the columns name once; it has id, x",
        ),
        (".csv", "", r"the columns name of .* cannot be read"),
        (".parquet", "no parquet", r"the columns name of .*own.parquet cannot be read"),
        (".csv", None, "there is no file"),
    ],
)
def test_unfit_files_of_ids(ending: str, content: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / f"own{ending}"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match=f"^bank: {says}"):
        canonical_ids("bank", IdFile("bank", path, "name"), AlignmentSettings())
    FRAME.to_parquet(tmp_path / "frame.parquet")
    with pytest.raises(DataError, match="each of the columns id once; it has name, year, label"):
        IdFile("bank", tmp_path / "frame.parquet", "id")


@pytest.mark.parametrize("block", [0, 2])  # in one process, IDs in files
def test_an_example_of_one_process_runs(block: int) -> None:
    exec(compile(BLOCKS[block], "page", "exec"), {"__name__": "page"})


def test_the_example_across_two_processes(tmp_path: Path) -> None:
    (tmp_path / "party.py").write_text(BLOCKS[1])
    place = f"127.0.0.1:{free_port()}"
    parties = [
        subprocess.Popen(
            [sys.executable, "party.py", *end, place],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for end in (("shop", "dial"), ("bank", "listen"))
    ]
    (found, complaint), (expected, other) = (each.communicate(timeout=60) for each in parties)
    assert (complaint, other) == ("", "")
    assert found == expected
    assert sorted(ast.literal_eval(found)) == ["bob", "eve"]


def test_the_example_with_links_that_resume(tmp_path: Path) -> None:
    example = program_of("docs/alignment.md", tmp_path, at=3)
    settings = AlignmentSettings(minimum_rows=1)
    bank, shop = ends_of(settings, settings)
    with Listener(("localhost", 0)) as listener:
        connects = (listener.accept, lambda: Client(listener.address))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(example.align_over, (bank, shop), ("b", "a"), connects))
    assert list(zip(bank.rows, shop.rows, strict=True)) == [(1, 0)]
