"""CrypTen loads beside today's torch, leaves nothing behind if it does not, stays optional."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from apfed_protocols.crypten import INSTALL, CryptenParty, act_as_party, load_crypten
from apfed_protocols.errors import LocalProtocolError
from tests.with_crypten import installed

ROOT = Path(__file__).parents[2]

ABSENT = """
import sys
class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name={module!r})
sys.meta_path.insert(0, Nowhere())
"""
TRY = """
from apfed_protocols.crypten import load_crypten
before = set(sys.modules)
try:
    load_crypten()
except ValueError as error:
    print(type(error).__name__, error)
left = [name for name in set(sys.modules) - before if name.startswith("crypten")]
assert not left, left
"""


def run(script: str, *options: str) -> tuple[str, str]:
    finished = subprocess.run(
        [sys.executable, *options, "-W", "error", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, finished.stderr


LOADS = "from apfed_protocols.crypten import load_crypten as l; assert l() is l()"


@installed
def test_it_loads_without_a_word() -> None:
    assert run(LOADS) == ("", "")


@installed
@pytest.mark.slow
def test_it_compiles_without_a_word(tmp_path: Path) -> None:
    assert run(LOADS, "-X", f"pycache_prefix={tmp_path}") == ("", "")


@installed
def test_models_are_not_converted_and_the_error_says_so() -> None:
    with pytest.raises(LocalProtocolError, match=r"build the model from crypten\.nn"):
        load_crypten().nn.from_onnx("model")


@installed
def test_stock_crypten_works_on_after_the_shim() -> None:
    script = (
        "import os, tempfile, warnings\n"
        "from apfed_protocols.crypten import load_crypten\n"
        "crypten = load_crypten()\n"
        "os.environ.update(RANK='0', WORLD_SIZE='1', RENDEZVOUS='file://' + tempfile.mktemp())\n"
        "warnings.simplefilter('ignore')\n"
        "assert not crypten.is_initialized()\n"
        "crypten.init()\n"
        "x = crypten.cryptensor([1.0, 2.0])\n"
        "print((x * x).get_plain_text().tolist())\n"
        "crypten.uninit()\n"
    )
    assert run(script)[0] == "[1.0, 4.0]\n"


BACKENDS = """
from apfed_protocols.psi.circuit import CryptenCircuitIntersection
from apfed_protocols.psi.interface import IntersectionAgreement
from apfed_protocols.sums import CryptenSum, SumAgreement
sums = SumAgreement(
    session="s", receiver="a", aggregator="b", contributors=("c", "d"), clip_norm=1.0
)
for make, agreed in ((CryptenSum, sums),
                     (CryptenCircuitIntersection, IntersectionAgreement(session="s", dealer="d"))):
    try:
        make(agreed)
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("module", ["crypten", "omegaconf"])
def test_a_missing_module_is_named_with_the_command_by_all_that_need_it(module: str) -> None:
    said = run(ABSENT.format(module=module) + TRY + BACKENDS)[0]
    if module == "omegaconf" and "module crypten is missing" in said:
        pytest.skip("crypten is absent")
    assert said.startswith(f"LocalProtocolError the module {module} is missing")
    assert said.count(f"the optional extra `mpc`, by `{INSTALL}`") == 3


@installed
def test_an_import_that_fails_leaves_nothing_behind() -> None:
    # a torch without one of the names that CrypTen takes from it
    broken = (
        "import sys, torch\ntorch.distributed.ReduceOp = None\ndel torch.distributed.ReduceOp\n"
    )
    said = run(broken + TRY)[0]
    assert said.startswith("LocalProtocolError CrypTen does not load beside this torch")


def test_tables_and_packages_load_without_crypten_and_tables_without_torch() -> None:
    script = (
        ABSENT.format(module="crypten")
        + "import apfed_protocols.sums, apfed_protocols.psi\n"
        + "assert 'torch' not in sys.modules\nimport secure_apfed"
    )
    assert run(script) == ("", "")


@installed
def test_a_seat_is_the_threads_own() -> None:
    crypten = load_crypten()
    found: list[object] = []

    def elsewhere() -> None:
        found.append(crypten.communicator.is_initialized())

    with act_as_party(CryptenParty("here", "mine")):
        assert crypten.communicator.get() == "here"
        assert crypten.mpc.get_default_provider() == "mine"
        with act_as_party(CryptenParty("inner", "other")):
            assert crypten.communicator.get() == "inner"
        assert crypten.communicator.get() == "here"
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [False]
    assert not crypten.communicator.is_initialized()
