"""No key, seed or mask is sent, shown, logged or copied, whichever sum is played."""

import copy
import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protocols.conversation import Outgoing
from protocols.errors import LocalProtocolError
from protocols.seal import RunKey, SealedLink
from protocols.sums import SECURE_SUMS
from protocols.sums.agreement import StepBinding
from protocols.sums.frame import Frame
from protocols.sums.homomorphic import HomomorphicSum
from protocols.sums.pairwise import add_keystream
from protocols.sums.roles import KeepsSecrets
from protocols.sums.seal_blobs import unpacked
from tests.contracts.sum_parties import agreement, binding, make
from tests.contracts.sum_secrets import SealKeys, alive, secrets_alive, shown_in
from tests.with_crypten import usable

SHAPE = (4, 8)
secure = pytest.mark.parametrize(
    "choice", [name for name in usable(SECURE_SUMS) if not SECURE_SUMS[name].unsafe]
)


class Overheard:
    """All roles of one sum, and every byte that any of them sends."""

    def __init__(self, choice: str) -> None:
        self.sum = make(choice, agreement())
        self.names = self.sum.agreement.contributors
        self.roles: dict[str, Any] = {
            "active": self.sum.receiver(),
            "aggregator": self.sum.combiner(),
            **{name: self.sum.contributor(name) for name in self.names},
        }
        self.messages: list[Outgoing] = []
        self.frames: list[bytes] = []
        self.secrets = secrets_alive()
        queue = [(me, out) for me, role in self.roles.items() for out in role.start()]
        while queue:
            sender, out = queue.pop(0)
            self.messages.append(out)
            self.frames.append(out.body)
            answers = self.roles[out.receiver].receive(sender, out.body)
            queue += [(out.receiver, answer) for answer in answers]

    def step(self, bound: StepBinding) -> None:
        self.secrets |= secrets_alive()
        values = np.random.default_rng(bound.step).normal(size=SHAPE)
        bodies = {name: self.roles[name].contribute(values, bound) for name in self.names}
        self.secrets |= secrets_alive()
        self.frames += bodies.values()
        if self.sum.rounds == 2:
            requests = self.roles["aggregator"].ask(bodies)
            bodies = {name: self.roles[name].answer(requests[name]) for name in requests}
            self.frames += [*requests.values(), *bodies.values()]
        self.frames.append(self.roles["aggregator"].combine(bodies))
        self.roles["active"].decode(self.frames[-1], SHAPE, bound)

    @property
    def wire(self) -> bytes:
        """All that was sent, and what SEAL compressed of it."""
        blobs = [blob for frame in self.frames for blob in Frame.parse(frame, sender="peer").blobs]
        packed = [blob for blob in blobs if blob[:2] == b"\x5e\xa1" and blob[5]]
        return b"".join([*self.frames, *map(unpacked, packed)])


def masks(secrets: set[bytes], bound: StepBinding) -> list[bytes]:
    """The first 16 bytes of each stream that a pair seed gives in this step."""
    found = []
    for seed in secrets:
        stream: NDArray[np.uint32] = np.zeros(SHAPE, dtype="<u4")
        add_keystream(stream, seed, bound.digest, sign=1)
        found.append(stream.tobytes()[:16])
    return found


@secure
def test_no_key_seed_or_mask_is_sent_shown_or_logged(
    choice: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = SealKeys(monkeypatch)
    with caplog.at_level(logging.NOTSET), warnings.catch_warnings(record=True) as warned:
        played = Overheard(choice)
        played.step(binding(1))
        played.step(binding(2))
    parts = [*played.roles.values(), played.sum, *played.messages, *warned]
    parts += [Frame.parse(frame, sender="peer") for frame in played.frames]
    parts += alive(KeepsSecrets, RunKey)
    shown = "".join([*map(repr, parts), caplog.text, *capfd.readouterr()]).encode()
    wire = played.wire
    secrets = played.secrets | keys.numbers()
    assert len(secrets) >= 4
    assert shown_in(secrets, wire + shown) == []
    for bound in (binding(1), binding(2)):
        assert not any(mask in wire for mask in masks(played.secrets, bound))
    if isinstance(played.sum, HomomorphicSum):
        context = vars(played.roles["active"])["_context"]
        assert shown_in(keys.numbers_of(context.public_key), wire), (
            "the judge reads what SEAL wrote"
        )
    else:
        assert shown_in(secrets, wire + next(iter(played.secrets)))


@secure
@pytest.mark.parametrize("spread", [pickle.dumps, copy.copy, copy.deepcopy])
def test_nothing_that_holds_a_secret_is_copied(
    choice: str, spread: Callable[[object], object]
) -> None:
    played = Overheard(choice)
    played.step(binding(1))
    holders = [role for me, role in played.roles.items() if me != "aggregator"]
    holders += alive(KeepsSecrets, RunKey, SealedLink)
    assert len(holders) > 4
    for holder in holders:
        with pytest.raises(LocalProtocolError, match=r"never (serialised|copied)"):
            spread(holder)
