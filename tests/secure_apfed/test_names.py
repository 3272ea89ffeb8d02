"""Names: of parties as names of files, those that other code imports, and what they take."""

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import apfed_protocols
import secure_apfed
from apfed_experiments.audit.release import bound_epsilon_by_guesses
from apfed_experiments.tradeoff import TradeOff
from apfed_protocols.noise import discrete_gaussian
from apfed_protocols.products.ring import ProductAgreement
from apfed_protocols.psi.interface import IntersectionAgreement
from apfed_protocols.svd import SvdAgreement
from secure_apfed.base.names import UPDATES, check_name, check_parties, log_file
from secure_apfed.base.seeds import derive_seed, shuffle_rows
from secure_apfed.config import Config
from secure_apfed.contract import Participant
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.exchange import Kind
from secure_apfed.privacy.accountants import ACCOUNTANTS
from secure_apfed.privacy.contributions import calibrate_noise
from secure_apfed.privacy.dp_sgd import GradientGuard
from secure_apfed.privacy.guard import FrozenGaussianGuard
from secure_apfed.privacy.noise import NoiseSource
from secure_apfed.privacy.randomised_response import LabelResponse
from tests.public_names import MOVES
from tests.secure_apfed.small_runs import small_config

BAD = [
    "",
    ".",
    "..",
    "x/../../../victim/active",
    "bank/eu",
    "a\\b",
    "-x",
    ".x",
    "a b",
    "a\n",
    "a\0b",
    "\u00e9",
    "a+updates",
    "a:b",
    "caf\u0065\u0301",
    "A" * 65,
    "\u2215",
    "a\u202e",
]
BREAST = {"dataset": "breast_cancer"}
GOOD = ["a", "Bank", "bank-updates", "passive-1", "7", "a..b", "x_1.eu", "A" * 64]
KEY = bytes(range(32))

MODULES = ("attacks", "errors", "exchange", "privacy", "psi", "sums")


