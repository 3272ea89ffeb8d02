"""The code of users: its types are what it gets when it runs, and wrong names are refused."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from apfed_protocols.psi import SET_INTERSECTIONS, IntersectionName
from apfed_protocols.sums import SECURE_SUMS
from apfed_protocols.sums.short import SumName, SumSession
from secure_apfed.interfaces.training_settings import SchemeName
from secure_apfed.runs.run import TRANSPORTS, RunTransport
from tests import user_code

WRONG = """
import numpy as np
from secure_apfed import Config, align, run, secure_sum, train, Active
from secure_apfed.psi import count_common
from secure_apfed.sums import MaskedSums  # wrong

add = secure_sum("mask", ["bank", "shop"], to="clinic", clip=10)  # wrong
secure_sum("masked", ["bank", "shop"], to="clinic", clip="agreed")  # wrong
align({"bank": ["ann"], "shop": ["ann"]}, hub="bank", protocol="dh")  # wrong
count_common({"bank": ["ann"], "shop": ["ann"]}, hub="bank", protocol="psi")  # wrong
run(Config.model_validate({}), None, transport="memry")  # wrong
train(Active("a", [], [], []), secure_sum="mask")  # wrong
train(Active("a", [], [], []), alignment="dh")  # wrong
train(Active("a", [], [], []), optimizer="adamax")  # wrong
text: str = add({"bank": np.ones(2), "shop": np.ones(2)})  # wrong
"""


def _lines_refused(command: list[str], folder: Path, source: str) -> tuple[set[int], str]:
    """Return the lines of a user's file that a type checker refuses, and all that it says."""
    path = folder / "code_of_a_user.py"
    path.write_text(source)
    done = subprocess.run(
        [*command, path.name], cwd=folder, capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    refused = set()
    for line in done.stdout.splitlines():
        place, colon, rest = line.strip().partition(".py:")
        if colon and "error" in rest:
            assert place.endswith(path.stem), f"an error within the library: {line}"
            refused.add(int(rest.partition(":")[0]))
    assert done.returncode == bool(refused), said
    return refused, said


CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--config-file="],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checker", CHECKERS)
def test_a_checker_finds_the_types_of_users_and_refuses_wrong_names(
    checker: str, tmp_path: Path
) -> None:
    if checker == "pyright" and shutil.which("pyright") is None:
        pytest.skip("pyright is not installed")
    source = Path(user_code.__file__).read_text("utf-8")
    refused, said = _lines_refused(CHECKERS[checker], tmp_path, source)
    assert refused == set(), said
    lines = enumerate(WRONG.splitlines(), start=1)
    wrong = {number for number, line in lines if line.endswith("# wrong")}
    assert len(wrong) == 10
    refused, said = _lines_refused(CHECKERS[checker], tmp_path, WRONG)
    assert refused == wrong, said


def test_the_types_are_what_users_get() -> None:
    array = np.ones(3)
    tensor = torch.ones(2, dtype=torch.float64)
    summed = user_code.add_arrays(array)
    assert type(summed) is np.ndarray
    assert summed.dtype == np.float64
    assert type(user_code.add_tensors(tensor)) is torch.Tensor
    tree = user_code.add_trees(tensor)
    assert (type(tree), type(tree["bias"])) == (dict, torch.Tensor)
    ((first, second),) = user_code.add_nested(tensor)
    assert type(first) is type(second) is torch.Tensor
    assert user_code.add_numbers() == [4, 6]
    assert user_code.add_by_roles(array) is array
    assert user_code.find_common("ecdh") == 3
    assert type(user_code.release_rows(torch.ones(4, 2))) is torch.Tensor


def test_the_names_that_are_types_are_those_of_the_tables() -> None:
    short: set[SumName] = {"masked", "recoverable", "masked bfv"}
    assert set(get_args(SumName)) == {*SECURE_SUMS} | short
    assert set(get_args(IntersectionName)) == {"auto", *SET_INTERSECTIONS}
    assert set(get_args(RunTransport)) == set(TRANSPORTS)
    assert all(type(user_code.make_session(name)) is SumSession for name in short)
    assert set(get_args(SchemeName)) <= {*get_args(SumName)}
