"""docs/alignment.md as printed: in one process and across two."""

import ast
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/alignment.md").read_text(encoding="utf-8"), re.DOTALL
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def start(script: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(script), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_the_example_in_one_process() -> None:
    subprocess.run([sys.executable, "-c", BLOCKS[0]], cwd=ROOT, check=True, timeout=60)


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


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_examples_are_short(block: int) -> None:
    lines = [line for line in BLOCKS[block].splitlines() if line.strip()]
    assert len(lines) <= 22
