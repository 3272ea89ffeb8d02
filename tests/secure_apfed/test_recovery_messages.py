"""Whoever resumes a run reads first what to do, or that there is nothing to do, then why, once."""

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import secure_apfed
from apfed_protocols.errors import PartyLeftError
from secure_apfed.errors import CheckpointError
from secure_apfed.exchange.resumable_link import ALL_AGAIN
from secure_apfed.methods.session_sum import Aggregator
from secure_apfed.organisations import party
from secure_apfed.runs import checkpoint_store
from secure_apfed.runs.folder import PartyFolder, RunFolder, load_with_checksum
from secure_apfed.runs.run import run
from tests.secure_apfed.small_runs import small_config

ROOT = Path(secure_apfed.__file__).parent
# By file, the functions whose errors a party meets that starts, resumes or goes on.
RECOVERY = {
    "runs/folder.py": (
        "_require_resumable",
        "_make_room",
        "lock_for_run",
        "_clear_logs",
        "_make_counts_error",
        "make_no_checkpoint_error",
        "load_with_checksum",
        "keep_metrics",
    ),
    "runs/checkpoint_store.py": ("_check_content",),
    "runs/run.py": ("run_in_memory", "prepare_loop"),
    "organisations/local.py": ("_refuse_another_run",),
    "runs/training_loop.py": ("_readmit_passives",),
    "methods/session.py": ("_load_checkpoint",),
    "organisations/counters.py": ("_make_inconsistency_error", "list_changes"),
}
FIRST = re.compile(
    r"(\{\}: )?(nothing to do: |(resume|start|put|choose|restore|name|finish|remove) )"
)
ERRORS = ("CheckpointError", "PartyBackError")


def text_of(node: ast.expr) -> str:
    """Return a message as it is written, with {} for what is put in; "" of other expressions."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return ""


def messages() -> Iterator[Any]:
    for file, names in RECOVERY.items():
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if function.name not in names:
                continue
            for call in ast.walk(function):
                if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                    continue
                if call.func.id in ERRORS and call.args:
                    identity = f"{file}-{function.name}-{call.lineno}"
                    yield pytest.param(text_of(call.args[0]), id=identity)


FOUND = list(messages())


@pytest.mark.parametrize("message", FOUND)
def test_a_message_begins_with_what_to_do(message: str) -> None:
    assert FIRST.match(message) or message.startswith("{}: {} is a"), message
    assert ": " in message, "and why"


@pytest.mark.parametrize("file", RECOVERY)
def test_every_function_of_the_table_is_there(file: str) -> None:
    source = (ROOT / file).read_text("utf-8")
    assert not [name for name in RECOVERY[file] if f"def {name}(" not in source]
    assert len(FOUND) >= 18


def resume_finished_run(folder: Path) -> None:
    (folder / "result.json").write_text("{}")
    with RunFolder(folder).open_for_run(small_config(), resume=True):
        pass


def resume_run_without_checkpoint(folder: Path) -> None:
    with RunFolder(folder).open_for_run(small_config(), resume=True):
        pass


def begin_begun_run(folder: Path) -> None:
    active = folder / "parties" / "active"
    active.mkdir(parents=True)
    (active / "checkpoint-3.bin").write_bytes(b"")
    with RunFolder(folder).open_for_run(small_config(), resume=False):
        pass


def lock_ended_folder(folder: Path) -> None:
    (folder / "ended.json").write_text("{}")
    with PartyFolder(folder).lock_for_run(resume=True):
        pass


def load_damaged_checkpoint(folder: Path) -> None:
    path = folder / "checkpoint-3.bin"
    path.write_bytes(b"12")
    load_with_checksum(path)


def resume_without_folder(folder: Path) -> None:
    del folder
    run(small_config(), None, resume=True)


def load_with_other_keys(folder: Path) -> None:
    mine = {"party": "lab", "identity": b"", "keys": "1", "config": "2", "table": "3"}
    checkpoint_store._check_content(folder / "checkpoint-3.bin", {**mine, "keys": "4"}, mine)


def load_with_other_settings(folder: Path) -> None:
    mine = {"party": "lab", "identity": b"", "keys": "1", "config": "2", "table": "3"}
    checkpoint_store._check_content(folder / "checkpoint-3.bin", {**mine, "config": "4"}, mine)


@pytest.mark.parametrize(
    ("do", "first", "cause"),
    [
        (resume_finished_run, "nothing to do: ", "holds a finished run"),
        (
            resume_run_without_checkpoint,
            "start the run without --resume: ",
            "there is no checkpoint",
        ),
        (
            begin_begun_run,
            "resume the run (--resume), or choose another folder: ",
            "holds a run already",
        ),
        (lock_ended_folder, "choose another folder: ", "part of a finished run"),
        (load_damaged_checkpoint, "restore ", "truncated or altered"),
        (resume_without_folder, "name the folder of the run, ", "has no checkpoint"),
        (load_with_other_keys, "finish the run with the version that began it", "other keys"),
        (
            load_with_other_settings,
            "resume with the config.yaml of that run: ",
            "another configuration",
        ),
    ],
)
def test_what_a_person_reads(
    do: Callable[[Path], None], first: str, cause: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(CheckpointError) as told:
        do(tmp_path)
    message = str(told.value)
    assert message.startswith(first)
    assert message.count(cause) == 1


BEGAN_ANEW = f"training: bank expected sum; shop began anew; {ALL_AGAIN}"
RESTARTED = {
    "one party left": BEGAN_ANEW,
    "another tells of it": f"training: bank stopped the run: '{BEGAN_ANEW}'",
    "two left": f"{BEGAN_ANEW}; the link to clinic was broken for 30 s; {ALL_AGAIN}",
    "a party is back": "nothing to do: all go on in a new session; checkpoint: shop is back",
}


@pytest.mark.parametrize("case", RESTARTED)
def test_who_begins_again_by_itself_reads_the_cause_alone(case: str) -> None:
    cause = party._describe_cause(RESTARTED[case])
    assert ALL_AGAIN not in cause
    assert not cause.startswith("nothing to do")
    assert "shop" in cause


def test_what_to_do_after_a_break_stands_behind_a_semicolon() -> None:
    texts = {path: re.sub(r'"\s*f?"', "", path.read_text("utf-8")) for path in ROOT.rglob("*.py")}
    befores = [
        (path, before) for path, text in texts.items() for before in text.split("{ALL_AGAIN}")[:-1]
    ]
    assert befores
    assert not [path for path, before in befores if not before.endswith("; ")]


@pytest.mark.parametrize(
    ("silent_passive", "said", "unsaid"),
    [
        ("wait", "the contract says to wait for shop", "go on in a new session"),
        ("stop", "go on in a new session once shop is back", "to wait"),
    ],
)
def test_only_who_has_to_do_something_reads_what(
    silent_passive: str, said: str, unsaid: str
) -> None:
    contract = SimpleNamespace(
        predicts=False, silent_passive=silent_passive, active="bank", passives=("shop", "clinic")
    )
    end = SimpleNamespace(contract=contract, present_passives=["shop", "clinic"])
    left = PartyLeftError("training: shop left", missing_parties=("shop",), has_left=True)
    with pytest.raises(PartyLeftError, match=said) as raised:
        Aggregator._drop_silent_passives(end, left, ["shop"])  # type: ignore[arg-type]
    assert unsaid not in str(raised.value)