def test_what_is_no_file_name_is_no_name(tmp_path: Path) -> None:
    for name in BAD:
        with pytest.raises(ValueError, match="expected a name of 1 to 64 letters"):
            check_name(name)
        with pytest.raises(ConfigError, match=r"no file of .* can be named so"):
            log_file(tmp_path, "ledger", name + UPDATES, "jsonl")
    files = []
    for name in GOOD:
        assert check_name(name) == name
        files.append(log_file(tmp_path, "ledger", name, "jsonl"))
        files[-1].write_text("")
    assert set(tmp_path.iterdir()) == set(files)
    parties = ["bank", "bank-updates", "bank.updates", "updates"]
    keys = [key for party in parties for key in (party, party + UPDATES)]
    shared = {log_file(tmp_path, "ledger", key, "jsonl").name.casefold() for key in keys}
    assert len(shared) == len(keys)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a", "a"], "differ in capitals at most"),
        (["Bank", "shop", "bank"], "'Bank' and 'bank' differ in capitals at most"),
        (["Aggregator"], "cannot be called 'Aggregator'"),
        (["dealer"], "cannot be called 'dealer'"),
        (["default"], "cannot be called 'default'"),
        (["a", "b/c"], "got 'b/c'"),
    ],
)
def test_parties_of_a_run_are_told_apart(given: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parties(given)


def tables(*parties: str, active: str = "bank") -> Config:
    files = {party: {"file": "x.csv"} for party in parties}
    return small_config(data={"dataset": "tables", "parties": files, "active": active})


def participant(name: str, role: str = "passive") -> Participant:
    keys = {"identity": "cd" * 32, "public_key": "ab" * 32}
    return Participant.model_validate({"name": name, "role": role, **keys})


@pytest.mark.parametrize("name", BAD, ids=ascii)
@pytest.mark.parametrize(
    "make",
    [
        lambda name: small_config(name=name * 4 if len(name) == 65 else name),
        lambda name: tables("bank", name),
        lambda name: tables("shop", name, active=name),
        lambda name: small_config(passives={name: {}}),
        lambda name: small_config(data={**BREAST, "columns": {"active": [1], name: [2]}}),
        participant,
        lambda name: TradeOff(name=name, base="x", defences=({"name": "x", "undefended": True},)),  # type: ignore[arg-type]  # as a file gives them
    ],
)
def test_every_setting_that_names_a_party_or_run_keeps_the_rule(name: str, make: Any) -> None:
    with pytest.raises(ValidationError):
        make(name)


def test_tables_keep_the_rule_too() -> None:
    data = load_data(small_config().data, seed=0)
    passive = data.passives[0]
    object.__setattr__(passive, "name", "../x")
    with pytest.raises(DataError, match=r"got '\.\./x'"):
        replace(data, passives=data.passives)


def test_every_name_has_a_home_and_an_unknown_one_is_an_attribute_error() -> None:
    for module in (secure_apfed, *(import_module(f"secure_apfed.{name}") for name in MODULES)):
        assert set(dir(module)) >= set(module.__all__)
        assert all(getattr(module, name) is not None for name in module.__all__)
        with pytest.raises(AttributeError, match=r"has no (attribute )?'Nothing'"):
            module.Nothing  # noqa: B018  # the access is what is tested
    assert set(dir(secure_apfed)) == set(secure_apfed.__all__)


def test_the_everyday_names_are_thirty_and_six_modules() -> None:
    values = {name: getattr(secure_apfed, name) for name in secure_apfed.__all__}
    modules = {name for name, value in values.items() if isinstance(value, ModuleType)}
    assert modules == set(MODULES)
    assert len(values.keys() - modules - {"__version__"}) == 30


def test_every_name_of_the_protocols_is_given_here_or_one_dot_further() -> None:
    given = {*secure_apfed.__all__}.union(
        *(import_module(f"secure_apfed.{name}").__all__ for name in MODULES)
    )
    assert {*apfed_protocols.__all__} - given == set()


def test_the_names_that_moved_are_listed() -> None:
    moved = {
        (name, module.rpartition(".")[2])
        for module, names in secure_apfed._MOVED.items()
        for name in names
    }
    assert moved == set(MOVES)
    assert not {name for name, _ in MOVES} & {*secure_apfed.__all__}


def test_a_name_that_moved_warns_once_and_is_the_same() -> None:
    """In a process of its own, in which nobody has asked for it before."""
    lines = [
        line
        for name, module in MOVES
        for line in (
            f"from secure_apfed import {name} as old",
            f"from secure_apfed import {name} as again",
            f"from secure_apfed.{module} import {name} as new",
            "assert old is again is new",
        )
    ]
    script = "\n".join(["import warnings", "warnings.simplefilter('always')", *lines])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warned = [line for line in done.stderr.splitlines() if "secure_apfed" in line]
    assert len(warned) == len(MOVES)
    for line, (name, module) in zip(warned, MOVES, strict=True):
        assert line.startswith("<string>:"), "the warning points at the caller"
        assert (
            f"DeprecationWarning: secure_apfed.{name} is now secure_apfed.{module}.{name};" in line
        )


def test_the_star_gives_no_name_that_moved() -> None:
    given: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec("from secure_apfed import *", given)  # a statement of users
    assert {*given} - {"__builtins__"} == {*secure_apfed.__all__}


def release_rows(guard: Any, of: Callable[[Any], Any]) -> Any:
    return guard.release(torch.ones(2, 3), step=of(3), rows=torch.arange(2)).tolist()


def charge_ledger(of: Callable[[Any], Any], log: Path) -> tuple[float, bytes]:
    ledger = secure_apfed.privacy.PrivacyLedger(
        GUARD.mechanism(), delta=1e-5, budget=None, rows=of(4), log=log
    )
    ledger.charge(step=of(3), rows=torch.arange(2), digest=b"x")
    return ledger.would_cost(of(5)), log.read_bytes()


def compute_epsilon(accountant: Any, of: Callable[[Any], Any]) -> Any:
    return accountant.get_epsilon(GUARD.mechanism(), releases=of(3), delta=1e-5)


NOISY: dict[str, Any] = {"clip": 1.0, "sigma": 2.0, "key": KEY, "noise": "reproducible_insecure"}
GUARD = secure_apfed.privacy.GaussianGuard(**NOISY)
PARTIES: dict[str, Any] = {
    "session": "s",
    "receiver": "a",
    "aggregator": "g",
    "contributors": ("p", "q"),
}


AGREEMENTS: tuple[Any, ...] = (
    secure_apfed.sums.SumAgreement(**PARTIES, clip_norm=2, bits=16, threshold=2, noise=3),
    ProductAgreement(
        **PARTIES, people=3, columns=2, labelled=2, bits=10, noise=2, security=40, candidates=2
    ),
    SvdAgreement(
        session="s",
        server="g",
        dealer="d",
        owners=("p", "q"),
        features=(2, 3),
        receiver="p",
        vectors=2,
        mask_rows=4,
        max_rows=8,
    ),
    IntersectionAgreement(session="s", minimum_rows=2, maximum_ids=10, sizes={"p": 3, "q": 4}),
)


def _digest(agreement: Any, of: Callable[[Any], Any]) -> bytes:
    """Return the digest of the same agreement with its numbers made so."""

    def convert_numbers(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: convert_numbers(one) for key, one in value.items()}
        if isinstance(value, tuple):
            return tuple(map(convert_numbers, value))
        return of(value) if type(value) is int else value

    numbers = {one.name: convert_numbers(getattr(agreement, one.name)) for one in fields(agreement)}
    again = replace(agreement, **numbers)
    return bytes(getattr(again, "blocks_sum", again).digest)


def open_sum(of: Callable[[Any], Any]) -> Any:
    sums = secure_apfed.sums.CkksSum(secure_apfed.sums.SumAgreement(**PARTIES, clip_norm=1.0))
    roles: dict[str, Any] = {name: sums.make_contributor(name) for name in ("p", "q")}
    receiver = sums.make_receiver()
    aggregator = sums.make_aggregator()
    secure_apfed.exchange.converse({"a": receiver, "g": aggregator, **roles})
    binding = secure_apfed.sums.StepBinding.from_contents("s", of(0), rows=b"r", message=b"m")
    added = {name: role.contribute(np.ones((1, 2)) / 2, binding) for name, role in roles.items()}
    total = receiver.decode(aggregator.combine(added), (of(1), of(2)), binding)
    return np.round(total, 3).tolist()


TAKERS: Mapping[str, Callable[[Callable[[Any], Any]], Any]] = {
    **{
        type(guard).__name__: partial(release_rows, guard)
        for guard in (GUARD, FrozenGaussianGuard(**NOISY), secure_apfed.privacy.NoGuard())
    },
    "gradient guard": lambda of: (
        GradientGuard(clip=1.0, noise_multiplier=1.0, key=KEY, noise="reproducible_insecure")
        .release([torch.ones(2, 3)], step=of(3), rows=torch.arange(2))
        .tolist()
    ),
    "sigma": lambda of: secure_apfed.privacy.calibrate_sigma(of(8), 1e-5, of(5), of(1)),
    **{
        f"accountant {name}": partial(compute_epsilon, accountant)
        for name, accountant in ACCOUNTANTS.items()
        if accountant.is_available()
    },
    "noise under a sum": lambda of: calibrate_noise(
        epsilon=8.0, delta=1e-5, releases=of(3), honest=of(2), sensitivity=10.0, numbers=of(4)
    ),
    "discrete noise": lambda of: discrete_gaussian(
        KEY, b"x", deviation=of(3), shape=(of(2), of(2))
    ).tolist(),
    "noise of a step": lambda of: (
        NoiseSource(KEY).draw_integers((of(2),), of(3), step=of(1), digest=b"d").tolist()
    ),
    "labels": lambda of: (
        LabelResponse(classes=of(3), epsilon=of(1))
        .randomise_labels(torch.tensor([0, 1] * 9), key=KEY)
        .tolist()
    ),
    "binding": lambda of: secure_apfed.sums.StepBinding.from_contents(
        "s", of(3), rows=b"r", message=b"m"
    ),
    "opened sum": open_sum,
    **{type(one).__name__: partial(_digest, one) for one in AGREEMENTS},
    "aligned": lambda of: {
        name: sorted(rows.tolist())  # the order is random
        for name, rows in secure_apfed.align(
            {"a": ["x", "y"], "b": ["y", "x"]},
            hub="a",
            minimum_rows=of(1),
            maximum_ids=of(5),
        ).items()
    },
    "header": lambda of: (
        secure_apfed.exchange.Envelope(
            session="s",
            step=of(3),
            kind=Kind.REQUEST,
            sender="a",
            receiver="b",
            sequence=of(1),
            payload=b"",
        ).header
    ),
    "seeds": lambda of: (
        derive_seed(of(3), "x", of(2)),
        shuffle_rows(torch.arange(5), of(3), of(1)).tolist(),
    ),
    "audit": lambda of: bound_epsilon_by_guesses(of(100), of(50), of(40), delta=1e-5, level=0.05),
    "settings": lambda of: secure_apfed.Config.model_validate(
        {
            "name": "r",
            "method": "single_view",
            "data": {"limit": of(50)},
            "seed": of(4),
            "train": {"epochs": of(2)},
            "guard": {"mechanism": "none"},
        }
    ).model_dump_json(),
}


@pytest.mark.parametrize("name", TAKERS)
def test_a_whole_number_may_be_numpys(name: str) -> None:
    """Lengths, steps and counts of somebody's loop often are; what comes of them is the same."""
    expected = TAKERS[name](int)
    assert {kind: TAKERS[name](kind) for kind in (np.int64, np.uint16)} == {
        np.int64: expected,
        np.uint16: expected,
    }


def test_a_ledger_of_numpys_numbers_reads_its_log_again(tmp_path: Path) -> None:
    assert charge_ledger(np.int64, tmp_path / "one") == charge_ledger(int, tmp_path / "other")
    charge_ledger(np.int64, tmp_path / "one")
