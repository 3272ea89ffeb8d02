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
from apfed_protocols.psi import base_ot, linear_code, store, transfers
from apfed_protocols.psi import circuit as dealt
from apfed_protocols.psi.circuit import (
    COUNT_RESULT,
    ENOUGH,
    TOO_FEW,
    UNCHECKED_SHARES_LEAK,
    VERSION,
    CircuitInputs,
    CircuitIntersection,
    CountOutcome,
    Endpoint,
    HintProgrammer,
    HubHelper,
    Kind,
    MemberHelper,
    OpprfIntersection,
    RowIndices,
    combine_member_bits,
    conclude_count,
    count_triple_words,
    decode_hints,
    find_filled_bins,
    unpack_bits,
)
from apfed_protocols.psi.hashing import (
    WORD_BITS,
    WORD_TYPE,
    AndGate,
    BeaverAnd,
    TripleShares,
    Words,
    count_bins,
    expand_words,
)
from apfed_protocols.psi.interface import (
    Aligner,
    Messages,
    Output,
    Round,
    count_message_bytes,
    wait_for,
)
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
_PREFIX_SHIFTS = (1, 2, 4, 8, 16)
_SIGN_TRIPLES = 1 + 2 * len(_PREFIX_SHIFTS)
_AUTHENTICATOR_BYTES = 16  # of Poly1305's authenticator
_NONCE_BYTES = 24
_SUM_BODY = struct.Struct("<I")
_MODULUS = 2**32
_PRF_OUTPUT_BYTES = 8
_BATCH_MEMORY_BYTES = 2**27
"""Memory of a batch of transfers with one peer, beside the message with its vector."""
_COLLUSION_LEAK = (
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
        UNCHECKED_SHARES_LEAK,
        _COLLUSION_LEAK,
    )
    version: ClassVar[int] = VERSION + 4

    @classmethod
    def count_announced_bytes(
        cls, announced_size: int, *, own_size: int = 0, member_count: int = 1
    ) -> int:
        """Return the bytes of memory that a role allocates because a peer announces
        `announced_size` IDs: for the comparison circuit, and for one batch of oblivious transfers
        with each member.

        Args:
            announced_size: the number of IDs that the peer announces.
            own_size: the number of this party's own IDs.
            member_count: the number of members in the intersection.
        """
        circuit_bytes = super().count_announced_bytes(
            announced_size, own_size=own_size, member_count=member_count
        )
        return circuit_bytes + _BATCH_MEMORY_BYTES * member_count

    @property
    def max_message_bytes(self) -> int:
        """Return the bytes of the longest message that a role accepts: the hub's message in a batch
        of oblivious transfers, or a message of the comparison circuit.
        """
        return max(count_message_bytes(_count_vector_bytes(self)), super().max_message_bytes)

    def make_dealer(self, hub: str, members: Sequence[str]) -> Aligner:
        """Raise LocalProtocolError: these intersections have no dealer."""
        raise LocalProtocolError(
            f"a {self.name} intersection has no dealer, only hub {hub} and members "
            f"{', '.join(members)}; the one with a dealer is {self.name.removesuffix('_ot')}"
        )

    def _make_hub_helper(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Round, Messages, HubHelper]:
        """Run the base oblivious transfers with each member; return the object by which the hub
        makes triples and counts without a dealer.
        """
        return (yield from _start_hub_transfers(endpoint, members, inputs))

    def _make_member_helper(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Round, Messages, MemberHelper]:
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
    def count_announced_bytes(
        cls, announced_size: int, *, own_size: int = 0, member_count: int = 1
    ) -> int:
        """Return the bytes of memory that a role allocates because a peer announces
        `announced_size` IDs: the larger of what the comparison circuit needs, and what a member's
        oblivious PRF needs.

        Args:
            announced_size: the number of IDs that the peer announces.
            own_size: the number of this party's own IDs.
            member_count: the number of members in the intersection.
        """
        circuit_bytes = super().count_announced_bytes(
            announced_size, own_size=own_size, member_count=member_count
        )
        # The hub's vector and the matrix computed from it, each in two copies at most.
        prf_bytes = 4 * count_extension_bytes(count_bins(announced_size)) + _BATCH_MEMORY_BYTES
        return max(circuit_bytes, prf_bytes)

    @property
    def max_message_bytes(self) -> int:
        """Return the bytes of the longest message that a role accepts: the hub's vector for the
        oblivious PRF, or a message of the comparison circuit.
        """
        vector_bytes = count_extension_bytes(count_bins(self.agreement.largest_size))
        return max(count_message_bytes(vector_bytes), super().max_message_bytes)

    def tag_hub_bins(
        self, endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        """Evaluate, at the hub (the active), an oblivious PRF on its ID in each bin, computed by
        oblivious transfers, and unmask the tags that each member programmed for its own IDs (step 4
        of the module's docstring). Return the hub's tag in each bin for each member, (members,
        bins): for a common ID it equals the member's tag; empty bins get random tags.

        `inputs`: the hub's IDs in bins.
        """
        keys_by_member = yield from _transfer_as_hub(
            endpoint, members, inputs, b"values", linear_code.LENGTH
        )
        filled = find_filled_bins(inputs)
        id_hashes = store.extract_id_hashes(filled.digests)
        bin_count = len(inputs.row_of_bin)
        # The hash of the hub's ID in each bin, random in an empty one.
        id_hashes_B = store.expand_elements(fresh_key(), b"points", bin_count)
        id_hashes_B[filled.bins] = id_hashes
        messages = linear_code.mask_message_bits(id_hashes_B)
        extensions = {}
        prf_outputs_by_member = {}
        vectors = {}
        for member in members:
            extension = HubExtension(keys_by_member[member], add_random_rows(messages, fresh_key()))
            vectors[member], t0 = extension.make_vector()
            tagger = _make_tagger(inputs, member)
            prf_outputs_by_member[member] = _evaluate_prf(tagger, t0[filled.bins], id_hashes)
            extensions[member] = extension
            del t0  # to save memory
        vector_round = endpoint.make_round(Kind.VECTOR, vectors, awaited=members)
        del vectors
        received = yield vector_round
        del vector_round
        proofs = {}
        for member in members:
            challenge = endpoint.parse_message(received, member, Kind.CHALLENGE, KEY_BYTES)
            proofs[member] = extensions.pop(member).prove(challenge)
        received = yield endpoint.make_round(Kind.PROOF, proofs, awaited=members)
        return decode_hints(endpoint, received, inputs, filled, prf_outputs_by_member)

    def tag_member_bins(
        self, endpoint: Endpoint, hub: str, inputs: CircuitInputs
    ) -> Generator[Round, Messages, Words]:
        """Draw, at a member (a passive), a random tag for each of its bins, and send the hub hints:
        these tags, masked by an oblivious PRF computed by oblivious transfers. From them the hub
        gets the same tag for a common ID, and a random one otherwise (step 4 of the module's
        docstring). Return the tags, (1, bins).

        `inputs`: the member's IDs in bins.
        """
        keys, choices = yield from _transfer_as_member(
            endpoint, hub, inputs, b"values", linear_code.LENGTH
        )
        extension = MemberExtension(keys, choices)
        programmer = HintProgrammer(inputs)
        id_hashes = store.extract_id_hashes(programmer.digests)
        bin_count = count_bins(inputs.announced_sizes[0])
        received = yield wait_for([hub])
        vector = endpoint.parse_message(
            received, hub, Kind.VECTOR, count_extension_bytes(bin_count)
        )
        challenge = fresh_key()
        yield endpoint.make_round(Kind.CHALLENGE, {hub: challenge}, awaited=())
        bin_terms = extension.compute_matrix(vector, challenge)
        del received, vector  # to save memory
        received = yield wait_for([hub])
        extension.check_proof(endpoint.parse_message(received, hub, Kind.PROOF, PROOF_BYTES), hub)
        # The PRF of ID y in bin b is hash(Q_b + C(H(y)) * s, H(y)); this is the part of each ID:
        id_terms = (
            linear_code.encode_words(linear_code.mask_message_bits(id_hashes)) & extension.choices
        )
        tagger = _make_tagger(inputs, endpoint.me)

        def evaluate_prf(bin_of_id: RowIndices) -> Words:
            """Return the PRF of each of the member's IDs in one of its bins, (n,)."""
            return _evaluate_prf(tagger, bin_terms[bin_of_id] ^ id_terms, id_hashes)

        tags_B, hints = programmer.program(endpoint.me, evaluate_prf)
        yield endpoint.make_round(Kind.HINT, {hub: hints}, awaited=())
        return tags_B[None]  # one slot in each bin


def _count_vector_bytes(backend: CircuitIntersection) -> int:
    """Return the bytes of the hub's longest message in a batch of oblivious transfers, for triples
    or for the count, under the backend's agreement.
    """
    largest_size = backend.agreement.largest_size
    max_slots = backend.count_slots(largest_size, count_bins(0))
    bin_words = count_bins(largest_size) // WORD_BITS
    chunk_words = max(max_slots, min(dealt.MAX_CHUNK_SLOTS // WORD_BITS, bin_words * max_slots))
    # Words of 64 transfers: two transfers for each triple of a comparison, one transfer for each
    # bin that is counted, two for each triple of the sign's computation.
    needed_words = max(2 * (WORD_BITS - 1) * chunk_words, bin_words, 2 * _SIGN_TRIPLES)
    return transfers.count_vector_bytes(min(needed_words, transfers.BATCH_WORDS))


def _make_tagger(inputs: CircuitInputs, member: str) -> Tagger:
    """Return the keyed hash that ends the oblivious PRF between the hub and one member."""
    return Tagger(
        derive_key(inputs.shared_key, b"opprf_ot function", member.encode()), _PRF_OUTPUT_BYTES
    )


def _evaluate_prf(tagger: Tagger, values: store.Elements, id_hashes: store.Elements) -> Words:
    """Return the outputs of the oblivious PRF, 64 bits each, (n,).

    `values`: what the oblivious transfers gave for each of n IDs, (n, 8) words. `id_hashes`: the
    hash H(x) of each ID, (n, 2) words.
    """
    return tagger.hash_rows(values, id_hashes).view(WORD_TYPE)[:, 0]


# Base transfers.


def _name_session(inputs: CircuitInputs, purpose: bytes, member: str) -> bytes:
    """Return 32 bytes that identify the base oblivious transfers of the hub with one member for one
    purpose. Both parties derive the same bytes from the key in `inputs`, which all parties share.
    """
    return derive_key(inputs.shared_key, b"base transfers", purpose, member.encode())


def _transfer_as_hub(
    endpoint: Endpoint,
    members: Sequence[str],
    inputs: CircuitInputs,
    purpose: bytes,
    transfer_count: int,
) -> Generator[Round, Messages, dict[str, list[tuple[bytes, bytes]]]]:
    """Run `transfer_count` base oblivious transfers with each member at the hub; return, by member,
    both keys of each transfer.

    `inputs`: the hub's inputs to the circuit, from whose key the session's name is derived.
    `purpose`: a label that separates these transfers from others.
    """
    sender_by_member = {
        member: base_ot.Sender(fresh_key(), session=_name_session(inputs, purpose, member))
        for member in members
    }
    sender_points = {member: sender.message for member, sender in sender_by_member.items()}
    received = yield endpoint.make_round(Kind.BASE, sender_points, awaited=members)
    choices_bytes = 2 * base_ot.POINT_BYTES * transfer_count
    keys_by_member = {}
    for member, sender in sender_by_member.items():
        receiver_points = endpoint.parse_message(received, member, Kind.CHOICES, choices_bytes)
        keys_by_member[member] = sender.compute_keys(receiver_points, receiver=member)
    return keys_by_member


def _transfer_as_member(
    endpoint: Endpoint, hub: str, inputs: CircuitInputs, purpose: bytes, transfer_count: int
) -> Generator[Round, Messages, tuple[list[bytes], bytes]]:
    """Run `transfer_count` base oblivious transfers with the hub at a member, with random choices;
    return the chosen key of each transfer, and the choice bits, packed in bytes.

    `inputs`: the member's inputs to the circuit, from whose key the session's name is derived.
    `purpose`: a label that separates these transfers from others.
    """
    packed_choices = keystream(fresh_key(), length=transfer_count // 8)
    choice_bits = np.unpackbits(np.frombuffer(packed_choices, np.uint8), bitorder="little").tolist()
    session = _name_session(inputs, purpose, endpoint.me)
    receiver = base_ot.Receiver(choice_bits, fresh_key(), session=session)
    received = yield endpoint.make_round(Kind.CHOICES, {hub: receiver.message}, awaited=[hub])
    sender_point = endpoint.parse_message(received, hub, Kind.BASE, base_ot.POINT_BYTES)
    return receiver.compute_keys(sender_point, sender=hub), packed_choices


def _derive_hash_key(inputs: CircuitInputs, member: str) -> bytes:
    """Return the key of the hash that turns transfers of the hub with one member into numbers,
    derived from the key in `inputs` that all share.
    """
    return derive_key(inputs.shared_key, b"transfers", member.encode())


# The hub's triples and counts.


def _start_hub_transfers(
    endpoint: Endpoint, members: Sequence[str], inputs: CircuitInputs
) -> Generator[Round, Messages, "TransferHub"]:
    """Run the base oblivious transfers with each member at the hub (the active), and forward the
    first member's public key to the other members, which encrypt their shares for it. Return the
    object by which the hub makes triples and counts.

    `inputs`: the hub's IDs, hashed into bins under a key that all parties share.
    """
    keys_by_member = yield from _transfer_as_hub(
        endpoint, members, inputs, b"bits", transfers.COLUMN_COUNT
    )
    receiver_by_member = {
        member: ExtensionReceiver(keys_by_member[member], _derive_hash_key(inputs, member))
        for member in members
    }
    first_member, *other_members = members
    if other_members:
        received = yield wait_for([first_member])
        public_key = endpoint.parse_message(received, first_member, Kind.KEY, KEY_BYTES)
        yield endpoint.make_round(Kind.KEY, dict.fromkeys(other_members, public_key), awaited=())
    return TransferHub(endpoint, members, inputs, receiver_by_member)


class TransferHub:
    """The hub's multiplication triples and count of common IDs without a dealer, by oblivious
    transfers; satisfies `HubHelper`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        members: Sequence[str],
        inputs: CircuitInputs,
        receiver_by_member: Mapping[str, ExtensionReceiver],
    ) -> None:
        """Store what the hub needs to make triples and to count.

        Args:
            endpoint: frames and parses the hub's messages.
            members: the members' names; the first one computes with the hub.
            inputs: the hub's inputs to the circuit.
            receiver_by_member: the hub's role in the oblivious transfers with each member.
        """
        self._endpoint = endpoint
        self._members = members
        self._inputs = inputs
        self._receiver_by_member = receiver_by_member
        self.share_holders = members[:1]  # only the first member has a share of the result

    def take_triples(
        self, word_count: int
    ) -> Generator[Round, Messages, tuple[Mapping[str, TripleShares], TripleShares]]:
        """Make the multiplication triples for a chunk of 64 * `word_count` bins. Return the hub's
        shares: by member, the triples for the comparison with that member; and the triples for the
        AND over all members, which are shared with the first member alone.
        """
        comparison_words, combination_words = count_triple_words(
            word_count, self._inputs.slot_counts
        )
        batch_sizes_by_member = {
            member: transfers.split_triples(triple_count)
            for member, triple_count in zip(self._members, comparison_words, strict=True)
        }
        first_member = self._members[0]
        batch_sizes_by_member[first_member] = transfers.split_triples(
            comparison_words[0], extra_word_count=combination_words
        )
        triples_by_member = yield from self._make_triples(batch_sizes_by_member)
        return triples_by_member, triples_by_member[first_member].split_off(combination_words)

    def combine_members(
        self, bits_MW: Words, triples: TripleShares, gate_type: type[AndGate]
    ) -> Generator[Round, Messages, Words]:
        """Forward the other members' encrypted shares to the first member, and compute the AND over
        all members' bits with the first member; return the hub's XOR share, (words,).

        Args:
            bits_MW: the hub's share of the bit that it shares with each of M members, for each of
                64 W bins, in W words, (members, words).
            triples: the hub's shares of the triples that this AND consumes.
            gate_type: class that computes AND of XOR-shared words.
        """
        endpoint = self._endpoint
        first_member, *other_members = self._members
        if other_members:
            sealed_bytes = _count_sealed_bytes(bits_MW.shape[1])
            received = yield wait_for(other_members)
            sealed_shares = [
                endpoint.parse_message(received, member, Kind.SEALED, sealed_bytes)
                for member in other_members
            ]
            yield endpoint.make_round(
                Kind.RELAYED, {first_member: b"".join(sealed_shares)}, awaited=()
            )
        return (
            yield from combine_member_bits(
                endpoint,
                bits_MW,
                triples,
                hub=endpoint.me,
                members=[first_member],
                gate_type=gate_type,
            )
        )

    def count_common(
        self, share: Words, own_size: int, row_of_bin: RowIndices
    ) -> Generator[Round, Messages, CountOutcome]:
        """Count the common IDs with the first member, and send the result to the others (step 3 of
        the module's docstring); return the hub's result, None if rows are still to be revealed.

        Hub and first member have XOR shares x and y of the bit of each bin. The bit is the integer
        x + y - 2 x y. Each party adds up its own bits, and its additive shares of -2 x y, which it
        gets from one oblivious transfer for each bin.

        Args:
            share: the hub's XOR share of the bits that say which bins hold a common ID, (words,).
            own_size: the number of the hub's IDs.
            row_of_bin: row of the hub's table in each bin, -1 for none, (bins,).
        """
        endpoint = self._endpoint
        first_member, *other_members = self._members
        product_shares = []
        for chunk in _split_words(share):
            numbers_by_member = yield from self._extend({first_member: chunk})
            corrections = yield from self._receive_corrections(first_member, WORD_BITS * len(chunk))
            # The hub's additive share of the product x y for each bin of the chunk.
            product_shares.append(
                numbers_by_member[first_member] + corrections * unpack_bits(chunk)
            )
        bits = unpack_bits(share)
        own_sum = int(bits.sum()) - 2 * _add_numbers(product_shares)
        triples_by_member = yield from self._make_triples({first_member: [_SIGN_TRIPLES]})
        count_result = yield from _reveal_count(
            endpoint, first_member, own_sum, triples_by_member[first_member], is_leader=True
        )
        if other_members:
            count_results = dict.fromkeys(other_members, COUNT_RESULT.pack(count_result))
            yield endpoint.make_round(Kind.VERDICT, count_results, awaited=())
        return conclude_count(endpoint, first_member, count_result, own_size, bits, row_of_bin)

    def _receive_corrections(self, member: str, count: int) -> Generator[Round, Messages, Numbers]:
        """Receive the member's message with one number for each of `count` products of bits."""
        received = yield wait_for([member])
        body = self._endpoint.parse_message(received, member, Kind.PRODUCTS, _SUM_BODY.size * count)
        return np.frombuffer(body, "<u4")

    def _make_triples(
        self, batch_sizes_by_member: Mapping[str, Sequence[int]]
    ) -> Generator[Round, Messages, dict[str, TripleShares]]:
        """Make multiplication triples with members by oblivious transfers, batch by batch; return
        the hub's shares by member.

        `batch_sizes_by_member`: the number of words of 64 triples in each batch, by member. A
        member with fewer batches than another takes no part in the last ones.
        """
        batches_by_member: dict[str, list[tuple[Words, Words, Words]]] = {
            member: [] for member in batch_sizes_by_member
        }
        for batch_index in range(max(map(len, batch_sizes_by_member.values()))):
            choices_by_member = {
                # Two transfers for each triple, with random choice bits.
                member: expand_words(fresh_key(), b"choices", 2 * batch_sizes[batch_index])
                for member, batch_sizes in batch_sizes_by_member.items()
                if batch_index < len(batch_sizes)
            }
            numbers_by_member = yield from self._extend(choices_by_member)
            for member, choice_words in choices_by_member.items():
                triples = transfers.choose_triples(choice_words, numbers_by_member[member])
                batches_by_member[member].append(triples)
        return {
            member: transfers.join_triples(batches) for member, batches in batches_by_member.items()
        }

    def _extend(
        self, choices_by_member: Mapping[str, Words]
    ) -> Generator[Round, Messages, dict[str, Numbers]]:
        """Run one batch of random oblivious transfers with each of these members: send the vectors,
        receive the members' challenges, and send the proofs. Return, by member, the hub's 32-bit
        number of each transfer: of the member's two numbers, the one that the hub's choice bit
        selects.

        `choices_by_member`: choice bits of the hub, by member, 64 transfers a word.
        """
        endpoint = self._endpoint
        vectors = {}
        numbers_by_member = {}
        for member, choice_words in choices_by_member.items():
            vectors[member], numbers_by_member[member] = self._receiver_by_member[member].extend(
                choice_words
            )
        vector_round = endpoint.make_round(Kind.EXTENSION, vectors, awaited=list(choices_by_member))
        del vectors  # large; this and `vector_round` are not needed after they were sent
        received = yield vector_round
        del vector_round
        proofs = {}
        for member in choices_by_member:
            challenge = endpoint.parse_message(received, member, Kind.CHALLENGE, KEY_BYTES)
            proofs[member] = self._receiver_by_member[member].prove(challenge)
        yield endpoint.make_round(Kind.PROOF, proofs, awaited=())
        return numbers_by_member


# A member's triples and counts.


def _start_member_transfers(
    endpoint: Endpoint, hub: str, inputs: CircuitInputs
) -> Generator[Round, Messages, "TransferMember"]:
    """Run the base oblivious transfers with the hub at a member (a passive), and return the object
    by which the member makes triples and counts.

    With several members, the first member sends its public key through the hub to the others, which
    encrypt their shares for it.

    `inputs`: the member's IDs, hashed into bins under a key that all parties share.
    """
    keys, choices = yield from _transfer_as_member(
        endpoint, hub, inputs, b"bits", transfers.COLUMN_COUNT
    )
    sender = ExtensionSender(keys, choices, _derive_hash_key(inputs, endpoint.me))
    private_key = fresh_key()
    sealer = None
    has_other_members = len(inputs.slot_counts) > 1
    is_first = inputs.member_index == 0
    if not is_first:
        received = yield wait_for([hub])
        public_key = endpoint.parse_message(received, hub, Kind.KEY, KEY_BYTES)
        sealer = Sealer(private_key, public_key)
    elif has_other_members:
        public_key = crypto_scalarmult_base(private_key)
        yield endpoint.make_round(Kind.KEY, {hub: public_key}, awaited=())
    return TransferMember(endpoint, hub, inputs, sender, private_key, sealer)


class TransferMember:
    """A member's multiplication triples and count of common IDs without a dealer, by oblivious
    transfers; satisfies `MemberHelper`.

    Args:
        endpoint: frames and parses the member's messages.
        hub: the hub's name.
        inputs: the member's inputs to the circuit.
        transfer_sender: the member's role in the transfers with the hub.
        private_key: X25519 key of this member, by which the first member decrypts the others'
            shares.
        sealer: encrypts shares for the first member; None at the first member itself.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        hub: str,
        inputs: CircuitInputs,
        transfer_sender: ExtensionSender,
        private_key: bytes,
        sealer: "Sealer | None",
    ) -> None:
        """Store what a member needs to make triples and to count."""
        self._endpoint = endpoint
        self._hub = hub
        self._inputs = inputs
        self._sender = transfer_sender
        self._private_key = private_key
        self._sealer = sealer
        self._chunk_index = 0  # how many chunks of bins were combined
        # At the first member, by chunk: the sum of the other members' random shares of the result.
        self._mask_sums: list[Words] = []
        self.has_result_share = sealer is None  # only the first member has a share to send

    def take_triples(
        self, word_count: int
    ) -> Generator[Round, Messages, tuple[TripleShares, TripleShares]]:
        """Make the multiplication triples for a chunk of 64 * `word_count` bins with the hub.
        Return this member's shares: the triples for the comparison; and, at the first member, the
        triples for the AND over all members (no triples at another member).
        """
        comparison_words, combination_words = count_triple_words(
            word_count, self._inputs.slot_counts
        )
        is_first = self.has_result_share
        own_combination_words = combination_words if is_first else 0
        own_comparison_words = comparison_words[self._inputs.member_index]
        batch_sizes = transfers.split_triples(
            own_comparison_words, extra_word_count=own_combination_words
        )
        triples = yield from self._make_triples(batch_sizes)
        return triples, triples.split_off(own_combination_words)

    def combine_members(
        self, bits_W: Words, triples: TripleShares, gate_type: type[AndGate]
    ) -> Generator[Round, Messages, Words]:
        """Return this member's XOR share, (words,), of the AND over all members' bits.

        The first member decrypts the others' shares and computes the AND with the hub. Another
        member encrypts its share for the first member, and returns a random share of the result.

        Args:
            bits_W: this member's share of the bit that it shares with the hub, for each of 64 W
                bins, in W words, (words,).
            triples: this member's shares of the triples that this AND consumes.
            gate_type: class that computes AND of XOR-shared words.
        """
        # Keys serve one intersection, so the number of the chunk is a nonce that is used once.
        nonce = self._chunk_index.to_bytes(_NONCE_BYTES, "big")
        self._chunk_index += 1
        if self._sealer is not None:
            share = expand_words(fresh_key(), b"share", len(bits_W))
            content = bits_W.tobytes() + share.tobytes()
            sealed = self._sealer.seal(content, nonce, hub=self._hub)
            yield self._endpoint.make_round(Kind.SEALED, {self._hub: sealed}, awaited=())
            return share
        other_bits, other_masks = yield from self._receive_others_shares(len(bits_W), nonce)
        share = yield from combine_member_bits(
            self._endpoint,
            np.concatenate([bits_W[None], other_bits]),
            triples,
            hub=self._hub,
            members=(),
            gate_type=gate_type,
        )
        self._mask_sums.append(np.bitwise_xor.reduce(other_masks, axis=0))
        return share

    def _receive_others_shares(
        self, word_count: int, nonce: bytes
    ) -> Generator[Round, Messages, tuple[Words, Words]]:
        """Receive, at the first member, the other members' shares of one chunk of bins through the
        hub, and decrypt them.

        Returns:
            Each other member's share of its bits with the hub; and its random share of the result.
            Both have the shape (members - 1, words); with a single member nothing is received.
        """
        other_count = len(self._inputs.slot_counts) - 1
        shares = np.empty((other_count, 2, word_count), np.uint64)
        if other_count:
            sealed_bytes = _count_sealed_bytes(word_count)
            received = yield wait_for([self._hub])
            body = self._endpoint.parse_message(
                received, self._hub, Kind.RELAYED, other_count * sealed_bytes
            )
            for index in range(other_count):
                sealed = body[index * sealed_bytes : (index + 1) * sealed_bytes]
                content = _decrypt_shares(sealed, nonce, self._private_key, self._hub)
                shares[index] = np.frombuffer(content, WORD_TYPE).reshape(2, word_count)
        return shares[:, 0], shares[:, 1]

    def count_common(self, share: Words, own_size: int) -> Generator[Round, Messages, CountOutcome]:
        """Count the common IDs with the hub, or, if this is not the first member, receive the hub's
        result; return the member's result, None if rows are still to be revealed.

        Hub and first member have XOR shares x and y of the bit of each bin. The bit is the integer
        x + y - 2 x y. Each party adds up its own bits, and its additive shares of -2 x y, which it
        gets from one oblivious transfer for each bin.

        `share`: this member's XOR share of the bits that say which bins hold a common ID, (words,).
        `own_size`: the number of its IDs.
        """
        endpoint = self._endpoint
        hub = self._hub
        bits = unpack_bits(share)
        is_first = self.has_result_share
        if not is_first:
            received = yield wait_for([hub])
            body = endpoint.parse_message(received, hub, Kind.VERDICT, COUNT_RESULT.size)
            (count_result,) = COUNT_RESULT.unpack(body)
            return conclude_count(endpoint, hub, count_result, own_size, bits, row_of_bin=None)
        negated_product_shares = []
        for chunk in _split_words(share):
            numbers_for_zero, numbers_for_one = yield from self._extend(len(chunk))
            # With it the hub gets m0 + x y, where m0 is `numbers_for_zero`; this member's share is
            # -m0.
            corrections = (numbers_for_zero - numbers_for_one + unpack_bits(chunk)).astype("<u4")
            yield endpoint.make_round(Kind.PRODUCTS, {hub: corrections.tobytes()}, awaited=())
            negated_product_shares.append(numbers_for_zero)
        own_sum = int(bits.sum()) + 2 * _add_numbers(negated_product_shares)
        triples = yield from self._make_triples([_SIGN_TRIPLES])
        count_result = yield from _reveal_count(endpoint, hub, own_sum, triples, is_leader=False)
        # The other members return random shares of the result, which this member cancels.
        masked_bits = unpack_bits(share ^ np.concatenate(self._mask_sums))
        return conclude_count(endpoint, hub, count_result, own_size, masked_bits, row_of_bin=None)

    def _make_triples(self, batch_sizes: Sequence[int]) -> Generator[Round, Messages, TripleShares]:
        """Make multiplication triples with the hub by oblivious transfers, batch by batch; return
        this member's shares.

        `batch_sizes`: number of words of 64 triples in each batch.
        """
        batches = []
        for word_count in batch_sizes:
            # Two transfers for each triple.
            numbers_for_zero, numbers_for_one = yield from self._extend(2 * word_count)
            batches.append(transfers.derive_triples(numbers_for_zero, numbers_for_one))
        return transfers.join_triples(batches)

    def _extend(self, word_count: int) -> Generator[Round, Messages, tuple[Numbers, Numbers]]:
        """Run one batch of 64 * `word_count` random oblivious transfers with the hub: receive its
        vector, send a challenge, and check its proof. Return this member's 32-bit numbers for
        choice 0 and for choice 1, each (64 * words,).

        Raises RemoteProtocolError: the hub's proof is wrong.
        """
        endpoint = self._endpoint
        hub = self._hub
        received = yield wait_for([hub])
        vector = endpoint.parse_message(
            received, hub, Kind.EXTENSION, transfers.count_vector_bytes(word_count)
        )
        challenge = fresh_key()
        yield endpoint.make_round(Kind.CHALLENGE, {hub: challenge}, awaited=())
        numbers = self._sender.extend(vector, word_count, challenge)
        del received, vector  # to save memory
        received = yield wait_for([hub])
        proof = endpoint.parse_message(received, hub, Kind.PROOF, transfers.PROOF_BYTES)
        self._sender.check_proof(proof, hub)
        return numbers


# Between hub and first member.


class Sealer:
    """The encryption of a member's shares for the first member, by X25519, XSalsa20 and Poly1305.

    Args:
        private_key: this member's private key, 32 bytes, used for this intersection only.
        receiver_public_key: the first member's public key.
    """

    def __init__(self, private_key: bytes, receiver_public_key: bytes) -> None:
        """Store this member's private key `private_key` and the first member's public key
        `receiver_public_key`.
        """
        self._private_key = private_key
        self._receiver_public_key = receiver_public_key
        self._own_public_key = crypto_scalarmult_base(private_key)

    def seal(self, content: bytes, nonce: bytes, *, hub: str) -> bytes:
        """Return this member's public key, followed by the content, encrypted for the first member.

        `nonce`: 24 bytes, used once. `hub`: the party that forwarded the first member's key, for
        the error.

        Raises RemoteProtocolError: the first member's key is of low order.
        """
        try:
            ciphertext = crypto_box(content, nonce, self._receiver_public_key, self._private_key)
        except RuntimeError:
            raise RemoteProtocolError(
                f"{hub} handed on a key of low order, under which nothing is secret; it does not "
                "follow the protocol"
            ) from None
        return self._own_public_key + ciphertext


def _decrypt_shares(sealed: bytes, nonce: bytes, private_key: bytes, hub: str) -> bytes:
    """Return the content, two shares, that another member encrypted for this (the first) member by
    `Sealer.seal`.

    Args:
        sealed: the other member's public key and the encrypted content.
        nonce: 24 bytes under which the content was encrypted.
        private_key: this member's private X25519 key.
        hub: the party that forwarded the content, for errors.

    Raises RemoteProtocolError: the content does not authenticate.
    """
    try:
        return crypto_box_open(sealed[KEY_BYTES:], nonce, sealed[:KEY_BYTES], private_key)
    except CryptoError:
        raise RemoteProtocolError(
            f"{hub} handed on a share that no member sealed so; it does not follow the protocol"
        ) from None


def _count_sealed_bytes(word_count: int) -> int:
    """Return the bytes of a member's encrypted shares for a chunk of this number of words of 64
    bins: a public key, an authenticator, and two shares.
    """
    return KEY_BYTES + _AUTHENTICATOR_BYTES + 2 * WORD_TYPE.itemsize * word_count


def _split_words(words: Words) -> Iterator[Words]:
    """Return the words in pieces of at most `BATCH_WORDS`, one batch of transfers."""
    max_words = transfers.BATCH_WORDS
    return (words[start : start + max_words] for start in range(0, len(words), max_words))


def _add_numbers(chunks: Sequence[Numbers]) -> int:
    """Return the sum of the 32-bit numbers in all chunks, as a Python integer."""
    return sum(int(chunk.sum(dtype=np.uint64)) for chunk in chunks)


def _reveal_count(
    endpoint: Endpoint, peer: str, own_sum: int, triples: TripleShares, *, is_leader: bool
) -> Generator[Round, Messages, int]:
    """Compare the number of common IDs with the agreed minimum, and return the result: `TOO_FEW`,
    `ENOUGH`, or the number if it is the agreed output.

    Hub and first member run this together; they have additive shares of the number modulo 2^32.
    They reveal only the sign of the number minus the minimum, and the number if it is the output.

    Args:
        endpoint: frames and parses this party's messages.
        peer: name of the other party of the two.
        own_sum: this party's additive share of the number.
        triples: this party's shares of `_SIGN_TRIPLES` words of triples.
        is_leader: whether this is the hub, which subtracts the minimum and adds public terms.

    Raises RemoteProtocolError: the peer's share of the sign is no bit.
    """
    public_minimum = endpoint.agreement.minimum_rows if is_leader else 0
    own_difference = own_sum - public_minimum
    own_sign = yield from _share_sign(endpoint, peer, own_difference, triples, is_leader=is_leader)
    received = yield endpoint.make_round(Kind.COUNT, {peer: bytes([own_sign])}, awaited=[peer])
    (peer_sign,) = endpoint.parse_message(received, peer, Kind.COUNT, 1)
    if peer_sign > 1:
        raise RemoteProtocolError(f"{peer} sent {peer_sign} as its share of a bit, expected 0 or 1")
    is_negative = own_sign ^ peer_sign
    if is_negative:
        return TOO_FEW
    if endpoint.agreement.output is not Output.SIZE:
        return ENOUGH
    # The number itself is the output: both parties reveal their shares of it.
    own_share = own_sum % _MODULUS
    received = yield endpoint.make_round(
        Kind.SUM, {peer: _SUM_BODY.pack(own_share)}, awaited=[peer]
    )
    (peer_share,) = _SUM_BODY.unpack(
        endpoint.parse_message(received, peer, Kind.SUM, _SUM_BODY.size)
    )
    return int((own_share + peer_share) % _MODULUS)


def _share_sign(
    endpoint: Endpoint, peer: str, own_number: int, triples: TripleShares, *, is_leader: bool
) -> Generator[Round, Messages, int]:
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
    own_bits = np.array([own_number % _MODULUS], np.uint64)
    zeros = np.zeros_like(own_bits)
    # Shares of the two numbers' bits: each party knows its own number and has 0 for the other.
    hub_bits, member_bits = (own_bits, zeros) if is_leader else (zeros, own_bits)
    generate_bits = yield from _compute_and(
        endpoint, peer, hub_bits, member_bits, triples, is_leader=is_leader
    )
    propagate_bits = own_bits
    for shift in _PREFIX_SHIFTS:
        # A span of positions propagates a carry if both its halves do; it generates a carry if the
        # upper half does, or if the lower half does and the upper half propagates it.
        lower = np.stack([generate_bits, propagate_bits]) << np.uint64(shift)
        upper = np.stack([propagate_bits, propagate_bits])
        products = yield from _compute_and(
            endpoint, peer, upper, lower, triples, is_leader=is_leader
        )
        generate_bits = generate_bits ^ products[0]
        propagate_bits = products[1]
    carries = generate_bits[0] << np.uint64(1)
    return int((own_bits[0] ^ carries) >> np.uint64(_SIGN_BIT)) & 1


def _compute_and(
    endpoint: Endpoint, peer: str, x: Words, y: Words, triples: TripleShares, *, is_leader: bool
) -> Generator[Round, Messages, Words]:
    """Return this party's XOR share of x AND y, computed with one peer by Beaver triples.

    Args:
        endpoint: frames and parses this party's messages.
        peer: the other party.
        x, y: this party's XOR shares of the inputs, words of one shape.
        triples: this party's shares of triples, of which as many words are consumed.
        is_leader: whether this party adds the public term; exactly one of the two does.
    """
    and_gate = BeaverAnd(x, y, triples.take_triple(x.shape), is_leader=is_leader)
    own_masked = and_gate.mask_inputs()
    received = yield endpoint.make_round(Kind.MASKED, {peer: own_masked.tobytes()}, awaited=[peer])
    peer_masked = endpoint.parse_words(received, peer, Kind.MASKED, own_masked.shape)
    return and_gate.compute_share(own_masked ^ peer_masked)
