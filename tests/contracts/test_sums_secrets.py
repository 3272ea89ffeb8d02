"""No key, seed or mask is sent, shown, logged or copied, whichever sum is played."""

import copy
import gc
import inspect
import logging
import pickle
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError
from apfed_protocols.products import (
    Candidates,
    CoinToss,
    LabelValues,
    ProductContributor,
    ProductReceiver,
)
from apfed_protocols.seal import RunKey, SealedLink
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.homomorphic import HomomorphicSum
from apfed_protocols.sums.interface import StepBinding
from apfed_protocols.sums.masked import add_keystream
from apfed_protocols.sums.roles import KeepsSecrets
from tests.contracts import sum_parties
from tests.refusals import list_unrefused
from tests.with_crypten import usable_secure_sums

secure = pytest.mark.parametrize("choice", usable_secure_sums())


@pytest.fixture(autouse=True)
def _collect_garbage() -> Iterator[None]:
    """Collect what other tests left: it is no secret of these sums, and long to look through."""
    gc.freeze()
    yield
    gc.unfreeze()


def masks(secrets: set[bytes], bound: StepBinding) -> list[bytes]:
    """The first 16 bytes of each stream that a pair seed gives in this step."""
    found = []
    for seed in secrets:
        stream: NDArray[np.uint32] = np.zeros(sum_parties.OVERHEARD_SHAPE, dtype="<u4")
        add_keystream(stream, seed, bound.digest, sign=1)
        found.append(stream.tobytes()[:16])
    return found


@secure
def test_no_key_seed_or_mask_is_sent_shown_logged_or_copied(
    choice: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = sum_parties.SealKeys(monkeypatch)
    with caplog.at_level(logging.NOTSET), warnings.catch_warnings(record=True) as warned:
        played = sum_parties.Overheard(sum_parties.make(choice, sum_parties.agreement()))
        played.step(sum_parties.binding(1))
        played.step(sum_parties.binding(2))
    parts = [*played.roles.values(), played.sum, *played.messages, *warned]
    parts += [Frame.parse(frame, sender="peer") for frame in played.frames]
    parts += sum_parties.alive(KeepsSecrets, RunKey)
    shown = "".join([*map(repr, parts), caplog.text, *capfd.readouterr()]).encode()
    wire = played.wire
    secrets = played.secrets | keys.numbers()
    assert len(secrets) >= 4
    assert sum_parties.find_secrets(secrets, wire + shown) == []
    assert not any(mask in wire for mask in masks(played.secrets, sum_parties.binding(1)))
    assert not any(mask in wire for mask in masks(played.secrets, sum_parties.binding(2)))
    if isinstance(played.sum, HomomorphicSum):
        context = vars(played.roles["active"])["_key_context"]
        assert sum_parties.find_secrets(keys.numbers_of(context.public_key), wire), (
            "the judge reads what SEAL wrote"
        )
    else:
        assert sum_parties.find_secrets(secrets, wire + next(iter(played.secrets)))
    holders = [role for me, role in played.roles.items() if me != "aggregator"]
    holders += sum_parties.alive(KeepsSecrets, RunKey, SealedLink)
    assert len(holders) > 4
    cases = [(r"never (serialised|copied)", holder) for holder in holders]
    assert list_unrefused(LocalProtocolError, pickle.dumps, cases) == []
    assert list_unrefused(LocalProtocolError, copy.copy, cases) == []
    assert list_unrefused(LocalProtocolError, copy.deepcopy, cases) == []


def kinds_below(kind: type) -> set[type]:
    return {kind}.union(*map(kinds_below, kind.__subclasses__()))


def test_no_role_of_any_protocol_is_copied() -> None:
    kinds = kinds_below(KeepsSecrets)
    roles = {ProductReceiver, ProductContributor, Candidates, CoinToss, LabelValues}
    assert kinds > roles
    concrete = [kind for kind in kinds if not inspect.isabstract(kind)]
    copy_one = lambda kind: pickle.dumps(object.__new__(kind))  # noqa: E731
    cases = [("never serialised", kind) for kind in concrete]
    assert list_unrefused(LocalProtocolError, copy_one, cases) == []
