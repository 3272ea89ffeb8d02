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
    CircuitInputs,
    CircuitIntersection,
    Counted,
    Endpoint,
    HintProgrammer,
    HubHelper,
    Kind,
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
    count_bins,
    expand_words,
)
from apfed_protocols.psi.interface import Aligner, Inbox, Output, Turn, count_message_bytes
from apfed_protocols.psi.ot import (
    PROOF_BYTES,
    HubExtension,
    MemberExtension,
    Tagger,
    add_random_rows,
    count_extension_bytes,
)
from apfed_protocols.psi.transfers import ExtensionReceiver, ExtensionSender, Numbers
from apfed_protocols.randomness import KEY_BYTES, derive_key, fresh_key, keystream

# The sign of a 32-bit number is computed by a prefix tree of ANDs, one level for each shift.
_SIGN_BIT = 31
_SHIFTS = (1, 2, 4, 8, 16)
_SIGN_TRIPLES = 1 + 2 * len(_SHIFTS)
_BOX_BYTES = 16  # of Poly1305's authenticator
_NONCE_BYTES = 24
_SUM = struct.Struct("<I")
_MODULUS = 2**32
_OUTPUT_BYTES = 8
_BATCH_BYTES = 2**27
"""Memory of a batch of transfers with one peer, beside the message with its vector."""
_TOGETHER = (
    "With several members, the hub and its first member together learn which of the hub's IDs each "
    "other member has, and a hub that does not follow the protocol learns it alone."
)


class CircuitOtIntersection(CircuitIntersection):
    """The backend `circuit_ot`: `circuit` without a dealer, with very many bytes; what it reveals
    is in `leaks`.
    """

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
        """Return the bytes of memory that a role allocates because a peer announces `size` IDs, if
        this party has `own_size` and there are so many members: those of the circuit, and of one
        batch of transfers with each member.
        """
        compared = super().count_announced_bytes(size, own_size=own_size, members=members)
        return compared + _BATCH_BYTES * members

    @property
    def longest(self) -> int:
        """Return the bytes of the longest message that a role accepts: a vector of transfers, or
        one of the circuit.
        """
        return max(count_message_bytes(_count_vector_bytes(self)), super().longest)

    def make_dealer(self, hub: str, members: Sequence[str]) -> Aligner:
        """Raise LocalProtocolError: these intersections have no dealer."""
        raise LocalProtocolError(
            f"a {self.name} intersection has no dealer, only hub {hub} and members "
            f"{', '.join(members)}; the one with a dealer is {self.name.removesuffix('_ot')}"
        )

    def _make_hub_helper(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Turn, Inbox, HubHelper]:
        """Run the base oblivious transfers with each member; return the object by which the hub
        makes triples and counts without a dealer.
        """
        return (yield from _start_hub_transfers(endpoint, members, inputs))

    def _make_member_helper(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Turn, Inbox, MemberHelper]:
        """Run the base oblivious transfers with the hub; return the object by which the member
        makes triples and counts without a dealer.
        """
        return (yield from _start_member_transfers(endpoint, hub, inputs))


