"""Public terms of a sum: what its parties agree before the first step, the binding of each step to
its message, and what the sum leaks.

Run by: every role. Protects from: parties that add under different numbers, and contributions to
different messages in one sum: frames carry the digests of both, and roles compare them.
"""

import hashlib
import json
import math
import struct
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apfed_protocols.checks import require_name, require_type, take_numpy_integers
from apfed_protocols.errors import LocalProtocolError, RemoteProtocolError
from apfed_protocols.noise import MAX_DEVIATION

_DIGEST_BYTES = 32
_POSITION_BYTES = 2
_MAX_CONTRIBUTORS = 1024
_MIN_CLIP_NORM = 1e-30
_MAX_CLIP_NORM = 1e30
MAX_BITS = 24
"""Signed fixed-point bits of one value, at most: floats of 32 bits hold no more."""
USUAL_BITS = 16
"""Bits of an agreement that does not say: the unit of noise that is given in steps goes by them."""
FloatArray = NDArray[np.floating[Any]]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SumAgreement:
    """The public terms that all parties agree on before the first sum.

    Raises LocalProtocolError on construction when a field is of another type or out of its range.

    Attributes:
        session: names the run; names have 1 to 255 bytes in UTF-8.
        receiver: the active, who reads the sum.
        aggregator: who adds the contributions; the receiver itself only where masks protect from
            both.
        contributors: the names of the passives, in the contract's order. At most 1024.
        clip_norm: C, the L2 bound of one row of a contribution (no unit), 1e-30 to 1e30.
        bits: signed fixed-point bits of one value, 2 to 24.
        allow_single: permit one contributor, whose "sum" is its own vector.
        threshold: the least number of contributors with which a step has a sum; None: the default
            of the sum, which is all of them except under recoverable masks.
        noise: standard deviation of the discrete Gaussian noise that each contributor adds to each
            value, in steps of fixed point, C / (2^(bits - 1) - 1); None: no noise.
    """

    session: str
    receiver: str
    aggregator: str
    contributors: tuple[str, ...]
    clip_norm: float
    bits: int = USUAL_BITS
    allow_single: bool = False
    threshold: int | None = None
    noise: int | None = None

    def __post_init__(self) -> None:
        """Validate all fields, and convert some: NumPy integers to int, contributors to a tuple,
        clip_norm to a float, so that equal agreements have equal digests.

        Raises LocalProtocolError: a field is of another type or out of its range.
        """
        take_numpy_integers(self)
        names: object = self.contributors
        if isinstance(names, str | bytes) or not isinstance(names, Iterable):
            raise LocalProtocolError(f"contributors are several names, got {names!r:.80}")
        # The class is frozen, so a field is set by `object.__setattr__`.
        object.__setattr__(self, "contributors", tuple(names))
        require_type(self, bool, "allow_single")
        given_options = [name for name in ("threshold", "noise") if getattr(self, name) is not None]
        require_type(self, int, "bits", *given_options)
        self._require_parties()
        self._require_ranges()
        # 1 and 1.0 are equal, so agreements that differ in this alone must have equal digests.
        object.__setattr__(self, "clip_norm", float(self.clip_norm))

    def _require_parties(self) -> None:
        """Raise LocalProtocolError unless all party names are valid and different and there are at
        least two contributors (one with `allow_single`), at most 1024.
        """
        # One party may both receive and combine; all others are different.
        is_one_party = self.receiver == self.aggregator
        receiver_and_aggregator = (
            (self.receiver,) if is_one_party else (self.receiver, self.aggregator)
        )
        parties = (*receiver_and_aggregator, *self.contributors)
        for name in (self.session, *parties):
            require_name("sum", name)
        if len(set(parties)) != len(parties):
            raise LocalProtocolError(
                f"the parties of a sum are all different, got {', '.join(parties)}; "
                "the key holder must not see single contributions"
            )
        if len(self.contributors) < (1 if self.allow_single else 2):
            raise LocalProtocolError(
                f"a sum over {len(self.contributors)} contributor(s) hides nothing: "
                "the receiver would read that contribution itself; "
                "have two or more, or say allow_single"
            )
        if len(self.contributors) > _MAX_CONTRIBUTORS:
            raise LocalProtocolError(
                f"a sum has at most {_MAX_CONTRIBUTORS} contributors, got {len(self.contributors)}"
            )

    def _require_ranges(self) -> None:
        """Raise LocalProtocolError if clip_norm, bits, threshold or noise lies outside
        its range.
        """
        is_number = isinstance(self.clip_norm, Real)
        if not is_number or not _MIN_CLIP_NORM <= self.clip_norm <= _MAX_CLIP_NORM:
            raise LocalProtocolError(
                f"clip_norm lies in {_MIN_CLIP_NORM:g}..{_MAX_CLIP_NORM:g}, got {self.clip_norm!r}"
            )
        if not 2 <= self.bits <= MAX_BITS:
            raise LocalProtocolError(f"bits lies in 2..{MAX_BITS}, got {self.bits}")
        if self.threshold is not None and not 1 <= self.threshold <= len(self.contributors):
            raise LocalProtocolError(
                f"threshold lies in 1..{len(self.contributors)}, the number of contributors, got "
                f"{self.threshold}"
            )
        if self.noise is not None and not 1 <= self.noise <= MAX_DEVIATION:
            raise LocalProtocolError(
                f"noise lies in 1..{MAX_DEVIATION} steps of fixed point, got {self.noise}; with "
                "fewer bits a step is larger"
            )

    @cached_property
    def digest(self) -> bytes:
        """Return SHA-256 over the canonical JSON of all fields that are set. There `aggregator` is
        named "combiner", as in earlier versions.
        """
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        fields["combiner"] = fields.pop("aggregator")
        canonical = json.dumps(fields, sort_keys=True).encode()
        return hashlib.sha256(b"secure-apfed sum agreement v1" + canonical).digest()

    def find_position(self, me: str) -> int:
        """Return the position, from 0, of the contributor named `me`. Raises LocalProtocolError: no
        contributor has that name.
        """
        if me not in self.contributors:
            raise LocalProtocolError(
                f"{me!r} contributes nothing; the contributors are {', '.join(self.contributors)}"
            )
        return self.contributors.index(me)

    def pack_names(self, names: Collection[str]) -> bytes:
        """Encode a set of contributors: their positions in rising order, two bytes each."""
        positions = sorted(self.find_position(name) for name in names)
        return struct.pack(f">{len(positions)}H", *positions)

    def parse_names(self, data: bytes, *, sender: str) -> tuple[str, ...]:
        """Decode a set of contributors, encoded by `pack_names` as rising positions of two bytes
        each; return their names in the agreement's order.

        Raises RemoteProtocolError, which names `sender`: the bytes encode no set of contributors.
        """
        count, bytes_left = divmod(len(data), _POSITION_BYTES)
        positions = struct.unpack_from(f">{count}H", data)
        are_rising = all(low < high for low, high in pairwise(positions))
        are_too_large = any(position >= len(self.contributors) for position in positions)
        if bytes_left or not are_rising or are_too_large:
            raise RemoteProtocolError(
                f"{sender} named a set of contributors in {len(data)} bytes that are none; "
                f"expected rising positions below {len(self.contributors)}"
            )
        return tuple(self.contributors[position] for position in positions)


