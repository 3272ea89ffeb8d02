"""What the library logs: nothing unless asked for, and nothing that is secret."""

import ast
import logging
import os
import secrets
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from apfed_protocols import count_common, randomness, secure_sum
from apfed_protocols.sums import masked
from secure_apfed import align_with, open_link, run_frames
from secure_apfed.organisations.local import find_free_addresses
from tests import architecture_rules
from tests.contracts.sum_parties import find_secrets

ROOT = Path(__file__).resolve().parents[2]
LOGGERS = ("secure_apfed", "apfed_protocols")
PEOPLE = 60
SECRET = b"a long secret of two parties"


class Kept(logging.Handler):
    """A handler that keeps all that a record holds, as text."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    @property
    def text(self) -> bytes:
        lines = [f"{record.getMessage()} {vars(record)!r}" for record in self.records]
        errors = [record.exc_info for record in self.records if record.exc_info]
        lines += ["".join(traceback.format_exception(*error)) for error in errors]
        return "\n".join(lines).encode()

    def loggers(self) -> set[str]:
        return {record.name for record in self.records}


@pytest.fixture
def kept() -> Iterator[Kept]:
    """All that both loggers say at DEBUG."""
    handler = Kept()
    before = {}
    for name in LOGGERS:
        logger = logging.getLogger(name)
        before[name] = logger.level
        logger.setLevel(logging.DEBUG)
        logger.addHandler(handler)
    yield handler
    for name, level in before.items():
        logging.getLogger(name).removeHandler(handler)
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> set[bytes]:
    """Every key that is drawn or derived from now on, and the beginning of every mask."""
    found: set[bytes] = set()

    def noting(function: Callable[..., bytes]) -> Callable[..., bytes]:
        def note_keys(*args: Any, **named: Any) -> bytes:
            made = function(*args, **named)
            found.update(part for part in (made, *args) if type(part) is bytes and len(part) == 32)
            return made

        return note_keys

    genuine = randomness.keystream_chunks

    def note_masks(*args: Any, **named: Any) -> Iterator[memoryview]:
        for chunk in genuine(*args, **named):
            found.add(bytes(chunk[:16]))
            yield chunk

    monkeypatch.setattr(secrets, "token_bytes", noting(secrets.token_bytes))
    monkeypatch.setattr(randomness, "derive_key", noting(randomness.derive_key))
    monkeypatch.setattr(masked, "keystream_chunks", note_masks)
    return found


def make_searchable_frames() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Make tables of two parties whose IDs, labels and cells can be searched for."""
    draw = np.random.default_rng(7)
    people = [f"planted-person-{row:03d}" for row in range(PEOPLE)]
    cells = draw.normal(4321.98765, 77.7, size=(PEOPLE, 6))
    ill = cells[:, 0] + cells[:, 4] > 2 * 4321.98765
    active = pd.DataFrame(cells[:, :3], columns=["age", "weight", "height"])
    active["id"] = people
    active["label"] = np.where(ill, "planted-label-ill", "planted-label-well")
    passive = pd.DataFrame(cells[:, 3:], columns=["sugar", "iron", "salt"])
    passive["id"] = people
    return active, passive


def spell_cells(frame: pd.DataFrame) -> set[bytes]:
    """Return every cell as text, as far as five digits tell it from others."""
    cells = frame.select_dtypes("number").to_numpy().reshape(-1)
    return {f"{value:.7g}"[:7].encode() for value in cells} | {cell.tobytes() for cell in cells}


PLANTED = {b"planted-person", b"planted-label", SECRET}