class OpprfOtIntersection(CircuitOtIntersection, OpprfIntersection):
    """The backend `opprf_ot`: `opprf` without a dealer, with many bytes; what it reveals is in
    `leaks`.
    """

    name: ClassVar[str] = "opprf_ot"
    version: ClassVar[int] = VERSION + 6

    @classmethod
    def count_announced_bytes(cls, size: int, *, own_size: int = 0, members: int = 1) -> int:
        """Return the bytes of memory that a role allocates because a peer announces `size` IDs, if
        this party has `own_size` and there are so many members: those of the circuit and its
        transfers or, if they are more, those of the OPRF, of which a member holds the hub's vector
        and the matrix from it, each twice at most.
        """
        compared = super().count_announced_bytes(size, own_size=own_size, members=members)
        return max(compared, 4 * count_extension_bytes(count_bins(size)) + _BATCH_BYTES)

    @property
    def longest(self) -> int:
        """Return the bytes of the longest message that a role accepts: the vector of the OPRF, or
        one of the circuit.
        """
        sent = count_extension_bytes(count_bins(self.agreement.largest_size))
        return max(count_message_bytes(sent), super().longest)

    def tag_hub_bins(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Turn, Inbox, Words]:
        """Evaluate, at the hub (the active), the oblivious PRF from transfers (step 4 of the
        module's docstring) on its ID in each bin, and decode each member's hints; return one tag
        for each bin and member, (members, bins), equal to the member's for a common ID. `inputs`:
        the hub's IDs in bins.
        """
        keys = yield from _transfer_as_hub(endpoint, members, inputs, b"values", code.LENGTH)
        placed = place_rows(inputs)
        targets = store.extract_targets(placed.digests)
        bins = len(inputs.row_of_bin)
        # The hash of the hub's ID in each bin, random in an empty one.
        points = store.expand_elements(fresh_key(), b"points", bins)
        points[placed.used] = targets
        messages = code.mask_message_bits(points)
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
        sending = endpoint.make_turn(Kind.VECTOR, vectors, members)
        del vectors
        inbox = yield sending
        del sending
        proofs = {}
        for member in members:
            challenge = endpoint.parse_message(inbox, member, Kind.CHALLENGE, KEY_BYTES)
            proofs[member] = extensions.pop(member).prove(challenge)
        inbox = yield endpoint.make_turn(Kind.PROOF, proofs, members)
        return decode_hints(endpoint, inbox, inputs, placed, outputs)

    def tag_member_bins(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Turn, Inbox, Words]:
        """Draw, at a member (a passive), one random tag for each bin, and send the hub hints that
        give it the same tags for common IDs, masked by the oblivious PRF from transfers (step 4 of
        the module's docstring); return the tags, (1, bins). `inputs`: the member's IDs in bins.
        """
        keys, choices = yield from _transfer_as_member(
            endpoint, hub, inputs, b"values", code.LENGTH
        )
        extension = MemberExtension(keys, choices)
        programmer = HintProgrammer(inputs)
        targets = store.extract_targets(programmer.digests)
        bins = count_bins(inputs.sizes[0])
        inbox = yield Turn((), [hub])
        vector = endpoint.parse_message(inbox, hub, Kind.VECTOR, count_extension_bytes(bins))
        challenge = fresh_key()
        yield Turn(endpoint.make_turn(Kind.CHALLENGE, {hub: challenge}, ()).outgoing, ())
        values_B = extension.open_vector(vector, challenge)
        del inbox, vector
        inbox = yield Turn((), [hub])
        extension.check_proof(endpoint.parse_message(inbox, hub, Kind.PROOF, PROOF_BYTES), hub)
        addends = code.encode_words(code.mask_message_bits(targets)) & extension.choices
        tagger = _make_tagger(inputs, endpoint.me)
        tags_B, hints = programmer.program(
            endpoint.me, lambda bins: _evaluate_prf(tagger, values_B[bins] ^ addends, targets)
        )
        yield endpoint.make_turn(Kind.HINT, {hub: hints}, ())
        return tags_B[None]


