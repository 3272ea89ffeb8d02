"""Names reach file names: one rule, held where settings are read and where a path is made."""

import doctest
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from apfed_experiments.tradeoff import TradeOff
from secure_apfed import names
from secure_apfed.config import Config
from secure_apfed.contract import Participant
from secure_apfed.data import load_data
from secure_apfed.errors import ConfigError, DataError
from secure_apfed.names import UPDATES, check_name, check_parties, log_file
from tests.secure_apfed.small_runs import small_config

BAD = [
    "", ".", "..", "x/../../../victim/active", "bank/eu", "a\\b", "-x", ".x", "a b", "a\n", "a\0b",
    "\u00e9", "a+updates", "a:b", "caf\u0065\u0301", "A" * 65, "\u2215", "a\u202e",
]  # fmt: skip
BREAST = {"dataset": "breast_cancer"}
GOOD = ["a", "Bank", "bank-updates", "passive-1", "7", "a..b", "x_1.eu", "A" * 64]


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


def test_parties_of_a_run_are_told_apart() -> None:
    for given, message in (
        (["a", "a"], "differ in capitals at most"),
        (["Bank", "shop", "bank"], "'Bank' and 'bank' differ in capitals at most"),
        (["Aggregator"], "cannot be called 'Aggregator'"),
        (["dealer"], "cannot be called 'dealer'"),
        (["default"], "cannot be called 'default'"),
        (["a", "b/c"], "got 'b/c'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_parties(given)


def tables(*parties: str, active: str = "bank") -> Config:
    files = {party: {"file": "x.csv"} for party in parties}
    return small_config(data={"dataset": "tables", "parties": files, "active": active})


def participant(name: str, role: str = "passive") -> Participant:
    keys = {"identity": "cd" * 32, "public_key": "ab" * 32}
    return Participant.model_validate({"name": name, "role": role, **keys})


@pytest.mark.parametrize("make", [
    lambda name: small_config(name=name * 4 if len(name) == 65 else name),
    lambda name: tables("bank", name),
    lambda name: tables("shop", name, active=name),
    lambda name: small_config(passives={name: {}}),
    lambda name: small_config(data={**BREAST, "columns": {"active": [1], name: [2]}}),
    participant,
    lambda name: TradeOff(name=name, base="x", defences=({"name": "x", "undefended": True},)),  # type: ignore[arg-type]  # as a file gives them
])  # fmt: skip
def test_every_setting_that_names_a_party_or_run_keeps_the_rule(make: Any) -> None:
    for name in BAD:
        with pytest.raises(ValidationError):
            make(name)
    participant("aggregator", "aggregator")  # a role is named by its own word alone
    with pytest.raises(ValidationError, match="cannot be called 'aggregator'"):
        participant("aggregator")


def test_tables_keep_the_rule_too_and_the_example_runs() -> None:
    assert doctest.testmod(names).failed == 0
    data = load_data(small_config().data, seed=0)
    passive = data.passives[0]
    object.__setattr__(passive, "name", "../x")
    with pytest.raises(DataError, match=r"got '\.\./x'"):
        replace(data, passives=data.passives)
