"""Sending and checking representations, and noise under a sum.

Run by the sending party: `Releases` and `ContributionNoise` combine a protection with its privacy
account, and return the protected values only after their privacy cost is recorded in the ledger
(charged), so that nothing can be sent uncharged or in another order. For the guarantees see
`secure_apfed.privacy.guard` and, for noise under a sum, `secure_apfed.privacy.contributions`.

Run by the receiver of representations, before it computes anything from them, and by the active
before it sends: `parse_representations`, `check_spread`. Protects from: a malicious sender that
probes with chosen rows. With duplicates, tiny batches, and zero or huge norms it could read single
rows from sums and gradients. So it could with queries in one direction or in a few: under a
contrastive loss all rows of such a query have equal softmax weights, so differences between their
gradients are differences between the passive's own representations, exactly. Does not protect from:
the information in gradients of honest batches, and from rows that differ only slightly more than
the bounds require.

Letters: B batch, D numbers of a row.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apfed_protocols.errors import RemoteProtocolError
from secure_apfed.base.names import UPDATES
from secure_apfed.base.transfers import fetch_tensors
from secure_apfed.contract import RepresentationBounds
from secure_apfed.errors import NarrowBatchWarning
from secure_apfed.exchange import Envelope, TensorSpec, pack_tensors, unpack_tensors
from secure_apfed.privacy.dp_sgd import PrivateUpdates, WholeTraining
from secure_apfed.privacy.guard import RepresentationGuard
from secure_apfed.privacy.ledger import NOTHING_RELEASED, PrivacyLedger
from secure_apfed.privacy.measured import check_graph, check_guard
from secure_apfed.privacy.noise import NoiseSource

_NORM_SLACK = 1e-5
"""Relative tolerance of norm bounds, for rounding in float32."""
_TINY = torch.finfo(torch.float32).tiny
_MAX_PAIRS = 2**22
"""Largest number of pairs of rows whose angles are in memory together."""
_NEIGHBOUR_WEIGHT = 10.0
"""Weight of the distance to the nearest row in the measure of spread."""
_MIN_NEIGHBOUR_NUMBERS = 16
"""Rows with fewer numbers are not compared with their nearest row, since in few dimensions many
honest rows are close to each other."""


def check_rows(rows_B: Tensor, *, aligned: int, minimum: int, sender: str) -> None:
    """Check the positions of a peer's batch; run by their receiver.

    Raises RemoteProtocolError: the batch is too small, or its positions are repeated or outside the
    alignment.

    Args:
        rows_B: alignment positions of the batch, from a peer.
        aligned: number of alignment positions.
        minimum: the fewest rows that the contract allows in a batch.
        sender: the peer's name, for the error.
    """
    if len(rows_B) < minimum:
        raise RemoteProtocolError(
            f"{sender} sent a batch of {len(rows_B)} rows; the contract says at least {minimum}"
        )
    rows = rows_B.tolist()
    if not 0 <= min(rows) <= max(rows) < aligned:
        raise RemoteProtocolError(
            f"{sender} named row positions outside the alignment of {aligned} rows"
        )
    if len(set(rows)) != len(rows):
        raise RemoteProtocolError(f"{sender} repeated a row within one batch")


def check_norms(z_BD: Tensor, terms: RepresentationBounds, *, sender: str) -> None:
    """Raise RemoteProtocolError if the L2 norm of a row is outside the contract's bounds, or NaN.

    `z_BD`: B rows of representations from a peer. `terms`: the contract's bounds on them.
    `sender`: the peer's name, for the error.
    """
    if not len(z_BD):
        return
    # NaN in any row makes both NaN, which is within no bounds.
    wide_BD = z_BD.detach().flatten(1).double()
    smallest, largest = torch.linalg.vector_norm(wide_BD, dim=1).aminmax()
    low = terms.minimum_norm
    high = terms.maximum_norm * (1 + _NORM_SLACK)
    if not (low <= float(smallest) and float(largest) <= high):
        raise RemoteProtocolError(
            f"{sender} sent representations whose norm is not within "
            f"{terms.minimum_norm:g} to {terms.maximum_norm:g}, as the contract says "
            f"(smallest {float(smallest):g}, largest {float(largest):g}); if its training "
            "diverges, lower train.learning_rate, or the rate of its own optimizer"
        )


def lengthen_rows(z_BD: Tensor, minimum: float) -> Tensor:
    """Return the rows with each one of L2 norm below `minimum` lengthened to it.

    In few dimensions an honest row may be shorter than receivers accept. A lengthened row keeps its
    direction; a row of zeros gets the direction of its first number. All other rows are unchanged.
    Gradients pass as if rows were not changed.
    """
    if minimum == 0:
        return z_BD
    flat_BD = z_BD.detach().flatten(1)
    norm_B1 = torch.linalg.vector_norm(flat_BD.double(), dim=1, keepdim=True)
    is_short_B1 = norm_B1 < minimum
    # Not checked on a GPU, since reading the result would wait for it.
    if not is_short_B1.is_cuda and not bool(is_short_B1.any()):
        return z_BD
    first_D = torch.zeros_like(flat_BD[:1])
    first_D[:, :1] = 1
    unit_BD = torch.where(norm_B1 > 0, flat_BD / norm_B1.clamp(min=_TINY).to(flat_BD), first_D)
    # Slightly longer, since in float32 a row of exactly the bound could be measured as shorter.
    longer_BD = (unit_BD * (minimum * (1 + _NORM_SLACK))).reshape(z_BD.shape)
    broadcast_shape = [1] * (z_BD.dim() - 1)
    is_short_B = is_short_B1.reshape(-1, *broadcast_shape)
    # The detached difference moves the value, and leaves the gradient of z alone.
    return torch.where(is_short_B, z_BD + (longer_BD - z_BD.detach()), z_BD)


def is_narrow(z_BD: Tensor, terms: RepresentationBounds) -> bool:
    """Return whether these rows have less spread of directions than the contract requires."""
    return bool(terms.minimum_spread) and compute_spread(z_BD) < terms.minimum_spread


def warn_if_near_constant(
    z_BD: Tensor, minimum: float, *, sender: str, step: int, spread: float | None = None
) -> bool:
    """Return whether passives would refuse a batch since its rows point in one direction.

    If so, warn (NarrowBatchWarning). The active calls it before it sends, and trains on such a
    batch alone.

    Args:
        z_BD: the batch, (B, *shape).
        minimum: the largest bound on the spread in any passive's contract.
        sender: the active, for the warning.
        step: number of the run's step, for the warning.
        spread: how much the batch's directions differ, if it is known; None: it is measured here.
    """
    if spread is None:
        spread = compute_spread(z_BD) if minimum else 1.0
    if spread < minimum:
        warnings.warn(
            f"{sender}: the representations of step {step} point in one direction (spread "
            f"{spread:.2g} below {minimum:g}); {sender} trains on such batches alone. Lower "
            "the learning rate if they go on, or agree on another rules.minimum_spread",
            NarrowBatchWarning,
            stacklevel=4,
        )
    return spread < minimum


def check_spread(z_BD: Tensor, terms: RepresentationBounds, *, sender: str) -> None:
    """Raise RemoteProtocolError if the directions of a peer's rows differ less than agreed.

    `z_BD`: B rows of representations from the peer `sender`. `terms`: the contract's bounds.
    """
    if terms.minimum_spread and (spread := compute_spread(z_BD)) < terms.minimum_spread:
        raise RemoteProtocolError(
            f"{sender} sent a near-constant batch: its directions spread by {spread:.2g}, the "
            f"contract says at least {terms.minimum_spread:g} (rules.minimum_spread); such "
            "batches read a passive's representations out of its gradients"
        )


def compute_spread(z_BD: Tensor) -> float:
    """Return how much a batch's directions differ, 0 to 1, as a number; this waits for a GPU."""
    return float(measure_spread(z_BD))


