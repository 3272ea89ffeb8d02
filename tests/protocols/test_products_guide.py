"""docs/votes-protocols.md as printed: the example opens what it says, the tables are true."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from apfed_protocols.products.ring import solve_products
from tests.contracts.product_parties import agreement

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "votes-protocols.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| ([\d,]+) x (\d+) \| (\d+) \| (\d+) \| (\d+) bits.*", GUIDE, re.MULTILINE)


def test_the_example_runs() -> None:
    code, _ = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("line", LINES, ids=str)
def test_the_parameters_are_those_found(line: tuple[str, ...]) -> None:
    people, labelled, degree, bits, kept = (int(number.replace(",", "")) for number in line)
    found = solve_products(agreement(3, people=people, columns=10, labelled=labelled))
    assert (found.degree, found.modulus_bits, found.kept_bits) == (degree, bits, kept)


def test_there_are_parameters_to_hold() -> None:
    assert len(LINES) == 3
