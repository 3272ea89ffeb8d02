"""The start of a session: every party identifies itself, and all sign one contract.

Run by: every party, before anything else. Each sends every other a greeting: its long-term
identity, a fresh key of its links, and its offer. From these and the shared settings each draws up
the contract for itself; the active names the session. Each signs session, its link key and the
contract, and continues only when it holds the signatures of all. Protects from: parties with other
settings, an active that gives two parties different contracts, and impersonation. Until then
messages travel in the clear: nothing in them is secret.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from pydantic import ValidationError

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.seal import Identity, RunKey, SealedLink, fresh_run_key, verify_signature
from secure_apfed.contract import AnsweredSteps, Contract, RepresentationBounds, Resumption
from secure_apfed.exchange.envelope import BEFORE_TRAINING, SESSION_LETTERS, Envelope, Kind
from secure_apfed.exchange.links import Links

_KEY_BYTES = 32
_MAX_CHECKPOINTS = 16  # in a greeting; a party keeps the two newest
_MAX_ANSWERED = 2**16  # ranges of answered steps in a greeting
_PURPOSE = b"contract v1"
_MALFORMED = (ValueError, TypeError, msgpack.UnpackException, ValidationError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """A party's first message in a session, which contains no secret.

    Attributes:
        identity: the party's long-term public key (Ed25519), 32 bytes.
        run_key: the party's public key of key exchange (X25519), fresh in this session, 32 bytes.
        offer: shape, dtype and norms of the representations that it sends; None: it sends none.
        resumes: from the active: the step from which the run can resume; None: from the start.
        holds: the steps for which the party has a checkpoint.
        answered: from a passive: the steps since its oldest checkpoint in which it contributed to a
            secure sum, as ranges, each with all passives that contributed.
    """

    identity: bytes
    run_key: bytes
    offer: RepresentationBounds | None = None
    resumes: Resumption | None = None
    holds: tuple[int, ...] = ()
    answered: tuple[AnsweredSteps, ...] = ()

    def to_bytes(self) -> bytes:
        """Encode the greeting as a msgpack list of its fields; an empty `answered` is left out."""
        offer = None if self.offer is None else self.offer.model_dump(mode="json")
        resumes = None if self.resumes is None else self.resumes.model_dump(mode="json")
        fields: list[object] = [self.identity, self.run_key, offer, resumes, list(self.holds)]
        if self.answered:
            fields.append([[steps.first, steps.last, steps.passives] for steps in self.answered])
        packed: bytes = msgpack.packb(fields)
        return packed

    @classmethod
    def from_message(cls, message: Envelope, known_identity: bytes) -> "Greeting":
        """Parse a peer's message as its greeting.

        `known_identity`: the peer's public key, 32 bytes, as written in this party's settings.

        Raises RemoteProtocolError: the message is malformed, or names another identity.
        """
        peer = message.sender
        try:
            identity, run_key, offer, resumes, holds, *optional = msgpack.unpackb(message.payload)
            for key in (identity, run_key):
                if type(key) is not bytes or len(key) != _KEY_BYTES:
                    raise ValueError("a key of another size")
            terms = None if offer is None else RepresentationBounds.model_validate(offer)
            resumption = None if resumes is None else Resumption.model_validate(resumes)
            are_steps = all(type(step) is int and step >= 0 for step in holds)
            if len(holds) > _MAX_CHECKPOINTS or not are_steps:
                raise ValueError("no steps")
            # `to_bytes` leaves the last field out if it is empty.
            answered = _parse_answered_steps(*optional)
        except _MALFORMED as error:
            raise RemoteProtocolError(f"{peer} sent something else than a greeting") from error
        if identity != known_identity:
            raise RemoteProtocolError(
                f"{peer} says that its identity is {identity.hex()[:16]}..., and is known by "
                f"{known_identity.hex()[:16]}...; ask {peer} which is right, and write it into the "
                "party's file"
            )
        return cls(
            identity=identity,
            run_key=run_key,
            offer=terms,
            resumes=resumption,
            holds=tuple(holds),
            answered=answered,
        )


def _parse_answered_steps(ranges: Any = ()) -> tuple[AnsweredSteps, ...]:
    """Parse the ranges of steps in which a passive contributed to a secure sum.

    `ranges`: untrusted; each is (first step, last step, names of all passives that contributed).

    Raises ValueError, TypeError: the ranges are malformed, or too many.
    """
    if len(ranges) > _MAX_ANSWERED:
        raise ValueError("too many stretches of steps")
    return tuple(
        AnsweredSteps(first=first, last=last, passives=names) for first, last, names in ranges
    )


@dataclass(frozen=True, kw_only=True)
class SignedContract:
    """The contract of all parties, and each party's signature of it by the party's name."""

    contract: Contract
    signatures: Mapping[str, bytes]


async def agree_on_contract(
    links: Links,
    *,
    identity: Identity,
    known: Mapping[str, bytes],
    active: str,
    session: str | None,
    make_greeting: Callable[[RunKey], Greeting],
    make_contract: Callable[[str, Mapping[str, Greeting]], Contract],
) -> SignedContract:
    """Exchange greetings, build the contract, exchange signatures, and encrypt the links.

    Every party builds the contract for itself. All signatures verify only if all contracts are
    equal.

    Args:
        links: this party's links, which are not encrypted yet.
        identity: this party's long-term key pair.
        known: the public identities of all parties, by name.
        active: the active's name.
        session: the session's name, at the active, which sends it to all others; None elsewhere.
        make_greeting: makes this party's greeting from its fresh key of this session.
        make_contract: makes the contract from the session's name and all greetings by party.

    Raises:
        LocalProtocolError: `known` has another key for this party than `identity`.
        RemoteProtocolError: a peer has another identity or contract, or sent no valid signature.
    """
    if known.get(links.me) != identity.public:
        raise LocalProtocolError(
            f"{links.me}: the known identities name another key for {links.me} than its own"
        )
    run_key = fresh_run_key()
    greetings = await _exchange_greetings(links, make_greeting(run_key), known)
    peers = [name for name in known if name != links.me]
    session = await _share_session_name(links, session, active, peers)
    contract = make_contract(session, {name: greetings[name] for name in known})
    return await _exchange_signatures(links, identity, run_key, greetings, contract)


async def _exchange_greetings(
    links: Links, own_greeting: Greeting, known: Mapping[str, bytes]
) -> dict[str, Greeting]:
    """Send this party's greeting to all peers; return all greetings by party, this party's first.

    `known`: the public identities of all parties, by name.

    Raises RemoteProtocolError: a greeting is malformed, from another identity, or has a key that
        another party has, too.
    """
    peers = [name for name in known if name != links.me]
    for peer in peers:
        links.send(peer, Kind.GREETING, BEFORE_TRAINING, own_greeting.to_bytes())
    greetings = {links.me: own_greeting}
    for peer in peers:
        message = await links.receive(peer, Kind.GREETING, step=BEFORE_TRAINING)
        greetings[peer] = Greeting.from_message(message, known[peer])
    _require_distinct_keys(greetings)
    return greetings


async def _share_session_name(
    links: Links, session: str | None, active: str, peers: Sequence[str]
) -> str:
    """Return the session's name: the active sends it to all peers, the others receive it.

    `session`: the name, at the active; None elsewhere. `active`: the active's name. `peers`: the
    names of all other parties.

    Raises RemoteProtocolError: the active sent no valid name.
    """
    if session is None:
        message = await links.receive(active, Kind.SESSION, step=BEFORE_TRAINING)
        return _parse_session_name(message)
    for peer in peers:
        links.send(peer, Kind.SESSION, BEFORE_TRAINING, session.encode())
    return session


async def _exchange_signatures(
    links: Links,
    identity: Identity,
    run_key: RunKey,
    greetings: Mapping[str, Greeting],
    contract: Contract,
) -> SignedContract:
    """Sign the contract, verify the signatures of all peers, and encrypt the links.

    Args:
        links: this party's links; they are encrypted under keys that depend on the contract.
        identity: this party's long-term key pair, which signs.
        run_key: this party's fresh key pair of this session.
        greetings: every party's greeting, by name.
        contract: the contract that this party built.

    Raises RemoteProtocolError: a peer built another contract, or its signature is not valid.
    """
    peers = [name for name in greetings if name != links.me]
    digest = contract.digest
    seals = {
        peer: SealedLink(me=links.me, peer=peer, run_key=run_key, contract_hash=digest)
        for peer in peers
    }
    own_signature = identity.sign(_PURPOSE, contract.session.encode(), run_key.public, digest)
    signatures = {links.me: own_signature}
    for peer in peers:
        body = msgpack.packb([own_signature, seals[peer].hello, contract.document])
        links.send(peer, Kind.SIGNATURE, BEFORE_TRAINING, body)
    for peer in peers:
        # Twice the usual time, since the peer may itself still wait for another party's greeting.
        message = await links.receive(peer, Kind.SIGNATURE, step=BEFORE_TRAINING, patience=2)
        signatures[peer], hello = _parse_signature(message, contract)
        theirs = greetings[peer]
        signed = (contract.session.encode(), theirs.run_key, digest)
        verify_signature(theirs.identity, signatures[peer], _PURPOSE, *signed, signer=peer)
        seals[peer].agree(theirs.run_key, hello)
    links.seal(contract.session, seals)
    return SignedContract(contract=contract, signatures=signatures)


def _require_distinct_keys(greetings: Mapping[str, Greeting]) -> None:
    """Raise RemoteProtocolError if two parties have the same identity or the same fresh key.

    `greetings`: name of each party -> its greeting.
    """
    identities = [greeting.identity for greeting in greetings.values()]
    run_keys = [greeting.run_key for greeting in greetings.values()]
    for keys in (identities, run_keys):
        owners = zip(greetings, keys, strict=True)
        sharing = [name for name, key in owners if keys.count(key) > 1]
        if sharing:
            raise RemoteProtocolError(
                f"{' and '.join(sharing)} came with one key; each party has keys of its own"
            )


def _parse_session_name(message: Envelope) -> str:
    """Return the session's name from the active's message.

    Raises RemoteProtocolError: the name is empty, too long, or not printable ASCII.
    """
    try:
        name = message.payload.decode("ascii")
        if not 0 < len(name) <= SESSION_LETTERS or not name.isprintable():
            raise ValueError("empty, too long, or no letters")
    except ValueError as error:
        raise RemoteProtocolError(
            f"{message.sender} sent no name of a session; it has 1 to {SESSION_LETTERS} letters"
        ) from error
    return name


def _parse_signature(message: Envelope, contract: Contract) -> tuple[bytes, bytes]:
    """Return a peer's signature, and its hello: 32 random bytes for the keys of the common link.

    The caller verifies the signature. The message also has the contract that the peer built, so
    that an error can name the settings that differ from `contract`, which this party built.

    Raises RemoteProtocolError: the peer built another contract, or the message is malformed.
    """
    try:
        signature, hello, document = msgpack.unpackb(message.payload)
        if not all(type(part) is bytes for part in (signature, hello, document)):
            raise TypeError("parts that are no bytes")
        if document != contract.document:
            theirs: Any = json.loads(document)
            ours = contract.model_dump(mode="json")
            differ = [*find_differences(ours, theirs)]
            raise RemoteProtocolError(
                f"{message.sender} and {message.receiver} would sign different contracts, which "
                f"differ in {', '.join(differ) or 'fields of another version'}; give both the same "
                "configuration and start again"
            )
    except (*_MALFORMED, AttributeError) as error:
        raise RemoteProtocolError(
            f"{message.sender} sent something else than a signature"
        ) from error
    return signature, hello


def find_differences(
    ours: dict[str, Any], theirs: dict[str, Any], prefix: str = ""
) -> Iterator[str]:
    """Yield the dotted path of every field of this party whose value differs at the peer.

    `ours`, `theirs`: the nested fields of this party and of the peer. `prefix`: the dotted path of
    the mapping that has them, with a final dot; "" at the top.
    """
    for key, mine in ours.items():
        their_value = theirs.get(key)
        if isinstance(mine, dict) and isinstance(their_value, dict) and mine:
            yield from find_differences(mine, their_value, f"{prefix}{key}.")
        elif their_value != mine:
            yield f"{prefix}{key}"
