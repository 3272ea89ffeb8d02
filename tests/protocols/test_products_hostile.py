"""Whatever arrives is refused or opens as what was sent: no crash, no wrong sum, no second use."""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.products import SumOfProducts
from apfed_protocols.sums.frames import Frame, FrameKind
from tests.contracts.hostile import mutated
from tests.contracts.product_parties import ProductParties, agreement, labels, matrices

TWO_BLOCKS = {"people": 8300, "columns": 10, "labelled": 2}


def parts(played: ProductParties) -> tuple[bytes, ...]:
    return played.sum.open_request(played.receiver.request(), 2 + played.sum.products.labelled)


def test_requests_that_are_none() -> None:
    played = ProductParties(agreement(), accept=False)
    role, good = played.contributors["passive_1"], played.receiver.request()
    seed, key, *encrypted = parts(played)
    other = ProductParties(agreement(bits=15)).receiver.request()
    session = ProductParties(replace(agreement(), session="other")).receiver.request()
    setup = next(iter(played.contributors["passive_2"].start())).body
    for bad, says in {
        b"": "header",
        good[:-1]: "cut or padded",
        good + b"\0": "cut or padded",
        other: "another agreement",
        session: "another agreement",
        setup: "expected the request",
        played.sum.request((seed, key, *encrypted[:-1])): "expected 6",
        played.sum.request((seed, key, *encrypted, key)): "expected 6",
        played.sum.request((seed[:-1], key, *encrypted)): "seed of 31 bytes",
        played.sum.request((seed, key[:-1], *encrypted)): "bytes, expected",
        played.sum.request((seed, key, *encrypted[:-1], b"")): "bytes, expected",
        played.sum.request((seed, b"\xff" * len(key), *encrypted)): "beyond 2",
        played.sum.request((seed, key, *encrypted[:-1], b"\xff" * len(key))): "beyond 2",
    }.items():
        with pytest.raises(RemoteProtocolError, match=says):
            role.accept(bad)
    role.accept(good)
    with pytest.raises(RemoteProtocolError, match="second request"):
        role.accept(good)


def test_broken_keys() -> None:
    for kind in ["zeros", "ones", "constant", "repeated", "small", "uniform half"]:
        played = ProductParties(agreement(), accept=False)
        seed, key, *encrypted = parts(played)
        ring = played.sum.ring
        numbers = ring.parse(key, sender="the test")
        if kind == "uniform half":
            numbers = ring.expand(seed, b"products key")
        elif kind == "repeated":
            numbers[:, 64:] = np.tile(numbers[:, :64], numbers.shape[1] // 64 - 1)
        elif kind == "small":
            numbers[3:] = 0
        else:
            numbers[:] = {"zeros": 0, "ones": 1, "constant": 777}[kind]
        with pytest.raises(RemoteProtocolError, match="no RLWE key"):
            played.contributors["passive_1"].accept(
                played.sum.request((seed, ring.pack(numbers), *encrypted))
            )


def test_other_labels_to_other_passives_are_not_added() -> None:
    agreed = agreement()
    played, rows = ProductParties(agreed, accept=False), matrices(agreed)
    second = played.sum.receiver(1 - labels(agreed)).request()
    played.contributors["passive_1"].accept(played.receiver.request())
    played.contributors["passive_2"].accept(second)
    answers = played.answers(0, rows)
    with pytest.raises(RemoteProtocolError, match="another message"):
        played.combiner.combine(0, answers)
    # Nor would an aggregator that helps the active find anything: the masks do not cancel.
    frame = Frame.parse(answers["passive_2"], sender="passive_2")
    binding = played.sum.binding(0, bytes(32))
    alike = {
        name: replace(Frame.parse(body, sender=name), binding=binding.digest, party=place).pack()
        for place, (name, body) in enumerate(answers.items())
    }
    combined = Frame.parse(played.combiner.combine(0, alike), sender="aggregator")
    words = played.sum.parse(combined, 0, sender="aggregator")
    assert len(np.unique(words)) > 0.99 * len(words)
    assert frame.binding != binding.digest


def test_the_combiner_refuses_what_is_not_this_block_of_these_parties() -> None:
    agreed = agreement(**TWO_BLOCKS)
    played, rows = ProductParties(agreed), matrices(agreed)
    first, second = played.answers(0, rows), played.answers(1, rows)
    a, b = agreed.contributors
    cases: dict[str, dict[str, bytes]] = {
        "missing: passive_2": {a: first[a]},
        "to step 1": {a: first[a], b: second[b]},
        "other parameters": {
            a: first[a],
            b: ProductParties(replace(agreed, session="other")).answers(0, rows)[b],
        },
    }
    for says, bodies in cases.items():
        with pytest.raises(RemoteProtocolError, match=says):
            played.combiner.combine(0, bodies)
    with pytest.raises(LocalProtocolError, match="blocks of"):
        played.combiner.combine(2, first)
    with pytest.raises(RemoteProtocolError, match=r"sent block 0 .* expected block 1"):
        ProductParties(agreed).sum.combiner().combine(1, first)
    played.combiner.combine(0, first)
    with pytest.raises(RemoteProtocolError, match="replayed"):
        played.combiner.combine(0, first)


def resized(frame: bytes, change: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]) -> bytes:
    parsed = Frame.parse(frame, sender="the test")
    return replace(parsed, blobs=change(parsed.blobs)).pack()


