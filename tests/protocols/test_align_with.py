"""Two lists in two processes: one call at each end, and each misuse with its sentence."""

import json
import multiprocessing
import queue
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any
from uuid import UUID

import numpy as np
import pytest

from apfed_protocols import DataError, IdNormalisation, align, align_with, count_common
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import SET_INTERSECTIONS, IntersectionName
from apfed_protocols.psi.interface import Output
from tests.waiting import LONG_S
from tests.with_crypten import usable


def link_over(pipe: "Connection[Any, Any]") -> Any:
    def receive(timeout_s: float) -> bytes:
        if not pipe.poll(timeout_s):
            raise TimeoutError(f"nothing came for {timeout_s} s")
        return pipe.recv_bytes()

    return pipe.send_bytes, receive


SHOP = {UUID(int=number): "row" for number in range(3, 60)}


def be_the_shop(pipe: "Connection[Any, Any]") -> None:
    for ids in (SHOP.keys(), [UUID(int=999)]):
        rows = align_with("bank", ids, link=link_over(pipe), me="shop", hub="bank", minimum_rows=0)
        pipe.send(rows.tolist())


def test_two_processes_align_twice_over_one_link() -> None:
    ours, theirs = multiprocessing.Pipe()
    shop = multiprocessing.get_context("spawn").Process(target=be_the_shop, args=(theirs,))
    shop.start()
    theirs.close()
    ids = frozenset(UUID(int=number) for number in range(50))

    def align_once() -> tuple[list[int], list[int]]:
        """Return the common people as the bank finds them, and as the shop does."""
        rows = align_with("shop", ids, link=link_over(ours), me="bank", hub="bank", minimum_rows=0)
        assert rows.dtype == np.int64
        assert ours.poll(LONG_S)
        return [[*ids][row].int for row in rows], [[*SHOP][row].int for row in ours.recv()]

    found, expected = align_once()
    assert found == expected
    assert {*found} == set(range(3, 50))
    assert align_once() == ([], [])
    shop.join(LONG_S)
    assert shop.exitcode == 0


DIFFER: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "terms": (
        {"hub": "shop"},
        {"minimum_rows": 0},
        "hub is 'shop' at bank and 'bank' at shop; minimum_rows is 2 at bank and 0 at shop;",
        "hub is 'bank' at shop and 'shop' at bank; minimum_rows is 0 at shop and 2 at bank;",
    ),
    "rules": ({"normalisation": IdNormalisation(case_fold=True)}, {}, '"case_fold":true', "normal"),
    "another peer": (
        {},
        {"me": "post"},
        "there is 'post', who aligns with 'bank'",
        "who aligns with 'shop'; correct",
    ),
    "unfit": ({"ids": ["ann", "ann"]}, {}, "bank has 1 repeated", "its own IDs are unfit"),
    "too few": ({"ids": ["ann", "eve"]}, {}, "minimum of 2 (1 in common", "shop: the parties"),
}


@pytest.mark.parametrize("case", DIFFER)
def test_both_ends_are_told_what_differs(case: str) -> None:
    def play(pipe: "Connection[Any, Any]", given: dict[str, Any]) -> str:
        usual: dict[str, Any] = {"ids": ["ann", "bob"], "hub": "bank", "link": link_over(pipe)}
        with pytest.raises((DataError, RemoteProtocolError)) as caught:
            align_with(**{**usual, "patience_s": LONG_S, **given})
        return str(caught.value)

    bank, shop, *expected = DIFFER[case]
    ends = ({"me": "bank", "peer": "shop", **bank}, {"me": "shop", "peer": "bank", **shop})
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(play, multiprocessing.Pipe(), ends))
    assert all(part in told for part, told in zip(expected, said, strict=True)), said


USUAL: dict[str, Any] = {"peer": "shop", "ids": ["ann"], "me": "bank", "hub": "bank"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"me": None}, r"me= and peer, and hub=, .*got me=None, peer='shop'"),
        ({"hub": None}, "hub=None"),
        ({"hub": "post"}, "hub='post'"),
        ({"peer": "bank"}, "are all different"),
        ({"peer": ""}, "a name for every party"),
        ({"link": "127.0.0.1:7000"}, r"takes what secure_apfed.open_link gives, .* got str"),
        ({"link": (print,)}, "got tuple"),
        ({"link": multiprocessing.Pipe()[0]}, "got Connection"),
        ({"link": (lambda _: None, lambda _: None)}, "returned NoneType, expected the bytes"),
        ({"minimum_rows": -1}, "minimum_rows lies in 0"),
    ],
)
def test_a_wrong_call_is_told(given: dict[str, Any], says: str) -> None:
    with pytest.raises(LocalProtocolError, match=says):
        align_with(**{"link": (lambda _: None, lambda _: b""), **USUAL, **given})


TERMS = {
    "me": "shop",
    "peer": "bank",
    "hub": "bank",
    "fit": True,
    "fresh": "",
    "minimum_rows": 2,
    "maximum_ids": 10_000_000,
    "normalisation": "x",
}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 9999,
        b"{}",
        b"null",
        json.dumps({**TERMS, "fit": 1}).encode(),
        json.dumps({**TERMS, "more": 1}).encode(),
        json.dumps({**TERMS, "fresh": "x" * 2**14}).encode(),
    ],
)
def test_whatever_a_peer_sends_is_terms_or_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match=f"shop sent {len(body)} bytes that are no terms"):
        align_with(link=(lambda _: None, lambda _: body), **USUAL)


def test_a_message_sent_back_and_silence_are_told() -> None:
    loop = queue.SimpleQueue[bytes]()
    with pytest.raises(RemoteProtocolError, match="there is 'bank', who aligns with 'shop'"):
        align_with(link=(loop.put, lambda timeout_s: loop.get(timeout=timeout_s)), **USUAL)
    ours, _theirs = multiprocessing.Pipe()
    with pytest.raises(RemoteProtocolError, match="fell silent"):
        align_with(link=link_over(ours), **USUAL, patience_s=0.05)


@pytest.mark.parametrize("protocol", usable(SET_INTERSECTIONS))
@pytest.mark.parametrize(
    ("bank", "shop"),
    [
        pytest.param(["a", "b"], ["c"], id="nothing common"),
        pytest.param([], ["c"], id="an empty hub"),
        pytest.param(["a"], [], id="an empty member"),
    ],
)
def test_nobody_in_common_is_a_result_under_a_minimum_of_0(
    bank: list[str], shop: list[str], protocol: IntersectionName
) -> None:
    usual: dict[str, Any] = {"ids_by_party": {"bank": bank, "shop": shop}, "hub": "bank"}
    rows = align(**usual, protocol=protocol, minimum_rows=0)
    assert all(each.dtype == np.int64 and each.shape == (0,) for each in rows.values())
    if Output.SIZE in SET_INTERSECTIONS[protocol].outputs:
        assert count_common(**usual, protocol=protocol, minimum_rows=0) == 0
    with pytest.raises(DataError, match="agreed minimum of 1"):
        align(**usual, protocol=protocol, minimum_rows=1)


@pytest.mark.parametrize("protocol", usable(SET_INTERSECTIONS))
def test_ids_of_kinds_that_never_match_are_refused(protocol: IntersectionName) -> None:
    with pytest.raises(DataError, match="no two can match"):
        align({"bank": [1], "shop": ["a"]}, hub="bank", protocol=protocol, minimum_rows=0)