def measure_spread(z_BD: Tensor) -> Tensor:
    """Return how much a batch's directions differ, from 0 (a line, or groups of equal directions)
    to 1.

    The spread is the smaller of two numbers. The first is the mean over pairs of rows of sin^2 of
    their angle. The second is ten times the median over rows of sin^2 of the angle to the nearest
    other row; it is used for rows of 16 numbers or more. Opposite directions count as one.

    The smallest spread of honest runs without noise (one seed each, batches of 32 to 128 rows, from
    the first step on) was 0.0019 on digits, 0.024 on breast cancer, 0.3 on handwritten and 0.018 on
    credit card. On credit card under APFed-R at a learning rate of 0.05 it was 0.0018, and half of
    all batches lay below 0.0053; above that rate the encoder can collapse to 0. With the guard's
    noise at epsilon 8 it was 0.93 or more. So the default of `rules.minimum_spread` is 0.0005.

    `z_BD`: two rows or more, finite, of any shape. A row of zeros has no direction, and counts as
    equal to every other row.
    """
    flat_BD = z_BD.detach().flatten(1)
    # In float64, also on a GPU: the squares of all finite float32 numbers are then finite, and all
    # parties compute the same spread.
    wide_BD = flat_BD.double()
    norm_B1 = torch.linalg.vector_norm(wide_BD, dim=1, keepdim=True)
    tiny = torch.finfo(torch.float64).tiny
    unit_BD = (wide_BD / norm_B1.clamp(min=tiny)).to(flat_BD.dtype)
    # Not checked on a GPU, since reading the result would wait for it.
    may_have_zeros = norm_B1.is_cuda or not bool(norm_B1.all())
    rows = len(flat_BD)
    total = wide_BD.new_zeros(())
    nearest = []
    # A block of O rows is compared with all rows at a time, since the pairs of a large batch may
    # exceed memory.
    block = max(1, _MAX_PAIRS // rows)
    for start in range(0, rows, block):
        end = start + block
        # sin^2 = 1 - cos^2, in place
        sine_OB = (unit_BD[start:end] @ unit_BD.T).double().square_().clamp_(max=1).neg_().add_(1)
        if may_have_zeros:
            zero_B = norm_B1.flatten() == 0
            sine_OB.masked_fill_(zero_B[start:end, None] | zero_B, 0)
        # Pairs of a row with itself: they add nothing to the mean, and are never the nearest.
        self_pairs_O = sine_OB.diagonal(start)  # a view, so filling it changes `sine_OB`
        self_pairs_O.fill_(0)
        total = total + sine_OB.sum()
        self_pairs_O.fill_(1)
        nearest.append(sine_OB.amin(dim=1))
    spread = total / (rows * (rows - 1))
    if flat_BD.shape[1] >= _MIN_NEIGHBOUR_NUMBERS:
        spread = torch.minimum(spread, _NEIGHBOUR_WEIGHT * torch.cat(nearest).median())
    return spread


@dataclass(frozen=True)
class Released:
    """A batch of protected representations whose privacy cost the ledger has recorded.

    Attributes:
        z: the clipped and noisy representations, (B, *shape), in the autograd graph.
        payload: the bytes to send.
        spread: how much the rows' directions differ, 0 to 1 (`measure_spread`); None: it was not
            measured.
    """

    z: Tensor
    payload: bytes
    spread: float | None = None


class Releases:
    """The only object that makes a party's representations ready to send.

    It combines protection and privacy account, so that nothing is sent without being charged.
    """

    def __init__(self, guard: RepresentationGuard, ledger: PrivacyLedger) -> None:
        """Take guard and ledger.

        Args:
            guard: the mechanism that clips representations and adds noise.
            ledger: the account of their privacy cost.
        """
        self.ledger = ledger
        self.guard = guard
        # A guard with a finite privacy bound is tested at its first release.
        self._check_due = math.isfinite(guard.mechanism().mu)

    def release(
        self,
        h_B: Tensor,
        *,
        step: int,
        rows: Tensor,
        count: Callable[[bytes], None] | None = None,
        measures_spread: bool = False,
        shortest: float = 0.0,
    ) -> Released:
        """Protect one batch of representations, encode it, and record its privacy cost.

        To protect means to clip and add noise, by the guard. The cost is recorded even if the bytes
        are not sent: a frozen guard, which adds noise to a row only once, counts these rows as
        released.

        Args:
            h_B: the representations of B rows, (B, *shape).
            step: number of the run's step.
            rows: alignment positions of the batch, (B,).
            count: called with the SHA-256 of the bytes before the cost is recorded; it may raise an
                error, so that nothing is recorded.
            measures_spread: whether the result says how much the rows' directions differ.
            shortest: protected rows with a smaller norm are lengthened to it.

        Raises:
            BudgetExhaustedError: sending would exceed the privacy budget; nothing may be sent.
            ModelError: representations are not finite.
            PromiseError: the guard does not keep its declared bound, or a row of the first batch
                depends on others; nothing is charged.
        """
        if self._check_due:
            check_guard(self.guard)
            check_graph(h_B)
            self._check_due = False
        # Which rows were released before; read first, since the release makes the guard know all.
        repeats_B = self.guard.repeats(rows)
        guarded_B = self.guard.release(h_B.flatten(1), step=step, rows=rows).reshape(h_B.shape)
        z_B = lengthen_rows(guarded_B, shortest)
        # Rows and spread are fetched from the device with one wait.
        measured = [measure_spread(z_B)] if measures_spread else []
        sent_B, *spreads = fetch_tensors(z_B, *measured)
        payload = pack_tensors({"rows": rows, "z": sent_B})
        digest = hashlib.sha256(payload).digest()
        if count is not None:
            count(digest)
        self.ledger.charge(step=step, rows=rows, digest=digest, repeats=repeats_B)
        return Released(z_B, payload, float(spreads[0]) if measures_spread else None)


@dataclass(frozen=True, kw_only=True)
class ActiveAccounts:
    """The protections of an active's representations and of its model, with their accounts.

    Attributes:
        releases: guard and ledger of its representations.
        sends: whether it sends representations.
        private: DP-SGD of its model's updates; None: these are not private.
        training: the privacy account of representations and updates together; None: updates are not
            private.
    """

    releases: Releases
    sends: bool
    private: PrivateUpdates | None = None
    training: WholeTraining | None = None

    def list_ledgers(self, owner: str) -> dict[str, PrivacyLedger]:
        """Return the privacy ledgers in use, by name.

        The ledger of representations has the party's name (`owner`); the ledger of private updates
        has it with a suffix.
        """
        ledgers: dict[str, PrivacyLedger] = {}
        if self.sends:
            ledgers[owner] = self.releases.ledger
        if self.private:
            ledgers[owner + UPDATES] = self.private.ledger
        return ledgers

    def describe_guarantee(self) -> str:
        """Return the privacy guarantee in words, for the report.

        It covers the whole training if updates are private, otherwise the sent representations, if
        there are any.
        """
        guard = self.releases.guard if self.sends else None
        if self.training is not None:
            return self.training.describe_guarantee(guard)
        return guard.describe_guarantee() if guard else NOTHING_RELEASED

    @property
    def rests_on_rows(self) -> bool:
        """True if a privacy bound assumes that no row changes another row's result."""
        is_bounded = self.sends and math.isfinite(self.releases.guard.mechanism().mu)
        return is_bounded or self.private is not None


class ContributionNoise:
    """A passive's discrete Gaussian noise on its contributions to a secure sum.

    It is a function of session, step and content. The privacy account counts the noise of all
    honest passives, so two sums must not share noise. Suppose that one passive repeated its
    contribution with the same noise, and the others did not: the difference of the two sums would
    contain the others' contributions with less noise than charged. So the noise depends on the
    session; a repeated step has other noise, and is charged again.
    """

    def __init__(self, *, deviation: int, key: bytes, ledger: PrivacyLedger, secret: bool) -> None:
        """Take the ledger, and prepare the source of noise.

        Args:
            deviation: standard deviation of the noise, in units of the integers that are summed.
            key: 32 bytes from which the noise is derived.
            ledger: the account of its privacy cost.
            secret: whether the noise protects; False, as in simulations: it depends on the step
                alone, so that runs repeat with the seed.
        """
        self.ledger = ledger
        self._deviation = deviation
        self._noise = NoiseSource(key, secret=secret)

    def draw(
        self, shape: tuple[int, ...], *, step: int, known_B: Tensor, digest: bytes
    ) -> NDArray[np.int64]:
        """Record the privacy cost of one contribution on the disk, and return its integer noise.

        Args:
            shape: shape of the contribution, all rows of the batch.
            step: number of the run's step.
            known_B: alignment positions of the people of the batch whom this party knows; only they
                are charged.
            digest: digest of the session, and of all rows and values that will be contributed.

        Raises BudgetExhaustedError: the contribution would exceed the privacy budget. Nothing may
        be sent then.
        """
        self.ledger.charge(step=step, rows=known_B, digest=digest)
        self.ledger.sync()  # so that the charge outlives a power failure
        return self._noise.draw_integers(shape, self._deviation, step=step, digest=digest)


def make_representation_specs(terms: RepresentationBounds) -> Mapping[str, TensorSpec]:
    """Return the types and shapes of the tensors in a message of representations.

    These are alignment positions, "rows", (B,), and representations, "z", (B, *shape).
    """
    dtype = torch.float64 if terms.dtype == "float64" else torch.float32
    return {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(dtype, (None, *terms.shape))}


def parse_representations(
    envelope: Envelope, terms: RepresentationBounds, *, aligned: int, minimum: int
) -> tuple[Tensor, Tensor]:
    """Parse and check a peer's batch of representations.

    Args:
        envelope: the message.
        terms: the contract's bounds on shape, type, norm and spread.
        aligned: number of alignment positions.
        minimum: the fewest rows that the contract allows in a batch.

    Returns the alignment positions, (B,), and the representations, (B, *shape). Raises
    RemoteProtocolError: the message breaks a rule of the contract.
    """
    tensors, _ = unpack_tensors(
        envelope.payload, make_representation_specs(terms), sender=envelope.sender
    )
    rows_B = tensors["rows"]
    z_BD = tensors["z"]
    if len(rows_B) != len(z_BD):
        raise RemoteProtocolError(
            f"{envelope.sender} sent {len(rows_B)} row positions for {len(z_BD)} representations"
        )
    check_rows(rows_B, aligned=aligned, minimum=minimum, sender=envelope.sender)
    check_norms(z_BD, terms, sender=envelope.sender)
    check_spread(z_BD, terms, sender=envelope.sender)
    return rows_B, z_BD
