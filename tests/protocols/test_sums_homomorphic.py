"""CKKS, and BFV with and without masks: who holds which key, what is sent, what a peer can try."""

import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.sums import MaskedBfvSum
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.homomorphic import HomomorphicSum
from apfed_protocols.sums.seal_cipher import SealCipher, SealContext, SealForm, open_scratch_file
from tests.contracts.sum_parties import (
    Parties,
    agreement,
    binding,
    fresh_parties,
    make,
    parties,
    random_values,
)
from tests.refusals import list_unrefused


@pytest.fixture(scope="module", params=["ckks", "bfv", "bfv + pairwise masks"])
def choice(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sum_roles(choice: str) -> Parties:
    return parties(choice)


@pytest.fixture(scope="module")
def cipher(sum_roles: Parties) -> SealCipher:
    return get_sum(sum_roles).cipher


def get_sum(played: Parties) -> HomomorphicSum:
    assert isinstance(played.sum, HomomorphicSum)
    return played.sum


def constant(played: Parties, slot: int) -> NDArray[np.int64]:
    return np.full((1, get_sum(played).packing.slots_per_vector), slot)


def test_nobody_but_the_active_can_decrypt(sum_roles: Parties, cipher: SealCipher) -> None:
    blobs = Frame.parse(
        sum_roles.contribute(random_values(3), sum_roles.next())["passive_1"], sender="passive_1"
    ).blobs
    own = vars(sum_roles.receiver)["_key_context"]
    last = get_sum(sum_roles).count_slots_sent_in_last(random_values(3)[0].size)
    decrypt = partial(cipher.decrypt, sender="passive_1", last_slots=last)
    assert np.abs(decrypt(own, blobs, 1)).max() > 1000
    contexts = [vars(role)["_key_context"] for role in sum_roles.contributors.values()]
    assert [context.decryptor for context in contexts] == [None] * 3
    cases = [("SEAL cannot decrypt", context, blobs, 1) for context in contexts]
    assert list_unrefused(RemoteProtocolError, decrypt, cases) == []


def test_the_aggregator_holds_no_key_of_any_kind(sum_roles: Parties) -> None:
    assert not any(isinstance(held, SealContext) for held in vars(sum_roles.aggregator).values())
    assert set(vars(sum_roles.aggregator)) == {"_add_frames", "_frames", "_setup", "_is_set_up"}


def test_setup_sends_the_public_key_to_passives_only(choice: str) -> None:
    outgoing = make(choice, agreement()).make_receiver().start()
    sizes = {message.receiver: len(message.body) for message in outgoing}
    assert sizes.pop("aggregator") < 128
    assert set(sizes) == {"passive_1", "passive_2", "passive_3"}
    assert all(size > 30_000 for size in sizes.values())


def test_only_residues_cross_the_wire(sum_roles: Parties, cipher: SealCipher) -> None:
    """No header, parameter or compression of SEAL's: their sizes are known before they come."""
    contributions = sum_roles.contribute(random_values(3, (100, 50)), sum_roles.next())
    frames = (*contributions.values(), sum_roles.aggregator.combine(contributions))
    blobs = [Frame.parse(frame, sender="peer").blobs for frame in frames]
    assert {len(own) for own in blobs} == {get_sum(sum_roles).packing.count_vectors(5000)}
    last = get_sum(sum_roles).count_slots_sent_in_last(5000)
    counts = [cipher.residues.count] * (len(blobs[0]) - 1)
    counts.append(cipher.residues.count if last is None else cipher.degree + last)
    for own in blobs:
        for blob, count in zip(own, counts, strict=True):
            assert cipher.residues.parse(blob, sender="peer", count=count).size == count
    assert cipher.residues.width == (8 if sum_roles.sum.name == "ckks" else 7)


def test_another_format_of_seal_is_our_own_fault(cipher: SealCipher) -> None:
    with open_scratch_file() as scratch:
        blob = scratch.save(cipher.make_key_pair().public_key)
    assert len(SealForm.decompress_object(blob)) > 32768
    said = r"does not serialise as SEAL 4\.1"
    cases = [(said, b"XX" + blob[2:]), (said, blob[:5] + b"\1" + blob[6:])]
    assert list_unrefused(LocalProtocolError, SealForm.decompress_object, cases) == []


def test_a_temporary_file_serves_where_memory_has_no_path(
    sum_roles: Parties, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    values = random_values(3, seed=5)
    usual = sum_roles.add(values)
    monkeypatch.delattr(os, "memfd_create", raising=False)
    assert np.array_equal(sum_roles.add(values), usual)
    assert capfd.readouterr() == ("", ""), "nothing is printed"


def test_roles_wait_for_their_setup(choice: str) -> None:
    fresh = make(choice, agreement())
    contributor = fresh.make_contributor("passive_1")
    aggregator = fresh.make_aggregator()
    assert not contributor.is_finished
    with pytest.raises(LocalProtocolError, match="no public key yet"):
        contributor.contribute(np.zeros((1, 1)), parties(choice).next())
    with pytest.raises(LocalProtocolError, match="no fingerprint yet"):
        aggregator.combine({})
    receiver = fresh.make_receiver()
    first, *_, last = receiver.start()
    with pytest.raises(LocalProtocolError, match="start is called once"):
        receiver.start()
    with pytest.raises(RemoteProtocolError, match="who must hold none"):
        aggregator.receive("active", first.body)
    with pytest.raises(RemoteProtocolError, match="sent 0 public keys"):
        contributor.receive("active", last.body)
    with pytest.raises(RemoteProtocolError, match=r"keys come from active|expects one from each"):
        contributor.receive("aggregator", first.body)
    contributor.receive("active", first.body)
    with pytest.raises(RemoteProtocolError, match="a second public key"):
        contributor.receive("active", first.body)


def test_an_exchanged_key_does_not_match_its_fingerprint(choice: str) -> None:
    first, second = (
        Frame.parse(next(iter(receiver.start())).body, sender="active")
        for receiver in (make(choice, agreement()).make_receiver() for _ in range(2))
    )
    swapped = replace(first, blobs=second.blobs).pack()
    with pytest.raises(RemoteProtocolError, match="does not match its fingerprint"):
        make(choice, agreement()).make_contributor("passive_1").receive("active", swapped)
    other = make(choice, agreement(bits=12)).make_contributor("passive_1")
    with pytest.raises(RemoteProtocolError, match="under another agreement"):
        other.receive("active", first.pack())


@pytest.mark.parametrize("change", ["doubled", "padding"])
def test_an_altered_sum_is_refused(change: str, choice: str, cipher: SealCipher) -> None:
    """Its frame is intact, but the ciphertexts hold a sum doubled, or values in the padding."""
    played = fresh_parties(choice)
    bound = played.next()
    body = played.aggregator.combine(played.contribute([np.ones((8, 1))] * 3, bound))
    frame = Frame.parse(body, sender="aggregator")
    if change == "doubled":
        last = get_sum(played).count_slots_sent_in_last(8)
        doubled = cipher.add_ciphertexts({"a": frame.blobs, "b": frame.blobs}, 1, last)
        altered = replace(frame, blobs=tuple(doubled))
    else:
        altered = replace(frame, rows=7)
    with pytest.raises(RemoteProtocolError, match="beyond the range"):
        played.receiver.decode(altered.pack(), altered.shape, bound)


def test_damaged_ciphertexts_are_refused(sum_roles: Parties, cipher: SealCipher) -> None:
    context = vars(sum_roles.receiver)["_key_context"]
    slots = get_sum(sum_roles).packing.slots_per_vector
    (good,) = cipher.encrypt(context, constant(sum_roles, 1))
    assert cipher.decrypt(context, [good], 1, sender="peer").size == slots
    cases = [
        ("has 0 bytes, expected", [b""]),
        *((r"has \d+ bytes, expected", [bad]) for bad in (good[:-1], good + b"!", good * 2)),
        ("beyond the modulus", [good[:-8] + b"\xff" * 8]),
    ]
    add = lambda blobs: cipher.add_ciphertexts({"p": blobs}, 1)  # noqa: E731
    assert list_unrefused(RemoteProtocolError, add, cases) == []
    decrypt = lambda blobs: cipher.decrypt(context, blobs, 1, sender="peer")  # noqa: E731
    assert list_unrefused(RemoteProtocolError, decrypt, cases) == []


def test_residues_end_below_the_modulus(cipher: SealCipher) -> None:
    residues = cipher.residues
    largest = np.full(residues.count, residues.modulus - 1, dtype=np.uint64)
    assert (residues.parse(residues.pack(largest), sender="peer") == largest).all()
    with pytest.raises(RemoteProtocolError, match="beyond the modulus"):
        residues.parse(residues.pack(largest + np.uint64(1)), sender="peer")


@pytest.mark.parametrize("passives", [2, 40])
def test_residues_add_as_seal_adds_them(
    sum_roles: Parties, cipher: SealCipher, passives: int
) -> None:
    """Many addends of 60 bits exceed a word unless each addition is reduced."""
    context = vars(sum_roles.receiver)["_key_context"]
    parts = {str(k): cipher.encrypt(context, constant(sum_roles, 1)) for k in range(passives)}
    ours = cipher.load_ciphertexts(cipher.add_ciphertexts(parts, 1), 1, sender="us")
    theirs = cipher.load_ciphertexts(parts.pop("0"), 1, sender="0")
    evaluator = vars(cipher)["_evaluator"]
    for name, blobs in parts.items():
        evaluator.add_inplace(theirs[0], cipher.load_ciphertexts(blobs, 1, sender=name)[0])
    with open_scratch_file() as scratch:
        assert scratch.save(ours[0]) == scratch.save(theirs[0])


def test_leaving_a_passive_out_shows_under_masks_and_nowhere_else(choice: str) -> None:
    played = fresh_parties(choice)
    bound = played.next()
    values = [np.full((2, 2), 0.1 * k) for k in (1, 2, 3)]
    bodies = played.contribute(values, bound)
    frames = [Frame.parse(body, sender=name) for name, body in bodies.items()]
    kept = {"passive_1": frames[0].blobs, "passive_2": frames[1].blobs}
    blobs = get_sum(played).cipher.add_ciphertexts(
        kept, 1, get_sum(played).count_slots_sent_in_last(4)
    )
    altered = vars(played.aggregator)["_frames"].pack_sum(frames, blobs)
    if played.sum.masks == "pairwise":
        with pytest.raises(RemoteProtocolError, match="lies beyond the range"):
            played.receiver.decode(altered, (2, 2), bound)
    else:
        assert played.receiver.decode(altered, (2, 2), bound) == pytest.approx(0.3, abs=1e-3)


def test_setup_needs_the_key_and_every_seed() -> None:
    described = MaskedBfvSum(agreement())
    first = described.make_contributor("passive_1")
    second = described.make_contributor("passive_2")
    first.receive("active", described.make_receiver().start()[0].body)
    assert not first.is_finished
    with pytest.raises(LocalProtocolError, match="no mask key of passive_2, passive_3 yet"):
        first.contribute(np.zeros((1, 1)), binding(0))
    messages = {out.receiver: out.body for out in second.start()}
    assert set(messages) == {"passive_1", "passive_3"}
    first.receive("passive_2", messages["passive_1"])
    with pytest.raises(RemoteProtocolError, match="expects one from each of passive_2, passive_3"):
        first.receive("passive_2", messages["passive_1"])
