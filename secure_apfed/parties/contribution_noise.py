"""A passive's noise on its contributions, charged to its own ledger before it is used.

Run by: every passive under `secure_sum.noise`. What it gives, and against whom, says
`secure_apfed.privacy.contributions`. Letters: B batch, D numbers of a row.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from protocols.discrete_gaussian import discrete_gaussian
from protocols.errors import LocalProtocolError
from secure_apfed.privacy import PrivacyLedger

__all__ = ["ContributionNoise"]


class ContributionNoise:
    """Discrete Gaussian noise as a function of key, session, step, rows and values.

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
        self._deviation, self._key, self._secret = deviation, key, secret

    def __reduce__(self) -> str:
        raise LocalProtocolError("noise keys are secrets of their party and never serialised")

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
        context = (step.to_bytes(8, "big"), *((digest,) if self._secret else ()))
        return discrete_gaussian(self._key, *context, deviation=self._deviation, shape=shape)
