"""CrypTen loads beside today's torch, leaves nothing behind if it does not, stays optional."""

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from apfed_protocols.crypten import (
    INSTALL,
    Seat,
    add_shares,
    complete,
    draw_share,
    load_crypten,
    seated,
    sum_at_first,
    total,
)
from apfed_protocols.crypten.tensors import DealtTriples, open_shares
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi.hashing import TripleShares
from apfed_protocols.randomness import fresh_key
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
if importlib.util.find_spec("crypten") is None:
    pytest.skip("crypten is absent", allow_module_level=True)
INT64 = st.integers(-(2**63), 2**63 - 1)


def run(script: str, *options: str) -> tuple[str, str]:
    finished = subprocess.run(
        [sys.executable, *options, "-W", "error", "-c", script],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
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
    session="s", receiver="a", combiner="b", contributors=("c", "d"), clip_norm=1.0
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

    with seated(Seat("here", "mine")):
        assert crypten.communicator.get() == "here"
        assert crypten.mpc.get_default_provider() == "mine"
        with seated(Seat("inner")):
            assert crypten.communicator.get() == "inner"
            with pytest.raises(LocalProtocolError, match="adds but does not multiply"):
                crypten.mpc.get_default_provider()
        assert crypten.communicator.get() == "here"
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert found == [False]
    assert not crypten.communicator.is_initialized()


@installed
def test_a_process_has_one_seat_at_most() -> None:
    crypten = load_crypten()
    found: list[object] = []
    with seated(Seat("all"), whole_process=True):
        thread = threading.Thread(target=lambda: found.append(crypten.communicator.get()))
        thread.start()
        thread.join()
        with (
            pytest.raises(LocalProtocolError, match="CrypTen party already"),
            seated(Seat("more"), whole_process=True),
        ):
            pass
        assert crypten.communicator.get() == "all"
    assert found == ["all"]
    assert not crypten.communicator.is_initialized()


@settings(max_examples=60)
@given(st.lists(INT64, min_size=1, max_size=6), st.integers(1, 6))
def test_shares_give_back_their_numbers(numbers: list[int], parties: int) -> None:
    values = np.array(numbers, np.int64)
    drawn = [draw_share(fresh_key(), values.shape) for _ in range(parties - 1)]
    assert (total([complete(values, drawn), *drawn]) == values).all()


@settings(max_examples=60)
@given(st.lists(st.lists(INT64, min_size=3, max_size=3), min_size=1, max_size=5))
def test_crypten_adds_as_the_ring_does(numbers: list[list[int]]) -> None:
    shares = [np.array(row, np.int64).view(np.uint64) for row in numbers]
    exact = [sum(int(row[k]) for row in numbers) % 2**64 for k in range(3)]
    assert add_shares(shares).tolist() == exact
    assert [row.view(np.int64).tolist() for row in shares] == numbers, "its input is untouched"


def test_drawn_shares_are_fresh_and_uniform() -> None:
    one, other = (draw_share(fresh_key(), (100, 100)) for _ in range(2))
    assert (one != other).all()
    ones = np.bitwise_count(np.stack([one, other])).mean() / 64
    assert abs(ones - 0.5) < 0.005
    key = fresh_key()
    assert (draw_share(key, (4, 2)) == draw_share(key, (8,)).reshape(4, 2)).all()


def test_numbers_of_other_shapes_and_kinds_are_refused() -> None:
    """What is added, and who learns it, is tested in worlds of several processes."""
    world = SimpleNamespace(get_rank=lambda: 0, all_gather=lambda mark: [mark, mark + 1, mark])
    other = r"party 0 adds numbers of shape \(2, 3\), parties 1 others"
    with pytest.raises(RemoteProtocolError, match=other):
        sum_at_first(world, np.zeros((2, 3), np.int64))
    with pytest.raises(LocalProtocolError, match="takes int64 numbers, got float64; quantise"):
        sum_at_first(world, np.zeros(3))  # type: ignore[arg-type]


def test_a_dealer_deals_bits_of_equal_shapes_only() -> None:
    provider = DealtTriples(TripleShares.expand(fresh_key(), 8).take)
    with pytest.raises(LocalProtocolError, match="for equal shapes on the processor"):
        provider.generate_binary_triple((2, 3), (3, 2))
    with pytest.raises(LocalProtocolError, match="for equal shapes on the processor"):
        provider.generate_binary_triple((2,), (2,), device="cuda")
    with pytest.raises(LocalProtocolError, match="asks its provider for generate_additive_triple"):
        _ = provider.generate_additive_triple


def test_shares_are_opened_by_addition_or_exclusive_or() -> None:
    shares = [torch.tensor([5]), torch.tensor([6])]
    assert open_shares(shares, ReduceOp.SUM).tolist() == [11]
    assert open_shares(shares, ReduceOp.BXOR).tolist() == [3]
    with pytest.raises(LocalProtocolError, match="opened by SUM or BXOR"):
        open_shares(shares, ReduceOp.MAX)