def test_nothing_is_written_unless_its_user_asks_for_it() -> None:
    script = (
        "import logging, apfed_protocols, secure_apfed\n"
        f"for name in {LOGGERS}:\n"
        "    logging.getLogger(name).critical('told')\n"
        "    logging.getLogger(name + '.part').critical('told')\n"
        "    assert logging.getLogger(name).level == logging.NOTSET\n"
        "assert not logging.getLogger().handlers\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "logging.getLogger('secure_apfed.part').info('heard')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "INFO:secure_apfed.part:heard\n"


@pytest.mark.parametrize(
    "secure_sum_settings",
    [
        {"scheme": "plain", "masks": "pairwise", "allow_single_passive": True},
        pytest.param({"scheme": "ckks", "allow_single_passive": True}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: settings["scheme"],
)
@pytest.mark.filterwarnings("ignore")  # of a small table, and of one passive
def test_a_run_logs_no_secret(
    secure_sum_settings: dict[str, Any], kept: Kept, keys: set[bytes]
) -> None:
    active, passive = make_searchable_frames()
    run_frames(
        active=active,
        passives={"clinic": passive},
        id="id",
        label="label",
        method={"name": "apfed_c"},
        data={"labelled": 20},
        train={"epochs": 2, "batch_size": 16},
        guard={"mechanism": "gaussian", "epsilon": 8.0},
        secure_sum=secure_sum_settings,
    )
    said = {"run", "secure_apfed.exchange.links", "secure_apfed.base.phases"}
    assert {name.replace("secure_apfed.runs.run", "run") for name in kept.loggers()} >= said
    assert {"secure_apfed.privacy.ledger"} <= kept.loggers()
    assert len(keys) > 10
    hidden = keys | PLANTED | spell_cells(active) | spell_cells(passive)
    assert find_secrets(hidden, kept.text) == []


def test_protocols_and_links_log_no_secret(kept: Kept, keys: set[bytes]) -> None:
    values = {name: [4321.98765, 1234.56789] for name in ("bank", "shop")}
    secure_sum("masked", values, to="clinic", clip=10_000)(values)
    people = [f"planted-person-{row}" for row in range(9)]
    count_common({"bank": people, "shop": people[3:]}, hub="bank")
    (place,) = map(str, find_free_addresses(1))

    def take_part_as(me: str, peer: str, **where: str) -> None:
        with open_link(me, peer, secret=SECRET, **where) as link:  # type: ignore[arg-type]
            align_with(peer, people, link=link)

    other = threading.Thread(target=take_part_as, args=("shop", "bank"), kwargs={"dial": place})
    other.start()
    take_part_as("bank", "shop", listen=place)
    other.join(60)
    assert {
        "apfed_protocols.conversation",
        "apfed_protocols.sums.short",
        "apfed_protocols.psi",
        "secure_apfed.exchange.resumable_link",
    } <= kept.loggers()
    assert len(keys) > 10
    numbers = {b"4321.98", b"1234.56", b"8643.97", b"2469.13"}
    assert find_secrets(keys | PLANTED | numbers, kept.text) == []


@pytest.mark.parametrize("form", [bytes.hex, repr, lambda key: key])
def test_a_secret_that_is_logged_is_found(form: Callable[[bytes], Any], kept: Kept) -> None:
    key = bytes(range(200, 232))
    logging.getLogger("apfed_protocols.planted").debug("the key is %s", form(key))
    assert find_secrets({key}, kept.text) == [key]


def test_every_logger_is_its_modules_and_every_message_a_literal() -> None:
    """So what is logged stands in the code: a format, and values that are named one by one."""
    calls = 0
    for module in architecture_rules.the_tree(ROOT).values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = ast.unparse(node.func.value)
            if owner != "_LOGGER":
                continue
            calls += 1
            message = node.args[1 if node.func.attr == "log" else 0]
            assert isinstance(message, ast.Constant), f"{module.name}:{node.lineno}"
            assert node.func.attr != "exception", f"{module.name}:{node.lineno} logs a traceback"
        source = ast.unparse(module.tree)
        if "_LOGGER." in source:
            assert "_LOGGER = logging.getLogger(__name__)" in source, module.name
    assert calls > 10
