"""Whatever arrives is refused or opens as what was sent: no crash, no wrong sum, no second use."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from apfed_protocols import products
from apfed_protocols.conversation import converse
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.products import SumOfProducts, encrypt_labels
from apfed_protocols.sums.frames import Frame, FrameKind
from apfed_protocols.sums.interface import IntArray
from tests.contracts.hostile import mutate_bytes
from tests.contracts.product_parties import ProductParties, agreement, labels, matrices
from tests.refusals import list_unrefused

TWO_BLOCKS = {"people": 8300, "columns": 10, "labelled": 2}


def parts(played: ProductParties) -> tuple[bytes, ...]:
    return played.sum.parse_request(
        played.receiver.make_request(), 2 + played.sum.product_agreement.labelled
    )


def test_requests_that_are_none() -> None:
    played = ProductParties(agreement(), accept=False)
    role = played.contributors["passive_1"]
    good = played.receiver.make_request()
    seed, key, *encrypted = parts(played)
    other = ProductParties(agreement(bits=15)).receiver.make_request()
    session = ProductParties(replace(agreement(), session="other")).receiver.make_request()
    setup = next(iter(played.contributors["passive_2"].start())).body
    cases = {
        b"": "header",
        good[:-1]: "cut or padded",
        good + b"\0": "cut or padded",
        other: "another agreement",
        session: "another agreement",
        setup: "expected the request",
        played.sum.pack_request((seed, key, *encrypted[:-1])): "expected 6",
        played.sum.pack_request((seed, key, *encrypted, key)): "expected 6",
        played.sum.pack_request((seed[:-1], key, *encrypted)): "seed of 31 bytes",
        played.sum.pack_request((seed, key[:-1], *encrypted)): "bytes, expected",
        played.sum.pack_request((seed, key, *encrypted[:-1], b"")): "bytes, expected",
        played.sum.pack_request((seed, b"\xff" * len(key), *encrypted)): "beyond 2",
        played.sum.pack_request((seed, key, *encrypted[:-1], b"\xff" * len(key))): "beyond 2",
    }
    wrong = [(says, bad) for bad, says in cases.items()]
    assert list_unrefused(RemoteProtocolError, role.accept_request, wrong) == []
    role.accept_request(good)
    with pytest.raises(RemoteProtocolError, match="second request"):
        role.accept_request(good)


@pytest.mark.parametrize("kind", ["zeros", "ones", "constant", "repeated", "small", "uniform half"])
def test_broken_keys(kind: str) -> None:
    played = ProductParties(agreement(), accept=False)
    seed, key, *encrypted = parts(played)
    ring = played.sum.ring
    numbers = ring.parse_digits(key, sender="the test")
    if kind == "uniform half":
        numbers = ring.expand_seed(seed, b"products key")
    elif kind == "repeated":
        numbers[:, 64:] = np.tile(numbers[:, :64], numbers.shape[1] // 64 - 1)
    elif kind == "small":
        numbers[3:] = 0
    else:
        numbers[:] = {"zeros": 0, "ones": 1, "constant": 777}[kind]
    with pytest.raises(RemoteProtocolError, match="no RLWE key"):
        played.contributors["passive_1"].accept_request(
            played.sum.pack_request((seed, ring.pack_digits(numbers), *encrypted))
        )


def test_other_labels_to_other_passives_are_not_added() -> None:
    agreed = agreement()
    played = ProductParties(agreed, accept=False)
    rows = matrices(agreed)
    second = played.sum.make_receiver(1 - labels(agreed)).make_request()
    played.contributors["passive_1"].accept_request(played.receiver.make_request())
    played.contributors["passive_2"].accept_request(second)
    answers = played.answers(0, rows)
    with pytest.raises(RemoteProtocolError, match="another message"):
        played.aggregator.combine_block(0, answers)
    # Nor would an aggregator that helps the active find anything: the masks do not cancel.
    frame = Frame.parse(answers["passive_2"], sender="passive_2")
    binding = played.sum.make_binding(0, bytes(32))
    alike = {
        name: replace(
            Frame.parse(body, sender=name), binding=binding.digest, index_or_count=place
        ).pack()
        for place, (name, body) in enumerate(answers.items())
    }
    combined = Frame.parse(played.aggregator.combine_block(0, alike), sender="aggregator")
    words = played.sum.parse_words(combined, 0, sender="aggregator")
    assert len(np.unique(words)) > 0.99 * len(words)
    assert frame.binding != binding.digest


def test_the_aggregator_refuses_what_is_not_this_block_of_these_parties() -> None:
    agreed = agreement(**TWO_BLOCKS)
    played = ProductParties(agreed)
    rows = matrices(agreed)
    first = played.answers(0, rows)
    second = played.answers(1, rows)
    a, b = agreed.contributors
    cases: dict[str, dict[str, bytes]] = {
        "missing: passive_2": {a: first[a]},
        "to step 1": {a: first[a], b: second[b]},
        "other parameters": {
            a: first[a],
            b: ProductParties(replace(agreed, session="other")).answers(0, rows)[b],
        },
    }
    wrong = [(says, 0, bodies) for says, bodies in cases.items()]
    assert list_unrefused(RemoteProtocolError, played.aggregator.combine_block, wrong) == []
    with pytest.raises(LocalProtocolError, match="blocks of"):
        played.aggregator.combine_block(2, first)
    with pytest.raises(RemoteProtocolError, match=r"sent block 0 .* expected block 1"):
        ProductParties(agreed).sum.make_aggregator().combine_block(1, first)
    played.aggregator.combine_block(0, first)
    with pytest.raises(RemoteProtocolError, match="replayed"):
        played.aggregator.combine_block(0, first)


def change_blobs(frame: bytes, change: Callable[[tuple[bytes, ...]], tuple[bytes, ...]]) -> bytes:
    parsed = Frame.parse(frame, sender="the test")
    return replace(parsed, blobs=change(parsed.blobs)).pack()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda blobs: blobs[:-1], id="one less"),
        pytest.param(lambda blobs: (*blobs, blobs[0]), id="one more"),
        pytest.param(lambda blobs: (blobs[0][:-4], *blobs[1:]), id="a shorter first"),
        pytest.param(lambda blobs: (blobs[0] + bytes(4), *blobs[1:]), id="a longer first"),
        pytest.param(
            lambda blobs: (blobs[0] + blobs[1][:4], blobs[1][4:], *blobs[2:]), id="a moved word"
        ),
        pytest.param(lambda blobs: (), id="none"),
    ],
)
def test_words_of_other_sizes(change: Any) -> None:
    agreed = agreement(columns=10, people=600)
    played = ProductParties(agreed)
    rows = matrices(agreed)
    answers = played.answers(0, rows)
    bad = {**answers, "passive_2": change_blobs(answers["passive_2"], change)}
    with pytest.raises(RemoteProtocolError, match=r"parts in|other sizes"):
        played.aggregator.combine_block(0, bad)
    combined = ProductParties(agreed).sum.make_aggregator().combine_block(0, answers)
    with pytest.raises(RemoteProtocolError, match=r"parts in|other sizes"):
        played.receiver.open_block(0, change_blobs(combined, change))


def test_the_receiver_refuses_once_and_then_opens_nothing() -> None:
    agreed = agreement(**TWO_BLOCKS)
    played, rows = ProductParties(agreed), matrices(agreed)
    good = [
        played.aggregator.combine_block(block, played.answers(block, rows)) for block in range(2)
    ]
    with pytest.raises(RemoteProtocolError):
        played.receiver.open_block(0, good[1])
    assert vars(played.receiver)["_secret"] is None
    with pytest.raises(LocalProtocolError, match="threw away what opens sums"):
        played.receiver.open_block(0, good[0])
    with pytest.raises(LocalProtocolError, match="threw away what opens sums"):
        played.receiver.make_request()


@pytest.mark.parametrize(
    "flipped",
    [
        pytest.param(None, id="one contribution alone"),
        pytest.param({2: 0x08, 1: 0x20}, id="half a step"),
        pytest.param({-1: 0x80}, id="the top bit"),
        pytest.param("foreign key", id="a foreign key"),
    ],
)
def test_sums_that_were_altered(flipped: Any) -> None:
    agreed = agreement()
    # 2^13 + 2^19 of 2^32: half a step of 2^14 away from any sum
    assert SumOfProducts(agreed).parameters.plain_bits == 18
    played = ProductParties(agreed)
    rows = matrices(agreed)
    answers = played.answers(0, rows)
    frame = Frame.parse(played.aggregator.combine_block(0, answers), sender="aggregator")
    if flipped is None:  # the contribution of one passive alone: its masks remain
        alone = Frame.parse(answers["passive_1"], sender="x")
        bad = replace(alone, kind=FrameKind.SUM, index_or_count=2).pack()
    elif isinstance(flipped, dict):
        blob = bytearray(frame.blobs[0])
        for place, bits in flipped.items():
            blob[place] ^= bits
        bad = replace(frame, blobs=(bytes(blob),)).pack()
    else:
        other = ProductParties(agreed)
        bad = other.aggregator.combine_block(0, other.answers(0, rows))
    with pytest.raises(RemoteProtocolError):
        played.receiver.open_block(0, bad)


def test_mutated_frames() -> None:
    """A mutation is refused, or changes no more than words that say nothing by themselves."""
    agreed = agreement()
    rng = random.Random(0)
    rows = matrices(agreed)
    refused = 0
    for _ in range(40):
        played = ProductParties(agreed, accept=False)
        request = mutate_bytes(rng, played.receiver.make_request())
        with pytest.raises(RemoteProtocolError):
            played.contributors["passive_1"].accept_request(request[: rng.randrange(len(request))])
        try:
            played.contributors["passive_1"].accept_request(request)
        except RemoteProtocolError:
            refused += 1
            played.contributors["passive_1"].accept_request(played.receiver.make_request())
        played.contributors["passive_2"].accept_request(played.receiver.make_request())
        answers = played.answers(0, rows)
        bad = {**answers, "passive_2": mutate_bytes(rng, answers["passive_2"])}
        for bodies in (bad, answers):
            try:
                combined = played.aggregator.combine_block(0, bodies)
                opened = played.receiver.open_block(0, mutate_bytes(rng, combined))
            except (RemoteProtocolError, LocalProtocolError):
                refused += 1
            else:
                assert np.abs(opened).max() <= 2.1
    assert refused > 100


def alike(one: bytes, other: bytes) -> float:
    """Return the share of equal bytes after the headers."""
    left, right = (np.frombuffer(body, np.uint8)[300:] for body in (one, other))
    return float((left == right).mean())


def test_no_bytes_repeat() -> None:
    """The same labels and rows twice: nothing but headers is alike."""
    agreed = agreement()
    rows = matrices(agreed)
    requests, answers = zip(
        *(
            (played.receiver.make_request(), played.answers(0, rows)["passive_1"])
            for played in (ProductParties(agreed), ProductParties(agreed))
        ),
        strict=True,
    )
    assert alike(*requests) < 0.01
    assert alike(*answers) < 0.01


def test_the_aggregator_needs_no_library_and_holds_no_key() -> None:
    held = vars(SumOfProducts(agreement()).make_aggregator())
    assert set(held) == {"_sum_of_products", "_frames", "_setup"}


# All requests but one are opened: an active that made one otherwise is found out.


def test_shifts_say_nothing_of_the_labels() -> None:
    agreed = agreement(columns=4, labelled=160, candidates=2)
    counts = []
    for row in ([1, 0, 0, 0], [0, 0, 0, 1]):
        played = ProductParties(agreed, np.tile(row, (160, 1)), accept=False)
        parts = played.sum.parse_request(played.make_audited_request(), 4 + 160)
        shifts = np.frombuffer(parts[1], ">u2").astype(np.int64)
        counts.append(np.bincount(shifts, minlength=4))
    assert all(np.abs(count - 40).max() < 28 for count in counts)  # five deviations


def test_the_outcome_is_the_same_for_all_and_uniform() -> None:
    agreed = agreement(3, candidates=8)
    described = SumOfProducts(agreed)
    commitment = described.make_receiver(labels(agreed)).get_commitment()
    outcomes = []
    for _ in range(400):
        coins = {
            name: products.CoinToss(name, described, described.make_frames(), commitment)
            for name in agreed.contributors
        }
        converse(coins)
        outcomes.append([coin.chosen_candidate for coin in coins.values()])
    assert [kept for kept in outcomes if len(set(kept)) != 1] == []
    counts = np.bincount([kept[0] for kept in outcomes], minlength=8)
    assert np.abs(counts - 50).max() < 35


class Cheat:
    """An active that makes one candidate otherwise than agreed; the others are honest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
        self.bad = bad
        self.made = 0
        self.roots: list[bytes] = []
        self.packed = np.array([[5, 0, 0], [25, 0, 0], [0, 1, 1], [0, 0, 0]])
        monkeypatch.setattr(products, "encrypt_labels", self._encrypt)

    def _encrypt(self, secure_sum: SumOfProducts, root: bytes, bits_nK: IntArray) -> list[bytes]:
        if root not in self.roots:
            self.roots.append(root)
        cheats = self.roots.index(root) == self.bad
        return encrypt_labels(secure_sum, root, self.packed if cheats else bits_nK)