@dataclass(frozen=True, kw_only=True)
class StepBinding:
    """The step and the active's message that a contribution answers: equal for all contributions to
    one sum, or they are not added.

    Attributes:
        session: the run.
        step: the step's number, from 0; each is used once, in rising order.
        rows: 32-byte digest of the ordered row positions.
        message: 32-byte digest of the representations that the active sent.
    """

    session: str
    step: int
    rows: bytes
    message: bytes

    def __post_init__(self) -> None:
        """Validate all fields, and convert a NumPy integer as step to int.

        Raises LocalProtocolError: session, step or a digest has another type, range or length.
        """
        step: object = self.step
        if isinstance(step, np.integer):
            # The class is frozen, so the field is set by `object.__setattr__`.
            object.__setattr__(self, "step", int(step))
        require_type(self, int, "step")
        require_type(self, bytes, "rows", "message")
        require_name("sum", self.session)
        if not 0 <= self.step < 2**63:
            raise LocalProtocolError(f"a step is a number from 0 to 2^63 - 1, got {self.step}")
        for name, digest in (("rows", self.rows), ("message", self.message)):
            if len(digest) != _DIGEST_BYTES:
                raise LocalProtocolError(
                    f"{name} is a digest of {_DIGEST_BYTES} bytes, got {len(digest)}"
                )

    @classmethod
    def from_contents(
        cls, session: str, step: int, *, rows: bytes, message: bytes
    ) -> "StepBinding":
        """Return the binding of a step (what all contributions to one sum must answer), which has
        SHA-256 digests of these contents.

        Args:
            session: names the run.
            step: the step's number, from 0.
            rows: the ordered row positions, as bytes.
            message: the representations that the active sent, as bytes.
        """
        rows_digest = hashlib.sha256(rows).digest()
        message_digest = hashlib.sha256(message).digest()
        return cls(session=session, step=step, rows=rows_digest, message=message_digest)

    @cached_property
    def digest(self) -> bytes:
        """Return SHA-256 over all fields, each preceded by its length."""
        sha256 = hashlib.sha256(b"secure-apfed step v1")
        fields = self.session.encode(), self.step.to_bytes(8, "big"), self.rows, self.message
        for content in fields:
            sha256.update(len(content).to_bytes(4, "big") + content)
        return sha256.digest()


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The information in one kind of message, in sentences for reports.

    Attributes:
        reads: what its receiver reads.
        protects: what keeps the receiver from reading more.
        remains: what stays unprotected.
    """

    reads: str
    protects: str
    remains: str


@dataclass(frozen=True, kw_only=True)
class SumLeaks:
    """The leaks of one sum: who learns what, in sentences for reports.

    Attributes:
        contribution: what the aggregator reads in a contribution.
        request: what a passive reads in a second-round request; None: there is one round.
        answer: what the aggregator reads in a second-round answer; None: there is one round.
        active_and_aggregator: what these two together learn about two passives or more.
        single: who reads single contributions, as "X, who reads each contribution"; "": nobody.
        altered: what the active's reaction to an altered sum (it accepts or refuses) reveals to
            whoever altered it; see `SumReceiver`.
    """

    contribution: Reading
    request: Reading | None = None
    answer: Reading | None = None
    active_and_aggregator: str
    single: str = ""
    altered: str


def count_number_bits(largest_sum: int) -> int:
    """Return how many bits one number of a sum has, ceil(log2(2 L + 1)), if its magnitude is at
    most L = `largest_sum`.

    Each reaction of the receiver to an altered sum (it accepts or refuses) reveals one bit.
    """
    return (2 * largest_sum).bit_length()


def count_sessions_to_reveal(number_bits: int, *, steps: int, names_step: bool) -> int:
    """Return the least number of sessions after which a party that alters sums (a reaction attack)
    knows one number of a sum, from the receiver's reactions: it accepts or refuses.

    A session ends with the first refusal, so the reactions of a session reveal which of its S steps
    was refused, log2(S + 1) bits. If messages are not bound to a step, all these bits may be about
    one number. Otherwise each reaction is about another number, and a session reveals one bit of
    it.

    Args:
        number_bits: the bits of one number (`count_number_bits`).
        steps: S, the steps of a session.
        names_step: whether the messages are bound to one step.
    """
    return number_bits if names_step else math.ceil(number_bits / math.log2(steps + 1))


def _count_example_sessions(bits: int, *, names_step: bool) -> int:
    """Return the example in the texts on altered sums: after how many sessions one number of a sum
    is revealed, with three contributors, no noise and a thousand steps in a session.

    Args:
        bits: signed fixed-point bits of one value.
        names_step: whether the messages are bound to one step.
    """
    largest_value = 2 ** (bits - 1) - 1
    number_bits = count_number_bits(3 * largest_value)
    return count_sessions_to_reveal(number_bits, steps=1000, names_step=names_step)


ALTERED_SUM = (
    "Each reaction to an altered sum tells of the sum of one step, and each is about another "
    "number: as many sessions tell one as it has bits, ceil(log2(2 L + 1)) for sums up to L. With "
    f"three passives these are {_count_example_sessions(MAX_BITS, names_step=True)} at "
    f"{MAX_BITS} bits a value, {_count_example_sessions(USUAL_BITS, names_step=True)} at "
    f"{USUAL_BITS}."
)
"""`SumLeaks.altered` where what is sent belongs to one step."""
ALTERED_CIPHERTEXT = (
    "and all of them may be about one number, since a ciphertext names no step: of n bits, "
    "ceil(n / log2(S + 1)) sessions of S steps tell it. With three passives and a thousand steps "
    f"these are {_count_example_sessions(19, names_step=False)} at 19 bits a value (ckks), "
    f"{_count_example_sessions(18, names_step=False)} at 18 (bfv), "
    f"{_count_example_sessions(USUAL_BITS, names_step=False)} at {USUAL_BITS}."
)
"""End of `SumLeaks.altered` where what is sent names no step."""


def format_sum_name(scheme: str, masks: str) -> str:
    """Return the name of a sum with this scheme and these masks, e.g. "bfv + pairwise masks"; the
    scheme alone where `masks` is "none".
    """
    return scheme if masks == "none" else f"{scheme} + {masks} masks"
