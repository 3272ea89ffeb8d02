"""The circuit intersections without a dealer: `circuit` and `opprf` on oblivious transfers.

Run by: the active as the hub, each passive as a member, over authenticated and encrypted links; the
members have none among each other. Protects from: semi-honest parties of which, with several
members, the hub and the first member do not work together: they take the dealer's place. Only the
intersection of all opens. What differs from `apfed_protocols.psi.circuit`:

1. BASE, CHOICES. Hub and member run 128 base transfers, once. For each chunk of bins they extend
   them to triples by EXTENSION, CHALLENGE and PROOF (`apfed_protocols.psi.transfers`).
2. With several members, the first one names a public key (KEY), which the hub hands on. For each
   chunk every other member seals its shares of the bits, and a random share of the result, for the
   first (SEALED, RELAYED), so that hub and first member compute the AND over all members alone.
3. Hub and first member count: each bit that they share becomes a share of a number, by a product of
   their two bits (EXTENSION to PRODUCTS; z = x + y - 2 x y), and they add all of them modulo 2^32.
   From the sum less the minimum, which is below zero where there are too few, they compute the
   sign, shared: the carry into bit 31, by a prefix tree of ANDs. They open it (COUNT), and their
   shares of the sum (SUM) where the size is the output. The others hear of it (VERDICT).
4. `opprf_ot`: the OPRF of a bin is that of `apfed_protocols.psi.ot`, of which a row is a bin: the
   hub's D_b is H(x), of which 85 bits count, and F(b, y) = hash(Q_b + C(H(y)) * s, H(y)).

Security: transfers and triples hold against a party that deviates, and so does the OPRF (see
there). The circuit does not, nor the count: shares are not checked, so that who alters its own
computes another function of the bits, as with a dealer. A member that sends wrong products has the
minimum depend on one bit of the hub's shares for each, which is whether a bin is common. With
several members, a hub that puts a key of its own in place of the first member's reads which of its
IDs each other member has, and one that invents the others' shares has each member count alone. In a
bin the hub tests two IDs at once if these agree in the 85 bits, which takes a search of 2^42 hashes
under a key that nobody chose.

Source: Kogge and Stone, IEEE Trans. Computers 1973 (prefix tree); else as of the modules named.
"""

import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from nacl.bindings import crypto_box, crypto_box_open, crypto_scalarmult_base
from nacl.exceptions import CryptoError

from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.psi import base_ot, code, store, transfers
from apfed_protocols.psi import circuit as dealt
from apfed_protocols.psi.circuit import (
    ENOUGH,
    TOO_FEW,
    UNCHECKED,
    VERDICT,
    VERSION,
    CircuitIntersection,
    Counted,
    Desk,
    HintProgrammer,
    HubHelper,
    Kind,
    Meeting,
    MemberHelper,
    OpprfIntersection,
    Rows,
    combine_member_bits,
    conclude_count,
    count_triple_words,
    decode_hints,
    place_rows,
    unpack_bits,
)
from apfed_protocols.psi.hashing import (
    BITS,
    WORD,
    And,
    BeaverAnd,
    TripleShares,
    Words,
    bins_for,
    random_words,
)
from apfed_protocols.psi.interface import Aligner, Inbox, Output, Turn, message_bytes
from apfed_protocols.psi.ot import (
    PROOF_BYTES,
    HubExtension,
    MemberExtension,
    Tagger,
    add_random_rows,
    extension_bytes,
)
from apfed_protocols.psi.transfers import ExtensionReceiver, ExtensionSender, Numbers
from apfed_protocols.randomness import KEY_BYTES, derive_key, fresh_key, keystream

_SIGN_BIT = 31
_SHIFTS = (1, 2, 4, 8, 16)
_SIGN_TRIPLES = 1 + 2 * len(_SHIFTS)
_BOX_BYTES = 16  # of the authenticator
_NONCE_BYTES = 24
_SUM = struct.Struct("<I")
_MODULUS = 2**32
_OUTPUT_BYTES = 8
_BATCH_BYTES = 2**27
"""Memory of a batch of transfers at either end, beside its vector as it came or went, of each
member at the hub."""
_TOGETHER = (
    "With several members, the hub and its first member together learn which of the hub's IDs each "
    "other member has, and a hub that does not follow the protocol learns it alone."
)


