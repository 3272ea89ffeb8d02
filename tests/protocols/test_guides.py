"""The guides as printed: examples open what they say, the loop learns, the backend passes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apfed_protocols.errors import RemoteProtocolError
from apfed_protocols.products import SumOfProducts
from apfed_protocols.products.ring import solve_products
from apfed_protocols.sums import MaskedSum, join_sum
from tests.contracts import product_parties
from tests.contracts.sum_parties import Parties, agreement, binding, random_values
from tests.docs.pages import ROOT, blocks, program_of, text_of

# By page and place there.
SAYS = {
    ("docs/votes-protocols.md", 0): ["True"],
    ("docs/papers.md", 0): ["True"],
    ("docs/secure-sum.md", 1): ["a True", "active True", "b True"],
}


@pytest.mark.parametrize(("document", "at"), SAYS)
def test_the_example_runs_as_printed(document: str, at: int, tmp_path: Path) -> None:
    if document == "docs/papers.md":
        pytest.importorskip("scipy")  # of the extra `svd`
    script = tmp_path / "guide.py"
    script.write_text(blocks(document, "python")[at], encoding="utf-8")
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=ROOT,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.stderr == ""
    assert sorted(finished.stdout.splitlines()) == SAYS[document, at]


def test_the_loop_is_short_and_uses_nothing_of_the_trainer() -> None:
    lines = [line for line in blocks("docs/secure-sum.md", "python")[1].splitlines() if line]
    assert len(lines) <= 25
    imports = [line for line in lines if "import" in line]
    assert imports[-1] == "from apfed_protocols import secure_sum"


def list_parameters(people: int, labelled: int) -> list[int]:
    """Return a line of the page's table: the numbers of people and labels, and what is solved."""
    agreed = product_parties.agreement(3, people=people, columns=10, labelled=labelled)
    found = solve_products(agreed)
    solved = [found.degree, found.modulus_bits, found.answer_modulus_bits, found.plain_bits]
    block = SumOfProducts(agreed).get_block_people(0)
    return [people, labelled, *solved, found.smudging_bits, len(block)]


def test_the_parameters_of_products_are_those_found() -> None:
    number = r"([\d,]+)"
    cells = rf"{number} x {number} \| {number} \| {number} \| {number} bits \| {number} \| {number}"
    row = re.compile(rf"^\| {cells} \| {number} people \|$", re.MULTILINE)
    lines = row.findall(text_of("docs/votes-protocols.md"))
    assert len(lines) == 3
    printed = [[int(number.replace(",", "")) for number in line] for line in lines]
    assert printed == [list_parameters(people, labelled) for people, labelled, *_ in printed]


def test_the_printed_backend_keeps_the_contract(tmp_path: Path) -> None:
    wide = program_of("docs/extend.md", tmp_path, at=2).WideMaskedSum
    played = Parties(wide(agreement()))
    usual = Parties(wide(agreement(bits=24)))
    values = [value / 10 for value in random_values(3)]
    assert played.sum.name == "wide + pairwise masks"
    assert (
        np.abs(usual.add(values) - sum(values)).max() <= usual.sum.compute_rounding_error() + 1e-15
    )
    bound = played.next()
    told = dict.fromkeys(played.names, bound) | {"passive_2": binding(bound.step, message=1)}
    contributions = played.contribute(values, told)
    with pytest.raises(RemoteProtocolError, match="different representations"):
        played.aggregator.combine(contributions)


def test_strangers_take_no_part_in_a_setup() -> None:
    described = MaskedSum(agreement())
    with pytest.raises(RemoteProtocolError, match="'eve' takes no part in this sum and wrote to"):
        join_sum(described, "active", send=lambda to, body: None, receive=lambda: ("eve", b""))
