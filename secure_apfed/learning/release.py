"""Sending and checking representations, and noise under a sum.

Run by the sending party: `ChargedGuard` and `ContributionNoise` combine a protection with its
privacy account, and return the protected values only after their privacy cost is recorded in the
ledger (charged), so that nothing can be sent uncharged or in another order. For the guarantees see
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
_MIN_NORM = torch.finfo(torch.float32).tiny
_MAX_PAIRS = 2**22
"""Largest number of pairs of rows whose angles are in memory together."""
_NEIGHBOUR_WEIGHT = 10.0
"""Weight of the distance to the nearest row in the measure of spread."""
_MIN_NEIGHBOUR_NUMBERS = 16
"""Rows with fewer numbers are not compared with their nearest row, since in few dimensions many
honest rows are close to each other."""


def check_rows(rows_B: Tensor, *, alignment_size: int, min_rows: int, sender: str) -> None:
    """Check the positions of a peer's batch; run by their receiver.

    Raises RemoteProtocolError: the batch is too small, or its positions are repeated or outside the
    alignment.

    Args:
        rows_B: alignment positions of the batch, from a peer.
        alignment_size: number of alignment positions.
        min_rows: the fewest rows that the contract allows in a batch.
        sender: the peer's name, for the error.
    """
    if len(rows_B) < min_rows:
        raise RemoteProtocolError(
            f"{sender} sent a batch of {len(rows_B)} rows; the contract says at least {min_rows}"
        )
    positions = rows_B.tolist()
    if not 0 <= min(positions) <= max(positions) < alignment_size:
        raise RemoteProtocolError(
            f"{sender} named row positions outside the alignment of {alignment_size} rows"
        )
    if len(set(positions)) != len(positions):
        raise RemoteProtocolError(f"{sender} repeated a row within one batch")


def check_norms(z_BD: Tensor, bounds: RepresentationBounds, *, sender: str) -> None:
    """Raise RemoteProtocolError if the L2 norm of a row is outside the contract's bounds, or NaN.

    `z_BD`: B rows of representations from a peer. `bounds`: the contract's bounds on them.
    `sender`: the peer's name, for the error.
    """
    if not len(z_BD):
        return
    # NaN in any row makes both NaN, which is within no bounds.
    flat_BD = z_BD.detach().flatten(1).double()
    smallest, largest = torch.linalg.vector_norm(flat_BD, dim=1).aminmax()
    min_norm = bounds.minimum_norm
    max_norm = bounds.maximum_norm * (1 + _NORM_SLACK)
    if not (min_norm <= float(smallest) and float(largest) <= max_norm):
        raise RemoteProtocolError(
            f"{sender} sent representations whose norm is not within "
            f"{bounds.minimum_norm:g} to {bounds.maximum_norm:g}, as the contract says "
            f"(smallest {float(smallest):g}, largest {float(largest):g}); if its training "
            "diverges, lower train.learning_rate, or the rate of its own optimizer"
        )


def lengthen_rows(z_BD: Tensor, min_norm: float) -> Tensor:
    """Return the rows with each one of L2 norm below `min_norm` lengthened to it.

    In few dimensions an honest row may be shorter than receivers accept. A lengthened row keeps its
    direction; a row of zeros gets the direction of its first number. All other rows are unchanged.
    Gradients pass as if rows were not changed.
    """
    if min_norm == 0:
        return z_BD
    flat_BD = z_BD.detach().flatten(1)
    norm_B1 = torch.linalg.vector_norm(flat_BD.double(), dim=1, keepdim=True)
    is_short_B1 = norm_B1 < min_norm
    # Not checked on a GPU, since reading the result would wait for it.
    if not is_short_B1.is_cuda and not bool(is_short_B1.any()):
        return z_BD
    default_direction_1D = torch.zeros_like(flat_BD[:1])
    default_direction_1D[:, :1] = 1
    direction_BD = torch.where(
        norm_B1 > 0, flat_BD / norm_B1.clamp(min=_MIN_NORM).to(flat_BD), default_direction_1D
    )
    # Slightly longer, since in float32 a row of exactly the bound could be measured as shorter.
    longer_BD = (direction_BD * (min_norm * (1 + _NORM_SLACK))).reshape(z_BD.shape)
    broadcast_shape = [1] * (z_BD.dim() - 1)
    is_short_B = is_short_B1.reshape(-1, *broadcast_shape)
    # The detached difference moves the value, and leaves the gradient of z alone.
    return torch.where(is_short_B, z_BD + (longer_BD - z_BD.detach()), z_BD)


def is_narrow(z_BD: Tensor, bounds: RepresentationBounds) -> bool:
    """Return whether these rows have less spread of directions than the contract requires."""
    return bool(bounds.minimum_spread) and compute_spread(z_BD) < bounds.minimum_spread


def warn_if_near_constant(
    z_BD: Tensor, min_spread: float, *, sender: str, step: int, spread: float | None = None
) -> bool:
    """Return whether passives would refuse a batch since its rows point in one direction.

    If so, warn (NarrowBatchWarning). The active calls it before it sends, and trains on such a
    batch alone.

    Args:
        z_BD: the batch, (B, *shape).
        min_spread: the largest bound on the spread in any passive's contract.
        sender: the active, for the warning.
        step: number of the run's step, for the warning.
        spread: how much the batch's directions differ, if it is known; None: it is measured here.
    """
    if spread is None:
        spread = compute_spread(z_BD) if min_spread else 1.0
    if spread < min_spread:
        warnings.warn(
            f"{sender}: the representations of step {step} point in one direction (spread "
            f"{spread:.2g} below {min_spread:g}); {sender} trains on such batches alone. Lower "
            "the learning rate if they go on, or agree on another rules.minimum_spread",
            NarrowBatchWarning,
            stacklevel=4,
        )
    return spread < min_spread


def check_spread(z_BD: Tensor, bounds: RepresentationBounds, *, sender: str) -> None:
    """Raise RemoteProtocolError if the directions of a peer's rows differ less than agreed.

    `z_BD`: B rows of representations from the peer `sender`. `bounds`: the contract's bounds.
    """
    if bounds.minimum_spread and (spread := compute_spread(z_BD)) < bounds.minimum_spread:
        raise RemoteProtocolError(
            f"{sender} sent a near-constant batch: its directions spread by {spread:.2g}, the "
            f"contract says at least {bounds.minimum_spread:g} (rules.minimum_spread); such "
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
    float64_BD = flat_BD.double()
    norm_B1 = torch.linalg.vector_norm(float64_BD, dim=1, keepdim=True)
    tiny = torch.finfo(torch.float64).tiny
    direction_BD = (float64_BD / norm_B1.clamp(min=tiny)).to(flat_BD.dtype)
    # Not checked on a GPU, since reading the result would wait for it.
    may_have_zeros = norm_B1.is_cuda or not bool(norm_B1.all())
    row_count = len(flat_BD)
    squared_sine_sum = float64_BD.new_zeros(())
    nearest_blocks = []
    # A block of O rows is compared with all rows at a time, since the pairs of a large batch may
    # exceed memory.
    block_rows = max(1, _MAX_PAIRS // row_count)
    for start in range(0, row_count, block_rows):
        end = start + block_rows
        # sin^2 = 1 - cos^2, in place
        squared_sine_OB = (
            (direction_BD[start:end] @ direction_BD.T)
            .double()
            .square_()
            .clamp_(max=1)
            .neg_()
            .add_(1)
        )
        if may_have_zeros:
            is_zero_B = norm_B1.flatten() == 0
            squared_sine_OB.masked_fill_(is_zero_B[start:end, None] | is_zero_B, 0)
        # Pairs of a row with itself: they add nothing to the mean, and are never the nearest.
        self_pairs_O = squared_sine_OB.diagonal(start)  # a view, so filling it changes `sine_OB`
        self_pairs_O.fill_(0)
        squared_sine_sum = squared_sine_sum + squared_sine_OB.sum()
        self_pairs_O.fill_(1)
        nearest_blocks.append(squared_sine_OB.amin(dim=1))
    spread = squared_sine_sum / (row_count * (row_count - 1))
    if flat_BD.shape[1] >= _MIN_NEIGHBOUR_NUMBERS:
        spread = torch.minimum(spread, _NEIGHBOUR_WEIGHT * torch.cat(nearest_blocks).median())
    return spread


@dataclass(frozen=True)
class ProtectedBatch:
    """A batch of protected representations whose privacy cost the ledger has recorded.

    Attributes:
        z_B: the clipped and noisy representations, (B, *shape), in the autograd graph.
        payload: the bytes to send.
        spread: how much the rows' directions differ, 0 to 1 (`measure_spread`); None: it was not
            measured.
    """

    z_B: Tensor  # noqa: N815
    payload: bytes
    spread: float | None = None


class ChargedGuard:
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
        self._is_guard_check_due = math.isfinite(guard.mechanism().mu)

    def release(
        self,
        h_B: Tensor,
        *,
        step: int,
        rows_B: Tensor,
        record_digest: Callable[[bytes], None] | None = None,
        should_measure_spread: bool = False,
        min_norm: float = 0.0,
    ) -> ProtectedBatch:
        """Protect one batch of representations, encode it, and record its privacy cost.

        To protect means to clip and add noise, by the guard. The cost is recorded even if the bytes
        are not sent: a frozen guard, which adds noise to a row only once, counts these rows as
        released.

        Args:
            h_B: the representations of B rows, (B, *shape).
            step: number of the run's step.
            rows_B: alignment positions of the batch.
            record_digest: called with the SHA-256 of the bytes before the cost is recorded; it may
                raise an error, so that nothing is recorded.
            should_measure_spread: whether the result says how much the rows' directions differ.
            min_norm: protected rows with a smaller norm are lengthened to it.

        Raises:
            BudgetExhaustedError: sending would exceed the privacy budget; nothing may be sent.
            ModelError: representations are not finite.
            PromiseError: the guard does not keep its declared bound, or a row of the first batch
                depends on others; nothing is charged.
        """
        if self._is_guard_check_due:
            check_guard(self.guard)
            check_graph(h_B)
            self._is_guard_check_due = False
        # Which rows were released before; read first, since the release makes the guard know all.
        is_repeat_B = self.guard.repeats(rows_B)
        guarded_B = self.guard.release(h_B.flatten(1), step=step, rows=rows_B).reshape(h_B.shape)
        z_B = lengthen_rows(guarded_B, min_norm)
        # Rows and spread are fetched from the device with one wait.
        device_spread = [measure_spread(z_B)] if should_measure_spread else []
        sent_B, *fetched_spread = fetch_tensors(z_B, *device_spread)
        payload = pack_tensors({"rows": rows_B, "z": sent_B})
        digest = hashlib.sha256(payload).digest()
        if record_digest is not None:
            record_digest(digest)
        self.ledger.charge(step=step, rows=rows_B, digest=digest, repeats=is_repeat_B)
        return ProtectedBatch(
            z_B, payload, float(fetched_spread[0]) if should_measure_spread else None
        )


@dataclass(frozen=True, kw_only=True)
class ActiveProtections:
    """The protections of an active's representations and of its model, with their accounts.

    Attributes:
        charged_guard: guard and ledger of its representations.
        is_sending: whether it sends representations.
        private_updates: DP-SGD of its model's updates; None: these are not private.
        whole_training: the privacy account of representations and updates together; None: updates
            are not private.
    """

    charged_guard: ChargedGuard
    is_sending: bool
    private_updates: PrivateUpdates | None = None
    whole_training: WholeTraining | None = None

    def list_ledgers(self, owner: str) -> dict[str, PrivacyLedger]:
        """Return the privacy ledgers in use, by name.

        The ledger of representations has the party's name (`owner`); the ledger of private updates
        has it with a suffix.
        """
        ledgers: dict[str, PrivacyLedger] = {}
        if self.is_sending:
            ledgers[owner] = self.charged_guard.ledger
        if self.private_updates:
            ledgers[owner + UPDATES] = self.private_updates.ledger
        return ledgers

    def describe_guarantee(self) -> str:
        """Return the privacy guarantee in words, for the report.

        It covers the whole training if updates are private, otherwise the sent representations, if
        there are any.
        """
        guard = self.charged_guard.guard if self.is_sending else None
        if self.whole_training is not None:
            return self.whole_training.describe_guarantee(guard)
        return guard.describe_guarantee() if guard else NOTHING_RELEASED

    @property
    def needs_independent_rows(self) -> bool:
        """True if a privacy bound assumes that no row changes another row's result."""
        is_bounded = self.is_sending and math.isfinite(self.charged_guard.guard.mechanism().mu)
        return is_bounded or self.private_updates is not None