class CircuitOtIntersection(CircuitIntersection):
    """The backend `circuit_ot`: `circuit` without a dealer, with very many bytes; see `leaks`."""

    name: ClassVar[str] = "circuit_ot"
    needs_dealer: ClassVar[bool] = False
    leaks: ClassVar[tuple[str, ...]] = (
        "All parties learn whether the agreed minimum is reached.",
        UNCHECKED,
        _TOGETHER,
    )
    version: ClassVar[int] = VERSION + 4

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the bytes of the circuit, and of one batch of transfers with each member."""
        compared = super().count_announced_bytes(size, own_size=own_size, members=members)
        return compared + _BATCH_BYTES * members

    @property
    def longest(self) -> int:
        """Return the bytes of the longest message: a vector of transfers, or the circuit's."""
        return max(message_bytes(_vector_bytes(self)), super().longest)

    def make_dealer(self, hub: str, members: Sequence[str]) -> Aligner:
        """Raise LocalProtocolError: these intersections have no dealer."""
        raise LocalProtocolError(
            f"a {self.name} intersection has no dealer, only hub {hub} and members "
            f"{', '.join(members)}; the one with a dealer is {self.name.removesuffix('_ot')}"
        )

    def _meet_hub_helper(
        self, desk: Desk, members: Sequence[str], inputs: Meeting
    ) -> Generator[Turn, Inbox, HubHelper]:
        return (yield from _meet_as_hub(desk, members, inputs))

    def _meet_member_helper(
        self, desk: Desk, hub: str, inputs: Meeting
    ) -> Generator[Turn, Inbox, MemberHelper]:
        return (yield from _meet_as_member(desk, hub, inputs))


class OpprfOtIntersection(CircuitOtIntersection, OpprfIntersection):
    """The backend `opprf_ot`: `opprf` without a dealer, with many bytes; see `leaks`."""

    name: ClassVar[str] = "opprf_ot"
    version: ClassVar[int] = VERSION + 6

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the bytes of the circuit and its transfers, or of the OPRF, if these are more.

        A member holds the hub's vector as it came, and what it opens it to, each twice at most.
        """
        compared = super().count_announced_bytes(size, own_size=own_size, members=members)
        return max(compared, 4 * extension_bytes(bins_for(size)) + _BATCH_BYTES)

    @property
    def longest(self) -> int:
        """Return the bytes of the longest message: the vector of the OPRF, or the circuit's."""
        sent = extension_bytes(bins_for(self.agreement.largest_size))
        return max(message_bytes(sent), super().longest)

    def tag_hub_bins(
        self, desk: Desk, members: Sequence[str], inputs: Meeting
    ) -> Generator[Turn, Inbox, Words]:
        """Play steps 1 and 3 of `opprf` at the hub, by an OPRF from transfers; see step 4 of the
        module's docstring. Returns the tags, (M, B).

        `members`: names of all parties but the hub.
        """
        keys = yield from _transfer_as_hub(desk, members, inputs, b"values", code.LENGTH)
        placed = place_rows(inputs)
        targets = store.targets_of(placed.digests)
        bins = len(inputs.row_of_bin)
        points = store.random_elements(fresh_key(), b"points", bins)
        points[placed.used] = targets
        messages = code.keep_message_bits(points)
        extensions = {}
        outputs = {}
        vectors = {}
        for member in members:
            extension = HubExtension(keys[member], add_random_rows(messages, fresh_key()))
            vectors[member], known = extension.make_vector()
            tagger = _make_tagger(inputs, member)
            outputs[member] = _evaluate_prf(tagger, known[placed.used], targets)
            extensions[member] = extension
            del known
        sending = desk.make_turn(Kind.VECTOR, vectors, members)
        del vectors
        inbox = yield sending
        del sending
        proofs = {}
        for member in members:
            challenge = desk.parse_message(inbox, member, Kind.CHALLENGE, KEY_BYTES)
            proofs[member] = extensions.pop(member).prove(challenge)
        inbox = yield desk.make_turn(Kind.PROOF, proofs, members)
        return decode_hints(desk, inbox, inputs, placed, outputs)

    def tag_member_bins(
        self, desk: Desk, hub: str, inputs: Meeting
    ) -> Generator[Turn, Inbox, Words]:
        """Play step 2 of `opprf` at a member, likewise. Returns the tags, (1, B).

        `hub`: the hub's name.
        """
        keys, choices = yield from _transfer_as_member(desk, hub, inputs, b"values", code.LENGTH)
        extension = MemberExtension(keys, choices)
        programmer = HintProgrammer(inputs)
        targets = store.targets_of(programmer.digests)
        bins = bins_for(inputs.sizes[0])
        inbox = yield Turn((), [hub])
        vector = desk.parse_message(inbox, hub, Kind.VECTOR, extension_bytes(bins))
        challenge = fresh_key()
        yield Turn(desk.make_turn(Kind.CHALLENGE, {hub: challenge}, ()).outgoing, ())
        values_B = extension.open_vector(vector, challenge)
        del inbox, vector
        inbox = yield Turn((), [hub])
        extension.check_proof(desk.parse_message(inbox, hub, Kind.PROOF, PROOF_BYTES), hub)
        addends = code.encode_words(code.keep_message_bits(targets)) & extension.choices
        tagger = _make_tagger(inputs, desk.me)
        tags_B, hints = programmer.program(
            desk.me, lambda bins: _evaluate_prf(tagger, values_B[bins] ^ addends, targets)
        )
        yield desk.make_turn(Kind.HINT, {hub: hints}, ())
        return tags_B[None]


