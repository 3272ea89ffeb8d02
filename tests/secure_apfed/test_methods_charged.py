"""What passives say that they charged: how it travels, and what becomes of it."""

import math

import msgpack
import pytest
import torch

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.methods.charged import Charged, pack_charged, read_charged, said_of
from secure_apfed.privacy.accountants import GaussianRelease
from secure_apfed.privacy.ledger import PrivacyLedger

SAID = {"figure": "epsilon_v", "epsilon": 2.0, "delta": 1e-5, "releases": 3, "mu": 0.5}


def test_what_a_ledger_counts_arrives_and_updates_stay() -> None:
    ledger = PrivacyLedger(
        GaussianRelease(noise_multiplier=4.0),
        delta=1e-5, budget=None, rows=4, log=None, figure="epsilon_v",
    )  # fmt: skip
    for step in range(2):
        ledger.charge(step=step, rows=torch.tensor([step, 3]), digest=b"z")
    packed = pack_charged({"shop": ledger, "shop+updates": ledger}.items())
    (told,) = read_charged(packed, sender="shop")
    account = ledger.account()
    said = said_of({"shop": [told]}, among=["shop"], silent={})["shop"]
    assert said["trace"] != account["trace"]
    assert {**said, "trace": ()} == {**account, "trace": ()}
    assert told.releases == 2
    assert read_charged(pack_charged(()), sender="shop") == ()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x90" * 5000, *map(msgpack.packb, (
        None, {}, [SAID] * 3, [{**SAID, "figure": "epsilon_y"}], [{**SAID, "epsilon": -1.0}],
        [{**SAID, "epsilon": math.nan}], [{**SAID, "delta": 0.0}], [{**SAID, "releases": 2**40}],
        [{**SAID, "releases": True}], [{**SAID, "more": 1}], [{"figure": "epsilon_v"}],
    ))],
)  # fmt: skip
def test_anything_else_is_refused_by_the_senders_name(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="checkpoint: shop sent no accounts"):
        read_charged(payload, sender="shop")


def test_of_who_fell_silent_nothing_is_promised_that_it_did_not_say() -> None:
    told = Charged.model_validate(SAID)
    charged = {"bank": [told], "post": [told], "quiet": ()}
    said = said_of(charged, among=["bank", "post", "shop", "quiet"], silent={"post": 7, "shop": 2})
    assert {name: one["epsilon"] for name, one in said.items()} == {
        "bank": 2.0, "post": 2.0, "shop": math.inf,
    }  # fmt: skip
    assert [("fell silent in step" in one["trace"][-1]) for one in said.values()] == [
        False, True, True,
    ]  # fmt: skip
    assert said_of({"quiet": ()}, among=["quiet", "shop"], silent={}) == {}