def _count_vector_bytes(backend: CircuitIntersection) -> int:
    """Return the bytes of the longest vector of transfers under the backend's agreement, for
    triples or for the count.
    """
    largest = backend.agreement.largest_size
    slots = backend.count_slots(largest, count_bins(0))
    bin_words = count_bins(largest) // BITS
    chunk_words = max(slots, min(dealt.CHUNK_SLOTS // BITS, bin_words * slots))
    # Two transfers for each triple of a comparison, one for each bin counted, two for the sign's.
    needed = max(2 * (BITS - 1) * chunk_words, bin_words, 2 * _SIGN_TRIPLES)
    return transfers.count_vector_bytes(min(needed, transfers.BATCH_WORDS))


def _make_tagger(inputs: CircuitInputs, member: str) -> Tagger:
    """Return the keyed hash that ends the oblivious PRF between the hub and one member."""
    return Tagger(derive_key(inputs.key, b"opprf_ot function", member.encode()), _OUTPUT_BYTES)


def _evaluate_prf(tagger: Tagger, values: store.Elements, targets: store.Elements) -> Words:
    """Return the output of the oblivious PRF, 64 bits, for each value from the transfers, (n, 8)
    words, and the hash H(x) of its ID, (n, 2) words.
    """
    return tagger.hash_rows(values, targets).view(WORD)[:, 0]


# Base transfers.


def _name_session(inputs: CircuitInputs, purpose: bytes, member: str) -> bytes:
    """Return the 32 bytes that identify, at both parties, the base oblivious transfers of the hub
    with one member for one purpose, derived from the key in `inputs` that all share.
    """
    return derive_key(inputs.key, b"base transfers", purpose, member.encode())


def _transfer_as_hub(
    endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs, purpose: bytes, count: int
) -> Generator[Turn, Inbox, dict[str, list[tuple[bytes, bytes]]]]:
    """Run `count` base transfers with each member at the hub; return, by member, both keys of each
    transfer.

    `inputs`: the hub's inputs to the circuit, whose key names the session. `purpose`: a label that
    separates these transfers from others.
    """
    senders = {
        member: base_ot.Sender(fresh_key(), session=_name_session(inputs, purpose, member))
        for member in members
    }
    points = {member: sender.message for member, sender in senders.items()}
    inbox = yield endpoint.make_turn(Kind.BASE, points, members)
    length = 2 * base_ot.POINT_BYTES * count
    return {
        member: sender.compute_keys(
            endpoint.parse_message(inbox, member, Kind.CHOICES, length), receiver=member
        )
        for member, sender in senders.items()
    }


def _transfer_as_member(
    endpoint: Endpoint, hub: str, inputs: CircuitInputs, purpose: bytes, count: int
) -> Generator[Turn, Inbox, tuple[list[bytes], bytes]]:
    """Run `count` base transfers with the hub at a member, with random choices; return the chosen
    key of each transfer, and the choices as bytes.

    `inputs`: the member's inputs to the circuit, whose key names the session. `purpose`: a label
    that separates these transfers from others.
    """
    choices = keystream(fresh_key(), length=count // 8)
    bits = np.unpackbits(np.frombuffer(choices, np.uint8), bitorder="little").tolist()
    session = _name_session(inputs, purpose, endpoint.me)
    receiver = base_ot.Receiver(bits, fresh_key(), session=session)
    inbox = yield endpoint.make_turn(Kind.CHOICES, {hub: receiver.message}, [hub])
    point = endpoint.parse_message(inbox, hub, Kind.BASE, base_ot.POINT_BYTES)
    return receiver.compute_keys(point, sender=hub), choices


def _derive_hash_key(inputs: CircuitInputs, member: str) -> bytes:
    """Return the key of the hash that turns transfers of the hub with one member into numbers,
    derived from the key in `inputs` that all share.
    """
    return derive_key(inputs.key, b"transfers", member.encode())


# The hub's triples and counts.


def _start_hub_transfers(
    endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
) -> Generator[Turn, Inbox, "TransferHub"]:
    """Run the base oblivious transfers with each member at the hub (the active), and forward the
    first member's public key to the other members, who encrypt their shares for it. `inputs`: this
    party's IDs, hashed into bins under a key that all share.
    """
    keys = yield from _transfer_as_hub(endpoint, members, inputs, b"bits", transfers.COLUMNS)
    receivers = {
        member: ExtensionReceiver(keys[member], _derive_hash_key(inputs, member))
        for member in members
    }
    first, *others = members
    if others:
        inbox = yield Turn((), [first])
        public = endpoint.parse_message(inbox, first, Kind.KEY, KEY_BYTES)
        yield endpoint.make_turn(Kind.KEY, dict.fromkeys(others, public), ())
    return TransferHub(endpoint, members, inputs, receivers)


class TransferHub:
    """The hub's multiplication triples and count of common IDs without a dealer, by oblivious
    transfers; satisfies `HubHelper`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        members: Sequence[str],
        inputs: CircuitInputs,
        receivers: Mapping[str, ExtensionReceiver],
    ) -> None:
        """Keep the hub's role in the transfers with each member, `receivers`, and the names of the
        members, of whom the first one counts with the hub.
        """
        self._endpoint = endpoint
        self._members = members
        self._inputs = inputs
        self._receivers = receivers
        self.sharers = members[:1]

    def take_triples(
        self, words: int
    ) -> Generator[Turn, Inbox, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Make the triples for a chunk of 64 `words` bins, and return the hub's shares: by member
        for the comparison with it, and with the first member for the AND over all.
        """
        pair_words, all_words = count_triple_words(words, self._inputs.slots)
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
        """Forward the other members' encrypted shares to the first member, and compute the AND over
        all members with it; return the hub's share, (words,). `bits_MW`: share of the bit with each
        of M members, in W words of 64 bins, (members, words). `triples`: shares of the triples that
        it consumes; `gate`: class that computes AND of XOR-shared words.
        """
        endpoint = self._endpoint
        first, *others = self._members
        if others:
            length = _count_sealed_bytes(bits_MW.shape[1])
            inbox = yield Turn((), others)
            sealed = [
                endpoint.parse_message(inbox, member, Kind.SEALED, length) for member in others
            ]
            yield endpoint.make_turn(Kind.RELAYED, {first: b"".join(sealed)}, ())
        return (
            yield from combine_member_bits(
                endpoint, bits_MW, triples, hub=endpoint.me, members=[first], gate=gate
            )
        )

    def count_common(
        self, share: Words, own_size: int, row_of_bin: Rows
    ) -> Generator[Turn, Inbox, Counted]:
        """Count the common IDs with the first member, and send the verdict to the others (step 3 of
        the module's docstring); return the hub's result, None if rows are to be revealed. `share`:
        the hub's XOR share of which bins are common. `own_size`: the number of its IDs.
        """
        endpoint = self._endpoint
        first, *others = self._members
        products = []
        for part in _split_words(share):
            numbers = yield from self._extend({first: part})
            corrections = yield from self._receive_corrections(first, BITS * len(part))
            # Additive share of the product x y of this party's bit x and the first member's y.
            products.append(numbers[first] + corrections * unpack_bits(part))
        bits = unpack_bits(share)
        # x XOR y = x + y - 2 x y: this party adds its x, and its shares of - 2 x y.
        own_sum = int(bits.sum()) - 2 * _add_numbers(products)
        triples = yield from self._make_triples({first: [_SIGN_TRIPLES]})
        size = yield from _open_count(endpoint, first, own_sum, triples[first], is_leader=True)
        if others:
            yield endpoint.make_turn(Kind.VERDICT, dict.fromkeys(others, VERDICT.pack(size)), ())
        return conclude_count(endpoint, first, size, own_size, bits, row_of_bin)

    def _receive_corrections(self, member: str, count: int) -> Generator[Turn, Inbox, Numbers]:
        """Receive the member's message with one number for each of `count` products of bits."""
        inbox = yield Turn((), [member])
        body = self._endpoint.parse_message(inbox, member, Kind.PRODUCTS, _SUM.size * count)
        return np.frombuffer(body, "<u4")

    def _make_triples(
        self, plans: Mapping[str, Sequence[int]]
    ) -> Generator[Turn, Inbox, dict[str, TripleShares]]:
        """Make triples with members, batch by batch; return the hub's shares by member.

        `plans`: number of words of 64 triples in each batch, by member.
        """
        parts: dict[str, list[tuple[Words, Words, Words]]] = {member: [] for member in plans}
        for batch in range(max(map(len, plans.values()))):
            choices = {
                member: expand_words(fresh_key(), b"choices", 2 * plan[batch])
                for member, plan in plans.items()
                if batch < len(plan)
            }
            numbers = yield from self._extend(choices)
            for member, chosen in choices.items():
                parts[member].append(transfers.choose_triples(chosen, numbers[member]))
        return {member: transfers.join_triples(own) for member, own in parts.items()}

    def _extend(self, choices: Mapping[str, Words]) -> Generator[Turn, Inbox, dict[str, Numbers]]:
        """Run one batch of oblivious transfers with each of these members; return, by member, the
        hub's 32-bit number of each transfer, which its choice bit selects.

        `choices`: choice bits of the hub, by member, 64 transfers a word.
        """
        endpoint = self._endpoint
        vectors = {}
        numbers = {}
        for member, chosen in choices.items():
            vectors[member], numbers[member] = self._receivers[member].extend(chosen)
        sending = endpoint.make_turn(Kind.EXTENSION, vectors, list(choices))
        del vectors
        inbox = yield sending
        del sending
        proofs = {
            member: self._receivers[member].prove(
                endpoint.parse_message(inbox, member, Kind.CHALLENGE, KEY_BYTES)
            )
            for member in choices
        }
        yield endpoint.make_turn(Kind.PROOF, proofs, ())
        return numbers


# A member's triples and counts.


def _start_member_transfers(
    endpoint: Endpoint, hub: str, inputs: CircuitInputs
) -> Generator[Turn, Inbox, "TransferMember"]:
    """Run the base oblivious transfers with the hub at a member (a passive); with several members,
    send this member's public key if it is the first, else receive the first one's. `inputs`: this
    party's IDs, hashed into bins under a key that all share.
    """
    keys, choices = yield from _transfer_as_member(
        endpoint, hub, inputs, b"bits", transfers.COLUMNS
    )
    sender = ExtensionSender(keys, choices, _derive_hash_key(inputs, endpoint.me))
    secret = fresh_key()
    sealer = None
    has_other_members = len(inputs.slots) > 1
    if has_other_members and inputs.member_index > 0:
        inbox = yield Turn((), [hub])
        sealer = Sealer(secret, endpoint.parse_message(inbox, hub, Kind.KEY, KEY_BYTES))
    elif has_other_members:
        yield endpoint.make_turn(Kind.KEY, {hub: crypto_scalarmult_base(secret)}, ())
    return TransferMember(endpoint, hub, inputs, sender, secret, sealer)


class TransferMember:
    """A member's multiplication triples and count of common IDs without a dealer, by oblivious
    transfers; satisfies `MemberHelper`.

    Args:
        endpoint: frames and parses the member's messages.
        hub: the hub's name.
        inputs: the member's inputs to the circuit.
        sender: the member's role in the transfers with the hub.
        secret: private X25519 key of this member, by which the first member decrypts the others'
            shares.
        sealer: encrypts shares for the first member; None at the first member itself.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hub: str,
        inputs: CircuitInputs,
        sender: ExtensionSender,
        secret: bytes,
        sealer: "Sealer | None",
    ) -> None:
        """Keep the member's inputs, its role `sender` in the transfers with the hub, its private
        key `secret`, and `sealer`, which encrypts shares for the first member (None at that one).
        """
        self._endpoint = endpoint
        self._hub = hub
        self._inputs = inputs
        self._sender = sender
        self._secret = secret
        self._sealer = sealer
        self._chunk = 0
        # At the first member, by chunk: the sum of the other members' random shares of the result.
        self._masks: list[Words] = []
        self.shares = sealer is None

    def take_triples(self, words: int) -> Generator[Turn, Inbox, tuple[TripleShares, TripleShares]]:
        """Make the triples for a chunk of 64 `words` bins with the hub, and return this member's
        shares: those for the comparison, and at the first member those for the AND over all (none
            at others).
        """
        pair_words, all_words = count_triple_words(words, self._inputs.slots)
        more = all_words if self.shares else 0
        plan = transfers.split_triples(pair_words[self._inputs.member_index], more=more)
        triples = yield from self._make_triples(plan)
        return triples, triples.split_off(more)

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate: type[And]
    ) -> Generator[Turn, Inbox, Words]:
        """Return this member's share, (words,), of the AND over all members. `bits_W`: share of
        this member's own bit with the hub for each bin, in W words of 64 bins, (words,). `triples`:
        shares of the triples that it consumes; `gate`: class that computes AND of XOR-shared words.

        The first member decrypts the others' shares and computes the AND with the hub. Another one
        encrypts its share for the first member, and returns a random share of the result.
        """
        endpoint = self._endpoint
        words = len(bits_W)
        # Keys serve one intersection, so the number of the chunk is a nonce that is used once.
        nonce = self._chunk.to_bytes(_NONCE_BYTES, "big")
        self._chunk += 1
        if self._sealer is not None:
            share = expand_words(fresh_key(), b"share", words)
            content = bits_W.tobytes() + share.tobytes()
            sealed = self._sealer.seal(content, nonce, hub=self._hub)
            yield endpoint.make_turn(Kind.SEALED, {self._hub: sealed}, ())
            return share
        others = len(self._inputs.slots) - 1
        # Of each other member its share of the bits, and its random share of the result.
        others_shares = np.empty((others, 2, words), np.uint64)
        if others:
            length = _count_sealed_bytes(words)
            inbox = yield Turn((), [self._hub])
            body = endpoint.parse_message(inbox, self._hub, Kind.RELAYED, others * length)
            for index in range(others):
                sealed = body[index * length : (index + 1) * length]
                content = _open_sealed(sealed, nonce, self._secret, self._hub)
                others_shares[index] = np.frombuffer(content, WORD).reshape(2, words)
        share = yield from combine_member_bits(
            endpoint,
            np.concatenate([bits_W[None], others_shares[:, 0]]),
            triples,
            hub=self._hub,
            members=(),
            gate=gate,
        )
        self._masks.append(np.bitwise_xor.reduce(others_shares[:, 1], axis=0))
        return share

    def count_common(self, share: Words, own_size: int) -> Generator[Turn, Inbox, Counted]:
        """Count the common IDs with the hub, or, if this is not the first member, receive the hub's
        verdict; return the member's result, None if rows are to be revealed. `share`: this member's
        XOR share of which bins are common, (words,). `own_size`: the number of its IDs.
        """
        endpoint = self._endpoint
        hub = self._hub
        if not self.shares:
            inbox = yield Turn((), [hub])
            body = endpoint.parse_message(inbox, hub, Kind.VERDICT, VERDICT.size)
            (size,) = VERDICT.unpack(body)
            return conclude_count(endpoint, hub, size, own_size, unpack_bits(share), None)
        bits = unpack_bits(share)
        numbers_of_zero = []
        for part in _split_words(share):
            of_zero, of_one = yield from self._extend(len(part))
            # By this the hub gets m0 + x y for its bit x, and this member has -m0.
            corrections = (of_zero - of_one + unpack_bits(part)).astype("<u4")
            yield endpoint.make_turn(Kind.PRODUCTS, {hub: corrections.tobytes()}, ())
            numbers_of_zero.append(of_zero)
        own_sum = int(bits.sum()) + 2 * _add_numbers(numbers_of_zero)
        triples = yield from self._make_triples([_SIGN_TRIPLES])
        size = yield from _open_count(endpoint, hub, own_sum, triples, is_leader=False)
        masked = share ^ np.concatenate(self._masks)
        return conclude_count(endpoint, hub, size, own_size, unpack_bits(masked), None)

    def _make_triples(self, plan: Sequence[int]) -> Generator[Turn, Inbox, TripleShares]:
        """Make triples with the hub, batch by batch; return this member's shares.

        `plan`: number of words of 64 triples in each batch.
        """
        parts = []
        for words in plan:
            numbers_of_zero, numbers_of_one = yield from self._extend(2 * words)
            parts.append(transfers.derive_triples(numbers_of_zero, numbers_of_one))
        return transfers.join_triples(parts)

    def _extend(self, words: int) -> Generator[Turn, Inbox, tuple[Numbers, Numbers]]:
        """Run one batch of 64 `words` transfers with the hub, and check its proof; return this
        member's numbers for choice 0 and for choice 1.
        """
        endpoint = self._endpoint
        hub = self._hub
        inbox = yield Turn((), [hub])
        vector = endpoint.parse_message(
            inbox, hub, Kind.EXTENSION, transfers.count_vector_bytes(words)
        )
        challenge = fresh_key()
        yield Turn(endpoint.make_turn(Kind.CHALLENGE, {hub: challenge}, ()).outgoing, ())
        numbers = self._sender.open_vector(vector, words, challenge)
        del inbox, vector
        inbox = yield Turn((), [hub])
        proof = endpoint.parse_message(inbox, hub, Kind.PROOF, transfers.PROOF_BYTES)
        self._sender.check_proof(proof, hub)
        return numbers


# Between hub and first member.


class Sealer:
    """The encryption of a member's shares for the first member, by X25519, XSalsa20 and Poly1305.

    Args:
        secret: this member's private key, 32 bytes, used for this intersection only.
        public: the first member's public key.
    """

    def __init__(self, secret: bytes, public: bytes) -> None:
        """Keep this member's private key `secret` and the first member's public key `public`."""
        self._secret = secret
        self._public = public
        self._own_public = crypto_scalarmult_base(secret)

    def seal(self, content: bytes, nonce: bytes, *, hub: str) -> bytes:
        """Return this member's public key, followed by the encrypted content; each nonce is used
        once.

        Raises RemoteProtocolError: the first member's key, which `hub` forwarded, is of low order.
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
    """Return the content that another member encrypted by `Sealer.seal`.

    Args:
        sealed: the other member's public key and the encrypted content.
        nonce: 24 bytes under which the content was encrypted.
        secret: this member's private X25519 key.
        hub: who forwarded it, for errors.

    Raises RemoteProtocolError: the content does not authenticate.
    """
    try:
        return crypto_box_open(sealed[KEY_BYTES:], nonce, sealed[:KEY_BYTES], secret)
    except CryptoError:
        raise RemoteProtocolError(
            f"{hub} handed on a share that no member sealed so; it does not follow the protocol"
        ) from None


def _count_sealed_bytes(words: int) -> int:
    """Return the bytes of a member's encrypted shares for a chunk of this number of words: a public
    key, an authenticator, and two shares.
    """
    return KEY_BYTES + _BOX_BYTES + 2 * WORD.itemsize * words


def _split_words(words: Words) -> Iterator[Words]:
    """Return the words in pieces of at most `BATCH_WORDS`, one batch of transfers."""
    max_words = transfers.BATCH_WORDS
    return (words[start : start + max_words] for start in range(0, len(words), max_words))


def _add_numbers(parts: Sequence[Numbers]) -> int:
    """Return the sum of the 32-bit numbers in all parts, as a Python integer."""
    return sum(int(part.sum(dtype=np.uint64)) for part in parts)


def _open_count(
    endpoint: Endpoint, peer: str, own_sum: int, triples: TripleShares, *, is_leader: bool
) -> Generator[Turn, Inbox, int]:
    """Compare the number of common IDs, of which hub and first member have additive shares modulo
    2^32, with the agreed minimum; return the verdict: `TOO_FEW`, `ENOUGH`, or the number if it is
    the output.

    Args:
        endpoint: frames and parses this party's messages.
        peer: name of the other of the two.
        own_sum: this party's additive share of the number.
        triples: this party's shares of `_SIGN_TRIPLES` words of triples.
        is_leader: whether this is the hub, which subtracts the minimum and adds public terms.

    Raises RemoteProtocolError: the peer's share of the sign is no bit.
    """
    offset = endpoint.agreement.minimum_rows if is_leader else 0
    sign = yield from _share_sign(endpoint, peer, own_sum - offset, triples, is_leader=is_leader)
    inbox = yield endpoint.make_turn(Kind.COUNT, {peer: bytes([sign])}, [peer])
    (other,) = endpoint.parse_message(inbox, peer, Kind.COUNT, 1)
    if other > 1:
        raise RemoteProtocolError(f"{peer} sent {other} as its share of a bit, expected 0 or 1")
    if sign ^ other:
        return TOO_FEW
    if endpoint.agreement.output is not Output.SIZE:
        return ENOUGH
    # The number itself is the output: both parties reveal their shares of it.
    own_share = own_sum % _MODULUS
    inbox = yield endpoint.make_turn(Kind.SUM, {peer: _SUM.pack(own_share)}, [peer])
    (other_share,) = _SUM.unpack(endpoint.parse_message(inbox, peer, Kind.SUM, _SUM.size))
    return int((own_share + other_share) % _MODULUS)


def _share_sign(
    endpoint: Endpoint, peer: str, own_number: int, triples: TripleShares, *, is_leader: bool
) -> Generator[Turn, Inbox, int]:
    """Return this party's XOR share of bit 31, the sign, of the sum of both parties' numbers modulo
    2^32, by a carry-lookahead adder (Kogge and Stone 1973).

    All 32 positions are bits of one word. Position i generates a carry if both numbers have its
    bit, and propagates one if exactly one number has it; a shift by k aligns position i - k with i.

    Args:
        endpoint: frames and parses this party's messages.
        peer: the other party.
        own_number: this party's number.
        triples: this party's shares of `_SIGN_TRIPLES` words of triples.
        is_leader: whether this party adds public terms; exactly one does.
    """
    bits = np.array([own_number % _MODULUS], np.uint64)
    zeros = np.zeros_like(bits)
    # Shares of the two numbers' bits: each party knows its own number and has 0 for the other.
    left, right = (bits, zeros) if is_leader else (zeros, bits)
    generates = yield from _compute_and(endpoint, peer, left, right, triples, is_leader=is_leader)
    propagates = bits
    for shift in _SHIFTS:
        lower = np.stack([generates, propagates]) << np.uint64(shift)
        both = yield from _compute_and(
            endpoint, peer, np.stack([propagates, propagates]), lower, triples, is_leader=is_leader
        )
        generates = generates ^ both[0]
        propagates = both[1]
    carries = generates[0] << np.uint64(1)
    return int((bits[0] ^ carries) >> np.uint64(_SIGN_BIT)) & 1


def _compute_and(
    endpoint: Endpoint, peer: str, x: Words, y: Words, triples: TripleShares, *, is_leader: bool
) -> Generator[Turn, Inbox, Words]:
    """Return this party's share of x AND y, computed with one peer by Beaver triples from its XOR
    shares `x` and `y`.

    `is_leader`: whether this party adds the public term; exactly one does.
    """
    gate = BeaverAnd(x, y, triples.take_triple(x.shape), is_leader=is_leader)
    own = gate.mask_inputs()
    inbox = yield endpoint.make_turn(Kind.MASKED, {peer: own.tobytes()}, [peer])
    return gate.compute_share(own ^ endpoint.parse_words(inbox, peer, Kind.MASKED, own.shape))