def _vector_bytes(backend: CircuitIntersection) -> int:
    """Return the bytes of the longest vector of transfers, of triples or of the count."""
    largest = backend.agreement.largest_size
    slots = backend.count_slots(largest, bins_for(0))
    chunk_words = max(slots, min(dealt.CHUNK_SLOTS // BITS, bins_for(largest) // BITS * slots))
    needed = max(2 * (BITS - 1) * chunk_words, bins_for(largest) // BITS, 2 * _SIGN_TRIPLES)
    return transfers.vector_bytes(min(needed, transfers.BATCH_WORDS))


def _make_tagger(inputs: Meeting, member: str) -> Tagger:
    """Return the hash of F with one member."""
    return Tagger(derive_key(inputs.key, b"opprf_ot function", member.encode()), _OUTPUT_BYTES)


def _evaluate_prf(tagger: Tagger, values: store.Elements, targets: store.Elements) -> Words:
    """Return the OPRF's output of 64 bits for each row of values."""
    return tagger.hash_rows(values, targets).view(WORD)[:, 0]


# Base transfers.


def _name_session(inputs: Meeting, purpose: bytes, member: str) -> bytes:
    """Return the 32 bytes that name the base transfers of one pair for one purpose."""
    return derive_key(inputs.key, b"base transfers", purpose, member.encode())


def _transfer_as_hub(
    desk: Desk, members: Sequence[str], inputs: Meeting, purpose: bytes, count: int
) -> Generator[Turn, Inbox, dict[str, list[tuple[bytes, bytes]]]]:
    """Run `count` base transfers with each member; return both keys of each.

    `purpose`: separates these transfers from others of the session.
    """
    senders = {
        member: base_ot.Sender(fresh_key(), session=_name_session(inputs, purpose, member))
        for member in members
    }
    points = {member: sender.message for member, sender in senders.items()}
    inbox = yield desk.make_turn(Kind.BASE, points, members)
    length = 2 * base_ot.POINT_BYTES * count
    return {
        member: sender.compute_keys(
            desk.parse_message(inbox, member, Kind.CHOICES, length), receiver=member
        )
        for member, sender in senders.items()
    }


def _transfer_as_member(
    desk: Desk, hub: str, inputs: Meeting, purpose: bytes, count: int
) -> Generator[Turn, Inbox, tuple[list[bytes], bytes]]:
    """Run `count` base transfers with the hub; return the key of each choice, and the choices.

    `purpose`: separates these transfers from others of the session.
    """
    choices = keystream(fresh_key(), length=count // 8)
    bits = np.unpackbits(np.frombuffer(choices, np.uint8), bitorder="little").tolist()
    session = _name_session(inputs, purpose, desk.me)
    receiver = base_ot.Receiver(bits, fresh_key(), session=session)
    inbox = yield desk.make_turn(Kind.CHOICES, {hub: receiver.message}, [hub])
    point = desk.parse_message(inbox, hub, Kind.BASE, base_ot.POINT_BYTES)
    return receiver.compute_keys(point, sender=hub), choices


def _derive_hash_key(inputs: Meeting, member: str) -> bytes:
    """Return the key of the hash of transfers with one member."""
    return derive_key(inputs.key, b"transfers", member.encode())


# The hub's helper.


def _meet_as_hub(
    desk: Desk, members: Sequence[str], inputs: Meeting
) -> Generator[Turn, Inbox, "TransferHub"]:
    """Run the base transfers with each member, and hand on the first member's key."""
    keys = yield from _transfer_as_hub(desk, members, inputs, b"bits", transfers.COLUMNS)
    ends = {
        member: ExtensionReceiver(keys[member], _derive_hash_key(inputs, member))
        for member in members
    }
    first, *others = members
    if others:
        inbox = yield Turn((), [first])
        public = desk.parse_message(inbox, first, Kind.KEY, KEY_BYTES)
        yield desk.make_turn(Kind.KEY, dict.fromkeys(others, public), ())
    return TransferHub(desk, members, inputs, ends)


class TransferHub:
    """The hub's end without a dealer; satisfies `HubHelper`."""

    def __init__(
        self,
        desk: Desk,
        members: Sequence[str],
        inputs: Meeting,
        ends: Mapping[str, ExtensionReceiver],
    ) -> None:
        self._desk = desk
        self._members = members
        self._meeting = inputs
        self._ends = ends
        self.sharers = members[:1]

    def take_triples(
        self, words: int
    ) -> Generator[Turn, Inbox, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Make the triples of a chunk with each member, and with the first those for all.

        `words`: how many words of 64 triples.
        """
        pair_words, all_words = count_triple_words(words, self._meeting.slots)
        plans = {
            member: transfers.split_triples(count)
            for member, count in zip(self._members, pair_words, strict=True)
        }
        plans[self._members[0]] = transfers.split_triples(pair_words[0], more=all_words)
        triples = yield from self._make_triples(plans)
        first = triples[self._members[0]]
        return triples, first.split_off(all_words)

    def combine_members(
        self, bits_MW: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Turn, Inbox, Words]:
        """Relay the other members' sealed shares to the first, and AND with it."""
        desk = self._desk
        first, *others = self._members
        if others:
            length = _sealed_bytes(bits_MW.shape[1])
            inbox = yield Turn((), others)
            sealed = [desk.parse_message(inbox, who, Kind.SEALED, length) for who in others]
            yield desk.make_turn(Kind.RELAYED, {first: b"".join(sealed)}, ())
        return (
            yield from combine_member_bits(
                desk, bits_MW, triples, hub=desk.me, members=[first], gate=gate
            )
        )

    def count_common(
        self, share: Words, own_size: int, row_of_bin: Rows
    ) -> Generator[Turn, Inbox, Counted]:
        """Count with the first member, and report the verdict to the others.

        `own_size`: how many IDs this party has.
        """
        desk = self._desk
        first, *others = self._members
        products = []
        for part in _split_words(share):
            numbers = yield from self._extend({first: part})
            corrections = yield from self._receive_corrections(first, BITS * len(part))
            products.append(numbers[first] + corrections * unpack_bits(part))
        bits = unpack_bits(share)
        own_sum = int(bits.sum()) - 2 * _add_numbers(products)
        triples = yield from self._make_triples({first: [_SIGN_TRIPLES]})
        size = yield from _open_count(desk, first, own_sum, triples[first], is_leader=True)
        if others:
            yield desk.make_turn(Kind.VERDICT, dict.fromkeys(others, VERDICT.pack(size)), ())
        return conclude_count(desk, first, size, own_size, bits, row_of_bin)

    def _receive_corrections(self, member: str, count: int) -> Generator[Turn, Inbox, Numbers]:
        inbox = yield Turn((), [member])
        body = self._desk.parse_message(inbox, member, Kind.PRODUCTS, _SUM.size * count)
        return np.frombuffer(body, "<u4")

    def _make_triples(
        self, plans: Mapping[str, Sequence[int]]
    ) -> Generator[Turn, Inbox, dict[str, TripleShares]]:
        """Make batches of these numbers of words of triples with each of these members.

        `plans`: by member, words of each batch.
        """
        parts: dict[str, list[tuple[Words, Words, Words]]] = {member: [] for member in plans}
        for batch in range(max(map(len, plans.values()))):
            choices = {
                member: random_words(fresh_key(), b"choices", 2 * plan[batch])
                for member, plan in plans.items()
                if batch < len(plan)
            }
            numbers = yield from self._extend(choices)
            for member, chosen in choices.items():
                parts[member].append(transfers.choose_triples(chosen, numbers[member]))
        return {member: transfers.join_triples(own) for member, own in parts.items()}

    def _extend(self, choices: Mapping[str, Words]) -> Generator[Turn, Inbox, dict[str, Numbers]]:
        """Play one batch of transfers of these choices with each of these members."""
        desk = self._desk
        vectors = {}
        numbers = {}
        for member, chosen in choices.items():
            vectors[member], numbers[member] = self._ends[member].extend(chosen)
        sending = desk.make_turn(Kind.EXTENSION, vectors, list(choices))
        del vectors
        inbox = yield sending
        del sending
        proofs = {
            member: self._ends[member].prove(
                desk.parse_message(inbox, member, Kind.CHALLENGE, KEY_BYTES)
            )
            for member in choices
        }
        yield desk.make_turn(Kind.PROOF, proofs, ())
        return numbers


# A member's helper.


def _meet_as_member(
    desk: Desk, hub: str, inputs: Meeting
) -> Generator[Turn, Inbox, "TransferMember"]:
    """Run the base transfers with the hub, and name or hear the first member's key."""
    keys, choices = yield from _transfer_as_member(desk, hub, inputs, b"bits", transfers.COLUMNS)
    end = ExtensionSender(keys, choices, _derive_hash_key(inputs, desk.me))
    secret = fresh_key()
    sealer = None
    if len(inputs.slots) > 1 and inputs.place:
        inbox = yield Turn((), [hub])
        sealer = Sealer(secret, desk.parse_message(inbox, hub, Kind.KEY, KEY_BYTES))
    elif len(inputs.slots) > 1:
        yield desk.make_turn(Kind.KEY, {hub: crypto_scalarmult_base(secret)}, ())
    return TransferMember(desk, hub, inputs, end, secret, sealer)


class TransferMember:
    """A member's end without a dealer; satisfies `MemberHelper`.

    Args:
        secret: of its key, where it is the first of several; sealer: where it is not the first.
    """

    def __init__(
        self,
        desk: Desk,
        hub: str,
        inputs: Meeting,
        end: ExtensionSender,
        secret: bytes,
        sealer: "Sealer | None",
    ) -> None:
        self._desk = desk
        self._hub = hub
        self._meeting = inputs
        self._end = end
        self._secret = secret
        self._sealer = sealer
        self._chunk = 0
        self._masks: list[Words] = []
        self.shares = sealer is None

    def take_triples(self, words: int) -> Generator[Turn, Inbox, tuple[TripleShares, TripleShares]]:
        """Make the triples of a chunk with the hub, and at the first member those for all."""
        pair_words, all_words = count_triple_words(words, self._meeting.slots)
        more = all_words if self.shares else 0
        plan = transfers.split_triples(pair_words[self._meeting.place], more=more)
        triples = yield from self._make_triples(plan)
        return triples, triples.split_off(more)

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Turn, Inbox, Words]:
        """Seal the own shares for the first member; or open those of all others, and AND."""
        desk = self._desk
        words = len(bits_W)
        nonce = self._chunk.to_bytes(_NONCE_BYTES, "big")
        self._chunk += 1
        if self._sealer is not None:
            share = random_words(fresh_key(), b"share", words)
            content = bits_W.tobytes() + share.tobytes()
            sealed = self._sealer.seal(content, nonce, hub=self._hub)
            yield desk.make_turn(Kind.SEALED, {self._hub: sealed}, ())
            return share
        others = len(self._meeting.slots) - 1
        opened = np.empty((others, 2, words), np.uint64)
        if others:
            length = _sealed_bytes(words)
            inbox = yield Turn((), [self._hub])
            body = desk.parse_message(inbox, self._hub, Kind.RELAYED, others * length)
            for place in range(others):
                sealed = body[place * length : (place + 1) * length]
                content = _open_sealed(sealed, nonce, self._secret, self._hub)
                opened[place] = np.frombuffer(content, WORD).reshape(2, words)
        share = yield from combine_member_bits(
            desk,
            np.concatenate([bits_W[None], opened[:, 0]]),
            triples,
            hub=self._hub,
            members=(),
            gate=gate,
        )
        self._masks.append(np.bitwise_xor.reduce(opened[:, 1], axis=0))
        return share

    def count_common(self, share: Words, own_size: int) -> Generator[Turn, Inbox, Counted]:
        """Count with the hub, or hear its verdict.

        `own_size`: how many IDs this party has.
        """
        desk = self._desk
        hub = self._hub
        if not self.shares:
            inbox = yield Turn((), [hub])
            body = desk.parse_message(inbox, hub, Kind.VERDICT, VERDICT.size)
            (size,) = VERDICT.unpack(body)
            return conclude_count(desk, hub, size, own_size, unpack_bits(share), None)
        bits = unpack_bits(share)
        zeros = []
        for part in _split_words(share):
            known, other = yield from self._extend(len(part))
            corrections = (known - other + unpack_bits(part)).astype("<u4")
            yield desk.make_turn(Kind.PRODUCTS, {hub: corrections.tobytes()}, ())
            zeros.append(known)
        own_sum = int(bits.sum()) + 2 * _add_numbers(zeros)
        triples = yield from self._make_triples([_SIGN_TRIPLES])
        size = yield from _open_count(desk, hub, own_sum, triples, is_leader=False)
        masked = share ^ np.concatenate(self._masks)
        return conclude_count(desk, hub, size, own_size, unpack_bits(masked), None)

    def _make_triples(self, plan: Sequence[int]) -> Generator[Turn, Inbox, TripleShares]:
        """Make batches of these numbers of words of triples with the hub."""
        parts = []
        for words in plan:
            zeros, ones = yield from self._extend(2 * words)
            parts.append(transfers.derive_triples(zeros, ones))
        return transfers.join_triples(parts)

    def _extend(self, words: int) -> Generator[Turn, Inbox, tuple[Numbers, Numbers]]:
        """Play one batch of 64 `words` transfers; return both numbers of each, once checked."""
        desk = self._desk
        hub = self._hub
        inbox = yield Turn((), [hub])
        vector = desk.parse_message(inbox, hub, Kind.EXTENSION, transfers.vector_bytes(words))
        challenge = fresh_key()
        yield Turn(desk.make_turn(Kind.CHALLENGE, {hub: challenge}, ()).outgoing, ())
        numbers = self._end.open_vector(vector, words, challenge)
        del inbox, vector
        inbox = yield Turn((), [hub])
        proof = desk.parse_message(inbox, hub, Kind.PROOF, transfers.PROOF_BYTES)
        self._end.check_proof(proof, hub)
        return numbers


# Between hub and first member.


class Sealer:
    """A sealer of a member's shares for the first member, by X25519, XSalsa20 and Poly1305.

    Args:
        secret: 32 bytes for this intersection alone; public: the first member's key.
    """

    def __init__(self, secret: bytes, public: bytes) -> None:
        self._secret = secret
        self._public = public
        self._own_public = crypto_scalarmult_base(secret)

    def seal(self, content: bytes, nonce: bytes, *, hub: str) -> bytes:
        """Return the own public key and the sealed content; a nonce serves once.

        Raises RemoteProtocolError: the key that the hub handed on is none.
        """
        try:
            box = crypto_box(content, nonce, self._public, self._secret)
        except RuntimeError:
            raise RemoteProtocolError(
                f"{hub} handed on a key of low order, under which nothing is secret; it does not "
                "follow the protocol"
            ) from None
        return self._own_public + box


def _open_sealed(sealed: bytes, nonce: bytes, secret: bytes, hub: str) -> bytes:
    """Return what another member sealed. Raises RemoteProtocolError: it was altered on its way.

    `nonce`: of the AEAD. `secret`: the key both members share. `hub`: the hub's name.
    """
    try:
        return crypto_box_open(sealed[KEY_BYTES:], nonce, sealed[:KEY_BYTES], secret)
    except CryptoError:
        raise RemoteProtocolError(
            f"{hub} handed on a share that no member sealed so; it does not follow the protocol"
        ) from None


def _sealed_bytes(words: int) -> int:
    """Return the bytes of sealed shares of so many words: a key, the box, two words each."""
    return KEY_BYTES + _BOX_BYTES + 2 * WORD.itemsize * words


def _split_words(words: Words) -> Iterator[Words]:
    """Split words into batches of transfers."""
    most = transfers.BATCH_WORDS
    return (words[start : start + most] for start in range(0, len(words), most))


def _add_numbers(parts: Sequence[Numbers]) -> int:
    """Return the sum of all numbers."""
    return sum(int(part.sum(dtype=np.uint64)) for part in parts)


def _open_count(
    desk: Desk, peer: str, own_sum: int, triples: TripleShares, *, is_leader: bool
) -> Generator[Turn, Inbox, int]:
    """Compare the shared sum with the minimum; return the verdict, as of a dealer.

    `own_sum`: this party's share of the number of common IDs. `is_leader`: whether this is the one
    party that adds the public terms.

    Raises RemoteProtocolError: the peer's share of the sign is no bit.
    """
    offset = desk.agreement.minimum_rows if is_leader else 0
    sign = yield from _share_sign(desk, peer, own_sum - offset, triples, is_leader=is_leader)
    inbox = yield desk.make_turn(Kind.COUNT, {peer: bytes([sign])}, [peer])
    (other,) = desk.parse_message(inbox, peer, Kind.COUNT, 1)
    if other > 1:
        raise RemoteProtocolError(f"{peer} sent {other} as its share of a bit, expected 0 or 1")
    if sign ^ other:
        return TOO_FEW
    if desk.agreement.output is not Output.SIZE:
        return ENOUGH
    own_share = own_sum % _MODULUS
    inbox = yield desk.make_turn(Kind.SUM, {peer: _SUM.pack(own_share)}, [peer])
    (other_share,) = _SUM.unpack(desk.parse_message(inbox, peer, Kind.SUM, _SUM.size))
    return int((own_share + other_share) % _MODULUS)


def _share_sign(
    desk: Desk, peer: str, own_size: int, triples: TripleShares, *, is_leader: bool
) -> Generator[Turn, Inbox, int]:
    """Return a share of bit 31 of the sum of both parties' numbers, modulo 2^32.

    All 32 places lie in one word, of which a shift by k moves each up by k.

    `own_size`: how many IDs this party has. `is_leader`: whether this is the one party that adds
    the public terms.
    """
    bits = np.array([own_size % _MODULUS], np.uint64)
    nothing = np.zeros_like(bits)
    left, right = (bits, nothing) if is_leader else (nothing, bits)
    carries = yield from _and_with(desk, peer, left, right, triples, is_leader=is_leader)
    spreads = bits
    for shift in _SHIFTS:
        lower = np.stack([carries, spreads]) << np.uint64(shift)
        both = yield from _and_with(
            desk, peer, np.stack([spreads, spreads]), lower, triples, is_leader=is_leader
        )
        carries = carries ^ both[0]
        spreads = both[1]
    return int((bits[0] ^ carries[0] << np.uint64(1)) >> np.uint64(_SIGN_BIT)) & 1


def _and_with(
    desk: Desk, peer: str, x: Words, y: Words, triples: TripleShares, *, is_leader: bool
) -> Generator[Turn, Inbox, Words]:
    """Return shares of x AND y.

    `is_leader`: whether this is the one party that adds the public terms.
    """
    gate = BeaverAnd(x, y, triples.take_triple(x.shape), is_leader=is_leader)
    own = gate.mask_inputs()
    inbox = yield desk.make_turn(Kind.MASKED, {peer: own.tobytes()}, [peer])
    return gate.compute_share(own ^ desk.parse_words(inbox, peer, Kind.MASKED, own.shape))
