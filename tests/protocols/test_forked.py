"""A forked process repeats nothing: its copies of roles and links are refused."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from apfed_protocols.psi.circuit import CircuitIntersection
from apfed_protocols.psi.ecdh import EcdhIntersection
from apfed_protocols.psi.interface import IntersectionAgreement
from apfed_protocols.randomness import ForkCheck, fresh_key, random_permutation
from apfed_protocols.seal import fresh_run_key
from apfed_protocols.sums.homomorphic import HomomorphicSum, draw_centred_binomial, draw_ternary
from apfed_protocols.sums.recoverable import split_secret
from tests.contracts import product_parties
from tests.contracts.hostile import run_in_fork
from tests.contracts.product_parties import ProductParties
from tests.contracts.sum_parties import CHOICES, Parties, agreement, binding, make
from tests.protocols.test_seal import ends, pair_of_links

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork"),
    pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"),
]


def check_refusals(**actions: Callable[[], object]) -> None:
    said = run_in_fork(actions)
    assert set(said) == set(actions)
    assert all("belongs to the process that made it" in text for text in said.values()), said


@pytest.mark.parametrize("choice", CHOICES)
def test_a_forked_copy_of_a_role_is_refused_and_the_original_goes_on(choice: str) -> None:
    played, values = Parties(make(choice, agreement(2))), [np.zeros((1, 2))] * 2
    bound = played.next()
    check_refusals(contribute=lambda: played.contribute(values, bound))
    bodies = played.contribute(values, bound)
    if played.sum.rounds == 2:
        asked = played.aggregator.ask(bodies)
        check_refusals(answer=lambda: played.contributors["passive_1"].answer(asked["passive_1"]))
        bodies = {me: role.answer(asked[me]) for me, role in played.contributors.items()}
    combined = played.aggregator.combine(bodies)
    check_refusals(decode=lambda: played.receiver.decode(combined, (1, 2), bound))
    played.receiver.decode(combined, (1, 2), bound)


def test_a_role_made_before_the_fork_is_not_set_up_after_it() -> None:
    """The copy would agree the same seeds."""
    described: dict[str, Any] = {
        scheme: make(f"{scheme} + pairwise masks", agreement()) for scheme in ("plain", "bfv")
    }
    masked, bfv = (each.make_contributor("passive_1") for each in described.values())
    key = {out.receiver: out.body for out in described["bfv"].make_receiver().start()}["passive_1"]
    peers = ("passive_2", "passive_3")
    hellos = {name: described["bfv"].make_contributor(name).start()[0].body for name in peers}

    def set_up() -> None:
        bfv.receive("active", key)
        for name, hello in hellos.items():
            bfv.receive(name, hello)

    check_refusals(
        start=masked.start,
        start_bfv=bfv.start,
        receive=lambda: bfv.receive("passive_2", hellos["passive_2"]),
        set_up=set_up,
    )
    set_up()
    words = np.zeros((1, 4), dtype=np.uint64)
    check_refusals(mask=lambda: bfv._seeds.add_shared_mask("passive_2", binding(1), words, sign=1))
    bfv.contribute(np.ones((1, 4)) / 9, binding(1))


def test_a_forked_process_is_no_second_end_of_a_link() -> None:
    alice, bob = ends()
    begun, _ = pair_of_links()
    sealed = bob.seal(b"", sequence=0, associated=b"")
    check_refusals(
        seal=lambda: alice.seal(b"", sequence=0, associated=b""),
        open=lambda: alice.open(sealed, sequence=0, associated=b""),
        agree=lambda: begun.agree(bytes(32), bytes(32)),
    )
    alice.seal(b"", sequence=0, associated=b"")
    alice.open(sealed, sequence=0, associated=b"")


def test_a_copy_of_a_role_of_an_intersection_is_refused() -> None:
    agreed = IntersectionAgreement(session="s", dealer="d")
    ecdh = EcdhIntersection(agreed).make_hub("hub", ["p"], [b"1"])
    script = CircuitIntersection(agreed).make_hub("hub", ["p"], [b"1"])
    check_refusals(start=ecdh.start, start_script=script.start)
    ecdh.start()
    script.start()
    check_refusals(receive=lambda: ecdh.receive("p", b""), script=lambda: script.receive("p", b""))


def test_a_copy_of_a_role_of_products_is_refused_and_opens_no_candidate() -> None:
    agreed = product_parties.agreement()
    played, answering = ProductParties(agreed), ProductParties(agreed).contributors["passive_1"]
    combined = played.aggregator.combine_block(
        0, played.answers(0, product_parties.matrices(agreed))
    )
    audited = ProductParties(product_parties.agreement(candidates=2), accept=False)
    told = audited.toss_coin()
    check_refusals(
        answer=lambda: answering.answer_block(0, np.zeros((30, 4))),
        open=lambda: played.receiver.open_block(0, combined),
        audit=lambda: audited.receiver.make_request(told),
    )
    audited.receiver.make_request(told)


def test_a_copy_with_the_number_of_the_original_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process namespace of its own."""
    number = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: number)
    same = ForkCheck("it")
    check_refusals(require=same.require_own_process)
    same.require_own_process()


def test_forked_processes_draw_other_numbers() -> None:
    def make_encryption(choice: str) -> Callable[[], bytes]:
        described = make(choice, agreement(2))
        assert isinstance(described, HomomorphicSum)
        context = described.cipher.make_key_pair()
        zeros = np.zeros((1, described.packing.slots_per_vector), dtype=np.int64)
        return lambda: described.cipher.encrypt(context, zeros)[0]

    draws: dict[str, Callable[[], bytes]] = {
        "key": fresh_key,
        "X25519 key": lambda: fresh_run_key().public,
        "permutation": lambda: random_permutation(100).tobytes(),
        "ternary": lambda: draw_ternary(100).tobytes(),
        "centred binomial": lambda: draw_centred_binomial(100).tobytes(),
        "shares": lambda: b"".join(split_secret(bytes(16), threshold=2, holder_count=3)),
        "error of ckks": make_encryption("ckks"),
        "error of bfv": make_encryption("bfv"),
    }
    drawn = []
    for name, draw in draws.items():
        draw()
        for _ in range(2):
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.write(writing, draw()[-64:])
                os._exit(0)
            drawn.append((name, os.read(reading, 64)))
            os.wait()
        drawn.append((name, draw()[-64:]))
    assert len(set(drawn)) == 3 * len(draws)
    assert all(len(numbers) >= 32 for _, numbers in drawn)