class ContributionNoise:
    """A passive's discrete Gaussian noise on its contributions to a secure sum.

    It is a function of session, step and content. The privacy account counts the noise of all
    honest passives, so two sums must not share noise. Suppose that one passive repeated its
    contribution with the same noise, and the others did not: the difference of the two sums would
    contain the others' contributions with less noise than charged. So the noise depends on the
    session; a repeated step has other noise, and is charged again.
    """

    def __init__(
        self, *, deviation: int, key: bytes, ledger: PrivacyLedger, is_secret: bool
    ) -> None:
        """Take the ledger, and prepare the source of noise.

        Args:
            deviation: standard deviation of the noise, in units of the integers that are summed.
            key: 32 bytes from which the noise is derived.
            ledger: the account of its privacy cost.
            is_secret: whether the noise protects; False, as in simulations: it depends on the step
                alone, so that runs repeat with the seed.
        """
        self.ledger = ledger
        self._deviation = deviation
        self._noise = NoiseSource(key, secret=is_secret)

    def charge_and_draw(
        self, shape: tuple[int, ...], *, step: int, charged_rows_B: Tensor, digest: bytes
    ) -> NDArray[np.int64]:
        """Record the privacy cost of one contribution on the disk, and return its integer noise.

        Args:
            shape: shape of the contribution, all rows of the batch.
            step: number of the run's step.
            charged_rows_B: alignment positions of the people of the batch whom this party knows;
                only they are charged.
            digest: digest of the session, and of all rows and values that will be contributed.

        Raises BudgetExhaustedError: the contribution would exceed the privacy budget. Nothing may
        be sent then.
        """
        self.ledger.charge(step=step, rows=charged_rows_B, digest=digest)
        self.ledger.sync()  # so that the charge outlives a power failure
        return self._noise.draw_integers(shape, self._deviation, step=step, digest=digest)


