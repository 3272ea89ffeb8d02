"""All parties of a secure sum in one process: played, altered on the way, and their secrets."""

import base64
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import tenseal.sealapi as seal
from numpy.typing import NDArray

from apfed_protocols.conversation import Outgoing, converse
from apfed_protocols.errors import RemoteProtocolError, UnsafeChoiceWarning
from apfed_protocols.seal import RunKey
from apfed_protocols.sums import (
    SECURE_SUMS,
    BfvSum,
    PlainSum,
    SecureSum,
    StepBinding,
    SumAggregator,
    SumAgreement,
    SumContributor,
    SumReceiver,
)
from apfed_protocols.sums.crypten_sum import CryptenContributor
from apfed_protocols.sums.frames import Frame
from apfed_protocols.sums.homomorphic import HomomorphicSum
from apfed_protocols.sums.masked import MaskedSum, PairwiseSeeds
from apfed_protocols.sums.recoverable import StepKeys
from apfed_protocols.sums.seal_cipher import SealCipher, SealForm, open_scratch_file
from tests.with_crypten import usable

CHOICES: Mapping[str, Callable[[SumAgreement], SecureSum]] = {
    **{name: SECURE_SUMS[name] for name in usable(SECURE_SUMS)},
    "plain, quantised": partial(PlainSum, quantise=True),
}


def agreement(passives: int = 3, **changes: Any) -> SumAgreement:
    usual = SumAgreement(
        session="test",
        receiver="active",
        aggregator="aggregator",
        contributors=tuple(f"passive_{k}" for k in range(1, passives + 1)),
        clip_norm=1.0,
    )
    return replace(usual, **changes)


def binding(step: int, *, session: str = "test", message: int = 0) -> StepBinding:
    return StepBinding(session=session, step=step, rows=bytes(32), message=bytes([message] * 32))


def make(choice: str, agreed: SumAgreement) -> SecureSum:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeChoiceWarning)
        return CHOICES[choice](agreed)


