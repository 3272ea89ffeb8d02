"""A session begins with one contract that all have drawn up and signed, or it does not begin."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.seal import Identity, fresh_identity, verify_signature
from secure_apfed.contract import Contract, Resumption
from secure_apfed.exchange import (
    Envelope,
    Greeting,
    InMemoryNetwork,
    Kind,
    Script,
    SignedContract,
    agree_on_contract,
)
from secure_apfed.methods import METHODS, SimulationInputs, fresh_secrets
from tests.secure_apfed.seats import contract, envelope, random_data, step_config

NAMES = ("active", "p1", "p2", "aggregator")
Draw = Callable[[str, Mapping[str, Greeting]], Contract]


def make_contract(session: str, greetings: Mapping[str, Greeting], **changes: Any) -> Contract:
    document = contract().model_dump(mode="json") | {"session": session} | changes
    for item in document["participants"]:
        greeting = greetings[item["name"]]
        item |= {"identity": greeting.identity.hex(), "public_key": greeting.run_key.hex()}
    return Contract.model_validate(document)


class Table:
    def __init__(self) -> None:
        self.identities = {name: fresh_identity() for name in NAMES}
        self.network = InMemoryNetwork(NAMES)

    def script(
        self,
        name: str,
        *,
        draw: Draw = make_contract,
        identity: Identity | None = None,
        known: Mapping[str, bytes] | None = None,
        session: str | None = None,
        run_key: bytes = b"",
    ) -> Script[SignedContract]:
        own = identity or self.identities[name]
        everybody = {other: one.public for other, one in self.identities.items()}
        return agree_on_contract(
            self.network.links[name],
            identity=own,
            known={**everybody, **(known or {})},
            active="active",
            session=session or ("s" if name == "active" else None),
            make_greeting=lambda key: Greeting(identity=own.public, run_key=run_key or key.public),
            make_contract=draw,
        )

    def play(self, **others: Script[Any]) -> dict[str, SignedContract]:
        return self.network.run_scripts(
            {name: others[name] if name in others else self.script(name) for name in NAMES}
        )


class TwoFaced(InMemoryNetwork):
    """The active tells one passive something else, under a header of its own."""

    kind = Kind.SESSION
    said = b"t"

    def queue_frame(self, sender: str, receiver: str, frame: bytes) -> None:
        length = int.from_bytes(frame[:2], "big")
        spoken = Envelope.parse_header(frame[2 : 2 + length]).kind
        if (sender, receiver, spoken) == ("active", "p2", self.kind):
            frame = frame[: 2 + length] + self.said
        super().queue_frame(sender, receiver, frame)


def test_all_hold_one_contract_and_the_signatures_of_all() -> None:
    table = Table()
    held = table.play()
    (document,) = {one.contract.document for one in held.values()}
    first = held["active"]
    assert {name: one.signatures for name, one in held.items()} == dict.fromkeys(
        held, first.signatures
    )
    for name, one in held.items():
        key = bytes.fromhex(
            next(item.public_key for item in first.contract.participants if item.name == name)
        )
        verify_signature(
            table.identities[name].public,
            one.signatures[name],
            b"contract v1",
            b"s",
            key,
            first.contract.digest,
            signer=name,
        )
    assert b'"session":"s"' in document


def test_afterwards_everything_is_sealed_under_it() -> None:
    table = Table()
    table.play()
    seen: list[bytes] = []

    def post(receiver: str, frame: bytes) -> None:
        seen.append(frame)
        table.network.queue_frame("active", receiver, frame)

    table.network.links["active"]._post_frame = post  # listens
    table.network.links["active"].send("p1", Kind.REPRESENTATIONS, 0, b"features in the clear")
    assert b"features in the clear" not in seen[0]

    async def receive() -> Envelope:
        return await table.network.links["p1"].receive("active", Kind.REPRESENTATIONS)

    assert table.network.run_script("p1", receive()).payload == b"features in the clear"
    with pytest.raises(LocalProtocolError, match="seals its links once"):
        table.network.links["p1"].seal("s", {})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"epochs": 7, "batch_size": 9}, "epochs, batch_size"),
        ({"settings": {"guard": {"mechanism": "none"}}}, "settings.guard.mechanism"),
    ],
)
def test_other_settings_are_found_out_by_name(changes: dict[str, Any], field: str) -> None:
    table = Table()
    other = table.script("p2", draw=lambda s, greetings: make_contract(s, greetings, **changes))
    with pytest.raises(RemoteProtocolError, match=f"would sign different contracts.* in {field}"):
        table.play(p2=other)
    table.network = TwoFaced(NAMES)  # tells one another session than the other
    with pytest.raises(RemoteProtocolError, match="different contracts, which differ in session"):
        table.play()


def nest_lists(depth: int) -> list[Any]:
    """Return lists in lists, so deep."""
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested or 0]
    return nested


DRAW = random.Random(5)


BODIES = [
    b"",
    b"\xc1",
    msgpack.packb(None),
    msgpack.packb([1, 2, 3]),
    msgpack.packb({}),
    msgpack.packb(nest_lists(400)),
    msgpack.packb([b"k" * 32, b"k" * 31, None]),
    b"\xff\xfe",
    msgpack.packb([b"k" * 32, b"k" * 32, {"shape": [2**63]}]),
    msgpack.packb([b"s" * 64, b"h" * 32, b"[1]"]),
    msgpack.packb([b"s" * 64, b"h" * 32, b"{"]),
    *(DRAW.randbytes(DRAW.randrange(200)) for _ in range(10)),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: f"{len(body)} bytes {body[:12].hex()}")
@pytest.mark.parametrize("kind", [Kind.GREETING, Kind.SIGNATURE, Kind.SESSION])
def test_hostile_bytes_end_in_an_error_of_the_peer(kind: Kind, body: bytes) -> None:
    table = Table()
    table.network = TwoFaced(NAMES)
    vars(table.network).update(kind=kind, said=body)
    with pytest.raises(RemoteProtocolError):
        table.play()


def test_an_identity_is_no_secret_of_others() -> None:
    identity = fresh_identity()
    assert identity.secret_bytes().hex() not in repr(identity)
    with pytest.raises(LocalProtocolError, match="never serialised"):
        __import__("pickle").dumps(identity)
    assert Identity.from_secret_bytes(identity.secret_bytes()).public == identity.public
    with pytest.raises(LocalProtocolError, match="32 bytes, got 31"):
        Identity.from_secret_bytes(bytes(31))


@pytest.mark.parametrize(
    ("purpose", "parts"),
    [(b"a", (b"b", b"cd")), (b"ab", (b"c", b"d")), (b"a", (b"bcd",))],
    ids=["another cut", "another purpose", "in one part"],
)
def test_a_signature_is_of_its_purpose_its_parts_and_their_cut(
    purpose: bytes, parts: tuple[bytes, ...]
) -> None:
    identity = fresh_identity()
    signature = identity.sign(b"a", b"bc", b"d")
    verify_signature(identity.public, signature, b"a", b"bc", b"d", signer="x")
    with pytest.raises(RemoteProtocolError, match="what x signed does not fit"):
        verify_signature(identity.public, signature, purpose, *parts, signer="x")


@pytest.mark.parametrize(
    "public",
    [bytes(32), bytes(31), fresh_identity().public],
    ids=["zeros", "a byte less", "another key"],
)
def test_a_signature_is_of_its_key(public: bytes) -> None:
    signature = fresh_identity().sign(b"a", b"bc", b"d")
    with pytest.raises(RemoteProtocolError):
        verify_signature(public, signature, b"a", b"bc", b"d", signer="x")


@pytest.mark.parametrize("point", ["01" + "00" * 31, "ec" + "ff" * 30 + "7f", "00" * 32])
def test_a_key_of_small_order_signs_nothing(point: str) -> None:
    every = bytes.fromhex(point) + bytes(32)  # R = A and S = 0
    with pytest.raises(RemoteProtocolError, match="what x signed does not fit"):
        verify_signature(bytes.fromhex(point), every, b"a", b"b", signer="x")


GREETED: list[Any] = [bytes(32), bytes([1]) * 32, None]


def test_one_identity_is_one_party_and_its_own() -> None:
    table = Table()
    other = fresh_identity()
    script = table.script("p1", identity=other, known={"p1": other.public})
    with pytest.raises(RemoteProtocolError, match="p1 says that its identity is"):
        table.play(p1=script)
    table = Table()
    table.identities["aggregator"] = table.identities["active"]
    with pytest.raises(RemoteProtocolError, match="active and aggregator came with one key"):
        table.play()
    table = Table()
    pair = {name: table.script(name, run_key=bytes([9]) * 32) for name in ("p1", "p2")}
    with pytest.raises(RemoteProtocolError, match="p1 and p2 came with one key"):
        table.play(**pair)
    with pytest.raises(LocalProtocolError, match="another key for p1 than its own"):
        Table().play(p1=table.script("p1", known={"p1": bytes(32)}))


@pytest.mark.filterwarnings("ignore::apfed_protocols.errors.UnsafeChoiceWarning")
@pytest.mark.parametrize(
    ("method", "changes", "field"),
    [
        ("apfed_c", {"rules": {"minimum_spread": 0.4}}, "minimum_spread"),
        ("apfed_c", {"guard": {"mechanism": "gaussian", "sigma": 1.0}}, "maximum_norm"),
        ("apfed_c", {"model": {"network": "mlp", "projection": 7}}, "shape"),
        ("tvfl", {"guard": {"mechanism": "gaussian", "sigma": 1.0}}, "maximum_norm"),
    ],
)
def test_nobody_takes_a_senders_word_for_its_own_rules(
    method: str, changes: dict[str, Any], field: str
) -> None:
    theirs = step_config(method)
    mine = step_config(method, **changes)
    start = SimulationInputs(
        config=theirs, data=random_data({"passive-1": range(20), "passive-2": range(20)})
    )
    sender, receiver = ("active", "passive-1") if method != "tvfl" else ("passive-1", "active")
    secrets = fresh_secrets(theirs, sender)
    offer, other = (
        METHODS[method].offer_terms(start.build_context(name, secrets, {}))
        for name in (sender, "passive-2")
    )
    assert offer is not None
    offers = {sender: offer, **({"passive-2": other} if other else {})}
    judging = replace(start, config=mine).build_context(receiver, secrets, {})
    with pytest.raises(RemoteProtocolError, match=f"{sender} offers {receiver} .*{field}"):
        METHODS[method].derive_terms(judging, offers, "s")
    METHODS[method].derive_terms(start.build_context(receiver, secrets, {}), offers, "s")


RUN = "ab" * 32
NOWHERE: list[object] = [
    {"step": 5},
    {"run": RUN},
    {"run": "z" * 64, "step": 5},
    {"run": RUN[1:], "step": 5},
    {"run": RUN, "step": -1},
    {"run": RUN, "step": True},
    {"run": RUN, "step": 5.0},
    {"run": RUN, "step": None},
    {"run": RUN, "step": 5, "more": 1},
    [RUN, 5],
    5,
    RUN,
]
NO_STEPS: list[object] = [None, 3, "12", [-1], ["3"], [True], [0.0], list(range(17))]


def parse_greeting(payload: bytes) -> Greeting:
    return Greeting.from_message(envelope(payload, kind=Kind.GREETING, step=-1), bytes(32))


@pytest.mark.parametrize(
    ("resumes", "holds"),
    [*((resumes, []) for resumes in NOWHERE), *((None, holds) for holds in NO_STEPS)],
    ids=lambda value: repr(value)[:40],
)
def test_who_would_go_on_nowhere_or_holds_no_steps_sends_no_greeting(
    resumes: object, holds: object
) -> None:
    """Refuse it where it is read: of half a resumption no contract could be drawn up."""
    with pytest.raises(RemoteProtocolError, match="active sent something else than a greeting"):
        parse_greeting(msgpack.packb([*GREETED, resumes, holds]))


@pytest.mark.parametrize("resumes", [None, Resumption(run=RUN, step=5)], ids=["anew", "goes on"])
def test_who_begins_anew_or_goes_on_sends_a_greeting(resumes: Resumption | None) -> None:
    sent = Greeting(identity=GREETED[0], run_key=GREETED[1], resumes=resumes, holds=(2, 5))
    assert parse_greeting(sent.to_bytes()) == sent