def make_representation_specs(bounds: RepresentationBounds) -> Mapping[str, TensorSpec]:
    """Return the types and shapes of the tensors in a message of representations.

    These are alignment positions, "rows", (B,), and representations, "z", (B, *shape).
    """
    dtype = torch.float64 if bounds.dtype == "float64" else torch.float32
    return {"rows": TensorSpec(torch.int64, (None,)), "z": TensorSpec(dtype, (None, *bounds.shape))}


def parse_representations(
    envelope: Envelope, bounds: RepresentationBounds, *, alignment_size: int, min_rows: int
) -> tuple[Tensor, Tensor]:
    """Parse and check a peer's batch of representations.

    Args:
        envelope: the message.
        bounds: the contract's bounds on shape, type, norm and spread.
        alignment_size: number of alignment positions.
        min_rows: the fewest rows that the contract allows in a batch.

    Returns the alignment positions, (B,), and the representations, (B, *shape). Raises
    RemoteProtocolError: the message breaks a rule of the contract.
    """
    tensors, _ = unpack_tensors(
        envelope.payload, make_representation_specs(bounds), sender=envelope.sender
    )
    rows_B = tensors["rows"]
    z_BD = tensors["z"]
    if len(rows_B) != len(z_BD):
        raise RemoteProtocolError(
            f"{envelope.sender} sent {len(rows_B)} row positions for {len(z_BD)} representations"
        )
    check_rows(rows_B, alignment_size=alignment_size, min_rows=min_rows, sender=envelope.sender)
    check_norms(z_BD, bounds, sender=envelope.sender)
    check_spread(z_BD, bounds, sender=envelope.sender)
    return rows_B, z_BD
