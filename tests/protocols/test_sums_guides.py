"""docs/secure-sum.md and docs/extend.md as printed: the loop learns, the backend passes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import MaskedSum, SecureSum, join_sum
from tests.contracts.sum_parties import Parties, agreement, binding, random_values
from tests.docs.pages import ROOT, blocks, program_of


def test_a_loop_of_ones_own_learns_in_four_processes(tmp_path: Path) -> None:
    script = tmp_path / "toy.py"
    script.write_text(blocks("docs/secure-sum.md", "python")[0])
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=ROOT, env={"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        timeout=100,
        check=False,
    )  # fmt: skip
    assert finished.stderr == ""
    assert sorted(finished.stdout.split("\n")) == ["", "a True", "active True", "b True"]


def test_the_loop_is_short_and_uses_nothing_of_the_trainer() -> None:
    printed = blocks("docs/secure-sum.md", "python")[0]
    lines = [line for line in printed.splitlines() if line.strip()]
    assert len(lines) <= 25
    imports = [line for line in lines if "import" in line]
    assert (
        imports[-1] == "from apfed_protocols import MaskedSum, StepBinding, SumAgreement, join_sum"
    )


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> type[SecureSum]:
    module = program_of("docs/extend.md", tmp_path_factory.mktemp("guide"), at=2)
    found: type[SecureSum] = module.WideMaskedSum
    return found


def test_the_printed_backend_keeps_the_contract(wide: type[SecureSum]) -> None:
    played, usual = Parties(wide(agreement())), Parties(wide(agreement(bits=24)))
    values = [value / 10 for value in random_values(3)]
    assert played.sum.name == "wide + pairwise masks"
    assert np.abs(usual.add(values) - sum(values)).max() <= usual.sum.rounding() + 1e-15
    bound = played.next()
    told = dict.fromkeys(played.names, bound) | {"passive_2": binding(bound.step, message=1)}
    contributions = played.contribute(values, told)
    assert len(contributions["passive_1"]) == played.sum.contribution_bytes((3, 5))
    with pytest.raises(RemoteProtocolError, match="different representations"):
        played.combiner.combine(contributions)


def test_strangers_take_no_part_in_a_setup() -> None:
    described = MaskedSum(agreement())
    with pytest.raises(RemoteProtocolError, match="'eve' takes no part in this sum and wrote to"):
        join_sum(described, "active", send=lambda to, body: None, receive=lambda: ("eve", b""))
    with pytest.raises(LocalProtocolError, match="'eve' contributes nothing"):
        join_sum(described, "eve", send=lambda to, body: None, receive=lambda: ("active", b""))
