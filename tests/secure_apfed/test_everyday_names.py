"""The names that other code imports from the package itself."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import secure_apfed
from apfed_experiments.audit.release import epsilon_below
from apfed_protocols.moments import MomentAgreement
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.products.ring import ProductAgreement
from apfed_protocols.psi.interface import IntersectionAgreement
from apfed_protocols.svd import SvdAgreement
from secure_apfed.exchange import Kind
from secure_apfed.privacy.accountants import ACCOUNTANTS
from secure_apfed.privacy.contributions import calibrate_noise
from secure_apfed.privacy.dp_sgd import GradientGuard
from secure_apfed.privacy.guard import FrozenGaussianGuard
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.privacy.randomised_response import LabelResponse
from secure_apfed.seeds import derive_seed, shuffled

KEY = bytes(range(32))


def test_every_name_has_a_home_and_an_unknown_one_is_an_attribute_error() -> None:
    assert set(dir(secure_apfed)) == set(secure_apfed.__all__)
    assert all(getattr(secure_apfed, name) is not None for name in secure_apfed.__all__)
    with pytest.raises(AttributeError, match="has no 'Nothing'"):
        secure_apfed.Nothing  # noqa: B018  # the access is what is tested


def test_one_part_does_not_load_the_rest() -> None:
    script = (
        "import sys, secure_apfed; secure_apfed.align; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'tenseal')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def _released(guard: Any, step: Any) -> bytes:
    released = guard.release(torch.ones(2, 3), step=step, rows=torch.arange(2))
    return bytes(released.numpy().tobytes())


def _charged(of: Callable[[Any], Any], log: Path) -> tuple[float, bytes]:
    ledger = secure_apfed.PrivacyLedger(
        GUARD.mechanism(), delta=1e-5, budget=None, rows=of(4), log=log
    )
    ledger.charge(step=of(3), rows=torch.arange(2), digest=b"x")
    return ledger.would_cost(of(5)), log.read_bytes()


def _accounted(accountant: Any, of: Callable[[Any], Any]) -> Any:
    return accountant.epsilon(GUARD.mechanism(), releases=of(3), delta=1e-5)


def _sum(of: Callable[[Any], Any]) -> bytes:
    agreement = secure_apfed.SumAgreement(
        session="s", receiver="a", combiner="g", contributors=("p", "q"), clip_norm=of(2),
        bits=of(16), threshold=of(2), noise=of(3),
    )  # fmt: skip
    binding = secure_apfed.StepBinding.of("s", of(3), rows=b"r", message=b"m")
    return agreement.digest + binding.digest


def _opened_by(of: Callable[[Any], Any]) -> Any:
    agreement = secure_apfed.SumAgreement(
        session="s", receiver="a", combiner="g", contributors=("p", "q"), clip_norm=1.0
    )
    sums = secure_apfed.CkksSum(agreement)
    roles: dict[str, Any] = {name: sums.contributor(name) for name in ("p", "q")}
    receiver, combiner = sums.receiver(), sums.combiner()
    secure_apfed.converse({"a": receiver, "g": combiner, **roles})
    binding = secure_apfed.StepBinding.of("s", of(0), rows=b"r", message=b"m")
    added = {name: role.contribute(np.ones((1, 2)) / 2, binding) for name, role in roles.items()}
    total = receiver.decode(combiner.combine(added), (of(1), of(2)), binding)
    return np.round(total, 3).tolist()


def _moment(of: Callable[[Any], Any]) -> bytes:
    return MomentAgreement(
        session="s", receiver="a", combiner="g", dealer="d", contributors=("p", "q"), people=of(3),
        features=of(2), columns=of(2), noise=of(4), bits=of(10),
    ).digest  # fmt: skip


def _product(of: Callable[[Any], Any]) -> bytes:
    return ProductAgreement(
        session="s", receiver="a", combiner="g", contributors=("p", "q"), people=of(3),
        columns=of(2), labelled=of(2), bits=of(10), noise=of(2), security=of(40), candidates=of(2),
    ).blocks_sum.digest  # fmt: skip


def _decomposition(of: Callable[[Any], Any]) -> bytes:
    return SvdAgreement(
        session="s", server="g", dealer="d", owners=("p", "q"), features=(of(2), of(3)),
        receiver="p", vectors=of(2), mask_rows=of(4), most_rows=of(8),
    ).digest  # fmt: skip


def _intersection(of: Callable[[Any], Any]) -> bytes:
    return IntersectionAgreement(
        session="s", minimum_rows=of(2), maximum_ids=of(10), sizes={"p": of(3), "q": of(4)}
    ).digest


NOISY: dict[str, Any] = {"clip": 1.0, "sigma": 2.0, "key": KEY, "noise": "reproducible_insecure"}
GUARD = secure_apfed.GaussianGuard(**NOISY)

TAKERS: Mapping[str, Callable[[Callable[[Any], Any]], Any]] = {
    "guard": lambda of: _released(GUARD, of(3)),
    "frozen guard": lambda of: _released(FrozenGaussianGuard(**NOISY), of(3)),
    "no guard": lambda of: _released(secure_apfed.NoGuard(), of(3)),
    "gradient guard": lambda of: (
        GradientGuard(clip=1.0, noise_multiplier=1.0, key=KEY, noise="reproducible_insecure")
        .release([torch.ones(2, 3)], step=of(3), rows=torch.arange(2)).tolist()
    ),
    "sigma": lambda of: secure_apfed.calibrate_sigma(of(8), 1e-5, of(5), of(1)),
    **{
        f"accountant {name}": partial(_accounted, accountant)
        for name, accountant in ACCOUNTANTS.items() if accountant.available()
    },
    "noise under a sum": lambda of: calibrate_noise(
        epsilon=8.0, delta=1e-5, releases=of(3), honest=of(2), sensitivity=10.0, numbers=of(4)
    ),
    "discrete noise": lambda of: (
        discrete_gaussian(KEY, b"x", deviation=of(3), shape=(of(2), of(2))).tolist()
    ),
    "noise of a step": lambda of: NoiseSource(KEY).integers(
        (of(2),), of(3), step=of(1), digest=b"d"
    ).tolist(),
    "labels": lambda of: LabelResponse(classes=of(3), epsilon=of(1)).answer(
        torch.tensor([0, 1] * 9), key=KEY
    ).tolist(),
    "sum": _sum,
    "opened sum": _opened_by,
    "moment": _moment,
    "product": _product,
    "decomposition": _decomposition,
    "intersection": _intersection,
    "aligned": lambda of: {
        name: sorted(rows.tolist())  # the order is random
        for name, rows in secure_apfed.align(
            {"a": ["x", "y"], "b": ["y", "x"]}, hub="a",
            minimum_rows=of(1), maximum_ids=of(5),
        ).items()
    },
    "header": lambda of: secure_apfed.Envelope(
        session="s", step=of(3), kind=Kind.REQUEST, sender="a", receiver="b", sequence=of(1),
        payload=b"",
    ).header,
    "seeds": lambda of: (
        derive_seed(of(3), "x", of(2)), shuffled(torch.arange(5), of(3), of(1)).tolist()
    ),
    "audit": lambda of: epsilon_below(of(100), of(50), of(40), delta=1e-5, level=0.05),
    "settings": lambda of: secure_apfed.Config.model_validate({
        "name": "r", "method": "single_view", "data": {"limit": of(50)}, "seed": of(4),
        "train": {"epochs": of(2)}, "guard": {"mechanism": "none"},
    }).model_dump_json(),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKERS)
def test_a_whole_number_may_be_numpys(name: str) -> None:
    """Lengths, steps and counts of somebody's loop often are; what comes of them is the same."""
    for kind in (np.int64, np.uint16):
        assert TAKERS[name](kind) == TAKERS[name](int)


def test_a_ledger_of_numpys_numbers_reads_its_log_again(tmp_path: Path) -> None:
    assert _charged(np.int64, tmp_path / "one") == _charged(int, tmp_path / "other")
    _charged(np.int64, tmp_path / "one")
