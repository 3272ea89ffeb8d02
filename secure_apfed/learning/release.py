"""What leaves a party: guarded representations, and noise under a sum; charged before it exists.

Run by: the party that sends. `Releases` and `ContributionNoise` hold what protects and the account
of it, and hand out what may be sent only once it is in the account, so that nothing can be sent
uncharged or in another order. What the guard gives, and against whom, says the guard; what noise
under a sum gives, `secure_apfed.privacy.contributions`. Whoever receives representations reads them
by `read_representations`. Letters: B batch, D numbers of a row.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.contract import RepresentationTerms
from secure_apfed.exchange import Envelope, TensorSpec, pack, unpack
from secure_apfed.learning.checks import check_norms, check_rows
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.privacy.ledger import PrivacyLedger
from secure_apfed.privacy.noise import NoiseSource

__all__ = [
    "ContributionNoise",
    "Released",
    "Releases",
    "read_representations",
    "representation_specs",
]


@dataclass(frozen=True)
class Released:
    """A batch that is paid for: z (B, *shape) in the autograd graph, and the bytes to send."""

    z: Tensor
    payload: bytes


class Releases:
    """The one way of a party's representations to the wire.

    Args:
        guard: what protects them.
        ledger: the account of what was sent.
    """

    def __init__(self, guard: RepresentationGuard, ledger: PrivacyLedger) -> None:
        self.ledger, self.guard = ledger, guard

    def release(
        self,
        h_B: Tensor,
        *,
        step: int,
        rows: Tensor,
        count: Callable[[bytes], None] = lambda digest: None,
    ) -> Released:
        """Guard, pack and charge one batch, in this order.

        It is charged even if its bytes stay here: a frozen guard counts what it made as released.

        Args:
            h_B: representations, (B, *shape), float32 or float64.
            step: of the run.
            rows: alignment positions, int64 of shape (B,).
            count: is called with the digest of the bytes before the charge, and may refuse.

        Raises:
            BudgetExhaustedError: sending would exceed the privacy budget; nothing may be sent.
            ModelError: representations that are not finite.
        """
        repeats_B = self.guard.repeats(rows)
        z_B = self.guard.release(h_B.flatten(1), step=step, rows=rows).reshape(h_B.shape)
        payload = pack({"rows": rows, "z": z_B})
        digest = hashlib.sha256(payload).digest()
        count(digest)
        self.ledger.charge(step=step, rows=rows, digest=digest, repeats=repeats_B)
        return Released(z_B, payload)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint must hold for a resumed run to release the same; a secret."""
        return self.guard.tensors()

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.guard.load_tensors(tensors)


class ContributionNoise:
    """A passive's discrete Gaussian noise under the sum, a function of session, step and content.

    The account counts the noise of all honest passives, so no sum may share it with another:
    where one passive's contribution came again with the same noise, and the others' did not, the
    difference of the two sums would hold theirs under their own noise alone. So the digests are
    of one session, and a step that is played again has other noise and is charged again.

    Args:
        deviation: in steps of fixed point, as agreed.
        key: 32 secret bytes of this party.
        ledger: of this party.
        secret: without it noise depends on the step alone, so that runs repeat with the seed.
    """

    def __init__(self, *, deviation: int, key: bytes, ledger: PrivacyLedger, secret: bool) -> None:
        self.ledger = ledger
        self._deviation, self._noise = deviation, NoiseSource(key, secret=secret)

    def draw(
        self, shape: tuple[int, ...], *, step: int, known_B: Tensor, digest: bytes
    ) -> NDArray[np.int64]:
        """Charge one release of the people that it knows, on the disk, and return all rows' noise.

        Args:
            shape: of what will be contributed, (B, D).
            step: of the run.
            known_B: alignment positions of those people.
            digest: of the session, and of all rows and values that will be contributed.

        Raises:
            BudgetExhaustedError: contributing would exceed the budget; nothing may be sent.
        """
        self.ledger.charge(step=step, rows=known_B, digest=digest)
        self.ledger.sync()  # a session after a power failure would not draw this noise again
        return self._noise.integers(shape, self._deviation, step=step, digest=digest)


def representation_specs(terms: RepresentationTerms) -> dict[str, TensorSpec]:
    """What a message of representations holds: rows (B,) and z (B, *shape)."""
    dtype = torch.float64 if terms.dtype == "float64" else torch.float32
    return {
        "rows": TensorSpec(torch.int64, (None,)),
        "z": TensorSpec(dtype, (None, *terms.shape)),
    }


def read_representations(
    envelope: Envelope, terms: RepresentationTerms, *, aligned: int, minimum: int
) -> tuple[Tensor, Tensor]:
    """Parse and check a batch of representations; returns rows (B,) and z (B, *shape).

    Raises:
        RemoteProtocolError: anything that the contract does not allow.
    """
    tensors, _ = unpack(envelope.payload, representation_specs(terms), sender=envelope.sender)
    rows_B, z_BD = tensors["rows"], tensors["z"]
    if len(rows_B) != len(z_BD):
        raise RemoteProtocolError(
            f"{envelope.sender} sent {len(rows_B)} row positions for {len(z_BD)} representations"
        )
    check_rows(rows_B, aligned=aligned, minimum=minimum, sender=envelope.sender)
    check_norms(z_BD, terms, sender=envelope.sender)
    return rows_B, z_BD