def test_words_of_other_sizes() -> None:
    for change in [
        lambda blobs: blobs[:-1],
        lambda blobs: (*blobs, blobs[0]),
        lambda blobs: (blobs[0][:-4], *blobs[1:]),
        lambda blobs: (blobs[0] + bytes(4), *blobs[1:]),
        lambda blobs: (blobs[0] + blobs[1][:4], blobs[1][4:], *blobs[2:]),
        lambda blobs: (),
    ]:
        agreed = agreement(columns=10, people=600)
        played, rows = ProductParties(agreed), matrices(agreed)
        answers = played.answers(0, rows)
        bad = {**answers, "passive_2": resized(answers["passive_2"], change)}
        with pytest.raises(RemoteProtocolError, match=r"parts in|other sizes"):
            played.combiner.combine(0, bad)
        combined = ProductParties(agreed).sum.combiner().combine(0, answers)
        with pytest.raises(RemoteProtocolError, match=r"parts in|other sizes"):
            played.receiver.open(0, resized(combined, change))


def test_the_receiver_refuses_once_and_then_opens_nothing() -> None:
    agreed = agreement(**TWO_BLOCKS)
    played, rows = ProductParties(agreed), matrices(agreed)
    good = [played.combiner.combine(block, played.answers(block, rows)) for block in range(2)]
    with pytest.raises(RemoteProtocolError):
        played.receiver.open(0, good[1])
    assert vars(played.receiver)["_secret"] is None
    for action in (lambda: played.receiver.open(0, good[0]), played.receiver.request):
        with pytest.raises(LocalProtocolError, match="threw away what opens sums"):
            action()


def test_sums_that_were_altered() -> None:
    for which in ["contribution", "flipped word", "flipped c1", "foreign key"]:
        agreed = agreement()
        played, rows = ProductParties(agreed), matrices(agreed)
        answers = played.answers(0, rows)
        combined = played.combiner.combine(0, answers)
        frame = Frame.parse(combined, sender="aggregator")
        blob = bytearray(frame.blobs[0])
        if which == "contribution":  # of one passive alone: its masks remain
            bad = replace(
                Frame.parse(answers["passive_1"], sender="x"), kind=FrameKind.SUM, party=2
            ).pack()
        elif which == "foreign key":
            other = ProductParties(agreed)
            bad = other.combiner.combine(0, other.answers(0, rows))
        else:
            blob[2 if which == "flipped word" else -1] ^= 0x08 if which == "flipped word" else 0x80
            if which == "flipped word":
                blob[1] ^= 0x20
            bad = replace(frame, blobs=(bytes(blob),)).pack()
        if which == "flipped word":
            # 2^13 + 2^19 of 2^32: half a step of 2^14 away from any sum.
            assert played.sum.headroom.plain_bits == 18
        with pytest.raises(RemoteProtocolError):
            played.receiver.open(0, bad)


def test_mutated_frames() -> None:
    """A mutation is refused, or changes no more than words that say nothing by themselves."""
    agreed, rng = agreement(), random.Random(0)
    rows, refused = matrices(agreed), 0
    for _ in range(40):
        played = ProductParties(agreed, accept=False)
        request = mutated(rng, played.receiver.request())
        with pytest.raises(RemoteProtocolError):
            played.contributors["passive_1"].accept(request[: rng.randrange(len(request))])
        try:
            played.contributors["passive_1"].accept(request)
        except RemoteProtocolError:
            refused += 1
            played.contributors["passive_1"].accept(played.receiver.request())
        played.contributors["passive_2"].accept(played.receiver.request())
        answers = played.answers(0, rows)
        bad = {**answers, "passive_2": mutated(rng, answers["passive_2"])}
        for bodies in (bad, answers):
            try:
                combined = played.combiner.combine(0, bodies)
                opened = played.receiver.open(0, mutated(rng, combined))
            except (RemoteProtocolError, LocalProtocolError):
                refused += 1
            else:
                assert np.abs(opened).max() <= 2.1
    assert refused > 100


def test_no_bytes_repeat() -> None:
    """The same labels and rows twice: nothing but headers is alike."""
    agreed = agreement()
    rows = matrices(agreed)
    requests, answers = zip(
        *(
            (played.receiver.request(), played.answers(0, rows)["passive_1"])
            for played in (ProductParties(agreed), ProductParties(agreed))
        ),
        strict=True,
    )
    for pair in (requests, answers):
        left, right = (np.frombuffer(body, np.uint8)[300:] for body in pair)
        assert (left == right).mean() < 0.01


def test_the_aggregator_needs_no_library_and_holds_no_key() -> None:
    held = vars(SumOfProducts(agreement()).combiner())
    assert set(held) == {"_products", "_frames", "_setup"}