@pytest.mark.parametrize("bad", range(4))
def test_a_request_that_was_made_otherwise_is_found_out(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where it happens to be the one that is kept."""
    with monkeypatch.context() as active:
        cheat = Cheat(active, bad)
        played = ProductParties(agreement(candidates=4), accept=False)
        assert len(cheat.roots) == 4
        request = played.make_audited_request()
    kept = vars(played.contributors["passive_1"])["_coin_toss"].chosen_candidate
    roles = list(played.contributors.values())
    if kept == bad:
        for role in roles:
            role.accept_request(request)
    else:
        accept = lambda role: role.accept_request(request)  # noqa: E731
        cases = [("cheated", role) for role in roles]
        assert list_unrefused(RemoteProtocolError, accept, cases) == []


def change_request(
    played: ProductParties, request: bytes, change: Callable[[list[bytes]], object]
) -> bytes:
    parts = list(played.sum.parse_request(request, 4 + played.sum.product_agreement.labelled))
    change(parts)
    return played.sum.pack_request(parts)


CHANGES: dict[str, tuple[str, Callable[[list[bytes]], object]]] = {
    "another root": ("cheated", lambda p: p.__setitem__(0, bytes(32) + p[0][32:])),
    "roots exchanged": ("cheated", lambda p: p.__setitem__(0, p[0][32:] + p[0][:32])),
    "a root less": ("expected", lambda p: p.__setitem__(0, p[0][32:])),
    "a root more": ("expected", lambda p: p.__setitem__(0, p[0] + bytes(32))),
    "another label": ("cheated", lambda p: p.__setitem__(4, p[5])),
    "another key": ("cheated", lambda p: p.__setitem__(3, p[4])),
    "another seed": ("cheated", lambda p: p.__setitem__(2, bytes(32))),
    "no shifts": ("expected", lambda p: p.__setitem__(1, b"")),
    "an odd byte of shifts": ("expected", lambda p: p.__setitem__(1, p[1] + b"\0")),
    "a shift of K": ("below 3", lambda p: p.__setitem__(1, b"\0\3" + p[1][2:])),
    "a shift beyond N": ("below 3", lambda p: p.__setitem__(1, b"\xff\xff" + p[1][2:])),
}


@pytest.mark.parametrize("which", CHANGES)
def test_requests_that_were_altered(which: str) -> None:
    played = ProductParties(agreement(candidates=3), accept=False)
    says, change = CHANGES[which]
    request = played.make_audited_request()
    role = played.contributors["passive_1"]
    with pytest.raises(RemoteProtocolError, match=says):
        role.accept_request(change_request(played, request, change))
    role.accept_request(request)
    with pytest.raises(RemoteProtocolError, match="second request"):
        role.accept_request(request)


def test_challenges_that_do_not_agree_open_nothing() -> None:
    played = ProductParties(agreement(candidates=3), accept=False)
    commitment = played.receiver.get_commitment()
    told = played.toss_coin()
    frames = played.sum.make_frames()
    digest = hashlib.sha256(played.sum.parse_request(commitment, 1)[0]).digest()
    kept = vars(played.contributors["passive_1"])["_coin_toss"].chosen_candidate
    other = frames.pack_setup(((kept + 1) % 3).to_bytes(2, "big") + digest)
    beyond = frames.pack_setup(b"\0\3" + digest)
    others: list[dict[str, bytes]] = [
        {},
        {"passive_1": told["passive_1"]},
        {**told, "aggregator": told["passive_1"]},
        {**told, "passive_2": other},
        dict.fromkeys(told, beyond),
        dict.fromkeys(told, frames.pack_setup()),
        {**told, "passive_2": b""},
        {**told, "passive_2": told["passive_2"][:-1]},
    ]
    cases = [("", bad) for bad in others]
    assert list_unrefused(RemoteProtocolError, played.receiver.make_request, cases) == []
    with pytest.raises(LocalProtocolError, match="once the passives' challenges came"):
        played.receiver.make_request()
    request = played.receiver.make_request(told)
    with pytest.raises(LocalProtocolError, match="opened already"):
        played.receiver.make_request(dict.fromkeys(told, other))  # which would open the one kept
    assert played.receiver.make_request() == request


def test_messages_of_the_coin_that_are_refused() -> None:
    agreed = agreement(3, candidates=3)
    described = SumOfProducts(agreed)
    receiver = described.make_receiver(labels(agreed))

    def coin(name: str, of: Any = receiver) -> products.CoinToss:
        return products.CoinToss(name, described, described.make_frames(), of.get_commitment())

    one = coin("passive_1")
    two = coin("passive_2")
    promise = two.start()[0].body
    frames = described.make_frames()
    cases = [("out of turn", sender, promise) for sender in ("passive_1", "active", "nobody")]
    others = (b"", frames.pack_setup(), frames.pack_setup(bytes(31)))
    cases += [("", "passive_2", bad) for bad in others]
    assert list_unrefused(RemoteProtocolError, one.receive, cases) == []
    assert one.receive("passive_2", promise) == ()
    with pytest.raises(RemoteProtocolError, match="other bytes for the coin"):
        one.receive("passive_2", described.make_frames().pack_setup(bytes(32)))
    with pytest.raises(LocalProtocolError, match="still"):
        _ = one.chosen_candidate
    # Passives that the active told other hashes find out.
    pair = {
        "passive_1": coin("passive_1"),
        "passive_2": coin("passive_2", described.make_receiver(labels(agreed))),
        "passive_3": coin("passive_3"),
    }
    with pytest.raises(RemoteProtocolError, match="other hashes of active"):
        converse(pair)


def test_own_bytes_stay_secret_until_all_others_are_bound() -> None:
    agreed = agreement(3, candidates=3)
    described = SumOfProducts(agreed)
    commitment = described.make_receiver(labels(agreed)).get_commitment()
    one, two, three = (
        products.CoinToss(name, described, described.make_frames(), commitment)
        for name in agreed.contributors
    )
    first = one.start()
    assert all(
        vars(one)["_random_bytes_by_passive"]["passive_1"] not in message.body for message in first
    )
    promise = {out.receiver: out.body for out in two.start()}["passive_1"]
    assert one.receive("passive_2", promise) == ()
    two.receive("passive_1", first[0].body)
    early = two.receive("passive_3", three.start()[1].body)  # two is bound by all before one is
    assert one.receive("passive_2", early[0].body) == ()
    revealed = one.receive("passive_3", three.start()[0].body)
    assert [message.receiver for message in revealed] == ["passive_2", "passive_3"]
    assert vars(one)["_random_bytes_by_passive"]["passive_1"] in revealed[0].body


def test_commitments_that_are_none() -> None:
    played = ProductParties(agreement(candidates=3), accept=False)
    role = played.contributors["passive_1"]
    others = (b"", played.sum.pack_request((bytes(64),)), played.sum.pack_request(()))
    assert list_unrefused(RemoteProtocolError, role.toss_coin, [("", bad) for bad in others]) == []
    role.toss_coin(played.receiver.get_commitment())
    with pytest.raises(RemoteProtocolError, match="second commitment"):
        role.toss_coin(played.receiver.get_commitment())


def test_what_is_called_out_of_turn() -> None:
    audited = ProductParties(agreement(candidates=2), accept=False)
    with pytest.raises(LocalProtocolError, match="once the passives' challenges came"):
        audited.receiver.make_request()
    with pytest.raises(LocalProtocolError, match="once the passives' challenges came"):
        audited.receiver.open_block(0, b"")
    role = audited.contributors["passive_1"]
    with pytest.raises(LocalProtocolError, match="tossed no coin"):
        role.pack_challenge()
    with pytest.raises(LocalProtocolError, match="tossed no coin"):
        role.accept_request(b"")
    trusted = ProductParties(agreement(), accept=False)
    with pytest.raises(LocalProtocolError, match="no candidates"):
        trusted.receiver.get_commitment()
    with pytest.raises(LocalProtocolError, match="no candidates"):
        trusted.receiver.make_request({})
    with pytest.raises(LocalProtocolError, match="no candidates"):
        trusted.contributors["passive_1"].toss_coin(b"")


@pytest.mark.parametrize("label", [0.0, 1.0])
def test_candidates_need_labels_of_both_classes(label: float) -> None:
    with pytest.raises(LocalProtocolError, match="one class"):
        SumOfProducts(agreement(candidates=2)).make_receiver(np.full((4, 3), label))


def test_mutated_messages_of_an_audit() -> None:
    agreed, rng, refused = agreement(candidates=3), random.Random(0), 0
    honest = ProductParties(agreed, accept=False)
    request = honest.make_audited_request()

    def attempt(action: Callable[[bytes], object], body: bytes) -> None:
        nonlocal refused
        for size in (len(body), rng.randrange(len(body))):
            changed = bytearray(body[:size] + rng.randbytes(rng.choice((0, 0, 3))))
            if size == len(body):
                changed[rng.randrange(min(size, 600))] ^= 1 << rng.randrange(8)
            try:
                action(bytes(changed))
            except RemoteProtocolError:
                refused += 1

    def send_challenge(played: ProductParties, body: bytes) -> None:
        played.receiver.make_request(dict.fromkeys(agreed.contributors, body))

    for _ in range(60):
        played = ProductParties(agreed, accept=False)
        one, two = (played.contributors[name] for name in agreed.contributors)
        commitment = played.receiver.get_commitment()
        attempt(played.sum.make_contributor("passive_1").toss_coin, commitment)
        coins = {"passive_1": one.toss_coin(commitment), "passive_2": two.toss_coin(commitment)}
        promise = next(iter(coins["passive_2"].start())).body
        attempt(partial(coins["passive_1"].receive, "passive_2"), promise)
        told = honest.contributors["passive_1"].pack_challenge()
        attempt(partial(send_challenge, played), told)
        attempt(honest.contributors["passive_1"].accept_request, request)
    # But for a changed bit in what is only checked later: hashes, and the bytes of a promise.
    assert refused > 60 * (4 + 2)
    assert vars(honest.contributors["passive_1"])["_label_values"] is None


def test_the_kept_secret_is_not_among_the_opened() -> None:
    played = ProductParties(agreement(candidates=5), accept=False)
    roots = set(vars(vars(played.receiver)["_candidates"])["_root_secrets"])
    request = played.make_audited_request()
    assert len({root for root in roots if root in request}) == 4
    assert vars(vars(played.receiver)["_candidates"])["_root_secrets"] == []


@pytest.mark.parametrize("changes", [{}, {"candidates": 2}, {"columns": 20, "bits": 8}])
def test_what_encrypted_labels_take_is_told_before_they_come(changes: dict[str, Any]) -> None:
    agreed = agreement(labelled=12, **changes)
    described = SumOfProducts(agreed)
    rows = np.eye(agreed.columns, dtype=np.int64)[np.zeros(12, dtype=np.int64)]
    blobs = encrypt_labels(described, bytes(range(32)), rows)
    held = products.LabelValues.from_request(described, b"", blobs)
    assert held.label_values.nbytes == 12 * described.label_bytes
