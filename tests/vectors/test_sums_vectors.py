"""Recorded sums decode to the same numbers for ever, and tampered ones never do."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import SECURE_SUMS
from tests.refusals import list_unrefused
from tests.vectors.recorded import (
    DECODED_LEVELS,
    RECOVERABLE,
    RECOVERED,
    RECOVERED_LEVELS,
    SEEDED,
    SHAPE,
    binding,
    combine_frames,
    fix_randomness,
    key_holder,
    make_seeded_roles,
    matrix,
    raw,
    tamper_bytes,
    text,
    vector_path,
)
from tests.with_crypten import usable

every = pytest.mark.parametrize("name", usable(SECURE_SUMS))
seeded = pytest.mark.parametrize("name", usable(SEEDED))


@pytest.fixture(autouse=True)
def _fixed_randomness() -> Iterator[None]:
    with fix_randomness():
        yield


def vector(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(vector_path(name).read_text(encoding="utf-8"))
    return content


def receiver(name: str, recorded: dict[str, Any]) -> Any:
    if name in SEEDED:
        return make_seeded_roles(name)["active"]
    return key_holder(name, raw(recorded["secret_key"]), bytes.fromhex(recorded["fingerprint"]))


@every
def test_the_recorded_sum_decodes_to_the_known_numbers_once(name: str) -> None:
    recorded = vector(name)
    active = receiver(name, recorded)
    combined = raw(recorded["sum"])
    decoded = active.decode(combined, SHAPE, binding())
    step = 1 / 32767
    if name == "plain":
        assert np.abs(decoded / step - DECODED_LEVELS).max() < 1.5
    else:
        assert np.array_equal(decoded, np.array(DECODED_LEVELS) * step)
    with pytest.raises(LocalProtocolError, match="each step is used once"):
        active.decode(combined, SHAPE, binding())
    with pytest.raises(RemoteProtocolError, match="for another message"):
        receiver(name, recorded).decode(combined, SHAPE, binding(8))


@seeded
def test_contributions_are_the_recorded_bytes(name: str) -> None:
    recorded = vector(name)
    roles = make_seeded_roles(name)
    frames = {
        party: roles[party].contribute(matrix(party), binding())
        for party in recorded["contributions"]
    }
    assert {party: text(frame) for party, frame in frames.items()} == recorded["contributions"]
    assert text(combine_frames(roles, frames, binding().digest)) == recorded["sum"]


@every
def test_a_tampered_sum_is_refused(name: str) -> None:
    recorded = vector(name)
    body = raw(recorded["sum"])
    decode = lambda altered: receiver(name, recorded).decode(altered, SHAPE, binding())  # noqa: E731
    cases = [(change["error"], tamper_bytes(body, change)) for change in recorded["tampered"]]
    assert list_unrefused(RemoteProtocolError, decode, cases) == []


def test_a_recovered_sum_is_the_recorded_bytes() -> None:
    recorded = vector("recovered")
    roles = make_seeded_roles(RECOVERABLE, **RECOVERED)
    told = recorded["contributions"]
    frames = {me: roles[me].contribute(matrix(me), binding()) for me in told}
    assert {me: text(frame) for me, frame in frames.items()} == told
    requests = roles["aggregator"].ask(frames, binding().digest)
    assert {me: text(request) for me, request in requests.items()} == recorded["requests"]
    answers = {me: roles[me].answer(request) for me, request in requests.items()}
    assert {me: text(answer) for me, answer in answers.items()} == recorded["answers"]
    total = roles["aggregator"].combine(answers, binding().digest)
    assert text(total) == recorded["sum"]
    decoded = roles["active"].decode(total, SHAPE, binding())
    assert np.array_equal(decoded, np.array(RECOVERED_LEVELS) * (1 / 32767))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_recorded_answer_with_a_false_share_gives_no_sum(which: int) -> None:
    recorded = vector("recovered")
    change = recorded["tampered"][which]
    with fix_randomness():
        roles = make_seeded_roles(RECOVERABLE, **RECOVERED)
        roles["aggregator"].ask({me: raw(told) for me, told in recorded["contributions"].items()})
    answers = {me: raw(told) for me, told in recorded["answers"].items()}
    answers["passive_2"] = tamper_bytes(answers["passive_2"], change)
    with pytest.raises(RemoteProtocolError, match=change["error"]):
        roles["aggregator"].combine(answers)