class Parties:
    """The three kinds of role after setup, and a step counter that only goes up."""

    def __init__(self, secure_sum: SecureSum) -> None:
        self.sum = secure_sum
        agreed = secure_sum.agreement
        self.names = agreed.contributors
        self.receiver: SumReceiver = secure_sum.make_receiver()
        self.aggregator: SumAggregator = secure_sum.make_aggregator()
        self.contributors: dict[str, SumContributor] = {
            name: secure_sum.make_contributor(name) for name in self.names
        }
        roles = {agreed.receiver: self.receiver, agreed.aggregator: self.aggregator}
        converse({**roles, **self.contributors})
        self._step = 0

    def next(self) -> StepBinding:
        self._step += 1
        return binding(self._step, session=self.sum.agreement.session)

    def contribute(
        self, values: Sequence[NDArray[Any]], bound: StepBinding | Mapping[str, StepBinding]
    ) -> dict[str, bytes]:
        return {
            name: self.contributors[name].contribute(
                value, bound if isinstance(bound, StepBinding) else bound[name]
            )
            for name, value in zip(self.names, values, strict=True)
        }

    def combine(
        self, contributions: Mapping[str, bytes], binding_digest: bytes | None = None
    ) -> bytes:
        """The aggregator's part, and the passives' second round where there is one.

        Answers come in the order of the contributions.
        """
        if self.sum.rounds == 1:
            return self.aggregator.combine(contributions, binding_digest)
        requests = self.aggregator.ask(contributions, binding_digest)
        answers = {name: self.contributors[name].answer(requests[name]) for name in contributions}
        return self.aggregator.combine(answers, binding_digest)

    def add(self, values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        bound = self.next()
        combined = self.combine(self.contribute(values, bound), bound.digest)
        rows, columns = values[0].shape
        return self.receiver.decode(combined, (rows, columns), bound)


@cache
def _share_parties(choice: str, passives: int, bits: int) -> Parties:
    return Parties(make(choice, agreement(passives, bits=bits)))


def parties(choice: str, passives: int = 3, bits: int = 16) -> Parties:
    """Parties that tests share; each sum takes a fresh step, and none is refused.

    Those of two rounds are not shared: a step that a test leaves unfinished ends their session.
    """
    if SECURE_SUMS.get(choice, PlainSum).rounds == 2:
        return Parties(make(choice, agreement(passives, bits=bits)))
    return _share_parties(choice, passives, bits)


def fresh_parties(choice: str) -> Parties:
    """Parties that no other test uses: a receiver that refused a sum opens no further one."""
    return Parties(parties(choice).sum)


def random_values(passives: int, shape: tuple[int, int] = (3, 5), seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for _ in range(passives)]


class Rearmed:
    """A receiver that goes on after a refusal: for fuzzing, and to show what its end is for."""

    def __init__(self, receiver: SumReceiver) -> None:
        self._receiver = receiver

    @property
    def is_finished(self) -> bool:
        return self._receiver.is_finished

    def start(self) -> Iterable[Outgoing]:
        return self._receiver.start()

    def receive(self, sender: str, body: bytes) -> Iterable[Outgoing]:
        return self._receiver.receive(sender, body)

    def decode(self, combined: bytes, shape: tuple[int, int], bound: StepBinding) -> Any:
        held = [self._receiver, vars(self._receiver)["_setup"]]
        before = [dict(vars(holder)) for holder in held]
        try:
            return self._receiver.decode(combined, shape, bound)
        except RemoteProtocolError:
            for holder, kept in zip(held, before, strict=True):
                vars(holder).clear()
                vars(holder).update(kept)
            raise


class Reactions:
    """What the aggregator sees of a receiver: whether it took a sum, and nothing else.

    Every question is put as the sum of the next step, with this frame's other parts.
    """

    def __init__(self, played: Parties, receiver: "SumReceiver | Rearmed", frame: Frame) -> None:
        self._played = played
        self._receiver = receiver
        self._frame = frame
        self.asked = self.refused = 0

    def takes(self, *blobs: bytes) -> bool:
        bound = self._played.next()
        frame = self._frame
        asked = replace(frame, step=bound.step, binding=bound.digest, blobs=blobs).pack()
        self.asked += 1
        try:
            self._receiver.decode(asked, (frame.rows, frame.columns), bound)
        except RemoteProtocolError:
            self.refused += 1
            return False
        return True


def shift_sum(played: Parties, blobs: tuple[bytes, ...], offset: int) -> tuple[bytes, ...]:
    """The sum in these blobs with a constant added to its first number; needs no key."""
    described = played.sum
    if isinstance(described, MaskedSum):
        numbers = np.frombuffer(blobs[0], described.word).copy()
        numbers[0] += np.array(offset, dtype=np.int64).astype(described.word)
        return (numbers.tobytes(), *blobs[1:])
    assert isinstance(described, HomomorphicSum)
    cipher = described.cipher
    first = np.array([[offset]], dtype=np.int64)
    return (_plus(cipher, blobs[0], described.packing.pack_fields(first)[0]), *blobs[1:])


def _plus(cipher: SealCipher, blob: bytes, slots_S: NDArray[np.int64]) -> bytes:
    import tenseal.sealapi as seal

    degree = cipher.degree
    last = len(blob) // cipher.residues.width - degree
    loaded = cipher.load_ciphertexts([blob], 1, sender="us", last_slots=last)
    (ciphertext,), plain = loaded, seal.Plaintext()
    with open_scratch_file() as scratch:
        cipher.encode(slots_S, plain, scratch)
        vars(cipher)["_evaluator"].add_plain_inplace(ciphertext, plain)
        numbers = cipher.ciphertext_form.extract_numbers(ciphertext, scratch)
    return cipher.residues.pack(np.concatenate((numbers[:last], numbers[degree:])))


def number_from_reactions(limit: int, takes_with: Callable[[int], bool]) -> int:
    """A number, in steps of fixed point, by bisection over what is added to it.

    The receiver refuses what lies beyond `limit`, M times the largest contribution, so the largest
    offset that it takes is that bound less the number.
    """
    taken = 0
    refused = 2 * limit + 1
    while refused - taken > 1:
        middle = (taken + refused) // 2
        if takes_with(middle):
            taken = middle
        else:
            refused = middle
    return limit - taken


def key_coefficients(played: Parties, takes: Callable[..., bool], count: int) -> list[int]:
    """The first coefficients of the secret key, of -1, 0 and 1, each from one or two reactions.

    The ciphertext (offset X^j, A X^(j-k)) of a sum of one number decrypts to offset + A s_k at the
    last coefficient j that is sent, which is padding and must round to 0, and to noise below half
    a step elsewhere.
    """
    described = played.sum
    assert isinstance(described, BfvSum)
    residues = described.cipher.residues
    degree = described.packing.slots_per_vector
    last = described.packing.count_slots_sent_in_last(1)
    step = residues.modulus >> described.parameters.scale_or_modulus_bits
    small = step // 4
    near = step // 2 - step // 8

    def beyond(coefficient: int, sign: int) -> bool:
        numbers = np.zeros(last + degree, dtype=np.uint64)
        numbers[last - 1] = sign * near % residues.modulus
        power = last - 1 - coefficient  # X^N is -1
        numbers[last + power % degree] = small if power >= 0 else residues.modulus - small
        return not takes(residues.pack(numbers))

    return [next((sign for sign in (1, -1) if beyond(k, sign)), 0) for k in range(count)]


def secrets_alive() -> set[bytes]:
    """Private keys, pair seeds, self-mask seeds and share keys of all roles in this process."""
    kinds = RunKey, StepKeys, PairwiseSeeds, CryptenContributor
    return {secret for thing in alive(*kinds) for secret in _secrets_of(thing)}


def alive(*kinds: type) -> list[Any]:
    """All objects of these classes in this process; `isinstance` would wake lazy modules."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def _secrets_of(thing: Any) -> Iterator[bytes]:
    if isinstance(thing, RunKey):
        yield vars(thing)["_private"].private_bytes_raw()
    elif isinstance(thing, StepKeys):
        yield thing.self_mask_seed
    elif isinstance(thing, PairwiseSeeds):
        yield from vars(thing).get("_seed_by_peer", {}).values()
    elif isinstance(thing, CryptenContributor):
        yield vars(thing)["_share_secret"]


class SealKeys:
    """Numbers of every secret key that SEAL makes from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._generators: list[Any] = []
        self._genuine = seal.KeyGenerator
        monkeypatch.setattr(seal, "KeyGenerator", self._generator)

    def _generator(self, context: Any) -> Any:
        self._generators.append(self._genuine(context))
        return self._generators[-1]

    def numbers(self) -> set[bytes]:
        keys = (made.secret_key() for made in self._generators)
        return {part for key in keys for part in self.numbers_of(key)}

    @staticmethod
    def numbers_of(key: Any) -> list[bytes]:
        """Two runs of four numbers of a public or secret key, as SEAL keeps them."""
        with open_scratch_file() as scratch:
            content = SealForm.decompress_object(scratch.save(key))
        return [content[-32:], content[-32 * 512 :][:32]]


def find_secrets(secrets: Iterable[bytes], told: bytes) -> list[bytes]:
    """The secrets that `told` shows: raw, in hexadecimal, in base64, or as Python prints them."""
    return [
        secret
        for secret in secrets
        if any(
            form in told
            for form in (
                secret,
                secret.hex().encode(),
                base64.b64encode(secret)[:40],
                repr(secret)[2:-1].encode(),
            )
        )
    ]


OVERHEARD_SHAPE = (4, 8)


class Overheard:
    """All roles of one sum, and every byte that any of them sends."""

    def __init__(self, secure_sum: SecureSum) -> None:
        self.sum = secure_sum
        self.names = self.sum.agreement.contributors
        self.roles: dict[str, Any] = {
            "active": self.sum.make_receiver(),
            "aggregator": self.sum.make_aggregator(),
            **{name: self.sum.make_contributor(name) for name in self.names},
        }
        self.messages: list[Outgoing] = []
        self.frames: list[bytes] = []
        self.secrets = secrets_alive()
        queue = [(me, out) for me, role in self.roles.items() for out in role.start()]
        while queue:
            sender, out = queue.pop(0)
            self.messages.append(out)
            self.frames.append(out.body)
            answers = self.roles[out.receiver].receive(sender, out.body)
            queue += [(out.receiver, answer) for answer in answers]

    def step(self, bound: StepBinding) -> None:
        self.secrets |= secrets_alive()
        values = np.random.default_rng(bound.step).normal(size=OVERHEARD_SHAPE)
        bodies = {name: self.roles[name].contribute(values, bound) for name in self.names}
        self.secrets |= secrets_alive()
        self.frames += bodies.values()
        if self.sum.rounds == 2:
            requests = self.roles["aggregator"].ask(bodies)
            bodies = {name: self.roles[name].answer(requests[name]) for name in requests}
            self.frames += [*requests.values(), *bodies.values()]
        self.frames.append(self.roles["aggregator"].combine(bodies))
        self.roles["active"].decode(self.frames[-1], OVERHEARD_SHAPE, bound)

    @property
    def wire(self) -> bytes:
        """All that was sent."""
        return b"".join(self.frames)
