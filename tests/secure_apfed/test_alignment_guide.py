"""docs/alignment.md as printed: in one process and across two."""

import ast
import os
import re
import subprocess
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest

from secure_apfed.alignment import canonical_ids, intersection
from secure_apfed.settings.alignment import AlignmentSettings
from tests.free_port import free_port

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/alignment.md").read_text(encoding="utf-8"), re.DOTALL
)


@pytest.mark.parametrize("block", [0, 2, 4])  # in one process, IDs in files, dealing ahead
def test_an_example_of_one_process_runs(block: int) -> None:
    exec(compile(BLOCKS[block], "page", "exec"), {"__name__": "page"})


def start(script: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def test_the_example_across_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "party.py"
    script.write_text(BLOCKS[1])
    port = str(free_port())
    bank = start(script, "bank", "shop", port)
    deadline = time.monotonic() + 60
    while True:  # the shop comes too early until the bank listens
        shop = start(script, "shop", "bank", port)
        found, complaint = shop.communicate(timeout=60)
        if "ConnectionRefusedError" not in complaint or time.monotonic() > deadline:
            break
    expected, bank_complaint = bank.communicate(timeout=60)
    assert (complaint, bank_complaint) == ("", "")
    assert found == expected
    assert sorted(ast.literal_eval(found)) == ["bob", "eve"]


def test_the_example_with_links_that_resume(tmp_path: Path) -> None:
    (tmp_path / "resuming.py").write_text(BLOCKS[3])
    place = spec_from_file_location("resuming", tmp_path / "resuming.py")
    assert place is not None
    assert place.loader is not None
    example = module_from_spec(place)
    place.loader.exec_module(example)
    settings = AlignmentSettings(protocol="ecdh")
    protocol = intersection(settings, session="s")
    tables = {"bank": ["ann", "bob", "eve"], "shop": ["eve", "joe", "bob"]}
    ids = {name: canonical_ids(name, table, settings) for name, table in tables.items()}
    bank = protocol.hub("bank", ["shop"], ids["bank"])
    shop = protocol.member("shop", "bank", ids["shop"])
    with Listener(("localhost", 0)) as listener:
        jobs = [(bank, "shop", listener.accept), (shop, "bank", lambda: Client(listener.address))]
        threads = [threading.Thread(target=example.align_over, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    found = [
        [tables[name][row] for row in role.rows] for name, role in (("bank", bank), ("shop", shop))
    ]
    assert found[0] == found[1]
    assert sorted(found[0]) == ["bob", "eve"]
